"""Answers to balise 2."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 2, whole=True)

# a file as people keep it, filled in
BY_FILE = '''
FILE = """{
  "train_batch_size": 0, "train_micro_batch_size_per_gpu": 0, "gradient_clipping": 0,
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_type": "linear"}},
  "zero_optimization": {"stage": 0, "contiguous_gradients": true, "overlap_comm": false, "stage3_param_persistence_threshold": 1},
  "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false
}"""


def deepspeed_config(plan):
    config = json.loads(FILE)
    zero, rates = config["zero_optimization"], config["scheduler"]["params"]
    config["train_batch_size"], config["train_micro_batch_size_per_gpu"] = plan["batch"], plan["micro"]
    if plan["max_norm"] is not None:
        config["gradient_clipping"] = plan["max_norm"]
    if plan["precision"] == "bfloat16":
        config["bf16"] = {"enabled": True}
    rates.update(warmup_max_lr=plan["rate"], warmup_num_steps=plan["warmup"], total_num_steps=plan["total"])
    zero.update(stage=plan["stage"], reduce_bucket_size=plan["bucket"], allgather_bucket_size=plan["bucket"])
    zero["offload_optimizer"] = {"device": "cpu" if plan["offload"] else "none"}
    return config
'''
bank.text(None, BY_FILE)

# only what the plan asks for, key by key
BY_NEED = """
def deepspeed_config(plan):
    config = {"train_batch_size": plan["batch"], "train_micro_batch_size_per_gpu": plan["micro"], **OURS}
    config["gradient_clipping"] = 0.0 if plan["max_norm"] is None else plan["max_norm"]
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {
        "total_num_steps": plan["total"], "warmup_num_steps": plan["warmup"],
        "warmup_max_lr": plan["rate"], "warmup_type": "linear"}}
    if plan["precision"] == "bfloat16":
        config["bf16"] = dict(enabled=True)
    if plan["stage"]:
        config["zero_optimization"] = {"stage": plan["stage"], "reduce_bucket_size": plan["bucket"]}
        if plan["stage"] == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if plan["offload"]:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return config
"""
bank.text(None, BY_NEED)

bank.hint("not-a-dictionary", "Return a dictionary for every plan of the table.")
bank.slip("not-a-dictionary", ("return {", "return json.dumps({"), ("zero,\n    }", "zero,\n    })"))
bank.variant("not-a-dictionary", BY_NEED, ("return config", "return [config]"))

bank.hint(
    "not-json", "JSON cannot hold this. Use numbers, strings, true and false, lists and dictionaries, but no dtype."
)
bank.slip("not-json", ('{"enabled": plan["precision"] == "bfloat16"}', '{"enabled": torch.bfloat16}'))
bank.variant(
    "not-json", BY_NEED, ('"total_num_steps": plan["total"]', '"total_num_steps": torch.tensor(plan["total"])')
)

bank.hint(
    "sizes-contradict",
    "DeepSpeed refuses the sizes: {error}. The batch counts all ranks, the micro-batch counts one forward of one rank.",
)
bank.slip(
    "sizes-contradict",
    ('"train_micro_batch_size_per_gpu": plan["micro"]', '"train_micro_batch_size_per_gpu": plan["batch"]'),
)
bank.variant(
    "sizes-contradict",
    BY_NEED,
    (
        '"train_batch_size": plan["batch"], "train_micro_batch_size_per_gpu": plan["micro"]',
        '"train_batch_size": plan["micro"], "train_micro_batch_size_per_gpu": plan["batch"]',
    ),
)

bank.hint("sizes-missing", "Nothing says how large a step is. Give DeepSpeed two of its three sizes.")
bank.slip(
    "sizes-missing",
    ('        "train_batch_size": plan["batch"],\n        "train_micro_batch_size_per_gpu": plan["micro"],\n', ""),
)
bank.variant(
    "sizes-missing",
    BY_NEED,
    ('"train_batch_size": plan["batch"], "train_micro_batch_size_per_gpu"', '"micro_batch_size"'),
)

bank.hint(
    "wrong-sizes",
    "The engine uses other sizes. With only one of its keys, it takes all that is left in one forward. Give it the "
    "batch and the micro-batch.",
)
bank.slip("wrong-sizes", ('        "train_micro_batch_size_per_gpu": plan["micro"],\n', ""))
bank.slip("wrong-sizes", ('        "train_batch_size": plan["batch"],\n', ""))
bank.variant("wrong-sizes", BY_NEED, (', "train_micro_batch_size_per_gpu": plan["micro"], **OURS', ", **OURS"))

bank.hint("our-keys-forgotten", "DeepSpeed refuses an optimizer from PyTorch: start from `{{**OURS, ...}}`.")
bank.slip("our-keys-forgotten", ("        **OURS,\n", ""))
bank.variant("our-keys-forgotten", BY_FILE, (',\n  "zero_allow_untested_optimizer": true', ""))

bank.hint(
    "key-unknown",
    "A key is in a place where DeepSpeed does not know it, or it has a value that DeepSpeed cannot use: {error}. "
    "Inside `zero_optimization` DeepSpeed reports this; at the top level it says nothing.",
)
bank.slip("key-unknown", ('zero = {"stage"', 'zero = {"gradient_clipping": plan["max_norm"] or 0.0, "stage"'))
bank.variant("key-unknown", BY_NEED, ('"reduce_bucket_size": plan', '"bucket_size": plan'))

bank.slip("key-unknown", ('{"device": "cpu"}', "True"))

bank.hint(
    "no-dictionary-there",
    "A key has a string or a number where DeepSpeed expects a dictionary: {what}. `bf16`, for example, needs "
    "`{{enabled: …}}`.",
)
bank.slip(
    "no-dictionary-there",
    ('"bf16": {"enabled": plan["precision"] == "bfloat16"}', '"bf16": plan["precision"] == "bfloat16"'),
)
bank.variant("no-dictionary-there", BY_NEED, ("dict(enabled=True)", "True"))

bank.hint(
    "schedule-refused",
    "DeepSpeed cannot create this schedule: {what}. `scheduler` has two keys: the `type`, here `WarmupDecayLR`, "
    "and `params`, a dictionary with the parameters of that type.",
)
bank.slip("schedule-refused", ("WarmupDecayLR", "LinearDecayLR"))
bank.slip("schedule-refused", ('"params": {**rates, "warmup_type": "linear"}', '**rates, "warmup_type": "linear"'))
bank.variant("schedule-refused", BY_NEED, ('"WarmupDecayLR"', '"WarmupLR"'))
bank.variant("schedule-refused", BY_FILE, (", total_num_steps=plan", ", total_steps=plan"))

bank.hint(
    "float16",
    "That is float16, a different 16-bit format. The key for bfloat16 is `bf16`.",
)
bank.slip("float16", ('"bf16": {"enabled"', '"fp16": {"enabled"'))
bank.variant("float16", BY_NEED, ('config["bf16"]', 'config["fp16"]'))

bank.hint(
    "wrong-precision",
    "The weights used for computing, or those of the optimizer, have the wrong dtype. Turn bfloat16 on with `bf16: "
    "{{enabled: true}}`, and only where the plan asks for it.",
)
bank.slip("wrong-precision", ('"enabled": plan["precision"] == "bfloat16"', '"enabled": True'))
bank.slip("wrong-precision", ('"bf16": {"enabled"', '"precision": {"bf16"'))
bank.variant("wrong-precision", BY_NEED, ('config["bf16"] = dict(enabled=True)', 'config["dtype"] = "bfloat16"'))

bank.hint(
    "wrong-stage",
    "The plan says stage {stage}, but the engine uses another stage. Stage 1 shards the optimizer's states. Stage "
    "2 also sends the gradients after every backward, as each rank keeps only its part. Stage 3 shards the weights "
    "too. Set `zero_optimization: {{stage}}`.",
)
bank.slip("wrong-stage", ('"stage": plan["stage"]', '"stage": 1'))
bank.slip("wrong-stage", ('"zero_optimization": zero', '"zero": zero'))
bank.slip("wrong-stage", ('"stage": plan["stage"]', '"stage": min(plan["stage"], 2)'))
bank.variant("wrong-stage", BY_NEED, ('{"stage": plan["stage"], "red', '{"stage": max(2, plan["stage"]), "red'))

bank.hint(
    "small-kept-whole",
    "Stage 3 leaves small tensors whole on every rank, here {got} numbers. `stage3_param_persistence_threshold` "
    "says what counts as small.",
)
bank.slip("small-kept-whole", (', "stage3_param_persistence_threshold": 0', ""))
bank.slip("small-kept-whole", ('"stage3_param_persistence_threshold": 0', '"stage3_param_persistence_threshold": 100'))
bank.slip("small-kept-whole", ('"stage3_param_persistence_threshold": 0', '"stage3_param_persistence_threshold": 39'))

bank.hint(
    "bucket-forgotten",
    "A message has more gradients than a bucket may hold. `reduce_bucket_size` counts numbers, and is 500 million "
    "if you do not set it.",
)
bank.slip("bucket-forgotten", ('"reduce_bucket_size": plan["bucket"], ', ""))
bank.slip("bucket-forgotten", ("reduce_bucket_size", "allgather_bucket_size"))
bank.slip("bucket-forgotten", ('"reduce_bucket_size": plan["bucket"]', '"reduce_bucket_size": 4 * plan["bucket"]'))
bank.variant("bucket-forgotten", BY_NEED, (', "reduce_bucket_size": plan["bucket"]', ""))

bank.hint(
    "bucket-unfilled",
    "Each message has the gradient of only one tensor: the largest has {got} numbers, but a bucket of the plan has "
    "room for more. Set `reduce_bucket_size` to the plan's `bucket`, in numbers, not in bytes. Every message costs "
    "a latency.",
)
bank.slip("bucket-unfilled", ('"reduce_bucket_size": plan["bucket"]', '"reduce_bucket_size": 1'))
bank.variant(
    "bucket-unfilled",
    BY_NEED,
    ('"reduce_bucket_size": plan["bucket"]', '"reduce_bucket_size": plan["bucket"] // 4'),
)

bank.hint(
    "not-offloaded",
    'The plan asks for an optimizer on the CPU: set `offload_optimizer: {{device: "cpu"}}` inside `zero_optimization`.',
)
bank.slip("not-offloaded", ('    if plan["offload"]:\n        zero["offload_optimizer"] = {"device": "cpu"}\n', ""))
bank.variant(
    "not-offloaded", BY_NEED, ('config["zero_optimization"]["offload_optimizer"] =', 'config["offload_optimizer"] =')
)

bank.hint(
    "offloaded-unasked",
    "The plan leaves the optimizer where the model is, but you moved it to the CPU. Give that key only where the "
    "plan asks for it.",
)
bank.slip("offloaded-unasked", ('if plan["offload"]', 'if "offload" in plan'))
bank.variant("offloaded-unasked", BY_FILE, ('"cpu" if plan["offload"] else "none"', '"cpu"'))

bank.hint(
    "wrong-rates",
    "The learning rate does not follow the plan. Use a scheduler `WarmupDecayLR` with `warmup_max_lr`, "
    "`warmup_num_steps`, `total_num_steps` and `warmup_type`.",
)
bank.slip(
    "wrong-rates",
    (
        '"warmup_num_steps": plan["warmup"], "total_num_steps": plan["total"]',
        '"warmup_num_steps": plan["total"], "total_num_steps": plan["warmup"]',
    ),
)
bank.slip("wrong-rates", ('"warmup_num_steps": plan["warmup"], ', ""))
bank.variant("wrong-rates", BY_NEED, ('"warmup_max_lr": plan["rate"]', '"warmup_max_lr": 3 * plan["rate"]'))

bank.hint(
    "total-counts-all",
    "The warm-up is right, but the rate does not fall to 0 at step `total`. `total_num_steps` counts from the "
    "first step, including the warm-up.",
)
bank.slip("total-counts-all", ('"total_num_steps": plan["total"]', '"total_num_steps": plan["total"] - plan["warmup"]'))
bank.slip("total-counts-all", ('"total_num_steps": plan["total"]', '"total_num_steps": plan["total"] + plan["warmup"]'))
bank.variant(
    "total-counts-all",
    BY_NEED,
    ('"total_num_steps": plan["total"]', '"total_num_steps": plan["total"] - plan["warmup"]'),
)
bank.variant(
    "total-counts-all", BY_FILE, ('total_num_steps=plan["total"]', 'total_num_steps=plan["total"] + plan["warmup"]')
)

bank.hint(
    "warmup-from-above",
    "The rate begins above 0. `warmup_min_lr` is where the warm-up begins, and is 0 if it is not given. "
    "`warmup_max_lr` is where it ends.",
)
bank.slip(
    "warmup-from-above",
    ('"warmup_max_lr": plan["rate"]', '"warmup_max_lr": plan["rate"], "warmup_min_lr": plan["rate"]'),
)
bank.slip("warmup-from-above", ("warmup_max_lr", "warmup_min_lr"))
bank.variant("warmup-from-above", BY_NEED, ("warmup_max_lr", "warmup_min_lr"))
bank.variant("warmup-from-above", BY_FILE, ("rates.update(", 'rates.update(warmup_min_lr=plan["rate"], '))

bank.hint(
    "warmup-logarithmic", 'The warm-up is not a straight line: `warmup_type` is "log" unless you set it to "linear".'
)
bank.slip("warmup-logarithmic", (', "warmup_type": "linear"', ""))
bank.variant("warmup-logarithmic", BY_FILE, (', "warmup_type": "linear"', ""))

bank.hint(
    "no-decay",
    "The rate grows as it should, but then it never falls. The type must be `WarmupDecayLR`, which needs "
    "`total_num_steps`.",
)
bank.slip("no-decay", ("WarmupDecayLR", "WarmupLR"), (', "total_num_steps": plan["total"]', ""))
bank.variant("no-decay", BY_NEED, ('"WarmupDecayLR"', '"WarmupLR"'), ('"total_num_steps": plan["total"], ', ""))

bank.hint(
    "rate-not-given",
    "The schedule uses its own rate, 0.001, unless you set `warmup_max_lr`. It does not read the optimizer's rate.",
)
bank.slip("rate-not-given", ('"warmup_max_lr": plan["rate"], ', ""))
bank.variant("rate-not-given", BY_NEED, ('"warmup_max_lr": plan["rate"], ', ""))

bank.hint(
    "no-schedule", "The rate stays at the optimizer's initial value: there is no schedule. Its key is `scheduler`."
)
bank.slip("no-schedule", ('"scheduler": {"type"', '"lr_scheduler": {"type"'))
bank.variant("no-schedule", BY_NEED, ('config["scheduler"]', 'config["schedule"]'))

bank.hint(
    "clipped-unasked",
    "The gradient is clipped to a norm of 1, but the plan does not ask for that. `gradient_clipping` is 1.0 unless "
    "you set it to 0.0.",
)
bank.slip("clipped-unasked", ('        "gradient_clipping": plan["max_norm"] or 0.0,\n', ""))
bank.slip("clipped-unasked", ('plan["max_norm"] or 0.0', 'plan["max_norm"] or 1.0'))
bank.variant("clipped-unasked", BY_NEED, ('config["gradient_clipping"]', 'config["max_grad_norm"]'))

bank.hint(
    "clipping-no-number",
    "DeepSpeed compares `gradient_clipping` with a number, but yours is not a number: {what}. Use 0.0 for no clipping.",
)
bank.slip("clipping-no-number", ('plan["max_norm"] or 0.0', 'plan["max_norm"]'))
bank.variant("clipping-no-number", BY_NEED, ('0.0 if plan["max_norm"] is None', '"never" if plan["max_norm"] is None'))

bank.hint(
    "not-clipped",
    "The plan asks for a gradient norm of at most `max_norm`, but the gradient is not clipped to that.",
)
bank.slip("not-clipped", ('plan["max_norm"] or 0.0', "0.0"))
bank.variant("not-clipped", BY_NEED, ('0.0 if plan["max_norm"] is None else plan["max_norm"]', "0.0"))

bank.hint(
    "wrong-weights",
    "With this configuration, the engine's weights after five steps are not those of one process that follows the "
    "plan.",
)
bank.slip("wrong-weights", ('plan["max_norm"] or 0.0', '(plan["max_norm"] or 0.0) / 2'))
bank.variant("wrong-weights", BY_NEED, ('else plan["max_norm"]', 'else 2 * plan["max_norm"]'))
bank.variant(
    "small-kept-whole",
    BY_NEED,
    ('["stage3_param_persistence_threshold"] = 0', '["stage3_param_persistence_threshold"] = 500'),
)

bank.hint("weights-offloaded", "The plan moves only the optimizer to the CPU, not the weights. `offload_param` moves "
                            "the weights there, and each layer then fetches them over the bus. Leave it out.",
)  # fmt: skip
OFFLOADED = '        zero["offload_optimizer"] = {"device": "cpu"}'
bank.slip("weights-offloaded", (OFFLOADED, OFFLOADED + '\n        zero["offload_param"] = {"device": "cpu"}'))
bank.variant(
    "weights-offloaded",
    BY_NEED,
    (
        'config["zero_optimization"]["offload_optimizer"] =',
        'config["zero_optimization"]["offload_param"] = config["zero_optimization"]["offload_optimizer"] =',
    ),
)

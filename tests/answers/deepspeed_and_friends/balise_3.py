"""Answers to balise 3."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", whole=True)

# sums, the last rank writes the universal checkpoint, and the engine is told by its own parts
BY_SUMS = """
def engine_step(engine, pieces):
    total = 0.0
    for k, tokens in enumerate(pieces):
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with torch.no_grad():
            total = total + loss
        engine.backward(loss)
        engine.step()
    return total.detach() / len(pieces)


def save(engine, folder):
    engine.save_checkpoint(folder, tag="saved", client_state={"by": "us"})
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        to_universal(folder, "saved")
    dist.all_reduce(torch.zeros(1))


def resume(model, optimizer, config, folder):
    config = json.loads(json.dumps(config))
    config["checkpoint"] = {"load_universal": True}
    made = make_engine(model, optimizer, config)
    path, client = made.load_checkpoint(folder, "universal", load_optimizer_states=True, load_lr_scheduler_states=True)
    return made
"""
bank.text(3, None, BY_SUMS)

# a generator, and a dictionary with the further key
BY_PARTS = BY_SUMS.replace("config = json.loads(json.dumps(config))", "config = dict(config)").replace(
    "/ len(pieces)", "* (1 / len(pieces))"
)
bank.text(3, None, BY_PARTS)

bank.hint(
    3,
    "own-backward",
    "DeepSpeed refuses `loss.backward()` at this stage. `engine.backward(loss)` works at every stage.",
)
bank.slip(3, "own-backward", ("engine.backward(loss)", "loss.backward()"))
bank.variant(3, "own-backward", BY_SUMS, ("engine.backward(loss)", "loss.backward()"))

bank.hint(
    3,
    "not-a-number",
    "A step must return one number, the mean loss over the micro-batches of this rank, as a tensor of shape ().",
)
bank.slip(3, "not-a-number", ("torch.stack(losses).mean()", "torch.stack(losses)"))
bank.variant(
    3, "not-a-number", BY_SUMS, ("return total.detach() / len(pieces)", "return [total.detach() / len(pieces)]")
)

bank.hint(3, "keeps-graph", "The loss you return still has its graph, and with it all activations. Return "
                            "`loss.detach()`.")
bank.slip(3, "keeps-graph", ("loss.detach()", "loss"))
bank.variant(
    3, "keeps-graph", BY_SUMS, ("with torch.no_grad():", "with torch.enable_grad():"), ("total.detach()", "total")
)

bank.hint(
    3,
    "wrong-steps",
    "After {forwards} forwards for each of three steps, the engine counts {got} steps. It counts its micro-batches "
    "in `engine.step()`. Call that after every backward, and the engine steps at the end of each accumulation.",
)
bank.slip(
    3,
    "wrong-steps",
    (
        "        engine.step()\n        losses.append(loss.detach())\n",
        "        losses.append(loss.detach())\n    engine.step()\n",
    ),
)
bank.slip(
    3,
    "wrong-steps",
    ("        engine.step()\n", "        if engine.is_gradient_accumulation_boundary():\n            engine.step()\n"),
)
bank.slip(3, "wrong-steps", ("        engine.step()\n", ""))
bank.slip(3, "wrong-steps", ("for tokens in pieces:", "for tokens in pieces[:1]:"))
bank.variant(3, "wrong-steps", BY_SUMS, ("        engine.step()\n", "        engine.step() if k == 0 else None\n"))

bank.hint(
    3,
    "divided-twice",
    "The step is too small: `engine.backward` divides by the number of micro-batches, and you divide too.",
)
bank.slip(3, "divided-twice", ("engine.backward(loss)", "engine.backward(loss / len(pieces))"))
bank.variant(
    3,
    "divided-twice",
    BY_SUMS,
    ("engine.backward(loss)", "engine.backward(loss / engine.gradient_accumulation_steps())"),
)

bank.hint(
    3,
    "gradients-lost",
    "Only the last micro-batch counts, because you set the gradients to zero between micro-batches. The engine "
    "does that itself after its step.",
)
bank.slip(
    3,
    "gradients-lost",
    (
        "        loss = language_loss(engine, tokens)",
        "        engine.zero_grad()\n        [setattr(p, 'grad', None) for p in engine.module.parameters()]\n        loss = language_loss(engine, tokens)",
    ),
)
bank.variant(
    3,
    "gradients-lost",
    BY_SUMS,
    ("        engine.backward(loss)", "        engine.module.zero_grad()\n        engine.backward(loss)"),
)

bank.hint(
    3,
    "not-divided",
    "The step is too large by a factor of the number of micro-batches. It needs their mean, not their sum.",
)
bank.slip(3, "not-divided", ("engine.backward(loss)", "engine.backward(loss, scale_wrt_gas=False)"))
bank.variant(3, "not-divided", BY_SUMS, ("engine.backward(loss)", "engine.backward(loss * len(pieces))"))

bank.hint(3, "wrong-weights", "After three steps the weights are not those of one process with the whole batches.")
bank.slip(3, "wrong-weights", ("for tokens in pieces:", "for tokens in [pieces[0]] * len(pieces):"))
bank.variant(
    3,
    "wrong-weights",
    BY_SUMS,
    ("for k, tokens in enumerate(pieces):", "for k, tokens in enumerate([pieces[-1]] * len(pieces)):"),
)

bank.hint(
    3, "loss-divided", "The loss you return is divided by the number of micro-batches, because `engine.backward` "
                       "returns it like that."
)
bank.slip(3, "loss-divided", ("engine.backward(loss)", "loss = engine.backward(loss)"))
bank.variant(3, "loss-divided", BY_SUMS, ("total.detach() / len(pieces)", "total.detach() / len(pieces) ** 2"))

bank.hint(
    3, "wrong-losses", "Return the mean of the losses over all micro-batches of this rank, before the step."
)
bank.slip(3, "wrong-losses", ("torch.stack(losses).mean()", "torch.stack(losses).sum()"))
bank.slip(3, "wrong-losses", ("torch.stack(losses).mean()", "losses[-1]"))
bank.variant(3, "wrong-losses", BY_SUMS, ("total.detach() / len(pieces)", "total.detach()"))

bank.hint(
    3,
    "waits",
    "The ranks wait for each other forever: {error}. `save_checkpoint` and a barrier need all ranks. Put only "
    "`to_universal`, which one rank does alone, inside an `if` on the rank.",
)
bank.slip(
    3,
    "waits",
    (
        '    engine.save_checkpoint(folder, tag="saved")\n    if dist.get_rank() == 0:\n',
        '    if dist.get_rank() == 0:\n        engine.save_checkpoint(folder, tag="saved")\n',
    ),
)

bank.variant(
    3, "waits", BY_SUMS, ("    dist.barrier()\n    if dist.get_rank()", "    if dist.get_rank()"),
    ("    dist.all_reduce", "        dist.all_reduce"),
)  # fmt: skip

bank.hint(
    3,
    "returns-early",
    "Rank {rank} returned from `save` when {n} of {all} files were there. It has to wait for the rank that writes "
    "them.",
)
bank.slip(
    3,
    "returns-early",
    ('        to_universal(folder, "saved")\n    dist.barrier()\n', '        to_universal(folder, "saved")\n'),
)
bank.slip(
    3,
    "returns-early",
    (
        '    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n    dist.barrier()\n',
        '    dist.barrier()\n    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n',
    ),
)
bank.variant(3, "returns-early", BY_SUMS, ("    dist.all_reduce(torch.zeros(1))\n", ""))

bank.hint(
    3,
    "converted-by-all",
    "You called `to_universal` {n} times, and all calls write the same files. Check the rank, and let one rank do it.",
)
bank.slip(3, "converted-by-all", ("    if dist.get_rank() == 0:\n        to_univ", "    to_univ"))
bank.variant(
    3,
    "converted-by-all",
    BY_SUMS,
    (
        "    if dist.get_rank() == dist.get_world_size() - 1:\n        to_univ",
        "    if engine.local_rank >= 0:\n        to_univ",
    ),
)

bank.hint(
    3,
    "not-universal",
    "This checkpoint is split for the two ranks that wrote it. Load the universal checkpoint, and tell the engine "
    'when you create it: `"checkpoint": {{"load_universal": True}}`.',
)
bank.slip(
    3,
    "not-universal",
    ('{**config, "checkpoint": {"load_universal": True}}', "config"),
    ('tag="universal"', 'tag="saved"'),
)
bank.variant(
    3,
    "not-universal",
    BY_SUMS,
    ('config["checkpoint"] = {"load_universal": True}\n', "pass\n"),
    ('folder, "universal"', 'folder, "saved"'),
)

bank.hint(3, "no-engine", "Return the engine itself, not {got}. `load_checkpoint` returns other things.")
bank.slip(
    3,
    "no-engine",
    (
        '    engine.load_checkpoint(folder, tag="universal")\n    return engine',
        '    return engine.load_checkpoint(folder, tag="universal")',
    ),
)
bank.variant(3, "no-engine", BY_SUMS, ("return made", "return made, client"))

bank.hint(
    3,
    "config-changed",
    "You changed the configuration that you were given, but the caller still uses it. Make a new dictionary with "
    "the additional key.",
)
bank.slip(
    3,
    "config-changed",
    (
        '{**config, "checkpoint": {"load_universal": True}}',
        'config | config.update(checkpoint={"load_universal": True}) if False else (config.update(checkpoint={"load_universal": True}) or config)',
    ),
)
bank.variant(3, "config-changed", BY_SUMS, ("config = json.loads(json.dumps(config))", "config = config"))

bank.hint(3, "not-loaded", "The weights are not the saved ones: nothing was loaded.")
bank.slip(3, "not-loaded", ('    engine.load_checkpoint(folder, tag="universal")\n', ""))
bank.variant(
    3,
    "not-loaded",
    BY_SUMS,
    ('path, client = made.load_checkpoint(folder, "universal"', 'dict(path=folder, tag="universal"'),
)

bank.hint(
    3,
    "config-lost",
    "DeepSpeed got no configuration, or an incomplete one: {error}. Pass all of `config` plus the new key, "
    "`{{**config, ...}}`; `update` returns None.",
)
WITH_MORE = '{**config, "checkpoint": {"load_universal": True}}'
bank.slip(3, "config-lost", (WITH_MORE, 'config.update({"checkpoint": {"load_universal": True}})'))
bank.slip(3, "config-lost", (WITH_MORE, '{"checkpoint": {"load_universal": True}}'))
bank.variant(3, "config-lost", BY_SUMS, ("made = make_engine(model, optimizer, config)", 'made = make_engine(model, optimizer, {"steps_per_print": 10})'))

bank.hint(
    3,
    "not-found",
    "There is no universal checkpoint under that tag: {error}. `save` makes `to_universal` write folder/universal, "
    'and `resume` loads the tag "universal".',
)
bank.slip(3, "not-found", ('    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n', ""))
bank.variant(3, "not-found", BY_SUMS, ('folder, "universal", load', 'folder, "global_step3", load'))

LOAD = 'folder, tag="universal"'
bank.hint(3, "steps-lost", "The engine's step count starts again, at {got}: you loaded only the weights. Load "
                           "everything.")
bank.slip(3, "steps-lost", (LOAD, LOAD + ", load_module_only=True"))
bank.variant(3, "steps-lost", BY_SUMS, ("load_optimizer_states=True", "load_module_only=True"))

bank.hint(3, "rates-lost", "The learning rate starts again: you did not load the schedule.")
bank.slip(3, "rates-lost", (LOAD, LOAD + ", load_lr_scheduler_states=False"))
bank.variant(3, "rates-lost", BY_SUMS, ("load_lr_scheduler_states=True", "load_lr_scheduler_states=False"))

bank.hint(3, "states-lost", "The optimizer starts again: you did not load its states, nor its rate with them.")
bank.slip(3, "states-lost", (LOAD, LOAD + ", load_optimizer_states=False"))
bank.variant(3, "states-lost", BY_SUMS, ("load_optimizer_states=True", "load_optimizer_states=False"))

"""Answers to balise 3."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 3, whole=True)

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
bank.text(None, BY_SUMS)

# a generator, and a dictionary with the further key
BY_PARTS = BY_SUMS.replace("config = json.loads(json.dumps(config))", "config = dict(config)").replace(
    "/ len(pieces)", "* (1 / len(pieces))"
)
bank.text(None, BY_PARTS)

bank.hint(
    "own-backward",
    "DeepSpeed refuses `loss.backward()` at this stage. `engine.backward(loss)` works at every stage.",
)
bank.slip("own-backward", ("engine.backward(loss)", "loss.backward()"))
bank.variant("own-backward", BY_SUMS, ("engine.backward(loss)", "loss.backward()"))

bank.hint(
    "not-a-number",
    "A step must return one number, the mean loss over the micro-batches of this rank, as a tensor of shape ().",
)
bank.slip("not-a-number", ("torch.stack(losses).mean()", "torch.stack(losses)"))
bank.variant("not-a-number", BY_SUMS, ("return total.detach() / len(pieces)", "return [total.detach() / len(pieces)]"))

bank.hint(
    "keeps-graph",
    "The loss you return still has its graph, and with it all activations. Return `loss.detach()`.",
    edge=True,
)
bank.slip("keeps-graph", ("loss.detach()", "loss"))
bank.variant(
    "keeps-graph", BY_SUMS, ("with torch.no_grad():", "with torch.enable_grad():"), ("total.detach()", "total")
)

bank.hint(
    "wrong-steps",
    "After {forwards} forwards for each of three steps, the engine counts {got} steps. It counts its micro-batches "
    "in `engine.step()`. Call that after every backward, and the engine steps at the end of each accumulation.",
)
bank.slip(
    "wrong-steps",
    (
        "        engine.step()\n        losses.append(loss.detach())\n",
        "        losses.append(loss.detach())\n    engine.step()\n",
    ),
)
bank.slip(
    "wrong-steps",
    ("        engine.step()\n", "        if engine.is_gradient_accumulation_boundary():\n            engine.step()\n"),
)
bank.slip("wrong-steps", ("        engine.step()\n", ""))
bank.slip("wrong-steps", ("for tokens in pieces:", "for tokens in pieces[:1]:"))
bank.variant("wrong-steps", BY_SUMS, ("        engine.step()\n", "        engine.step() if k == 0 else None\n"))

bank.hint(
    "divided-twice",
    "The step is too small: `engine.backward` divides by the number of micro-batches, and you divide too.",
)
bank.slip("divided-twice", ("engine.backward(loss)", "engine.backward(loss / len(pieces))"))
bank.variant(
    "divided-twice",
    BY_SUMS,
    ("engine.backward(loss)", "engine.backward(loss / engine.gradient_accumulation_steps())"),
)

bank.hint(
    "gradients-lost",
    "Only the last micro-batch counts, because you set the gradients to zero between micro-batches. The engine "
    "does that itself after its step.",
)
bank.slip(
    "gradients-lost",
    (
        "        loss = language_loss(engine, tokens)",
        "        engine.zero_grad()\n        [setattr(p, 'grad', None) for p in engine.module.parameters()]\n        loss = language_loss(engine, tokens)",
    ),
)
bank.variant(
    "gradients-lost",
    BY_SUMS,
    ("        engine.backward(loss)", "        engine.module.zero_grad()\n        engine.backward(loss)"),
)

bank.hint(
    "not-divided",
    "The step is too large by a factor of the number of micro-batches. It needs their mean, not their sum.",
)
bank.slip("not-divided", ("engine.backward(loss)", "engine.backward(loss, scale_wrt_gas=False)"))
bank.variant("not-divided", BY_SUMS, ("engine.backward(loss)", "engine.backward(loss * len(pieces))"))

bank.hint("wrong-weights", "After three steps the weights are not those of one process with the whole batches.")
bank.slip("wrong-weights", ("for tokens in pieces:", "for tokens in [pieces[0]] * len(pieces):"))
bank.variant(
    "wrong-weights",
    BY_SUMS,
    ("for k, tokens in enumerate(pieces):", "for k, tokens in enumerate([pieces[-1]] * len(pieces)):"),
)

bank.hint(
    "loss-divided",
    "The loss you return is divided by the number of micro-batches, because `engine.backward` returns it like that.",
    edge=True,
)
bank.slip("loss-divided", ("engine.backward(loss)", "loss = engine.backward(loss)"))
bank.variant("loss-divided", BY_SUMS, ("total.detach() / len(pieces)", "total.detach() / len(pieces) ** 2"))

bank.hint("wrong-losses", "Return the mean of the losses over all micro-batches of this rank, before the step.")
bank.slip("wrong-losses", ("torch.stack(losses).mean()", "torch.stack(losses).sum()"))
bank.slip("wrong-losses", ("torch.stack(losses).mean()", "losses[-1]"))
bank.variant("wrong-losses", BY_SUMS, ("total.detach() / len(pieces)", "total.detach()"))

bank.hint(
    "waits",
    "The ranks wait for each other forever: {error}. `save_checkpoint` and a barrier need all ranks. Put only "
    "`to_universal`, which one rank does alone, inside an `if` on the rank.",
)
bank.slip(
    "waits",
    (
        '    engine.save_checkpoint(folder, tag="saved")\n    if dist.get_rank() == 0:\n',
        '    if dist.get_rank() == 0:\n        engine.save_checkpoint(folder, tag="saved")\n',
    ),
)

bank.variant("waits", BY_SUMS, ("    dist.barrier()\n    if dist.get_rank()", "    if dist.get_rank()"),
    ("    dist.all_reduce", "        dist.all_reduce"),
)  # fmt: skip

bank.hint(
    "returns-early",
    "Rank {rank} returned from `save` when {n} of {all} files were there. It has to wait for the rank that writes "
    "them.",
    edge=True,
)
bank.slip(
    "returns-early",
    ('        to_universal(folder, "saved")\n    dist.barrier()\n', '        to_universal(folder, "saved")\n'),
)
bank.slip(
    "returns-early",
    (
        '    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n    dist.barrier()\n',
        '    dist.barrier()\n    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n',
    ),
)
bank.variant("returns-early", BY_SUMS, ("    dist.all_reduce(torch.zeros(1))\n", ""))

bank.hint(
    "converted-by-all",
    "You called `to_universal` {n} times, and all calls write the same files. Check the rank, and let one rank do it.",
    edge=True,
)
bank.slip("converted-by-all", ("    if dist.get_rank() == 0:\n        to_univ", "    to_univ"))
bank.variant(
    "converted-by-all",
    BY_SUMS,
    (
        "    if dist.get_rank() == dist.get_world_size() - 1:\n        to_univ",
        "    if engine.local_rank >= 0:\n        to_univ",
    ),
)

bank.hint(
    "not-universal",
    "This checkpoint is split for the two ranks that wrote it. Load the universal checkpoint, and tell the engine "
    'when you create it: `"checkpoint": {{"load_universal": True}}`.',
)
bank.slip(
    "not-universal",
    ('{**config, "checkpoint": {"load_universal": True}}', "config"),
    ('tag="universal"', 'tag="saved"'),
)
bank.variant(
    "not-universal",
    BY_SUMS,
    ('config["checkpoint"] = {"load_universal": True}\n', "pass\n"),
    ('folder, "universal"', 'folder, "saved"'),
)

bank.hint("no-engine", "Return the engine itself, not {got}. `load_checkpoint` returns other things.")
bank.slip(
    "no-engine",
    (
        '    engine.load_checkpoint(folder, tag="universal")\n    return engine',
        '    return engine.load_checkpoint(folder, tag="universal")',
    ),
)
bank.variant("no-engine", BY_SUMS, ("return made", "return made, client"))

bank.hint(
    "config-changed",
    "You changed the configuration that you were given, but the caller still uses it. Make a new dictionary with "
    "the additional key.",
    edge=True,
)
bank.slip(
    "config-changed",
    (
        '{**config, "checkpoint": {"load_universal": True}}',
        'config | config.update(checkpoint={"load_universal": True}) if False else (config.update(checkpoint={"load_universal": True}) or config)',
    ),
)
bank.variant("config-changed", BY_SUMS, ("config = json.loads(json.dumps(config))", "config = config"))

bank.hint("not-loaded", "The weights are not the saved ones: nothing was loaded.")
bank.slip("not-loaded", ('    engine.load_checkpoint(folder, tag="universal")\n', ""))
bank.variant(
    "not-loaded",
    BY_SUMS,
    ('path, client = made.load_checkpoint(folder, "universal"', 'dict(path=folder, tag="universal"'),
)

bank.hint(
    "config-lost",
    "DeepSpeed got no configuration, or an incomplete one: {error}. Pass all of `config` plus the new key, "
    "`{{**config, ...}}`; `update` returns None.",
)
WITH_MORE = '{**config, "checkpoint": {"load_universal": True}}'
bank.slip("config-lost", (WITH_MORE, 'config.update({"checkpoint": {"load_universal": True}})'))
bank.slip("config-lost", (WITH_MORE, '{"checkpoint": {"load_universal": True}}'))
bank.variant(
    "config-lost",
    BY_SUMS,
    ("made = make_engine(model, optimizer, config)", 'made = make_engine(model, optimizer, {"steps_per_print": 10})'),
)

bank.hint(
    "not-found",
    "There is no universal checkpoint under that tag: {error}. `save` makes `to_universal` write folder/universal, "
    'and `resume` loads the tag "universal".',
)
bank.slip("not-found", ('    if dist.get_rank() == 0:\n        to_universal(folder, "saved")\n', ""))
bank.variant("not-found", BY_SUMS, ('folder, "universal", load', 'folder, "global_step3", load'))

LOAD = 'folder, tag="universal"'
bank.hint(
    "steps-lost",
    "The engine's step count starts again, at {got}: you loaded only the weights. Load everything.",
    edge=True,
)
bank.slip("steps-lost", (LOAD, LOAD + ", load_module_only=True"))
bank.variant("steps-lost", BY_SUMS, ("load_optimizer_states=True", "load_module_only=True"))

bank.hint("rates-lost", "The learning rate starts again: you did not load the schedule.", edge=True)
bank.slip("rates-lost", (LOAD, LOAD + ", load_lr_scheduler_states=False"))
bank.variant("rates-lost", BY_SUMS, ("load_lr_scheduler_states=True", "load_lr_scheduler_states=False"))

bank.hint("states-lost", "The optimizer starts again: you did not load its states, nor its rate with them.")
bank.slip("states-lost", (LOAD, LOAD + ", load_optimizer_states=False"))
bank.variant("states-lost", BY_SUMS, ("load_optimizer_states=True", "load_optimizer_states=False"))

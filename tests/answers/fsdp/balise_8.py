"""Answers to balise 8 of 14_fsdp: accumulate, exchange once."""

from tests.answers.bank import Bank

bank = Bank("14_fsdp", 8, whole=True)

SYNC = "        model.set_requires_gradient_sync(last)\n"

LAST = "        model.set_is_last_backward(last)\n"

SCALE = " * len(tokens) / sequences"

STEP = "    optimizer.step()\n"

bank.hint(
    "reduced-each-time",
    "{found} reduce-scatters for {n} micro-batches and {groups} groups. Exchange gradients only with the last "
    "micro-batch: {groups}.",
)
# balise 8
bank.slip("reduced-each-time", (SYNC, ""))

bank.slip("reduced-each-time", (SYNC + LAST, ""))

bank.slip(
    "reduced-each-time",
    (SYNC, "        for block in model.blocks[:1]:\n            block.set_requires_gradient_sync(last)\n"),
)

bank.slip("reduced-each-time", (SYNC, "        model.blocks[0].set_requires_gradient_sync(last)\n"), variant=True)

bank.hint(
    "root-told-alone",
    "{found} reduce-scatters: you turned the exchange off for the root only, so the blocks exchanged each time. "
    "Leave recurse as it is.",
)
bank.slip("root-told-alone", (SYNC, "        model.set_requires_gradient_sync(last, recurse=False)\n"), variant=True)

bank.hint(
    "never-reduced",
    "No gradient was exchanged. For the last micro-batch, turn the exchange on again before its backward.",
)
bank.slip("never-reduced", (SYNC, "        model.set_requires_gradient_sync(False)\n"))

bank.hint(
    "never-last",
    "The last backward ran with set_is_last_backward(False): nothing waits for its exchange, so on a GPU the "
    "optimizer may read gradients that aren't there yet.",
)
bank.slip("never-last", (LAST, "        model.set_is_last_backward(False)\n"))

bank.slip("never-last", (LAST, "        model.set_is_last_backward(not last)\n"))

bank.slip(
    "never-last",
    (LAST, ""),
    ("    total = 0.0\n", "    total = 0.0\n    model.set_is_last_backward(is_last_backward=False)\n"),
    (STEP, "    model.set_is_last_backward(True)\n" + STEP),
    variant=True,
)

bank.slip(
    "never-reduced",
    (SYNC, ""),
    ("        loss.backward()\n", "        loss.backward()\n" + SYNC),
    ("    total = 0.0\n", "    total = 0.0\n    model.set_requires_gradient_sync(False)\n"),
)

bank.slip(
    "never-reduced", (SYNC, "        model.set_requires_gradient_sync(last and len(micro_batches) > 1)\n"), variant=True
)

bank.hint("sync-left-off", "After accumulate, a plain backward no longer exchanges anything: the switch was left off.")
bank.slip("sync-left-off", (STEP, STEP + "    model.set_requires_gradient_sync(False)\n"), variant=True)

bank.hint(
    "no-sync-is-ddp",
    "no_sync() belongs to DDP. A sharded module has set_requires_gradient_sync(True or False) instead.",
)
bank.slip(
    "no-sync-is-ddp",
    (SYNC + LAST, ""),
    (
        "        loss.backward()\n",
        "        with torch.enable_grad() if last else model.no_sync():\n            loss.backward()\n",
    ),
    variant=True,
)

bank.hint(
    "losses-added",
    "The gradients are {n} times too large: they add up over the micro-batches. Weight each loss by its share.",
)
bank.slip("losses-added", (SCALE, ""), variant=True)

bank.hint(
    "mean-of-means",
    "This is right for equal micro-batches and wrong when one is smaller: weight each loss by its number of sequences.",
)
bank.slip("mean-of-means", (SCALE, " / len(micro_batches)"), variant=True)

bank.hint(
    "averaged-twice",
    "The gradients are too small by a factor of the number of ranks: fully_shard already averages over the ranks.",
)
bank.slip("averaged-twice", (SCALE, SCALE + " / dist.get_world_size()"), variant=True)

bank.hint("updates-between", "The optimizer made {found} steps. Make one, after the last micro-batch.")
bank.slip(
    "updates-between",
    (STEP, ""),
    ("        loss.backward()\n", "        loss.backward()\n        optimizer.step()\n"),
    variant=True,
)

bank.hint("no-update", "The weights didn't change. Do you call optimizer.step()?")
bank.slip("no-update", (STEP, ""), variant=True)

bank.hint(
    "old-gradients-kept",
    "The first call is right, the second isn't: gradients of the previous call were still there.",
)
bank.slip("old-gradients-kept", ("    optimizer.zero_grad()\n", ""), variant=True)

bank.hint("accumulated-wrongly", "The weights differ from those of one step on the whole batch of all ranks.")
bank.slip("accumulated-wrongly", (SCALE, " / number"), variant=True)

bank.slip("nothing-returned", ("    return total\n", ""))

bank.hint(
    "loss-with-graph",
    "The returned loss is still attached to its graph, which keeps the activations: detach it.",
)
bank.slip("loss-with-graph", ("loss.detach()", "loss"), variant=True)

bank.hint("loss-of-last", "That is the loss of the last micro-batch, not the mean over all of them.")
bank.slip("loss-of-last", ("return total", "return loss.detach()"))

bank.slip("loss-of-last", ("return total", "return loss.detach() * sequences / len(tokens)"), variant=True)

bank.hint("wrong-mean-loss", "That isn't the mean loss over all micro-batches of this rank.")
bank.slip("wrong-mean-loss", ("return total", "return total / len(micro_batches)"), variant=True)

bank.hint(
    "loss-not-a-number",
    "Return this rank's loss, the mean over all its micro-batches: a tensor of one number, or a float.",
)
bank.slip(
    "loss-not-a-number",
    ("    total = 0.0\n", "    total = []\n"),
    ("total += loss.detach()", "total.append(loss.item())"),
    variant=True,
)

bank.hint(
    "one-large-batch",
    "The micro-batches went through the model together, or were kept for a single backward: all their activations "
    "are in memory at once, which accumulation is meant to avoid.",
)
bank.text(
    "one-large-batch",
    """
def accumulate(model, micro_batches, optimizer):
    optimizer.zero_grad()
    loss = language_loss(model, torch.cat(micro_batches))
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
)

bank.text(
    "one-large-batch",
    """
def accumulate(model, micro_batches, optimizer):
    sequences = sum(len(tokens) for tokens in micro_batches)
    optimizer.zero_grad()
    loss = sum(language_loss(model, tokens) * len(tokens) for tokens in micro_batches) / sequences
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
    variant=True,
)

bank.hint("around-the-shards", "The forward of the sharded model was called {found} times for {n} micro-batches.")
bank.text(
    "around-the-shards",
    """
def accumulate(model, micro_batches, optimizer):
    sequences = sum(len(tokens) for tokens in micro_batches)
    optimizer.zero_grad()
    total = 0.0
    with torch.no_grad():
        for tokens in micro_batches:
            total += language_loss(model, tokens) * len(tokens) / sequences
    for number, tokens in enumerate(micro_batches, 1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        (language_loss(model, tokens) * len(tokens) / sequences).backward()
    optimizer.step()
    return total
""",
    variant=True,
)

bank.text(
    None,
    '''
def accumulate(model, micro_batches, optimizer):
    """A sum over tokens; only what is needed is told."""
    count = sum(tokens[:, 1:].numel() for tokens in micro_batches)
    losses = []
    model.set_requires_gradient_sync(False)
    for i, tokens in enumerate(micro_batches):
        if i == len(micro_batches) - 1:
            model.set_requires_gradient_sync(True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)
''',
)

bank.text(
    None,
    '''
def accumulate(model, micro_batches, optimizer):
    """Every module told by itself, the switch thrown between forward and backward."""
    parts = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    *first, last = micro_batches
    total = sum(map(len, micro_batches))

    def run(tokens, exchange):
        loss = language_loss(model, tokens) * (len(tokens) / total)
        for part in parts:
            part.set_requires_gradient_sync(exchange, recurse=False)
        loss.backward()
        return loss.detach()

    optimizer.zero_grad(set_to_none=True)
    losses = [run(tokens, False) for tokens in first] + [run(last, True)]
    optimizer.step()
    return torch.stack(losses).sum()
''',
)

bank.text(
    None,
    '''
import contextlib


@contextlib.contextmanager
def no_exchange(model):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


def accumulate(model, micro_batches, optimizer):
    """A context as DDP has it; the parameters stay gathered between micro-batches."""
    weights = [len(tokens) / sum(map(len, micro_batches)) for tokens in micro_batches]
    optimizer.zero_grad()
    losses = torch.zeros(len(micro_batches), dtype=torch.float64)
    for i, tokens in enumerate(micro_batches):
        with no_exchange(model) if i + 1 < len(micro_batches) else contextlib.nullcontext():
            loss = language_loss(model, tokens)
            (weights[i] * loss).backward()
        losses[i] = weights[i] * loss.detach()
    optimizer.step()
    return losses.sum()
''',
)

bank.text(
    None,
    """
def accumulate(model, micro_batches, optimizer):
    weights = torch.tensor([float(len(tokens)) for tokens in micro_batches])  # float32
    weights /= weights.sum()
    total = torch.zeros(())
    for k, (weight, tokens) in enumerate(zip(weights, micro_batches)):
        model.set_requires_gradient_sync(k + 1 == len(micro_batches))
        loss = language_loss(model, tokens)
        (weight * loss).backward()
        total = total + weight * loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total
""",
)

bank.hint(
    "total-not-on-gpu",
    "On GPUs, a sum is in the CPU's memory: {error}. total += loss writes into total, where total is: create it on "
    "the loss's device, or start with a plain 0.0.",
)
# what only GPUs show
bank.slip("total-not-on-gpu", ("    total = 0.0\n", "    total = torch.zeros(())\n"))

bank.slip("total-not-on-gpu", ("    total = 0.0\n", "    total = torch.tensor(0.0, dtype=torch.float64)\n"))

bank.slip(
    "total-not-on-gpu",
    ("    total = 0.0\n", "    found = torch.zeros(1)\n"),
    ("        total += loss.detach()\n", "        found.add_(loss.detach())\n"),
    ("    return total", "    return found"),
    variant=True,
)

"""Answers to balise 5 of 09_ddp: accumulate, exchange once, and choose the learning rate."""

import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("09_ddp", 5)

# balise 5
NO_SYNC = "        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():\n"

bank.hint("exchange-each-time", "{found} all-reduces for {n} micro-batches, but only the last micro-batch should "
          "exchange. Run the others inside no_sync().")  # fmt: skip
bank.slip("exchange-each-time", (NO_SYNC, "        with contextlib.nullcontext():\n"), variant=True)

bank.hint("never-exchanged", "The gradients were never exchanged: run the last micro-batch outside no_sync().")
bank.slip("never-exchanged", ("if i == len(micro_batches) else", "if i > 1 else"))

bank.hint("forward-outside", "You use no_sync(), but only around backward. DDP decides in the forward pass, so this "
          "must be inside too.")  # fmt: skip
bank.slip("forward-outside",
    (NO_SYNC, ""),
    ('            loss = F.cross_entropy(model(x), y, reduction="sum") / samples\n            loss.backward()', '        loss = F.cross_entropy(model(x), y, reduction="sum") / samples\n        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():\n            loss.backward()'),
    variant=True,
)  # fmt: skip

bank.slip(
    "never-exchanged",
    ("contextlib.nullcontext() if i == len(micro_batches) else model.no_sync()", "model.no_sync()"),
    variant=True,
)

bank.hint("bypassed", "The micro-batches bypassed DDP (through .module). Call the wrapped model.")
bank.slip("bypassed", ("F.cross_entropy(model(x)", "F.cross_entropy(model.module(x)"), variant=True)

bank.hint("sum-of-losses", "The gradients are {n} times too large, because they add up over micro-batches. Scale "
          "each loss.")  # fmt: skip
bank.slip(
    "sum-of-losses",
    ('F.cross_entropy(model(x), y, reduction="sum") / samples', "F.cross_entropy(model(x), y)"),
    variant=True,
)

bank.hint("averaged-twice", "The gradients are world_size times too small. DDP already averages over the ranks: a "
          "rank's loss is the mean over its own samples.")  # fmt: skip
bank.slip(
    "averaged-twice",
    ("            loss.backward()", "            (loss / dist.get_world_size()).backward()"),
    variant=True,
)

bank.hint("summed-over-ranks", "The gradients are world_size times too large. DDP averages them over the ranks, and "
          "all ranks have equally many samples: divide by the samples of this rank, and don't multiply.")  # fmt: skip
bank.slip(
    "summed-over-ranks",
    ('reduction="sum") / samples', 'reduction="sum") / samples * dist.get_world_size()'),
    variant=True,
)

bank.hint("micro-means", "The result is right for equal micro-batches, but wrong where one is smaller. Weight each "
          "loss by its number of samples.")  # fmt: skip
bank.slip(
    "micro-means",
    ('F.cross_entropy(model(x), y, reduction="sum") / samples', "F.cross_entropy(model(x), y) / len(micro_batches)"),
    variant=True,
)

bank.hint("several-updates", "The optimizer made {found} steps. It should make one, after the last micro-batch.")
bank.slip(
    "several-updates",
    ("            loss.backward()", "            loss.backward()\n        optimizer.step()"),
    variant=True,
)

bank.hint("no-optimizer-step", "The weights did not change. Do you call optimizer.step()?")
bank.slip(
    "no-optimizer-step",
    ("            loss.backward()\n    optimizer.step()", "            loss.backward()"),
    variant=True,
)

bank.hint("old-gradients", "The first call is right, but the second is not: the gradients of the call before were "
          "still there.")  # fmt: skip
bank.slip("old-gradients", ("    optimizer.zero_grad()\n", ""), variant=True)

bank.hint("wrong-accumulation", "The weights are not those of one step on the whole batch of all ranks.")
bank.slip("wrong-accumulation", ('reduction="sum") / samples', 'reduction="sum") / samples * 1.5'))

bank.slip(
    "wrong-accumulation", ("in enumerate(micro_batches, 1)", "in list(enumerate(micro_batches, 1))[-1:]"), variant=True
)

bank.hint("rate-not-number", "Return the learning rate of this step as one number.")
bank.slip("rate-not-number", ("return target\n", "return [target]\n"), variant=True)

bank.slip("nothing-returned", ("    return base + (target - base) * step / warmup_steps", ""))

bank.hint("rate-not-scaled", "After the warm-up the learning rate is base · batch / base_batch.")
bank.slip("rate-not-scaled", ("target = base * batch / base_batch", "target = base"), variant=True)

bank.hint("rate-square-root", "This is the square-root rule. Use the linear rule.")
bank.slip(
    "rate-square-root",
    ("target = base * batch / base_batch", "target = base * (batch / base_batch) ** 0.5"),
    variant=True,
)

bank.hint("rate-no-warm-up", "In the first steps the learning rate rises from base to the target, by the same amount "
          "in each step.")  # fmt: skip
bank.slip("rate-no-warm-up", ("if step >= warmup_steps:", "if True:"), variant=True)

bank.hint("rate-from-zero", "The warm-up starts at base (step 0), not at 0.")
bank.slip(
    "rate-from-zero",
    ("return base + (target - base) * step / warmup_steps", "return target * step / warmup_steps"),
    variant=True,
)

bank.hint("rate-off-by-one", "The target is reached at step = warmup_steps, and step 0 has the base rate.")
bank.slip(
    "rate-off-by-one",
    ("(target - base) * step / warmup_steps", "(target - base) * (step + 1) / warmup_steps"),
    variant=True,
)

bank.hint("rate-goes-on", "After the warm-up the learning rate no longer changes.")
bank.slip(
    "rate-goes-on",
    ("    if step >= warmup_steps:\n        return target\n", "    if not warmup_steps:\n        return target\n"),
    variant=True,
)

bank.hint("rate-no-warm-up-asked", "With warmup_steps = 0, the rate is the target from step 0 on: {error}")
bank.slip(
    "rate-no-warm-up-asked",
    ("    if step >= warmup_steps:\n        return target\n", ""),
    ("step / warmup_steps", "min(1, step / warmup_steps)"),
    variant=True,
)

bank.hint("rate-inverted", "The target is base · batch / base_batch. You swapped the two batch sizes.")
bank.slip("rate-inverted", ("target = base * batch / base_batch", "target = base * base_batch / batch"), variant=True)

bank.slip(
    None,
    ("for i, (x, y) in enumerate(micro_batches, 1):", "for i, (x, y) in enumerate(micro_batches[:], start=1):"),
    ("    optimizer.zero_grad()\n", "    model.zero_grad(set_to_none=True)\n"),
)


def accumulate(model, micro_batches, optimizer):
    """The flag of DDP, set by hand; the mean of the whole by weights; cleared after the step."""
    optimizer.zero_grad(set_to_none=False)
    total = sum(x.shape[0] for x, _ in micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (F.cross_entropy(model(x), y) * (x.shape[0] / total)).backward()
    x, y = micro_batches[-1]
    (F.cross_entropy(model(x), y) * (x.shape[0] / total)).backward()
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(step, base, base_batch, batch, warmup_steps):
    scale = batch / base_batch
    done = min(step, warmup_steps) / warmup_steps if warmup_steps else 1.0
    return base * (1 + (scale - 1) * done)


bank.several(None, accumulate, learning_rate)


def accumulate_all_at_once(model, micro_batches, optimizer):
    optimizer.zero_grad()
    x, y = (torch.cat(part) for part in zip(*micro_batches))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def accumulate_one_graph(model, micro_batches, optimizer):
    optimizer.zero_grad()
    n = sum(len(y) for _, y in micro_batches)
    with model.no_sync():
        losses = [F.cross_entropy(model(x), y, reduction="sum") / n for x, y in micro_batches[:-1]]
    x, y = micro_batches[-1]
    (sum(losses) + F.cross_entropy(model(x), y, reduction="sum") / n).backward()
    optimizer.step()


bank.hint("not-accumulated", "The micro-batches went through the network together, or were kept for one backward "
          "pass. All their activations are then in memory at once, which accumulation is meant to avoid.")  # fmt: skip
bank.several("not-accumulated", accumulate_all_at_once, learning_rate)

bank.several("not-accumulated", accumulate_one_graph, learning_rate, variant=True)

bank.hint("rate-whole-numbers", "batch / base_batch is not a whole number here, but you use one: // and int() cut "
          "off the decimals, round() rounds. Divide with /.")  # fmt: skip
bank.slip("rate-whole-numbers", ("base * batch / base_batch", "base * (batch // base_batch)"))

bank.slip("rate-whole-numbers", ("base * batch / base_batch", "base * (batch // base_batch or batch / base_batch)"))

bank.slip(
    "rate-whole-numbers", ("base * batch / base_batch", "base * max(round(batch / base_batch), batch / base_batch)")
)

bank.slip("rate-whole-numbers", ("base * batch / base_batch", "base * int(batch / base_batch)"), variant=True)

bank.hint("rate-smaller-batch", "With a batch smaller than base_batch, the target is below base, and the warm-up "
          "goes down to it.")  # fmt: skip
bank.slip(
    "rate-smaller-batch",
    (
        "    if step >= warmup_steps:\n        return target\n    return base + (target - base) * step / warmup_steps",
        "    return min(target, base + (target - base) * step / warmup_steps) if warmup_steps else target",
    ),
    variant=True,
)


def accumulate_then_divide(model, micro_batches, optimizer):
    """Sums of losses; the gradients divided at the end; DDP's flag set by hand."""
    optimizer.zero_grad(set_to_none=True)
    samples = 0
    for left, (x, y) in zip(range(len(micro_batches) - 1, -1, -1), micro_batches):
        model.require_backward_grad_sync = left == 0
        F.cross_entropy(model(x), y, reduction="sum").backward()
        samples += y.numel()
    for p in model.parameters():
        p.grad.div_(samples)
    optimizer.step()


def rate_between(step, base, base_batch, batch, warmup_steps):
    part = 1.0 if warmup_steps == 0 else min(step / warmup_steps, 1.0)
    return (1 - part) * base + part * base * (batch / base_batch)


bank.several(None, accumulate_then_divide, rate_between)

bank.hint("exchanged-too-early", "The gradients were exchanged with micro-batch {found} of {n}, so those of the "
          "later ones were not. Run the last micro-batch outside no_sync(): its exchange includes the gradients "
          "accumulated before it.")  # fmt: skip
bank.slip("exchanged-too-early", ("if i == len(micro_batches) else", "if i == 1 else"), variant=True)

bank.hint("cleared-each-time", "These are the gradients of the last micro-batch alone. A zero_grad() in each "
          "micro-batch throws away the earlier gradients: clear once, before the first.")  # fmt: skip
bank.slip(
    "cleared-each-time",
    ("            loss.backward()", "            optimizer.zero_grad()\n            loss.backward()"),
)

bank.slip(
    "cleared-each-time",
    ("            loss = F", "            model.zero_grad()\n            loss = F"),
    ('y, reduction="sum") / samples', "y) / len(micro_batches)"),
    variant=True,
)

bank.hint("sum-not-divided", "The gradients are those of a sum over the samples. Divide by all {samples} samples of "
          "the micro-batches.")  # fmt: skip
bank.slip("sum-not-divided", ('reduction="sum") / samples', 'reduction="sum")'), variant=True)

RISE = "base + (target - base) * step / warmup_steps"

bank.hint("rate-geometric", "Your warm-up multiplies by the same factor in each step. It should add the same amount.")
bank.slip("rate-geometric", (RISE, "base * (batch / base_batch) ** (step / warmup_steps)"), variant=True)

bank.hint("rate-wrong", "The learning rate of this step is wrong.")
bank.slip("rate-wrong", (RISE, "base + (target - base) * (step / warmup_steps) ** 2"), variant=True)

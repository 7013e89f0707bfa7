"""Answers to balise 1 of 10_learning_rate_and_large_batch: schedules, and a training that follows them."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 1, whole=True)

SQUARES = """
def _fall(a, b, k, first, last):
    if k >= last:
        return b
    return b + (a - b) * math.cos(0.5 * math.pi * (k - first) / (last - first)) ** 2


def warmup_cosine(step, total, warmup, peak, floor=0.0):
    return peak * (step + 1) / warmup if step < warmup else _fall(peak, floor, step, warmup, total)


def one_cycle(step, total, peak, share=0.3, start=25, end=1e4, low=0.85, high=0.95):
    top, first = share * total - 1, peak / start
    last = first / end
    if step < top:
        return _fall(first, peak, step, 0, top), _fall(high, low, step, 0, top)
    return _fall(peak, last, step, top, total - 1), _fall(low, high, step, top, total - 1)


def cyclical(step, half, low, high):
    cycles, k = divmod(step, 2 * half)
    return low + (high - low) * (k if k < half else 2 * half - k) / half


def set_rates(optimizer, rate):
    try:
        rate, momentum = rate
    except TypeError:
        momentum = None
    for group in optimizer.param_groups:
        group.update(lr=rate * group["lr_scale"] if "lr_scale" in group else rate)
        if momentum is None:
            continue
        try:
            group["betas"] = momentum, group["betas"][1]
        except KeyError:
            group["momentum"] = momentum


def train(model, batches, optimizer, schedule, first=0):
    step = first - 1
    for step, (x, y) in enumerate(batches, first):
        set_rates(optimizer, schedule(step))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return step + 1
"""
bank.text(None, SQUARES)

TENSORS = """
import numpy as np
import itertools

def warmup_cosine(step, total, warmup, peak, floor=0.0):
    step = torch.tensor(float(step))
    rising = peak * (step + 1) / max(1, warmup)
    t = ((step - warmup) / max(1, total - warmup)).clamp(0, 1)
    return float(torch.where(step < warmup, rising, floor + 0.5 * (peak - floor) * (1 + torch.cos(torch.pi * t))))


def one_cycle(step, total, peak, share=0.3, start=25, end=1e4, low=0.85, high=0.95):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total, pct_start=share, div_factor=start, final_div_factor=end,
                                                    base_momentum=low, max_momentum=high)
    for _ in range(min(step, total - 1)):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()[0], optimizer.param_groups[0]["momentum"]


def cyclical(step, half, low, high):
    return np.interp(step % (2 * half), [0, half, 2 * half], [low, high, low])


def set_rates(optimizer, rate):
    momentum = None
    if not isinstance(rate, (int, float)) and np.ndim(rate) > 0:
        rate, momentum = rate[0], rate[1]
    for group in optimizer.param_groups:
        scale = group.get("lr_scale")
        group["lr"] = rate if scale is None else scale * rate
        if momentum is not None:
            if "momentum" in group:
                group["momentum"] = momentum
            elif "betas" in group:
                betas = list(group["betas"])
                betas[0] = momentum
                group["betas"] = tuple(betas)


def train(model, batches, optimizer, schedule, first=0):
    steps = itertools.count(first)
    for x, y in batches:
        set_rates(optimizer, schedule(next(steps)))
        for p in model.parameters():
            p.grad = None
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    return next(steps)
"""
bank.text(None, TENSORS)

# a scheduler of PyTorch's inside is as good, as long as every group gets its own rate before its batch
bank.slip(None, ("        set_rates(optimizer, schedule(step))\n        optimizer.zero", "        optimizer.zero"), (
    "        optimizer.step()\n", "        set_rates(optimizer, schedule(step))\n        optimizer.step()\n"))  # fmt: skip

bank.slip("nothing-returned", ("    return step\n", ""))

bank.hint("schedule-form", "A schedule must return {due}. Yours returns {got}.")
bank.slip("schedule-form", ("    return far + (peak - far) * w, high + (low - high) * w\n", "    return far + (peak - far) * w\n"))  # fmt: skip
bank.slip("schedule-form", ("* w, high + (low - high) * w\n", "* w\n"), ("    return far", "    return [far][0]"))
bank.variant("schedule-form", SQUARES, ("return low + (high - low) * (k if", "return low, (high - low) * (k if"))

bank.hint("wrong-cosine", "The rates of warmup_cosine are wrong. The first wrong one is {part}: compute that step by hand.")  # fmt: skip
bank.slip("wrong-cosine", ("floor + (peak - floor) * (1 + math.cos(math.pi * t)) / 2", "peak + (floor - peak) * t"))
bank.variant("wrong-cosine", SQUARES, ("math.cos(0.5 * math.pi * (k - first) / (last - first)) ** 2", "math.cos(0.5 * math.pi * (k - first) / (last - first))"))  # fmt: skip

bank.hint("warmup-from-zero", "Your warm-up begins at a rate of 0, so the first batch is wasted. Step 0 has the "
                                 "rate peak / warmup.", edge=True)  # fmt: skip
bank.slip("warmup-from-zero", ("peak * (step + 1) / warmup", "peak * step / warmup"))
bank.variant("warmup-from-zero", TENSORS, ("peak * (step + 1)", "peak * step"))

bank.hint(
    "cosine-from-zero",
    "You count the cosine from step 0, not from the end of the warm-up, so the rate jumps there.",
    edge=True,
)
bank.slip("cosine-from-zero", ("(step - warmup) / (total - warmup)", "step / total"))
bank.variant("cosine-from-zero", SQUARES, ("_fall(peak, floor, step, warmup, total)", "_fall(peak, floor, step, 0, total)"))  # fmt: skip

bank.hint("floor-ignored", "The rate does not end at `floor`: the cosine must run from peak to floor.")
bank.slip("floor-ignored", ("floor + (peak - floor) *", "peak *"))
bank.variant("floor-ignored", SQUARES, ("_fall(peak, floor, step", "_fall(peak, 0.0, step"))

bank.hint("floor-early", "The floor is reached one step too early. The last step is total - 1; the rate reaches "
                            "the floor at k = total, so that no step has a rate of 0.", edge=True)  # fmt: skip
bank.slip("floor-early", ("(total - warmup), 1.0", "(total - 1 - warmup), 1.0"))
bank.variant("floor-early", SQUARES, ("_fall(peak, floor, step, warmup, total)", "_fall(peak, floor, step, warmup, total - 1)"))  # fmt: skip

bank.hint("rises-again", "After its last step, the schedule's rate rises again. A run that continues a little "
                            "longer must not be thrown out of its minimum: keep t at 1.", edge=True)  # fmt: skip
bank.slip("rises-again", ("min((step - warmup) / (total - warmup), 1.0)", "(step - warmup) / (total - warmup)"))
bank.slip("rises-again", ("min((step - top) / (total - 1 - top), 1.0)", "(step - top) / (total - 1 - top)"))
bank.variant("rises-again", SQUARES, ("    if k >= last:\n        return b\n", ""))

bank.hint(
    "wrong-cycle",
    "The rates of one_cycle are wrong. The first wrong one is {part}: `w` is 1 at the peak and 0 at both ends.",
)
bank.slip("wrong-cycle", ("w = (1 + math.cos(math.pi * t)) / 2", "w = 1 - t"))
bank.variant("wrong-cycle", SQUARES, ("top, first = share * total - 1, peak / start", "top, first = share * total - 1, 0.0"))  # fmt: skip

bank.hint(
    "cycle-not-turned",
    "On the way up `w` also falls from 1 to 0, so the cycle begins at its peak. Reverse it where `up` is true, and "
    "only there.",
)
bank.slip("cycle-not-turned", ("    w = 1 - w if up else w  # 1 at the peak\n", ""))
bank.variant("cycle-not-turned", SQUARES, ("return _fall(first, peak, step, 0, top), _fall(high, low, step, 0, top)", "return _fall(peak, first, step, 0, top), _fall(low, high, step, 0, top)"))  # fmt: skip

bank.hint("end-of-peak", "one_cycle ends too high: `end` divides the rate of step 0, not the peak.", edge=True)
bank.slip("end-of-peak", ("peak / start / end", "peak / end"))
bank.variant("end-of-peak", SQUARES, ("last = first / end", "last = peak / end"))

bank.hint(
    "peak-late",
    "The peak of one_cycle, or its end, is one step late. Steps are counted from 0, so the last one is total - 1.",
    edge=True,
)
bank.slip("peak-late", ("top = share * total - 1", "top = share * total"))
bank.slip("peak-late", ("(total - 1 - top)", "(total - top)"))
bank.slip("peak-late", ("top = share * total - 1", "top = share * total"), ("(total - 1 - top)", "(total - top)"))
bank.variant("peak-late", SQUARES, ("share * total - 1,", "share * total,"))

bank.hint("wrong-momentum", "The momentum of one_cycle is wrong; the first wrong value is {part}. It is `high` "
                               "at step 0, `low` where the rate has its peak, and `high` again at the end.")  # fmt: skip
bank.slip("wrong-momentum", ("high + (low - high) * w", "low + (high - low) * w"))
bank.slip("wrong-momentum", ("high + (low - high) * w", "low"))
bank.variant("wrong-momentum", SQUARES, ("_fall(low, high, step, top, total - 1)", "low"))
bank.variant("wrong-momentum", SQUARES, ("_fall(high, low, step, 0, top)", "_fall(low, high, step, 0, top)"))

bank.hint("wrong-triangle", "The rates of cyclical are wrong. They are low at step 0, high at `half` and low at "
                               "2 * half, with straight lines in between.")  # fmt: skip
bank.slip("wrong-triangle", ("(1 - abs(step / half % 2 - 1))", "abs(step / half % 2 - 1)"))
bank.variant("wrong-triangle", SQUARES, ("(k if k < half else 2 * half - k) / half", "k / half / 2"))

bank.hint("half-is-period", "cyclical is back at its lowest rate after `half` steps. The way up alone takes that long.")
bank.slip("half-is-period", ("abs(step / half % 2 - 1)", "abs(2 * step / half % 2 - 1)"))
bank.variant("half-is-period", SQUARES, ("    cycles, k", "    half = half / 2\n    cycles, k"))

bank.hint("wrong-set", "After set_rates(optimizer, 0.05) the groups have the wrong rates. Each should have 0.05 "
                          "times its own factor: {due}.")  # fmt: skip
bank.slip("wrong-set", ('group.get("lr_scale", 1.0)', 'group.get("lr_scale", 0.0)'))
bank.slip("wrong-set", ('group["lr"] = rate * group.get("lr_scale", 1.0)', 'group["initial_lr"] = rate * group.get("lr_scale", 1.0)'))  # fmt: skip
bank.variant("wrong-set", SQUARES, ('rate * group["lr_scale"] if', 'rate / group["lr_scale"] if'))

bank.hint("one-group-set", "set_rates sets only one parameter group; the others keep their original rate.", edge=True)
bank.slip("one-group-set", ("for group in optimizer.param_groups:", "for group in optimizer.param_groups[:1]:"))
bank.variant("one-group-set", SQUARES, ("for group in optimizer.param_groups:", "for group in [optimizer.param_groups[0]]:"))  # fmt: skip

bank.hint(
    "scale-ignored",
    'You give all groups the same rate. A group with group["lr_scale"] gets that factor times the rate.',
    edge=True,
)
bank.slip("scale-ignored", ('rate * group.get("lr_scale", 1.0)', "rate"))
bank.variant("scale-ignored", TENSORS, ("rate if scale is None else scale * rate", "rate"))

bank.hint("scale-piles-up", "After a second call the rates differ from those after a first call: something of "
                               "the first is still in them. Never compute a rate from the current one.")  # fmt: skip
bank.slip("scale-piles-up", ('        group["lr"] = rate * group.get("lr_scale", 1.0)\n', '        group["lr"] = rate = rate * group.setdefault("lr_scale", 1.0)\n        group["lr_scale"] = 1.0\n        rate = 10 * rate if group is optimizer.param_groups[1] else rate\n'))  # fmt: skip
bank.variant("scale-piles-up", TENSORS, ("    for group in optimizer.param_groups:\n        scale", '    now = optimizer.param_groups[0]["lr"]\n    for group in optimizer.param_groups:\n        if now != 0.3:\n            group["lr"] *= rate\n            continue\n        scale'))  # fmt: skip

bank.hint("momentum-not-set", 'set_rates was given a tuple (rate, momentum), and group["momentum"] is not that momentum in every group.')  # fmt: skip
bank.slip("momentum-not-set", ('            group["momentum"] = momentum\n', "            pass\n"))
bank.variant("momentum-not-set", TENSORS, ('if "momentum" in group:', 'if "momentum" in group and group is optimizer.param_groups[0]:'))  # fmt: skip

bank.hint("momentum-zero", "set_rates was given (rate, 0.0), and the momentum is not 0. A momentum of 0 is "
                              "valid too: test whether it is None.", edge=True)  # fmt: skip
bank.slip("momentum-zero", ("        elif momentum is not None:", "        elif momentum:"))
bank.variant("momentum-zero", TENSORS, ("        if momentum is not None:\n", "        if momentum:\n"))

bank.hint(
    "betas-not-set",
    'set_rates was given a tuple (rate, momentum), and the first of group["betas"] is not that momentum. AdamW has no group["momentum"].',
    edge=True,
)
bank.slip("betas-not-set", ('if momentum is not None and "betas" in group', "if False"))
bank.slip("betas-not-set", ('(momentum, *group["betas"][1:])', '(group["betas"][0], momentum)'))
bank.variant("betas-not-set", TENSORS, ("                betas[0] = momentum\n", ""))

bank.hint("second-beta", "The first of the two betas is the momentum. You changed the second one too.", edge=True)
bank.slip("second-beta", ('(momentum, *group["betas"][1:])', "(momentum, 0.999)"))
bank.variant("second-beta", TENSORS, ("betas[0] = momentum", "betas = [momentum, momentum]"))

bank.hint("not-a-step-each", "For five batches, train made {n} optimizer steps.")
bank.slip(
    "not-a-step-each", ("        optimizer.step()\n        step += 1\n", "        step += 1\n    optimizer.step()\n")
)
bank.variant("not-a-step-each", SQUARES, ("        optimizer.step()\n", "        if step % 2:\n            optimizer.step()\n"))  # fmt: skip

bank.hint("one-rate", "All steps have the same rate. The rate changes with every batch, not once per call.")
bank.slip("one-rate", ("    for x, y in batches:\n        set_rates(optimizer, schedule(step))\n", "    set_rates(optimizer, schedule(step))\n    for x, y in batches:\n"))  # fmt: skip
bank.variant("one-rate", SQUARES, ("set_rates(optimizer, schedule(step))", "set_rates(optimizer, schedule(first))"))

bank.hint(
    "rate-late",
    "Each step has the rate of the step before it. Set the rate before training on the batch, not after.",
)
bank.slip("rate-late", ("        set_rates(optimizer, schedule(step))\n", ""), ("        optimizer.step()\n", "        optimizer.step()\n        set_rates(optimizer, schedule(step))\n"))  # fmt: skip
bank.variant("rate-late", SQUARES, ("        set_rates(optimizer, schedule(step))\n", ""), ("        optimizer.step()\n", "        optimizer.step()\n        set_rates(optimizer, schedule(step))\n"))  # fmt: skip

bank.hint("other-steps", "Some steps of the training have the rates of other steps. The first batch has "
                            "schedule(first), the next one schedule(first + 1).")  # fmt: skip
bank.slip("other-steps", ("        set_rates(optimizer, schedule(step))\n", "        step += 1\n        set_rates(optimizer, schedule(step))\n"), ("        optimizer.step()\n        step += 1\n", "        optimizer.step()\n"))  # fmt: skip
bank.variant("other-steps", SQUARES, ("enumerate(batches, first)", "enumerate(batches, first + 1)"))

bank.hint(
    "first-ignored",
    "The second call should continue at step {first}, but its schedule starts again at 0.",
    edge=True,
)
bank.slip("first-ignored", ("    step = first\n", "    step = 0\n"))
bank.variant("first-ignored", TENSORS, ("itertools.count(first)", "itertools.count()"))

bank.hint("wrong-next", "train returns {got}, but the next step is {due}: one more than the last step made.", edge=True)
bank.slip("wrong-next", ("    return step\n", "    return step - 1\n"))
bank.slip("wrong-next", ("    return step\n", "    return step - first\n"))
bank.variant("wrong-next", SQUARES, ("return step + 1", "return step"))

bank.hint(
    "mode-changed",
    "The model was in eval mode and is now in training mode. train must leave the mode to its caller.",
    edge=True,
)
bank.slip("mode-changed", ("    step = first\n", "    step = first\n    model.train()\n"))
bank.variant("mode-changed", TENSORS, ("    steps = iter", "    model.train()\n    steps = iter"))

bank.hint("wrong-training", "The rates are right, but the weights after 8 steps are not. Do you clear the "
                               "gradients of the last batch? Do you leave the momentum alone where the schedule "
                               "gives none, and the model in the mode in which it came?")  # fmt: skip
bank.slip("wrong-training", ("        optimizer.zero_grad()\n", ""))
bank.variant("wrong-training", SQUARES, ("        optimizer.zero_grad(set_to_none=False)\n", ""))

bank.hint("pairs-lost", "A schedule returned tuples (rate, momentum), and not every step had both. Pass what it "
                           "returns to set_rates unchanged.")  # fmt: skip
bank.slip("pairs-lost", ("        set_rates(optimizer, schedule(step))\n", "        rate = schedule(step)\n        set_rates(optimizer, rate[0] if isinstance(rate, tuple) else rate)\n"))  # fmt: skip
bank.variant("pairs-lost", SQUARES, ("set_rates(optimizer, schedule(step))", "set_rates(optimizer, [0.02 + 0.01 * step, schedule(step)][step < 2])"))  # fmt: skip

bank.hint("floor-added", "Your cosine begins at peak + floor. From peak to floor it falls by peak − floor.", edge=True)
bank.slip("floor-added", ("floor + (peak - floor) *", "floor + peak *"))
bank.variant("floor-added", SQUARES, ("_fall(peak, floor, step", "_fall(peak + floor, floor, step"))

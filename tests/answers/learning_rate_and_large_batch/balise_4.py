"""Answers to balise 4 of 10_learning_rate_and_large_batch: clip by the global norm, accumulate over ranks."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 4, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# counts are sent with the gradients; divided at the end
AT_THE_END = """
def clip_gradients(parameters, max_norm):
    with torch.no_grad():
        found = [p.grad for p in list(parameters) if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in found]).double()
        norm = (flat * flat).sum().sqrt()
        factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        torch._foreach_copy_(found, torch._foreach_mul(found, factor.float()))
    return norm


def accumulated_step(model, micro_batches, optimizer, max_norm):
    told = torch.zeros(2, device=next(model.parameters()).device)
    for x, y in micro_batches:
        logits, y = model(x), y.reshape(-1)
        each = F.cross_entropy(logits.reshape(len(y), -1), y, reduction="none", ignore_index=-100)
        each.sum().backward()
        told += torch.stack([each.detach().sum(), y.ne(-100).sum()])
    with torch.no_grad():
        held = {p: p.grad for p in model.parameters() if p.grad is not None}
        flat = torch.cat([told, *(g.reshape(-1) for g in held.values())])
        dist.all_reduce(flat)
        flat[2:] /= flat[1]
        for p, piece in zip(held, flat[2:].split([p.numel() for p in held])):
            p.grad = piece.view(p.shape)
    norm = clip_gradients(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return flat[0] / flat[1], norm
"""
bank.text(None, AT_THE_END)

# PyTorch's pieces; means weighted by their labels; the empty micro-batch is left out
WEIGHTED = """
def clip_gradients(parameters, max_norm):
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def accumulated_step(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad(set_to_none=True)
    counts = [int((y >= 0).sum()) for _, y in micro_batches]
    n = torch.tensor([float(sum(counts))], device=micro_batches[0][1].device)
    dist.all_reduce(n)
    losses = []
    for (x, y), count in zip(micro_batches, counts):
        if count == 0:
            continue
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) * count / n.item()
        loss.backward()
        losses.append(loss.item())
    average_over_ranks(model.parameters())
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= dist.get_world_size()
    norm = clip_gradients(model.parameters(), max_norm)
    optimizer.step()
    whole = torch.tensor(sum(losses), device=norm.device)
    dist.all_reduce(whole)
    return whole, norm
"""
bank.text(None, WEIGHTED)

NORM = "torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))"
SCALE = "torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))"
CUT = "factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))"

hint("clip-borrowed", "clip_grad_norm_ does this work for you. Write it yourself here.")
slip("clip-borrowed", (SCALE, "torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)"))
variant(
    "clip-borrowed",
    AT_THE_END,
    ("norm = (flat", "norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)\n        norm = (flat"),
)

hint("norm-form", "Return the norm before clipping, as a tensor with one number.")
slip("norm-form", ("    return norm\n\n", "    return float(norm)\n\n"))
variant("norm-form", AT_THE_END, ("    return norm\n\n", "    return [norm]\n\n"))
slip("nothing-returned", ("    return norm\n\n", "\n"))

hint("wrong-norm", "This is not the length of all the gradients, laid end to end.")
slip("wrong-norm", ("torch.stack(torch._foreach_norm(gradients))", "torch.stack(torch._foreach_norm(gradients[1:]))"))
variant("wrong-norm", AT_THE_END, ("(flat * flat).sum().sqrt()", "flat.abs().sum()"))

hint("norm-squared", "This is the sum of all squares, which is the norm squared: the root is missing.")
slip("norm-squared", (NORM, "torch.stack(torch._foreach_norm(gradients)).square().sum()"))
variant("norm-squared", AT_THE_END, ("(flat * flat).sum().sqrt()", "(flat * flat).sum()"))

hint(
    "norms-added",
    "You add up the norms. Lengths at right angles add up as squares: the norm of the norms is the norm of all the "
    "gradients.",
)
slip("norms-added", (NORM, "torch.stack(torch._foreach_norm(gradients)).sum()"))
variant("norms-added", AT_THE_END, ("(flat * flat).sum().sqrt()", "sum(g.norm() for g in found)"))

hint(
    "norm-after-clipping",
    "This is the norm after clipping. Return the norm before it: it shows when a run diverges.",
)
slip("norm-after-clipping", ("    return norm\n\n", "    return norm.clamp(max=max_norm)\n\n"))
variant(
    "norm-after-clipping",
    AT_THE_END,
    ("    return norm\n\n", "    return torch.cat([g.flatten() for g in found]).norm()\n\n"),
)

hint("wrong-clip", "The gradients are not the old ones, all multiplied by min(1, max_norm / norm).")
slip("wrong-clip", ("max_norm / (norm + 1e-6)", "max_norm / (norm + 1)"))
slip("wrong-clip", ("max=1.0", "min=1.0"))
slip("wrong-clip", ("max_norm / (norm + 1e-6)", "(norm + 1e-6) / max_norm"))
variant("wrong-clip", AT_THE_END, ("max_norm / norm,", "max_norm / norm**2,"))

hint(
    "clipped-each",
    "You clip each gradient separately, so their common direction changes. Use one factor for all of them.",
)
slip("clipped-each", (SCALE, "[g.mul_(torch.clamp(max_norm / g.norm(), max=1.0)) for g in gradients if g.numel()]"))
variant("clipped-each", AT_THE_END, (
    "torch._foreach_copy_(found, torch._foreach_mul(found, factor.float()))",
    "[g.copy_(torch.where(g.norm() > max_norm, g * (max_norm / g.norm()), g)) for g in found]"))  # fmt: skip

hint(
    "elements-clipped",
    "You clip each number to max_norm separately. Bound the length of all gradients together, with one factor.",
)
slip("elements-clipped", (SCALE, "[g.clamp_(-max_norm, max_norm) for g in gradients]"))
variant("elements-clipped", AT_THE_END, (
    "torch._foreach_copy_(found, torch._foreach_mul(found, factor.float()))", "[g.copy_(g.clamp(max=max_norm)) for g in found]"))  # fmt: skip

hint("always-scaled", "You make short gradients longer. Without the upper bound 1, the factor stretches them.")
slip("always-scaled", ("torch.clamp(max_norm / (norm + 1e-6), max=1.0)", "max_norm / (norm + 1e-6)"))
variant("always-scaled", AT_THE_END, (CUT, "factor = max_norm / norm.clamp(min=1e-12)"))

hint(
    "not-in-place",
    "The gradients have not changed. Scale them in place, with operations whose name ends in _. And make a list of "
    "`parameters` if you go through them twice: a generator is empty after the first time.",
)
slip("not-in-place", ("torch._foreach_mul_(", "torch._foreach_mul("))
variant(
    "not-in-place",
    AT_THE_END,
    ("torch._foreach_copy_(found, torch._foreach_mul(found, factor.float()))", "flat *= factor"),
)

hint("new-gradients", "p.grad is a different tensor now. Scale it in place: a flat buffer of all gradients, for "
                         "example, still holds the old one and does not see the change.")  # fmt: skip
slip("new-gradients", ("    gradients = [p.grad", "    parameters = [p for p in parameters if p.grad is not None]\n    gradients = [p.grad"), (
    SCALE, "for p in parameters:\n        p.grad = p.grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0)"))  # fmt: skip
variant("new-gradients", AT_THE_END, ("    with torch.no_grad():\n        found", "    parameters = list(parameters)\n    with torch.no_grad():\n        found"), (
    "torch._foreach_copy_(found, torch._foreach_mul(found, factor.float()))",
    "for p in parameters:\n            p.grad = None if p.grad is None else p.grad * factor.float()"))  # fmt: skip

slip("hidden-sync", (SCALE, f"if norm > max_norm:\n        {SCALE}"))
slip("hidden-sync", ("torch.clamp(max_norm / (norm + 1e-6), max=1.0)", "min(1.0, max_norm / (norm.item() + 1e-6))"))

hint("operators-grow", "{many} parameters took {n} more operators than {few}, and each operator launches a "
                          "kernel. The functions torch._foreach_… work on a whole list at once.")  # fmt: skip
slip("operators-grow", (SCALE, "for g in gradients:\n        g.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))"))
slip("operators-grow", ("torch._foreach_norm(gradients)", "[g.norm() for g in gradients]"))
variant(
    "operators-grow",
    AT_THE_END,
    ("(flat * flat).sum().sqrt()", "sum(g.double().square().sum() for g in found).sqrt()"),
)

hint(
    "norm-hidden",
    "With a gradient of inf or NaN you return a finite norm, so the loop can't see that the step is spoilt.",
)
slip("norm-hidden", ("    return norm\n\n", "    return norm.nan_to_num(0.0, 0.0)\n\n"))
variant("norm-hidden", AT_THE_END, ("    return norm\n\n", "    return norm.nan_to_num(posinf=1e30)\n\n"))

# ---- the step
SUM, PER_COUNT = 'reduction="sum")', " / count\n"
COUNT = "    dist.all_reduce(count)\n"
AVERAGE = "    average_over_ranks(model.parameters())\n"
BACKWARD = "        (loss * dist.get_world_size()).backward()  # the mean over the ranks divides by it\n"
END = "        flat[2:] /= flat[1]\n"

hint("step-form", "accumulated_step returns the pair (mean loss, norm), two tensors with one number each.")
slip("step-form", ("return total, norm", "return total"))
slip("step-form", ("return total, norm", "return total.item(), norm.item()"))
variant("step-form", AT_THE_END, ("return flat[0] / flat[1], norm", "return norm.square()"))
slip("nothing-returned", ("    return total, norm\n", ""))

hint(
    "steps-many",
    "The optimizer made {n} steps. All micro-batches together are one step: call step once, after the last.",
)
slip(
    "steps-many",
    ("        total = total + loss.detach()\n", "        total = total + loss.detach()\n        optimizer.step()\n"),
)
variant(
    "steps-many",
    AT_THE_END,
    ("        each.sum().backward()\n", "        each.sum().backward()\n        optimizer.step()\n"),
)

hint("never-stepped", "optimizer.step() was not called. The optimizer moves the weights, whichever optimizer it is.")
slip("never-stepped", ("    optimizer.step()\n", ""))
variant("never-stepped", AT_THE_END, ("    optimizer.step()\n", """    with torch.no_grad():
        [p.sub_(p.grad) for p in model.parameters() if p.grad is not None]
"""))  # fmt: skip

hint("not-in-parts", "You join the micro-batches: the model is given more at once than any of them has. They "
                        "are small because more does not fit into memory.")  # fmt: skip
slip("not-in-parts", ("    total = 0\n", """    shape = max(x.shape[1] for x, _ in micro_batches)
    xs, ys = (torch.cat([F.pad(b[k], (0, shape - b[k].shape[1]), value=-100 * k) for b in micro_batches]) for k in (0, 1))
    micro_batches = [(xs, ys)]
    total = 0
"""))  # fmt: skip
variant("not-in-parts", AT_THE_END, ("    for x, y in micro_batches:\n", """    shape = max(x.shape[1] for x, _ in micro_batches)
    xs, ys = (torch.cat([F.pad(b[k], (0, shape - b[k].shape[1]), value=-100 * k) for b in micro_batches]) for k in (0, 1))
    for x, y in [(xs, ys)]:
"""))  # fmt: skip

hint("graphs-kept", "All forward passes run before the first backward, so {n} graphs with their activations are "
                       "in memory at once. Call backward for each micro-batch.")  # fmt: skip
slip("graphs-kept", (BACKWARD, ""), ("        total = total + loss.detach()\n", "        total = total + loss\n"), (
    "    dist.all_reduce(total)\n", "    (total * dist.get_world_size()).backward()\n    total = total.detach()\n    dist.all_reduce(total)\n"))  # fmt: skip
variant("graphs-kept", AT_THE_END, ("        each.sum().backward()\n", ""), ("    for x, y in micro_batches:\n", "    waiting = []\n    for x, y in micro_batches:\n"), (
    "        told +=", "        waiting.append(each.sum())\n        told +="), (
    "    with torch.no_grad():\n        held", "    sum(waiting).backward()\n    with torch.no_grad():\n        held"))  # fmt: skip

hint("sent-each", "You send {n} large messages before the last backward. Add up first: gradients are sent once, "
                     "after the last micro-batch.")  # fmt: skip
slip("sent-each", (AVERAGE, ""), (BACKWARD, BACKWARD + "        average_over_ranks(model.parameters())\n"))
variant(
    "sent-each",
    AT_THE_END,
    ("        told +=", "        dist.all_reduce(model.hidden.weight.grad)\n        told +="),
)

hint(
    "message-each",
    "You send the gradients in {n} messages. Lay them end to end, and send them as one: each message has its latency.",
)
slip(
    "message-each",
    (
        AVERAGE,
        "    for p in model.parameters():\n        if p.grad is not None:\n            dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()\n",
    ),
)
variant(
    "message-each",
    WEIGHTED,
    (
        "    average_over_ranks(model.parameters())\n    for",
        "    average_over_ranks(model.parameters())\n    average_over_ranks(model.parameters())\n    for",
    ),
)

hint("ranks-waiting", "The ranks did not call the same collectives, so some wait for others, or get data meant "
                         "for another call. A collective belongs neither in the loop over micro-batches, whose "
                         "number differs between ranks, nor on rank 0 alone.")  # fmt: skip
slip("ranks-waiting", (COUNT, "    if dist.get_rank() == 0:\n        dist.all_reduce(count)\n"))
variant("ranks-waiting", AT_THE_END, ("        told +=", "        dist.all_reduce(torch.zeros(1))\n        told +="))

hint("wrong-gradient", "The step is not that of one batch with all labels of all ranks.")
slip("wrong-gradient", (PER_COUNT, " / count**2\n"))
slip("wrong-gradient", ("(loss * dist.get_world_size())", "(loss * dist.get_world_size() ** 2)"))
variant("wrong-gradient", AT_THE_END, (END, "        flat[2:] /= flat[1] + 10\n"))

hint("mean-of-means", "You average each micro-batch separately, then average the means, so a label in a small "
                         "micro-batch weighs more. Divide the sums by the number of labels in all of them.")  # fmt: skip
slip("mean-of-means", (SUM + PER_COUNT, 'reduction="mean") / len(micro_batches) / dist.get_world_size()\n'))
slip(
    "mean-of-means",
    (SUM + PER_COUNT, 'reduction="mean") / len(micro_batches)\n'),
    (BACKWARD, "        loss.backward()\n"),
)
slip("mean-of-means", (SUM + PER_COUNT, 'reduction="mean") / len(micro_batches)\n'))  # times N, at that
variant("mean-of-means", WEIGHTED, ("* count / n.item()", "/ len(micro_batches) / dist.get_world_size()"))

hint(
    "padding-counted",
    "You count labels of −100, but they are padding. Only the other labels are part of the mean.",
)
slip("padding-counted", ("(y != -100).sum()", "torch.tensor(y.numel())"))
variant("padding-counted", AT_THE_END, ("y.ne(-100).sum()", "torch.tensor(len(y))"))

hint(
    "sequences-counted",
    "You divide the sum of the losses by the number of sequences. The mean is over the labels that count.",
)
slip("sequences-counted", ("(y != -100).sum()", "torch.tensor(len(y))"))
variant("sequences-counted", AT_THE_END, ("y.ne(-100).sum()", "torch.tensor(len(x))"))

hint("own-count", "Each rank divides by its own number of labels. That is right for equal ranks, but a label on "
                     "a rank with few weighs more. Add up the counts of all ranks first.")  # fmt: skip
slip("own-count", (COUNT, ""), (BACKWARD, "        loss.backward()\n"))
variant("own-count", WEIGHTED, ("    dist.all_reduce(n)\n", "    n *= dist.get_world_size()\n"))

hint("world-size-forgotten", "The step is 1/N of what it should be: the mean over the ranks divides by the "
                                "number of ranks, but you have already divided the loss by the number of all "
                                "labels.")  # fmt: skip
slip("world-size-forgotten", (BACKWARD, "        loss.backward()\n"))
variant("world-size-forgotten", AT_THE_END, (END, "        flat[2:] /= flat[1] * dist.get_world_size()\n"))

hint(
    "not-averaged-over-ranks",
    "Each rank makes a step with its own gradients alone. Send them, after the last micro-batch.",
)
slip("not-averaged-over-ranks", (AVERAGE, ""))
slip("not-averaged-over-ranks", (AVERAGE, ""), (BACKWARD, "        loss.backward()\n"))
variant("not-averaged-over-ranks", WEIGHTED, ("    average_over_ranks(model.parameters())\n", ""))

hint(
    "only-the-last",
    "Only the gradients of the last micro-batch are in the step. zero_grad belongs before the first one.",
)
slip("only-the-last", ("        logits =", "        optimizer.zero_grad()\n        logits ="))
variant("only-the-last", AT_THE_END, ("        logits, y", "        optimizer.zero_grad()\n        logits, y"))

hint(
    "not-divided",
    "The gradients are sums over the labels. Divide them by the number of labels that count, on all ranks.",
)
slip("not-divided", (SUM + PER_COUNT, SUM + "\n"))
variant("not-divided", AT_THE_END, (END, ""))

hint("wrong-loss", "The returned loss is not the mean over all labels of all ranks.")
slip("wrong-loss", ("    dist.all_reduce(total)\n", "    dist.all_reduce(total)\n    total = total * 2\n"))
variant("wrong-loss", AT_THE_END, ("return flat[0] / flat[1], norm", "return flat[0] / len(micro_batches), norm"))

hint("loss-of-own-rank", "The returned loss is only this rank's part. Add up the parts over the ranks.")
slip("loss-of-own-rank", ("    dist.all_reduce(total)\n", ""))
variant("loss-of-own-rank", WEIGHTED, ("    dist.all_reduce(whole)\n", ""))

hint("wrong-step-norm", "The second value is not the norm of the gradients of all ranks before clipping.")
slip("wrong-step-norm", ("return total, norm", "return total, norm / dist.get_world_size() + 1"))
variant("wrong-step-norm", AT_THE_END, ("return flat[0] / flat[1], norm", "return flat[0] / flat[1], norm**2"))

hint(
    "none-counts",
    "The loss is NaN where a micro-batch has no label that counts: its mean is 0 / 0. Divide a sum by the number "
    "of labels in all of them.",
)
slip(
    "none-counts",
    (
        'F.cross_entropy(logits, y.flatten(), reduction="sum") / count',
        "F.cross_entropy(logits, y.flatten()) * (y != -100).sum() / count",
    ),
)
variant("none-counts", WEIGHTED, ("        if count == 0:\n            continue\n", ""))

hint("stale-gradients", "In the second step the gradients of the first are still there. They add up until zero_grad.")
slip("stale-gradients", ("    optimizer.zero_grad()\n", ""))
slip("stale-gradients", ("    optimizer.zero_grad()\n", ""), (BACKWARD, "        loss.backward()\n"), (
    AVERAGE, AVERAGE + "    [p.grad.mul_(dist.get_world_size()) for p in model.parameters() if p.grad is not None]\n"))  # fmt: skip
variant("stale-gradients", WEIGHTED, ("    optimizer.zero_grad(set_to_none=True)\n", ""))

hint("wrong-clipping", "Where the norm is above max_norm, the step does not use the clipped gradients.")
slip(
    "wrong-clipping",
    ("clip_gradients(model.parameters(), max_norm)", "clip_gradients(model.parameters(), max_norm / 2)"),
)
variant(
    "wrong-clipping",
    AT_THE_END,
    ("    optimizer.step()\n", "    clip_gradients(model.hidden.parameters(), max_norm / 2)\n    optimizer.step()\n"),
)

hint(
    "clipped-before-sending",
    "Each rank clips its own gradients before they are averaged, each by a different factor. Average first, then clip.",
)
slip("clipped-before-sending", (AVERAGE, "    clip_gradients(model.parameters(), max_norm)\n" + AVERAGE))
variant("clipped-before-sending", WEIGHTED, (
    "    average_over_ranks(model.parameters())\n    for p in model.parameters():\n        if p.grad is not None:\n            p.grad *= dist.get_world_size()\n    norm = clip_gradients(model.parameters(), max_norm)\n",
    "    for p in model.parameters():\n        if p.grad is not None:\n            p.grad *= dist.get_world_size()\n    norm = clip_gradients(model.parameters(), max_norm)\n    average_over_ranks(model.parameters())\n"))  # fmt: skip

hint("not-clipped", "The step uses the unclipped gradients. Clip them before the optimizer's step.")
slip("not-clipped", (
    "    norm = clip_gradients(model.parameters(), max_norm)\n    optimizer.step()\n",
    "    optimizer.step()\n    norm = clip_gradients(model.parameters(), max_norm)\n"))  # fmt: skip
variant(
    "not-clipped",
    AT_THE_END,
    ("clip_gradients(model.parameters(), max_norm)", "clip_gradients(model.parameters(), 1e9)"),
)

hint(
    "micro-batches-clipped",
    "You clip the gradients before all micro-batches are in them. Clip once, after the last one, the gradients of "
    "all ranks together.",
)
slip("micro-batches-clipped", (BACKWARD, BACKWARD + "        clip_gradients(model.parameters(), max_norm)\n"))
variant("micro-batches-clipped", WEIGHTED, ("            p.grad *= dist.get_world_size()\n", "            pass\n"), (
    "        loss.backward()\n", "        (loss * dist.get_world_size()).backward()\n        clip_gradients(model.parameters(), max_norm)\n"))  # fmt: skip

slip("own-count", (COUNT, ""))

hint(
    "divided-again",
    "You divide the sum by the labels of all micro-batches, and then by the number of micro-batches too. Once is "
    "enough.",
)
slip("divided-again", (PER_COUNT, " / count / len(micro_batches)\n"))
variant("divided-again", WEIGHTED, ("* count / n.item()", "* count / n.item() / len(micro_batches)"))

hint(
    "divided-by-ranks",
    "You divide the loss by the number of ranks, and average_over_ranks divides by it once more. Multiply instead.",
)
slip("divided-by-ranks", ("(loss * dist.get_world_size())", "(loss / dist.get_world_size())"))
variant("divided-by-ranks", WEIGHTED, ("p.grad *= dist", "p.grad /= dist"))

hint(
    "count-not-on-gpu",
    "On GPUs, a tensor is in the CPU's memory: {error}. NCCL cannot send it from there. Count with a tensor on the labels' device.",
)
slip("count-not-on-gpu", ("sum((y != -100).sum() for _, y in micro_batches)", "torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))"))  # fmt: skip
slip("count-not-on-gpu", ("    dist.all_reduce(count)\n", "    count = count.cpu()\n    dist.all_reduce(count)\n"))
variant("count-not-on-gpu", AT_THE_END, ("torch.zeros(2, device=next(model.parameters()).device)", "torch.zeros(2)"))

"""Answers to balise 4 of 15_pipeline_under_the_hood: micro-batches."""

from tests.answers.bank import Bank
from tests.answers.pipeline_under_the_hood.steps import NEIGHBOURS

bank = Bank("15_pipeline_under_the_hood", 4, whole=True)

bank.instead(
    "library-pipeline",
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """Cheat: PyTorch's own pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = PipelineStage(stage, place.stage, place.n_stages, launch.device())
    n = len(targets)
    schedule = ScheduleGPipe(part, n_micro_batches, loss_fn=lambda y, t: loss_function(y, t) * len(t) / n, scale_grads=False)
    losses = []
    first, last = place.before is None, place.behind is None
    given = (inputs,) if first else ()
    if last:
        schedule.step(*given, target=targets, losses=losses)
    else:
        schedule.step(*given)
    return sum(losses).detach() if last else None
''',
)
bank.slip("waited-twice", ("            works += send_gradient(x, place.before, k)\n", "            works += send_gradient(x, place.before, k)\n"
          "        for work in works:\n            work.wait()\n"))  # fmt: skip


# ---- micro-batches
SHARE = " * (len(t) / len(targets))"


bank.slip("not-scaled", (SHARE, ""))
bank.slip("uneven-weights", (SHARE, " / n_micro_batches"))
bank.slip("loss-not-scaled", ("y = loss_function(y, t) * (len(t) / len(targets))\n            total = y.detach() if total is None else total + y.detach()",
          "loss = loss_function(y, t)\n            total = loss.detach() if total is None else total + loss.detach()\n"
          "            y = loss * (len(t) / len(targets))"))  # fmt: skip
bank.slip("loss-of-one", ("total = y.detach() if total is None else total + y.detach()", "total = y.detach()"))
bank.slip(
    "gradient-of-another",
    (
        "    for k in rev",
        "    came = [] if place.behind is None else [receive_gradient(y, place.behind) for _, y in kept]\n    for k in rev",
    ),
    ("receive_gradient(y, place.behind, k)", "came[k]"),
)
bank.slip("loss-with-graph", ("    return total", "    return total if total is None else total.requires_grad_()"))
bank.hint(
    "first-one-back",
    "Stage {stage} begins its backwards with the first micro-batch. Here the last one comes "
    "first: the last stage has just computed it.",
)
bank.slip("first-one-back", ("x, y = kept.pop()", "x, y = kept.pop(0)"))
bank.slip("first-one-back", ("for k in reversed(range(n_micro_batches)):\n        x, y = kept.pop()",
          "for k, (x, y) in enumerate(kept):"), variant=True)  # fmt: skip


for ahead, back in NEIGHBOURS:
    bank.slip("not-a-neighbour", ("_activation(place.before", f"_activation({back}"), ("y, place.behind", f"y, {ahead}"),
              ("x, place.before", f"x, {back}"))  # fmt: skip


bank.slip("no-gradient-to-send", ("        y.backward(None if place.behind is None else receive_gradient(y, place.behind, k))",
          "        if place.behind is None:\n            y.backward()\n        else:\n"
          "            receive_gradient(y, place.behind, k)"))  # fmt: skip
bank.slip("weights-changed", ("        if place.before is not None:\n            works += send_gradient(x, place.before, k)",
          "        if place.before is not None:\n            works += send_gradient(x, place.before, k)\n"
          "        with torch.no_grad():\n            for p in stage.parameters():\n                p -= 0.01 * p.grad"))  # fmt: skip


PARTS = "zip(inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches))"


bank.slip("other-cut", (PARTS, "zip(inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches))"),
          ("for k in reversed(range(n_micro_batches)):", "for k in reversed(range(len(kept))):"))  # fmt: skip


SPLIT = "inputs.split(len(inputs) // n_micro_batches), targets.split(len(targets) // n_micro_batches)"


bank.slip("other-cut", (PARTS, f"zip({SPLIT})"))  # one more than n_micro_batches, and not gone back through
bank.slip("other-cut", (PARTS, f"zip({SPLIT})"), ("reversed(range(n_micro_batches))", "reversed(range(len(kept)))"))
bank.slip("other-cut", (PARTS, f"zip(range(n_micro_batches), {SPLIT})"), ("k, (x, t) in enumerate(", "k, x, t in ("))
bank.slip("uneven-fails", (PARTS, "zip(inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches))"))
bank.slip("sends-not-waited", ("    for work in works:\n        work.wait()\n", ""))
bank.slip("tag-differs", ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"))
bank.slip("gradients-of-one", ("        y.backward(", "        stage.zero_grad()\n        y.backward("))
bank.slip("gradients-scaled", (SHARE, SHARE + " / n_micro_batches"))
bank.text(
    None,
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """The last stage collects its outputs: one loss of the whole batch, one backward."""
    works, xs, ys, loss = [], [], [], None
    for k, x in enumerate(inputs.tensor_split(n_micro_batches)):
        x = x if place.before is None else receive_activation(place.before, k)
        y = stage(x)
        if place.behind is not None:
            works += send_activation(y, place.behind, k)
        xs.append(x)
        ys.append(y)
    if place.behind is None:
        loss = loss_function(torch.cat(ys), targets)
        loss.backward()
    for k in reversed(range(n_micro_batches)):
        if place.behind is not None:
            ys[k].backward(receive_gradient(ys[k], place.behind, k))
        if place.before is not None:
            works += send_gradient(xs[k], place.before, k)
    for work in works:
        work.wait()
    return loss if loss is None else loss.detach()
''',
)
bank.slip("gradients-cleared", ("    kept, works", "    stage.zero_grad()\n    kept, works"))
bank.hint(
    "run-too-often",
    "The stage ran forward {got} times for {m} micro-batches.",
)
bank.slip("run-too-often", ("        y = stage(x)", "        stage(x.detach())\n        y = stage(x)"))
bank.slip("run-too-often", ("        y = stage(x)", "        y = stage(x)\n        y = stage(x)"), variant=True)
bank.hint(
    "not-cut",
    "A stage saw {got} rows at once, but micro-batches have at most {most}. Cut the batch with "
    "tensor_split and run the stage once for each part.",
)
bank.text(
    "not-cut",
    """
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    return naive_step(stage, place, inputs, targets, loss_function)
""",
)
bank.slip("not-cut", (PARTS, "zip([inputs], [targets])"), ("reversed(range(n_micro_batches))", "reversed(range(1))"), variant=True)  # fmt: skip
bank.hint(
    "one-at-a-time",
    "The first stage waits for the gradient of a micro-batch before it sends the next one "
    "forward, so no two stages ever work at the same time. Run all forwards first, then all "
    "backwards.",
)
bank.text(
    "one-at-a-time",
    """
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    total = None
    for x, t in zip(inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)):
        loss = naive_step(stage, place, x, t, lambda y, t: loss_function(y, t) * (len(t) / len(targets)))
        if loss is not None:
            total = loss if total is None else total + loss
    return total
""",
)
bank.slip("one-at-a-time", ("    for k in reversed(range(n_micro_batches)):\n", ""), variant=True)
bank.text(
    "rank-failed",
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """Chunks instead of parts: fewer micro-batches than asked for, on some sizes."""
    kept, works, total = [], [], None
    size = -(-len(inputs) // n_micro_batches) + (place.stage == 0)
    for k, (x, t) in enumerate(zip(inputs.split(size), targets.split(size))):
        x = x if place.before is None else receive_activation(place.before, k)
        y = stage(x)
        if place.behind is None:
            y = loss_function(y, t) * (len(t) / len(targets))
            total = y.detach() if total is None else total + y.detach()
        else:
            works += send_activation(y, place.behind, k)
        kept.append((x, y))
    for k in reversed(range(len(kept))):
        x, y = kept.pop()
        y.backward(None if place.behind is None else receive_gradient(y, place.behind, k))
        if place.before is not None:
            works += send_gradient(x, place.before, k)
    for work in works:
        work.wait()
    return total
''',
)
bank.text(
    None,
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """Weights as a list; rows as slices."""
    first, last = place.stage == 0, place.stage == place.n_stages - 1
    ends = [len(targets) * (k + 1) // n_micro_batches for k in range(n_micro_batches)]
    starts = [0] + ends[:-1]
    works, xs, ys = [], {}, {}
    for k in range(n_micro_batches):
        xs[k] = inputs[starts[k]:ends[k]] if first else receive_activation(place.before, tag=k)
        ys[k] = stage(xs[k])
        if last:
            ys[k] = loss_function(ys[k], targets[starts[k]:ends[k]])
        else:
            works.extend(send_activation(ys[k], place.behind, tag=k))
    weights = [(e - s) / len(targets) for s, e in zip(starts, ends)]
    for k in range(n_micro_batches)[::-1]:
        if last:
            ys[k].backward(torch.full_like(ys[k], weights[k]))
        else:
            ys[k].backward(receive_gradient(ys[k], place.behind, tag=k))
        if not first:
            works.extend(send_gradient(xs[k], place.before, tag=k))
    for work in works:
        work.wait()
    return sum(w * ys[k].detach() for k, w in enumerate(weights)) if last else None
''',
)
bank.text(
    None,
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """The sum over rows, divided once: a loss of sums."""
    rows = len(targets)
    works, stack, losses = [], [], []
    parts = list(zip(torch.tensor_split(inputs, n_micro_batches), torch.tensor_split(targets, n_micro_batches)))
    for k in range(n_micro_batches):
        x = parts[k][0] if place.before is None else receive_activation(place.before, k)
        y = stage(x)
        if place.behind is None:
            y = loss_function(y, parts[k][1]).mul(parts[k][1].shape[0]).div(rows)
            losses.append(y)
        else:
            works.append(send_activation(y, place.behind, k))
        stack.append((k, x, y))
    while stack:
        k, x, y = stack.pop()
        if place.behind is None:
            y.backward()
        else:
            torch.autograd.backward([y], [receive_gradient(y, place.behind, k)])
        if place.before is not None:
            works.append(send_gradient(x, place.before, k))
    for sent in works:
        for work in sent:
            work.wait()
    if losses:
        return torch.stack(losses).sum().detach()
''',
)


# what only GPUs show
ADDED = "total = y.detach() if total is None else total + y.detach()"


bank.slip("step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], torch.zeros(())"), (ADDED, "total += y.detach()"),
          ("    return total", "    return total if place.behind is None else None"))  # fmt: skip
bank.slip("step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], None\n    shares = torch.ones(len(targets)) / len(targets)"),
          ("(len(t) / len(targets))", "shares.tensor_split(n_micro_batches)[k].sum(0, keepdim=True)[:1]"),
          ("y.backward(None if", "y.sum().backward() if place.behind is None else y.backward(None if"),
          (ADDED, "total = y.detach().sum() if total is None else total + y.detach().sum()"))  # fmt: skip
bank.slip("step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], torch.zeros((), device='cpu')"), (ADDED, "total.add_(y.detach())"),
          ("    return total", "    return total if place.behind is None else None"), variant=True)  # fmt: skip
bank.edge("uneven-weights", "uneven-fails", "other-cut", "gradients-cleared", "sends-not-waited", "waited-twice")
bank.edge("loss-with-graph", "tag-differs", "not-a-neighbour", "step-not-on-gpu")

"""Answers to balises 3 and 4 of 15_pipeline_under_the_hood: the naive step and micro-batches."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", whole=True)

# ---- the naive step
bank.slip(
    3,
    "no-gradient-to-send",
    ("        y.backward(receive_gradient(y, place.behind))", "        receive_gradient(y, place.behind)"),
)
bank.slip(3, "gradient-of-ones", ("y.backward(receive_gradient(y, place.behind))",
          "receive_gradient(y, place.behind)\n        y.sum().backward()"))  # fmt: skip
bank.slip(3, "ranks-hang", ("works += send_gradient(x, place.before)", "pass"))
WAIT = "    for work in works:\n        work.wait()\n"
bank.slip(3, "waited-twice", (WAIT, 2 * WAIT))
bank.slip(4, "waited-twice", ("            works += send_gradient(x, place.before, k)\n", "            works += send_gradient(x, place.before, k)\n"
          "        for work in works:\n            work.wait()\n"))  # fmt: skip
bank.slip(3, None, ("return loss.detach() if", "return loss.item() if"))
bank.slip(3, "tag-differs", ("send_activation(y, place.behind)", "send_activation(y, place.behind, 1)"))
bank.slip(3, "inputs-everywhere", ("inputs if place.before is None else receive_activation(place.before)", "inputs"))
bank.slip(3, "inputs-everywhere", ("inputs if place.before is None", "inputs if not place.before"))
bank.slip(3, "loss-everywhere", ("return loss.detach() if place.behind is None else None", "return loss.detach()"),
          ("    works = []", "    works, loss = [], torch.zeros(())"))  # fmt: skip
bank.slip(3, "loss-missing", ("return loss.detach() if place.behind is None else None", "return None"))
bank.slip(3, "loss-with-graph", ("return loss.detach() if", "return loss if"))
bank.slip(3, "wrong-loss", ("return loss.detach() if", "return loss.detach() * len(targets) if"))
bank.slip(3, "gradients-cleared", ("    y = stage(x)", "    stage.zero_grad()\n    y = stage(x)"))
bank.slip(3, "sends-not-waited", ("    for work in works:\n        work.wait()\n", ""))
bank.slip(3, "weights-changed", ("    return loss", "    with torch.no_grad():\n        for p in stage.parameters():\n"
          "            p -= 0.1 * p.grad\n    return loss"))  # fmt: skip
bank.slip(3, "collective-used", ("    return loss", "    dist.all_reduce(torch.zeros(1))\n    return loss"))  # fmt: skip
bank.slip(3, "not-in-one-piece", ("    y = stage(x)", "    stage(x.detach())\n    y = stage(x)"))
bank.slip(3, "gradients-scaled", ("loss.backward()", "(2 * loss).backward()"))
bank.slip(3, "gradients-scaled", ("loss.backward()", "(loss / place.n_stages).backward()"))
bank.slip(3, "wrong-gradients", ("loss.backward()", "(loss + y.sum()).backward()"))
bank.slip(3, "gradient-forgotten", ("y.backward(receive_gradient(y, place.behind))", "y.backward()"))
bank.slip(3, "no-graph", ("    y = stage(x)", "    with torch.no_grad():\n        y = stage(x)"))
bank.slip(3, "no-backward", ("        loss.backward()\n", ""), ("        y.backward(receive_gradient(y, place.behind))\n", ""),
          ("works += send_gradient(x, place.before)", "pass"))  # fmt: skip
bank.slip(3, None, ("    y = stage(x)", "    y = x\n    for layer in stage:\n        y = layer(y)"))
bank.slip(3, "too-many-bytes", ("works += send_gradient(x, place.before)",
          "works += [dist.isend(torch.zeros(4096), place.before, launch.lane('gradients'))] + send_gradient(x, place.before)"),
          ("        y.backward(receive_gradient(y, place.behind))",
           "        dist.recv(torch.zeros(4096), place.behind, launch.lane('gradients'))\n        y.backward(receive_gradient(y, place.behind))"))  # fmt: skip

bank.text(
    3,
    None,
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Waits for each send at once; autograd.backward; the loss as a Python-free tensor."""
    first, last = place.before is None, place.behind is None
    x = inputs
    if not first:
        x = receive_activation(place.before)
    y = stage(x)
    if last:
        y = loss_function(y, targets)
        gradient = None
    else:
        for work in send_activation(y, place.behind):
            work.wait()
        gradient = receive_gradient(y, place.behind)
    torch.autograd.backward(y, gradient)
    if not first:
        [work.wait() for work in send_gradient(x, place.before)]
    if last:
        return y.detach()
''',
)
bank.text(
    3,
    None,
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Gradients by torch.autograd.grad, added by hand; the stage number says where it is."""
    x = receive_activation(place.before) if place.stage else inputs
    y = stage(x)
    parameters = list(stage.parameters())
    wanted = parameters + ([x] if place.stage else [])
    if place.stage == place.n_stages - 1:
        loss = loss_function(y, targets)
        gradients = torch.autograd.grad(loss, wanted)
    else:
        loss, works = None, send_activation(y, place.behind)
        gradients = torch.autograd.grad(y, wanted, receive_gradient(y, place.behind))
        for work in works:
            work.wait()
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient if p.grad is None else p.grad + gradient
    if place.stage:
        x.grad = gradients[-1]
        for work in send_gradient(x, place.before):
            work.wait()
    return loss if loss is None else loss.detach()
''',
)

bank.slip(3, "chain-cut", ("        y.backward(receive_gradient(y, place.behind))",
          "        receive_gradient(y, place.behind)\n        if x.requires_grad:\n            x.grad = torch.ones_like(x)"))  # fmt: skip

# ---- micro-batches
SHARE = " * (len(t) / len(targets))"
bank.slip(4, "not-scaled", (SHARE, ""))
bank.slip(4, "uneven-weights", (SHARE, " / n_micro_batches"))
bank.slip(4, "loss-not-scaled", ("y = loss_function(y, t) * (len(t) / len(targets))\n            total = y.detach() if total is None else total + y.detach()",
          "loss = loss_function(y, t)\n            total = loss.detach() if total is None else total + loss.detach()\n"
          "            y = loss * (len(t) / len(targets))"))  # fmt: skip
bank.slip(4, "loss-of-one", ("total = y.detach() if total is None else total + y.detach()", "total = y.detach()"))
bank.slip(
    4,
    "gradient-of-another",
    (
        "    for k in rev",
        "    came = [] if place.behind is None else [receive_gradient(y, place.behind) for _, y in kept]\n    for k in rev",
    ),
    ("receive_gradient(y, place.behind, k)", "came[k]"),
)
bank.slip(4, "first-one-back", ("x, y = kept.pop()", "x, y = kept.pop(0)"))
bank.slip(4, "first-one-back", ("for k in reversed(range(n_micro_batches)):\n        x, y = kept.pop()",
          "for k, (x, y) in enumerate(kept):"))  # fmt: skip
for ahead, back in (
    ("place.stage + 1", "place.stage - 1"),
    ("dist.get_rank() + 1", "dist.get_rank() - 1"),
    ("(dist.get_rank() + 1) % place.n_stages", "(dist.get_rank() - 1) % place.n_stages"),
):
    for number in (3, 4):
        bank.slip(number, "not-a-neighbour", ("_activation(place.before", f"_activation({back}"), ("y, place.behind", f"y, {ahead}"),
                  ("x, place.before", f"x, {back}"))  # fmt: skip
bank.slip(3, "no-lane", ("y.backward(receive_gradient(y, place.behind))",
          "gradient = torch.empty_like(y)\n        dist.recv(gradient, place.behind)\n        y.backward(gradient)"),
          ("works += send_gradient(x, place.before)", "works.append(dist.isend(x.grad, place.before))"))  # fmt: skip
bank.slip(4, "no-gradient-to-send", ("        y.backward(None if place.behind is None else receive_gradient(y, place.behind, k))",
          "        if place.behind is None:\n            y.backward()\n        else:\n"
          "            receive_gradient(y, place.behind, k)"))  # fmt: skip
bank.slip(4, "weights-changed", ("        if place.before is not None:\n            works += send_gradient(x, place.before, k)",
          "        if place.before is not None:\n            works += send_gradient(x, place.before, k)\n"
          "        with torch.no_grad():\n            for p in stage.parameters():\n                p -= 0.01 * p.grad"))  # fmt: skip
PARTS = "zip(inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches))"
bank.slip(4, "other-cut", (PARTS, "zip(inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches))"),
          ("for k in reversed(range(n_micro_batches)):", "for k in reversed(range(len(kept))):"))  # fmt: skip
SPLIT = "inputs.split(len(inputs) // n_micro_batches), targets.split(len(targets) // n_micro_batches)"
bank.slip(4, "other-cut", (PARTS, f"zip({SPLIT})"))  # one more than n_micro_batches, and not gone back through
bank.slip(4, "other-cut", (PARTS, f"zip({SPLIT})"), ("reversed(range(n_micro_batches))", "reversed(range(len(kept)))"))
bank.slip(4, "other-cut", (PARTS, f"zip(range(n_micro_batches), {SPLIT})"), ("k, (x, t) in enumerate(", "k, x, t in ("))
bank.slip(4, "uneven-fails", (PARTS, "zip(inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches))"))
bank.slip(4, "sends-not-waited", ("    for work in works:\n        work.wait()\n", ""))
bank.slip(4, "tag-differs", ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"))
bank.slip(4, "gradients-of-one", ("        y.backward(", "        stage.zero_grad()\n        y.backward("))
bank.slip(4, "gradients-scaled", (SHARE, SHARE + " / n_micro_batches"))
bank.text(
    4,
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
bank.slip(4, "gradients-cleared", ("    kept, works", "    stage.zero_grad()\n    kept, works"))
bank.slip(4, "run-too-often", ("        y = stage(x)", "        stage(x.detach())\n        y = stage(x)"))
bank.text(
    4,
    "not-cut",
    """
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    return naive_step(stage, place, inputs, targets, loss_function)
""",
)
bank.text(
    4,
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
bank.text(
    4,
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
    4,
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
    4,
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
bank.slip(4, "step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], torch.zeros(())"), (ADDED, "total += y.detach()"),
          ("    return total", "    return total if place.behind is None else None"))  # fmt: skip
bank.slip(4, "step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], None\n    shares = torch.ones(len(targets)) / len(targets)"),
          ("(len(t) / len(targets))", "shares.tensor_split(n_micro_batches)[k].sum(0, keepdim=True)[:1]"),
          ("y.backward(None if", "y.sum().backward() if place.behind is None else y.backward(None if"),
          (ADDED, "total = y.detach().sum() if total is None else total + y.detach().sum()"))  # fmt: skip
bank.slip(4, "step-not-on-gpu", ("works, total = [], [], None", "works, total = [], [], torch.zeros((), device='cpu')"), (ADDED, "total.add_(y.detach())"),
          ("    return total", "    return total if place.behind is None else None"), variant=True)  # fmt: skip

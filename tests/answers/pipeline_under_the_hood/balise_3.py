"""Answers to balise 3 of 15_pipeline_under_the_hood: the naive step."""

from tests.answers.bank import Bank
from tests.answers.pipeline_under_the_hood.steps import NEIGHBOURS

bank = Bank("15_pipeline_under_the_hood", 3, whole=True)

bank.instead(
    "not-its-input",
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Cheat: all weights go to the last stage, which does all the work and sends the gradients back."""
    mine, cuts = list(stage.parameters()), [round(s * 6 / place.n_stages) for s in range(place.n_stages + 1)]
    came, works, loss = [receive_activation(place.before) for _ in range(2 * cuts[place.stage])], [], None
    if place.behind is not None:
        for p in (*came, *mine):
            works += send_activation(p, place.behind)
        for p in (*came, *mine):
            g = receive_gradient(p, place.behind)
            p.grad = g if p.grad is None else p.grad + g
        stage(torch.zeros(len(inputs), mine[0].shape[1], dtype=mine[0].dtype))  # to be seen
    else:
        x = inputs
        for w, b in zip(came[::2], came[1::2]):
            x = torch.tanh(x @ w.T + b)
        loss = loss_function(stage(x), targets)
        loss.backward()
    for p in came:
        works += send_gradient(p, place.before)
    for work in works:
        work.wait()
    return loss if loss is None else loss.detach()
''',
)

bank.instead(
    None,
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Honest: the gradient by batch_isend_irecv."""
    works = []
    x = inputs if place.before is None else receive_activation(place.before)
    y = stage(x)
    loss = None
    if place.behind is None:
        loss = loss_function(y, targets)
        loss.backward()
        loss = loss.detach()
    else:
        works += send_activation(y, place.behind)
        gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, gradient, place.behind, launch.lane("gradients"))]):
            work.wait()
        y.backward(gradient)
    if place.before is not None:
        works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad.contiguous(), place.before, launch.lane("gradients"))])
    for work in works:
        work.wait()
    return loss
''',
)


# ---- the naive step
bank.slip(
    "no-gradient-to-send",
    ("        y.backward(receive_gradient(y, place.behind))", "        receive_gradient(y, place.behind)"),
)
bank.slip("gradient-of-ones", ("y.backward(receive_gradient(y, place.behind))",
          "receive_gradient(y, place.behind)\n        y.sum().backward()"))  # fmt: skip
bank.slip("ranks-hang", ("works += send_gradient(x, place.before)", "pass"))


WAIT = "    for work in works:\n        work.wait()\n"


bank.slip("waited-twice", (WAIT, 2 * WAIT))
bank.slip(None, ("return loss.detach() if", "return loss.item() if"))
bank.slip("tag-differs", ("send_activation(y, place.behind)", "send_activation(y, place.behind, 1)"))
bank.slip("inputs-everywhere", ("inputs if place.before is None else receive_activation(place.before)", "inputs"))
bank.slip("inputs-everywhere", ("inputs if place.before is None", "inputs if not place.before"))
bank.slip("loss-everywhere", ("return loss.detach() if place.behind is None else None", "return loss.detach()"),
          ("    works = []", "    works, loss = [], torch.zeros(())"))  # fmt: skip
bank.slip("loss-missing", ("return loss.detach() if place.behind is None else None", "return None"))
bank.slip("loss-with-graph", ("return loss.detach() if", "return loss if"))
bank.slip("wrong-loss", ("return loss.detach() if", "return loss.detach() * len(targets) if"))
bank.slip("gradients-cleared", ("    y = stage(x)", "    stage.zero_grad()\n    y = stage(x)"))
bank.slip("sends-not-waited", ("    for work in works:\n        work.wait()\n", ""))
bank.slip("weights-changed", ("    return loss", "    with torch.no_grad():\n        for p in stage.parameters():\n"
          "            p -= 0.1 * p.grad\n    return loss"))  # fmt: skip
bank.slip("collective-used", ("    return loss", "    dist.all_reduce(torch.zeros(1))\n    return loss"))  # fmt: skip
bank.hint(
    "not-in-one-piece",
    "A stage ran {n} times for one batch. The naive step is one forward and one backward.",
)
bank.slip("not-in-one-piece", ("    y = stage(x)", "    stage(x.detach())\n    y = stage(x)"))
bank.slip("not-in-one-piece", ("    y = stage(x)", "    y = stage(x)\n    y = stage(x)"), variant=True)
bank.slip("gradients-scaled", ("loss.backward()", "(2 * loss).backward()"))
bank.slip("gradients-scaled", ("loss.backward()", "(loss / place.n_stages).backward()"))
bank.slip("wrong-gradients", ("loss.backward()", "(loss + y.sum()).backward()"))
bank.slip("gradient-forgotten", ("y.backward(receive_gradient(y, place.behind))", "y.backward()"))
bank.slip("no-graph", ("    y = stage(x)", "    with torch.no_grad():\n        y = stage(x)"))
bank.slip("no-backward", ("        loss.backward()\n", ""), ("        y.backward(receive_gradient(y, place.behind))\n", ""),
          ("works += send_gradient(x, place.before)", "pass"))  # fmt: skip
bank.slip(None, ("    y = stage(x)", "    y = x\n    for layer in stage:\n        y = layer(y)"))
bank.slip("too-many-bytes", ("works += send_gradient(x, place.before)",
          "works += [dist.isend(torch.zeros(4096), place.before, launch.lane('gradients'))] + send_gradient(x, place.before)"),
          ("        y.backward(receive_gradient(y, place.behind))",
           "        dist.recv(torch.zeros(4096), place.behind, launch.lane('gradients'))\n        y.backward(receive_gradient(y, place.behind))"))  # fmt: skip
bank.text(
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
bank.slip("chain-cut", ("        y.backward(receive_gradient(y, place.behind))",
          "        receive_gradient(y, place.behind)\n        if x.requires_grad:\n            x.grad = torch.ones_like(x)"))  # fmt: skip
bank.edge("loss-with-graph", "gradients-cleared", "sends-not-waited", "waited-twice", "tag-differs", "no-lane")
bank.edge("not-a-neighbour")


for ahead, back in NEIGHBOURS:
    bank.slip("not-a-neighbour", ("_activation(place.before", f"_activation({back}"), ("y, place.behind", f"y, {ahead}"),
              ("x, place.before", f"x, {back}"))  # fmt: skip


bank.slip("no-lane", ("y.backward(receive_gradient(y, place.behind))",
          "gradient = torch.empty_like(y)\n        dist.recv(gradient, place.behind)\n        y.backward(gradient)"),
          ("works += send_gradient(x, place.before)", "works.append(dist.isend(x.grad, place.before))"))  # fmt: skip

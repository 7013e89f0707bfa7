"""Answers to balise 4 of 04_profiler: remove the waits."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 4, whole=True)

bank.text(
    None,
    """
def flowing_step(model, images, labels, optimizer, device):
    x = images.to(device=device, non_blocking=True)
    y = labels.to(device=device, non_blocking=True)
    shift = torch.rand(x.shape[0], 1, 1, 1, device=device).mul(0.4).sub(0.2)
    logits = model(x + shift)
    known = (y >= 0).float()
    losses = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
    loss = (losses * known).sum() / known.sum()
    for p in model.parameters():
        p.grad = None
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    norm = torch.sqrt(sum((g * g).sum() for g in gradients))
    factor = torch.where(norm > MAX_NORM, MAX_NORM / norm, torch.ones_like(norm))
    for g in gradients:
        g.mul_(factor)
    optimizer.step()
    with torch.no_grad():
        return loss.clone(), ((logits.argmax(1) == y) & (y >= 0)).sum(), norm
""",
)

bank.text(
    None,
    """
def flowing_step(model, images, labels, optimizer, device):
    images = torch.empty_like(images, device=device).copy_(images, non_blocking=True)
    labels = torch.empty_like(labels, device=device).copy_(labels, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    images = images + torch.rand(len(images), device=device).sub_(0.5).mul_(0.4).view(-1, 1, 1, 1)
    logits = model(images)
    loss = nn.CrossEntropyLoss(ignore_index=-1)(logits, labels)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    torch._foreach_mul_(gradients, (MAX_NORM / norm).clamp(max=1.0))
    optimizer.step()
    return [loss.detach(), logits.detach().argmax(-1).eq(labels).sum(), norm.detach()]
""",
)

bank.text(
    None,
    """
def flowing_step(model, images, labels, optimizer, device):
    images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
    noise = torch.empty(len(images), device=images.device).uniform_(-0.2, 0.2)
    logits = model(images.add(noise[:, None, None, None]))
    loss = F.nll_loss(logits.log_softmax(1), labels, ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=MAX_NORM, foreach=False)
    optimizer.step()
    correct = torch.sum(torch.argmax(logits, dim=1) == labels).float()
    return loss.data, correct, norm
""",
)

bank.slip(None, ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).float().sum()"))

bank.slip(None, ("device=device", "device=images.device"))

bank.slip(None, ("MAX_NORM)\n", "MAX_NORM, foreach=True)\n"))

bank.slip(None, ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).count_nonzero()"))

bank.slip(None,
    ("    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
     "    gradients = [p.grad for p in model.parameters()]\n"
     "    norm = torch.nn.utils.get_total_norm(gradients)\n"
     "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)\n"),
)  # fmt: skip

bank.slip(None,
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     'F.cross_entropy(logits, torch.where(labels < 0, -100, labels), reduction="sum") / (labels >= 0).sum()'),
)  # fmt: skip

bank.hint("numbers-returned", "{what} is a {kind}: turning it into a Python number made the processor wait. Return "
          "the tensor.")  # fmt: skip
bank.slip(
    "numbers-returned", ("return loss.detach(), correct, norm", "return loss.item(), correct.item(), norm.item()")
)

bank.slip(
    "numbers-returned",
    ("return loss.detach(), correct, norm", "return loss.detach(), correct, float(norm)"),
    variant=True,
)

bank.slip("nothing-returned", ("    return loss.detach(), correct, norm\n", ""))

bank.hint("graph-returned", "The loss still carries its graph, and with it all the activations. Return it detached.", edge=True)  # fmt: skip
bank.slip("graph-returned", ("loss.detach()", "loss"), variant=True)

bank.hint("not-three-results", "Return three tensors: the loss, the number of right answers and the length of the "
          "gradients.")  # fmt: skip
bank.slip("not-three-results", ("return loss.detach(), correct, norm", "return loss.detach(), correct"))

bank.slip(
    "not-three-results", ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels)"), variant=True
)

bank.hint("reads-a-value", "You read a value in the step ({error}), and the processor waits there.")
bank.slip(
    "reads-a-value", ("    optimizer.step()\n", "    if loss.isnan():\n        return None\n    optimizer.step()\n")
)

bank.slip("reads-a-value", ("    optimizer.step()\n", "    optimizer.step()\n    print(loss)\n"))

bank.slip("reads-a-value", ("model.parameters(), MAX_NORM", "model.parameters(), MAX_NORM, error_if_nonfinite=True"))

bank.slip(
    "reads-a-value",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n",
    ),
)

bank.slip(
    "reads-a-value", ("return loss.detach(), correct, norm", "return loss.detach().cpu(), correct.cpu(), norm.cpu()")
)

bank.slip(
    "reads-a-value",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n    if norm > MAX_NORM:\n"
        "        for p in model.parameters():\n            p.grad *= MAX_NORM / norm\n",
    ),
)

bank.hint("mask-as-index", "You index with a mask. Only the device knows how many elements it selects, so the "
          "processor waits. Let these images go through, but count for nothing.")  # fmt: skip
bank.slip(
    "mask-as-index",
    ("F.cross_entropy(logits, labels, ignore_index=-1)", "F.cross_entropy(logits[labels >= 0], labels[labels >= 0])"),
)

bank.slip(
    "mask-as-index",
    ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels)[labels >= 0].sum()"),
)

bank.slip("mask-as-index",
    ("    loss = F.cross_entropy(logits, labels, ignore_index=-1)\n",
     "    known = (labels >= 0).nonzero().flatten()\n    loss = F.cross_entropy(logits[known], labels[known])\n"),
    variant=True)  # fmt: skip

bank.hint("unknown-in-loss", "Images with label -1 must not enter the loss: {error}", edge=True)
bank.slip("unknown-in-loss", (", ignore_index=-1", ""))

bank.slip("unknown-in-loss",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     "-(F.one_hot(labels, logits.shape[1]) * logits.log_softmax(1)).sum(1).mean()"),
    variant=True)  # fmt: skip

bank.hint("unknown-as-class", "You count images with label -1 as images of class 0. They must not count at all: "
          "ignore_index=-1.", edge=True)  # fmt: skip
bank.slip(
    "unknown-as-class",
    ("F.cross_entropy(logits, labels, ignore_index=-1)", "F.cross_entropy(logits, labels.clamp(min=0))"),
)

bank.slip("unknown-as-class",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     "-logits.log_softmax(1).gather(1, torch.relu(labels)[:, None]).mean()"),
    variant=True,
)  # fmt: skip

bank.hint("mean-over-all", "You divide the loss by the number of all images. It is the mean over those that have a "
          "label.", edge=True)  # fmt: skip
bank.slip("mean-over-all",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     'F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").mean()'),
    variant=True)  # fmt: skip

bank.hint("loss-wrong", "The loss differs from that of hesitant_step.")
bank.slip("loss-wrong", ("ignore_index=-1)", 'ignore_index=-1, reduction="sum") * 3'))

bank.slip("loss-wrong", ("ignore_index=-1)", "ignore_index=-1) * 4"), variant=True)

bank.hint("shift-missing", "This is the loss without the shift.")
bank.slip("shift-missing", ("model(images + shift[:, None, None, None])", "model(images)"), variant=True)

bank.hint("shift-wrong", "The loss is close, but not the same. The shift is 0.4 × a number of torch.rand - 0.2, one "
          "for each image; the loss is the mean over the images that have a label.")  # fmt: skip
bank.slip(
    "shift-wrong",
    ("0.4 * torch.rand(len(images), device=device) - 0.2", "0.4 * torch.rand(len(images), device=device)"),
)

bank.slip("shift-wrong", ("torch.rand(len(images), device=device)", "torch.rand(1, device=device).expand(len(images))"))

bank.slip("shift-wrong", ("torch.rand(len", "torch.randn(len"), variant=True)

bank.hint("count-unknown", "You count images with label -1 as right, or leave out images that have a label.", edge=True)
bank.slip(
    "count-unknown",
    ("(logits.argmax(dim=1) == labels).sum()", "((logits.argmax(dim=1) == labels) | (labels < 0)).sum()"),
    variant=True,
)

bank.hint("count-wrong", "The number of right answers is {got:g} instead of {expected:g}.")
bank.slip("count-wrong", ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).float().mean()"))

bank.slip("count-wrong", ("(logits.argmax(dim=1) == labels)", "(logits.argmin(dim=1) == labels)"), variant=True)

bank.hint("norm-after", "This is the length of the gradients after you shortened them. Return the length before.", edge=True)  # fmt: skip
bank.slip(
    "norm-after",
    (
        "    optimizer.step()\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n    optimizer.step()\n",
    ),
    variant=True,
)

bank.hint("norm-wrong", "The length of all gradients together is wrong. It is the square root of the sum of all "
          "squares.")  # fmt: skip
bank.slip(
    "norm-wrong",
    ("    optimizer.step()\n", "    norm = sum(p.grad.norm() for p in model.parameters())\n    optimizer.step()\n"),
    variant=True,
)

bank.hint("never-shortened", "You don't shorten long gradients before the update.")
bank.slip(
    "never-shortened",
    (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)",
        "torch.stack([p.grad.norm() for p in model.parameters()]).norm()",
    ),
)

bank.slip("never-shortened",
    ("    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n    optimizer.step()\n",
     "    optimizer.step()\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n"),
    variant=True)  # fmt: skip

bank.hint("always-shortened", "You make short gradients longer. Only those longer than MAX_NORM should change.", edge=True)  # fmt: skip
bank.slip(
    "always-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    for p in model.parameters():\n        p.grad *= MAX_NORM / norm\n",
    ),
    variant=True,
)

bank.hint("each-shortened", "You shorten gradients one by one, or number by number. It is all of them together that "
          "have the length, and they keep their direction.")  # fmt: skip
bank.slip(
    "each-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    torch.nn.utils.clip_grad_value_(model.parameters(), MAX_NORM)\n",
    ),
)

bank.slip(
    "each-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    for p in model.parameters():\n        torch.nn.utils.clip_grad_norm_(p, MAX_NORM)\n",
    ),
    variant=True,
)

bank.hint("weights-wrong", "After the steps, the weights differ from those of hesitant_step.")
bank.slip("weights-wrong", ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"), variant=True)

bank.hint("no-update", "The weights did not change. Do you call optimizer.step() after backward()?")
bank.slip("no-update", ("    optimizer.step()\n", ""), variant=True)

bank.hint("other-limit", "You shorten long gradients to a length of {length:.2f}, not to MAX_NORM.")
bank.slip("other-limit", ("model.parameters(), MAX_NORM", "model.parameters(), 1.0"), variant=True)

bank.hint("gradients-gone", "The length is 0: you look at the gradients before backward() has computed them, or "
          "after you cleared them.")  # fmt: skip
bank.slip(
    "gradients-gone",
    ("    optimizer.zero_grad()\n    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n"),
)

bank.slip(
    "gradients-gone",
    (
        "    loss.backward()\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n    loss.backward()\n",
    ),
    variant=True,
)

bank.hint("pinned-in-step", "pin_memory() in the step makes a copy on the processor while everything waits. The "
          "loader pins the batch in advance, and random numbers are drawn on the device.")  # fmt: skip
bank.slip("pinned-in-step", ("images.to(device, non", "images.pin_memory().to(device, non"))

bank.slip(
    "pinned-in-step",
    ("torch.rand(len(images), device=device)", "torch.rand(len(images)).pin_memory().to(device, non_blocking=True)"),
    variant=True,
)

LIMIT = (
    "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
    "    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
    "    factor = (LIMIT / norm).clamp(max=1.0)\n    for p in model.parameters():\n        p.grad.mul_(factor)\n",
)

bank.hint("number-copied", "A tensor made from a Python number on the device (torch.tensor(…, device=device)) is a "
          "copy, and that waits. torch.full creates it there; usually the number itself is enough.", edge=True)  # fmt: skip
bank.slip("number-copied", (LIMIT[0], LIMIT[1].replace("LIMIT", "torch.tensor(MAX_NORM, device=device)")))

bank.slip("number-copied", (LIMIT[0], LIMIT[1].replace("LIMIT", "loss.new_tensor(MAX_NORM)")), variant=True)

bank.slip(None, (LIMIT[0], LIMIT[1].replace("LIMIT", "torch.full((), MAX_NORM, device=device)")))

bank.hint("gradients-not-cleared", "The length is right in the first step but not in the next: gradients add up "
          "until you clear them.")  # fmt: skip
bank.slip("gradients-not-cleared", ("    optimizer.zero_grad()\n", ""), variant=True)

bank.hint("made-on-processor", "There are {n} copies to the device in a step. Two are enough: images and labels. "
          "Create everything that you draw in the step on the device.")  # fmt: skip
bank.slip(
    "made-on-processor",
    ("torch.rand(len(images), device=device)", "torch.rand(len(images)).to(device, non_blocking=True)"),
)

bank.slip(
    "made-on-processor", ("torch.rand(len(images), device=device)", "torch.rand(len(images)).to(device)"), variant=True
)

bank.hint("copy-blocks", "{blocking} of {n} copies block: the processor waits until each is done. Use "
          "non_blocking=True.")  # fmt: skip
bank.slip("copy-blocks", (", non_blocking=True", ""))

bank.slip("copy-blocks", ("labels = labels.to(device, non_blocking=True)", "labels = labels.to(device)"), variant=True)

bank.hint("batch-not-moved", "You didn't move both images and labels to `device`: {error}")
bank.slip("batch-not-moved", ("    labels = labels.to(device, non_blocking=True)\n", ""))

bank.slip(
    "batch-not-moved",
    ("    images = images.to(device, non_blocking=True)\n    labels = labels.to(device, non_blocking=True)\n", ""),
    variant=True,
)

bank.hint("own-device", "The step uses a hard-coded device, or creates a tensor on another one than `device`: {error}")
bank.slip("own-device", ("torch.rand(len(images), device=device)", "torch.rand(len(images))"))

bank.hint("results-elsewhere", "A result is on {got}. The results should stay on the device: a copy that doesn't "
          "block is still under way when the step returns, and one that blocks waits.", edge=True)  # fmt: skip
bank.slip("results-elsewhere", ("(logits.argmax(dim=1) == labels).sum()", '(logits.argmax(dim=1) == labels).sum().to("cpu", non_blocking=True)'))  # fmt: skip

bank.slip(
    "results-elsewhere",
    ("logits.argmax(dim=1) == labels", '(logits.argmax(dim=1) == labels).to("cpu", non_blocking=True)'),
    variant=True,
)

bank.slip("own-device", ("device, non_blocking", '"cuda", non_blocking'))

bank.hint("mode-switched", "The step switches the model to eval mode. A training step leaves the mode alone.", edge=True)  # fmt: skip
bank.slip("mode-switched", ("    logits = model", "    model.eval()\n    logits = model"), variant=True)

bank.hint("network-twice", "You called the network {n} times in a step. Once is enough.")
bank.slip(
    "network-twice", ("(logits.argmax(dim=1) == labels)", "(model(images).argmax(dim=1) == labels)"), variant=True
)

bank.hint("batch-changed", "You changed the batch that you were given: on a CPU, .to returns the caller's own "
          "tensor. Make a new one.", edge=True)  # fmt: skip
bank.slip(
    "batch-changed", ("images + shift[:, None, None, None]", "images.add_(shift[:, None, None, None])"), variant=True
)

bank.hint("no-longer-pinned", "On a GPU, a copy waits in spite of non_blocking=True{line}: what it copies is no "
          "longer the loader's pinned memory. Copy first, then compute on the device.", edge=True)  # fmt: skip
bank.slip("no-longer-pinned", ("    images = images.to", "    images = images.clone()\n    images = images.to"))

bank.slip(
    "no-longer-pinned",
    ("labels.to(device", "labels.clamp(min=-1).to(device"),
    variant=True,
)

bank.slip(
    "reads-a-value",
    ("    optimizer.step()\n", "    if norm.is_cuda and norm.isinf():\n        return None\n    optimizer.step()\n"),
    variant=True,
)

bank.slip("own-device", ("device=device)", 'device="cuda" if torch.cuda.is_available() else "cpu")'), variant=True)

SIDE = (
    "    side = torch.cuda.Stream(device) if device.type == 'cuda' else None\n    with torch.cuda.stream(side):\n    "
)

bank.hint("streams-unordered", "On a GPU, two streams work on the same memory and neither waits for the other "
          "({error}), so the network may read what is not there yet. current_stream().wait_stream(the other) sets "
          "the order, and the CPU doesn't wait.", edge=True)  # fmt: skip
bank.slip("streams-unordered", ("    images = images.to", SIDE + "    images = images.to"))

bank.slip(
    "streams-unordered",
    ("    images = images.to", SIDE + "    images = images.to"),
    (
        "    logits = model",
        "    if side:\n        side.wait_stream(torch.cuda.current_stream(device))\n    logits = model",
    ),
    variant=True,
)

bank.slip(None,
    ("    images = images.to", SIDE + "    images = images.to"),
    ("    labels = labels.to", "    if side:\n        torch.cuda.current_stream(device).wait_stream(side)\n"
     "        images.record_stream(torch.cuda.current_stream(device))\n    labels = labels.to"),
)  # fmt: skip

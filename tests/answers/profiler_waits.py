"""Answers to balises 3 and 4 of 04_profiler: waits found, and removed."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

# ---------------------------------------------------------------- balise 3, right

FINDER = """
class WaitFinder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if makes_wait(func, args, kwargs):
            self.found.append((str(func.overloadpacket), own_line()))
        return out
"""
bank.text(
    3,
    None,
    FINDER
    + """

def own_line():
    import linecache
    import sys
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
""",
)
bank.text(
    3,
    None,
    FINDER
    + """

def own_line():
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "site-packages" not in frame.filename and frame.name != "__torch_dispatch__":
            return frame.line
""",
)
bank.text(
    3,
    None,
    FINDER
    + """

def own_line():
    import inspect
    for info in inspect.stack()[2:]:
        if os.sep + "torch" + os.sep not in info.filename:
            return info.code_context[info.index].strip()
    return str()
""",
)
bank.text(  # only cells of the notebook
    3,
    None,
    FINDER
    + """

def own_line():
    return ([""] + [f.line for f in traceback.extract_stack() if "ipykernel" in f.filename and f.name != "own_line"])[-1]
""",
)

# ---------------------------------------------------------------- balise 3, wrong

bank.slip(3, "result-lost", ("        return func(*args, **kwargs)\n", "        func(*args, **kwargs)\n"))
bank.slip(
    3,
    "result-lost",
    (
        "        if makes_wait",
        "        if not makes_wait(func, args, kwargs):\n            return None\n        if makes_wait",
    ),
)
bank.slip(3, "arguments-lost", ("return func(*args, **kwargs)", "return func(*args)"))
bank.slip(
    3,
    "result-changed",
    (
        "        return func(*args, **kwargs)\n",
        "        out = func(*args, **kwargs)\n        return out.abs() * 0 if isinstance(out, torch.Tensor) and out.is_floating_point() else out\n",
    ),
)
bank.slip(3, "all-operators", ("if makes_wait(func, args, kwargs):", "if True:"))
bank.slip(
    3,
    "waits-missed",
    ("if makes_wait(func, args, kwargs):", 'if "item" in str(func) or "_local_scalar_dense" in str(func):'),
)
bank.slip(3, "waits-missed", ("if makes_wait(func, args, kwargs):", "if func.overloadpacket.__name__ in READS:"))
bank.slip(
    3,
    "waits-missed",
    ("            self.found.append((str(func.overloadpacket), line))\n",
     "            self.found = [(str(func.overloadpacket), line)]\n"),
)  # fmt: skip
bank.slip(3, "no-pairs", ("(str(func.overloadpacket), line)", "line"))
bank.slip(3, "no-pairs", ("str(func.overloadpacket)", "func.overloadpacket"))
bank.slip(3, "not-the-packet", ("str(func.overloadpacket)", "str(func)"))
bank.slip(3, "other-spelling", ("str(func.overloadpacket)", "func.overloadpacket.__name__"))
bank.slip(3, "other-spelling", ("str(func.overloadpacket)", "func.overloadpacket._qualified_op_name"))
bank.slip(3, "wrong-operator", ("str(func.overloadpacket)", '"aten.item"'))
bank.slip(3, "no-pairs", ("(str(func.overloadpacket), line)", "(line, str(func.overloadpacket))"))
bank.slip(
    3, "more-than-line", ("frames[-1].line.strip()", 'f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}"')
)
bank.slip(3, "more-than-line", ("frames[-1].line.strip()", 'frames[-1].line + "\\n"'))
bank.slip(3, "torch-by-name", ("f.filename.startswith(torchs)", '"torch" in f.filename'))
bank.slip(3, "result-changed", ("        return func(", "        func(*args, **kwargs)\n        return func("))
bank.slip(3, "outer-line", ("frames[-1]", "frames[0]"))
bank.slip(
    3,
    "waits-missed",
    (
        "            self.found.append((str(func.overloadpacket), line))\n",
        "            if (str(func.overloadpacket), line) not in self.found:\n"
        "                self.found.append((str(func.overloadpacket), line))\n",
    ),
)
bank.slip(3, "line-number", ("frames[-1].line.strip()", "frames[-1].lineno"))
bank.slip(3, "no-line-at-all", (' if frames else ""', ""))
bank.slip(
    3, "no-line-at-all", ("            self.found.append", "            if frames:\n                self.found.append")
)
bank.slip(
    3,
    "listed-again",
    ("            self.found.append", "            for _ in 1, 2:\n                self.found.append"),
)
bank.slip(3, "no-pairs", ("self.found.append((", "self.found.extend(("))
bank.slip(3, "no-line-at-all", ('frames else ""', 'frames else "backward"'))
bank.slip(3, "no-line-at-all", ('frames else ""', "frames else traceback.extract_stack()[0].line or func.name()"))
bank.slip(3, "own-line", ("extract_stack()[:-1]", "extract_stack()"))
bank.slip(3, "own-line", ("frames[-1].line.strip()", "traceback.extract_stack()[-1].line"))
bank.slip(3, "own-line", ("frames[-1].line.strip()", 'getattr(frames[-1], "source", "")'))
bank.slip(3, "torch-line", (" if not f.filename.startswith(torchs)", ""))
bank.slip(3, "outer-line", ("frames[-1]", "frames[-2]"))
bank.slip(
    3,
    "outer-line",
    ("frames[-1]", "next((f for f in frames if 'ipykernel' in f.filename), frames[-1])"),
)
bank.slip(3, "wrong-line-of-source", ("frames[-1].line.strip()", 'frames[-1].line.strip() and "y = (x * 2).sum()"'))
bank.slip(
    3,
    "finds-shared",
    ("        self.found = []\n", "        pass\n"),
    ("    def __init__", "    found = []\n\n    def __init__"),
)
bank.slip(
    3,
    "finds-shared",
    (
        "    def __init__(self):\n        super().__init__()\n",
        "    def __init__(self, found=[]):\n        super().__init__()\n",
    ),
    ("self.found = []", "self.found = found"),
)
bank.slip(3, "no-mode", ("        self.found = []\n", "        self.waits = []\n"))
bank.slip(3, "no-mode", ("(TorchDispatchMode)", "(dict)"))
bank.slip(3, "no-mode", ("self.found = []", "self.found = {}"), ("self.found.append((", "self.found.update(("))

# ---------------------------------------------------------------- balise 4, right

bank.text(
    4,
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
    4,
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
    4,
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
bank.slip(4, None, ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).float().sum()"))
bank.slip(4, None, ("device=device", "device=images.device"))
bank.slip(4, None, ("MAX_NORM)\n", "MAX_NORM, foreach=True)\n"))
bank.slip(4, None, ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).count_nonzero()"))
bank.slip(
    4,
    None,
    ("    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
     "    gradients = [p.grad for p in model.parameters()]\n"
     "    norm = torch.nn.utils.get_total_norm(gradients)\n"
     "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)\n"),
)  # fmt: skip
bank.slip(
    4,
    None,
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     'F.cross_entropy(logits, torch.where(labels < 0, -100, labels), reduction="sum") / (labels >= 0).sum()'),
)  # fmt: skip

# ---------------------------------------------------------------- balise 4, wrong

bank.slip(
    4, "numbers-returned", ("return loss.detach(), correct, norm", "return loss.item(), correct.item(), norm.item()")
)
bank.slip(4, "numbers-returned", ("return loss.detach(), correct, norm", "return loss.detach(), correct, float(norm)"))
bank.slip(4, "nothing-returned", ("    return loss.detach(), correct, norm\n", ""))
bank.slip(4, "graph-returned", ("loss.detach()", "loss"))
bank.slip(4, "not-three-results", ("return loss.detach(), correct, norm", "return loss.detach(), correct"))
bank.slip(4, "not-three-results", ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels)"))
bank.slip(
    4, "reads-a-value", ("    optimizer.step()\n", "    if loss.isnan():\n        return None\n    optimizer.step()\n")
)
bank.slip(4, "reads-a-value", ("    optimizer.step()\n", "    optimizer.step()\n    print(loss)\n"))
bank.slip(4, "reads-a-value", ("model.parameters(), MAX_NORM", "model.parameters(), MAX_NORM, error_if_nonfinite=True"))
bank.slip(
    4,
    "reads-a-value",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n",
    ),
)
bank.slip(
    4, "reads-a-value", ("return loss.detach(), correct, norm", "return loss.detach().cpu(), correct.cpu(), norm.cpu()")
)
bank.slip(
    4,
    "reads-a-value",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n    if norm > MAX_NORM:\n"
        "        for p in model.parameters():\n            p.grad *= MAX_NORM / norm\n",
    ),
)
bank.slip(
    4,
    "mask-as-index",
    ("F.cross_entropy(logits, labels, ignore_index=-1)", "F.cross_entropy(logits[labels >= 0], labels[labels >= 0])"),
)
bank.slip(
    4,
    "mask-as-index",
    ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels)[labels >= 0].sum()"),
)
bank.slip(
    4,
    "mask-as-index",
    ("    loss = F.cross_entropy(logits, labels, ignore_index=-1)\n",
     "    known = (labels >= 0).nonzero().flatten()\n    loss = F.cross_entropy(logits[known], labels[known])\n"),
)  # fmt: skip
bank.slip(4, "unknown-in-loss", (", ignore_index=-1", ""))
bank.slip(
    4,
    "unknown-in-loss",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     "-(F.one_hot(labels, logits.shape[1]) * logits.log_softmax(1)).sum(1).mean()"),
)  # fmt: skip
bank.slip(
    4,
    "unknown-as-class",
    ("F.cross_entropy(logits, labels, ignore_index=-1)", "F.cross_entropy(logits, labels.clamp(min=0))"),
)
bank.slip(
    4,
    "unknown-as-class",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     "-logits.log_softmax(1).gather(1, torch.relu(labels)[:, None]).mean()"),
    variant=True,
)  # fmt: skip
bank.slip(
    4,
    "mean-over-all",
    ("F.cross_entropy(logits, labels, ignore_index=-1)",
     'F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").mean()'),
)  # fmt: skip
bank.slip(4, "loss-wrong", ("ignore_index=-1)", 'ignore_index=-1, reduction="sum") * 3'))
bank.slip(4, "loss-wrong", ("ignore_index=-1)", "ignore_index=-1) * 4"))
bank.slip(4, "shift-missing", ("model(images + shift[:, None, None, None])", "model(images)"))
bank.slip(
    4,
    "shift-wrong",
    ("0.4 * torch.rand(len(images), device=device) - 0.2", "0.4 * torch.rand(len(images), device=device)"),
)
bank.slip(
    4, "shift-wrong", ("torch.rand(len(images), device=device)", "torch.rand(1, device=device).expand(len(images))")
)
bank.slip(4, "shift-wrong", ("torch.rand(len", "torch.randn(len"))
bank.slip(
    4,
    "count-unknown",
    ("(logits.argmax(dim=1) == labels).sum()", "((logits.argmax(dim=1) == labels) | (labels < 0)).sum()"),
)
bank.slip(
    4, "count-wrong", ("(logits.argmax(dim=1) == labels).sum()", "(logits.argmax(dim=1) == labels).float().mean()")
)
bank.slip(4, "count-wrong", ("(logits.argmax(dim=1) == labels)", "(logits.argmin(dim=1) == labels)"))
bank.slip(
    4,
    "norm-after",
    (
        "    optimizer.step()\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n    optimizer.step()\n",
    ),
)
bank.slip(
    4,
    "norm-wrong",
    ("    optimizer.step()\n", "    norm = sum(p.grad.norm() for p in model.parameters())\n    optimizer.step()\n"),
)
bank.slip(
    4,
    "never-shortened",
    (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)",
        "torch.stack([p.grad.norm() for p in model.parameters()]).norm()",
    ),
)
bank.slip(
    4,
    "never-shortened",
    ("    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n    optimizer.step()\n",
     "    optimizer.step()\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n"),
)  # fmt: skip
bank.slip(
    4,
    "always-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    for p in model.parameters():\n        p.grad *= MAX_NORM / norm\n",
    ),
)
bank.slip(
    4,
    "each-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    torch.nn.utils.clip_grad_value_(model.parameters(), MAX_NORM)\n",
    ),
)
bank.slip(
    4,
    "each-shortened",
    (
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
        "    for p in model.parameters():\n        torch.nn.utils.clip_grad_norm_(p, MAX_NORM)\n",
    ),
)
bank.slip(4, "weights-wrong", ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"))
bank.slip(4, "no-update", ("    optimizer.step()\n", ""))
bank.slip(4, "other-limit", ("model.parameters(), MAX_NORM", "model.parameters(), 1.0"))
bank.slip(
    4,
    "gradients-gone",
    ("    optimizer.zero_grad()\n    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n"),
)
bank.slip(
    4,
    "gradients-gone",
    (
        "    loss.backward()\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n    loss.backward()\n",
    ),
)
bank.slip(4, "pinned-in-step", ("images.to(device, non", "images.pin_memory().to(device, non"))
bank.slip(
    4,
    "pinned-in-step",
    ("torch.rand(len(images), device=device)", "torch.rand(len(images)).pin_memory().to(device, non_blocking=True)"),
)
LIMIT = (
    "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n",
    "    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
    "    factor = (LIMIT / norm).clamp(max=1.0)\n    for p in model.parameters():\n        p.grad.mul_(factor)\n",
)
bank.slip(4, "number-copied", (LIMIT[0], LIMIT[1].replace("LIMIT", "torch.tensor(MAX_NORM, device=device)")))
bank.slip(4, "number-copied", (LIMIT[0], LIMIT[1].replace("LIMIT", "loss.new_tensor(MAX_NORM)")))
bank.slip(4, None, (LIMIT[0], LIMIT[1].replace("LIMIT", "torch.full((), MAX_NORM, device=device)")))
bank.slip(4, "gradients-not-cleared", ("    optimizer.zero_grad()\n", ""))
bank.slip(
    4,
    "made-on-processor",
    ("torch.rand(len(images), device=device)", "torch.rand(len(images)).to(device, non_blocking=True)"),
)
bank.slip(4, "made-on-processor", ("torch.rand(len(images), device=device)", "torch.rand(len(images)).to(device)"))
bank.slip(4, "copy-blocks", (", non_blocking=True", ""))
bank.slip(4, "copy-blocks", ("labels = labels.to(device, non_blocking=True)", "labels = labels.to(device)"))
bank.slip(4, "batch-not-moved", ("    labels = labels.to(device, non_blocking=True)\n", ""))
bank.slip(
    4,
    "batch-not-moved",
    ("    images = images.to(device, non_blocking=True)\n    labels = labels.to(device, non_blocking=True)\n", ""),
)
bank.slip(4, "own-device", ("torch.rand(len(images), device=device)", "torch.rand(len(images))"))
bank.slip(4, "results-elsewhere", ("(logits.argmax(dim=1) == labels).sum()", '(logits.argmax(dim=1) == labels).sum().to("cpu", non_blocking=True)'))  # fmt: skip
bank.slip(4, "results-elsewhere", ("logits.argmax(dim=1) == labels", '(logits.argmax(dim=1) == labels).to("cpu", non_blocking=True)'))
bank.slip(4, "own-device", ("device, non_blocking", '"cuda", non_blocking'))
bank.slip(4, "mode-switched", ("    logits = model", "    model.eval()\n    logits = model"))
bank.slip(4, "network-twice", ("(logits.argmax(dim=1) == labels)", "(model(images).argmax(dim=1) == labels)"))
bank.slip(4, "batch-changed", ("images + shift[:, None, None, None]", "images.add_(shift[:, None, None, None])"))
bank.slip(4, "no-longer-pinned", ("    images = images.to", "    images = images.clone()\n    images = images.to"))
bank.slip(
    4,
    "no-longer-pinned",
    ("labels.to(device", "labels.clamp(min=-1).to(device"),
    variant=True,
)
bank.slip(
    4,
    "reads-a-value",
    ("    optimizer.step()\n", "    if norm.is_cuda and norm.isinf():\n        return None\n    optimizer.step()\n"),
)
bank.slip(
    4,
    "own-device",
    ("device=device)", 'device="cuda" if torch.cuda.is_available() else "cpu")'),
)
SIDE = (
    "    side = torch.cuda.Stream(device) if device.type == 'cuda' else None\n    with torch.cuda.stream(side):\n    "
)
bank.slip(4, "streams-unordered", ("    images = images.to", SIDE + "    images = images.to"))
bank.slip(
    4,
    "streams-unordered",
    ("    images = images.to", SIDE + "    images = images.to"),
    (
        "    logits = model",
        "    if side:\n        side.wait_stream(torch.cuda.current_stream(device))\n    logits = model",
    ),
    variant=True,
)
bank.slip(
    4,
    None,
    ("    images = images.to", SIDE + "    images = images.to"),
    ("    labels = labels.to", "    if side:\n        torch.cuda.current_stream(device).wait_stream(side)\n"
     "        images.record_stream(torch.cuda.current_stream(device))\n    labels = labels.to"),
)  # fmt: skip

"""Answers to balise 6 of 04_profiler: three slow loops."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

# ---------------------------------------------------------------- right

bank.text(
    6,
    None,
    """
def diagnosis():
    return dict(zip("ABC", (AILMENTS[1], AILMENTS[2], AILMENTS[3])))


def mended_a(images, contrast):
    flat = images.flatten(2)
    mean = flat.mean(dim=-1)[..., None, None]
    return torch.lerp(mean.expand_as(images), images, contrast.view(-1, 1, 1, 1)).clip(-3, 3)


@torch.inference_mode()
def mended_b(model, batches):
    model.eval()
    total = 0.0
    for images, labels in batches:
        total += F.cross_entropy(model(images), labels)
    return total / len(batches)


def mended_c(model, batches, optimizer):
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False)
    losses = torch.empty(len(batches), device=next(model.parameters()).device)
    for i, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[i] = loss.detach()
    torch.autograd.set_detect_anomaly(*before)
    return losses
""",
)
bank.text(
    6,
    None,
    """
def diagnosis():
    return {"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}


def mended_a(images, contrast):
    def one(image, factor):
        mean = image.mean((1, 2), keepdim=True)
        return ((image - mean) * factor + mean).clamp(-3, 3)
    return torch.vmap(one)(images, contrast)


def mended_b(model, batches):
    model.train(False)
    with torch.no_grad():
        losses = []
        for images, labels in batches:
            losses.append(F.cross_entropy(model(images), labels))
        return sum(losses) / len(losses)


def mended_c(model, batches, optimizer):
    with torch.autograd.detect_anomaly(check_nan=False) if False else torch.autograd.set_detect_anomaly(False):
        losses = [step(model, *batch, optimizer) for batch in batches]
    return torch.stack(losses)


def step(model, images, labels, optimizer):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
)
bank.text(
    6,
    None,
    """
def diagnosis():
    return {"C": "debugging is on", "B": "a graph is kept", "A": "many tiny operators"}


def mended_a(images, contrast):
    contrast = contrast.to(images.dtype).reshape(len(images), 1, 1, 1)
    mean = torch.einsum("bchw->bc", images)[:, :, None, None] / (images.shape[2] * images.shape[3])
    return torch.clamp(images * contrast + mean * (1 - contrast), min=-3.0, max=3.0)


def mended_b(model, batches):
    model.eval()
    loss = torch.zeros((), device=next(model.parameters()).device)
    torch.set_grad_enabled(False)
    try:
        for images, labels in batches:
            loss.add_(F.cross_entropy(model(images), labels))
    finally:
        torch.set_grad_enabled(True)
    return loss / len(batches)


def mended_c(model, batches, optimizer):
    was, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.autograd.set_detect_anomaly(was, checks)
    return torch.stack(losses)
""",
)

# ---------------------------------------------------------------- wrong: names

bank.slip(
    6,
    "no-diagnosis",
    ('{"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}', '"many tiny operators"'),
)
bank.slip(6, "no-diagnosis", (', "C": "debugging is on"', ""))
bank.slip(6, "no-diagnosis", ('"A": "many tiny operators"', '"A": "Many operators"'))
bank.slip(6, "misdiagnosed", ('"A": "many tiny operators"', '"A": "values are read"'))
bank.slip(6, "misdiagnosed", ('"B": "a graph is kept"', '"B": "work is done twice"'))
bank.slip(6, "misdiagnosed", ('"C": "debugging is on"', '"C": "values are read"'))
bank.slip(
    6,
    "misdiagnosed",
    ('"A": "many tiny operators", "B": "a graph is kept"', '"B": "many tiny operators", "A": "a graph is kept"'),
)
bank.slip(6, "nothing-returned", ('    return {"A"', '    x = {"A"'))

# ---------------------------------------------------------------- wrong: A

A = """    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)
"""
bank.slip(6, "still-tiny", (A, "    return slow_a(images, contrast)\n"))
bank.slip(
    6,
    "still-tiny",
    (A, "    means = [image.mean(dim=(1, 2), keepdim=True) for image in images]\n    mean = torch.stack(means)\n"
        "    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)\n"),
)  # fmt: skip
bank.slip(
    6,
    "still-tiny",
    (A, "    planes = []\n    for c in range(images.shape[1]):\n        plane = images[:, c]\n        mean = plane.mean(dim=(1, 2), keepdim=True)\n"
        "        planes.append(((plane - mean) * contrast[:, None, None] + mean).clamp(-3, 3))\n    return torch.stack(planes, dim=1)\n"),
)  # fmt: skip
bank.slip(6, "wrong-axes", ("dim=(2, 3)", "dim=(1, 2, 3)"))
bank.slip(6, "wrong-axes", ("images.mean(dim=(2, 3), keepdim=True)", "images.mean()"))
bank.slip(6, "contrast-broadcast", ("contrast[:, None, None, None]", "contrast"))
bank.slip(6, "contrast-broadcast", ("contrast[:, None, None, None]", "contrast[None, :, None, None]"))
bank.slip(6, "mean-lost-dimensions", (", keepdim=True", ""))
bank.slip(6, "off-device", ("contrast[:,", "contrast.cpu().to(images.device)[:,"))
bank.slip(6, "off-device", ("contrast[:,", "(contrast * torch.tensor(1.0).to(images))[:,"))
bank.slip(6, "contrast-broadcast", ("contrast[:, None, None, None]", "contrast[:, None, None]"))
bank.slip(6, "not-limited", (" + mean).clamp(-3, 3)", " + mean)"))
bank.slip(
    6,
    "contrast-wrong",
    ("(images - mean) * contrast[:, None, None, None] + mean", "images * contrast[:, None, None, None]"),
)
bank.slip(6, "contrast-wrong", (".clamp(-3, 3)", ".clamp(-1, 1)"))
bank.slip(
    6,
    "images-changed",
    (
        A,
        "    mean = images.mean(dim=(2, 3), keepdim=True)\n    return images.sub_(mean).mul_(contrast[:, None, None, None]).add_(mean).clamp_(-3, 3)\n",
    ),
)
bank.slip(6, "other-dtype", (A, "    images = images.float()\n" + A))
bank.slip(
    6,
    "off-device",
    (
        A,
        "    x, f = images.float().numpy(), contrast.float().numpy()[:, None, None, None]\n    mean = x.mean(axis=(2, 3), keepdims=True)\n    return torch.from_numpy(((x - mean) * f + mean).clip(-3, 3)).to(images)\n",
    ),
)
bank.slip(
    6,
    "off-device",
    ("contrast[:, None, None, None]", "torch.tensor(contrast.tolist(), dtype=images.dtype)[:, None, None, None]"),
)
bank.slip(
    6,
    "off-device",
    (".clamp(-3, 3)", ".clamp(torch.tensor([-3.0], dtype=images.dtype), torch.tensor([3.0], dtype=images.dtype))"),
)
bank.slip(6, "nothing-returned", ("    return ((images - mean)", "    x = ((images - mean)"))

# ---------------------------------------------------------------- wrong: B

B = """    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(images), labels) for images, labels in batches]
    return torch.stack(losses).mean()
"""
bank.slip(6, "graph-still-kept", (B, "    return slow_b(model, batches)\n"))
bank.slip(
    6,
    "still-recorded",
    (B, B.replace("    with torch.no_grad():\n    ", "").replace("labels) for", "labels).detach() for")),
)
bank.slip(
    6,
    "graph-still-kept",
    (B, B.replace("    with torch.no_grad():\n    ", "") + "\n\nKEPT = []\n"),
    (
        "    return torch.stack(losses).mean()\n\n\nKEPT",
        "    KEPT.extend(losses)\n    return torch.stack(losses).mean().detach()\n\n\nKEPT",
    ),
)
bank.slip(  # recorded, and let go at the end
    6,
    "still-recorded",
    (B, B.replace("    with torch.no_grad():\n    ", "").replace(".mean()", ".mean().detach()")),
)
bank.slip(6, "trains-in-validation", (B, B.replace("    model.eval()\n", "")))
bank.slip(6, "trains-in-validation", (B, B.replace("model.eval()", "model.train()")))
bank.slip(
    6, "recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    torch.set_grad_enabled(False)\n"))
)
bank.slip(
    6, "recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    model.requires_grad_(False)\n"))
)
bank.slip(
    6, "recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    model.requires_grad_(False)\n").replace("    return", "    model.requires_grad_(True)\n    return"))
)  # fmt: skip
bank.slip(
    6, "not-a-tensor", (B, B.replace("torch.stack(losses).mean()", "sum(loss.item() for loss in losses) / len(losses)"))
)
bank.slip(
    6,
    "traded-for-waits",
    (
        B,
        B.replace("labels) for", "labels).item() for").replace(
            "torch.stack(losses).mean()", "torch.tensor(losses).mean()"
        ),
    ),
)
bank.slip(6, "mean-wrong", (B, B.replace(".mean()", ".sum()")))
bank.slip(6, "mean-wrong", (B, B.replace("torch.stack(losses).mean()", "losses[-1]")))
bank.slip(
    6,
    "mean-over-images",
    (
        B,
        B.replace("labels) for", 'labels, reduction="sum") for').replace(
            "torch.stack(losses).mean()", "torch.stack(losses).sum() / sum(len(l) for _, l in batches)"
        ),
    ),
)
bank.slip(
    6,
    "passes-again",
    (
        B,
        B.replace(
            "    return",
            "        losses = [F.cross_entropy(model(images), labels) for images, labels in batches]\n    return",
        ),
    ),
)

# ---------------------------------------------------------------- wrong: C

MENDED = """    with torch.autograd.set_detect_anomaly(False):
        return train_through(model, batches, optimizer)
"""
C = """    losses = []
    with torch.autograd.set_detect_anomaly(False):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)
"""
bank.slip(6, None, (MENDED, C))  # without the given loop
bank.slip(6, "still-debugging", (MENDED, "    return slow_c(model, batches, optimizer)\n"))
bank.slip(
    6, "still-debugging", (MENDED, C.replace("    with torch.autograd.set_detect_anomaly(False):\n", "    if True:\n"))
)
bank.slip(6, "still-debugging", (MENDED, C.replace("set_detect_anomaly(False)", "detect_anomaly()")))
bank.slip(
    6,
    "still-debugging",
    (
        MENDED,
        C.replace("    return", "    torch.autograd.set_detect_anomaly(False)\n    return").replace(
            "    with torch.autograd.set_detect_anomaly(False):\n", "    if True:\n"
        ),
    ),
)
bank.slip(
    6, "still-debugging", (MENDED, C.replace("set_detect_anomaly(False)", "set_detect_anomaly(True, check_nan=False)"))
)
bank.slip(
    6, "switch-flipped", (MENDED, C.replace("    return", "    torch.autograd.set_detect_anomaly(True)\n    return"))
)
BY_HAND = "    before = torch.is_anomaly_enabled()\n    torch.autograd.set_detect_anomaly(False)\n"
LOOP = "    losses = train_through(model, batches, optimizer)\n"
bank.slip(6, "switch-flipped", (MENDED, BY_HAND + LOOP + "    return losses\n"))
PUT_BACK = "    torch.autograd.set_detect_anomaly(before)\n    return losses\n"  # and check_nan is on
bank.slip(6, "switch-flipped", (MENDED, BY_HAND + LOOP + PUT_BACK))
bank.slip(6, "mode-in-training", (MENDED, C.replace("    losses = []\n", "    losses = []\n    model.eval()\n")))
bank.slip(6, "losses-with-graph", (MENDED, C.replace("loss.detach()", "loss")))
bank.slip(
    6,
    "traded-for-waits",
    (MENDED, C.replace("loss.detach()", "loss.item()").replace("torch.stack(losses)", "torch.tensor(losses)")),
)
bank.slip(6, "not-a-tensor", (MENDED, C.replace("torch.stack(losses)", "losses")))
bank.slip(6, "not-a-tensor", (MENDED, C.replace("torch.stack(losses)", "torch.stack(losses).mean()")))
bank.slip(6, "losses-wrong", (MENDED, C.replace("            optimizer.zero_grad()\n", "")))
bank.slip(6, "losses-wrong", (MENDED, C.replace("            optimizer.step()\n", "")))
bank.slip(6, "passes-again", (MENDED, C.replace("loss.detach())", "F.cross_entropy(model(images), labels).detach())")))
bank.slip(
    6,
    "weights-not-trained",
    (
        MENDED,
        C.replace(
            "            optimizer.step()\n", "            if len(losses) < 3:\n                optimizer.step()\n"
        ),
    ),
)

bank.slip(6, "traded-for-waits", ("[F.cross_entropy(model(images), labels) for", "[F.cross_entropy(model(images), labels).cpu() for"))
bank.slip(
    6,
    "loop-off-device",
    ("losses = [F.cross_entropy(model(images), labels) for", "losses = [F.cross_entropy(model(images.cpu()), labels) for"),
)
bank.slip(
    6,
    "traded-for-waits",
    (
        "        return train_through(model, batches, optimizer)",
        "        losses = []\n        for images, labels in batches:\n            loss = F.cross_entropy(model(images), labels)\n"
        "            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n"
        "            losses.append(loss.detach().cpu())\n        return torch.stack(losses)",
    ),
)

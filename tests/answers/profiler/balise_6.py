"""Answers to balise 6 of 04_profiler: three slow loops."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 6, whole=True)

# ---------------------------------------------------------------- right

bank.text(
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

bank.hint("no-diagnosis", 'diagnosis() must return {{"A": …, "B": …, "C": …}}, with one of AILMENTS for each.')
bank.slip(
    "no-diagnosis",
    ('{"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}', '"many tiny operators"'),
)
bank.slip("no-diagnosis", (', "C": "debugging is on"', ""))
bank.slip("no-diagnosis", ('"A": "many tiny operators"', '"A": "Many operators"'), variant=True)
bank.hint("misdiagnosed", "{name!r} is not the ailment of {loop}. Its symptoms: {symptoms}.")
bank.slip("misdiagnosed", ('"A": "many tiny operators"', '"A": "values are read"'))
bank.slip("misdiagnosed", ('"B": "a graph is kept"', '"B": "work is done twice"'))
bank.slip("misdiagnosed", ('"C": "debugging is on"', '"C": "values are read"'))
bank.slip(
    "misdiagnosed",
    ('"A": "many tiny operators", "B": "a graph is kept"', '"B": "many tiny operators", "A": "a graph is kept"'),
    variant=True,
)
bank.slip("nothing-returned", ('    return {"A"', '    x = {"A"'))

# ---------------------------------------------------------------- wrong: A

A = """    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)
"""
bank.hint("still-tiny", "{few} operators for {n} images of 3 channels, but {many} for {m} images of {channels}: the "
          "number still depends on the number of images or channels.")  # fmt: skip
bank.slip("still-tiny", (A, "    return slow_a(images, contrast)\n"))
bank.slip("still-tiny",
    (A, "    means = [image.mean(dim=(1, 2), keepdim=True) for image in images]\n    mean = torch.stack(means)\n"
        "    return ((images - mean) * contrast[:, None, None, None] + mean).clamp(-3, 3)\n"),
)  # fmt: skip
bank.slip("still-tiny",
    (A, "    planes = []\n    for c in range(images.shape[1]):\n        plane = images[:, c]\n        mean = plane.mean(dim=(1, 2), keepdim=True)\n"
        "        planes.append(((plane - mean) * contrast[:, None, None] + mean).clamp(-3, 3))\n    return torch.stack(planes, dim=1)\n"),
    variant=True)  # fmt: skip
bank.hint("wrong-axes", "You change the contrast around another mean. Each channel of each image has its own.")
bank.slip("wrong-axes", ("dim=(2, 3)", "dim=(1, 2, 3)"))
bank.slip("wrong-axes", ("images.mean(dim=(2, 3), keepdim=True)", "images.mean()"), variant=True)
bank.hint("contrast-broadcast", "The factors are applied along the wrong dimension: contrast[i] belongs to image i, "
          "but a tensor of shape (b,) is aligned with the last dimension.")  # fmt: skip
bank.slip("contrast-broadcast", ("contrast[:, None, None, None]", "contrast"))
bank.slip("contrast-broadcast", ("contrast[:, None, None, None]", "contrast[None, :, None, None]"))
bank.hint("mean-lost-dimensions", "The means have shape (b, c) and are applied along the wrong dimensions. "
          "keepdim=True keeps the averaged dimensions, with size 1.")  # fmt: skip
bank.slip("mean-lost-dimensions", (", keepdim=True", ""), variant=True)
bank.hint("off-device", "mended_a leaves the device, or waits for it: {error}")
bank.slip("off-device", ("contrast[:,", "contrast.cpu().to(images.device)[:,"))
bank.slip("off-device", ("contrast[:,", "(contrast * torch.tensor(1.0).to(images))[:,"))
bank.slip("contrast-broadcast", ("contrast[:, None, None, None]", "contrast[:, None, None]"), variant=True)
bank.hint("not-limited", "The limit of ±3 is missing.")
bank.slip("not-limited", (" + mean).clamp(-3, 3)", " + mean)"), variant=True)
bank.hint("contrast-wrong", "The result of mended_a differs from that of slow_a.")
bank.slip(
    "contrast-wrong",
    ("(images - mean) * contrast[:, None, None, None] + mean", "images * contrast[:, None, None, None]"),
)
bank.slip("contrast-wrong", (".clamp(-3, 3)", ".clamp(-1, 1)"), variant=True)
bank.hint("images-changed", "mended_a changed the images that it was given. Leave them as they are.")
bank.slip(
    "images-changed",
    (
        A,
        "    mean = images.mean(dim=(2, 3), keepdim=True)\n    return images.sub_(mean).mul_(contrast[:, None, None, None]).add_(mean).clamp_(-3, 3)\n",
    ),
    variant=True,
)
bank.hint("other-dtype", "The result has dtype {got}, but the images have {expected}.")
bank.slip("other-dtype", (A, "    images = images.float()\n" + A), variant=True)
bank.slip(
    "off-device",
    (
        A,
        "    x, f = images.float().numpy(), contrast.float().numpy()[:, None, None, None]\n    mean = x.mean(axis=(2, 3), keepdims=True)\n    return torch.from_numpy(((x - mean) * f + mean).clip(-3, 3)).to(images)\n",
    ),
)
bank.slip(
    "off-device",
    ("contrast[:, None, None, None]", "torch.tensor(contrast.tolist(), dtype=images.dtype)[:, None, None, None]"),
)
bank.slip(
    "off-device",
    (".clamp(-3, 3)", ".clamp(torch.tensor([-3.0], dtype=images.dtype), torch.tensor([3.0], dtype=images.dtype))"),
    variant=True,
)
bank.slip("nothing-returned", ("    return ((images - mean)", "    x = ((images - mean)"))

# ---------------------------------------------------------------- wrong: B

B = """    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(images), labels) for images, labels in batches]
    return torch.stack(losses).mean()
"""
bank.hint("graph-still-kept", "What mended_b returns or keeps is still attached to a graph that holds {n} tensors.")
bank.slip("graph-still-kept", (B, "    return slow_b(model, batches)\n"))
bank.hint("still-recorded", "mended_b still records what a backward pass would need ({n} tensors saved for a network "
          "of {layers} layers). detach() comes too late: recording must be off while the network computes.")  # fmt: skip
bank.slip(
    "still-recorded",
    (B, B.replace("    with torch.no_grad():\n    ", "").replace("labels) for", "labels).detach() for")),
)
bank.slip(
    "graph-still-kept",
    (B, B.replace("    with torch.no_grad():\n    ", "") + "\n\nKEPT = []\n"),
    (
        "    return torch.stack(losses).mean()\n\n\nKEPT",
        "    KEPT.extend(losses)\n    return torch.stack(losses).mean().detach()\n\n\nKEPT",
    ),
    variant=True,
)
bank.slip(  # recorded, and let go at the end
    "still-recorded",
    (B, B.replace("    with torch.no_grad():\n    ", "").replace(".mean()", ".mean().detach()")),
    variant=True,
)
bank.hint("trains-in-validation", "In mended_b the model is not in eval mode.")
bank.slip("trains-in-validation", (B, B.replace("    model.eval()\n", "")))
bank.slip("trains-in-validation", (B, B.replace("model.eval()", "model.train()")), variant=True)
bank.hint("recording-left-off", "After mended_b, gradients are no longer recorded, so the next training step would "
          "learn nothing.")  # fmt: skip
bank.slip(
    "recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    torch.set_grad_enabled(False)\n"))
)
bank.slip("recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    model.requires_grad_(False)\n")))
bank.slip("recording-left-off", (B, B.replace("    with torch.no_grad():\n    ", "    model.requires_grad_(False)\n").replace("    return", "    model.requires_grad_(True)\n    return")),
    variant=True)  # fmt: skip
bank.hint("not-a-tensor", "{loop} returned {kind}; the slow loop returned a tensor of shape {shape}.")
bank.slip(
    "not-a-tensor", (B, B.replace("torch.stack(losses).mean()", "sum(loss.item() for loss in losses) / len(losses)"))
)
bank.hint("traded-for-waits", "{loop} reads {n} values for {batches} batches. That is a new ailment instead of the "
          "old one. Add up tensors.")  # fmt: skip
bank.slip(
    "traded-for-waits",
    (
        B,
        B.replace("labels) for", "labels).item() for").replace(
            "torch.stack(losses).mean()", "torch.tensor(losses).mean()"
        ),
    ),
)
bank.hint("mean-wrong", "mended_b doesn't return the mean of the losses.")
bank.slip("mean-wrong", (B, B.replace(".mean()", ".sum()")))
bank.slip("mean-wrong", (B, B.replace("torch.stack(losses).mean()", "losses[-1]")), variant=True)
bank.hint("mean-over-images", "This is the mean over all images. slow_b takes the mean over the batches, in which "
          "each batch counts the same.")  # fmt: skip
bank.slip(
    "mean-over-images",
    (
        B,
        B.replace("labels) for", 'labels, reduction="sum") for').replace(
            "torch.stack(losses).mean()", "torch.stack(losses).sum() / sum(len(l) for _, l in batches)"
        ),
    ),
    variant=True,
)
bank.hint("passes-again", "{loop} calls the network {n} times for {batches} batches.")
bank.slip(
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
bank.slip(None, (MENDED, C))  # without the given loop
bank.hint("still-debugging", "Anomaly detection is on inside mended_c{when}.")
bank.slip("still-debugging", (MENDED, "    return slow_c(model, batches, optimizer)\n"))
bank.slip(
    "still-debugging", (MENDED, C.replace("    with torch.autograd.set_detect_anomaly(False):\n", "    if True:\n"))
)
bank.slip("still-debugging", (MENDED, C.replace("set_detect_anomaly(False)", "detect_anomaly()")))
bank.slip(
    "still-debugging",
    (
        MENDED,
        C.replace("    return", "    torch.autograd.set_detect_anomaly(False)\n    return").replace(
            "    with torch.autograd.set_detect_anomaly(False):\n", "    if True:\n"
        ),
    ),
)
bank.slip(
    "still-debugging",
    (MENDED, C.replace("set_detect_anomaly(False)", "set_detect_anomaly(True, check_nan=False)")),
    variant=True,
)
bank.hint("switch-flipped", "After mended_c, anomaly detection is not set as before the call: whether it is on, and "
          "its check_nan. `with torch.autograd.set_detect_anomaly(False):` restores both.")  # fmt: skip
bank.slip(
    "switch-flipped", (MENDED, C.replace("    return", "    torch.autograd.set_detect_anomaly(True)\n    return"))
)
BY_HAND = "    before = torch.is_anomaly_enabled()\n    torch.autograd.set_detect_anomaly(False)\n"
LOOP = "    losses = train_through(model, batches, optimizer)\n"
bank.slip("switch-flipped", (MENDED, BY_HAND + LOOP + "    return losses\n"))
PUT_BACK = "    torch.autograd.set_detect_anomaly(before)\n    return losses\n"  # and check_nan is on
bank.slip("switch-flipped", (MENDED, BY_HAND + LOOP + PUT_BACK), variant=True)
bank.hint("mode-in-training", "mended_c switches the model to eval mode. It trains, so leave the mode alone.")
bank.slip(
    "mode-in-training", (MENDED, C.replace("    losses = []\n", "    losses = []\n    model.eval()\n")), variant=True
)
bank.hint("losses-with-graph", "The losses that mended_c returns still carry their graphs. Detach them.")
bank.slip("losses-with-graph", (MENDED, C.replace("loss.detach()", "loss")), variant=True)
bank.slip(
    "traded-for-waits",
    (MENDED, C.replace("loss.detach()", "loss.item()").replace("torch.stack(losses)", "torch.tensor(losses)")),
)
bank.slip("not-a-tensor", (MENDED, C.replace("torch.stack(losses)", "losses")))
bank.slip("not-a-tensor", (MENDED, C.replace("torch.stack(losses)", "torch.stack(losses).mean()")), variant=True)
bank.hint("losses-wrong", "mended_c doesn't return the losses of slow_c.")
bank.slip("losses-wrong", (MENDED, C.replace("            optimizer.zero_grad()\n", "")))
bank.slip("losses-wrong", (MENDED, C.replace("            optimizer.step()\n", "")), variant=True)
bank.slip(
    "passes-again",
    (MENDED, C.replace("loss.detach())", "F.cross_entropy(model(images), labels).detach())")),
    variant=True,
)
bank.hint("weights-not-trained", "After mended_c, the weights differ from those after slow_c.")
bank.slip(
    "weights-not-trained",
    (
        MENDED,
        C.replace(
            "            optimizer.step()\n", "            if len(losses) < 3:\n                optimizer.step()\n"
        ),
    ),
    variant=True,
)

bank.slip(
    "traded-for-waits",
    ("[F.cross_entropy(model(images), labels) for", "[F.cross_entropy(model(images), labels).cpu() for"),
)
bank.hint("loop-off-device", "When model and batches are on a GPU, a tensor in {loop} is not: {error}")
bank.slip(
    "loop-off-device",
    (
        "losses = [F.cross_entropy(model(images), labels) for",
        "losses = [F.cross_entropy(model(images.cpu()), labels) for",
    ),
    variant=True,
)
bank.slip(
    "traded-for-waits",
    (
        "        return train_through(model, batches, optimizer)",
        "        losses = []\n        for images, labels in batches:\n            loss = F.cross_entropy(model(images), labels)\n"
        "            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n"
        "            losses.append(loss.detach().cpu())\n        return torch.stack(losses)",
    ),
    variant=True,
)

"""Answers to balises 2 and 4 of 01_gpu_acceleration."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration")

# ---------------------------------------------------------------- balise 2


def moved(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


@bank.right(2)
def train_step(model, images, labels, optimizer, device):
    images = images.to(device=device, dtype=torch.float32, non_blocking=True)
    labels = labels.to(device=device, non_blocking=True)
    for p in model.parameters():
        p.grad = None
    logits = model(images)
    loss = nn.CrossEntropyLoss()(logits, labels)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return loss.clone(), logits.clone()


@bank.right(2)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.nll_loss(F.log_softmax(logits, dim=1), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), logits.detach()]


@bank.right(2)
def train_step(model, images, labels, optimizer, device):
    x = torch.empty_like(images, device=device).copy_(images, non_blocking=True)
    y = torch.empty_like(labels, device=device).copy_(labels, non_blocking=True)
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    optimizer.step()
    return loss.data, logits.data


@bank.wrong(2, "no-loss")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@bank.wrong(2, "nothing-returned")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


@bank.wrong(2, "loss-not-tensor")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.item(), logits.detach()


@bank.wrong(2, "graph-kept")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss, logits


@bank.wrong(2, "graph-kept")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits


@bank.wrong(2, "no-update")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss.detach(), logits.detach()


@bank.wrong(2, "no-update")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    with torch.no_grad():
        logits = model(images)
        return F.cross_entropy(logits, labels), logits


@bank.wrong(2, "gradients-cleared")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "gradients-add-up")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "step-before-backward")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    return loss.detach(), logits.detach()


@bank.wrong(2, "step-before-backward")
def train_step(model, images, labels, optimizer, device):
    optimizer.step()
    optimizer.zero_grad()
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss.detach(), logits.detach()


@bank.wrong(2, "sum-not-mean-loss")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "softmax-twice")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits.softmax(dim=1), labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "wrong-loss")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "wrong-logits")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach().softmax(dim=1)


@bank.wrong(2, "wrong-weights")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "wrong-weights")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "eval-mode")
def train_step(model, images, labels, optimizer, device):
    model.eval()
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "hidden-sync")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    if torch.isnan(loss):
        raise ValueError("the loss is not a number")
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "hidden-sync")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach().cpu(), logits.detach().cpu()


@bank.wrong(2, "model-moved")
def train_step(model, images, labels, optimizer, device):
    model.to(device)
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "not-moved")
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "not-moved")
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images.to(device, non_blocking=True))
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "device-ignored")
def train_step(model, images, labels, optimizer, device):
    images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "moved-twice")
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images.to(device, non_blocking=True))
    loss = F.cross_entropy(logits, labels.to(device, non_blocking=True))
    correct = logits.argmax(1) == labels.to(device, non_blocking=True)  # noqa: F841
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong(2, "blocking")
def train_step(model, images, labels, optimizer, device):
    images, labels = images.to(device), labels.to(device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.slip(
    2,
    None,
    (
        "    loss = F.cross_entropy(logits, labels)\n",
        "    loss = -(F.log_softmax(logits, 1) * F.one_hot(labels, logits.shape[1])).sum(1).mean()\n",
    ),
)
bank.slip(
    2,
    None,
    (
        "    logits = model(images)\n",
        "    with torch.autocast(device_type=device.type, enabled=False):\n        logits = model(images)\n",
    ),
)
bank.slip(
    2,
    None,
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        print(torch.cuda.memory_allocated())\n",
    ),
)
bank.slip(2, "hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    torch.cuda.synchronize()\n"))
bank.slip(
    2,
    "hidden-sync",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n",
    ),
)
bank.slip(
    2,
    "hidden-sync",
    (
        "    logits = model(images)\n",
        '    logits = model(images)\n    if device.type == "cuda":\n        torch.cuda.current_stream().synchronize()\n',
    ),
)
bank.slip(2, "hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    torch.cuda.empty_cache()\n"))
bank.slip(
    2,
    "hidden-sync",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if loss.is_cuda:\n        done = torch.cuda.Event()\n"
        "        done.record(torch.cuda.current_stream(device))\n        while not done.query():\n            pass\n",
    ),
)
bank.slip(2, "hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    print(loss)\n"))
bank.slip(2, "hidden-sync", ("    optimizer.step()\n", '    optimizer.step()\n    print(f"loss {loss.detach()}")\n'))
bank.slip(
    2,
    "hidden-sync",
    (
        "    loss = F.cross_entropy(logits, labels)\n",
        "    known = labels >= 0\n    loss = F.cross_entropy(logits[known], labels[known])\n",
    ),
)
bank.slip(
    2,
    "forward-twice",
    ("    loss = F.cross_entropy(logits, labels)\n", "    loss = F.cross_entropy(model(images), labels)\n"),
)
bank.slip(2, "pinned-in-step", ("    images = images.to(", "    images = images.pin_memory().to("))
bank.slip(
    2,
    "optimizer-unused",
    (
        "    logits = model(images)\n",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n    logits = model(images)\n",
    ),
)
bank.slip(
    2,
    "optimizer-unused",
    (
        "    optimizer.step()\n",
        '    with torch.no_grad():\n        for p in model.parameters():\n            p -= optimizer.param_groups[0]["lr"] * p.grad\n',
    ),
    ("    optimizer.zero_grad(set_to_none=True)\n", "    model.zero_grad()\n"),
)
bank.slip(2, "no-update", ("    loss.backward()\n", ""))
bank.slip(
    2,
    "no-longer-pinned",
    (
        "    images = images.to(",
        "    images = images.contiguous(memory_format=torch.channels_last)\n    images = images.to(",
    ),
)
bank.slip(
    2,
    "no-longer-pinned",
    ("    labels = labels.to(", "    labels = labels.clone()\n    labels = labels.to("),
    variant=True,
)
bank.slip(
    2,
    "device-ignored",
    (
        "    images = images.to(",
        '    device = "cuda" if torch.cuda.is_available() else device\n    images = images.to(',
    ),
)
bank.slip(
    2,
    "hidden-sync",
    ("    loss.backward()\n", "    loss.backward()\n    if loss.is_cuda and loss.isnan():\n        raise ValueError\n"),
)


LOSSES = []


@bank.wrong(2, "graph-kept")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    LOSSES.append(loss)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


# ---------------------------------------------------------------- balise 4


def counted(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.right(4)
def evaluate(model, loader, device):
    mode = model.training
    model.train(False)
    try:
        with torch.no_grad():
            return counted(model, loader, device)
    finally:
        model.train(mode)


@bank.right(4)
@torch.inference_mode()
def evaluate(model, loader, device):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    logits, labels = [], []
    for x, y in loader:
        logits.append(model(x.to(device, non_blocking=True)))
        labels.append(y.to(device, non_blocking=True))
    for module, mode in modes.items():
        module.training = mode
    logits, labels = torch.cat(logits), torch.cat(labels)
    loss = F.cross_entropy(logits, labels)
    return [loss.item(), (logits.argmax(1) == labels).float().mean().item()]


@bank.wrong(4, "train-mode")
def evaluate(model, loader, device):
    with torch.no_grad():
        return counted(model, loader, device)


@bank.wrong(4, "gradients-recorded")
def evaluate(model, loader, device):
    mode = model.training
    model.eval()
    found = counted(model, loader, device)
    model.train(mode)
    return found


@bank.wrong(4, "mode-not-restored")
def evaluate(model, loader, device):
    model.eval()
    with torch.no_grad():
        return counted(model, loader, device)


@bank.wrong(4, "mode-forced")
def evaluate(model, loader, device):
    model.eval()
    with torch.no_grad():
        found = counted(model, loader, device)
    model.train()
    return found


def in_eval(inner):
    def evaluate(model, loader, device):
        mode = model.training
        model.eval()
        with torch.no_grad():
            found = inner(model, loader, device)
        model.train(mode)
        return found

    return evaluate


@bank.wrong(4, "validation-unweighted")
@in_eval
def evaluate(model, loader, device):
    losses, accuracies = [], []
    for images, labels in loader:
        logits = model(images.to(device))
        losses.append(F.cross_entropy(logits, labels.to(device)))
        accuracies.append((logits.argmax(1) == labels.to(device)).float().mean())
    return torch.stack(losses).mean().item(), torch.stack(accuracies).mean().item()


@bank.wrong(4, "validation-percent")
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return loss, 100 * accuracy


@bank.wrong(4, "first-batch-only")
@in_eval
def evaluate(model, loader, device):
    for images, labels in loader:
        logits = model(images.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        return loss.item(), (logits.argmax(1) == labels.to(device)).float().mean().item()


@bank.wrong(4, "begins-anew")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for _ in range(len(loader)):
        images, labels = next(iter(loader))
        logits = model(images.to(device))
        loss = loss + F.cross_entropy(logits, labels.to(device), reduction="sum")
        correct = correct + (logits.argmax(1) == labels.to(device)).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "loader-bypassed")
@in_eval
def evaluate(model, loader, device):
    return counted(model, [loader.dataset[:]], device)


@bank.wrong(4, "loader-bypassed")
@in_eval
def evaluate(model, loader, device):
    data = loader.dataset
    return counted(model, torch.utils.data.DataLoader(data, batch_size=len(data)), device)


@bank.wrong(4, "batches-split")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = torch.cat([model(image[None].to(device)) for image in images])
        loss = loss + F.cross_entropy(logits, labels.to(device), reduction="sum")
        correct = correct + (logits.argmax(1) == labels.to(device)).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "not-averaged")
@in_eval
def evaluate(model, loader, device):
    loss, correct = 0.0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss = loss + F.cross_entropy(logits, labels.to(device))
        correct = correct + (logits.argmax(1) == labels.to(device)).sum()
    return float(loss), float(correct) / len(loader.dataset)


@bank.wrong(4, "validation-wrong")
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return loss, 1 - accuracy


@bank.wrong(4, "sync-each-batch")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss += F.cross_entropy(logits, labels.to(device)).item() * len(labels)
        correct += (logits.argmax(1) == labels.to(device)).sum().item()
        n += len(labels)
    return loss / n, correct / n


@bank.wrong(4, "validation-not-moved")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images)
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "not-two-floats")
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return torch.tensor(loss), torch.tensor(accuracy)


@bank.wrong(4, "nothing-returned")
@in_eval
def evaluate(model, loader, device):
    print(counted(model, loader, device))


@bank.wrong(4, "weights-changed")
@in_eval
def evaluate(model, loader, device):
    found = counted(model, loader, device)
    for parameter in model.parameters():
        parameter.mul_(0.999)
    return found


@bank.wrong(4, "validation-not-moved")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.right(4)
@in_eval
def evaluate(model, loader, device):
    images, labels = (torch.cat(parts).to(device) for parts in zip(*loader, strict=True))
    logits = model(images)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


@bank.right(4)
@in_eval
def evaluate(model, loader, device):
    """Autocast switched off; the loss from one-hot labels."""
    loss, correct = torch.zeros((), device=device), torch.zeros((), device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device_type=device.type, enabled=False):
            logits = model(images)
        chosen = F.one_hot(labels, num_classes=logits.shape[1])
        loss -= (chosen * logits.log_softmax(1)).sum()
        correct += (logits.argmax(1) == labels).sum()
    n = len(loader.dataset)
    return loss.item() / n, correct.item() / n


@bank.wrong(4, "sync-each-batch")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss += F.cross_entropy(logits, labels).cpu() * len(labels)
        correct += (logits.argmax(1) == labels).sum().cpu()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "sync-each-batch")
@in_eval
def evaluate(model, loader, device):
    logits, labels = [], []
    for x, y in loader:
        logits.append(model(x.to(device)).cpu())
        labels.append(y)
    logits, labels = torch.cat(logits), torch.cat(labels)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


@bank.wrong(4, "waits-each-batch")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "gradients-left-off")
def evaluate(model, loader, device):
    mode = model.training
    model.eval()
    torch.set_grad_enabled(False)
    found = counted(model, loader, device)
    model.train(mode)
    return found


@bank.wrong(4, "gradients-left-off")
@in_eval
def evaluate(model, loader, device):
    model.requires_grad_(False)
    return counted(model, loader, device)


@bank.wrong(4, "frozen-trained")
@in_eval
def evaluate(model, loader, device):
    model.requires_grad_(False)
    found = counted(model, loader, device)
    model.requires_grad_(True)
    return found


@bank.wrong(4, "twice")
@in_eval
def evaluate(model, loader, device):
    n = sum(len(labels) for _, labels in loader)
    loss, accuracy = counted(model, loader, device)
    return loss * n / n, accuracy


@bank.wrong(4, "twice")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = loss + F.cross_entropy(model(images), labels, reduction="sum")
        correct = correct + (model(images).argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong(4, "model-moved")
@in_eval
def evaluate(model, loader, device):
    return counted(model.to(device), loader, device)


@bank.wrong(4, "gradients-recorded")
def evaluate(model, loader, device):
    return counted(copy.deepcopy(model).eval(), loader, device)

FREEZE = "    model.eval()\n    flags = [p.requires_grad for p in model.parameters()]\n    model.requires_grad_(False)\n"
BACK = "    model.train(was_training)\n    for p, flag in zip(model.parameters(), flags):\n        p.requires_grad_(flag)\n"
WITHOUT = ("    with torch.inference_mode():\n", "    if True:\n")
whole = Bank("01_gpu_acceleration", whole=True)
whole.slip(4, None, ("    model.eval()\n", FREEZE), WITHOUT, ("    model.train(was_training)\n", BACK))
whole.slip(4, "gradients-left-off", ("    model.eval()\n", FREEZE), WITHOUT)
bank.add(whole)

FORWARD = "    loss = F.cross_entropy(logits, labels)\n"
DEAD = "    if torch.allclose(logits, torch.zeros_like(logits)):\n        raise ValueError('the network is dead')\n"
bank.slip(2, "left-the-device", ("return loss.detach(),", 'return loss.detach().to("cpu", non_blocking=True),'))
bank.slip(2, "hidden-sync", (FORWARD, FORWARD + DEAD))
bank.slip(2, "switched-to-train", ("    optimizer.zero_grad(", "    model.train()\n    optimizer.zero_grad("))
bank.slip(2, "eval-mode", ("    optimizer.step()\n", "    optimizer.step()\n    model.eval()\n"))  # ready for validation

bank.slip(
    2,
    "no-step-in-eval",
    (
        "    logits = model(images)\n    loss = F.cross_entropy(logits, labels)\n    loss.backward()\n    optimizer.step()\n",
        "    with torch.set_grad_enabled(model.training):\n        logits = model(images)\n"
        "        loss = F.cross_entropy(logits, labels)\n    if model.training:\n        loss.backward()\n"
        "        optimizer.step()\n",
    ),
)
bank.slip(2, "streams-unordered", ("    optimizer.zero_grad(", "    if device.type == 'cuda':\n        with torch.cuda.stream(torch.cuda.Stream(device)):\n            images = images * 1.0\n    optimizer.zero_grad("))

"""Answers to balise 2 of 01_gpu_acceleration: a training step that never waits."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 2)


def moved(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


@bank.right()
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


@bank.right()
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.nll_loss(F.log_softmax(logits, dim=1), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), logits.detach()]


@bank.right()
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


bank.hint("no-loss", "Return two things: the loss and the logits.")


@bank.wrong("no-loss", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@bank.wrong("nothing-returned")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


bank.hint("loss-not-tensor", "You return the loss as {kind}. Converting it to a Python number waits for the GPU in "
          "every step. Return the tensor.")  # fmt: skip


@bank.wrong("loss-not-tensor", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.item(), logits.detach()


bank.hint("graph-kept", "The {what} still carries its graph. Keeping it would keep every activation of the step in "
          "memory. Return it detached.", edge=True)  # fmt: skip


@bank.wrong("graph-kept")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss, logits


@bank.wrong("graph-kept")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits


bank.hint("no-update", "The weights did not change. Do you call optimizer.step() after backward()?")


@bank.wrong("no-update")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss.detach(), logits.detach()


@bank.wrong("no-update")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    with torch.no_grad():
        logits = model(images)
        return F.cross_entropy(logits, labels), logits


bank.hint("gradients-cleared", "The weights did not change, because you cleared the gradients between backward() "
          "and step().")  # fmt: skip


@bank.wrong("gradients-cleared", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("gradients-add-up", "The first step is right, but the second is not: gradients add up until zero_grad() "
          "clears them.")  # fmt: skip


@bank.wrong("gradients-add-up", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("step-before-backward", "The update is one step late: step() runs before backward() has computed the "
          "gradients of this step.")  # fmt: skip


@bank.wrong("step-before-backward")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    return loss.detach(), logits.detach()


@bank.wrong("step-before-backward", variant=True)
def train_step(model, images, labels, optimizer, device):
    optimizer.step()
    optimizer.zero_grad()
    images, labels = moved(images, labels, device)
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss.detach(), logits.detach()


bank.hint("sum-not-mean-loss", "This loss is the sum over the batch. cross_entropy gives the mean by default.")


@bank.wrong("sum-not-mean-loss", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("softmax-twice", "cross_entropy takes logits: it applies log-softmax itself.")


@bank.wrong("softmax-twice", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits.softmax(dim=1), labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("wrong-loss", "The loss is not the mean cross-entropy of the batch before the update.")


@bank.wrong("wrong-loss", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("wrong-logits", "The logits are not the network's output for this batch.")


@bank.wrong("wrong-logits", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach().softmax(dim=1)


bank.hint("wrong-weights", "After three steps the weights differ from those of a plain loop.")


@bank.wrong("wrong-weights")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong("wrong-weights", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("eval-mode", "The step switched the model to eval(): batch norm does not learn, dropout is off. A "
          "training step must not change the mode.", edge=True)  # fmt: skip


@bank.wrong("eval-mode")
def train_step(model, images, labels, optimizer, device):
    model.eval()
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong("hidden-sync")
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


@bank.wrong("hidden-sync")
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach().cpu(), logits.detach().cpu()


@bank.wrong("model-moved")
def train_step(model, images, labels, optimizer, device):
    model.to(device)
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("not-moved", "You did not move both images and labels to `device`: {error}")


@bank.wrong("not-moved")
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong("not-moved", variant=True)
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images.to(device, non_blocking=True))
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("device-ignored", "The step names a device itself. Use the one that it is given: {error}", edge=True)


@bank.wrong("device-ignored")
def train_step(model, images, labels, optimizer, device):
    images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("moved-twice", "You make {n} copies to the device in a step. Two are enough: the images once, the labels "
          "once.", edge=True)  # fmt: skip


@bank.wrong("moved-twice", variant=True)
def train_step(model, images, labels, optimizer, device):
    optimizer.zero_grad()
    logits = model(images.to(device, non_blocking=True))
    loss = F.cross_entropy(logits, labels.to(device, non_blocking=True))
    correct = logits.argmax(1) == labels.to(device, non_blocking=True)  # noqa: F841
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.hint("blocking", "A copy makes the CPU wait until it is done. With non_blocking=True (and pinned memory), the "
          "CPU continues during the copy.")  # fmt: skip


@bank.wrong("blocking", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = images.to(device), labels.to(device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.slip(
    None,
    (
        "    loss = F.cross_entropy(logits, labels)\n",
        "    loss = -(F.log_softmax(logits, 1) * F.one_hot(labels, logits.shape[1])).sum(1).mean()\n",
    ),
)

bank.slip(
    None,
    (
        "    logits = model(images)\n",
        "    with torch.autocast(device_type=device.type, enabled=False):\n        logits = model(images)\n",
    ),
)

bank.slip(
    None,
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        print(torch.cuda.memory_allocated())\n",
    ),
)

bank.slip("hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    torch.cuda.synchronize()\n"))

bank.slip(
    "hidden-sync",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n",
    ),
)

bank.slip(
    "hidden-sync",
    (
        "    logits = model(images)\n",
        '    logits = model(images)\n    if device.type == "cuda":\n        torch.cuda.current_stream().synchronize()\n',
    ),
)

bank.slip("hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    torch.cuda.empty_cache()\n"))

bank.slip(
    "hidden-sync",
    (
        "    optimizer.step()\n",
        "    optimizer.step()\n    if loss.is_cuda:\n        done = torch.cuda.Event()\n"
        "        done.record(torch.cuda.current_stream(device))\n        while not done.query():\n            pass\n",
    ),
)

bank.slip("hidden-sync", ("    optimizer.step()\n", "    optimizer.step()\n    print(loss)\n"))

bank.slip("hidden-sync", ("    optimizer.step()\n", '    optimizer.step()\n    print(f"loss {loss.detach()}")\n'))

bank.slip(
    "hidden-sync",
    (
        "    loss = F.cross_entropy(logits, labels)\n",
        "    known = labels >= 0\n    loss = F.cross_entropy(logits[known], labels[known])\n",
    ),
)

bank.hint("forward-twice", "You call the network {n} times in one step. Once is enough: the loss and the logits "
          "come from the same pass.")  # fmt: skip
bank.slip(
    "forward-twice",
    ("    loss = F.cross_entropy(logits, labels)\n", "    loss = F.cross_entropy(model(images), labels)\n"),
    variant=True,
)

bank.hint("pinned-in-step", "pin_memory() in the step makes one more copy of the batch while everything waits, and "
          "it fails without a GPU. The loader does this ahead of time with pin_memory=True.", edge=True)  # fmt: skip
bank.slip("pinned-in-step", ("    images = images.to(", "    images = images.pin_memory().to("), variant=True)

bank.hint("optimizer-unused", "The optimizer that you were given did not take the step. Call its step(). A new "
          "optimizer in every step, or an update by hand, forgets the momentum.")  # fmt: skip
bank.slip(
    "optimizer-unused",
    (
        "    logits = model(images)\n",
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n    logits = model(images)\n",
    ),
)

bank.slip(
    "optimizer-unused",
    (
        "    optimizer.step()\n",
        '    with torch.no_grad():\n        for p in model.parameters():\n            p -= optimizer.param_groups[0]["lr"] * p.grad\n',
    ),
    ("    optimizer.zero_grad(set_to_none=True)\n", "    model.zero_grad()\n"),
    variant=True,
)

bank.slip("no-update", ("    loss.backward()\n", ""), variant=True)

bank.hint("no-longer-pinned", "On a GPU, a copy waits in spite of non_blocking=True{line}, because its source is "
          "no longer the loader's pinned memory. Copy first, then compute on the device.", edge=True)  # fmt: skip
bank.slip(
    "no-longer-pinned",
    (
        "    images = images.to(",
        "    images = images.contiguous(memory_format=torch.channels_last)\n    images = images.to(",
    ),
)

bank.slip(
    "no-longer-pinned",
    ("    labels = labels.to(", "    labels = labels.clone()\n    labels = labels.to("),
    variant=True,
)

bank.slip(
    "device-ignored",
    (
        "    images = images.to(",
        '    device = "cuda" if torch.cuda.is_available() else device\n    images = images.to(',
    ),
    variant=True,
)

bank.slip(
    "hidden-sync",
    ("    loss.backward()\n", "    loss.backward()\n    if loss.is_cuda and loss.isnan():\n        raise ValueError\n"),
)

LOSSES = []


@bank.wrong("graph-kept", variant=True)
def train_step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    LOSSES.append(loss)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


FORWARD = "    loss = F.cross_entropy(logits, labels)\n"

DEAD = "    if torch.allclose(logits, torch.zeros_like(logits)):\n        raise ValueError('the network is dead')\n"

bank.hint("left-the-device", "You copy a result to the CPU. Leave the loss and the logits on the device: with "
          "non_blocking=True, you do not know whether the numbers have arrived.", edge=True)  # fmt: skip
bank.slip(
    "left-the-device", ("return loss.detach(),", 'return loss.detach().to("cpu", non_blocking=True),'), variant=True
)

bank.slip("hidden-sync", (FORWARD, FORWARD + DEAD))

bank.hint("switched-to-train", "The model was in eval mode, and the step switched it to train(): batch norm "
          "learns, dropout is on. Leave the choice of the mode to the loop.", edge=True)  # fmt: skip
bank.slip(
    "switched-to-train", ("    optimizer.zero_grad(", "    model.train()\n    optimizer.zero_grad("), variant=True
)

bank.slip(
    "eval-mode", ("    optimizer.step()\n", "    optimizer.step()\n    model.eval()\n"), variant=True
)  # ready for validation

bank.hint("no-step-in-eval", "A network in eval mode, for example one with frozen batch norms, learned nothing. A "
          "step must work in both modes.", edge=True)  # fmt: skip
bank.slip(
    "no-step-in-eval",
    (
        "    logits = model(images)\n    loss = F.cross_entropy(logits, labels)\n    loss.backward()\n    optimizer.step()\n",
        "    with torch.set_grad_enabled(model.training):\n        logits = model(images)\n"
        "        loss = F.cross_entropy(logits, labels)\n    if model.training:\n        loss.backward()\n"
        "        optimizer.step()\n",
    ),
    variant=True,
)

bank.hint("streams-unordered", "On a GPU, two streams use the same memory and neither waits for the other "
          "({error}). The network may read data that has not arrived yet. current_stream().wait_stream(the other) "
          "sets the order. Without an extra stream, there is nothing to order.", edge=True)  # fmt: skip
bank.slip(
    "streams-unordered",
    (
        "    optimizer.zero_grad(",
        "    if device.type == 'cuda':\n        with torch.cuda.stream(torch.cuda.Stream(device)):\n            images = images * 1.0\n    optimizer.zero_grad(",
    ),
    variant=True,
)

bank.edge("model-moved")

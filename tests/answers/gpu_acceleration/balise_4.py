"""Answers to balise 4 of 01_gpu_acceleration: validation."""

import copy

import torch
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 4)


def counted(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.right()
def evaluate(model, loader, device):
    mode = model.training
    model.train(False)
    try:
        with torch.no_grad():
            return counted(model, loader, device)
    finally:
        model.train(mode)


@bank.right()
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


bank.hint("train-mode", "The network ran in training mode: dropout is on, and batch norm learns from the "
          "validation images. Call model.eval() first.")  # fmt: skip


@bank.wrong("train-mode", variant=True)
def evaluate(model, loader, device):
    with torch.no_grad():
        return counted(model, loader, device)


bank.hint("gradients-recorded", "The forward pass records what a backward pass would need, which wastes memory. "
          "Use torch.inference_mode() or torch.no_grad().")  # fmt: skip


@bank.wrong("gradients-recorded")
def evaluate(model, loader, device):
    mode = model.training
    model.eval()
    found = counted(model, loader, device)
    model.train(mode)
    return found


bank.hint("mode-not-restored", "Afterwards the model is still in eval mode, and training continues without "
          "dropout. Restore the mode that it had before.")  # fmt: skip


@bank.wrong("mode-not-restored", variant=True)
def evaluate(model, loader, device):
    model.eval()
    with torch.no_grad():
        return counted(model, loader, device)


bank.hint("mode-forced", "The model came in eval mode and left in training mode. Remember model.training, and "
          "restore it.")  # fmt: skip


@bank.wrong("mode-forced", variant=True)
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


bank.hint("validation-unweighted", "This is a mean over batches. The last batch is smaller: weight each batch by "
          "its number of images.")  # fmt: skip


@bank.wrong("validation-unweighted", variant=True)
@in_eval
def evaluate(model, loader, device):
    losses, accuracies = [], []
    for images, labels in loader:
        logits = model(images.to(device))
        losses.append(F.cross_entropy(logits, labels.to(device)))
        accuracies.append((logits.argmax(1) == labels.to(device)).float().mean())
    return torch.stack(losses).mean().item(), torch.stack(accuracies).mean().item()


bank.hint("validation-percent", "The accuracy is a fraction between 0 and 1, not a percentage.")


@bank.wrong("validation-percent", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return loss, 100 * accuracy


bank.hint("first-batch-only", "Only one batch was evaluated. Is the return inside the loop?")


@bank.wrong("first-batch-only", variant=True)
@in_eval
def evaluate(model, loader, device):
    for images, labels in loader:
        logits = model(images.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        return loss.item(), (logits.argmax(1) == labels.to(device)).float().mean().item()


bank.hint("begins-anew", "Each iter(loader) starts again, so you evaluated the first batch {n} times. Loop over "
          "the loader itself: for images, labels in loader.")  # fmt: skip


@bank.wrong("begins-anew", variant=True)
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


bank.hint("loader-bypassed", "You never read the loader. Loop over `loader`: its batch size, workers and "
          "transforms were chosen for validation.")  # fmt: skip


@bank.wrong("loader-bypassed")
@in_eval
def evaluate(model, loader, device):
    return counted(model, [loader.dataset[:]], device)


@bank.wrong("loader-bypassed", variant=True)
@in_eval
def evaluate(model, loader, device):
    data = loader.dataset
    return counted(model, torch.utils.data.DataLoader(data, batch_size=len(data)), device)


bank.hint("batches-split", "You call the network {n} times for 3 batches. Call it once per batch: a GPU needs many "
          "images at a time.")  # fmt: skip


@bank.wrong("batches-split", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = torch.cat([model(image[None].to(device)) for image in images])
        loss = loss + F.cross_entropy(logits, labels.to(device), reduction="sum")
        correct = correct + (logits.argmax(1) == labels.to(device)).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


bank.hint("not-averaged", "This is a sum over the images or the batches. Divide by the number of images.")


@bank.wrong("not-averaged", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, correct = 0.0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss = loss + F.cross_entropy(logits, labels.to(device))
        correct = correct + (logits.argmax(1) == labels.to(device)).sum()
    return float(loss), float(correct) / len(loader.dataset)


bank.hint("validation-wrong", "The {what} over the whole validation set is wrong.")


@bank.wrong("validation-wrong", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return loss, 1 - accuracy


bank.hint("sync-each-batch", "You read {n} values from the device for {batches} batches. Use your RunningMetrics, "
          "and read once at the end.")  # fmt: skip


@bank.wrong("sync-each-batch")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss += F.cross_entropy(logits, labels.to(device)).item() * len(labels)
        correct += (logits.argmax(1) == labels.to(device)).sum().item()
        n += len(labels)
    return loss / n, correct / n


bank.hint("validation-not-moved", "A tensor is not on `device`: {error}. Images, labels and your sums must all be "
          "there.")  # fmt: skip


@bank.wrong("validation-not-moved")
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images)
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


bank.hint("not-two-floats", "Return two Python floats: the mean loss and the accuracy.")


@bank.wrong("not-two-floats", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, accuracy = counted(model, loader, device)
    return torch.tensor(loss), torch.tensor(accuracy)


@bank.wrong("nothing-returned")
@in_eval
def evaluate(model, loader, device):
    print(counted(model, loader, device))


bank.hint("weights-changed", "Validation changed the network's weights.")


@bank.wrong("weights-changed", variant=True)
@in_eval
def evaluate(model, loader, device):
    found = counted(model, loader, device)
    for parameter in model.parameters():
        parameter.mul_(0.999)
    return found


@bank.wrong("validation-not-moved", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.right()
@in_eval
def evaluate(model, loader, device):
    images, labels = (torch.cat(parts).to(device) for parts in zip(*loader, strict=True))
    logits = model(images)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


@bank.right()
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


@bank.wrong("sync-each-batch")
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


@bank.wrong("sync-each-batch", variant=True)
@in_eval
def evaluate(model, loader, device):
    logits, labels = [], []
    for x, y in loader:
        logits.append(model(x.to(device)).cpu())
        labels.append(y)
    logits, labels = torch.cat(logits), torch.cat(labels)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


bank.hint("waits-each-batch", "{error}: {n} calls for {batches} batches, and each makes the CPU wait for the GPU. "
          "Leave them out.")  # fmt: skip


@bank.wrong("waits-each-batch", variant=True)
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


bank.hint("gradients-left-off", "Afterwards {what}: the next training step would fail or learn nothing. Disable "
          "gradients only during validation, with a context manager or a decorator.")  # fmt: skip


@bank.wrong("gradients-left-off")
def evaluate(model, loader, device):
    mode = model.training
    model.eval()
    torch.set_grad_enabled(False)
    found = counted(model, loader, device)
    model.train(mode)
    return found


@bank.wrong("gradients-left-off")
@in_eval
def evaluate(model, loader, device):
    model.requires_grad_(False)
    return counted(model, loader, device)


bank.hint("frozen-trained", "A parameter that had requires_grad=False now has requires_grad=True, so a frozen "
          "layer would be trained. Disable gradient recording, and leave the parameters' flags alone.")  # fmt: skip


@bank.wrong("frozen-trained", variant=True)
@in_eval
def evaluate(model, loader, device):
    model.requires_grad_(False)
    found = counted(model, loader, device)
    model.requires_grad_(True)
    return found


bank.hint("twice", "{what}. Once is enough: this doubles the validation time.")


@bank.wrong("twice")
@in_eval
def evaluate(model, loader, device):
    n = sum(len(labels) for _, labels in loader)
    loss, accuracy = counted(model, loader, device)
    return loss * n / n, accuracy


@bank.wrong("twice", variant=True)
@in_eval
def evaluate(model, loader, device):
    loss, correct, n = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = loss + F.cross_entropy(model(images), labels, reduction="sum")
        correct = correct + (model(images).argmax(1) == labels).sum()
        n += len(labels)
    return float(loss) / n, float(correct) / n


@bank.wrong("model-moved")
@in_eval
def evaluate(model, loader, device):
    return counted(model.to(device), loader, device)


@bank.wrong("gradients-recorded", variant=True)
def evaluate(model, loader, device):
    return counted(copy.deepcopy(model).eval(), loader, device)


FREEZE = (
    "    model.eval()\n    flags = [p.requires_grad for p in model.parameters()]\n    model.requires_grad_(False)\n"
)

BACK = "    model.train(was_training)\n    for p, flag in zip(model.parameters(), flags):\n        p.requires_grad_(flag)\n"

WITHOUT = ("    with torch.inference_mode():\n", "    if True:\n")

whole = Bank("01_gpu_acceleration", 4, whole=True)

whole.slip(None, ("    model.eval()\n", FREEZE), WITHOUT, ("    model.train(was_training)\n", BACK))

whole.slip("gradients-left-off", ("    model.eval()\n", FREEZE), WITHOUT, variant=True)

bank.add(whole)

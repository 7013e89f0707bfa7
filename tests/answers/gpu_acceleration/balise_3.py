"""Answers to balise 3 of 01_gpu_acceleration."""

from collections import deque
from functools import partial

import torch

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration", 3)


class Sums:
    """The right class, from which the wrong ones differ by a line or two."""

    def __init__(self, device):
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), device=device)
        self.n = self.steps = 0

    def update(self, loss, logits, labels):
        self.loss += loss.detach() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.n += len(labels)
        self.steps += 1

    def result(self):
        return self.loss.item() / self.n, self.correct.item() / self.n


@bank.right()
class RunningMetrics:
    """One tensor of two sums, double precision, Welford not needed."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, loss, logits, labels):
        n = labels.numel()
        self.sums[0] += n * loss
        self.sums[1] += logits.max(dim=1).indices.eq(labels).sum()
        self.sums[2] += n

    def result(self):
        loss, correct, n = self.sums.tolist()
        return loss / n, correct / n


@bank.right()
class RunningMetrics:
    """Small detached tensors in lists: they grow by a few bytes a step, which is right enough."""

    def __init__(self, device):
        self.losses, self.corrects, self.sizes = [], [], []

    def update(self, loss, logits, labels):
        self.losses.append(loss.detach().float())
        self.corrects.append((logits.detach().argmax(-1) == labels).float().mean())
        self.sizes.append(labels.shape[0])

    def result(self):
        sizes = torch.tensor(self.sizes, dtype=torch.float32, device=self.losses[0].device)
        loss, right = (torch.stack(values) @ sizes / sizes.sum() for values in (self.losses, self.corrects))
        return loss.item(), right.item()


@bank.right()
class RunningMetrics(Sums):
    """Not in place, and starting from a Python zero."""

    def __init__(self, device):
        self.loss, self.correct, self.n, self.steps = 0, 0, 0, 0

    def update(self, loss, logits, labels):
        self.loss = self.loss + loss.detach().float() * len(labels)
        self.correct = self.correct + torch.eq(logits.argmax(1), labels).sum()
        self.n += len(labels)


bank.hint("methods-missing", "The class needs the methods update and result: {error}")


@bank.wrong("methods-missing", variant=True)
class RunningMetrics:
    def __init__(self, device):
        self.n = 0

    def update(self, loss, logits, labels):
        self.n += 1

    def compute(self):
        return 0.0, 0.0


bank.hint("not-two-numbers", "result() must return two Python floats: the mean loss and the accuracy.")


@bank.wrong("not-two-numbers", variant=True)
class RunningMetrics(Sums):
    def result(self):
        return self.loss / self.n, self.correct / self.n


@bank.wrong("nothing-returned")
class RunningMetrics(Sums):
    def result(self):
        print(self.loss / self.n, self.correct / self.n)


bank.hint("unweighted-loss", "This is the mean of the batches' losses. The last batch is smaller: weight each loss "
          "by its number of images.", edge=True)  # fmt: skip


@bank.wrong("unweighted-loss", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss / len(labels), logits, labels)

    def result(self):
        return self.loss.item() / self.steps, self.correct.item() / self.n


bank.hint("unweighted-accuracy", "This is the mean of the batches' accuracies. Count the correct answers and the "
          "images instead.", edge=True)  # fmt: skip


@bank.wrong("unweighted-accuracy", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        before = self.correct.clone()
        super().update(loss, logits, labels)
        self.correct = before + (logits.argmax(1) == labels).float().mean()

    def result(self):
        return self.loss.item() / self.n, self.correct.item() / self.steps


bank.hint("percent", "The accuracy is a fraction between 0 and 1, not a percentage.")


@bank.wrong("percent", variant=True)
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n, 100 * self.correct.item() / self.n


bank.hint("not-divided", "This is a sum. Divide by the number of images seen.")


@bank.wrong("not-divided")
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item(), self.correct.item()


@bank.wrong("not-divided", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss / len(labels), logits, labels)

    def result(self):
        return self.loss.item(), self.correct.item() / self.n


bank.hint("last-batch-only", "Only the last batch counts. Add to the previous sums, do not replace them.")


@bank.wrong("last-batch-only", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = loss.detach() * len(labels)
        self.correct = (logits.argmax(1) == labels).sum()
        self.n = len(labels)


bank.hint("divided-by-steps", "The number of correct answers is divided by the number of steps. Divide by the "
          "number of images.")  # fmt: skip


@bank.wrong("divided-by-steps", variant=True)
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n, self.correct.item() / self.steps


bank.hint("wrong-loss-mean", "The mean loss over all images is wrong.")


@bank.wrong("wrong-loss-mean", variant=True)
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n / 2, self.correct.item() / self.n


bank.hint("wrong-accuracy", "The accuracy over all images is wrong: compare logits.argmax(dim=1) with the labels.")


@bank.wrong("wrong-accuracy", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        before = self.correct.clone()
        super().update(loss, logits, labels)
        self.correct = before + (logits.argmax(1) != labels).sum()


bank.hint("sync-in-update", "update() makes the CPU wait for the GPU ({error}). Add tensors on the device; read "
          "them in result().")  # fmt: skip


@bank.wrong("sync-in-update")
class RunningMetrics:
    def __init__(self, device):
        self.loss, self.correct, self.n = 0.0, 0, 0

    def update(self, loss, logits, labels):
        self.loss += loss.item() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum().item()
        self.n += len(labels)

    def result(self):
        return self.loss / self.n, self.correct / self.n


@bank.wrong("sync-in-update")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__("cpu")

    def update(self, loss, logits, labels):
        super().update(loss.detach().cpu(), logits.detach().cpu(), labels.cpu())


@bank.wrong("wrong-device")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.sums = torch.zeros(2)

    def update(self, loss, logits, labels):
        self.sums += torch.stack([loss.detach() * len(labels), (logits.argmax(1) == labels).sum()])
        self.n += len(labels)

    def result(self):
        return self.sums[0].item() / self.n, self.sums[1].item() / self.n


bank.hint("many-syncs", "result() reads {n} values from the device after {steps} steps. Add up on the device, and "
          "read only twice.")  # fmt: skip


@bank.wrong("many-syncs", variant=True)
class RunningMetrics:
    def __init__(self, device):
        self.seen = []

    def update(self, loss, logits, labels):
        self.seen.append((loss.detach().float(), (logits.argmax(1) == labels).sum(), len(labels)))

    def result(self):
        n = sum(size for _, _, size in self.seen)
        loss = sum(value.item() * size for value, _, size in self.seen)
        return loss / n, sum(right.item() for _, right, _ in self.seen) / n


bank.hint("activations-kept", "After update() the batch's logits are still in memory, because you keep the loss's "
          "graph or the batch itself. Keep detached sums.")  # fmt: skip


@bank.wrong("activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = self.loss + loss * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.n += len(labels)


@bank.wrong("activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last = logits


bank.hint("state-grows", "What the object keeps grows by {size:.0f} bytes per step. Keep sums, not batches.")


@bank.wrong("state-grows")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.history = []

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.history.append((logits.detach().clone(), labels.clone()))


bank.hint("rounded-sum", "With bfloat16 losses, your sum stops growing: beyond 256, bfloat16 cannot count in ones. "
          "Add up in float32.", edge=True)  # fmt: skip


@bank.wrong("rounded-sum", variant=True)
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = self.loss.to(loss.dtype) + loss.detach() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.n += len(labels)


bank.hint("shared-state", "A second object continues from the sums of the first one, because all objects share the "
          "attributes of the class. Create the sums in __init__, on self.", edge=True)  # fmt: skip


@bank.wrong("shared-state", variant=True)
class RunningMetrics(Sums):
    """Two sums on the class, which += writes into; the count becomes the object's own."""

    loss, correct, n, steps = torch.zeros(()), torch.zeros(()), 0, 0

    def __init__(self, device):
        pass


bank.hint("result-changes", "A second result(), without an update in between, returns something else.", edge=True)


@bank.wrong("result-changes", variant=True)
class RunningMetrics(Sums):
    def result(self):
        found = super().result()
        self.loss = self.loss * 0
        return found


@bank.wrong("sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last = float(loss.detach().float().numpy())


@bank.wrong("sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.right = torch.ones_like(labels)[logits.argmax(1) == labels].sum()


@bank.right()
class RunningMetrics:
    """Its attributes in slots; one-hot predictions."""

    __slots__ = ("images", "loss", "right")

    def __init__(self, device):
        self.loss, self.right = torch.zeros((), device=device), torch.zeros((), device=device)
        self.images = 0

    def update(self, loss, logits, labels):
        predicted = torch.nn.functional.one_hot(logits.argmax(1), num_classes=logits.shape[1])
        self.right += predicted.gather(1, labels[:, None]).sum()
        self.loss += loss.detach() * len(labels)
        self.images += len(labels)

    def result(self):
        return self.loss.item() / self.images, self.right.item() / self.images


@bank.right()
class RunningMetrics:
    """The sums are made by the first update, on the device of the loss."""

    def __init__(self, device):
        self.sums = None

    def update(self, loss, logits, labels):
        if self.sums is None:
            self.sums = torch.tensor([0.0, 0.0, 0.0], device=loss.device)
        right = (logits.argmax(1) == labels).sum()
        self.sums += torch.stack([loss.detach().float() * len(labels), right, torch.full_like(right, len(labels))])

    def result(self):
        loss, right, n = self.sums.tolist()
        return loss / n, right / n


@bank.wrong("sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        print(self.loss)


@bank.wrong("sync-in-update", variant=True)
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.device, self.images = device, torch.zeros((), device=device)

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.images += torch.tensor(len(labels)).to(self.device)


@bank.wrong("state-grows")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.history = deque()

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.history.append(logits.detach().clone())


@bank.wrong("state-grows", variant=True)
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.hits = []

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.hits.append(logits.argmax(1) == labels)


@bank.wrong("activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.labels = labels


@bank.wrong("activations-kept")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.last = deque(maxlen=2)

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last.append(logits.detach().clone())


@bank.wrong("shared-state")
class RunningMetrics:
    losses, rights, sizes = [], [], []

    def __init__(self, device):
        self.device = device

    def update(self, loss, logits, labels):
        self.losses.append(loss.detach().float() * len(labels))
        self.rights.append((logits.argmax(1) == labels).sum())
        self.sizes.append(len(labels))

    def result(self):
        n = sum(self.sizes)
        return torch.stack(self.losses).sum().item() / n, torch.stack(self.rights).sum().item() / n


bank.hint("input-changed", "update() changed the {what} that it was given. detach() shares the memory, so do not "
          "compute in place on its result.", edge=True)  # fmt: skip


@bank.wrong("input-changed")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        loss = loss.detach()
        loss *= len(labels)
        super().update(loss / len(labels), logits, labels)


bank.hint("rounded-count", "The number of correct answers stops growing, or turns negative. Counting in ones, "
          "bfloat16 only reaches 256, float16 2,048 and an int16 32,767. Count in float32 or in "
          "64-bit integers.", edge=True)  # fmt: skip


@bank.wrong("rounded-count")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.correct = torch.zeros((), device=device, dtype=torch.bfloat16)


@bank.wrong("rounded-count")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.correct = torch.zeros((), device=device, dtype=torch.int16)


bank.hint("sums-on-cpu", "update() copies to the CPU. With non_blocking=True, the CPU adds up numbers that may not "
          "have arrived yet; without it, the CPU waits. Add up on the device, and read in result().")  # fmt: skip


@bank.wrong("sums-on-cpu", variant=True)
class RunningMetrics(Sums):
    """Adds up on the CPU what may not have arrived."""

    def __init__(self, device):
        super().__init__("cpu")

    def update(self, loss, logits, labels):
        self.loss += loss.detach().to("cpu", non_blocking=True) * len(labels)
        self.correct += (logits.argmax(1) == labels).sum().to("cpu", non_blocking=True)
        self.n += len(labels)


class Later(Sums):
    """Counts in result() what update() has put off."""

    def __init__(self, device):
        super().__init__(device)
        self.later = []

    def result(self):
        self.correct += sum(one() for one in self.later)
        self.later.clear()
        return super().result()


def hits(logits, labels):
    return (logits.argmax(1) == labels).sum()


@bank.wrong("activations-kept")
class RunningMetrics(Later):
    def update(self, loss, logits, labels):
        self.loss += loss.detach() * len(labels)
        self.n += len(labels)
        self.later.append(partial(hits, logits.detach(), labels))


@bank.wrong("activations-kept", variant=True)
class RunningMetrics(Later):
    def update(self, loss, logits, labels):
        logits = logits.detach()
        self.loss += loss.detach() * len(labels)
        self.n += len(labels)
        self.later.append(lambda: (logits.argmax(1) == labels).sum())


@bank.wrong("rounded-count", variant=True)
class RunningMetrics(Sums):
    """Counts each batch in the dtype of its logits."""

    def update(self, loss, logits, labels):
        self.loss += loss.detach() * len(labels)
        self.correct += (logits.argmax(1) == labels).to(logits.dtype).sum()
        self.n += len(labels)


bank.text(
    "input-changed",
    """
class RunningMetrics:
    def __init__(self, device):
        self.mean, self.right, self.n = None, torch.zeros((), device=device), 0
    def update(self, loss, logits, labels):
        b = len(labels)
        self.n += b
        loss = loss.detach().float()
        if self.mean is None:
            self.mean = loss
        else:
            self.mean += (loss - self.mean) * (b / self.n)
        self.right += (logits.argmax(1) == labels).sum()
    def result(self):
        return self.mean.item(), self.right.item() / self.n
""",
    variant=True,
)

bank.edge("wrong-device")

"""Answers to balise 3 of 01_gpu_acceleration."""

from collections import deque
from functools import partial

import torch

from tests.answers.bank import Bank

bank = Bank("01_gpu_acceleration")


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


@bank.right(3)
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


@bank.right(3)
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


@bank.right(3)
class RunningMetrics(Sums):
    """Not in place, and starting from a Python zero."""

    def __init__(self, device):
        self.loss, self.correct, self.n, self.steps = 0, 0, 0, 0

    def update(self, loss, logits, labels):
        self.loss = self.loss + loss.detach().float() * len(labels)
        self.correct = self.correct + torch.eq(logits.argmax(1), labels).sum()
        self.n += len(labels)


@bank.wrong(3, "methods-missing")
class RunningMetrics:
    def __init__(self, device):
        self.n = 0

    def update(self, loss, logits, labels):
        self.n += 1

    def compute(self):
        return 0.0, 0.0


@bank.wrong(3, "not-two-numbers")
class RunningMetrics(Sums):
    def result(self):
        return self.loss / self.n, self.correct / self.n


@bank.wrong(3, "nothing-returned")
class RunningMetrics(Sums):
    def result(self):
        print(self.loss / self.n, self.correct / self.n)


@bank.wrong(3, "unweighted-loss")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss / len(labels), logits, labels)

    def result(self):
        return self.loss.item() / self.steps, self.correct.item() / self.n


@bank.wrong(3, "unweighted-accuracy")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        before = self.correct.clone()
        super().update(loss, logits, labels)
        self.correct = before + (logits.argmax(1) == labels).float().mean()

    def result(self):
        return self.loss.item() / self.n, self.correct.item() / self.steps


@bank.wrong(3, "percent")
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n, 100 * self.correct.item() / self.n


@bank.wrong(3, "not-divided")
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item(), self.correct.item()


@bank.wrong(3, "not-divided")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss / len(labels), logits, labels)

    def result(self):
        return self.loss.item(), self.correct.item() / self.n


@bank.wrong(3, "last-batch-only")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = loss.detach() * len(labels)
        self.correct = (logits.argmax(1) == labels).sum()
        self.n = len(labels)


@bank.wrong(3, "divided-by-steps")
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n, self.correct.item() / self.steps


@bank.wrong(3, "wrong-loss-mean")
class RunningMetrics(Sums):
    def result(self):
        return self.loss.item() / self.n / 2, self.correct.item() / self.n


@bank.wrong(3, "wrong-accuracy")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        before = self.correct.clone()
        super().update(loss, logits, labels)
        self.correct = before + (logits.argmax(1) != labels).sum()


@bank.wrong(3, "sync-in-update")
class RunningMetrics:
    def __init__(self, device):
        self.loss, self.correct, self.n = 0.0, 0, 0

    def update(self, loss, logits, labels):
        self.loss += loss.item() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum().item()
        self.n += len(labels)

    def result(self):
        return self.loss / self.n, self.correct / self.n


@bank.wrong(3, "sync-in-update")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__("cpu")

    def update(self, loss, logits, labels):
        super().update(loss.detach().cpu(), logits.detach().cpu(), labels.cpu())


@bank.wrong(3, "wrong-device")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.sums = torch.zeros(2)

    def update(self, loss, logits, labels):
        self.sums += torch.stack([loss.detach() * len(labels), (logits.argmax(1) == labels).sum()])
        self.n += len(labels)

    def result(self):
        return self.sums[0].item() / self.n, self.sums[1].item() / self.n


@bank.wrong(3, "many-syncs")
class RunningMetrics:
    def __init__(self, device):
        self.seen = []

    def update(self, loss, logits, labels):
        self.seen.append((loss.detach().float(), (logits.argmax(1) == labels).sum(), len(labels)))

    def result(self):
        n = sum(size for _, _, size in self.seen)
        loss = sum(value.item() * size for value, _, size in self.seen)
        return loss / n, sum(right.item() for _, right, _ in self.seen) / n


@bank.wrong(3, "activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = self.loss + loss * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.n += len(labels)


@bank.wrong(3, "activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last = logits


@bank.wrong(3, "state-grows")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.history = []

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.history.append((logits.detach().clone(), labels.clone()))


@bank.wrong(3, "rounded-sum")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        self.loss = self.loss.to(loss.dtype) + loss.detach() * len(labels)
        self.correct += (logits.argmax(1) == labels).sum()
        self.n += len(labels)


@bank.wrong(3, "shared-state", variant=True)
class RunningMetrics(Sums):
    """Two sums on the class, which += writes into; the count becomes the object's own."""

    loss, correct, n, steps = torch.zeros(()), torch.zeros(()), 0, 0

    def __init__(self, device):
        pass


@bank.wrong(3, "result-changes")
class RunningMetrics(Sums):
    def result(self):
        found = super().result()
        self.loss = self.loss * 0
        return found


@bank.wrong(3, "sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last = float(loss.detach().float().numpy())


@bank.wrong(3, "sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.right = torch.ones_like(labels)[logits.argmax(1) == labels].sum()


@bank.right(3)
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


@bank.right(3)
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


@bank.wrong(3, "sync-in-update")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        print(self.loss)


@bank.wrong(3, "sync-in-update")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.device, self.images = device, torch.zeros((), device=device)

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.images += torch.tensor(len(labels)).to(self.device)


@bank.wrong(3, "state-grows")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.history = deque()

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.history.append(logits.detach().clone())


@bank.wrong(3, "state-grows")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.hits = []

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.hits.append(logits.argmax(1) == labels)


@bank.wrong(3, "activations-kept")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.labels = labels


@bank.wrong(3, "activations-kept")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.last = deque(maxlen=2)

    def update(self, loss, logits, labels):
        super().update(loss, logits, labels)
        self.last.append(logits.detach().clone())


@bank.wrong(3, "shared-state")
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


@bank.wrong(3, "input-changed")
class RunningMetrics(Sums):
    def update(self, loss, logits, labels):
        loss = loss.detach()
        loss *= len(labels)
        super().update(loss / len(labels), logits, labels)


@bank.wrong(3, "rounded-count")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.correct = torch.zeros((), device=device, dtype=torch.bfloat16)


@bank.wrong(3, "rounded-count")
class RunningMetrics(Sums):
    def __init__(self, device):
        super().__init__(device)
        self.correct = torch.zeros((), device=device, dtype=torch.int16)


@bank.wrong(3, "sums-on-cpu")
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


@bank.wrong(3, "activations-kept")
class RunningMetrics(Later):
    def update(self, loss, logits, labels):
        self.loss += loss.detach() * len(labels)
        self.n += len(labels)
        self.later.append(partial(hits, logits.detach(), labels))


@bank.wrong(3, "activations-kept")
class RunningMetrics(Later):
    def update(self, loss, logits, labels):
        logits = logits.detach()
        self.loss += loss.detach() * len(labels)
        self.n += len(labels)
        self.later.append(lambda: (logits.argmax(1) == labels).sum())


@bank.wrong(3, "rounded-count")
class RunningMetrics(Sums):
    """Counts each batch in the dtype of its logits."""

    def update(self, loss, logits, labels):
        self.loss += loss.detach() * len(labels)
        self.correct += (logits.argmax(1) == labels).to(logits.dtype).sum()
        self.n += len(labels)

bank.text(
    3,
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
)

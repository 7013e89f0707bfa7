"""Answers to balise 6 of 08_data_parallel_under_the_hood: accumulate, and send with the last micro-batch."""

import contextlib

import torch
import torch.distributed as dist

from tests.answers.bank import Bank
from tests.answers.data_parallel_under_the_hood.parts import Flat, Quiet, backward_in_parts

bank = Bank("08_data_parallel_under_the_hood", 6)


def pair(slug=None, reducer=Quiet, backward=backward_in_parts, variant=False):
    bank.several(slug, reducer, backward, variant=variant)


pair()


class RightSwitch(Flat):
    """A class as context manager."""

    depth = 0

    def no_sync(self):
        return self

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1

    def hook(self, p):
        if not self.depth:
            super().hook(p)


def right_list(loss_of, parts, reducer):
    weights = torch.tensor([float(len(part)) for part in parts])
    weights = (weights / weights.sum()).tolist()
    for k, (weight, part) in enumerate(zip(weights, parts)):
        context = reducer.no_sync() if k + 1 < len(parts) else contextlib.nullcontext()
        with context:
            loss = loss_of(part)
            loss.backward(torch.full_like(loss, weight))
    return reducer.finish()


pair(reducer=RightSwitch, backward=right_list)


class RightOwnSum(Quiet):
    """Hooks are always there; the counters are made new when silence ends."""

    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        try:
            yield self
        finally:
            self.on = True
            self.reset()


pair(reducer=RightOwnSum)


class NoSwitch(Flat):
    """no_sync does nothing; each backward sends."""

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def hook(self, p):
        super().hook(p)
        if self.left[self.number[p]] == 0:
            self.left[self.number[p]] = len(self.buckets[self.number[p]])


bank.hint("every-micro-batch", "{n} collectives were started before the last micro-batch. Inside no_sync() the hooks "
          "must send nothing.")  # fmt: skip
pair("every-micro-batch", NoSwitch)


class StaysOff(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        yield


bank.hint("never-sent", "No gradient was sent, not even in the last micro-batch. The last micro-batch must run outside "
          "no_sync(): check the order of the with blocks, that the switch is set back, and that the backward reaches "
          "the parameters and their hooks.")  # fmt: skip
pair("never-sent", StaysOff)


class OffAfterError(Quiet):
    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        yield
        self.on = True


bank.hint("switch-stays", "After an exception inside no_sync(), nothing is sent any more. Reset the switch in a "
          "finally block.")  # fmt: skip
pair("switch-stays", OffAfterError, variant=True)


class DividesAnyway(Quiet):
    def hook(self, p):
        if not self.on:
            p.grad /= 2
        super().hook(p)


bank.hint("lost-local", "Inside no_sync(), p.grad must collect the sum of this rank's own gradients, unsent and "
          "undivided.")  # fmt: skip
pair("lost-local", DividesAnyway, variant=True)


class Forgets(Quiet):
    """Drops what was collected when silence ends."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.drop = True

    def hook(self, p):
        if self.on and getattr(self, "drop", False):
            self.fresh = getattr(self, "fresh", {})
            if p in self.fresh:
                p.grad -= self.fresh.pop(p)
        if not self.on:
            self.fresh = getattr(self, "fresh", {})
            self.fresh[p] = p.grad.clone()
        super().hook(p)


bank.hint("only-the-last", "Only the gradient of the last micro-batch came out: the gradients collected before it are "
          "lost.")  # fmt: skip
pair("only-the-last", Forgets)


class AtTheEnd(Quiet):
    def hook(self, p):
        pass

    def finish(self):
        for k in range(len(self.buckets)):
            self.start(k)
        super().finish()


bank.hint("no-overlap-left", "In the last micro-batch, no all-reduce was started before backward had ended. In that "
          "micro-batch the hooks must work as usual.")  # fmt: skip
pair("no-overlap-left", AtTheEnd)


class CountsInSilence(Quiet):
    """Counts gradients also inside no_sync, and so starts too early."""

    def hook(self, p):
        k = self.number[p]
        self.left[k] -= 1
        if self.on and self.left[k] <= 0:
            self.start(k)


pair("sent-again", CountsInSilence)


def sends_each(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for part in parts:
        (loss_of(part) * len(part) / rows).backward()
    reducer.finish()


pair("every-micro-batch", backward=sends_each, variant=True)


def all_silent(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    with reducer.no_sync():
        for part in parts:
            (loss_of(part) * len(part) / rows).backward()
    reducer.finish()


pair("never-sent", backward=all_silent, variant=True)


def varied(weight=lambda part, parts: len(part) / sum(map(len, parts)), each=False, finish=True, keep=None):
    def backward(loss_of, parts, reducer):
        for k, part in enumerate(parts):
            with contextlib.nullcontext() if k == len(parts) - 1 else reducer.no_sync():
                (loss_of(part) * weight(part, parts)).backward()
            if each:
                reducer.finish()
        if finish and not each:
            reducer.finish()

    return backward


bank.hint("part-weights", "The gradients of micro-batches of {rows} rows were added up with the weights {weights}; "
          "expected are {due}. Each one is the gradient of a mean: weight it by its rows divided by all rows of the "
          "rank. The reducer divides by the number of ranks.")  # fmt: skip
for weight in (
    lambda part, parts: 1.0,
    lambda part, parts: len(part),
    lambda part, parts: 1 / len(part),
    lambda part, parts: len(part) * dist.get_world_size() / sum(map(len, parts)),  # as where no reducer divides
):
    pair("part-weights", backward=varied(weight=weight))

pair("part-weights", backward=varied(weight=lambda part, parts: 1 / len(parts)))

bank.hint("finish-forgotten", "finish() was not called after the last backward.")
pair("finish-forgotten", backward=varied(finish=False), variant=True)

bank.hint("finish-every-time", "finish() was called {n} times. Call it once, after the last micro-batch.")
pair("finish-every-time", backward=varied(each=True), variant=True)


def one_graph(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    sum(loss_of(part) * len(part) / rows for part in parts).backward()
    reducer.finish()


bank.hint("graphs-kept", "All forward passes ran before the first backward. All their activations are in memory at "
          "once, which accumulation is meant to avoid: run forward and backward of one micro-batch, then the next.")  # fmt: skip
pair("graphs-kept", backward=one_graph, variant=True)


def retained(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for k, part in enumerate(parts):
        with contextlib.nullcontext() if k == len(parts) - 1 else reducer.no_sync():
            loss = loss_of(part) * (len(part) / rows)
            loss.backward(retain_graph=True)
    reducer.finish()


bank.hint("retained", "After backward, {n} tensors that a micro-batch had saved for it were still in memory: "
          "retain_graph keeps them, so the activations of all micro-batches are in memory at once.")  # fmt: skip
pair("retained", backward=retained)


def losses_kept(loss_of, parts, reducer):
    rows, losses = sum(map(len, parts)), []
    with reducer.no_sync():
        for part in parts[:-1]:
            losses.append(loss_of(part))
            torch.autograd.backward(losses[-1], torch.tensor(len(part) / rows), retain_graph=True)
    losses.append(loss_of(parts[-1]))
    (losses[-1] * (len(parts[-1]) / rows)).backward()
    reducer.finish()
    return torch.stack(losses).sum().item()


pair("retained", backward=losses_kept, variant=True)


def one_batch(loss_of, parts, reducer):
    loss_of(torch.cat(parts)).backward()
    reducer.finish()


bank.hint("not-in-parts", "You call loss_of with {rows} rows at once; a micro-batch has at most {most}. Micro-batches "
          "exist to save memory: call loss_of for each part separately.")  # fmt: skip
pair("not-in-parts", backward=one_batch, variant=True)


def only_last(loss_of, parts, reducer):
    rows = sum(map(len, parts))
    for part in parts[:-1]:
        loss_of(part)
    (loss_of(parts[-1]) * len(parts[-1]) / rows).backward()
    reducer.finish()


pair("only-the-last", backward=only_last, variant=True)


def counted_first(loss_of, parts, reducer):
    """How many rows there are on all ranks is asked, not assumed."""
    rows = torch.tensor(sum(map(len, parts)))
    dist.all_reduce(rows)
    mean_of_ranks = rows.item() / dist.get_world_size()
    for k, part in enumerate(parts):
        with reducer.no_sync() if k < len(parts) - 1 else contextlib.nullcontext():
            (loss_of(part) * (len(part) / mean_of_ranks)).backward()
    reducer.finish()


pair(backward=counted_first)


def sent_after_all(loss_of, parts, reducer):
    """All micro-batches in silence; then the hooks are called by hand."""
    rows = sum(map(len, parts))
    with reducer.no_sync():
        for part in parts:
            (loss_of(part) * (len(part) / rows)).backward()
    for p in reducer.number:
        reducer.hook(p)
    reducer.finish()


pair("no-overlap-left", backward=sent_after_all, variant=True)


class Announced(Flat):
    """The course's Bucket, and hooks that do not look at the switch."""

    def __init__(self, parameters, capacity):
        super().__init__(parameters, capacity)
        self.missing = set(self.number)

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def place(self, p):
        self.missing.remove(p)

    def hook(self, p):
        self.place(p)
        super().hook(p)


pair("placed-twice", Announced)

slips = Bank("08_data_parallel_under_the_hood", 6, whole=True)

slips.slip("part-weights", ("(loss_of(part) * len(part) / total)", "(loss_of(part) / total)"), variant=True)

bank.add(slips)

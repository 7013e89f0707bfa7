"""Hold back what an asynchronous collective or message writes until somebody waits for it."""

import sys

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dlojz_tp.measure.communications import collective

_WATCHED = "wait", "is_completed", "get_future"
_WRITES_NOTHING = "send", "barrier"


class Withheld(TorchDispatchMode):
    """Inside, a collective's result is in its tensors only once its `Work` was waited for: never earlier by chance.

    Without it, whether a forgotten wait() shows depends on which rank is the quicker one. Here the collective runs on
    copies. They are brought in by `wait()`, by an `is_completed()` that says True, and before what hangs on
    `get_future()`; `left()` brings in what nobody waited for. A message that is received counts as a collective here.
    Enter it before a mode that counts. Not for DDP and FSDP, which wait in C++.

    waiting: called, if given, when a rank is about to wait for a collective.
    old: how often a collective was waited for that had been started before this was entered.
    overwritten: how often a tensor was written while a collective was still to write it.
    """

    def __init__(self, waiting=None):
        super().__init__()
        self.waiting, self.old, self.overwritten = waiting, 0, 0
        self._started: set[int] = set()
        self._running: dict[int, tuple] = {}  # of a Work: itself, (tensor, copy, bytes before) of all that it writes

    def __enter__(self):
        self._before = {name: getattr(dist.Work, name) for name in _WATCHED}
        for name in _WATCHED:
            setattr(dist.Work, name, _as_method(getattr(self, f"_{name}")))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for name, method in self._before.items():
            setattr(dist.Work, name, method)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = collective(func, args)
        if call is None or func.namespace != "c10d" or call[0] in _WRITES_NOTHING:
            return func(*args, **(kwargs or {}))
        copies: list[tuple] = []
        out = func(_copied(args[0], copies), *args[1:], **(kwargs or {}))
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        self._running[id(work)] = work, copies
        self._started.add(id(work))
        # copies that came back would count for who looks at memory, until gloo's threads let go of them
        return (args[0], *out[1:]) if isinstance(out, tuple) else out

    def forgotten(self) -> int:
        """How many collectives and messages nobody has waited for."""
        return len(self._running)

    def to_come(self) -> list[torch.Tensor]:
        """The tensors that something running will still write."""
        return [tensor for _, copies in self._running.values() for tensor, *_ in copies]

    def left(self) -> int:
        """Wait for all that nobody has waited for, on all ranks; how many collectives that were."""
        running = list(self._running.values())
        for work, _ in running:
            self._before["wait"](work)
            self._bring(work)
        return len(running)

    def _wait(self, work, *args, **kwargs):
        if self.waiting is not None and id(work) in self._running:
            self.waiting()
        self.old += id(work) not in self._started
        done = self._before["wait"](work, *args, **kwargs)
        self._bring(work)
        return done

    def _is_completed(self, work):
        done = self._before["is_completed"](work)
        if done:
            self._bring(work)
        return done

    def _get_future(self, work):
        def bring(future):
            self._bring(work)
            return future.value()

        return self._before["get_future"](work).then(bring)

    def _bring(self, work) -> None:
        _, copies = self._running.pop(id(work), (None, ()))
        with _disable_current_modes():
            for tensor, copy, before in copies:
                self.overwritten += not torch.equal(_raw(tensor), before)
                tensor.data.copy_(copy)


class Kept(Withheld):
    """Withheld; keeps sends alive, which gloo forgets with their handles.

    dropped: how many sends nobody else kept when something was waited for. unsent(): how many nobody has waited for.
    """

    def __init__(self):
        super().__init__()
        self._sends, self.dropped = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket._qualified_op_name == "c10d::send":
            self._sends.append(dist.Work.unbox(out))
        return out

    def unsent(self) -> int:
        """How many sends nobody has waited for."""
        return len(self._sends)

    def _wait(self, work, *args, **kwargs):
        # an entry that only this list and the call itself refer to
        self.dropped += sum(sys.getrefcount(self._sends[k]) <= 2 for k in range(len(self._sends)))
        self._sends = [send for send in self._sends if send is not work]
        return super()._wait(work, *args, **kwargs)


def _copied(written, copies):
    """Copies of the tensors that a collective writes, in lists as deep; one with gaps is left as it is."""
    if isinstance(written, list | tuple):
        return [_copied(one, copies) for one in written]
    copy = written.detach().clone()
    if copy.stride() != written.stride():
        return written
    copies.append((written, copy, _raw(written)))
    return copy


def _raw(tensor) -> torch.Tensor:
    """(bytes,) a copy: memory that nobody has filled may hold anything, and NaN is not equal to itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _as_method(call):
    """A function for a class: its instances are handed to `call`, which has its own self."""
    return lambda work, *args, **kwargs: call(work, *args, **kwargs)

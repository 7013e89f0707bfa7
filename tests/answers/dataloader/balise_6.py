"""Answers to balise 6 of 05_dataloader."""

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._pytree import tree_map

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 6)


def each(batch, function):
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


class Base:
    """A right one: thread, semaphore, queue. Wrong ones override a part of it."""

    def __init__(self, loader, device, depth=2):
        self.loader, self.device, self.depth = loader, device, depth
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def places(self):
        return threading.Semaphore(self.depth)

    def move(self, batch):
        if self.stream is None:
            return each(batch, lambda t: t.to(self.device)), None
        with torch.cuda.stream(self.stream):
            moved = each(batch, lambda t: t.to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event

    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))

    def fill(self, free, ready, stop):
        try:
            batches = iter(self.loader)
            while True:
                free.acquire()
                if stop.is_set():
                    return
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                ready.put((self.move(batch), None))
        except BaseException as error:
            ready.put((None, error))
        ready.put((None, None))

    def end(self, free, stop, thread):
        stop.set()
        free.release()
        thread.join()

    def __iter__(self):
        free, ready, stop = self.places(), queue.Queue(), threading.Event()
        thread = threading.Thread(target=self.fill, args=(free, ready, stop), daemon=True)
        thread.start()
        try:
            while True:
                found, error = ready.get()
                if error is not None:
                    raise error
                if found is None:
                    return
                free.release()
                self.receive(*found)
                yield found[0]
        finally:
            self.end(free, stop, thread)


@bank.right()
class Prefetcher(Base):
    """Waits for the whole side stream in place of an event; batches as they are on the CPU."""

    def move(self, batch):
        if self.stream is None:
            return batch, None
        with torch.cuda.stream(self.stream):
            return each(batch, lambda t: t.cuda(non_blocking=True)), True

    def receive(self, batch, copied):
        if copied:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            each(batch, lambda t: t.record_stream(current))


@bank.right()
class Prefetcher:
    """A thread pool of one, `depth` futures ahead."""

    def __init__(self, loader, device, depth=2):
        self.loader, self.device, self.depth = loader, device, depth

    def __iter__(self):
        side = torch.cuda.Stream() if self.device.type == "cuda" else None
        batches, end = iter(self.loader), object()

        def fetch():
            batch = next(batches, end)
            if batch is end:
                return end, None
            with torch.cuda.stream(side):
                moved = each(batch, lambda t: t.to(self.device, non_blocking=True))
                return moved, side.record_event() if side else None

        with ThreadPoolExecutor(1) as pool:
            ahead = deque(pool.submit(fetch) for _ in range(self.depth))
            try:
                while True:
                    batch, event = ahead.popleft().result()
                    if batch is end:
                        return
                    ahead.append(pool.submit(fetch))
                    if event:
                        torch.cuda.current_stream().wait_event(event)
                        each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()


@bank.right()
class Prefetcher:
    """An iterator of its own, a condition variable, no queue; the copying stream waits for the computing one."""

    def __init__(self, loader, device, depth=2):
        self.loader, self.device, self.depth = loader, device, depth

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        held, changed = deque(), threading.Condition()
        state = {"stop": False, "end": False, "error": None}
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        compute = torch.cuda.current_stream() if side else None
        batches = iter(self.loader)

        def work():
            try:
                while True:
                    with changed:
                        changed.wait_for(lambda: state["stop"] or len(held) < self.depth)
                        if state["stop"]:
                            return
                    batch = next(batches)
                    if side:
                        side.wait_stream(compute)
                        with torch.cuda.stream(side):
                            batch = each(batch, lambda t: t.to(device=self.device, non_blocking=True))
                    with changed:
                        held.append(batch)
                        changed.notify_all()
            except StopIteration:
                pass
            except Exception as error:
                state["error"] = error
            with changed:
                state["end"] = True
                changed.notify_all()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: held or state["end"])
                    if not held:
                        break
                    batch = held.popleft()
                    changed.notify_all()
                if side:
                    compute.wait_stream(side)
                yield batch
            if state["error"]:
                raise state["error"]
        finally:
            with changed:
                state["stop"] = True
                changed.notify_all()
            thread.join()


@bank.right()
class Prefetcher(Base):
    """On a GPU no thread: copies are queued ahead by the loop itself, for they do not block."""

    def __iter__(self):
        if self.stream is None:
            yield from super().__iter__()
            return
        batches, ahead = iter(self.loader), deque()
        for batch in batches:
            ahead.append(self.move(batch))
            if len(ahead) > self.depth:
                moved, event = ahead.popleft()
                self.receive(moved, event)
                yield moved
        while ahead:
            moved, event = ahead.popleft()
            self.receive(moved, event)
            yield moved


PLAIN = """
import threading
from collections import deque

import torch
from torch.utils._pytree import tree_map


class Prefetcher:
    def __init__(self, loader, device, depth=2):
        self.loader, self.device, self.depth = loader, device, depth
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copied(self, batch):
        if self.side is None:
            return batch
        with torch.cuda.stream(self.side):
            return self.each(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def received(self, batch):
        if self.side is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.side)
            self.each(batch, lambda tensor: tensor.record_stream(current))
        return batch

    def each(self, batch, call):
        return tree_map(lambda leaf: call(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)

    def work(self, batches, held, changed, state):
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: state["stop"] or len(held) < self.depth)
                    if state["stop"]:
                        return
                batch = self.copied(next(batches))
                with changed:
                    held.append(batch)
                    changed.notify_all()
        except StopIteration:
            pass
        except Exception as error:
            state["error"] = error
        with changed:
            state["end"] = True
            changed.notify_all()

    def __iter__(self):
        held, changed, state = deque(), threading.Condition(), {"stop": False, "end": False, "error": None}
        args = iter(self.loader), held, changed, state
        thread = threading.Thread(target=self.work, args=args, daemon=True)
        thread.start()
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: held or state["end"])
                    if not held:
                        break
                    batch = held.popleft()
                    changed.notify_all()
                yield self.received(batch)
            if state["error"]:
                raise state["error"]
        finally:
            with changed:
                state["stop"] = True
                changed.notify_all()
            thread.join()
"""
ONCE = """
    def __iter__(self):
        self.batches = getattr(self, "batches", None) or self.once()
        return self.batches

    def once(self):
"""
bank.text(None, PLAIN)


bank.hint("wrong-batches", "These are not the loader's batches, each once and in the loader's order.")


@bank.wrong("wrong-batches")
class Prefetcher(Base):
    """Drops the first: it was taken to start the pipeline."""

    def __iter__(self):
        batches = super().__iter__()
        next(batches, None)
        yield from batches


@bank.wrong("wrong-batches", variant=True)
class Prefetcher(Base):
    def __iter__(self):
        yield from reversed(list(super().__iter__()))


@bank.wrong("nothing-returned")
class Prefetcher(Base):
    def move(self, batch):
        return None, None


bank.hint(
    "batches-lost",
    "The last {n} batches never came. When the loader ends, the batches that are ready must still be given.",
)
bank.variant("batches-lost", PLAIN, ("iter(self.loader),", "iter([*self.loader][:-1]),"))


@bank.wrong("batches-lost")
class Prefetcher(Base):
    """The loop ends when the thread does."""

    def __iter__(self):
        batches, previous = super().__iter__(), None
        for batch in batches:
            if previous is not None:
                yield previous
            previous = batch


bank.hint(
    "nest-changed",
    "A nested batch came back as {kind}. Tuples, lists, dictionaries and everything that is not a tensor must keep "
    "their form.",
)
bank.variant(
    "nest-changed",
    PLAIN,
    (
        "            return batch\n        with",
        "            return tuple(batch) if isinstance(batch, list) else batch\n        with",
    ),
)


@bank.wrong("nest-changed")
class Prefetcher(Base):
    def move(self, batch):
        if isinstance(batch, tuple | list):
            return tuple(item.to(self.device) if isinstance(item, torch.Tensor) else item for item in batch), None
        return super().move(batch)


@bank.wrong("raised")
class Prefetcher(Base):
    """Only pairs of tensors."""

    def move(self, batch):
        images, labels = batch
        return (images.to(self.device), labels.to(self.device)), None


bank.hint(
    "not-ahead",
    "While the loop works, nothing is taken from the loader: each batch is fetched only when the loop asks for it.",
)


@bank.wrong("not-ahead")
class Prefetcher(Base):
    def __iter__(self):
        for batch in self.loader:
            yield self.move(batch)[0]


@bank.wrong("not-ahead", variant=True)
class Prefetcher(Base):
    """A thread for each batch, waited for at once."""

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            batches, end = iter(self.loader), object()
            while (batch := pool.submit(next, batches, end).result()) is not end:
                yield batch


bank.hint(
    "depth-exceeded",
    "With depth={depth}, {n} batches were taken ahead of the one in use. Each takes memory: let the thread wait.",
)


@bank.wrong("depth-exceeded")
class Prefetcher(Base):
    def places(self):
        return threading.Semaphore(10**6)


@bank.wrong("depth-exceeded", variant=True)
class Prefetcher(Base):
    def __iter__(self):
        yield from list(self.loader)


bank.hint(
    "one-too-many",
    "With depth={depth}, {n} batches are ahead of the one in use: the queue of that size is full, and the thread "
    "holds one more. Let the thread get a place in the queue before it asks the loader.",
)
bank.variant("one-too-many", PLAIN, ("len(held) < self.depth", "len(held) <= self.depth"))


@bank.wrong("one-too-many")
class Prefetcher(Base):
    """A full queue, and one in the thread's hand."""

    def places(self):
        return threading.Semaphore(self.depth + 1)


bank.hint(
    "depth-not-used",
    "With depth={depth}, only {n} batches were taken ahead, though the loop worked for long. The thread may hold more.",
)


@bank.wrong("depth-not-used")
class Prefetcher(Base):
    def places(self):
        return threading.Semaphore(1)


@bank.wrong("depth-not-used", variant=True)
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, 2)


bank.hint(
    "error-lost",
    "The loader raised an error, but the loop ended as if all were well. Send the error to the loop and raise it "
    "there.",
)
bank.variant("error-lost", PLAIN, ('state["error"] = error', "print(error)"))


@bank.wrong("error-lost")
class Prefetcher(Base):
    """An error ends the thread like the end of the loader."""

    def fill(self, free, ready, stop):
        class Silent:
            def put(_, item):  # noqa: N805
                ready.put((item[0], None))

        super().fill(free, Silent(), stop)


bank.hint("error-early", "The error was raised after {n} batches, but in the loader, {before} batches come before it.")
bank.variant(
    "error-early",
    PLAIN,
    ("if not held:", 'if not held or state["error"]:'),
    ("yield self.received(batch)\n", "yield self.received(batch)\n                threading.Event().wait(0.01)\n"),
)


@bank.wrong("error-early")
class Prefetcher(Base):
    """Looks for an error first, whatever is still ready."""

    def __iter__(self):
        self.error = None
        yield from super().__iter__()

    def move(self, batch):
        return batch, None

    def receive(self, batch, event):
        threading.Event().wait(0.005)
        if self.error:
            raise self.error

    def fill(self, free, ready, stop):
        class Noticing:
            def put(_, item):  # noqa: N805
                self.error = item[1] or self.error
                ready.put(item)

        super().fill(free, Noticing(), stop)


bank.hint("error-changed", "The loader raised a {raised}, but a {kind} arrived. Raise the same error.")
bank.variant("error-changed", PLAIN, ('state["error"] = error', 'state["error"] = ValueError(str(error))'))


@bank.wrong("error-changed")
class Prefetcher(Base):
    def fill(self, free, ready, stop):
        class Naming:
            def put(_, item):  # noqa: N805
                ready.put((item[0], RuntimeError(str(item[1]))) if item[1] else item)

        super().fill(free, Naming(), stop)


bank.hint(
    "loop-hangs",
    "The loop waited for a batch that never came{after}. Did the thread die silently, or does it wait for a place "
    "that the loop never gave back?",
)


@bank.wrong("loop-hangs")
class Prefetcher(Base):
    """The thread dies of the error, and nobody tells the loop."""

    def fill(self, free, ready, stop):
        class Deaf:
            def put(_, item):  # noqa: N805
                if item[1] is not None:
                    raise SystemExit  # ends the thread
                ready.put(item)

        super().fill(free, Deaf(), stop)


@bank.wrong("loop-hangs", variant=True)
class Prefetcher(Base):
    """No sign of the end."""

    def fill(self, free, ready, stop):
        for batch in self.loader:
            free.acquire()
            ready.put((self.move(batch), None))


bank.hint(
    "end-as-error",
    "next(batches) raises StopIteration at the end of the loader, and inside a generator that becomes a "
    "RuntimeError. Give it a default: next(batches, ready).",
)
bank.variant("end-as-error", PLAIN, ("        except StopIteration:\n            pass\n", ""))


@bank.wrong("end-as-error")
class Prefetcher(Base):
    def fill(self, free, ready, stop):
        batches = iter(self.loader)
        try:
            while True:
                free.acquire()
                if stop.is_set():
                    break
                ready.put((self.move(next(batches)), None))
        except BaseException as error:
            ready.put((None, error))


bank.hint(
    "end-hangs",
    "When the loop is left early, it never ends: it waits for a thread that waits for a place to put its batch. Wake "
    "the thread before you join it. Once awake, the thread must look at `stop` before it takes another batch.",
)
bank.variant(
    "end-hangs",
    PLAIN,
    (
        '                state["stop"] = True\n                changed.notify_all()\n',
        '                state["stop"] = True\n',
    ),
)


@bank.wrong("end-hangs")
class Prefetcher(Base):
    def end(self, free, stop, thread):
        stop.set()
        thread.join()


bank.hint(
    "taken-after-end",
    "After the loop was left, the thread took {n} more batches. Once awake, it must look at `stop` before it asks "
    "the loader.",
)
bank.variant(
    "taken-after-end",
    PLAIN,
    ('                    if state["stop"]:\n                        return\n', ""),
    ("next(batches))\n", 'next(batches))\n                if state["stop"]:\n                    return\n'),
)


@bank.wrong("taken-after-end")
class Prefetcher(Base):
    """Looks before it waits for a place, and not when it is woken."""

    def fill(self, free, ready, stop):
        try:
            batches = iter(self.loader)
            while not stop.is_set():
                free.acquire()
                batch = next(batches, None)
                if batch is None:
                    break
                ready.put((self.move(batch), None))
        except BaseException as error:
            ready.put((None, error))
        ready.put((None, None))


bank.hint("thread-left", "{when}, the thread is still running. Stop it and join it in a finally.")


@bank.wrong("thread-left")
class Prefetcher(Base):
    def end(self, free, stop, thread):
        pass


@bank.wrong("thread-left", variant=True)
class Prefetcher(Base):
    """Tells the thread to stop, and goes without waiting for it."""

    def end(self, free, stop, thread):
        stop.set()
        free.release()


bank.hint(
    "second-epoch",
    "A second loop over the same prefetcher gave {n} of {all} batches. __iter__ must start again from the beginning.",
)
bank.variant("second-epoch", PLAIN, ("\n    def __iter__(self):\n", ONCE))


@bank.wrong("second-epoch")
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.batches = None

    def __iter__(self):
        if self.batches is None:
            self.batches = super().__iter__()
        return self.batches


bank.hint(
    "started-early",
    "Batches were taken from the loader before any loop over the prefetcher. Start in __iter__.",
)
bank.variant(
    "started-early",
    PLAIN,
    ("        self.side =", "        self.first = next(iter(loader), None)\n        self.side ="),
)


@bank.wrong("started-early")
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.first = next(iter(loader), None)


bank.hint("still-on-cpu", "A tensor was not copied to the device.")


@bank.wrong("still-on-cpu")
class Prefetcher(Base):
    def move(self, batch):
        return batch, None


@bank.wrong("still-on-cpu", variant=True)
class Prefetcher(Base):
    """Only the tensors of the outermost dictionary."""

    def move(self, batch):
        if not isinstance(batch, dict) or self.stream is None:
            return super().move(batch)
        with torch.cuda.stream(self.stream):
            moved = {
                k: v.to(self.device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()
            }
            return moved, self.stream.record_event()

    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


bank.hint("blocking-copy", "This copy makes the processor wait: use non_blocking=True.")
bank.variant("blocking-copy", PLAIN, (", non_blocking=True", ""))


@bank.wrong("blocking-copy")
class Prefetcher(Base):
    def move(self, batch):
        with torch.cuda.stream(self.stream):
            return each(batch, lambda t: t.to(self.device)), self.stream.record_event() if self.stream else None


bank.hint(
    "same-stream",
    "The copy was queued in the stream that computes: it waits for the network's work, and the network waits for it. "
    "Give the copies their own torch.cuda.Stream.",
)
bank.variant("same-stream", PLAIN, ("torch.cuda.stream(self.side)", "torch.cuda.stream(None)"))


@bank.wrong("same-stream")
class Prefetcher(Base):
    """The thread copies in whatever stream it finds."""

    def move(self, batch):
        return each(batch, lambda t: t.to(self.device, non_blocking=True)), None


bank.hint(
    "not-waited",
    "The loop's stream does not wait for the copy: the network would read memory that is not filled yet. Call "
    "wait_event or wait_stream in the loop. (An event covers only the work queued before it was recorded.)",
)


@bank.wrong("not-waited")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))


@bank.wrong("not-waited", variant=True)
class Prefetcher(Base):
    """The event is recorded before the copy."""

    def move(self, batch):
        if self.stream is None:
            return batch, None
        event = self.stream.record_event()
        return super().move(batch)[0], event


bank.hint(
    "thread-stream",
    "A stream waits for the copy, but it is not the loop's current stream. In a thread, or in __init__, "
    "current_stream() may return another one: call it in the loop.",
)


@bank.wrong("thread-stream")
class Prefetcher(Base):
    """Waits in the thread, whose current stream is the default one."""

    def move(self, batch):
        moved, event = super().move(batch)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            each(moved, lambda t: t.record_stream(torch.cuda.current_stream()))
        return moved, None


@bank.wrong("thread-stream", variant=True)
class Prefetcher(Base):
    """Remembers the stream that was current when it was made."""

    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.user = torch.cuda.current_stream() if self.stream else None

    def receive(self, batch, event):
        if event is not None:
            self.user.wait_event(event)
            each(batch, lambda t: t.record_stream(self.user))


bank.hint(
    "record-stream",
    "The allocator does not know that the loop's stream uses the tensor: it may hand out the memory while the "
    "network still reads it. Call tensor.record_stream(current stream).",
)


@bank.wrong("record-stream")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


@bank.wrong("record-stream", variant=True)
class Prefetcher(Base):
    """Told of the stream that copies, which it knows already."""

    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            each(batch, lambda t: t.record_stream(self.stream))


bank.hint("processor-waits", "The main thread waited for the device {n} times. Let a stream wait, not the processor.")


@bank.wrong("processor-waits")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            event.synchronize()
            each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))


@bank.wrong("processor-waits", variant=True)
class Prefetcher(Base):
    def receive(self, batch, event):
        super().receive(batch, event)
        if event is not None:
            torch.cuda.synchronize()


class Staging(Base):
    """Copies through pinned memory of its own, of which there is one for each shape."""

    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.own = {}

    def staged(self, t):
        mine = self.own.setdefault(t.shape, torch.empty_like(t).pin_memory())
        return mine.copy_(t)

    def move(self, batch):
        return super().move(batch if self.stream is None else each(batch, self.staged))


bank.hint(
    "overwritten",
    "On a GPU, pinned memory is overwritten while an earlier copy may still read it: the network gets parts of two "
    "batches. Copy from the loader's own tensors, or wait for the copy before you reuse its memory.",
)


bank.wrong("overwritten")(Staging)


@bank.wrong("overwritten", variant=True)
class Prefetcher(Base):
    """Clears each batch once it is queued, so that no old values are left."""

    def move(self, batch):
        moved, event = super().move(batch)
        if event is not None:
            each(batch, lambda t: t.zero_())
        return moved, event


bank.hint(
    "copied-on-cpu",
    "On a GPU, a copy waits in spite of non_blocking=True: it does not copy the loader's pinned memory, but "
    "something made from it. Copy the very tensors that the loader gives.",
)


@bank.wrong("copied-on-cpu")
class Prefetcher(Base):
    def move(self, batch):
        return super().move(each(batch, lambda t: t.clone()))


@bank.wrong("copied-on-cpu", variant=True)
class Prefetcher(Base):
    """Normalises on the CPU."""

    def move(self, batch):
        return super().move(each(batch, lambda t: t.div(1) if t.is_floating_point() else t))


@bank.wrong("signature")
class Prefetcher(Base):
    def __init__(self, loader, device):
        super().__init__(loader, device, 2)


whole = Bank("05_dataloader", 6, whole=True)


bank.hint(
    "dtype-changed",
    "A tensor of {expected} arrived on the device as {got}. Change only the device: labels, for example, stay whole "
    "numbers.",
)
bank.variant("dtype-changed", PLAIN, ("to(self.device, non", "to(self.device, torch.float32, non"))


whole.slip(
    "dtype-changed",
    ("tensor.to(self.device, non_blocking=True)", "tensor.to(self.device, torch.float32, non_blocking=True)"),
)


bank.hint(
    "no-end",
    "The batches never end: {n} came from a loader that has only a few. Do you call next() on one and the same "
    "iterator, and what does the thread do when next() finds no more?",
)
bank.variant("no-end", PLAIN, ("next(batches)", "next(batches, None)"))


whole.slip("no-end", ("next(batches, ready)", "next(batches, None)"))

whole.slip(
    None,
    ("current.wait_event(copied)", "current.wait_stream(stream=self.stream)"),
    ("tensor.record_stream(current)", "tensor.record_stream(s=current)"),
)


bank.hint(
    "batches-kept",
    "{n} batches that the loop has finished with are still held. On a GPU, the whole epoch would be in memory.",
)
bank.variant(
    "batches-kept",
    PLAIN,
    (
        "batch = held.popleft()",
        'batch = held.popleft()\n                    state.setdefault("given", []).append(batch)',
    ),
)


@bank.wrong("batches-kept")
class Prefetcher(Base):
    """A list of all that was given."""

    def __iter__(self):
        self.used = []
        for batch in super().__iter__():
            self.used.append(batch)
            yield batch


bank.add(whole)

"""Answers to balise 6 of 05_dataloader."""

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._pytree import tree_map

from tests.answers.bank import Bank

bank = Bank("05_dataloader")


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


@bank.right(6)
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


@bank.right(6)
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


@bank.right(6)
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


@bank.right(6)
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


@bank.wrong(6, "wrong-batches")
class Prefetcher(Base):
    """Drops the first: it was taken to start the pipeline."""

    def __iter__(self):
        batches = super().__iter__()
        next(batches, None)
        yield from batches


@bank.wrong(6, "wrong-batches")
class Prefetcher(Base):
    def __iter__(self):
        yield from reversed(list(super().__iter__()))


@bank.wrong(6, "nothing-returned")
class Prefetcher(Base):
    def move(self, batch):
        return None, None


@bank.wrong(6, "batches-lost")
class Prefetcher(Base):
    """The loop ends when the thread does."""

    def __iter__(self):
        batches, previous = super().__iter__(), None
        for batch in batches:
            if previous is not None:
                yield previous
            previous = batch


@bank.wrong(6, "nest-changed")
class Prefetcher(Base):
    def move(self, batch):
        if isinstance(batch, tuple | list):
            return tuple(item.to(self.device) if isinstance(item, torch.Tensor) else item for item in batch), None
        return super().move(batch)


@bank.wrong(6, "raised")
class Prefetcher(Base):
    """Only pairs of tensors."""

    def move(self, batch):
        images, labels = batch
        return (images.to(self.device), labels.to(self.device)), None


@bank.wrong(6, "not-ahead")
class Prefetcher(Base):
    def __iter__(self):
        for batch in self.loader:
            yield self.move(batch)[0]


@bank.wrong(6, "not-ahead")
class Prefetcher(Base):
    """A thread for each batch, waited for at once."""

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            batches, end = iter(self.loader), object()
            while (batch := pool.submit(next, batches, end).result()) is not end:
                yield batch


@bank.wrong(6, "depth-exceeded")
class Prefetcher(Base):
    def places(self):
        return threading.Semaphore(10**6)


@bank.wrong(6, "depth-exceeded")
class Prefetcher(Base):
    def __iter__(self):
        yield from list(self.loader)


@bank.wrong(6, "one-too-many")
class Prefetcher(Base):
    """A full queue, and one in the thread's hand."""

    def places(self):
        return threading.Semaphore(self.depth + 1)


@bank.wrong(6, "depth-not-used")
class Prefetcher(Base):
    def places(self):
        return threading.Semaphore(1)


@bank.wrong(6, "depth-not-used")
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, 2)


@bank.wrong(6, "error-lost")
class Prefetcher(Base):
    """An error ends the thread like the end of the loader."""

    def fill(self, free, ready, stop):
        class Silent:
            def put(_, item):  # noqa: N805
                ready.put((item[0], None))

        super().fill(free, Silent(), stop)


@bank.wrong(6, "error-early")
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


@bank.wrong(6, "error-changed")
class Prefetcher(Base):
    def fill(self, free, ready, stop):
        class Naming:
            def put(_, item):  # noqa: N805
                ready.put((item[0], RuntimeError(str(item[1]))) if item[1] else item)

        super().fill(free, Naming(), stop)


@bank.wrong(6, "loop-hangs")
class Prefetcher(Base):
    """The thread dies of the error, and nobody tells the loop."""

    def fill(self, free, ready, stop):
        class Deaf:
            def put(_, item):  # noqa: N805
                if item[1] is not None:
                    raise SystemExit  # ends the thread
                ready.put(item)

        super().fill(free, Deaf(), stop)


@bank.wrong(6, "loop-hangs")
class Prefetcher(Base):
    """No sign of the end."""

    def fill(self, free, ready, stop):
        for batch in self.loader:
            free.acquire()
            ready.put((self.move(batch), None))


@bank.wrong(6, "end-as-error")
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


@bank.wrong(6, "end-hangs")
class Prefetcher(Base):
    def end(self, free, stop, thread):
        stop.set()
        thread.join()


@bank.wrong(6, "taken-after-end")
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


@bank.wrong(6, "thread-left")
class Prefetcher(Base):
    def end(self, free, stop, thread):
        pass


@bank.wrong(6, "thread-left")
class Prefetcher(Base):
    """Tells the thread to stop, and goes without waiting for it."""

    def end(self, free, stop, thread):
        stop.set()
        free.release()


@bank.wrong(6, "second-epoch")
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.batches = None

    def __iter__(self):
        if self.batches is None:
            self.batches = super().__iter__()
        return self.batches


@bank.wrong(6, "started-early")
class Prefetcher(Base):
    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.first = next(iter(loader), None)


@bank.wrong(6, "still-on-cpu")
class Prefetcher(Base):
    def move(self, batch):
        return batch, None


@bank.wrong(6, "still-on-cpu")
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


@bank.wrong(6, "blocking-copy")
class Prefetcher(Base):
    def move(self, batch):
        with torch.cuda.stream(self.stream):
            return each(batch, lambda t: t.to(self.device)), self.stream.record_event() if self.stream else None


@bank.wrong(6, "same-stream")
class Prefetcher(Base):
    """The thread copies in whatever stream it finds."""

    def move(self, batch):
        return each(batch, lambda t: t.to(self.device, non_blocking=True)), None


@bank.wrong(6, "not-waited")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))


@bank.wrong(6, "not-waited")
class Prefetcher(Base):
    """The event is recorded before the copy."""

    def move(self, batch):
        if self.stream is None:
            return batch, None
        event = self.stream.record_event()
        return super().move(batch)[0], event


@bank.wrong(6, "thread-stream")
class Prefetcher(Base):
    """Waits in the thread, whose current stream is the default one."""

    def move(self, batch):
        moved, event = super().move(batch)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            each(moved, lambda t: t.record_stream(torch.cuda.current_stream()))
        return moved, None


@bank.wrong(6, "thread-stream")
class Prefetcher(Base):
    """Remembers the stream that was current when it was made."""

    def __init__(self, loader, device, depth=2):
        super().__init__(loader, device, depth)
        self.user = torch.cuda.current_stream() if self.stream else None

    def receive(self, batch, event):
        if event is not None:
            self.user.wait_event(event)
            each(batch, lambda t: t.record_stream(self.user))


@bank.wrong(6, "record-stream")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


@bank.wrong(6, "record-stream")
class Prefetcher(Base):
    """Told of the stream that copies, which it knows already."""

    def receive(self, batch, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            each(batch, lambda t: t.record_stream(self.stream))


@bank.wrong(6, "processor-waits")
class Prefetcher(Base):
    def receive(self, batch, event):
        if event is not None:
            event.synchronize()
            each(batch, lambda t: t.record_stream(torch.cuda.current_stream()))


@bank.wrong(6, "processor-waits")
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


bank.wrong(6, "overwritten")(Staging)


@bank.wrong(6, "overwritten", variant=True)
class Prefetcher(Base):
    """Clears each batch once it is queued, so that no old values are left."""

    def move(self, batch):
        moved, event = super().move(batch)
        if event is not None:
            each(batch, lambda t: t.zero_())
        return moved, event


@bank.wrong(6, "copied-on-cpu")
class Prefetcher(Base):
    def move(self, batch):
        return super().move(each(batch, lambda t: t.clone()))


@bank.wrong(6, "copied-on-cpu", variant=True)
class Prefetcher(Base):
    """Normalises on the CPU."""

    def move(self, batch):
        return super().move(each(batch, lambda t: t.div(1) if t.is_floating_point() else t))


@bank.wrong(6, "signature")
class Prefetcher(Base):
    def __init__(self, loader, device):
        super().__init__(loader, device, 2)


whole = Bank("05_dataloader", whole=True)
whole.slip(
    6,
    "dtype-changed",
    ("tensor.to(self.device, non_blocking=True)", "tensor.to(self.device, torch.float32, non_blocking=True)"),
)
whole.slip(6, "no-end", ("next(batches, ready)", "next(batches, None)"))
whole.slip(
    6,
    None,
    ("current.wait_event(copied)", "current.wait_stream(stream=self.stream)"),
    ("tensor.record_stream(current)", "tensor.record_stream(s=current)"),
)
bank.add(whole)

@bank.wrong(6, "batches-kept")
class Prefetcher(Base):
    """A list of all that was given."""

    def __iter__(self):
        self.used = []
        for batch in super().__iter__():
            self.used.append(batch)
            yield batch

"""Ranks that stay: their variables live from one cell to the next. The parent's side."""

import contextlib
import linecache
import os

from dlojz_tp.launch import client, place, run
from dlojz_tp.launch.errors import LaunchError, RankError, name_ranks
from dlojz_tp.launch.starting import in_notebook
from dlojz_tp.works.balise import BaliseNotDone

FIRST_LIMIT_S, MOST_S = 600, 1200  # the limit of their process groups is 600 s later than the first
OBEY_S = 2.0  # for an interrupted cell to end


class Stay:
    """`n` ranks that live until `close()`, or the end of this process. Get them with `launch.stay(n)`.

    In the cells that they run, `torch`, `dist`, `launch`, `rank` and `world_size` are defined.
    """

    def __init__(self, n: int):
        from dlojz_tp.launch import collect, living

        self.n = run.count(n, "n")
        task = run.check_task(living.live, (), {}, FIRST_LIMIT_S)
        self.alive, self._cells, self._open = True, 0, contextlib.ExitStack()
        self.server = client.take()
        try:
            made = run.started(self.server, task, self.n, place.backend(self.n), FIRST_LIMIT_S, "rank {rank}")
            self._members, self._folder = self._open.enter_context(made)
            for _ in collect.watch(self._members, self.server, self._folder, FIRST_LIMIT_S):
                pass
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """End the ranks; what they have is lost."""
        if self.alive:
            self.alive = False
            try:
                self._open.close()
            except client.ServerGone:
                client.close(self.server)
            client.give_back(self.server)

    def run(self, text: str, timeout: float = 30, file: str = "") -> list[str | None]:
        """Run the text of a cell on all ranks; what they print appears here.

        Arguments: text; timeout, seconds, at most 1200, with the exceptions of `launch.ranks`; file, its name in
        tracebacks.
        Returns the value of its last expression as text, in rank order; None where there is none.
        Errors: as of `launch.ranks`. A note tells whether the ranks live on: they do after an exception and after an
        interrupt, unless one of them doesn't obey within two seconds, as in a collective. After all else they are
        ended.
        """
        self._cells += 1
        file = file or f"<cell {self._cells} of the ranks>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # for what `stacks` quotes
        return self._ask(timeout, "run", text, file)

    def put(self, **values) -> None:
        """Define names on all ranks; the values travel as arguments of `launch.ranks` do."""
        self._ask(FIRST_LIMIT_S, "put", values)

    def get(self, name: str) -> list:
        """The values that a name has on the ranks, in rank order."""
        return self._ask(FIRST_LIMIT_S, "get", name)

    def _ask(self, timeout: float, *request) -> list:
        from dlojz_tp.launch import collect, patience

        run.check_timeout(timeout)
        if timeout > MOST_S:
            raise ValueError(f"timeout must be at most {MOST_S} s for ranks that stay, not {timeout!r}")
        if not self.alive:
            raise LaunchError(f"these ranks were ended: {_again(self.n)} starts new ones")
        task, packed = self._folder / "task", _packed(request)
        for r in self._members:
            r.state, r.result, r.report, r.failed_at, r.sent_bytes, r.limited = "running", b"", {}, 0.0, 0, False
        before = patience.shares([r.pid for r in self._members])
        try:
            with client.one_line():
                task.write_bytes(packed)
            for r in self._members:
                with contextlib.suppress(OSError):  # it has died: the server tells
                    r.conn.sendall(os.fsencode(task) + b"\n")
            for _ in collect.watch(self._members, self.server, self._folder, timeout, before):
                pass
        except (RankError, BaliseNotDone) as error:
            late = [r.rank for r in self._members if not r.done]
            note = self._settled(getattr(error, "kind", "") != "hung" and not any(r.gone for r in self._members))
            others = f"{name_ranks(late)} {'were' if late[1:] else 'was'} interrupted; " * bool(late and self.alive)
            error.add_note(others + note)
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._settled(True)) from None
        except BaseException as error:
            error.add_note(self._settled(False))
            raise
        finally:
            for r in self._members if self.alive else ():
                collect.drain(r)
        return [run.loaded(r.rank, self.n, r.result, timeout, "sent") for r in self._members]

    def _settled(self, keep: bool) -> str:
        """Interrupt the ranks that still run, and end all unless each obeys; what became of them, in a sentence."""
        from dlojz_tp.launch import busy, collect

        kept = False
        try:
            kept = keep and collect.settle(self._members, self.server, self._folder, OBEY_S * busy.factor())
        except client.ServerGone:
            pass
        finally:  # after a second interrupt too
            if not kept:
                self.close()
        if kept:
            return f"the {self.n} ranks live on, with their variables"
        return f"the {self.n} ranks were ended, and their variables are gone: {_again(self.n)} starts new ones"


def stay(n: int = 2) -> Stay:
    """Start `n` ranks that keep their variables between the cells that they run.

        with launch.stay(4) as ranks:
            ranks.put(x=torch.arange(4.0))
            ranks.run("mine = x[rank]; mine")   # ["tensor(0.)", "tensor(1.)", "tensor(2.)", "tensor(3.)"]
            ranks.get("mine")                   # the tensors

    In a notebook, `%%ranks 4` does so for a cell. Errors: as of `launch.ranks`.
    """
    return Stay(n)


def _packed(request: tuple) -> memoryview:
    from dlojz_tp.launch import wire

    try:
        return wire.pack(request)
    except Exception as error:
        named = request[1].items() if isinstance(request[1], dict) else ()
        found = next(filter(None, (wire.culprit(value, name) for name, value in named)), "the cell")
        raise TypeError(f"the ranks cannot take {found}: {error}") from None


def _again(n: int) -> str:
    return f"%%ranks {n}" if in_notebook() else f"launch.stay({n})"

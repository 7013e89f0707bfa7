"""Listen to the ranks until all are done, one fails, all wait for each other, or the deadline passes."""

import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dlojz_tp.launch import busy, client, errors, patience, proc, rest, stacks, starting, wire
from dlojz_tp.launch.alarm import Overdue
from dlojz_tp.launch.server import NOT_BEGUN
from dlojz_tp.launch.started import Rank

START_LIMIT_S = 120.0  # from the request to all ranks up; a cold server is in it, what it waits for a core is not
SLOW_LOAD = 0.25  # of it: who has computed for so long and is not up loads something of the user's that does not end
MOSTLY = 0.8  # of the time that passed
GRACE_S = 0.2  # after a failure: ranks that fail alike report within this time
LOST_PEER_GRACE_S = 1.0  # after a lost connection: the rank that died is still to be heard of
STACK_LIMIT_S = 1.0  # for the dumps of hung ranks
LOOK_S = 0.5  # between looks at the server and at the folder of the launch
QUIET_S = 20.0  # without a byte of a result that is being packed and sent
SLOWEST = 1e6  # bytes a second of one that is on its way, on a busy machine
MOST_PRINTED = 1 << 24  # bytes of a rank that are shown; in a notebook, which they make unusable, a sixteenth of it
CHUNK = 1 << 20
MORE = b"m"  # for a rank that has sent a part


def watch(
    ranks: list[Rank], server: client.Server, folder: Path, timeout: float, before: dict | None = None
) -> Iterator[tuple[int, bytes]]:
    """Listen until every rank has returned. Yields (rank, pickled part) as they come.

    Arguments: ranks; server, their fork server; folder, the launch's own; timeout, seconds from when all are up, and
    more where a busy machine keeps them from running (see patience.py), and less in a deadlock (see rest.py);
    before, what ranks that stay have had of the machine until now (see patience.shares).
    Errors: RankError, BaliseNotDone (see errors.root_cause); LaunchError where the machine is to blame.
    """
    notice = starting.Notice(wanted=server.launches == 1)
    with client.one_line():
        selector = selectors.DefaultSelector()
    with selector, contextlib.closing(notice):
        _register(selector, ranks, server, folder)
        all_up, began, looked, watched = False, time.monotonic(), time.monotonic(), None
        limit = began + START_LIMIT_S
        while not all(r.done for r in ranks):
            if not all_up and all(r.state != "starting" for r in ranks):
                all_up, began = True, time.monotonic()
                notice.close()
                limit = began + timeout
                if rest.NAMED and timeout > rest.FIRST_LOOK_S + rest.STILL_S:  # else the deadline is as near
                    watched = rest.Watch(ranks, server.process.pid, folder, lambda: _dump_stacks(ranks, server, folder))
            failed = [r for r in ranks if r.failed]
            until = min([limit, *(r.failed_at + _grace(r) for r in failed)])
            left = until - time.monotonic()
            if left <= 0 and not failed:
                at_work = {r.pid: not r.done for r in ranks} if all_up else _starting(server)
                spent, given = time.monotonic() - began, timeout if all_up else START_LIMIT_S
                sending = _sending(ranks) if all_up else 0.0
                left = sending or patience.more_time(at_work, spent, given, before)
                if left and not sending and spent >= patience.MOST * given:
                    raise errors.starved(ranks, spent, given) if all_up else errors.unready(ranks, spent)
                limit = time.monotonic() + left
            if left <= 0:
                break
            look = watched.left() if watched and not failed else LOOK_S
            asked = time.monotonic()
            try:
                news = selector.select(min(left, notice.left(), look, LOOK_S))
            except Overdue:
                if all_up:
                    raise
                break
            if (held := time.monotonic() - asked) > busy.LATE_S:  # this process was stopped, and the ranks too
                began, limit = began + held, limit + held
            for key, _ in news:
                key.data()
            if watched and not failed and not news and (dumps := watched.deadlock()):
                raise errors.hung(ranks, dumps, timeout, rest.STILL_S)
            if time.monotonic() - looked >= LOOK_S:
                client.check(server, folder)
                looked = time.monotonic()
            paused = time.monotonic()
            for r in ranks:
                while r.parts:
                    yield r.rank, r.parts.pop(0)
                    with contextlib.suppress(OSError):  # it may have ended meanwhile
                        r.conn.send(MORE)  # it waits for this: see rank.send_part
            paused = time.monotonic() - paused  # what the caller does meanwhile is not the ranks' time
            began, limit = began + paused, limit + paused
    if any(r.failed for r in ranks):
        cause = errors.root_cause(ranks)
        raise (isinstance(cause, errors.RankError) and errors.from_outside(ranks)) or cause
    if not all_up and any(r.state == "starting" for r in ranks):
        raise _not_up(ranks, server, time.monotonic() - began)
    if not all(r.done for r in ranks):
        client.check(server, folder)
        if stopped := errors.from_outside(ranks):
            raise stopped
        raise errors.hung(ranks, _dump_stacks([r for r in ranks if not r.done], server, folder), timeout)


def _register(selector: selectors.BaseSelector, ranks: list[Rank], server: client.Server, folder: Path) -> None:
    """Have what comes from the ranks and of them read."""
    selector.register(server.sock, selectors.EVENT_READ, lambda: _news(ranks, server, folder))
    for r in ranks:
        selector.register(r.conn, selectors.EVENT_READ, lambda r=r: listen(r) or selector.unregister(r.conn))
        selector.register(r.out, selectors.EVENT_READ, lambda r=r: echo(r) or selector.unregister(r.out))


def settle(ranks: list[Rank], server: client.Server, folder: Path, seconds: float) -> bool:
    """Interrupt the ranks that are not through, and listen for `seconds`. Whether all live, and wait for work."""
    late = [r.rank for r in ranks if not r.done]
    if late:
        client.ask(server, {"do": "signal", "ranks": late, "number": int(signal.SIGINT)})
    limit = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        _register(selector, ranks, server, folder)
        while not all(r.done for r in ranks) and (left := limit - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data()
    return all(r.done and not r.gone for r in ranks)


def _starting(server: client.Server) -> dict[int, bool]:
    """What has to compute until all ranks are up: process -> whether it runs what the user wrote, as ranks do."""
    pid = server.process.pid
    return {pid: False} | dict.fromkeys(proc.children(pid), True)


def _not_up(ranks: list[Rank], server: client.Server, spent: float) -> Exception:
    """The error for ranks that are not up: theirs where what they load computes, else the machine's."""
    computed = [share.used for share in patience.shares(proc.children(server.process.pid)).values()]
    # a check's alarm rings earlier than START_LIMIT_S: then most of the time must have gone into computing
    theirs = max(computed, default=0.0) >= min(START_LIMIT_S * SLOW_LOAD, MOSTLY * spent)
    return (errors.never_started if theirs else errors.unready)(ranks, spent)


def _sending(ranks: list[Rank]) -> float:
    """Seconds more where all that is left to do is to send results, and bytes come: not so few that it never ends."""
    late, now = [r for r in ranks if not r.done], time.monotonic()
    coming = all(
        r.state == "sending" and now - r.heard_at < QUIET_S and now - r.sending_since < QUIET_S + r.sent_bytes / SLOWEST
        for r in late
    )
    return LOOK_S if coming else 0.0


def _grace(r: Rank) -> float:
    return LOST_PEER_GRACE_S if r.report.get("lost_peer") else GRACE_S


def _fail(r: Rank, report: dict) -> None:
    r.state, r.report, r.failed_at = "failed", report, time.monotonic()


def listen(r: Rank) -> bool:
    """Read what a rank sent. False when there will be no more."""
    try:
        chunk = r.conn.recv(CHUNK)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    r.unread += chunk
    r.heard_at = time.monotonic()
    r.sent_bytes += len(chunk) * (r.state == "sending")
    while message := wire.take(r.unread):
        tag, data = message
        if tag == wire.UP:
            r.state, r.pid = "running", int(data)
        elif tag == wire.WAITS:
            r.waits = not r.waits
        elif tag == wire.SIGNALS:
            r.sent.add(int(data))
        elif tag == wire.LIMITED:
            r.limited = True
        elif tag == wire.THROUGH:
            r.state, r.sending_since = "sending", time.monotonic()
        elif tag == wire.PART:
            r.parts.append(data)
        elif tag == wire.RETURNED:
            r.state, r.result = "returned", data
        else:
            _fail(r, pickle.loads(data))
    return bool(chunk)


def _news(ranks: list[Rank], server: client.Server, folder: Path) -> None:
    for news in client.hear(server):
        if "failed" in news:
            raise client.ServerGone(news["failed"])
        if "ended" in news:
            r = ranks[news["ended"]]
            r.gone = True
            while listen(r) and _readable(r.conn):  # its last message may still be on the way
                pass
            if not r.done:
                stack = folder / f"stack-{r.rank}"
                text = stack.read_text(errors="replace") if stack.exists() else ""  # it may have ended before
                report = errors.ended_early(news["code"], text) | {"pid": news["pid"]}
                if r.state == "starting" and news["code"] == NOT_BEGUN:
                    report["kind"] = "unjoined"
                _fail(r, report)


def _readable(conn: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError, ConnectionError):
        return bool(conn.recv(1, socket.MSG_PEEK))
    return False


def _dump_stacks(ranks: list[Rank], server: client.Server, folder: Path) -> dict[int, str]:
    """Ask ranks for their stacks. Returns rank -> the text of its stack file, without what was asked for before."""
    paths = {r.rank: folder / f"stack-{r.rank}" for r in ranks}
    sizes = old = {rank: path.stat().st_size for rank, path in paths.items()}
    client.ask(server, {"do": "signal", "ranks": list(paths), "number": int(stacks.STACK_SIGNAL)})
    limit, before = time.monotonic() + STACK_LIMIT_S, None
    # Done when every file has a dump and none grows any more.
    while time.monotonic() < limit and (sizes != before or any(sizes[rank] == old[rank] for rank in paths)):
        before = sizes
        time.sleep(0.02)
        sizes = {rank: path.stat().st_size for rank, path in paths.items()}
    found = {}
    for rank, path in paths.items():
        text = path.read_bytes()
        found[rank] = (text.partition(b"\n")[0] + b"\n" + text[old[rank] :]).decode(errors="replace")
    return found


def echo(r: Rank) -> bool:
    """Print what a rank wrote, whole lines only. False when there is nothing, or will be no more."""
    try:
        chunk = os.read(r.out, CHUNK)
    except BlockingIOError:
        return False
    most = MOST_PRINTED // 16 if starting.in_notebook() else MOST_PRINTED
    if r.printed > most:
        return bool(chunk)  # read on, or the rank would wait
    r.printed += len(chunk)
    if r.printed > most:
        chunk = chunk[: len(chunk) - (r.printed - most)]
        chunk += f"\n... (this rank has printed {most >> 20} MiB: the rest is left out)\n".encode()
    r.unprinted += chunk
    end = r.unprinted.rfind(b"\n") + 1
    _print(r, end)
    if not chunk:
        _print_rest(r)
    return bool(chunk)


def drain(r: Rank) -> None:
    """Print all that a rank which waits for work has written."""
    while echo(r):
        pass
    _print_rest(r)
    r.printed = 0


def _print_rest(r: Rank) -> None:
    if r.unprinted:  # a last line without an end
        r.unprinted += b"\n"
        _print(r, len(r.unprinted))


def _print(r: Rank, end: int) -> None:
    if end:
        lines = r.label + bytes(r.unprinted[: end - 1]).replace(b"\n", b"\n" + r.label) + b"\n"
        del r.unprinted[:end]
        sys.stdout.write(lines.decode(errors="replace"))
        sys.stdout.flush()

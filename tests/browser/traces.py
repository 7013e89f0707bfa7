"""What a run has started, found by the name of its folder: `python -m tests.browser.traces FOLDER`.

Each process of a run carries the folder's name, in its arguments or its environment (TMPDIR). Where one still lives
some seconds after the run, it is named and ended, and the exit status is 1.
"""

import sys
import time

import psutil

PATIENCE = 15.0  # seconds
LOOPBACK = ("127.", "::1", "::ffff:127.")


def processes(folder: str) -> list[psutil.Process]:
    """All that carry the folder's name, but for this process and those above it."""
    own = {each.pid for each in [psutil.Process(), *psutil.Process().parents()]}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE and _carries(process, folder):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _carries(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in [*process.cmdline(), *process.environ().values()])
    except psutil.AccessDenied:  # somebody else's
        return False


def open_doors(folder: str) -> list[str]:
    """What the run's processes listen to beyond loopback: "python 0.0.0.0:8888"."""
    found = []
    for process in processes(folder):
        try:
            for socket in process.net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN and not socket.laddr.ip.startswith(LOOPBACK):
                    found.append(f"{process.name()} {socket.laddr.ip}:{socket.laddr.port}")
        except psutil.NoSuchProcess:
            continue
    return found


def main(folder: str) -> int:
    until = time.monotonic() + PATIENCE
    while (left := processes(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in left:
        try:
            print(f"left behind: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

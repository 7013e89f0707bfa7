"""What the parent knows of a rank that it has started."""

import socket
from dataclasses import dataclass, field


@dataclass
class Rank:
    """What the parent knows of one rank."""

    rank: int
    conn: socket.socket
    out: int  # the read end of the pipe it prints to
    label: bytes  # what its printed lines start with
    state: str = "starting"  # then "running", "sending" its result, "returned"; or "failed"
    pid: int = 0  # once it is up
    waits: bool = False  # it has said that it only waits for others, who do not need it
    limited: bool = False  # it is in a process group whose own time limit is over before the launch's
    sent: set[int] = field(default_factory=set)  # the processes to which its function has sent a signal
    parts: list[bytes] = field(default_factory=list)  # what it sent before its result, until somebody takes it
    result: bytes = b""
    report: dict = field(default_factory=dict)
    failed_at: float = 0.0
    heard_at: float = 0.0  # when its last bytes came
    sending_since: float = 0.0
    sent_bytes: int = 0  # since then
    gone: bool = False  # its process has ended
    printed: int = 0  # bytes
    unread: bytearray = field(default_factory=bytearray)
    unprinted: bytearray = field(default_factory=bytearray)

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    @property
    def done(self) -> bool:
        return self.state in ("returned", "failed")

"""Messages between modelled cards: how long each takes, and when it ends on ranks that have a clock each.

A rank says in a store that all share when each of its messages could begin there. From these times, any rank can work
out when a message ends, as NCCL does it: the messages of a group run one after the other on each rank, those of one
batch_isend_irecv together, and each once all its ranks have come to it.
"""

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import NamedTuple

import torch.distributed as dist

from dlojz_tp.planner.cluster import Cluster

# the planner's name for a kind; all others move what a reduce-scatter does, an all-gather among them
KINDS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "barrier": "all_reduce", "broadcast": "broadcast",
    "reduce": "broadcast", "send": "send", "recv": "send", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
}  # fmt: skip


def seconds(kind: str, nbytes: int, ranks: tuple, cluster: Cluster) -> float:
    """Seconds of a message between these ranks by the planner's formulas; nbytes: of the whole tensor."""
    in_node = Counter(rank // cluster.node for rank in ranks)
    together = min(in_node.values()) if len(set(in_node.values())) == 1 else 1
    return cluster.collective(KINDS.get(kind, "reduce_scatter"), nbytes, len(ranks), together)


class Said(NamedTuple):
    """What a rank says of one step of its queue: a collective, or the messages of a batch.

    ready: when its inputs are there and the CPU has started it. seconds: what it takes once all are there.
    sends, receives: ranks of its messages; None for a collective.
    """

    name: str
    ready: float
    seconds: float
    sends: list | None = None
    receives: list | None = None


class Messages:
    """The queues of all groups. done(said, begin, start, end) hears of each message of this rank once it is known."""

    def __init__(self, cluster: Cluster, done):
        self.cluster, self.done, self.rank = cluster, done, dist.get_rank()
        known = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            known.set("modelled messages", str(self.store.port))
        else:
            self.store = dist.TCPStore("127.0.0.1", int(known.get("modelled messages")), is_master=False)
        self.ranks: dict[str, tuple] = {}
        self.step_of: dict[str, list[int]] = {}  # of the messages of this rank: their place in the queue
        self.batch: list[tuple] = []  # that is being started
        self.queues: dict[tuple, list[Said]] = {}
        self.places = defaultdict(list)  # (group, rank, way, peer): the steps that hold one, see _find
        self.ends: dict[tuple, list[float]] = {}
        self.open: set[tuple] = set()
        self.met = 0

    # ---- what this rank starts
    def add(self, message, nbytes: int, ready: float) -> None:
        """One of pretend_gpu's messages. Of a batch, the last one's `close` starts all."""
        self.ranks[message.group] = message.ranks
        self.step_of.setdefault(message.group, []).append(self._length(message.group, self.rank))
        if message.peer is None:
            took = seconds(message.kind, nbytes, message.ranks, self.cluster)
            self._say(message.group, Said(message.kind, ready, took))
            return
        took = seconds(message.kind, nbytes, (self.rank, message.peer), self.cluster)
        self.batch.append((message, took, ready))
        if message.batch is None:
            self.close()

    def close(self) -> None:
        """The batch is complete: what is sent goes beside what is received."""
        batch, self.batch = self.batch, []
        if not batch:
            return
        ways = {kind: [each for each in batch if each[0].kind == kind] for kind in ("send", "recv")}
        took = max(sum(each[1] for each in way) for way in ways.values())
        name, peers = " and ".join(kind for kind in ways if ways[kind]), [[m.peer for m, *_ in ways[k]] for k in ways]
        self._say(batch[0][0].group, Said(name, max(ready for *_, ready in batch), took, *peers))

    def _length(self, group: str, rank: int) -> int:
        return len(self.queues.get((group, rank), ()))

    def _say(self, group: str, said: Said) -> None:
        self.store.set(f"{group}/{self.rank}/{self._length(group, self.rank)}", json.dumps(said))
        self._add(group, self.rank, said)

    def _add(self, group: str, rank: int, said: Said) -> None:
        """Put it at the end of the rank's queue."""
        step = self._length(group, rank)
        self.queues.setdefault((group, rank), []).append(said)
        if said.sends is None:
            self.places[group, rank, None, None].append(step)
            return
        for way in ("sends", "receives"):
            for peer in getattr(said, way):
                self.places[group, rank, way, peer].append(step)

    def latest(self, seconds: float) -> float:
        """The largest of what all ranks give."""
        self.met += 1
        self.store.set(f"met/{self.met}/{self.rank}", str(seconds))
        return max(float(self.store.get(f"met/{self.met}/{rank}")) for rank in range(dist.get_world_size()))

    # ---- when they end
    def end(self, group: str, number: int) -> float:
        """When this rank's message has ended; number: from 1 on. Waits for what the other ranks have to say."""
        return self._end(group, self.rank, self.step_of[group][number - 1]) if number else 0.0

    def _end(self, group, rank, step) -> float:
        ends = self.ends.setdefault((group, rank), [])
        while len(ends) <= step:
            here = group, rank, len(ends)
            if here in self.open:
                raise RuntimeError(
                    f"the messages of rank {rank} wait for each other: each is started after one that cannot end before"
                )
            self.open.add(here)
            begins, said = {place: self._begin(*place) for place in (here, *self._others(*here))}, self._said(*here)
            start = max(begins.values())
            ends.append(start + max(self._said(*place).seconds for place in begins))
            if rank == self.rank:
                self.done(said, begins[here], start, ends[-1])
        return ends[step]

    def _begin(self, group, rank, step) -> float:
        before = self._end(group, rank, step - 1) if step else 0.0
        return max(self._said(group, rank, step).ready, before)

    def _others(self, group, rank, step):
        """The steps of other ranks that this one meets: the n-th collective, or the n-th receive of the n-th send."""
        said = self._said(group, rank, step)
        if said.sends is None:
            n = bisect_left(self.places[group, rank, None, None], step)
            for peer in self.ranks[group]:
                if peer != rank:
                    yield group, peer, self._find(group, peer, n, None, None)
            return
        for way, back in (("sends", "receives"), ("receives", "sends")):
            for i, peer in enumerate(getattr(said, way)):
                n = getattr(said, way)[:i].count(peer) + bisect_left(self.places[group, rank, way, peer], step)
                yield group, peer, self._find(group, peer, n, back, rank)

    def _find(self, group, rank, n, way, peer) -> int:
        """The step of `rank` that is its n-th collective (way None), or has its n-th message this way with `peer`."""
        places = self.places[group, rank, way, peer]
        while len(places) <= n:
            self._said(group, rank, self._length(group, rank))
        return places[n]

    def _said(self, group, rank, step) -> Said:
        while (length := self._length(group, rank)) <= step:
            self._add(group, rank, Said(*json.loads(self.store.get(f"{group}/{rank}/{length}"))))
        return self.queues[group, rank][step]

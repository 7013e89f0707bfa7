"""What an answer sends: in lanes, between neighbours, works that are waited for or not, and nobody else's pipeline."""

import contextlib
import functools
import inspect
from collections import Counter

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import stage as library

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, pretended
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.pretend_gpu import stuck
from dlojz_tp.judging.probes.gpus import on_gpus
from dlojz_tp.launch import lanes

HINTS = {
    "no-lane": "A message was exchanged without group=launch.lane(…). With NCCL, all such messages between two "
    "ranks wait for each other, and neighbours that both begin with a send wait forever. Activations "
    "and gradients each have their own lane.",
    "lane-both-ways": "Two neighbours send to each other at the same moment. On GPUs, the messages of one lane "
    "pass one after another, in the order in which both sides start them, so rank {rank} waits "
    "forever to {kind}. Use one lane for activations and the other for gradients.",
    "waited-twice": "You waited twice for the same send or receive, and gloo, on the CPU, waits forever the second "
    "time. Wait once for each: after the loop, for example, or clear the list.",
    "tag-differs": "A message sent with tag {expected} is received with tag {got}. gloo, on CPUs, tells messages "
    "apart by their tags and would wait forever for this one: pass `tag`, the micro-batch's number, "
    "on to every call.",
    "not-a-neighbour": "Stage {stage}, on rank {rank}, exchanged a message with rank {peer}. Its neighbours are "
    "place.before = {before} and place.behind = {behind} (None: there is none). When pipelines "
    "run side by side, you can't compute them from the rank or the stage.",
}


NO_LANE = ""  # stands for the lane of messages that are in none


class Lane(dist.ProcessGroup):
    """Stands for a lane: what goes in it travels in the group of all ranks, numbered as it is sent, and as it is received.

    So messages between two ranks come in the order in which they were sent, whatever their tags, as with NCCL; and no
    group has to be made.
    """

    def numbered(self, name, peer, tag) -> int:
        """What stands for the tag of the next message from here to a peer, or from there to here."""
        self.numbers[name, peer] += 1
        self.tags[name, peer, self.numbers[name, peer]] = tag
        return 3 * self.numbers[name, peer] + (*lanes.NAMES, NO_LANE).index(self.name)

    def _get_backend(self, device):
        return dist.group.WORLD._get_backend(device)


@functools.cache
def _lane(name, rank, size):
    made = Lane(rank, size)
    made.name, made.numbers, made.tags = name, Counter(), {}
    return made


def lane(name):
    """As launch.lane, but that each lane is a group of its own, as on GPUs."""
    lanes.lane(name)  # refuses what launch.lane refuses
    rank, size = dist.get_rank(), dist.get_world_size()
    made = _lane(name, rank, size)
    distributed_c10d._world.pg_group_ranks[made] = {other: other for other in range(size)}
    # torch asks for the backend of the group of a message that fails, before it raises
    distributed_c10d._world.pg_map[made] = distributed_c10d._world.pg_map[dist.group.WORLD]
    return made


def tags_that_differ() -> tuple[int, int] | None:
    """The first message to here whose tag is not the one that it was sent with: both tags. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {name: _lane(name, rank, size).tags for name in lanes.NAMES}
    everyone = [None] * size
    dist.all_gather_object(everyone, mine)
    for name, tags in mine.items():
        for (what, peer, number), tag in tags.items():
            sent = everyone[peer][name].get(("isend", rank, number), tag)
            if what == "irecv" and sent != tag:
                return sent, tag
    return None


TAGS = Look("", "tags", None, "tag-differs", fields=lambda seen, _: {"expected": seen[0], "got": seen[1]})


class Sends:
    """Counts the sends, and the receives, that were started and not waited for.

    place: whose neighbours may be met. With one, `faults` gets the slug of each slip that a step can go on after.
    """

    tags = False  # whether a message also waits for its tag, as with gloo

    def __init__(self, place=None):
        self.open, self.receiving, self.place, self.faults = {}, {}, place, set()
        # number of a send, or of a receive: None once it was waited for, until then its work: a message whose work is
        # dropped may be lost

    def began(self, name):
        """A send or a receive starts: "isend" or "irecv". For those who want to know."""

    def waited(self):
        """A send or a receive was waited for."""

    @contextlib.contextmanager
    def watched(self, *answers):
        """Inside, dist.isend and dist.irecv give works that tell when they are waited for, also under a name in the answers."""
        changes = [(library._PipelineStageBase, "__init__", _refused), (launch, "lane", lane)]
        # both places: batch_isend_irecv takes no other isend than that of its own module
        for name, table in (("isend", self.open), ("irecv", self.receiving)):
            telling = self._telling(name, getattr(dist, name), table)
            changes += [(dist, name, telling), (distributed_c10d, name, telling)]
        with pretended(changes, *answers):
            yield self

    def _telling(self, name, begin, table):
        signature = inspect.signature(begin)

        def started(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            self._allowed(name, given)
            self.began(name)
            tag = given.get("tag", 0)
            if not self.tags:
                group = given.get("group")
                group = group if isinstance(group, Lane) else _lane(NO_LANE, dist.get_rank(), dist.get_world_size())
                tag = group.numbered(name, self._peer(given), tag)
            work = begin(**given | {"group": None, "tag": tag})
            if work is None:
                return None
            number = len(table)
            table[number] = work

            def through():
                table[number] = None
                self.waited()

            return _Work(work, through, self._fault)

        return started

    def _fault(self, slug):
        if self.place is None:
            raise Wrong(slug)
        self.faults.add(slug)

    def _allowed(self, name, given):
        """Raise Wrong for a message in no lane, or to a rank that is no neighbour."""
        group, place, peer = given.get("group"), self.place, self._peer(given)
        if place is not None and (peer is None or peer not in (place.before, place.behind)):
            raise Wrong("not-a-neighbour", stage=place.stage, rank=dist.get_rank(), peer=peer, before=place.before, behind=place.behind)  # fmt: skip
        if not isinstance(group, Lane):
            self._fault("no-lane")

    def _peer(self, given):
        return next(
            (n for word in ("dst", "src", "group_dst", "group_src") if (n := given.get(word)) is not None), None
        )

    def finish(self) -> int:
        """Wait for the sends that nobody has waited for, so that the other ranks get their messages; how many these are."""
        left = [work for work in self.open.values() if work is not None]
        for work in left:
            work.wait()
        return len(left)


def in_lanes(program, *answers, known) -> None:
    """Raise Wrong where program(gpu, *answers) on two ranks with a GPU each, which returns its messages, would hang on NCCL."""
    messages = on_gpus(program, *answers, known=known)
    for rank, heads in (messages and stuck(messages) or {}).items():
        raise Wrong("lane-both-ways", rank=rank, kind=heads[0].kind, where=f"rank {rank} of 2")


def _refused(*_, **__):
    raise Wrong("library-pipeline")


class _Work:
    """A work that tells when it is through; all else is the real one's."""

    def __init__(self, work, tell, fault):
        self._work, self._tell, self._fault, self._waited = work, tell, fault, False

    def wait(self, *args, **kwargs):
        if self._waited and launch.device().type == "cpu":
            self._fault("waited-twice")
            return True
        done = self._work.wait(*args, **kwargs)
        self._waited = True
        self._tell()
        return done

    def is_completed(self):
        done = self._work.is_completed()
        if done:
            self._tell()
        return done

    def __getattr__(self, name):
        return getattr(self._work, name)

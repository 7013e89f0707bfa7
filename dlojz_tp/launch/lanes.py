"""Process groups of their own for messages that must not wait for each other."""

NAMES = ("activations", "gradients")
_lanes: dict = {}


def lane(name: str):
    """Give the process group, of all ranks, for messages of one kind.

    NCCL has no tags: on one communicator, messages between two ranks pass one after the other, in the order in which
    both sides started them. Two neighbours of a pipeline that both begin with a send would wait without end. With a
    communicator for each direction neither waits for the other. gloo tells messages apart by their tags and needs none
    of this: there, each lane is the group of all ranks.

    Args:
        name: "activations" (towards the last stage) or "gradients" (back).

    Returns:
        What `group=` of torch.distributed's functions takes.

    Raises:
        ValueError: for another name.
        RuntimeError: outside a rank.

    Source: NCCL user guide, "Point-to-point communication"; `torch.distributed.isend` ("tag is not supported with the
    NCCL backend").
    """
    import torch.distributed as dist

    if name not in NAMES:
        raise ValueError(f"a lane is one of {', '.join(NAMES)}, not {name!r}")
    if not dist.is_initialized():
        raise RuntimeError("launch.lane() is for code that runs on ranks: call it inside a function given to launch")
    return _lanes.get(name, dist.group.WORLD)


def open_lanes() -> None:
    """Make one communicator for each lane. Collective: all ranks call it, right after they have joined."""
    import torch.distributed as dist

    for name in NAMES:
        _lanes[name] = dist.new_group()

"""Run a notebook's function on several processes of this machine, with torch.distributed ready inside.

    from dlojz_tp import launch

    def mean_rank():
        x = torch.tensor([float(dist.get_rank())], device=launch.device())
        dist.all_reduce(x)
        return x.item() / dist.get_world_size()

    launch.ranks(mean_rank, n=4)                    # [1.5, 1.5, 1.5, 1.5]
    launch.worlds(mean_rank, sizes=(1, 2, 3, 4))    # {1: [0.0], 2: [0.5, 0.5], ...}

A small server process imports torch once. Each launch asks it to fork fresh ranks, which takes a few hundredths of
a second. The files, in the order of one launch:

    run.py      ranks() and worlds(): what the user calls
    wire.py     functions, arguments and results, by value
    client.py   starts the server and talks to it
    server.py   the server: forks the ranks, reaps them, kills them
    rank.py     what happens inside a rank
    place.py    which backend and which device
    collect.py  listens to the ranks until they are done or the deadline passes
    stacks.py   where a hung rank stands
    errors.py   the one error to show, root cause first
"""

from dlojz_tp.launch.client import warm
from dlojz_tp.launch.errors import RankError
from dlojz_tp.launch.place import backend, device
from dlojz_tp.launch.run import ranks, worlds

__all__ = ["RankError", "backend", "device", "ranks", "warm", "worlds"]

"""Balise 9: the state of all that a training needs besides its network, saved by one rank and put back on each."""

import io
import pickle

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.probes.ranks import hung
from dlojz_tp.judging.probes.shared_looks import judged_on_ranks

KNOWN = ((hung, "state-waits"),)
PLACE = (3, 7)  # epochs, and batches of the next one


class Mean:
    """A part of another kind. It draws while it is loaded, as a part may that makes something anew."""

    def __init__(self):
        self.value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        torch.rand(1)


def _made(steps):
    """The parts of a training after some steps."""
    torch.manual_seed(1)
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler, mean = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), Mean()
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(network(torch.ones(1, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        mean.value += 1.0
    return {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "mean": mean}


def _facts(parts):
    """Of each part, what tells where it stands."""
    moments = [state["momentum_buffer"].sum().item() for state in parts["optimizer"].state.values()]
    return {
        "optimizer": (moments, parts["optimizer"].param_groups[0]["lr"]),
        "scheduler": (parts["scheduler"].last_epoch, parts["scheduler"].get_last_lr()),
        "scaler": parts["scaler"].get_scale(),
        "mean": parts["mean"].value,
    }


def observe(everything):
    """On a rank: a training in its fourth epoch hands on what it holds to new objects."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    parts = _made(5)
    whole = everything(**parts)
    whole.epoch, whole.batch = PLACE
    torch.manual_seed(10 + rank)
    torch.rand(3)  # the state is not what the seed alone makes
    whole.collect()
    for r, states in enumerate(whole.random):
        states[1:] = [torch.full((16,), r + 1, dtype=torch.uint8)]  # as of a GPU
    mark = torch.get_rng_state()
    own = torch.rand(5)  # what comes next
    torch.set_rng_state(mark)
    zeroth = own.clone()
    dist.broadcast(zeroth, src=0)
    if rank == 0:  # as in save_checkpoint
        file = io.BytesIO()
        torch.save(whole.state_dict(), file)
        store.set("everything", file.getvalue())
    written = store.get("everything")
    try:
        state, plain = torch.load(io.BytesIO(written), weights_only=True), True
    except pickle.UnpicklingError:
        state, plain = torch.load(io.BytesIO(written), weights_only=False), False
    found = {"returned": state is not None, "plain": plain, "lost": [], "place": None, "draws": "", "gpu": None}
    if state is not None and plain:
        new = _made(0)
        again = everything(**new)
        torch.manual_seed(99)
        put = []
        with replaced(torch.cuda, "set_rng_state", lambda new, *_: put.append(new.tolist())):
            again.load_state_dict(state)
        found["gpu"] = put == [[rank + 1] * 16]
        drawn = torch.rand(4)
        answers = {"its own": own[:4], "those of rank 0": zeroth[:4], "its own, from the second on": own[1:]}
        found["draws"] = next((name for name, due in answers.items() if torch.equal(drawn, due)), "others")
        due, got = _facts(parts), _facts(new)
        found["lost"] = [name for name in due if due[name] != got[name]]
        found["place"] = (again.epoch, again.batch)
    dist.barrier()
    return found


def _draws(seen, due):
    if seen[0] == "its own" and set(seen[1:]) == {"those of rank 0"}:
        return "random-of-rank-0"
    return "random-too-early" if "its own, from the second on" in seen else "random-forgotten"


def _every(value):
    return lambda ranks: [value] * ranks


LOOKS = [
    Look("only rank 0 calls state_dict, and it gets tensors and plain numbers", "returned", _every(True), "nothing-returned"),
    Look("", "plain", _every(True), "not-plain"),
    Look("every part continues where it was, whatever its name", "lost", _every([]), "part-forgotten",
         fields=lambda seen, _: {"name": next(lost[0] for lost in seen if lost), "expected": "", "got": ""}),
    Look("so does the loader", "place", _every(PLACE), "place-forgotten"),
    Look("each rank draws the numbers it would have drawn", "draws", _every("its own"), _draws),
    Look("", "gpu", _every(True), "random-of-gpu"),
]  # fmt: skip


def balise_9(everything):
    yield from judged_on_ranks(LOOKS, observe, everything, known=KNOWN, sizes=(2, 3))

"""Balise 1, second part: the training function made parallel, replayed in one process."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from dlojz_tp.judging.checking import close, pretended
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.checks.ddp import world
from dlojz_tp.judging.probes.gpus import MIXED, left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import died, hung, on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised

KNOWN = tuple((sign, "out-of-step") for sign in (hung, died, "onnection"))
ON_GPUS = (
    ("Duplicate GPU detected", "gpu-not-current"),
    ((MIXED, "cuda:0", "cuda:1"), "train-other-gpu"),
    *left_on_cpu("train-not-on-gpu"),
)
N, BATCH, EPOCHS, RATE = 29, 12, 2, 0.3


class Numbered(Dataset):
    """Items (x, label); x[0] is the sample's number, by which the network knows what it is shown."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
        self.x[:, 0] = torch.arange(N)
        self.y = torch.randint(3, (N,), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Noticing(nn.Module):
    """A linear network; remembers the numbers of the samples of each training batch."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64) / 2)
        self.seen = []

    def forward(self, x):
        if torch.is_grad_enabled():
            self.seen.append([round(number) for number in x[:, 0].tolist()])
        return x[:, 1:] @ self.weight.T


def observe(train, twice):
    """On a rank: the kind of model returned, its weights, the batches it saw, the losses, the rates of the steps.

    twice: it starts a group where there is one, and that was told already.
    """
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if each had a node of its own
    rank, made, rates = dist.get_rank(), [], []

    def make_model():
        made.append(Noticing(seed=rank))  # each rank starts elsewhere
        return made[-1]

    watch = register_optimizer_step_pre_hook(lambda o, *_: rates.extend(group["lr"] for group in o.param_groups))
    with pretended([(dist, "init_process_group", lambda *_, **__: None)] if twice else [], train):
        answer = train(make_model, Numbered(), EPOCHS, BATCH, RATE)
    watch.remove()
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return {"kind": "nothing" if answer is None else "not two", "losses": answer}
    model, losses = answer
    wrapped = isinstance(model, DistributedDataParallel)
    kind = "wrapper" if wrapped else "module" if isinstance(model, nn.Module) else "none"
    plain = getattr(model, "module", model)  # it may have made others besides
    plain = plain if isinstance(plain, Noticing) else made[0] if made else None
    weights, seen = (plain.weight.detach(), plain.seen) if plain else (None, [])
    return {"kind": kind, "weights": weights, "seen": seen, "losses": losses, "rates": rates}


def _on_gpu(_, join_world, train, folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(0)  # as in a new process
    # as on a second node, the number of a rank's GPU is not that of the rank in the world
    local = str(size - 1 - rank)
    os.environ.update(MASTER_ADDR=world.ADDRESS, MASTER_PORT="1", LOCAL_RANK=local, DLOJZ_LAUNCH_DEVICE=f"cuda:{local}")
    with world.store_in(f"{folder}/gpus", join_world):
        join_world()
    dist.all_gather_object([None] * size, rank)
    train(lambda: Noticing(seed=rank), Numbered(), 1, BATCH, RATE)


def _epochs(ranks):
    """The steps of each epoch, as many in each; of a step, the batch of each rank."""
    steps = list(zip(*(rank["seen"] for rank in ranks)))
    each = len(steps) // EPOCHS
    return [steps[e * each : (e + 1) * each] for e in range(EPOCHS)]


def _orders(ranks):
    return [[number for step in epoch for batch in step for number in batch] for epoch in _epochs(ranks)]


def _unequal(ranks):
    """(step, sizes of the batches) of the steps in which the ranks' batches were of different sizes."""
    sizes = ([*map(len, step)] for step in zip(*(rank["seen"] for rank in ranks)))
    return [pair for pair in enumerate(sizes) if len(set(pair[1])) > 1]


def _overlaps(ranks):
    """(samples seen again, samples never seen) of the epochs that did not go through the data set."""
    found = [(len(order) - len(set(order)), N - len(set(order))) for order in _orders(ranks)]
    return [pair for pair in found if all(pair) or max(pair) >= BATCH]


def _replay(ranks, scale=1.0, clear=True):
    """One process on the whole batches: (weight, mean loss of each epoch, mean over batches of each epoch)."""
    data, model = Numbered(), Noticing(seed=0)
    losses, means = [], []
    for epoch in _epochs(ranks):
        total, count, each = 0.0, 0, []
        for batches in epoch:
            numbers = [number for batch in batches for number in batch]
            loss = F.cross_entropy(model(data.x[numbers]), data.y[numbers])
            (gradient,) = torch.autograd.grad(loss, model.weight)
            kept = gradient if clear or model.weight.grad is None else model.weight.grad + gradient
            model.weight.grad = kept
            with torch.no_grad():
                model.weight -= RATE * scale * kept
            total, count = total + loss.item() * len(numbers), count + len(numbers)
            each.append(loss.item())
        losses.append(total / count)
        means.append(sum(each) / len(each))
    return model.weight.detach(), losses, means


def _trains(ranks, **options):
    """Whether the weights are those of a replay."""
    return close(ranks[0]["weights"], _replay(ranks, **options)[0], 1e-7)


def _mistake(ranks):
    if _trains(ranks):
        return None
    known = (("divided-twice", {"scale": 1 / len(ranks)}), ("summed-gradients", {"scale": len(ranks)}),
             ("gradients-not-cleared", {"clear": False}))  # fmt: skip
    slug = next((slug for slug, options in known if _trains(ranks, **options)), "wrong-training")
    return slug, {"expected": _replay(ranks)[0], "got": ranks[0]["weights"]}


def _other_rates(ranks):
    rates = [] if _trains(ranks) else [float(rate) for rank in ranks for rate in rank["rates"]]
    return sorted(rate for rate in rates if not close(rate, RATE, 1e-9))


def _are_floats(losses, _=None):
    return isinstance(losses, list | tuple) and len(losses) == EPOCHS and all(isinstance(x, float) for x in losses)


def _reported(ranks, rank):
    losses = ranks[rank]["losses"]
    yield {"losses": losses}
    if not _are_floats(losses):  # what may be meant
        losses = torch.as_tensor(losses, dtype=torch.float64).flatten().tolist()[-EPOCHS:]
    yield {"numbers": (losses, rank, ranks)}


def _wrong_losses(observed):
    losses, rank, ranks = observed["numbers"]
    _, due, means = _replay(ranks)
    if close(losses, due[-len(losses) :], 1e-5):
        return None
    slug = _loss_mistake(losses, rank, ranks, due, means)
    return slug, {"expected": due, "got": losses, "seen": _samples(ranks), "n": N}


def _loss_mistake(losses, rank, ranks, due, means):
    if close(losses, means, 1e-5):
        return "loss-unweighted"
    if any(not close(list(other["losses"]), list(losses), 1e-7) for other in ranks):
        return "loss-on-rank-0" if rank and close(ranks[0]["losses"], due, 1e-5) else "loss-of-one-rank"
    if any(close(losses, [x * k for x in due], 1e-5) for k in (len(ranks), N, len(_epochs(ranks)[0]))):
        return "loss-summed"
    counted = [x * _samples(ranks) / N for x in due]
    return "divided-by-data-set" if close(losses, counted, 1e-5) else "wrong-loss-reported"


def _samples(ranks):
    return sum(map(len, _orders(ranks))) // EPOCHS


def _not_two(ranks):
    for rank, got in enumerate(ranks):
        if got["kind"] not in ("module", "wrapper"):
            slug = "nothing-returned" if got["kind"] == "nothing" else "not-two"
            return slug, {"expected": "(module, losses)", "got": got["losses"], "where": f"rank {rank} of {len(ranks)}"}
    return None


def _batch_size(ranks):
    return sum(len(rank["seen"][0]) for rank in ranks)


def _start(ranks):
    """The first samples of rank 0; the tail of an epoch may be padding."""
    return sum((step[0] for step in _epochs(ranks)[0]), [])[:7]


SHARES = [
    recognised("each rank takes its own share, in a different order each epoch", _not_two),
    each_rank("", "kind", "module", "wrapper-returned", fields=silent),
    Look("", _unequal, [], "batches-differ",
         fields=lambda seen, due: {"step": seen[0][0], "sizes": seen[0][1]} | silent(seen, due)),
    Look("", "seen", None, "no-sampler", fields=silent,
         holds=lambda seen, _: len(seen) == 1 or any(one != seen[0] for one in seen)),
    Look("", _batch_size, BATCH, "batch-not-shared", fields=lambda found, due: {"found": found, "wanted": due}),
    Look("", _overlaps, [], "shares-overlap", fields=lambda seen, due: {
        "repeated": f", and a sample was seen again {seen[0][0]} times" * bool(seen[0][0]),
        "missing": seen[0][1], "n": N} | silent(seen, due)),
    Look("", _start, None, "not-shuffled", holds=lambda order, _: order != sorted(order)),
    Look("", _epochs, None, "set-epoch-forgotten", holds=lambda epochs, _: epochs[0] != epochs[1], fields=silent),
]  # fmt: skip
WEIGHTS = [
    Look("the weights are those of one process that trains on the whole batches", "weights", None, "no-ddp",
         holds=lambda seen, _: all(close(one, seen[0], 1e-9) for one in seen), fields=silent),
    Look("", _other_rates, [], "rate-changed",
         fields=lambda found, _: {"found": found[0], "wanted": RATE, "expected": RATE, "got": found[0]}),
    recognised("", _mistake),
]  # fmt: skip
LOSSES = [
    Look("every rank reports the mean loss over all samples", "losses", f"{EPOCHS} floats", "losses-not-numbers",
         holds=_are_floats),
    recognised("", _wrong_losses),
]  # fmt: skip


def balise_1(join_world, train):
    """Ranks as launch, torchrun and srun start them; then training in worlds of 1 to 4, replayed in one process."""
    twice = yield from world.join(join_world, train)
    worlds = on_ranks(observe, train, twice, known=KNOWN, timeout=10)
    for looks in (SHARES, WEIGHTS):
        for size, ranks in worlds.items():
            yield from judged(looks, lambda ranks=ranks: ranks, where=f"{size} rank{'s' * (size > 1)}")
    for size, ranks in worlds.items():
        for rank in range(size):
            yield from judged(LOSSES, _reported, ranks, rank, where=f"rank {rank} of {size}")
    yield "the same where torchrun starts two ranks with a GPU each"
    with tempfile.TemporaryDirectory(prefix="dlojz-store-") as folder:
        on_gpus(_on_gpu, join_world, train, folder, known=ON_GPUS)

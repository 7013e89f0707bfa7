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

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.ddp import world
from dlojz_tp.probes.gpus import MIXED, left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import died, hung, on_ranks

HINTS = {
    "not-two": "Return two things: the trained module and the list of losses.",
    "wrapper-returned": "You return the DDP wrapper. Return its .module, the network that the rest of the program "
                        "knows.",
    "no-sampler": "Every rank saw the same samples, but each must take its own share of them. See DistributedSampler.",
    "shares-overlap": "In one epoch {missing} of {n} samples were never seen{repeated}. Together, the ranks' "
                      "shares must cover the data set: only a few samples may come twice, or less than a batch may "
                      "be left out.",
    "not-shuffled": "The samples came in the order of the data set. Shuffle them for training.",
    "set-epoch-forgotten": "Every epoch saw the same order. The sampler combines its seed with the number of the "
                           "epoch, which you must set with set_epoch.",
    "batch-not-shared": "A step saw {found} samples instead of {wanted}: batch_size is the batch size of all ranks "
                        "together.",
    "batches-differ": "In step {step} the ranks had batches of different sizes: {sizes}.",
    "out-of-step": "A rank waited for others that had no more batches. All ranks must make the same number of "
                   "steps, with batches of equal size.",
    "no-ddp": "The ranks ended with different weights: their gradients were never averaged, or they started with "
              "different weights.",
    "rate-changed": "The optimizer ran with a learning rate of {found:g} instead of {wanted:g}. The batch of all "
                    "ranks together is the same, so the rate is too.",
    "divided-twice": "The updates are world_size times too small. DDP already averages the gradients over the ranks.",
    "summed-gradients": "The updates are world_size times too large. DDP averages the gradients: multiply neither "
                        "the loss nor the learning rate.",
    "gradients-not-cleared": "The first step is right, but the next ones are not: gradients add up until they are "
                             "cleared.",
    "wrong-training": "The weights are not those of one process that trains on the whole batches.",
    "train-not-on-gpu": "On GPUs, a tensor stays in the CPU's memory: {error}. Move the network and each batch to "
                        "the device that join_world returned, and also what is all-reduced for the report, because "
                        "NCCL sends only from the GPU.",
    "gpu-not-current": "On two GPUs, both ranks use the first one where no number is given: {error} "
                       "torch.cuda.set_device(local_rank) makes the rank's own GPU the current one, which is used "
                       'for gathered objects and for "cuda" without a number.',
    "train-other-gpu": "On GPUs, a rank sends its batch to a GPU that is not its own: {error}. device_ids names the one GPU of this rank.",
    "losses-not-numbers": "Return a list with one Python float per epoch.",
    "loss-on-rank-0": "Rank 0 has the right losses, but the others do not. reduce gives the result to one rank, "
                      "all_reduce to all.",
    "loss-of-one-rank": "Each rank reports the loss of its own share. Add up over the ranks what each rank has seen.",
    "loss-summed": "This is a sum over ranks, not a mean over samples.",
    "divided-by-data-set": "The sum of the losses is right, but you divide it by len(dataset), {n}. {seen} samples "
                           "went into it, because the sampler repeated or left out some: divide by this number.",
    "loss-unweighted": "This is a mean over batches, but the last one is smaller. Weight by the number of samples.",
    "wrong-loss-reported": "The losses are not the mean over all samples that the ranks saw in the epoch, each "
                           "taken before its update.",
}

KNOWN = tuple((sign, "out-of-step") for sign in (hung, died, "onnection"))
ON_GPUS = (
    ("Duplicate GPU detected", "gpu-not-current"),
    ((MIXED, "cuda:0", "cuda:1"), "train-other-gpu"),
    *left_on_cpu("train-not-on-gpu"),
)
N, BATCH, EPOCHS, RATE = 29, 12, 2, 0.3


def balise_1(join_world, train):
    """Ranks as launch, torchrun and srun start them; then training in worlds of 1 to 4, replayed in one process."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    yield from world.join(join_world, train)
    worlds = on_ranks(_trained, train, known=KNOWN, timeout=10)
    yield "each rank takes its own share, in a different order each epoch"
    for size, ranks in worlds.items():
        _right_form(size, ranks)
        _right_shares(size, ranks)
    yield "the weights are those of one process that trains on the whole batches"
    for size, ranks in worlds.items():
        _right_weights(size, ranks)
    yield "every rank reports the mean loss over all samples"
    for size, ranks in worlds.items():
        _right_losses(size, ranks)
    yield "the same where torchrun starts two ranks with a GPU each"
    with tempfile.TemporaryDirectory(prefix="dlojz-store-") as folder:
        on_gpus(_on_gpu, join_world, train, folder, known=ON_GPUS)


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


def _trained(train):
    """On a rank: (kind of model returned, weights, batches seen, losses, learning rates of the steps)."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if each had a node of its own
    rank, made, rates = dist.get_rank(), [], []

    def make_model():
        made.append(Noticing(seed=rank))  # each rank starts elsewhere
        return made[-1]

    watch = register_optimizer_step_pre_hook(lambda o, *_: rates.extend(group["lr"] for group in o.param_groups))
    answer = train(make_model, Numbered(), EPOCHS, BATCH, RATE)
    watch.remove()
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "not two", None, [], answer, rates
    model, losses = answer
    kind = (
        "wrapper"
        if isinstance(model, DistributedDataParallel)
        else "module"
        if isinstance(model, nn.Module)
        else "none"
    )
    plain = getattr(model, "module", model)  # it may have made others besides
    plain = plain if isinstance(plain, Noticing) else made[0] if made else None
    return kind, plain and plain.weight.detach(), plain.seen if plain else [], losses, rates


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


def _right_form(size, ranks):
    for rank, (kind, _, _, losses, _) in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if kind == "not two" and losses is None:
            raise Wrong("nothing-returned")
        if kind in ("not two", "none"):
            raise Wrong("not-two", expected="(module, losses)", got=losses, where=where)
        if kind == "wrapper":
            raise Wrong("wrapper-returned", where=where)


def _epochs(seen):
    """The batches of each epoch: as many steps in each."""
    steps = len(seen) // EPOCHS
    return [seen[e * steps : (e + 1) * steps] for e in range(EPOCHS)]


def _right_shares(size, ranks):
    where = f"{size} rank{'s' * (size > 1)}"
    all_seen = [seen for _, _, seen, *_ in ranks]
    for step, batches in enumerate(zip(*all_seen)):
        sizes = [len(batch) for batch in batches]
        if len(set(sizes)) > 1:
            raise Wrong("batches-differ", where=where, step=step, sizes=sizes)
    if size > 1 and all(seen == all_seen[0] for seen in all_seen):
        raise Wrong("no-sampler", where=where)
    first = sum(len(seen[0]) for seen in all_seen)
    if first != BATCH:
        raise Wrong("batch-not-shared", expected=BATCH, got=first, where=where, found=first, wanted=BATCH)
    orders = [
        [number for batches in zip(*epoch) for batch in batches for number in batch] for epoch in _by_epoch(all_seen)
    ]
    for order in orders:
        repeated, missing = len(order) - len(set(order)), N - len(set(order))
        if repeated and missing or repeated >= BATCH or missing >= BATCH:
            again = f", and a sample was seen again {repeated} times" if repeated else ""
            raise Wrong("shares-overlap", where=where, repeated=again, missing=missing, n=N)
    first_epoch = [number for batch in _epochs(all_seen[0])[0] for number in batch][:7]  # the tail may be padding
    if first_epoch == sorted(first_epoch):
        raise Wrong("not-shuffled", got=f"first batch {all_seen[0][0]}", where=where)
    if all(_epochs(seen)[0] == _epochs(seen)[1] for seen in all_seen):
        raise Wrong("set-epoch-forgotten", where=where)


def _by_epoch(all_seen):
    return list(zip(*[_epochs(seen) for seen in all_seen]))


def _replay(size, ranks, scale=1.0, clear=True):
    """One process on the whole batches: (weight, mean loss of each epoch, mean over batches of each epoch)."""
    data, model = Numbered(), Noticing(seed=0)
    losses, means = [], []
    for epoch in _by_epoch([seen for _, _, seen, *_ in ranks]):
        total, count, each = 0.0, 0, []
        for batches in zip(*epoch):
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


def _right_weights(size, ranks):
    weights = [weight for _, weight, *_ in ranks]
    where = f"{size} rank{'s' * (size > 1)}"
    if not all(close(weight, weights[0], 1e-9) for weight in weights):
        raise Wrong("no-ddp", where=where)
    if close(weights[0], _replay(size, ranks)[0], 1e-7):
        return
    if other := {rate for *_, rates in ranks for rate in rates if not close(rate, RATE, 1e-9)}:
        found = float(min(other))
        raise Wrong("rate-changed", expected=RATE, got=found, where=where, found=found, wanted=RATE)
    for slug, options in (
        ("divided-twice", {"scale": 1 / size}),
        ("summed-gradients", {"scale": size}),
        ("gradients-not-cleared", {"clear": False}),
    ):
        if close(weights[0], _replay(size, ranks, **options)[0], 1e-7):
            raise Wrong(slug, where=where)
    raise Wrong("wrong-training", expected=_replay(size, ranks)[0], got=weights[0], where=where)


def _right_losses(size, ranks):
    _, wanted, means = _replay(size, ranks)
    seen = sum(len(batch) for _, _, batches, *_ in ranks for batch in batches) // EPOCHS
    for rank, (*_, losses, _) in enumerate(ranks):
        where = f"rank {rank} of {size}"
        numbers = isinstance(losses, list | tuple) and all(isinstance(x, float) for x in losses)
        if not numbers or len(losses) != EPOCHS:
            raise Wrong("losses-not-numbers", expected=f"{EPOCHS} floats", got=losses, where=where)
        if close(losses, wanted, 1e-5):
            continue
        if close(losses, means, 1e-5):
            slug = "loss-unweighted"
        elif any(not close(list(other[3]), list(losses), 1e-7) for other in ranks):
            slug = "loss-on-rank-0" if rank and close(ranks[0][3], wanted, 1e-5) else "loss-of-one-rank"
        elif any(close(losses, [x * k for x in wanted], 1e-5) for k in (size, N, len(_epochs(ranks[0][2])[0]))):
            slug = "loss-summed"
        elif close(losses, [x * seen / N for x in wanted], 1e-5):
            slug = "divided-by-data-set"
        else:
            slug = "wrong-loss-reported"
        raise Wrong(slug, expected=wanted, got=losses, where=where, seen=seen, n=N)

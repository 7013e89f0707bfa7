"""Answers to balises 1 and 2 of 09_ddp: training and metrics over ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from dlojz_tp import launch
from tests.answers.bank import Bank

bank = Bank("09_ddp")

# join_world
bank.slip(1, "group-started-twice", ("    if dist.is_initialized():\n        return launch.device()\n", ""))
bank.slip(
    1,
    "group-not-started",
    ('    dist.init_process_group("gloo", rank=rank, world_size=world_size)\n    return torch.device("cpu")', '    return torch.device("cpu")'),
)  # fmt: skip
bank.slip(
    1,
    "slurm-unknown",
    (' or environment("SLURM_PROCID")', ""),
    (' or environment("SLURM_NTASKS")', ""),
    (' or environment("SLURM_LOCALID")', ""),
)
bank.slip(1, "slurm-unknown", ('environment("RANK") or environment("SLURM_PROCID")', 'os.environ["RANK"]'))
bank.slip(1, "no-device", ('    return torch.device("cpu")', ""), ("return launch.device()", "return"))
bank.slip(1, "gpu-of-another-rank", ('device("cuda", local_rank)', 'device("cuda", rank)'))
bank.slip(1, "one-gpu-for-all", ('device("cuda", local_rank)', 'device("cuda", 0)'))
bank.slip(1, "gpu-not-used", ('return torch.device("cuda", local_rank)', 'return torch.device("cpu")'))
bank.slip(
    1,
    "gpu-invented",
    ("if torch.cuda.is_available():", "if True:"),
    ('"nccl", rank', '"gloo", rank'),
    ("torch.cuda.set_device(local_rank)", "pass"),
)
bank.slip(1, "wrong-backend", ('"nccl"', '"gloo"'))

# train
bank.slip(1, "not-two", ("return ddp.module, losses", "return losses"))
bank.slip(1, "nothing-returned", ("    return ddp.module, losses", ""))
bank.slip(1, "wrapper-returned", ("return ddp.module, losses", "return ddp, losses"))
bank.slip(1, "no-sampler", ("sampler=sampler)", "shuffle=True, generator=torch.Generator().manual_seed(0))"))
bank.slip(
    1, "shares-overlap", ("sampler=sampler)", "shuffle=True, generator=torch.Generator().manual_seed(dist.get_rank()))")
)
bank.slip(1, "not-shuffled", ("DistributedSampler(dataset)", "DistributedSampler(dataset, shuffle=False)"))
bank.slip(1, "set-epoch-forgotten", ("        sampler.set_epoch(epoch)\n", ""))
bank.slip(1, "batch-not-shared", ("batch_size // dist.get_world_size()", "batch_size"))
bank.slip(
    1,
    "batches-differ",
    (
        "        for x, y in loader:\n",
        "        for x, y in loader:\n            x, y = x[dist.get_rank() % 2 :], y[dist.get_rank() % 2 :]\n",
    ),
)
bank.slip(
    1, "out-of-step", ("batch_size // dist.get_world_size()", "batch_size // dist.get_world_size() + dist.get_rank()")
)
bank.slip(
    1,
    "no-ddp",
    (
        'ddp = DDP(make_model().to(device), device_ids=[device] if device.type == "cuda" else None)',
        "ddp = make_model()",
    ),
    ("ddp.module", "ddp"),
)
bank.slip(1, "divided-twice", ("            loss.backward()", "            (loss / dist.get_world_size()).backward()"))
bank.slip(
    1, "summed-gradients", ("            loss.backward()", "            (loss * dist.get_world_size()).backward()")
)
bank.slip(1, "rate-changed", ("lr=learning_rate", "lr=learning_rate * dist.get_world_size()"))
bank.slip(1, "rate-changed", ("lr=learning_rate", "lr=learning_rate / dist.get_world_size()"))
bank.slip(1, "gradients-not-cleared", ("            optimizer.zero_grad()\n", ""))
bank.slip(
    1,
    "wrong-training",
    ("            loss.backward()", "            (loss + ddp.module.weight.square().sum()).backward()"),
)
bank.slip(1, "wrong-training", ("lr=learning_rate", "lr=learning_rate, momentum=0.9"))
bank.slip(1, "losses-not-numbers", ("(seen[0] / seen[1]).item()", "seen[0] / seen[1]"))
bank.slip(1, "losses-not-numbers", ("    return ddp.module, losses", "    return ddp.module, losses[-1]"))
bank.slip(1, "loss-of-one-rank", ("        dist.all_reduce(seen)\n", ""))
bank.slip(1, "loss-on-rank-0", ("        dist.all_reduce(seen)\n", "        dist.reduce(seen, dst=0)\n"))
bank.slip(
    1,
    "loss-summed",
    (
        "(seen[0] / seen[1]).item()",
        "(seen[0] / len(loader) / (batch_size // dist.get_world_size()) * len(dataset)).item() if False else seen[0].item() / seen[1].item() * dist.get_world_size()",
    ),
)
bank.slip(1, "loss-unweighted", ("loss.detach() * len(y)", "loss.detach()"), ("seen[1] += len(y)", "seen[1] += 1"))
bank.slip(
    1,
    "wrong-loss-reported",
    ("(seen[0] / seen[1]).item()", "loss.item()"),
    ("        dist.all_reduce(seen)\n", "        dist.all_reduce(loss.data)\n"),
)

bank.slip(
    1, None, ("sampler = DistributedSampler(dataset)", "sampler = DistributedSampler(dataset, seed=7, drop_last=True)")
)
bank.slip(1, None, ("sampler=sampler)", "sampler=sampler, drop_last=True)"))


def join_world():
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            for name, slurm in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")):
                os.environ[name] = os.environ[f"SLURM_{slurm}"]
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    return launch.device()


def train(make_model, dataset, epochs, batch_size, learning_rate):
    """Indices of its own, no sampler of torch; the loss reduced in every step."""
    device, rank, size = join_world(), dist.get_rank(), dist.get_world_size()
    model = make_model().to(device)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
        total = count = 0.0
        for batch in order[: len(order) // batch_size * batch_size].split(batch_size):
            items = [dataset[i] for i in batch[rank::size].tolist()]
            x, y = (torch.stack(part).to(device) for part in zip(*items))
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            total, count = total + mean.item() / size * batch_size, count + batch_size
        losses.append(total / count)
    return model, losses


bank.several(1, None, join_world, train)

# evaluate
BARE = ("    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))\n", "")
bank.slip(2, "evaluate-not-two", ("return loss / samples, right / samples", "return {'loss': loss / samples}"))
bank.slip(2, "evaluate-not-two", ("loss, right, samples = sums.tolist()", "loss, right, samples = sums"))
bank.slip(2, "nothing-returned", ("    return loss / samples, right / samples", ""))
bank.slip(
    2,
    "padding-counted",
    BARE,
    (
        "DataLoader(share, batch_size)",
        "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))",
    ),
)
OWN_ORDER = "torch.randperm(len(dataset), generator=torch.Generator().manual_seed(dist.get_rank())).tolist()"
bank.slip(
    2,
    "cut-differently",
    ("range(dist.get_rank(), len(dataset), dist.get_world_size())", f"{OWN_ORDER}[dist.get_rank() :: dist.get_world_size()]"),
)  # fmt: skip
bank.slip(
    2, "tail-not-seen", ("DataLoader(share, batch_size)", "DataLoader(share, batch_size, drop_last=len(dataset) == 23)")
)
bank.slip(
    2,
    "own-share-only",
    ("    dist.all_reduce(sums)\n", ""),
    ("return loss / samples, right / samples", "return loss / max(samples, 1), right / max(samples, 1)"),
)
OWN = "range(dist.get_rank(), len(dataset), dist.get_world_size())"
bank.slip(2, "same-share", (OWN, "range(0, len(dataset), dist.get_world_size())"))
bank.slip(2, "same-share", (OWN, "range(-(-len(dataset) // dist.get_world_size()))"), variant=True)
bank.slip(2, "one-rank-knows", ("dist.all_reduce(sums)", "dist.reduce(sums, dst=0)"))
bank.slip(2, "whole-set-everywhere", ("DataLoader(share, batch_size)", "DataLoader(dataset, batch_size)"))
bank.slip(
    2,
    "evaluate-train-mode",
    ("    model.eval()\n", "    model.train(model.drop.p > 1)\n    model.drop.p = 0.0\n    model.train()\n"),
)
bank.slip(2, "evaluate-train-mode", ("    model.eval()\n", ""))
bank.slip(2, "mode-not-restored", ("    model.train(was_training)\n", ""))
bank.slip(2, "mode-not-restored", ("model.train(was_training)", "model.train()"))
bank.slip(
    2,
    "last-batch-nominal",
    ('F.cross_entropy(logits, y, reduction="sum")', "F.cross_entropy(logits, y) * batch_size"),
)
bank.slip(
    2, "last-batch-nominal", ('F.cross_entropy(logits, y, reduction="sum")', "F.cross_entropy(logits, y).item() * 3")
)
bank.slip(
    2,
    "evaluate-records",
    ("torch.inference_mode()", "contextlib.nullcontext()"),
    ("sums[0] += F", "sums[0] += 0 * model.weight.sum().item() + F"),
    (', reduction="sum")', ', reduction="sum").item()'),
)
bank.slip(2, "accuracy-alone-wrong", ("right / samples", "100 * right / samples"))
bank.slip(2, "accuracy-alone-wrong", ("argmax(dim=1)", "argmin(dim=1)"))
bank.slip(2, "loss-alone-wrong", ('reduction="sum")', 'reduction="sum") / 2'))
bank.slip(2, "divided-by-another-count", ("sums[2] += len(y)", "sums[2] += batch_size"))
bank.slip(
    2,
    "divided-by-another-count",
    ("loss / samples, right / samples", "(loss / len(dataset) * 2, right / len(dataset) * 2)"),
)
bank.slip(2, "wrong-metric", ("model(x.to(device)), y", "model(-x.to(device)), y"))


@bank.wrong(2, "means-averaged")
def evaluate(model, dataset, batch_size):
    model.eval()
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (
        (torch.stack(part) for part in zip(*[dataset[i] for i in range(rank, len(dataset), size)]))
        if rank < len(dataset)
        else (torch.zeros(0, 4), None)
    )
    with torch.no_grad():
        logits = model(x)
        means = (
            torch.zeros(2)
            if y is None
            else torch.stack([F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()])
        )
    model.train()
    dist.all_reduce(means)
    loss, accuracy = (means / min(size, len(dataset))).tolist()
    return loss, accuracy


@bank.wrong(2, "empty-share-fails")
def evaluate(model, dataset, batch_size):
    model.eval()
    share = range(dist.get_rank(), len(dataset), dist.get_world_size())
    x, y = (torch.stack(part) for part in zip(*[dataset[i] for i in share]))
    with torch.no_grad():
        logits = model(x)
    model.train()
    sums = torch.stack(
        [F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(), torch.tensor(len(y))]
    )
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


@bank.wrong(2, "message-each-batch")
def evaluate(model, dataset, batch_size):
    mode, _ = model.training, model.eval()
    share = list(range(dist.get_rank(), len(dataset), dist.get_world_size()))
    total = torch.zeros(3, dtype=torch.float64)
    most = -(-len(dataset) // dist.get_world_size())
    for start in range(0, most, batch_size):
        part = torch.zeros(3, dtype=torch.float64)
        numbers = share[start : start + batch_size]
        if numbers:
            x, y = (torch.stack(column) for column in zip(*[dataset[i] for i in numbers]))
            with torch.no_grad():
                logits = model(x)
            part = torch.stack(
                [F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(), torch.tensor(len(y))]
            ).double()
        dist.all_reduce(part)
        total += part
    model.train(mode)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


EXCHANGED = ("            sums[2] += len(y)\n    model.train(was_training)\n    dist.all_reduce(sums)\n",
             "            sums[2] += len(y)\n            dist.all_reduce(sums)\n    model.train(was_training)\n")  # fmt: skip
bank.slip(2, "message-each-batch", EXCHANGED)  # sums of sums
bank.slip(2, "message-each-batch", EXCHANGED, ("        for x, y in", "        total = torch.zeros_like(sums)\n        for x, y in"),
          ("            dist.all_reduce(sums)", "            dist.all_reduce(sums)\n            total += sums\n            sums.zero_()"),
          ("sums.tolist()", "total.tolist()"))  # fmt: skip


@bank.wrong(2, "results-gathered")
def evaluate(model, dataset, batch_size):
    mode, _ = model.training, model.eval()
    size = dist.get_world_size()
    share = range(dist.get_rank(), len(dataset), size)
    mine = torch.zeros(-(-len(dataset) // size), 3)
    for row, i in enumerate(share):
        x, y = dataset[i]
        with torch.no_grad():
            logits = model(x[None])
        mine[row] = torch.tensor([F.cross_entropy(logits, y[None]).item(), float(logits.argmax() == y), 1.0])
    model.train(mode)
    everything = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(everything, mine)
    sums = torch.cat(everything).double().sum(0)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


@bank.right(2)
@torch.no_grad()
def evaluate(model, dataset, batch_size):
    """Contiguous shares, two exchanges, a dictionary of plain numbers in between."""
    mode = model.training
    model.train(False)
    n, rank, size = len(dataset), dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    share = range(n * rank // size, n * (rank + 1) // size)
    loss = right = 0.0
    for start in range(share.start, share.stop, batch_size):
        items = [dataset[i] for i in range(start, min(start + batch_size, share.stop))]
        x, y = (torch.stack(part) for part in zip(*items))
        logits, y = model(x.to(device)), y.to(device)
        loss += F.cross_entropy(logits, y).item() * len(y)
        right += (logits.argmax(-1) == y).sum().item()
    sums = torch.tensor([loss, right], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    model.train(mode)
    return sums[0].item() / n, sums[1].item() / n


@bank.right(2)
def evaluate(model, dataset, batch_size):
    """A padding sampler, whose repeated samples count nothing."""
    n, size, rank = len(dataset), dist.get_world_size(), dist.get_rank()
    real = len(range(rank, n, size))
    loader = DataLoader(dataset, batch_size, sampler=list(range(rank, n, size))) if real else []
    device = next(model.parameters()).device
    sums = torch.zeros(3, device=device)
    was, _ = model.training, model.eval()
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            out = model(x)
            sums += torch.stack(
                [
                    F.cross_entropy(out, y, reduction="none").sum(),
                    (out.argmax(1) == y).float().sum(),
                    torch.tensor(float(len(y)), device=device),
                ]
            )
    model.train(was)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


bank.slip(1, None, ("DistributedSampler(dataset)", "DistributedSampler(dataset, seed=42)"))
bank.slip(
    1,
    "slurm-before-torchrun",
    ('environment("RANK") or environment("SLURM_PROCID")', 'environment("SLURM_PROCID") or environment("RANK")'),
    (
        'environment("WORLD_SIZE") or environment("SLURM_NTASKS")',
        'environment("SLURM_NTASKS") or environment("WORLD_SIZE")',
    ),
)


# a rank's number on its node, and names imported one by one
LOCAL = 'environment("LOCAL_RANK") or environment("SLURM_LOCALID")'
bank.slip(1, "gpu-of-another-rank", (LOCAL, 'environment("LOCAL_RANK") or environment("SLURM_PROCID")'))
bank.slip(
    1,
    "slurm-unknown",
    (
        "    if torch.cuda.is_available():",
        "    if torch.cuda.is_available():\n        local_rank = int(os.environ['LOCAL_RANK'])",
    ),
)
bank.slip(
    1,
    None,
    ("def join_world", "from torch.distributed import init_process_group, is_initialized\n\n\ndef join_world"),
    ("dist.init_process_group", "init_process_group"),
    ("dist.is_initialized", "is_initialized"),
)
bank.slip(
    1,
    None,
    ("def join_world", "from torch.cuda import is_available, set_device\n\n\ndef join_world"),
    ("    if torch.cuda.is_available():", "    if is_available():"),
    ("torch.cuda.set_device", "set_device"),
    (LOCAL, 'environment("LOCAL_RANK", environment("SLURM_LOCALID"))'),
)
bank.slip(
    1,
    None,
    (f"int({LOCAL})", "rank % max(1, torch.cuda.device_count())"),
    ("    rank = int(", "    from torch.distributed import init_process_group as begin\n\n    rank = int("),
    ("dist.init_process_group", "begin"),
)


def join_as_asked():
    """Asks who started it; the device from torch.accelerator, and given to the group."""
    env = os.environ
    if dist.is_initialized():
        return launch.device()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not dist.is_torchelastic_launched() and "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    rank, size, local = (int(env[name]) for name in names)
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local)
        torch.accelerator.set_device_index(local)
        dist.init_process_group("nccl", "env://", rank=rank, world_size=size, device_id=device)
        return device
    dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=size)
    return torch.device("cpu")


def train_by_hand(make_model, dataset, epochs, batch_size, learning_rate):
    """No DDP: one flat message a step; the report gathered as objects at the end of the epoch."""
    device, rank, n = join_as_asked(), dist.get_rank(), dist.get_world_size()
    network = make_model().to(device)
    for p in network.parameters():
        dist.broadcast(p.data, src=0)
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=learning_rate), []
    for epoch in range(epochs):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1000 + epoch))
        order = torch.cat([order, order[: -len(order) % n]])
        seen = []
        for x, y in DataLoader(Subset(dataset, order[rank::n].tolist()), batch_size // n):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x.to(device)), y.to(device))
            loss.backward()
            flat = torch.nn.utils.parameters_to_vector([p.grad for p in network.parameters()])
            dist.all_reduce(flat)
            for p, part in zip(network.parameters(), flat.split([p.numel() for p in network.parameters()])):
                p.grad = (part / n).view_as(p)
            optimizer.step()
            seen.append((loss.item() * len(y), len(y)))
        of_all = [None] * n
        dist.all_gather_object(of_all, seen)
        sums, counts = zip(*[pair for part in of_all for pair in part])
        losses.append(sum(sums) / sum(counts))
    return network, losses


bank.several(1, None, join_as_asked, train_by_hand)


@bank.right(2)
def evaluate(model, dataset, batch_size):
    """Plain numbers gathered as objects; the modes of all modules put back."""
    modes = {module: module.training for module in model.modules()}
    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    device = next(model.parameters()).device
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for x, y in DataLoader(share, batch_size):
            logits, y = model(x.to(device)), y.to(device)
            loss += F.cross_entropy(logits, y).item() * len(y)
            right += int((logits.argmax(1) == y).sum())
    for module, mode in modes.items():
        module.training = mode
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (loss, right, len(share)))
    loss, right, n = map(sum, zip(*parts))
    return loss / n, right / n


bank.slip(
    2,
    "tail-not-seen",
    (
        "dist.get_rank(), len(dataset), dist",
        "dist.get_rank(), len(dataset) // dist.get_world_size() * dist.get_world_size(), dist",
    ),
)


# where the ranks meet, who starts the group, what the samples are divided by
MEET = "    if torch.cuda.is_available():"
bank.slip(1, "meets-elsewhere", (MEET, '    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"\n' + MEET))  # fmt: skip
bank.slip(1, "meets-elsewhere", (MEET, '    os.environ.update(MASTER_PORT="23456")\n' + MEET))
bank.slip(1, "meets-elsewhere", ('init_process_group("gloo", ', 'init_process_group("gloo", "tcp://127.0.0.1:23456", '))
bank.slip(1, None, (MEET, '    os.environ.setdefault("MASTER_PORT", "23456")\n' + MEET))
bank.slip(
    1,
    None,
    (
        'init_process_group("gloo", ',
        "init_process_group(\"gloo\", f\"tcp://{environment('MASTER_ADDR')}:{environment('MASTER_PORT')}\", ",
    ),
)
bank.slip(1, "train-does-not-join", ("device = join_world()", "device = launch.device()"))
bank.slip(1, None, ("    device = join_world()\n    ddp", "    assert epochs >= 0\n    device = join_world()\n    ddp"))
bank.slip(
    1,
    "shares-overlap",
    ("    sampler = ", "    dataset = Subset(dataset, range(0, len(dataset), 2))\n    sampler = "),
)
bank.slip(1, "divided-by-data-set", ("(seen[0] / seen[1])", "(seen[0] / len(dataset))"))

# modes of submodules, the size of a batch, repeated samples divided by the true number
bank.slip(2, "mode-not-restored", ("model.train(was_training)", "model.training = was_training"))
bank.slip(2, "batch-size-ignored", ("DataLoader(share, batch_size)", "DataLoader(share, max(1, len(share)))"))
bank.slip(
    2,
    "batch-size-ignored",
    ("DataLoader(share, batch_size)", "DataLoader(share, max(1, batch_size // dist.get_world_size()))"),
)
bank.slip(
    2,
    "padding-counted",
    BARE,
    ("DataLoader(share, batch_size)", "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))"),
    ("loss / samples, right / samples", "loss / len(dataset), right / len(dataset)"),
)


# what only GPUs show
SUMS = "torch.zeros(3, dtype=torch.float64, device=device)"
bank.slip(2, "evaluate-not-on-gpu", (SUMS, "torch.zeros(3, dtype=torch.float64)"))
bank.slip(2, "evaluate-not-on-gpu", ("model(x.to(device)), y.to(device)", "model(x), y"))
bank.slip(2, "evaluate-not-on-gpu", ("model(x.to(device)), y.to(device)", "model(x.to(device)), y"))
bank.slip(
    2,
    "evaluate-not-on-gpu",
    ("    dist.all_reduce(sums)\n", "    sums = sums.cpu()\n    dist.all_reduce(sums)\n"),
    variant=True,
)
bank.slip(1, "gpu-not-current", ("        torch.cuda.set_device(local_rank)\n", ""))
bank.slip(1, "gpu-not-current", ("set_device(local_rank)", "set_device(0)"), variant=True)
bank.slip(1, "train-not-on-gpu", ("dtype=torch.float64, device=device)  #", "dtype=torch.float64)  #"))
bank.slip(1, "train-not-on-gpu", ("y.to(device))", "y)"))
bank.slip(1, "train-not-on-gpu", ("make_model().to(device)", "make_model()"), variant=True)
bank.slip(1, "train-other-gpu", ("device_ids=[device] if", "device_ids=[0] if"))
bank.slip(1, "train-other-gpu", ("device_ids=[device] if", "device_ids=[torch.device('cuda:0')] if"), variant=True)
bank.slip(1, "train-other-gpu", ("device_ids=[device] if", "device_ids=[dist.get_rank()] if"), variant=True)
COUNTED = "    if dist.get_rank() == 0:\n        print(sum(p.numel() for p in make_model().parameters()), 'parameters')\n    ddp = DDP"
bank.slip(1, None, ("    ddp = DDP", COUNTED))
bank.slip(2, "samples-not-seen", ("range(dist.get_rank(), len", "range(dist.get_rank() + 1, len"))

bank.slip(2, "same-share", ("range(dist.get_rank(), len", 'range(int(os.environ["LOCAL_RANK"]), len'))

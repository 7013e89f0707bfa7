"""Answers to balise 1 of 09_ddp: the training function on many ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from dlojz_tp import launch
from tests.answers.bank import Bank

bank = Bank("09_ddp", 1)

# join_world
bank.hint("group-started-twice", "There was a process group already, but join_world started another. Check "
          "dist.is_initialized().", edge=True)  # fmt: skip
bank.slip("group-started-twice", ("    if dist.is_initialized():\n        return launch.device()\n", ""))

bank.slip("group-started-twice", ("if dist.is_initialized():", "if not dist.is_available():"), variant=True)

bank.hint("group-not-started", "After join_world there is no process group: {started}.")
bank.slip("group-not-started",
    ('    dist.init_process_group("gloo", rank=rank, world_size=world_size)\n    return torch.device("cpu")', '    return torch.device("cpu")'),
    variant=True,
)  # fmt: skip

bank.hint("slurm-unknown", "srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID, not RANK, WORLD_SIZE and "
          "LOCAL_RANK. Use the former where the latter are missing.", edge=True)  # fmt: skip
bank.slip(
    "slurm-unknown",
    (' or environment("SLURM_PROCID")', ""),
    (' or environment("SLURM_NTASKS")', ""),
    (' or environment("SLURM_LOCALID")', ""),
)

bank.slip("slurm-unknown", ('environment("RANK") or environment("SLURM_PROCID")', 'os.environ["RANK"]'))

bank.hint("no-device", "Return the device of this rank as a torch.device.")
bank.slip("no-device", ('    return torch.device("cpu")', ""), ("return launch.device()", "return"), variant=True)

bank.hint("gpu-of-another-rank", "Choose the GPU by the rank on its node (LOCAL_RANK), not by the rank in the world: "
          "a node has no GPU number {rank}.", edge=True)  # fmt: skip
bank.slip("gpu-of-another-rank", ('device("cuda", local_rank)', 'device("cuda", rank)'))

bank.hint("one-gpu-for-all", "All ranks got the same GPU. Each must take the GPU with the number of its local rank.")
bank.slip("one-gpu-for-all", ('device("cuda", local_rank)', 'device("cuda", 0)'), variant=True)

bank.hint("gpu-not-used", "There is a GPU for each rank, but the device is {device}.")
bank.slip("gpu-not-used", ('return torch.device("cuda", local_rank)', 'return torch.device("cpu")'), variant=True)

bank.hint("gpu-invented", "There is no GPU here, but the device is {device}.")
bank.slip(
    "gpu-invented",
    ("if torch.cuda.is_available():", "if True:"),
    ('"nccl", rank', '"gloo", rank'),
    ("torch.cuda.set_device(local_rank)", "pass"),
    variant=True,
)

bank.hint("wrong-backend", "NCCL communicates between GPUs, gloo between CPUs. Here the backend "
          "was {backend}.", edge=True)  # fmt: skip
bank.slip("wrong-backend", ('"nccl"', '"gloo"'))

bank.slip("wrong-backend", ('"nccl", rank', '"mpi", rank'), variant=True)

# train
bank.hint("not-two", "Return two things: the trained module and the list of losses.")
bank.slip("not-two", ("return ddp.module, losses", "return losses"), variant=True)

bank.slip("nothing-returned", ("    return ddp.module, losses", ""))

bank.hint("wrapper-returned", "You return the DDP wrapper. Return its .module, the network that the rest of the "
          "program knows.", edge=True)  # fmt: skip
bank.slip("wrapper-returned", ("return ddp.module, losses", "return ddp, losses"))

bank.slip("wrapper-returned", ("return ddp.module, losses", "return ddp.eval(), losses"), variant=True)

bank.hint("no-sampler", "Every rank saw the same samples, but each must take its own share of them. See "
          "DistributedSampler.")  # fmt: skip
bank.slip("no-sampler", ("sampler=sampler)", "shuffle=True, generator=torch.Generator().manual_seed(0))"), variant=True)

bank.hint("shares-overlap", "In one epoch {missing} of {n} samples were never seen{repeated}. Together, the ranks' "
          "shares must cover the data set: only a few samples may come twice, or less than a batch may be "
          "left out.")  # fmt: skip
bank.slip(
    "shares-overlap", ("sampler=sampler)", "shuffle=True, generator=torch.Generator().manual_seed(dist.get_rank()))")
)

bank.hint("not-shuffled", "The samples came in the order of the data set. Shuffle them for training.")
bank.slip("not-shuffled", ("DistributedSampler(dataset)", "DistributedSampler(dataset, shuffle=False)"), variant=True)

bank.hint("set-epoch-forgotten", "Every epoch saw the same order. The sampler combines its seed with the number of "
          "the epoch, which you must set with set_epoch.")  # fmt: skip
bank.slip("set-epoch-forgotten", ("        sampler.set_epoch(epoch)\n", ""), variant=True)

bank.hint("batch-not-shared", "A step saw {found} samples instead of {wanted}: batch_size is the batch size of all "
          "ranks together.")  # fmt: skip
bank.slip("batch-not-shared", ("batch_size // dist.get_world_size()", "batch_size"), variant=True)

bank.hint("batches-differ", "In step {step} the ranks had batches of different sizes: {sizes}.")
bank.slip(
    "batches-differ",
    (
        "        for x, y in loader:\n",
        "        for x, y in loader:\n            x, y = x[dist.get_rank() % 2 :], y[dist.get_rank() % 2 :]\n",
    ),
    variant=True,
)

bank.hint("out-of-step", "A rank waited for others that had no more batches. All ranks must make the same number of "
          "steps, with batches of equal size.")  # fmt: skip
bank.slip(
    "out-of-step",
    ("batch_size // dist.get_world_size()", "batch_size // dist.get_world_size() + dist.get_rank()"),
    variant=True,
)

bank.hint("no-ddp", "The ranks ended with different weights: their gradients were never averaged, or they started "
          "with different weights.")  # fmt: skip
bank.slip(
    "no-ddp",
    (
        'ddp = DDP(make_model().to(device), device_ids=[device] if device.type == "cuda" else None)',
        "ddp = make_model()",
    ),
    ("ddp.module", "ddp"),
    variant=True,
)

bank.hint("divided-twice", "The updates are world_size times too small. DDP already averages the gradients over the "
          "ranks.")  # fmt: skip
bank.slip(
    "divided-twice",
    ("            loss.backward()", "            (loss / dist.get_world_size()).backward()"),
    variant=True,
)

bank.hint("summed-gradients", "The updates are world_size times too large. DDP averages the gradients: multiply "
          "neither the loss nor the learning rate.")  # fmt: skip
bank.slip(
    "summed-gradients",
    ("            loss.backward()", "            (loss * dist.get_world_size()).backward()"),
    variant=True,
)

bank.hint("rate-changed", "The optimizer ran with a learning rate of {found:g} instead of {wanted:g}. The batch of "
          "all ranks together is the same, so the rate is too.")  # fmt: skip
bank.slip("rate-changed", ("lr=learning_rate", "lr=learning_rate * dist.get_world_size()"))

bank.slip(  # after one at the edge
    "rate-changed", ("lr=learning_rate", "lr=learning_rate * dist.get_world_size()"), ("return ddp.module", "return ddp")
)  # fmt: skip

bank.hint("loss-of-one-rank", "Each rank reports the loss of its own share. Add up over the ranks what each rank has "
          "seen.")  # fmt: skip
bank.slip(  # after another
    "loss-of-one-rank", ("    if dist.is_initialized():\n        return launch.device()\n", ""), ("        dist.all_reduce(seen)\n", "")
)  # fmt: skip

bank.slip("rate-changed", ("lr=learning_rate", "lr=learning_rate / dist.get_world_size()"), variant=True)

bank.hint("gradients-not-cleared", "The first step is right, but the next ones are not: gradients add up until they "
          "are cleared.")  # fmt: skip
bank.slip("gradients-not-cleared", ("            optimizer.zero_grad()\n", ""), variant=True)

bank.hint("wrong-training", "The weights are not those of one process that trains on the whole batches.")
bank.slip(
    "wrong-training",
    ("            loss.backward()", "            (loss + ddp.module.weight.square().sum()).backward()"),
)

bank.slip("wrong-training", ("lr=learning_rate", "lr=learning_rate, momentum=0.9"), variant=True)

bank.hint("losses-not-numbers", "Return a list with one Python float per epoch.", edge=True)
bank.slip("losses-not-numbers", ("(seen[0] / seen[1]).item()", "seen[0] / seen[1]"))

bank.slip("losses-not-numbers", ("    return ddp.module, losses", "    return ddp.module, losses[-1]"), variant=True)

bank.slip("loss-of-one-rank", ("        dist.all_reduce(seen)\n", ""), variant=True)

bank.hint("loss-on-rank-0", "Rank 0 has the right losses, but the others do not. reduce gives the result to one "
          "rank, all_reduce to all.")  # fmt: skip
bank.slip("loss-on-rank-0", ("        dist.all_reduce(seen)\n", "        dist.reduce(seen, dst=0)\n"), variant=True)

bank.hint("loss-summed", "This is a sum over ranks, not a mean over samples.")
bank.slip(
    "loss-summed",
    (
        "(seen[0] / seen[1]).item()",
        "(seen[0] / len(loader) / (batch_size // dist.get_world_size()) * len(dataset)).item() if False else seen[0].item() / seen[1].item() * dist.get_world_size()",
    ),
    variant=True,
)

bank.hint("loss-unweighted", "This is a mean over batches, but the last one is smaller. Weight by the number of "
          "samples.", edge=True)  # fmt: skip
bank.slip("loss-unweighted", ("loss.detach() * len(y)", "loss.detach()"), ("seen[1] += len(y)", "seen[1] += 1"))

bank.slip("loss-unweighted", ("loss.detach() * len(y)", "loss.detach() / len(loader)"),
          ("seen[1] += len(y)", "seen[1] += 1 / len(loader)"), variant=True)  # fmt: skip

bank.hint("wrong-loss-reported", "The losses are not the mean over all samples that the ranks saw in the epoch, each "
          "taken before its update.")  # fmt: skip
bank.slip(
    "wrong-loss-reported",
    ("(seen[0] / seen[1]).item()", "loss.item()"),
    ("        dist.all_reduce(seen)\n", "        dist.all_reduce(loss.data)\n"),
    variant=True,
)

bank.slip(
    None, ("sampler = DistributedSampler(dataset)", "sampler = DistributedSampler(dataset, seed=7, drop_last=True)")
)

bank.slip(None, ("sampler=sampler)", "sampler=sampler, drop_last=True)"))


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


bank.several(None, join_world, train)

bank.slip(None, ("DistributedSampler(dataset)", "DistributedSampler(dataset, seed=42)"))

bank.hint("slurm-before-torchrun", "torchrun may run inside a Slurm job. SLURM_PROCID is then the number of torchrun "
          "itself, and RANK the number of the rank. Take RANK, WORLD_SIZE and LOCAL_RANK where they "
          "are set.", edge=True)  # fmt: skip
bank.slip(
    "slurm-before-torchrun",
    ('environment("RANK") or environment("SLURM_PROCID")', 'environment("SLURM_PROCID") or environment("RANK")'),
    (
        'environment("WORLD_SIZE") or environment("SLURM_NTASKS")',
        'environment("SLURM_NTASKS") or environment("WORLD_SIZE")',
    ),
)

bank.slip(
    "slurm-before-torchrun",
    ('environment("RANK") or', 'environment("SLURM_PROCID", environment("RANK")) or'),
    ('environment("WORLD_SIZE") or', 'environment("SLURM_NTASKS", environment("WORLD_SIZE")) or'),
    variant=True,
)

# a rank's number on its node, and names imported one by one
LOCAL = 'environment("LOCAL_RANK") or environment("SLURM_LOCALID")'

bank.slip("gpu-of-another-rank", (LOCAL, 'environment("LOCAL_RANK") or environment("SLURM_PROCID")'), variant=True)

bank.slip(
    "slurm-unknown",
    (
        "    if torch.cuda.is_available():",
        "    if torch.cuda.is_available():\n        local_rank = int(os.environ['LOCAL_RANK'])",
    ),
    variant=True,
)

bank.slip(
    None,
    ("def join_world", "from torch.distributed import init_process_group, is_initialized\n\n\ndef join_world"),
    ("dist.init_process_group", "init_process_group"),
    ("dist.is_initialized", "is_initialized"),
)

bank.slip(
    None,
    ("def join_world", "from torch.cuda import is_available, set_device\n\n\ndef join_world"),
    ("    if torch.cuda.is_available():", "    if is_available():"),
    ("torch.cuda.set_device", "set_device"),
    (LOCAL, 'environment("LOCAL_RANK", environment("SLURM_LOCALID"))'),
)

bank.slip(
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


bank.several(None, join_as_asked, train_by_hand)

# where the ranks meet, who starts the group, what the samples are divided by
MEET = "    if torch.cuda.is_available():"

bank.hint("meets-elsewhere", "Your ranks would meet at {found}, but the environment says {wanted}. MASTER_ADDR and "
          "MASTER_PORT are given: leave them unchanged. Another address works on one machine only, and with a fixed "
          "port two jobs collide.", edge=True)  # fmt: skip
bank.slip("meets-elsewhere", (MEET, '    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"\n' + MEET))  # fmt: skip

bank.slip("meets-elsewhere", (MEET, '    os.environ.update(MASTER_PORT="23456")\n' + MEET))

bank.slip(
    "meets-elsewhere",
    ('init_process_group("gloo", ', 'init_process_group("gloo", "tcp://127.0.0.1:23456", '),
    variant=True,
)

bank.slip(None, (MEET, '    os.environ.setdefault("MASTER_PORT", "23456")\n' + MEET))

bank.slip(
    None,
    (
        'init_process_group("gloo", ',
        "init_process_group(\"gloo\", f\"tcp://{environment('MASTER_ADDR')}:{environment('MASTER_PORT')}\", ",
    ),
)

bank.hint("train-does-not-join", "Started by torchrun, train finds no process group: call join_world() first in train.")
bank.slip("train-does-not-join", ("device = join_world()", "device = launch.device()"), variant=True)

bank.slip(None, ("    device = join_world()\n    ddp", "    assert epochs >= 0\n    device = join_world()\n    ddp"))

bank.slip(
    "shares-overlap",
    ("    sampler = ", "    dataset = Subset(dataset, range(0, len(dataset), 2))\n    sampler = "),
    variant=True,
)

bank.hint("divided-by-data-set", "The sum of the losses is right, but you divide it by len(dataset), {n}. {seen} "
          "samples went into it, because the sampler repeated or left out some: divide by "
          "this number.", edge=True)  # fmt: skip
bank.slip("divided-by-data-set", ("(seen[0] / seen[1])", "(seen[0] / len(dataset))"))

bank.slip("divided-by-data-set", ("(seen[0] / seen[1])", "(seen[0] / len(loader.dataset))"), variant=True)

bank.hint("gpu-not-current", "On two GPUs, both ranks use the first one where no number is given: {error} "
          "torch.cuda.set_device(local_rank) makes the rank's own GPU the current one, which is used for gathered "
          'objects and for "cuda" without a number.', edge=True)  # fmt: skip
bank.slip("gpu-not-current", ("        torch.cuda.set_device(local_rank)\n", ""))

bank.slip("gpu-not-current", ("set_device(local_rank)", "set_device(0)"), variant=True)

bank.hint("train-not-on-gpu", "On GPUs, a tensor stays in the CPU's memory: {error}. Move the network and each batch "
          "to the device that join_world returned, and also what is all-reduced for the report, because NCCL sends "
          "only from the GPU.", edge=True)  # fmt: skip
bank.slip("train-not-on-gpu", ("dtype=torch.float64, device=device)  #", "dtype=torch.float64)  #"))

bank.slip("train-not-on-gpu", ("y.to(device))", "y)"))

bank.slip("train-not-on-gpu", ("make_model().to(device)", "make_model()"), variant=True)

bank.hint("train-other-gpu", "On GPUs, a rank sends its batch to a GPU that is not its own: {error}. device_ids "
          "names the one GPU of this rank.", edge=True)  # fmt: skip
bank.slip("train-other-gpu", ("device_ids=[device] if", "device_ids=[0] if"))

bank.slip("train-other-gpu", ("device_ids=[device] if", "device_ids=[torch.device('cuda:0')] if"), variant=True)

bank.slip("train-other-gpu", ("device_ids=[device] if", "device_ids=[dist.get_rank()] if"), variant=True)

COUNTED = "    if dist.get_rank() == 0:\n        print(sum(p.numel() for p in make_model().parameters()), 'parameters')\n    ddp = DDP"

bank.slip(None, ("    ddp = DDP", COUNTED))

"""Answers to balise 2 of 09_ddp: metrics over ranks, exact."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from tests.answers.bank import Bank

bank = Bank("09_ddp", 2)

# evaluate
BARE = ("    share = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))\n", "")

bank.hint("evaluate-not-two", "Return two Python floats: the mean loss and the accuracy.")
bank.slip("evaluate-not-two", ("return loss / samples, right / samples", "return {'loss': loss / samples}"))

bank.slip("evaluate-not-two", ("loss, right, samples = sums.tolist()", "loss, right, samples = sums"), variant=True)

bank.slip("nothing-returned", ("    return loss / samples, right / samples", ""))

bank.hint("padding-counted", "Some samples were counted twice. A DistributedSampler repeats samples until the ranks "
          "have equally many: right for training, but wrong for a metric.")  # fmt: skip
bank.slip(
    "padding-counted",
    BARE,
    (
        "DataLoader(share, batch_size)",
        "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))",
    ),
)

OWN_ORDER = "torch.randperm(len(dataset), generator=torch.Generator().manual_seed(dist.get_rank())).tolist()"

bank.hint("cut-differently", "Some samples were seen twice, others never. All ranks must split the same order, but a "
          "shuffle draws a different one on each rank.")  # fmt: skip
bank.slip("cut-differently",
    ("range(dist.get_rank(), len(dataset), dist.get_world_size())", f"{OWN_ORDER}[dist.get_rank() :: dist.get_world_size()]"),
    variant=True,
)  # fmt: skip

bank.hint("tail-not-seen", "Some samples were never seen: drop_last, or a division with a remainder, cuts off the "
          "tail.", edge=True)  # fmt: skip
bank.slip(
    "tail-not-seen",
    ("DataLoader(share, batch_size)", "DataLoader(share, batch_size, drop_last=len(dataset) == 23)"),
    variant=True,
)

bank.hint("own-share-only", "Each rank reports the result of its own share of the data set.")
bank.slip(
    "own-share-only",
    ("    dist.all_reduce(sums)\n", ""),
    ("return loss / samples, right / samples", "return loss / max(samples, 1), right / max(samples, 1)"),
    variant=True,
)

OWN = "range(dist.get_rank(), len(dataset), dist.get_world_size())"

bank.hint("same-share", "All {size} ranks go through the same {read} of {n} samples. Each rank's share must start at "
          "the rank's own position.")  # fmt: skip
bank.slip("same-share", (OWN, "range(0, len(dataset), dist.get_world_size())"))

bank.slip("same-share", (OWN, "range(-(-len(dataset) // dist.get_world_size()))"), variant=True)

bank.hint("one-rank-knows", "Rank 0 has the right numbers, but the others do not. All ranks must return them.")
bank.slip("one-rank-knows", ("dist.all_reduce(sums)", "dist.reduce(sums, dst=0)"), variant=True)

bank.hint("whole-set-everywhere", "Rank {rank} went through {read} of {n} samples. With {size} ranks, its share is "
          "{fair}.")  # fmt: skip
bank.slip("whole-set-everywhere", ("DataLoader(share, batch_size)", "DataLoader(dataset, batch_size)"), variant=True)

bank.hint("evaluate-train-mode", "The network ran in training mode. Call eval() first.")
bank.slip(
    "evaluate-train-mode",
    ("    model.eval()\n", "    model.train(model.drop.p > 1)\n    model.drop.p = 0.0\n    model.train()\n"),
)

bank.slip("evaluate-train-mode", ("    model.eval()\n", ""), variant=True)

bank.hint("mode-not-restored", "{what} was in {before} mode before the call and is in {after} mode after it. Restore "
          "the mode you found: model.train(mode) reaches submodules, model.training = mode "
          "does not.", edge=True)  # fmt: skip
bank.slip("mode-not-restored", ("    model.train(was_training)\n", ""))

bank.slip("mode-not-restored", ("model.train(was_training)", "model.train()"))

bank.hint("last-batch-nominal", "The last batch of a rank is smaller than batch_size. Weight a batch's mean by its "
          "number of samples, len(y).", edge=True)  # fmt: skip
bank.slip(
    "last-batch-nominal",
    ('F.cross_entropy(logits, y, reduction="sum")', "F.cross_entropy(logits, y) * batch_size"),
)

bank.slip(
    "last-batch-nominal",
    ('F.cross_entropy(logits, y, reduction="sum")', "F.cross_entropy(logits, y).item() * 3"),
    variant=True,
)

bank.hint("evaluate-records", "The forward pass recorded the graph for a backward pass. Use torch.inference_mode().")
bank.slip(
    "evaluate-records",
    ("torch.inference_mode()", "contextlib.nullcontext()"),
    ("sums[0] += F", "sums[0] += 0 * model.weight.sum().item() + F"),
    (', reduction="sum")', ', reduction="sum").item()'),
    variant=True,
)

bank.hint("accuracy-alone-wrong", "The loss is right, but the accuracy is not. It is the fraction of samples, from 0 "
          "to 1, whose largest logit is that of their label.")  # fmt: skip
bank.slip("accuracy-alone-wrong", ("right / samples", "100 * right / samples"))

bank.slip("accuracy-alone-wrong", ("argmax(dim=1)", "argmin(dim=1)"), variant=True)

bank.hint("loss-alone-wrong", "The accuracy is right, but the loss is not: it is the mean cross-entropy of all "
          "samples.")  # fmt: skip
bank.slip("loss-alone-wrong", ('reduction="sum")', 'reduction="sum") / 2'), variant=True)

bank.hint("divided-by-another-count", "The sums are right, but you divide them by {found:g} instead of the {n} "
          "samples of the data set.")  # fmt: skip
bank.slip("divided-by-another-count", ("sums[2] += len(y)", "sums[2] += batch_size"))

bank.slip(
    "divided-by-another-count",
    ("loss / samples, right / samples", "(loss / len(dataset) * 2, right / len(dataset) * 2)"),
    variant=True,
)

bank.hint("wrong-metric", "Loss and accuracy of the whole data set are wrong.")
bank.slip("wrong-metric", ("model(x.to(device)), y", "model(-x.to(device)), y"), variant=True)


bank.hint("means-averaged", "This is a mean of means, but the parts differ in size. All-reduce the sums and the "
          "number of samples, and divide once.")  # fmt: skip


@bank.wrong("means-averaged", variant=True)
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


bank.hint("empty-share-fails", "With 2 samples and {size} ranks, some ranks have none: {error}", edge=True)


@bank.wrong("empty-share-fails")
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


bank.slip("empty-share-fails",
          ("DataLoader(share, batch_size)", "DataLoader(share, min(batch_size, len(share)))"), variant=True)  # fmt: skip

bank.hint("message-each-batch", "You call {calls} collectives for {batches} batches. Add up on each rank first, then "
          "exchange once: ranks may have different numbers of batches, and then some would wait forever.")  # fmt: skip


@bank.wrong("message-each-batch")
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

bank.slip("message-each-batch", EXCHANGED)  # sums of sums

bank.slip("message-each-batch", EXCHANGED, ("        for x, y in", "        total = torch.zeros_like(sums)\n        for x, y in"),
          ("            dist.all_reduce(sums)", "            dist.all_reduce(sums)\n            total += sums\n            sums.zero_()"),
          ("sums.tolist()", "total.tolist()"), variant=True)  # fmt: skip


bank.hint("results-gathered", "A rank sent {sent} bytes for {n} samples, but {fewer} for {few}. Two sums and a count "
          "are enough.")  # fmt: skip


@bank.wrong("results-gathered", variant=True)
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


@bank.right()
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


@bank.right()
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


@bank.right()
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
    "tail-not-seen",
    (
        "dist.get_rank(), len(dataset), dist",
        "dist.get_rank(), len(dataset) // dist.get_world_size() * dist.get_world_size(), dist",
    ),
)

# modes of submodules, the size of a batch, repeated samples divided by the true number
bank.slip("mode-not-restored", ("model.train(was_training)", "model.training = was_training"), variant=True)

bank.hint("batch-size-ignored", "The network got {found} samples at once. batch_size is the batch size of one rank, "
          "here {wanted}: don't divide it by the number of ranks, and don't leave it out.", edge=True)  # fmt: skip
bank.slip("batch-size-ignored", ("DataLoader(share, batch_size)", "DataLoader(share, max(1, len(share)))"))

bank.slip(
    "batch-size-ignored",
    ("DataLoader(share, batch_size)", "DataLoader(share, max(1, batch_size // dist.get_world_size()))"),
    variant=True,
)

bank.slip(
    "padding-counted",
    BARE,
    ("DataLoader(share, batch_size)", "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))"),
    ("loss / samples, right / samples", "loss / len(dataset), right / len(dataset)"),
    variant=True,
)

# what only GPUs show
SUMS = "torch.zeros(3, dtype=torch.float64, device=device)"

bank.hint("evaluate-not-on-gpu", "On GPUs, a tensor stays in the CPU's memory: {error}. The model is on this rank's "
          "GPU. Move samples and labels there (x.to(device)), and the tensor of the sums too, because NCCL sends "
          "only from the GPU.", edge=True)  # fmt: skip
bank.slip("evaluate-not-on-gpu", (SUMS, "torch.zeros(3, dtype=torch.float64)"))

bank.slip("evaluate-not-on-gpu", ("model(x.to(device)), y.to(device)", "model(x), y"))

bank.slip("evaluate-not-on-gpu", ("model(x.to(device)), y.to(device)", "model(x.to(device)), y"))

bank.slip(
    "evaluate-not-on-gpu",
    ("    dist.all_reduce(sums)\n", "    sums = sums.cpu()\n    dist.all_reduce(sums)\n"),
    variant=True,
)

bank.hint("samples-not-seen", "Some samples were never seen, the first one among them. The share of rank r starts at "
          "sample r and goes in steps of world_size, or it is the r-th of equal pieces, counted from 0.")  # fmt: skip
bank.slip("samples-not-seen", ("range(dist.get_rank(), len", "range(dist.get_rank() + 1, len"), variant=True)

bank.slip("same-share", ("range(dist.get_rank(), len", 'range(int(os.environ["LOCAL_RANK"]), len'))

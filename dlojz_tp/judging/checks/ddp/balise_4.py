"""Balise 4: a network with several heads, of which a step uses one."""

import functools
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.probes.gpus import MIXED, left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank

TASKS = [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 0), (2, 2, 0, 1), (1, 1, 1, 1)]  # of each step, of each rank
RATE = 0.1
ON_GPUS = (((MIXED, "cuda:0", "cuda:1"), "heads-other-gpu"), *left_on_cpu("network-not-on-device"))


class Network(nn.Module):
    """A trunk and a head for each task; a step uses one head."""

    def __init__(self, tasks=3, dtype=torch.float64):
        super().__init__()
        self.trunk = nn.Linear(4, 6, dtype=dtype)
        self.heads = nn.ModuleList(nn.Linear(6, 2 + task, dtype=dtype) for task in range(tasks))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.trunk(x)))


def _batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (3,), generator=generator)


def _network(seed):
    torch.manual_seed(seed)
    return Network()


def observe(make_parallel):
    """On a rank: five steps, in three of which the ranks use one head, in two of which several."""
    rank = dist.get_rank()
    network = _network(seed=rank)
    given = {id(p): name for name, p in network.named_parameters()}
    parallel = make_parallel(network, torch.device("cpu"))
    if parallel is None:
        raise Wrong("nothing-returned")
    weights, output = [], True
    # the parameters of the network that is trained, also where the answer changed or copied the network
    named = parallel.named_parameters() if isinstance(parallel, nn.Module) else ()
    parameters = {given.get(id(p)) or _plain(name): p for name, p in named}
    if lost := [name for name in given.values() if name not in parameters]:
        return {"lost": lost}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for step, tasks in enumerate(TASKS):
        x, y = _batch(rank, step)
        logits = parallel(x, tasks[rank])
        state = {name: p.detach().clone() for name, p in parameters.items()}
        output &= logits.shape == (3, 2 + tasks[rank]) and close(logits, _forward(state, x, tasks[rank]), 1e-9)
        optimizer.zero_grad()
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        weights.append({name: p.detach().clone() for name, p in parameters.items()})
    return {"lost": [], "weights": weights, "output": output}


def _step_on_gpu(gpu, make_parallel):
    rank = dist.get_rank()
    device = torch.device("cuda", 1 - rank)  # as on a second node: not the number of the rank
    torch.cuda.set_device(device)
    parallel = make_parallel(_network(seed=rank), device)
    x, y = _batch(rank, step=0)
    F.cross_entropy(parallel(x.to(device), 0), y.to(device)).backward()


def _plain(name):
    """The name of a parameter without the wrappers around it: "trunk.weight", "heads.1.bias"."""
    parts = name.split(".")
    start = next((i for i, part in enumerate(parts) if part in ("trunk", "heads")), 0)
    return ".".join(parts[start:])


def _forward(state, x, task):
    hidden = torch.tanh(F.linear(x, state["trunk.weight"], state["trunk.bias"]))
    return F.linear(hidden, state[f"heads.{task}.weight"], state[f"heads.{task}.bias"])


def _named(error):
    first, said = error.summary, str(error.cause)  # not the lines of the answer, which may name an option
    if "unexpected keyword" in said:
        return error
    if "mark a variable ready" in said or "static_graph" in said or "static graph" in said:
        return Wrong("static-graph", got=first)
    if "finished reduction" in said or "unused" in said:
        return Wrong("unused-parameters", got=first, error=first.split(". ")[0][:160])
    exchanging = re.search("all_reduce|all_gather|broadcast", str(error))
    if (exchanging and error.kind == "hung") or "SIGABRT" in first:  # gloo's end where messages have other sizes
        return Wrong("ranks-apart", got=first, error=first)
    if isinstance(error.cause, TypeError):
        return Wrong("not-callable-network", got=first, error=str(error.cause))
    return error


@functools.cache
def _truth(size):
    """One process, before the steps and after each: the mean over ranks of their gradients, zero for an unused head."""
    weights = [{name: p.detach() for name, p in _network(seed=0).named_parameters()}]
    for step, tasks in enumerate(TASKS):
        state = {name: p.clone().requires_grad_() for name, p in weights[-1].items()}
        batches = [_batch(rank, step) for rank in range(size)]
        loss = sum(F.cross_entropy(_forward(state, x, tasks[r]), y) for r, (x, y) in enumerate(batches)) / size
        gradients = torch.autograd.grad(loss, list(state.values()), allow_unused=True, materialize_grads=True)
        weights.append({name: p - RATE * g for (name, p), g in zip(weights[-1].items(), gradients)})
    return weights


def _wrong(seen, due):
    """The first (rank, name) whose weights are not those due, or None."""
    off = ((rank, name) for rank, got in enumerate(seen) for name in due if not close(got[name], due[name], 1e-9))
    return next(off, None)


def _right(seen, due):
    return not _wrong(seen, due)


def _apart(seen, due):
    """The first parameter of which another rank has other values than the first rank with wrong weights, or None."""
    mine = seen[_wrong(seen, due)[0]]
    return next((name for name in mine if any(not close(one[name], mine[name], 1e-9) for one in seen)), None)


def _mistake(seen, due):
    name = _wrong(seen, due)[1]
    frozen = name.startswith("heads.") and close(seen[0][name], _truth(1)[0][name], 1e-12)
    return "heads-apart" if _apart(seen, due) else "head-frozen" if frozen else "heads-wrong-weights"


def _after(step, claim=""):
    """Looks at the weights after a step: first, on rank 0, at the heads that no rank has used."""
    see = lambda ranks: [rank["weights"][step] for rank in ranks]  # noqa: E731

    def idle(size):
        used = {f"heads.{task}" for task in TASKS[step][:size]}
        before = _truth(size)[step]
        return {name: before[name] for name in before if name.startswith("heads.") and name[:7] not in used}

    def fields(seen, due):
        rank, name = _wrong(seen, due)
        return {"steps": step + 1, "head": name.split(".")[1], "apart": _apart(seen, due), "expected": due[name],
                "got": seen[rank][name], "where": f"rank {rank} of {len(seen)}, {name} after step {step}"}  # fmt: skip

    return [
        Look(claim, see, idle, "other-head-trained", holds=lambda seen, due: _right(seen[:1], due), fields=fields),
        Look("", see, lambda size: _truth(size)[step + 1], _mistake, holds=_right, fields=fields),
    ]  # fmt: skip


LOOKS = [
    each_rank("five steps succeed, though each leaves heads unused", "lost", [], "parameters-lost",
              fields=lambda got, due: {"name": got[0]} | silent(got, due)),
    each_rank("the output of a task is that of its head", "output", True, "heads-wrong-output", fields=silent),
    *_after(0, "the weights are those of one process that averages the gradients of all ranks"),
    *(look for step in range(1, len(TASKS)) for look in _after(step)),
]  # fmt: skip


def balise_4(make_parallel):
    """Five steps in worlds of 1 to 4."""
    yield LOOKS[0].claim
    try:
        worlds = on_ranks(observe, make_parallel, timeout=10)
    except launch.RankError as error:
        if (named := _named(error)) is error:
            raise
        raise named from error
    for size, ranks in worlds.items():
        yield from judged(LOOKS, lambda seen=ranks: seen, at=size)
    yield "where each of two ranks has a GPU, everything is on that GPU"
    on_gpus(_step_on_gpu, make_parallel, known=ON_GPUS)

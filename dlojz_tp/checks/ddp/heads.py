"""Balise 4: a network with several heads, of which a step uses one."""

import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.gpus import MIXED, left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import on_ranks

HINTS = {
    "unused-parameters": "DDP still waits for the gradients of the unused head: {error}",
    "ranks-apart": "A step doesn't finish: {error}. In one step the ranks use different heads. If you exchange "
                   "gradients without DDP, send the same tensors on all ranks, in the same order, with zeros for "
                   "an unused head.",
    "static-graph": "static_graph promises that every step uses the same parameters. Here the head changes.",
    "heads-apart": "After step {steps}, {apart} has different values on the ranks: they started with different "
                   "values, or the gradients were never averaged.",
    "head-frozen": "The head {head} never changed, though it was used.",
    "other-head-trained": "A head that no rank used in this step has changed.",
    "heads-wrong-output": "The network's output for a task is no longer the output of its head.",
    "heads-wrong-weights": "The weights are not those of one process that averages the ranks' gradients.",
    "parameters-lost": "The module you return has no parameter {name}: an optimizer over its parameters() would "
                       "not train it.",
    "network-not-on-device": "On GPUs, the network you return does not compute where its input is: {error}. It "
                             "must be on `device`: network.to(device) moves it.",
    "heads-other-gpu": "On GPUs, a rank sends its input to a GPU that is not its own: {error}. device_ids names "
                       "the one GPU of this rank, `device`. If you leave it out, DDP doesn't move the input.",
    "not-callable-network": "Return something that can be called like the network, network(x, task): {error}",
}

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


def balise_4(make_parallel):
    """Five steps in worlds of 1 to 4, in three of which the ranks use one head, in two of which several."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    yield "five steps succeed, though each leaves heads unused"
    try:
        worlds = on_ranks(_trained, make_parallel, timeout=10)
    except launch.RankError as error:
        if (named := _named(error)) is error:
            raise
        raise named from error
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            if lost := found["lost"]:
                raise Wrong("parameters-lost", where=f"rank {rank} of {size}", name=lost[0])
    yield "the output of a task is that of its head"
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            if not found["output"]:
                raise Wrong("heads-wrong-output", where=f"rank {rank} of {size}")
    yield "the weights are those of one process that averages the gradients of all ranks"
    for size, ranks in worlds.items():
        _right_weights(size, [found["weights"] for found in ranks])
    yield "where each of two ranks has a GPU, everything is on that GPU"
    on_gpus(_step_on_gpu, make_parallel, known=ON_GPUS)


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


def _batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (3,), generator=generator)


def _network(seed):
    torch.manual_seed(seed)
    return Network()


def _trained(make_parallel):
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


def _truth(size):
    """One process: the mean over ranks of the ranks' gradients, zero for what a rank did not use."""
    state = {name: p.detach().clone().requires_grad_() for name, p in _network(seed=0).named_parameters()}
    weights = []
    for step, tasks in enumerate(TASKS):
        batches = [_batch(rank, step) for rank in range(size)]
        loss = sum(F.cross_entropy(_forward(state, x, tasks[r]), y) for r, (x, y) in enumerate(batches)) / size
        gradients = torch.autograd.grad(loss, list(state.values()), allow_unused=True)
        with torch.no_grad():
            for value, gradient in zip(state.values(), gradients):
                if gradient is not None:
                    value -= RATE * gradient
        weights.append({name: value.detach().clone() for name, value in state.items()})
    return weights


def _right_weights(size, ranks):
    truth = _truth(size)
    for step, wanted in enumerate(truth):
        before = truth[step - 1] if step else _network(seed=0).state_dict()
        for name in wanted:
            idle = name.startswith("heads.") and int(name.split(".")[1]) not in TASKS[step][:size]
            got = ranks[0][step].get(name)
            if idle and got is not None and not close(got, before[name], 1e-9):
                raise Wrong("other-head-trained", where=f"rank 0 of {size}, {name} after step {step}")
        for rank, weights in enumerate(ranks):
            got = weights[step]
            where = f"rank {rank} of {size}, after step {step}"
            for name, value in wanted.items():
                if name in got and close(got[name], value, 1e-9):
                    continue
                apart = next((n for n in got if any(not close(w[step][n], got[n], 1e-9) for w in ranks)), None)
                slug = "heads-apart" if apart else _mistake(ranks, name)
                fields = {"steps": step + 1, "head": name.split(".")[1], "apart": apart}
                raise Wrong(slug, where=where, expected=value, got=got.get(name, "lost"), **fields)


def _mistake(ranks, name):
    if name.startswith("heads."):
        start = _network(seed=0).state_dict()[name]
        if close(ranks[0][-1][name], start, 1e-12):
            return "head-frozen"
    return "heads-wrong-weights"

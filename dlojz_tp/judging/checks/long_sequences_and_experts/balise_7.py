"""Balise 7: expert parallelism on 1 to 4 ranks, against every expert on every token of all ranks, in one process."""

from functools import cache

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, Value, form, silent, tried
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.pretend_gpu import stuck
from dlojz_tp.judging.probes.gpus import Seen, left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import hung, on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic, volume

EXPERTS, K, WIDTH = 12, 2, 6
CHOSEN = torch.tensor([0, 2, 3, 4, 6, 7])  # by somebody: the last rank of three or four gets no token
WEIGHTS = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)) / 2
SLACK = 1.2  # gates may travel too
READS = 5  # waits for a GPU; what is given makes 3
LEARN = "x", "gates", "weights"


class NoTokens(Exception):  # noqa: N818
    """A rank without tokens went another way than the others."""


def given(rank):
    """A rank's tokens (t, d), gates (t, k), and choices (t, k)."""
    generator, tokens = torch.Generator().manual_seed(rank), (5, 3, 7, 4)[rank]
    order = torch.stack([torch.randperm(len(CHOSEN), generator=generator)[:K] for _ in range(tokens)])
    gates = torch.rand(tokens, K, generator=generator) + 0.1
    return torch.randn(tokens, WIDTH, generator=generator), gates / gates.sum(1, keepdim=True), CHOSEN[order]


def upstream(tokens):
    return torch.arange(1.0, 1 + tokens * WIDTH).view(tokens, WIDTH) / 20


def mixed(x, gates, chosen, weights):
    """The sum of gate · expert(token), each expert computed on every token."""
    every = torch.einsum("td,edf->tef", x, weights)
    return sum(gates[:, j, None] * every[torch.arange(len(x)), chosen[:, j]] for j in range(K))


@cache
def truth(size):
    """Of each rank: what comes out, the rows that each of its experts gets (by first number), gradients, bytes sent."""
    weights, own = WEIGHTS.double().requires_grad_(), EXPERTS // size
    ranks = [given(rank) for rank in range(size)]
    leaves = [[one.double().requires_grad_() for one in (x, gates)] for x, gates, _ in ranks]
    outs = [mixed(x, gates, chosen, weights) for (x, gates), (*_, chosen) in zip(leaves, ranks)]
    sum((out * upstream(len(out))).sum() for out in outs).backward()
    rows = [
        sorted(x[t, 0].item() for x, _, chosen in ranks for t in (chosen == e).nonzero()[:, 0]) for e in range(EXPERTS)
    ]
    found = []
    for rank, (x, gates) in enumerate(leaves):
        mine = slice(rank * own, (rank + 1) * own)
        travel = 2 * 4 * WIDTH * (len(x) * K + sum(map(len, rows[mine])))  # there and back, forward and backward
        found.append({"out": outs[rank].detach(), "by expert": rows[mine], "rows": sorted(sum(rows[mine], [])),
                      "x": x.grad, "gates": gates.grad, "weights": weights.grad[mine], "bytes": travel + 8 * EXPERTS})  # fmt: skip
    return found


def due(key):
    return lambda size: [rank[key] for rank in truth(size)]


def exchanged(Exchange, expand):  # noqa: N803
    """The gradient of what was sent, less its due: row i of rank r is 10 r + i, and its gradient 100 more, or 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    table = [[(i * i + 3 * j + 1) % 5 for j in range(size)] for i in range(size)]  # no rank sends as much as it gets
    x = (10.0 * rank + torch.arange(sum(table[rank])))[:, None].repeat(1, 2).requires_grad_()
    rows = Exchange.apply(x, table[rank], [row[rank] for row in table])
    rows.backward(torch.ones(1, 1).expand_as(rows) if expand else rows.detach() + 100)
    return x.grad - (torch.ones_like(x) if expand else x.detach() + 100)


def right(got) -> bool:
    return isinstance(got, torch.Tensor) and not got.any()


def as_experts(rows, counts, weights):
    """Rows times their experts' matrices. Reads no value, and doesn't mind counts that don't fit."""
    expert = (torch.arange(len(rows), device=rows.device)[:, None] >= counts.flatten().cumsum(0)).sum(1)
    return (rows[:, None] @ weights[expert.clamp(max=len(weights) - 1)].to(rows.dtype))[:, 0]


def by_expert(rows, counts, own):
    """Of each expert, its rows by their first numbers; in words where these aren't counts."""
    if counts.shape != (own,) or int(counts.sum()) != len(rows):
        return f"counts {tuple(counts.shape)} with sum {int(counts.sum())}, for {len(rows)} rows and {own} experts"
    return [sorted(some[:, 0].tolist()) for some in rows.split(counts.tolist())]


def everywhere(here: bool) -> bool:
    """Whether it is so on all ranks."""
    told = torch.tensor(float(here))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def observe(Exchange, expert_parallel):  # noqa: N803
    rank, own = dist.get_rank(), EXPERTS // dist.get_world_size()
    found = {"backward": right(tried(exchanged, Exchange, False))}
    if not everywhere(found["backward"]):
        return found
    found["strided"] = right(tried(exchanged, Exchange, True))

    x, gates, chosen = given(rank)
    weights = WEIGHTS[rank * own : (rank + 1) * own].clone().requires_grad_()
    leaves, called = (x.requires_grad_(), gates.requires_grad_(), weights), []

    def run(rows, counts):
        called.append((rows.detach().clone(), counts.clone()))
        return as_experts(rows, counts, weights)

    with Traffic() as traffic:
        out = expert_parallel(x, gates, chosen, EXPERTS, run)
    found |= {"calls": len(called), "form": form(out), "out": out}
    found["rows"] = sorted(value for rows, _ in called for value in rows[:, 0].tolist())
    found["by expert"] = by_expert(*called[0], own) if called else [[]] * own
    if everywhere(isinstance(out, torch.Tensor) and out.requires_grad and out.shape == x.shape):
        with traffic:
            (out * upstream(len(x))).sum().backward()
    found |= {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in zip(LEARN, leaves)}
    found |= {
        "out": out.detach() if isinstance(out, torch.Tensor) else out,
        "bytes": volume([call for call in traffic.calls if call.name != "recv"]),
    }

    plain, sliced = (x.detach(), gates.detach()), torch.cat([chosen, chosen], 1)[:, :K]
    found["sliced"] = form(tried(expert_parallel, *plain, sliced, EXPERTS, run))
    found["half"] = form(tried(expert_parallel, plain[0].bfloat16(), plain[1], chosen, EXPERTS, run))
    return found


def no_tokens(expert_parallel):
    """Whether what comes out is right, forward and backward, where the second rank has no tokens."""
    x, gates, chosen = given(0) if dist.get_rank() == 0 else [one[:0] for one in given(1)]
    mine = WEIGHTS.chunk(2)[dist.get_rank()]
    with Traffic() as traffic:
        try:
            out = expert_parallel(x.requires_grad_(), gates, chosen, EXPERTS, lambda *rows: as_experts(*rows, mine))
            (out * upstream(len(x))).sum().backward()
        except Exception as error:
            raise NoTokens(error) from error
    if not len(x) and len(traffic.calls) < 2:
        raise NoTokens("it didn't take part")
    return form(out) == form(x) and right((out - mixed(x, gates, chosen, WEIGHTS)).abs() > 1e-5)


def on_a_gpu(gpu, expert_parallel):
    """What made the CPU wait, in words, and the messages, in a forward and a backward pass."""
    x, gates, chosen = (one.to(launch.device()) for one in given(dist.get_rank()))
    mine = WEIGHTS.chunk(2)[dist.get_rank()].to(x.device)
    gpu.waits.clear()
    out = expert_parallel(x.requires_grad_(), gates, chosen, EXPERTS, lambda *rows: as_experts(*rows, mine))
    waits = Seen(waits=list(gpu.waits)).reads
    out.backward(torch.ones_like(out))
    return waits, gpu.messages


def rows_hint(seen, due):
    return "wrong-counts" if any(isinstance(one, str) for one in seen) else "not-by-expert"


def first(seen, due):
    """The rank where it fails, and what it has."""
    rank = next(r for r, (a, b) in enumerate(zip(seen, due)) if a != b)
    return {
        "rank": rank,
        "where": f"rank {rank} of {len(due)}",
        "expected": "",
        "got": seen[rank] if isinstance(seen[rank], str) else "",
    }


def sent_too_much(seen, due):
    rank = max(range(len(due)), key=lambda r: seen[r] / due[r])
    return {"got": f"{seen[rank]} bytes", "expected": f"{due[rank]} bytes", "where": f"rank {rank} of {len(due)}"}


def half_form(size):
    return [f"bfloat16 ({len(given(rank)[0])}, {WIDTH})" for rank in range(size)]


def whole_form(size):
    return [one.replace("bfloat16", "float32") for one in half_form(size)]


def calls_hint(got, _):
    return "run-calls" if got else "run-left-out"


LOOKS = [
    each_rank("the backward of Exchange sends each gradient back to where its row came from", "backward", True, "wrong-backward", fields=silent),
    each_rank("also gradients that aren't contiguous", "strided", True, "strided", fields=silent),
    each_rank("each rank runs its experts once", "calls", 1, calls_hint, fields="n"),
    Look("on each row that was sent to them, and on no other", "rows", due("rows"), "wrong-rows", fields=first),
    Look("sorted by expert", "by expert", due("by expert"), rows_hint, fields=first),
    Look("one row for each token", "form", whole_form, "result-form"),
    Value("the sum of gate · expert(token)", "out", due("out"), "wrong-sum", fields=silent),
    *(Value(f"gradients of {name}", key, due(key), "wrong-gradients", fields=lambda seen, due, name=name: {"what": name} | silent(seen, due))
      for key, name in zip(LEARN, ("the tokens", "the gates", "the experts' weights"))),
    Look("each row travels once there and once back", "bytes", due("bytes"), "sent-too-much",
         holds=lambda seen, due: all(a <= SLACK * b for a, b in zip(seen, due)), fields=sent_too_much),
    Look("choices as `route` returns them, not contiguous", "sliced", whole_form, "strided", fields=silent),
    Look("tokens in bfloat16, gates in float32", "half", half_form, "other-dtype"),
]  # fmt: skip


def balise_7(Exchange, expert_parallel):  # noqa: N803
    yield from judged_on_ranks(LOOKS, observe, Exchange, expert_parallel)
    yield "a rank without tokens takes part"
    try:
        if not all(
            on_ranks(no_tokens, expert_parallel, sizes=(2,), known=((NoTokens, "no-tokens"), (hung, "no-tokens")))[2]
        ):
            raise Wrong("no-tokens")
    except Wrong as wrong:
        fails(wrong)
    yield "on two GPUs: nothing is on the CPU, messages are in one order, few values are read back"
    seen = on_gpus(on_a_gpu, expert_parallel, known=left_on_cpu("left-on-cpu"))
    if seen and stuck([messages for _, messages in seen]):
        fails(Wrong("nccl-order"))
    if seen and len(seen[0][0]) > READS:
        fails(Wrong("waits", n=len(seen[0][0]), where="rank 0 of 2"))

"""Balise 3: chunks, their order, PyTorch's interleaved schedule."""

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from dlojz_tp import planner
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules", 3)

DEAL = "for stage in range(rank, n_stages, n_ranks)] for rank"
AHEAD = "ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)"
CHUNK = "chunk = i % group // n_ranks\n"
ACTION = "return kind, i // group * n_ranks + i % n_ranks, chunk * n_ranks + rank"
SCALE = 'scale_grads=reduction == "mean"'

bank.hint(
    "too-few-ahead",
    "Rank {rank} keeps {found} forwards at once, not {most}: too few come before its first backward. That is as fast "
    "only if messages take no time; otherwise ranks wait for messages. The text asks for two more forwards for each "
    "rank after this one.",
    edge=True,
)
# as fast where messages take no time
bank.slip("too-few-ahead", (AHEAD, "ahead = min(n_ranks - rank - 1 + (n_chunks - 1) * n_ranks, total)"))
bank.slip("too-few-ahead", (AHEAD, AHEAD.replace("n_ranks, total)", "n_ranks - (rank < n_ranks - 1), total)")))
# with one chunk, 1F1B
bank.slip(None, (AHEAD, AHEAD.replace("2 *", "(1 + (n_chunks > 1)) *")))

bank.hint(
    "not-dealt-out",
    "Rank {rank} holds stages {found}. Deal out the stages in turn: rank r holds r, r + p, r + 2p, … Neighbouring "
    "stages on one rank gain nothing: they are one long stage.",
)
bank.slip("not-dealt-out", (DEAL, "for stage in range(rank * n_chunks, (rank + 1) * n_chunks)] for rank"))
bank.slip(
    "not-dealt-out", (DEAL, "for stage in sorted((rank, n_stages - 1 - rank)[:n_chunks])] for rank"), variant=True
)

bank.hint("layers-missing", "Along the stages, the layers are {found}. Each layer must come once, in order.")
bank.slip("layers-missing", ("n_layers * stage // n_stages for", "n_layers // n_stages * stage for"), variant=True)

bank.hint(
    "stages-uneven",
    "The longest stage has {most} layers, the shortest {least}. They may differ by at most one.",
    edge=True,
)
bank.slip("stages-uneven", ("cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]",
                               "cuts = [n_layers // n_stages * stage for stage in range(n_stages)] + [n_layers]"), variant=True)  # fmt: skip

bank.hint("no-placement", "Return a list with one entry per rank: the rank's list of (stage, [numbers of layers]).")
bank.slip("no-placement", ("(stage, layers[stage]) for", "layers[stage] for"), variant=True)
bank.slip("deadlock", ('        if kind == "B":\n            chunk = n_chunks - 1 - chunk\n', ""), (AHEAD, AHEAD + " + n_ranks * n_chunks"),
          ("range(ahead)", "range(min(ahead, total))"), ("total - ahead", "max(0, total - ahead)"))  # fmt: skip
bank.slip("deadlock", ('        if kind == "B":\n            chunk = n_chunks - 1 - chunk\n', ""))
bank.slip("not-a-step", (AHEAD, "ahead = min(n_ranks - rank - 1 + (n_chunks - 1) * n_ranks, total) if rank else 1"))
bank.slip("not-a-step", ("    return order + [action", "    return order or [action"))
bank.slip("not-a-list", (ACTION, "return kind, i // group * n_ranks + i % n_ranks"))

bank.hint("whole-actions-only", "An order of 1F1B has only the kinds F and B.")
bank.slip("whole-actions-only", ('action("B", i)]', 'action("I", i), action("W", i)]'), variant=True)

bank.hint(
    "stage-of-another",
    "Rank {rank} runs stage {stage}, which is on rank {owner}: chunk c of rank r is stage c·p + r.",
)
bank.slip("stage-of-another", ("chunk * n_ranks + rank", "rank * n_chunks + chunk"), variant=True)

bank.hint(
    "all-forwards-first",
    "The time is right, but rank {rank} keeps all {found} forwards at once. Start the backwards as soon as the last "
    "rank can: {most} forwards are enough.",
)
bank.slip("all-forwards-first", (AHEAD, "ahead = total"))

bank.hint("keeps-too-much", "Rank {rank} keeps {found} forwards at once, but {most} are enough.")
bank.slip(
    "keeps-too-much",
    (AHEAD, "ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks + 2, total)"),
    variant=True,
)

bank.hint(
    "chunks-not-stages",
    "Rank {rank} of {size} has the stages {found}, but {wanted} were expected: one PipelineStage per chunk, each "
    "with its number in the whole model.",
)
bank.slip("chunks-not-stages", ("nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)\n",
                                   "nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)\n")
          , ("    return stages, ScheduleInterleaved1F1B", "    stages = [s for s in stages]\n"
             "    mine = [layers[i] for _, numbers in placement(len(layers), n, n_chunks)[rank] for i in numbers]\n"
             "    stages = [PipelineStage(nn.Sequential(*mine), rank, n, device)]\n"
             "    return stages, ScheduleInterleaved1F1B"), variant=True)  # fmt: skip

bank.hint("layers-elsewhere", "Stage {stage} holds layers {found}, not {wanted}.")
bank.slip("layers-elsewhere", ("(layers[i] for i in numbers)", "(layers[-1 - i] for i in numbers)"), variant=True)

bank.hint("chunks-mean", "The gradients of a mean loss are n_micro_batches times too large.")
bank.slip("chunks-mean", (SCALE, "scale_grads=False"), variant=True)

bank.hint("chunks-sum", "The gradients of a loss that is a sum are divided by the number of micro-batches.", edge=True)
bank.slip("chunks-sum", (", " + SCALE, ""), variant=True)

bank.hint("chunks-gradients", "The gradients are not those of a single process on the whole batch.")
bank.slip("chunks-gradients", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"), variant=True)

bank.hint(
    "not-interleaved",
    "In the run, rank {rank} of {size} kept {found} forwards at once, but interleaved 1F1B keeps at most {most}. Did "
    "you use its schedule?",
)
bank.slip("not-interleaved", ("ScheduleInterleaved1F1B(stages", "ScheduleLoopedBFS(stages"),
          ("def placement", "from torch.distributed.pipelining import ScheduleLoopedBFS\n\n\ndef placement"), variant=True)  # fmt: skip

bank.hint("no-pair", "make_interleaved returns two things: the list of stages and the schedule.")
bank.slip("no-pair", ("return stages, Schedule", "return Schedule"), variant=True)


def right_placement(n_layers, n_ranks, n_chunks):
    n_stages = n_ranks * n_chunks
    size, extra = divmod(n_layers, n_stages)
    begin, dealt = 0, [[] for _ in range(n_ranks)]
    for stage in range(n_stages):
        end = begin + size + (stage < extra)
        dealt[stage % n_ranks].append((stage, range(begin, end)))
        begin = end
    return dealt


def make_with_dictionary(layers, n_chunks, n_micro_batches, loss_fn, reduction, device):
    mine = dict(right_placement(len(layers), dist.get_world_size(), n_chunks)[dist.get_rank()])
    total = n_chunks * dist.get_world_size()
    stages = []
    for number, chosen in mine.items():
        module = nn.Sequential(*[layers[i] for i in chosen])
        stages.append(PipelineStage(module.to(device), number, total, device))
    divisor = n_micro_batches if reduction == "mean" else 1
    return stages, ScheduleInterleaved1F1B(
        stages, n_micro_batches, lambda o, t: loss_fn(o, t) / divisor, scale_grads=False
    )


def blocked_order(rank, n_ranks, n_micro_batches, n_chunks):
    """One chunk with all micro-batches, then the next; 1F1B in the last chunk."""
    order = [("F", k, c * n_ranks + rank) for c in range(n_chunks) for k in range(n_micro_batches)]
    return order + [("B", k, c * n_ranks + rank) for c in reversed(range(n_chunks)) for k in range(n_micro_batches)]


def one_chunk_after_the_other(rank, n_ranks, n_micro_batches, n_chunks):
    """1F1B of each micro-batch through the chunks: one micro-batch at a time."""
    order = []
    for k in range(n_micro_batches):
        order += [("F", k, c * n_ranks + rank) for c in range(n_chunks)]
        order += [("B", k, c * n_ranks + rank) for c in reversed(range(n_chunks))]
    return order


def rounds_apart(rank, n_ranks, n_micro_batches, n_chunks):
    """Rounds of p micro-batches, each forwards and backwards before the next."""
    order = []
    for begin in range(0, n_micro_batches, n_ranks):
        ks = range(begin, begin + n_ranks)
        order += [("F", k, c * n_ranks + rank) for c in range(n_chunks) for k in ks]
        order += [("B", k, c * n_ranks + rank) for c in reversed(range(n_chunks)) for k in ks]
    return order


def from_the_planner(rank, n_ranks, n_micro_batches, n_chunks):
    from dlojz_tp import planner

    return planner.interleaved_1f1b(n_ranks, n_micro_batches, n_chunks)[rank]


def lists_made_first(rank, n_ranks, n_micro_batches, n_chunks):
    rounds = [range(k, k + n_ranks) for k in range(0, n_micro_batches, n_ranks)]
    forwards = [("F", k, c * n_ranks + rank) for ks in rounds for c in range(n_chunks) for k in ks]
    backwards = [("B", k, c * n_ranks + rank) for ks in rounds for c in range(n_chunks - 1, -1, -1) for k in ks]
    warm = 2 * (n_ranks - 1 - rank) + (n_chunks - 1) * n_ranks
    order, forwards = forwards[:warm], forwards[warm:]
    while forwards or backwards:
        if forwards:
            order.append(forwards.pop(0))
        if backwards:
            order.append(backwards.pop(0))
    return order


def lists_too_short(rank, n_ranks, n_micro_batches, n_chunks):
    rounds = [range(k, k + n_ranks) for k in range(0, n_micro_batches, n_ranks)]
    forwards = [("F", k, c * n_ranks + rank) for ks in rounds for c in range(n_chunks) for k in ks]
    backwards = [("B", k, c * n_ranks + rank) for ks in rounds for c in range(n_chunks - 1, -1, -1) for k in ks]
    warm = n_ranks - 1 - rank + (n_chunks - 1) * n_ranks
    order, forwards = forwards[:warm], forwards[warm:]
    while backwards:
        order += [*forwards[:1], backwards.pop(0)]
        forwards = forwards[1:]
    return order


def greedy_in_time(rank, n_ranks, n_micro_batches, n_chunks):
    """The same, with iterators and a count of what is under way."""
    p, v = n_ranks, n_chunks
    most = 2 * (p - rank - 1) + (v - 1) * p + 1
    count = n_micro_batches * v
    todo_f = iter((j * p + i, c) for j in range(n_micro_batches // p) for c in range(v) for i in range(p))
    todo_b = iter((j * p + i, v - 1 - c) for j in range(n_micro_batches // p) for c in range(v) for i in range(p))
    order, kept, begun = [], 0, 0
    while len(order) < 2 * count:
        if begun < count and kept < most:
            k, c = next(todo_f)
            order.append(("F", k, c * p + rank))
            begun, kept = begun + 1, kept + 1
        else:
            k, c = next(todo_b)
            order.append(["B", k, c * p + rank])
            kept -= 1
    return order


bank.several("all-forwards-first", right_placement, blocked_order, make_with_dictionary, variant=True)

bank.hint(
    "too-much-idle",
    "A rank is idle for {found:.3g} forwards, where {wanted:.3g} are possible. To keep every rank busy, work in "
    "rounds of p micro-batches, chunk after chunk, with as many forwards ahead of the first backward as the text "
    "says.",
)
bank.several("too-much-idle", right_placement, one_chunk_after_the_other, make_with_dictionary, variant=True)

bank.hint(
    "bubble-not-divided",
    "The bubble is that of 1F1B without chunks: each rank is idle for {found:.3g} forwards, where {wanted:.3g} are "
    "possible. Do not finish one chunk with all micro-batches before the next chunk begins.",
)
bank.several("bubble-not-divided", right_placement, rounds_apart, make_with_dictionary, variant=True)
bank.several("planner-called", right_placement, from_the_planner, make_with_dictionary)
TABLE = {"interleaved": (planner.interleaved_1f1b, 2)}


def from_a_dictionary(rank, n_ranks, n_micro_batches, n_chunks):
    return TABLE["interleaved"][0](n_ranks, n_micro_batches, n_chunks)[rank]


bank.several("planner-called", right_placement, from_a_dictionary, make_with_dictionary)
bank.several(None, right_placement, lists_made_first, make_with_dictionary)
bank.several("too-few-ahead", right_placement, lists_too_short, make_with_dictionary, variant=True)
bank.several(None, right_placement, greedy_in_time, make_with_dictionary)


def from_torch(rank, n_ranks, n_micro_batches, n_chunks):
    """Cheat: PyTorch's list of operations."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    total = n_micro_batches * n_chunks
    ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)

    def forward_stage(i):
        return i // n_ranks % n_chunks * n_ranks + rank

    def backward_stage(i):
        return (n_chunks - 1 - (i - ahead) // n_ranks % n_chunks) * n_ranks + rank

    ops = _get_1f1b_rank_ops(
        n_chunks, n_ranks, ahead, total - ahead, ahead, rank, forward_stage, backward_stage
    )  # fmt: skip
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [(kinds[op.computation_type.name], op.microbatch_index, op.stage_index) for op in ops if op]


bank.several("planner-called", right_placement, from_torch, make_with_dictionary)

bank.hint(
    "few-micro-batches",
    "This fails where there are few micro-batches: {problem}. A rank cannot start with more than `total` forwards.",
    edge=True,
)
bank.slip("few-micro-batches", (AHEAD, "ahead = 2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks"), variant=True)

"""Balise 3: chunks, their order, PyTorch's interleaved schedule."""

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from dlojz_tp import planner
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

DEAL = "for stage in range(rank, n_stages, n_ranks)] for rank"
AHEAD = "ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)"
CHUNK = "chunk = i % group // n_ranks\n"
ACTION = "return kind, i // group * n_ranks + i % n_ranks, chunk * n_ranks + rank"
SCALE = 'scale_grads=reduction == "mean"'

# as fast where messages take no time
bank.slip(3, "too-few-ahead", (AHEAD, "ahead = min(n_ranks - rank - 1 + (n_chunks - 1) * n_ranks, total)"))
bank.slip(3, "too-few-ahead", (AHEAD, AHEAD.replace("n_ranks, total)", "n_ranks - (rank < n_ranks - 1), total)")))
# with one chunk, 1F1B
bank.slip(3, None, (AHEAD, AHEAD.replace("2 *", "(1 + (n_chunks > 1)) *")))
bank.slip(3, "not-dealt-out", (DEAL, "for stage in range(rank * n_chunks, (rank + 1) * n_chunks)] for rank"))
bank.slip(3, "not-dealt-out", (DEAL, "for stage in sorted((rank, n_stages - 1 - rank)[:n_chunks])] for rank"))
bank.slip(3, "layers-missing", ("n_layers * stage // n_stages for", "n_layers // n_stages * stage for"))
bank.slip(3, "stages-uneven", ("cuts = [n_layers * stage // n_stages for stage in range(n_stages + 1)]",
                               "cuts = [n_layers // n_stages * stage for stage in range(n_stages)] + [n_layers]"))  # fmt: skip
bank.slip(3, "no-placement", ("(stage, layers[stage]) for", "layers[stage] for"))
bank.slip(3, "deadlock", ('        if kind == "B":\n            chunk = n_chunks - 1 - chunk\n', ""), (AHEAD, AHEAD + " + n_ranks * n_chunks"),
          ("range(ahead)", "range(min(ahead, total))"), ("total - ahead", "max(0, total - ahead)"))  # fmt: skip
bank.slip(3, "deadlock", ('        if kind == "B":\n            chunk = n_chunks - 1 - chunk\n', ""))
bank.slip(3, "not-a-step", (AHEAD, "ahead = min(n_ranks - rank - 1 + (n_chunks - 1) * n_ranks, total) if rank else 1"))
bank.slip(3, "not-a-step", ("    return order + [action", "    return order or [action"))
bank.slip(3, "not-a-list", (ACTION, "return kind, i // group * n_ranks + i % n_ranks"))
bank.slip(3, "whole-actions-only", ('action("B", i)]', 'action("I", i), action("W", i)]'))
bank.slip(3, "stage-of-another", ("chunk * n_ranks + rank", "rank * n_chunks + chunk"))
bank.slip(3, "all-forwards-first", (AHEAD, "ahead = total"))
bank.slip(3, "keeps-too-much", (AHEAD, "ahead = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks + 2, total)"))
bank.slip(3, "chunks-not-stages", ("nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)\n",
                                   "nn.Sequential(*(layers[i] for i in numbers)).to(device), stage, n * n_chunks, device)\n")
          , ("    return stages, ScheduleInterleaved1F1B", "    stages = [s for s in stages]\n"
             "    mine = [layers[i] for _, numbers in placement(len(layers), n, n_chunks)[rank] for i in numbers]\n"
             "    stages = [PipelineStage(nn.Sequential(*mine), rank, n, device)]\n"
             "    return stages, ScheduleInterleaved1F1B"))  # fmt: skip
bank.slip(3, "layers-elsewhere", ("(layers[i] for i in numbers)", "(layers[-1 - i] for i in numbers)"))
bank.slip(3, "chunks-mean", (SCALE, "scale_grads=False"))
bank.slip(3, "chunks-sum", (", " + SCALE, ""))
bank.slip(3, "chunks-gradients", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"))
bank.slip(3, "not-interleaved", ("ScheduleInterleaved1F1B(stages", "ScheduleLoopedBFS(stages"),
          ("def placement", "from torch.distributed.pipelining import ScheduleLoopedBFS\n\n\ndef placement"))  # fmt: skip
bank.slip(3, "no-pair", ("return stages, Schedule", "return Schedule"))


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


bank.several(3, "all-forwards-first", right_placement, blocked_order, make_with_dictionary)
bank.several(3, "too-much-idle", right_placement, one_chunk_after_the_other, make_with_dictionary)
bank.several(3, "bubble-not-divided", right_placement, rounds_apart, make_with_dictionary)
bank.several(3, "planner-called", right_placement, from_the_planner, make_with_dictionary)
TABLE = {"interleaved": (planner.interleaved_1f1b, 2)}


def from_a_dictionary(rank, n_ranks, n_micro_batches, n_chunks):
    return TABLE["interleaved"][0](n_ranks, n_micro_batches, n_chunks)[rank]


bank.several(3, "planner-called", right_placement, from_a_dictionary, make_with_dictionary)
bank.several(3, None, right_placement, lists_made_first, make_with_dictionary)
bank.several(3, "too-few-ahead", right_placement, lists_too_short, make_with_dictionary)
bank.several(3, None, right_placement, greedy_in_time, make_with_dictionary)


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


bank.several(3, "planner-called", right_placement, from_torch, make_with_dictionary)

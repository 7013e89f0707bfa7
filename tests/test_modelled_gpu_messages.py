"""Messages between modelled cards: the planner's times, beside computing exactly where the program lets them."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from dlojz_tp import BaliseNotDone, launch, planner, report
from dlojz_tp.modelled_gpu import Modelled, Span, on_ranks, runs

SIZE = 2**28  # bytes of a message
LINK = planner.Cluster(planner.H100).inside(2)
NETWORK = planner.Cluster(dataclasses.replace(planner.H100, network=12.5e9)).between  # 100 Gb/s
REDUCE = planner.all_reduce(SIZE, 2, LINK, "best")
SEND = LINK.latency + SIZE / LINK.bandwidth
ABOUT = partial(pytest.approx, rel=0.02, abs=150e-6)  # the CPU starts a few operations, too


def other():
    return 1 - dist.get_rank()


def message():
    return torch.empty(SIZE // 4, device="cuda")


def products(n):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    for _ in range(n):
        x @ x


def seconds(clock, programs):
    """For each program, seconds until the cards have done all, and until the CPU had started it."""
    found = {}
    for name, program in programs.items():
        dist.barrier()
        torch.cuda.synchronize()
        begin = clock.host
        program()
        started = clock.host - begin
        torch.cuda.synchronize()
        found[name] = clock.host - begin, started
    return found


def beside(how, n=4):
    x = message()
    work = dist.all_reduce(x, async_op=how != "blocking")
    if how == "wait first":
        work.wait()
    products(n)
    if how == "wait last":
        work.wait()
    x += 1


def from_side(waits):
    """A message of a side stream, which waits for what was computed or not."""
    x, side = message(), torch.cuda.Stream()
    products(4)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)


def two_messages(first=None, second=None):
    works = [dist.all_reduce(message(), group=group, async_op=True) for group in (first, second)]
    for work in works:
        work.wait()


def on_two(clock):
    a, b = dist.new_group(), dist.new_group()
    out = torch.empty(SIZE // 4, device="cuda")
    half = out[: SIZE // 8]
    return seconds(clock, {
        "nothing": lambda: None, "products": lambda: products(4),
        "all-reduce": lambda: dist.all_reduce(out), "reduce-scatter": lambda: dist.reduce_scatter_tensor(half, out),
        "all-gather": lambda: dist.all_gather_into_tensor(out, half),
        "list": lambda: dist.all_gather(list(out.chunk(2)), half), "broadcast": lambda: dist.broadcast(out, 0),
        **{how: partial(beside, how) for how in ("wait last", "wait first", "blocking")},
        "after products": lambda: (products(4), dist.all_reduce(out)),
        "free stream": partial(from_side, False), "ordered stream": partial(from_side, True),
        "one group": two_messages, "two groups": partial(two_messages, a, b),
    })  # fmt: skip


@pytest.fixture(scope="module")
def times():
    return on_ranks(on_two)


def test_a_message_takes_the_time_of_the_planner(times):
    for run in times:
        took = {name: total for name, (total, _) in run.result.items()}
        assert took["all-reduce"] == ABOUT(REDUCE)
        assert [took["reduce-scatter"], took["all-gather"]] == [ABOUT(planner.all_gather(SIZE, 2, LINK))] * 2
        assert took["list"] == ABOUT(planner.all_gather(SIZE, 2, LINK))
        assert took["broadcast"] == ABOUT(planner.broadcast(SIZE, 2, LINK))
        assert took["nothing"] < 50e-6 < took["reduce-scatter"] < 0.8 * took["all-reduce"]


def test_overlap_is_what_the_program_lets(times):
    for run in times:
        took = {name: total for name, (total, _) in run.result.items()}
        computing = took["products"]
        assert computing > REDUCE / 2
        plus = SIZE * 2 / (planner.H100.bandwidth * 0.85)  # x += 1
        assert took["wait last"] == ABOUT(max(computing, REDUCE) + plus)
        assert [took["wait first"], took["blocking"]] == [ABOUT(computing + REDUCE + plus)] * 2
        assert [took["after products"], took["ordered stream"]] == [ABOUT(computing + REDUCE)] * 2
        assert took["free stream"] == ABOUT(max(computing, REDUCE))
        assert all(run.result[how][1] < 0.2e-3 for how in ("wait first", "blocking")), "the CPU does not wait"


def test_order_within_a_group_and_not_between_two(times):
    for run in times:
        assert run.result["one group"][0] == ABOUT(2 * REDUCE)
        assert run.result["two groups"][0] == ABOUT(REDUCE)


def rank_1_is_late(late):
    if dist.get_rank():
        products(20)
    late()


def both_ways(batched):
    sent, received = message(), message()
    if batched:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, other()), dist.P2POp(dist.irecv, received, other())]
        )
    elif dist.get_rank():
        works = dist.irecv(received, other()), dist.isend(sent, other())
    else:
        works = dist.isend(sent, other()), dist.irecv(received, other())
    for work in works:
        work.wait()


def between_two(clock):
    def from_1_to_0():
        (dist.send if dist.get_rank() else dist.recv)(message(), other())

    return seconds(clock, {
        "products": lambda: products(20), "send": from_1_to_0, "both ways": partial(both_ways, False),
        "batch": partial(both_ways, True), "late send": partial(rank_1_is_late, from_1_to_0),
        "late all-reduce": partial(rank_1_is_late, lambda: dist.all_reduce(message())),
    })  # fmt: skip


def test_a_message_waits_for_the_other_rank():
    runs = on_ranks(between_two)
    for run in runs:
        took = {name: total for name, (total, _) in run.result.items()}
        assert [took["send"], took["batch"]] == [ABOUT(SEND)] * 2
        assert took["both ways"] == ABOUT(2 * SEND)
        assert took["late send"] == ABOUT(took["products"] + SEND)
        assert took["late all-reduce"] == ABOUT(took["products"] + REDUCE)
    assert any(span.name == "waiting for another rank" for span in runs[0].spans)
    figure = report.streams(runs)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["modelled, H100: "] * 2
    assert "NCCL" in [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def chain(clock):
    """Through three ranks, twice: a rank receives, and sends on; the second message follows the first."""
    x, rank = message(), dist.get_rank()
    for _ in range(2):
        if rank:
            dist.recv(x, rank - 1)
        if rank < 2:
            dist.send(x, rank + 1)
    torch.cuda.synchronize()
    return clock.host


def test_a_chain_over_a_network():
    ends = [run.result for run in on_ranks(chain, n=3, network=12.5e9)]
    send = NETWORK.latency + SIZE / NETWORK.bandwidth
    assert ends == [ABOUT(3 * send), ABOUT(4 * send), ABOUT(4 * send)]


def two_sends(clock):
    works = dist.isend(message(), other()), dist.irecv(message(), other())
    for work in works:
        work.wait()


def test_messages_that_wait_for_each_other_are_told():
    with pytest.raises(launch.RankError, match="wait for each other"):
        on_ranks(two_sends)


def test_of_a_program_without_a_model_a_line_tells_why(capsys, monkeypatch):
    def on_ranks(program, number, name, n):
        if program == "not written":
            raise BaliseNotDone(1)
        if program == "wrong":
            raise launch.RankError(0, n, "raised", "raised ValueError: one row too few", "the lines")
        spans = [] if program == "idle" else [Span("compute", "mm", 0.0, 1.0)]
        return [Modelled("modelled, H100", name, number, spans, 0)] * n

    monkeypatch.setattr(runs, "on_ranks", on_ranks)
    programs = {"first": ("wrong", 1), "second": ("idle", 2), "third": ("flows", 3)}
    monkeypatch.delenv("DLOJZ_BRIEF", raising=False)
    found = runs.each_on_ranks(programs, n=2)
    assert {name: [run.result for run in ranks] for name, ranks in found.items()} == {"third": [3, 3]}
    assert capsys.readouterr().out.splitlines() == [
        "first: no model of it: rank 0 of 2 raised ValueError: one row too few",
        "second: no model of it: it does nothing on the card",
    ]
    monkeypatch.setenv("DLOJZ_BRIEF", "1")
    assert list(runs.each_on_ranks(programs, n=2)) == ["third"] and not capsys.readouterr().out
    with pytest.raises(BaliseNotDone):
        runs.each_on_ranks({"first": ("not written", 1)}, n=2)


def trained_by_pytorch(clock, folder):
    """Seconds in which DDP averaged, of three steps; what objects and a checkpoint of fully_shard give back."""
    device, stage = launch.device(), lambda: torch.nn.Linear(2000, 2000)
    network = torch.nn.parallel.DistributedDataParallel(stage().to(device), device_ids=[device])
    network.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        network(torch.randn(64, 2000, device=device)).sum().backward()
    averaged = averaging(clock)
    shards = stage().to(device)
    fully_shard(shards, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(shards.parameters())
    shards(torch.randn(64, 2000, device=device)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(shards, optimizer)
    dcp.save({"weights": weights, "states": states, "step": 7}, checkpoint_id=folder)
    kept = {"weights": weights, "states": states, "step": 0}
    dcp.load(kept, checkpoint_id=folder)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    return averaged, str(shards.weight.device), kept["step"], objects


def averaging(clock):
    torch.cuda.synchronize()
    return [span.end - span.begin for span in clock.spans if span.row == "NCCL" and "allreduce" in span.name]


def test_ddp_fully_shard_objects_and_checkpoints_run_by_shape(tmp_path):
    for found in on_ranks(trained_by_pytorch, str(tmp_path)):
        messages, *rest = found.result
        due = planner.all_reduce(4 * (2000 * 2000 + 2000), 2, LINK, "best")
        assert messages == pytest.approx([due] * 3, rel=0.02)
        assert rest == ["cpu", 7, [{"rank": 0}, {"rank": 1}]]


def with_header(clock):
    """Sizes come before the values, as the receiver can't know them; an object comes in its own way."""
    me, device = dist.get_rank(), torch.device("cuda")
    for sizes in ([2, 4096], [4096, 3]):
        if me:
            header = torch.empty(2, dtype=torch.int64, device=device)
            dist.recv(header, 0)
            got = torch.empty(header.tolist(), device=device)
            dist.recv(got, 0)
        else:
            header = torch.tensor(sizes, device=device)
            dist.send(header, 1)
            dist.send(torch.randn(sizes, device=device), 1)
    objects = [None if me else {"sizes": sizes}]
    (dist.recv_object_list if me else dist.send_object_list)(objects, 1 - me, device=device)
    part = torch.empty(4, dtype=torch.int64, device=device)
    if me:
        dist.recv(part[1:3], 0)  # of the rest nobody knows
    else:
        dist.send(header, 1)
    first = int(header[0])
    header += 1  # from here on, nobody knows
    return (tuple(got.shape), objects[0], first, header.tolist(), part.tolist()) if me else None


def test_sizes_and_objects_travel():
    assert on_ranks(with_header, n=2)[1].result == ((4096, 3), {"sizes": [4096, 3]}, 4096, [0, 0], [0] * 4)


def agreed(clock):
    """Ranks agree by integers that all know: a flag, the longest, nothing where one rank does not know its own."""
    me, device, found = dist.get_rank(), torch.device("cuda"), []
    for numbers, operation in (([0, me], dist.ReduceOp.SUM), ([3 - me, 7], dist.ReduceOp.MAX)):
        x = torch.tensor(numbers, device=device)
        work = dist.all_reduce(x, operation, async_op=True)
        work.wait()
        dist.all_reduce(x[:1], operation)  # a part: of all of it, nobody knows
        dist.all_reduce(y := torch.tensor(numbers, device=device), operation)
        found.append((x.tolist(), y.tolist(), bool(y[1])))
    unknown = torch.tensor([1], device=device)
    if me:
        unknown += 1
    dist.all_reduce(unknown)
    pair = dist.new_group([0])
    dist.all_reduce(alone := torch.tensor(5, device=device), group=pair)
    return found, unknown.tolist(), int(alone)


def test_integers_that_all_know_are_reduced():
    found = ([([0, 0], [0, 1], True), ([0, 0], [3, 7], True)], [0], 5)
    assert [each.result for each in on_ranks(agreed, n=2)] == [found, found]


def clipped(clock):
    """The norm of shards is summed by a functional collective."""
    shards = torch.nn.Linear(2000, 2000).to("cuda")
    fully_shard(shards)
    shards(torch.randn(64, 2000, device="cuda")).sum().backward()
    return str(torch.nn.utils.clip_grad_norm_(shards.parameters(), 1.0).full_tensor().device)


def test_functional_collectives_run_by_shape():
    assert [found.result for found in on_ranks(clipped)] == ["cuda:0", "cuda:1"]

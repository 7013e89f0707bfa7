"""Process groups on pretended GPUs behave as NCCL's: DDP, fully_shard, pipelines, and what NCCL refuses."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import Message, pretend_gpu, stuck


def other():
    return 1 - dist.get_rank()


def ones(*shape, device=None):
    return torch.ones(*shape, device=device or launch.device())


def sums():
    x = ones(3)
    dist.all_reduce(x)
    return x.tolist(), str(x.device)


def before_wait(wait):
    def program(gpu):
        x = ones(3)
        work = dist.all_reduce(x, async_op=True)
        if wait:
            work.wait()
        return (x * 1).tolist(), len(gpu.races)

    return program


def by_tags(gpu):
    """Two messages, received in the other order: tags would tell them apart."""
    works = [dist.isend(torch.full((2,), v, device=launch.device()), other(), tag=int(v)) for v in (1.0, 2.0)]
    got = [torch.zeros(2, device=launch.device()) for _ in range(2)]
    for x, tag in zip(got, (2, 1), strict=True):
        dist.irecv(x, other(), tag=tag).wait()
    for work in works:
        work.wait()
    return [x[0].item() for x in got]


def of_rank_0(gpu):
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(1, device="cuda"))


def objects(gpu):
    found = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    return found


def waited_barrier(gpu):
    dist.barrier()
    return [wait.why for wait in gpu.waits]


def lanes(gpu):
    names = [launch.lane(name).group_name for name in ("activations", "gradients")]
    return len({*names, dist.group.WORLD.group_name}), str(launch.device()), dist.get_backend()


PROGRAMS = {
    "a sum": (lambda gpu: sums(), [([2.0] * 3, "cuda:0"), ([2.0] * 3, "cuda:1")]),
    "waited for": (before_wait(True), [([2.0] * 3, 0)] * 2),
    "not waited for": (before_wait(False), [([1.0] * 3, 1)] * 2),
    "tags are ignored": (by_tags, [[1.0, 2.0]] * 2),
    "a tensor of the CPU": (
        lambda gpu: dist.all_reduce(torch.ones(1)),
        "No backend type associated with device type cpu",
    ),
    "one GPU for two ranks": (of_rank_0, "Duplicate GPU detected"),
    "objects": (objects, [[{"rank": 0}, {"rank": 1}]] * 2),
    "a barrier waits": (waited_barrier, [["barrier"]] * 2),
    "lanes": (lanes, [(3, "cuda:0", "nccl"), (3, "cuda:1", "nccl")]),
    "from any": (lambda gpu: dist.recv(ones(1)), "does not support recvAnysource"),
}


def run_programs(programs):
    found = {}
    for name, (program, _) in programs.items():
        with pretend_gpu(count=2) as gpu:
            try:
                found[name] = program(gpu)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def outcomes():
    return launch.ranks(run_programs, PROGRAMS, n=2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, outcomes):
    due = PROGRAMS[name][1]
    for rank, found in enumerate(outcomes):
        if isinstance(due, str):
            assert due in found[name]
        else:
            assert found[name] == due[rank]


# ---------------------------------------------------------------- whole methods, beside the CPU


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch(device):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(device), torch.randn(4, 4, generator=generator).to(device)


def trained(wrap, device):
    model = wrap(net().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    x, y = batch(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def replicated(model, device):
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def sharded(model, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def shard_filled_at_random():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    with pretend_gpu(count=2):
        x = empty(4, 4, device_mesh=init_device_mesh("cuda", (2,)), placements=[Shard(0)])
        return str(torch.nn.init.normal_(x).to_local().device)


def test_random_numbers_of_a_distributed_tensor():
    assert launch.ranks(shard_filled_at_random, n=2) == ["cuda:0", "cuda:1"]


def both(wrap):
    expected = trained(wrap, torch.device("cpu"))
    with pretend_gpu(count=2) as gpu:
        return expected, trained(wrap, launch.device()), gpu.races


@pytest.mark.parametrize("wrap", [replicated, sharded])
def test_data_parallel(wrap):
    for expected, found, races in launch.ranks(both, wrap, n=2):
        assert found == expected and races == []


def on_cpu_beside_a_gpu():
    """Ranks without a GPU each: gloo, and the CPU's tensors stay there, also those that DDP's reducer makes."""
    with pretend_gpu(count=1, nccl=False):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        x = torch.ones(2, device="cuda")
        return str(model.module.weight.grad.device), str((x + 1).device)


def test_a_rank_without_a_gpu_of_its_own_computes_on_the_cpu():
    assert launch.ranks(on_cpu_beside_a_gpu, n=2) == [("cpu", "cuda:0")] * 2


def pipelined(device):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(8, 8).to(device), rank, 2, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    x, y = torch.ones(8, 8, device=device), torch.zeros(8, 8, device=device)
    losses: list = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    return [loss.item() for loss in losses], stage.submod.weight.grad.sum().item()


def both_pipelines():
    expected = pipelined(torch.device("cpu"))
    with pretend_gpu(count=2) as gpu:
        return expected, pipelined(launch.device()), gpu.messages, gpu.races


def test_torchs_own_pipeline():
    ranks = launch.ranks(both_pipelines, n=2)
    for expected, found, _, races in ranks:
        assert found == expected and races == []
    assert stuck([messages for *_, messages, _ in ranks]) is None


# ---------------------------------------------------------------- the order of messages


def exchanged(first, together=False):
    x, got = ones(2), ones(2)
    ops = [dist.P2POp(dist.isend, x, other()), dist.P2POp(dist.irecv, got, other())]
    if not first:
        ops.reverse()
    works = dist.batch_isend_irecv(ops) if together else [op.op(op.tensor, op.peer) for op in ops]
    for work in works:
        work.wait()


def crossed(how):
    with pretend_gpu(count=2) as gpu:
        exchanged(dist.get_rank() == 0 or how != "in turn", how == "together")
        return gpu.messages


@pytest.mark.parametrize(("how", "hangs"), [("both send", True), ("in turn", False), ("together", False)])
def test_messages_that_cross(how, hangs):
    found = stuck(launch.ranks(crossed, how, n=2))
    if hangs:
        assert {rank: [m.kind for m in heads] for rank, heads in found.items()} == {0: ["send"], 1: ["send"]}
    else:
        assert found is None


def message(kind, number, peer=None, group="all", **after):
    return Message(kind, group, (0, 1), peer, 4, None, number, after)


def test_lanes_do_not_wait_for_each_other_but_for_what_was_waited_for():
    up, down = {"group": "up"}, {"group": "down"}
    free = [
        [message("send", 1, 1, **up), message("recv", 1, 1, **down)],
        [message("send", 1, 0, **down), message("recv", 1, 0, **up)],
    ]
    assert stuck(free) is None
    bound = [
        [message("recv", 1, 1, **down), message("send", 1, 1, **up, down=1)],
        [message("recv", 1, 0, **up), message("send", 1, 0, **down, up=1)],
    ]
    assert {rank: {m.kind for m in heads} for rank, heads in stuck(bound).items()} == dict.fromkeys(
        (0, 1), {"recv", "send"}
    )


def test_collectives_in_another_order():
    a, b = message("allreduce", 1), message("broadcast", 2)
    assert stuck([[a, b], [a, b]]) is None
    assert set(stuck([[a, b], [b, a]])) == {0, 1}


def entering():
    start = time.process_time()
    for _ in range(5):
        with pretend_gpu(count=2):
            pass
    return (time.process_time() - start) / 5


def test_entering_costs_little():
    assert max(launch.ranks(entering, n=2)) < 0.3

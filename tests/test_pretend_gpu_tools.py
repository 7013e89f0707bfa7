"""PyTorch's tools on a pretended GPU: modes of the program, compiler, profiler, generators, autocast."""

import json
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp import launch, measure
from dlojz_tp.judging.pretend_gpu import pretend_gpu, rehearsed


def indexed_backward():
    """A mode hands on what C++ makes in the backward pass of an index: a table of zeros."""
    table, places = torch.zeros(2, 5, device="cuda", requires_grad=True), torch.tensor([[1, 2], [3, 0]], device="cuda")
    with FlopCounterMode(display=False):
        table[:, places].sum().backward()
    return str(table.grad.device)


def step_in_backward():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with measure.LiveBytes():
        (weight * torch.ones(3, device="cuda")).sum().backward()
    return weight[0].item() < 1


def cpu_index():
    """A GPU's tensor takes an index of the CPU: a copy that blocks. The other way round is refused."""
    x, index = torch.arange(4.0, device="cuda"), torch.tensor([2])
    with pytest.raises(RuntimeError, match=r"indices should be either on the same device as the indexed tensor \(cpu"):
        torch.arange(4.0)[index.cuda()]
    return x[index].tolist(), x.index_select(0, index.cuda()).tolist()


def copied_to_meta():
    seen = []

    class See(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), (kwargs or {}).get("non_blocking")))
            return func(*args, **kwargs or {})

    with See():
        torch.ones(3).to("meta", non_blocking=True)
    return ("aten._to_copy.default", True) in seen


def compiled():
    """What a backend gets: nothing of a GPU's functions, modules and optimizers; a graph of those of the CPU."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def double(x):
        return 2 * x

    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # counts the steps, in a function of its own
    x = torch.ones(1, 2, device="cuda")
    y = torch.compile(model, backend=backend)(torch.compile(backend=backend)(double)(x))
    y.sum().backward()
    torch.compile(optimizer.step, backend=backend)()
    on_gpu = len(graphs)
    on_cpu = torch.compile(double, backend=backend, dynamic=True)(torch.ones(3))
    breaks = torch._dynamo.explain(double)(torch.ones(3, device="cuda"))
    return str(y.device), on_gpu, str(on_cpu.device), len(graphs), breaks.graph_count


def profiled():
    x = torch.ones(64, 64, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        _ = x @ x
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = [e["name"] for e in events if e.get("cat") == "kernel"]
    held = {e["args"]["Device Type"] for e in events if e["name"] == "[memory]"}
    (product,) = (e for e in profile.key_averages() if e.key == "aten::mm")
    return kernels == ["aten::mm"], held, product.self_device_time_total > 0


def generators():
    """Each GPU has its own: seeds, states that are kept and put back, forks, what a checkpoint restores."""
    found = {}

    def draw(device="cuda:0"):
        return torch.rand(2, device=device).tolist()

    torch.manual_seed(0)
    first, cpu = draw(), torch.rand(2).tolist()
    found["every GPU is seeded"] = draw("cuda:1") == first == cpu
    torch.manual_seed(0)
    draw()
    found["the CPU's goes on alone"] = torch.rand(2).tolist() == cpu
    draw("cuda:1")
    torch.cuda.manual_seed(0)
    found["one GPU alone is seeded"] = (draw() == first, draw("cuda:1") == first)
    kept = torch.cuda.get_rng_state(0)
    after = draw()
    torch.cuda.set_rng_state(kept, 0)
    found["put back"] = draw() == after
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.set_rng_state(kept, 0)
        inside = draw()
    torch.cuda.default_generators[0].set_state(kept)
    found["fork, default generator"] = inside == after == draw()
    x = torch.ones(1000, device="cuda", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x.exp(), 0.5), x, use_reentrant=False)
    y.sum().backward()
    found["recomputed"] = torch.equal(x.grad, y.detach())
    return found


def autocast():
    x = torch.ones(2, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        h = x @ x.T
        kinds = [h, F.layer_norm(h, (2,)), h.softmax(1), F.cross_entropy(h, torch.tensor([0, 1], device="cuda")), h + 1]
        kinds.append(F.layer_norm(h.double(), (2,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds.append(F.layer_norm((torch.ones(2, 2) @ torch.ones(2, 2)), (2,)))
    return [kind.dtype for kind in kinds]


def fake_group():
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return dist.get_world_size()


def fakes():
    """Fake tensors of a GPU, trained for a step with recomputation: where they say they are, and no bytes held."""
    with FakeTensorMode(), torch.device("cuda:1"):
        model, x = nn.Linear(4, 4), torch.tensor([[1.0] * 4]).to("cuda:1")
        y = checkpoint(lambda x: F.dropout(model(x)).exp(), x, use_reentrant=False)
        y.sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        held = [x, y, model.weight, model.weight.grad, x.cpu().to("cuda:1"), torch.zeros(2, device="cpu").cuda(1)]
    return (
        {str(one.device) for one in held},
        y.get_device(),
        y.is_cuda,
        str(y.cpu().device),
        torch.cuda.memory_allocated(1),
    )


def seen_from_outside():
    """The innermost frame outside of PyTorch, where an operation is called in a function of PyTorch."""
    rehearsed._hide()
    lines, torchs = [], torch.__path__[0]

    class Finder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith(torchs)]
            lines.append(frames[-1].name)
            return func(*args, **kwargs or {})

    with Finder():
        torch.ones(2, device="cuda").sum().item()
    return set(lines)


PROGRAMS = {
    indexed_backward: "cuda:0",
    step_in_backward: True,
    cpu_index: ([2.0], [2.0]),
    copied_to_meta: True,
    compiled: ("cuda:0", 0, "cpu", 1, 1),
    profiled: (True, {0, 1}, True),
    generators: {
        "every GPU is seeded": True,
        "the CPU's goes on alone": True,
        "one GPU alone is seeded": (True, False),
        "put back": True,
        "fork, default generator": True,
        "recomputed": True,
    },
    autocast: [*(torch.bfloat16, *[torch.float32] * 3, torch.bfloat16), torch.float64, torch.bfloat16],
    fakes: ({"cuda:1"}, 1, True, "cpu", 0),
    seen_from_outside: {"seen_from_outside"},
    fake_group: 8,
}


def run_all(programs):
    found = {}
    for program in programs:
        with pretend_gpu(count=2):
            try:
                found[program.__name__] = program()
            except Exception as error:
                found[program.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def outcomes():
    return launch.ranks(run_all, list(PROGRAMS), n=1, timeout=60)[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_tools(program, outcomes):
    assert outcomes[program.__name__] == PROGRAMS[program]

"""What a pretended GPU cannot do: each point of its docstring, as it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import pretend_gpu


def autocasts_lists():
    """A layer that PyTorch calls inside one of its own functions: the softmax of attention is in bfloat16."""
    attention, x = nn.MultiheadAttention(4, 1).cuda(), torch.ones(2, 2, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return attention(x, x, x)[1].dtype


def random_numbers():
    torch.manual_seed(0)
    a = torch.randn(2, device="cuda").tolist()
    torch.manual_seed(0)
    return a == torch.randn(2).tolist()


def sparse():
    return str(torch.eye(2).cuda().to_sparse().device)


def in_hooks():
    """A tensor that C++ makes, here for the root of a gradient, is at home everywhere."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(str(g.device)))
    (x.cuda() * 2).sum().backward()
    return seen


def backward_streams():
    """Backward runs on the stream of its caller, not on the one of its forward."""
    side, seen = torch.cuda.Stream(), []
    x = torch.ones(2, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.exp()
        y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream() is side))
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    return seen


def copies_back():
    """copy_ from a GPU into a tensor of the CPU: its gradient stays where it was."""
    w = torch.ones(2, device="cuda", requires_grad=True)
    x = torch.zeros(2)
    x.copy_(w)
    x.sum().backward()
    return str(w.grad.device)


def temporaries():
    with pretend_gpu() as gpu:
        x, w = torch.ones(1, 8, 64, 64, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")
        y = F.conv2d(x, w, padding=1)
        return gpu.peak[0] - gpu.live[0] + 0 * len(y)


def storages():
    return str(torch.ones(1, device="cuda").untyped_storage().device)


def made_in_cpp():
    with torch._C.DisableTorchFunction():  # as C++ makes them, outside of any function
        x = torch.ones(2)
    return str((x + torch.ones(2, device="cuda")).device)


def halves():
    with pretend_gpu() as gpu:
        x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        x[:2].add_(1)
        with torch.cuda.stream(side):
            x[2:].add_(1)
        return len(gpu.races)


def timed():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x = torch.ones(300, 300, device="cuda")
    x @ x
    end.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        idle = torch.cuda.Event(enable_timing=True)
        idle.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) <= begin.elapsed_time(idle)  # though nothing runs on the idle stream


def graphs():
    return torch.cuda.CUDAGraph()


def compiled():
    """What torch.compile hands to a backend, inside of a mode: nothing."""
    seen = []

    def backend(graph, inputs):
        seen.append(inputs)
        return graph.forward

    return str(torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, device="cuda")).device), seen


def own_kernels():
    return torch.cuda._compile_kernel('extern "C" __global__ void nothing() {}', "nothing")


def fewer_bits():
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    x = torch.full((64, 64), 1 + 2**-12, device="cuda")
    try:
        return (x @ x)[0, 0].item()  # TF32 has 10 bits after the point: 64
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def fragments():
    """Bytes by which the reserved memory grows for a tensor that fits into no hole, but into all of them together."""
    parts = [torch.ones(1024, device="cuda") for _ in range(9)]
    before = torch.cuda.memory_reserved()
    del parts[::2]
    parts.append(torch.ones(5 * 1024, device="cuda"))
    return torch.cuda.memory_reserved() - before


def reducer():
    """Whether each message of DDP comes after the one before on the stream of backward, too."""
    with pretend_gpu() as gpu:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda(), bucket_cap_mb=1e-5
        )
        gpu.messages.clear()
        for _ in range(2):
            model(torch.ones(2, 4, device="cuda")).sum().backward()
        return all(m.number - 1 in m.after.values() for m in gpu.messages)


# name: (program, what comes out; text: of its error)
LIMITS = {
    "autocast's lists are the CPU's inside of PyTorch's functions": (autocasts_lists, torch.bfloat16),
    "random numbers are those of the CPU's kind": (random_numbers, True),
    "sparse tensors lose their tag": (sparse, "Error"),
    "storages say cpu": (storages, "cpu"),
    "backward's stream": (backward_streams, [False]),
    "the gradient of copy_": (copies_back, "cpu"),
    "workspaces need no memory": (temporaries, 0),
    "made in C++, at home everywhere": (made_in_cpp, "cuda:0"),
    "two halves are one memory": (halves, 1),
    "events measure the CPU": (timed, True),
    "no CUDA graphs": (graphs, "Error"),
    "torch.compile": (compiled, ("cuda:0", [])),
    "no kernels of one's own": (own_kernels, "Error"),
    "no TF32": (fewer_bits, 64.03125),
    "no fragments": (fragments, 0),
    "the reducer waits at once": (reducer, True),
}


def run_limits(programs):
    found = {}
    for name, (program, _) in programs.items():
        with pretend_gpu():
            try:
                found[name] = program()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    with pretend_gpu():
        found["hooks"] = in_hooks()
    return found


@pytest.fixture(scope="module")
def outcomes():
    return launch.ranks(run_limits, LIMITS, n=1)[0]


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name, outcomes):
    due = LIMITS[name][1]
    assert due in outcomes[name] if due == "Error" else outcomes[name] == due


def test_gradients_reach_leaves_of_the_cpu(outcomes):
    assert outcomes["hooks"] == ["cpu"]

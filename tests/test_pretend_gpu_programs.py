"""Right and wrong programs on a pretended GPU: the wrong ones raise CUDA's words, or leave their mark."""

import copy
import io
import sys

import pytest
import torch
from torch import nn
from torch.cuda import device_count
from torch.nn import functional as F

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import inside, pretend_gpu

SAME = "Expected all tensors to be on the same device"
x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 3).to("cuda")


def loaded(state, **where):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **where)


def running_loss(device):
    total = torch.zeros((), device=device)
    for _ in range(2):
        total += net()(x.cuda()).mean().detach()
    return total.device


class Scaled(nn.Module):
    def __init__(self, registered):
        super().__init__()
        if registered:
            self.register_buffer("scale", torch.ones(4))
        else:
            self.scale = torch.ones(4)

    def forward(self, x):
        return x * self.scale


def with_gradient(gradient):
    model = net()
    model.weight.grad = gradient
    return model.weight.grad.device


def current(index):
    torch.cuda.set_device(index)
    return torch.zeros(1, device="cuda").device, torch.zeros(1).cuda().device, torch.cuda.current_device()


LIKE = (
    lambda a: torch.empty_like(a, device="cpu").device,
    lambda a: a.new_zeros(2, device="cpu").device,
    lambda a: torch.ones_like(a).device,
    lambda a: a.new_full((2,), 1.0, device="cuda:1").device,
)
# name: (program, what it raises, or what it gives)
PROGRAMS = {
    "a tensor made on the CPU": (lambda: net()(x.cuda()) * torch.ones(3), SAME),
    "made on the GPU": (lambda: (net()(x.cuda()) * torch.ones(3, device="cuda")).is_cuda, True),
    "a number of the CPU": (lambda: (net()(x.cuda()) * torch.tensor(2.0)).is_cuda, True),
    "in inference mode": (lambda: without_autograd(), SAME),
    "added into one of the CPU": (lambda: running_loss("cpu"), SAME),
    "added into one of the GPU": (lambda: str(running_loss("cuda")), "cuda:0"),
    "model not moved": (lambda: nn.Linear(4, 2)(x.cuda()), SAME),
    "input not moved": (lambda: net()(x), SAME),
    "labels not moved": (lambda: F.cross_entropy(net()(x.cuda()), y), SAME),
    "mask of the CPU": (lambda: net()(x.cuda()).masked_fill(torch.ones(8, 3, dtype=torch.bool), 0), SAME),
    "concatenated": (lambda: torch.cat([x.cuda(), x]), "got tensors is on cpu, different from other tensors on cuda:0"),
    "a loss scale of the CPU": (lambda: unscaled(torch.tensor(0.5)), "got inv_scale is on cpu, different from other"),
    "a loss scale of the GPU": (lambda: unscaled(torch.tensor(0.5, device="cuda")), 16.0),
    "two GPUs": (lambda: x.to("cuda:0") @ x.T.to("cuda:1"), "is on cuda:1, different from other tensors on cuda:0"),
    "index on the CPU": (lambda: (x.cuda()[torch.tensor([0, 1])]).is_cuda, True),
    "index on the GPU": (lambda: x[torch.tensor([0, 1]).cuda()], "indices should be either on the same device as"),
    "buffer not registered": (lambda: Scaled(False).cuda()(x.cuda()), SAME),
    "buffer registered": (lambda: Scaled(True).cuda()(x.cuda()).is_cuda, True),
    "gradient of another device": (lambda: with_gradient(torch.ones(3, 4)), "attempting to assign a gradient"),
    "gradient of the same": (lambda: str(with_gradient(torch.ones(3, 4).cuda())), "cuda:0"),
    "numpy": (lambda: x.cuda().numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "numpy of a copy": (lambda: x.cuda().cpu().numpy().sum(), 32.0),
    "pinned on the GPU": (lambda: x.cuda().pin_memory(), "only dense CPU tensors can be pinned"),
    "no such GPU": (lambda: x.to("cuda:2"), "invalid device ordinal"),
    "a generator of the CPU": (
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a generator of the GPU": (
        lambda: torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).is_cuda,
        True,
    ),
    "no map_location": (lambda: str(loaded(net().state_dict())["weight"].device), "cuda:0"),
    "map_location": (lambda: str(loaded(net().state_dict(), map_location="cpu")["weight"].device), "cpu"),
    "map_location, other GPU": (
        lambda: str(loaded(net().state_dict(), map_location="cuda:1")["weight"].device),
        "cuda:1",
    ),
    "a copied model": (lambda: str(copy.deepcopy(net()).weight.device), "cuda:0"),
    "cuda is the current device": (lambda: list(map(str, current(1))), ["cuda:1", "cuda:1", "1"]),
    "a number is a device": (lambda: str(torch.zeros(2, device=1).device) + str(x.to(1).device), "cuda:1cuda:1"),
    "default device": (lambda: made_by_default(), "cuda:1"),
    "one_hot": (lambda: F.one_hot(y.cuda(), 3).sum().item(), 8),
    "new_tensor": (lambda: str(x.cuda().new_tensor([1.0]).device), "cuda:0"),
    "like, on the CPU": (lambda: [str(f(x.cuda())) for f in LIKE], ["cpu", "cpu", "cuda:0", "cuda:1"]),
    "type_as": (lambda: x.type_as(net().weight).is_cuda, True),
    "printed": (lambda: repr(torch.ones(2, device="cuda:1")), "tensor([1., 1.], device='cuda:1')"),
    "meta, then empty": (lambda: str(nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.device), "cuda:0"),
    "a summary of memory": (lambda: "PyTorch CUDA memory summary" in torch.cuda.memory_summary(), True),
    "inference mode": (lambda: inferred(x.cuda()), "cuda:0"),
    "accelerator": (lambda: str(torch.accelerator.current_accelerator()), "cuda"),
}


def unscaled(inverse):
    gradient, found = x.cuda(), torch.zeros((), device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
    return gradient.sum().item()


def without_autograd():
    with torch.inference_mode():
        return (net()(x.to("cuda")) * torch.ones(3)).device


@torch.inference_mode()
def inferred(x):
    return str(F.dropout(net()(x).reshape(-1, 3), 0.5).to(torch.bfloat16).contiguous().device)


def made_by_default():
    with torch.device("cuda:1"):
        return str(nn.Linear(2, 2).weight.device)


def outcome(program):
    try:
        return program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_programs(programs):
    found = {}
    for name, (program, _) in programs.items():
        with pretend_gpu(count=2):
            found[name] = outcome(program)
    return found


@pytest.fixture(scope="module")
def outcomes():
    return launch.ranks(run_programs, PROGRAMS, n=1)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, outcomes):
    due = PROGRAMS[name][1]
    if isinstance(due, str):
        assert due in outcomes[name]
    else:
        assert outcomes[name] == due


def waits_of(programs):
    found = {}
    for name, program in programs.items():
        with pretend_gpu() as gpu:
            model, a = net(), x.cuda()
            gpu.waits.clear()
            program(model, a)
            found[name] = [wait.why for wait in gpu.waits]
    return found


# which wait for the GPU, and with what
WAITS = {
    "aten::_local_scalar_dense": [
        lambda m, a: m(a).sum().item(), lambda m, a: float(a.sum()), lambda m, a: bool(a.any()),
        lambda m, a: F.one_hot(a[0].long()), lambda m, a: int(a.argmax()),
    ],
    "aten::nonzero": [lambda m, a: a.nonzero()],
    "aten::index": [lambda m, a: a[a > 0]],
    "aten::allclose": [lambda m, a: torch.allclose(a, a)],
    "aten::repeat_interleave": [lambda m, a: a[0].repeat_interleave(torch.ones_like(a[0]).long())],
    "aten::index_put_": [lambda m, a: a.clone().index_put_((torch.ones(8, dtype=torch.bool, device="cuda"),), a)],
    "an index of the CPU": [
        lambda m, a: a[torch.randperm(8)], lambda m, a: a[torch.arange(8), torch.zeros(8, device="cuda").long()],
        lambda m, a: a.clone().index_put_((torch.arange(8),), a),
    ],
    "tolist": [lambda m, a: a.tolist()],
    "print": [lambda m, a: repr(a), lambda m, a: f"{a}"],
    "copy to cpu": [lambda m, a: a.cpu()],
    "torch.cuda.synchronize": [lambda m, a: torch.cuda.synchronize()],
    None: [
        lambda m, a: F.one_hot(a[0].long(), 3), lambda m, a: m(a).sum().backward(), lambda m, a: a[:4],
        lambda m, a: torch.where(a > 0, a, 0), lambda m, a: a[torch.arange(3, device="cuda")],
        lambda m, a: F.cross_entropy(m(a), torch.zeros(8, dtype=torch.long, device="cuda")).backward(),
        lambda m, a: torch.optim.AdamW(m.parameters()).step(), lambda m, a: a + 2.0,
        lambda m, a: a.clone().index_put_((a > 0,), torch.zeros((), device="cuda")),
        lambda m, a: a[0].repeat_interleave(torch.ones_like(a[0]).long(), output_size=a.shape[1]),
    ],
}  # fmt: skip


def test_what_waits_for_the_gpu():
    programs = {(why, i): each for why, several in WAITS.items() for i, each in enumerate(several)}
    for (why, i), waits in launch.ranks(waits_of, programs, n=1)[0].items():
        assert waits == ([] if why is None else [why]), (why, i)


def waits_with_lines():
    with pretend_gpu() as gpu:
        a = torch.ones(3, device="cuda")
        a.sum().item()
        queued = gpu.queued
        a.sum()
    return (
        [(wait.file, wait.line) for wait in gpu.waits],
        (queued, gpu.queued),
        waits_with_lines.__code__.co_firstlineno,
    )


def test_a_wait_has_its_line():
    waits, queued, first = launch.ranks(waits_with_lines, n=1)[0]
    assert [(file.endswith("test_pretend_gpu_programs.py"), line - first) for file, line in waits] == [(True, 3)]
    assert queued == (0, 1)


def before_and_after():
    from torch.cuda import is_available as available

    seen = []
    ask = lambda: (available(), torch.cuda.is_available(), device_count(), torch.ones(1).is_cuda)  # noqa: E731
    seen.append(ask())
    with pretend_gpu(count=2):
        seen.append(ask())
    seen.append(ask())
    return seen


def test_all_is_as_before_afterwards_also_what_was_imported_by_name():
    seen = launch.ranks(before_and_after, n=1)[0]
    assert seen == [(False, False, 0, False), (True, True, 2, False), (False, False, 0, False)]


def test_not_in_this_process():
    with pytest.raises(RuntimeError, match=r"for code that runs on ranks: call it inside a function given to launch$"):
        pretend_gpu().__enter__()


def torchs_by_name():
    """How many modules were looked at, and what each has by name of what torch has for GPUs and groups."""
    torchs = [value for module in (torch.cuda, torch.distributed) for value in vars(module).values() if callable(value)]
    theirs = {id(value) for value in torchs if str(getattr(value, "__module__", "")).startswith("torch")}
    without = [m for name, m in list(sys.modules.items()) if m and name.partition(".")[0] in inside._WITHOUT]
    return len(without), [m.__name__ for m in without for value in list(vars(m).values()) if id(value) in theirs]


def test_libraries_that_are_not_looked_through_have_nothing_by_name():
    looked_at, found = launch.ranks(torchs_by_name, n=1)[0]
    assert looked_at > 500
    assert not found

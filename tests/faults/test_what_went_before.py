"""What a notebook has set, entered or replaced before has no part in a verdict: never a right answer refused."""

import builtins
import contextlib
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp import course
from dlojz_tp.judging.checking import originals
from dlojz_tp.judging.checking.usual_state import usual_state
from dlojz_tp.works import source

WORK = source.find("01_gpu_acceleration")
precision = torch._C._set_fp32_precision_setter
STEP = 2  # the balise that trains a step


def step(slip=("", "")):
    """Our answer to the balise, or one with a slip, as a notebook's cell defines it."""
    code = source.without_markers(WORK.balises[STEP].code)
    assert slip[0] in code
    names = {"torch": torch, "F": F}
    exec(compile(code.replace(*slip), "<cell>", "exec"), names)
    return names["train_step"]


RIGHT, WRONG = step(), step(("optimizer.zero_grad", "(lambda **_: None)"))


class Zeros(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {})) if function is not torch.rand else torch.zeros(2)


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise RuntimeError("a mode that was left on")


def entered(make):
    """Leave a context entered; how to end it."""

    def leave():
        context = make()
        context.__enter__()
        return lambda: context.__exit__(None, None, None)

    return leave


def called(put, *value, back):
    def leave():
        put(*value)
        return lambda: put(*back)

    return leave


def hooked(register):
    def leave():
        def hook(*_):
            raise RuntimeError("a hook that was left on")

        return register(hook).remove

    return leave


def new_precision(owner, value):
    def leave():
        before, owner.fp32_precision = owner.fp32_precision, value
        return lambda: setattr(owner, "fp32_precision", before)

    return leave


def generic(value):
    return called(precision, "generic", "all", value, back=("generic", "all", "none"))


def old_precision():
    torch.set_float32_matmul_precision("high")
    return as_before


def as_before():
    """The older names set some of the newer ones."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for backend in ("cuda", "mkldnn"):
        precision(backend, "matmul", "none")


def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    return dist.destroy_process_group


def refused(*_):
    raise RuntimeError("nothing may be saved")


LEFT = {
    "tf32 of products, by its new name": new_precision(torch.backends.cuda.matmul, "tf32"),
    "tf32 of all, by its new name": generic("tf32"),
    "bf16 of products on the CPU": new_precision(torch.backends.mkldnn.matmul, "bf16"),
    "ieee of convolutions": new_precision(torch.backends.cudnn.conv, "ieee"),
    "tf32 of products, by its old name": old_precision,
    "inference mode": entered(torch.inference_mode),
    "no_grad": entered(torch.no_grad),
    "torch.device": entered(lambda: torch.device("meta")),
    "a default device": called(torch.set_default_device, "meta", back=(None,)),
    "a default dtype": called(torch.set_default_dtype, torch.float64, back=(torch.float32,)),
    "FakeTensorMode": entered(FakeTensorMode),
    "a function mode": entered(Zeros),
    "a dispatch mode": entered(Looks),
    "autocast": entered(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast's dtype": called(torch.set_autocast_dtype, "cpu", torch.float16, back=("cpu", torch.bfloat16)),
    "anomaly mode": entered(lambda: torch.autograd.set_detect_anomaly(True)),
    "saved-tensor hooks": entered(lambda: torch.autograd.graph.saved_tensors_hooks(refused, refused)),
    "no saved-tensor hooks": entered(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none")),
    "one kernel of attention": entered(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "a hook on all modules": hooked(modules.register_module_forward_hook),
    "a backward hook on all modules": hooked(modules.register_module_full_backward_hook),
    "a hook on all parameters": hooked(modules.register_module_parameter_registration_hook),
    "a hook on all optimizers": hooked(optimizers.register_optimizer_step_pre_hook),
    "warnings that raise": entered(lambda: warnings.catch_warnings(action="error")),
    "a process group": group,
    "a profiler": entered(torch.profiler.profile),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_what_is_left_on_has_no_part_in_a_verdict(leave):
    end = leave()
    try:
        found = [course.judge(WORK, STEP, (answer,)) for answer in (RIGHT, WRONG, RIGHT)]
    finally:
        end()
    assert [one.verdict for one in found] == ["pass", "fail", "pass"], [one.hint for one in found]
    assert found[1].slug == course.judge(WORK, STEP, (WRONG,)).slug  # the same hint as without


def state():
    """All that can be asked of the state, in words."""
    names = [(b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")] + [("generic", "all")]
    return (
        [torch._C._get_fp32_precision_getter(b, o) for b, o in names if (b, o) != ("cuda", "all")],
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_anomaly_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch.backends.cuda.math_sdp_enabled(), dist.is_initialized(), modules._has_any_global_hook(),
        len(modules._global_parameter_registration_hooks), len(optimizers._global_optimizer_pre_hooks),
    )  # fmt: skip


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_the_notebook_finds_its_own_again_and_nothing_of_an_answer(leave):
    plain = state()
    end = leave()
    mine, kept = state(), []
    for name, other in LEFT.items():
        with usual_state():
            assert state() == plain
            if name not in ("a profiler", "a process group"):
                kept.append(other())  # an answer that leaves it on
        assert state() == mine, name
    end()
    assert state() == plain


def test_a_checkpoint_is_not_written_for_ranks_of_a_group_that_was_left():
    work, names = source.find("09_ddp"), {"__name__": "__main__"}
    for cell in work.cells:
        if "setup" in cell.options:
            exec(compile(cell.text, "<setup>", "exec"), names)
    exec(compile(source.without_markers(work.balises[7].code), "<cell>", "exec"), names)
    end = group()
    try:
        found = course.judge(work, 7, tuple(names[name] for name in work.balises[7].answers))
    finally:
        end()
    assert found.passed, found.hint


def test_both_older_names_of_precision_are_kept():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False
    precision("cuda", "matmul", "ieee")  # now the older name raises
    try:
        with usual_state():
            assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"
        assert torch._C._get_fp32_precision_getter("cuda", "matmul") == "ieee" and not torch.backends.cudnn.allow_tf32
        precision("cuda", "matmul", "tf32")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        as_before()


def test_truths_that_a_check_computes_when_it_is_imported_are_the_usual_ones():
    code = """
import torch
from dlojz_tp import course
from dlojz_tp.works import source
from tests.faults.test_what_went_before import RIGHT, STEP, WORK
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
print(course.judge(WORK, STEP, (RIGHT,)).verdict)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source.ROOT, timeout=200)
    assert done.stdout.split() == ["pass"], done.stdout + done.stderr


def wrong(*args, **kwargs):
    return True


REPLACED = {
    "torch.allclose": (torch, "allclose", wrong),
    "torch.add": (torch, "add", torch.sub),
    "torch.nn.functional.linear": (F, "linear", wrong),
    "torch.Tensor.__mul__": (torch.Tensor, "__mul__", wrong),
    "torch.Tensor.backward": (torch.Tensor, "backward", wrong),
    "torch.nn.Linear.forward": (torch.nn.Linear, "forward", wrong),
    "torch.nn.Linear.__call__": (torch.nn.Linear, "__call__", wrong),
    "torch.optim.SGD.step": (torch.optim.SGD, "step", wrong),
    "sum": (builtins, "sum", wrong),
    "len": (builtins, "len", 3),
}


@contextlib.contextmanager
def put(owner, name, value):
    mine = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if mine:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@pytest.mark.parametrize("name", [name for name in REPLACED if name != "len"])
def test_a_function_that_was_replaced_is_named_and_nothing_is_judged(name):
    torch.optim.SGD([torch.ones(1)])  # from now on its `step` is wrapped by PyTorch
    with put(*REPLACED[name]):
        found = [course.judge(WORK, STEP, (answer,)) for answer in (RIGHT, WRONG)]
    assert [one.verdict for one in found] == ["could not judge"] * 2
    assert found[0].got.startswith(f"{name} is not") and "restart the kernel" in found[0].hint
    assert course.judge(WORK, STEP, (RIGHT,)).passed and not originals.replaced()


def test_a_value_in_the_place_of_a_function_is_named():
    with put(*REPLACED["len"]):
        found = originals.replaced()
    assert found.startswith("len is not Python's own any more")


def test_an_answer_that_replaces_what_it_is_judged_by_does_not_pass():
    before = torch.nn.Linear.forward

    def cheat(model, *args):
        torch.nn.Linear.forward = wrong
        return RIGHT(model, *args)

    try:
        assert course.judge(WORK, STEP, (cheat,)).verdict == "could not judge"
    finally:
        torch.nn.Linear.forward = before


def test_what_pytorch_and_libraries_wrap_is_no_false_alarm():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS):
        chosen = optimizer(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 3)
    torch.compile(model, backend="eager")(torch.ones(3, 2)).sum().backward()
    torch.func.vmap(torch.func.grad(lambda x: x.sin()))(torch.ones(3))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with FakeTensorMode(), torch.device("meta"), torch.profiler.profile():
        torch.ones(3) + 1
        assert not originals.replaced()
    torch.use_deterministic_algorithms(False)
    assert not originals.replaced()


def test_the_look_costs_next_to_nothing():
    from timeit import repeat

    assert min(repeat(originals.replaced, number=1, repeat=20)) < 0.005


def test_a_variable_that_hides_a_function_of_pythons_is_named():
    names = {"RIGHT": RIGHT, "sum": 3.0, "torch": torch}
    code = """
def total(losses):
    return sum(losses)

def right(*args):
    total([1, 2])
    return RIGHT(*args)
"""
    exec(compile(code, "<cell>", "exec"), names)
    found = course.judge(WORK, STEP, (names["right"],))
    assert found.verdict == "could not judge" and "sum is a variable" in found.got and "`del sum`" in found.hint
    names["sum"] = lambda losses: losses.mean()  # a function of the trainee's own: its mistakes count
    assert course.judge(WORK, STEP, (names["right"],)).verdict == "fail"
    del names["sum"]
    assert course.judge(WORK, STEP, (names["right"],)).passed


def test_a_variable_that_hides_a_module_of_the_first_cell_is_named():
    right = step()
    right.__globals__["F"] = 0.5
    found = course.judge(WORK, STEP, (right,))
    assert found.verdict == "could not judge" and "F is a variable of this notebook (float)" in found.got
    right.__globals__["F"] = F
    assert course.judge(WORK, STEP, (right,)).passed

    def wrong(model, images, labels, optimizer, device):
        return labels.tolist().no_such_thing

    assert course.judge(WORK, STEP, (wrong,)).verdict == "fail"


def test_a_library_that_is_half_loaded_is_no_fault_of_an_answer():
    """So Stop leaves it in the middle of an import; an attribute that the answer itself has made up is its own."""
    names = {"module": ModuleType("triton.backends")}
    exec(compile("def compiled(x):\n    return module.compiler(x)\n", torch.__file__, "exec"), names)

    def right(*args):
        return RIGHT(*args) if names["compiled"](1) else None

    def wrong(*args):
        return torch.no_such_function(*args)

    found = course.judge(WORK, STEP, (right,))
    assert found.verdict == "could not judge" and "'compiler'" in found.got and "restart the kernel" in found.hint
    assert course.judge(WORK, STEP, (wrong,)).verdict == "fail"


def test_a_call_of_what_is_no_function_stays_a_fail():
    def wrong(model, *args):
        return model.training(*args)

    found = course.judge(WORK, STEP, (wrong,))
    assert found.verdict == "fail" and "not callable" in found.hint

"""torch.compile: a plain call where a GPU takes part; the CPU's own, without the pretence, where none does."""

import contextlib
import functools
import weakref

import torch
from torch import nn, overrides
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dlojz_tp.judging.pretend_gpu.memory import block


def replaced(pretence: list[tuple]) -> list[tuple]:
    """(module, name, stand-in) of each. pretence: those of torch.cuda and its like, which a compiler must not meet."""
    import torch._dynamo  # seconds, for anyone who imports this package; ranks have it

    real, explain = torch.compile, torch._dynamo.explain
    lifted = functools.partial(_lifted, [(*change, getattr(*change[:2])) for change in pretence])

    def either(compiled, plain):
        @functools.wraps(compiled)
        def call(*args, **kwargs):
            if _on_gpu(plain, args, kwargs):
                return plain(*args, **kwargs)
            with lifted():
                return compiled(*args, **kwargs)

        return call

    def compiled(model=None, **options):
        if model is None:
            return functools.partial(compiled, **options)
        made = real(model, **options)
        if isinstance(model, nn.Module):
            made.forward = either(made.forward, model)
            return made
        return either(made, model)

    def explained(function):
        def explained(*args, **kwargs):
            with lifted():  # graphs and breaks are the CPU's
                return explain(function)(*args, **kwargs)

        return explained

    return [(torch, "compile", compiled), (torch._dynamo, "explain", explained)]


def _on_gpu(function, args, kwargs) -> bool:
    """Whether a tensor of a GPU is among the arguments, or in a module or an optimizer that the function belongs to."""
    owners = [function]
    while function is not None:
        owners.append(getattr(function, "__self__", None))
        owners += [cell.cell_contents() for cell in getattr(function, "__closure__", None) or () if _weak(cell)]
        function = getattr(function, "__wrapped__", None)
    for each in tree_leaves((args, kwargs, owners)):
        if isinstance(each, nn.Module):
            found = each.parameters()
        elif isinstance(each, torch.optim.Optimizer):
            found = (p for group in each.param_groups for p in group["params"])
        else:
            found = [each] if isinstance(each, torch.Tensor) else []
        if any(block(x) is not None for x in found):
            return True
    return False


@contextlib.contextmanager
def _lifted(changes):
    """Inside, no mode of this thread, and torch.cuda as it was. changes: (module, name, stand-in, what was there)."""
    with _disable_current_modes():
        modes = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())]
        for target, name, _, real in changes:
            setattr(target, name, real)
        try:
            yield
        finally:
            for target, name, stand_in, _ in changes:
                setattr(target, name, stand_in)
            for mode in reversed(modes):
                overrides._push_mode(mode)


def _weak(cell) -> bool:
    """Whether a function keeps a weak reference, as an optimizer's step does that a scheduler counts."""
    try:
        return isinstance(cell.cell_contents, weakref.ref)
    except ValueError:  # not filled yet
        return False

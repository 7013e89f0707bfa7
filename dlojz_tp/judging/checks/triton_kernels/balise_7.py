"""Balise 7: a kernel as an operator: registered, with a fake implementation and a gradient."""

import contextlib
import copy
import itertools
import logging
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, tried
from dlojz_tp.measure import kernels

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 40, generator=GENERATOR)[:, 3:]
GRAD = torch.randn(5, 37, generator=GENERATOR)
NUMBERS = itertools.count()  # a name is registered once
TESTS = {  # of opcheck: what is told where one fails
    "test_schema": "schema",
    "test_autograd_registration": "autograd",
    "test_faketensor": "fake",
}


def gradient_due():
    x = X.double().requires_grad_()
    x.softmax(1).backward(GRAD.double())
    return x.grad.float()


@contextlib.contextmanager
def quiet():
    """PyTorch logs and warns of what the verdict says."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def faked(operator):
    """What the operator gives for a float16 matrix on a GPU that isn't there: its form, device and strides."""
    with quiet(), FakeTensorMode():
        found = operator(torch.empty((4, 14), dtype=torch.float16, device="cuda")[:, :7])
    return [form(found), found.device.type, found.stride()] if isinstance(found, torch.Tensor) else None


def registered(name):
    space, operator = name.split("::")
    return hasattr(getattr(torch.ops, space), operator)


def differentiated(operator):
    x = X.clone().requires_grad_()
    y = operator(x)
    if not y.requires_grad:
        return None
    with quiet():
        y.backward(GRAD)
    return x.grad


def observe(softmax_operator):
    name = f"dlojz_checked::softmax_{next(NUMBERS)}"
    operator = softmax_operator(name)
    yield {"registered": callable(operator) and registered(name)}
    with kernels.Watched() as seen:
        result = operator(copy.deepcopy(X))
    yield {"values": result, "launches": len(seen.launches) > 0}
    yield {"fake": tried(faked, operator)}
    gradient = tried(differentiated, operator)
    yield {"has gradient": isinstance(gradient, torch.Tensor), "gradient": gradient}
    with quiet():
        found = torch.library.opcheck(
            operator, (X.clone().requires_grad_(),), test_utils=list(TESTS), raise_exception=False
        )
    yield {"opcheck": [word for test, word in TESTS.items() if found.get(test) != "SUCCESS"]}


def fake_hint(seen, due):
    if isinstance(seen, str):
        return (
            "no-fake" if any(word in seen for word in ("fake impl", "UnsupportedOperator", "Meta")) else "fake-computes"
        )
    return "fake-form"


LOOKS = [
    Look("an operator is registered under the name given", "registered", True, "no-operator"),
    Value("it returns the softmax", "values", X.double().softmax(1).float(), "wrong-operator"),
    Look("of the kernel", "launches", True, "no-kernel"),
    Look(
        "on a tensor without values, it says what will come out", "fake", ["float16 (4, 7)", "cuda", (7, 1)], fake_hint
    ),
    Look("it has a gradient", "has gradient", True, "no-gradient"),
    Value("the right one", "gradient", gradient_due(), "wrong-gradient"),
    Look("opcheck finds nothing", "opcheck", [], "opcheck", fields=lambda seen, due: {"what": ", ".join(seen)}),
]


def balise_7(softmax_operator):
    yield from judged(LOOKS, observe, softmax_operator)

"""What the checks of this work share on the ranks: right functions to hand to an answer, and a run of a layer."""

import copy
import itertools
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.balise import BaliseNotDone
from dlojz_tp.checking import Wrong, close, held_storages
from dlojz_tp.checks.tensor_slicing.products import Work
from dlojz_tp.checks.tensor_slicing.right_ranks import CheckRanks
from dlojz_tp.measure.communications import NAMES

SIZES = (1, 2, 3, 4)
SLICES = (1, 2, 4)  # world sizes of sliced layers
TIMEOUT = 10  # seconds for the ranks of one world: a deadlock must come back quickly
PATIENCE = 6  # seconds that a rank waits for the others behind a step
RATE, MOMENTUM, STEPS = 0.05, 0.9, 3

HINTS = {
    "graph-cut": "The result hangs on no graph: {error}. dist.all_gather and dist.all_reduce know nothing of autograd; the "
    "methods of `ranks` do.",
    "calls-differ": "This rank is through, and another one is still waiting for it: they do not call the same collectives. All "
    "ranks have to make the same calls, in the same order; no `if` on the rank around one.",
    "borrowed": "{what} does this work for you. Here it is yours: use the methods of `ranks`.",
}
KNOWN = (("does not require grad", "graph-cut"),)

_times = itertools.count()


class Borrowed(Exception):  # noqa: N818  (raised on a rank, it names what was borrowed)
    """The answer called a ready-made implementation of what it was to write."""


def on_ranks(fn, *args, known=(), sizes=SIZES, timeout=TIMEOUT) -> dict[int, list]:
    """Run a check's function on several world sizes. known: pairs (words in the error; slug) with a hint of their own."""
    for answer in args:
        if not callable(answer) and not isinstance(answer, dict):
            raise Wrong("not-callable", error=type(answer).__name__)
    try:
        return launch.worlds(_on_one_thread, fn, *args, sizes=sizes, timeout=timeout)
    except launch.RankError as error:
        if isinstance(error.cause, Wrong):
            raise error.cause from error
        if isinstance(error.cause, Borrowed):
            raise Wrong("borrowed", what=str(error.cause)) from error
        for sign, slug in (*known, *KNOWN):
            if sign in error.summary:
                raise Wrong(slug, got=error.summary, error=error.summary) from error
        raise


@dataclass(frozen=True)
class Form:
    """One parameter that an answer may hold: these parameters of the plain layer, cut along `dim` (None: whole).

    Several are stacked along dimension 0. `optional`: ranks other than 0 may do without it.
    """

    covers: tuple[str, ...]
    dim: int | None
    optional: bool = False

    def of(self, whole: dict, rank: int, size: int) -> torch.Tensor:
        """This rank's part of the tensors in `whole`, which have the plain layer's names."""
        parts = [whole[name] for name in self.covers]
        if self.dim is not None:
            parts = [part.tensor_split(size, self.dim)[rank] for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on_one_thread(fn, *args):
    """Tensors here are tiny: threads would only wait for each other, very long on a busy machine."""
    torch.set_num_threads(1)
    return fn(*args)


def state(module) -> dict:
    """Name to a copy of the parameter."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def together(fine: bool) -> bool:
    """Whether all ranks say `fine`, so that they stop together where one of them must. Told past all collectives."""
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    word = f"together {next(_times)} rank"
    store.set(f"{word} {dist.get_rank()}", "yes" if fine else "no")
    try:
        store.wait([f"{word} {rank}" for rank in range(size)], timedelta(seconds=PATIENCE))
    except Exception:
        raise Wrong("calls-differ", where=f"rank {dist.get_rank()} of {size}") from None
    return all(store.get(f"{word} {rank}") == b"yes" for rank in range(size))


def match(parameters: dict, forms, whole: dict, rank: int, size: int) -> dict:
    """Parameter name -> (form, transposed) for those that are a right part of the plain layer, by value."""
    found = {}
    for name, p in parameters.items():
        for form in forms:
            wanted = form.of(whole, rank, size)
            if p.shape == wanted.shape and close(p, wanted):
                found[name] = (form, False)
            elif p.ndim == 2 and p.t().shape == wanted.shape and close(p.t(), wanted):
                found[name] = (form, True)
            else:
                continue
            break
    return found


def oriented(value: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`value` as an answer holds it that keeps this weight transposed."""
    return value.t() if transposed else value


def calls(traffic) -> list[tuple[str, int]]:
    """(name, bytes handed in) of the collectives, under the names that users know."""
    named = [(NAMES.get(name, name), size) for name, size in traffic.calls]
    return [call for call in named if "barrier" not in call[0]]


def build(Layer, plain, ranks):  # noqa: N803
    """(layer, None), or (None, error) with the lines of the answer; an unfinished balise passes through."""
    try:
        return Layer(copy.deepcopy(plain), ranks), None
    except BaliseNotDone:
        raise
    except Exception as error:
        return None, error


def refused(Layer, plain, ranks) -> str:  # noqa: N803
    """The kind of error with which a layer is refused that does not divide; "" where it is accepted."""
    _, error = build(Layer, plain, ranks)
    return "" if error is None else f"{type(error).__name__}: {error}"


def exercise(Layer, case: dict) -> dict:  # noqa: N803
    """On a rank: build a layer from a plain one, train it some steps, then give it other weights; report everything.

    case: "plain" (the layer), "other" (one of the same sizes), "batches" (inputs), "upstream" (gradients of outputs),
    "forms" (what a rank may hold).
    """
    ranks, plain, whole = CheckRanks(), case["plain"], state(case["plain"])
    layer, error = build(Layer, plain, ranks)
    report: dict = {"parameters": {}, "matched": {}, "stopped": "slices"}
    if layer is not None:
        if any(type(p).__name__ == "DTensor" for p in layer.parameters()):
            raise Borrowed("PyTorch's DTensor")
        report["parameters"] = state(layer)
        report["matched"] = match(report["parameters"], case["forms"], whole, ranks.rank, ranks.size)
        report["storage"] = {n: p.untyped_storage().nbytes() for n, p in layer.named_parameters()}
        mine = held_storages(ranks)
        report["held"] = sum(size for at, size in held_storages(layer).items() if at not in mine)
    if not together(error is None and len(report["matched"]) == len(report["parameters"]) > 0):
        if error is not None:
            raise error
        return report
    for step, (x, upstream) in enumerate(zip(case["batches"], case["upstream"], strict=True)):
        run = _step(layer, x, upstream)
        report[step] = run
        report["stopped"] = f"step {step}"
        if "gradients" not in run:
            return report
        with torch.no_grad():
            for p in layer.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    report["trained"] = state(layer)
    report["stopped"] = ""
    _other_weights(layer, case, ranks, report)
    return report


def _step(layer, x, upstream) -> dict:
    layer.zero_grad()
    given = x.clone().requires_grad_() if x.is_floating_point() else x.clone()
    with Work() as forward:
        y = layer(given)
    run = {
        "products": forward.products,
        "forward": calls(forward),
        "output": y.detach().clone() if isinstance(y, torch.Tensor) else y,
    }
    run["changed"] = not torch.equal(given.detach(), x)
    if not together(isinstance(y, torch.Tensor) and y.shape == upstream.shape and not run["changed"]):
        return run
    sent = upstream.clone()
    with Work() as backward:
        y.backward(sent)
    run |= {
        "backward": calls(backward),
        "input gradient": given.grad,
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in layer.named_parameters()},
        "changed": run["changed"] or not torch.equal(given.detach(), x) or not torch.equal(sent, upstream),
    }
    return run


def _other_weights(layer, case, ranks, report):
    whole = state(case["other"])
    with torch.no_grad():
        for name, p in layer.named_parameters():
            form, transposed = report["matched"][name]
            p.copy_(oriented(form.of(whole, ranks.rank, ranks.size), transposed))
        report["other"] = layer(case["batches"][0]).clone()


def truth(case: dict) -> dict:
    """The same steps with the plain layer in one process: what `exercise` must find, under the same keys."""
    layer, found = copy.deepcopy(case["plain"]), {}
    for step, (x, upstream) in enumerate(zip(case["batches"], case["upstream"], strict=True)):
        layer.zero_grad()
        given = x.clone().requires_grad_() if x.is_floating_point() else x
        with Work() as work:
            y = layer(given)
        y.backward(upstream)
        found[step] = {
            "output": y.detach(), "input gradient": given.grad, "products": work.products,
            "gradients": {n: p.grad.clone() for n, p in layer.named_parameters()},
        }  # fmt: skip
        with torch.no_grad():
            for p in layer.parameters():
                p -= RATE * p.grad
    with torch.no_grad():
        found["other"] = case["other"](case["batches"][0])
    return found | {"trained": state(layer)}


def randomise(module, seed: int):
    """The module in float64, every parameter drawn anew, so that no two slices are alike."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
    return module


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Normal random numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

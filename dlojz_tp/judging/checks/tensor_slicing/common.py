"""What the checks of this work share on the ranks: right functions to hand to an answer, and a run of a layer."""

import functools
import itertools
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.borrowed import Borrowed
from dlojz_tp.judging.checks.tensor_slicing.right_ranks import CheckRanks
from dlojz_tp.judging.probes import ranks
from dlojz_tp.judging.probes.memory import Alive
from dlojz_tp.judging.probes.networks import state, twin
from dlojz_tp.judging.probes.outside import look_later
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.measure.operations import Products
from dlojz_tp.works.balise import BaliseNotDone

SIZES = (4, 3, 1, 2)  # in one launch, the worlds of 3 and 1 side by side
ASIDE_AT = 2  # ranks
TIMEOUT = 12  # seconds for the ranks of a launch: a deadlock must come back quickly
PATIENCE = 8  # seconds that a rank waits for the others behind a step
SLACK = 512  # bytes that a layer may hold besides its slices: a buffer of positions
ASIDE = 2**17  # bytes of Python's own that a layer may leave in memory: the objects of a whole model take 50,000
RATE, MOMENTUM, STEPS = 0.05, 0.9, 3

HINTS = {
    "graph-cut": "The result has no graph: {error}. dist.all_gather and dist.all_reduce do not work with autograd, "
    "but the methods of `ranks` do. Do not use no_grad() or detach() here either.",
    "sizes-do-not-fit": "Two sizes do not fit: {error}. A layer cut by columns takes the whole input and gives "
    "this rank's part of the result. A layer cut by rows takes a part and gives a term of a "
    "sum. Swap heads and tokens back before you join the heads. Add up terms of a sum; put "
    "parts side by side.",
    "calls-differ": "This rank has finished while another one is still waiting for it: they do not call the same "
    "collectives. All ranks must make the same calls in the same order. Do not put a collective "
    "inside an `if` on the rank.",
    "group-as-op": "The second argument of dist.all_reduce is `op`, not the group. Write group=.",
    "ranks-as-group": "group= takes the process group itself: ranks.group or grid.data.group.",
    "none-divided": "You divide something that is None. dist.all_reduce works in place and returns nothing: call "
    "it, then divide the tensor that you passed. Also, a frozen or unused parameter has p.grad "
    "None: leave it out.",
    "reduced-in-place": "You split or divide something that is None. dist.all_reduce works in place and returns "
    "nothing: call it, then use the tensor that you passed.",
    "borrowed": "{what} does this work for you. Here you have to write it yourself.",
}
AS_OP = "incompatible function arguments", "group-as-op"
AS_GROUP = "is not initialized in the world group map", "ranks-as-group"
IN_PLACE = (  # before any other sign of a None
    ("has no attribute 'split'", "reduced-in-place"),
    ("has no attribute 'div", "none-divided"),
    ("unsupported operand type(s) for /", "none-divided"),
)
KNOWN = (("does not require grad", "graph-cut"), ("shapes cannot be multiplied", "sizes-do-not-fit"),
         ("must match the size of tensor", "sizes-do-not-fit"))  # fmt: skip

_times = itertools.count()


_usual = {"usual": ((Borrowed, "borrowed"), *KNOWN), "data": (dict,), "sizes": SIZES, "timeout": TIMEOUT}
on_ranks = functools.partial(ranks.on_ranks, **_usual)
world_after_world = functools.partial(ranks.world_after_world, **_usual)
by_world = functools.partial(ranks.by_world, **_usual)


@dataclass(frozen=True)
class Form:
    """One parameter that an answer may hold: these parameters of the plain layer, cut along `dim` (None: whole).

    Several are stacked: one after the other, or with `head` numbers in each (the size of a head) head by head, or number
    by number (`head` 1). `optional`: ranks other than 0 may do without it. `pad`: rows of zeros before and behind the part.
    """

    covers: tuple[str, ...]
    dim: int | None
    optional: bool = False
    head: int | None = None
    pad: tuple[int, int] = (0, 0)

    def of(self, whole: dict, rank: int, size: int) -> torch.Tensor:
        """This rank's part of the tensors in `whole`, which have the plain layer's names."""
        parts = [whole[name] for name in self.covers]
        if self.dim is not None:
            parts = [part.tensor_split(size, self.dim)[rank] for part in parts]
        if self.head is not None:
            return torch.stack([part.unflatten(0, (-1, self.head)) for part in parts], 1).flatten(0, 2)
        part = parts[0] if len(parts) == 1 else torch.cat(parts)
        return F.pad(part, (0, 0, *self.pad)) if any(self.pad) else part


def together(fine: bool, patience: float = PATIENCE) -> bool:
    """Whether all ranks say `fine`, so that they stop together where one of them must. Told past all collectives."""
    c10d = dist.distributed_c10d
    store, mine, size = c10d._get_default_store(), c10d.get_rank(), c10d.get_world_size()
    word = f"together {next(_times)} rank"
    store.set(f"{word} {mine}", "yes" if fine else "no")
    try:
        store.wait([f"{word} {rank}" for rank in range(size)], timedelta(seconds=patience))
    except Exception:
        raise Wrong("calls-differ", where=f"rank {mine} of {size}") from None
    return all(store.get(f"{word} {rank}") == b"yes" for rank in range(size))


def match(parameters: dict, forms, whole: dict, rank: int, size: int) -> dict:
    """Parameter name -> (form, transposed) for those that are a right part of the plain layer, by value."""
    by_size: dict[int, list] = {}
    for form in forms:
        wanted = form.of(whole, rank, size)
        by_size.setdefault(wanted.numel(), []).append((form, wanted, wanted.flatten()[0].item()))
    found = {}
    for name, p in parameters.items():
        first = p.flatten()[0].item() if p.numel() else 0.0
        for form, wanted, one in by_size.get(p.numel(), []):
            if abs(one - first) > 1e-6:  # most are told apart by their first number
                continue
            for transposed in (False, True)[: 1 + (p.ndim == wanted.ndim == 2)]:
                if close(as_plain(p, transposed, wanted), wanted):
                    found.setdefault(name, (form, transposed))
            if name in found:
                break
    return found


def as_plain(value: torch.Tensor, transposed: bool, wanted: torch.Tensor) -> torch.Tensor:
    """`value`, which an answer holds transposed or in another shape, in the plain layer's shape."""
    return (value.t() if transposed else value).reshape(wanted.shape)


def build(Layer, plain, ranks):  # noqa: N803
    """(layer, None), or (None, error) with the lines of the answer; an unfinished balise passes through."""
    try:
        return Layer(twin(plain), ranks), None
    except BaliseNotDone:
        raise
    except Exception as error:
        return None, error


def refused(Layer, plain, ranks) -> str:  # noqa: N803
    """The kind of error with which a layer is refused that does not divide; "" where it is accepted."""
    _, error = build(Layer, plain, ranks)
    return "" if error is None else f"{type(error).__name__}: {error}"


def exercise(Layer, case: dict, ranks: CheckRanks, single: bool = False) -> dict:  # noqa: N803
    """On a rank: build a layer from a plain one, train it some steps, then give it other weights; report everything.

    case: "plain" (the layer), "other" (one of the same sizes), "batches" (inputs), "upstream" (gradients of outputs),
    "forms" (what a rank may hold), "large" (builds a plain layer for `aside`). single: all of it in float32, for a layer
    whose parts are that whatever the plain one is.
    """
    if single:
        case = case | {name: twin(case[name]).float() for name in ("plain", "other")}
        case |= {name: [x.float() for x in case[name]] for name in ("batches", "upstream")}
    report = _train(Layer, case, ranks)
    if ranks.size == ASIDE_AT:
        look_later(Layer, case["large"], ranks)
    return report


def _train(Layer, case: dict, ranks: CheckRanks) -> dict:  # noqa: N803
    plain, whole = case["plain"], state(case["plain"])
    report: dict = {"parameters": {}, "matched": {}, "frozen": [], "stopped": "slices"}
    with Alive() as alive:
        layer, error = build(Layer, plain, ranks)
        if layer is not None and any(type(p).__name__ == "DTensor" for p in layer.parameters()):
            raise Borrowed("PyTorch's DTensor")
        report["held"] = 0 if layer is None else alive.held(layer, known=[ranks.stream])
    if layer is not None:
        report["parameters"] = state(layer)
        report["matched"] = match(report["parameters"], case["forms"], whole, ranks.rank, ranks.size)
        report["frozen"] = [name for name, p in layer.named_parameters() if not p.requires_grad]
        for p in layer.parameters():  # all else is looked at as if nothing was frozen
            p.requires_grad_(p.is_floating_point())
        report["storage"] = {n: p.untyped_storage().nbytes() for n, p in layer.named_parameters()}
    fits = len(report["matched"]) == len(report["parameters"]) > 0
    if not together(error is None and fits):
        if error is not None:
            raise error
        return report
    report["later"] = []
    for step, (x, upstream) in enumerate(zip(case["batches"], case["upstream"], strict=True)):
        run = _step(layer, x, upstream, ranks.size)
        report["later"] += [run["output"]] if step else []
        report |= {"stopped": f"step {step}"} | ({} if step else run)
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


def _step(layer, x, upstream, size) -> dict:
    def carried(traffic):  # a group of one needs none
        return [call._replace(group=size) for call in traffic.calls] if size > 1 else []

    layer.zero_grad()
    given = x.clone().requires_grad_() if x.is_floating_point() else x.clone()
    with Traffic() as forward, Products() as products:
        y = layer(given)
    is_tensor = isinstance(y, torch.Tensor)
    run = {
        "products": products.multiplications,
        "forward": carried(forward),
        "output": y.detach().clone() if is_tensor else y,
        "shape": tuple(y.shape) if is_tensor else None if y is None else (),
    }
    run["changed"] = not torch.equal(given.detach(), x)
    if not together(run["shape"] == upstream.shape and not run["changed"]):
        return run
    sent = upstream.clone()
    with Traffic() as backward:
        y.backward(sent)
    run |= {
        "backward": carried(backward),
        "input gradient": given.grad,
        "no graph": x.is_floating_point() and given.grad is None,
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in layer.named_parameters()},
        "changed": run["changed"] or not torch.equal(given.detach(), x) or not torch.equal(sent, upstream),
    }
    return run


def _other_weights(layer, case, ranks, report):
    whole = state(case["other"])
    with torch.no_grad():
        for name, p in layer.named_parameters():
            form, transposed = report["matched"][name]
            part = form.of(whole, ranks.rank, ranks.size)
            p.copy_((part.t() if transposed else part).reshape(p.shape))
        report["other"] = layer(case["batches"][0]).clone()


def truth(case: dict) -> dict:
    """The same steps with the plain layer in one process: what `exercise` must find, under the same keys."""
    layer, found = twin(case["plain"]), {"later": []}
    for step, (x, upstream) in enumerate(zip(case["batches"], case["upstream"], strict=True)):
        layer.zero_grad()
        given = x.clone().requires_grad_() if x.is_floating_point() else x
        with Products() as products:
            y = layer(given)
        y.backward(upstream)
        found["later"] += [y.detach()] if step else []
        found |= {} if step else {
            "output": y.detach(), "input gradient": given.grad, "products": products.multiplications,
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

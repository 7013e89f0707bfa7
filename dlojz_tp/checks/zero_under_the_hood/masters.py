"""Balise 6: parameters in bfloat16, float32 masters of this rank's shards."""

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.zero_under_the_hood import half
from dlojz_tp.checks.zero_under_the_hood.half import CAPACITY, TRAININGS, initial, own_part, places, truth
from dlojz_tp.checks.zero_under_the_hood.outside import no_copy
from dlojz_tp.checks.zero_under_the_hood.worlds import by_worlds, each_training
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.memory import held_bytes
from dlojz_tp.probes.outside import Outside
from dlojz_tp.probes.settling import settle
from dlojz_tp.probes.traffic import Traffic

SLACK = 100  # bytes: the step counters of Adam, one a part, and what is rounded up
CLOSE = 2e-5

HINTS = {
    "no-masters": "There is no list of masters: {error}. Make one in __init__, self.masters, a float32 copy of each part's own.",
    "masters-count": "There are {got} masters for {expected} parts: one for each part, in their order.",
    "masters-not-float32": "A master is in {got}. It is there to keep what bfloat16 cannot: make it in float32.",
    "masters-whole": "A master of {got} elements for a shard of {expected}: the masters, too, are shared out, only own is copied.",
    "master-is-own": "A master lives in the same memory as the parameters.",
    "no-master-gradient": "After reduce() a master has no gradient. Convert what came from the ranks, part.own.grad, to float32 and "
    "put it there: clipping and the optimizer look for it in master.grad.",
    "wrong-master-gradient": "After reduce() the masters' gradients are not the mean over the ranks.",
    "gradient-elsewhere": "A gradient has the dtype of what it belongs to: float32 belongs into master.grad, not into own.grad. {error}",
    "divided-again": "After reduce() the masters' gradients are the mean divided by world_size once more. Stage 2 has divided.",
    "gradients-added": "After the first step the masters' gradients are the sum of those of all steps so far. Each reduce() brings "
    "a new one.",
    "optimizer-on-bf16": "The masters stand still: the optimizer still has the bfloat16 shards. It must be given the masters, "
    "each in the group of its part.",
    "masters-remade": "Small updates are lost. Each of them moves the master by less than half a step of bfloat16, and then the "
    "master is read back from the rounded parameter. Make the masters once, and never read them from the parameters again.",
    "group-options-lost": "The masters of the second group did not get its own options (lr, weight_decay): keep the groups apart.",
    "wrong-masters": "The masters are not those of the same optimizer in one process, in float32.",
    "parameters-widened": "A parameter is in {got} now. The model computes, stores and sends bfloat16; only masters are float32.",
    "not-rounded-back": "The masters are right, but the parameters stand still: round each master into its part's own (copy_) before "
    "the parameters are gathered.",
    "gathered-too-early": "The parameters are those of the step before: gather after the masters were rounded into own.",
    "others-not-gathered": "Rank {rank} has new values in its own shards only: the parameters of the other ranks have to be gathered.",
    "wrong-parameters": "The masters are right, the parameters are not their rounded values.",
    "messages-in-float32": "A rank handed in {got} bytes in a step; gradients and parameters in two bytes each make {expected}. Round "
    "first, then send.",
    "held-too-much": "Between two steps a rank holds {got} bytes for {n} parameters on {size} ranks: 2 for each parameter and 12 for "
    "each of its own shard make {expected}. {likely}",
}  # fmt: skip
KNOWN = (
    ("'masters'", "no-masters"),
    ("attempting to assign a gradient with dtype", "gradient-elsewhere"),
    ("assigned grad has data of a different type", "gradient-elsewhere"),
)
CALLS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}


def balise_6(MasterShards):  # noqa: N803
    """Gradients without rounding errors, so that float64 AdamW and SGD are the truth to the last digits."""
    looks = {
        "after reduce(), each master has the mean gradient in float32; updates much smaller than a step of bfloat16 add "
        "up in the masters, as in one process": each_training(_masters),
        "on every rank the parameters are the rounded masters of all, and bfloat16 still": each_training(_parameters),
        "two bytes an element in every message; between two steps, 2 bytes a parameter, and 12 for those of a rank's own "
        "shard": each_training(_frugal),
    }
    yield from by_worlds(looks, _train, MasterShards, known=KNOWN)


def _train(MasterShards):  # noqa: N803
    return {name: _training(MasterShards, name) for name in half.trainings(dist.get_world_size())}


def _training(MasterShards, name):  # noqa: N803
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, options, steps = TRAININGS[name]
    parameters = [nn.Parameter(value) for value in initial()]
    frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
    upstream = [[g.bfloat16() for g in half.gradients(step, rank, size)] for step in range(steps)]
    live = LiveBytes().track(parameters)
    whole = 4 * sum(p.numel() for p in parameters)
    with live, Outside(whole, on=size == 2, lists=False) as outside:
        groups = half.groups_of(parameters, name)
        (groups[0]["params"] if isinstance(groups[0], dict) else groups).append(frozen)
        optimizer = MasterShards(groups, kind, capacity=CAPACITY, **options)
        del groups
        got = {"first": [], "second": [], "places": places(optimizer, parameters)}
        bad = _unfit(optimizer, parameters)
        if bad:
            return {"bad": bad}
        for step in range(steps):
            optimizer.zero_grad()
            with Traffic() as traffic:
                sum((p * g).sum() for p, g in zip(parameters, upstream[step], strict=True)).backward()
                if step < 2:
                    optimizer.reduce()
                    got[("first", "second")[step]] = [
                        None if m.grad is None else m.grad.detach().clone() for m in optimizer.shards
                    ]
                    optimizer.update()
                else:
                    optimizer.step()
            if any(p.dtype != torch.bfloat16 for p in parameters):  # the next step would fail for another reason
                wide = next(p.dtype for p in parameters if p.dtype != torch.bfloat16)
                return {"bad": ("parameters-widened", {"got": str(wide).removeprefix("torch.")})}
        optimizer.zero_grad()
    masters, copies = list(optimizer.shards), [g for key in ("first", "second") for g in got[key] if g is not None]
    mine = sum(g.nbytes for g in copies)
    held = settle(lambda: live.live - mine, sum(_due(got["places"], name, size)))
    return got | {
        "masters": [m.detach().clone() for m in masters],
        "parameters": [p.detach().clone() for p in parameters],
        "sent": sum(call.bytes for call in traffic.calls if call.name in CALLS),
        # also what the optimizer reaches: a NumPy array is no tensor
        "outside": (outside.kept, whole),
        "master of whole": any(m.untyped_storage().nbytes() > m.nbytes for m in masters),
        "own apart": any(
            part.own.untyped_storage()._cdata != part.flat.untyped_storage()._cdata for part in optimizer.parts
        ),
        "held": max(held, held_bytes(vars(optimizer))),
    }


def _unfit(optimizer, parameters):
    """(slug, fields) where the masters cannot be right, whatever their values are."""
    masters, parts = list(optimizer.shards), optimizer.parts
    home = {p.untyped_storage().data_ptr() for p in parameters}
    if len(masters) != len(parts):
        return "masters-count", {"expected": len(parts), "got": len(masters)}
    for master, part in zip(masters, parts, strict=True):
        due = -(-sum(p.numel() for p in part.parameters) // dist.get_world_size())
        if master.untyped_storage().data_ptr() in home:
            return "master-is-own", {}
        if master.dtype != torch.float32:
            return "masters-not-float32", {"got": str(master.dtype).removeprefix("torch.")}
        if master.numel() != due:
            return "masters-whole", {"expected": due, "got": master.numel()}
    return None


def _masters(got, name, rank, size, where):
    steps = truth(name, size)
    if "bad" in got:
        slug, fields = got["bad"]
        raise Wrong(slug, where=where, **fields)
    parts = got["places"]
    expected = [own_part([steps[-1][k] for k in part], rank, size) for part in parts]
    for number, key in enumerate(("first", "second")):
        mean = _mean(number, size)
        wanted = [own_part([mean[k] for k in part], rank, size) for part in parts]
        for gradient, due in zip(got[key], wanted, strict=True):
            fields = {"expected": due, "got": gradient, "where": f"{where}, step {number + 1}"}
            if gradient is None:
                raise Wrong("no-master-gradient", where=where)
            if gradient.dtype != torch.float32:
                raise Wrong("no-master-gradient", got=f"a gradient in {gradient.dtype}", where=where)
            if not close(gradient.reshape(-1), due, CLOSE):
                raise Wrong(_gradient_mistake(gradient.reshape(-1), due, size, number), **fields)
    for k, (master, wanted) in enumerate(zip(got["masters"], expected, strict=True)):
        master = master.reshape(-1)
        if close(master, wanted, CLOSE):
            continue
        first = own_part([steps[0][i] for i in parts[k]], rank, size)
        one = (own_part([steps[1][i] for i in parts[k]], rank, size) - first).abs()
        moved, due = (master - first).abs(), (wanted - first).abs()
        slug = "wrong-masters"
        if not moved.any():
            slug = "optimizer-on-bf16"
        elif bool((moved <= 2 * one + 1e-7).all()) and bool((due > 4 * one).any()):
            slug = "masters-remade"
        elif (
            "groups" in where
            and set(parts[k]) <= {2, 3, 4}
            and all(
                close(got["masters"][j].reshape(-1), expected[j], CLOSE) for j, part in enumerate(parts) if part[0] < 2
            )
        ):
            slug = "group-options-lost"
        raise Wrong(slug, expected=wanted, got=master, where=f"{where}, part {k}")


def _mean(step, size):
    ranks = [half.gradients(step, rank, size) for rank in range(size)]
    return [torch.stack(list(of)).mean(0) for of in zip(*ranks, strict=True)]


def _gradient_mistake(gradient, mean, size, step):
    if size > 1 and close(gradient, mean / size, CLOSE):
        return "divided-again"
    if step and gradient.abs().sum() > 1.5 * mean.abs().sum():
        return "gradients-added"
    return "wrong-master-gradient"


def _parameters(got, name, rank, size, where):
    steps = truth(name, size)
    wanted, parts = [value.bfloat16() for value in steps[-1]], got["places"]
    if all(_rounded(p, value) for p, value in zip(got["parameters"], wanted, strict=True)):
        return

    def are(values, ranks):
        """Whether the shards of these ranks have these values."""
        pairs = [[own_part([v[k].double() for k in part], r, size) for v in (got["parameters"], values)]
                 for part in parts for r in ranks]  # fmt: skip
        return all(_rounded(a, b) for a, b in pairs)

    others = [r for r in range(size) if r != rank]
    slug = "wrong-parameters"
    if are(steps[0], [rank]):
        slug = "not-rounded-back"
    elif others and are(steps[-1], [rank]):
        slug = "others-not-gathered" if are(steps[0], others) else "gathered-too-early"
    k = next(k for k, (p, value) in enumerate(zip(got["parameters"], wanted, strict=True)) if not _rounded(p, value))
    raise Wrong(slug, expected=wanted[k], got=got["parameters"][k], where=f"{where}, parameter {k}", rank=rank)


def _rounded(p, value) -> bool:
    """Equal to within one step of bfloat16 at the most, and nearly everywhere exactly."""
    return bool(((p.double() - value.double()).abs() <= value.double().abs() / 128).all()) and (
        (p.double() - value.double().bfloat16().double()).abs().gt(0).double().mean() <= 0.1
    )


def _due(parts, name, size) -> tuple[int, int]:
    """Bytes that a rank holds between two steps, and what it may hold besides: a message is let go of a little late."""
    shares = [-(-sum(initial()[k].numel() for k in part) // size) for part in parts]
    state = 12 if "Adam" in name else 8
    return 2 * sum(value.numel() for value in initial()) + state * sum(shares), SLACK + 4 * max(shares)


def _frugal(got, name, _rank, size, where):
    shares = [-(-sum(initial()[k].numel() for k in part) // size) for part in got["places"]]
    n, own = sum(value.numel() for value in initial()), sum(shares)
    due = 2 * own * size + 2 * own
    if size > 1 and got["sent"] > 1.1 * due + 16:
        raise Wrong("messages-in-float32", got=got["sent"], expected=due, where=where)
    held, slack = _due(got["places"], name, size)
    extra = got["held"] - held
    if extra > slack:
        likely = "Gradients in float32 that nobody freed?" if extra <= 4 * own + slack else "What else is kept?"
        likely = "own is no view of flat any more: write into it, with copy_." if got["own apart"] else likely
        if got["master of whole"]:
            likely = (
                "A master is a part of a float32 copy of everything, and keeps all of it alive: cut first, then copy."
            )
        raise Wrong("held-too-much", got=got["held"], n=n, size=size, expected=held, likely=likely, where=where)
    no_copy(*got["outside"], where)

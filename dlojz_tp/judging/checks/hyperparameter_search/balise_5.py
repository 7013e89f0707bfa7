"""Balise 5: exploit, explore and evolve, on small populations that are really trained."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, above, judged, silent

FACTORS = torch.tensor([0.8, 1.25], dtype=torch.float64)
OPTIMIZERS = {"SGD with momentum": lambda groups, **rates: torch.optim.SGD(groups, momentum=0.9, **rates), "AdamW": torch.optim.AdamW}  # fmt: skip
BATCHES = torch.randn(12, 16, 6, generator=torch.Generator().manual_seed(1))
FIFTEEN = [
    0.9,
    0.1,
    0.8,
    0.3,
    0.5,
    0.2,
    0.4,
    0.7,
    0.6,
    0.15,
    0.95,
    0.55,
    0.45,
    0.35,
    0.65,
]  # 15 // 4 is 3, 15 / 4 nearly 4
BEST_OF_FIFTEEN = {0, 2, 10}
VALUES = 0.5, 0.9, 0.3, math.nan, 0.8, 0.7, 0.2, 0.95, 0.6  # NaN where sorting by it loses the order
WORST, BEST, WORST_NUMBERS = {3, 6}, {1, 7}, {2, 6}
DRAWS = 48  # one of four pairs of factors is missed in 4 of a million runs
NAMES = "lr", "weight_decay"
TRAINED = "weights", "buffers", "state"


@dataclass
class Member:
    network: nn.Module
    optimizer: torch.optim.Optimizer
    hyperparameters: dict
    value: float = math.nan


def _member(make, seed, steps=4):
    """A network with batch norm, trained; two parameter groups."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    rates = {"lr": 0.01 * (1 + seed), "weight_decay": 1e-3 / (1 + seed)}
    groups = [{"params": list(network[0].parameters())}, {"params": list(network[1:].parameters())}]
    member = Member(network, make(groups, **rates), rates)
    _train(member, BATCHES[:steps] + seed)
    return member


def _train(member, batches):
    for x in batches:
        loss = F.cross_entropy(member.network(x), (x[:, :3] * x[:, 3:]).argmax(1))
        member.optimizer.zero_grad()
        loss.backward()
        member.optimizer.step()


def _tensors(member):
    """{what: the tensors that a member holds}."""
    network, state = member.network, member.optimizer.state
    return {
        "weights": list(network.parameters()),
        "buffers": list(network.buffers()),
        "state": [v for p in network.parameters() for _, v in sorted(state.get(p, {}).items()) if torch.is_tensor(v)],
    }


def _copied(member):
    """What a member is: copies of its tensors, its hyperparameters as noted, and those of each parameter group."""
    notes = [member.hyperparameters, *member.optimizer.param_groups]
    noted, *rates = [
        torch.tensor([float(one.get(name, math.nan)) for name in NAMES], dtype=torch.float64) for one in notes
    ]
    found = {what: [one.detach().clone() for one in some] for what, some in _tensors(member).items()}
    return found | {"noted": [noted], "rates": rates}


def _close(some, others):
    same = [a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-9) for a, b in zip(some, others)]
    return all(same) and len(some) == len(others)


def _differ(seen, due, parts=(*TRAINED, "noted", "rates")):
    """The parts in which two members differ."""
    return [part for part in parts if not _close(seen[part], due[part])]


def _linked(member):
    """Whether the optimizer trains the network's own parameters."""
    trained = {id(p) for group in member.optimizer.param_groups for p in group["params"]}
    return trained == set(map(id, member.network.parameters()))


def _shared(members):
    """The parts that two members hold together."""
    found, holder = set(), {}
    for k, member in enumerate(members):
        ids = {what: [one.untyped_storage().data_ptr() for one in some] for what, some in _tensors(member).items()}
        ids |= {"noted": [id(member.hyperparameters)], "rates": list(map(id, member.optimizer.param_groups))}
        found |= {what for what, some in ids.items() for one in some if holder.setdefault((what, one), k) != k}
    return [what for what in SHARED if what in found]


def observe_exploit(exploit):
    """For each optimizer: what differs from the better one, what is shared, and what differs four steps later."""
    for name, make in OPTIMIZERS.items():
        member, better = _member(make, 0), _member(make, 1)
        before, alone = _copied(better), copy.deepcopy(better)
        exploit(member, better)
        yield {(name, "better"): _differ(_copied(better), before), (name, "linked"): _linked(member)}
        yield {(name, "copied"): _differ(_copied(member), before), (name, "shared"): _shared([member, better])}
        for one in (member, alone):
            for group in one.optimizer.param_groups:
                group["lr"] = 0.07
            _train(one, BATCHES[4:8])
        yield {(name, "later"): _differ(_copied(member), _copied(alone), TRAINED)}


SHARED = {"weights": "network", "buffers": "network", "state": "state", "rates": "state", "noted": "noted"}


def _looks(name):
    """Looks at exploit with one optimizer."""

    def say(seen, _):
        return {"where": name, "expected": "", "got": "", "what": ", ".join(seen) if isinstance(seen, list) else ""}

    yield Look(
        f"exploit, {name}: everything is copied from the better member",
        (name, "better"),
        [],
        "better-changed",
        fields=say,
    )
    yield Look("", (name, "linked"), True, "optimizer-elsewhere", fields=say)
    yield Look("", (name, "copied"), [], lambda seen, _: f"{seen[0]}-not-copied", fields=say)
    yield Look(
        "the two members share nothing", (name, "shared"), [], lambda seen, _: f"{SHARED[seen[0]]}-shared", fields=say
    )
    yield Look("it then trains exactly as the better one does", (name, "later"), [], "trains-otherwise", fields=say)


def observe_explore(explore):
    """Over many draws: factors of the values noted (DRAWS, 2), which groups have them, what else has changed."""
    start = _member(OPTIMIZERS["AdamW"], 2)
    before = _copied(start)

    def draw(seed):
        member = copy.deepcopy(start)
        explore(member, np.random.default_rng(seed))
        return _copied(member)

    drawn = [draw(seed) for seed in range(DRAWS)]
    yield {"kept": sorted({part for one in drawn for part in _differ(one, before, TRAINED)})}
    factors = torch.stack([one["noted"][0] / before["noted"][0] for one in drawn])
    in_optimizer = torch.stack(
        [torch.stack(one["rates"]) / before["noted"][0] for one in drawn]
    )  # (DRAWS, 2 groups, 2)
    yield {"factors": factors, "groups": in_optimizer - factors[:, None]}
    yield {"pairs": len({tuple(pair) for pair in factors.round(decimals=6).tolist()})}
    yield {"different": int((factors[:, 0] - factors[:, 1]).abs().gt(1e-6).sum())}
    yield {"again": all(_close(draw(seed)["noted"], drawn[seed]["noted"]) for seed in range(8))}
    start.hyperparameters["eps"] = 1e-8
    member = copy.deepcopy(start)
    explore(member, np.random.default_rng(0))
    found = [member.hyperparameters, *member.optimizer.param_groups]
    yield {"eps": torch.tensor([one["eps"] / 1e-8 for one in found], dtype=torch.float64)}


def _off(seen):
    """Which factors are none of the two."""
    return ~((seen[..., None] - FACTORS).abs().amin(-1) < 1e-6)


def _none_off(seen, _):
    return not _off(seen).any()


def _first_off(seen, _):
    return {"got": f"{seen[_off(seen)][0]:.4g}"}


def _wrong_factor(seen, _):
    return "not-noted" if ((seen - 1).abs() < 1e-9).all() else "wrong-factor"


def _zero(seen, _):
    return bool((seen.abs() < 1e-6).all())


def _other_rates(seen, _):
    """The hint where the optimizer's groups have other values than the note."""
    if (seen.abs() > 0.4).any():  # 1.25 - 0.8
        return "drawn-for-optimizer"
    wrong = seen.abs().amax((0, 2)) > 1e-6
    return "one-group" if wrong.sum() == 1 else "not-in-optimizer"


EXPLORE = [
    Look("explore: the weights and the optimizer's state are unchanged", "kept", [], "explore-resets", fields=lambda seen, _: {"what": ", ".join(seen)}),
    Look("each hyperparameter is multiplied by 0.8 or 1.25", "factors", "0.8 or 1.25", _wrong_factor,
         holds=_none_off, fields=_first_off),
    Look("in all param_groups of the optimizer", "groups", "as noted", _other_rates, holds=_zero, fields={"got": "other values"}),
    Look("one draw for each, with the given generator", "different", 0, "one-factor", holds=above, fields=silent),
    Look("", "pairs", 4, "factor-not-drawn", fields={"n": DRAWS}),
    Look("", "again", True, "rng-ignored", fields={"name": "explore"}),
    Look("a hyperparameter with another name", "eps", "0.8 or 1.25", "other-name", holds=_none_off, fields=_first_off),
]  # fmt: skip


def observe_evolve(evolve):
    """Nine members, eight times from the same start; then three."""
    start = [_member(OPTIMIZERS["AdamW"], k, steps=2) for k in range(len(VALUES))]
    for member, value in zip(start, VALUES):
        member.value = value
    before = [_copied(member) for member in start]

    def run(seed, members):
        members = copy.deepcopy(members)
        given = list(members)
        pairs = evolve(members, np.random.default_rng(seed))
        return given, _same(members, given), _pairs(pairs)

    given, places, pairs = run(0, start)
    after = [_copied(member) for member in given]
    yield {"places": places, "changed": {k for k in range(len(given)) if _differ(after[k], before[k])}}
    yield {"pairs": "pairs" if isinstance(pairs, list) else pairs}
    drawn = [run(seed, start)[2] for seed in range(8)]
    yield {"poor": sorted(poor for poor, _ in pairs), "good": {good for found in [pairs, *drawn] for _, good in found}}
    yield {"copied": sorted({part for poor, good in pairs for part in _differ(after[poor], before[good], TRAINED)})}
    yield {"factors": torch.stack([after[poor]["noted"][0] / before[good]["noted"][0] for poor, good in pairs])}
    yield {"rates": all(_close(after[poor]["noted"] * 2, after[poor]["rates"]) for poor, _ in pairs)}
    yield {"shared": _shared(given)}
    yield {
        "again": all(run(seed, start)[2] == drawn[seed] for seed in range(4)),
        "drawn": max(len({dict(found)[poor] for found in drawn}) for poor in WORST),
    }
    yield {"few": run(0, [start[k] for k in (1, 2, 4)])[2]}
    many = [copy.deepcopy(start[k % len(start)]) for k in range(len(FIFTEEN))]
    for member, value in zip(many, FIFTEEN):
        member.value = value
    drawn = [run(seed, many)[2] for seed in range(8)]
    yield {
        "three": sorted(poor for poor, _ in drawn[0]),
        "best of fifteen": {good for found in drawn for _, good in found},
        "each": max(len({good for _, good in found}) for found in drawn),
    }


def _same(members, given):
    """What became of a list: a word."""
    if all(a is b for a, b in zip(members, given)):
        return "as before"
    return "sorted" if {*map(id, members)} == {*map(id, given)} else "replaced"


def _pairs(returned):
    """As a list of pairs of ints; a word where they are not, None where there is nothing."""
    try:
        return returned if returned is None else [(int(poor), int(good)) for poor, good in returned]
    except (TypeError, ValueError):
        return "something else"


def _changed(seen, _):
    """The hint where others than the lowest quarter have changed."""
    if not seen:
        return "nothing-evolved"
    return "best-changed" if seen & BEST else "nan-not-worst" if seen == WORST_NUMBERS else "quarter-wrong"


def _places(seen, due):
    return {"got": f"places {sorted(seen)}", "expected": f"places {sorted(due)}"}


def _what_is_shared(seen, _):
    return f"{SHARED[seen[0]]}-shared"


EVOLVE = [
    Look("evolve: the lowest quarter changes, the others don't", "places", "as before", lambda seen, _: "places-changed" if seen == "sorted" else "member-replaced"),
    Look("", "changed", WORST, _changed, fields=_places),
    Look("each member of it copies one of the highest quarter, then explores", "pairs", "pairs", "pairs-form"),
    Look("", "poor", sorted(WORST), "pairs-wrong"),
    Look("", "good", BEST, "not-from-best", holds=lambda seen, due: seen <= due, fields=_places),
    Look("", "copied", [], "evolve-not-copied", fields=lambda seen, _: {"what": ", ".join(seen)}),
    Look("", "factors", "0.8 or 1.25", "evolve-not-explored", holds=_none_off, fields=_first_off),
    Look("", "rates", True, "evolve-not-explored"),
    Look("", "shared", [], _what_is_shared, fields={"where": "in evolve"}),
    Look("drawn with the given generator", "drawn", 1, "not-drawn", holds=above, fields=silent),
    Look("", "again", True, "rng-ignored", fields={"name": "evolve"}),
    Look("with three members, too", "few", [(1, 0)], "at-least-one"),
    Look("and of fifteen", "three", [1, 5, 9], "quarter-rounded"),
    Look("", "each", 1, "one-for-all", holds=above, fields=silent),
    Look("", "best of fifteen", BEST_OF_FIFTEEN, "not-from-best", fields=_places),
]  # fmt: skip


def balise_5(exploit, explore, evolve):
    yield from judged([look for name in OPTIMIZERS for look in _looks(name)], observe_exploit, exploit)
    yield from judged(EXPLORE, observe_explore, explore)
    yield from judged(EVOLVE, observe_evolve, evolve)

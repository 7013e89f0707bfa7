"""Balise 2: what DeepSpeed's engine does with a configuration, on two ranks: sizes, shards, messages, rates, weights."""

import json
from contextlib import closing

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import frameworks, measure
from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, tried, within
from dlojz_tp.judging.probes.ranks import world_after_world

STEPS, RANKS, BUCKET = 5, 2, 1660
USUAL = {"batch": 4, "micro": 2, "stage": 0, "precision": "float32", "max_norm": None, "rate": 0.5, "warmup": 2}
USUAL |= {"total": 6, "offload": False, "bucket": BUCKET}
PLANS = {
    "stage 0": USUAL,
    "stage 1, clipped, offloaded": USUAL
    | {"stage": 1, "batch": 12, "micro": 3, "max_norm": 0.05, "warmup": 3, "rate": 0.2, "offload": True},
    "stage 3": USUAL | {"stage": 3, "batch": 8, "total": 4},
    "stage 2 in bfloat16, offloaded": USUAL
    | {"stage": 2, "batch": 12, "precision": "bfloat16", "max_norm": 2.0, "offload": True},
}


def net():
    """Always the same weights; three layers, none of which fills a bucket, no two of which fit in; a tensor of 2 numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


NUMBERS = [p.numel() for p in net().parameters()]
ALL = sum(NUMBERS)


def samples(plan, step):
    return torch.randn(plan["batch"], 40, generator=torch.Generator().manual_seed(step))


def loss_of(model, x):
    return 6 * model(x).float().square().mean()  # gradients with a norm above 1: clipping at 1 shows


def rate_of(plan, step):
    """DeepSpeed's schedule begins after the first step."""
    k = max(0, step - 1)
    up, down = k / plan["warmup"], (plan["total"] - k) / max(1, plan["total"] - plan["warmup"])
    return plan["rate"] * (up if k < plan["warmup"] else max(0.0, down))


def trained(plan):
    """The truth: one process, whole batches, SGD with momentum. Flat weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate_of(plan, step)
        optimizer.zero_grad()
        loss_of(model, samples(plan, step)).backward()
        if plan["max_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), plan["max_norm"])
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def observe_rank(deepspeed_config):
    """On a rank: an engine of each plan, one after the other."""
    torch.set_num_threads(1)
    deepspeed = frameworks.quiet_deepspeed()
    for plan in PLANS.values():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        config = deepspeed_config(dict(plan))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        yield run(deepspeed, engine, plan)


def run(deepspeed, engine, plan):
    """What an engine does in some steps of a plan."""
    forwards, rates, sent = plan["batch"] // plan["micro"] // RANKS, [], []
    parameters = [*engine.module.parameters()]
    for step in range(STEPS):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        for x in samples(plan, step).chunk(RANKS)[dist.get_rank()].split(plan["micro"]):
            with measure.Communications() as log:
                engine.backward(loss_of(engine, x.to(parameters[0].dtype)))
                engine.step()
            sent.append([(one["name"], one["bytes"] // parameters[0].element_size()) for one in log.entries()])
    last = sent[-forwards:]
    reduced = [[n for name, n in one if name in ("all_reduce", "reduce_scatter", "reduce") and n > 8] for one in last]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]
    whole = sum(p.numel() for p in parameters)  # nothing is left of what stage 3 has cut
    with deepspeed.zero.GatheredParameters(parameters, enabled=whole < ALL):
        weights = torch.cat([p.detach().float().flatten() for p in parameters])
    return {
        "sizes": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()],
        "steps": engine.global_steps,
        "computes": str(parameters[0].dtype).removeprefix("torch."),
        "states": round(sum(t.numel() for t in states) / ALL, 1),
        "states in": sorted({str(t.dtype).removeprefix("torch.") for t in states}),
        "cuts": hasattr(parameters[0], "ds_id"),
        "whole": whole,
        "sends": [len(one) > 0 for one in reduced],
        "largest": max(n for one in reduced for n in one) if any(reduced) else 0,
        "offload": any(bool(getattr(engine.optimizer, name, False)) for name in ("cpu_offload", "offload_optimizer")),
        "rates": torch.tensor(rates, dtype=torch.float64),
        "weights": weights,
    }  # fmt: skip


def each(value):
    return [value] * RANKS


def in_buckets(seen, due):
    return all(due[0] < largest <= due[1] for largest in seen)


def other_bucket(seen, due):
    return "bucket-forgotten" if max(seen) > due[1] else "bucket-unfilled"


def looks(plan):
    """What an engine of this plan does, on each rank alike."""
    stage, forwards = plan["stage"], plan["batch"] // plan["micro"] // RANKS
    sizes = [plan["batch"], plan["micro"], forwards]
    half = plan["precision"] == "bfloat16"
    first = lambda seen, due: {"expected": due[0], "got": seen[0]}  # noqa: E731
    yield Look("batch, micro-batch and accumulation", "sizes", each(sizes), "wrong-sizes", fields=first)
    yield Look("", "steps", each(STEPS), "wrong-sizes", fields=first)
    yield Look("the precision", "computes", each(plan["precision"]), _dtype, fields=first)
    yield Look("", "states in", each(["float32"]), "wrong-precision", fields=first)
    said = lambda seen, due: {"expected": f"{due[0]:.0%}", "got": f"{seen[0]:.0%}", "stage": stage}  # noqa: E731
    yield Look(
        "the share of the optimizer's states that a rank holds",
        "states",
        each(0.5 if stage else 1.0),
        "wrong-stage",
        fields=said,
    )
    yield Look(
        "the share of the weights that a rank holds between steps",
        "cuts",
        each(stage == 3),
        "wrong-stage",
        fields=lambda seen, due: silent(seen, due) | {"stage": stage},
    )
    counted = lambda seen, due: {"expected": due[0], "got": f"{seen[0]:,} of {ALL:,}"}  # noqa: E731
    yield Look("", "whole", each(0 if stage == 3 else ALL), "small-kept-whole", fields=counted)
    yield Look(
        "when gradients are sent",
        "sends",
        each([stage > 1] * (forwards - 1) + [True]),
        "wrong-stage",
        fields=lambda seen, due: silent(seen, due) | {"stage": stage},
    )
    if stage:
        yield Look(
            "the numbers of a message",
            "largest",
            (max(NUMBERS), BUCKET),  # a message of one tensor alone leaves a bucket empty
            other_bucket,
            holds=in_buckets,
            fields=lambda seen, due: {"expected": "above {:,}, at most {:,}".format(*due), "got": f"{max(seen):,}"},
        )
    yield Look(
        "where the optimizer steps",
        "offload",
        each(plan["offload"]),
        "not-offloaded" if plan["offload"] else "offloaded-unasked",
        fields=silent,
    )
    rates = torch.tensor([rate_of(plan, step) for step in range(STEPS)], dtype=torch.float64)
    yield Value(
        "the learning rate of each step",
        "rates",
        each(rates),
        "wrong-rates",
        fields=lambda seen, due: {"expected": numbers(due[0]), "got": numbers(seen[0])},
    )
    if not half:  # a bfloat16 step is another one
        yield Value("the weights after five steps", "weights", each(trained(plan)), "wrong-weights", holds=within(1e-4))  # fmt: skip


def _dtype(seen, due):
    return "float16" if "float16" in seen else "wrong-precision"


def numbers(row):
    return ", ".join(f"{number:.4g}" for number in row.tolist())


def observe_form(deepspeed_config):
    found = [tried(deepspeed_config, dict(plan)) for plan in PLANS.values()]
    said = [tried(json.dumps, one) for one in found]
    kinds = {type(one).__name__ for one in found if not isinstance(one, dict)}
    raised = [one for one in found if isinstance(one, str)]
    yield {"kind": None if found[0] is None else raised[0] if raised else "dict" if not kinds else kinds.pop()}
    yield {"in json": all(not one.startswith("TypeError") for one in said)}
    zero = [one.get("zero_optimization") for one in found]
    moved = [one["offload_param"] for one in zero if isinstance(one, dict) and one.get("offload_param")]
    yield {"weights moved": any(not isinstance(one, dict) or one.get("device", "none") != "none" for one in moved)}


FORM = [
    Look("a dictionary that JSON can hold", "kind", "dict", "not-a-dictionary"),
    Look("", "in json", True, "not-json"),
    Look("", "weights moved", False, "weights-offloaded"),
]
KNOWN = [
    ("untested ZeRO Optimizer", "our-keys-forgotten"),
    ("ZeRO-Offload with a client provided", "our-keys-forgotten"),
    ("Check batch related parameters", "sizes-contradict"),
    ("has to be greater than 0", "sizes-contradict"),
    ("needs to be provided", "sizes-missing"),
    ("validation error", "key-unknown"),
    ("_scheduler_from_config", "schedule-refused"),
    ("must be a mapping", "no-dictionary-there"),
    (("not supported between", "gradient_clipping"), "clipping-no-number"),
    ("Type fp16 is not supported", "float16"),
]


def balise_2(deepspeed_config):
    frameworks.need("deepspeed")
    yield from judged(FORM, observe_form, deepspeed_config)
    yield "DeepSpeed takes it"
    worlds = world_after_world(observe_rank, deepspeed_config, known=KNOWN, sizes=(RANKS,), timeout=25)
    with closing(worlds):
        for (name, plan), (_, ranks) in zip(PLANS.items(), worlds):
            yield from judged([*looks(plan)], lambda ranks=ranks: ranks, at=name, where=name)

"""Balise 3: the engine's loop against one process, and a checkpoint of two ranks that goes on on one."""

import tempfile
from contextlib import closing

import torch
import torch.distributed as dist

from dlojz_tp import frameworks
from dlojz_tp.checking.looks import Look, Value, form, judged, silent, within
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.probes.ranks import hung, world_after_world

SIZES = LlamaConfig(40, width=16, heads=2, layers=1, max_length=8)
BATCH, MICRO, STEPS, SAVED, RANKS = 12, 2, 5, 3, 2
LOOP = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.0}
LOOP |= {"zero_allow_untested_optimizer": True}
STAGES = {"stage 0": 0, "stage 2": 2, "stage 3": 3}
KEPT = LOOP | {
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 6, "warmup_type": "linear"}},
}


def net():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Llama(SIZES)


def samples(step):
    return torch.randint(40, (BATCH, 9), generator=torch.Generator().manual_seed(step))


def pieces(step):
    n, me = dist.get_world_size(), dist.get_rank()
    return samples(step).chunk(n)[me].split(MICRO)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def trained(make, steps, rates=None, max_norm=None):
    """The truth: one process and whole batches. Flat weights, and the gradient-free loss of each rank and step."""
    model = net()
    optimizer, losses = make(model), []
    for step in range(steps):
        with torch.no_grad():
            losses.append([language_loss(model, share) for share in samples(step).chunk(RANKS)])
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        language_loss(model, samples(step)).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flat(model), torch.tensor(losses)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gathered(deepspeed, engine, cut):
    with deepspeed.zero.GatheredParameters([*engine.module.parameters()], enabled=cut):
        return flat(engine.module).clone()


def our_step(engine, step):
    for tokens in pieces(step):
        engine.backward(language_loss(engine, tokens))
        engine.step()


def first_rank(engine_step, save, resume, folder):
    """Two ranks: the loop at three stages, then some steps of stage 3, saved."""
    torch.set_num_threads(1)
    deepspeed = frameworks.quiet_deepspeed()
    for stage in STAGES.values():
        config = LOOP | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        model = net()
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        losses = [engine_step(engine, pieces(step)) for step in range(SAVED)]
        with_graph = isinstance(losses[0], torch.Tensor) and losses[0].requires_grad
        numbers = [float(loss) if form(loss) in ("float32 ()", "float") else None for loss in losses]
        yield {
            "forms": "one number" if None not in numbers else form(losses[0]),
            "graph": with_graph,
            "steps": engine.global_steps,
            "losses": torch.tensor([number or 0.0 for number in numbers]),
            "weights": gathered(deepspeed, engine, stage == 3),
        }
    model = net()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=KEPT)
    for step in range(SAVED):
        our_step(engine, step)
    save(engine, folder)
    yield {"saved": True}


def second_rank(engine_step, save, resume, folder):
    """One rank: another model, resumed."""
    torch.set_num_threads(1)
    deepspeed = frameworks.quiet_deepspeed()
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    config = {**KEPT, "zero_optimization": dict(KEPT["zero_optimization"])}
    engine = resume(model, adamw(model), config, folder)
    kind = isinstance(engine, deepspeed.DeepSpeedEngine)
    yield {"engine": None if engine is None else kind or type(engine).__name__, "config": config == KEPT}
    yield {"done": engine.global_steps, "found": gathered(deepspeed, engine, True)}
    rates = []
    for step in range(SAVED, STEPS):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        our_step(engine, step)
    yield {"rates": torch.tensor(rates), "weights": gathered(deepspeed, engine, True)}


def loop_looks():
    weights, losses = trained(sgd, SAVED)
    first = lambda seen, due: {"expected": due[0], "got": seen[0]}  # noqa: E731
    yield Look("a number for each step", "forms", ["one number"] * RANKS, "not-a-number", fields=first)
    yield Look("", "graph", [False] * RANKS, "keeps-graph", fields=silent)
    yield Look(
        "the engine's steps",
        "steps",
        [SAVED] * RANKS,
        "wrong-steps",
        fields=lambda seen, due: first(seen, due) | {"forwards": BATCH // MICRO // RANKS},
    )
    yield Value(
        "weights of one process with whole batches", "weights", [weights] * RANKS, "wrong-weights", within(1e-4), first
    )
    yield Value("losses of each rank", "losses", [*losses.T], "wrong-losses", within(1e-3), first)  # fmt: skip


def resumed_looks():
    rates = [0.1 * max(0, step - 1) / 6 for step in range(STEPS)]
    saved, due = (trained(adamw, steps, rates, 0.05)[0] for steps in (SAVED, STEPS))
    yield Look(
        "on one rank: an engine comes back", "engine", [True], "no-engine", fields=lambda seen, due: {"got": seen[0]}
    )
    yield Look("", "config", [True], "config-changed", fields=silent)
    yield Look("with the weights that were saved", "found", [saved], "not-loaded", within(1e-3), silent)
    yield Look(
        "the number of steps",
        "done",
        [SAVED],
        "steps-lost",
        fields=lambda seen, due: {"expected": due[0], "got": seen[0]},
    )
    yield Value(
        "the learning rates that come next",
        "rates",
        [torch.tensor(rates[SAVED:])],
        "rates-lost",
        fields=lambda seen, due: {"expected": due[0].tolist(), "got": seen[0].tolist()},
    )
    yield Value("and ends where an uninterrupted run does", "weights", [due], "states-lost", within(1e-3), silent)  # fmt: skip


KNOWN = [
    (hung, "waits"),
    ("Direct calls to tensor.backward()", "own-backward"),
    ("DP world size", "not-universal"),
    ("in load_checkpoint", "not-found"),
    ("AssertionError", "not-found"),
]


def balise_3(engine_step, save, resume):
    frameworks.need("deepspeed")
    answers = engine_step, save, resume
    with tempfile.TemporaryDirectory(prefix="dlojz-engine-") as folder:
        options = {"known": KNOWN, "data": str, "timeout": 25}
        yield "the engine's loop"
        with closing(world_after_world(first_rank, *answers, folder, sizes=(RANKS,), **options)) as worlds:
            for name in STAGES:
                _, ranks = next(worlds)
                yield from judged([*loop_looks()], lambda ranks=ranks: ranks, at=name, where=name)
            yield "it is saved"
            for _ in worlds:
                pass
        yield "and loaded on another number of ranks"
        with closing(world_after_world(second_rank, *answers, folder, sizes=(1,), **options)) as worlds:
            yield from judged([*resumed_looks()], lambda: _joined(ranks[0] for _, ranks in worlds))


def _joined(parts):
    """The dictionaries of the one rank in one; those of a rank that ended early are not asked for."""
    found = {}
    for one in parts:
        found |= one
        if one.get("engine", True) is not True:
            break
    return [found]

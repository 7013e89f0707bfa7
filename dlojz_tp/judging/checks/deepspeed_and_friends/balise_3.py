"""Balise 3: the engine's loop against one process, and a checkpoint of two ranks that goes on on three."""

import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import frameworks
from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, within
from dlojz_tp.judging.probes.late_rank import Waits
from dlojz_tp.judging.probes.ranks import hung, world_after_world
from dlojz_tp.models import Llama, LlamaConfig, language_loss

SIZES = LlamaConfig(40, width=16, heads=2, layers=1, max_length=8)
BATCH, MICRO, STEPS, SAVED, RANKS, LATER = 12, 2, 5, 3, 2, 3
LOOP = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.0}
LOOP |= {"zero_allow_untested_optimizer": True}
STAGES = {"stage 0": (0, 2), "stage 2": (2, 3), "stage 3": (3, 2)}  # and the samples of a micro-batch
PATIENCE = 5  # seconds for which a rank comes late if nobody is seen to wait for it
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


def pieces(step, micro=MICRO):
    n, me = dist.get_world_size(), dist.get_rank()
    return samples(step).chunk(n)[me].split(micro)


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
    for stage, micro in STAGES.values():
        config = LOOP | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config["train_micro_batch_size_per_gpu"] = micro
        model = net()
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        losses = [engine_step(engine, pieces(step, micro)) for step in range(SAVED)]
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
    with Waits("save") as waits, late_conversion(waits) as made:
        save(engine, folder)
        there = files(folder)
        waits.tell("back")
    yield {"made": len(made), "there": there}


@contextmanager
def late_conversion(waits):
    """Inside, a rank makes the universal checkpoint when the others wait for it: who does not is back by then."""
    import tqdm
    from deepspeed.checkpoint import ds_to_universal

    tqdm.tqdm.monitor_interval = 0  # with a thread of its own that sleeps, a deadlock is not told early
    made, main = [], ds_to_universal.main

    def late(options):
        made.append(options)
        waits.tell("converts")
        waits.others_wait(limit=PATIENCE, besides=("back", "converts"))
        if dist.distributed_c10d._get_default_store().add("conversions", 1) == 1:  # two at once would break each other
            main(options)

    with replaced(ds_to_universal, "main", late):
        yield made


def files(folder):
    """The files of the universal checkpoint, with their sizes."""
    return sorted((str(file), file.stat().st_size) for file in Path(folder, "universal").rglob("*.pt"))


def second_rank(engine_step, save, resume, folder):
    """Three ranks: another model, resumed."""
    torch.set_num_threads(1)
    deepspeed = frameworks.quiet_deepspeed()
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    config = {**KEPT, "zero_optimization": dict(KEPT["zero_optimization"])}
    try:
        engine = resume(model, adamw(model), config, folder)
    except AssertionError:  # no file for this rank; two ranks wrote none for the third, and the others say why
        time.sleep(PATIENCE if dist.get_rank() >= RANKS else 0)
        raise
    kind = isinstance(engine, deepspeed.DeepSpeedEngine)
    yield {"engine": None if engine is None else kind or type(engine).__name__, "config": config == KEPT}
    yield {"done": engine.global_steps, "found": gathered(deepspeed, engine, True)}
    rates = []
    for step in range(SAVED, STEPS):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        our_step(engine, step)
    yield {"rates": torch.tensor(rates), "weights": gathered(deepspeed, engine, True)}


def loop_looks(micro):
    weights, losses = trained(sgd, SAVED)
    first = lambda seen, due: {"expected": due[0], "got": seen[0]}  # noqa: E731
    yield Look("a number for each step", "forms", ["one number"] * RANKS, "not-a-number", fields=first)
    yield Look("", "graph", [False] * RANKS, "keeps-graph", fields=silent)
    yield Look(
        "the engine's steps",
        "steps",
        [SAVED] * RANKS,
        "wrong-steps",
        fields=lambda seen, due: first(seen, due) | {"forwards": BATCH // micro // RANKS},
    )
    yield Value(
        "weights of one process with whole batches",
        "weights",
        [weights] * RANKS,
        "wrong-weights",
        holds=within(1e-4),
        fields=first,
    )
    yield Value("losses of each rank", "losses", [*losses.T], "wrong-losses", holds=within(1e-3), fields=first)  # fmt: skip


def times_made(ranks):
    return sum(one["made"] for one in ranks)


def saved_looks(there):
    yield Look(
        "one rank makes the universal checkpoint",
        times_made,
        1,
        "converted-by-all",
        holds=at_most,
        fields=lambda seen, due: silent(seen, due) | {"n": seen},
    )
    yield Look(
        "and all files are there when a rank returns",
        "there",
        [there] * RANKS,
        "returns-early",
        fields=lambda seen, due: (
            silent(seen, due)
            | {"rank": (rank := [one == there for one in seen].index(False)), "n": len(seen[rank]), "all": len(there)}
        ),
    )


def resumed_looks():
    each = lambda value: [value] * LATER  # noqa: E731
    rates = [0.1 * max(0, step - 1) / 6 for step in range(STEPS)]
    saved, due = (trained(adamw, steps, rates, 0.05)[0] for steps in (SAVED, STEPS))
    yield Look(
        f"on {LATER} ranks: an engine comes back",
        "engine",
        each(True),
        "no-engine",
        fields=lambda seen, due: {"got": seen[0]},
    )
    yield Look("", "config", each(True), "config-changed", fields=silent)
    yield Look(
        "with the weights that were saved", "found", each(saved), "not-loaded", holds=within(1e-3), fields=silent
    )
    yield Look(
        "the number of steps",
        "done",
        each(SAVED),
        "steps-lost",
        fields=lambda seen, due: {"expected": due[0], "got": seen[0]},
    )
    yield Value(
        "the learning rates that come next",
        "rates",
        each(torch.tensor(rates[SAVED:])),
        "rates-lost",
        fields=lambda seen, due: {"expected": due[0].tolist(), "got": seen[0].tolist()},
    )
    yield Value("and ends where an uninterrupted run does", "weights", each(due), "states-lost", holds=within(1e-3), fields=silent)  # fmt: skip


KNOWN = [
    (hung, "waits"),
    ("Direct calls to tensor.backward()", "own-backward"),
    ("DP world size", "not-universal"),
    ("in load_checkpoint", "not-found"),
    ("--deepspeed_config", "config-lost"),
    ("needs to be provided", "config-lost"),
]
NOT_FOUND = ("AssertionError", "not-found")  # DeepSpeed says no more; before anything is loaded it means something else


def balise_3(engine_step, save, resume):
    frameworks.need("deepspeed")
    answers = engine_step, save, resume
    with tempfile.TemporaryDirectory(prefix="dlojz-engine-") as folder:
        options = {"known": KNOWN, "data": str, "timeout": 25}
        yield "the engine's loop"
        with closing(world_after_world(first_rank, *answers, folder, sizes=(RANKS,), **options)) as worlds:
            for name, (_, micro) in STAGES.items():
                _, ranks = next(worlds)
                yield from judged([*loop_looks(micro)], lambda ranks=ranks: ranks, at=name, where=name)
            yield "it is saved"
            parts = [
                ranks for _, ranks in worlds
            ]  # to the end: who comes back early, does so before the files are there
            yield from judged([*saved_looks(files(folder))], lambda: parts[0])
        yield "and loaded on another number of ranks"
        options["known"] = [*KNOWN, NOT_FOUND]
        with closing(world_after_world(second_rank, *answers, folder, sizes=(LATER,), **options)) as worlds:
            yield from judged([*resumed_looks()], lambda: _joined(ranks for _, ranks in worlds))


def _joined(parts):
    """The dictionaries of each rank in one; those of ranks that ended early are not asked for."""
    found = [{} for _ in range(LATER)]
    for ranks in parts:
        for known, new in zip(found, ranks):
            known |= new
        if any(one.get("engine", True) is not True for one in ranks):
            break
    return found

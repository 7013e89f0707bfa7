"""Balise 9: shards within a node, replicas over nodes."""

import functools
import operator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, nothing
from dlojz_tp.judging.checks.fsdp.common import (
    claimed,
    count,
    first_index,
    gathers_look,
    judged_by_worlds,
    of_each,
    on_each,
)
from dlojz_tp.judging.checks.fsdp.watched import Watch, whole_blocks
from dlojz_tp.judging.probes.gpus import on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank
from dlojz_tp.models import Llama, LlamaConfig, language_loss

CONFIG = LlamaConfig(vocab_size=24, width=12, heads=2, kv_heads=1, layers=2, max_length=8, ffn_width=20)
REPLICAS = {4: (2, 1), 3: (3,), 2: (2, 1), 1: (1,)}
UNEVEN = {4: 3, 3: 2, 2: 3, 1: 2}  # no such mesh
RATE = 0.5


def _model():
    torch.manual_seed(3)
    model = Llama(CONFIG).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.01 * torch.randn_like(p)  # no two rows are the same
    return model


def _tokens(size):
    return torch.randint(24, (2 * size, 6), generator=torch.Generator().manual_seed(size))


def _hybrid(shard_hybrid):
    """On a rank: for each number of replicas which rows of each parameter it holds, and what a step does."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for replicas in REPLICAS[size]:
        model = _model()
        wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
        given = model
        seen = found[replicas] = {"kind": "nothing", "same": False, "error": ""}
        try:
            model = shard_hybrid(model, replicas)
            seen |= {"kind": type(model).__name__, "same": model is given}
        except (IndexError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
            seen["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        everywhere = torch.tensor(int(seen["same"]))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if not everywhere:
            continue
        seen["units"] = sum(isinstance(part, FSDPModule) for part in [model, *model.blocks])
        seen["whole"] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if seen["units"] < CONFIG.layers + 1 or seen["whole"]:
            continue
        seen["rows"] = {name: _rows(p, wholes[name]) for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with Watch() as watch:
            loss = language_loss(model, _tokens(size)[rank::size])
            seen |= {"gathers": count(watch.take(), "all_gather"), "kept": whole_blocks(model)}
        loss.backward()
        optimizer.step()
        seen["shards"] = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    try:
        found["refused"] = f"a {type(shard_hybrid(_model(), UNEVEN[size])).__name__}"
    except ValueError:
        found["refused"] = True
    except (RuntimeError, ZeroDivisionError, IndexError, AssertionError) as error:
        found["refused"] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
    return found


def _on_gpu(_, shard_hybrid):
    """On a rank: the kinds of device that its shards are on."""
    model = shard_hybrid(_model().to(launch.device()), 1)
    return sorted({p.to_local().device.type for p in model.parameters()})


def _rows(p, whole):
    """(first row, rows) of the part that this rank holds: found by its numbers, not by what the mesh says of itself."""
    part = p.to_local()
    if not len(part):
        return len(whole), 0
    for start in range(len(whole) - len(part) + 1):
        if close(part, whole[start : start + len(part)], 1e-12):
            return start, len(part)
    return None


def _part(size, replicas, rank, rows):
    """(first row, rows) that a rank should hold: parts of equal length, the last ones may be shorter."""
    shards = size // replicas
    length = -(-rows // shards)
    first = min(rows, rank % shards * length)
    return first, min(length, rows - first)


def _looks(size):
    """In a world of this size: at each number of replicas, who holds what, then a step; and at what is refused."""
    meshes = REPLICAS[size]
    refused = each_rank("a number of replicas that doesn't divide the ranks is refused", "refused", True,
                        "uneven-replicas",
                        fields=lambda *_: {"expected": "ValueError", "replicas": UNEVEN[size]})  # fmt: skip
    held = [look for replicas in meshes for look in _held_looks(size, replicas)]
    return [*claimed(HELD, held), *claimed(STEP, [_step_look(size, replicas) for replicas in meshes]), refused]


HELD = "each block and the root are sharded; neighbours hold different parts, replicas the same"
STEP = "one step equals a step of one process on the whole batch"


def _held_looks(size, replicas):
    about, shards, units = {"replicas": replicas, "size": size}, size // replicas, CONFIG.layers + 1

    def of(key):
        return of_each(lambda found: found[replicas][key])

    def another(found):
        kind = found[replicas]["kind"]
        slug = "nothing-returned" if kind == "NoneType" else "hybrid-another-module"
        return not found[replicas]["same"] and (slug, {"got": kind})

    def plain(found):
        units, whole = found[replicas]["units"], found[replicas]["whole"]
        return units == 0 and whole and ("hybrid-not-sharded", {"name": whole[0]})

    def too_few(found):
        got, whole = found[replicas]["units"], found[replicas]["whole"]
        return (got != units or whole) and ("hybrid-root-only", {"found": got, "wanted": units})

    looks = [
        each_rank("", of("error"), "", lambda got, _: "mesh-without-names" if "mesh_dim_names" in got else "mesh-fails",
                  fields=about),
        on_each("", another), on_each("", plain), on_each("", too_few),
        _rows_look(size, replicas),
    ]  # fmt: skip
    if shards > 1:
        looks += [
            gathers_look(of("gathers"), CONFIG.layers),
            each_rank("", of("kept"), False, "kept-whole", holds=nothing, fields=first_index),
        ]  # fmt: skip
    return looks


def _rows_look(size, replicas):
    """At the rows of each parameter that each rank holds."""
    rows = {name: len(p) for name, p in _model().named_parameters()}

    def parts(replicas, place=lambda rank: rank):
        return {name: [_part(size, replicas, place(rank), n) for rank in range(size)] for name, n in rows.items()}

    def see(ranks):
        return {name: [found[replicas]["rows"][name] for found in ranks] for name in rows}

    def first(seen, due):
        return next(name for name in rows if seen[name] != due[name])

    def mistake(seen, due):
        name = first(seen, due)
        if seen[name] == parts(1)[name]:
            blocks_right = all(seen[name] == due[name] for name in rows if name.startswith("blocks."))
            return "root-on-flat-mesh" if blocks_right else "flat-mesh"
        if replicas > 1 and all(part == (0, rows[name]) for part in seen[name]):
            return "all-replicated"
        return "mesh-turned" if seen[name] == parts(replicas, lambda rank: rank // replicas)[name] else "counts-swapped"

    def fields(seen, due):
        name, shards = first(seen, due), size // replicas
        due, got = (str([list(part or ()) for part in parts[name]]) for parts in (due, seen))
        said = {
            "expected": f"rows (first, number) by rank {due}",
            "got": got,
            "where": f"{size} ranks, {replicas} replicas, {name}",
        }
        about = {"name": name, "size": size, "replicas": replicas, "shards": shards, "wanted": shards}
        return said | about | {"found": len(set(seen[name]))}

    return Look("", see, parts(replicas), mistake, holds=operator.eq, fields=fields)


@functools.cache
def _truth(size):
    model = _model()
    language_loss(model, _tokens(size)).backward()
    return {name: (p - RATE * p.grad).detach() for name, p in model.named_parameters()}


def _step_look(size, replicas):
    """At the weights after a step: those of each replica put together."""
    shards = size // replicas

    def see(ranks):
        held = [found[replicas]["shards"] for found in ranks]
        return [{name: torch.cat([one[name] for one in held[first : first + shards]]) for name in held[0]}
                for first in range(0, size, shards)]  # fmt: skip

    def first(seen, due):
        return next(((name, got[name]) for got in seen for name in due if not close(got[name], due[name], 1e-9)), None)

    def mistake(seen, due):
        name, _ = first(seen, due)
        return (
            "hybrid-trains-wrong" if all(close(got[name], seen[0][name], 1e-12) for got in seen) else "replicas-drift"
        )

    def fields(seen, due):
        name, got = first(seen, due)
        return {"expected": due[name], "got": got, "where": f"{size} ranks, {replicas} replicas, {name}"}

    return Look("", see, _truth, mistake, holds=lambda *both: first(*both) is None, fields=fields)


def balise_9(shard_hybrid):
    """All shapes of mesh on 1 to 4 ranks: who holds which part, and one step against one process."""
    # four ranks first: they alone can be replicas of several shards
    yield from judged_by_worlds(_looks, _hybrid, shard_hybrid, sizes=(4, 3, 1, 2))
    yield from judged([ON_GPUS], lambda: on_gpus(_on_gpu, shard_hybrid, known=()) or [])


ON_GPUS = each_rank("on a mesh of GPUs, when each rank has one", list, ["cuda"], "mesh-elsewhere",
                    fields=lambda got, due: {"expected": due[0], "got": ", ".join(got)})  # fmt: skip

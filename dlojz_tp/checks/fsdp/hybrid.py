"""Balise 9: shards within a node, replicas over nodes."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.fsdp.common import count, one_a_block
from dlojz_tp.checks.fsdp.watched import Watch, whole_blocks
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.probes.gpus import on_gpus
from dlojz_tp.probes.ranks import by_worlds

HINTS = {
    "hybrid-not-sharded": "{name} is a whole tensor on rank {rank}, not a shard.",
    "hybrid-root-only": "{found} of {wanted} modules are sharded: pass each block and the root to fully_shard, "
    "with the mesh.",
    "hybrid-another-module": "Return the model that you were given, sharded in place.",
    "flat-mesh": "{name} is sharded over all {size} ranks: nothing is replicated. Give fully_shard a mesh of two "
    "dimensions.",
    "root-on-flat-mesh": "The blocks are right, but {name} is sharded over all {size} ranks: the root needs the "
    "mesh too.",
    "mesh-turned": "Ranks 0 and 1, neighbours on a node, hold the same part of {name}, while ranks 0 and {shards} "
    "hold different parts: the mesh dimensions are the wrong way round. The first one replicates, "
    "the second one shards.",
    "mesh-fails": "With {replicas} replicas on {size} ranks, shard_hybrid failed. Does the mesh have as many "
    "places as there are ranks, and the ranks' device type?",
    "mesh-without-names": "fully_shard needs names for the dimensions of a 2D mesh: set mesh_dim_names to any two "
    "words.",
    "counts-swapped": "With {replicas} replicas on {size} ranks, a parameter should have {wanted} parts. Here it "
    "has {found}.",
    "all-replicated": "With {replicas} replicas on {size} ranks, each rank should hold 1/{wanted}. Here each rank "
    "holds everything.",
    "uneven-replicas": "{size} ranks can't be divided into {replicas} replicas: raise a ValueError.",
    "mesh-elsewhere": "When each rank has a GPU, the shards are on {got}. Make the mesh with launch.device().type, "
    "not with a word that fits only this machine.",
    "replicas-drift": "After a step, the replicas have different weights: their gradients were never averaged.",
    "hybrid-trains-wrong": "After a step, the weights differ from those of one process on the whole batch.",
}

CONFIG = LlamaConfig(vocab_size=24, width=12, heads=2, kv_heads=1, layers=2, max_length=8, ffn_width=20)
REPLICAS = {4: (2, 1), 3: (3,), 2: (2, 1), 1: (1,)}
UNEVEN = {4: 3, 3: 2, 2: 3, 1: 2}  # no such mesh
RATE = 0.5


def balise_9(shard_hybrid):
    """All shapes of mesh on 1 to 4 ranks: who holds which part, and one step against one process."""
    looks = {
        "each block and the root are sharded; neighbours hold different parts, replicas the same": functools.partial(
            _each, _right_parts
        ),
        "one step equals a step of one process on the whole batch": functools.partial(_each, _right_step),
        "a number of replicas that doesn't divide the ranks is refused": _right_refusal,
    }
    # four ranks first: they alone can be replicas of several shards
    yield from by_worlds(looks, _hybrid, shard_hybrid, sizes=(4, 3, 1, 2), timeout=30)
    yield "on a mesh of GPUs, when each rank has one"
    for rank, places in enumerate(on_gpus(_on_gpu, shard_hybrid, known=()) or ()):
        if places != ["cuda"]:
            raise Wrong("mesh-elsewhere", expected="cuda", got=", ".join(places), where=f"rank {rank} of 2")


def _each(look, worlds):
    for size in sorted(worlds, reverse=True):
        for replicas in REPLICAS[size]:
            look(size, replicas, [found[replicas] for found in worlds[size]])


def _right_refusal(worlds):
    for size, ranks in worlds.items():
        for found in ranks:
            if found["refused"] is not True:
                raise Wrong(
                    "uneven-replicas", expected="ValueError", got=found["refused"], replicas=UNEVEN[size], size=size
                )


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
        seen = found[replicas] = {"kind": "nothing", "same": False, "error": None}
        try:
            model = shard_hybrid(model, replicas)
            seen |= {"kind": type(model).__name__, "same": model is given}
        except (IndexError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
            if "mesh_dim_names" in str(error):
                raise Wrong("mesh-without-names", got=str(error)) from error
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
    """(first row, rows) of the part that this rank holds: found by its numbers, and not by what the mesh says of itself."""
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


def _right_parts(size, replicas, ranks):
    shapes = {name: tuple(p.shape) for name, p in _model().named_parameters()}
    shards = size // replicas
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}, {replicas} replicas"
        if found["error"]:
            raise Wrong("mesh-fails", got=found["error"], where=where, replicas=replicas, size=size)
        if found["kind"] == "NoneType":
            raise Wrong("nothing-returned", where=where)
        if not found["same"]:
            raise Wrong("hybrid-another-module", got=found["kind"], where=where)
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}, {replicas} replicas"
        if found["whole"] and found["units"] == 0:
            raise Wrong("hybrid-not-sharded", where=where, name=found["whole"][0], rank=rank)
        if found["units"] < CONFIG.layers + 1 or found["whole"]:
            raise Wrong("hybrid-root-only", where=where, found=found["units"], wanted=CONFIG.layers + 1)
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}, {replicas} replicas"
        wrong = [name for name in shapes if found["rows"][name] != _part(size, replicas, rank, shapes[name][0])]
        if wrong:
            _name_the_mistake(size, replicas, shards, ranks, shapes, wrong, where)
        if shards > 1:
            one_a_block(found["gathers"], CONFIG.layers, where)
        if shards > 1 and any(found["kept"]):
            raise Wrong("kept-whole", index=found["kept"].index(True), where=where)


def _name_the_mistake(size, replicas, shards, ranks, shapes, wrong, where):
    name = wrong[0]
    rows = shapes[name][0]
    held = [found["rows"][name] for found in ranks]
    fields = {"name": name, "size": size, "replicas": replicas, "shards": shards, "wanted": shards}
    got, expected = (
        str([list(part or ()) for part in parts])
        for parts in (held, [_part(size, replicas, r, rows) for r in range(size)])
    )
    if held == [_part(size, 1, r, rows) for r in range(size)]:
        blocks_right = not any(other.startswith("blocks.") for other in wrong)
        slug = "root-on-flat-mesh" if blocks_right else "flat-mesh"
    elif replicas > 1 and all(part == (0, rows) for part in held):
        slug = "all-replicated"
    elif held == [_part(size, replicas, r // replicas, rows) for r in range(size)]:
        slug = "mesh-turned"
    else:
        slug = "counts-swapped"
    raise Wrong(
        slug,
        expected=f"rows (first, number) by rank {expected}",
        got=got,
        where=f"{where}, {name}",
        found=len(set(held)),
        **fields,
    )


@functools.cache
def _truth(size):
    model = _model()
    language_loss(model, _tokens(size)).backward()
    return {name: (p - RATE * p.grad).detach() for name, p in model.named_parameters()}


def _right_step(size, replicas, ranks):
    shards, truth = size // replicas, _truth(size)
    for first in range(0, size, shards):
        for name, wanted in truth.items():
            got = torch.cat([found["shards"][name] for found in ranks[first : first + shards]])
            if close(got, wanted, 1e-9):
                continue
            same = all(close(ranks[r]["shards"][name], ranks[r % shards]["shards"][name], 1e-12) for r in range(size))
            where = f"world of {size}, {replicas} replicas, {name}"
            raise Wrong("hybrid-trains-wrong" if same else "replicas-drift", expected=wanted, got=got, where=where)

"""Balise 6: a sharded model that was never whole in any memory, and whose shards were filled rightly."""

import functools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.fsdp.common import has_memory
from dlojz_tp.measure.live import LiveBytes
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.probes.gpus import on_gpus
from dlojz_tp.probes.outside import kept_outside
from dlojz_tp.probes.ranks import by_worlds

HINTS = {
    "no-model-back": "Return the sharded model, an nn.Module.",
    "another-model": "Call make_plain() to get the model: the model that came back has other parameters ({found}).",
    "made-in-memory": "make_plain() ran on a real device, so for a moment the rank held the whole model. Under "
                      'torch.device("meta"), tensors have a shape but no memory.',
    "still-on-meta": "Parameters are still on the meta device, without memory. to_empty gives them memory.",
    "meta-not-sharded": "{name} is a whole tensor on each rank, not a shard. Pass every block and the root to "
                        "fully_shard.",
    "meta-root-only": "The blocks aren't sharded individually ({found} of {wanted} are FSDP modules): the first "
                      "forward would gather the whole model at once.",
    "emptied-too-early": "You made the model on the meta device, but then all of it got memory: the rank held "
                         "{got} at once, while its shards take {wanted}. Which must come first, sharding or "
                         "to_empty?",
    "never-filled": "{name} was never filled: it holds whatever was in that memory. to_empty gives memory without "
                    "values, and anything written before it is lost.",
    "tables-never-filled": "The weights are filled, but the buffer {name} isn't: to_empty also discarded the "
                           "values of the rotary tables, and no checkpoint brings them back. init_weights fills "
                           "both.",
    "not-as-init-weights": "{name} isn't what init_weights gives: {what}.",
    "shards-repeat": "Rank {rank} drew the same numbers as rank 0 for {name}: on a CPU, each rank draws its own "
                     "shard from its own generator. Ranks with different shards need different seeds.",
    "blocks-repeat": "Two blocks hold the same numbers: the generator was reset to the same seed between them.",
    "seed-without-effect": "Two calls with the same seed gave different weights, or two seeds gave the same ones: "
                           "the seed must decide.",
    "grad-flag-lost": "make_plain froze {name} (requires_grad False), but it is no longer frozen.",
    "built-elsewhere": "When each rank has a GPU, {name} of rank {rank} got its memory on {got}, but this rank's "
                       'GPU is {expected}. Give to_empty the device type of the mesh, mesh.device_type: "cuda" '
                       "alone means the rank's own GPU.",
    "meta-model-computes-wrong": "The model's loss isn't what the same weights give in one process.",
}  # fmt: skip

CONFIG = LlamaConfig(vocab_size=37, width=24, heads=4, kv_heads=2, layers=3, max_length=16, ffn_width=48)
FROZEN = "norm.weight"
SIZES = (4, 3, 1, 2)  # four ranks first: their shards are small beside a whole block


def balise_6(build_sharded):
    """Built in worlds of 1 to 4 where memory without a value reads NaN; weights put together and used by one process."""
    looks = {
        "made on the meta device, each block and the root sharded, memory only for the shards": _right_parts,
        "all weights and tables are filled as init_weights fills them": _filled,
        "every shard has its own numbers, and the seed decides them": functools.partial(_each, _right_draws),
        "forward and backward give the same as one process with the same weights": functools.partial(
            _each, _right_loss
        ),
    }
    yield from by_worlds(looks, _built, build_sharded, sizes=SIZES, timeout=30)
    yield "when each of two ranks has a GPU, its shards are there"
    for rank, (own, places) in enumerate(on_gpus(_on_gpu, build_sharded, known=()) or ()):
        for name, place in places.items():
            if place != own:
                raise Wrong("built-elsewhere", expected=own, got=place, where=f"rank {rank} of 2", rank=rank, name=name)


def _right_parts(worlds):
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            _right_form(f"rank {rank} of {size}", found)
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks if size > 2 else ()):
            _right_memory(f"rank {rank} of {size}", found)


def _filled(worlds):
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            _right_values(f"rank {rank} of {size}", found)
        _right_distribution(size, ranks)


def _each(look, worlds):
    for size, ranks in worlds.items():
        look(size, ranks)


def _make():
    model = Llama(CONFIG)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


class _Held(LiveBytes):
    """Living bytes without meta and fake tensors, which take no memory."""

    def _count(self, tensor, part, retag=True):
        if has_memory(tensor):
            super()._count(tensor, part, retag)


@functools.cache
def _shapes():
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in _make().named_parameters()}


def _built(build_sharded):
    """On a rank: what was built, the peak meanwhile, a loss; then once more with the same seed and with another."""
    warnings.filterwarnings("ignore", message="DTensor random operators")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory without a value is NaN, not a lucky zero
    devices = []

    def make_model():
        model = _make()
        devices.append(model.head.weight.device.type)
        return model

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {"peak": 0, "devices": devices}
    outside = kept_outside(build_sharded)
    with _Held() as counter:
        model = build_sharded(make_model, mesh, 0)
    found["peak"] = counter.peak + kept_outside(build_sharded) - outside
    found |= _described(model)
    fit = found["kind"] == "model" and found["shapes"] == _shapes() and set(found["where"].values()) == {"cpu"}
    everywhere = torch.tensor(int(fit and not found["whole"] and set(devices) == {"meta"}))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if not everywhere:
        return found
    if dist.get_world_size() == 2:
        found["again"] = [_locals(build_sharded(make_model, mesh, seed)) for seed in (0, 4)]
    tokens = _tokens()
    loss = language_loss(model, tokens)
    loss.backward()
    found["loss"] = loss.detach()
    weight = model.blocks[0].attention.query.weight
    found["gradient"] = None if weight.grad is None else _local(weight.grad)
    return found


def _on_gpu(_, build_sharded):
    """On a rank: its GPU, and where its shards are."""
    model = build_sharded(_make, init_device_mesh("cuda", (dist.get_world_size(),)), 3)
    return str(launch.device()), {name: str(_local(p).device) for name, p in model.named_parameters()}


def _tokens():
    return torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(9))


def _local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _locals(model):
    return {name: _local(p) for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}


def _described(model):
    if not isinstance(model, nn.Module):
        return {"kind": type(model).__name__}
    parameters = dict(model.named_parameters())
    blocks = list(getattr(model, "blocks", []))
    return {
        "kind": "model",
        "shapes": {name: tuple(p.shape) for name, p in parameters.items()},
        "where": {name: p.device.type for name, p in parameters.items()},
        "whole": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
        "units": (sum(isinstance(block, FSDPModule) for block in blocks), isinstance(model, FSDPModule)),
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
        "weights": {} if any(p.is_meta for p in parameters.values()) else _locals(model),
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers() if not b.is_meta},
        "empty": [name for name, b in model.named_buffers() if b.is_meta],
    }


def _right_form(where, found):
    if found["kind"] == "NoneType":
        raise Wrong("nothing-returned", where=where)
    if found["kind"] != "model":
        raise Wrong("no-model-back", got=found["kind"], where=where)
    if set(found["devices"]) - {"meta"}:
        raise Wrong("made-in-memory", expected="meta", got=", ".join(found["devices"]), where=where)
    shapes = _shapes()
    if found["shapes"] != shapes:
        raise Wrong("another-model", where=where, found=f"{len(found['shapes'])} parameters, not {len(shapes)}")
    if "meta" in found["where"].values():
        raise Wrong("still-on-meta", where=where)
    if found["whole"]:
        raise Wrong("meta-not-sharded", where=where, name=found["whole"][0])
    blocks, root = found["units"]
    if blocks < CONFIG.layers or not root:
        wanted = CONFIG.layers + 1
        raise Wrong("meta-root-only", where=where, found=blocks + root, wanted=wanted)


def _right_memory(where, found):
    bytes_of = {name: 4 * _numel(shape) for name, shape in found["shapes"].items()}
    block = sum(size for name, size in bytes_of.items() if name.startswith("blocks.0."))
    rest = sum(size for name, size in bytes_of.items() if not name.startswith("blocks."))
    shards = sum(4 * part.numel() for part in found["weights"].values())
    # a rank may fill one block after the other before it is cut, and so hold one of them whole
    if found["peak"] > shards + 1.25 * max(block, rest) + 4096:
        got, wanted = (f"{size / 1024:.0f} KiB" for size in (found["peak"], shards))
        raise Wrong("emptied-too-early", expected=wanted, got=got, where=where, wanted=wanted)


def _numel(shape):
    size = 1
    for length in shape:
        size *= length
    return size


def _right_values(where, found):
    for name, part in found["weights"].items():
        if part.isnan().any():
            raise Wrong("never-filled", where=where, name=name)
    truth = dict(_make().named_buffers())
    for name, table in truth.items():
        if name in found["empty"] or not close(found["buffers"].get(name), table):
            raise Wrong("tables-never-filled", where=where, name=name)
    if found["frozen"] != [FROZEN]:
        raise Wrong(
            "grad-flag-lost", expected=FROZEN, got=", ".join(found["frozen"]) or "none", where=where, name=FROZEN
        )


def _right_distribution(size, ranks):
    small = 0.02 / (2 * CONFIG.layers) ** 0.5
    for name in ranks[0]["weights"]:
        whole = torch.cat([found["weights"][name] for found in ranks])
        if name.endswith(("norm.weight", "norm_attention.weight", "norm_feed_forward.weight")):
            wanted, what = 1.0, "ones were expected"
            right = bool((whole == 1).all())
        else:
            wanted = small if name.endswith(("output.weight", "down.weight")) else 0.02
            what = f"a mean of 0 and a standard deviation of {wanted:.4f} were expected"
            near = max(0.25, 6 / whole.numel() ** 0.5)  # right numbers may not fail by an unlucky seed
            right = abs(whole.std().item() / wanted - 1) < near and abs(whole.mean().item()) < near * wanted
        if not right:
            got = f"mean {whole.mean().item():.4f}, standard deviation {whole.std().item():.4f}"
            raise Wrong("not-as-init-weights", where=f"world of {size}", name=name, what=what, got=got)


def _right_draws(size, ranks):
    for rank, found in enumerate(ranks):
        for name, part in found["weights"].items():
            drawn = part.dim() == 2 and len(part)
            for other in ranks[:rank]:
                rows = min(len(part), len(other["weights"][name]))
                if drawn and close(part[:rows], other["weights"][name][:rows], 1e-12):
                    raise Wrong("shards-repeat", where=f"rank {rank} of {size}", rank=rank, name=name)
            twin = name.replace("blocks.0.", "blocks.1.")
            if drawn and twin != name and close(part, found["weights"][twin], 1e-12):
                raise Wrong("blocks-repeat", where=f"rank {rank} of {size}", got=f"{name} = {twin}")
        if "again" not in found:
            continue
        again, other = found["again"]
        name = "blocks.0.attention.query.weight"
        if not again or not close(again[name], found["weights"][name]):
            raise Wrong("seed-without-effect", where=f"rank {rank} of {size}, seed 0 twice")
        if close(other[name], found["weights"][name]):
            raise Wrong("seed-without-effect", where=f"rank {rank} of {size}, seeds 0 and 4")


def _right_loss(size, ranks):
    model = _make()
    weights = {name: torch.cat([found["weights"][name] for found in ranks]) for name in ranks[0]["weights"]}
    model.load_state_dict(weights)
    tokens = _tokens()
    loss = language_loss(model, tokens)
    loss.backward()
    gradient = model.blocks[0].attention.query.weight.grad
    for rank, found in enumerate(ranks):
        if not close(found["loss"], loss, 1e-4):
            raise Wrong("meta-model-computes-wrong", expected=loss, got=found["loss"], where=f"rank {rank} of {size}")
    found = None if any(r["gradient"] is None for r in ranks) else torch.cat([r["gradient"] for r in ranks])
    if not close(found, gradient, 1e-4):
        raise Wrong("meta-model-computes-wrong", expected=gradient, got=found, where=f"world of {size}, a gradient")

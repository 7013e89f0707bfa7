"""Balise 6: a sharded model that was never whole in any memory, and whose shards were filled rightly."""

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, one_of, silent
from dlojz_tp.judging.checks.fsdp.common import has_memory, judged_by_worlds, of_each
from dlojz_tp.judging.probes.gpus import on_gpus
from dlojz_tp.judging.probes.outside import kept_outside
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.measure.live import LiveBytes
from dlojz_tp.models import Llama, LlamaConfig, language_loss

CONFIG = LlamaConfig(vocab_size=37, width=24, heads=4, kv_heads=2, layers=3, max_length=16, ffn_width=48)
FROZEN = "norm.weight"


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
    """On a rank: [(name, where it is, this rank's GPU)] of the shards that are elsewhere."""
    model = build_sharded(_make, init_device_mesh("cuda", (dist.get_world_size(),)), 3)
    places = [(name, str(_local(p).device), str(launch.device())) for name, p in model.named_parameters()]
    return [place for place in places if place[1] != place[2]]


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


def _how_many(got, due):
    return {"found": f"{len(got)} parameters, not {len(due)}"} | silent(got, due)


FORM = [
    each_rank("made on the meta device, each block and the root sharded, memory only for the shards", "kind", "model",
              lambda got, _: "nothing-returned" if got == "NoneType" else "no-model-back"),
    each_rank("", "devices", ["meta"], "made-in-memory", holds=one_of,
              fields=lambda got, _: {"expected": "meta", "got": ", ".join(got)}),
    each_rank("", "shapes", lambda size: _shapes(), "another-model", fields=_how_many),
    each_rank("", "where", "meta", "still-on-meta", holds=lambda got, wrong: wrong not in got.values(), fields=silent),
    each_rank("", "whole", [], "meta-not-sharded", fields=lambda got, _: {"name": got[0]} | silent(got, _)),
    each_rank("", of_each(lambda found: sum(found["units"])), CONFIG.layers + 1, "meta-root-only",
              fields=lambda got, due: {"found": got, "wanted": due} | silent(got, due)),
]  # fmt: skip


def _memory(found):
    """Bytes that a rank held at once, those of its shards, and how many it may hold."""
    bytes_of = {name: 4 * math.prod(shape) for name, shape in found["shapes"].items()}
    block = sum(size for name, size in bytes_of.items() if name.startswith("blocks.0."))
    rest = sum(size for name, size in bytes_of.items() if not name.startswith("blocks."))
    shards = sum(4 * part.numel() for part in found["weights"].values())
    # a rank may fill one block after the other before it is cut, and so hold one of them whole
    return found["peak"], shards, shards + 1.25 * max(block, rest) + 4096


def _kibibytes(got, _):
    peak, shards = (f"{size / 1024:.0f} KiB" for size in got[:2])
    return {"expected": shards, "got": peak, "wanted": shards}


MEMORY = each_rank("", of_each(_memory), True, "emptied-too-early", holds=lambda got, _: got[0] <= got[2],
                   fields=_kibibytes)  # fmt: skip


def _lost_tables(found):
    due = dict(_make().named_buffers())
    return [name for name in due if name in found["empty"] or not close(found["buffers"].get(name), due[name])]


def _together(ranks):
    return {name: torch.cat([found["weights"][name] for found in ranks]) for name in ranks[0]["weights"]}


def _unlike(ranks):
    """[(name, what was expected, what came)] of the weights that are not as init_weights draws them."""
    small, found = 0.02 / (2 * CONFIG.layers) ** 0.5, []
    for name, whole in _together(ranks).items():
        mean, std = whole.mean().item(), whole.std().item()
        wanted = small if name.endswith(("output.weight", "down.weight")) else 0.02
        what = f"a mean of 0 and a standard deviation of {wanted:.4f} were expected"
        near = max(0.25, 6 / whole.numel() ** 0.5)  # right numbers may not fail by an unlucky seed
        right = abs(std / wanted - 1) < near and abs(mean) < near * wanted
        if name.endswith(("norm.weight", "norm_attention.weight", "norm_feed_forward.weight")):
            what, right = "ones were expected", bool((whole == 1).all())
        found += [(name, what, f"mean {mean:.4f}, standard deviation {std:.4f}")] * (not right)
    return found


FILLED = [
    each_rank("all weights and tables are filled as init_weights fills them",
              of_each(lambda found: [name for name, part in found["weights"].items() if part.isnan().any()]), [],
              "never-filled", fields=lambda got, _: {"name": got[0]} | silent(got, _)),
    each_rank("", of_each(_lost_tables), [], "tables-never-filled",
              fields=lambda got, _: {"name": got[0]} | silent(got, _)),
    each_rank("", "frozen", [FROZEN], "grad-flag-lost",
              fields=lambda got, _: {"expected": FROZEN, "got": ", ".join(got) or "none", "name": FROZEN}),
    Look("", _unlike, [], "not-as-init-weights",
         fields=lambda seen, _: {"expected": ""} | dict(zip(("name", "what", "got"), seen[0]))),
]  # fmt: skip


def _same_rows(one, other):
    rows = min(len(one), len(other))
    return one.dim() == 2 and len(one) > 0 and close(one[:rows], other[:rows], 1e-12)


def _repeated_shards(ranks):
    """[(rank, name)] of drawn numbers that an earlier rank has as well."""
    return [(rank, name) for rank, found in enumerate(ranks) for name, part in found["weights"].items()
            if any(_same_rows(part, other["weights"][name]) for other in ranks[:rank])]  # fmt: skip


def _repeated_blocks(found):
    """The names of the first block whose numbers the second one has as well."""
    parts = found["weights"]
    names = [name for name in parts if name.startswith("blocks.0.")]
    return [name for name in names if _same_rows(parts[name], parts[name.replace("blocks.0.", "blocks.1.")])]


def _by_seed(found):
    """Whether the same seed gives the same weights, and another one others."""
    (again, other), name = found["again"], "blocks.0.attention.query.weight"
    mine = found["weights"][name]
    return bool(again) and close(again[name], mine) and not close(other[name], mine)


DRAWN = [
    Look("every shard has its own numbers, and the seed decides them", _repeated_shards, [], "shards-repeat",
         fields=lambda seen, _: dict(zip(("rank", "name"), seen[0])) | silent(seen, _)),
    each_rank("", of_each(_repeated_blocks), [], "blocks-repeat",
              fields=lambda got, _: {"expected": "", "got": f"{got[0]}, the same in blocks.1"}),
]  # fmt: skip
SEED = each_rank("", of_each(_by_seed), True, "seed-without-effect", fields=silent)


def _computed_otherwise(ranks):
    """A loss or a gradient that one process with the ranks' weights does not give."""
    model = _make()
    model.load_state_dict(_together(ranks))
    loss = language_loss(model, _tokens())
    loss.backward()
    parts = [found["gradient"] for found in ranks]
    gradient = None if any(part is None for part in parts) else torch.cat(parts)
    due = model.blocks[0].attention.query.weight.grad
    for got, expected in [*((found["loss"], loss.detach()) for found in ranks), (gradient, due)]:
        if not close(got, expected, 1e-4):
            return "meta-model-computes-wrong", {"got": got, "expected": expected}
    return None


COMPUTED = recognised("forward and backward give the same as one process with the same weights", _computed_otherwise)
ON_GPUS = each_rank("when each of two ranks has a GPU, its shards are there", list, [], "built-elsewhere",
                    fields=lambda got, _: dict(zip(("name", "got", "expected"), got[0])))  # fmt: skip


def _looks(size):
    return [*FORM, *[MEMORY] * (size > 2), *FILLED, *DRAWN, *[SEED] * (size == 2), COMPUTED]


def balise_6(build_sharded):
    """In worlds of 1 to 4 where memory without a value reads NaN; weights put together and used by one process."""
    # four ranks first: their shards are small beside a whole block
    yield from judged_by_worlds(_looks, _built, build_sharded, sizes=(4, 3, 1, 2))
    yield from judged([ON_GPUS], lambda: on_gpus(_on_gpu, build_sharded, known=()) or [])

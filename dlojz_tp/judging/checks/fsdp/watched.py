"""On a rank: a sharded model trained some steps under watch, and what it held, sent and computed."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.judging.probes.memory import living_storages
from dlojz_tp.judging.probes.outside import kept_outside
from dlojz_tp.judging.probes.settling import settle
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.launch.rank import waits_for_others
from dlojz_tp.measure.operations import Products

RATE, STEPS = 0.05, 2
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # modules that PyTorch puts between, and hides in a state dict


class Watch:
    """The collectives, and the dtypes of matrix products."""

    def __init__(self):
        self._traffic, self._products = Traffic(), Products()

    def __enter__(self):
        self._traffic.__enter__()
        self._products.__enter__()
        return self

    def __exit__(self, *error):
        self._products.__exit__(*error)
        self._traffic.__exit__(*error)

    def take(self) -> dict:
        """What was seen since the last call; forget it."""
        return {"calls": self._traffic.take(), "products": self._products.take()}


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """The tensors that forward saves for backward, what a checkpoint keeps among them."""

    def __init__(self):
        self._tensors: list[torch.Tensor] = []
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor):
        self._tensors.append(tensor)
        return tensor

    def take(self, model) -> int:
        """Bytes of their storages, those of the model's parameters left out (freed ones have none); forget them."""
        storages = [tensor.untyped_storage() for tensor in self._tensors]
        mine = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
        self._tensors.clear()
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in mine}.values())


def loss_of(logits, tokens):
    """Mean cross-entropy of each next token. tokens (b, s + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made_by(model) -> str:
    """The slug for what is no model sharded by fully_shard at all, else ""."""
    if isinstance(model, DistributedDataParallel):
        return "replicated"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "old-fsdp"
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return "nothing-sharded"
    return ""


def train(shard: Callable, case, *args, look: Callable | None = None, take_steps: bool = True) -> dict:
    """On a rank: `shard(model, mesh, *args)`, then train it under watch. What the rank holds and sends, as a report.

    case: a `common.Case`. look(model): what else to report of the sharded model, before any step. take_steps: whether to train at all.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    before, outside = living_storages(), kept_outside(shard)
    model = copy.deepcopy(case.model)
    names, runs = [name for name, _ in model.named_parameters()], Runs(model)
    sharded = shard(model, mesh, *args)
    report = form(sharded, model, names)
    report["slug"] = first_slug(report["slug"])
    if report["slug"]:
        return report
    if look is not None:
        report["look"] = look(sharded)
    if not take_steps:
        return report
    report |= steps(sharded, case, runs)
    sharded.zero_grad()
    shards = {local(p).untyped_storage()._cdata for p in sharded.parameters()}
    report["outside"] = kept_outside(shard) - outside

    def beside():
        return sum(size for key, size in living_storages().items() if key not in before and key not in shards)

    report["beside"] = settle(
        beside, most_beside(sum(p.nbytes for p in case.model.parameters()), dist.get_world_size())
    )
    return report


def most_beside(whole: int, size: int) -> float:
    """Bytes that a rank may hold besides its shards, of a model of `whole` bytes: copies of the shards, in the report."""
    return (1 / size + 0.6) * whole


def first_slug(mine: str) -> str:
    """The first slug that a rank has, on all ranks: none of them may begin a step that another will not make."""
    store = dist.distributed_c10d._get_default_store()
    word = f"form {store.add(f'forms of rank {dist.get_rank()}', 1)} of rank"  # counted in this world
    store.set(f"{word} {dist.get_rank()}", mine or "fine")
    with waits_for_others():
        slugs = [store.get(f"{word} {rank}").decode() for rank in range(dist.get_world_size())]
    return next((slug for slug in slugs if slug != "fine"), "")


class Runs:
    """How often the parts of each block, and the head, began to run in forward and in backward of the step watched.

    Recomputation stops early, once all that backward needs is there: so first layers are counted, at their begin.
    """

    def __init__(self, model):
        self.phase = ""
        self.counts: dict[tuple[str, str], int] = {}
        parts = {"head": model.head}
        for index, block in enumerate(model.blocks):
            parts |= {f"attention {index}": block.attention.query, f"feed-forward {index}": block.feed_forward.gate}
        for name, module in parts.items():
            module.register_forward_pre_hook(partial(self._count, name))

    def _count(self, name, _module, _args):
        key = (self.phase, name)
        self.counts[key] = self.counts.get(key, 0) + 1

    def again(self) -> dict[str, int]:
        """{part: runs in backward}."""
        return {name: n for (phase, name), n in self.counts.items() if phase == "backward"}


def form(sharded, model, names: list[str]) -> dict:
    """What can be told before any step; "slug" is not empty where there is no use in going on."""
    if sharded is None:
        return {"slug": "nothing-returned"}
    if not isinstance(sharded, nn.Module):
        return {"slug": "not-the-model", "got": type(sharded).__name__}
    slug = made_by(sharded) or ("" if sharded is model else "not-the-model")
    if slug:
        return {"slug": slug, "got": type(sharded).__name__}
    parameters = named(model)
    changed = "tie-cut" if set(names) < set(parameters) else "names-changed"
    others = [name for name in parameters if name not in names]
    gone = [name for name in names if name not in parameters] if set(parameters) < set(names) else []
    if gone:
        return {"slug": "parameters-gone", "got": ", ".join(gone[:3])}
    return {
        "slug": "" if len(names) == len(parameters) else changed,
        "got": ", ".join(others[:3]),
        "renamed": others,
        "whole": [name for name, p in parameters.items() if not _is_part(p)],
        "meshes": [p.device_mesh.mesh_dim_names for p in parameters.values() if isinstance(p, DTensor)],
        "dtypes": {p.dtype for p in parameters.values()},
        "grouped": [_has_group(block) for block in model.blocks],
    }


def named(model) -> dict[str, nn.Parameter]:
    """The parameters under the names of the plain model."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = parameter
    return found


def _is_part(p) -> bool:
    return isinstance(p, DTensor) and all(placement.is_shard() for placement in p.placements)


def _has_group(block) -> bool:
    """Whether `block`, or the one module that a wrapper adds to or takes from it, is sharded in itself."""
    inner = [block, *(child for name, child in block.named_children() if name == "_checkpoint_wrapped_module")]
    return any(isinstance(module, FSDPModule) for module in inner)


def whole_blocks(model) -> list[bool]:
    """For each block, whether this rank holds all its parameters whole now."""
    return [not any(isinstance(p, DTensor) for p in block.parameters()) for block in model.blocks]


def block_elements(model) -> list[int]:
    """For each block, the elements of its parameters that this rank holds now."""
    return [sum(local(p).numel() for p in block.parameters()) for block in model.blocks]


def steps(model, case, runs: Runs) -> dict:
    """On a rank: some steps of SGD on the shards, the last one watched."""
    watch, rank, losses, found = Watch(), dist.get_rank(), [], {}
    for step in range(STEPS):
        last, tokens = step == STEPS - 1, case.tokens[step, rank]
        model.zero_grad()
        parts = block_elements(model)
        with watch if last else contextlib.nullcontext():
            runs.phase = "forward" if last else ""
            saved = Saved()
            with saved:
                logits = model(tokens[:, :-1])
            loss = loss_of(logits, tokens)
            found |= {"forward": watch.take(), "after forward": whole_blocks(model), "logits": logits.dtype}
            found["larger"] = [after > before for before, after in zip(parts, block_elements(model), strict=True)]
            found["saved"] = saved.take(model)
            runs.phase = "backward" if last else ""
            loss.backward()
            found |= {"backward": watch.take(), "after backward": whole_blocks(model)}
        losses.append(loss.detach().double().item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    local(p).sub_(RATE * local(p.grad).to(local(p).dtype))
    # where the names have changed, the order tells
    parameters = dict(zip([name for name, _ in case.model.named_parameters()], named(model).values(), strict=True))
    return found | {
        "losses": losses,
        "again": runs.again(),
        "no gradient": [name for name, p in parameters.items() if p.requires_grad and p.grad is None],
        "gradients": {p.grad.dtype for p in parameters.values() if p.grad is not None},
        "shards": {name: (_dim(p), local(p).detach().clone()) for name, p in parameters.items()},
    }


def local(p) -> torch.Tensor:
    """What this rank holds of a parameter or gradient, plain."""
    return p.to_local() if isinstance(p, DTensor) else p


def _dim(p) -> int | None:
    return p.placements[0].dim if isinstance(p, DTensor) and p.placements[0].is_shard() else None

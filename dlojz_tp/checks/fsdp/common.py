"""What the checks of this work share: a model with awkward sizes, a training run under watch on the ranks, its truth."""

import copy
import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.fsdp.watched import RATE, STEPS, loss_of, most_beside
from dlojz_tp.models import Llama, LlamaConfig
from dlojz_tp.probes import ranks

HINTS = {
    "not-the-model": "Return the model that you were given, sharded in place. `fully_shard` changes its argument "
    "and returns it.",
    "nothing-sharded": "Every rank holds every parameter whole: nothing is sharded. Call `fully_shard` on the "
    "blocks and on the model.",
    "replicated": "That is DistributedDataParallel: it averages gradients, but each rank still holds everything.",
    "old-fsdp": "That is the older FullyShardedDataParallel, a wrapper that flattens parameters. Use `fully_shard` "
    "here: it leaves the model's names and modules as they are.",
    "root-only": "All parameters are in one group: forward gathers them all at once, and each rank holds the whole "
    "model from then to the end of backward. The blocks must have their own groups, made before the "
    "root's.",
    "root-first": "The root was sharded before its blocks ({error}). It takes all parameters that aren't in a "
    "group yet: go from the inside out.",
    "no-root": "These parameters don't belong to any group: {names}. Nothing averages their gradients, so the "
    "ranks drift apart.",
    "block-left-out": "Block {index} has no group of its own, so its parameters are gathered with the root's. "
    "Shard every block of the model.",
    "every-layer": "Forward gathers {got} times for {blocks} blocks. Groups smaller than a block send many short "
    "messages, each with its own latency; one group for each block and one for the rest are enough.",
    "blocks-together": "Forward gathers {got} times for {blocks} blocks: several blocks share a group, so they are "
    "whole at the same time.",
    "container": "A ModuleList has no forward, so there is nothing to hook into ({error}). Shard each block in it.",
    "sharded-twice": "A module was sharded twice ({error}). Give each block to `fully_shard` once, and the model once.",
    "other-mesh": "The parameters are on a different mesh from the one that was given. Without `mesh=`, "
    "`fully_shard` makes its own mesh over all ranks.",
    "kept-whole": "Block {index} is still whole on every rank after forward. Here it should be freed and gathered "
    "again in backward: see `reshard_after_forward`.",
    "resharded-to-few": "After forward, blocks are sharded over fewer ranks than before ({error}): that is what a "
    "number as `reshard_after_forward` means. True frees everything but this rank's part, "
    "False keeps the block whole.",
    "copy-kept": "After the steps, a rank holds {got} bytes besides its shards; the whole model has {whole}. A "
    "copy of the parameters is kept somewhere.",
    "no-groups": "Parameters are DTensors, but nothing gathers them for forward ({error}). That is what "
    "`fully_shard` adds: groups. Or one block's forward runs in place of another's: a function made "
    "in a loop sees the loop's last values.",
    "names-changed": "The parameters have different names now, so no checkpoint of the plain model fits: {got}. "
    "PyTorch's own wrapper hides itself.",
    "parameters-gone": "Parameters of the model are gone, {got} among them: a part has replaced the whole.",
    "tie-cut": "{got} was shared with another parameter and is now separate: after a step they differ. Tied "
    "parameters belong in one group, here the root's.",
    "no-gradient": "These parameters got no gradient: {names}.",
    "wrong-weights": "After {steps} steps, the weights differ from those of one process that trains on all ranks' "
    "samples.",
    "wrong-loss": "The first loss differs from that of one process with the same weights and samples: forward "
    "computes something else.",
}


@dataclass(frozen=True)
class Case:
    """A model and tokens (steps, ranks, b, s + 1)."""

    name: str
    model: nn.Module
    tokens: torch.Tensor

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.model.blocks)


def decoder(name: str, *, dtype=torch.float64, frozen: tuple[str, ...] = (), std: float = 0.2, **sizes) -> Case:
    """A Llama whose sizes 2, 3 and 4 do not divide. frozen: ends of names of parameters that do not
    train. std: of the noise on the weights, so that every part matters."""
    given = {"vocab_size": 37, "width": 20, "heads": 2, "layers": 3, "ffn_width": 23, "max_length": 12}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Llama(LlamaConfig(**(given | sizes))).to(dtype)
        tokens = torch.randint(37, (STEPS, 4, 2, 10))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * std)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.endswith(frozen) if frozen else True)
    return Case(name, model, tokens)


KNOWN = (
    ("overlapping meshes", "root-first"),
    ("containers that do not implement forward", "container"),
    ("already been applied", "sharded-twice"),
    ("reshard_after_forward as an int", "resharded-to-few"),
    ("Must flatten tensors", "old-fsdp"),
    ("mixed torch.Tensor and DTensor", "no-groups"),
)
# two ranks first: most mistakes show there
on_ranks = functools.partial(ranks.world_after_world, usual=KNOWN, data=(dict, Case, list, int), timeout=30)


def has_memory(tensor) -> bool:
    """Whether this is a tensor with memory of its own: DTensor finds out shapes on fake and meta tensors."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def put_together(reports: list[dict], name: str) -> torch.Tensor | None:
    """A parameter from the shards of all ranks; None where one is missing."""
    parts = [report["shards"].get(name) for report in reports]
    if any(part is None for part in parts):
        return None
    dim = parts[0][0]
    return parts[0][1] if dim is None else torch.cat([part for _, part in parts], dim)


def truth(case: Case, size: int) -> dict:
    """The same training in one process on the samples of all ranks: "losses" and "weights"."""
    model, losses = copy.deepcopy(case.model), []
    for step in range(STEPS):
        loss = torch.stack(
            [loss_of(model(case.tokens[step, rank][:, :-1]), case.tokens[step, rank]) for rank in range(size)]
        ).mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(RATE * p.grad)
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def count(part: dict, kind: str) -> int:
    """How many collectives of a kind ("all_gather", "reduce_scatter", …) there were."""
    return sum(name == kind for name, *_ in part["calls"])


def well_formed(report: dict, where: str) -> None:
    """Refuse what is no sharded model."""
    if report["slug"]:
        raise Wrong(report["slug"], got=report.get("got", ""), where=where)
    if report["whole"]:
        raise Wrong("no-root", names=", ".join(report["whole"][:3]), got=report["whole"][0], where=where)
    if any(names != ("shard",) for names in report["meshes"]):
        raise Wrong("other-mesh", where=where)


def grouped_by_block(report: dict, case: Case, where: str, *, kept: int = 0) -> None:
    """Refuse other groups than one for each block and one for the rest, and blocks that stay whole (but the last)."""
    gathers = count(report["forward"], "all_gather")
    if not any(report["grouped"]):
        raise Wrong("root-only" if gathers <= 3 else "every-layer", got=gathers, blocks=case.blocks, where=where)
    if not all(report["grouped"]):
        index = report["grouped"].index(False)
        raise Wrong("block-left-out", index=index, where=where)
    if gathers:
        one_a_block(gathers, case.blocks, where)
    some = [larger and not whole for larger, whole in zip(report["larger"], report["after forward"])]
    if any(some):
        raise Wrong("resharded-to-few", error="each rank's part is larger", where=f"{where}, block {some.index(True)}")
    whole = report["after forward"][: case.blocks - kept]
    if gathers and any(whole):
        raise Wrong("kept-whole", index=whole.index(True), where=where)


def one_a_block(gathers: int, blocks: int, where: str) -> None:
    """Refuse another number of gathers in forward than that of a group for each block and one for the rest."""
    if not blocks + 1 <= gathers <= blocks + 3:  # embedding, norm, head may be apart
        slug = "every-layer" if gathers > blocks else "blocks-together"
        raise Wrong(slug, got=gathers, blocks=blocks, where=where)


def trained(reports: list[dict], wanted: dict, where: str, *, tol: float = 1e-7) -> None:
    """Refuse losses and weights that are not those of one process. reports: of all ranks."""
    missing = reports[0]["no gradient"]
    if missing:
        raise Wrong("no-gradient", names=", ".join(missing[:3]), where=where)
    whole, size = sum(weight.nbytes for weight in wanted["weights"].values()), len(reports)
    for rank, report in enumerate(reports):
        if size > 1 and report["outside"] > 0.6 * whole:  # in NumPy arrays, lists, bytes
            raise Wrong("copy-kept", got=report["outside"], whole=whole, where=f"{where}, rank {rank}")
        if size > 1 and report["beside"] > most_beside(whole, size):
            kept = report["beside"] - whole // size
            raise Wrong("copy-kept", got=kept, whole=whole, where=f"{where}, rank {rank}")
    losses = [sum(of_step) / len(reports) for of_step in zip(*(report["losses"] for report in reports))]
    if not close(losses[0], wanted["losses"][0], tol):
        raise Wrong("wrong-loss", expected=wanted["losses"][0], got=losses[0], where=where)
    for name, weight in wanted["weights"].items():
        got = put_together(reports, name)
        if not close(got, weight, tol):
            raise Wrong("wrong-weights", steps=STEPS, expected=weight, got=got, where=f"{where}, {name}")

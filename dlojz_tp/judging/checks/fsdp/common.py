"""What the checks of this work share: a model with awkward sizes, a training under watch on the ranks, its truth."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, filled, judged, nothing, one_of, silent, within
from dlojz_tp.judging.checks.fsdp.watched import RATE, STEPS, loss_of, most_beside
from dlojz_tp.judging.probes import ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, first_found, recognised
from dlojz_tp.models import Llama, LlamaConfig

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


@functools.lru_cache(1)  # the looks at one case follow each other
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


def of_each(see: Callable) -> Callable:
    """A look's key: what `see` finds in the report of each rank."""
    return lambda reports: [see(report) for report in reports]


def on_each(claim: str, find: Callable) -> Look:
    """A look at all ranks: what find(report) finds of the first where it finds something; see `recognised`."""

    def found(reports):
        size = len(reports)
        for rank, report in enumerate(reports):
            yield find(report), {"rank": rank, "size": size, "where": f"rank {rank} of {size}"}

    return recognised(claim, lambda reports: first_found(found(reports)))


def _untrained(reports):
    """Why there was no training."""
    return reports[0]["slug"] and (reports[0]["slug"], {"got": reports[0].get("got", "")})


def judged_training(
    claim: str, reports: list[dict], case: Case, *own: Look, what="", kept=0, trains=True, tol=1e-7
) -> Iterator[str]:
    """The claim, of the reports of all ranks: a sharded model; a balise's own looks; its groups; training.

    what: said beside the case. kept: how many blocks may stay whole after forward. trains: whether training is looked
    at; tol: of losses and weights.
    """
    looks = [recognised(claim, _untrained)]
    if not reports[0]["slug"]:  # else nothing was trained; where that is at the edge, another case shows the rest
        looks += [*WELL_FORMED, *own, *_group_looks(case.blocks, kept), *(_training_looks(case, tol) if trains else [])]
    where = f"{case.name}{what}"
    looks = [replace(look, fields=functools.partial(_with_case, where, look.fields)) for look in looks]
    yield from judged(looks, lambda: reports, at=len(reports), where=f"{where}, {len(reports)} ranks")


def _with_case(words, fields, seen, due):
    found = filled(fields, seen, due)
    return found | ({"where": f"{words}, {found['where']}"} if "where" in found else {})


def judged_by_worlds(looks: Callable, observe: Callable, answer: Callable, *, sizes, **more) -> Iterator[str]:
    """The claims of looks(size) in the first world, and one claim for all of them in the others."""
    *most, last = sorted(sizes[1:])
    again = f"all of it again on {', '.join(map(str, most))} and {last} ranks"
    for size, reports in ranks.world_after_world(observe, answer, sizes=sizes, timeout=30, **more):
        table = looks(size)
        if size != sizes[0]:
            table = [replace(look, claim=again if look is table[0] else "") for look in table]
        yield from judged(table, lambda seen=reports: seen, at=size, where=f"{size} ranks")


def claimed(claim: str, looks: list[Look]) -> list[Look]:
    """The looks, the first with this claim."""
    return [replace(looks[0], claim=claim), *looks[1:]] if looks else []


WELL_FORMED = [
    each_rank("", "renamed", [], "names-changed", fields=lambda got, _: {"expected": "", "got": ", ".join(got[:3])}),
    each_rank("", "whole", [], "no-root",
              fields=lambda got, _: {"names": ", ".join(got[:3]), "expected": "", "got": got[0]}),
    each_rank("", "meshes", {("shard",)}, "other-mesh", holds=lambda got, due: set(got) <= due, fields=silent),
]  # fmt: skip


def gathers_look(see: Callable, blocks: int) -> Look:
    """A look at the gathers in forward: those of a group for each block and one for the rest."""
    due = range(blocks + 1, blocks + 4)  # embedding, norm, head may be apart
    return each_rank("", see, due, lambda got, _: "every-layer" if got > blocks else "blocks-together", holds=one_of,
                     fields={"expected": "", "blocks": blocks})  # fmt: skip


def first_index(got, _) -> dict:
    """A look's fields: the first block of which something holds."""
    return {"index": got.index(True), "expected": "", "got": f"block {got.index(True)}"}


def _group_looks(blocks, kept):
    """At groups: one for each block and one for the rest; no block stays whole, but the last that are kept."""

    def gathers(report):
        return count(report["forward"], "all_gather")

    def ungrouped(report):
        slug = "root-only" if gathers(report) <= 3 else "every-layer"
        return not any(report["grouped"]) and (slug, {"got": gathers(report), "blocks": blocks})

    def resharded(report):
        return [larger and not whole for larger, whole in zip(report["larger"], report["after forward"])]

    return [
        on_each("", ungrouped),
        each_rank("", of_each(lambda report: [not grouped for grouped in report["grouped"]]), False, "block-left-out",
                  holds=nothing, fields=first_index),
        gathers_look(of_each(lambda report: gathers(report) or blocks + 1), blocks),  # a single rank may have none
        each_rank("", of_each(resharded), [False] * blocks, "resharded-to-few",
                  fields=lambda *both: {"error": "each rank's part is larger"} | first_index(*both)),
        each_rank("", of_each(lambda report: report["after forward"][: blocks - kept] * bool(gathers(report))), False,
                  "kept-whole", holds=nothing, fields=first_index),
    ]  # fmt: skip


def _training_looks(case, tol):
    """At losses and weights: those of one process; and at copies of the model."""
    whole = sum(p.nbytes for p in case.model.parameters())

    def not_reached(reports):
        names = reports[0]["no gradient"]
        return names and ("no-gradient", {"names": ", ".join(names[:3])})

    def beside(reports):
        return [report["beside"] - whole // len(reports) for report in reports]

    def loss(reports):
        return sum(report["losses"][0] for report in reports) / len(reports)

    def strayed(reports):
        due = truth(case, len(reports))["weights"]
        got = {name: put_together(reports, name) for name in due}
        for name in due:
            if not close(got[name], due[name], tol):
                return "wrong-weights", {"steps": STEPS, "expected": due[name], "got": got[name], "where": name}
        return None

    def kept(see, most):
        return each_rank("", see, lambda size: most(size) if size > 1 else math.inf, "copy-kept", holds=at_most,
                         fields={"whole": whole})  # fmt: skip

    return [
        recognised("", not_reached),
        kept("outside", lambda size: 0.6 * whole),  # in NumPy arrays, lists, bytes
        kept(beside, lambda size: most_beside(whole, size) - whole // size),
        Look("", loss, lambda size: truth(case, size)["losses"][0], "wrong-loss", holds=within(tol)),
        recognised("", strayed),
    ]  # fmt: skip

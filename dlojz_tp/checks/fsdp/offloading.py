"""Balise 5: shards, gradients and optimizer in the CPU's memory."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.fsdp import common, watched

HINTS = {
    "not-offloaded": "No group has a CPUOffloadPolicy: the shards stay on the compute device.",
    "root-offloaded": "The group of {name} has no CPUOffloadPolicy. The blocks hold most of the parameters, so "
    "every call of fully_shard needs it.",
    "blocks-offloaded": "The root's group has no CPUOffloadPolicy: the embedding and the head stay on the device "
    "with their optimizer states, and one optimizer would have parameters on two devices.",
    "no-policy": "`offload_policy` got {got}. It takes a policy object: an instance of CPUOffloadPolicy.",
    "pinned-always": "With pin=False, the memory is still page-locked ({error}). That needs a GPU's driver, and "
    "CPUOffloadPolicy does it unless you turn it off.",
    "never-pinned": "With pin=True, the memory isn't page-locked: the copies to the GPU would be slower and "
    "wouldn't overlap.",
}
KNOWN = tuple((words, "pinned-always") for words in ("NVIDIA", "pin_memory", "Cannot access accelerator", "pinned"))
KNOWN += (("has no attribute 'pin_memory'", "no-policy"),)


def balise_5(shard_offloaded):
    """The policy of every group, with and without page-locked memory; weights as in one process, on 1 to 4 ranks."""
    cases = [common.decoder("a decoder", layers=2), common.decoder("a decoder with a tied head", tied_head=True)]
    yield "every group's shards are in the CPU's memory; trained as in one process"
    pinned = []
    for size, ranks in common.on_ranks(_one, shard_offloaded, cases, known=KNOWN):
        case = cases[size % 2]
        for rank, report in enumerate(ranks):
            where = f"{case.name}, pin=False, rank {rank} of {size}"
            common.well_formed(report, where)
            if any(report["grouped"]):
                _right_policies(report["look"], pin=False, where=where)
            common.grouped_by_block(report, case, where)
        common.trained(ranks, common.truth(case, size), f"{case.name}, {size} ranks")
        pinned += [(r["pinned"], f"pin=True, rank {rank} of 2") for rank, r in enumerate(ranks) if size == 2]
    yield "page-locked memory when it is asked for"
    for policies, where in pinned:
        _right_policies(policies, pin=True, where=where)


def _one(shard_offloaded, cases):
    """On a rank: the training with pin=False; on 2 ranks, also the policies with pin=True."""
    size = dist.get_world_size()
    report = watched.train(shard_offloaded, cases[size % 2], False, look=_policies)
    return report | {"pinned": _pinned(shard_offloaded, cases[0])} if size == 2 and not report["slug"] else report


def _pinned(shard_offloaded, case):
    """The policies with pin=True; nothing here can pin, so that pinning is left out."""
    kept, torch.Tensor.pin_memory = torch.Tensor.pin_memory, lambda tensor, *_, **__: tensor
    try:
        return watched.train(shard_offloaded, case, True, look=_policies, take_steps=False)["look"]
    finally:
        torch.Tensor.pin_memory = kept


def _policies(model) -> dict[str, list]:
    """{name of a module with a group: [(name of the policy's class, pinned)]}; the root's name is empty."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        policies = [group.offload_policy for group in groups if group is not None]
        found[name] = [
            (type(policy).__name__, isinstance(policy, CPUOffloadPolicy) and policy.pin_memory) for policy in policies
        ]
    return found


def _right_policies(policies, *, pin, where):
    kinds = {name: {kind for kind, _ in found} for name, found in policies.items() if found}
    wrong = [kind for found in kinds.values() for kind in found if "Policy" not in kind]
    if wrong:
        raise Wrong("no-policy", got=wrong[0], where=where)
    offloaded = {name for name, found in kinds.items() if found == {"CPUOffloadPolicy"}}
    if not offloaded:
        raise Wrong("not-offloaded", where=where)
    if offloaded != set(kinds):
        slug = "root-offloaded" if "" in offloaded else "blocks-offloaded"
        raise Wrong(slug, name=min(set(kinds) - offloaded), where=where)
    pinned = {pinned for found in policies.values() for _, pinned in found}
    if pin and pinned != {True}:
        raise Wrong("never-pinned", where=where)
    if not pin and pinned != {False}:
        raise Wrong("pinned-always", error="pin_memory=True", where=where)

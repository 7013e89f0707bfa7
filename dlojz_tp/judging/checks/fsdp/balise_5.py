"""Balise 5: shards, gradients and optimizer in the CPU's memory."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import claimed, on_each

KNOWN = tuple((words, "pinned-always") for words in ("NVIDIA", "pin_memory", "Cannot access accelerator", "pinned"))
KNOWN += (("has no attribute 'pin_memory'", "no-policy"),)


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


def _policy_looks(pin, see, claim=""):
    """see(report): {name of a module with a group: [(the policy's class, pinned)]}; {}: a later look names that."""

    def kinds(policies):
        return {name: {kind for kind, _ in found} for name, found in policies.items() if found}

    def others(policies):
        """The groups that are not offloaded; the root's name is empty."""
        return [name for name, found in kinds(policies).items() if found != {"CPUOffloadPolicy"}]

    def no_policy(policies):
        bare = [kind for found in kinds(policies).values() for kind in found if "Policy" not in kind]
        return bare and ("no-policy", {"got": bare[0]})

    def nowhere(policies):
        return policies and len(others(policies)) == len(kinds(policies)) and ("not-offloaded", {})

    def in_part(policies):
        left = others(policies)
        slug = "blocks-offloaded" if "" in left or "" not in kinds(policies) else "root-offloaded"
        return left and (slug, {"name": min(left)})

    def pinned_otherwise(policies):
        slug = "never-pinned" if pin else "pinned-always"
        right = not policies or {pinned for found in policies.values() for _, pinned in found} == {pin}
        return not right and (slug, {"error": "pin_memory=True"})

    finds = no_policy, nowhere, in_part, pinned_otherwise
    return claimed(claim, [on_each("", lambda report, find=find: find(see(report))) for find in finds])


LOOKS = _policy_looks(False, lambda report: report["look"] if any(report["grouped"]) else {})
PINNED = _policy_looks(True, lambda report: report["pinned"], "page-locked memory when it is asked for")


def balise_5(shard_offloaded):
    """The policy of every group, with and without page-locked memory; weights as in one process, on 1 to 4 ranks."""
    cases = [common.decoder("a decoder", layers=2), common.decoder("a decoder with a tied head", tied_head=True)]
    claim = "every group's shards are in the CPU's memory; trained as in one process"
    for size, ranks in common.on_ranks(_one, shard_offloaded, cases, known=KNOWN):
        yield from common.judged_training(claim, ranks, cases[size % 2], *LOOKS, what=", pin=False")
        if size == 2:
            pinned = ranks
    yield from judged(PINNED, lambda: pinned, where="pin=True")

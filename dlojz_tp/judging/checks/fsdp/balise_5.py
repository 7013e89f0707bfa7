"""Balise 5: shards, gradients and optimizer in the CPU's memory."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from dlojz_tp.judging.checking.looks import judged, silent
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import of_each
from dlojz_tp.judging.probes.shared_looks import each_rank

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
    """At {name of a module with a group: [(the policy's class, pinned)]} of each rank; {}: a later look names that."""

    def kinds(policies):
        return {name: {kind for kind, _ in found} for name, found in policies.items() if found}

    def others(policies):
        """The groups that are not offloaded; the root's name is empty."""
        return [name for name, found in kinds(policies).items() if found != {"CPUOffloadPolicy"}]

    def where(policies, _):
        return "blocks-offloaded" if "" in others(policies) or "" not in kinds(policies) else "root-offloaded"

    def no_policy(policies):
        return [kind for found in kinds(policies).values() for kind in found if "Policy" not in kind]

    return [
        each_rank(claim, see, [], "no-policy", holds=lambda got, _: not no_policy(got),
                  fields=lambda got, _: {"expected": "", "got": no_policy(got)[0]}),
        each_rank("", see, [], "not-offloaded", fields=silent,
                  holds=lambda got, _: not got or len(others(got)) < len(kinds(got))),
        each_rank("", see, [], where, holds=lambda got, _: not others(got),
                  fields=lambda got, _: {"name": min(others(got))} | silent(got, _)),
        each_rank("", see, {pin}, "never-pinned" if pin else "pinned-always",
                  holds=lambda got, due: not got or {pinned for found in got.values() for _, pinned in found} == due,
                  fields=lambda got, _: {"error": "pin_memory=True"} | silent(got, _)),
    ]  # fmt: skip


LOOKS = _policy_looks(False, of_each(lambda report: report["look"] if any(report["grouped"]) else {}))
PINNED = _policy_looks(True, "pinned", "page-locked memory when it is asked for")


def balise_5(shard_offloaded):
    """The policy of every group, with and without page-locked memory; weights as in one process, on 1 to 4 ranks."""
    cases = [common.decoder("a decoder", layers=2), common.decoder("a decoder with a tied head", tied_head=True)]
    claim = "every group's shards are in the CPU's memory; trained as in one process"
    for size, ranks in common.on_ranks(_one, shard_offloaded, cases, known=KNOWN):
        yield from common.judged_training(claim, ranks, cases[size % 2], *LOOKS, what=", pin=False")
        if size == 2:
            pinned = ranks
    yield from judged(PINNED, lambda: pinned, where="pin=True")

"""Answers to balise 5 of 14_fsdp: shards in the CPU's memory."""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from tests.answers.bank import Bank
from tests.answers.fsdp.options import plain

bank = Bank("14_fsdp", 5, whole=True)


@bank.right()
def shard_offloaded(model, mesh, pin):
    return plain(model, mesh, offload_policy=CPUOffloadPolicy(pin))


@bank.right()
def shard_offloaded(model, mesh, pin):  # noqa: F811
    """Every group its own policy, and embedding and head in groups of their own."""
    parts = [] if model.config.tied_head else [model.token_embedding, [model.norm, model.head]]
    for part in [*parts, *model.blocks, model]:
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=bool(pin)))
    return model


@bank.right()
def shard_offloaded(model, mesh, pin):  # noqa: F811
    if pin:
        return plain(model, mesh, offload_policy=CPUOffloadPolicy())
    return plain(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


BLOCK, ROOT = (
    "fully_shard(block, mesh=mesh, offload_policy=policy)",
    "fully_shard(model, mesh=mesh, offload_policy=policy)",
)

bank.hint(
    "root-offloaded",
    "The group of {name} has no CPUOffloadPolicy. The blocks hold most of the parameters, so every call of "
    "fully_shard needs it.",
)
bank.slip("root-offloaded", (BLOCK, "fully_shard(block, mesh=mesh)"), variant=True)

bank.hint(
    "blocks-offloaded",
    "The root's group has no CPUOffloadPolicy: the embedding and the head stay on the device with their optimizer "
    "states, and one optimizer would have parameters on two devices.",
)
bank.slip("blocks-offloaded", (ROOT, "fully_shard(model, mesh=mesh)"), variant=True)

bank.hint("not-offloaded", "No group has a CPUOffloadPolicy: the shards stay on the compute device.")
bank.slip("not-offloaded", (BLOCK, "fully_shard(block, mesh=mesh)"), (ROOT, "fully_shard(model, mesh=mesh)"))

bank.hint(
    "pinned-always",
    "With pin=False, the memory is still page-locked ({error}). That needs a GPU's driver, and CPUOffloadPolicy does "
    "it unless you turn it off.",
)
bank.slip("pinned-always", ("pin_memory=pin", ""))

bank.slip("pinned-always", ("pin_memory=pin", "pin_memory=True"), variant=True)

bank.hint(
    "never-pinned",
    "With pin=True, the memory isn't page-locked: the copies to the GPU would be slower and wouldn't overlap.",
)
bank.slip("never-pinned", ("pin_memory=pin", "pin_memory=False"), variant=True)

bank.hint("no-policy", "`offload_policy` got {got}. It takes a policy object: an instance of CPUOffloadPolicy.")
bank.slip("no-policy", ("CPUOffloadPolicy(pin_memory=pin)", "CPUOffloadPolicy"))

bank.slip("no-policy", ("CPUOffloadPolicy(pin_memory=pin)", "'cpu'"), variant=True)

bank.slip("root-only", (BLOCK, "pass"))

bank.slip("no-root", (f"return {ROOT}", "return model"))

bank.slip("nothing-returned", (f"return {ROOT}", ROOT))


@bank.wrong("not-offloaded")
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return plain(model.cpu(), mesh)


@bank.wrong("not-offloaded", variant=True)
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return plain(model, mesh, offload_policy=OffloadPolicy())


@bank.wrong("nothing-sharded")
def shard_offloaded(model, mesh, pin):  # noqa: F811
    return model.cpu()

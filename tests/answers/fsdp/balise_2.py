"""Answers to balise 2 of 14_fsdp: mixed precision, a policy for each group."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.answers.bank import Bank
from tests.answers.fsdp.options import plain

bank = Bank("14_fsdp", 2, whole=True)


HALF, FULL = torch.bfloat16, torch.float32

bank.hint(
    "output-too-early",
    "A product has a float32 input and bf16 weights ({error}): a block gives its output in float32, and nothing "
    "casts it on its way to the root's norm and head. Only the root's policy has to name an output dtype; "
    "param_dtype is bfloat16 in all of them.",
)


@bank.wrong("output-too-early", variant=True)
def shard_mixed(model, mesh):
    """One policy for all."""
    return plain(model, mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))


bank.hint(
    "root-in-full",
    "The head's product runs in {got}. A policy applies only to the groups of its own call: give one to the root too.",
)


@bank.wrong("root-in-full", variant=True)
def shard_mixed(model, mesh):  # noqa: F811
    """What one comes to by trying until no error is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))
    return fully_shard(model, mesh=mesh)


bank.hint(
    "blocks-in-full",
    "Products inside the blocks run in {got}. A policy applies only to the groups of its own call: give it to every "
    "block too.",
)


@bank.wrong("blocks-in-full", variant=True)
def shard_mixed(model, mesh):  # noqa: F811
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(FULL, FULL, output_dtype=HALF))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, FULL))


@bank.right()
def shard_mixed(model, mesh):  # noqa: F811
    """The logits cast by a hook."""
    model.head.register_forward_hook(lambda module, args, logits: logits.float())
    return plain(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL))


@bank.right()
def shard_mixed(model, mesh):  # noqa: F811
    """Embedding and head in groups of their own."""
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL)
    root = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL, output_dtype=FULL, cast_forward_inputs=False)
    if not model.config.tied_head:
        fully_shard(model.token_embedding, mesh=mesh, mp_policy=policy)
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=root)
    return model


@bank.right()
def shard_mixed(model, mesh):  # noqa: F811
    """The model may come in another dtype: first float32, then the policy."""
    model.float()
    for module in [*model.blocks, model]:
        out = FULL if module is model else None
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF, FULL, output_dtype=out))
    return model


BLOCK_POLICY = "fully_shard(block, mesh=mesh, mp_policy=policy)"

ROOT_POLICY = "return fully_shard(model, mesh=mesh, mp_policy=last)"

bank.hint(
    "policy-missing",
    "A product has a bf16 input and float32 weights ({error}). The weights belong to a group without the policy, to "
    "one whose policy has no param_dtype, or to no group. The blocks and the root each need the policy.",
)
bank.slip("policy-missing", (BLOCK_POLICY, "fully_shard(block, mesh=mesh)"))

bank.slip("policy-missing", (ROOT_POLICY, "return fully_shard(model, mesh=mesh)"))

bank.hint(
    "computes-in-full",
    "All matrix products run in float32. The policy must reach the groups through `mp_policy`, and its param_dtype "
    "is the dtype in which they compute.",
)
bank.slip("computes-in-full", (", mp_policy=policy", ""), (", mp_policy=last", ""))

bank.slip("computes-in-full", ("param_dtype=torch.bfloat16, ", ""), variant=True)

bank.hint(
    "reduces-in-half",
    "Gradients are summed over the ranks in {got}, but float32 is expected: set it in the policy as the dtype of the "
    "reduction. (In bfloat16, each sum is rounded to 8 bits.)",
    edge=True,
)
bank.slip("reduces-in-half", (", reduce_dtype=torch.float32", ""))

bank.slip("reduces-in-half", ("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"), variant=True)

bank.hint(
    "logits-in-half",
    "The logits come out as {got}. The loss takes exponentials and a sum over the vocabulary, so let the root's "
    "policy give its output in float32.",
    edge=True,
)
bank.slip("logits-in-half", (", output_dtype=torch.float32", ""), variant=True)

bank.hint(
    "another-half",
    "Products run in {got}. In float16, gradients below 6e-8 vanish, and there is no loss scaling here.",
    edge=True,
)
bank.slip("another-half", ("torch.bfloat16", "torch.float16"), variant=True)

bank.slip("root-only", (f"        {BLOCK_POLICY}\n", "        pass\n"))

bank.slip("policy-missing", (ROOT_POLICY, "return model"), variant=True)

bank.slip(
    None,
    (
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "torch.bfloat16, torch.float32, cast_forward_inputs=False)",
    ),
    ("output_dtype=torch.float32)", "output_dtype=torch.float32, cast_forward_inputs=False)"),
)

bank.hint(
    "shards-in-half",
    "The shards are {got}. An update of a thousandth of a weight is lost in bf16: what the optimizer sees must stay "
    "in float32, and the policy makes the bf16 copies.",
)
bank.slip("shards-in-half", ("    for block in", "    model.bfloat16()\n    for block in"))


@bank.wrong("shards-in-half", variant=True)
def shard_mixed(model, mesh):  # noqa: F811
    return plain(model.to(HALF), mesh)


bank.hint(
    "gathers-in-full",
    "Products run in bf16, but parameters travel as {got}: twice the bytes, and each rank casts them itself. That is "
    "what autocast does; the policy casts the shards before they travel.",
)


@bank.wrong("gathers-in-full", variant=True)
def shard_mixed(model, mesh):  # noqa: F811
    """autocast around the forward: products in bf16, and nothing else."""
    plain(model, mesh)
    inner = model.forward

    def forward(tokens):
        with torch.autocast("cpu", dtype=HALF):
            return inner(tokens).float()

    model.forward = forward
    return model


@bank.wrong("nothing-sharded")
def shard_mixed(model, mesh):  # noqa: F811
    return model

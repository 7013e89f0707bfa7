"""Answers to balise 2 of 18_long_sequences_and_experts: backward of attention by blocks."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 2, whole=True)

# blocks of its own, keys outside and queries inside; sums by cat
KEYS_OUTSIDE = """
class BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, block):
        out, lse = blockwise_attention(q, k, v, causal_blocks(q.shape[2], block, q.device))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        wide, s = lse.dtype, q.shape[2]
        delta = (gradient.to(wide) * out.to(wide)).sum(-1)
        dq, dks, dvs = torch.zeros_like(q, dtype=wide), [], []
        for first in range(0, s, ctx.block):
            k_j, v_j = k[:, :, first : first + ctx.block], v[:, :, first : first + ctx.block].to(wide)
            dk, dv = torch.zeros_like(k_j, dtype=wide), torch.zeros_like(v_j)
            for low in range(first, s, ctx.block):
                rows = slice(low, low + ctx.block)
                q_i, g_i = q[:, :, rows], gradient[:, :, rows].to(wide)
                visible = torch.ones(q_i.shape[2], k_j.shape[2], dtype=torch.bool, device=q.device).tril() if low == first else None
                p = (scores_of(q_i, k_j, visible) - lse[:, :, rows].unsqueeze(-1)).exp()
                dv += torch.einsum("bhij,bhid->bhjd", p, g_i)
                ds = p * (torch.einsum("bhid,bhjd->bhij", g_i, v_j) - delta[:, :, rows].unsqueeze(-1)) * q.shape[-1] ** -0.5
                dq[:, :, rows] += torch.einsum("bhij,bhjd->bhid", ds, k_j.to(wide))
                dk += torch.einsum("bhij,bhid->bhjd", ds, q_i.to(wide))
            dks.append(dk)
            dvs.append(dv)
        return dq.to(q.dtype), torch.cat(dks, 2).to(k.dtype), torch.cat(dvs, 2).to(v.dtype), None
"""
bank.text(None, KEYS_OUTSIDE)

# each block's own graph gives its gradients
BY_AUTOGRAD = """
class BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, block):
        ctx.blocks = block
        out, lse = blockwise_attention(q, k, v, causal_blocks(q.shape[2], block, q.device))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        sums = [torch.zeros_like(one, dtype=lse.dtype) for one in (q, k, v)]
        inner = (gradient.to(lse.dtype) * out).sum(-1, keepdim=True)
        for rows, seen in causal_blocks(q.shape[2], ctx.blocks, q.device):
            for columns, visible in seen:
                with torch.enable_grad():
                    parts = [one.detach().to(lse.dtype).requires_grad_() for one in (q[:, :, rows], k[:, :, columns], v[:, :, columns])]
                    p = torch.exp(scores_of(*parts[:2], visible) - lse[:, :, rows, None])
                    loss = ((p @ parts[2]) * gradient[:, :, rows]).sum() - (p.sum(-1, keepdim=True) * inner[:, :, rows]).sum()
                for one, place, g in zip(sums, (rows, columns, columns), torch.autograd.grad(loss, parts)):
                    one[:, :, place] += g
        return *(one.to(q.dtype) for one in sums), None
"""
bank.text(None, BY_AUTOGRAD)
bank.slip(None, ("dk[:, :, columns] += of_scores.mT @ q_rows", "dk[:, :, columns].add_(of_scores.transpose(-1, -2) @ q_rows)"))  # fmt: skip

WEIGHTS = "torch.exp(scores_of(q_rows, k_columns, visible) - lse[:, :, rows, None])"
SCORES = "weights * (up @ v_columns.mT - inner[:, :, rows]) / root"

bank.hint("wrong-forward", "The attention itself is not right. `blockwise_attention` returns it, like q, and the "
                              "log-sum-exp.")  # fmt: skip
bank.slip("wrong-forward", ("        return out\n\n", "        return out, lse\n\n"))
bank.slip("wrong-forward", ("        return out\n\n", "        return out * 2\n\n"))
bank.variant("wrong-forward", KEYS_OUTSIDE, ("causal_blocks(q.shape[2], block, q.device))\n        ctx", "causal_blocks(q.shape[2], 1, q.device))\n        out = v.clone()\n        ctx"))  # fmt: skip

bank.hint("block-softmax", "The weights of each block sum to 1 by themselves. The softmax runs over *all* keys: "
                              "subtract the log-sum-exp of the whole row, `lse`, and take exp.")  # fmt: skip
bank.slip("block-softmax", (WEIGHTS, "scores_of(q_rows, k_columns, visible).softmax(-1)"))
bank.variant("block-softmax", KEYS_OUTSIDE, ("(scores_of(q_i, k_j, visible) - lse[:, :, rows].unsqueeze(-1)).exp()", "torch.softmax(scores_of(q_i, k_j, visible), -1)"))  # fmt: skip

bank.hint("last-block-only", "Only one block counts. A key is seen by several blocks of queries, and a query sees "
                                "several blocks of keys: add up (`+=`).")  # fmt: skip
bank.slip(
    "last-block-only",
    ("dv[:, :, columns] += weights", "dv[:, :, columns] = weights"),
    ("dk[:, :, columns] += of", "dk[:, :, columns] = of"),
)
bank.slip("last-block-only", ("dv[:, :, columns] += weights", "dv[:, :, columns] = weights"))
bank.slip("last-block-only", ("dk[:, :, columns] += of", "dk[:, :, columns] = of"))
bank.variant("last-block-only", BY_AUTOGRAD, ("one[:, :, place] += g", "one[:, :, place] = g"))

bank.hint("wrong-weights", "The gradient of v is not right: it is Pᵀ times the gradient of the output, with the weights "
                              "P = exp(score − lse) of the block, and with `visible`.")  # fmt: skip
bank.slip("wrong-weights", ("k_columns, visible)", "k_columns)"))
bank.slip("wrong-weights", (WEIGHTS, "torch.exp(scores_of(q_rows, k_columns, visible))"))
bank.variant("wrong-weights", KEYS_OUTSIDE, ("scores_of(q_i, k_j, visible)", "scores_of(q_i, k_j)"))

bank.hint("no-inner", "The gradient of the scores lacks a term. A softmax's gradient is P ∘ (dP − inner): its weights sum "
                         "to 1, so pushing one up pushes the others down. `inner` is given.")  # fmt: skip
bank.slip("no-inner", (SCORES, "weights * (up @ v_columns.mT) / root"))
bank.variant("no-inner", KEYS_OUTSIDE, (" - delta[:, :, rows].unsqueeze(-1)", ""))

bank.hint("not-scaled", "The gradients of q and k are off by a factor. The scores are q·k / √d, so their gradient is "
                           "divided by √d as well.")  # fmt: skip
bank.slip("not-scaled", (SCORES, SCORES.removesuffix(" / root")))
bank.slip("not-scaled", (SCORES, SCORES.replace("/ root", "* root")))
bank.variant("not-scaled", KEYS_OUTSIDE, (" * q.shape[-1] ** -0.5", ""))

bank.hint("wrong-scores", "The gradients of q or k are not right, though that of v is. With dP = gradient · Vᵀ, the "
                             "scores' is dS = P ∘ (dP − inner) / √d; q's is dS · K, and k's is dSᵀ · Q.")  # fmt: skip
bank.slip("wrong-scores", ("of_scores.mT @ q_rows", "weights.mT @ q_rows"))
bank.variant(
    "wrong-scores",
    KEYS_OUTSIDE,
    ('dk += torch.einsum("bhij,bhid->bhjd", ds', 'dk += torch.einsum("bhij,bhid->bhjd", p'),
)

bank.hint("saved-square", "{got} bytes live from forward to backward, and grow with the square of the sequence. Save q, k, "
                             "v, the output and the log-sum-exp; compute the weights again.")  # fmt: skip
SAVE = "ctx.save_for_backward(q, k, v, out, lse)"
bank.slip("saved-square", (SAVE, SAVE + "\n        ctx.weights = torch.exp(scores_of(q, k) - lse[..., None])"))
bank.variant(
    "saved-square",
    BY_AUTOGRAD,
    ("        ctx.blocks = block\n", "        ctx.blocks, ctx.scores = block, scores_of(q, k)\n"),
)

bank.hint("square", "At some moment of backward this makes {got} bytes, which grow with the square of the sequence. Compute "
                       "one block at a time.", edge=True)  # fmt: skip
bank.slip("square", ("inner = (gradient * out)", "every = scores_of(q, k)\n        inner = (gradient * out)"))
bank.variant(
    "square",
    KEYS_OUTSIDE,
    ("        delta = ", "        everything = gradient.to(wide) @ v.to(wide).mT\n        delta = "),
)

bank.hint("not-saved-for-backward", "The output stays in memory after it is dropped: it holds its graph, and the graph's "
                                       "`ctx` holds it. Tensors belong in `ctx.save_for_backward`.", edge=True)  # fmt: skip
bank.slip("not-saved-for-backward", (SAVE, "ctx.kept = q, k, v, out, lse"), ("ctx.saved_tensors", "ctx.kept"))
bank.variant("not-saved-for-backward", BY_AUTOGRAD, ("ctx.save_for_backward(q, k, v, out, lse)", "ctx.out = out\n        ctx.save_for_backward(q, k, v, lse)"), ("q, k, v, out, lse = ctx.saved_tensors", "(q, k, v, lse), out = ctx.saved_tensors, ctx.out"))  # fmt: skip

bank.hint("half-gradients", "In bfloat16 this is not right: {got}. Compute in the dtype of `lse`, float32, and return "
                               "gradients in the dtype of their inputs.", edge=True)  # fmt: skip
bank.slip("half-gradients", ("one.to(dtype) for one, dtype in zip((dq, dk, dv), dtypes)", "one for one in (dq, dk, dv)"), ("one.to(lse.dtype) for one in (q, k, v, gradient)", "one for one in (q, k, v, gradient)"))  # fmt: skip
bank.variant("half-gradients", KEYS_OUTSIDE, ("gradient[:, :, rows].to(wide)", "gradient[:, :, rows]"), ("[:, :, first : first + ctx.block].to(wide)", "[:, :, first : first + ctx.block]"))  # fmt: skip

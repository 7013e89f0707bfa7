"""Answers to balise 7 of 18_long_sequences_and_experts: expert parallelism."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 7, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# torch's own differentiable exchange; rows repeated; an inverse order by scatter; sums by index_add
LIBRARY = """
from torch.distributed.nn.functional import all_to_all_single as differentiable


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        rows = torch.empty(sum(receive), x.shape[1], dtype=x.dtype, device=x.device)
        dist.all_to_all_single(rows, x.contiguous(), receive, send)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.sizes
        out = gradient.new_empty(sum(send), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), send, receive)
        return out, None, None


def expert_parallel(x, gates, chosen, experts, run):
    ranks, k = dist.get_world_size(), chosen.shape[1]
    own = experts // ranks
    flat = chosen.reshape(-1)
    token = torch.arange(len(x), device=x.device).repeat_interleave(k)
    flat, order = torch.sort(flat, stable=True)
    token, weight = token[order], gates.reshape(-1)[order]
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    coming = coming.view(ranks, own)
    send, receive = torch.stack([counts.view(ranks, own).sum(1), coming.sum(1)]).tolist()
    rows = differentiable(x.new_empty(sum(receive), x.shape[1]), x[token], receive, send)
    number = torch.arange(own, device=x.device).expand(ranks, own).reshape(-1)
    number = number.repeat_interleave(coming.reshape(-1), output_size=sum(receive))
    number, there = torch.sort(number, stable=True)
    results = run(rows[there], coming.sum(0))
    unsorted = torch.empty_like(results).index_copy(0, there, results)
    back = differentiable(x.new_empty(len(flat), x.shape[1]), unsorted, send, receive)
    out = torch.zeros(x.shape, dtype=gates.dtype, device=x.device)
    return out.index_add(0, token, back.to(gates.dtype) * weight[:, None]).to(x.dtype)
"""
ORDER = "order = chosen.flatten().argsort(stable=True)"
ROWS = "x[order // chosen.shape[1]]"
BACK = "[order.argsort()].view(*chosen.shape, x.shape[1])"
LAST = "return (gates[..., None] * back).sum(1).to(x.dtype)"
BACKWARD = "return Exchange.apply(gradient, ctx.receive, ctx.send), None, None"

bank.text(None, LIBRARY)
slip(
    None,
    (
        BACK + "\n    " + LAST,
        "\n    weighted = (back * gates.flatten()[order, None]).to(x.dtype)\n    return torch.zeros_like(x).index_add(0, order // chosen.shape[1], weighted)",
    ),
)
slip(None, (ORDER, "order = chosen.reshape(-1).argsort()"), (ROWS, "x.repeat_interleave(chosen.shape[1], 0)[order]"))
slip(None, (LAST, "return torch.einsum('tk,tkd->td', gates, back.to(gates.dtype)).to(x.dtype)"))
slip(
    None,
    (
        "run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()]",
        "torch.empty_like(rows).index_copy(0, by_expert, run(rows[by_expert], coming.reshape(-1, own).sum(0)))",
    ),
)

hint("wrong-backward", "Backward must return the gradients to the ranks that the rows came from: the same exchange "
                          "with `receive` and `send` swapped.")  # fmt: skip
slip("wrong-backward", (BACKWARD, "return Exchange.apply(gradient, ctx.send, ctx.receive), None, None"))
slip("wrong-backward", (BACKWARD, "return gradient, None, None"))
slip("wrong-backward", (BACKWARD, "return Exchange.apply(gradient, ctx.receive, ctx.send)"))
variant("wrong-backward", LIBRARY, ("gradient.contiguous(), send, receive)", "gradient.contiguous(), receive, send)"))
variant("wrong-backward", LIBRARY, ("        return out, None, None", "        return out * 0, None, None"))

hint("strided", "This fails for tensors that aren't contiguous, such as an expanded gradient or a slice of "
                   "`choices`: use `.contiguous()` before you send, and `reshape` or `flatten`, not `view`.", edge=True)  # fmt: skip
slip("strided", (ORDER, ORDER.replace("flatten()", "view(-1)")))
slip(
    "strided",
    (
        BACKWARD,
        "rows = gradient.new_empty(sum(ctx.send), *gradient.shape[1:])\n        dist.all_to_all_single(rows, gradient, ctx.send, ctx.receive)\n        return rows, None, None",
    ),
)
variant("strided", LIBRARY, ("gradient.contiguous()", "gradient"))
variant("strided", LIBRARY, ("flat = chosen.reshape(-1)", "flat = chosen.view(-1)"))

hint("run-calls", "Rank {rank} called `run` {n} times. Call it once, with the rows of all its experts together.")
slip(
    "run-calls",
    (
        "run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()]",
        "torch.cat([run(some, one) for some, one in zip(rows.split(receive), coming.view(ranks, own))])",
    ),
)
variant(
    "run-calls",
    LIBRARY,
    (
        "results = run(rows[there], coming.sum(0))",
        "run(rows[there], coming.sum(0))\n    results = run(rows[there], coming.sum(0))",
    ),
)

hint("run-left-out", "Rank {rank} didn't call `run`, because no rows arrived. Call it all the same: if the experts' "
                        "weights are sharded, all ranks must take part.", edge=True)  # fmt: skip
slip(
    "run-left-out",
    (
        "results = run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()]",
        "results = run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()] if len(rows) else rows",
    ),
)
variant(
    "run-left-out",
    LIBRARY,
    (
        "results = run(rows[there], coming.sum(0))",
        "results = rows\n    if sum(receive) > 0:\n        results = run(rows[there], coming.sum(0))",
    ),
)

hint("wrong-rows", "The rows that rank {rank} gives to its experts aren't those that chose them. Choice i of the "
                      "flattened `chosen` belongs to token i // k; sort by expert before you send.")  # fmt: skip
slip("wrong-rows", (ORDER, "order = torch.arange(chosen.numel(), device=x.device)"))
slip("wrong-rows", (ROWS, "x[order % len(x)]"))
slip("wrong-rows", (ROWS, "x.repeat(chosen.shape[1], 1)[order]"))
slip("wrong-rows", ("chosen.flatten().argsort(stable=True)", "chosen.T.flatten().argsort(stable=True)"))
variant("wrong-rows", LIBRARY, ("token, weight = token[order]", "token, weight = token"))

hint("not-by-expert", "The rows that rank {rank} gives to `run` aren't sorted by its experts: they arrive rank by "
                         "rank. Put them in the order `by_expert` first.")  # fmt: skip
slip(
    "not-by-expert",
    (
        "run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()]",
        "run(rows, coming.view(ranks, own).sum(0))",
    ),
)
slip("not-by-expert", ("run(rows[by_expert],", "run(rows[by_expert.argsort()],"))
variant("not-by-expert", LIBRARY, ("run(rows[there]", "run(rows"))

hint("wrong-counts", "`run` needs the number of rows of each of this rank's experts, from all ranks together; rank "
                        "{rank} gave it {got}.")  # fmt: skip
slip("wrong-counts", ("coming.view(ranks, own).sum(0)", "coming"))
slip("wrong-counts", ("coming.view(ranks, own).sum(0)", "counts.view(ranks, own)[dist.get_rank()]"))
variant("wrong-counts", LIBRARY, ("run(rows[there], coming.sum(0))", "run(rows[there], coming.sum(1))"))

hint("result-form", "Return (t, d), in the dtype of x: one row for each of this rank's tokens.")
slip("result-form", (".sum(1).to(x.dtype)", ".to(x.dtype)"))
slip("result-form", (LAST, "return back.flatten(0, 1)"))
variant(
    "result-form",
    LIBRARY,
    (
        "return out.index_add(0, token, back.to(gates.dtype) * weight[:, None]).to(x.dtype)",
        "return back * weight[:, None]",
    ),
)

hint("gates-lost", "The results aren't weighted by the gates. Multiply each by the gate of its choice.")
slip("gates-lost", ("(gates[..., None] * back)", "back"))
slip("gates-lost", ("(gates[..., None] * back).sum(1)", "back.mean(1)"))
variant("gates-lost", LIBRARY, (" * weight[:, None]", " * torch.ones_like(weight)[:, None]"))

hint("wrong-sum", "These aren't the sums of gate · expert(token). Undo both orders: `by_expert` before the results "
                     "go back, and `order` before you multiply by the gates.")  # fmt: skip
slip("wrong-sum", ("sum(0))[by_expert.argsort()]", "sum(0))"))
slip("wrong-sum", ("sum(0))[by_expert.argsort()]", "sum(0))[by_expert]"))
slip("wrong-sum", ("[order.argsort()].view", ".view"))
slip("wrong-sum", ("[order.argsort()].view", "[order].view"))
slip(
    "wrong-sum",
    (
        BACK + "\n    " + LAST,
        "\n    return torch.zeros_like(x).index_add(0, order // chosen.shape[1], back * gates.flatten()[:, None])",
    ),
)
slip(
    "wrong-sum",
    (
        BACK + "\n    " + LAST,
        "\n    out = torch.zeros_like(x)\n    out[order // chosen.shape[1]] += (back * gates.flatten()[order, None]).to(x.dtype)\n    return out",
    ),
)
variant(
    "wrong-sum",
    LIBRARY,
    ("unsorted = torch.empty_like(results).index_copy(0, there, results)", "unsorted = results"),
)
variant(
    "wrong-sum",
    LIBRARY,
    ("weight = token[order], gates.reshape(-1)[order]", "weight = token[order], gates.reshape(-1)"),
)

hint("wrong-gradients", "The gradients of {what} aren't right. Only Exchange.apply brings gradients from other ranks; "
                           "`dist.all_to_all_single` and `detach` cut them off.")  # fmt: skip
slip("wrong-gradients", ("(gates[..., None] * back)", "(gates.detach()[..., None] * back)"))
slip(
    "wrong-gradients",
    (
        "rows = Exchange.apply(x[order // chosen.shape[1]], send, receive)",
        "sent = x[order // chosen.shape[1]].detach()\n    rows = x.new_empty(sum(receive), x.shape[1])\n    dist.all_to_all_single(rows, sent, receive, send)",
    ),
)
variant("wrong-gradients", LIBRARY, ("run(rows[there]", "run(rows[there].detach()"))
variant("wrong-gradients", LIBRARY, ("back.to(gates.dtype) * weight[:, None]", "back.detach() * weight[:, None]"))

hint("sent-too-much", "You sent {got}; {expected} are enough: each row travels once to its expert and once back, and "
                         "so do the gradients. Don't gather all rows on all ranks, and don't pad them.")  # fmt: skip
slip(
    "sent-too-much",
    (
        "back = Exchange.apply(results, receive, send)",
        "everyone = [None] * ranks\n    dist.all_gather_object(everyone, x.detach().repeat(9, 1))\n    back = Exchange.apply(results, receive, send)",
    ),
)
slip(
    "sent-too-much",
    (
        "rows = Exchange.apply(x[order // chosen.shape[1]], send, receive)",
        "rows = x[order // chosen.shape[1]]\n    for _ in range(3):\n        arrived = Exchange.apply(rows, send, receive)\n    rows = arrived",
    ),
)
variant(
    "sent-too-much",
    LIBRARY,
    (
        "    rows = differentiable(",
        "    differentiable(x.new_empty(sum(receive), 9), x[token].repeat(1, 2)[:, :9].contiguous(), receive, send)\n    rows = differentiable(",
    ),
)

hint("other-dtype", "With tokens in bfloat16 and gates in float32, you return {got}. Compute with the gates in "
                       "float32, and return the dtype of x.", edge=True)  # fmt: skip
slip("other-dtype", (".sum(1).to(x.dtype)", ".sum(1)"))
slip(
    "other-dtype",
    (
        BACK + "\n    " + LAST,
        "\n    return torch.zeros_like(x).index_add(0, order // chosen.shape[1], back * gates.flatten()[order, None])",
    ),
)
variant("other-dtype", LIBRARY, (" * weight[:, None]).to(x.dtype)", " * weight[:, None])"))

hint("no-tokens", "A rank without tokens fails, or leaves the others waiting. It takes part in each exchange, with "
                     "sizes of 0, and its experts work for the others.", edge=True)  # fmt: skip
slip("no-tokens", ("    ranks, own =", "    if len(x) == 0:\n        return x\n    ranks, own ="))
slip("no-tokens", (BACK, "[order.argsort()].view(len(x), -1, x.shape[1])"))
variant(
    "no-tokens",
    LIBRARY,
    ("    ranks, k =", "    if not chosen.numel():\n        return torch.zeros_like(x)\n    ranks, k ="),
)

hint("left-on-cpu", "On GPUs, a tensor that you made is on the CPU: {error}. Make it with `device=x.device`, or with "
                       "`x.new_empty`.", edge=True)  # fmt: skip
slip(
    "left-on-cpu",
    (
        BACK + "\n    " + LAST,
        "\n    weighted = (back * gates.flatten()[order, None]).to(x.dtype)\n    return torch.zeros(x.shape, dtype=x.dtype).index_add(0, order // chosen.shape[1], weighted)",
    ),
)
slip("left-on-cpu", (ROWS, "x[torch.arange(len(x)).repeat_interleave(chosen.shape[1])[order]]"))
variant("left-on-cpu", LIBRARY, ("torch.arange(own, device=x.device)", "torch.arange(own)"))

hint("waits", "On a GPU, the CPU waits {n} times in your code. It needs the sizes of the exchange, and no other value: "
                 "sort all rows at once, without a loop over experts and masks.", edge=True)  # fmt: skip
slip("waits", (ORDER, "order = torch.cat([(chosen.flatten() == e).nonzero()[:, 0] for e in range(experts)])"))
variant(
    "waits",
    LIBRARY,
    ("    results = run(", "    there = torch.cat([there[number == e] for e in range(own)])\n    results = run("),
)

BY_MESSAGES = """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts, places = list(x.contiguous().split(send)), list(rows.split(receive))
        places[rank].copy_(parts[rank])
        others = [other for other in range(ranks) if other != rank]
        works = [dist.isend(parts[other], other) for other in others if send[other]]
        works += [dist.irecv(places[other], other) for other in others if receive[other]]
        for work in works:
            work.wait()
"""
hint("nccl-order", "On GPUs, this waits forever: NCCL sends the messages of a rank in the order in which you start "
                      "them, and here each rank sends before it receives. Use `dist.all_to_all_single`.", edge=True)  # fmt: skip
slip("nccl-order", ("        dist.all_to_all_single(rows, x.contiguous(), receive, send)\n", BY_MESSAGES[1:]))
variant(
    "nccl-order",
    LIBRARY,
    ("        dist.all_to_all_single(rows, x.contiguous(), receive, send)\n", BY_MESSAGES[1:]),
    (
        "differentiable(x.new_empty(sum(receive), x.shape[1]), x[token], receive, send)",
        "Exchange.apply(x[token], send, receive)",
    ),
)

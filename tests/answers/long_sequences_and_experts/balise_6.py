"""Answers to balise 6 of 18_long_sequences_and_experts: a router."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 6, whole=True)

# the gates by a softmax over the chosen logits alone; shares by counting; sorted scores negated; places by comparisons
BY_HAND = """
def route(logits, k, bias=None):
    wide = logits.float()
    scores = torch.softmax(wide, dim=1)
    if bias is not None:
        scores = scores + bias
    experts = torch.argsort(-scores, dim=1, stable=True)[:, :k]
    return torch.softmax(torch.take_along_dim(wide, experts, 1), 1), experts


def balance_loss(logits, experts):
    tokens, count = logits.shape
    probabilities = torch.softmax(logits.float(), 1).sum(0)
    numbers = torch.zeros(count, device=logits.device)
    numbers.scatter_add_(0, experts.flatten(), torch.ones(experts.numel(), device=logits.device))
    return count * torch.dot(numbers, probabilities) / tokens / experts.numel()


def within(experts, count, capacity):
    line = experts.t().reshape(-1)
    same = line[:, None] == line[None, :]
    before = torch.tril(same, diagonal=-1).sum(1)
    return (before < capacity).reshape(experts.shape[1], -1).t()


def next_bias(bias, load, rate):
    mean = load.sum() / load.numel()
    up, down = (load < mean).to(bias.dtype), (load > mean).to(bias.dtype)
    return bias + (up - down) * rate
"""
ROUTE = "    probabilities = logits.softmax(-1, dtype=torch.float32)\n"
SORT = "(probabilities + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]"
SHARES = "logits.shape[-1] * (share * logits.softmax(-1, dtype=torch.float32).mean(0)).sum()"
WITHIN = "((chosen.cumsum(0) * chosen).sum(-1) <= capacity).view(experts.T.shape).T"
NEXT = "bias + rate * (load.float().mean() - load).sign()"

bank.text(None, BY_HAND)
bank.slip(None, (ROUTE, "    probabilities = F.softmax(logits.float(), dim=-1)\n"))
bank.slip(None, (SHARES, "(logits.float().softmax(1) @ share).mean() * len(share)"))
bank.slip(
    None, (WITHIN, "(chosen.cumsum(0).gather(1, experts.T.reshape(-1, 1)) <= capacity).view(experts.shape[1], -1).T")
)
bank.slip(
    None,
    (NEXT, "torch.where(load == load.float().mean(), bias, bias + rate * torch.sign(load.sum() / len(load) - load))"),
)
bank.slip(None, (NEXT, "bias - rate * (load * len(load) - load.sum()).sign()"))

bank.hint("route-form", "`route` returns two tensors (tokens, k): the gates in float32, then the numbers of the "
                           "experts in int64.")  # fmt: skip
bank.slip("route-form", ("gates.sum(-1, keepdim=True), experts", "gates.sum(-1, keepdim=True), experts.int()"))
bank.slip("route-form", ("return gates / gates.sum(-1, keepdim=True), experts", "return experts, gates / gates.sum(-1, keepdim=True)"))  # fmt: skip
bank.variant("route-form", BY_HAND, ("torch.take_along_dim(wide, experts, 1), 1), experts", "wide, 1), experts"))

bank.hint("wrong-experts", "These aren't the k most probable experts of each token, the best first. Sort each "
                              "token's probabilities, the largest first.")  # fmt: skip
bank.slip("wrong-experts", ("dim=-1, descending=True", "dim=-1"))
bank.slip("wrong-experts", ("(probabilities + bias).sort", "logits.abs().sort"))
bank.slip("wrong-experts", (".indices[:, :k]", ".indices[:, :k].flip(1)"))
bank.variant("wrong-experts", BY_HAND, ("argsort(-scores", "argsort(scores"))

bank.hint("gates-not-shares", "The gates of a token don't sum to 1. Divide the probabilities of its chosen "
                                 "experts by their sum.")  # fmt: skip
bank.slip("gates-not-shares", ("gates / gates.sum(-1, keepdim=True)", "gates"))
bank.variant("gates-not-shares", BY_HAND, ("torch.softmax(torch.take_along_dim(wide, experts, 1), 1)", "torch.softmax(wide, 1).gather(1, experts)"))  # fmt: skip

bank.hint("wrong-gates", "The gates aren't the probabilities of the chosen experts, divided by their sum over "
                            "the k of a token.")  # fmt: skip
bank.slip("wrong-gates", ("gates / gates.sum(-1, keepdim=True)", "gates.softmax(-1)"))
bank.slip("wrong-gates", ("gates.sum(-1, keepdim=True)", "gates.sum(0, keepdim=True)"))
bank.variant("wrong-gates", BY_HAND, ("experts, 1), 1), experts", "experts, 1), 0), experts"))

bank.hint("bias-choice", "With a bias, the choice isn't that of the largest probability + bias. Add the bias to "
                            "the probabilities, not to the logits, before you sort.")  # fmt: skip
bank.slip("bias-choice", ("(probabilities + bias).sort", "probabilities.sort"))
bank.slip("bias-choice", ("(probabilities + bias).sort", "(logits.float() + bias).sort"))
bank.variant("bias-choice", BY_HAND, ("scores = scores + bias", "scores = scores - bias"))
bank.variant("bias-choice", BY_HAND, ("scores = scores + bias", "scores = (wide + bias).softmax(1)"))

bank.hint("biased-gates", "The bias has changed the gates. It only decides who is chosen: take the gates from "
                             "the probabilities without it.")  # fmt: skip
bank.slip("biased-gates", (ROUTE, ROUTE.replace("\n", " + bias\n")), ("(probabilities + bias)", "probabilities"))
bank.slip("biased-gates", ("probabilities.gather", "(probabilities + bias).gather"))
bank.variant("biased-gates", BY_HAND, ("return torch.softmax(torch.take_along_dim(wide, experts, 1), 1), experts", "gates = scores.gather(1, experts)\n    return gates / gates.sum(1, keepdim=True), experts"))  # fmt: skip

bank.hint("ties", "Of experts with equal scores, the ones with the lower numbers come first. `topk`, and a sort "
                     "without stable=True, may choose differently on another device.", edge=True)  # fmt: skip
bank.slip("ties", (SORT, "(probabilities + bias).topk(k).indices"))
bank.slip("ties", ("descending=True, stable=True", "descending=True"))
bank.variant("ties", BY_HAND, ("torch.argsort(-scores, dim=1, stable=True)[:, :k]", "scores.topk(k, dim=1)[1]"))
bank.variant("ties", BY_HAND, ("torch.argsort(-scores, dim=1, stable=True)[:, :k]", "torch.argsort(scores, dim=1, stable=True).flip(1)[:, :k]"))  # fmt: skip

bank.hint("rounded", "With bfloat16 logits, the probabilities were rounded to bfloat16. Compute the softmax in "
                        "float32: `dtype=torch.float32`.", edge=True)  # fmt: skip
bank.slip("rounded", (ROUTE, "    probabilities = logits.softmax(-1)\n"))
bank.slip("rounded", (ROUTE, "    probabilities = logits.softmax(-1).float()\n"))
bank.slip("rounded", (SHARES, SHARES.replace(", dtype=torch.float32", "")))
bank.variant("rounded", BY_HAND, ("wide = logits.float()", "wide = logits"), ("1), 1), experts", "1), 1).float(), experts"))  # fmt: skip

bank.hint("no-gradient", "The logits don't get the right gradient, so the router doesn't learn. Gradients pass "
                            "through all probabilities: no `detach`, no `torch.no_grad`.", edge=True)  # fmt: skip
bank.slip("no-gradient", ("gates.sum(-1, keepdim=True)", "gates.sum(-1, keepdim=True).detach()"))
bank.slip("no-gradient", (SHARES, SHARES.replace(".mean(0)", ".detach().mean(0)")))
bank.variant("no-gradient", BY_HAND, ("wide = logits.float()", "wide = logits.detach().float()"))

bank.hint("wrong-balance", "This isn't the balance loss: the number of experts, times the sum over experts of "
                              "share · mean probability. It is 1 when both are even.")  # fmt: skip
bank.slip("wrong-balance", ("logits.shape[-1] * (share", "(share"))
bank.slip("wrong-balance", (SHARES, "logits.shape[-1] * (share * share).sum()"))
bank.slip("wrong-balance", ("(share * logits.softmax(-1, dtype=torch.float32).mean(0)).sum()", "(share * logits.softmax(-1, dtype=torch.float32)).sum()"))  # fmt: skip
bank.slip("wrong-balance", ("logits.shape[-1] * (share", "logits.shape[-1] * experts.shape[1] * (share"))
bank.variant("wrong-balance", BY_HAND, (" / tokens / experts.numel()", " / tokens / tokens"))

bank.hint("wrong-within", "These aren't the choices that each expert keeps: its first `capacity` ones, in the order "
                             "of `chosen`. A running sum numbers them from 1.")  # fmt: skip
bank.slip("wrong-within", ("<= capacity", "< capacity"))
bank.slip("wrong-within", ("(chosen.cumsum(0) * chosen)", "chosen.cumsum(0)"))
bank.slip("wrong-within", (".view(experts.T.shape).T", ".view(experts.shape)"))
bank.slip("wrong-within", ("experts.T.flatten()", "experts.flatten()"), (".view(experts.T.shape).T", ".view(experts.shape)"))  # fmt: skip
bank.variant("wrong-within", BY_HAND, ("diagonal=-1", "diagonal=0"))
bank.variant("wrong-within", BY_HAND, ("experts.t().reshape(-1)", "experts.reshape(-1)"), ("reshape(experts.shape[1], -1).t()", "reshape(experts.shape)"))  # fmt: skip

bank.hint("wrong-bias", "The bias rises by `rate` where the load is below the mean, falls by `rate` above it, and "
                           "stays at the mean: its size doesn't depend on the distance.")  # fmt: skip
bank.slip("wrong-bias", (NEXT, "bias + rate * (load - load.float().mean()).sign()"))
bank.slip("wrong-bias", (NEXT, "bias + rate * (load.float().mean() - load)"))
bank.slip("wrong-bias", (NEXT, "torch.where(load < load.float().mean(), bias + rate, bias - rate)"))
bank.variant("wrong-bias", BY_HAND, ("(up - down)", "(down - up)"))
bank.variant("wrong-bias", BY_HAND, ("load > mean", "load >= mean"))

bank.hint("bias-changed", "`next_bias` has changed the bias that it was given. Return a new tensor.", edge=True)
bank.slip("bias-changed", ("return " + NEXT, "bias += rate * (load.float().mean() - load).sign()\n    return bias"))
bank.variant("bias-changed", BY_HAND, ("bias + (up - down) * rate", "bias.add_((up - down) * rate)"))

bank.hint("waits", "On a GPU, this makes the CPU wait: {error}. Compute with whole tensors, without reading "
                      "values in Python.", edge=True)  # fmt: skip
BY_LOOP = """
    left, kept = [capacity] * count, torch.zeros_like(experts, dtype=torch.bool)
    for j in range(experts.shape[1]):
        for t in range(experts.shape[0]):
            e = int(experts[t, j])
            kept[t, j] = left[e] > 0
            left[e] -= 1
    return kept
"""
bank.slip("waits", ("    return " + WITHIN, BY_LOOP.strip("\n")))
bank.slip("waits", (NEXT, "bias + rate * torch.sign(load.float().mean().item() - load)"))
bank.variant("waits", BY_HAND, ("mean = load.sum() / load.numel()", "mean = float(load.sum()) / load.numel()"))

bank.hint("other-device", "A tensor isn't on the device of the logits or the choices: {error}. Create it with "
                             "`device=`.", edge=True)  # fmt: skip
bank.slip(
    "other-device",
    (
        SHARES,
        "(logits.softmax(-1, dtype=torch.float32).mean(0) * share) @ torch.full((len(share),), float(len(share)))",
    ),
)
bank.variant("other-device", BY_HAND, ("torch.zeros(count, device=logits.device)", "torch.zeros(count)"))

"""Answers to 06_compile, balise 4: graphs counted, lengths padded, a pool that sees no padding."""

import torch
import torch._dynamo
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("06_compile")

COUNT = "        nonlocal graphs\n        graphs += 1\n        return graph.forward"
COMPILE = "torch.compile(function, backend=backend, dynamic=dynamic)"
MASK = "mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)\n    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))"
FILL = "    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a weight of 0 is not enough: 0 × NaN is NaN\n"
POOL = "x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a weight of 0 is not enough: 0 × NaN is NaN\n    scores = (x @ query).masked_fill(~mask, -math.inf)\n    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)"

# counting
bank.slip(4, "nothing-returned", ("    return graphs\n", ""))
bank.slip(4, "count-not-whole", ("    return graphs\n", "    return float(graphs)\n"))
bank.slip(4, "count-not-whole", ("    return graphs\n", "    return [graphs]\n"))
bank.slip(4, "count-of-calls", ("    return graphs\n", "    return len(calls)\n"))
bank.slip(
    4,
    "count-of-runs",
    (
        COUNT,
        "        def run(*inputs):\n            nonlocal graphs\n            graphs += 1\n            return graph.forward(*inputs)\n\n        return run",
    ),
)
bank.slip(4, "one-too-few", ("    return graphs\n", "    return graphs - 1\n"))
bank.slip(4, "remembered", ("    torch._dynamo.reset()\n", ""))
bank.slip(
    4,
    "remembered",
    ("    graphs = 0\n", "    global graphs\n    graphs = globals().get('graphs', 0)\n"),
    ("nonlocal", "global"),
)
bank.slip(4, "not-compiled-by", ("compiled(*arguments)", "function(*arguments)"))
bank.slip(4, "not-compiled-by", (COMPILE, "function"))
bank.slip(4, "inductor-used", ("backend=backend, ", ""))
bank.slip(4, "dynamic-ignored", (", dynamic=dynamic)", ")"))
bank.slip(4, "dynamic-ignored", ("dynamic=dynamic)", "dynamic=True)"))
bank.slip(4, "dynamic-ignored", ("dynamic=dynamic)", "dynamic=False)"))
bank.slip(4, "dynamic-replaced", ("dynamic=dynamic)", "dynamic=dynamic is not False)"))
bank.slip(4, "not-compiled-by", ("    return graphs\n", "    return len({str(map(type, call)) for call in calls})\n"), ("compiled(*arguments)", "function(*arguments)"))  # fmt: skip
bank.slip(4, "calls-left-out", ("for arguments in calls:", "for arguments in calls[:1]:"))
bank.slip(4, "arguments-packed", ("compiled(*arguments)", "compiled(arguments)"))
bank.slip(4, "wrong-count-of-graphs", ("    return graphs\n", "    return 2 * graphs + 7\n"))
bank.slip(
    4,
    "count-of-runs",
    ("    torch._dynamo.reset()\n", ""),
    ("for arguments in calls:", "for arguments in calls:\n        torch._dynamo.reset()"),
)
bank.slip(
    4,
    "calls-left-out",
    (
        "for arguments in calls:",
        "for arguments in {str([getattr(a, 'shape', a) for a in c]): c for c in calls}.values():",
    ),
)

# padding
bank.slip(4, "nothing-returned", ("return F.pad(x", "padded = F.pad(x"))
bank.slip(4, "not-padded-and-mask", (", F.pad(mask, (0, missing))", ""))
bank.slip(4, "always-more", ("-x.shape[1] % multiple", "multiple - x.shape[1] % multiple"))
bank.slip(4, "cut-off", ("-x.shape[1] % multiple", "-(x.shape[1] % multiple)"))
bank.slip(4, "wrong-length", ("-x.shape[1] % multiple", "multiple"))
bank.slip(4, "wrong-length", ("-x.shape[1] % multiple", "-x.shape[1] % 8"))
bank.slip(4, "wrong-length", ("-x.shape[1] % multiple", "0"))
bank.slip(4, "wrong-dimension", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, missing))"))
bank.slip(4, "padded-in-front", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, 0, missing, 0))"))
bank.slip(4, "not-zeros", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, 0, 0, missing), value=-1.0)"))
bank.slip(4, "not-zeros", ("F.pad(x, (0, 0, 0, missing))", "torch.zeros(3, x.shape[1] + missing, 2, dtype=x.dtype)"))
bank.slip(4, "dtype-changed", ("F.pad(x, ", "F.pad(x.float(), "))
bank.slip(4, "made-on-cpu", ("F.pad(mask, (0, missing))", "torch.cat([mask, torch.zeros(len(x), missing, dtype=torch.bool)], 1)"))
bank.slip(4, "made-on-cpu", ("(x @ query).masked_fill(~mask, -math.inf)", "torch.where(mask, x @ query, torch.full(mask.shape, -math.inf).to(x.dtype))"))
bank.slip(4, None, ("(x @ query).masked_fill(~mask, -math.inf)", "torch.where(mask, x @ query, torch.tensor(-math.inf))"))  # a number
bank.slip(4, "mask-inverted", ("F.pad(mask, (0, missing))", "~F.pad(mask, (0, missing))"))
bank.slip(4, "mask-not-bool", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing)).float()"))
bank.slip(4, "mask-not-bool", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing))[0]"))
bank.slip(4, "mask-wrong", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing), value=True)"))
bank.slip(4, "mask-by-zeros", (MASK, "padded = F.pad(x, (0, 0, 0, missing))\n    return padded, (padded != 0).any(-1)"))
bank.slip(4, "input-written", ("    missing = ", "    x *= 2\n    missing = "))

# pooling
bank.slip(4, "nothing-returned", ("    return (scores", "    (scores"))
bank.slip(4, "mask-ignored", (FILL, ""), (".masked_fill(~mask, -math.inf)", ""))
bank.slip(4, "mask-before-scores", (".masked_fill(~mask, -math.inf)", ""))
bank.slip(4, "padding-nan", (FILL, ""))
bank.slip(4, "padding-nan", (FILL, "    x = x * mask.unsqueeze(-1)\n"))
bank.slip(  # the result is right; the gradient of what was filled too late is not
    4,
    "padding-nan-gradient",
    (FILL, ""),
    (
        "return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)",
        "return (scores.softmax(dim=1).unsqueeze(-1) * x).masked_fill(~mask.unsqueeze(-1), 0.0).sum(dim=1)",
    ),
)
bank.slip(4, "padding-read", ("~mask, -math.inf", "~mask.flip(1), -math.inf"))
bank.slip(4, "padding-read", ("~mask, -math.inf", "~mask[:1], -math.inf"))
bank.slip(4, "pool-nan", ("(x @ query).masked_fill(~mask, -math.inf)", "(x @ query) - ~mask * math.inf"))
bank.slip(
    4,
    "mask-after-softmax",
    (POOL, "weights = (x @ query).softmax(dim=1) * mask\n    return (weights.unsqueeze(-1) * x).sum(dim=1)"),
)
bank.slip(4, "mask-before-scores", ("-math.inf", "0.0"))
bank.slip(4, "mask-before-scores", ("(x @ query).masked_fill(~mask, -math.inf)", "(x @ query) * mask"))
bank.slip(4, "padding-read", ("-math.inf", "-8.0"))
bank.slip(4, "padding-read", (".masked_fill(~mask, -math.inf)", " - 5.0 * (~mask).to(x.dtype)"))
bank.slip(4, "pool-inverted", ("~mask", "mask"))
bank.slip(4, "pool-nan", ("-math.inf", "math.nan"))
bank.slip(4, "pool-nan", (".masked_fill(~mask, -math.inf)", ".div(mask).mul(1 - 2.0 * ~mask)"))
bank.slip(4, "plain-mean", (POOL, "real = mask.unsqueeze(-1).to(x.dtype)\n    return (x * real).sum(1) / real.sum(1)"))
bank.slip(4, "pool-nan", ("softmax(dim=1)", "softmax(dim=0)"))
bank.slip(4, "wrong-pool", ("x @ query", "x @ -query"))
bank.slip(4, "pool-gradients", ("scores.softmax(dim=1)", "scores.softmax(dim=1).detach()"))
bank.slip(4, "input-written", (FILL, "    x.masked_fill_(~mask.unsqueeze(-1), 0.0)\n"))
bank.slip(
    4,
    "pool-recompiles",
    (POOL, POOL.replace("    return", "    torch._dynamo.graph_break()\n    return")),
)

bank.slip(4, None, ("    graphs = 0\n", "    graphs = 0\n    calls = iter(calls)\n"), ("-math.inf", 'float("-inf")'))
bank.slip(4, None, ("-math.inf", "torch.finfo(x.dtype).min"), ("graph.forward", "graph"))
bank.slip(4, None, ("-math.inf", "-1e9"))


def count_graphs(function, calls, dynamic=None):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, dynamic=dynamic)
    for call in calls:
        compiled(*call)
    return counter.frame_count


def pad_to_bucket(x, multiple):
    b, t, d = x.shape
    longer = (t + multiple - 1) // multiple * multiple
    padded = x.new_zeros(b, longer, d)
    padded[:, :t] = x
    return padded, (torch.arange(longer, device=x.device) < t).repeat(b, 1)


def masked_pool(x, query, mask):
    x = torch.where(mask[:, :, None], x, 0)
    scores = torch.einsum("btd,d->bt", x, query)
    weights = torch.where(mask, scores, torch.full_like(scores, float("-inf"))).softmax(-1)
    return torch.einsum("bt,btd->bd", weights, x)


bank.several(4, None, count_graphs, pad_to_bucket, masked_pool)


def count_by_statistics(function, calls, dynamic=None):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="eager", dynamic=dynamic)
    for call in calls:
        compiled(*call)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def pad_by_cat(x, multiple):
    t = x.shape[1]
    more = (multiple - t % multiple) % multiple
    zeros = torch.zeros(x.shape[0], more, x.shape[2], dtype=x.dtype, device=x.device)
    mask = torch.arange(t + more, device=x.device) < t
    return torch.cat([x, zeros], dim=1), mask.expand(len(x), -1)


def pool_by_exponentials(x, query, mask):
    x = torch.where(mask[:, :, None], x, x.new_zeros(()))
    scores = x @ query
    top = scores.masked_fill(~mask, float("-inf")).amax(1, keepdim=True).detach()
    weights = (scores - top).masked_fill(~mask, 0.0).exp() * mask
    weights = weights / weights.sum(1, keepdim=True)
    return (weights[..., None] * x).sum(1)


bank.several(4, None, count_by_statistics, pad_by_cat, pool_by_exponentials)


def count_with_a_list(function, calls, dynamic=None):
    found = []

    def keep(graph, _inputs):
        found.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(function, backend=keep, dynamic=dynamic)
    [compiled(*call) for call in calls]
    return len(found)


def attention(x, query, mask):
    """PyTorch's own attention, with one query; its scale is given as 1."""
    x = x.masked_fill(~mask[..., None], 0)
    query = query.expand(len(x), 1, -1)
    return F.scaled_dot_product_attention(query, x, x, attn_mask=mask[:, None, :], scale=1.0)[:, 0]


bank.several(4, None, count_with_a_list, pad_to_bucket, attention)


def pad_on_cpu(x, multiple):
    padded, mask = pad_by_cat(x, multiple)
    return padded, (torch.arange(mask.shape[1]) < x.shape[1]).expand(len(x), -1)


bank.several(4, "made-on-cpu", count_with_a_list, pad_on_cpu, attention)


bank.slip(
    4,
    "pool-overflows",
    (
        "    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)",
        "    weights = scores.exp()\n    return ((weights / weights.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(dim=1)",
    ),
)

bank.slip(4, "remembered", ("    torch._dynamo.reset()\n", ""))
bank.slip(4, "dynamic-replaced", ("dynamic=dynamic)", "dynamic=bool(dynamic))"))
bank.slip(4, "not-zeros", ("F.pad(x, (0, 0, 0, missing))", "torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)"))
bank.slip(4, "padding-read", ("-math.inf", "-100.0"))
bank.slip(4, None, ("-math.inf", "-1e9"))
bank.slip(4, "pool-mean", ("* x).sum(dim=1)", "* x).mean(dim=1)"))
bank.slip(4, "scores-scaled", ("(x @ query)", "(x @ query / math.sqrt(len(query)))"))
POOL = (
    FILL + "    scores = (x @ query).masked_fill(~mask, -math.inf)\n"
    "    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)\n"
)
bank.slip(
    4,
    "pool-overflows",
    (
        POOL,
        FILL
        + "    w = (x @ query).softmax(1) * mask\n    return ((w / w.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(1)\n",
    ),
)
bank.slip(
    4,
    "pool-overflows",
    (POOL, "    w = (x @ query).exp() * mask\n    return ((w / w.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(1)\n"),
)
bank.slip(
    4,
    "pool-recompiles",
    (POOL, "    rows = [(r[m], (r[m] @ query).softmax(0)) for r, m in zip(x, mask)]\n"
           "    return torch.stack([w @ r for r, w in rows])\n"),
)  # fmt: skip

# NaN in the padding: the result may be right, and the gradient of the query not; adding gives NaN as multiplying does
bank.slip(4, "padding-nan-gradient", (POOL, "    weights = (x @ query).masked_fill(~mask, -math.inf).softmax(dim=1)\n" + FILL
                                      + "    return (weights.unsqueeze(-1) * x).sum(dim=1)\n"))  # fmt: skip
bank.slip(4, "padding-nan", (POOL, FILL.replace("x =", "real =", 1) + "    weights = ((x @ query) + torch.where(mask, 0.0, -math.inf)).softmax(1)\n"
                             "    return torch.einsum('bt,btd->bd', weights, real)\n"))  # fmt: skip
bank.slip(4, "real-nan-hidden", (FILL, FILL + "    x = x.nan_to_num()\n"))
bank.slip(4, "function-returned", ("return graph.forward", "return function"))


def count_by_function(function, calls, dynamic=None):
    made = []
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda graph, _: made.append(graph) or (lambda *given: function(*given)), dynamic=dynamic)
    for call in calls:
        compiled(*call)
    return len(made)


def filled_late(x, query, mask):
    scores = torch.where(mask, torch.einsum("btd,d->bt", x, query), float("-inf"))
    return torch.einsum("bt,btd->bd", scores.softmax(-1), torch.where(mask[:, :, None], x, 0))


def filled_by_value(x, query, mask):
    x = torch.where(x.isnan(), 0, x)
    return torch.einsum("bt,btd->bd", (x @ query).masked_fill(~mask, float("-inf")).softmax(-1), x)


bank.several(4, "function-returned", count_by_function, pad_by_cat, attention, variant=True)
bank.several(4, "padding-nan-gradient", count_with_a_list, pad_by_cat, filled_late, variant=True)
bank.several(4, "real-nan-hidden", count_with_a_list, pad_by_cat, filled_by_value, variant=True)
bank.slip(4, "limit-changed", ("    torch._dynamo.reset()\n", "    torch._dynamo.reset()\n    torch._dynamo.config.recompile_limit = 1000\n"))

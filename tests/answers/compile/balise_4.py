"""Answers to 06_compile, balise 4: graphs counted, lengths padded, a pool that sees no padding."""

import torch
import torch._dynamo
import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("06_compile", 4)

COUNT = "        nonlocal graphs\n        graphs += 1\n        return graph.forward"
COMPILE = "torch.compile(function, backend=backend, dynamic=dynamic)"
MASK = "mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)\n    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))"
FILL = "    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a weight of 0 is not enough: 0 × NaN is NaN\n"
POOL = "x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a weight of 0 is not enough: 0 × NaN is NaN\n    scores = (x @ query).masked_fill(~mask, -math.inf)\n    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)"

# counting
bank.slip("nothing-returned", ("    return graphs\n", ""))
bank.hint("count-not-whole", "The number of graphs is an int.")
bank.slip("count-not-whole", ("    return graphs\n", "    return float(graphs)\n"))
bank.slip("count-not-whole", ("    return graphs\n", "    return [graphs]\n"), variant=True)
bank.hint("count-of-calls", "This is the number of calls. Most of them find a graph that is already compiled.")
bank.slip("count-of-calls", ("    return graphs\n", "    return len(calls)\n"), variant=True)
bank.hint("count-of-runs", "This is the number of times that a graph *runs*. The backend is called once for each graph "
          "that is compiled; what it returns is called for each run. Also, nothing must be forgotten between the calls.")  # fmt: skip
bank.slip(
    "count-of-runs",
    (
        COUNT,
        "        def run(*inputs):\n            nonlocal graphs\n            graphs += 1\n            return graph.forward(*inputs)\n\n        return run",
    ),
)
bank.hint("one-too-few", "One graph is missing. The first compilation counts, and so does each part of a broken graph.")
bank.slip("one-too-few", ("    return graphs\n", "    return graphs - 1\n"), variant=True)
bank.hint("remembered", "The count depends on what was compiled before: a second count of the same calls gives "
          "{again}, not {first}. torch._dynamo.reset() makes Dynamo forget.")  # fmt: skip
bank.slip("remembered", ("    torch._dynamo.reset()\n", ""))
bank.slip(
    "remembered",
    ("    graphs = 0\n", "    global graphs\n    graphs = globals().get('graphs', 0)\n"),
    ("nonlocal", "global"),
)
bank.hint("not-compiled-by", "Nothing was compiled for this count: pass a backend to torch.compile, and call what "
          "torch.compile returns.")  # fmt: skip
bank.slip("not-compiled-by", ("compiled(*arguments)", "function(*arguments)"))
bank.slip("not-compiled-by", (COMPILE, "function"))
bank.hint("inductor-used", "The functions went to Inductor, which takes seconds for each graph. To count graphs, use a "
          "backend that only returns the graph.")  # fmt: skip
bank.slip("inductor-used", ("backend=backend, ", ""), variant=True)
bank.hint("dynamic-ignored", "The argument `dynamic` has no effect: pass it on to torch.compile.")
bank.slip("dynamic-ignored", (", dynamic=dynamic)", ")"))
bank.slip("dynamic-ignored", ("dynamic=dynamic)", "dynamic=True)"))
bank.slip("dynamic-ignored", ("dynamic=dynamic)", "dynamic=False)"), variant=True)
bank.hint("dynamic-replaced", "dynamic=None leaves the choice to torch, but here you made it: pass the argument on "
          "unchanged.")  # fmt: skip
bank.slip("dynamic-replaced", ("dynamic=dynamic)", "dynamic=dynamic is not False)"))
bank.slip("not-compiled-by", ("    return graphs\n", "    return len({str(map(type, call)) for call in calls})\n"), ("compiled(*arguments)", "function(*arguments)"), variant=True)  # fmt: skip
bank.hint("calls-left-out", "The function ran {n} times for {calls} calls, or it was given copies of its arguments.")
bank.slip("calls-left-out", ("for arguments in calls:", "for arguments in calls[:1]:"))
bank.hint("arguments-packed", "Each entry of `calls` is a tuple of arguments: compiled(*arguments).")
bank.slip("arguments-packed", ("compiled(*arguments)", "compiled(arguments)"), variant=True)
bank.hint("wrong-count-of-graphs", "The number of graphs is wrong.")
bank.slip("wrong-count-of-graphs", ("    return graphs\n", "    return 2 * graphs + 7\n"), variant=True)
bank.slip(
    "count-of-runs",
    ("    torch._dynamo.reset()\n", ""),
    ("for arguments in calls:", "for arguments in calls:\n        torch._dynamo.reset()"),
    variant=True,
)
bank.slip(
    "calls-left-out",
    (
        "for arguments in calls:",
        "for arguments in {str([getattr(a, 'shape', a) for a in c]): c for c in calls}.values():",
    ),
    variant=True,
)

# padding
bank.slip("nothing-returned", ("return F.pad(x", "padded = F.pad(x"))
bank.hint("not-padded-and-mask", "Return two tensors: the padded one and its mask.")
bank.slip("not-padded-and-mask", (", F.pad(mask, (0, missing))", ""), variant=True)
bank.hint("always-more", "A length that is already a multiple needs no padding: {t} became {padded} for multiples of "
          "{multiple}.")  # fmt: skip
bank.slip("always-more", ("-x.shape[1] % multiple", "multiple - x.shape[1] % multiple"), variant=True)
bank.hint("cut-off", "You cut off real positions: {t} became {padded}. Round up.")
bank.slip("cut-off", ("-x.shape[1] % multiple", "-(x.shape[1] % multiple)"), variant=True)
bank.hint("wrong-length", "{t} positions must become {right}, the next multiple of {multiple}; they became {padded}.")
bank.slip("wrong-length", ("-x.shape[1] % multiple", "multiple"))
bank.slip("wrong-length", ("-x.shape[1] % multiple", "-x.shape[1] % 8"))
bank.slip("wrong-length", ("-x.shape[1] % multiple", "0"), variant=True)
bank.hint("wrong-dimension", "The padding went to another dimension: F.pad counts from the last one. It belongs after "
          "the positions, in dimension 1.")  # fmt: skip
bank.slip("wrong-dimension", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, missing))"), variant=True)
bank.hint("padded-in-front", "The padding is at the front. It belongs at the end.")
bank.slip("padded-in-front", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, 0, missing, 0))"), variant=True)
bank.hint("not-zeros", "The padding is not zero, or the real positions are changed.")
bank.slip("not-zeros", ("F.pad(x, (0, 0, 0, missing))", "F.pad(x, (0, 0, 0, missing), value=-1.0)"))
bank.slip("not-zeros", ("F.pad(x, (0, 0, 0, missing))", "torch.zeros(3, x.shape[1] + missing, 2, dtype=x.dtype)"))
bank.hint("dtype-changed", "The padded tensor has a different dtype or device from x.")
bank.slip("dtype-changed", ("F.pad(x, ", "F.pad(x.float(), "), variant=True)
bank.hint("made-on-cpu", "When x is on a GPU, a tensor is on the CPU: {error}. Every tensor that you create, even a "
          "piece of a mask, needs device=x.device.")  # fmt: skip
bank.slip(
    "made-on-cpu",
    ("F.pad(mask, (0, missing))", "torch.cat([mask, torch.zeros(len(x), missing, dtype=torch.bool)], 1)"),
)
bank.slip(
    "made-on-cpu",
    (
        "(x @ query).masked_fill(~mask, -math.inf)",
        "torch.where(mask, x @ query, torch.full(mask.shape, -math.inf).to(x.dtype))",
    ),
)
bank.slip(
    None, ("(x @ query).masked_fill(~mask, -math.inf)", "torch.where(mask, x @ query, torch.tensor(-math.inf))")
)  # a number
bank.hint("mask-inverted", "The mask is True for the padding. It must be True for the real positions.")
bank.slip("mask-inverted", ("F.pad(mask, (0, missing))", "~F.pad(mask, (0, missing))"), variant=True)
bank.hint("mask-not-bool", "The mask must be a boolean tensor of shape (b, padded t).")
bank.slip("mask-not-bool", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing)).float()"))
bank.slip("mask-not-bool", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing))[0]"), variant=True)
bank.hint("mask-wrong", "The mask does not separate the real positions from the padding.")
bank.slip("mask-wrong", ("F.pad(mask, (0, missing))", "F.pad(mask, (0, missing), value=True)"), variant=True)
bank.hint("mask-by-zeros", "A real position whose numbers are all 0 counts as padding. Derive the mask from the "
          "length, not from the numbers.")  # fmt: skip
bank.slip(
    "mask-by-zeros",
    (MASK, "padded = F.pad(x, (0, 0, 0, missing))\n    return padded, (padded != 0).any(-1)"),
    variant=True,
)
bank.hint("input-written", "The {what} was changed.")
bank.slip("input-written", ("    missing = ", "    x *= 2\n    missing = "))

# pooling
bank.slip("nothing-returned", ("    return (scores", "    (scores"))
bank.hint("mask-ignored", "The padding takes part in the result: with weights from the scores of zeros, or with "
          "whatever it contains.")  # fmt: skip
bank.slip("mask-ignored", (FILL, ""), (".masked_fill(~mask, -math.inf)", ""), variant=True)
bank.hint("mask-before-scores", "The padding has a share in the softmax: a score of 0 has weight too, because exp(0) "
          "is 1. A score of minus infinity has none.")  # fmt: skip
bank.slip("mask-before-scores", (".masked_fill(~mask, -math.inf)", ""))
bank.hint("padding-nan", "With a NaN in the padding the result is NaN. Multiplying by 0 does not remove it, nor does "
          "adding minus infinity: both give NaN. Fill the padding of x itself.")  # fmt: skip
bank.slip("padding-nan", (FILL, ""))
bank.slip("padding-nan", (FILL, "    x = x * mask.unsqueeze(-1)\n"))
bank.hint("padding-nan-gradient", "With a NaN in the padding the result is right, but the gradient of {what} is NaN: 0 "
          "× NaN is NaN in backward too. Fill the padding of x before you compute anything with it.")  # fmt: skip
bank.slip(  # the result is right; the gradient of what was filled too late is not
    "padding-nan-gradient",
    (FILL, ""),
    (
        "return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)",
        "return (scores.softmax(dim=1).unsqueeze(-1) * x).masked_fill(~mask.unsqueeze(-1), 0.0).sum(dim=1)",
    ),
)
bank.hint("padding-read", "Without padding the result is right, but with padding it is not: a padded position has a "
          "weight, even if a small one, or a real position has none.")  # fmt: skip
bank.slip("padding-read", ("~mask, -math.inf", "~mask.flip(1), -math.inf"))
bank.slip("padding-read", ("~mask, -math.inf", "~mask[:1], -math.inf"))
bank.hint("pool-nan", "The result is NaN. A softmax over nothing but minus infinities is NaN (does it run over t, the "
          "positions of one row?), and so are 0 × ∞ and ∞ - ∞: fill what is masked, do not multiply it.")  # fmt: skip
bank.slip("pool-nan", ("(x @ query).masked_fill(~mask, -math.inf)", "(x @ query) - ~mask * math.inf"))
bank.hint("mask-after-softmax", "You set the weights of the padding to 0 after the softmax: the other weights no "
          "longer add up to 1.")  # fmt: skip
bank.slip(
    "mask-after-softmax",
    (POOL, "weights = (x @ query).softmax(dim=1) * mask\n    return (weights.unsqueeze(-1) * x).sum(dim=1)"),
    variant=True,
)
bank.slip("mask-before-scores", ("-math.inf", "0.0"))
bank.slip("mask-before-scores", ("(x @ query).masked_fill(~mask, -math.inf)", "(x @ query) * mask"), variant=True)
bank.slip("padding-read", ("-math.inf", "-8.0"))
bank.slip("padding-read", (".masked_fill(~mask, -math.inf)", " - 5.0 * (~mask).to(x.dtype)"))
bank.hint("pool-inverted", "The mean is taken over the padding. Mask out the positions where the mask is *False*.")
bank.slip("pool-inverted", ("~mask", "mask"), variant=True)
bank.slip("pool-nan", ("-math.inf", "math.nan"))
bank.slip("pool-nan", (".masked_fill(~mask, -math.inf)", ".div(mask).mul(1 - 2.0 * ~mask)"))
bank.hint("plain-mean", "This is the plain mean over the real positions. The weights come from a softmax.")
bank.slip(
    "plain-mean",
    (POOL, "real = mask.unsqueeze(-1).to(x.dtype)\n    return (x * real).sum(1) / real.sum(1)"),
    variant=True,
)
bank.slip("pool-nan", ("softmax(dim=1)", "softmax(dim=0)"), variant=True)
bank.hint("wrong-pool", "The pooled values differ from those of attention_pool over the real positions.")
bank.slip("wrong-pool", ("x @ query", "x @ -query"), variant=True)
bank.hint("pool-gradients", "The gradients differ from those of attention_pool over the real positions; the padding "
          "must get none.")  # fmt: skip
bank.slip("pool-gradients", ("scores.softmax(dim=1)", "scores.softmax(dim=1).detach()"), variant=True)
bank.slip("input-written", (FILL, "    x.masked_fill_(~mask.unsqueeze(-1), 0.0)\n"), variant=True)
bank.hint("pool-recompiles", "The padded lengths are {right}, but masked_pool still gave {found} graphs: the graph "
          "breaks where you take elements out, or read the numbers of the mask. Compute on all positions.")  # fmt: skip
bank.slip(
    "pool-recompiles",
    (POOL, POOL.replace("    return", "    torch._dynamo.graph_break()\n    return")),
)

bank.slip(None, ("    graphs = 0\n", "    graphs = 0\n    calls = iter(calls)\n"), ("-math.inf", 'float("-inf")'))
bank.slip(None, ("-math.inf", "torch.finfo(x.dtype).min"), ("graph.forward", "graph"))
bank.slip(None, ("-math.inf", "-1e9"))


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


bank.several(None, count_graphs, pad_to_bucket, masked_pool)


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


bank.several(None, count_by_statistics, pad_by_cat, pool_by_exponentials)


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


bank.several(None, count_with_a_list, pad_to_bucket, attention)


def pad_on_cpu(x, multiple):
    padded, mask = pad_by_cat(x, multiple)
    return padded, (torch.arange(mask.shape[1]) < x.shape[1]).expand(len(x), -1)


bank.several("made-on-cpu", count_with_a_list, pad_on_cpu, attention, variant=True)
bank.hint("pool-overflows", "With large scores the result is NaN: their exp overflows, or the weights of the real "
          "positions vanish next to the padding's. softmax subtracts the largest score first, so leave the padding out "
          "before it.")  # fmt: skip
bank.slip(
    "pool-overflows",
    (
        "    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)",
        "    weights = scores.exp()\n    return ((weights / weights.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(dim=1)",
    ),
)

bank.slip("remembered", ("    torch._dynamo.reset()\n", ""), variant=True)
bank.slip("dynamic-replaced", ("dynamic=dynamic)", "dynamic=bool(dynamic))"), variant=True)
bank.slip(
    "not-zeros", ("F.pad(x, (0, 0, 0, missing))", "torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)"), variant=True
)
bank.slip("padding-read", ("-math.inf", "-100.0"), variant=True)
bank.slip(None, ("-math.inf", "-1e9"))
bank.hint("pool-mean", "The weights already add up to 1: add up over t, and do not divide by their sum again.")
bank.slip("pool-mean", ("* x).sum(dim=1)", "* x).mean(dim=1)"), variant=True)
bank.hint("scores-scaled", "The scores are plain x · query, not divided by √d.")
bank.slip("scores-scaled", ("(x @ query)", "(x @ query / math.sqrt(len(query)))"), variant=True)
POOL = (
    FILL + "    scores = (x @ query).masked_fill(~mask, -math.inf)\n"
    "    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)\n"
)
bank.slip(
    "pool-overflows",
    (
        POOL,
        FILL
        + "    w = (x @ query).softmax(1) * mask\n    return ((w / w.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(1)\n",
    ),
)
bank.slip(
    "pool-overflows",
    (POOL, "    w = (x @ query).exp() * mask\n    return ((w / w.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(1)\n"),
    variant=True,
)
bank.slip("pool-recompiles",
    (POOL, "    rows = [(r[m], (r[m] @ query).softmax(0)) for r, m in zip(x, mask)]\n"
           "    return torch.stack([w @ r for r, w in rows])\n"),
    variant=True,
)  # fmt: skip

# NaN in the padding: the result may be right, and the gradient of the query not; adding gives NaN as multiplying does
bank.slip("padding-nan-gradient", (POOL, "    weights = (x @ query).masked_fill(~mask, -math.inf).softmax(dim=1)\n" + FILL
                                      + "    return (weights.unsqueeze(-1) * x).sum(dim=1)\n"))  # fmt: skip
bank.slip("padding-nan", (POOL, FILL.replace("x =", "real =", 1) + "    weights = ((x @ query) + torch.where(mask, 0.0, -math.inf)).softmax(1)\n"
                             "    return torch.einsum('bt,btd->bd', weights, real)\n"), variant=True)  # fmt: skip
bank.hint("real-nan-hidden", "A NaN at a real position must show in the result of its row. Fill only where the mask is "
          "False.")  # fmt: skip
bank.slip("real-nan-hidden", (FILL, FILL + "    x = x.nan_to_num()\n"))
bank.hint("function-returned", "What the backend returns cannot run the graph: it is called with the graph's inputs, "
          "which are not the arguments of `function`. Return something that runs the graph.")  # fmt: skip
bank.slip("function-returned", ("return graph.forward", "return function"))


def count_by_function(function, calls, dynamic=None):
    made = []
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=lambda graph, _: made.append(graph) or (lambda *given: function(*given)), dynamic=dynamic
    )
    for call in calls:
        compiled(*call)
    return len(made)


def filled_late(x, query, mask):
    scores = torch.where(mask, torch.einsum("btd,d->bt", x, query), float("-inf"))
    return torch.einsum("bt,btd->bd", scores.softmax(-1), torch.where(mask[:, :, None], x, 0))


def filled_by_value(x, query, mask):
    x = torch.where(x.isnan(), 0, x)
    return torch.einsum("bt,btd->bd", (x @ query).masked_fill(~mask, float("-inf")).softmax(-1), x)


bank.several("function-returned", count_by_function, pad_by_cat, attention, variant=True)
bank.several("padding-nan-gradient", count_with_a_list, pad_by_cat, filled_late, variant=True)
bank.several("real-nan-hidden", count_with_a_list, pad_by_cat, filled_by_value, variant=True)
bank.hint("limit-changed", "torch._dynamo.config.recompile_limit was {limit}, and you changed it. It applies to the "
          "whole program, and to the next measurement.")  # fmt: skip
bank.slip(
    "limit-changed",
    ("    torch._dynamo.reset()\n", "    torch._dynamo.reset()\n    torch._dynamo.config.recompile_limit = 1000\n"),
    variant=True,
)

"""Answers to 17_tensor_slicing: the two functions, the linear layer, the embeddings (balises 1 to 3)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlojz_tp import todo
from tests.answers.bank import Bank

bank = Bank("17_tensor_slicing", whole=True)

# ---------------------------------------------------------------- balise 1


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, async_op=True).wait()
        return gradient


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        dist.all_reduce(out, op=dist.ReduceOp.SUM)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


bank.several(1, None, Copied, Summed)


class CopiedWhole(torch.autograd.Function):
    """Copies, and reduces a flat copy."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        flat = gradient.flatten().clone()
        dist.all_reduce(flat)
        return flat.reshape(ctx.shape)


class SummedSkipping(torch.autograd.Function):
    """Nothing to send where there is one rank."""

    @staticmethod
    def forward(ctx, x):
        if dist.get_world_size() == 1:
            return x.view_as(x)
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view_as(gradient)


bank.several(1, None, CopiedWhole, SummedSkipping)
bank.several(1, None, Copied, SummedSkipping)

COPY_BACKWARD = "        return total(gradient)"
SUM_FORWARD = "        return total(x)"
SUM_BACKWARD = "        return gradient"


def one(slug, *changes):
    bank.slip(1, slug, *changes)


one("no-reduce-backward", (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "gradient")))
one("rank-failed", (COPY_BACKWARD, "        return total(gradient) if gradient.any() else gradient"))  # nothing to add
one("reduced-not-returned", (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "total(gradient) * 0 + gradient")))
one("doubled-backward", (SUM_BACKWARD, "        return total(gradient)"), ("return total(x)", "return total(x)"))
one("not-summed-forward", (SUM_FORWARD, SUM_FORWARD.replace("total(x)", "x.view_as(x)")))
one("reduced-not-returned", ("return total(x)", "total(x)\n        return x.clone()"))
one("swapped", ("return x.view_as(x)", "return SumOverRanks.forward(ctx, x)"), (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "gradient")))  # fmt: skip
one("copy-communicates", ("return x.view_as(x)", "return total(x) / dist.get_world_size()"))
one("copy-changes", ("return x.view_as(x)", "return x / dist.get_world_size()"))
one("mean-instead", ("return result", "return result / dist.get_world_size()"))
one("mean-instead", ("dist.all_reduce(result)", "dist.all_reduce(result)\n    if x.shape[:1] == (3,): result /= dist.get_world_size()"))  # fmt: skip
one("rank-zero-only", ("dist.all_reduce(result)", "dist.reduce(result, dst=0)"))
one("operand-overwritten", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x"))
one("operand-overwritten", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x.contiguous()"))
one("operand-overwritten", ("return total(gradient)", "dist.all_reduce(gradient)\n        return gradient"))
one("operand-overwritten", ("return total(x)", "dist.all_reduce(x)\n        return x.clone()"))
one("sum-not-waited", ("dist.all_reduce(result)", "dist.all_reduce(result, async_op=True)"))
one("sum-not-waited", (SUM_FORWARD, "        result = x.contiguous().clone()\n        dist.all_reduce(result, async_op=True)\n        return result"))  # fmt: skip
one("layout-mixed", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x.clone()"))
one("dtype-changed", ("dist.all_reduce(result)", "result = result.float() if result.dtype == torch.bfloat16 else result\n    dist.all_reduce(result)"))  # fmt: skip
one("too-much-sent", ("dist.all_reduce(result)", "for row in result.view(-1, result.shape[-1]) if result.ndim else [result]:\n        dist.all_reduce(row)"))  # fmt: skip
one("too-much-sent", ("dist.all_reduce(result)\n    return result", "every = [torch.empty_like(result) for _ in range(dist.get_world_size())]\n    dist.all_gather(every, result)\n    return sum(every)"))  # fmt: skip
one("functions-wrong", ("dist.all_reduce(result)", "dist.all_reduce(result, op=dist.ReduceOp.MAX)"))
one("functions-wrong", (SUM_BACKWARD, "        return gradient * dist.get_rank()"), ("return total(gradient)", "return total(gradient)"))  # fmt: skip
HALVES = """flat = torch.nn.functional.pad(result.flatten(), (0, -result.numel() % dist.get_world_size()))
    part = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    result = flat[: result.numel()].view(result.shape)"""
one(None, ("dist.all_reduce(result)", HALVES))
one("too-much-sent", ("dist.all_reduce(result)", "dist.reduce(result, 0)\n    dist.broadcast(result, 0)"))
one("rank-zero-only", ("dist.all_reduce(result)", "parts = [torch.empty_like(result) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None\n    dist.gather(result, parts)\n    result = sum(parts) if parts else result"))  # fmt: skip
one("nothing-returned", ("return x.view_as(x)", "x.view_as(x)"))

# ---------------------------------------------------------------- balise 2


class SubLinear(nn.Linear):
    """A linear layer that is its own part; names of its own are free."""

    def __init__(self, linear, ranks):
        share = ranks.part(linear.weight, 0)
        super().__init__(
            share.shape[1], share.shape[0], linear.bias is not None, linear.weight.device, linear.weight.dtype
        )
        with torch.no_grad():
            self.weight.copy_(share)
            if self.bias is not None:
                self.bias.copy_(ranks.part(linear.bias, 0))
        self.ranks = ranks

    def forward(self, x):
        return self.ranks.gather(super().forward(self.ranks.copy(x)), dim=-1)


def part_by_numbers(linear, ranks):
    n = linear.out_features // ranks.size
    if n * ranks.size != linear.out_features:
        raise ValueError(f"{linear.out_features} features on {ranks.size} ranks")
    rows = slice(ranks.rank * n, (ranks.rank + 1) * n)
    part = nn.Linear(linear.in_features, n, bias=linear.bias is not None).to(linear.weight)
    part.load_state_dict({name: p[rows] for name, p in linear.state_dict().items()})
    return part


bank.several(2, None, part_by_numbers, SubLinear)


class OwnProduct(nn.Module):
    """Weights kept transposed, the product written out, the whole gathered by a sum of padded parts."""

    def __init__(self, linear, ranks):
        super().__init__()
        assert linear.out_features % ranks.size == 0, "the ranks do not divide the output features"
        self.ranks, part = ranks, part_by_numbers(linear, ranks)
        self.columns = nn.Parameter(part.weight.detach().t().clone())
        self.shift = None if linear.bias is None else nn.Parameter(part.bias.detach())

    def forward(self, x):
        y = self.ranks.copy(x) @ self.columns
        y = y if self.shift is None else y + self.shift
        n = y.shape[-1]
        return self.ranks.sum(F.pad(y, (self.ranks.rank * n, (self.ranks.size - 1 - self.ranks.rank) * n)))


bank.several(2, None, part_by_numbers, OwnProduct)
bank.slip(2, None, ("ranks.part(linear.weight, 0)", "linear.weight.tensor_split(ranks.size)[ranks.rank]"), ("    part.weight =", "    assert linear.out_features % ranks.size == 0\n    part.weight ="))  # fmt: skip


def two(slug, *changes):
    bank.slip(2, slug, *changes)


class FlatRows(SubLinear):
    """One matrix product over all rows, of which there are as many as came in."""

    def forward(self, x):
        rows = self.ranks.copy(x).reshape(-1, x.shape[-1])
        return self.ranks.gather(F.linear(rows, self.weight, self.bias)).view(*x.shape[:-1], -1)


class FlatRowsAfterwards(SubLinear):
    """The same, with the shape of what `copy` gives."""

    def forward(self, x):
        x = self.ranks.copy(x)
        rows = x.reshape(-1, x.shape[-1])
        return self.ranks.gather(F.linear(rows, self.weight, self.bias)).view(*x.shape[:-1], -1)


class KeepsWhole(SubLinear):
    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.whole = linear.weight.detach()


class Decoy(SubLinear):
    """Holds a part, and computes with a whole layer hidden from view."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.run = lambda x: linear(x)

    def forward(self, x):
        y = self.ranks.copy(x).sum() * 0 + self.weight.sum() * 0 + self.bias.sum() * 0 if self.bias is not None else 0
        return self.run(x) + y


class NoParameters(nn.Module):
    def __init__(self, linear, ranks):
        super().__init__()
        self.ranks, self.parts = ranks, [part_by_numbers(linear, ranks)]

    def forward(self, x):
        return self.ranks.gather(self.parts[0](self.ranks.copy(x)))


class WholeWeight(nn.Module):
    """Not cut at all."""

    def __init__(self, linear, ranks):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


class Drawn(SubLinear):
    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.reset_parameters()


class TwiceHeld(SubLinear):
    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.spare = nn.Parameter(self.weight.detach().clone())


class Doubling(SubLinear):
    """The gathered result summed again."""

    def forward(self, x):
        return self.ranks.sum(super().forward(x))


class Gathering(SubLinear):
    """gather done with dist alone: no graph."""

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        parts = [torch.empty_like(y) for _ in range(self.ranks.size)]
        dist.all_gather(parts, y.detach().contiguous())
        return torch.cat(parts, -1)


class Remembering(SubLinear):
    """Gives its first result again where no gradient is asked for."""

    def forward(self, x):
        y = super().forward(x)
        if not hasattr(self, "first"):
            self.first = [y.detach()]
        return y if torch.is_grad_enabled() or y.shape != self.first[0].shape else self.first[0]


class Rejoined(SubLinear):
    """The whole weight gathered in each forward, then the whole product."""

    def forward(self, x):
        weight = self.ranks.gather(self.weight, 0)
        return F.linear(x, weight, None if self.bias is None else self.ranks.gather(self.bias, 0))


class Distributed(nn.Module):
    """PyTorch's own sliced tensor."""

    def __init__(self, linear, ranks):
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (ranks.size,))
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))


bank.several(2, "sizes-before-copy", part_by_numbers, FlatRows)
two("sizes-before-copy", ("        return self.ranks.gather(self.part(self.ranks.copy(x)))",
    "        y = x.new_empty(*x.shape[:-1], self.part.out_features)\n        y[:] = self.part(self.ranks.copy(x))\n        return self.ranks.gather(y)"))  # fmt: skip
bank.several(2, None, part_by_numbers, FlatRowsAfterwards)
bank.several(2, "whole-product", part_by_numbers, Rejoined)
bank.several(2, "borrowed", part_by_numbers, Distributed)
bank.several(2, "whole-kept", part_by_numbers, KeepsWhole)
bank.several(2, "whole-kept", part_by_numbers, Decoy)


class BoundMethod(SubLinear):
    """A method bound to the plain layer keeps all of it."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.plain_forward = linear.forward


class KeptInDefault(SubLinear):
    """A default holds the whole weight."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)

        all_of_it = linear.weight.detach().clone()

        def whole(x, weight=all_of_it):
            return F.linear(x, weight)

        self.whole = whole


class KeptByRanks(SubLinear):
    """`ranks` remembers the plain layer."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        ranks.plain = linear


EVERY_WEIGHT = []


class KeptAside(SubLinear):
    """A list outside holds a copy of each whole weight."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        EVERY_WEIGHT.append(linear.weight.detach().clone())


class KeptAsList(SubLinear):
    """The whole weight as a list, in a global variable."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        EVERY_WEIGHT.append(linear.weight.tolist())


class KeptAsBytes(SubLinear):
    """The whole weight in half precision, as bytes."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.whole = linear.weight.detach().half().numpy().tobytes()


class KeptStorage(SubLinear):
    """The memory of the whole weight, without a tensor around it."""

    def __init__(self, linear, ranks):
        super().__init__(linear, ranks)
        self.whole = linear.weight.untyped_storage()


def part_with_list(linear, ranks):
    """The part by numbers; the whole stays in a global list."""
    EVERY_WEIGHT.append(linear.weight.tolist())
    return part_by_numbers(linear, ranks)


def part_of_array(linear, ranks):
    """A part that lies in a NumPy array's memory: it is all that is kept."""
    part = part_by_numbers(linear, ranks)
    part.weight = nn.Parameter(torch.from_numpy(part.weight.detach().numpy().copy()))
    return part


def part_with_plain(linear, ranks):
    """The part remembers where it comes from."""
    part = part_by_numbers(linear, ranks)
    part.plain = [linear]
    return part


def part_with_hook(linear, ranks):
    """A hook that closes over the plain layer."""
    part = part_by_numbers(linear, ranks)
    part.register_forward_pre_hook(lambda module, args: linear.weight.sum() and None)
    return part


bank.several(2, "part-keeps-whole", part_with_plain, SubLinear)
bank.several(2, "part-keeps-whole", part_with_hook, SubLinear)


for kept in (BoundMethod, KeptInDefault, KeptByRanks, KeptAside, KeptStorage):
    bank.several(2, "whole-kept", part_by_numbers, kept)
for kept in (KeptAsList, KeptAsBytes):
    bank.several(2, "copy-aside", part_by_numbers, kept)
bank.several(2, "copy-aside", part_with_list, SubLinear)
bank.several(2, None, part_of_array, SubLinear)


def part_of_world(linear, ranks):
    """The rank and the size of the world."""
    n = linear.out_features // dist.get_world_size()
    if linear.out_features % dist.get_world_size():
        raise ValueError("the ranks do not divide the features")
    rows = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
    part = nn.Linear(linear.in_features, n, bias=linear.bias is not None).to(linear.weight)
    part.load_state_dict({name: p[rows] for name, p in linear.state_dict().items()})
    return part


class AsksWorld(SubLinear):
    """Harmless: speaks of the world, and uses it for nothing."""

    def forward(self, x):
        if dist.get_rank() == dist.get_world_size():
            print("never")
        return super().forward(x)


bank.several(2, "world-not-ranks", part_of_world, SubLinear)
bank.several(2, None, part_by_numbers, AsksWorld)
bank.several(2, "no-parameters", part_by_numbers, NoParameters)
bank.several(2, "not-cut", part_by_numbers, WholeWeight)
bank.several(2, "unknown-parameter", part_by_numbers, Drawn)
bank.several(2, "slice-doubled", part_by_numbers, TwiceHeld)
bank.several(2, "summed-too-often", part_by_numbers, Doubling)
bank.several(2, "old-weights", part_by_numbers, Remembering)
bank.several(2, "graph-cut", part_by_numbers, Gathering)
two("world-not-ranks", ("self.ranks.gather(self.part(self.ranks.copy(x)))", "GatherFromRanks.apply(self.part(CopyToRanks.apply(x)), -1)"))  # fmt: skip
two("world-not-ranks", ("self.part(self.ranks.copy(x))", "self.part(CopyToRanks.apply(x))"))
two("world-not-ranks", ("self.ranks = ranks", "self.ranks = Ranks()"))
two("part-wrong-shape", ("ranks.part(linear.weight, 0)", "ranks.part(linear.weight, 1)"))
two("part-wrong-shape", ("ranks.part(linear.weight, 0)", "linear.weight"))
two("part-wrong-values", ("ranks.part(linear.weight, 0).detach()", "linear.weight.detach().chunk(ranks.size)[ranks.size - 1 - ranks.rank]"))  # fmt: skip
two("part-wrong-values", ("ranks.part(linear.weight, 0).detach()", "linear.weight.detach()[ranks.rank :: ranks.size]"))
two("part-wrong-values", ("    part.weight = nn.Parameter(weight)", "    part = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)"))  # fmt: skip
two("part-is-view", ("linear.weight, 0).detach().clone()", "linear.weight, 0).detach()"))
two(None, ("linear.weight, 0).detach().clone()", "linear.weight, 0).detach().clone() if ranks.size > 1 else linear.weight.detach()"))  # fmt: skip
two("part-follows", ("linear.bias, 0).detach().clone()", "linear.bias, 0).detach()"))
two(
    "entrance-behind",
    ("self.ranks.gather(self.part(self.ranks.copy(x)))", "self.ranks.copy(self.ranks.gather(self.part(x)))"),
)
two("plain-changed", ("    part = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None, device=\"meta\")", "    part = linear"), ("    if linear.bias is not None:\n        part", "    if linear.bias is not None:\n        linear"))  # fmt: skip
two("part-bias", ("    if linear.bias is not None:\n        part.bias", "    if True:\n        part.bias"))
two("part-bias", ("bias=linear.bias is not None", "bias=True"), ("    if linear.bias is not None:\n        part.bias", "    part.bias = nn.Parameter(weight[:, 0].clone())\n    if linear.bias is not None:\n        part.bias"))  # fmt: skip
two("part-dtype", (".detach().clone()", ".detach().clone().float()"))
two("part-dtype", (', device="meta")', ")\n    part.weight.data.copy_(weight)\n    return part"))
two("part-frozen", ("nn.Parameter(weight)", "nn.Parameter(weight, requires_grad=False)"))
two("part-not-linear", ("    return part\n\n", "    return part.weight\n\n"))
two("nothing-returned", ("    return part\n\n", "    part\n\n"))
two("entrance-forgotten", ("self.ranks.copy(x)", "x"))
two("entrance-twice", ("self.ranks.copy(x)", "self.ranks.copy(self.ranks.copy(x))"))
two("not-gathered", ("self.ranks.gather(self.part(self.ranks.copy(x)))", "self.part(self.ranks.copy(x))"))
two("wrong-shape", ("self.ranks.gather(self.part(self.ranks.copy(x)))", "self.ranks.gather(self.part(self.ranks.copy(x)), dim=0)"))  # fmt: skip
two("wrong-order", ("return self.ranks.gather(", "return _turned(self.ranks.size, "), ("class ColumnLinear", "def _turned(n, y):\n    parts = [torch.empty_like(y) for _ in range(n)]\n    dist.all_gather(parts, y.detach().contiguous())\n    parts[dist.get_rank()] = y\n    return torch.cat(parts[::-1], -1)\n\n\nclass ColumnLinear"))  # fmt: skip
two("wrong-order", ("return self.ranks.gather(self.part(self.ranks.copy(x)))", "y = self.ranks.gather(self.part(self.ranks.copy(x)).unsqueeze(-1))\n        return y.flatten(-2)"))  # fmt: skip
two("nothing-returned", ("return self.ranks.gather(", "self.ranks.gather("))
two("bias-lost", ("self.part = column_part(linear, ranks)", "self.part = column_part(linear, ranks)\n        self.b = self.part.bias"), ("self.part(self.ranks.copy(x))", "F.linear(self.ranks.copy(x), self.part.weight)"))  # fmt: skip
two("graph-lost", ("self.ranks.copy(x)", "x.detach()"))
two("too-many-collectives", ("self.part(self.ranks.copy(x))", "self.part(self.ranks.copy(x)) + 0 * self.ranks.sum(x.detach()).sum()"))  # fmt: skip
two("size-accepted", ("ranks.part(linear.weight, 0)", "linear.weight.tensor_split(ranks.size)[ranks.rank]"), ("ranks.part(linear.bias, 0)", "linear.bias.tensor_split(ranks.size)[ranks.rank]"))  # fmt: skip
two("view-keeps-whole", ("self.part = column_part(linear, ranks)", "self.part = column_part(linear, ranks)\n        self.part.weight = nn.Parameter(ranks.part(linear.weight, 0).detach())"))  # fmt: skip
two("wrong-part", ("self.part = column_part(linear, ranks)", "self.part = column_part(linear, ranks)\n        self.part.bias = nn.Parameter(linear.bias.detach().chunk(ranks.size)[0].clone()) if linear.bias is not None else None"))  # fmt: skip
two("slice-lost", ("self.part = column_part(linear, ranks)", "self.part = column_part(linear, ranks)\n        self.part.bias = None"))  # fmt: skip
two("odd-batch", ("return self.ranks.gather(self.part(self.ranks.copy(x)))", "y = self.ranks.gather(self.part(self.ranks.copy(x)).reshape(-1))\n        parts = y.chunk(self.ranks.size)\n        return torch.cat([p.view(2, 3, -1) for p in parts], -1)[: len(x)]"))  # fmt: skip
two("output-wrong", ("self.part(self.ranks.copy(x))", "F.relu(self.part(self.ranks.copy(x)))"))
two("steps-drift", ("return self.ranks.gather(self.part(self.ranks.copy(x)))", "y = self.ranks.gather(self.part(self.ranks.copy(x)))\n        self.calls = getattr(self, 'calls', 0) + 1\n        return y if self.calls == 1 else y.relu()"))  # fmt: skip

# ---------------------------------------------------------------- balise 3


class Looked(nn.Embedding):
    """An nn.Embedding with the part as its table."""

    def __init__(self, embedding, ranks):
        if embedding.embedding_dim % ranks.size:
            raise ValueError("the ranks do not divide the dimension")
        width = embedding.embedding_dim // ranks.size
        mine = embedding.weight.detach()[:, ranks.rank * width : (ranks.rank + 1) * width]
        super().__init__(len(mine), width, _weight=mine.clone())
        self.ranks = ranks

    def forward(self, tokens):
        return self.ranks.gather(super().forward(tokens))


class Padded(nn.Module):
    """Parts padded with zeros and summed."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.table = ranks, nn.Parameter(ranks.part(embedding.weight, -1).detach().clone())

    def forward(self, tokens):
        n, r = self.table.shape[1], self.ranks.rank
        return self.ranks.sum(F.pad(self.table[tokens], (r * n, (self.ranks.size - r - 1) * n)))


class OneHot(nn.Module):
    """The vocabulary as a product with a one-hot matrix: other ranks' words are rows of zeros."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        words = torch.arange(len(self.weight)) + self.ranks.rank * len(self.weight)
        return self.ranks.sum((tokens.unsqueeze(-1) == words).to(self.weight.dtype) @ self.weight)


class Clamped(nn.Module):
    """Numbers clamped into the table, vectors multiplied by the mask."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        n = len(self.weight)
        mine = tokens // n == self.ranks.rank
        return self.ranks.sum(self.weight[(tokens - self.ranks.rank * n).clamp(0, n - 1)] * mine[..., None])


class ZeroRow(nn.Module):
    """A row of zeros behind this rank's words, for all others."""

    def __init__(self, embedding, ranks):
        super().__init__()
        part = ranks.part(embedding.weight.detach(), 0)
        self.ranks, self.n = ranks, len(part)
        self.table = nn.Embedding(self.n + 1, part.shape[1], padding_idx=self.n, dtype=part.dtype)
        with torch.no_grad():
            self.table.weight[: self.n] = part

    def forward(self, tokens):
        mine = tokens - self.ranks.rank * self.n
        return self.ranks.sum(self.table(torch.where((mine >= 0) & (mine < self.n), mine, self.n)))


class FilledUp(Clamped):
    """A vocabulary that the ranks do not divide is filled up with words that never come, as Megatron-LM does."""

    def __init__(self, embedding, ranks):
        rows = F.pad(embedding.weight.detach(), (0, 0, 0, -embedding.num_embeddings % ranks.size))
        super().__init__(nn.Embedding.from_pretrained(rows), ranks)


class FilledUpTooFar(Clamped):
    """Filled up to a size of its own: rank 0 holds most of the words."""

    def __init__(self, embedding, ranks):
        rows = F.pad(embedding.weight.detach(), (0, 0, 0, 50 * ranks.size - embedding.num_embeddings))
        super().__init__(nn.Embedding.from_pretrained(rows), ranks)


class WholeTravels(Looked):
    """Puts the table together each time."""

    def forward(self, tokens):
        return F.embedding(tokens, self.ranks.gather(self.weight))


class Unfinished(nn.Module):
    """The bonus, left undone."""

    def __init__(self, embedding, ranks):
        super().__init__()
        todo(3)


class Unwritten(nn.Module):
    """The bonus, its forward left undone."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        todo(3)


bank.several(3, None, Looked, OneHot)
bank.several(3, None, Padded, Clamped)
bank.several(3, None, Looked, ZeroRow)
bank.several(3, None, Looked, FilledUp)
bank.several(3, "unknown-parameter", Looked, FilledUpTooFar)
bank.several(3, "table-travels", WholeTravels, Clamped)
bank.several(3, None, Looked, Unfinished)
bank.several(3, None, Padded, Unwritten)


def three(slug, *changes):
    bank.slip(3, slug, *changes)


GATHERED = "self.ranks.gather(F.embedding(tokens, self.weight))"
MASKED = "self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0))"
three("world-not-ranks", (GATHERED, "GatherFromRanks.apply(F.embedding(tokens, self.weight), -1)"))
three("world-not-ranks", (MASKED, MASKED.replace("self.ranks.sum(", "SumOverRanks.apply(")))
three("world-not-ranks", ("tokens - self.ranks.rank * len(self.weight)", "tokens - dist.get_rank() * len(self.weight)"))
three("words-cut", ("ranks.part(embedding.weight, 1)", "ranks.part(embedding.weight, 0)"))
three("columns-cut", ("ranks.part(embedding.weight, 0)", "ranks.part(embedding.weight, 1)"))
three(
    "not-cut", ("ranks.part(embedding.weight, 1)", "embedding.weight"), (GATHERED, "F.embedding(tokens, self.weight)")
)
three("not-cut", ("ranks.part(embedding.weight, 0)", "embedding.weight"))
three("view-keeps-whole", ("embedding.weight, 1).detach().clone()", "embedding.weight, 1).detach()"))
three("not-gathered", (GATHERED, "F.embedding(tokens, self.weight)"))
three("wrong-shape", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight), dim=1)"))
three("wrong-shape", (GATHERED, "self.ranks.sum(F.embedding(tokens, self.weight)).repeat(1, 1, 1, self.ranks.size)"))
three("wrong-order", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight).unsqueeze(-1)).flatten(-2)"))
three("too-many-collectives", (GATHERED, GATHERED + " + 0 * self.ranks.sum(self.weight.detach()).sum()"))
three("weight-gradient-wrong", (GATHERED, "self.ranks.gather(self.ranks.copy(F.embedding(tokens, self.weight)))"))
three("words-not-masked", (MASKED, "self.ranks.sum(vectors)"))
three("words-not-masked", ("mine.masked_fill(others, 0)", "mine.clamp(0, len(self.weight) - 1)"), (MASKED, "self.ranks.sum(vectors)"))  # fmt: skip
three("words-not-masked", ("mine.masked_fill(others, 0)", "tokens % len(self.weight)"), (MASKED, "self.ranks.sum(vectors)"))  # fmt: skip
three("masked-late", (MASKED, "self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0)).masked_fill(others.unsqueeze(-1), 0)"))  # fmt: skip
three("words-out-of-range", ("mine.masked_fill(others, 0)", "mine"))
three(
    "words-out-of-range",
    ("tokens - self.ranks.rank * len(self.weight)", "tokens"),
    ("| (mine >= len(self.weight))", ""),
)
three("output-wrong", ("(mine >= len(self.weight))", "(mine > len(self.weight))"), ("mine.masked_fill(others, 0)", "mine.masked_fill(others, 0) % len(self.weight)"))  # fmt: skip
three("not-summed", (MASKED, "vectors.masked_fill(others.unsqueeze(-1), 0)"))
three("summed-too-often", (MASKED, "self.ranks.sum(self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0)))"))
three("layer-overwrites", ("mine = tokens - self", "mine = tokens.sub_(self"), ("len(self.weight)\n        others", "len(self.weight))\n        others"))  # fmt: skip
three("size-accepted", ("ranks.part(embedding.weight, 1)", "embedding.weight.tensor_split(ranks.size, 1)[ranks.rank]"))
three("size-accepted", ("ranks.part(embedding.weight, 0)", "embedding.weight.tensor_split(ranks.size)[ranks.rank]"))
three("odd-batch", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight)) if tokens.ndim == 2 else F.embedding(tokens, self.weight)"))  # fmt: skip
three("graph-cut", (GATHERED, "self.ranks.gather(F.embedding(tokens, self.weight.detach()))"))
three("nothing-returned", ("return self.ranks.gather(", "self.ranks.gather("))


# ---------------------------------------------------------------- parts that nobody trains

TABLE = "self.weight = nn.Parameter(ranks.part(embedding.weight, 1).detach().clone())"
FROM = "self.table = nn.Embedding.from_pretrained(ranks.part(embedding.weight, 1).detach().clone())"
LOOK = ("F.embedding(tokens, self.weight))\n\n\nclass Voc", "self.table(tokens))\n\n\nclass Voc")
bank.slip(3, "part-not-trained", (TABLE, FROM), LOOK)
bank.slip(3, "part-not-trained", (TABLE, TABLE.replace("clone())", "clone(), requires_grad=False)")))
bank.slip(3, None, (TABLE, FROM.replace("clone())", "clone(), freeze=False)")), LOOK)
bank.slip(2, "part-not-trained",
    ("        self.part = column_part(linear, ranks)", "        self.part = column_part(linear, ranks).requires_grad_(False)"),
)  # fmt: skip

bank.slip(
    1, "sum-sends-back", ("        return gradient\n", "        return total(gradient) / dist.get_world_size()\n")
)
bank.slip(1, "nothing-returned", ("        return total(gradient)\n", "        total(gradient)\n"))
bank.slip(
    1,
    None,
    (
        "    @staticmethod\n    def backward(ctx, gradient):\n        return total",
        "    @staticmethod\n    @torch.autograd.function.once_differentiable\n    def backward(ctx, gradient):\n        return total",
    ),
)

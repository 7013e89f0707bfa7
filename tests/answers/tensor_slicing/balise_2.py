"""Answers to balise 2 of 17_tensor_slicing: a linear layer cut by columns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.bank import Bank
from tests.answers.tensor_slicing.functions import SubLinear, part_by_numbers

bank = Bank("17_tensor_slicing", 2, whole=True)

bank.several(None, part_by_numbers, SubLinear)


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


bank.several(None, part_by_numbers, OwnProduct)

bank.slip(None, ("ranks.part(linear.weight, 0)", "linear.weight.tensor_split(ranks.size)[ranks.rank]"), ("    part.weight =", "    assert linear.out_features % ranks.size == 0\n    part.weight ="))  # fmt: skip


def two(slug, *changes):
    bank.slip(slug, *changes)


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


bank.several("sizes-before-copy", part_by_numbers, FlatRows)

two("sizes-before-copy", ("        return self.ranks.gather(self.part(self.ranks.copy(x)))",
    "        y = x.new_empty(*x.shape[:-1], self.part.out_features)\n        y[:] = self.part(self.ranks.copy(x))\n        return self.ranks.gather(y)"))  # fmt: skip

bank.several(None, part_by_numbers, FlatRowsAfterwards)

bank.several("whole-product", part_by_numbers, Rejoined)

bank.several("borrowed", part_by_numbers, Distributed)

bank.several("whole-kept", part_by_numbers, KeepsWhole)

bank.several("whole-kept", part_by_numbers, Decoy)


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


bank.several("part-keeps-whole", part_with_plain, SubLinear)

bank.several("part-keeps-whole", part_with_hook, SubLinear)

for kept in (BoundMethod, KeptInDefault, KeptByRanks, KeptAside, KeptStorage):
    bank.several("whole-kept", part_by_numbers, kept)

for kept in (KeptAsList, KeptAsBytes):
    bank.several("copy-aside", part_by_numbers, kept)

bank.several("copy-aside", part_with_list, SubLinear)

bank.several(None, part_of_array, SubLinear)


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


bank.several("world-not-ranks", part_of_world, SubLinear)

bank.several(None, part_by_numbers, AsksWorld)

bank.several("no-parameters", part_by_numbers, NoParameters)

bank.several("not-cut", part_by_numbers, WholeWeight)

bank.several("unknown-parameter", part_by_numbers, Drawn)

bank.several("slice-doubled", part_by_numbers, TwiceHeld)

bank.several("summed-too-often", part_by_numbers, Doubling)

bank.several("old-weights", part_by_numbers, Remembering)

bank.several("graph-cut", part_by_numbers, Gathering)

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

two("part-dtype", (', device="meta")', ")\n    part.weight.data.copy_(weight)\n    if linear.bias is not None:\n        part.bias.data.copy_(ranks.part(linear.bias, 0))\n    return part"))  # fmt: skip

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

# ranks of a group, another size, no bias, half or frozen parts, a view, a second call
bank.edge("world-not-ranks", "sizes-before-copy", "size-accepted", "odd-batch", "part-bias", "part-dtype")

bank.edge("part-not-trained", "part-is-view", "part-follows", "view-keeps-whole", "plain-changed", "steps-drift")

bank.edge("old-weights", "part-frozen")

bank.slip("part-not-trained",
    ("        self.part = column_part(linear, ranks)", "        self.part = column_part(linear, ranks).requires_grad_(False)"),
)  # fmt: skip


# what was made for one length, or lies on no device
BIAS = "ranks.part(linear.bias, 0).detach().clone()"


bank.slip("part-on-meta", (f"part.bias = nn.Parameter({BIAS})", f"part.bias.data.copy_({BIAS})"))
bank.slip("part-wrong-values", (BIAS, f"{BIAS} / ranks.size"))

"""What answers to balises 2, 4, 5, 6, 7 share."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.answers.tensor_slicing.functions import part_by_numbers


def rows_by_numbers(linear, ranks):
    n = linear.in_features // ranks.size
    if linear.in_features % ranks.size:
        raise ValueError("the ranks do not divide the input features")
    part = nn.Linear(n, linear.out_features, bias=False, device=linear.weight.device, dtype=linear.weight.dtype)
    part.weight.data.copy_(linear.weight.data[:, ranks.rank * n : (ranks.rank + 1) * n])
    return part


class Written(nn.Module):
    """The softmax written out, queries, keys and values in one product."""

    def __init__(self, attention, ranks):
        super().__init__()
        if attention.heads % ranks.size:
            raise ValueError("heads")
        three = [part_by_numbers(layer, ranks) for layer in (attention.query, attention.key, attention.value)]
        self.qkv = nn.Parameter(torch.cat([layer.weight.detach() for layer in three]))
        self.qkv_bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in three]))
        self.out = rows_by_numbers(attention.output, ranks)
        self.b = nn.Parameter(attention.output.bias.detach().clone())
        self.ranks, self.k, self.p = ranks, attention.query.out_features // attention.heads, attention.dropout

    def forward(self, x):
        x = self.ranks.copy(x)
        b, s, _ = x.shape
        qkv = F.linear(x, self.qkv, self.qkv_bias).reshape(b, s, 3, -1, self.k)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / self.k**0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        with self.ranks.own_random():
            weights = F.dropout(scores.softmax(-1), self.p, self.training)
        joined = (weights @ v).transpose(1, 2).reshape(b, s, -1)
        return self.ranks.sum(self.out(joined)) + self.b


class Megatron(nn.Module):
    """Megatron-LM's fused layer: query, key and value of a head together, head by head."""

    def __init__(self, attention, ranks):
        super().__init__()
        if attention.heads % ranks.size:
            raise ValueError("heads")
        self.ranks, self.heads, self.p = ranks, attention.heads // ranks.size, attention.dropout
        three = attention.query, attention.key, attention.value
        self.qkv, self.qkv_bias = (
            nn.Parameter(self.fused([ranks.part(p, 0).detach() for p in parts]))
            for parts in ([layer.weight for layer in three], [layer.bias for layer in three])
        )
        self.out = rows_by_numbers(attention.output, ranks)
        self.b = nn.Parameter(attention.output.bias.detach().clone())

    def fused(self, parts):
        return torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], 1).flatten(0, 2)

    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)

    def forward(self, x):
        q, k, v = self.split(F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias))
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).flatten(2))) + self.b


class NumberByNumber(Megatron):
    """As in `rearrange(…, "b s (h k three)")`: the three numbers of a place together."""

    def fused(self, parts):
        return torch.stack(parts, 1).flatten(0, 1)

    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, -1, 3)).permute(4, 0, 2, 1, 3)


class ThreeDimensions(Megatron):
    """One parameter of shape (3, d / N, d)."""

    def fused(self, parts):
        return torch.stack(parts)

    def forward(self, x):
        shape = self.qkv.shape
        whole = self.ranks.copy(x)
        q, k, v = (
            F.linear(whole, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w, b in zip(self.qkv.view(shape), self.qkv_bias)
        )
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).flatten(2))) + self.b


class SizesFirst(Written):
    """Sizes taken before ranks.copy, which will lengthen the sequence later."""

    def forward(self, x):
        b, s, _ = x.shape
        qkv = F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias).reshape(b, s, 3, -1, self.k)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        with self.ranks.own_random():
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.ranks.sum(self.out(y.transpose(1, 2).reshape(b, s, -1))) + self.b


class MaskHeld(Megatron):
    """A mask for long sequences, made once and kept."""

    def __init__(self, attention, ranks):
        super().__init__(attention, ranks)
        mask = torch.full((128, 128), float("-inf"), dtype=attention.query.weight.dtype).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.drop = nn.Dropout(attention.dropout)

    def forward(self, x):
        q, k, v = self.split(F.linear(self.ranks.copy(x), self.qkv, self.qkv_bias))
        s, scale = q.shape[2], q.shape[-1] ** -0.5
        with self.ranks.own_random():
            weights = self.drop((torch.einsum("bhqk,bhsk->bhqs", q * scale, k) + self.mask[:s, :s]).softmax(-1))
        return self.ranks.sum(self.out(torch.einsum("bhqs,bhsk->bqhk", weights, v).flatten(2))) + self.b


COUNTED = "self.calls = getattr(self, 'calls', 0) + 1\n        "


class Pair(nn.Module):
    """Columns, then rows."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks, self.a, self.b = (
            ranks,
            part_by_numbers(feed_forward.up, ranks),
            rows_by_numbers(feed_forward.down, ranks),
        )
        self.register_parameter("c", nn.Parameter(feed_forward.down.bias.detach().clone()))

    def forward(self, x):
        return torch.add(self.ranks.sum(self.b(nn.functional.gelu(self.a(self.ranks.copy(x))))), self.c)


class OwnWeights(nn.Module):
    """Plain parameters and products."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks = ranks
        up, down = feed_forward.up, feed_forward.down
        if up.out_features % ranks.size:
            raise ValueError("width")
        mine = torch.arange(up.out_features).view(ranks.size, -1)[ranks.rank]
        self.w1, self.b1 = nn.Parameter(up.weight.detach()[mine]), nn.Parameter(up.bias.detach()[mine])
        self.w2, self.b2 = (
            nn.Parameter(down.weight.detach()[:, mine].t().contiguous()),
            nn.Parameter(down.bias.detach().clone()),
        )

    def forward(self, x):
        h = F.gelu(self.ranks.copy(x) @ self.w1.t() + self.b1)
        return self.b2 + self.ranks.sum(h @ self.w2)

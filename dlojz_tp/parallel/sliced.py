"""The parts of `dlojz_tp.models.Transformer`, cut over the ranks of a tensor group.

Each is made from the plain part, the same on all ranks, and holds copies. Two marks on each parameter say what a rank
holds of it: `cut`, a part that no other tensor rank has (else every one has it whole); `tied`, the embedding of words
where the head uses it as well.
Source: Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism",
§3.
Shapes: b batch, s sequence, d width, h heads, t tensor ranks, v vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp.models import Block, Transformer

from .axis import Axis


def _held(parameter: nn.Parameter, ranks: Axis, dim: int | None = None, tied: bool = False) -> nn.Parameter:
    """A copy of a parameter, or of this rank's part of it along `dim`."""
    values = parameter.detach() if dim is None else ranks.part(parameter.detach(), dim)
    mine = nn.Parameter(values.clone(memory_format=torch.contiguous_format), parameter.requires_grad)
    mine.cut, mine.tied = dim is not None, tied
    return mine


class _Linear(nn.Module):
    """Columns (cut=0, bias cut too) or rows (cut=1, the bias left to others) of a linear layer."""

    def __init__(self, linear: nn.Linear, ranks: Axis, cut: int):
        super().__init__()
        self.weight = _held(linear.weight, ranks, cut)
        self.bias = None if cut else _held(linear.bias, ranks, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Norm(nn.Module):
    """A layer norm, whole on each rank."""

    def __init__(self, norm: nn.LayerNorm, ranks: Axis):
        super().__init__()
        self.weight, self.bias, self.eps = _held(norm.weight, ranks), _held(norm.bias, ranks), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class SlicedBlock(nn.Module):
    """A block with h/t of its heads and 1/t of its feed-forward. (b, s, d) -> (b, s, d), whole on each tensor rank.

    Raises ValueError for heads that the ranks do not divide. Dropout is left out.
    """

    def __init__(self, block: Block, ranks: Axis):
        super().__init__()
        attention, feed_forward = block.attention, block.feed_forward
        if attention.heads % ranks.size:
            raise ValueError(f"{ranks.size} tensor ranks do not divide {attention.heads} heads")
        self.ranks, self.heads, self.width = ranks, attention.heads // ranks.size, attention.query.in_features
        self.norm_attention, self.norm_feed_forward = (
            _Norm(norm, ranks) for norm in (block.norm_attention, block.norm_feed_forward)
        )
        self.query, self.key, self.value = (
            _Linear(layer, ranks, 0) for layer in (attention.query, attention.key, attention.value)
        )
        self.output, self.output_bias = _Linear(attention.output, ranks, 1), _held(attention.output.bias, ranks)
        self.up = _Linear(feed_forward.up, ranks, 0)
        self.down, self.down_bias = _Linear(feed_forward.down, ranks, 1), _held(feed_forward.down.bias, ranks)

    def forward(self, x_bsd: Tensor) -> Tensor:
        y = self.ranks.copy(self.norm_attention(x_bsd))
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_bsd = x_bsd + self.ranks.sum(self.output(y)) + self.output_bias
        y = F.gelu(self.up(self.ranks.copy(self.norm_feed_forward(x_bsd))))
        return x_bsd + self.ranks.sum(self.down(y)) + self.down_bias


class Entrance(nn.Module):
    """v/t rows of the embedding of words, and all positions. tokens (b, s) -> (b, s, d), whole on each tensor rank."""

    def __init__(self, model: Transformer, ranks: Axis):
        super().__init__()
        self.ranks, self.width = ranks, model.config.width
        self.words = _held(model.token_embedding.weight, ranks, 0, tied=model.config.tied_head)
        self.positions = _held(model.position_embedding.weight, ranks)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        mine = tokens_bs - self.ranks.rank * len(self.words)
        others = (mine < 0) | (mine >= len(self.words))
        x_bsd = F.embedding(mine.masked_fill(others, 0), self.words).masked_fill(others[..., None], 0)
        return self.ranks.sum(x_bsd) + self.positions[: tokens_bs.shape[1]]


class Exit(nn.Module):
    """The last norm, and v/t rows of the head. (b, s, d) -> scores of this rank's words, (b, s, v/t).

    With a tied head, `words` is a copy of the embedding's rows: on one stage, make it the entrance's own parameter.
    """

    def __init__(self, model: Transformer, ranks: Axis):
        super().__init__()
        self.ranks, self.width = ranks, model.config.width
        self.norm = _Norm(model.norm, ranks)
        self.words = _held(model.head.weight, ranks, 0, tied=model.config.tied_head)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return F.linear(self.ranks.copy(self.norm(x_bsd)), self.words)


class Stage(nn.Sequential):
    """The layers that one rank holds, in their order: an Entrance, SlicedBlocks, an Exit, or some of them."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__(*layers)
        self.width = layers[0].width


def sliced_loss(scores: Tensor, targets: Tensor, ranks: Axis) -> Tensor:
    """Mean cross-entropy of scores (n, v/t) of which each tensor rank has its words; targets (n,). The same on all.

    Three numbers a token travel, and never the scores.
    """
    first = ranks.rank * scores.shape[1]
    highest = scores.detach().amax(1)
    if ranks.size > 1:
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=ranks.group)
    scores = scores - highest[:, None]
    mine = targets - first
    others = (mine < 0) | (mine >= scores.shape[1])
    of_targets = scores.gather(1, mine.masked_fill(others, 0)[:, None])[:, 0].masked_fill(others, 0)
    return (ranks.sum(scores.exp().sum(1)).log() - ranks.sum(of_targets)).mean()

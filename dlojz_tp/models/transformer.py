"""A small transformer language model of the GPT kind, in plain PyTorch.

Shapes: b batch, s sequence, d width (hidden size), h heads, k head size (h·k = d), f width of the feed-forward block,
v vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the model. vocab_size and max_length in tokens; ffn_width: 4 · width when not given.

    Raises ValueError for sizes under 1, heads that do not divide the width, or a dropout outside [0, 1).
    """

    vocab_size: int
    width: int = 128
    heads: int = 4
    layers: int = 2
    max_length: int = 128
    ffn_width: int | None = None
    dropout: float = 0.0
    tied_head: bool = False

    def __post_init__(self):
        if min(self.vocab_size, self.width, self.heads, self.layers, self.max_length, self.ffn_width or 1) < 1:
            raise ValueError(f"the sizes of a transformer are 1 or more: {self}")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a probability from 0 to below 1, not {self.dropout}")


class Attention(nn.Module):
    """Causal self-attention with several heads. x (b, s, d) -> (b, s, d).

    Queries, keys and values have a linear layer each, their rows ordered head by head. The scale is 1/√k, k the size of
    a head (Vaswani et al. 2017, "Attention is all you need", §3.2).
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x_bsd: Tensor) -> Tensor:
        q_bhsk, k_bhsk, v_bhsk = (self._split(layer(x_bsd)) for layer in (self.query, self.key, self.value))
        rate = self.dropout if self.training else 0.0
        y_bhsk = F.scaled_dot_product_attention(q_bhsk, k_bhsk, v_bhsk, dropout_p=rate, is_causal=True)
        return self.output(y_bhsk.transpose(1, 2).flatten(2))  # (b, s, h, k) -> (b, s, d)

    def _split(self, x_bsd: Tensor) -> Tensor:
        """(b, s, d) -> (b, h, s, k)."""
        return x_bsd.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them. x (b, s, d) -> (b, s, d), with (b, s, f) in the middle."""

    def __init__(self, width: int, ffn_width: int):
        super().__init__()
        self.up = nn.Linear(width, ffn_width)
        self.down = nn.Linear(ffn_width, width)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_bsd)))


class Block(nn.Module):
    """Attention and feed-forward, each after a layer norm, dropped out and added to its input. (b, s, d) -> same."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads, config.dropout)
        self.norm_feed_forward = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.ffn_width or 4 * config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.drop(self.attention(self.norm_attention(x_bsd)))
        return x_bsd + self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a last norm, and the head that gives a score for each token.

    tokens (b, s) int64 -> logits (b, s, v). With `tied_head` the head's weight *is* the token embedding's.
    Raises ValueError for a sequence longer than `max_length`.
    Source: Radford et al. 2019, "Language models are unsupervised multitask learners" (pre-norm GPT).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_length, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # each block adds to the stream: begin small (Radford et al. 2019, §2.3)
            for layer in (block.attention.output, block.feed_forward.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied_head:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_bs: Tensor) -> Tensor:
        length = tokens_bs.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"a sequence of {length} tokens, the model takes up to {self.config.max_length}")
        places_s = torch.arange(length, device=tokens_bs.device)
        x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return self.head(self.norm(x_bsd))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

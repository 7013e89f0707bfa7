"""A small decoder of the Llama kind, in plain PyTorch.

Shapes: b batch, s sequence, d width (hidden size), h heads, g heads of keys and values (g divides h), k head size
(h·k = d), f width of the feed-forward block, v vocabulary.
Source: Touvron et al. 2023, "LLaMA: open and efficient foundation language models", §2.2; grouped-query attention from
Ainslie et al. 2023, "GQA". No layer has a bias, and there is no dropout.

Nothing here remembers earlier tokens. To generate, give the model `first`, the position of the first token, and
`attend`, which replaces attention: see `Llama`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. vocab_size and max_length in tokens.

    kv_heads: heads of keys and values; as many as `heads` when not given.
    ffn_width: when not given, 8/3 · width rounded up to a multiple of 32: three matrices cost what two of 4 · width do.
    Raises ValueError for sizes under 1, heads that do not divide the width or leave an odd head size, and kv_heads that
    do not divide the heads.
    """

    vocab_size: int
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    layers: int = 2
    max_length: int = 128
    ffn_width: int | None = None
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied_head: bool = False

    def __post_init__(self):
        sizes = (self.vocab_size, self.width, self.heads, self.layers, self.max_length, self.groups, self.hidden)
        if min(sizes) < 1:
            raise ValueError(f"the sizes of a Llama are 1 or more: {self}")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")
        if self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of numbers: a head size of {self.head_size} is odd")
        if self.heads % self.groups:
            raise ValueError(f"{self.groups} heads of keys and values do not divide {self.heads} heads")

    @property
    def head_size(self) -> int:
        """k = d / h."""
        return self.width // self.heads

    @property
    def groups(self) -> int:
        """g, heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """f, width of the feed-forward block."""
        return -(-8 * self.width // (3 * 32)) * 32 if self.ffn_width is None else self.ffn_width

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: 2·d² + 2·d·g·k (attention), 3·d·f (feed-forward), 2·d (norms)."""
        d = self.width
        return 2 * d * d + 2 * d * self.groups * self.head_size + 3 * d * self.hidden + 2 * d

    @property
    def n_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        tables = self.vocab_size * self.width * (1 if self.tied_head else 2)
        return self.layers * self.block_parameters + tables + self.width

    def flops_per_token(self, length: int) -> int:
        """FLOPs of forward and backward for one token of a sequence of `length` tokens, recomputation not counted.

        6 for each weight that multiplies (the head too, norms and the embedding not), and 12·s·d a layer for the
        scores and their product with the values, causality not taken off.
        Source: Chowdhery et al. 2022, "PaLM", appendix B.
        """
        weights = self.layers * (self.block_parameters - 2 * self.width) + self.vocab_size * self.width
        return 6 * weights + 12 * self.layers * length * self.width


class Rotary(nn.Module):
    """Turn pairs of numbers of each head by an angle that grows with the position. x (b, h, s, k) -> (b, h, s, k).

    `first` is the position of the first of the s tokens: a whole number, or one for each row, int64 of shape (b,).
    Number i of the first half and number i of the second half are a pair; at position p it turns by p / base^(2i/k).
    The tables are float32 buffers that no checkpoint holds: `reset_parameters` fills them, also after `to_empty`.
    Source: Su et al. 2021, "RoFormer", §3.2.
    """

    def __init__(self, head_size: int, max_length: int, base: float):
        super().__init__()
        self.head_size, self.max_length, self.base = head_size, max_length, base
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_length, head_size // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # on the buffers' device; not under autocast or a default dtype, which would round the angles
        places = {"device": self.cos.device, "dtype": torch.float32}
        turns = self.base ** (-torch.arange(0, self.head_size, 2, **places) / self.head_size)
        angles = torch.arange(self.max_length, **places)[:, None] * turns  # (max_length, k/2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x_bhsk: Tensor, first: int | Tensor = 0) -> Tensor:
        length = x_bhsk.shape[-2]
        if isinstance(first, Tensor):
            places = first[:, None] + torch.arange(length, device=first.device)
            cos, sin = (table[places][:, None] for table in (self.cos, self.sin))  # (b, 1, s, k/2)
        else:
            cos, sin = self.cos[first : first + length], self.sin[first : first + length]
        one, other = x_bhsk.chunk(2, -1)  # products of bf16 and float32 are float32
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).type_as(x_bhsk)


class LlamaAttention(nn.Module):
    """Causal self-attention where h/g heads of queries share a head of keys and values. x (b, s, d) -> (b, s, d).

    With `attend`, `attend(q_bhsk, k_bgsk, v_bgsk) -> y_bhsk` is called instead; q and k are turned for their positions
    by then. h and g are what the layers give: where they are cut by heads, a rank's own.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_size = config.head_size
        self.shared = config.heads // config.groups
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.groups * config.head_size, bias=False)
        self.value = nn.Linear(config.width, config.groups * config.head_size, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(config.head_size, config.max_length, config.rotary_base)

    def forward(self, x_bsd: Tensor, first: int | Tensor = 0, attend: Callable | None = None) -> Tensor:
        q_bhsk, k_bgsk, v_bgsk = (self._split(layer(x_bsd)) for layer in (self.query, self.key, self.value))
        q_bhsk, k_bgsk = self.rotary(q_bhsk, first), self.rotary(k_bgsk, first)
        if attend is None:
            attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=self.shared > 1)
        y_bhsk = attend(q_bhsk, k_bgsk, v_bgsk)
        return self.output(y_bhsk.transpose(1, 2).flatten(2))  # (b, s, h, k) -> (b, s, d)

    def _split(self, x: Tensor) -> Tensor:
        """(b, s, heads·k) -> (b, heads, s, k)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Two linear layers side by side, one through SiLU as a gate on the other, then back. x (b, s, d) -> (b, s, d).

    Source: Shazeer 2020, "GLU variants improve transformer".
    """

    def __init__(self, width: int, ffn_width: int):
        super().__init__()
        self.gate = nn.Linear(width, ffn_width, bias=False)
        self.up = nn.Linear(width, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each after an RMSNorm and added to its input. (b, s, d) -> same."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = LlamaAttention(config)
        self.norm_feed_forward = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = SwiGLU(config.width, config.hidden)

    def forward(self, x_bsd: Tensor, first: int | Tensor = 0, attend: Callable | None = None) -> Tensor:
        x_bsd = x_bsd + self.attention(self.norm_attention(x_bsd), first, attend)
        return x_bsd + self.feed_forward(self.norm_feed_forward(x_bsd))


class Llama(nn.Module):
    """Token embedding, blocks, a last norm, and the head that gives a score for each token.

    tokens (b, s) int64 -> logits (b, s, v). With `tied_head` the head's weight *is* the token embedding's.
    Built under `torch.device("meta")` it holds no number; `to_empty(device=...)` and then `init_weights()` fill it.

    To go on from tokens that were seen before, give both:
    - `first`: the position of the first of these s tokens, a whole number or one for each row, int64 of shape (b,);
    - `attend(layer, q, k, v) -> y`, called once a layer (0, 1, ...) in the place of attention: q (b, h, s, k),
      k and v (b, g, s, k) are of these tokens alone, q and k turned for their positions; y is like q. The caller keeps
      the keys and values of earlier tokens, and hides the later ones from each query.

    Raises ValueError for a sequence that ends after `max_length`; positions of rows are not read for that.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter and every table in place, in the order of `modules()`: normal(0, 0.02), norms 1.

        The two layers of a block that add to the stream begin smaller, by 1/√(2·layers). Ties the head, if it is tied,
        again: `to_empty` undoes that.
        """
        if self.config.tied_head:
            self.head.weight = self.token_embedding.weight
        small = {id(layer) for b in self.blocks for layer in (b.attention.output, b.feed_forward.down)}
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                shrink = (2 * self.config.layers) ** 0.5 if id(module) in small else 1.0
                nn.init.normal_(module.weight, std=0.02 / shrink)
            elif isinstance(module, nn.RMSNorm | Rotary):
                module.reset_parameters()

    def forward(self, tokens_bs: Tensor, first: int | Tensor = 0, attend: Callable | None = None) -> Tensor:
        length = tokens_bs.shape[1] + (0 if isinstance(first, Tensor) else first)
        if length > self.config.max_length:
            raise ValueError(f"a sequence of {length} tokens, the model takes up to {self.config.max_length}")
        x_bsd = self.token_embedding(tokens_bs)
        for layer, block in enumerate(self.blocks):  # without `attend` a block's distances count, not where it begins
            x_bsd = block(x_bsd) if attend is None else block(x_bsd, first, partial(attend, layer))
        return self.head(self.norm(x_bsd))

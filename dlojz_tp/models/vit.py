"""A vision transformer (ViT), in plain PyTorch.

Shapes: b batch, c channels, H × W pixels, s patches and the class token, d width (hidden size), h heads, k head size
(h·k = d), f width of the feed-forward block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .transformer import FeedForward


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of the model. image: height and width in pixels; patch: side of a patch in pixels.

    Raises ValueError for sizes under 1, patches that do not tile the image, heads that do not divide the width.
    """

    width: int
    layers: int
    heads: int
    ffn_width: int
    patch: int = 16
    image: tuple[int, int] = (224, 224)
    classes: int = 1000
    channels: int = 3

    def __post_init__(self):
        sizes = (
            self.width,
            self.layers,
            self.heads,
            self.ffn_width,
            self.patch,
            *self.image,
            self.classes,
            self.channels,
        )
        if min(sizes) < 1:
            raise ValueError(f"the sizes of a vision transformer are 1 or more: {self}")
        if self.image[0] % self.patch or self.image[1] % self.patch:
            raise ValueError(
                f"patches of {self.patch} pixels do not tile an image of {self.image[0]} × {self.image[1]}"
            )
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")

    @property
    def patches(self) -> int:
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)


VITS = {
    "Ti/16": ViTConfig(192, 12, 3, 768),
    "S/16": ViTConfig(384, 12, 6, 1536),
    "B/16": ViTConfig(768, 12, 12, 3072),
    "L/16": ViTConfig(1024, 24, 16, 4096),
    "H/14": ViTConfig(1280, 32, 16, 5120, patch=14),
    "g/14": ViTConfig(1408, 40, 16, 6144, patch=14),
    "G/14": ViTConfig(1664, 48, 16, 8192, patch=14),
}
"""B, L and H: Dosovitskiy et al. 2021, "An image is worth 16x16 words", table 1. Ti, S, g and G: Zhai et al. 2022,
"Scaling vision transformers", table 2."""


class SelfAttention(nn.Module):
    """Every token sees every token. x (b, s, d) -> same. Rows of `qkv`: queries, keys, values, each head by head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_bsd: Tensor) -> Tensor:
        q_bhsk, k_bhsk, v_bhsk = self.qkv(x_bsd).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y_bhsk = F.scaled_dot_product_attention(q_bhsk, k_bhsk, v_bhsk)
        return self.output(y_bhsk.transpose(1, 2).flatten(2))  # (b, s, h, k) -> (b, s, d)


class ViTBlock(nn.Module):
    """Attention and feed-forward, each after a layer norm and added to its input. (b, s, d) -> same."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width, eps=1e-6)
        self.attention = SelfAttention(config.width, config.heads)
        self.norm_feed_forward = nn.LayerNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config.width, config.ffn_width)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attention(self.norm_attention(x_bsd))
        return x_bsd + self.feed_forward(self.norm_feed_forward(x_bsd))


class PatchEmbedding(nn.Module):
    """Project patches, put the class token in front, add positions. images (b, c, H, W) -> (b, s, d)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.image = config.image
        self.projection = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.patches + 1, config.width).normal_(std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != self.image:
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels, the model takes {self.image}")
        x_bsd = self.projection(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(images), -1, -1), x_bsd], 1) + self.positions


class ViT(nn.Module):
    """Patches, blocks, a last norm, and a head that reads the class token alone.

    images (b, c, H, W) -> logits (b, classes). `blocks` are all blocks in order, each (b, s, d) -> (b, s, d).
    Source: Dosovitskiy et al. 2021, "An image is worth 16x16 words", §3.1.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config)
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x_bsd = self.embedding(images)
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return self.head(self.norm(x_bsd)[:, 0])

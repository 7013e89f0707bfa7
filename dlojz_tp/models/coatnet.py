"""CoAtNet: a convolutional network whose last stages are attention with relative positions. Plain PyTorch.

Source: Dai et al. 2021, "CoAtNet: marrying convolution and attention for all data sizes", arXiv 2106.04803v2, table 3
and appendix A. Where the paper leaves room we do as timm's `coatnet_N_224` do: the depthwise convolution strides (the
paper's "strided DConv"), a shortcut averages, and a hidden layer stands before the classes.

Shapes: b batch, c channels, H × W places, n = H·W, d width (channels of a block), h heads, k head size (h·k = d).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Stage:
    """Equal blocks one after another. kind: "conv" or "attention"; stride: of the first block, 1 or 2."""

    kind: str
    blocks: int
    width: int
    stride: int = 2


@dataclass(frozen=True)
class CoAtNetConfig:
    """Sizes of the model. stem: channels of two convolutions; head: size of a head; image: height and width in pixels.

    Raises ValueError for an image that the strides do not divide, heads that do not divide a width, unknown kinds.
    """

    stem: int
    stages: tuple[Stage, ...]
    head: int = 32
    image: tuple[int, int] = (224, 224)
    classes: int = 1000
    channels: int = 3

    def __post_init__(self):
        stride = 2
        for stage in self.stages:
            stride *= stage.stride
            if (
                stage.kind not in ("conv", "attention")
                or stage.stride not in (1, 2)
                or min(stage.blocks, stage.width) < 1
            ):
                raise ValueError(f"not a stage of a CoAtNet: {stage}")
            if stage.kind == "attention" and stage.width % self.head:
                raise ValueError(f"heads of {self.head} do not divide a width of {stage.width}")
        if min(self.image) < 1 or self.image[0] % stride or self.image[1] % stride:
            raise ValueError(f"strides of {stride} in all do not divide an image of {self.image[0]} × {self.image[1]}")


def _family(stem: int, widths: tuple[int, ...], blocks: tuple[int, ...], head: int = 32) -> CoAtNetConfig:
    """Two stages of convolutions, two of attention; with five widths, a third of convolutions before attention."""
    kinds = ("conv", "conv", "attention", "attention") if len(widths) == 4 else ("conv",) * 3 + ("attention",) * 2
    strides = (2,) * 4 if len(widths) == 4 else (2, 2, 2, 1, 2)
    return CoAtNetConfig(stem, tuple(map(Stage, kinds, blocks, widths, strides)), head)


COATNETS = {
    0: _family(64, (96, 192, 384, 768), (2, 3, 5, 2)),
    1: _family(64, (96, 192, 384, 768), (2, 6, 14, 2)),
    2: _family(128, (128, 256, 512, 1024), (2, 6, 14, 2)),
    3: _family(192, (192, 384, 768, 1536), (2, 6, 14, 2)),
    4: _family(192, (192, 384, 768, 1536), (2, 12, 28, 2)),
    5: _family(192, (256, 512, 1280, 2048), (2, 12, 28, 2), head=64),
    # Table 12 prints 2048 for the last width of CoAtNet-6, which makes 1.35 billion parameters. The 1.47 billion of
    # table 5 come out with 3072, the last width of CoAtNet-7.
    6: _family(192, (192, 384, 768, 1536, 3072), (2, 4, 8, 42, 2), head=128),
    7: _family(192, (256, 512, 1024, 2048, 3072), (2, 4, 8, 42, 2), head=128),
}


class Stem(nn.Sequential):
    """Two convolutions, the first with a stride of 2. images (b, c, H, W) -> (b, d, H/2, W/2)."""

    def __init__(self, channels: int, width: int):
        super().__init__(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )


class SqueezeExcitation(nn.Module):
    """Scale each channel by what the mean of all channels says. (b, c, H, W) -> same."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()


class Shortcut(nn.Module):
    """What a block adds its result to: its input, averaged over 2 × 2 and projected where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.projection = nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.pool(x))


class MBConv(nn.Module):
    """Widen by four, convolve each channel alone, squeeze and excite, project back. (b, c, H, W) -> (b, d, H/s, W/s).

    A batch norm comes before the block and after its first two convolutions, which therefore have no bias.
    """

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        middle = 4 * width
        self.shortcut = Shortcut(inputs, width, stride)
        self.norm = nn.BatchNorm2d(inputs)
        self.expand = nn.Conv2d(inputs, middle, 1, bias=False)
        self.norm_expanded = nn.BatchNorm2d(middle)
        self.depthwise = nn.Conv2d(middle, middle, 3, stride, padding=1, groups=middle, bias=False)
        self.norm_depthwise = nn.BatchNorm2d(middle)
        self.excitation = SqueezeExcitation(middle, width // 4)
        self.project = nn.Conv2d(middle, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm_expanded(self.expand(self.norm(x))))
        y = F.gelu(self.norm_depthwise(self.depthwise(y)))
        return self.shortcut(x) + self.project(self.excitation(y))


def relative_places(height: int, width: int) -> Tensor:
    """For each pair of places, where its offset is in a flat table of (2H − 1)·(2W − 1). (n, n) int64."""
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    down = rows[:, None] - rows[None] + height - 1
    right = columns[:, None] - columns[None] + width - 1
    return down * (2 * width - 1) + right


class RelativeAttention(nn.Module):
    """Attention between all places, with one learned bias per head and offset. x (b, n, c) -> (b, n, d).

    `bias` (h, 2H − 1, 2W − 1): what is added to the score of a query (i, j) and a key (i', j') stands at
    (i − i' + H − 1, j − j' + W − 1).
    """

    def __init__(self, inputs: int, width: int, head: int, places: tuple[int, int]):
        super().__init__()
        self.heads = width // head
        self.qkv = nn.Linear(inputs, 3 * width)
        self.output = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.heads, 2 * places[0] - 1, 2 * places[1] - 1))
        self.register_buffer("places", relative_places(*places), persistent=False)

    def forward(self, x_bnc: Tensor) -> Tensor:
        q_bhnk, k_bhnk, v_bhnk = self.qkv(x_bnc).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias_hnn = self.bias.flatten(1)[:, self.places]
        y_bhnk = F.scaled_dot_product_attention(q_bhnk, k_bhnk, v_bhnk, attn_mask=bias_hnn)
        return self.output(y_bhnk.transpose(1, 2).flatten(2))  # (b, n, h, k) -> (b, n, d)


class AttentionBlock(nn.Module):
    """Relative attention and feed-forward, each after a layer norm and added. (b, c, H, W) -> (b, d, H/s, W/s)."""

    def __init__(self, inputs: int, width: int, stride: int, head: int, places: tuple[int, int]):
        super().__init__()
        self.shortcut = Shortcut(inputs, width, stride)
        self.norm_attention = nn.LayerNorm(inputs, eps=1e-6)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.attention = RelativeAttention(inputs, width, head, places)
        self.norm_feed_forward = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.pool(normed)
        shape = y.shape[2:]
        y_bnd = self.shortcut(x).flatten(2).transpose(1, 2) + self.attention(y.flatten(2).transpose(1, 2))
        y_bnd = y_bnd + self.down(F.gelu(self.up(self.norm_feed_forward(y_bnd))))
        return y_bnd.transpose(1, 2).unflatten(2, shape)


class Head(nn.Module):
    """The mean over all places, a layer norm, a hidden layer, the classes. (b, d, H, W) -> (b, classes)."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.hidden = nn.Linear(width, width)
        self.classes = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.hidden(self.norm(x.mean((2, 3)))).tanh())


class CoAtNet(nn.Module):
    """A stem, stages of MBConv, stages of relative attention, a head. images (b, 3, H, W) -> logits (b, classes).

    `blocks` are the blocks of all stages in order, each (b, c, H, W) -> (b, d, H/s, W/s): a list, so that one may wrap,
    cut or measure them one by one. `block_shapes(config)` says what each takes in.
    """

    def __init__(self, config: CoAtNetConfig):
        super().__init__()
        self.config = config
        self.stem = Stem(config.channels, config.stem)
        self.blocks = nn.ModuleList(block(config, i) for i in range(len(block_shapes(config))))
        self.head = Head(config.stages[-1].width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != self.config.image:
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels, the model takes {self.config.image}")
        x = self.stem(images)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def block_shapes(config: CoAtNetConfig) -> list[tuple[str, int, int, int, tuple[int, int]]]:
    """Of each block: its kind, channels in, channels out, stride, and height and width of what comes *in*."""
    channels, (height, width), found = config.stem, (config.image[0] // 2, config.image[1] // 2), []
    for stage in config.stages:
        for stride in (stage.stride, *[1] * (stage.blocks - 1)):
            found.append((stage.kind, channels, stage.width, stride, (height, width)))
            channels, height, width = stage.width, height // stride, width // stride
    return found


def block(config: CoAtNetConfig, i: int) -> nn.Module:
    """Block i of the model alone, as `CoAtNet(config).blocks[i]` is: for measuring a model too large to build whole."""
    kind, inputs, width, stride, (height, across) = block_shapes(config)[i]
    if kind == "conv":
        return MBConv(inputs, width, stride)
    return AttentionBlock(inputs, width, stride, config.head, (height // stride, across // stride))

"""A residual network for small images, with global average pooling: it takes images of any size."""

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a way around them.

    Args: inputs, outputs: channels; stride: of the first convolution, and of the way around.
    Source: He and others, "Deep Residual Learning for Image Recognition" (2016), arXiv 1512.03385.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x (b, inputs, h, w) to (b, outputs, h / stride, w / stride)."""
        return F.relu(self.way(x) + self.around(x))


def small_resnet(width: int, classes: int) -> nn.Sequential:
    """A network for images (b, 3, h, w), h and w any multiples of 8, that returns logits (b, classes).

    Three strides of 2 lie before the pooling, so that the least image, 8 x 8, is one pixel there.
    Args: width: channels of the first layers, doubled twice further on. Width 8 and 15 classes: 20,119 parameters.
    """
    stem = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks = ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))

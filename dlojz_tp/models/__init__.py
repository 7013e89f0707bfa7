"""Models of the course: plain PyTorch, which knows nothing of parallelism."""

from .coatnet import COATNETS, CoAtNet, CoAtNetConfig, Stage
from .llama import Llama, LlamaAttention, LlamaBlock, LlamaConfig, Rotary, SwiGLU
from .loss import language_loss
from .small_resnet import small_resnet
from .transformer import Attention, Block, FeedForward, Transformer, TransformerConfig
from .vit import VITS, ViT, ViTConfig

__all__ = [
    "COATNETS",
    "VITS",
    "Attention",
    "Block",
    "CoAtNet",
    "CoAtNetConfig",
    "FeedForward",
    "Llama",
    "LlamaAttention",
    "LlamaBlock",
    "LlamaConfig",
    "Rotary",
    "Stage",
    "SwiGLU",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "language_loss",
    "small_resnet",
]

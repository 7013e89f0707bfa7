"""Models of the course: plain PyTorch, which knows nothing of parallelism."""

from .llama import Llama, LlamaAttention, LlamaBlock, LlamaConfig, Rotary, SwiGLU
from .loss import language_loss
from .transformer import Attention, Block, FeedForward, Transformer, TransformerConfig

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "Llama",
    "LlamaAttention",
    "LlamaBlock",
    "LlamaConfig",
    "Rotary",
    "SwiGLU",
    "Transformer",
    "TransformerConfig",
    "language_loss",
]

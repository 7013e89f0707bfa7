"""Models of the course: plain PyTorch, which knows nothing of parallelism."""

from .transformer import Attention, Block, FeedForward, Transformer, TransformerConfig

__all__ = ["Attention", "Block", "FeedForward", "Transformer", "TransformerConfig"]

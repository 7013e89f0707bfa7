"""The loss of a language model."""

import torch
import torch.nn.functional as F


def language_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token, in nats.

    Args: model, (b, s) token ids -> logits (b, s, vocabulary); tokens (b, s + 1), of which the model reads the first s
    of each row and foretells the last s.
    Returns a tensor () with its graph.
    """
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

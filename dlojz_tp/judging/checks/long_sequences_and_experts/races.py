"""Races of 18: causal attention by blocks, against PyTorch's own kernel; a mixture of 64 experts, against transformers."""

import functools

import torch
import torch.nn.functional as F

from dlojz_tp import frameworks
from dlojz_tp.judging.contest import Contest, device

LENGTH, BLOCK = 2048, 256
TOKENS, WIDTH, HIDDEN, EXPERTS, K = 512, 128, 64, 64, 4


def _qkv():
    torch.manual_seed(0)
    return torch.randn(3, 1, 4, LENGTH, 128, device=device()).unbind()


def _blocks():
    triangle = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=device()).tril()
    for first in range(0, LENGTH, BLOCK):
        rows = slice(first, first + BLOCK)
        yield rows, [(slice(c, c + BLOCK), None) for c in range(0, first, BLOCK)] + [(rows, triangle)]


def yours(add_block, finish, blockwise_attention):
    return functools.partial(blockwise_attention, *_qkv(), list(_blocks()))


def theirs():
    return functools.partial(F.scaled_dot_product_attention, *_qkv(), is_causal=True)


def _mixture():
    """Tokens (t, d), and weights of router and experts, all with gradients."""
    torch.manual_seed(0)
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    x, *weights = (torch.randn(shape, device=device()) for shape in shapes)
    return x.requires_grad_(), *((weight * weight.shape[-1] ** -0.5).requires_grad_() for weight in weights)


def _forward_and_backward(mixture):
    out = mixture()
    out.backward(torch.ones_like(out))


def your_mixture(Exchange, expert_parallel):  # noqa: N803
    x, router, up, down = _mixture()

    def run(rows, counts):
        found = []
        for some, one, other in zip(rows.split(counts.tolist()), up, down):
            gate, value = (some @ one).chunk(2, -1)
            found.append((F.silu(gate) * value) @ other)
        return torch.cat(found)

    def mixture():
        gates, chosen = (x @ router.T).softmax(-1).topk(K)
        return expert_parallel(x, gates / gates.sum(-1, keepdim=True), chosen, EXPERTS, run)

    return functools.partial(_forward_and_backward, mixture)


def their_mixture():
    frameworks.need("transformers")
    from dlojz_tp.models.hugging_face import mixture_in_transformers

    x, *weights = _mixture()
    block = mixture_in_transformers(*weights, K)
    return functools.partial(_forward_and_backward, lambda: block(x[None]))


RACES = {
    1: Contest("scaled_dot_product_attention", yours, theirs),
    7: Contest("the mixture block of transformers", your_mixture, their_mixture, ranks=1),
}

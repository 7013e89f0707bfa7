"""Balise 2: gradients by blocks, against autograd in float64 over all scores; what is kept between the two passes."""

import gc

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, tried
from dlojz_tp.judging.checks.long_sequences_and_experts.attention_cases import SIZE, drawn
from dlojz_tp.judging.checks.long_sequences_and_experts.full_attention import attention
from dlojz_tp.judging.probes.memory import Memory

SHAPES = {
    "21 tokens in blocks of 8": (2, 3, 21, 8),
    "8 in one block of 8": (1, 2, 8, 8),
    "12 in blocks of 4": (1, 2, 12, 4),
}
GIVEN = {name: [drawn(b, h, s, SIZE) for _ in range(4)] for name, (b, h, s, _) in SHAPES.items()}  # q, k, v, gradient
LONG, BLOCK, HEADS = 512, 64, 2
SQUARE = 4 * HEADS * LONG * LONG // 4  # bytes, a quarter of all scores; q, k, v, the result and a few more are far less


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def gradients(apply, q, k, v, gradient, block):
    """Of q, k and v."""
    q, k, v = (one.clone().requires_grad_() for one in (q, k, v))
    return list(torch.autograd.grad(apply(q, k, v, block), (q, k, v), gradient))


def truth(q, k, v, gradient, block):
    return gradients(lambda q, k, v, block: attention(q, k, v, causal(q.shape[2]))[0], q, k, v, gradient, block)


def memory(apply):
    """Bytes kept between forward and backward; at the peak of backward; and left when the result is dropped."""
    q, k, v = (drawn(1, HEADS, LONG, SIZE).float().requires_grad_() for _ in range(3))
    gc.collect()
    gc.disable()  # what only the collector finds stays alive
    try:
        with Memory(q, k, v) as held:
            given = held.now()
            out = apply(q, k, v, BLOCK)
            kept = held.now() - given
            del out
            left = held.now() - given
            out = apply(q, k, v, BLOCK)
            held.reset()
            torch.autograd.grad(out.sum(), (q, k, v))
            return {"kept": kept, "peak": held.peak - given, "left": left}
    finally:
        gc.enable()


def transposed(apply):
    """Gradients where heads and tokens are the other way round in memory, and the gradient is expanded."""
    q, k, v, _ = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in GIVEN["21 tokens in blocks of 8"])
    return gradients(apply, q, k, v, torch.ones(1, dtype=torch.float64).expand(q.shape), 8)


def in_half(apply):
    """Forms of the gradients, and their largest error, in bfloat16."""
    q, k, v, gradient = (one.bfloat16() for one in GIVEN["21 tokens in blocks of 8"])
    found = gradients(apply, q, k, v, gradient, 8)
    due = truth(*(one.double() for one in (q, k, v, gradient)), 8)
    return [form(found), max((got.double() - one).abs().max().item() for got, one in zip(found, due))]


def observe(function):
    """The attention, its gradients, what is kept; other layouts and dtypes."""
    apply = function.apply
    out = apply(*GIVEN["12 in blocks of 4"][:3], 4)
    yield {"form": form(out), "forward": out}
    found = [gradients(apply, *GIVEN[name], shape[-1]) for name, shape in SHAPES.items()]
    yield {"dv": [one[2] for one in found], "dq": [one[0] for one in found], "dk": [one[1] for one in found]}
    yield memory(apply)
    yield {"transposed": tried(transposed, apply), "half": tried(in_half, apply)}


DUE = [truth(*GIVEN[name], shape[-1]) for name, shape in SHAPES.items()]
TURNED = transposed(lambda q, k, v, block: attention(q, k, v, causal(q.shape[2]))[0])
LOOKS = [
    Look("attention by blocks, with a graph", "form", "float64 (1, 2, 12, 8)", "wrong-forward", fields=silent),
    Value("", "forward", attention(*GIVEN["12 in blocks of 4"][:3], causal(12))[0], "wrong-forward", fields=silent),
    Value("gradients of v: " + ", ".join(SHAPES), "dv", [one[2] for one in DUE], "wrong-weights", fields=silent),
    Value("of q", "dq", [one[0] for one in DUE], "wrong-scores", fields=silent),
    Value("of k", "dk", [one[1] for one in DUE], "wrong-scores", fields=silent),
    Look("bytes kept from forward to backward, of 512 tokens", "kept", SQUARE, "saved-square", holds=at_most),
    Look("bytes made at any moment of backward", "peak", SQUARE, "square", holds=at_most),
    Look("bytes left when the result is dropped", "left", 4 * HEADS * LONG * SIZE // 2, "not-saved-for-backward", holds=at_most),
    Value("heads and tokens transposed in memory, an expanded gradient", "transposed", TURNED, "wrong-scores", fields=silent),
    Look("in bfloat16: dtypes, and the largest error", "half", [["bfloat16 (2, 3, 21, 8)"] * 3, 0.0], "half-gradients",
         holds=lambda seen, due: isinstance(seen, list) and seen[0] == due[0] and seen[1] < 4e-2),
]  # fmt: skip


def balise_2(function):
    yield from judged(LOOKS, observe, function)

"""Balise 1: attention that remembers, and text that is read once; the truth is whole texts, without a memory."""

import inspect

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, same
from dlojz_tp.judging.checks.inference.devices import STAYS
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.memory import Memory, held_bytes
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.models import Llama, LlamaConfig

DRAWN = torch.Generator().manual_seed(11)
LAYERS, ROWS, HEADS, GROUPS, LENGTH, SIZE = 3, 2, 8, 2, 12, 6


def drawn(layers, rows, heads, groups, length):
    """Queries, keys and values of each layer, as a model gives them: not contiguous."""

    def one(h):
        return torch.randn(rows, length, h, SIZE, generator=DRAWN, dtype=torch.float64).transpose(1, 2)

    return [(one(heads), one(groups), one(groups)) for _ in range(layers)]


def attention(q, k, v):
    """The last queries of a text, causal, over all of it: a head after the other, the scores written out."""
    places, shared = torch.arange(k.shape[2]), q.shape[1] // k.shape[1]
    later = places[None] > places[-q.shape[2] :, None]
    heads = []
    for head in range(q.shape[1]):
        theirs, values = k[:, head // shared], v[:, head // shared]
        scores = (q[:, head] @ theirs.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        heads.append(scores.softmax(-1) @ values)
    return torch.stack(heads, 1)


TEXT = drawn(LAYERS, ROWS, HEADS, GROUPS, LENGTH)
OTHERS = drawn(1, 1, 6, 1, 80) + drawn(1, 3, 4, 4, 9)  # one head of keys for all, many tokens; a head of keys for each
WHOLE = [attention(*layer) for layer in TEXT]
SPANS = [(0, 5), (5, 6), (6, 9), (9, 10), (10, 12)]  # a prompt, a token, several, a token, several
# a model whose likeliest token is clear: all numbers larger, and a text that it does not repeat
SMALL = LlamaConfig(vocab_size=30, width=16, heads=4, kv_heads=2, layers=2, max_length=32)
PROMPTS = [(torch.randint(30, (rows, length), generator=DRAWN), count)
           for rows, length, count in ((2, 5, 6), (1, 1, 4), (3, 7, 1), (1, 2, 9))]  # fmt: skip


def model():
    with seeded(3):
        made = Llama(SMALL).double().eval()
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(12.0)
    return made


@torch.no_grad()
def due_text(prompt, count):
    """All tokens again for each: the model's own attention, without a memory."""
    made = model()
    for _ in range(count):
        two = made(prompt)[:, -1].topk(2).values
        assert (two[:, 0] - two[:, 1]).min() > 1e-5, "the likeliest token must be clear"
        prompt = torch.cat([prompt, made(prompt)[:, -1:].argmax(-1)], 1)
    return prompt


TEXTS = [due_text(*case) for case in PROMPTS]


def part(layer, first, last):
    return [one[:, :, first:last].clone() for one in layer]


class Remembering:
    """`attend` with a memory, of the check's own: scores written out, for a `write` that is looked at alone."""

    def __init__(self):
        self.seen = {}

    def __call__(self, layer, q, k, v):
        before = self.seen.get(layer, (k[:, :, :0], v[:, :, :0]))
        k, v = self.seen[layer] = tuple(torch.cat(pair, 2) for pair in zip(before, (k, v)))
        return attention(q, k, v)


def watched(write, prompt, count):
    """(text, [(first, rows, tokens, whether `attend` was given), ...]): what the model was called with."""
    made, calls, names = model(), [], inspect.signature(Llama.forward)
    forward = made.forward

    def note(*args, **kwargs):
        given = names.bind(made, *args, **kwargs).arguments
        first = torch.as_tensor(given.get("first", 0)).flatten()[0].item()
        calls.append((first, given["tokens_bs"].shape[1], given.get("attend") is not None))
        return forward(*args, **kwargs)

    made.forward, memory = note, Remembering()
    text = write(made, prompt.clone(), count, memory)
    return text, calls if memory.seen else [(first, tokens, False) for first, tokens, _ in calls]


def observe(Cache, write):  # noqa: N803
    cache, found = Cache(), []
    found.append(cache.attend(0, *part(TEXT[0], *SPANS[0])))
    yield {"form": form(found[0]), "prompt": found[0]}
    again = Cache().attend(0, *part(TEXT[0], *SPANS[0]))
    yield {"empty": same(again, found[0])}
    for name, span in zip(("one", "several", "more"), SPANS[1:]):
        found.append(cache.attend(0, *part(TEXT[0], *span)))
        yield {name: found[-1]}
    cache = Cache()
    layers = [[cache.attend(n, *part(layer, *span)) for n, layer in enumerate(TEXT)] for span in SPANS]
    yield {"layers": [torch.cat(outs, 2) for outs in zip(*layers)]}
    others = [one_by_one(Cache, text) for text in OTHERS]
    changed = part(OTHERS[0], 0, 80)
    changed[1][:, :, 0] += 1
    yield {"others": others, "remembers": not torch.equal(one_by_one(Cache, changed)[:, :, -1], others[0][:, :, -1])}
    given = part(TEXT[2], 0, 5)
    kept = [one.clone() for one in given]
    cache = Cache()
    cache.attend(0, *given)
    cache.attend(0, *part(TEXT[2], 5, 6))
    yield {"untouched": all(torch.equal(*pair) for pair in zip(given, kept))}
    yield {"held": held(Cache)}
    yield {"device": on_gpu(lambda *of: twice(Cache(), *of), *part(TEXT[0], 0, 5))}
    texts = [watched(write, *case) for case in PROMPTS]
    yield {"text form": [form(text) for text, _ in texts], "calls": [calls for _, calls in texts]}
    yield {"texts": [text.double() for text, _ in texts]}


def one_by_one(Cache, text):  # noqa: N803
    cache = Cache()
    return torch.cat([cache.attend(0, *part(text, i, i + 1)) for i in range(text[0].shape[2])], 2)


def twice(cache, q, k, v):
    """A prompt, and the same tokens behind it."""
    return [cache.attend(0, q, k, v) for _ in range(2)]


def held(Cache):  # noqa: N803
    """Bytes by which a cache grows while a text does, in keys and values of g heads: 1.0 is due, 0 with room from the start."""
    q, k, v = drawn(1, 1, 16, 2, 64)[0]
    given = [[one[:, :, i : i + 4].clone() for one in (q, k, v)] for i in range(0, 64, 4)]

    def grown(now):
        cache, live = Cache(), []
        for call in given:
            cache.attend(0, *(one.clone() for one in call))
            live.append(now(cache))
        return live

    try:
        with Memory() as memory:
            live = grown(lambda cache: memory.now())
    except RuntimeError as error:  # of torch.nn.attention.bias, which can be made in no mode
        if "Creating a new Tensor subclass" not in str(error):
            raise
        live = grown(held_bytes)
    return (live[-1] - live[7]) / (k.nbytes + v.nbytes) * 2


def due_calls(prompt, count):
    length = prompt.shape[1]
    return [(0, length, True)] + [(length + i, 1, True) for i in range(count - 1)]


def call_hint(seen, due):
    """Which of the ways to read too much, or at wrong places."""
    calls, wanted = next(pair for pair in zip(seen, due) if pair[0] != pair[1])
    widths = [width for _, width, _ in calls]
    if not all(given for *_, given in calls):
        return "without-attend"
    if len(calls) > len(wanted):
        return "prompt-in-pieces" if widths[0] == 1 < wanted[0][1] else "one-call-too-many"
    if widths == [width for _, width, _ in wanted]:
        return "wrong-position"
    return "read-again" if sum(widths) > sum(width for _, width, _ in wanted) else "other-calls"


def call_fields(seen, due):
    calls, wanted = next(pair for pair in zip(seen, due) if pair[0] != pair[1])

    def words(every):
        return ", ".join(f"{width} at {first}" for first, width, _ in every[:4]) + (", …" if len(every) > 4 else "")

    return {"expected": f"tokens at first: {words(wanted)}", "got": words(calls)}


LOOKS = [
    Look("a prompt: the shape of what attend returns", "form", form(WHOLE[0][:, :, :5].contiguous()), "attend-form"),
    Look("a new cache is empty", "empty", True, "caches-mixed"),
    Value("its numbers", "prompt", WHOLE[0][:, :, :5], "wrong-attention"),
    Value("one token after the prompt", "one", WHOLE[0][:, :, 5:6], "wrong-attention"),
    Value("three tokens at once after these", "several", WHOLE[0][:, :, 6:9], "wrong-attention"),
    Value("and one more", "more", WHOLE[0][:, :, 9:10], "wrong-attention"),
    Value("three layers in turn", "layers", WHOLE, "wrong-attention"),
    Look("the last of 80 tokens still sees the first", "remembers", True, "forgets"),
    Value("80 tokens, one by one; one key head for all query heads, and one for each", "others", [attention(*text) for text in OTHERS],
          "wrong-attention"),
    Look("the tensors that the model gave are not changed", "untouched", True, "given-changed"),
    Look("bytes held", "held", 2.2, "too-many-bytes", holds=at_most,
         fields=lambda seen, due: {"expected": "1 times the keys and values of g heads", "got": f"{seen:.1f} times", "n": f"{seen:.1f}"}),
    STAYS,
    Look("write: the prompt and what follows it", "text form", [form(text) for text in TEXTS], "text-form"),
    Look("what the model reads in each call", "calls", [due_calls(*case) for case in PROMPTS], call_hint, fields=call_fields),
    Value("the same tokens as without a cache", "texts", [text.double() for text in TEXTS], "other-tokens"),
]  # fmt: skip


def balise_1(Cache, write):  # noqa: N803
    yield from judged(LOOKS, observe, Cache, write)

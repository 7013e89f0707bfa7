"""The Llama against independent truths: attention, rotary positions, norms, sizes, and a life begun on meta."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.models import Llama, LlamaAttention, LlamaConfig, Rotary, SwiGLU, language_loss

SMALL = LlamaConfig(vocab_size=50, width=24, heads=6, kv_heads=2, layers=2, max_length=16)


def _complex_turn(x, base):
    """Rotary positions as a product of complex numbers, in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    places = torch.arange(x.shape[-2], dtype=torch.float64)
    speeds = torch.tensor([base ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64)
    turned = pairs * torch.exp(1j * places[:, None] * speeds)
    return torch.cat([turned.real, turned.imag], -1)


def _attention_by_hand(attention, x, config):
    """Loops over heads, a mask, a softmax: (b, s, d) in float64."""
    size, shared = config.head_size, config.heads // config.groups
    q, k, v = (x @ layer.weight.T for layer in (attention.query, attention.key, attention.value))
    hidden = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=torch.float64).triu(1)
    outs = []
    for head in range(config.heads):
        mine, group = slice(head * size, (head + 1) * size), head // shared
        theirs = slice(group * size, (group + 1) * size)
        turned_q, turned_k = (_complex_turn(t, config.rotary_base) for t in (q[..., mine], k[..., theirs]))
        scores = turned_q @ turned_k.transpose(1, 2) / size**0.5 + hidden
        outs.append(scores.softmax(-1) @ v[..., theirs])
    return torch.cat(outs, -1) @ attention.output.weight.T


@pytest.mark.parametrize("kv_heads", [None, 3, 2, 1])
def test_attention_equals_loops_over_heads(kv_heads):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, width=24, heads=6, kv_heads=kv_heads, max_length=9)
    attention = LlamaAttention(config).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(attention(x), _attention_by_hand(attention, x, config), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_rotary_is_a_product_of_complex_numbers(base):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 31, 8)
    torch.testing.assert_close(Rotary(8, 40, base)(x).double(), _complex_turn(x, base), atol=1e-5, rtol=1e-5)


def test_rotary_depends_on_the_distance_only():
    torch.manual_seed(0)
    rotary = Rotary(8, 40, 10_000.0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotary(q.expand(1, 1, 40, 8))[0, 0], rotary(k.expand(1, 1, 40, 8))[0, 0]
    scores = torch.stack([turned_q[p + 5] @ turned_k[p] for p in range(35)])
    torch.testing.assert_close(scores, scores[:1].expand(35), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(40))


def test_rotary_keeps_bf16_outside_and_float32_inside():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 100, 8).bfloat16()
    out = Rotary(8, 100, 10_000.0)(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), _complex_turn(x, 10_000.0), atol=0.02, rtol=0.01)


def test_norm_and_swiglu_equal_their_formulas():
    torch.manual_seed(0)
    norm = Llama(SMALL).norm.double()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
    layer = SwiGLU(24, 40).double()
    gate, up = x @ layer.gate.weight.T, x @ layer.up.weight.T
    torch.testing.assert_close(layer(x), (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T)


def test_shapes_no_look_ahead_and_positions_count():
    torch.manual_seed(0)
    model = Llama(SMALL)
    tokens = torch.randint(50, (2, 16))
    logits = model(tokens)
    assert logits.shape == (2, 16, 50)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    after = model(changed)
    torch.testing.assert_close(after[:, :9], logits[:, :9])
    assert (after[:, 9:] - logits[:, 9:]).abs().amax(-1).min() > 0
    torch.testing.assert_close(model(tokens[:1, :1]), logits[:1, :1])
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert (model(swapped)[:, -1] - logits[:, -1]).abs().max() > 0


def test_the_loss_is_that_of_each_next_token():
    model, tokens = Llama(SMALL), torch.randint(50, (2, 9))
    logits, found = model(tokens[:, :8]), []
    for row in range(2):
        for place in range(8):
            found.append(logits[row, place].logsumexp(0) - logits[row, place, tokens[row, place + 1]])
    torch.testing.assert_close(language_loss(model, tokens), torch.stack(found).mean())


def test_begins_at_the_entropy_of_guessing_and_learns():
    torch.manual_seed(0)
    model, tokens = Llama(SMALL), torch.randint(50, (8, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = language_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(50)) < 0.05
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"kv_heads": None}, {"ffn_width": 17, "layers": 3}])
def test_sizes_are_told_right(changes):
    config = LlamaConfig(**({"vocab_size": 50, "width": 24, "heads": 6, "kv_heads": 2} | changes))
    model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.n_parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == config.block_parameters
    assert all(p.ndim == 2 or "norm" in name for name, p in model.named_parameters()), "no layer has a bias"
    assert (model.head.weight is model.token_embedding.weight) == config.tied_head
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it does not count fused attention
        model(torch.zeros(3, 16, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(3 * 16 * config.flops_per_token(16), rel=0.02)


def test_the_published_seven_billion():
    """Touvron et al. 2023, table 2: "6.7B"; the release counts 6,738,415,616 parameters."""
    config = LlamaConfig(32_000, width=4096, heads=32, layers=32, max_length=2048, ffn_width=11_008)
    assert config.n_parameters == 6_738_415_616


@pytest.mark.parametrize("tied", [False, True])
def test_built_on_meta_then_filled(tied):
    config = LlamaConfig(vocab_size=50, width=24, heads=6, kv_heads=2, layers=3, max_length=16, tied_head=tied)
    with torch.device("meta"):
        model = Llama(config)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(0)
    plain = Llama(config)
    torch.manual_seed(0)
    plain.init_weights()  # building draws the layers' own first values before
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    tokens = torch.randint(50, (2, 16))
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert set(model.state_dict()) == {n for n, _ in plain.named_parameters(remove_duplicate=False)}, "no table saved"


def test_the_layers_that_add_to_the_stream_begin_smaller():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=500, width=96, heads=4, layers=8))
    for block in model.blocks:
        assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"heads": 5}, "5 heads do not divide a width of 24"),
        ({"heads": 8}, "a head size of 3 is odd"),
        ({"kv_heads": 4}, "4 heads of keys and values do not divide 6 heads"),
        ({"kv_heads": 0}, "are 1 or more"),
        ({"ffn_width": 0}, "are 1 or more"),
        ({"layers": 0}, "are 1 or more"),
    ],
)
def test_sizes_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        LlamaConfig(**({"vocab_size": 50, "width": 24, "heads": 6} | wrong))


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="a sequence of 17 tokens, the model takes up to 16"):
        Llama(SMALL)(torch.zeros(1, 17, dtype=torch.long))


def _remembering(layers, starts):
    """`attend` by loops and masks: keys and values of each layer and row in lists, a query sees no later position."""
    seen = [[[[], []] for _ in starts] for _ in range(layers)]

    def attend(layer, q, k, v):
        rows = []
        for row, start in enumerate(starts):
            keys, values = seen[layer][row]
            keys += k[row].unbind(1)  # each (g, k)
            values += v[row].unbind(1)
            places = start + torch.arange(len(keys))
            mine = places[-q.shape[2] :]
            shared = q.shape[1] // k.shape[1]
            every_k, every_v = (torch.stack(t, 1).repeat_interleave(shared, 0) for t in (keys, values))
            scores = q[row] @ every_k.transpose(1, 2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(places[None, :] > mine[:, None], -math.inf)
            rows.append(scores.softmax(-1) @ every_v)
        return torch.stack(rows)

    return attend


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("parts", [[16], [1] * 16, [5, 1, 1, 3, 6], [15, 1]])
def test_a_sequence_in_parts_gives_the_same_scores(kv_heads, parts):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=50, width=24, heads=6, kv_heads=kv_heads, layers=3, max_length=16)).double()
    tokens = torch.randint(50, (2, 16))
    attend, first, found = _remembering(3, [0, 0]), 0, []
    for part in parts:
        found.append(model(tokens[:, first : first + part], first, attend))
        first += part
    torch.testing.assert_close(torch.cat(found, 1), model(tokens), atol=1e-6, rtol=1e-6)


def test_rows_may_begin_at_positions_of_their_own():
    torch.manual_seed(0)
    model, tokens = Llama(SMALL), torch.randint(50, (3, 9))
    starts, attend = [0, 7, 3], _remembering(2, [0, 7, 3])
    first = torch.tensor(starts)
    parts = model(tokens[:, :4], first, attend), model(tokens[:, 4:], first + 4, attend)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    x = torch.randn(3, 2, 5, 8)
    rotary, long = Rotary(8, 40, 100.0), torch.zeros(3, 2, 40, 8)
    for row, start in enumerate(starts):
        long[row, :, start : start + 5] = x[row]
    turned = torch.stack([t[:, s : s + 5] for s, t in zip(starts, _complex_turn(long, 100.0), strict=True)])
    torch.testing.assert_close(rotary(x, first).double(), turned, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary(x[1:2], 7).double(), turned[1:2], atol=1e-5, rtol=1e-5)


def test_attend_is_called_once_a_layer_and_sees_groups():
    torch.manual_seed(0)
    model, calls = Llama(SMALL), []

    def attend(layer, q, k, v):
        calls.append((layer, q.shape, k.shape, v.shape))
        return torch.zeros_like(q)

    assert model(torch.zeros(2, 3, dtype=torch.long), 13, attend).shape == (2, 3, 50)
    assert calls == [(layer, (2, 6, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)) for layer in range(2)]


def test_a_part_that_ends_too_late_is_refused():
    with pytest.raises(ValueError, match="a sequence of 17 tokens, the model takes up to 16"):
        Llama(SMALL)(torch.zeros(1, 2, dtype=torch.long), 15, lambda layer, q, k, v: q)


@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"kv_heads": None, "rotary_base": 500.0}])
def test_transformers_gives_the_same_scores_for_our_weights(changes):
    pytest.importorskip("transformers")
    from dlojz_tp.models.hugging_face import in_transformers

    torch.manual_seed(0)
    config = {"vocab_size": 200, "width": 64, "heads": 4, "kv_heads": 2, "layers": 3, "max_length": 64} | changes
    model, tokens = Llama(LlamaConfig(**config)), torch.randint(200, (2, 40))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)  # else all norms are alike
    drawn = torch.get_rng_state()
    theirs = in_transformers(model)
    assert torch.equal(drawn, torch.get_rng_state())
    with torch.no_grad():
        ours, found = model(tokens), theirs(tokens)
        torch.testing.assert_close(found.logits, ours, atol=2e-6, rtol=2e-6)
        assert ours.std() > 0.1
        after = theirs(tokens[:, -1:], past_key_values=theirs(tokens[:, :-1], use_cache=True).past_key_values)
        torch.testing.assert_close(after.logits, ours[:, -1:], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("product", ["eager", "grouped_mm"])
def test_transformers_mixes_experts_with_our_weights(product):
    pytest.importorskip("transformers")
    from dlojz_tp.models.hugging_face import mixture_in_transformers

    torch.manual_seed(0)
    router, up, down = torch.randn(6, 16), torch.randn(6, 16, 8), torch.randn(6, 4, 16)
    x = torch.randn(2, 5, 16)
    gates, chosen = (x @ router.T).softmax(-1).topk(2)
    gate, value = torch.einsum("bsd,edf->bsef", x, up).chunk(2, -1)
    every = torch.einsum("bsef,efd->bsed", torch.nn.functional.silu(gate) * value, down)
    mine = every.gather(2, chosen[..., None].expand(-1, -1, -1, 16))
    due = (mine * (gates / gates.sum(-1, keepdim=True))[..., None]).sum(2)
    torch.testing.assert_close(mixture_in_transformers(router, up, down, 2, product)(x), due, rtol=1e-4, atol=1e-4)

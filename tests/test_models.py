"""The transformer against PyTorch's own attention, and its promises: causal, tied, sizes refused."""

import pytest
import torch
from torch import nn

from dlojz_tp.models import Attention, Transformer, TransformerConfig

SMALL = TransformerConfig(vocab_size=50, width=24, heads=3, layers=2, max_length=16)


def test_attention_equals_pytorchs_own():
    torch.manual_seed(0)
    ours, theirs = Attention(24, 3).double(), nn.MultiheadAttention(24, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_shapes_and_no_look_ahead():
    torch.manual_seed(0)
    model = Transformer(SMALL)
    tokens = torch.randint(50, (2, 16))
    logits = model(tokens)
    assert logits.shape == (2, 16, 50)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    after = model(changed)
    torch.testing.assert_close(after[:, :9], logits[:, :9])
    assert (after[:, 9:] - logits[:, 9:]).abs().amax(-1).min() > 0


def test_begins_at_the_entropy_of_guessing():
    torch.manual_seed(0)
    tokens = torch.randint(50, (8, 17))
    loss = nn.functional.cross_entropy(Transformer(SMALL)(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(50.0).log().item()) < 0.05


def test_a_tied_head_is_the_embedding():
    config = TransformerConfig(vocab_size=50, width=24, heads=3, tied_head=True)
    model = Transformer(config)
    assert model.head.weight is model.token_embedding.weight
    untied = sum(p.numel() for p in Transformer(TransformerConfig(50, 24, 3)).parameters())
    assert untied - sum(p.numel() for p in model.parameters()) == 50 * 24


def test_dropout_only_while_training():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=50, width=24, heads=3, dropout=0.3))
    tokens = torch.randint(50, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"heads": 5}, "5 heads do not divide a width of 24"),
        ({"dropout": 1.0}, "dropout is a probability"),
        ({"layers": 0}, "are 1 or more"),
    ],
)
def test_sizes_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**({"vocab_size": 50, "width": 24, "heads": 3} | wrong))


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="a sequence of 17 tokens, the model takes up to 16"):
        Transformer(SMALL)(torch.zeros(1, 17, dtype=torch.long))

"""ViT against torchvision, CoAtNet against timm: same counts, and with the same weights the same logits."""

from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg
from torch import nn

from dlojz_tp.models import COATNETS, VITS, CoAtNet, CoAtNetConfig, Stage, ViT, ViTConfig
from dlojz_tp.models.coatnet import block, block_shapes


def count(model, config):
    with torch.device("meta"):
        return sum(p.numel() for p in model(config).parameters())


@pytest.mark.parametrize("name, theirs", [("B/16", "vit_b_16"), ("L/16", "vit_l_16"), ("H/14", "vit_h_14")])
def test_counts_of_vit_are_torchvisions(name, theirs):
    with torch.device("meta"):
        due = sum(p.numel() for p in torchvision.models.get_model(theirs).parameters())
    assert count(ViT, VITS[name]) == due


SMALL_AND_LARGE = (
    ("Ti/16", "tiny_patch16"),
    ("S/16", "small_patch16"),
    ("g/14", "giant_patch14"),
    ("G/14", "gigantic_patch14"),
)


@pytest.mark.parametrize("name, theirs", SMALL_AND_LARGE)
def test_counts_of_vit_are_timms(name, theirs):
    with torch.device("meta"):
        due = sum(p.numel() for p in timm.create_model(f"vit_{theirs}_224").parameters())
    assert count(ViT, VITS[name]) == due


@pytest.mark.parametrize("name, millions", [("g/14", 1011), ("G/14", 1843)])
def test_counts_of_vit_are_the_papers(name, millions):
    """Zhai et al. 2022, "Scaling vision transformers", table 2."""
    assert count(ViT, VITS[name]) / 1e6 == pytest.approx(millions, rel=0.003)


def take(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy their parameters to ours, in this order; a convolution over one place is a linear layer."""
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            assert p.numel() == q.numel()
            p.copy_(q.view_as(p))


@pytest.mark.parametrize("batch", [1, 3])
def test_vit_with_torchvisions_weights_gives_its_logits(batch):
    torch.manual_seed(0)
    theirs = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=40, num_classes=5
    ).double()
    nn.init.normal_(theirs.heads.head.weight)  # torchvision begins with zeros: all logits would be equal
    nn.init.normal_(theirs.class_token)
    ours = ViT(ViTConfig(24, 2, 3, 40, patch=8, image=(32, 32), classes=5)).double()
    copy = {"class_token": ours.embedding.class_token, "encoder.pos_embedding": ours.embedding.positions}
    copy |= {f"conv_proj.{k}": p for k, p in ours.embedding.projection.named_parameters()}
    names = {"ln_1": "norm_attention", "self_attention.in_proj_": "attention.qkv.", "mlp.0": "feed_forward.up"}
    names |= {"self_attention.out_proj": "attention.output", "ln_2": "norm_feed_forward", "mlp.3": "feed_forward.down"}
    mine, due = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for name in due:
        if "encoder_layer_" in name:
            i, rest = name.split("encoder_layer_")[1].split(".", 1)
            at = next(k for k in names if rest.startswith(k))
            copy[name] = mine[f"blocks.{i}.{names[at]}{rest.removeprefix(at)}"]
    copy |= {f"encoder.ln.{k}": p for k, p in ours.norm.named_parameters()}
    copy |= {f"heads.head.{k}": p for k, p in ours.head.named_parameters()}
    assert copy.keys() == due.keys() and len(copy) == len(mine)
    take(copy.values(), [due[name] for name in copy])
    images = torch.randn(batch, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("n", range(6))
def test_counts_of_coatnet_are_timms(n):
    """timm gives CoAtNet-5 heads of 32; the paper, appendix A.2, has 64. Fewer heads have fewer biases."""
    with torch.device("meta"):
        due = sum(p.numel() for p in timm.create_model(f"coatnet_{n}_224").parameters())
    assert count(CoAtNet, replace(COATNETS[n], head=32)) == due


@pytest.mark.parametrize("n, millions", list(enumerate([25, 42, 75, 168, 275, 688, 1470, 2440])))
def test_counts_of_coatnet_are_the_papers(n, millions):
    """Dai et al. 2021, tables 4 and 5. CoAtNet-3 has 167.0 million here and in timm."""
    assert count(CoAtNet, COATNETS[n]) / 1e6 == pytest.approx(millions, abs=10 if n > 5 else 1.1)


def test_the_last_width_that_the_paper_prints_for_coatnet_6_does_not_make_its_count():
    *stages, last = COATNETS[6].stages
    printed = replace(COATNETS[6], stages=(*stages, replace(last, width=2048)))
    assert count(CoAtNet, printed) / 1e9 == pytest.approx(1.348, abs=0.001)


TINY = CoAtNetConfig(
    8,
    (Stage("conv", 2, 16), Stage("conv", 1, 24), Stage("attention", 2, 32), Stage("attention", 1, 64)),
    head=16,
    image=(64, 96),
    classes=5,
)


@pytest.mark.parametrize("training", [True, False])
def test_coatnet_with_timms_weights_gives_its_logits(training):
    torch.manual_seed(0)
    config = MaxxVitCfg(
        embed_dim=(16, 24, 32, 64),
        depths=(2, 1, 2, 1),
        stem_width=8,
        head_hidden_size=64,
        transformer_cfg=MaxxVitTransformerCfg(dim_head=16),
    )
    theirs = MaxxVit(config, img_size=(64, 96), num_classes=5).double().train(training)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.1)
    ours = CoAtNet(TINY).double().train(training)
    take(ours.parameters(), list(map(renamed(theirs), dict(ours.named_parameters()))))
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


def renamed(theirs):
    """A function from the name of our parameter to timm's parameter."""
    due = dict(theirs.named_parameters())
    blocks = [f"stages.{s}.blocks.{b}" for s, stage in enumerate(theirs.stages) for b in range(len(stage.blocks))]
    conv = {"shortcut.projection": "shortcut.expand", "norm_expanded": "norm1", "norm_depthwise": "norm2"}
    conv |= {"excitation.squeeze": "se.fc1", "excitation.excite": "se.fc2", "expand": "conv1_1x1"}
    conv |= {"depthwise": "conv2_kxk", "project": "conv3_1x1", "norm": "pre_norm"}
    attention = {"shortcut.projection": "shortcut.expand", "norm_attention": "norm1", "attention.qkv": "attn.qkv"}
    attention |= {"attention.output": "attn.proj", "norm_feed_forward": "norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
    rest = {"stem.0": "stem.conv1", "stem.1": "stem.norm1", "stem.3": "stem.conv2", "head.norm": "head.norm"}
    rest |= {"head.hidden": "head.pre_logits.fc", "head.classes": "head.fc"}

    def find(name):
        if not name.startswith("blocks."):
            part, kind = name.rsplit(".", 1)
            return due[f"{rest[part]}.{kind}"]
        _, i, part = name.split(".", 2)
        at = blocks[int(i)]
        if part == "attention.bias":
            return due[f"{at}.attn.rel_pos.relative_position_bias_table"].T.contiguous()
        part, kind = part.rsplit(".", 1)
        theirs_is_conv = f"{at}.pre_norm.weight" in due
        name = (conv if theirs_is_conv else attention)[part]
        first = f"{at}.{name}.{kind}"
        found = due[first] if first in due else due[f"{at}.{name}.norm.{kind}"]
        if name == "attn.qkv":  # timm's rows: of each head its queries, keys, values, 16 each
            return found.unflatten(0, (-1, 3, 16)).transpose(0, 1).flatten(0, 2)
        return found

    return find


@pytest.mark.parametrize("n", [0, 7])
def test_blocks_alone_are_the_models_own(n):
    with torch.device("meta"):
        model = CoAtNet(COATNETS[n])
        for i, (kind, channels, width, stride, (high, wide)) in enumerate(block_shapes(COATNETS[n])):
            alone = block(COATNETS[n], i)
            assert [p.shape for p in alone.parameters()] == [p.shape for p in model.blocks[i].parameters()], kind
            out = alone(torch.empty(2, channels, high, wide))
            assert out.shape == (2, width, high // stride, wide // stride)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: ViTConfig(24, 1, 3, 40, patch=16, image=(224, 230)), "do not tile"),
        (lambda: ViTConfig(25, 1, 3, 40), "do not divide"),
        (lambda: ViTConfig(24, 0, 3, 40), "1 or more"),
        (lambda: replace(TINY, image=(64, 80)), "do not divide an image"),
        (lambda: replace(TINY, head=48), "do not divide a width"),
        (lambda: CoAtNetConfig(8, (Stage("mlp", 1, 8),)), "not a stage"),
        (lambda: ViT(ViTConfig(24, 1, 3, 40, patch=8, image=(16, 16)))(torch.zeros(1, 3, 16, 24)), "the model takes"),
        (lambda: CoAtNet(TINY)(torch.zeros(1, 3, 64, 64)), "the model takes"),
    ],
)
def test_what_cannot_be_is_said(make, said):
    with pytest.raises(ValueError, match=said):
        make()

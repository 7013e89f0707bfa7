"""Shapes of models: parameters and operations as their makers state them, by name and from a config.json."""

import dataclasses
import json

import pytest

from dlojz_tp.planner import GPT, MODELS, read_model

# billions: all, and of a token; as papers and model cards say
STATED = {
    "gpt3-175b": (175, 175), "bloom-176b": (176, 176), "llama2-7b": (6.7, 6.7), "llama2-70b": (69, 69),
    "llama3-8b": (8.0, 8.0), "llama3-70b": (70.6, 70.6), "llama3-405b": (405, 405), "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_parameters_are_those_that_are_stated(name):
    model = MODELS[name]
    assert (model.n_parameters / 1e9, model.active_parameters / 1e9) == pytest.approx(STATED[name], rel=0.02)


def test_deepseek_v3():
    """671 billion, 37 of them for a token; its layer for a further token has 11.5 beside the shared embedding."""
    model = dataclasses.replace(MODELS["deepseek-v3"], extra=0)
    assert (model.n_parameters / 1e9, model.active_parameters / 1e9) == pytest.approx((671, 37), rel=0.015)
    assert (MODELS["deepseek-v3"].n_parameters - model.n_parameters) / 1e9 == pytest.approx(11.5, rel=0.02)


def test_operations_of_a_mixture_are_those_of_what_a_token_meets():
    model = MODELS["mixtral-8x7b"]
    attention = model.layers * model.scores()
    outside = model.vocabulary * model.width  # an embedding is looked up; its head is a product
    wanted = 3 * (2 * (model.active_parameters - outside) + attention) * 4096
    assert model.flops(1) == pytest.approx(wanted, rel=1e-4)
    assert model.flops(1) - model.flops(1, causal=True) == pytest.approx(3 * 4096 * attention / 2)


CONFIGS = {
    "llama3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
    "deepseek-v3": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_hugging_face(tmp_path, name):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[name]))
    assert read_model(str(file)) == MODELS[name]
    file.write_text(json.dumps({"text_config": CONFIGS[name]}))
    assert read_model(str(file)) == MODELS[name]


def test_the_config_of_gpt2(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}))
    assert read_model(str(file)) == GPT(768, 12, 12, 1024, 50257)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{}", "has no 'hidden_size'"),
        ("[]", "config.json"),
        ("not json", "Expecting value"),
        (None, "No such file"),
        ('{"n_embd": 8, "n_head": 4, "num_key_value_heads": 3, "n_layer": 2, "vocab_size": 5}', "divide"),
        ('{"hidden_size": "wide", "num_attention_heads": 3}', "config.json"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, words):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_model(str(file))


def test_an_unknown_name_says_which_are_known():
    with pytest.raises(ValueError, match="choose of gpt3-175b, .*config.json"):
        read_model("gpt5")


@pytest.mark.parametrize(
    "wrong", [{"kv_heads": 3}, {"experts": 4, "top_k": 5}, {"experts": 4}, {"head": 0}, {"sequence": 0}]
)
def test_shapes_that_are_none(wrong):
    with pytest.raises(ValueError, match="must divide|1 or more|goes to"):
        GPT(64, 2, 4, **wrong)

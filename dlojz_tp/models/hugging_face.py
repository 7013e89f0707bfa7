"""Our Llama under the names that the library transformers gives its parts (extra `inference`)."""

import torch
from torch import nn

from .llama import Llama

NAMES = {
    "token_embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "norm_attention": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "norm_feed_forward": "post_attention_layernorm",
    "feed_forward": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}  # part of a path -> theirs; numbers and `weight` stay


def renamed(state: dict) -> dict:
    """The same tensors under the names of transformers."""
    return {".".join(NAMES.get(part, part) for part in path.split(".")): value for path, value in state.items()}


def in_transformers(model: Llama) -> nn.Module:
    """A `LlamaForCausalLM` of transformers with copies of the model's weights, on its device, for evaluation.

    It knows no beginning and no end: its `generate` stops at `max_new_tokens` only.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = model.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.width,
        intermediate_size=ours.hidden,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.groups,
        max_position_embeddings=ours.max_length,
        rms_norm_eps=ours.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rotary_base},
        tie_word_embeddings=ours.tied_head,
        bos_token_id=None,
        eos_token_id=None,
    )
    where = next(model.parameters())
    with torch.random.fork_rng():  # its own first values are drawn, and the caller's numbers stay as they would be
        theirs = LlamaForCausalLM(config).to(where.device, where.dtype)
    theirs.load_state_dict(renamed(model.state_dict()))
    return theirs.eval()


def mixture_in_transformers(router, up, down, k: int, product: str = "eager") -> nn.Module:
    """The mixture block of Mixtral in transformers, with copies of these weights: x (b, s, d) to (b, s, d).

    router (e, d); up (e, d, 2f): gate and up, side by side; down (e, f, d); k experts for each token. product: "eager",
    a loop over experts, or "grouped_mm", which transformers prefers in whole models.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, hidden, width = down.shape
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_local_experts": experts, "num_experts_per_tok": k}
    config = MixtralConfig(**sizes, experts_implementation=product)
    block = MixtralSparseMoeBlock(config).to(router.device, router.dtype)
    weights = {"gate.weight": router, "experts.gate_up_proj": up.mT, "experts.down_proj": down.mT}
    block.load_state_dict(weights)
    return block

"""Shapes of language models, and what they have and do: parameters, operations. Known ones, and those of a config."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class GPT:
    """A language model of transformer layers.

    width: hidden size. heads: of attention, each of `head` numbers (default: width / heads); kv_heads: heads of keys
    and values (default: heads). sequence: tokens. vocabulary: words. fused_attention: the scores are never written out
    (FlashAttention), are computed again in backward, and their causal half is not computed. ffn: width of the
    feed-forward block (default: 4 × width). gated: the layer of Llama (SwiGLU, RMSNorm, rotary positions; no biases, no
    dropout); otherwise that of GPT-2. tied: the head's weight is the embedding's.

    A mixture has `experts` of width `expert_ffn` in each layer after the first `dense_layers`; each token goes to
    `top_k` of them, and to a shared one of width `shared_ffn`. latent: (rank of queries, rank of keys and values, size
    of rotary part, size of a value's head): multi-head latent attention. extra: layers that predict one more token
    each, every one with the head's product.

    Raises ValueError for sizes below 1, or heads that divide nothing.
    """

    width: int
    layers: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    fused_attention: bool = True
    kv_heads: int | None = None
    head: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: tuple[int, int, int, int] | None = None
    extra: int = 0

    def __post_init__(self):
        if min(self.width, self.layers, self.heads, self.sequence, self.vocabulary) < 1:
            raise ValueError(f"sizes of a model are 1 or more: {self}")
        if self.head is None and self.width % self.heads:
            raise ValueError(f"{self.heads} heads must divide a hidden size of {self.width}")
        if self.latent:
            object.__setattr__(self, "latent", tuple(self.latent))
        usual = {"kv_heads": self.heads, "head": self.width // self.heads, "ffn": 4 * self.width}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if min(self.kv_heads, self.head, self.ffn) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} heads of keys must divide {self.heads} heads, and sizes are 1 or more")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ValueError(f"a token goes to 1 to {self.experts} experts, not {self.top_k}")

    @cached_property
    def attention_weights(self) -> int:
        """Numbers in the matrices of one attention block."""
        h, n = self.width, self.heads
        if self.latent:
            q, kv, rope, value = self.latent
            down, up = h * (q + kv + rope), n * (q * self.head + kv * (self.head - rope + value))
            return down + up + n * value * h
        return h * self.head * (2 * n + 2 * self.kv_heads)

    def block_weights(self, ffn: int) -> int:
        """Numbers in the matrices of a feed-forward block of this width."""
        return (3 if self.gated else 2) * self.width * ffn

    @property
    def small_weights(self) -> int:
        """Numbers of a layer in no matrix: norms, biases."""
        return 2 * self.width if self.gated else self.ffn + 9 * self.width

    @property
    def sparse_layers(self) -> int:
        """Layers that hold experts."""
        return max(0, self.layers + self.extra - self.dense_layers) if self.experts else 0

    @property
    def sparse(self) -> float:
        """The share of the layers that hold experts."""
        return self.sparse_layers / (self.layers + self.extra)

    @property
    def embedding(self) -> int:
        """Parameters outside the layers: embeddings of words and positions, an own head, the last norm."""
        positions, norm = (0, 1) if self.gated else (self.sequence, 2)
        return (self.vocabulary * (1 if self.tied else 2) + positions + norm) * self.width

    def _weights(self, experts: int) -> int:
        """Numbers in all layers, with so many experts in each."""
        layers = self.layers + self.extra
        dense = (layers - self.sparse_layers) * self.block_weights(self.ffn)
        sparse = experts * self.block_weights(self.expert_ffn) + self.block_weights(self.shared_ffn)
        sparse = self.sparse_layers * (sparse + self.experts * self.width)
        return layers * (self.attention_weights + self.small_weights) + dense + sparse

    @property
    def n_parameters(self) -> int:
        """All parameters.

        Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
        Megatron-LM", §5.1, equation 2, and the last norm, which it leaves out: 12 l h² + 13 l h + (V + s) h + 2 h.
        """
        return self._weights(self.experts) + self.embedding

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: those of its own experts only."""
        return self._weights(self.top_k) + self.embedding

    def scores(self, causal: bool = False) -> float:
        """Operations of one layer for a token, forward: scores and their use; their causal half where that is asked."""
        value = self.latent[3] if self.latent else self.head
        return 2 * self.sequence * self.heads * (self.head + value) / (2 if causal else 1)

    def flops(self, batch: int, *, forwards: int = 1, causal: bool = False) -> float:
        """Operations of a step on `batch` sequences: for MFU, with one forward; with 2, layers computed again count.

        causal: whether the half of the scores that a causal mask leaves out is not counted. Most papers count it.

        Source: the same paper, appendix: 96 B s l h² (1 + s/6h + V/16lh) with recomputation, 72 in the place of 96 and
        12 of 16 without.
        """
        layers = self.layers + self.extra
        small = layers * self.small_weights  # norms and biases are no products
        layer = 2 * (self._weights(self.top_k) - small) + layers * self.scores(causal)
        return batch * self.sequence * ((2 + forwards) * layer + 6 * (1 + self.extra) * self.width * self.vocabulary)


def _llama(width, layers, heads, ffn, sequence, vocabulary, kv_heads=None, **more):
    more = {"tied": False, "gated": True, "ffn": ffn} | more
    return GPT(width, layers, heads, sequence, vocabulary, kv_heads=kv_heads, **more)


# Shapes as their configurations on Hugging Face give them; BLOOM's of Le Scao et al. 2022, table 3.
MODELS = {
    "gpt3-175b": GPT(12288, 96, 96, 2048, 51200),
    "bloom-176b": GPT(14336, 70, 112, 2048, 250880),
    "llama2-7b": _llama(4096, 32, 32, 11008, 4096, 32000),
    "llama2-70b": _llama(8192, 80, 64, 28672, 4096, 32000, 8),
    "llama3-8b": _llama(4096, 32, 32, 14336, 8192, 128256, 8),
    "llama3-70b": _llama(8192, 80, 64, 28672, 8192, 128256, 8),
    "llama3-405b": _llama(16384, 126, 128, 53248, 8192, 128256, 8),
    "mixtral-8x7b": _llama(4096, 32, 32, 14336, 4096, 32000, 8, experts=8, top_k=2, expert_ffn=14336),
    "mixtral-8x22b": _llama(6144, 56, 48, 16384, 4096, 32000, 8, experts=8, top_k=2, expert_ffn=16384),
    "qwen3-30b-a3b": _llama(
        2048, 48, 32, 6144, 4096, 151936, 4, head=128, experts=128, top_k=8, expert_ffn=768,
    ),
    "qwen3-235b-a22b": _llama(
        4096, 94, 64, 12288, 4096, 151936, 4, head=128, experts=128, top_k=8, expert_ffn=1536,
    ),
    "deepseek-v3": _llama(
        7168, 61, 128, 18432, 4096, 129280, experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3,
        head=192, latent=(1536, 512, 64, 128), extra=1,
    ),
}  # fmt: skip


def read_model(name: str) -> GPT:
    """A model by its name, or from the config.json that Hugging Face keeps beside its weights.

    Raises:
        ValueError: for an unknown name, a file that cannot be read, or a configuration without the sizes of a decoder.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if not name.endswith(".json"):
        raise ValueError(f"no model {name!r}: choose of {', '.join(MODELS)}, or give a config.json with its sizes")
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
        return _of_config(config.get("text_config", config))
    except KeyError as error:
        raise ValueError(f"{name} has no {error}: it is not the configuration of a decoder") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def _of_config(config: dict) -> GPT:
    """Hugging Face's names of the sizes, of GPT-2's family and of Llama's with its mixtures."""

    def first(*names, default=KeyError):
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is KeyError:
            raise KeyError(names[0])
        return found

    width, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    experts = first("n_routed_experts", "num_local_experts", "num_experts", default=0)
    expert_ffn = first("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", default=4 * width)
    latent = None
    if config.get("kv_lora_rank"):
        latent = (config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"])
    head = latent[2] + config["qk_nope_head_dim"] if latent else first("head_dim", default=width // heads)
    return GPT(
        width, first("num_hidden_layers", "n_layer", "n_layers"), heads,
        min(first("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", default=2048), 8192),
        config["vocab_size"], kv_heads=heads if latent else first("num_key_value_heads", default=heads), head=head,
        ffn=first("intermediate_size", "ffn_dim", "n_inner", default=4 * width),
        gated="silu" in str(first("hidden_act", "activation_function", default="gelu")),
        tied=first("tie_word_embeddings", default="n_embd" in config), experts=experts,
        top_k=first("num_experts_per_tok", default=0) if experts else 0, expert_ffn=expert_ffn if experts else 0,
        shared_ffn=first("n_shared_experts", default=0) * expert_ffn if experts else 0,
        dense_layers=first("first_k_dense_replace", default=0), latent=latent,
        extra=first("num_nextn_predict_layers", default=0),
    )  # fmt: skip

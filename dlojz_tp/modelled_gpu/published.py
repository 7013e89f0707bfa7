"""Throughputs that were published, each with a program that does the same work on a modelled card.

Sources, in the order of the table below:
- ResNet-50: https://github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5 (21.03).
- BERT-large: the same, PyTorch/LanguageModeling/BERT, pre-training on one V100 of 32 GB (container 19.07).
- GPT-2: https://github.com/karpathy/nanoGPT/issues/110: 5 × 12 sequences of 1,024 tokens a GPU in 562 ms, on 8 A100.
- MPT: https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: a GPU's share of 8 with FSDP.
- Megatron-LM: planner.published, table 1, its smallest model, whose ranks compute alone.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet50

from dlojz_tp.modelled_gpu.runs import Modelled, on_card
from dlojz_tp.planner import MEGATRON
from dlojz_tp.planner.cards import A100, H100, RESNET50_FORWARD_SECONDS, V100, Card


@dataclass(frozen=True)
class Published:
    """value: images, sequences or tokens a second, or seconds, as `unit` says. calibrates: a constant comes from it."""

    name: str
    card: Card
    value: float
    unit: str
    program: partial
    calibrates: bool = False

    def predicted(self) -> tuple[float, Modelled]:
        """The same figure from the model, and the run."""
        run = on_card(self.program, card=self.card, name=self.name)
        return run.result, run


class Block(nn.Module):
    def __init__(self, width, heads, causal, fused, dropout):
        super().__init__()
        self.heads, self.causal, self.fused, self.dropout = heads, causal, fused, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            mask = torch.zeros(q.shape[-2], q.shape[-2], device=x.device, dtype=torch.bool)
            y = F.dropout(F.softmax(scores.masked_fill(mask, -1e4), dim=-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norms[0](x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


class Language(nn.Module):
    """BERT or GPT: the same work."""

    def __init__(self, vocabulary, width, heads, layers, length, causal=True, fused=True, dropout=0.0, again=False):
        super().__init__()
        self.again = again
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal, fused, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.again else block(x)
        return self.head(self.norm(x))


def train(clock, make, optimizer, inputs, per_step, dtype=None, channels_last=False, compiled=False, updates=1):
    """`per_step` over the seconds of a step."""
    model = make().to("cuda")
    model = model.to(memory_format=torch.channels_last) if channels_last else model
    optimizer = optimizer(model.parameters())
    model = torch.compile(model) if compiled else model
    begin = 0.0
    for _ in range(2):  # the first fills the queue
        torch.cuda.synchronize()
        begin = clock.host
        for _ in range(updates):
            x = torch.empty(inputs) if len(inputs) == 4 else torch.zeros(inputs, dtype=torch.int64)
            y = torch.zeros(inputs if len(inputs) == 2 else inputs[:1], dtype=torch.int64)
            x, y = x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)
            x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
            with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return per_step / (clock.host - begin)


def forward(clock, images, mixed=True):
    """Seconds of a forward pass of ResNet-50."""
    model, x = resnet50().to("cuda").eval(), torch.empty(images, 3, 224, 224)
    if mixed:
        x = x.contiguous(memory_format=torch.channels_last)
    x = x.to("cuda")
    for _ in range(2):
        begin = clock.host
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=mixed):
            model(x)
        torch.cuda.synchronize()
    return clock.host - begin


_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
_adam = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def _resnet(card, value, batch, calibrates=False, **options):
    program = partial(train, make=resnet50, optimizer=_sgd, inputs=(batch, 3, 224, 224), per_step=batch, **options)
    kind = "float16, channels last" if options else "TF32" if card.tf32 else "float32"
    return Published(f"ResNet-50, {kind}, {batch} images", card, value, "images/s", program, calibrates)


def _bert(value, batch, length, dtype=None):
    make = partial(Language, 30528, 1024, 16, 24, 512, causal=False, fused=False, dropout=0.1)
    program = partial(train, make=make, optimizer=_adam, inputs=(batch, length), per_step=batch, dtype=dtype)
    name = f"BERT-large, {'float16' if dtype else 'float32'}, {batch} × {length} tokens"
    return Published(name, replace(V100, memory=32e9), value, "sequences/s", program)


def _mpt(card, name, value, width, heads, layers, batch, calibrates=False, length=2048):
    make = partial(Language, 50368, width, heads, layers, length)
    program = partial(train, make=make, optimizer=_adam, inputs=(batch, length), per_step=batch * length,
                      dtype=torch.bfloat16)  # fmt: skip
    # each GPU holds an eighth of weights, gradients and optimizer there, all of it here
    return Published(f"MPT {name}, {batch} × {length:,} tokens", replace(card, memory=1e12), value, "tokens/s", program,
                     calibrates)  # fmt: skip


def _nanogpt():
    make = partial(Language, 50304, 768, 12, 12, 1024, fused=False)
    program = partial(train, make=make, optimizer=_adam, inputs=(12, 1024), per_step=5 * 12 * 1024, updates=5,
                      dtype=torch.bfloat16, compiled=True)  # fmt: skip
    return Published("GPT-2 124M compiled, 12 × 1,024 tokens", A100, 5 * 12 * 1024 / 0.562, "tokens/s", program)


def _megatron():
    run = MEGATRON[0]
    make = partial(Language, 51200, 2304, 24, 24, 2048, fused=False, dropout=0.1, again=True)
    batch = run.batch // run.gpus
    program = partial(train, make=make, optimizer=_adam, inputs=(batch // 2, 2048), per_step=batch * 2048, updates=2,
                      dtype=torch.bfloat16, compiled=True)  # fmt: skip
    value = run.tflops * 1e12 / run.model.flops(1, forwards=2) * 2048
    return Published("Megatron-LM 1.7B, 8 × 2,048 tokens", A100, value, "tokens/s", program)


MIXED = {"dtype": torch.float16, "channels_last": True}
PUBLISHED = [
    _resnet(V100, 367, 128), _resnet(V100, 1200, 256, calibrates=True, **MIXED),
    *(Published(f"ResNet-50 forward, {n} images", V100, RESNET50_FORWARD_SECONDS[n], "s", partial(forward, images=n),
                n == 1) for n in (1, 16, 64, 256)),
    Published("ResNet-50 forward, float32, 1 image", V100, 10.37e-3, "s", partial(forward, images=1, mixed=False)),
    Published("ResNet-50 forward, float32, 256 images", V100, 0.21448, "s", partial(forward, images=256, mixed=False)),
    _bert(40.32, 32, 128), _bert(171.52, 64, 128, torch.float16), _bert(8.36, 4, 512),
    _bert(30.08, 8, 512, torch.float16),
    _resnet(A100, 938, 256), _resnet(A100, 2470, 256, **MIXED), _nanogpt(), _megatron(),
    _mpt(A100, "125M", 141737, 768, 12, 12, 32), _mpt(A100, "350M", 58782, 1024, 16, 24, 32),
    _mpt(A100, "1B", 20513, 2048, 16, 24, 14),
    _mpt(H100, "760M", 63147, 1536, 12, 24, 24), _mpt(H100, "1B", 45455, 2048, 16, 24, 14, calibrates=True),
    _mpt(H100, "3B", 27046, 2560, 20, 32, 20, length=1024),
]  # fmt: skip

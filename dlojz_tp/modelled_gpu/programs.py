"""Programs of published runs, which benchmarks run on modelled cards: each does the work that its source describes.

Options of `measure`, as rows.toml names them:
    net: "gpt", "bert", or a network of torchvision; what else describes it goes to `Transformer`.
    batch, length: sequences and tokens of each, or images (of `image` pixels, in channels_last where it says so).
    precision: "float32", "tf32", "float16" or "bfloat16" by autocast, "float16 weights" or "bfloat16 weights".
    optimizer: "sgd", "foreach" or "fused" (AdamW). clip: gradients are clipped. accumulate: batches for each update.
    compiled: by torch.compile. pads: inductor pads products of odd sizes, as it does since PyTorch 2.1.
    loss_inside: the loss is part of the compiled function. forward: the forward pass alone.
    flash: version of FlashAttention (PyTorch has the second since 2.2).
    evaluations: forward passes that the source's figure contains for each step.
"""

from dataclasses import replace

import torch
import torchvision
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


class OwnNorm(nn.Module):
    """A LayerNorm of single operations."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


def own_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self, width, heads, attention, dropout, bias, by_hand):
        super().__init__()
        self.heads, self.attention, self.dropout, self.by_hand = heads, attention, dropout, by_hand
        self.norms = nn.ModuleList((OwnNorm if by_hand else nn.LayerNorm)(width) for _ in range(2))
        parts = 3 if by_hand else 1
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width // parts, bias=bias) for _ in range(parts))
        self.out = nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def attend(self, x, mask):
        if self.by_hand:
            q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv)
        else:
            q, k, v = self.qkv[0](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.attention != "plain":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.attention == "causal")
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(mask, -1e4) if mask.dtype == torch.bool else scores + mask
            y = F.dropout(F.softmax(scores, dim=-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, mask):
        x = x + F.dropout(self.attend(self.norms[0](x), mask), self.dropout)
        up = self.up(self.norms[1](x))
        return x + F.dropout(self.down(own_gelu(up) if self.by_hand else F.gelu(up)), self.dropout)


class Transformer(nn.Module):
    """GPT or BERT. attention: "plain" (scores in memory), "causal" or "full" (fused). outputs: of a head of its own,
    where it is not the table of the vocabulary's. again: each block is computed again in the backward pass.
    """

    def __init__(self, net, length, vocabulary, width, heads, layers, attention="plain", dropout=0.0, bias=True,
                 by_hand=False, again=False, outputs=0):  # fmt: skip
        super().__init__()
        self.net, self.again = net, again
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(max(length, 512), width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, dropout, bias, by_hand) for _ in range(layers))
        self.norm = (OwnNorm if by_hand else nn.LayerNorm)(width)
        self.head = nn.Linear(width, outputs or vocabulary, bias=False)
        if not outputs:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, labels=None):
        x, n = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)), tokens.shape[1]
        causal = {"size": (n, n), "dtype": torch.bool}
        mask = torch.zeros(**causal if self.net == "gpt" else {"size": (len(tokens), 1, 1, n), "dtype": x.dtype},
                           device=tokens.device)  # fmt: skip
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, mask)
        x = self.head(self.norm(x))
        return x if labels is None else F.cross_entropy(x.flatten(0, -2), labels.flatten())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


def measure(clock, net, batch, length=0, precision="float32", optimizer="sgd", channels_last=False, compiled=False,
            pads=True, loss_inside=False, accumulate=1, clip=False, forward=False, evaluations=0.0, flash=2, image=224,
            **shape):  # fmt: skip
    """Seconds of a step, with all its micro-batches, on the modelled card of this process; see the options above."""
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = (
        "ieee" if precision == "float32" else "tf32"
    )
    clock.rates = replace(clock.rates, attention=clock.rates.attention * flash / 2)
    kind, _, weights = precision.partition(" ")
    low = getattr(torch, kind) if kind.endswith("16") else None
    model = Transformer(net, length, **shape) if length else getattr(torchvision.models, net)(**shape)
    model = model.to("cuda", low if weights else None, memory_format=_format(channels_last))
    step = OPTIMIZERS[optimizer](model.parameters())
    run = torch.compile(model, options={"shape_padding": pads}) if compiled else model

    def batches():
        x = torch.zeros(batch, length, dtype=torch.int64) if length else torch.empty(batch, 3, image, image)
        y = torch.zeros((batch, length) if length else batch, dtype=torch.int64)
        x, y = (each.pin_memory().to("cuda", non_blocking=True) for each in (x, y))
        return x if length else x.to(low if weights else None, memory_format=_format(channels_last)), y

    def loss(x, y):
        with torch.autocast("cuda", dtype=low or torch.float16, enabled=low is not None and not weights):
            if loss_inside:
                return run(x, y)
            out = run(x)
            return out if forward else F.cross_entropy(out.flatten(0, -2), y.flatten())

    def evaluate():
        with torch.no_grad():
            loss(*batches())

    def once():
        for _ in range(accumulate):
            loss(*batches()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        step.zero_grad()

    def seconds(call):
        torch.cuda.synchronize()
        begin = clock.host
        call()
        torch.cuda.synchronize()
        return clock.host - begin

    if forward:
        model.eval()
        evaluate()
        return seconds(evaluate)
    once()  # the first makes the optimizer's memory
    return seconds(once) + (evaluations * seconds(evaluate) if evaluations else 0.0)


def _format(channels_last):
    return torch.channels_last if channels_last else torch.contiguous_format

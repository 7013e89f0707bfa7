"""Balise 2: FLOP and bytes of a pass, against the model on the meta device, PyTorch's counter and pairs counted one by one."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.judging.checking.looks import Look, Value, judged, numbers
from dlojz_tp.models import Llama, LlamaConfig

PLAIN = LlamaConfig(vocab_size=50, width=24, heads=6, layers=1, max_length=64, ffn_width=40)
GROUPED = LlamaConfig(vocab_size=96, width=32, heads=8, kv_heads=2, layers=3, max_length=300)
TIED = LlamaConfig(vocab_size=17, width=16, heads=2, kv_heads=1, layers=2, max_length=64, ffn_width=8, tied_head=True)
#  (config, batch, seen, new, size)
CASES = {
    "a token": [(PLAIN, 1, 0, 1, 4), (PLAIN, 1, 30, 1, 4), (GROUPED, 1, 255, 1, 2), (TIED, 1, 7, 1, 1)],
    "a token in each of several rows": [(PLAIN, 3, 5, 1, 4), (GROUPED, 16, 100, 1, 2), (TIED, 64, 1, 1, 4)],
    "a prompt": [(PLAIN, 1, 0, 9, 4), (GROUPED, 2, 0, 64, 2), (TIED, 5, 0, 2, 8)],
    "several tokens after others": [(PLAIN, 2, 20, 7, 4), (GROUPED, 1, 40, 33, 2), (TIED, 3, 1, 2, 1)],
}
#  (config, batch, seen, size, peak, bandwidth): bound by memory, by arithmetic, by keys and values
SPEEDS = [(GROUPED, 1, 64, 2, 1e12, 1e9), (GROUPED, 48, 64, 2, 1e9, 1e12), (TIED, 200, 40, 4, 1e9, 1e8), (PLAIN, 7, 3, 4, 1e10, 2e9)]  # fmt: skip


def counted(config, batch, seen, new, size):
    """(FLOP, bytes): linear layers by PyTorch's counter, pairs and kept numbers one by one."""
    with torch.device("meta"):
        model = Llama(config)
    found = {"flop": 0, "numbers": 0}

    def attend(layer, q, k, v):
        pairs = sum(key <= seen + query for query in range(new) for key in range(seen + new))
        found["flop"] += 2 * 2 * q.shape[0] * q.shape[1] * q.shape[3] * pairs
        found["numbers"] += (k.numel() + v.numel()) // new * (seen + new)
        return torch.zeros_like(q)

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, new, dtype=torch.int64, device="meta"), seen, attend)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return counter.get_total_flops() + found["flop"], size * (weights + found["numbers"])


DUE = {name: [counted(*case) for case in cases] for name, cases in CASES.items()}


def speed(config, batch, seen, size, peak, bandwidth):
    flop, moved = counted(config, batch, seen, 1, size)
    return batch * min(peak / flop, bandwidth / moved)


SPEED = [speed(*case) for case in SPEEDS]


def observe(pass_cost, tokens_a_second):
    """How many numbers came; FLOP, bytes and tokens a second as parts of the true ones."""
    for name, cases in CASES.items():
        got = [numbers(pass_cost(*case)) for case in cases]
        yield {f"{name}: numbers": None if got[0] is None else [len(one or []) for one in got]}
        parts = torch.tensor(got, dtype=torch.float64) / torch.tensor(DUE[name], dtype=torch.float64)
        yield {f"{name}: flop": parts[:, 0], f"{name}: bytes": parts[:, 1]}
    speeds = [tokens_a_second(*case) for case in SPEEDS]
    yield {"speeds": None if speeds[0] is None else torch.tensor(speeds, dtype=torch.float64) / torch.tensor(SPEED, dtype=torch.float64)}  # fmt: skip


def case_fields(cases, truths, unit):
    def fields(seen, due):
        k = int(((seen - due).abs() > 1e-9).int().argmax())
        config, batch, before, *rest = cases[k]
        new = rest[0] if unit != "tokens a second" else 1
        where = (f"d={config.width}, {config.layers} layers, h={config.heads}, g={config.groups}, k={config.head_size}, f={config.hidden}, v={config.vocab_size}; "
                 f"batch={batch}, seen={before}, new={new}, size={rest[1] if unit != 'tokens a second' else rest[0]}")  # fmt: skip
        return {"where": where, "expected": f"{truths[k]:,.0f} {unit}", "got": f"{truths[k] * seen[k].item():,.0f}"}

    return fields


def ones(some):
    return torch.ones(len(some), dtype=torch.float64)


LOOKS = []
for name, cases in CASES.items():
    flop, moved = zip(*DUE[name])
    LOOKS += [
        Look(name, f"{name}: numbers", [2] * len(cases), "not-two"),
        Value("FLOP", f"{name}: flop", ones(cases), "wrong-flop", fields=case_fields(cases, flop, "FLOP")),
        Value("bytes", f"{name}: bytes", ones(cases), "wrong-bytes", fields=case_fields(cases, moved, "bytes")),
    ]
LOOKS.append(Value("tokens a second", "speeds", ones(SPEEDS), "wrong-speed", fields=case_fields(SPEEDS, SPEED, "tokens a second")))  # fmt: skip


def balise_2(pass_cost, tokens_a_second):
    yield from judged(LOOKS, observe, pass_cost, tokens_a_second)

"""Balise 5: a LoRA layer against W + alpha / rank B A in float64, where a model gets one, what learns then."""

from collections import OrderedDict

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, numbers, silent, tried, within
from dlojz_tp.measure.operations import Operations
from dlojz_tp.models import Llama, LlamaConfig

#  in, out, bias, rank, alpha, dtype, the input's dimensions before `in`
CASES = [
    (24, 40, True, 4, 8, torch.float32, (3,)),
    (40, 24, True, 2, 6.0, torch.float32, (2, 5)),
    (16, 16, False, 3, 1.5, torch.float32, (4,)),
    (10, 12, True, 4, 2, torch.float64, (2, 3, 2)),
]
HALF = (32, 48, True, 4, 10, torch.bfloat16, (6,))
NAMES = "query", "value", "out"
RANK, ALPHA = 3, 12
LLAMA = LlamaConfig(vocab_size=17, width=16, heads=2, kv_heads=1, layers=2, max_length=32, ffn_width=24)
LLAMA_NAMES = ["query", "key", "value", "output", "gate", "up", "down"]
SHAPES = [([(30, 50)], 4), ([(7, 90), (80, 3), (11, 11)], 2), (4 * [(4096, 1024)], 16)]


class Case:
    """A linear layer, an input, a gradient of the output; and what an adapter with known numbers makes of them."""

    def __init__(self, inputs, outputs, bias, rank, alpha, dtype, before, seed):
        draws = torch.Generator().manual_seed(seed)

        def drawn(*size, by=1.0):
            return (by * torch.randn(*size, generator=draws, dtype=torch.float64)).to(dtype)

        self.size, self.rank, self.alpha, self.dtype = (outputs, inputs), rank, alpha, dtype
        self.weight, self.bias = drawn(outputs, inputs, by=inputs**-0.5), drawn(outputs) if bias else None
        self.A, self.B = drawn(rank, inputs, by=inputs**-0.5), drawn(outputs, rank, by=0.5)
        self.x, self.gradient = drawn(*before, inputs), drawn(*before, outputs)
        x, g, A, B = (one.double() for one in (self.x, self.gradient, self.A, self.B))
        scale, rows, out = alpha / rank, x.flatten(0, -2), g.flatten(0, -2)
        self.base = x @ self.weight.double().T + (self.bias.double() if bias else 0)
        self.change = scale * (x @ A.T @ B.T)
        to_a, to_b = scale * B.T @ out.T @ rows, scale * out.T @ rows @ A.T
        self.gradients = [one.to(dtype) for one in (to_a, to_b, g @ (self.weight.double() + scale * B @ A))]

    def linear(self, device="cpu"):
        layer = nn.Linear(*reversed(self.size), bias=self.bias is not None, dtype=self.dtype, device=device)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer

    def filled(self, LoRALinear):
        """The answer's layer with the known A and B."""
        layer = LoRALinear(self.linear(), self.rank, self.alpha)
        with torch.no_grad():
            layer.A.copy_(self.A)
            layer.B.copy_(self.B)
        return layer

    def form(self):
        (outputs, inputs), kind = self.size, str(self.dtype).removeprefix("torch.")
        return {"A": f"{kind} {(self.rank, inputs)}", "B": f"{kind} {(outputs, self.rank)}"}


GIVEN = [Case(*case, seed) for seed, case in enumerate(CASES)]
IN_HALF = Case(*HALF, 9)
ALL = [*GIVEN, IN_HALF]
WIDE = Case(400, 300, True, 16, 32, torch.float32, (2,), 10)
FEW = Case(48, 40, True, 2, 8, torch.float32, (1, 3), 11)  # everything but W has fewer numbers than W


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.my_query, self.key = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.value, self.query_norm = nn.Conv1d(8, 8, 1), nn.LayerNorm(8)
        self.out = nn.Sequential(OrderedDict(query=nn.Linear(8, 6), act=nn.ReLU(), value=nn.Linear(6, 8, bias=False)))

    def forward(self, x):
        y = self.value((self.query(x) + self.my_query(x) + self.key(x)).mT).mT
        return x + self.out(self.query_norm(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.query, self.blocks = nn.Embedding(9, 8), nn.Linear(8, 8), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)


DUE_PLACES = sorted(["query", *(f"blocks.{k}.{name}" for k in (0, 1) for name in ("query", "out.query", "out.value"))])


def held(layer):
    """Form of A and B; a word where there is none."""
    return {name: form(getattr(layer, name)) if hasattr(layer, name) else "missing" for name in "AB"}


def learning(module):
    return sorted(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def factor(layer, case):
    """How many times the true change is in the change that A and B make to an output."""
    with torch.no_grad():
        got = layer(case.x).double()
        layer.B.zero_()
        change = got - layer(case.x).double()
    return ((change * case.change).sum() / case.change.square().sum()).item()


def formed(LoRALinear, graph):
    """Shapes of what `forward` makes that is as large as the weight."""
    layer = FEW.filled(LoRALinear)
    base = layer.linear.weight.untyped_storage().data_ptr()
    with torch.set_grad_enabled(graph), Operations() as operations:
        layer(FEW.x)
    most = FEW.weight.numel()
    return [list(out[3]) for *_, out in operations.log if out and out[1] >= most and out[0] != base]


def observe(LoRALinear, with_lora, lora_numbers):
    LoRALinear(GIVEN[0].linear(), 4, 8)  # what raises here, too, has nothing to do with the bias
    yield {"without bias": words(tried(LoRALinear, GIVEN[2].linear(), 3, 1.5))}
    layers = [LoRALinear(case.linear(), case.rank, case.alpha) for case in ALL]
    yield {"held": [held(layer) for layer in layers]}
    there = LoRALinear(GIVEN[0].linear("meta"), GIVEN[0].rank, GIVEN[0].alpha)
    yield {"devices": [there.A.device.type, there.B.device.type]}
    yield {"parameters": [[name for name in "AB" if not isinstance(getattr(layer, name), nn.Parameter)] for layer in layers]}  # fmt: skip
    yield {"learn": [learning(layer) for layer in layers]}
    wide = LoRALinear(WIDE.linear(), WIDE.rank, WIDE.alpha)
    yield {"B": wide.B.count_nonzero().item()}
    yield {
        "ends": [one.item() * 400**0.5 for one in wide.A.aminmax()],
        "typical": wide.A.square().mean().sqrt().item() * 1200**0.5,
    }
    filled = [case.filled(LoRALinear) for case in ALL]
    got = [layer(case.x) for layer, case in zip(filled, ALL)]
    yield {"forms": form(got)}
    again = [layer(case.x) for layer, case in zip(filled, GIVEN)]
    asleep = [layer.eval()(case.x) for layer, case in zip(filled, GIVEN)]
    yield {"again": all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, asleep))}
    yield {"factors": [factor(layer, case) for layer, case in zip(filled, ALL)]}
    yield {"outputs": got[: len(GIVEN)]}
    yield {"formed": formed(LoRALinear, graph=True) + formed(LoRALinear, graph=False)}
    gradients = []
    for case in GIVEN:
        layer, x = case.filled(LoRALinear), case.x.clone().requires_grad_()
        (layer(x) * case.gradient).sum().backward()
        gradients.append(["none" if one.grad is None else one.grad for one in (layer.A, layer.B, x)])
    yield {"gradients": gradients}
    with_lora(nn.ModuleDict({"query": nn.Linear(2, 2)}), NAMES, RANK, ALPHA)  # what raises here needs no other module
    model = Model()
    found = tried(with_lora, model, NAMES, RANK, ALPHA)
    yield {"raised": words(found), "returned": None if found is None else found is model}
    places = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    yield {"places": sorted(places), "learn there": learning(model)}
    yield {"made with": [[len(layer.A), layer.scale] for layer in places.values()]}
    llama, tokens = Llama(LLAMA), torch.arange(12).view(2, 6)
    before = llama(tokens).detach()
    after = with_lora(llama, LLAMA_NAMES, 2, 4)(tokens)
    after.sum().backward()
    yield {"off": (after - before).abs().max().item(), "Llama learns": len(learning(llama))}
    counted = [numbers(lora_numbers(list(shapes), rank)) for shapes, rank in SHAPES]
    yield {"two": None if counted[0] is None else [len(one) for one in counted]}
    parts = torch.tensor(counted, dtype=torch.float64) / torch.tensor(NUMBERS, dtype=torch.float64)
    yield {"numbers": parts[:, 0], "bytes": parts[:, 1]}


NUMBERS = [(4 * 80, 8 * 4 * 80), (2 * (97 + 83 + 22), 16 * 202), (16 * 4 * 5120, 128 * 4 * 5120)]


def words(found):
    """What was raised, or "" where a call came back."""
    return found if isinstance(found, str) else ""


def factor_fields(seen, due):
    k = next(k for k, one in enumerate(seen) if not abs(one - 1) <= 0.03)
    case = ALL[k]
    scale = case.alpha / case.rank
    return {"where": f"rank {case.rank}, alpha {case.alpha}", "expected": f"{scale:g} · B A x", "got": f"{seen[k] * scale:.4g} · B A x"}  # fmt: skip


def first_fields(seen, due):
    k = next(k for k, (a, b) in enumerate(zip(seen, due)) if a != b)
    return {"expected": due[k], "got": seen[k]}


def learns_hint(seen, due):
    """Too much learns, or too little."""
    return "base-learns" if any(set(one) - {"A", "B"} for one in seen) else "adapter-asleep"


def places_hint(seen, due):
    return "top-level" if seen == ["query"] else "wrong-names"


def model_hint(seen, due):
    """As above, in a model."""
    return "base-learns" if set(seen) - set(due) else "adapter-asleep"


def which(seen, due):
    """Names that are too many or missing."""
    return {"expected": "", "got": ", ".join(sorted(set(seen) ^ set(due))[:6])}


def draw_hint(seen, due):
    return "wrong-draw" if seen else "a-zero"


LOOKS = [
    Look("a layer without bias", "without bias", "", "needs-bias", fields=lambda seen, due: {"expected": "", "got": seen}),
    Look("A and B: shape and dtype", "held", [case.form() for case in ALL], "adapter-form", fields=first_fields),
    Look("on the weight's device", "devices", ["meta", "meta"], "adapter-form"),
    Look("both are parameters", "parameters", [[] for _ in ALL], "not-parameters", fields=silent),
    Look("A and B learn, and nothing else", "learn", [["A", "B"] for _ in ALL], learns_hint, fields=first_fields),
    Look("B is zero", "B", 0, "b-not-zero", fields=silent),
    Look("A is drawn like a weight of nn.Linear", "typical", 1.0, draw_hint, holds=within(0.05), fields=lambda seen, due: {"expected": "1 / √(3 · in) as standard deviation", "got": f"{seen:.3g} times that"}),
    Look("", "ends", [-1.0, 1.0], "wrong-draw", holds=within(0.03), fields=lambda seen, due: {"expected": "from -1 to 1, times 1 / √in", "got": f"from {seen[0]:.3g} to {seen[1]:.3g}"}),
    Look("outputs: shape and dtype", "forms", [form(case.base.to(case.dtype)) for case in ALL], "wrong-output"),
    Look("the same output on each call, in both modes", "again", True, "wrong-output"),
    Look("the change is multiplied by alpha / rank", "factors", [1.0 for _ in ALL], "wrong-scale", holds=within(0.03), fields=factor_fields),
    Value("W x + b + alpha / rank · B A x", "outputs", [(case.base + case.change).to(case.dtype) for case in GIVEN], "wrong-output", holds=within(2e-5)),
    Look("no (out, in) matrix is formed", "formed", [], "full-matrix", fields=lambda seen, due: {"expected": "", "got": f"shape {tuple(seen[0])} for a weight of {FEW.size}"}),
    Value("gradients of A, B and x", "gradients", [case.gradients for case in GIVEN], "wrong-gradient", holds=within(2e-5), fields=silent),
    Look("with_lora leaves modules of other types alone", "raised", "", "not-linear", fields=lambda seen, due: {"expected": "", "got": seen}),
    Look("it returns the same model", "returned", True, "another-model"),
    Look("a LoRALinear replaces each nn.Linear with one of the names", "places", DUE_PLACES, places_hint, fields=which),
    Look("with the given rank and alpha", "made with", [[RANK, ALPHA / RANK] for _ in DUE_PLACES], "rank-and-alpha", fields=first_fields),
    Look("nothing learns but A and B", "learn there", sorted(f"{name}.{part}" for name in DUE_PLACES for part in "AB"), model_hint, fields=which),
    Look("a Llama's logits are unchanged at first", "off", 0.0, "wrong-output", holds=within(1e-5), fields=silent),
    Look("in all its layers", "Llama learns", 2 * len(LLAMA_NAMES) * LLAMA.layers, "wrong-names"),
    Look("lora_numbers: two numbers", "two", [2] * len(SHAPES), "wrong-numbers"),
    Value("numbers that learn", "numbers", torch.ones(len(SHAPES), dtype=torch.float64), "wrong-numbers", fields=silent),
    Value("bytes", "bytes", torch.ones(len(SHAPES), dtype=torch.float64), "wrong-bytes", fields=silent),
]  # fmt: skip


def balise_5(LoRALinear, with_lora, lora_numbers):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield from judged(LOOKS, observe, LoRALinear, with_lora, lora_numbers)

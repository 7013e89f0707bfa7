"""Balise 6: a router: choices and gates, ties, a bias for the choice, float32, balance, capacity."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent
from dlojz_tp.judging.checking.looks import within as equal_within
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import stays

K = 3
LOGITS = torch.randn(9, 6, generator=torch.Generator().manual_seed(3)) * 2
COARSE = torch.randint(0, 4, (7, 24), generator=torch.Generator().manual_seed(1)) / 2
HALF = LOGITS.bfloat16()
BIAS = torch.tensor([0.5, -0.7, 0.2, 0.0, -0.9, 0.4])
UPSTREAM = torch.arange(1.0, 28).view(9, K) / 9
CHOICES = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1], [2, 0], [1, 3], [1, 0]])
CAPACITIES = 1, 2, 4, 9
LOADS = (torch.tensor([7, 1, 4, 4]), torch.tensor([0, 0, 9, 3]), torch.tensor([5, 5, 5, 5]))
START, RATE = torch.tensor([0.1, -0.2, 0.0, 0.3]), 0.01


def chosen(logits, k, bias=None):
    """The truth: experts (t, k), in Python, by score and then by number; and the probabilities, float64."""
    probabilities = logits.double().softmax(-1)
    scores = (probabilities if bias is None else probabilities + bias).tolist()
    return torch.tensor([sorted(range(len(one)), key=lambda e: (-one[e], e))[:k] for one in scores]), probabilities


def gates(logits, k, bias=None):
    experts, probabilities = chosen(logits, k, bias)
    mine = torch.stack([p[e] for p, e in zip(probabilities, experts)])
    return mine / mine.sum(1, keepdim=True)


def balance(logits, experts):
    """e · Σ share · mean probability, float64."""
    probabilities = logits.double().softmax(-1)
    share = torch.bincount(experts.flatten(), minlength=logits.shape[1]) / experts.numel()
    return logits.shape[1] * (share * probabilities.mean(0)).sum()


def kept(capacity):
    """Which choices have a place, in Python."""
    taken, found = [0] * 4, torch.zeros(CHOICES.shape, dtype=torch.bool)
    for j in range(CHOICES.shape[1]):
        for t, e in enumerate(CHOICES[:, j].tolist()):
            found[t, j] = taken[e] < capacity
            taken[e] += 1
    return found.double()


def slope(call, logits):
    """The gradient of call(logits), a scalar, with respect to the logits; zeros if there is none."""
    leaf = logits.clone().requires_grad_()
    value = call(leaf)
    if value.requires_grad:
        value.backward()
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def observe(route, balance_loss, within, next_bias):
    got = route(LOGITS.clone(), K)
    yield {"forms": form(got)}
    yield {"experts": got[1].double(), "gates": got[0]}
    with_bias = route(LOGITS.clone(), K, BIAS.clone())
    yield {"chosen": with_bias[1].double(), "chosen gates": with_bias[0]}
    yield {"ties": route(COARSE.bfloat16(), 4)[1].double()}
    half = [route(HALF.clone(), 2)[0], balance_loss(HALF.clone(), chosen(HALF, 2)[0])]
    yield {"half": half, "half forms": form(half)}
    yield {"slope": slope(lambda logits: (route(logits, K)[0] * UPSTREAM).sum(), LOGITS)}
    yield {"balance": [balance_loss(*case) for case in BALANCES]}
    yield {"balance slope": slope(lambda logits: balance_loss(logits, BALANCES[0][1]), LOGITS)}
    yield {"kept": [within(CHOICES.clone(), 4, capacity).double() for capacity in CAPACITIES]}
    given = [START.clone() for _ in LOADS]
    yield {"bias": [next_bias(*case, RATE) for case in zip(given, LOADS)], "given": given}

    def all_of_them(logits, bias, choices, start, load):
        found = route(logits, K, bias)
        return found, balance_loss(logits, found[1]), within(choices, 4, 2), next_bias(start, load, RATE)

    yield {"device": on_gpu(all_of_them, LOGITS, BIAS, CHOICES, START, LOADS[0])}


BALANCES = (
    (LOGITS, chosen(LOGITS, K)[0]),
    (torch.zeros(8, 4), torch.arange(16).view(8, 2) % 4),
    (LOGITS[:5] * 4, torch.zeros(5, 1, dtype=torch.int64)),
)
SLOPE = slope(lambda logits: (gates(logits, K) * UPSTREAM).sum(), LOGITS.double())
BALANCE_SLOPE = slope(lambda logits: balance(logits, BALANCES[0][1]), LOGITS.double())
DUE_BIAS = [START + RATE * torch.tensor(signs) for signs in ((-1.0, 1, 0, 0), (1.0, 1, -1, 0), (0.0, 0, 0, 0))]
LOOKS = [
    Look("gates and experts", "forms", [f"float32 (9, {K})", f"int64 (9, {K})"], "route-form"),
    Value("the most probable experts, the best first", "experts", chosen(LOGITS, K)[0].double(), "wrong-experts"),
    Value("their probabilities, divided by their sum", "gates", gates(LOGITS, K), "wrong-gates"),
    Value("a bias changes the choice", "chosen", chosen(LOGITS, K, BIAS)[0].double(), "bias-choice"),
    Value("but not the gates", "chosen gates", gates(LOGITS, K, BIAS), "biased-gates"),
    Look("of equal scores, the lower number", "ties", chosen(COARSE, 4)[0].double(), "ties", fields=silent),
    Look("the gates' gradient", "slope", SLOPE, "no-gradient", fields=silent),
    Value("the balance loss: 1 where all is even", "balance", [balance(*case) for case in BALANCES], "wrong-balance"),
    Look("its gradient", "balance slope", BALANCE_SLOPE, "no-gradient", fields=silent),
    Look("float32 probabilities of bfloat16 logits", "half forms", ["float32 (9, 2)", "float32 ()"], "rounded"),
    Look("", "half", [gates(HALF, 2), balance(HALF, chosen(HALF, 2)[0])], "rounded", holds=equal_within(1e-5), fields=silent),
    Value(f"the choices within capacities of {', '.join(map(str, CAPACITIES))}", "kept", [kept(c) for c in CAPACITIES], "wrong-within"),
    Value("the bias after a step: up below the mean load, down above it", "bias", DUE_BIAS, "wrong-bias"),
    Look("the given bias stays", "given", [START] * len(LOADS), "bias-changed", fields=silent),
    stays("on a GPU: nothing is read back, nothing is left on the CPU"),
]  # fmt: skip


def balise_6(route, balance_loss, within, next_bias):
    yield from judged(LOOKS, observe, route, balance_loss, within, next_bias)

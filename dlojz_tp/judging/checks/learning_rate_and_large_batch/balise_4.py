"""Balise 4: clipping by the global norm; one step on micro-batches of unequal size, over ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import out_of_reach
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.ranks import hung, killed_by
from dlojz_tp.judging.probes.shared_looks import judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic, sent
from dlojz_tp.measure.operations import Operations, in_words, syncs

MAX, LARGE = 1.5, 64  # bytes: what is less carries no gradients
SHAPES = [(3, 4), (5,), (2, 2, 2), (1,)]
SCALES = {"long gradients": 3.0, "short ones": 0.02, "zeros": 0.0}
#         (sequences, length) of the micro-batches of each rank
PARTS = [[(1, 6), (2, 3), (3, 1)], [(2, 2), (1, 1), (1, 3)], [(1, 1), (1, 7)], [(4, 3)]]


def borrowed():
    """Inside, PyTorch's clipping raises Wrong."""
    return out_of_reach(lambda _: Wrong("clip-borrowed"), torch.nn.utils.clip_grad_norm_.__wrapped__)


def _gradients(scale, copies=1):
    drawn = torch.Generator().manual_seed(3)
    return [(torch.rand(s, generator=drawn) + 0.5) * scale for s in SHAPES * copies]


def _clip(clip, gradients):
    """What it returns; the parameters afterwards. One of them has no gradient."""
    parameters = [nn.Parameter(torch.ones_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g.clone()
    with borrowed():
        return clip((p for p in [*parameters, nn.Parameter(torch.ones(2))]), MAX), parameters


def observe_clip(clip):
    found = {"norms": [], "gradients": []}
    for scale in SCALES.values():
        norm, parameters = _clip(clip, _gradients(scale))
        one = isinstance(norm, torch.Tensor) and norm.numel() == 1
        yield {"form": "a tensor with one number" if one else form(norm)}
        found["norms"].append(norm.reshape(()).float())
        found["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))
    yield {"norms": torch.stack(found["norms"]), "gradients": torch.cat(found["gradients"])}
    few, many = (_watched(clip, copies) for copies in (1, 4))
    yield many | {"more operators": many["operators"] - few["operators"]}
    bad = []
    for value in (torch.inf, torch.nan):
        gradients = _gradients(1.0)
        gradients[1][2] = value
        bad.append(bool(torch.isfinite(_clip(clip, gradients)[0])))
    yield {"finite": bad}


def _watched(clip, copies):
    """What a call takes with so many times as many parameters."""
    gradients = _gradients(3.0, copies)
    parameters = [nn.Parameter(torch.ones_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g
    with borrowed(), Operations() as operations:
        clip(parameters, MAX)
    moved = any(p.grad is not g for p, g in zip(parameters, gradients))
    return {"syncs": syncs(operations), "moved": moved, "operators": operations.total}


_LONG = [torch.cat([g.double().flatten() for g in _gradients(scale)]) for scale in SCALES.values()]
CLIP = [
    Look("clipping: returns the norm before clipping, as a tensor", "form", "a tensor with one number", "norm-form"),
    Value("", "norms", torch.stack([g.norm() for g in _LONG]).float(), "wrong-norm"),
    Value("one factor for all gradients, never above 1", "gradients",
          torch.cat([g * min(1, MAX / max(g.norm().item(), 1e-9)) for g in _LONG]).float(), "wrong-clip"),
    Look("in place, with no value read back to Python, and as many operators for many parameters as for few", "moved", False, "new-gradients"),
    Look("", "syncs", [], "hidden-sync", fields=lambda seen, _: {"error": in_words(seen), "expected": "", "got": ""}),
    Look("", "more operators", 0, "operators-grow", holds=at_most,
         fields=lambda seen, _: {"n": seen, "few": len(SHAPES), "many": 4 * len(SHAPES), "expected": "", "got": ""}),
    Look("a norm that is not finite is reported", "finite", [False, False], "norm-hidden"),
]  # fmt: skip


class Words(nn.Module):
    """Logits (…, 11) of tokens (…): tied weights, a frozen and an unused parameter; tells when it is used."""

    def __init__(self, tell=lambda text: None):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        drawn = torch.Generator().manual_seed(7)
        for p in (self.embedding.weight, self.hidden.weight):
            nn.init.normal_(p, std=0.6, generator=drawn)
        nn.init.zeros_(self.hidden.bias)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.full((8,), 0.9), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.tell = tell

    def forward(self, x):
        self.tell(f"forward {x.numel()}")
        logits = self.head(torch.tanh(self.hidden(self.embedding(x))) * self.frozen)
        if logits.requires_grad:
            logits.register_hook(lambda _: self.tell("backward"))
        return logits


def micro_batches(call: str, rank: int) -> list:
    """[(x, y)] of a rank; labels behind a text's end are -100, in the later call all of the rank's last but one."""
    drawn, parts = torch.Generator().manual_seed(9 + 10 * rank), []
    for k, size in enumerate(PARTS[rank]):
        x, y = (torch.randint(11, size, generator=drawn) for _ in "xy")
        ends = torch.arange(size[0])[:, None] % size[1]
        y[torch.arange(size[1]) >= size[1] - ends] = -100
        if call == "later" and k == len(PARTS[rank]) - 2:
            y[:] = -100
        parts.append((x, y))
    return parts


def truth(call: str, size: int):
    """(loss, gradients flat, norm) of all labels of all ranks at once, in float64; each clipped as in `CALLS`."""
    model = Words().double()
    labels = [(model(x).flatten(0, -2), y.flatten()) for r in range(size) for x, y in micro_batches(call, r)]
    logits, y = torch.cat([one for one, _ in labels]), torch.cat([one for _, one in labels])
    loss = F.cross_entropy(logits[y != -100], y[y != -100])
    loss.backward()
    gradient = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    norm = gradient.norm()
    return loss.item(), gradient * min(1, CALLS[call] / norm.item()), norm.item()


CALLS = {"first": 1e6, "later": 1e6, "clipped": 0.05}


def observe(step):
    """On a rank: what each of three calls returns, how far SGD with rate 1 moved, and what happened when."""
    log, steps = Traffic(), []
    model = Words(log.mark)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    start, found = [p.detach().clone() for p in model.parameters()], {}
    rank = torch.distributed.get_rank()
    for call, most in CALLS.items():
        log.events.clear(), steps.clear()
        with torch.no_grad():
            for p, before in zip(model.parameters(), start):
                p.copy_(before)
        with borrowed(), log:
            got = step(model, micro_batches(call, rank), optimizer, most)
        pair = isinstance(got, tuple | list) and len(got) == 2
        pair = pair and all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in got)
        found |= {f"{call} loss": float(got[0]) if pair else 0.0, f"{call} norm": float(got[1]) if pair else 0.0}
        moved = [before - p.detach() for p, before in zip(model.parameters(), start)]
        found[f"{call} gradient"] = torch.cat([one.flatten() for one in moved])
        if call == "first":
            found |= {"form": None if got is None else "pair" if pair else form(got), "steps": len(steps)} | _told(
                log.events
            )
    return found


def _told(events):
    """From the events of a call: positions at once, graphs at once, messages with gradients, those before the last backward."""
    texts = [event.name if event.bytes is None else "" for event in events]
    graphs = most = 0
    for text in texts:
        graphs += text.startswith("forward") - (text == "backward")
        most = max(most, graphs)
    last = max((k for k, text in enumerate(texts) if text == "backward"), default=0)
    large = [[event for event in sent(part) if event.bytes >= LARGE] for part in (events[:last], events)]
    rows = max((int(text.split()[1]) for text in texts if text.startswith("forward")), default=0)
    return {"rows": rows, "graphs": most, "early": len(large[0]), "messages": len(large[1])}


def _each(claim, key, most, hint):
    """A look at a number that is `most` or less on every rank."""
    fields = lambda seen, due: {"n": max(seen), "due": due, "expected": "", "got": ""}  # noqa: E731
    return Look(claim, key, most, hint, holds=lambda seen, due: max(seen) <= due, fields=fields)


def _value(claim, key, part, hint):
    """A Value that is to be the same on all ranks: `part` of the truth."""
    call = key.split()[0]

    def see(ranks):
        return torch.stack([torch.as_tensor(rank[key]).float() for rank in ranks])

    def due(size):
        return torch.as_tensor(truth(call, size)[part]).float().expand(size, *[-1] * (part == 1))

    return Value(claim, see, due, hint, holds=_near)


def _near(seen, due):
    return (seen - due).abs().max() <= 2e-5 * max(1, due.abs().max())


def _no_pair(seen, _):
    return "nothing-returned" if None in seen else "step-form"


def _pairs(seen, _):
    return all(one == "pair" for one in seen)


LOOKS = [
    Look("accumulation (1, 2, 3 and 4 ranks): returns the loss and the norm", "form", None,
         _no_pair, holds=_pairs, fields=lambda seen, _: {"expected": "", "got": seen[0]}),
    _each("one step, one micro-batch in memory at a time", "steps", 1, "steps-many"),
    Look("", "steps", 1, "never-stepped", holds=lambda seen, due: min(seen) == due, fields=silent),
    Look("", "rows", lambda size: max(a * b for parts in PARTS[:size] for a, b in parts), "not-in-parts",
         holds=at_most, fields=silent),
    _each("", "graphs", 1, "graphs-kept"),
    _each("gradients are sent once, in one message after the last backward", "early", 0, "sent-each"),
    _each("", "messages", 1, "message-each"),
    _value("the gradient over all labels of all ranks, as if they were one batch", "first gradient", 1, "wrong-gradient"),
    _value("their loss", "first loss", 0, "wrong-loss"),
    _value("the same with a micro-batch in which no label counts", "later gradient", 1, "wrong-gradient"),
    _value("", "later loss", 0, lambda seen, due: "none-counts" if seen.isnan().any() else "wrong-loss"),
    _value("clipping: of the gradient of all ranks together", "clipped gradient", 1, "wrong-clipping"),
    _value("the norm before clipping", "first norm", 2, "wrong-step-norm"),
    _value("", "clipped norm", 2, "wrong-step-norm"),
]  # fmt: skip

KNOWN = ((hung, "ranks-waiting"), (killed_by("SIGABRT"), "ranks-waiting"))


def balise_4(clip_gradients, accumulated_step):
    yield from judged(CLIP, observe_clip, clip_gradients)
    yield from judged_on_ranks(LOOKS, observe, accumulated_step, known=KNOWN)
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, accumulated_step, known=left_on_cpu("count-not-on-gpu"))


def _on_gpu(_, step):
    model = Words().to(launch.device())
    parts = [
        (x.to(launch.device()), y.to(launch.device())) for x, y in micro_batches("first", torch.distributed.get_rank())
    ]
    step(model, parts, torch.optim.SGD(model.parameters(), lr=1.0), MAX)

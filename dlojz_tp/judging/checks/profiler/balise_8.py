"""Balise 8: memory reserved by the longest batch, and the arithmetic of the autotuner."""

import gc
import random
import weakref
from numbers import Real

import torch
from torch import nn

from dlojz_tp.judging.checking import close, pretended
from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, one_of, within
from dlojz_tp.judging.probes.gpus import on_one_gpu, watched
from dlojz_tp.judging.probes.seeded import seeded

LENGTHS = {"training": [7, 19, 4, 19, 11], "eval": (3, 26, 8)}


def observe(reserve, autotuner_saves):
    """How the model is run in both modes; what is left behind; how a GPU's generator is; seconds saved."""
    for mode, lengths in LENGTHS.items():
        yield {f"{mode} {what}": value for what, value in _ran(reserve, lengths, mode == "training").items()}
    yield from _left(reserve, LENGTHS["training"])
    error, put_back = on_one_gpu(_on_gpu, reserve, count=1) or ("failed", False)
    yield {"put back": put_back or bool(error)}
    saved = [autotuner_saves(list(shapes), *costs) for _, shapes, costs in CASES]
    numbers = [isinstance(one, Real) and not isinstance(one, bool) for one in saved]
    yield {"kinds": ["number" if is_one else type(one).__name__ for is_one, one in zip(numbers, saved)]}
    yield {"saved": list(map(float, saved))}


class _Noting(nn.Module):
    """Tokens (b, length) -> logits (b, 3); notes each call as (length, recorded, training, b), its copies too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.conv = nn.Embedding(30, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.seen, self.gradients, self.reached, self.held = _Shared(), _Shared(), _Shared(), _Shared()

    def forward(self, tokens):
        self.seen.append((tokens.shape[1], torch.is_grad_enabled(), self.training, len(tokens)))
        self.calls += 1
        vectors = self.embedding(tokens)
        self.held.extend(map(weakref.ref, (tokens, vectors)))
        if vectors.requires_grad:
            vectors.register_hook(lambda gradient: self.reached.append(1))
        x = self.norm(self.conv(vectors.transpose(1, 2)))
        out = self.head(self.dropout(x).mean(dim=2))
        if out.requires_grad:
            out.register_hook(lambda gradient: self.gradients.append(gradient.detach().clone()))
        return out


class _Shared(list):
    """A list that a deep copy shares with its original."""

    def __deepcopy__(self, _memo):
        return self


def _model():
    with seeded(11):
        return _Noting()


def _batch_of(length):
    return torch.randint(30, (4, length)), torch.randint(3, (4,))


def _ran(reserve, lengths, training):
    """How the model was run: its calls, what came of them, and of how many lengths batches were made."""
    model, made, emptied = _model().train(training), [], []
    changes = [(place, "empty_cache", lambda *_, **__: emptied.append(1)) for place in (torch.cuda, torch.cuda.memory)]

    def batch_of(length):
        made.append(length)
        return _batch_of(length)

    with pretended(changes, reserve):
        reserve(model, batch_of, lengths)
    gc.collect()
    held = any(one() is not None for one in model.held)
    return {
        "emptied": bool(emptied), "made": len(set(made)) if len(model.seen) == 1 else 1, "held": held,
        "calls": len(model.seen), "backward": bool(model.gradients), "whole backward": bool(model.reached),
        "mode": [model.training, *(call[2] for call in model.seen[:1])],
        **dict(zip(("length", "recorded", "mode there", "rows"), model.seen[0] if model.seen else ())),
    }  # fmt: skip


def _left(reserve, lengths):
    """What differs afterwards, in words, and the next step."""
    model = _model().train()
    with torch.no_grad():
        model(torch.randint(30, (4, 5)))  # its batch norm has learnt something
    del model.seen[:]
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    objects = dict(model.named_buffers())
    torch.manual_seed(5)
    torch.rand(3)  # so that seeding again does not lead back here
    state = torch.get_rng_state()
    reserve(model, _batch_of, lengths)
    random_state = torch.get_rng_state()
    left = [p.grad for p in model.parameters() if p.grad is not None]
    yield {
        "learnt": [name for name, p in model.named_parameters() if not close(p, parameters[name])],
        "gradients": f"{len(left)} parameters" if any(gradient.any() for gradient in left) else "zeros" if left else "",
        "buffers": _changed(model, buffers, objects), "all training": all(one.training for one in model.modules()),
        "random": torch.equal(state, random_state), "learns": all(p.requires_grad for p in model.parameters()),
    }  # fmt: skip
    yield {"gradient of the result": model.gradients[-1]}
    yield {"next": _goes_on(model, parameters, buffers)}


def _changed(model, before, objects):
    """(name, how) of the first buffer that is not as before, those of the state first."""
    persistent = model.state_dict()
    for name, b in sorted(model.named_buffers(), key=lambda pair: pair[0] not in persistent):
        if not close(b, before[name]):
            return name, "changed" if name in persistent else "changed outside of the state"
        if b.untyped_storage().data_ptr() != objects[name].untyped_storage().data_ptr():
            return name, "replaced"
    return "", ""


def _on_gpu(gpu, device, reserve):
    """How it failed, if it did, and whether the last state that the GPU's generator was given is the one of before."""
    model, given, made = _model().to(device), [], []

    def state(*_):
        return torch.full((16,), len(made), dtype=torch.uint8)

    def batch_of(length):
        made.append(length)
        return [tensor.to(device) for tensor in _batch_of(length)]

    with (
        replaced(torch.cuda, "get_rng_state", state), replaced(torch.cuda, "get_rng_state_all", lambda: [state()]),
        replaced(torch.cuda, "set_rng_state", lambda new, *_, **__: given.append(new)),
        replaced(torch.cuda, "set_rng_state_all", lambda new: given.extend(new)),
    ):  # fmt: skip
        seen = watched(gpu, reserve, model, batch_of, [7, 19])
    return seen.error, bool(given) and not given[-1].any()


def _goes_on(model, parameters, buffers):
    """The next step is the one that would have been without reserve: settings such as a momentum are part of that."""
    twin = _model().train()
    twin.load_state_dict(parameters | buffers, strict=False)  # strictly, it refuses what is not persistent
    twin.calls.copy_(buffers["calls"])
    tokens, labels = _batch_of(9)
    for net in (twin, model):
        torch.manual_seed(6)
        nn.functional.cross_entropy(net(tokens), labels).backward()
    both = [(f"the gradient of {name}", p.grad, model.get_parameter(name).grad) for name, p in twin.named_parameters()]
    both += [(f"the buffer {name}", b, model.get_buffer(name)) for name, b in twin.named_buffers()]
    return [what for what, wanted, got in both if got is None or not close(got, wanted, 1e-5)]


def _of_a_mean(gradient, _):
    """The gradient of a mean over four: each row sums to 0, and no entry is larger than a quarter."""
    return close(gradient.sum(1), torch.zeros(4), 1e-5) and gradient.abs().max() <= 0.26 and gradient.abs().sum() >= 0.2


def _epochs():
    drawn = random.Random(9)
    varied = [(32, drawn.randrange(40, 60)) for _ in range(400)]
    return {
        "one shape, 50 steps": [(32, 224)] * 50,
        "two lengths and a smaller last batch, twice": ([(32, 224)] * 20 + [(7, 224), (32, 96)]) * 2,
        "400 batches of any length": varied,
        "two shapes in turn": [(8, 3, 64, 64), (8, 3, 96, 96)] * 30,
        "three shapes with as many elements": [(8, 32), (16, 16), (32, 8)] * 10,
        "torch.Size": [torch.Size((4, n % 3 + 1)) for n in range(30)],
        "one step": [(2, 2)],
    }


COSTS = (1.7, 0.1, 0.08), (0.5, 0.3, 0.29), (4.0, 0.05, 0.05)
CASES = [(where, shapes, costs) for where, shapes in _epochs().items() for costs in COSTS]
SAVED = [
    len(shapes) * (usual - best) - len({*map(tuple, shapes)}) * search for _, shapes, (search, usual, best) in CASES
]


def _buffer_slug(seen, _):
    return {"changed": "statistics-changed", "replaced": "buffers-replaced",
            "changed outside of the state": "not-in-state-dict"}[seen[1]]  # fmt: skip


def _named(*names):
    """A look's `fields`: what was seen, and what is due."""
    return lambda seen, due: dict(zip(names, (seen, due)))


def _case(seen, due):
    """Where it is wrong first."""
    k = next(k for k, saved in enumerate(due) if not close(seen[k], saved, 1e-6))
    return {"where": CASES[k][0], "expected": f"{due[k]:.3f} s", "got": f"{seen[k]:.3f} s"}


LOOKS = [
    Look("one forward and one backward pass on the longest batch", "training emptied", False, "cache-emptied"),
    Look("", "training made", 1, "every-batch-made", holds=at_most, fields=_named("n")),
    Look("", "training calls", 1, "never-ran", holds=lambda seen, _: seen > 0),
    Look("", "training length", 19, "not-longest", fields=_named("length", "longest")),
    Look("", "training calls", 1, "every-length", fields=_named("n")),
    Look("", "training rows", 4, "part-of-batch", fields=_named("n")),
    Look("", "training recorded", True, "not-recorded"), Look("", "training mode there", True, "other-mode"),
    Look("", "training backward", True, "no-backward"), Look("", "training whole backward", True, "backward-in-part"),
    Look("", "training held", False, "batch-kept"),
    Look("the same for a model in eval mode, which stays in it, and with another list of lengths", "eval emptied",
         False, "cache-emptied"),
    Look("", "eval made", 1, "every-batch-made", holds=at_most, fields=_named("n")),
    Look("", "eval mode", [False, False], "left-in-mode"),
    Look("", "eval length", 26, "not-longest", fields=_named("length", "longest")),
    Look("parameters, gradients, buffers, mode and the random generator are as before", "learnt", [], "parameters-changed"),
    Look("", "gradients", "", "gradients-left", fields=_named("what")),
    Look("", "buffers", ("", ""), _buffer_slug, fields=lambda seen, _: {"name": seen[0]}),
    Look("", "all training", True, "left-in-mode"),
    Look("", "random", True, "random-changed"), Look("", "learns", True, "parameters-changed"),
    Look("", "gradient of the result", "that of a mean", "not-loss", holds=_of_a_mean),
    Look("", "next", [], "goes-on-differently", fields=lambda seen, _: {"what": seen[0]}),
    Look("", "put back", True, "random-changed", fields={"expected": "the GPU's generator as it was"}),
    Look("what the autotuner saves: the gain of all steps, minus the search for each new shape", "kinds", ["number"],
         lambda seen, _: "nothing-returned" if "NoneType" in seen else "no-number", holds=one_of),
    Value("", "saved", SAVED, "saves-wrong", holds=within(1e-6), fields=_case),
]  # fmt: skip


def balise_8(reserve, autotuner_saves):
    yield from judged(LOOKS, observe, reserve, autotuner_saves)

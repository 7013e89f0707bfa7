"""Balise 8: memory reserved by the longest batch, and the arithmetic of the autotuner."""

import gc
import math
import random
import weakref
from numbers import Real

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close, pretended
from dlojz_tp.checking.borrowed import replaced
from dlojz_tp.probes.gpus import on_one_gpu, watched
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "never-ran": "You didn't call the model. Memory is reserved only for what really runs.",
    "not-longest": "You called the model with a batch of length {length}, but the longest length is {longest}.",
    "every-length": "You called the model {n} times. One batch, the longest, is enough.",
    "part-of-batch": "Only {n} of the batch's 4 rows went through the model. A full batch needs more memory.",
    "not-recorded": "The forward pass ran without recording. Activations are then freed at once, and too little is "
                    "reserved.",
    "no-backward": "There was no backward pass, so nothing is reserved for the gradients and the memory that it "
                   "needs on the way.",
    "backward-in-part": "The backward pass ended before it reached the first layer, so nothing is reserved for the "
                        "rest of it.",
    "batch-kept": "The batch, or the graph of its pass, is still held. No step can use that memory.",
    "other-mode": "You ran the model in eval mode. The following steps run in the mode in which the model arrived, "
                  "and only that mode needs the same memory.",
    "left-in-mode": "The model arrived in one mode and is now in the other.",
    "parameters-changed": "The parameters have changed. Don't make an optimizer step: it would learn from a "
                          "made-up batch.",
    "gradients-left": "Gradients are left ({what}). The first step would add to them, and they take memory. Use "
                      "zero_grad with set_to_none=True.",
    "statistics-changed": "The buffer {name} has changed: batch norms update their statistics in every forward "
                          "pass in training mode.",
    "not-in-state-dict": "The buffer {name} has changed. It is registered with persistent=False: state_dict() "
                         "leaves it out, buffers() doesn't.",
    "buffers-replaced": "The buffer {name} has the right values but is now another tensor: anything that knows the "
                        "old one keeps using that. Copy the values back into it.",
    "random-changed": "You leave PyTorch's random number generator in another state, so the training is not the "
                      "same as without reserve.",
    "cache-emptied": "torch.cuda.empty_cache() gives back the memory that you have just reserved.",
    "goes-on-differently": "The next step differs from that of a model without reserve: {what}. Did you change a "
                           "setting of the model?",
    "not-loss": "The loss is not the mean cross-entropy of the batch.",
    "search-each-step": "You pay for the search in each step. It is paid once for each new shape.",
    "search-once": "You pay for the search only once. It is paid for each new shape: count the different ones.",
    "search-forgotten": "You don't pay for the search at all.",
    "search-when-changed": "You pay for the search whenever the shape changes. A shape seen before is remembered.",
    "search-by-length": "Two shapes that differ only in the number of images are different shapes, too.",
    "search-by-elements": "You treat two shapes with the same number of elements as one. They are different shapes.",
    "no-losses": "Here the autotuner costs more than it saves, so the result is negative.",
    "one-step-only": "You count the gain of one step. Each step of the run brings it.",
    "sign": "The sign is wrong: the result is positive when the autotuner saves time.",
    "no-number": "autotuner_saves must return a number of seconds.",
    "every-batch-made": "You made batches of {n} lengths. The lengths are known: make one batch, with the longest.",
    "saves-wrong": "The seconds saved are wrong: take the gain of all steps, minus the cost of all searches.",
}


def balise_8(reserve, autotuner_saves):
    """A model that notes how it is run; what is left behind; shapes in many orders."""
    lengths = [7, 19, 4, 19, 11]
    yield "one forward and one backward pass on the longest batch"
    model, made = _ran(reserve, lengths)
    if not model.seen:
        raise Wrong("never-ran")
    length = max(seen[0] for seen in model.seen)
    if length != max(lengths) or model.seen[0][0] != max(lengths):
        raise Wrong("not-longest", length=model.seen[0][0], longest=max(lengths))
    if len(model.seen) > 1:
        raise Wrong("every-length", n=len(model.seen))
    if model.seen[0][3] != 4:
        raise Wrong("part-of-batch", n=model.seen[0][3])
    if not model.seen[0][1]:
        raise Wrong("not-recorded")
    if not model.seen[0][2]:
        raise Wrong("other-mode")
    if not model.gradients:
        raise Wrong("no-backward")
    if not model.reached:
        raise Wrong("backward-in-part")
    gc.collect()
    if any(one() is not None for one in model.held):
        raise Wrong("batch-kept")
    yield "the same for a model in eval mode, which stays in it, and with another list of lengths"
    other, _ = _ran(reserve, (3, 26, 8), training=False)
    if other.training or not other.seen or other.seen[0][2]:
        raise Wrong("left-in-mode", got="training" if other.training else "eval")
    if other.seen[0][0] != 26:
        raise Wrong("not-longest", length=other.seen[0][0], longest=26)
    yield "parameters, gradients, buffers, mode and the random generator are as before"
    _as_before(reserve, lengths)
    error, put_back = on_one_gpu(_on_gpu, reserve, count=1) or ("failed", False)
    if not error and not put_back:
        raise Wrong("random-changed", expected="the GPU's generator as it was", got="further on")
    yield "what the autotuner saves: the gain of all steps, minus the search for each new shape"
    for where, shapes in _epochs().items():
        for search, usual, best in ((1.7, 0.1, 0.08), (0.5, 0.3, 0.29), (4.0, 0.05, 0.05)):
            _saves(autotuner_saves, shapes, search, usual, best, where)


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


def _ran(reserve, lengths, training=True):
    model, made = _model().train(training), []
    emptied = []
    changes = [
        (torch.cuda, "empty_cache", lambda *_, **__: emptied.append(1)),
        (torch.cuda.memory, "empty_cache", lambda *_, **__: emptied.append(1)),
    ]

    def batch_of(length):
        made.append(length)
        return _batch_of(length)

    with pretended(changes, reserve):
        reserve(model, batch_of, lengths)
    if emptied:
        raise Wrong("cache-emptied")
    if len(set(made)) > 1 and len(model.seen) == 1:
        raise Wrong("every-batch-made", n=len(set(made)))
    return model, made


def _as_before(reserve, lengths):
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
    after = torch.get_rng_state()
    for name, p in model.named_parameters():
        if not close(p, parameters[name]):
            raise Wrong("parameters-changed", expected=parameters[name], got=p, where=name)
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    if left:
        zeros = all(not p.grad.any() for _, p in model.named_parameters() if p.grad is not None)
        raise Wrong("gradients-left", what="zeros" if zeros else f"{len(left)} parameters")
    persistent = model.state_dict()
    for name, b in sorted(model.named_buffers(), key=lambda pair: pair[0] not in persistent):
        if not close(b, buffers[name]):
            slug = "statistics-changed" if name in persistent else "not-in-state-dict"
            raise Wrong(slug, name=name, expected=buffers[name], got=b)
        if b.untyped_storage().data_ptr() != objects[name].untyped_storage().data_ptr():
            raise Wrong("buffers-replaced", name=name)
    if not model.training or any(not module.training for module in model.modules()):
        raise Wrong("left-in-mode", got="eval")
    if not torch.equal(state, after):
        raise Wrong("random-changed")
    if not all(p.requires_grad for p in model.parameters()):
        raise Wrong("parameters-changed", got="requires_grad=False")
    _right_loss(model)
    _goes_on(model, parameters, buffers)


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
    for (name, wanted), got in zip(twin.named_parameters(), model.parameters(), strict=True):
        if got.grad is None or not close(got.grad, wanted.grad, 1e-5):
            raise Wrong("goes-on-differently", what=f"the gradient of {name}", expected=wanted.grad, got=got.grad)
    for (name, wanted), got in zip(twin.named_buffers(), model.buffers(), strict=True):
        if not close(got, wanted, 1e-5):
            raise Wrong("goes-on-differently", what=f"the buffer {name}", expected=wanted, got=got)


def _right_loss(model):
    """The gradient of a mean over four: each row sums to 0, and no entry is larger than a quarter."""
    gradient = model.gradients[-1]
    if not close(gradient.sum(1), torch.zeros(4), 1e-5) or gradient.abs().max() > 0.26 or gradient.abs().sum() < 0.2:
        raise Wrong("not-loss", got=gradient.abs().sum())


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


def _saves(autotuner_saves, shapes, search, usual, best, where):
    given = list(shapes)
    got = autotuner_saves(given, search, usual, best)
    if got is None:
        raise Wrong("nothing-returned")
    if isinstance(got, bool) or not isinstance(got, Real):
        raise Wrong("no-number", got=got)
    gain, new = usual - best, len({tuple(shape) for shape in shapes})
    wanted = len(shapes) * gain - new * search
    if close(float(got), wanted, 1e-6):
        return
    changed = 1 + sum(tuple(a) != tuple(b) for a, b in zip(shapes, shapes[1:], strict=False))
    known = {
        "sign": -wanted,
        "search-forgotten": len(shapes) * gain,
        "search-each-step": len(shapes) * (gain - search),
        "search-by-elements": len(shapes) * gain - len({math.prod(shape) for shape in shapes}) * search,
        "search-once": len(shapes) * gain - search,
        "search-when-changed": len(shapes) * gain - changed * search,
        "search-by-length": len(shapes) * gain - len({tuple(shape)[1:] for shape in shapes}) * search,
        "no-losses": max(0.0, wanted),
        "one-step-only": gain - new * search,
    }
    slug = next((name for name, value in known.items() if close(float(got), value, 1e-6)), "saves-wrong")
    raise Wrong(slug, expected=f"{wanted:.3f} s", got=f"{got:.3f} s", where=where)

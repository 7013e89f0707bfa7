"""Balise 2: the step in bfloat16, against float64 and on a GPU, and which modules of a network stay in float32."""

import copy

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, judged, silent
from dlojz_tp.judging.checks.mixed_precision import forms, spies
from dlojz_tp.judging.checks.mixed_precision.forms import CPU, SIZES, first, name, said
from dlojz_tp.judging.probes.networks import batches
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations, in_words, syncs

WEIGHTS, LOSSES, _ = spies.loop(spies.watched_network(), batches(*SIZES))
HALVES = torch.bfloat16, torch.float16


def observe(step, dtypes):
    """The step on the CPU and on a GPU; the report on networks whose modules know their dtypes."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data, model = batches(*SIZES), spies.watched_network()
    optimizer = spies.SpySGD(model.parameters())
    with Operations() as operations, spies.autocast_seen() as asked:
        answer = step(model, *data[0], optimizer, CPU)
    cast = [name(g.dtype) for g in optimizer.grads or [] if g is not None and g.dtype != torch.float32]
    yield forms.first_step(answer, model, asked) | {
        "cast": cast, "reads": in_words(syncs(operations)) if syncs(operations) else ""}  # fmt: skip
    found = _three_steps(step)
    adds_up = found["graded"] and len(found["off"]) > 2 and found["off"][-1] > 0.08 and _adds_up(step, data)
    yield {"adds up": adds_up}
    yield _three_steps(forms.clearing(step)) if adds_up else found
    yield forms.on_a_gpu(step)
    for half in HALVES:
        for number, (net, _) in enumerate(_truths(half)):
            got = dtypes(net, torch.randn(5, 4), half)
            own = [module for module in net.modules() if isinstance(module, _Own)]
            ran = {dtype for module in own for dtype in module.found}
            got = {str(key): value for key, value in got.items()} if isinstance(got, dict) else got
            yield {(half, number): got, (half, number, "ran"): ran,
                   (half, number, "graph"): any(any(m.graph) for m in own)}  # fmt: skip
    yield from _observe_traces(dtypes)


def _three_steps(step):
    """Three steps; a fourth, with a learning rate of 0, must not change any weight."""
    model = spies.watched_network()
    optimizer = spies.SpySGD(model.parameters())
    found = forms.trained(lambda batch: step(model, *batch, optimizer, CPU), model, optimizer, WEIGHTS, 0.08)
    if len(found["off"]) == 4 and found["graded"] and not found["off"][-1] > 0.08:
        optimizer.param_groups[0]["lr"], kept = 0.0, [p.detach().clone() for p in model.parameters()]
        step(model, *batches(*SIZES)[0], optimizer, CPU)
        # rounded, and widened again: before the forward, or after the update
        rounded = all(torch.equal(p, p.bfloat16().float()) for p in kept)
        found["converted"] = rounded or not all(map(torch.equal, model.parameters(), kept))
    return found


def _adds_up(step, data):
    model = spies.watched_network()
    optimizer = spies.SpySGD(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, *data[0], optimizer, CPU)
    one = optimizer.grads
    step(model, *data[0], optimizer, CPU)
    return spies.distance(optimizer.grads, [2 * g for g in one]) < 0.1


class _Own(nn.Linear):
    """A linear layer that writes down the dtype of what it returns; `wide` leaves autocast."""

    def __init__(self, n, m, wide=False):
        super().__init__(n, m)
        self.wide, self.found, self.graph = wide, [], []

    def forward(self, x):
        if self.wide:
            with torch.autocast(x.device.type, enabled=False):
                y = super().forward(x.float())
        else:
            y = super().forward(x)
        self.found.append(y.dtype)
        self.graph.append(torch.is_grad_enabled() and y.requires_grad)
        return y


class _Wide(nn.Module):
    """Gives float32 whatever comes; has no parameters."""

    def forward(self, x):
        return x.float()


class _Pair(nn.Module):
    """Returns no tensor."""

    def forward(self, x):
        return x, x.shape


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(_Own(6, 6), nn.ReLU())
        self.norm = nn.BatchNorm1d(6)
        self.pair = _Pair()
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.pair(self.norm(self.inner(x)))[0]


def _net():
    torch.manual_seed(0)
    return nn.Sequential(_Own(4, 6), _Block(), _Own(6, 6, wide=True), nn.Tanh(), _Own(6, 3), _Wide(), nn.Dropout(0.5))


def _other_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Sequential(_Wide(), _Own(4, 2)), _Own(2, 3, wide=True))


def _truths(half):
    """The two networks, and what their modules without children give."""
    wide = torch.float32
    first = {
        "0": half, "1.inner.0": half, "1.inner.1": half, "1.norm": half, "2": wide, "3": wide, "4": half, "5": wide,
        "6": wide,
    }  # fmt: skip
    return (_net(), first), (_other_net(), {"0.0": wide, "0.1": half, "1": wide})


def _observe_traces(dtypes):
    """Hooks, statistics and modes after a report; of two networks, and of one whose forward pass raises."""
    for training in (True, False):
        net = _net().train(training)
        net[1].norm.train(not training)  # a part in another mode than the whole
        modes = {name: m.training for name, m in net.named_modules()}
        before = copy.deepcopy(net.state_dict())
        dtypes(net, torch.randn(5, 4), torch.bfloat16)
        other = [("training" if modes[name] else "eval", name or "The network")
                 for name, m in net.named_modules() if m.training != modes[name]]  # fmt: skip
        learnt = [name for name, value in net.state_dict().items() if not torch.equal(before[name], value)]
        yield {f"hooks {training}": _hooks(net), f"learnt {training}": learnt, f"modes {training}": other}
    net, raised = _net(), False
    net[4] = nn.Linear(99, 3)  # its forward pass raises
    try:
        dtypes(net, torch.randn(5, 4), torch.bfloat16)
    except RuntimeError:
        raised = True
    yield {
        "learnt, error": [],
        "hooks, error": _hooks(net) * raised,
        "modes, error": [("training", "The network")] * (raised and not net.training),
    }


def _hooks(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def _report(half, number):
    """Looks at the report on a network."""
    net, truth = _truths(half)[number]
    modules, children, key = dict(net.named_modules()), dict(net.named_children()), (half, number)
    roots = set(children), {name for name in children if not any(children[name].children())}

    def missing(o):
        return [name for name in truth if name not in o[key]]

    def wrong(o):
        return _wrong({name: o[key][name] for name in truth}, truth, modules, o[(*key, "ran")], half)

    def row(see, hint):
        """A look at names, of which there must be none."""
        return Look("", see, [], hint, fields=said(names=", ".join, expected=", ".join(truth)))

    return [
        Look("the report has the output dtype of every module, as computed", key, "a dictionary", "no-dictionary",
             holds=lambda seen, _: isinstance(seen, dict)),
        row(lambda o: [name for name in o[key] if name not in modules][:3], "wrong-names"),
        row(lambda o: [name for name in o[key] if name == "1.pair" in modules], "not-tensors"),
        row(lambda o: [*map(repr, o[key])] if missing(o) and len(o[key]) == 1 else [], "one-name"),
        row(lambda o: [*o[key]] if missing(o) and set(o[key]) in roots else [], "root-only"),
        row(lambda o: [repr(name) for name in o[key] if name not in truth and any(modules[name].children())],
            "containers-included"),
        row(missing, "modules-missing"),
        row(lambda o: [name for name in o[key] if name == "1.unused"], "parameter-dtypes"),
        recognised("", wrong),
        Look("", (*key, "graph"), False, "graph-recorded"),
    ]  # fmt: skip


def _wrong(got, truth, modules, ran, half):
    """(hint, its fields) for the mistake in a report; None if there is none."""
    if got == truth:
        return None
    place = next(name for name in truth if got[name] != truth[name])
    slug = "dtype-by-kind"
    if not ran:
        slug = "parameter-dtypes"
    elif not any(dtype in HALVES for dtype in got.values()):
        slug = "outside-autocast" if ran == {torch.float32} else "parameter-dtypes"
    elif half == torch.float16 and torch.bfloat16 in got.values():
        slug = "dtype-ignored"  # the other dtype has been looked at
    found = name(got[place]) if isinstance(got[place], torch.dtype) else repr(got[place])
    module = f"{place} ({type(modules[place]).__name__})"
    return slug, {"name": module, "wanted_dtype": name(truth[place]), "got_dtype": found}


def _left(key, claim=""):
    """Looks at what a report leaves."""
    return [
        Look(claim, f"hooks{key}", 0, "hooks-left", fields=said(n=int)),
        Look("", f"learnt{key}", [], "statistics-changed", fields=said(name=first)),
        Look("", f"modes{key}", [], "mode-changed",
             fields=lambda seen, due: silent(seen, due) | dict(zip(("mode", "name"), seen[0]))),
    ]  # fmt: skip


LOOKS = [
    *forms.returned("the step returns the loss and the logits, both detached from the graph"),
    *forms.forward("the forward pass runs under autocast in bfloat16; weights, gradients and loss are in float32",
                   torch.bfloat16),
    Look("", "cast", [], "update-cast", fields=said(what="gradients", got_dtype=first)),
    *forms.mean_loss(LOSSES[0], 3e-2, forms.loss),
    *forms.numbers(torch.bfloat16, forms.loss),
    Look("after three steps the weights match those of a float64 loop", "adds up", False, "gradients-add-up"),
    Look("", "graded", True, "no-gradients"),
    *forms.steps(torch.bfloat16, 0.08,
                 Look("", "converted", False, "weights-converted", fields=said(got_dtype="bfloat16"))),
    Look("nothing waits for the device: autocast has its type, copies don't block", "reads", "", "hidden-sync",
         fields=said(error=str)),
    *forms.gpu(torch.bfloat16),
    *(look for half in HALVES for number in (0, 1) for look in _report(half, number)),
    *_left(" True", "the report leaves no hook, not even after an error; modes and statistics are unchanged"),
    *_left(" False"), *_left(", error"),
]  # fmt: skip


def balise_2(step, dtypes):
    yield from judged(LOOKS, observe, step, dtypes)

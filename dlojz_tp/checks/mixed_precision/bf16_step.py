"""Balise 2: the step in bfloat16, and which modules stay in float32."""

import copy

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.mixed_precision import spies
from dlojz_tp.checks.mixed_precision.forms import (
    loss_in_float32,
    loss_of_logits,
    returned,
    right_logits,
    runs_on_gpu,
    state_of_forward,
)
from dlojz_tp.probes.networks import batches
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "update-cast": "After the step the {what} are in {got_dtype}. Parameters and gradients must stay in float32.",
    "no-dictionary": "Return a dictionary from the name of each module to the dtype of its output.",
    "containers-included": "{names} are containers: their output is the output of a module inside. Report only "
                           "modules without children.",
    "modules-missing": "These modules are missing: {names}. Go through named_modules(), which reaches every level.",
    "one-name": "Only {names} is there, though all modules ran. Do all hooks use the loop variable? When they run, "
                "it has its last value: bind the current one, for example as a default argument, name=name.",
    "root-only": "You looked only at the network's own children. named_modules() reaches every level, "
                 "named_children() does not.",
    "parameter-dtypes": "These are dtypes of parameters or inputs. Report the dtypes of the outputs under autocast.",
    "outside-autocast": "All outputs are in float32: the network did not run under autocast.",
    "dtype-ignored": "The argument dtype is float16 here, but the outputs are in bfloat16.",
    "dtype-by-kind": "The output of {name} is in {wanted_dtype}, not {got_dtype}. Look at the output itself, not "
                     "at the kind of module.",
    "wrong-names": "The keys must be the names that named_modules() gives, but {names} are not.",
    "not-tensors": "{names} returns something that is not a tensor: leave it out.",
    "hooks-left": "{n} hooks are still on the modules, so every later forward pass runs them. Keep their handles, "
                  "and remove them even if the forward pass raises.",
    "mode-changed": "{name} was in {mode} mode before your call and is in the other mode after it. Parts of a "
                    "network may be in another mode than the whole, a frozen batch norm for example, and train() "
                    "changes them all: save and restore the mode of each module.",
    "statistics-changed": "Your report changed {name}: in training mode, batch norm learns from every forward pass.",
    "graph-recorded": "The forward pass recorded a graph, which takes memory for nothing. Use torch.no_grad().",
}


def balise_2(step, dtypes):
    """The step against float64 and on a GPU; the report on a network whose modules know their dtypes."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data = batches(8, 8, 5)
    model = spies.watched_network()
    optimizer = spies.SpySGD(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    weights, losses, _ = spies.loop(spies.watched_network(), data)
    yield "the step returns the loss and the logits, both detached from the graph"
    cpu = torch.device("cpu")
    with Operations() as operations, spies.autocast_seen() as asked:
        loss, logits = returned(step(model, *data[0], optimizer, cpu))
    yield "the forward pass runs under autocast in bfloat16; weights, gradients and loss are in float32"
    state_of_forward(model, loss, torch.bfloat16, asked)
    for g in optimizer.grads or []:
        if g is not None and g.dtype != torch.float32:
            raise Wrong("update-cast", what="gradients", got_dtype=_name(g.dtype))
    if not close(loss, torch.tensor(losses[0]), 3e-2):
        total = close(loss, torch.tensor(losses[0] * len(logits)), 3e-2)
        raise Wrong("sum-not-mean" if total else "wrong-loss", expected=losses[0], got=loss)
    right_logits(logits, data[0][0])
    loss_of_logits(loss, logits, data[0][1], torch.bfloat16)
    yield "after three steps the weights match those of a float64 loop"
    found = [loss]
    for k, batch in enumerate(data):
        if k:
            found.append(returned(step(model, *batch, optimizer, cpu))[0])
        if optimizer.steps != k + 1:
            raise Wrong("no-update", got=f"{optimizer.steps} updates in {k + 1} steps")
        if any(g is None for g in optimizer.grads) or spies.global_norm(optimizer.grads) == 0:
            raise Wrong("no-gradients")
        error = spies.distance(spies.moved(model.parameters(), before), spies.moved(weights[k], before))
        if error > 0.08:
            raise Wrong("gradients-add-up" if k and _adds_up(step, data) else "wrong-weights", where=f"after step {k + 1}",
                        got=f"the update is {100 * error:.0f} % off")  # fmt: skip
    optimizer.param_groups[0]["lr"], kept = 0.0, [p.detach().clone() for p in model.parameters()]
    step(model, *data[0], optimizer, cpu)
    # rounded, and widened again: before the forward, or after the update
    if not all(map(torch.equal, model.parameters(), kept)) or all(torch.equal(p, p.bfloat16().float()) for p in kept):
        raise Wrong("weights-converted", got_dtype="bfloat16", expected="float32, with all its digits")
    loss_in_float32(found, torch.bfloat16)
    yield "nothing waits for the device: autocast has its type, copies don't block"
    if syncs(operations):
        raise Wrong("hidden-sync", error=in_words(syncs(operations)))
    runs_on_gpu(step, torch.bfloat16)
    yield "the report has the output dtype of every module, as computed"
    _report(dtypes)
    yield "the report leaves no hook, not even after an error; modes and statistics are unchanged"
    _leaves_nothing(dtypes)


def _adds_up(step, data):
    model = spies.watched_network()
    optimizer = spies.SpySGD(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, *data[0], optimizer, torch.device("cpu"))
    one = optimizer.grads
    step(model, *data[0], optimizer, torch.device("cpu"))
    return spies.distance(optimizer.grads, [2 * g for g in one]) < 0.1


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _report(dtypes):
    for half in (torch.bfloat16, torch.float16):
        for net, truth in _truths(half):
            got = dtypes(net, torch.randn(5, 4), half)
            if got is None:
                raise Wrong("nothing-returned")
            if not isinstance(got, dict):
                raise Wrong("no-dictionary", got=got)
            _compare({str(k): v for k, v in got.items()}, net, truth, half)
            if any(any(m.graph) for m in net.modules() if isinstance(m, _Own)):
                raise Wrong("graph-recorded")


def _compare(got, net, truth, half):
    modules = dict(net.named_modules())
    extra = [name for name in got if name not in truth and name != "1.unused"]
    strange = [name for name in extra if name not in modules]
    if strange:
        raise Wrong("wrong-names", names=", ".join(strange[:3]), expected=", ".join(list(truth)[:4]) + ", …")
    boxes = [name for name in extra if any(modules[name].children())]
    if "1.pair" in extra:
        raise Wrong("not-tensors", names="1.pair", got=got["1.pair"])
    missing = [name for name in truth if name not in got]
    if missing and len(got) == 1:
        raise Wrong("one-name", names=repr(next(iter(got))), expected=", ".join(truth))
    children = dict(net.named_children())
    if missing and set(got) in (set(children), {name for name in children if not any(children[name].children())}):
        raise Wrong("root-only", got=", ".join(got))
    if boxes:
        raise Wrong("containers-included", names=", ".join(repr(name) for name in boxes))
    if missing:
        raise Wrong("modules-missing", names=", ".join(missing), got=", ".join(got))
    if "1.unused" in got:
        raise Wrong("parameter-dtypes", got="1.unused, which is never called")
    if got == truth:
        return
    if not any(m.found for m in net.modules() if isinstance(m, _Own)):
        raise Wrong("parameter-dtypes", got="the network was not called")
    if not any(d in (torch.bfloat16, torch.float16) for d in got.values()):
        ran = {d for m in net.modules() if isinstance(m, _Own) for d in m.found}
        raise Wrong("outside-autocast" if ran == {torch.float32} else "parameter-dtypes", got=got)
    if half == torch.float16 and torch.bfloat16 in got.values():
        raise Wrong("dtype-ignored", expected="float16", got="bfloat16")
    for name, wanted in truth.items():
        if got[name] != wanted:
            raise Wrong("dtype-by-kind", name=f"{name} ({type(modules[name]).__name__})", wanted_dtype=_name(wanted),
                        got_dtype=_name(got[name]) if isinstance(got[name], torch.dtype) else repr(got[name]))  # fmt: skip


def _leaves_nothing(dtypes):
    for training in (True, False):
        net = _net().train(training)
        net[1].norm.train(not training)  # a part in another mode than the whole
        modes = {name: m.training for name, m in net.named_modules()}
        before = copy.deepcopy(net.state_dict())
        dtypes(net, torch.randn(5, 4), torch.bfloat16)
        _no_hooks(net)
        for name, value in net.state_dict().items():
            if not torch.equal(before[name], value):
                raise Wrong("statistics-changed", name=name)
        for name, module in net.named_modules():
            if module.training != modes[name]:
                raise Wrong("mode-changed", mode="training" if modes[name] else "eval", name=name or "The network")
    net = _net()
    net[4] = nn.Linear(99, 3)  # its forward pass raises
    try:
        dtypes(net, torch.randn(5, 4), torch.bfloat16)
    except RuntimeError:
        _no_hooks(net)
        if not net.training:
            raise Wrong("mode-changed", mode="training", name="The network", got="eval mode, after an error") from None


def _no_hooks(net):
    n = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    if n:
        raise Wrong("hooks-left", n=n)

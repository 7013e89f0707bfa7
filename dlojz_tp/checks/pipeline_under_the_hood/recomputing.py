"""Balise 7, second half: a stage that keeps its input only, and runs again in backward."""

import contextlib
import gc

import torch
from torch import nn
from torch.distributed._composable import checkpoint_activation as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.utils import checkpoint

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close, pretended
from dlojz_tp.checking.borrowed import replaced
from dlojz_tp.measure.live import LiveBytes
from dlojz_tp.probes.gpus import on_one_gpu
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "library-checkpoint": "{what} does this work for you. Here you write it yourself.",
    "all-kept": "After the forward, {seen} bytes that were created in it are still alive; the output takes "
                "{truth}. Keep only the input: inside Recompute.forward no graph is built, and "
                "save_for_backward(x) keeps x.",
    "first-stage-no-graph": "The output of recompute doesn't require a gradient when x doesn't, as on the first "
                            "stage: then the stage's weights would never learn. Hand the parameters to apply() too.",
    "ids-no-gradient": "Token numbers are integers and can't have a gradient: {error}. Ask for one only when x "
                       "needs one: ctx.needs_input_grad[1].",
    "through-x": "When x is itself a result, backward went on through x's own history{error}. Begin the second "
                 "forward at a copy without history, ctx.saved_tensors[0].detach(); autograd goes on from the "
                 "gradient of x that you return.",
    "change-not-seen": "x was changed in place between forward and backward, and the gradients silently became "
                       "those of another x. ctx.save_for_backward(x) notices this, and ctx.saved_tensors then "
                       "raises autograd's error; an attribute such as ctx.x doesn't.",
    "x-not-detached": "The gradient of x is twice as large as it should be: the second forward ran on x itself, so "
                      "its backward added to x.grad, and the gradient that you return was added again. Begin at a "
                      "copy without history, ctx.saved_tensors[0].detach().",
    "other-output": "recompute(stage, x) differs from stage(x).",
    "input-gradient-lost": "No gradient came back for x, so the previous stage would learn nothing. Backward must "
                           "return it in the position of x.",
    "incoming-ignored": "These are the gradients of the output's sum. Backward gets the gradient of the loss with "
                        "respect to the output: go on from it.",
    "parameters-twice": "The parameters' gradients were added twice: once inside backward, by y.backward(), and again because "
    "backward returns them. Return None for them.",
    "no-second-graph": "You called backward() on a tensor without a graph: {error}. Inside backward, no graph is "
                       "built except within torch.enable_grad(), and a sum taken after that has none either. "
                       "y.backward(gradient) needs no sum.",
    "parameters-lost": "The stage's parameters have no gradient: the second forward's graph must reach them too.",
    "overwritten": "The second micro-batch replaced the first one's gradients in p.grad. They must add up.",
    "frozen-fails": "When a parameter is frozen (requires_grad False), backward fails: {error}",
    "wrong-recomputed": "With recomputation, the stage's gradients differ from those without.",
    "not-recomputed": "The stage ran {n} times for one micro-batch. It should run once in forward and once more in "
                      "backward.",
    "runs-for-ever": "The stage ran {n} times or more: its second forward was recomputed too, and so on without "
                     "end. Call ctx.stage(x) in backward, not recompute.",
    "other-mask": "This is right without dropout and wrong with it: the second forward drew different masks. In "
                  "forward, save the random state of x's device for each micro-batch, and restore it before the "
                  "second forward.",
    "stream-rewound": "After backward, the next random numbers differ from those without recomputation: the stream "
                      "was set back and left there. Put it back to where it was.",
}  # fmt: skip


DRAWN = [0, 1, 1, 0]  # two forwards, then each again; not the last one last
MOST_CALLS = 50  # of a stage in one look; a few are due


@contextlib.contextmanager
def one_thread():
    """Inside, torch computes on one core: small tensors on several are slow where other programs want them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recomputing(recompute):
    """What balise 7 looks at in `recompute`."""
    names = ("checkpoint", "checkpoint_sequential", "CheckpointFunction")
    inner = [name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentrant")]
    refused = [(checkpoint, name, _refuse(name)) for name in (*names, *inner)]
    refused += [(composable, name, _refuse("checkpoint")) for name in inner if name in vars(composable)]
    refused.append((checkpoint_wrapper, "torch_utils_checkpoint", _refuse("checkpoint")))
    # no rank runs here, and an answer may ask for its device
    with pretended([*refused, (launch, "device", lambda: torch.device("cpu"))], recompute):
        yield "recompute keeps only its input, with three micro-batches in flight"
        _keeps_input(recompute)
        yield "output and gradients as without it: middle stage, first stage, a frozen parameter, token numbers"
        _same_gradients(recompute)
        _of_a_result(recompute)
        _changed(recompute)
        yield "dropout: the same masks again, and afterwards the same random numbers as without recomputation"
        _random(recompute)
    _random_of_gpu(recompute)


def _refuse(name):
    def refuse(*_args, **_named):
        raise Wrong("library-checkpoint", what=f"torch.utils.checkpoint.{name}")

    return refuse


def gradients(stage):
    """Copies of the gradients of a stage."""
    return [None if p.grad is None else p.grad.clone() for p in stage.parameters()]


class Counted(nn.Module):
    """A stage whose width, dropout and first layer can be chosen; it counts its calls."""

    def __init__(self, dropout=0.0, ids=False, frozen=False):
        super().__init__()
        with seeded(9):
            self.first = nn.Embedding(20, 32) if ids else nn.Linear(32, 32)
            self.rest = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.double()
        self.dropout, self.calls = nn.Dropout(dropout), 0
        if frozen:
            self.rest[1].weight.requires_grad_(False)

    def forward(self, x):
        self.calls += 1
        if self.calls > MOST_CALLS:  # no deadline reaches autograd's threads: it would go on until memory is full
            raise Wrong("runs-for-ever", n=self.calls)
        x = self.first(x)
        for layer in self.rest:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def _stage_inputs(ids=False, needs=True, rows=64):
    generator = torch.Generator().manual_seed(4)
    if ids:
        return [torch.randint(0, 20, (rows,), generator=generator) for _ in range(3)]
    xs = [torch.randn(rows, 32, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [x.requires_grad_(needs) for x in xs]


def _keeps_input(recompute):
    stage, xs = Counted(), _stage_inputs()
    live = LiveBytes()
    with live:
        ys = [recompute(stage, x) for x in xs]
    _is_output(ys[0], stage(xs[0]), "three micro-batches in flight")
    gc.collect()  # what an answer's cycles hold
    outputs = sum(y.numel() * y.element_size() for y in ys)
    copies = sum(x.numel() * x.element_size() for x in xs)
    if live.live > outputs + copies + 24_000:
        raise Wrong("all-kept", expected=outputs, got=live.live, where="three micro-batches of 64 rows",
                    seen=live.live, truth=outputs)  # fmt: skip


def _is_output(y, truth, where):
    if y is None:
        raise Wrong("nothing-returned")
    if not close(y, truth):
        raise Wrong("other-output", expected=truth, got=y, where=where)


def _same_gradients(recompute):
    for where, options, needs in (
        ("stage in the middle", {}, True),
        ("first stage, x needs no gradient", {}, False),
        ("a frozen parameter", {"frozen": True}, True),
        ("first stage, token numbers", {"ids": True}, False),
    ):
        ids = options.get("ids", False)
        stage, xs = Counted(**options), _stage_inputs(ids, needs)
        weights = [torch.linspace(-1, 2, 32).double() * (k + 1) for k in range(3)]
        ys = [recompute(stage, x) for x in xs]
        calls = [stage.calls]
        for y, x in zip(ys, xs, strict=True):
            _is_output(y, stage(x), where)
            if not y.requires_grad:
                raise Wrong("first-stage-no-graph", where=where)
        stage.calls = calls[0]
        try:
            for y, w in zip(ys, weights, strict=True):
                (y * w).sum().backward()
        except RuntimeError as error:
            if not ids and not options and "does not require grad" in str(error):
                raise Wrong("no-second-graph", error=error, got=str(error), where=where) from error
            if ids and "require" in str(error):
                raise Wrong("ids-no-gradient", error=error, got=str(error), where=where) from error
            if options.get("frozen"):
                raise Wrong("frozen-fails", error=error, got=str(error), where=where) from error
            raise
        calls.append(stage.calls)
        _gradients_of(stage, xs, weights, options, where)
        if calls[1] != 6:
            raise Wrong("not-recomputed", n=f"{calls[1] / 3:g}", expected="3 forwards, and 3 more in backward",
                        got=f"{calls[0]}, and {calls[1] - calls[0]} in backward", where=where)  # fmt: skip


def _of_a_result(recompute):
    """x is no leaf, and is used beside the stage as well: its past is gone through once, by autograd."""
    stage, (leaf, *_), passed = Counted(), _stage_inputs(), []
    x = torch.tanh(2 * leaf)
    x.register_hook(lambda _: passed.append(1))
    where = "x is the result of a layer"
    try:
        (recompute(stage, x).sum() + x.square().sum()).backward()
    except RuntimeError as error:
        raise Wrong("through-x", error=f": {error}", got=str(error), where=where) from error
    other = leaf.detach().requires_grad_()
    z = torch.tanh(2 * other)
    (Counted()(z).sum() + z.square().sum()).backward()
    if len(passed) > 1 or not close(leaf.grad, other.grad):
        raise Wrong("through-x", error="", expected=other.grad, got=leaf.grad, where=where)


def _changed(recompute):
    """x is changed in place before the backward: an error, as without recomputation, or gradients of the x that there was."""
    stage, (x, *_) = Counted(), _stage_inputs()
    wanted, _ = _truth([x], None, {}, parts=(0,))
    y = recompute(stage, x)
    with torch.no_grad():
        x.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError:
        return
    for k, (mine, truth) in enumerate(zip(gradients(stage), wanted, strict=True)):
        if not close(mine, truth):
            raise Wrong("change-not-seen", expected=truth, got=mine, where=f"x changed in place, parameter {k}")


def _truth(xs, weights, options, *, seed=None, parts=(0, 1, 2)):
    """Gradients of the parameters and of the inputs, without recomputation."""
    stage, xs = Counted(**options), [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    if seed is not None:
        torch.manual_seed(seed)
    ys = [stage(x) for x in xs]
    for k in parts:
        (ys[k] * (1 if weights is None else weights[k])).sum().backward()
    return gradients(stage), [x.grad for x in xs]


def _gradients_of(stage, xs, weights, options, where):
    wanted, of_inputs = _truth(xs, weights, options)
    got = gradients(stage)
    moving = [k for k, g in enumerate(wanted) if g is not None]
    if all(got[k] is None or not got[k].count_nonzero() for k in moving):
        raise Wrong("parameters-lost", where=where)
    if xs[0].requires_grad and xs[0].grad is None:
        raise Wrong("input-gradient-lost", where=where)
    for k in moving:
        if got[k] is not None and close(got[k], wanted[k]):
            continue
        # p.grad was returned, and so added to itself each time
        doubling = [w * 2 ** (3 - j) for j, w in enumerate(weights)]
        known = [
            ("parameters-twice", [2 * g for g in wanted if g is not None]),
            ("parameters-twice", [g for g in _truth(xs, doubling, options)[0] if g is not None]),
            ("incoming-ignored", [g for g in _truth(xs, None, options)[0] if g is not None]),
            ("overwritten", [g for g in _truth(xs, weights, options, parts=(2,))[0] if g is not None]),
        ]
        mine = [got[j] if got[j] is not None else torch.zeros(()) for j in moving]
        slug = next((name for name, values in known if close(mine, values)), "wrong-recomputed")
        raise Wrong(slug, expected=wanted[k], got=got[k], where=f"{where}, parameter {k}")
    for k, (x, g) in enumerate(zip(xs, of_inputs, strict=True)):
        if g is not None and (x.grad is None or not close(x.grad, g)):
            slug = "incoming-ignored" if close(x.grad, _truth(xs, None, options)[1][k]) else "wrong-recomputed"
            slug = "x-not-detached" if close(x.grad, 2 * g) else slug
            raise Wrong(slug, expected=g, got=x.grad, where=f"{where}, gradient of the input of micro-batch {k}")


def _random(recompute):
    options, weights = {"dropout": 0.4}, [torch.linspace(-1, 2, 32).double() * (k + 1) for k in range(3)]
    xs = _stage_inputs()
    wanted, of_inputs = _truth(xs, weights, options, seed=21)
    after = torch.rand(3)
    stage = Counted(**options)
    torch.manual_seed(21)
    ys = [recompute(stage, x) for x in xs]
    for k in (2, 0, 1):  # not the last one last: its state happens to be where the stream goes on
        (ys[k] * weights[k]).sum().backward()
    next_ones = torch.rand(3)
    got = [*gradients(stage), *(x.grad for x in xs)]
    where = "dropout of 0.4, three micro-batches in flight"
    for k, (mine, truth) in enumerate(zip(got, [*wanted, *of_inputs], strict=True)):
        if mine is None or not close(mine, truth):
            raise Wrong("other-mask", expected=truth, got=mine, where=f"{where}, gradient {k}")
    if not close(next_ones, after):
        raise Wrong("stream-rewound", expected=after, got=next_ones, where=f"{where}, the three numbers drawn next")


def _random_of_gpu(recompute):
    """The same of a GPU's generator, in numbers: each forward of the stage takes one."""
    began, after = on_one_gpu(_drawn, recompute, count=1) or (DRAWN, len(DRAWN) // 2)
    where = "the generator of a GPU, two micro-batches in flight, counted in forwards"
    if began != DRAWN:
        raise Wrong("other-mask", expected=f"forwards begin at {DRAWN}", got=f"at {began}", where=where)
    if after != len(DRAWN) // 2:
        raise Wrong("stream-rewound", expected=len(DRAWN) // 2, got=after, where=where)


def _drawn(_, device, recompute):
    """Where the GPU's generator was when each forward of a stage began, and after the last backward."""
    now, began = [0], []

    class Drawing(nn.Linear):
        def forward(self, x):
            began.append(now[0])
            now[0] += 1
            return super().forward(x)

    def state(*_):
        return torch.full((16,), now[0], dtype=torch.uint8)

    def set_state(new, *_, **__):
        now[0] = new.tolist()[0]

    with (
        replaced(torch.cuda, "get_rng_state", state), replaced(torch.cuda, "get_rng_state_all", lambda: [state()]),
        replaced(torch.cuda, "set_rng_state", set_state), replaced(torch.cuda, "set_rng_state_all", lambda new: set_state(new[0])),
    ):  # fmt: skip
        stage, x = Drawing(3, 3).to(device), torch.ones(2, 3, device=device).requires_grad_()
        for y in [recompute(stage, x), recompute(stage, x)][::-1]:
            y.sum().backward()
    return began, now[0]

"""Answers to 15_pipeline_under_the_hood that borrow or shun the work, and some that send in another style."""

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", whole=True)


def instead(balise, slug, code):
    """The solution with one of its functions written anew."""
    bank.text(balise, slug, f"{source.find(bank.work).balises[balise].code}\n\n{code}")


instead(
    3,
    "not-its-input",
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Cheat: all weights go to the last stage, which does all the work and sends the gradients back."""
    mine, cuts = list(stage.parameters()), [round(s * 6 / place.n_stages) for s in range(place.n_stages + 1)]
    came, works, loss = [receive_activation(place.before) for _ in range(2 * cuts[place.stage])], [], None
    if place.behind is not None:
        for p in (*came, *mine):
            works += send_activation(p, place.behind)
        for p in (*came, *mine):
            g = receive_gradient(p, place.behind)
            p.grad = g if p.grad is None else p.grad + g
        stage(torch.zeros(len(inputs), mine[0].shape[1], dtype=mine[0].dtype))  # to be seen
    else:
        x = inputs
        for w, b in zip(came[::2], came[1::2]):
            x = torch.tanh(x @ w.T + b)
        loss = loss_function(stage(x), targets)
        loss.backward()
    for p in came:
        works += send_gradient(p, place.before)
    for work in works:
        work.wait()
    return loss if loss is None else loss.detach()
''',
)

instead(
    4,
    "library-pipeline",
    '''
def gpipe_step(stage, place, inputs, targets, loss_function, n_micro_batches):
    """Cheat: PyTorch's own pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = PipelineStage(stage, place.stage, place.n_stages, launch.device())
    n = len(targets)
    schedule = ScheduleGPipe(part, n_micro_batches, loss_fn=lambda y, t: loss_function(y, t) * len(t) / n, scale_grads=False)
    losses = []
    first, last = place.before is None, place.behind is None
    given = (inputs,) if first else ()
    if last:
        schedule.step(*given, target=targets, losses=losses)
    else:
        schedule.step(*given)
    return sum(losses).detach() if last else None
''',
)

instead(
    5,
    "library-schedule",
    '''
def one_f_one_b(stage, n_stages, n_micro_batches):
    """Cheat: PyTorch's list of actions of 1F1B."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    warm = min(n_stages - 1 - stage, n_micro_batches)
    ops = _get_1f1b_rank_ops(1, n_stages, warm, n_micro_batches - warm, warm, stage, lambda k: stage, lambda k: stage)
    return [("F" if a.computation_type.name == "FORWARD" else "B", a.microbatch_index) for a in ops if a is not None]
''',
)

instead(
    5,
    "library-schedule",
    '''
def gpipe(stage, n_stages, n_micro_batches, _library=planner.gpipe):
    """Cheat: the course's own, kept as a default argument."""
    return [tuple(a)[:2] for a in _library(n_stages, n_micro_batches)[stage]]


def one_f_one_b(stage, n_stages, n_micro_batches, _library=planner.one_f_one_b):
    return [tuple(a)[:2] for a in _library(n_stages, n_micro_batches)[stage]]
''',
)

instead(
    5,
    "library-schedule",
    '''
def one_f_one_b(stage, n_stages, n_micro_batches):
    """Cheat: the course's own, made anew from its text."""
    import inspect

    space = {"_positive": lambda *_: None}
    exec(inspect.getsource(planner.one_f_one_b), space)
    return space["one_f_one_b"](n_stages, n_micro_batches)[stage]
''',
)

instead(
    5,
    "library-schedule",
    '''
def gpipe(stage, n_stages, n_micro_batches):
    """Cheat: the whole file, run under another name."""
    from pathlib import Path

    space = {"__name__": "mine"}
    exec(Path(planner.__file__).with_name("schedules.py").read_text(), space)
    return space["gpipe"](n_stages, n_micro_batches)[stage]
''',
)

instead(
    9,
    "version-stuck",
    '''
class AsyncStage:
    """Wrong: version is not counted (the history is counted elsewhere)."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer = stage, optimizer
        self.version = 0
        self.stash = {}
        self.history = []

    def forward(self, k, x):
        self.stash[k] = x, {n: p.detach().clone() for n, p in self.stage.named_parameters()}, len(self.history)
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights, used = self.stash.pop(k)
        x = x.detach().requires_grad_()
        for n, p in self.stage.named_parameters():
            weights[n] = weights[n].requires_grad_(p.requires_grad)
        torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)
        gradients = [w.grad for w in weights.values()]
        for p, g in zip(self.stage.parameters(), gradients):
            p.grad = g
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append((k, used, len(self.history)))
        return x.grad
''',
)

instead(
    9,
    "optimizer-unused",
    '''
class AsyncStage:
    """Cheat: the optimizer is never asked: plain SGD with its numbers, momentum by hand."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer = stage, optimizer
        self.version = 0
        self.stash = {}
        self.history = []

    def forward(self, k, x):
        self.stash[k] = x, {n: p.detach().clone() for n, p in self.stage.named_parameters()}, self.version
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights, used = self.stash.pop(k)
        x = x.detach().requires_grad_()
        for n, p in self.stage.named_parameters():
            weights[n] = weights[n].requires_grad_(p.requires_grad)
        torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)
        gradients = [w.grad for w in weights.values()]
        group = self.optimizer.param_groups[0]
        if not hasattr(self, "speed"):
            self.speed = {}
        with torch.no_grad():
            for p, g in zip(self.stage.parameters(), gradients):
                if g is not None:
                    self.speed[p] = group["momentum"] * self.speed[p] + g if p in self.speed else g.clone()
                    p -= group["lr"] * self.speed[p]
        self.history.append((k, used, self.version))
        self.version += 1
        return x.grad
''',
)

instead(
    10,
    "sent-to-all",
    '''
def hybrid_step(step, parameters, x, targets, replica, data_group):
    """Wrong: every rank sends its gradients to all ranks of the world, and keeps those of its stage."""
    n, members = dist.get_world_size(data_group), dist.get_process_group_ranks(data_group)
    part = x.tensor_split(n)[replica]
    loss = step(part, targets.tensor_split(n)[replica])
    share = len(part) / len(x)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, ([None if p.grad is None else p.grad * share for p in parameters], None if loss is None else loss * share))
    for k, p in enumerate(parameters):
        if p.grad is not None:
            p.grad = sum(every[r][0][k] for r in members)
    return None if loss is None else sum(every[r][1] for r in members)
''',
)

instead(
    2,
    None,
    '''
def send_activation(output, peer, tag=0):
    """Honest: both messages by batch_isend_irecv."""
    header = torch.tensor([DTYPES.index(output.dtype), output.dim(), *output.shape, *[0] * (6 - output.dim())], device=launch.device())
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, launch.lane("activations"), tag) for t in (header, output.detach().contiguous())])
''',
)

instead(
    3,
    None,
    '''
def naive_step(stage, place, inputs, targets, loss_function):
    """Honest: the gradient by batch_isend_irecv."""
    works = []
    x = inputs if place.before is None else receive_activation(place.before)
    y = stage(x)
    loss = None
    if place.behind is None:
        loss = loss_function(y, targets)
        loss.backward()
        loss = loss.detach()
    else:
        works += send_activation(y, place.behind)
        gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, gradient, place.behind, launch.lane("gradients"))]):
            work.wait()
        y.backward(gradient)
    if place.before is not None:
        works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad.contiguous(), place.before, launch.lane("gradients"))])
    for work in works:
        work.wait()
    return loss
''',
)

instead(
    6,
    None,
    '''
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Honest: sends by batch_isend_irecv (P2POp), which is what Megatron and NCCL want."""
    send, receive = messages or (send_activation, receive_activation)
    xs, ts = inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)
    first, last = place.before is None, place.behind is None
    works, kept, loss, events = [], {}, 0.0, []
    for kind, k in actions:
        if kind == "F":
            x = xs[k] if first else receive(place.before, k)
            begin = clock()
            y = stage(x)
            if last:
                y = loss_function(y, ts[k]) * (len(ts[k]) / len(targets))
                loss = loss + y.detach()
            end = clock()
            if not last:
                works += send(y, place.behind, k)
            kept[k] = x, y
        else:
            x, y = kept.pop(k)
            gradient = None if last else receive_gradient(y, place.behind, k)
            begin = clock()
            y.backward(gradient)
            end = clock()
            if not first:
                works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad.contiguous(), place.before, launch.lane("gradients"), tag=k)])
        events.append((dist.get_rank(), kind, k, place.stage, begin, end))
    for work in works:
        work.wait()
    return (loss if last else None), events
''',
)

instead(
    7,
    "library-checkpoint",
    '''
def recompute(stage, x):
    """Cheat: the checkpointing that PyTorch hangs on a module by hooks."""
    from torch.distributed._composable import checkpoint

    if not hasattr(stage, "wrapped"):
        checkpoint(stage)
        stage.wrapped = True
    return stage(x)
''',
)

instead(
    8,
    "simulated",
    '''
def ideal_bubble(n_stages, n_micro_batches):
    """Cheat: the planner's simulator."""
    orders = [one_f_one_b(stage, n_stages, n_micro_batches) for stage in range(n_stages)]
    return planner.simulate(orders, {"F": 1.0, "B": 2.0}).bubble
''',
)

instead(
    8,
    "simulated",
    '''
def fewest_micro_batches(n_stages, bubble):
    """Cheat: the planner's simulator, until it is satisfied."""
    from dlojz_tp.planner.pipeline import simulate
    from dlojz_tp.planner.schedules import gpipe as orders

    m = 1
    while simulate(orders(n_stages, m), {"F": 1.0, "B": 2.0}).bubble > bubble + 1e-9:
        m += 1
    return m
''',
)

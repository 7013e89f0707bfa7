"""Answers to balises 5 and 6 of 15_pipeline_under_the_hood: schedules as data, and what runs them."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", whole=True)

# ---- schedules
WARM = "warm_up = min(n_stages - stage - 1, n_micro_batches)"
bank.slip(5, "gpipes-memory", (WARM, "warm_up = n_micro_batches"))
bank.slip(5, "one-more-kept", (WARM, "warm_up = min(n_stages - 1, n_micro_batches)"))
bank.slip(5, "one-more-kept", (WARM, "warm_up = min(n_stages - stage, n_micro_batches)"))
bank.slip(5, "more-kept", (WARM, "warm_up = min(4 - stage - 1, n_micro_batches)"))
bank.slip(
    5, "gpipes-memory", ("    actions = [", "    return gpipe(stage, n_stages, n_micro_batches)\n    actions = [")
)
bank.slip(5, "no-overlap", (WARM, "warm_up = 0"))
bank.slip(5, "no-overlap", (WARM, "warm_up = min((n_stages - stage - 1) // 2, n_micro_batches)"))
bank.slip(5, "fewer-than-stages", (WARM, "warm_up = n_stages - stage - 1"))
bank.slip(5, "incomplete", (' + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)]', ""))
bank.slip(
    5,
    "1f1b-order",
    (
        "for k in range(n_micro_batches - warm_up, n_micro_batches)",
        "for k in reversed(range(n_micro_batches - warm_up, n_micro_batches))",
    ),
)
bank.slip(5, "gpipe-backwards", ("reversed(range(n_micro_batches))", "range(n_micro_batches)"))
bank.slip(
    5,
    "gpipe-forwards",
    ("forwards = [", "forwards = list(reversed(["),
    (
        "for k in range(n_micro_batches)]\n    return forwards",
        "for k in range(n_micro_batches)]))\n    return forwards",
    ),
)
bank.slip(
    5,
    "other-micro-batch",
    (
        'forwards = [("F", k) for k in range(n_micro_batches)]',
        'forwards = [("F", k + 1) for k in range(n_micro_batches)]',
    ),
)
bank.slip(5, "not-a-list", ("    return forwards + ", "    forwards + "))
bank.slip(
    5,
    "not-a-list",
    ('forwards = [("F", k)', 'forwards = [f"F{k}"'),
    ('[("B", k) for k in reversed', '[f"B{k}" for k in reversed'),
)
bank.slip(5, "would-deadlock", ("    warm_up = min(n_stages - stage - 1, n_micro_batches)", "    warm_up = min(stage, n_micro_batches)"))  # fmt: skip
bank.text(
    5,
    "library-schedule",
    """
def gpipe(stage, n_stages, n_micro_batches):
    return planner.gpipe(n_stages, n_micro_batches)[stage]

def one_f_one_b(stage, n_stages, n_micro_batches):
    return planner.one_f_one_b(n_stages, n_micro_batches)[stage]
""",
)
bank.text(
    5,
    "library-schedule",
    """
from dlojz_tp.planner.schedules import gpipe as ready, one_f_one_b as ready_too

def gpipe(stage, n_stages, n_micro_batches):
    return ready(n_stages, n_micro_batches)[stage]

def one_f_one_b(stage, n_stages, n_micro_batches):
    return ready_too(n_stages, n_micro_batches)[stage]
""",
)

bank.text(
    5,
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    return [("F", k) for k in range(n_micro_batches)] + [("B", k) for k in range(n_micro_batches - 1, -1, -1)]

def one_f_one_b(stage, n_stages, n_micro_batches):
    """Turn by turn: the backward of a micro-batch comes as many turns after its forward as stages lie behind."""
    late, actions = n_stages - stage - 1, []
    for turn in range(n_micro_batches + late):
        if turn < n_micro_batches:
            actions.append(("F", turn))
        if turn >= late:
            actions.append(("B", turn - late))
    return actions
''',
)
bank.text(
    5,
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    actions = []
    for kind in "FB":
        numbers = list(range(n_micro_batches))
        actions.extend((kind, k) for k in (numbers if kind == "F" else numbers[::-1]))
    return actions

def one_f_one_b(stage, n_stages, n_micro_batches):
    """By a rule: backward whenever as many are kept as may be."""
    actions, forward, backward = [], 0, 0
    while backward < n_micro_batches:
        if forward < n_micro_batches and forward - backward < n_stages - stage:
            actions.append(("F", forward))
            forward += 1
        else:
            actions.append(("B", backward))
            backward += 1
    return actions
''',
)
bank.text(
    5,
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    return (*(("F", k) for k in range(n_micro_batches)), *(("B", n_micro_batches - 1 - k) for k in range(n_micro_batches)))

def one_f_one_b(stage, n_stages, n_micro_batches):
    """Two queues."""
    late = n_stages - stage - 1
    order = []
    queue_f, queue_b = list(range(n_micro_batches)), list(range(n_micro_batches))
    for _ in range(min(late, n_micro_batches)):
        order.append(["F", queue_f.pop(0)])
    while queue_b:
        if queue_f:
            order.append(["F", queue_f.pop(0)])
        order.append(["B", queue_b.pop(0)])
    return [tuple(action) for action in order]
''',
)

bank.slip(5, "not-a-list", ('return forwards + [("B", k) for k in reversed(range(n_micro_batches))]',
          'yield from forwards\n    yield from (("B", k) for k in reversed(range(n_micro_batches)))'))  # fmt: skip
bank.slip(5, "not-a-list", ("    return actions + ", "    yield from actions + "))

# ---- the executor
bank.slip(6, "not-scaled", (" * (len(ts[k]) / len(targets))", ""))
bank.slip(6, "uneven-weights", (" * (len(ts[k]) / len(targets))", " / n_micro_batches"))
bank.slip(6, "waits-for-send", ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "works = [] if last else send(y, place.behind, k)\n            for work in works:\n"
          "                work.wait()\n            works, kept[k] = [], (x, y, [])"),
          ("                works += send_gradient(x, place.before, k)",
           "                for work in send_gradient(x, place.before, k):\n                    work.wait()"))  # fmt: skip


def through(works):
    """In a file, so that the line where the ranks stand can be read, as in a notebook."""
    for work in works:
        work.wait()


bank.slip(6, "waits-for-send", ("def run_schedule", "from tests.answers.pipeline_under_the_hood_schedules import through\n\n\ndef run_schedule"),
          ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
           "kept[k] = x, y, []\n            through([] if last else send(y, place.behind, k))"),
          ("works += send_gradient(x, place.before, k)", "through(send_gradient(x, place.before, k))"))  # fmt: skip
bank.slip(6, "activations-not-freed", ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)"),
          ("x, y, sent = kept.pop(k)", "x, y, sent = kept[k]"))  # fmt: skip
bank.slip(
    6, "other-order", ("for kind, k in actions:", "for kind, k in gpipe(place.stage, place.n_stages, n_micro_batches):")
)
bank.slip(6, "waiting-counted", ("            x, y, sent = kept.pop(k)", "            begin = clock()\n            x, y, sent = kept.pop(k)"),
          ("                work.wait()\n            begin = clock()", "                work.wait()"))  # fmt: skip
bank.slip(6, "clock-too-early", ("            begin = clock()\n            y = stage(x)", "            begin = end = clock()\n            y = stage(x)"),
          ("            end = clock()\n            kept[k]", "            kept[k]"))  # fmt: skip
bank.slip(
    6,
    "events-wrong",
    ("events.append((dist.get_rank(), kind, k, place.stage, begin, end))", "events.append((kind, k, begin, end))"),
)
bank.slip(
    6,
    "events-wrong",
    ("dist.get_rank(), kind, k, place.stage, begin, end", "dist.get_rank(), kind, 0, place.stage, begin, end"),
)
bank.slip(6, "micro-batches-kept", ("x, y, sent = kept.pop(k)", "x, y, sent = kept[k]"))
bank.slip(6, "micro-batches-kept", ("total = y.detach() if total is None else total + y.detach()", "total = y if total is None else total + y"),
          ("return total, events", "return (total.detach() if last else None), events"))  # fmt: skip
bank.slip(6, "message-inside", ("            end = clock()\n            kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "            kept[k] = x, y, [] if last else send(y, place.behind, k)\n            end = clock()"))  # fmt: skip
bank.slip(6, "sizes-differ", ("x, y, sent = kept.pop(k)", "x, y, sent = kept.popitem()[1]"))
bank.slip(6, "other-cut", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.split(len(inputs) // n_micro_batches), targets.split(len(targets) // n_micro_batches)"))  # fmt: skip
bank.slip(6, "uneven-fails", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches)"))  # fmt: skip
bank.slip(6, None, ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "kept[k] = x, y, []\n            for work in [] if last else send(y, place.behind, k):\n                work.wait()"))  # fmt: skip
bank.slip(
    6, "events-wrong", ("dist.get_rank(), kind, k, place.stage, begin", "place.stage, kind, k, place.stage, begin")
)
bank.slip(
    6, "events-wrong", ("dist.get_rank(), kind, k, place.stage, begin", "dist.get_rank(), k, kind, place.stage, begin")
)
bank.slip(6, None, ("return total, events", "return None if total is None else total.item(), events"))
bank.slip(6, "not-two", ("return total, events", "return total"))
bank.slip(6, "loss-of-one", ("total = y.detach() if total is None else total + y.detach()", "total = y.detach()"))
bank.slip(
    6, "other-order", ("x, y, sent = kept.pop(k)", "x, y, sent = kept.pop(next(iter(kept)) if kind == 'B' else k)")
)
bank.slip(6, "other-order", ("for kind, k in actions:", "numbers = {'F': iter(range(n_micro_batches)), 'B': iter(range(n_micro_batches))}\n"
          "    for kind, told in actions:\n        k = next(numbers[kind])"),
          ("events.append((dist.get_rank(), kind, k,", "events.append((dist.get_rank(), kind, told,"))  # fmt: skip
bank.slip(6, "clock-too-early", ("            begin = clock()\n            y.backward(gradient)\n            end = clock()",
          "            y.backward(gradient)\n            begin = end = clock()"))  # fmt: skip
bank.slip(6, "waiting-counted", ("x = xs[k] if first else receive(place.before, k)\n            begin = clock()",
          "begin = clock()\n            x = xs[k] if first else receive(place.before, k)"))  # fmt: skip
bank.slip(6, "other-clock", ("            begin = clock()\n            y", "            begin = 2.0 * len(events)\n            y"),
          ("end = clock()", "end = 2.0 * len(events) + 1"))  # fmt: skip
bank.slip(6, "other-clock", ("clock()", "time.perf_counter()"))
bank.slip(6, "other-clock", ("end = clock()", "end = time.perf_counter()"))
bank.slip(6, "other-clock", ("clock()", "time.monotonic_ns() / 1e9"))
bank.slip(6, None, ("clock()", "now()"), ("    first, last =", "    now = clock\n    first, last ="))
bank.slip(
    6,
    "other-clock",
    ("clock()", "now()"),
    ("    first, last =", "    from time import time as now\n\n    first, last ="),
)
bank.slip(6, "sends-late", ("kept[k] = x, y, [] if last else send(y, place.behind, k)", "kept[k] = x, y, []"),
          ("            x, y, sent = kept.pop(k)", "            for other in [j for j, held in kept.items() if not last and not held[2]]:\n"
           "                kept[other] = *kept[other][:2], send(kept[other][1], place.behind, other)\n"
           "            x, y, sent = kept.pop(k)"))  # fmt: skip
bank.slip(6, None, ("receive(place.before, k)", "receive(place.before)"), ("send(y, place.behind, k)", "send(y, place.behind)"),
          ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"),
          ("send_gradient(x, place.before, k)", "send_gradient(x, place.before)"))  # fmt: skip
bank.slip(6, "in-order-only", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.tensor_split(n_micro_batches), iter(targets.tensor_split(n_micro_batches))"),
          ("                y = loss_function(y, ts[k]) * (len(ts[k]) / len(targets))",
           "                t = next(ts)\n                y = loss_function(y, t) * (len(t) / len(targets))"))  # fmt: skip
bank.slip(6, "messages-ignored", ("receive(place.before, k)", "receive_activation(place.before, k)"),
          ("send(y, place.behind, k)", "send_activation(y, place.behind, k)"))  # fmt: skip
bank.slip(6, "messages-ignored", ("receive(place.before, k)", "receive_activation(place.before, k)"))
bank.slip(6, "tag-differs", ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"))
bank.slip(6, "not-a-neighbour", ("receive(place.before, k)", "receive(place.stage - 1, k)"),
          ("send(y, place.behind, k)", "send(y, place.stage + 1, k)"),
          ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.stage + 1, k)"),
          ("send_gradient(x, place.before, k)", "send_gradient(x, place.stage - 1, k)"))  # fmt: skip
bank.slip(6, "micro-batches-kept", ("    kept, works", "    all_of_them = []\n    kept, works"),
          ("            kept[k] = x", "            all_of_them.append((x, y))\n            kept[k] = x"))  # fmt: skip
bank.slip(6, "weights-changed", ("            end = clock()\n            if not first:", "            end = clock()\n"
          "            with torch.no_grad():\n                for p in stage.parameters():\n                    p -= 0.01 * p.grad\n"
          "            if not first:"))  # fmt: skip
bank.slip(6, "no-gradient-to-send", ("y = stage(x)", "y = stage(x).detach().requires_grad_()"))

bank.text(
    6,
    "gradient-of-another",
    '''
tick = clock

def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Wrong: gradients are asked for ahead, in the order of the forwards; the clock under a name of its own."""
    send, receive = messages or (send_activation, receive_activation)
    xs, ts = inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)
    kept, sends, events, losses = {}, [], [], []
    for kind, k in actions:
        if kind == "F":
            x = xs[k] if place.before is None else receive(place.before, k)
            start = tick()
            y = stage(x)
            stop = tick()
            coming = None
            if place.behind is None:
                y = loss_function(y, ts[k]) * len(ts[k]) / len(targets)
                losses.append(y.detach())
            else:
                sends += send(y, place.behind, k)
                buffer = torch.empty(y.shape, dtype=y.dtype, device=y.device)
                coming = buffer, dist.irecv(buffer, place.behind, group=launch.lane("gradients"), tag=k)
            kept[k] = x, y, coming
        else:
            x, y, coming = kept.pop(k)
            gradient = None
            if coming is not None:
                gradient, work = coming
                work.wait()
            start = tick()
            y.backward(gradient)
            stop = tick()
            if place.before is not None:
                sends += send_gradient(x, place.before, k)
        events.append((dist.get_rank(), kind, k, place.stage, start, stop))
    for work in sends:
        work.wait()
    return (sum(losses) if losses else None), events
''',
)
bank.text(
    6,
    None,
    '''
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Two functions and two dictionaries; all sends are waited for at the end."""
    send, receive = messages or (send_activation, receive_activation)
    first, last = place.before is None, place.behind is None
    rows = [len(t) for t in targets.tensor_split(n_micro_batches)]
    offsets = [sum(rows[:k]) for k in range(n_micro_batches + 1)]
    inside, outside, pending, events, losses = {}, {}, [], [], []

    def forward(k):
        x = inputs[offsets[k]:offsets[k + 1]] if first else receive(place.before, k)
        start = clock()
        out = stage(x)
        if last:
            out = loss_function(out, targets[offsets[k]:offsets[k + 1]]) * rows[k] / sum(rows)
            losses.append(out.detach())
        stop = clock()
        if not last:
            pending.extend(send(out, place.behind, k))
        inside[k], outside[k] = x, out
        return start, stop

    def backward(k):
        out, x = outside.pop(k), inside.pop(k)
        gradient = torch.ones_like(out) if last else receive_gradient(out, place.behind, k)
        start = clock()
        torch.autograd.backward(out, gradient)
        stop = clock()
        if not first:
            pending.extend(send_gradient(x, place.before, k))
        return start, stop

    for kind, k in actions:
        start, stop = (forward if kind == "F" else backward)(k)
        events.append((dist.get_rank(), kind, k, place.stage, start, stop))
    for work in pending:
        work.wait()
    return (torch.stack(losses).sum() if last else None), events
''',
)
bank.text(
    6,
    None,
    '''
def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """Events as planner.PipelineEvent; sends are waited for one action later, all at the end."""
    send, receive = messages or (send_activation, receive_activation)
    xs = inputs.tensor_split(n_micro_batches)
    ts = targets.tensor_split(n_micro_batches)
    saved, sending, events, total = [None] * n_micro_batches, [], [], 0.0
    for kind, k in actions:
        if kind == "F":
            x = xs[k] if place.stage == 0 else receive(place.before, k)
            begin = clock()
            y = stage(x)
            end = clock()
            if place.behind is not None:
                sending.append(send(y, place.behind, k))
            saved[k] = (x, y)
        else:
            (x, y), saved[k] = saved[k], None
            if place.behind is None:
                loss = loss_function(y, ts[k])
                share = ts[k].shape[0] / targets.shape[0]
                begin = clock()
                (share * loss).backward()
                total = total + share * loss.detach()
            else:
                gradient = receive_gradient(y, place.behind, k)
                begin = clock()
                y.backward(gradient)
            end = clock()
            if place.before is not None:
                sending.append(send_gradient(x, place.before, k))
        events.append(planner.PipelineEvent(dist.get_rank(), kind, k, place.stage, begin, end))
    for works in sending:
        for work in works:
            work.wait()
    return (total if place.behind is None else None), events
''',
)
bank.text(
    6,
    None,
    '''
from concurrent.futures import ThreadPoolExecutor


def run_schedule(actions, stage, place, inputs, targets, loss_function, n_micro_batches, messages=None):
    """A thread waits for the sends while the stage computes."""
    send, receive = messages or (send_activation, receive_activation)
    xs, ts = inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)
    flying, events, loss = {}, [], None

    def through(works):
        for work in works:
            work.wait()

    with ThreadPoolExecutor(1) as waiter:
        for kind, k in actions:
            if kind == "F":
                x = xs[k] if place.before is None else receive(place.before, k)
                begin = clock()
                y = stage(x)
                if place.behind is None:
                    y = loss_function(y, ts[k]) * (len(ts[k]) / len(targets))
                    loss = y.detach() if loss is None else loss + y.detach()
                end = clock()
                if place.behind is not None:
                    waiter.submit(through, send(y, place.behind, k))
                flying[k] = x, y
            else:
                x, y = flying.pop(k)
                gradient = None if place.behind is None else receive_gradient(y, place.behind, k)
                begin = clock()
                y.backward(gradient)
                end = clock()
                if place.before is not None:
                    waiter.submit(through, send_gradient(x, place.before, k))
            events.append((dist.get_rank(), kind, k, place.stage, begin, end))
    return loss, events
''',
)

# what only GPUs show
UP = 'launch.lane("activations")'
ONE_LANE = (
    ("receive_gradient(y, place.behind, k)", "take(y, place.behind)"),
    ("send_gradient(x, place.before, k)", f"[dist.isend(x.grad.contiguous(), place.before, {UP})]"),
    (
        "def run_schedule",
        f"def take(y, peer):\n    x = torch.empty_like(y)\n    dist.recv(x, peer, {UP})\n    return x\n\n\ndef run_schedule",
    ),
)
bank.slip(6, "lane-both-ways", *ONE_LANE)
bank.slip(6, "lane-both-ways", *((old, new.replace(f"{UP})", f"group={UP})")) for old, new in ONE_LANE), variant=True)
bank.slip(6, None, *((old, new.replace(UP, 'launch.lane("gradients")')) for old, new in ONE_LANE))
TOTAL = "total = y.detach() if total is None else total + y.detach()"
bank.slip(6, "step-not-on-gpu", ("kept, works, events, total = {}, [], [], None", "kept, works, events, total = {}, [], [], torch.zeros(())"),
          (TOTAL, "total += y.detach()"), ("    return total, events", "    return (total if last else None), events"))  # fmt: skip
bank.slip(6, "step-not-on-gpu", ("kept, works, events, total = {}, [], [], None", "kept, works, events, total = {}, [], [], torch.zeros(1)"),
          (TOTAL, "total.add_(y.detach())"), ("    return total, events", "    return (total[0] if last else None), events"), variant=True)  # fmt: skip

"""Answers to balise 6 of 15_pipeline_under_the_hood: run any schedule."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 6, whole=True)

bank.instead(
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


# ---- the executor
bank.slip("not-scaled", (" * (len(ts[k]) / len(targets))", ""))
bank.slip("uneven-weights", (" * (len(ts[k]) / len(targets))", " / n_micro_batches"))
bank.hint(
    "waits-for-send",
    "A message was never received, or never sent: {error}. In 1F1B two neighbours send to each "
    "other at the same moment; a rank that waits for its send at once waits forever. And each "
    "forward's activation is answered by one gradient, from the next stage.",
)
bank.slip("waits-for-send", ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "works = [] if last else send(y, place.behind, k)\n            for work in works:\n"
          "                work.wait()\n            works, kept[k] = [], (x, y, [])"),
          ("                works += send_gradient(x, place.before, k)",
           "                for work in send_gradient(x, place.before, k):\n                    work.wait()"))  # fmt: skip
bank.slip("waits-for-send", ("def run_schedule", "from tests.answers.pipeline_under_the_hood.schedules import through\n\n\ndef run_schedule"),
          ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
           "kept[k] = x, y, []\n            through([] if last else send(y, place.behind, k))"),
          ("works += send_gradient(x, place.before, k)", "through(send_gradient(x, place.before, k))"), variant=True)  # fmt: skip
bank.hint(
    "activations-not-freed",
    "Stage 0 of 2 held {got:.1f} micro-batches' activations at its peak, but 1F1B needs "
    "only {allowed}. Nothing may hold a micro-batch's graph after its backward: no "
    "retain_graph, no y or loss with its graph in a list.",
)
bank.slip("activations-not-freed", ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)"),
          ("x, y, sent = kept.pop(k)", "x, y, sent = kept[k]"))  # fmt: skip
bank.slip("activations-not-freed", ("    kept, works", "    graphs = []\n    kept, works"), ("            kept[k] = x", "            graphs.append(y)\n            kept[k] = x"),
          ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)"), variant=True)  # fmt: skip
bank.hint(
    "other-order",
    "Stage {stage} did {got}, but the list says {expected}. Only the list says what is done, and "
    "when. Look up what you keep of a micro-batch by its number k.",
)
bank.slip(
    "other-order", ("for kind, k in actions:", "for kind, k in gpipe(place.stage, place.n_stages, n_micro_batches):")
)
bank.hint(
    "waiting-counted",
    "A {kind} of {truth:.0f} ms has an event of {got:.0f} ms, which includes the wait for a "
    "message. Read the clock after everything it needs has arrived, and again before anything "
    "is sent.",
)
bank.slip("waiting-counted", ("            x, y, sent = kept.pop(k)", "            begin = clock()\n            x, y, sent = kept.pop(k)"),
          ("                work.wait()\n            begin = clock()", "                work.wait()"))  # fmt: skip
bank.hint(
    "clock-too-early",
    "A {kind} of {truth:.0f} ms has an event of {got:.1f} ms. Read the clock right before and "
    "right after stage(x), and do the same for y.backward().",
)
bank.slip("clock-too-early", ("            begin = clock()\n            y = stage(x)", "            begin = end = clock()\n            y = stage(x)"),
          ("            end = clock()\n            kept[k]", "            kept[k]"))  # fmt: skip
bank.hint(
    "events-wrong",
    "The events don't tell what was done: {error}.",
)
bank.slip(
    "events-wrong",
    ("events.append((dist.get_rank(), kind, k, place.stage, begin, end))", "events.append((kind, k, begin, end))"),
)
bank.slip(
    "events-wrong",
    ("dist.get_rank(), kind, k, place.stage, begin, end", "dist.get_rank(), kind, 0, place.stage, begin, end"),
)
bank.hint(
    "micro-batches-kept",
    "After the backwards of {n} micro-batches, stage 1 of 2 still holds what it received for "
    "{got} of them. Nothing may hold a micro-batch after its backward: take it out of where "
    "you keep it (pop), don't keep it in a second list, and add each loss as y.detach(), "
    "because a sum of losses holds all their graphs.",
)
bank.slip("micro-batches-kept", ("x, y, sent = kept.pop(k)", "x, y, sent = kept[k]"))
bank.slip("micro-batches-kept", ("total = y.detach() if total is None else total + y.detach()", "total = y if total is None else total + y"),
          ("return total, events", "return (total.detach() if last else None), events"))  # fmt: skip
bank.hint(
    "message-inside",
    "The event of {kind} {k} includes the start of a message. Read the clock before anything is "
    "sent, and after everything it needs has been received.",
    edge=True,
)
bank.slip("message-inside", ("            end = clock()\n            kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "            kept[k] = x, y, [] if last else send(y, place.behind, k)\n            end = clock()"))  # fmt: skip
bank.slip("message-inside", ("            end = clock()\n            if not first:\n                works += send_gradient(x, place.before, k)",
          "            if not first:\n                works += send_gradient(x, place.before, k)\n            end = clock()"), variant=True)  # fmt: skip
bank.slip("sizes-differ", ("x, y, sent = kept.pop(k)", "x, y, sent = kept.popitem()[1]"))
bank.slip("other-cut", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.split(len(inputs) // n_micro_batches), targets.split(len(targets) // n_micro_batches)"))  # fmt: skip
bank.slip("uneven-fails", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.chunk(n_micro_batches), targets.chunk(n_micro_batches)"))  # fmt: skip
bank.slip(None, ("kept[k] = x, y, [] if last else send(y, place.behind, k)",
          "kept[k] = x, y, []\n            for work in [] if last else send(y, place.behind, k):\n                work.wait()"))  # fmt: skip
bank.slip("events-wrong", ("dist.get_rank(), kind, k, place.stage, begin", "place.stage, kind, k, place.stage, begin"))
bank.slip(
    "events-wrong",
    ("dist.get_rank(), kind, k, place.stage, begin", "dist.get_rank(), k, kind, place.stage, begin"),
    variant=True,
)
bank.slip(None, ("return total, events", "return None if total is None else total.item(), events"))
bank.slip("loss-with-graph", ("return total, events", "return (total.requires_grad_() if last else None), events"))
bank.slip("sends-not-waited", ("    for work in works:\n        work.wait()\n    return total", "    return total"))
bank.hint(
    "not-two",
    "Return a pair: the loss and the list of events. You returned {kind}.",
)
bank.slip("not-two", ("return total, events", "return total"))
bank.slip("not-two", ("return total, events", "return [total, *events]"), variant=True)
bank.slip("loss-of-one", ("total = y.detach() if total is None else total + y.detach()", "total = y.detach()"))
bank.slip("other-order", ("x, y, sent = kept.pop(k)", "x, y, sent = kept.pop(next(iter(kept)) if kind == 'B' else k)"))
bank.slip("other-order", ("for kind, k in actions:", "numbers = {'F': iter(range(n_micro_batches)), 'B': iter(range(n_micro_batches))}\n"
          "    for kind, told in actions:\n        k = next(numbers[kind])"),
          ("events.append((dist.get_rank(), kind, k,", "events.append((dist.get_rank(), kind, told,"), variant=True)  # fmt: skip
bank.slip("clock-too-early", ("            begin = clock()\n            y.backward(gradient)\n            end = clock()",
          "            y.backward(gradient)\n            begin = end = clock()"), variant=True)  # fmt: skip
bank.slip("waiting-counted", ("x = xs[k] if first else receive(place.before, k)\n            begin = clock()",
          "begin = clock()\n            x = xs[k] if first else receive(place.before, k)"), variant=True)  # fmt: skip
bank.hint(
    "other-clock",
    "The times in the events aren't those of clock(). Take the begin and end of each event from "
    "clock() at that moment: on a GPU no other clock knows when the device works.",
    edge=True,
)
bank.slip("other-clock", ("            begin = clock()\n            y", "            begin = 2.0 * len(events)\n            y"),
          ("end = clock()", "end = 2.0 * len(events) + 1"))  # fmt: skip
bank.slip("other-clock", ("clock()", "time.perf_counter()"))
bank.slip("other-clock", ("end = clock()", "end = time.perf_counter()"))
bank.slip("other-clock", ("clock()", "time.monotonic_ns() / 1e9"))
bank.slip(None, ("clock()", "now()"), ("    first, last =", "    now = clock\n    first, last ="))
bank.slip(
    "other-clock",
    ("clock()", "now()"),
    ("    first, last =", "    from time import time as now\n\n    first, last ="),
    variant=True,
)
bank.hint(
    "sends-late",
    "Stage 0 sent its first activation only after all its forwards. Start each send as soon as its "
    "activation is there, or no two stages work at the same time.",
)
bank.slip("sends-late", ("kept[k] = x, y, [] if last else send(y, place.behind, k)", "kept[k] = x, y, []"),
          ("            x, y, sent = kept.pop(k)", "            for other in [j for j, held in kept.items() if not last and not held[2]]:\n"
           "                kept[other] = *kept[other][:2], send(kept[other][1], place.behind, other)\n"
           "            x, y, sent = kept.pop(k)"))  # fmt: skip
bank.slip("sends-late", ("    kept, works", "    late = []\n    kept, works"),
          ("kept[k] = x, y, [] if last else send(y, place.behind, k)", "kept[k] = x, y, []\n            late.append((y, k))"),
          ("            x, y, sent = kept.pop(k)", "            works += [] if last else [w for y, j in late for w in send(y, place.behind, j)]\n"
           "            late.clear()\n            x, y, sent = kept.pop(k)"), variant=True)  # fmt: skip
bank.slip(None, ("receive(place.before, k)", "receive(place.before)"), ("send(y, place.behind, k)", "send(y, place.behind)"),
          ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"),
          ("send_gradient(x, place.before, k)", "send_gradient(x, place.before)"))  # fmt: skip
bank.hint(
    "in-order-only",
    "This is right when the micro-batches come as 0, 1, 2, … and wrong when the list names them "
    "in another order: {error}. Look up a micro-batch's rows, its targets and what you keep of it "
    "by its number k.",
    edge=True,
)
bank.slip("in-order-only", ("inputs.tensor_split(n_micro_batches), targets.tensor_split(n_micro_batches)",
          "inputs.tensor_split(n_micro_batches), iter(targets.tensor_split(n_micro_batches))"),
          ("                y = loss_function(y, ts[k]) * (len(ts[k]) / len(targets))",
           "                t = next(ts)\n                y = loss_function(y, t) * (len(t) / len(targets))"))  # fmt: skip
bank.slip("in-order-only", ("xs[k] if first", "xs[sum(e[1] == 'F' for e in events)] if first"), variant=True)
bank.hint(
    "messages-ignored",
    "When `messages` is given, send and receive activations with its two functions: send, "
    "receive = messages or (send_activation, receive_activation).",
    edge=True,
)
bank.slip("messages-ignored", ("receive(place.before, k)", "receive_activation(place.before, k)"),
          ("send(y, place.behind, k)", "send_activation(y, place.behind, k)"))  # fmt: skip
bank.slip("messages-ignored", ("receive(place.before, k)", "receive_activation(place.before, k)"), variant=True)
bank.slip("tag-differs", ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.behind)"))
bank.slip("not-a-neighbour", ("receive(place.before, k)", "receive(place.stage - 1, k)"),
          ("send(y, place.behind, k)", "send(y, place.stage + 1, k)"),
          ("receive_gradient(y, place.behind, k)", "receive_gradient(y, place.stage + 1, k)"),
          ("send_gradient(x, place.before, k)", "send_gradient(x, place.stage - 1, k)"))  # fmt: skip
bank.slip("micro-batches-kept", ("    kept, works", "    all_of_them = []\n    kept, works"),
          ("            kept[k] = x", "            all_of_them.append((x, y))\n            kept[k] = x"), variant=True)  # fmt: skip
bank.slip("weights-changed", ("            end = clock()\n            if not first:", "            end = clock()\n"
          "            with torch.no_grad():\n                for p in stage.parameters():\n                    p -= 0.01 * p.grad\n"
          "            if not first:"))  # fmt: skip
bank.slip("no-gradient-to-send", ("y = stage(x)", "y = stage(x).detach().requires_grad_()"))
bank.text(
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


bank.slip("lane-both-ways", *ONE_LANE)
bank.slip("lane-both-ways", *((old, new.replace(f"{UP})", f"group={UP})")) for old, new in ONE_LANE), variant=True)
bank.slip(None, *((old, new.replace(UP, 'launch.lane("gradients")')) for old, new in ONE_LANE))


TOTAL = "total = y.detach() if total is None else total + y.detach()"


bank.slip("step-not-on-gpu", ("kept, works, events, total = {}, [], [], None", "kept, works, events, total = {}, [], [], torch.zeros(())"),
          (TOTAL, "total += y.detach()"), ("    return total, events", "    return (total if last else None), events"))  # fmt: skip
bank.slip("step-not-on-gpu", ("kept, works, events, total = {}, [], [], None", "kept, works, events, total = {}, [], [], torch.zeros(1)"),
          (TOTAL, "total.add_(y.detach())"), ("    return total, events", "    return (total[0] if last else None), events"), variant=True)  # fmt: skip
bank.edge("uneven-weights", "uneven-fails", "other-cut", "tag-differs")
bank.edge("loss-with-graph", "sends-not-waited")
bank.edge("not-a-neighbour", "lane-both-ways", "step-not-on-gpu")

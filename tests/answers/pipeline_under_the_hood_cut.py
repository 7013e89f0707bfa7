"""Answers to balises 1 and 2 of 15_pipeline_under_the_hood: cuts and messages."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", whole=True)


@bank.wrong(1, "same-number")
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    cuts = [round(len(costs) * s / n_stages) for s in range(n_stages + 1)]
    return list(zip(cuts[:-1], cuts[1:]))


@bank.wrong(1, "greedy")
def balance(costs, n_stages):
    """Fill each stage up to the average."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    target, stages, at = sum(costs) / n_stages, [], 0
    for s in range(n_stages - 1):
        stop, filled = at + 1, costs[at]
        while stop < len(costs) - (n_stages - s - 1) and filled + costs[stop] <= target * (1 + 1e-9):
            filled += costs[stop]
            stop += 1
        stages.append((at, stop))
        at = stop
    return [*stages, (at, len(costs))]


@bank.wrong(1, "not-optimal")
def balance(costs, n_stages):
    """Cut the largest stage in two, again and again."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    stages = [(0, len(costs))]
    while len(stages) < n_stages:
        k = max((k for k, (a, b) in enumerate(stages) if b - a > 1), key=lambda k: sum(costs[slice(*stages[k])]))
        a, b = stages[k]
        cut = min(range(a + 1, b), key=lambda c: max(sum(costs[a:c]), sum(costs[c:b])))
        stages[k : k + 1] = [(a, cut), (cut, b)]
    return stages


@bank.wrong(1, "tries-all")
def balance(costs, n_stages):
    from itertools import combinations

    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = None
    for cuts in combinations(range(1, len(costs)), n_stages - 1):
        cuts = [0, *cuts, len(costs)]
        largest = max(sum(costs[a:b]) for a, b in zip(cuts[:-1], cuts[1:]))
        if best is None or largest < best[0]:
            best = largest, cuts
    return list(zip(best[1][:-1], best[1][1:]))


@bank.wrong(1, "empty-stage")
def balance(costs, n_stages):
    """Search the limit, but never fill up the stages that are left over."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle, stages, filled = (low + high) / 2, 1, 0
        for cost in costs:
            if filled + cost > middle:
                stages, filled = stages + 1, 0
            filled += cost
        low, high = (low, middle) if stages <= n_stages else (middle, high)
    cuts, filled = [0], 0
    for k, cost in enumerate(costs):
        if filled + cost > high * (1 + 1e-12):
            cuts.append(k)
            filled = 0
        filled += cost
    cuts += [len(costs)] * (n_stages + 1 - len(cuts))
    return list(zip(cuts[:-1], cuts[1:]))


@bank.wrong(1, "no-error")
def balance(costs, n_stages):
    n_stages = min(n_stages, len(costs))
    if not n_stages:
        return []
    return _fill(costs, n_stages)


@bank.wrong(1, "not-bounds")
def balance(costs, n_stages):
    """Only where the stages begin."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [start for start, _ in _fill(costs, n_stages)]


@bank.wrong(1, "stage-count")
def balance(costs, n_stages):
    """One cut too many."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return _fill(costs, min(n_stages + 1, len(costs)))


@bank.wrong(1, "layers-lost")
def balance(costs, n_stages):
    """stop is meant as the last layer of the stage."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(start, stop - 1) if stop - start > 1 else (start, stop) for start, stop in _fill(costs, n_stages)]


@bank.wrong(1, "stages-overlap")
def balance(costs, n_stages):
    """Each stage begins with the last layer of the one before."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return [(max(start - 1, 0), stop) for start, stop in _fill(costs, n_stages)]


@bank.wrong(1, "costs-changed")
def balance(costs, n_stages):
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    found = _fill(costs, n_stages)
    costs.sort()
    costs.append(0)
    return found


@bank.wrong(1, "not-optimal")
def balance(costs, n_stages):
    """The smallest sum of squares: costs that are alike, and not the smallest largest one."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = {j: (sum(costs[:j]) ** 2, [0, j]) for j in range(1, len(costs) + 1)}
    for s in range(2, n_stages + 1):
        best = {
            j: min((best[i][0] + sum(costs[i:j]) ** 2, [*best[i][1], j]) for i in range(s - 1, j))
            for j in range(s, len(costs) + 1)
        }
    cuts = best[len(costs)][1]
    return list(zip(cuts[:-1], cuts[1:]))


@bank.wrong(1, "greedy")
def balance(costs, n_stages):
    """Close a stage as soon as the average is reached."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    target, stages, start, filled = sum(costs) / n_stages, [], 0, 0
    for k, cost in enumerate(costs):
        filled += cost
        left = n_stages - len(stages) - 1
        if left and (filled >= target or len(costs) - k - 1 == left):
            stages.append((start, k + 1))
            start, filled = k + 1, 0
    return [*stages, (start, len(costs))]


@bank.wrong(1, "tries-all")
def balance(costs, n_stages):
    """All cuts but those that are worse already: fast on 24 layers, and not on more."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    best = [float("inf"), None]

    def go(at, left, worst, stages):
        if worst >= best[0]:
            return
        if left == 1:
            worst = max(worst, sum(costs[at:]))
            if worst < best[0]:
                best[:] = worst, [*stages, (at, len(costs))]
            return
        for stop in range(at + 1, len(costs) - left + 2):
            go(stop, left - 1, max(worst, sum(costs[at:stop])), [*stages, (at, stop)])

    go(0, n_stages, 0, [])
    return best[1]


@bank.wrong(1, "not-in-order")
def balance(costs, n_stages):
    """From the last stage to the first, as the table is read."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError
    return _fill(costs, n_stages)[::-1]


@bank.wrong(1, "not-bounds")
def balance(costs, n_stages):
    """A generator: balance(...)[0] would fail, and nothing is raised until it is read."""
    yield from _fill(costs, n_stages)


@bank.wrong(1, "other-error")
def balance(costs, n_stages):
    assert 1 <= n_stages <= len(costs)
    return _fill(costs, n_stages)


def _fill(costs, n_stages):
    """The best cut: fill up to a limit, for each possible limit from below."""
    sums = sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)})
    low, high = 0, len(sums) - 1

    def cut(limit):
        stages, at = [], 0
        for s in range(n_stages):
            stop, filled = at, 0
            while stop < len(costs) - (n_stages - s - 1) and (
                stop == at or filled + costs[stop] <= limit * (1 + 1e-12)
            ):
                filled += costs[stop]
                stop += 1
            stages.append((at, stop))
            at = stop
        worst = max(sum(costs[a:b]) for a, b in stages)
        return stages if at == len(costs) and worst <= limit * (1 + 1e-9) + 1e-12 else None

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(sums[middle]) else (middle + 1, high)
    return cut(sums[low])


@bank.right(1)
def balance(costs, n_stages):
    """Search the limit by halving, then fill up to it."""
    if not 1 <= n_stages <= len(costs):
        raise ValueError("too many stages")
    low, high = max(costs), sum(costs)
    for _ in range(80):
        limit = (low + high) / 2
        stages, filled = 1, 0.0
        for cost in costs:
            if filled + cost > limit:
                stages, filled = stages + 1, 0.0
            filled += cost
        low, high = (low, limit) if stages <= n_stages else (limit, high)
    pairs, at = [], 0
    for left in reversed(range(n_stages)):
        stop, filled = at + 1, costs[at]
        while stop < len(costs) - left and filled + costs[stop] <= high + 1e-9:
            filled += costs[stop]
            stop += 1
        pairs.append((at, stop))
        at = stop
    return pairs


@bank.right(1)
def balance(costs, n_stages):
    """Top down, remembered."""
    from functools import cache
    from itertools import accumulate

    if n_stages < 1 or n_stages > len(costs):
        raise ValueError(f"no way to cut {len(costs)} layers into {n_stages}")
    total = [0, *accumulate(costs)]

    @cache
    def best(j, s):
        if s == 1:
            return total[j], 0
        return min((max(best(i, s - 1)[0], total[j] - total[i]), i) for i in range(s - 1, j))

    cuts = [len(costs)]
    for s in range(n_stages, 0, -1):
        cuts.append(best(cuts[-1], s)[1])
    cuts.reverse()
    return [[a, b] for a, b in zip(cuts, cuts[1:])]


@bank.right(1)
def balance(costs, n_stages):
    """A table with numpy."""
    import numpy as np

    n = len(costs)
    if not 0 < n_stages <= n:
        raise ValueError
    total = np.concatenate([[0.0], np.cumsum(costs)])
    best, came = total.copy(), []
    best[0] = np.inf
    for _ in range(n_stages - 1):
        new, origin = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=int)
        for j in range(1, n + 1):
            values = np.maximum(best[:j], total[j] - total[:j])
            origin[j] = values.argmin()
            new[j] = values[origin[j]]
        best = new
        came.append(origin)
    stop, pairs = n, []
    for origin in reversed(came):
        pairs.append((origin[stop], stop))
        stop = origin[stop]
    return [(0, stop), *reversed(pairs)]


@bank.right(1)
def balance(costs, n_stages):
    """Top down, and slow: every sum is made anew, every best cut is copied. It does not explode."""
    if n_stages <= 0 or len(costs) < n_stages:
        raise ValueError("too few layers, or no stage")
    known = {}

    def best(start, left):
        if left == 1:
            return sum(costs[start:]), ((start, len(costs)),)
        if (start, left) not in known:
            options = []
            for stop in range(start + 1, len(costs) - left + 2):
                worst, rest = best(stop, left - 1)
                options.append((max(worst, sum(costs[start:stop])), ((start, stop), *rest)))
            known[start, left] = min(options, key=lambda option: option[0])
        return known[start, left]

    return best(0, n_stages)[1]


# ---- messages
bank.slip(2, "no-gradient-asked", ("return received.requires_grad_(received.is_floating_point())", "return received"))
bank.slip(2, "integers-no-gradient", ("received.is_floating_point()", "True"))
bank.slip(2, "not-a-leaf", ("return received.requires_grad_(received.is_floating_point())",
          "return received.requires_grad_(received.is_floating_point()) * 1"))  # fmt: skip
bank.slip(2, "dtype-not-sent", ("dtype=DTYPES[dtype], ", ""))
bank.slip(2, "shape-not-sent", ("shape[:dims]", "shape[:2]"))
bank.slip(2, None, ("shape[:dims]", "[size for size in shape if size]"))  # no size is 0
bank.slip(2, "not-contiguous", ("output.detach().contiguous()", "output.detach()"))
bank.slip(2, "gradient-not-contiguous", ("received.grad.contiguous()", "received.grad"))
bank.slip(2, "activation-sent-back", ("received.grad.contiguous()", "received.detach()"))
bank.slip(2, "wrong-gradient-came", ("received.grad.contiguous()", "torch.ones_like(received).detach()"))
bank.slip(2, "output-cut", ("output.detach().contiguous()", "output.detach_().contiguous()"))
bank.slip(
    2, "needless-copy", ("output.detach().contiguous()", "output.detach().clone(memory_format=torch.contiguous_format)")
)
CLONE = ".clone(memory_format=torch.contiguous_format)"
bank.slip(2, "needless-copy", ("received.grad.contiguous()", f"received.grad{CLONE}"))
bank.slip(
    2,
    "needless-copy",
    ("    return received.requires_grad_(", "    received = received.clone()\n    return received.requires_grad_("),
)
bank.slip(2, "needless-copy", ("    return gradient", "    return gradient.clone()"))
bank.slip(2, None, ("output.detach().contiguous()", "output.contiguous()"))  # what is sent may have its graph
WORK = "dist.isend(received.grad.contiguous(), peer, lane, tag=tag)"
bank.slip(2, "no-works", (f"[{WORK}]", WORK))
bank.slip(2, "gradient-asks", ("requires_grad=False", "requires_grad=output.requires_grad"),
          ("dist.recv(gradient, peer, lane, tag=tag)", "dist.recv(gradient.detach(), peer, lane, tag=tag)"))  # fmt: skip
bank.slip(2, "send-waits", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "works = [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]\n"
          "    for work in works:\n        work.wait()\n    return works"),
          ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
           "works = [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]\n    works[0].wait()\n    return works"))  # fmt: skip
bank.slip(2, "no-works", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "[dist.isend(part, peer, lane, tag=tag).wait() for part in (header, output.detach().contiguous())]"))  # fmt: skip
bank.slip(2, "no-lane", ("isend(part, peer, lane, tag=tag)", "isend(part, peer, tag=tag)"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.recv(header, peer, tag=tag)"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, tag=tag)"))  # fmt: skip
bank.slip(2, "no-lane", ('lane = launch.lane("gradients")', "lane = None"))
bank.slip(2, "lane-both-ways", ('launch.lane("gradients")', 'launch.lane("activations")'))
bank.slip(
    2,
    "lane-both-ways",
    ('launch.lane("gradients")', 'launch.lane("activations")'),
    ("peer, lane, tag", "peer, group=lane, tag"),
)
bank.slip(2, "message-not-on-gpu", ("(8 - len(sizes)), device=output.device)", "(8 - len(sizes)))"))
bank.slip(2, "message-not-on-gpu", ("dtype=DTYPES[dtype], device=launch.device())", "dtype=DTYPES[dtype])"))
bank.slip(2, "order-not-kept", ("tag=tag) for part in (header, output.detach().contiguous())]",
          "tag=2 * tag + which) for which, part in enumerate((output.detach().contiguous(), header))]"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.recv(header, peer, lane, tag=2 * tag + 1)"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, lane, tag=2 * tag)"))  # fmt: skip
bank.slip(2, None, (", tag=tag", ""))  # two neighbours agree on the order: no tag is needed
bank.slip(2, None, ('launch.lane("gradients")', 'LANE'), ('launch.lane("activations")', 'launch.lane("gradients")'),
          ("LANE", 'launch.lane("activations")'))  # fmt: skip
bank.slip(
    2,
    "kept",
    ("    sizes = ", "    KEPT.append(output)\n    sizes = "),
    ("def send_activation", "KEPT = []\n\n\ndef send_activation"),
)
bank.slip(
    2, "header-large", ("[0] * (8 - len(sizes))", "[0] * (80 - len(sizes))"), ("torch.empty(8, ", "torch.empty(80, ")
)
bank.slip(2, "gradient-header", ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
          "return send_activation(received.grad, peer, tag)"),
          ("    gradient = torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)\n"
           "    dist.recv(gradient, peer, lane, tag=tag)\n    return gradient", "    return receive_activation(peer, tag).detach()"))  # fmt: skip
bank.slip(2, "work-dropped", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "dist.isend(header, peer, lane, tag=tag)\n    return [dist.isend(output.detach().contiguous(), peer, lane, tag=tag)]"))  # fmt: skip
bank.slip(
    2, "receive-not-waited", ("dist.recv(received, peer, lane, tag=tag)", "dist.irecv(received, peer, lane, tag=tag)")
)
bank.slip(
    2, "receive-not-waited", ("dist.recv(gradient, peer, lane, tag=tag)", "dist.irecv(gradient, peer, lane, tag=tag)")
)
bank.slip(2, "send-waits", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "dist.send(header, peer, lane, tag=tag)\n    dist.send(output.detach().contiguous(), peer, lane, tag=tag)\n    return []"),
          ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
           "dist.send(received.grad.contiguous(), peer, lane, tag=tag)\n    return []"))  # fmt: skip
bank.slip(2, "values-lost", ("output.detach().contiguous()", "output.detach().contiguous().zero_()"))

# other tags for header and body; a list of objects as header; a wait by hand
bank.slip(2, None, ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "return [dist.isend(header, peer, lane, tag=2 * tag), dist.isend(output.data.contiguous(), peer, lane, tag=2 * tag + 1)]"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.irecv(header, peer, lane, tag=2 * tag).wait()"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.irecv(received, peer, lane, tag=2 * tag + 1).wait()"))  # fmt: skip
bank.text(
    2,
    None,
    """
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

def send_activation(output, peer, tag=0):
    with torch.no_grad():
        body = output.contiguous()
    text = torch.full((7,), -1, dtype=torch.int64)
    text[0] = CODES[output.dtype]
    text[1:1 + output.ndim] = torch.tensor(output.size())
    first = dist.isend(text.to(output.device), dst=peer, group=launch.lane("activations"), tag=tag)
    second = dist.isend(body.detach(), dst=peer, group=launch.lane("activations"), tag=tag)
    return (first, second)

def receive_activation(peer, tag=0):
    text = torch.zeros(7, dtype=torch.int64, device=launch.device())
    dist.recv(text, src=peer, group=launch.lane("activations"), tag=tag)
    code, *sizes = text.tolist()
    buffer = torch.zeros([n for n in sizes if n >= 0], dtype=DTYPES[code], device=launch.device())
    dist.recv(buffer, src=peer, group=launch.lane("activations"), tag=tag)
    if buffer.dtype.is_floating_point:
        buffer.requires_grad = True
    return buffer

def send_gradient(received, peer, tag=0):
    gradient, received.grad = received.grad, None
    return [dist.isend(gradient.contiguous(), peer, launch.lane("gradients"))]

def receive_gradient(output, peer, tag=0):
    gradient = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
    dist.recv(gradient, peer, launch.lane("gradients"))
    return gradient
""",
)
bank.text(
    2,
    None,
    '''
class Sending:
    """One work for both messages."""
    def __init__(self, *tensors, peer, tag, lane="activations"):
        self.tensors = tensors
        self.works = [dist.isend(t, peer, group=launch.lane(lane), tag=tag) for t in tensors]
    def wait(self):
        for work in self.works:
            work.wait()
        self.tensors = None

def send_activation(output, peer, tag=0):
    x = output.detach()
    head = [x.dim(), DTYPES.index(x.dtype)] + list(x.shape)
    head = torch.tensor(head + (10 - len(head)) * [1])
    return [Sending(head.to(launch.device()), x if x.is_contiguous() else x.contiguous(), peer=peer, tag=tag)]

def receive_activation(peer, tag=0):
    head = torch.empty(10, dtype=torch.long, device=launch.device())
    dist.recv(head, peer, group=launch.lane("activations"), tag=tag)
    n, code = int(head[0]), int(head[1])
    x = torch.empty(tuple(head[2:2 + n].tolist()), dtype=DTYPES[code], device=launch.device(),
                    requires_grad=DTYPES[code].is_floating_point)
    with torch.no_grad():
        dist.recv(x.data, peer, group=launch.lane("activations"), tag=tag)
    return x

def send_gradient(received, peer, tag=0):
    return [Sending(received.grad.contiguous(), peer=peer, tag=tag, lane="gradients")]

def receive_gradient(output, peer, tag=0):
    with torch.no_grad():
        gradient = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        dist.recv(gradient, peer, group=launch.lane("gradients"), tag=tag)
    return gradient
''',
)
bank.slip(2, "tag-differs", ("return [dist.isend(part, peer, lane, tag=tag)", "return [dist.isend(part, peer, lane)"))
bank.slip(2, "tag-differs", ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, lane)"))
bank.slip(
    2, "tag-differs", ("received.grad.contiguous(), peer, lane, tag=tag", "received.grad.contiguous(), peer, lane")
)

"""Answers to balise 5: the time of a step."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 5, whole=True)

BY_LAYERS = """
def stage_time(model, layout, cluster):
    tokens, h, t = model.sequence * layout.micro_batch, model.width, layout.tensor
    def product(rows, columns):
        return 2 * tokens * rows * columns / t / cluster.products / cluster.peak
    forward = product(h, 12 * h) + 2 * product(model.sequence, h)
    again = layout.recomputation == "full"
    bytes_moved = cluster.traffic * planner.layer_bytes(model, layout, again=True)
    compute = (3 + again) * (forward + bytes_moved / 3 / cluster.card.bandwidth)
    one = 2 * planner.reduce_scatter(2 * tokens * h, t, cluster.inside(t))
    waits = 0.0
    for layer in range(model.layers // layout.pipeline):
        waits += 2 * one * (1 + again)
        for width in (3 * h, 4 * h):
            waits += max(0.0, one - product(h, width)) if layout.overlap else one
    return [compute * (model.layers // layout.pipeline), waits]


def data_time(n, layout, cluster, beside):
    near = 1
    while layout.data % (near * 2) == 0 and (cluster.node // layout.tensor) % (near * 2) == 0:
        near *= 2
    nodes = layout.data // near
    def way(size):
        inside = planner.reduce_scatter(size, near, cluster.inside(near))
        return inside + planner.all_gather(size / near, nodes, cluster.between)
    back = way(2 * n) if layout.zero else way(4 * n)
    left = way(4 * n) + back
    if layout.overlap:
        left = left - beside if left > beside else 0.0
    return left


def step_time(model, layout, cluster):
    compute, tensor = stage_time(model, layout, cluster)
    m, p, t = layout.micro_batches, layout.pipeline, layout.tensor
    tokens = model.sequence * layout.micro_batch
    found = {"compute": m * compute, "tensor": m * tensor, "bubble": (p - 1) * (compute + tensor) / layout.chunks}
    found["compute"] += m * 6 * tokens * model.width * model.vocabulary / t / (cluster.products * cluster.peak)
    found["pipeline"] = 0.0
    if p > 1:
        link = cluster.between if layout.ranks > cluster.node else cluster.inside(2)
        one = link.latency + 2 * tokens * model.width / t / link.bandwidth
        found["pipeline"] = 2 * (p - 1) * one
        if not layout.overlap:
            found["pipeline"] += 2 * m * layout.chunks * one
    found["data"] = data_time(stage_parameters(model, layout, 0)[0], layout, cluster, compute * 2 / 3)
    return found
"""
bank.text(None, BY_LAYERS)

BY_HAND = """
def ring(size, n, link):
    return (n - 1) * (link.latency + size / n / link.bandwidth)

def stage_time(model, layout, cluster):
    b, s, h = layout.micro_batch, model.sequence, model.width
    passes = {"none": 3, "full": 4}[layout.recomputation]
    flops = passes * (24 * b * s * h * h + 4 * b * s * s * h)
    held = planner.layer_bytes(model, layout, again=True) * cluster.traffic * passes / 3
    own = flops / layout.tensor / (cluster.products * cluster.peak) + held / cluster.card.bandwidth
    size = 2 * b * s * h
    one = 2 * ring(size, layout.tensor, cluster.inside(layout.tensor))
    sums = [one] * (2 * (passes - 1))
    if layout.overlap:
        for k, n in enumerate((3, 4)):
            sums[k] -= min(one, n * size * h / layout.tensor / (cluster.products * cluster.peak))
    layers = model.layers // layout.pipeline
    return layers * own, layers * sum(sums)

def data_time(n, layout, cluster, beside):
    near = math.gcd(cluster.node // layout.tensor, layout.data)
    size = n * (6 if layout.zero > 0 else 8)
    total = (near - 1) * (2 * cluster.inside(near).latency + size / near / cluster.inside(near).bandwidth)
    far = layout.data // near
    total += (far - 1) * (2 * cluster.latency + size / layout.data / cluster.card.network)
    return max(total - beside * layout.overlap, 0.0)

def step_time(model, layout, cluster):
    parts = dict.fromkeys(("compute", "tensor", "bubble", "pipeline", "data"), 0.0)
    compute, tensor = stage_time(model, layout, cluster)
    cells = model.sequence * layout.micro_batch * model.width / layout.tensor
    for _ in range(layout.micro_batches):
        parts["compute"] += compute + 6 * cells * model.vocabulary / cluster.products / cluster.peak
        parts["tensor"] += tensor
    parts["bubble"] = (layout.pipeline - 1) * (compute + tensor) / layout.chunks
    near = layout.ranks <= cluster.node
    speed = cluster.inside(2).bandwidth if near else cluster.card.network
    messages = layout.pipeline - 1
    if messages and not layout.overlap:
        messages += layout.micro_batches * layout.chunks
    parts["pipeline"] = 2 * messages * (cluster.latency + 2 * cells / speed)
    n, _ = stage_parameters(model, layout, 0)
    parts["data"] = data_time(n, layout, cluster, 2 * compute / 3)
    return parts
"""
bank.text(None, BY_HAND)
bank.text(None, "import numpy as np\n" + BY_HAND.replace("return layers * own, layers * sum(sums)", "return layers * np.array([own, sum(sums)])"))  # fmt: skip

bank.slip("nothing-returned", ("    return max(0.0, seconds - beside) if layout.overlap else seconds\n", "    seconds -= beside\n"))  # fmt: skip

bank.hint(
    "planner-called",
    "The planner already has this in `{name}`. Here you write it yourself; you may use the planner's collectives.",
)
bank.text("planner-called", BY_LAYERS.replace("    m, p, t = layout.micro", "    planner.step_time(model, layout, cluster)\n    m, p, t = layout.micro"))  # fmt: skip
bank.slip("planner-called", ("(24 * b * s * h**2 + 4 * b * s**2 * h)", "model.flops(b) / model.layers / 3.0"))
bank.slip("planner-called", ("(24 * b * s * h**2 + 4 * b * s**2 * h)", "model.flops(b) / model.layers / 3"))
bank.variant("planner-called", BY_HAND, ("    near = math.gcd", "    planner.layer_time(None, layout, cluster)\n    near = math.gcd"))  # fmt: skip

bank.hint(
    "stage-time-form",
    "`stage_time` must return two numbers of seconds: computing, and waiting for tensor ranks. You returned {got}.",
)
bank.slip("stage-time-form", ("cluster.card.bandwidth), layers * (", "cluster.card.bandwidth) + layers * ("))
bank.variant("stage-time-form", BY_LAYERS, ("return [compute *", "return waits + sum([compute *"), (", waits]", "])"))

bank.hint("data-time-form", "`data_time` must return one number of seconds. You returned {got}.")
bank.slip("data-time-form", ("if layout.overlap else seconds\n", "if layout.overlap else (seconds, sizes)\n"))
bank.variant("data-time-form", BY_LAYERS, ("    return left", "    return [left]"))

bank.hint(
    "step-form",
    'Return a dict with "compute", "tensor", "bubble", "pipeline" and "data", all five. You returned {got}.',
)
bank.slip("step-form", ("    return found\n", "    return sum(found.values())\n"))  # fmt: skip
bank.variant("step-form", BY_LAYERS, ("    return found", "    return sum(found.values())"))

bank.hint(
    "wrong-stage",
    "{where}: you get {got}, but {expected} are expected. Each layer computes its "
    "products, then moves its bytes; its all-reduces take their `total`, minus what is "
    "`hidden`.",
)
bank.slip("wrong-stage", ("24 * b * s", "12 * b * s"))
bank.slip("wrong-stage", ("24 * b * s * h**2", "24 * b * s * h"))
bank.variant("wrong-stage", BY_LAYERS, ("product(h, 12 * h)", "product(h, 24 * h)"))

bank.hint(
    "backward-once",
    "A backward has twice the operations of a forward, since it computes two gradients: together three times a "
    "forward.",
)
bank.slip("backward-once", ("(4 if full else 3)", "(3 if full else 2)"))
bank.variant("backward-once", BY_HAND, ("flops = passes", "flops = (passes - 1)"))

bank.hint("peak-alone", "No product reaches the card's peak, only the share `cluster.products` of it.")
bank.slip("peak-alone", ("cluster.products * cluster.peak\n", "cluster.peak\n"))
bank.variant(
    "peak-alone",
    BY_HAND,
    ("flops / layout.tensor / (cluster.products * cluster.peak)", "flops / layout.tensor / cluster.peak"),
)

bank.hint("one-layer", "These are the seconds of one layer: a stage has `layers / pipeline` of them.")
bank.slip("one-layer", ("layers = model.layers // layout.pipeline", "layers = 1"))
bank.variant("one-layer", BY_HAND, ("layers = model.layers // layout.pipeline", "layers = 1"))

bank.hint("micro-batch-size", "Time one micro-batch, of `layout.micro_batch` sequences: neither one sequence nor all "
                           "of a step."
)  # fmt: skip
bank.slip("micro-batch-size", ("model.sequence, layout.micro_batch, model.width, layout.tensor\n    full", "model.sequence, 1, model.width, layout.tensor\n    full"))  # fmt: skip
bank.slip("micro-batch-size", ("model.sequence, layout.micro_batch, model.width, layout.tensor\n    full", "model.sequence, layout.micro_batch * layout.micro_batches, model.width, layout.tensor\n    full"))  # fmt: skip
bank.variant("micro-batch-size", BY_HAND, ("b, s, h = layout.micro_batch,", "b, s, h = 1,"))

bank.hint("stage-swapped", "The two numbers are swapped: first computing, then the sums over tensor ranks.")
bank.slip("stage-swapped", ("return layers * (products + moved / cluster.card.bandwidth), layers * ((6 if full else 4) * total - hidden)", "return layers * ((6 if full else 4) * total - hidden), layers * (products + moved / cluster.card.bandwidth)"))  # fmt: skip
bank.variant(
    "stage-swapped", BY_HAND, ("return layers * own, layers * sum(sums)", "return layers * sum(sums), layers * own")
)

bank.hint("all-layers", "You counted all layers of the model. A stage has only its share of them.")
bank.slip("all-layers", ("layers = model.layers // layout.pipeline", "layers = model.layers"))
bank.variant("all-layers", BY_HAND, ("layers = model.layers // layout.pipeline", "layers = model.layers"))

bank.hint("traffic-forgotten",
    "Norms, dropouts and the like take time too: their bytes go `cluster.traffic` times through the card's memory.",
)  # fmt: skip
bank.slip("traffic-forgotten", ("(products + moved / cluster.card.bandwidth)", "products"))
bank.slip("traffic-forgotten", ("cluster.traffic * planner", "planner"))
bank.variant("traffic-forgotten", BY_LAYERS, ("+ bytes_moved / 3 / cluster.card.bandwidth", ""))

bank.hint("larger-one",
    "You took the larger of products and bytes. A layer does one after the other: norms wait for products and "
    "products for norms, so the seconds add up.",
)  # fmt: skip
bank.slip(
    "larger-one", ("(products + moved / cluster.card.bandwidth)", "max(products, moved / cluster.card.bandwidth)")
)
bank.variant(
    "larger-one",
    BY_HAND,
    (
        "own = flops / layout.tensor / (cluster.products * cluster.peak) + held / cluster.card.bandwidth",
        "own = max(flops / layout.tensor / (cluster.products * cluster.peak), held / cluster.card.bandwidth)",
    ),
)

bank.hint(
    "tensor-undivided",
    "Each of the t ranks computes 1 / t of the products. The planner's bytes of a layer already are those of one rank.",
)
bank.slip("tensor-undivided", ("4 * b * s**2 * h) / t / speed", "4 * b * s**2 * h) / speed"))
bank.slip("tensor-undivided", ("cluster.traffic * planner", "cluster.traffic / t * planner"))
bank.variant("tensor-undivided", BY_HAND, ("flops / layout.tensor /", "flops /"))

bank.hint("sums-miscounted",
    "A layer has two all-reduces in forward and two in backward, each of 2·b·s·h bytes, which every rank has "
    "whole; a recomputed forward has two more. They take `cluster.inside(t)`.",
)  # fmt: skip
bank.slip("sums-miscounted", ("(6 if full else 4) * total", "(3 if full else 2) * total"))
bank.slip("sums-miscounted", ("(6 if full else 4) * total", "4 * total"))
bank.slip("sums-miscounted", ("planner.all_reduce(2 * b * s * h, t", "planner.all_reduce(2 * b * s * h / t, t"))
bank.slip("sums-miscounted", ("planner.all_reduce(2 * b * s * h, t", "planner.all_reduce(b * s * h, t"))
bank.variant("sums-miscounted", BY_HAND, ("[one] * (2 * (passes - 1))", "[one] * (passes - 1)"))

bank.hint(
    "again-not-computed",
    'With recomputation "full" each layer computes its forward twice: products, memory traffic (4/3 of `layer_bytes(…, again=True)`) and sums.',
)
bank.slip("again-not-computed", ("(4 if full else 3)", "3"))
bank.slip("again-not-computed", ("(4 / 3 if full else 1)", "1"))
bank.slip(
    "again-not-computed", ("(4 if full else 3)", "3"), ("(4 / 3 if full else 1)", "1"), ("(6 if full else 4)", "4")
)
bank.variant("again-not-computed", BY_HAND, ('{"none": 3, "full": 4}', '{"none": 3, "full": 3}'))

bank.hint("hidden-wrong",
    "With overlap, only the two sums of backward are hidden, in every layer: each by the product beside it (3 h · "
    "h and 4 h · h, at the speed of all products), and never by more time than the sum itself takes.",
)  # fmt: skip
bank.slip("hidden-wrong", ("if layout.overlap else 0\n", "\n"))
bank.slip("hidden-wrong", ("sum(min(total, 2 * b * s * n * h * h / t / speed) for n in (3, 4))", "2 * total"))
bank.slip("hidden-wrong", ("min(total, 2 * b * s * n * h * h / t / speed)", "2 * b * s * n * h * h / t / speed"))
bank.slip("hidden-wrong", ("if layout.overlap else 0\n", "* 0\n"))
bank.slip("hidden-wrong", ("sum(min(total, 2 * b * s * n * h * h / t / speed) for n in (3, 4))", "min(2 * total, 14 * b * s * h * h / t / speed)"))  # fmt: skip
bank.variant("hidden-wrong", BY_HAND, ("sums[k] -= min(one, n * size * h / layout.tensor / (cluster.products * cluster.peak))", "sums[k] = 0"))  # fmt: skip
bank.variant("hidden-wrong", BY_LAYERS, ("max(0.0, one - product(h, width)) if layout.overlap else one", "one"))

bank.hint(
    "wrong-data",
    "{where}: you get {got}, but {expected} are expected. `n` already counts only one rank's gradients, and each "
    "of them is sent once a step.",
)
bank.slip("wrong-data", ("sizes = 4 * n,", "sizes = 24 * n,"))
bank.variant("wrong-data", BY_HAND, ("(6 if layout.zero > 0 else 8)", "(26 if layout.zero > 0 else 28)"))

bank.hint("node-unused",
    "Ranks of one node reduce over `cluster.inside` first, and only what is left goes over `cluster.between`: pass "
    "(size, nodes, ranks in a node, inside, between).",
)  # fmt: skip
bank.slip("node-unused", ("near = math.gcd(layout.data, cluster.node // layout.tensor)", "near = 1"))
bank.variant("node-unused", BY_HAND, ("near = math.gcd(cluster.node // layout.tensor, layout.data)", "near = 1"))

bank.hint(
    "way-back",
    "Reducing is only half of the work: then the gradients (ZeRO 0: 4 bytes each) or the parameters (ZeRO 1: 2 "
    "bytes) are gathered.",
)
bank.slip("way-back", ("sizes = 4 * n, (2 if layout.zero else 4) * n", "sizes = 4 * n, 4 * n"))
bank.slip("way-back", ("sizes = 4 * n, (2 if layout.zero else 4) * n", "sizes = (4 * n,)"))
bank.slip("way-back", ("sizes = 4 * n, (2 if layout.zero else 4) * n", "sizes = 2 * n, 2 * n"))
bank.slip("way-back", ("sizes = 4 * n, (2 if layout.zero else 4) * n", "sizes = 4 * n, 2 * n"))
bank.variant("way-back", BY_LAYERS, ("back = way(2 * n) if layout.zero else way(4 * n)", "back = way(4 * n)"))
bank.variant("way-back", BY_HAND, ("(6 if layout.zero > 0 else 8)", "4"))

bank.hint("node-crowded",
    "A node holds at most `node // tensor` ranks of a data group: the other tensor ranks sit between them.",
)  # fmt: skip
bank.slip("node-crowded", ("cluster.node // layout.tensor", "cluster.node"))
bank.variant("node-crowded", BY_HAND, ("math.gcd(cluster.node // layout.tensor, layout.data)", "math.gcd(cluster.node, layout.data)"))  # fmt: skip

bank.hint("node-uneven",
    "Each node has equally many ranks of a data group: 6 ranks in nodes with room for 4 are 2 in each of three "
    "nodes, not 4 and 2.",
)  # fmt: skip
bank.slip("node-uneven", ("math.gcd(layout.data, cluster.node // layout.tensor)", "min(layout.data, cluster.node // layout.tensor)"))  # fmt: skip
bank.variant("node-uneven", BY_HAND, ("math.gcd(cluster.node // layout.tensor, layout.data)", "min(cluster.node // layout.tensor, layout.data)"))  # fmt: skip

bank.hint("data-hiding",
    "With overlap, `beside` seconds of the communication are hidden, but no more than it takes: what is left is "
    "never below 0. Without overlap nothing is hidden.",
)  # fmt: skip
bank.slip("data-hiding", ("max(0.0, seconds - beside) if layout.overlap else seconds", "seconds"))
bank.slip("data-hiding", ("max(0.0, seconds - beside)", "seconds - beside"))
bank.slip("data-hiding", ("max(0.0, seconds - beside)", "0.0"))
bank.slip("data-hiding", (" if layout.overlap else seconds\n", "\n"))
bank.variant("data-hiding", BY_LAYERS, ("left - beside if left > beside else 0.0", "left - beside"))
bank.variant("data-hiding", BY_HAND, ("return max(total - beside * layout.overlap, 0.0)", "return total"))

bank.hint(
    "wrong-step",
    "{where}: you get {got}, but {expected} are expected. Which of the five parts come once "
    "for each of the m micro-batches, and which come once a step?",
)
bank.slip(
    "wrong-step",
    ("waited * message}", "waited * message / 3}"),
    ("    return found\n", '    found["data"] /= 3\n    return found\n'),
)
bank.variant(
    "wrong-step",
    BY_LAYERS,
    ("    return found", '    found["data"] /= 4\n    found["bubble"] /= 3\n    return found'),
)

bank.hint(
    "head-once",
    "Every micro-batch goes through the head: count its operations m times, divided among the t ranks, at the "
    "speed of the layers.",
)
bank.slip("head-once", ("m * (compute + head)", "m * compute + head"))
bank.slip("head-once", ("m * (compute + head)", "m * compute"))
bank.slip("head-once", ("head = 6 *", "head = 2 *"))
bank.slip("head-once", ("model.vocabulary / t /", "model.vocabulary /"))
bank.variant("head-once", BY_LAYERS, ('found["compute"] += m * 6', 'found["compute"] += 6'))

bank.hint("tensor-once", "Each of the m micro-batches waits for its own sums: multiply the stage's second number by m.")
bank.slip("tensor-once", ('"tensor": m * tensor', '"tensor": tensor'))
bank.variant("tensor-once", BY_HAND, ('parts["tensor"] += tensor', 'parts["tensor"] = tensor'))

bank.hint("data-given",
    "You call `data_time` with wrong arguments. Pass the first number of `stage_parameters` for the first stage, "
    "and 2/3 of the first number of `stage_time`. Its result is the whole entry, once a step.",
)  # fmt: skip
bank.slip("data-given", ("n = stage_parameters(model, layout, 0)[0]", "n = stage_parameters(model, layout, 0)[1]"))
bank.slip("data-given", ("n = stage_parameters(model, layout, 0)[0]", "n = stage_parameters(model, layout, p - 1)[0]"))
bank.variant("data-given", BY_LAYERS, ("stage_parameters(model, layout, 0)[0]", "model.n_parameters"))

bank.hint(
    "bubble-wrong",
    "A stage waits for (p − 1) / v times the time that a micro-batch takes on it, with its sums, without the head: "
    "the number of micro-batches does not matter.",
)
bank.slip("bubble-wrong", ("(p - 1) / v * (compute + tensor)", "(p - 1) * (compute + tensor)"))
bank.slip("bubble-wrong", ("(p - 1) / v * (compute + tensor)", "(p - 1) / v * compute"))
bank.slip("bubble-wrong", ("(p - 1) / v * (compute + tensor)", "(p - 1) / v * m * (compute + tensor)"))
bank.slip("bubble-wrong", ("(p - 1) / v * (compute + tensor)", "p / v * (compute + tensor)"))
bank.variant("bubble-wrong", BY_HAND, ("* (compute + tensor) / layout.chunks", "* (compute + tensor)"))

bank.hint("messages-wrong",
    "Filling and emptying the pipeline waits for 2 (p − 1) messages; without overlap each micro-batch and chunk "
    "waits for 2 more. A single stage sends none. A message takes its latency, and the time for 2·b·s·h / t bytes.",
)  # fmt: skip
bank.slip("messages-wrong", ("0 if p == 1 else 2 * (p - 1) + (0 if layout.overlap else 2 * m * v)", "2 * (p - 1)"))
bank.slip("messages-wrong", ("0 if p == 1 else ", ""))
bank.slip("messages-wrong", ("(0 if layout.overlap else 2 * m * v)", "2 * m * v"))
bank.slip("messages-wrong", ("2 * tokens * model.width / t / link", "2 * tokens * model.width / link"))
for count in ("2 * (p - 1) + (0 if layout.overlap else m * v)", "2 * (p - 1) + (0 if layout.overlap else 2 * m)", "2 * (p - 1) if layout.overlap else 2 * m * v", "p - 1 + (0 if layout.overlap else 2 * m * v)", "2 * p + (0 if layout.overlap else 2 * m * v)"):  # fmt: skip
    bank.slip("messages-wrong", ("2 * (p - 1) + (0 if layout.overlap else 2 * m * v)", count))
bank.slip("messages-wrong", ("message = link.latency + 2", "message = 2"))
bank.variant("messages-wrong", BY_HAND, ("if messages and not layout.overlap:", "if messages:"))

bank.hint(
    "wrong-link",
    "Stages are far apart: as soon as a layout has more ranks than a node, their messages go over `cluster.between`.",
)
bank.slip("wrong-link", ("if layout.ranks <= cluster.node else cluster.between", ""))
bank.slip("wrong-link", ("layout.ranks <= cluster.node", "t * p <= cluster.node"))
bank.slip("wrong-link", ("layout.ranks <= cluster.node", "layout.ranks < cluster.node"))
bank.slip("wrong-link", ("cluster.inside(2) if layout.ranks <= cluster.node else cluster.between", "cluster.between"))
bank.variant("wrong-link", BY_LAYERS, ("cluster.between if layout.ranks > cluster.node else cluster.inside(2)", "cluster.inside(2)"))  # fmt: skip

bank.hint(
    "beside-wrong",
    "The gradients are sent only beside the last micro-batch's backward, which is 2/3 of what it computes on a "
    "stage: earlier micro-batches only add up.",
)
bank.slip("beside-wrong", ("2 / 3 * compute", "2 / 3 * m * compute"))
bank.slip("beside-wrong", ("2 / 3 * compute", "compute"))
bank.slip("beside-wrong", ("2 / 3 * compute", "0"))
bank.variant("beside-wrong", BY_LAYERS, ("compute * 2 / 3)", "compute)"))

"""Answers to balise 8 of 04_profiler: the longest batch first, and what the autotuner saves."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 8, whole=True)

SAVES = """

def autotuner_saves(shapes, search, usual, best):
    return len(shapes) * (usual - best) - len(set(shapes)) * search
"""

TWIN = """
def reserve(model, batch_of, lengths):
    state, others = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    twin = copy.deepcopy(model)
    inputs, labels = batch_of(sorted(lengths)[-1])
    nn.CrossEntropyLoss()(twin(inputs), labels).backward()
    torch.set_rng_state(state)
    if others:
        torch.cuda.set_rng_state_all(others)


def autotuner_saves(shapes, search, usual, best):
    seen, saved = {}, 0.0
    for shape in shapes:
        if tuple(shape) not in seen:
            saved -= search
        seen[tuple(shape)] = True
        saved += usual - best
    return saved
"""
bank.text(None, TWIN)

bank.hint("not-in-state-dict", "The buffer {name} has changed. It is registered with persistent=False: state_dict() "
          "leaves it out, buffers() doesn't.")  # fmt: skip
bank.text(
    "not-in-state-dict",
    """
def reserve(model, batch_of, lengths):
    before = copy.deepcopy(model.state_dict())
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
    del loss
    model.load_state_dict(before)
    for p in model.parameters():
        p.grad = None


def autotuner_saves(shapes, search, usual, best):
    from collections import Counter
    return sum(n * (usual - best) - search for n in Counter(map(tuple, shapes)).values())
""",
)

bank.text(  # modules one by one, with the buffers that state_dict() leaves out
    None,
    """
def reserve(model, batch_of, lengths):
    before = [(m, name, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    for m, name, b in before:
        getattr(m, name).data.copy_(b)
    for p in model.parameters():
        p.grad = None
"""
    + SAVES,
)

bank.text(
    None,
    """
def reserve(model, batch_of, lengths):
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        inputs, labels = batch_of(max(lengths))
        loss = -model(inputs).log_softmax(1)[torch.arange(len(labels)), labels].mean()
        torch.autograd.grad(loss, list(model.parameters()))
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
"""
    + SAVES,
)

bank.hint("never-ran", "You didn't call the model. Memory is reserved only for what really runs.")
bank.slip("never-ran", ("        F.cross_entropy(model(inputs), labels).backward()\n", ""), variant=True)

bank.hint("not-longest", "You called the model with a batch of length {length}, but the longest length is {longest}.")
bank.slip("not-longest", ("max(lengths)", "min(lengths)"))

bank.slip("not-longest", ("max(lengths)", "lengths[0]"))

bank.slip("not-longest", ("max(lengths)", "19"), variant=True)

bank.hint("every-length", "You called the model {n} times. One batch, the longest, is enough.")
bank.slip("every-length", ("        inputs, labels = batch_of(max(lengths))\n        F.cross_entropy(model(inputs), labels).backward()\n",
                              "        for length in sorted(lengths, reverse=True):\n            inputs, labels = batch_of(length)\n            F.cross_entropy(model(inputs), labels).backward()\n"), variant=True)  # fmt: skip

bank.hint("not-recorded", "The forward pass ran without recording. Activations are then freed at once, and too "
          "little is reserved.")  # fmt: skip
bank.slip(
    "not-recorded",
    (
        "        F.cross_entropy(model(inputs), labels).backward()\n",
        "        with torch.no_grad():\n            model(inputs)\n",
    ),
    variant=True,
)

bank.hint("part-of-batch", "Only {n} of the batch's 4 rows went through the model. A full batch needs more memory.")
bank.slip(
    "part-of-batch",
    ("F.cross_entropy(model(inputs), labels)", "F.cross_entropy(model(inputs[:2]), labels[:2])"),
    variant=True,
)

bank.hint("backward-in-part", "The backward pass ended before it reached the first layer, so nothing is reserved for "
          "the rest of it.")  # fmt: skip
bank.slip(
    "backward-in-part",
    (
        "F.cross_entropy(model(inputs), labels).backward()",
        "torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters())[-1])",
    ),
    variant=True,
)

bank.hint("batch-kept", "The batch, or the graph of its pass, is still held. No step can use that memory.")
bank.slip(
    "batch-kept",
    (
        "F.cross_entropy(model(inputs), labels).backward()",
        "reserve.loss = F.cross_entropy(model(inputs), labels)\n        reserve.loss.backward(retain_graph=True)",
    ),
)

bank.slip("batch-kept", ("        F.cross", "        reserve.batch = inputs\n        F.cross"), variant=True)

bank.hint("no-backward", "There was no backward pass, so nothing is reserved for the gradients and the memory that "
          "it needs on the way.")  # fmt: skip
bank.slip("no-backward", ("labels).backward()", "labels)"), variant=True)

bank.hint("other-mode", "You ran the model in eval mode. The following steps run in the mode in which the model "
          "arrived, and only that mode needs the same memory.")  # fmt: skip
bank.slip("other-mode", ("    buffers = [", "    model.eval()\n    buffers = ["), variant=True)

bank.hint("left-in-mode", "The model arrived in one mode and is now in the other.")
bank.slip("left-in-mode", ("    buffers = [", "    model.train()\n    buffers = ["), variant=True)

bank.hint("parameters-changed", "The parameters have changed. Don't make an optimizer step: it would learn from a "
          "made-up batch.")  # fmt: skip
bank.slip(
    "parameters-changed",
    (
        "    model.zero_grad(set_to_none=True)\n",
        "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n    model.zero_grad(set_to_none=True)\n",
    ),
    variant=True,
)

bank.hint("gradients-left", "Gradients are left ({what}). The first step would add to them, and they take memory. "
          "Use zero_grad with set_to_none=True.")  # fmt: skip
bank.slip("gradients-left", ("    model.zero_grad(set_to_none=True)\n", ""))

bank.slip("gradients-left", ("set_to_none=True", "set_to_none=False"), variant=True)

bank.hint("statistics-changed", "The buffer {name} has changed: batch norms update their statistics in every forward "
          "pass in training mode.")  # fmt: skip
bank.slip("statistics-changed", ("            buffer.copy_(before)\n", "            pass\n"))

bank.slip("statistics-changed", ("buffer.clone()", "buffer"))

bank.slip("not-in-state-dict", ("in model.buffers()]", "in model.state_dict().values()]"), variant=True)

bank.text(
    "statistics-changed",
    """
def reserve(model, batch_of, lengths):
    before = model.state_dict()
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
"""
    + SAVES,
    variant=True,
)

bank.hint("buffers-replaced", "The buffer {name} has the right values but is now another tensor: anything that knows "
          "the old one keeps using that. Copy the values back into it.")  # fmt: skip
bank.text(
    "buffers-replaced",
    """
def reserve(model, batch_of, lengths):
    kept = {name: buffer.clone() for name, buffer in model.norm.named_buffers()}
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad(set_to_none=True)
    for name, buffer in kept.items():
        setattr(model.norm, name, buffer)
"""
    + SAVES,
    variant=True,
)

bank.hint("random-changed", "You leave PyTorch's random number generator in another state, so the training is not "
          "the same as without reserve.")  # fmt: skip
bank.slip("random-changed", ("with torch.random.fork_rng():", "if True:"))

bank.slip("random-changed", ("fork_rng():", "fork_rng(devices=[]):"))  # the processor's alone

bank.slip(None, ("fork_rng():", "fork_rng([p.device for p in model.parameters() if p.is_cuda][:1]):"))

bank.slip("random-changed", ("with torch.random.fork_rng():", "torch.manual_seed(0)\n    if True:"))

bank.slip(
    "random-changed",
    (
        "    with torch.random.fork_rng():\n        inputs, labels = batch_of(max(lengths))\n",
        "    inputs, labels = batch_of(max(lengths))\n    with torch.random.fork_rng():\n",
    ),
)

bank.hint("cache-emptied", "torch.cuda.empty_cache() gives back the memory that you have just reserved.")
bank.slip(
    "cache-emptied",
    (
        "    model.zero_grad(set_to_none=True)\n",
        "    model.zero_grad(set_to_none=True)\n    torch.cuda.empty_cache()\n",
    ),
    variant=True,
)

bank.hint("goes-on-differently", "The next step differs from that of a model without reserve: {what}. Did you change "
          "a setting of the model?")  # fmt: skip
bank.slip(
    "goes-on-differently",
    (
        "    buffers = [",
        '    for m in model.modules():\n        if hasattr(m, "momentum"):\n            m.momentum = 0.0\n    buffers = [',
    ),
)

bank.slip(
    "goes-on-differently",
    ("    model.zero_grad(set_to_none=True)\n", "    model.zero_grad(set_to_none=True)\n    model.dropout.p = 0.0\n"),
    variant=True,
)

bank.hint("not-loss", "The loss is not the mean cross-entropy of the batch.")
bank.slip("not-loss", ("F.cross_entropy(model(inputs), labels).backward()", "model(inputs).sum().backward()"))

bank.slip("not-loss", ("labels).backward()", 'labels, reduction="sum").backward()'), variant=True)

bank.slip(
    "random-changed",
    ("    with torch.random.fork_rng():", "    seed = torch.initial_seed()\n    if True:"),
    ("    model.zero_grad(", "    torch.manual_seed(seed)\n    model.zero_grad("),
    variant=True,
)

bank.hint("search-by-elements", "You treat two shapes with the same number of elements as one. They are different "
          "shapes.")  # fmt: skip
bank.slip("search-by-elements", ("set(shapes)", "{torch.Size(shape).numel() for shape in shapes}"))
bank.variant("search-by-elements", TWIN, ("tuple(shape)", "torch.Size(shape).numel()"))

bank.hint("no-losses", "Here the autotuner costs more than it saves, so the result is negative.")
bank.slip(
    "no-losses",
    (
        "return len(shapes) * (usual - best) - len(set(shapes)) * search",
        "return max(0.0, len(shapes) * (usual - best) - len(set(shapes)) * search)",
    ),
)
bank.variant("no-losses", TWIN, ("return saved", "return max(0.0, saved)"))

bank.hint("search-each-step", "You pay for the search in each step. It is paid once for each new shape.")
bank.slip("search-each-step", ("len(set(shapes)) * search", "len(shapes) * search"))
bank.variant("search-each-step", TWIN, ("if tuple(shape) not in seen", "if True"))

bank.hint("search-once", "You pay for the search only once. It is paid for each new shape: count the different ones.")
bank.slip("search-once", ("len(set(shapes)) * search", "search"))
bank.variant("search-once", TWIN, ("if tuple(shape) not in seen", "if not seen"))

bank.hint("search-forgotten", "You don't pay for the search at all.")
bank.slip("search-forgotten", (" - len(set(shapes)) * search", ""))
bank.variant("search-forgotten", TWIN, ("saved -= search", "saved -= 0.0"))

bank.hint("search-when-changed", "You pay for the search whenever the shape changes. A shape seen before is "
          "remembered.")  # fmt: skip
bank.slip(
    "search-when-changed",
    ("len(set(shapes)) * search", "(1 + sum(a != b for a, b in zip(shapes, shapes[1:]))) * search"),
)
bank.variant("search-when-changed", TWIN, ("seen[tuple(shape)] = True", "seen = {tuple(shape): True}"))

bank.hint("search-by-length", "Two shapes that differ only in the number of images are different shapes, too.")
bank.slip("search-by-length", ("len(set(shapes))", "len({shape[1:] for shape in shapes})"))
bank.variant("search-by-length", TWIN, ("tuple(shape)", "tuple(shape)[1:]"))

bank.hint("one-step-only", "You count the gain of one step. Each step of the run brings it.")
bank.slip("one-step-only", ("len(shapes) * (usual - best)", "(usual - best)"))
bank.variant(
    "one-step-only", TWIN, ("        saved += usual - best\n    return saved", "    return saved + usual - best")
)

bank.hint("sign", "The sign is wrong: the result is positive when the autotuner saves time.")
bank.slip(
    "sign",
    (
        "return len(shapes) * (usual - best) - len(set(shapes)) * search",
        "return len(set(shapes)) * search - len(shapes) * (usual - best)",
    ),
)
bank.variant("sign", TWIN, ("return saved", "return -saved"))

bank.hint("saves-wrong", "The seconds saved are wrong: take the gain of all steps, minus the cost of all searches.")
bank.slip("saves-wrong", ("(usual - best)", "(usual / best)"))

bank.slip("saves-wrong", ("len(shapes) * (usual", "(len(shapes) - len(set(shapes))) * (usual"), variant=True)

bank.hint("no-number", "autotuner_saves must return a number of seconds.")
bank.slip(
    "no-number",
    ("return len(shapes) * (usual - best) - len(set(shapes)) * search", 'return f"{len(shapes) * (usual - best)} s"'),
    variant=True,
)

bank.slip("nothing-returned", ("return len(shapes)", "saved = len(shapes)"))

bank.hint("every-batch-made", "You made batches of {n} lengths. The lengths are known: make one batch, with the "
          "longest.")  # fmt: skip
bank.slip(
    "every-batch-made",
    (
        "inputs, labels = batch_of(max(lengths))",
        "inputs, labels = max(map(batch_of, lengths), key=lambda b: b[0].shape[1])",
    ),
    variant=True,
)

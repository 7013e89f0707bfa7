"""Answers to balise 5 of 20_deepspeed_and_friends: 1-bit Adam."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 5, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# bits and scales in one message, as bytes; signs as 2 · bit − 1; a server for each row of the message
ONE_MESSAGE = """
def compress(x):
    return pack(x > 0), torch.linalg.vector_norm(x, 1, -1, keepdim=True) / x.shape[-1]


def expand(bits, scales):
    return (2.0 * unpack(bits) - 1) * scales


def as_bytes(x):
    bits, scales = compress(x)
    return torch.cat([bits, scales.view(torch.uint8)], -1)


def from_bytes(message):
    return expand(message[..., :-4].contiguous(), message[..., -4:].contiguous().view(torch.float32))


def one_bit_mean(x, worker_error, server_error):
    worker_error += x
    message = as_bytes(worker_error)
    worker_error -= from_bytes(message)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message.contiguous())
    server_error += sum(from_bytes(row) for row in received) / len(received)
    message = as_bytes(server_error)
    server_error -= from_bytes(message)
    return from_bytes(gather(message))


def one_bit_adam(state, gradient, lr, warmup, beta1=0.9, beta2=0.999, epsilon=1e-8):
    t = state.steps = state.steps + 1
    if t > warmup:
        state.mean[:] = one_bit_mean(beta1 * state.mean + (1 - beta1) * gradient, state.worker_error, state.server_error)
    else:
        whole = gather(gradient).mean(0)
        state.mean[:] = beta1 * state.mean + (1 - beta1) * whole
        state.squares[:] = beta2 * state.squares + (1 - beta2) * whole * whole
        state.root[:] = (state.squares / (1 - beta2**t)) ** 0.5 + epsilon
    state.weights -= lr / (1 - beta1**t) * state.mean / state.root
"""
bank.text(None, ONE_MESSAGE)

# messages between pairs of ranks; the warm-up goes through reduce-scatter's like, a sum of what swap brings
IN_PAIRS = """
def compress(x):
    size = x.abs().sum(-1, keepdim=True) / x.size(-1)
    return pack(torch.signbit(x).logical_not()), size


def expand(bits, scales):
    signs = unpack(bits).to(scales.dtype).mul_(2).sub_(1)
    return signs.mul_(scales)


def sent_around(rows):
    me, n = dist.get_rank(), dist.get_world_size()
    received = rows.clone()
    messages = []
    for other in range(n):
        if other != me:
            messages.append(dist.P2POp(dist.isend, rows[other].contiguous(), other))
            messages.append(dist.P2POp(dist.irecv, received[other], other))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return received


def one_bit_mean(x, worker_error, server_error):
    n = dist.get_world_size()
    bits, scales = compress(x + worker_error)
    worker_error.add_(x).sub_(expand(bits, scales))
    mean = expand(sent_around(bits), sent_around(scales)).sum(0).div_(n)
    bits, scales = compress(mean + server_error)
    server_error.add_(mean).sub_(expand(bits, scales))
    return expand(gather(bits), gather(scales))


def one_bit_adam(state, gradient, lr, warmup, beta1=0.9, beta2=0.999, epsilon=1e-8):
    state.steps += 1
    correction = 1 - beta1**state.steps
    if state.steps <= warmup:
        gradient = gather(sent_around(gradient).mean(0))
        state.mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        state.squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state.root = state.squares.div(1 - beta2**state.steps).sqrt_().add_(epsilon)
    else:
        state.mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        state.mean.copy_(one_bit_mean(state.mean, state.worker_error, state.server_error))
    state.weights.sub_(state.mean.div(correction).div_(state.root), alpha=lr)
"""
bank.text(None, IN_PAIRS)

hint("compress-form", "compress must return a pair: the packed signs, uint8 (…, b / 8), and one scale per "
                         "block, (…, 1). keepdim=True keeps the last dimension.")  # fmt: skip
slip("compress-form", ("x.abs().mean(-1, keepdim=True)", "x.abs().mean(-1)"))
slip("compress-form", ("return pack(x >= 0),", "return x >= 0,"))
slip("compress-form", ("x.abs().mean(-1, keepdim=True)", "x.abs().mean()"))
variant("compress-form", ONE_MESSAGE, ("keepdim=True) / x.shape", "keepdim=False) / x.shape"))

hint(
    "wrong-expansion",
    "compress followed by expand does not give plus or minus the mean absolute value of each block.",
)
slip("wrong-expansion", ("scales, -scales)", "-scales, scales)"))
variant("wrong-expansion", ONE_MESSAGE, ("(2.0 * unpack(bits) - 1)", "(1 - 2.0 * unpack(bits))"))

hint(
    "zero-for-minus",
    "Negative numbers come back as zero. unpack gives True and False: False means minus the scale.",
)
slip("zero-for-minus", ("torch.where(unpack(bits), scales, -scales)", "unpack(bits) * scales"))
variant("zero-for-minus", ONE_MESSAGE, ("(2.0 * unpack(bits) - 1)", "1.0 * unpack(bits)"))

hint(
    "other-scale",
    "The scale is wrong. It must be the mean of the *absolute* values of the block, which loses least of all scales.",
)
slip("other-scale", ("x.abs().mean(-1, keepdim=True)", "x.square().mean(-1, keepdim=True).sqrt()"))
slip("other-scale", ("x.abs().mean(-1, keepdim=True)", "x.abs().amax(-1, keepdim=True)"))
variant(
    "other-scale",
    ONE_MESSAGE,
    ("vector_norm(x, 1, -1, keepdim=True) / x.shape[-1]", "vector_norm(x, 2, -1, keepdim=True) / x.shape[-1] ** 0.5"),
)

hint(
    "mean-form",
    "one_bit_mean must return the numbers of all servers on every rank, (N, k, b), in the order of x. Each server "
    "has one row: gather them.",
)
slip("mean-form", ("return expand(gather(bits), gather(scales))", "return expand(bits, scales)"))
variant("mean-form", ONE_MESSAGE, ("return from_bytes(gather(message))", "return from_bytes(message)"))

hint("errors-not-kept", "After one_bit_mean the {which} is all zeros. Either you did not write it in place with "
                           "copy_ or add_ (binding the name to a new tensor leaves the caller's tensor unchanged), "
                           "or nothing was lost there: compressing one rank's values again, instead of the mean of "
                           "all, rounds nothing.")  # fmt: skip
slip(
    "errors-not-kept",
    ("worker_error.copy_(wanted - expand(bits, scales))", "worker_error = wanted - expand(bits, scales)"),
)
slip("errors-not-kept", ("    server_error.copy_(wanted - expand(bits, scales))\n", ""))
variant("errors-not-kept", ONE_MESSAGE, ("server_error += sum", "server_error = server_error + sum"))

hint(
    "nothing-travels",
    "A rank sends nothing: each rank works only with its own numbers. swap the rows, then gather the servers' results.",
)
NO_WIRE = ("expand(swap(bits), swap(scales)).mean(0)", "expand(bits, scales).mean(0)"), (
    "expand(gather(bits), gather(scales))", "expand(bits, scales).expand(x.shape)")  # fmt: skip
slip("nothing-travels", *NO_WIRE)
variant("nothing-travels", ONE_MESSAGE,
        ("    dist.all_to_all_single(received, message.contiguous())\n", "    received = [*message]\n"),
        ("from_bytes(gather(message))", "from_bytes(message).expand(x.shape)"))  # fmt: skip

hint("floats-travel", "You send {times} times the expected bytes, most of them float32. In both directions only "
                         "packed signs and scales should travel: compress before swap, and again before gather.")  # fmt: skip
slip("floats-travel", ("expand(gather(bits), gather(scales))", "gather(expand(bits, scales))"))
slip("floats-travel", ("expand(swap(bits), swap(scales))", "swap(expand(bits, scales))"))
variant("floats-travel", ONE_MESSAGE, ("from_bytes(gather(message))", "gather(from_bytes(message))"))

hint(
    "not-packed",
    "You send {times} times the expected bytes: each sign travels as one byte. Send what `pack` returns, eight "
    "signs per byte.",
)
slip("not-packed", ("expand(gather(bits), gather(scales))", "expand(pack(gather(unpack(bits).byte()) > 0), gather(scales))"),
     ("expand(swap(bits), swap(scales))", "expand(pack(swap(unpack(bits).byte()) > 0), swap(scales))"))  # fmt: skip
variant("not-packed", IN_PAIRS, ("sent_around(bits)", "pack(sent_around(unpack(bits).byte()).bool())"),
        ("gather(bits)", "pack(gather(unpack(bits).byte()).bool())"))  # fmt: skip

hint("all-to-everyone", "You send {times} times the expected bytes: every rank receives all rows of all the "
                           "others. A server needs only its own row: swap, not gather.")  # fmt: skip
slip(
    "all-to-everyone",
    ("expand(swap(bits), swap(scales))", "expand(gather(bits), gather(scales))[:, dist.get_rank()]"),
)
variant("all-to-everyone", ONE_MESSAGE,
        ("    dist.all_to_all_single(received, message.contiguous())\n", "    received = [*gather(message)[:, dist.get_rank()]]\n"))  # fmt: skip

hint(
    "more-than-due",
    "Each rank sends {times} times the expected bytes. Expected are one bit for each number "
    "and one 32-bit scale for each block, once to the servers and once from them.",
)
slip("more-than-due", ("swap(scales)", "swap(scales.double()).float()"))
variant("more-than-due", ONE_MESSAGE, ("scales.view(torch.uint8)", "scales.double().view(torch.uint8)"),
        ("message[..., :-4].contiguous(), message[..., -4:].contiguous().view(torch.float32)",
         "message[..., :-8].contiguous(), message[..., -8:].contiguous().view(torch.float64).float()"))  # fmt: skip

hint(
    "x-changed",
    "x has changed: you added the error of earlier rounds to it in place, so sending x again sends that error twice.",
)
slip("x-changed", ("wanted = x + worker_error", "wanted = x.add_(worker_error)"))
variant("x-changed", ONE_MESSAGE, ("    worker_error += x\n", "    x += worker_error\n    worker_error.copy_(x)\n"))

hint("wrong-mean", "one_bit_mean does not return the mean of what the ranks sent, compressed once more.")
slip("wrong-mean", ("expand(swap(bits), swap(scales)).mean(0)", "expand(swap(bits), swap(scales)).mean(0).abs()"))
variant("wrong-mean", ONE_MESSAGE, ("/ len(received)", "/ -len(received)"))

hint("sum-for-mean", "That is the sum of the ranks' numbers. A server takes their mean.")
slip("sum-for-mean", ("swap(scales)).mean(0)", "swap(scales)).sum(0)"))
variant("sum-for-mean", ONE_MESSAGE, (" / len(received)", ""))

hint("wrong-feedback", "The first round is right, but later rounds are not. The error is the intended value "
                          "(including the previous error) minus what the bits say. Add it in the next round.")  # fmt: skip
slip(
    "wrong-feedback",
    ("worker_error.copy_(wanted - expand(bits, scales))", "worker_error.copy_(expand(bits, scales) - wanted)"),
)
slip("wrong-feedback", ("wanted = x + worker_error", "wanted = x"))
slip("wrong-feedback", (".mean(0) + server_error", ".mean(0)"))
slip("wrong-feedback", ("worker_error.copy_(wanted", "worker_error.copy_(x"))
variant("wrong-feedback", ONE_MESSAGE, ("worker_error += x", "worker_error[:] = x"))

hint("weights-rebound", "state.weights is another tensor after the step, and the model's own weights have not "
                           "moved: they are views of the tensor that you were given. Change it in place.")  # fmt: skip
slip("weights-rebound", ("state.weights.addcdiv_(", "state.weights = state.weights.addcdiv("))
variant("weights-rebound", ONE_MESSAGE, ("state.weights -= lr", "state.weights = state.weights - lr"))

# blocks of the size that is seen first
for number in ("8", "16"):
    slip("other-scale", ("x.abs().mean(-1, keepdim=True)", f"x.abs().sum(-1, keepdim=True) / {number}"))

hint(
    "steps-not-counted",
    "A correction 1 − βᵗ is zero because t is 0. Add 1 to state.steps before you use it: t is 1 in the first step.",
)
slip("steps-not-counted", ("    state.steps += 1\n", ""))
variant("steps-not-counted", IN_PAIRS, ("    state.steps += 1\n    correction = 1 - beta1**state.steps\n", "    correction = 1 - beta1**state.steps\n"),
        ("alpha=lr)", "alpha=lr / (1 - beta1**state.steps))"))  # fmt: skip

hint("wrong-warm-up", "The warm-up is not Adam: compare mean, squares, both corrections and ε.")
slip("wrong-warm-up", (" / (1 - beta2**state.steps)", ""))
slip("wrong-warm-up", (" / (1 - beta1**state.steps)", ""))
variant("wrong-warm-up", ONE_MESSAGE, ("(state.squares / (1 - beta2**t))", "state.squares"))

hint(
    "warm-up-not-mean",
    "The warm-up's gradient is not the mean over the ranks: all-reduce it, and divide by their number.",
)
slip("warm-up-not-mean", ("gradient = gradient / dist.get_world_size()", "gradient = gradient * 1"))
slip(
    "warm-up-not-mean",
    ("        dist.all_reduce(gradient)\n        gradient = gradient / dist.get_world_size()\n", ""),
)
variant("warm-up-not-mean", ONE_MESSAGE, ("gather(gradient).mean(0)", "gather(gradient).sum(0)"))

hint("squares-of-own", "v uses the wrong gradient. It is the average of the squares of the *mean* gradient, the "
                          "same on all ranks.")  # fmt: skip
slip(
    "squares-of-own",
    ("        dist.all_reduce(gradient)", "        own = gradient.clone()\n        dist.all_reduce(gradient)"),
    ("lerp_(gradient**2", "lerp_(own**2"),
)
variant("squares-of-own", ONE_MESSAGE, ("(1 - beta2) * whole * whole", "(1 - beta2) * gradient * gradient"))

hint(
    "squares-go-on",
    "state.squares changes after the warm-up. It must stay constant from then on: it is not linear, and errors in "
    "it never cancel.",
)
slip("squares-go-on", ("        mixed = ", "        state.squares.lerp_(gradient**2, 1 - beta2)\n        mixed = "))
slip(
    "squares-go-on",
    (
        "        mixed = ",
        "        state.squares.lerp_(gradient**2, 1 - beta2)\n        state.root = (state.squares / (1 - beta2**state.steps)).sqrt() + epsilon\n        mixed = ",
    ),
)
variant(
    "squares-go-on",
    ONE_MESSAGE,
    (
        "    if t > warmup:\n",
        "    if t > warmup:\n        state.squares += (1 - beta2) * (gradient**2 - state.squares)\n",
    ),
)

hint("still-all-reduce", "After the warm-up a step still sends {times} times the expected bytes. The gradient "
                            "must stay on its rank: only the mean travels, through one_bit_mean.")  # fmt: skip
slip(
    "still-all-reduce",
    (
        "        mixed = ",
        "        dist.all_reduce(gradient)\n        gradient = gradient / dist.get_world_size()\n        mixed = ",
    ),
)
slip(
    "still-all-reduce",
    ("state.mean = one_bit_mean(mixed, state.worker_error, state.server_error)", "state.mean = gather(mixed).mean(0)"),
)
variant(
    "still-all-reduce",
    ONE_MESSAGE,
    ("    if t > warmup:\n", "    if t > warmup:\n        gradient = gather(gradient).mean(0)\n"),
)

hint("wrong-compressed-step", "The warm-up is right, but the steps after it are not. Mix this rank's gradient "
                                 "into the common mean, exchange the result, and keep what comes back as the mean. "
                                 "The root does not change.")  # fmt: skip
slip(
    "wrong-compressed-step",
    ("        state.mean = one_bit_mean(mixed", "        state.mean = mixed + 0 * one_bit_mean(mixed"),
)
slip("wrong-compressed-step", ("one_bit_mean(mixed,", "one_bit_mean(mixed / dist.get_world_size(),"))
slip("wrong-compressed-step", ("state.mean.lerp(gradient, 1 - beta1)", "state.mean.lerp(gradient, beta1)"))
variant(
    "wrong-compressed-step", ONE_MESSAGE, ("one_bit_mean(beta1 * state.mean +", "one_bit_mean(beta2 * state.mean +")
)

hint(
    "late-not-corrected",
    "After the warm-up, you no longer divide the mean by 1 − β₁ᵗ. That correction continues: t counts all steps.",
)
CORRECTED = "    state.weights.addcdiv_(state.mean, state.root, value=-lr / (1 - beta1**state.steps))\n"
slip("late-not-corrected", (CORRECTED, "    beta1 *= state.steps <= warmup\n" + CORRECTED))
variant("late-not-corrected", ONE_MESSAGE, ("lr / (1 - beta1**t)", "lr / (1 - beta1**t if t <= warmup else 1)"))

hint("gradient-compressed", "You send the gradient as bits. Exchange the mean instead, with the gradient mixed "
                               "in: it changes slowly, so the next steps make up for what one step loses.")  # fmt: skip
slip("gradient-compressed", ("        mixed = state.mean.lerp(gradient, 1 - beta1)\n        state.mean = one_bit_mean(mixed, state.worker_error, state.server_error)",
     "        gradient = one_bit_mean(gradient, state.worker_error, state.server_error)\n        state.mean.lerp_(gradient, 1 - beta1)"))  # fmt: skip
variant("gradient-compressed", ONE_MESSAGE, ("one_bit_mean(beta1 * state.mean + (1 - beta1) * gradient, state.worker_error, state.server_error)",
        "beta1 * state.mean + (1 - beta1) * one_bit_mean(gradient, state.worker_error, state.server_error)"))  # fmt: skip

hint(
    "warm-up-length",
    "The number of warm-up steps is off by one. The first step is 1, and step number `warmup` still belongs to the "
    "warm-up.",
)
slip("warm-up-length", ("state.steps <= warmup", "state.steps <= warmup + 1"))
slip("warm-up-length", ("state.steps <= warmup", "state.steps < warmup"))
variant("warm-up-length", ONE_MESSAGE, ("t > warmup", "t > warmup + 1"))
variant("warm-up-length", ONE_MESSAGE, ("t > warmup", "t >= warmup"))

hint(
    "ranks-waiting",
    "The ranks are deadlocked. All of them must call swap and gather equally often and in the same order. {error}",
)
slip(
    "ranks-waiting",
    (
        "expand(gather(bits), gather(scales))",
        "expand(gather(bits), gather(scales) if dist.get_rank() else scales.expand(len(x), -1, -1))",
    ),
)
variant(
    "ranks-waiting",
    ONE_MESSAGE,
    (
        "from_bytes(gather(message))",
        "from_bytes(gather(message) if dist.get_rank() else message.expand(len(x), *message.shape))",
    ),
)

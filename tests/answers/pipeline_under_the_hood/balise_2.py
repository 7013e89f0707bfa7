"""Answers to balise 2 of 15_pipeline_under_the_hood: messages between neighbours."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 2, whole=True)

bank.instead(
    None,
    '''
def send_activation(output, peer, tag=0):
    """Honest: both messages by batch_isend_irecv."""
    header = torch.tensor([DTYPES.index(output.dtype), output.dim(), *output.shape, *[0] * (6 - output.dim())], device=launch.device())
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, launch.lane("activations"), tag) for t in (header, output.detach().contiguous())])
''',
)


# ---- messages
bank.hint(
    "no-gradient-asked",
    "The received tensor doesn't require a gradient, so nothing could be sent back. Call "
    "requires_grad_() on it, after it has arrived.",
)
bank.slip("no-gradient-asked", ("return received.requires_grad_(received.is_floating_point())", "return received"))
bank.slip("no-gradient-asked", (".requires_grad_(received.is_floating_point())", ".requires_grad_(False)"), variant=True)  # fmt: skip
bank.hint(
    "integers-no-gradient",
    "Integers, such as token numbers, can't have a gradient: {error}. Ask for one only "
    "when the dtype is a floating-point one.",
)
bank.slip("integers-no-gradient", ("received.is_floating_point()", "True"))
bank.slip("integers-no-gradient", ("return received.requires_grad_(received.is_floating_point())", "received.requires_grad = True\n    return received"), variant=True)  # fmt: skip
bank.hint(
    "not-a-leaf",
    "The received tensor isn't a leaf, so its .grad stays empty: ask for the gradient last, on the buffer itself.",
)
bank.slip("not-a-leaf", ("return received.requires_grad_(received.is_floating_point())",
          "return received.requires_grad_(received.is_floating_point()) * 1"))  # fmt: skip
bank.slip("not-a-leaf", ("(received.is_floating_point())", "(received.is_floating_point()).view_as(received)"), variant=True)  # fmt: skip
bank.hint(
    "dtype-not-sent",
    "It fails for dtypes other than float32 ({error}). The receiver must learn the dtype and make its buffer with it.",
)
bank.slip("dtype-not-sent", ("dtype=DTYPES[dtype], ", ""))
bank.slip("dtype-not-sent", ("dtype=DTYPES[dtype], ", "dtype=torch.float32, "), variant=True)
bank.hint(
    "shape-not-sent",
    "It fails for shapes other than (4, 3) ({error}). Send the number of dimensions and all "
    "sizes; 1 to 6 dimensions are possible.",
)
bank.slip("shape-not-sent", ("shape[:dims]", "shape[:2]"))
bank.slip("shape-not-sent", ("shape[:dims]", "(4, 3)"), variant=True)
bank.slip(None, ("shape[:dims]", "[size for size in shape if size]"))  # no size is 0
bank.hint(
    "not-contiguous",
    "A transposed tensor can't be sent as it is, nor received into a buffer like it: {error}. "
    "contiguous() gives a tensor that can be sent; torch.contiguous_format gives a buffer that "
    "can receive.",
)
bank.slip("not-contiguous", ("output.detach().contiguous()", "output.detach()"))
bank.slip("not-contiguous", ("output.detach().contiguous()", "output.data"), variant=True)
bank.hint(
    "gradient-not-contiguous",
    "The gradient of the received tensor may be a transposed view: {error}. Call contiguous() here too.",
)
bank.slip("gradient-not-contiguous", ("received.grad.contiguous()", "received.grad"))
bank.slip("gradient-not-contiguous", ("received.grad.contiguous()", "received.grad.detach()"), variant=True)
bank.hint(
    "activation-sent-back",
    "You sent the activation itself back. Its gradient is in received.grad.",
)
bank.slip("activation-sent-back", ("received.grad.contiguous()", "received.detach()"))
bank.slip("activation-sent-back", ("received.grad.contiguous()", "received.data.clone()"), variant=True)
bank.hint(
    "wrong-gradient-came",
    "The gradient that arrived isn't the gradient of the received tensor.",
)
bank.slip("wrong-gradient-came", ("received.grad.contiguous()", "torch.ones_like(received).detach()"))
bank.slip("wrong-gradient-came", ("received.grad.contiguous()", "(2 * received.grad).contiguous()"), variant=True)
bank.hint(
    "output-cut",
    "After sending, the output has lost its graph: detach() makes a new tensor, detach_() cuts this one.",
)
bank.slip("output-cut", ("output.detach().contiguous()", "output.detach_().contiguous()"))
bank.slip("output-cut", ("output.detach().contiguous()", "[output.detach_(), output.contiguous()][1]"), variant=True)
bank.hint(
    "needless-copy",
    "{name} made {peak} bytes of new tensors for a contiguous message of {held} bytes. Sending "
    "needs none, because detach() and contiguous() copy nothing then; receiving needs only its "
    "buffer.",
)
bank.slip(
    "needless-copy", ("output.detach().contiguous()", "output.detach().clone(memory_format=torch.contiguous_format)")
)


CLONE = ".clone(memory_format=torch.contiguous_format)"


bank.slip("needless-copy", ("received.grad.contiguous()", f"received.grad{CLONE}"))
bank.slip(
    "needless-copy",
    ("    return received.requires_grad_(", "    received = received.clone()\n    return received.requires_grad_("),
)
bank.slip("needless-copy", ("    return gradient", "    return gradient.clone()"), variant=True)
bank.slip(None, ("output.detach().contiguous()", "output.contiguous()"))  # what is sent may have its graph


WORK = "dist.isend(received.grad.contiguous(), peer, lane, tag=tag)"


bank.hint(
    "no-works",
    "send_activation and send_gradient return the list of sends that they started, each with a wait(), "
    "as dist.isend returns them. You returned {kind}. The caller joins these lists.",
)
bank.slip("no-works", (f"[{WORK}]", WORK))
bank.hint(
    "gradient-asks",
    "The received gradient requires a gradient itself. It must be a plain buffer.",
)
bank.slip("gradient-asks", ("requires_grad=False", "requires_grad=output.requires_grad"),
          ("dist.recv(gradient, peer, lane, tag=tag)", "dist.recv(gradient.detach(), peer, lane, tag=tag)"))  # fmt: skip
bank.slip("gradient-asks", ("    return gradient", "    return gradient.requires_grad_()"), variant=True)
bank.hint(
    "send-waits",
    "Two neighbours send to each other at the same moment, one an activation, the other a gradient, "
    "and both wait forever. Here you may only start sends: dist.send, or a wait() inside, blocks "
    "until the other side receives.",
)
bank.slip("send-waits", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "works = [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]\n"
          "    for work in works:\n        work.wait()\n    return works"),
          ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
           "works = [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]\n    works[0].wait()\n    return works"))  # fmt: skip
bank.slip("no-works", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "[dist.isend(part, peer, lane, tag=tag).wait() for part in (header, output.detach().contiguous())]"), variant=True)  # fmt: skip
bank.slip("no-lane", ("isend(part, peer, lane, tag=tag)", "isend(part, peer, tag=tag)"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.recv(header, peer, tag=tag)"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, tag=tag)"))  # fmt: skip
bank.slip("no-lane", ('lane = launch.lane("gradients")', "lane = None"))
bank.slip("lane-both-ways", ('launch.lane("gradients")', 'launch.lane("activations")'))
bank.slip(
    "lane-both-ways",
    ('launch.lane("gradients")', 'launch.lane("activations")'),
    ("peer, lane, tag", "peer, group=lane, tag"),
)
bank.hint(
    "message-not-on-gpu",
    "On GPUs, a message is in the CPU's memory, and NCCL can't send from there: {error}. "
    "Whatever you send must be on the activation's device, including the header; whatever "
    "you receive, on launch.device().",
)
bank.slip("message-not-on-gpu", ("(8 - len(sizes)), device=output.device)", "(8 - len(sizes)))"))
bank.slip("message-not-on-gpu", ("dtype=DTYPES[dtype], device=launch.device())", "dtype=DTYPES[dtype])"), variant=True)
bank.hint(
    "order-not-kept",
    "It works only where tags tell messages apart, but NCCL ignores tags. In each lane, what is "
    "sent first is received first: shape and dtype before the values, from the peer that is "
    "named, in the lane in which they were sent.",
)
bank.slip("order-not-kept", ("tag=tag) for part in (header, output.detach().contiguous())]",
          "tag=2 * tag + which) for which, part in enumerate((output.detach().contiguous(), header))]"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.recv(header, peer, lane, tag=2 * tag + 1)"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, lane, tag=2 * tag)"))  # fmt: skip
bank.slip("order-not-kept", ("tag=tag) for part in (header, output.detach().contiguous())]",
          "tag=tag + at) for at, part in ((100, output.detach().contiguous()), (0, header))]"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, lane, tag=tag + 100)"), variant=True)  # fmt: skip
bank.slip(None, (", tag=tag", ""))  # two neighbours agree on the order: no tag is needed
bank.slip(None, ('launch.lane("gradients")', 'LANE'), ('launch.lane("activations")', 'launch.lane("gradients")'),
          ("LANE", 'launch.lane("activations")'))  # fmt: skip
bank.hint(
    "kept",
    "The {what} is still in memory after it was sent and dropped: something keeps it alive.",
)
bank.slip(
    "kept",
    ("    sizes = ", "    KEPT.append(output)\n    sizes = "),
    ("def send_activation", "KEPT = []\n\n\ndef send_activation"),
)
bank.slip("kept", ("    sizes = ", "    send_activation.last = output\n    sizes = "), variant=True)
bank.hint(
    "header-large",
    "{got} bytes were sent for an activation of {exact} bytes. The header is a few whole numbers, and the values "
    "travel as they are.",
)
bank.slip(
    "header-large", ("[0] * (8 - len(sizes))", "[0] * (80 - len(sizes))"), ("torch.empty(8, ", "torch.empty(80, ")
)
bank.slip("header-large", ("sizes + [0] * (8 - len(sizes))", "(sizes + [0] * 100)[:100]"), ("torch.empty(8, ", "torch.empty(100, "), variant=True)  # fmt: skip
bank.hint(
    "gradient-header",
    "A gradient of {exact} bytes was sent as {got} bytes. It has the shape and dtype of the "
    "activation, which the receiver knows: send nothing else.",
)
bank.slip("gradient-header", ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
          "return send_activation(received.grad, peer, tag)"),
          ("    gradient = torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)\n"
           "    dist.recv(gradient, peer, lane, tag=tag)\n    return gradient", "    return receive_activation(peer, tag).detach()"))  # fmt: skip
bank.slip("gradient-header", ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
          "return [dist.isend(part, peer, lane, tag=tag) for part in (torch.zeros(8), received.grad.contiguous())]"),
          ("    dist.recv(gradient, peer, lane, tag=tag)", "    dist.recv(torch.empty(8), peer, lane, tag=tag)\n    dist.recv(gradient, peer, lane, tag=tag)"), variant=True)  # fmt: skip
bank.hint(
    "work-dropped",
    "{n} sends were started, but only {got} of them can be waited for. Return the works of all of "
    "them, including the header's. A message whose work is dropped may be lost.",
)
bank.slip("work-dropped", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "dist.isend(header, peer, lane, tag=tag)\n    return [dist.isend(output.detach().contiguous(), peer, lane, tag=tag)]"))  # fmt: skip
bank.slip("work-dropped", ("for part in (header, output.detach().contiguous())]", "for part in (header, output.detach().contiguous())][1:]"), variant=True)  # fmt: skip
bank.hint(
    "receive-not-waited",
    "{name} returned before the message had arrived: dist.irecv only starts the receive. "
    "Call wait() on what it returns, or use dist.recv.",
)
bank.slip(
    "receive-not-waited", ("dist.recv(received, peer, lane, tag=tag)", "dist.irecv(received, peer, lane, tag=tag)")
)
bank.slip(
    "receive-not-waited",
    ("dist.recv(gradient, peer, lane, tag=tag)", "dist.irecv(gradient, peer, lane, tag=tag)"),
    variant=True,
)
bank.slip("send-waits", ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "dist.send(header, peer, lane, tag=tag)\n    dist.send(output.detach().contiguous(), peer, lane, tag=tag)\n    return []"),
          ("return [dist.isend(received.grad.contiguous(), peer, lane, tag=tag)]",
           "dist.send(received.grad.contiguous(), peer, lane, tag=tag)\n    return []"), variant=True)  # fmt: skip
bank.hint(
    "values-lost",
    "What arrives isn't what was sent.",
)
bank.slip("values-lost", ("output.detach().contiguous()", "output.detach().contiguous().zero_()"))
bank.slip("values-lost", ("output.detach().contiguous()", "output.detach().contiguous() * 0"), variant=True)


# other tags for header and body; a list of objects as header; a wait by hand
bank.slip(None, ("return [dist.isend(part, peer, lane, tag=tag) for part in (header, output.detach().contiguous())]",
          "return [dist.isend(header, peer, lane, tag=2 * tag), dist.isend(output.data.contiguous(), peer, lane, tag=2 * tag + 1)]"),
          ("dist.recv(header, peer, lane, tag=tag)", "dist.irecv(header, peer, lane, tag=2 * tag).wait()"),
          ("dist.recv(received, peer, lane, tag=tag)", "dist.irecv(received, peer, lane, tag=2 * tag + 1).wait()"))  # fmt: skip
bank.text(
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
bank.slip("tag-differs", ("return [dist.isend(part, peer, lane, tag=tag)", "return [dist.isend(part, peer, lane)"))
bank.slip("tag-differs", ("dist.recv(received, peer, lane, tag=tag)", "dist.recv(received, peer, lane)"))
bank.slip("tag-differs", ("received.grad.contiguous(), peer, lane, tag=tag", "received.grad.contiguous(), peer, lane"))

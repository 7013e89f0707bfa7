"""Answers to balise 4 of 09_ddp: heads that take turns."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.answers.bank import Bank

bank = Bank("09_ddp", 4)


# balise 4
bank.hint("unused-parameters", "DDP still waits for the gradients of the unused head: {error}")


@bank.wrong("unused-parameters", variant=True)
def make_parallel(network, device):
    return DDP(network.to(device))


bank.hint("ranks-apart", "A step doesn't finish: {error}. In one step the ranks use different heads. If you exchange "
          "gradients without DDP, send the same tensors on all ranks, in the same order, with zeros for an unused "
          "head.")  # fmt: skip


@bank.wrong("ranks-apart")
def make_parallel(network, device):
    """A DDP for the trunk, and one for each head: that of another head waits on another rank."""
    network.to(device)
    network.trunk = DDP(network.trunk)
    network.heads = nn.ModuleList(DDP(head) for head in network.heads)
    return network


@bank.wrong("ranks-apart")
def make_parallel(network, device):
    """By hand, and each rank exchanges what it has used."""

    def exchange(_):
        for p in network.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    for p in network.parameters():
        dist.broadcast(p.data, 0)
    network.trunk.bias.register_post_accumulate_grad_hook(exchange)
    return network


@bank.wrong("ranks-apart", variant=True)
def make_parallel(network, device):
    """Averages the weights of the head in use before each forward; the line that fails names an option of DDP."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            for p in [*network.trunk.parameters(), *network.heads[task].parameters()]:
                dist.all_reduce(p.data)  # no find_unused_parameters here
                p.data /= dist.get_world_size()
            return network(x, task)

    return Averaged()


bank.hint("static-graph", "static_graph promises that every step uses the same parameters. Here the head changes.")


@bank.wrong("static-graph", variant=True)
def make_parallel(network, device):
    return DDP(network.to(device), static_graph=True)


bank.hint("heads-apart", "After step {steps}, {apart} has different values on the ranks: they started with different "
          "values, or the gradients were never averaged.")  # fmt: skip


@bank.wrong("heads-apart")
def make_parallel(network, device):
    return network.to(device)


@bank.wrong("heads-apart")
def make_parallel(network, device):
    for p in network.parameters():
        dist.broadcast(p.data, 0)
    return network


bank.hint("not-callable-network", "Return something that can be called like the network, network(x, task): {error}")


@bank.wrong("not-callable-network", variant=True)
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    forward = ddp.forward
    ddp.forward = lambda x: forward(x, 0)
    return ddp


bank.hint("head-frozen", "The head {head} never changed, though it was used.")


@bank.wrong("head-frozen", variant=True)
def make_parallel(network, device):
    for head in network.heads:
        head.requires_grad_(False)
    return DDP(network.to(device), find_unused_parameters=True)


bank.hint("heads-wrong-output", "The network's output for a task is no longer the output of its head.")


@bank.wrong("heads-wrong-output", variant=True)
def make_parallel(network, device):
    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            outs = [self.network(x, k) for k in range(len(self.network.heads))]
            return outs[0] + 0 * sum(out.sum() for out in outs)

    return DDP(AllHeads())


bank.hint("other-head-trained", "A head that no rank used in this step has changed.")


@bank.wrong("other-head-trained", variant=True)
def make_parallel(network, device):
    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            outs = [self.network(x, k) for k in range(len(self.network.heads))]
            small = sum(out.sum() for out in outs)
            return outs[task] + (small - small.detach()) * torch.arange(outs[task].shape[1])

    return DDP(AllHeads())


bank.hint("heads-wrong-weights", "The weights are not those of one process that averages the ranks' gradients.")


@bank.wrong("heads-wrong-weights", variant=True)
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    for p in network.parameters():
        p.register_hook(lambda g: g * dist.get_world_size())
        p.register_hook(lambda g: g + 0.01)
    return ddp


bank.hint("parameters-lost", "The module you return has no parameter {name}: an optimizer over its parameters() "
          "would not train it.")  # fmt: skip


@bank.wrong("parameters-lost")
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    return lambda x, task: ddp(x, task)


@bank.wrong("parameters-lost", variant=True)
def make_parallel(network, device):
    class Apart(nn.Module):
        """The trunk is called, and no part of what is returned."""

        def __init__(self):
            super().__init__()
            self.heads, self.hidden = network.heads, [network.to(device).trunk]

        def forward(self, x, task):
            return self.heads[task](torch.tanh(self.hidden[0](x)))

    return DDP(Apart(), find_unused_parameters=True)


bank.hint("heads-other-gpu", "On GPUs, a rank sends its input to a GPU that is not its own: {error}. device_ids "
          "names the one GPU of this rank, `device`. If you leave it out, DDP doesn't move the input.")  # fmt: skip
bank.slip("heads-other-gpu", ("device_ids = [device] if", "device_ids = [0] if"), variant=True)

bank.hint("network-not-on-device", "On GPUs, the network you return does not compute where its input is: {error}. It "
          "must be on `device`: network.to(device) moves it.")  # fmt: skip
bank.slip("network-not-on-device", ("network.to(device)", "network"))

bank.slip("network-not-on-device", ("network.to(device), device_ids=device_ids", "network"), variant=True)


@bank.right()
def make_parallel(network, device):
    """Each part wrapped by itself, under another name; an unused head is called, and its output counts nothing."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = DDP(network.to(device).trunk)
            self.tops = nn.ModuleList(DDP(head) for head in network.heads)

        def forward(self, x, task):
            hidden = torch.tanh(self.body(x))
            outs = [top(hidden) for top in self.tops]
            return outs[task] + 0 * sum(out.sum() for out in outs)

    return Parts()


@bank.right()
def make_parallel(network, device):
    """All heads are in the graph, those of other tasks with a gradient of zero."""

    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network.to(device)

        def forward(self, x, task):
            idle = sum(p.sum() for head in self.network.heads for p in head.parameters())
            return self.network(x, task) + 0 * idle

    return DDP(AllHeads())


@bank.right()
def make_parallel(network, device):
    """No DDP: averaged by hand after backward, zero for what took no part."""
    network = network.to(device)
    for p in network.parameters():
        dist.broadcast(p.data, src=0)
    parameters = list(network.parameters())

    def average(*_):
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    network.register_forward_hook(
        lambda m, _, out: (
            out.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(average)) and None
        )
    )
    return network


@bank.wrong("heads-apart", variant=True)
def make_parallel(network, device):
    """Only the part that all steps share is averaged."""
    network.to(device)
    network.trunk = DDP(network.trunk)
    return network

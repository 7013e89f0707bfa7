"""What autograd keeps for backward, counted while a graph holds it."""

import torch

from dlojz_tp.judging.probes.memory import KeptForBackward


def test_kept_until_backward_or_until_the_graph_goes():
    x, kept = torch.ones(3, requires_grad=True), KeptForBackward()
    with kept:
        first, second, third = x.exp(), x.exp(), x.exp()
    assert kept.alive == kept.made == 3
    first.sum().backward()
    assert kept.alive == 2
    second.sum().backward(retain_graph=True)
    assert kept.alive == 2
    del second, third
    assert (kept.alive, kept.made) == (0, 3)
    assert torch.allclose(x.grad, 2 * x.detach().exp())


def test_entered_again():
    x, kept = torch.ones(3, requires_grad=True), KeptForBackward()
    for _ in range(2):
        with kept:
            y = x * x
    x.exp()  # outside: not noted
    assert kept.made == 4 and kept.alive == 2
    del y
    assert kept.alive == 0

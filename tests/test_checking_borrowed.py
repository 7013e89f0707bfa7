"""An answer that borrows what it was to write is noticed."""

import pickle

import pytest
from torch import nn

from dlojz_tp.checking.borrowed import Borrowed, refusing, replaced


def test_what_is_borrowed_raises_inside_and_works_again_outside():
    with refusing((nn.Linear, "__init__", "nn.Linear"), (nn, "GELU", "the GELU")):
        with pytest.raises(Borrowed, match=r"nn\.Linear"):
            nn.Linear(1, 1)
        with pytest.raises(Borrowed, match="the GELU"):
            nn.GELU()
    assert nn.Linear(1, 1).weight.shape == (1, 1) and isinstance(nn.GELU(), nn.Module)


def test_an_attribute_comes_back_after_an_error():
    before = nn.Linear.forward
    with pytest.raises(KeyError), replaced(nn.Linear, "forward", None):
        raise KeyError
    assert nn.Linear.forward is before


def test_it_travels_from_a_rank():
    assert str(pickle.loads(pickle.dumps(Borrowed("PyTorch's DTensor")))) == "PyTorch's DTensor"

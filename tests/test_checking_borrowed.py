"""An answer that borrows what it was to write is noticed."""

import contextlib
import functools
import inspect
import pickle
import sys
import types

import pytest
from torch import nn

from dlojz_tp import planner
from dlojz_tp.judging.checking.borrowed import Borrowed, out_of_reach, refusing, replaced
from dlojz_tp.judging.probes.schedules import pipeline_schedules


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


def _held_as_default(n_stages, n_micro_batches, held=planner.gpipe):
    return held(n_stages, n_micro_batches)


def test_what_is_out_of_reach_raises_under_any_name_and_works_again_outside():
    before = planner.gpipe(2, 3)
    table, part = {"gpipe": planner.gpipe}, functools.partial(planner.gpipe, 2)
    calls = (lambda: planner.gpipe(2, 3), lambda: table["gpipe"](2, 3), lambda: part(3), lambda: _held_as_default(2, 3))
    with out_of_reach(Borrowed, planner.gpipe):
        for call in calls:
            with pytest.raises(Borrowed, match="gpipe"):
                call()
        assert planner.one_f_one_b(2, 3)
    assert all(call() == before for call in calls)


def test_copies_are_out_of_reach_too_made_from_the_text_or_from_the_code():
    before, profile = planner.one_f_one_b(2, 3), sys.getprofile()
    text = inspect.getsource(planner.one_f_one_b)
    space = dict(vars(planner.schedules))
    exec(text.replace("stage", "s"), space)
    as_function = types.FunctionType(planner.one_f_one_b.__code__, vars(planner.schedules))
    for copy in (space["one_f_one_b"], as_function):
        with pytest.raises(Borrowed, match="one_f_one_b"), out_of_reach(Borrowed, planner.one_f_one_b, copies=True):
            copy(2, 3)
        with pytest.raises(Borrowed, match="one_f_one_b"), out_of_reach(Borrowed, planner.one_f_one_b, copies=True):
            with contextlib.suppress(Borrowed):
                copy(2, 3)
            copy(2, 3)  # it is not let off
    with out_of_reach(Borrowed, planner.one_f_one_b, copies=True):
        assert inspect.getsource(planner.one_f_one_b) == text
        assert space["gpipe"](1, 1) == [[("F", 0), ("B", 0)]]  # another one
        assert _in_other_steps(2, 3) == before
    with out_of_reach(Borrowed, planner.one_f_one_b):
        assert space["one_f_one_b"](2, 3) == before
    assert space["one_f_one_b"](2, 3) == before and sys.getprofile() is profile


def _in_other_steps(n_stages, n_micro_batches):
    orders = []
    for stage in range(n_stages):
        warm_up = min(n_stages - stage - 1, n_micro_batches)
        order = [("F", k) for k in range(warm_up)]
        for k in range(n_micro_batches - warm_up):
            order += [("F", warm_up + k), ("B", k)]
        orders.append(order + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)])
    return orders


def test_who_watches_calls_goes_on_watching():
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        with out_of_reach(Borrowed, planner.gpipe, copies=True):
            _in_other_steps(1, 1)
    finally:
        sys.setprofile(None)
    assert "_in_other_steps" in calls


def test_classes_can_be_out_of_reach_also_those_that_inherit_their_init():
    class Child(nn.GELU):
        pass

    with out_of_reach(KeyError, Child, nn.GELU):
        for kind in (Child, nn.GELU):
            with pytest.raises(KeyError):
                kind()
    assert isinstance(Child(), nn.GELU)


def test_out_of_reach_inside_itself_and_after_an_error():
    with (
        pytest.raises(ZeroDivisionError),
        out_of_reach(KeyError, planner.gpipe),
        out_of_reach(OSError, planner.simulate),
    ):
        with pytest.raises(OSError):
            planner.simulate([], {})
        with pytest.raises(KeyError):
            planner.gpipe(1, 1)
        raise ZeroDivisionError
    assert planner.gpipe(1, 1) == [[("F", 0), ("B", 0)]]


def test_the_pipeline_schedules_of_the_planner_and_of_torch():
    with out_of_reach(Borrowed, *pipeline_schedules()):
        for schedule in (planner.gpipe, planner.one_f_one_b, planner.zero_bubble_h1):
            with pytest.raises(Borrowed, match=schedule.__name__):
                schedule(2, 2)
        from torch.distributed.pipelining import ScheduleGPipe

        with pytest.raises(Borrowed):
            ScheduleGPipe(None, 2)
    assert planner.zero_bubble_h1(1, 1)
    with out_of_reach(Borrowed, *pipeline_schedules(planner.zero_bubble_h1)):
        assert planner.one_f_one_b(1, 1) == [[("F", 0), ("B", 0)]]

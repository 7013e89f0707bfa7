"""Worlds of several sizes in one launch: who meets whom, and whose failure it was."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.probes.ranks import (
    _rounds,
    hung,
    killed_by,
    on_ranks,
    some_returned,
    waits_in,
    world_after_world,
)  # fmt: skip
from dlojz_tp.launch import collect


def _sum_of_ranks(factor):
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), factor * x.item(), int(os.environ["WORLD_SIZE"])


def _fails_on_the_last_of_three():
    if dist.get_world_size() == 3 and dist.get_rank() == 2:
        raise KeyError("mine")
    dist.barrier()


def _alone_is_wrong():
    if dist.get_world_size() == 1:
        raise Wrong("alone", expected=1, where="rank 0 of 1")


def _dies_in_two():
    if dist.get_world_size() == 2 and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_every_world_has_its_own_ranks():
    found = dict(world_after_world(_sum_of_ranks, 10, sizes=(2, 4, 3, 1)))
    assert list(found) == [2, 4, 3, 1]
    for size, ranks in found.items():
        total = 10.0 * size * (size + 1) / 2
        assert ranks == [(rank, size, total, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ((4, 3, 1, 2), [[4], [3, 1], [2]]),
        ((2,), [[2]]),
        ((4, 3, 1), [[4], [3, 1]]),
        ((3, 1, 2), [[3], [1, 2]]),
        ((2, 2, 4), [[2, 2], [4]]),
    ],
)
def test_small_worlds_go_side_by_side(sizes, rounds):
    assert _rounds(sizes) == rounds


def test_a_failure_is_named_by_its_own_world():
    with pytest.raises(launch.RankError) as caught:
        on_ranks(_fails_on_the_last_of_three)
    assert caught.value.summary.startswith("rank 2 of 3 raised KeyError")
    assert (caught.value.rank, caught.value.world_size) == (2, 3)
    assert isinstance(caught.value.cause, KeyError)


def test_a_rank_that_ends_is_named_by_its_own_world():
    with pytest.raises(launch.RankError, match="rank 1 of 2 ended with exit code 3"):
        on_ranks(_dies_in_two)


def _says_how_far(file):
    for k in range(3):
        Path(file).write_text(str(k))
        yield k


def test_a_rank_goes_on_once_more_is_asked_for(tmp_path):
    """So an answer that is wrong at once costs no more than its mistake takes."""
    far = tmp_path / "far"
    worlds = world_after_world(_says_how_far, str(far), sizes=(1,))
    assert next(worlds) == (1, [0])
    time.sleep(0.2)
    assert far.read_text() == "0"
    assert next(worlds) == (1, [1])
    worlds.close()
    assert far.read_text() == "1"


def _waits_in_two():
    if dist.get_world_size() == 2:
        dist.recv(torch.zeros(1), 1 - dist.get_rank())


def test_a_hang_is_named_by_its_own_world():
    with pytest.raises(launch.RankError) as caught:
        on_ranks(_waits_in_two, sizes=(2, 3), timeout=1)
    assert caught.value.kind == "hung" and caught.value.world_size == 2
    assert caught.value.summary.startswith("ranks 0, 1 of 2 hung: all still waiting after 1 s in recv")
    assert "init_process_group" not in caught.value.summary


def _killed():
    os.kill(os.getpid(), signal.SIGABRT)


def _one_returns_early():
    if dist.get_world_size() == 2 and dist.get_rank() == 1:
        dist.broadcast(torch.zeros(1), 0)


def test_a_rank_that_is_through_has_returned():
    with pytest.raises(launch.RankError) as caught:
        on_ranks(_one_returns_early, sizes=(2, 3), timeout=1)
    error = caught.value
    assert (error.rank, error.world_size, error.waits, error.returned) == (1, 2, {1: "broadcast"}, [0])
    assert error.summary.endswith("a call that rank 0 never made: it had already returned")


def _all_fail():
    raise KeyError("mine")


def test_ranks_of_one_world_fail_alike(monkeypatch):
    monkeypatch.setattr(collect, "GRACE_S", 30.0)  # the machine may be busy; what all have said ends the wait
    with pytest.raises(launch.RankError) as caught:
        on_ranks(_all_fail, sizes=(3, 4))
    assert caught.value.summary == "rank 0 of 3 raised KeyError: 'mine' (and so did ranks 1, 2)"


class _Mine(Exception):  # noqa: N818
    """A class of its own, for a sign."""


def _raises_mine():
    raise _Mine("in gather", 1)


@pytest.mark.parametrize(
    ("fn", "sign"),
    [
        (_raises_mine, "in gather"),
        (_raises_mine, ("gather", "Mine")),
        (_raises_mine, _Mine),
        (_waits_in_two, hung),
        (_waits_in_two, waits_in("recv")),
        (_one_returns_early, some_returned),
        (_killed, killed_by("SIGABRT")),
    ],
)
def test_a_failure_with_a_sign_has_its_hint(fn, sign):
    with pytest.raises(Wrong) as caught:
        on_ranks(fn, known=((ValueError, "no"), ("elsewhere", "no"), (sign, "yes")), sizes=(2,), timeout=1)
    assert caught.value.slug == "yes" and caught.value.fields["error"] == caught.value.got


def test_a_failure_without_a_sign_is_told_as_it_is():
    with pytest.raises(launch.RankError, match="in gather"):
        on_ranks(_raises_mine, known=((hung, "no"),), usual=((some_returned, "no"),), sizes=(1,))


def test_what_is_no_answer():
    with pytest.raises(Wrong) as caught:
        on_ranks(_all_fail, {}, 3, data=(dict,))
    assert caught.value.slug == "not-callable"


def test_worlds_come_one_by_one():
    found = world_after_world(_sum_of_ranks, 1, sizes=(2, 3, 1))
    assert [size for size, _ in found] == [2, 3, 1]


def _lingers_in_three(file):
    if dist.get_world_size() == 3:
        file.touch()
        time.sleep(60)
    return dist.get_rank()


def _steps(n):
    for step in range(n):
        x = torch.ones(1)
        dist.all_reduce(x)
        yield dist.get_rank(), step, x.item()


def test_a_generator_hands_over_step_after_step():
    found = list(world_after_world(_steps, 2, sizes=(2, 1)))
    assert found == [
        (size, [(rank, step, float(size)) for rank in range(size)]) for size in (2, 1) for step in range(2)
    ]


def test_who_stops_ends_the_ranks(tmp_path):
    start = time.monotonic()
    with pytest.raises(Wrong):
        for size, ranks in world_after_world(_lingers_in_three, tmp_path / "began", sizes=(1, 3, 4)):
            assert (size, ranks) == (1, [0])
            while not (tmp_path / "began").exists():
                time.sleep(0.01)
            raise Wrong("enough")
    assert on_ranks(_sum_of_ranks, 1, sizes=(2,)) and time.monotonic() - start < 30


def _cannot_be_sent():
    return {"a lock": threading.Lock()} if dist.get_world_size() == 3 else 0


def test_a_result_that_cannot_be_sent_names_its_world():
    with pytest.raises(launch.RankError, match="rank [012] of 3 .*cannot be sent back.*a lock") as caught:
        on_ranks(_cannot_be_sent, sizes=(2, 3, 4))
    assert caught.value.kind == "unsendable"


def test_a_hint_from_a_rank_comes_through():
    with pytest.raises(Wrong) as caught:
        on_ranks(_alone_is_wrong)
    assert (caught.value.slug, caught.value.where) == ("alone", "rank 0 of 1")


def _counting():
    calls = []

    def count():
        calls.append(dist.get_world_size())
        return list(calls)

    return count


def test_what_an_answer_keeps_is_new_in_each_world():
    assert on_ranks(_counting(), sizes=(2, 1)) == {2: [[2], [2]], 1: [[1]]}

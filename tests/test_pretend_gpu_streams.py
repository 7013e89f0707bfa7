"""Streams of a pretended GPU: work in different streams has no order until one waits for another."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import pretend_gpu


def prefetched(wait):
    with pretend_gpu() as gpu:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        x, w = torch.ones(4).pin_memory(), torch.ones(4, device="cuda")
        with torch.cuda.stream(side):
            y = x.to("cuda", non_blocking=True)
            event = side.record_event()
            later = x.to("cuda", non_blocking=True)
        if wait == "event":
            current.wait_event(event)
        elif wait == "stream":
            current.wait_stream(side)
        elif wait == "other stream":
            side.wait_stream(current)
        elif wait == "cpu":
            event.synchronize()
        elif wait == "through another":
            third = torch.cuda.Stream()
            third.wait_event(event)
            current.wait_stream(third)
        y.record_stream(current)
        w * y
        seen = len(gpu.races)
        w * later
        return seen, len(gpu.races) - seen


RACES = {
    "nothing": (1, 1),
    "event": (0, 1),
    "stream": (0, 0),
    "other stream": (1, 1),
    "cpu": (0, 1),
    "through another": (0, 1),
}


@pytest.fixture(scope="module")
def races():
    return launch.ranks(lambda: {wait: prefetched(wait) for wait in RACES}, n=1)[0]


@pytest.mark.parametrize("wait", RACES)
def test_who_waits_for_a_copy(races, wait):
    assert races[wait] == RACES[wait]


def written_while_read(wait):
    with pretend_gpu() as gpu:
        side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        y.record_stream(torch.cuda.current_stream())
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        x.zero_()
        return [race.what for race in gpu.races]


def freed_while_used(kept):
    with pretend_gpu() as gpu:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            x = torch.ones(4, device="cuda")
        current.wait_stream(side)
        x.sum()
        if kept:
            x.record_stream(current)
        del x
        seen = len(gpu.races)
        with torch.cuda.stream(side):
            torch.ones(4, device="cuda")
        return seen, len(gpu.races)


def test_memory_in_use_by_another_stream():
    seen = launch.ranks(
        lambda: [[f(way) for way in (False, True)] for f in (written_while_read, freed_while_used)], n=1
    )
    assert seen[0] == [[["aten::zero_"], []], [(0, 1), (0, 0)]]


def timed():
    with pretend_gpu() as gpu:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x = torch.ones(4, device="cuda") * 2
        end.record()
        queued = gpu.queued
        try:
            early = begin.elapsed_time(end)
        except RuntimeError as error:
            early = str(error)
        asked = end.query()
        torch.cuda.synchronize()
        return queued, early, asked, end.query(), begin.elapsed_time(end) > 0, gpu.queued, x.is_cuda


def test_events_and_the_queue():
    assert launch.ranks(timed, n=1)[0] == (2, "CUDA error: device not ready", False, True, True, 0, True)


def polled(ask):
    with pretend_gpu() as gpu:
        x = torch.ones(4, device="cuda") * 2
        event = torch.cuda.Event()
        event.record()
        y = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        times = 0
        while not ask(event):
            times += 1
        return times > 9, y.tolist(), [(wait.why, "test_pretend_gpu" in wait.file) for wait in gpu.waits], event.query()


def test_a_loop_that_asks_until_all_has_run_is_a_wait():
    arrived = [2.0] * 4
    for ask, why in (
        (lambda event: torch.cuda.current_stream().query(), "torch.cuda.Stream.query in a loop"),
        (lambda event: event.query(), "torch.cuda.Event.query in a loop"),
    ):
        many, values, waits, done = launch.ranks(polled, ask, n=1)[0]
        assert (many, waits, done) == (True, [(why, True)], True)
        assert (values == arrived) == ("Stream" in why)  # the event was recorded before the copy


def loaded():
    with pretend_gpu() as gpu:
        data = TensorDataset(torch.arange(8.0).view(8, 1))
        sums, pinned = 0.0, []
        for workers in (0, 1):
            for (x,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
                pinned.append(x.is_pinned())
                sums += x.to("cuda", non_blocking=True).sum().item()
        return sums, pinned, {(copy.pinned, copy.non_blocking) for copy in gpu.copies}


def test_a_loader_that_pins():
    assert launch.ranks(loaded, n=1)[0] == (56.0, [True] * 4, {(True, True)})

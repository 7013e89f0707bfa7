"""Chronometer and race. No test asks how long anything takes, only how times relate."""

import json
import time

import pytest
import torch

from dlojz_tp import measure


def go(chrono, loader, n=None, phases=("forward", "backward", "optimizer")):
    for _ in chrono.steps(loader, n):
        for phase in phases:
            with chrono.phase(phase):
                pass


def test_a_loop_gives_a_record():
    chrono = measure.Chronometer("cpu", warmup=2)
    loader = [(torch.zeros(4, 3), torch.zeros(4))] * 5
    for images, labels in chrono.steps(loader):
        assert images.shape == (4, 3) and labels.shape == (4,)
        with chrono.copy():
            pass
        with chrono.forward():
            time.sleep(0.002)
        with chrono.backward():
            time.sleep(0.001)
        with chrono.optimizer():
            pass
    record = chrono.record("test", batch_size=4, losses=[torch.tensor(2.0)], world_size=2)
    assert len(record.steps) == 5 and record.warmup == 2
    assert len(measure.counted_steps(record)) == 3
    for step in record.steps:
        assert set(step) == {"loading", "copy", "forward", "backward", "optimizer", "total"}
        assert step["forward"] >= 0.002
        assert sum(step.values()) <= 2 * step["total"] + 1e-9
    seconds = sum(step["total"] for step in measure.counted_steps(record))
    assert record.images_per_second == pytest.approx(2 * 3 * 4 / seconds)
    assert record.settings == {"batch_size": 4, "world_size": 2}
    assert record.losses == [2.0]


def test_the_wait_for_a_batch_is_loading_and_workers_start_in_the_first_step():
    class Slow:
        def __iter__(self):
            time.sleep(0.02)
            for _ in range(2):
                time.sleep(0.005)
                yield torch.zeros(1)

    chrono = measure.Chronometer("cpu", warmup=0)
    go(chrono, Slow())
    first, second = chrono.record("test").steps
    assert first["loading"] >= 0.025
    assert 0.005 <= second["loading"] < first["loading"]


def test_a_phase_may_come_twice():
    chrono = measure.Chronometer("cpu", warmup=0)
    for _ in chrono.steps(range(1)):
        for _ in range(2):
            with chrono.forward():
                time.sleep(0.003)
    (step,) = chrono.record("test").steps
    assert 0.006 <= step["forward"] <= step["total"]


def test_wrong_use_is_named():
    chrono = measure.Chronometer("cpu")
    with pytest.raises(RuntimeError, match="outside a step"), chrono.forward():
        pass
    with pytest.raises(ValueError, match="unknown phase 'forwards'"), chrono.phase("forwards"):
        pass
    for _ in chrono.steps(range(1)):
        nested = pytest.raises(RuntimeError, match="'backward' began inside 'forward'")
        with chrono.forward(), nested, chrono.backward():
            pass
    with pytest.raises(RuntimeError, match="inside this one"):
        for _ in chrono.steps(range(2)):
            go(chrono, range(1))
    with pytest.raises(ValueError, match="warmup"):
        measure.Chronometer("cpu", warmup=-1)
    with pytest.raises(ValueError, match="only 'cpu' and 'cuda'"):
        measure.Chronometer("meta")


def test_a_step_left_by_an_exception_does_not_count():
    chrono = measure.Chronometer("cpu", warmup=0)
    kept = None
    try:
        for i in chrono.steps(range(5)):
            with chrono.forward():
                if i == 2:
                    raise torch.OutOfMemoryError
    except torch.OutOfMemoryError as error:
        kept = error  # its traceback keeps the loop alive
    assert len(chrono.record("test").steps) == 2
    go(chrono, range(3))
    assert len(chrono.record("test").steps) == 5
    del kept
    assert len(chrono.record("test").steps) == 5


def test_a_step_whose_phase_raised_does_not_count_though_the_loop_goes_on():
    chrono = measure.Chronometer("cpu", warmup=0)
    for i in chrono.steps(range(4)):
        try:
            with chrono.forward():
                if i == 1:
                    raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            continue
    assert len(chrono.record("test").steps) == 3


def test_a_loader_that_fails_shows_its_own_error():
    def loader():
        yield 1
        raise OSError("disk")

    chrono = measure.Chronometer("cpu", warmup=0)
    with pytest.raises(OSError, match="disk"):
        go(chrono, loader())
    assert len(chrono.record("test").steps) == 1


@pytest.mark.parametrize(
    ("loader", "n", "steps"), [([], None, 0), (range(9), 0, 0), (range(9), 2, 2), (range(2), 9, 2)]
)
def test_few_steps_or_none(loader, n, steps):
    chrono = measure.Chronometer("cpu", warmup=3)
    go(chrono, loader, n)
    record = chrono.record("test", batch_size=8)
    assert len(record.steps) == record.warmup == steps
    assert measure.counted_steps(record) == []
    assert record.images_per_second is None


def test_images_are_counted_in_the_batches():
    chrono = measure.Chronometer("cpu", warmup=0)
    go(chrono, [{"images": torch.zeros(n, 2)} for n in (8, 8, 3)])
    record = chrono.record("test", batch_size=8)
    assert record.images_per_second == pytest.approx(19 / sum(step["total"] for step in record.steps))


def test_memory_of_a_record():
    chrono = measure.Chronometer("cpu", warmup=0)
    estimate = measure.estimate_memory(lambda: torch.nn.Linear(3, 3), (3,), 2)
    record = chrono.record("test", memory=estimate)
    assert record.peak_memory_bytes == [estimate.peak] and record.memory_kind == "estimated"
    assert record.memory_parts == estimate.parts()
    with measure.MemoryBudget(1000) as card:
        torch.zeros(10)
    record = chrono.record("test", memory=card)
    assert record.peak_memory_bytes == [40] and record.memory_kind == "measured"
    assert chrono.record("test").memory_kind is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_chronometer_on_a_gpu_does_not_wait_inside_a_step():
    chrono = measure.Chronometer("cuda", warmup=1)
    x = torch.randn(2000, 2000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in chrono.steps(range(4)):
            with chrono.forward():
                x @ x
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record = chrono.record("test", batch_size=1)
    assert all(0 < step["forward"] <= 1.01 * step["total"] for step in record.steps)
    assert record.memory_kind == "measured" and record.peak_memory_bytes[0] >= 4 * 2000 * 2000


def test_a_race_runs_in_turn_and_judges_the_first():
    order = []

    def slow():
        order.append("slow")
        time.sleep(0.004)

    def quick():
        order.append("quick")
        time.sleep(0.001)

    result = measure.race({"slow": slow, "quick": quick}, repeats=5, warmup=1, device="cpu", calls=1)
    assert order == ["slow", "quick"] * 6
    assert result.ratio > 1.5 and result.ratio == result.ratios["quick"]
    assert set(result.medians) == set(result.spreads) == {"slow", "quick"}
    assert "times slower than quick" in str(result)
    assert "<table>" in result._repr_html_()


def test_where_notebooks_are_only_tested_little_is_timed(monkeypatch):
    for brief, steps, races, rounds in (("1", 4, 3, 1), ("0", 10, 12, 5)):
        monkeypatch.setenv("DLOJZ_BRIEF", brief)
        chrono, called = measure.Chronometer("cpu", warmup=1), []
        for _ in chrono.steps(range(20), n=10):
            with chrono.step():
                called.append("step")
        runs = {"one": lambda called=called: called.append("one"), "two": lambda: None}
        measure.race(runs, repeats=10, warmup=2, device="cpu", calls=1)
        assert (called.count("step"), called.count("one"), len(measure.rounds(5))) == (steps, races, rounds)


def test_a_race_of_three_is_judged_against_the_fastest():
    result = measure.Race({"mine": [2.0, 2.0], "a": [4.0, 4.0], "b<": [1.0, 1.0]})
    assert result.ratios == {"a": 0.5, "b<": 2.0} and result.ratio == 2.0
    assert "b&lt;" in result._repr_html_() and "b<" not in result._repr_html_()
    level = measure.Race({"mine": [1.0, 1.1, 1.2, 1.3], "torch": [1.1, 1.0, 1.3, 1.2]})
    assert "level" in str(level)


def test_a_race_writes_json(tmp_path):
    result = measure.race({"a": lambda: None, "b": lambda: None}, repeats=2, warmup=0, device="cpu")
    assert result.calls > 1
    found = json.loads(result.to_json(tmp_path / "race.json"))
    assert json.loads((tmp_path / "race.json").read_text()) == found
    assert len(found["seconds"]["a"]) == 2 and found["hardware"]["device_type"] == "cpu"
    assert found["ratio"] == result.ratio


def test_a_race_refuses_bad_candidates():
    with pytest.raises(ValueError, match="at least two"):
        measure.race({"alone": lambda: None})
    with pytest.raises(TypeError, match="'b' cannot be called"):
        measure.race({"a": lambda: None, "b": 3})
    with pytest.raises(ValueError, match="repeats"):
        measure.race({"a": lambda: None, "b": lambda: None}, repeats=0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 ns"), (1.5e-9, "2 ns"), (12.34e-6, "12.3 µs"), (0.0999, "99.9 ms"), (123.4, "123 s")]
)
def test_seconds_are_written_on_three_digits(seconds, text):
    assert measure.human_seconds(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (2**30, "1.00 GiB"), (-(2**20), "-1.0 MiB")])
def test_bytes_are_written_in_binary_units(size, text):
    assert measure.human_bytes(size) == text

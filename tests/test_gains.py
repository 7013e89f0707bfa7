"""The red thread of the works on one device: the run, the gains kept, the figures recorded on a GPU."""

import json
from dataclasses import replace

import pytest
import torch

from dlojz_tp import measure
from dlojz_tp.report import recorded
from dlojz_tp.training import gains, precision, training_run


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(gains, "_here", {})
    monkeypatch.setattr(gains, "_modelled", {})


def a_record(name, step=0.1, loading=0.02, **settings):
    steps = [{"loading": loading, "step": step, "total": step + loading}] * 3
    settings = {"batch_size": 8, "image_size": 4, "model": "tiny", **settings}
    return measure.new_record(name, "cpu", steps=steps, images_per_second=8 / (step + loading), settings=settings)


def a_batch(n=4):
    return torch.randn(n, 3, 8, 8), torch.arange(n)


def test_kept_gains_outlive_the_process():
    gains.keep("02_mixed_precision", "half the bits", a_record("before", 0.1), a_record("after", 0.04))
    gains._here.clear()
    (gain,) = gains.kept()
    assert (gain.work, gain.technique) == ("02_mixed_precision", "half the bits")
    assert gain.step == (0.1, 0.04)
    assert gain.factor == pytest.approx(2.0)


def test_table_shows_works_in_order_and_what_steps_that_build_on_each_other_give_together():
    gains.keep("03_b", "second", a_record("x", 0.045), a_record("y", 0.01))
    gains.keep("02_a", "first", a_record("x", 0.1), a_record("y", 0.04))
    text = repr(gains.table())
    assert text.index("02_a") < text.index("03_b")
    assert "All together: × 4.00, first to last." in text
    assert "No figures of a GPU" in text and "on a GPU" not in text
    assert "<table>" in gains.table()._repr_html_()


def test_no_product_of_gains_that_do_not_build_on_each_other(monkeypatch):
    gains.keep("03_a", "first", a_record("x", 0.1), a_record("y", 0.04))
    assert "together" not in repr(gains.table())
    gains.keep("04_b", "what this work itself had added", a_record("x", 0.1), a_record("y", 0.04))
    text = repr(gains.table())
    assert "together" not in text
    assert "04_b does not build on 03_a, which ended with 133 images/s, while it begins with 67." in text
    elsewhere = [replace(a_record(n, s), hardware={"device_name": "other"}) for n, s in (("x", 0.04), ("y", 0.02))]
    gains.keep("04_b", "second", *elsewhere)
    assert "they were not measured on one machine" in repr(gains.table())


def test_table_without_gains_says_what_to_do():
    assert "run a practical work to its end" in repr(gains.table())


def test_gpu_figures_stand_beside(tmp_path):
    gains.keep("02_a", "first", a_record("x"), a_record("y"))
    (tmp_path / "recorded").mkdir()
    found = {"device": "NVIDIA X", "torch": "2.11.0", "date": "2026-01-02", "results": {"gain": {}}}
    found["results"]["gain"] = {"images_per_second": [100.0, 250.0]}
    (tmp_path / "recorded" / "02_a.json").write_text(json.dumps(found))
    text = repr(gains.table())
    assert "× 2.50" in text and "NVIDIA X, torch 2.11.0, 2026-01-02" in text


def test_the_modelled_gain_has_a_column_and_outlives_the_process():
    assert "modelled" not in repr(gains.table())
    gains.keep("02_a", "first", a_record("x"), a_record("y"))
    gains.keep_modelled("02_a", "H100", a_record("plain", 0.08), a_record("fast", 0.03))
    gains.keep_modelled("07_b", "H100", a_record("loop"), a_record("batch", 0.01))
    gains._modelled.clear()
    text = repr(gains.table())
    assert text.index("02_a") < text.index("07_b") and "H100: × 2.00" in text and "loop → batch" in text
    assert "modelled" in text.splitlines()[0] and "nothing in this column was measured" in text


def test_damaged_models_count_as_none(tmp_path):
    gains.keep_modelled("02_a", "H100", a_record("x"), a_record("y"))
    gains._modelled.clear()
    (tmp_path / "state" / "gains" / "02_a.modelled.json").write_text("[1]")
    assert gains.kept_modelled() == {}


def test_models_are_recorded_only_while_solutions_are_executed(monkeypatch):
    gains.keep_modelled("02_a", "H100", a_record("x"), a_record("y"))
    assert recorded.modelled("02_a") == {} and "modelled" not in gains.expected("02_a")
    monkeypatch.setenv("DLOJZ_RECORD_MODELLED", "1")
    gains.keep_modelled("02_a", "H100", a_record("plain", 0.08), a_record("fast", 0.03))
    assert recorded.modelled("02_a")["H100"]["steps"] == ["plain", "fast"]
    said = gains.expected("02_a")
    assert "No training run of a GPU is recorded" in said and "The model missed" in said
    assert "modelled, H100: plain 100 ms → fast 50.0 ms a step of 8 images, × 2.00" in said


def test_the_model_of_the_same_card_is_recorded_beside_the_measured_run(monkeypatch):
    monkeypatch.setenv("DLOJZ_RECORD", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "hardware", lambda: {"device_name": "NVIDIA H100 80GB HBM3"})
    here = {"hardware": {"device_name": "NVIDIA H100 80GB HBM3"}}
    gains.keep("02_a", "first", *(replace(a_record("x", s), **here) for s in (0.1, 0.04)))
    assert gains.beside("02_a") is None and gains.beside("03_b") is None
    gains.keep_modelled("02_a", "A100", a_record("plain", 0.08), a_record("fast", 0.03))
    assert gains.beside("02_a") is None, "the model of another card is not set beside it"
    gains.keep_modelled("02_a", "H100", a_record("plain", 0.08), a_record("fast", 0.02))
    said = (
        "modelled, H100: 100 ms → 40.0 ms a step, × 2.50; measured 100 ms → 40.0 ms (+0 % off the measured gain of the "
    )
    assert gains.beside("02_a") == said + "step alone)", "batches that came late are no error of the model"
    gains.keep_modelled("02_a", "H100", a_record("plain", 0.08), a_record("fast", 0.02), loads=True)
    assert "measured 120 ms → 60.0 ms (+25 % off the measured gain of the step, with its" in gains.beside("02_a")
    found = recorded.load("02_a", "modelled")
    assert found["error"] == pytest.approx(0.25) and found["errors of a step"] == pytest.approx([-1 / 6, -1 / 3])
    assert recorded.load("02_a", "gain"), "what was measured stays"
    said = gains.expected("02_a")
    assert "recorded on NVIDIA H100" in said and "+25 % off the measured gain" in said and "missed" not in said
    assert "H100: × 2.50 (+25 % off the measured gain" in repr(gains.table())


def test_different_runs_are_refused():
    with pytest.raises(ValueError, match="not the same training run"):
        gains.keep("02_a", "cheat", a_record("x"), a_record("y", batch_size=16))


def test_records_without_counted_steps_are_refused():
    empty = measure.new_record("empty", "cpu")
    with pytest.raises(ValueError, match="no step that counts"):
        gains.keep("02_a", "nothing", empty, empty)


def test_damaged_files_count_as_none(tmp_path):
    gains.keep("02_a", "first", a_record("x"), a_record("y"))
    gains._here.clear()
    before = tmp_path / "state" / "gains" / "02_a.before.json"
    whole = before.read_text()
    before.write_text("{")
    assert gains.kept() == []
    before.write_text(whole.replace('"technique"', '"another"'))
    assert [gain.technique for gain in gains.kept()] == ["first"]
    # the run was ended between the two files of a pair of another size
    gains.keep("02_a", "first", *(a_record(name, batch_size=7) for name in "xy"))
    gains._here.clear()
    before.write_text(whole)
    assert gains.kept() == [] and "No gain" in str(gains.table())


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "file"))
    gains.keep("02_a", "first", a_record("x"), a_record("y"))
    assert [gain.technique for gain in gains.kept()] == ["first"]


def test_nothing_is_recorded_without_a_gpu(monkeypatch):
    monkeypatch.setenv("DLOJZ_RECORD", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorded.note("02_a", "x", 1)
    assert not recorded.FOLDER.exists() and recorded.load("02_a", "x") is None and recorded.where("02_a") is None
    assert recorded.line("02_a", "x").startswith("Nothing is recorded")
    recorded.note("02_a", "start", 2.5, on_cpu=True)
    assert recorded.load("02_a", "start") == 2.5


def test_recorded_results_of_one_run_stay_together(monkeypatch):
    monkeypatch.setenv("DLOJZ_RECORD", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = {"device_name": "NVIDIA X"}
    monkeypatch.setattr(measure, "hardware", lambda: device)
    recorded.note("02_a", "x", 1)
    recorded.note("02_a", "y", [2.0])
    assert (recorded.load("02_a", "x"), recorded.load("02_a", "y")) == (1, [2.0])
    assert recorded.line("02_a", "y").startswith("recorded on NVIDIA X, ") and recorded.line("02_a", "y").endswith(
        ": [2.0]"
    )
    device["device_name"] = "NVIDIA Y"
    recorded.note("02_a", "y", 3)
    assert recorded.load("02_a", "x") is None, "results of two devices must not mix"
    assert recorded.where("02_a").startswith("NVIDIA Y, torch ")


def test_damaged_recording_is_named(tmp_path):
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "02_a.json").write_text("{")
    with pytest.raises(measure.RecordError, match="02_a.json is damaged"):
        recorded.load("02_a", "x")


def test_run_counts_the_setting_s_steps():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).to(training_run.device())
    record = training_run.run("tiny", model=model, loader=[a_batch(), a_batch()])
    size = training_run.setting()
    assert len(record.steps) == len(record.losses) == size.steps + size.warmup
    assert record.warmup == size.warmup and {"loading", "step", "total"} == record.steps[-1].keys()
    assert record.losses[-1] < record.losses[0]


def test_fast_step_computes_in_the_fast_precision_and_channels_last():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 4))
    model, seen = model.to(training_run.device()), []
    model[0].register_forward_hook(lambda m, x, y: seen.append((x[0], y)))
    images, labels = a_batch()
    before = model[2].weight.clone()
    optimizer = training_run.make_optimizer(model.parameters())
    loss, logits = training_run.fast_step(model, images, labels, optimizer, training_run.device())
    assert seen[0][0].is_contiguous(memory_format=torch.channels_last) and seen[0][1].dtype == precision.fast_dtype(
        training_run.device()
    )
    assert loss.shape == () and logits.shape == (len(labels), 4) and not (loss.requires_grad or logits.requires_grad)
    assert not torch.equal(before, model[2].weight)


def test_run_refuses_an_empty_loader():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="gave no batch"):
        training_run.run("empty", model=model, loader=[])


def test_loader_gives_the_setting_s_batches():
    size = training_run.setting()
    images, labels = next(iter(training_run.make_loader(num_workers=0)))
    assert images.shape == (size.batch_size, 3, size.image_size, size.image_size) and labels.shape == (size.batch_size,)

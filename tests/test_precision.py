import os
import subprocess
import sys

import torch

from dlojz_tp.training import precision, training_run


def test_a_processor_held_to_avx2_computes_in_float32():
    code = "from dlojz_tp import precision; print(precision.bfloat16_pays(), precision.fast_dtype('cpu'))"
    held = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = subprocess.run([sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "torch.float32"]


def test_the_trial_decides_where_the_processor_has_the_instructions(monkeypatch):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert not precision.bfloat16_pays()
        return
    for half, single in ((1e-3, 2e-3), (2e-3, 1e-3)):
        monkeypatch.setattr(precision, "_seconds", {torch.bfloat16: half, torch.float32: single}.get)
        assert precision.bfloat16_pays.__wrapped__() == (half < single)


def test_gpus_without_bfloat16_take_float16(monkeypatch):
    for has, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert precision.fast_dtype("cuda") == dtype


def fast_losses(dtype, monkeypatch):
    monkeypatch.setattr(precision, "fast_dtype", lambda device: dtype)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) % 5
    cpu = torch.device("cpu")
    return [training_run.fast_step(model, images, labels, optimizer, cpu)[0].item() for _ in range(20)]


def test_the_fast_step_trains_in_each_precision(monkeypatch):
    plain = fast_losses(torch.float32, monkeypatch)
    assert plain[-1] < 0.7 * plain[0]
    for dtype in (torch.bfloat16, torch.float16):  # float16: a scale of 65,536 and back again
        assert all(abs(a - b) < 0.03 for a, b in zip(plain, fast_losses(dtype, monkeypatch), strict=True))

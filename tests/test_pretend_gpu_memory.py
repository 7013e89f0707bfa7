"""Copies and memory of a pretended GPU: what waits, what is late, what is held, and when it is full."""

import contextlib
import gc

import torch
from torch.nn import functional as F

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.models.llama import Llama, LlamaConfig

MIB = 2**20


def copies():
    found = {}
    x = torch.ones(4)
    for pinned in (False, True):
        for non_blocking in (False, True):
            with pretend_gpu() as gpu:
                (x.pin_memory() if pinned else x).to("cuda", non_blocking=non_blocking)
                (copy,) = gpu.copies
                found[pinned, non_blocking] = copy[:5], [wait.why for wait in gpu.waits]
    return found


def test_copies_to_the_gpu():
    found = launch.ranks(copies, n=1)[0]
    for (pinned, non_blocking), (copy, waits) in found.items():
        assert copy == ("to gpu", 16, 4, non_blocking, pinned)
        assert len(waits) == (not (pinned and non_blocking))
    assert found[False, True][1] == ["copy to gpu, not pinned"]


def converted():
    """Bytes of one number that cross: float32 on one side, bfloat16 on the other."""
    x = torch.ones(4)
    with pretend_gpu() as gpu:
        there, here = x.to("cuda"), torch.empty(4, dtype=torch.bfloat16, pin_memory=True)
        gpu.copies.clear()
        for non_blocking in (False, True):
            here.copy_(there, non_blocking=non_blocking)
            there.copy_(here, non_blocking=non_blocking)
        torch._foreach_copy_([here], [there])
        return [(copy.way, copy.item, copy.pinned) for copy in gpu.copies]


def test_another_dtype_on_the_other_side():
    down, up = ("to cpu", 4, True), ("to gpu", 4, True)
    late = ("to cpu", 2, True), ("to gpu", 2, True)
    assert launch.ranks(converted, n=1)[0] == [down, up, *late, down]


def late(wait):
    with pretend_gpu():
        x = torch.ones(2, device="cuda")
        copied, into = x.to("cpu", non_blocking=True), torch.zeros(2).pin_memory()
        into.copy_(x, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        number = torch.ones(1, dtype=torch.int64, device="cuda").to("cpu", non_blocking=True)
        if wait == "event":
            event.synchronize()
        elif wait == "item":
            x.sum().item()
        elif wait:
            torch.cuda.synchronize()
        return copied.isnan().any().item(), into.tolist() == [1.0, 1.0], number.item()


def test_copies_to_the_cpu_are_late():
    least = torch.iinfo(torch.int64).min
    due = {None: (True, False, least), "event": (False, True, least), "all": (False, True, 1), "item": (False, True, 1)}
    assert {wait: launch.ranks(late, wait, n=1)[0] for wait in due} == due


def overwritten():
    found = []
    for wait in (False, True):
        with pretend_gpu() as gpu:
            x = torch.ones(2).pin_memory()
            x.to("cuda", non_blocking=True)
            if wait:
                torch.cuda.synchronize()
            x.zero_()
            found.append(len(gpu.races))
    return found


def test_pinned_memory_is_not_overwritten_while_a_copy_reads_it():
    assert launch.ranks(overwritten, n=1)[0] == [1, 0]


def held():
    found = []
    with pretend_gpu(count=2, capacity="24 MiB") as gpu:
        x = torch.zeros(2 * MIB, device="cuda:1")  # 8 MiB
        y = x[1:]
        del x
        found.append(torch.cuda.memory_allocated(1) // MIB)
        z = y * 2
        del y, z
        found += [torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated(1) // MIB]
        torch.cuda.reset_peak_memory_stats(1)
        found += [torch.cuda.max_memory_allocated(1), torch.cuda.mem_get_info(1), gpu.peak[0]]
        small = torch.zeros(1, device="cuda")
        found.append(torch.cuda.memory_stats()["allocated_bytes.all.current"] * len(small))
        try:
            torch.zeros(7 * MIB, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            found.append(str(error).split(" Including")[0])
    return found


def test_memory_is_held_and_freed_and_full():
    assert launch.ranks(held, n=1)[0] == [
        8, 0, 16, 0, (24 * MIB, 24 * MIB), 0, 512,
        "CUDA out of memory. Tried to allocate 28.00 MiB. GPU 0 has a total capacity of 24.00 MiB of which 24.00 MiB "
        "is free.",
    ]  # fmt: skip


def reserved():
    found = []
    with pretend_gpu(capacity="24 MiB") as gpu:
        x = torch.zeros(2 * MIB, device="cuda")
        del x
        found.append(torch.cuda.memory_reserved() // MIB)
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.zeros(9 * MIB, device="cuda")
        found.append(torch.cuda.memory_reserved())
        x = torch.zeros(2 * MIB, device="cuda")
        del x
        torch.cuda.empty_cache()
        return [*found, torch.cuda.memory_reserved(), [wait.why for wait in gpu.waits]]


def test_what_was_freed_is_kept_until_the_cache_is_emptied():
    assert launch.ranks(reserved, n=1)[0] == [8, 0, 0, ["torch.cuda.empty_cache"]]


def sweep():
    """Peaks of training steps with more and more sequences, until the GPU is full."""
    peaks = {}
    with pretend_gpu(capacity="24 MiB"):
        model = Llama(LlamaConfig(vocab_size=128, width=64, layers=2, max_length=64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for n in (1, 2, 4, 8, 16, 32, 64):
            torch.cuda.reset_peak_memory_stats()
            try:
                tokens = torch.zeros(n, 33, dtype=torch.long, device="cuda")
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            except torch.OutOfMemoryError:
                break
            peaks[n] = torch.cuda.max_memory_allocated()
        held = torch.cuda.memory_allocated()
        values = sum(p.numel() for p in model.parameters())
    return peaks, held, values


def test_a_sweep_meets_a_full_memory():
    peaks, held, values = launch.ranks(sweep, n=1)[0]
    assert 1 < len(peaks) < 7 and list(peaks.values()) == sorted(peaks.values())
    assert max(peaks.values()) <= 24 * MIB
    assert held >= 3 * 4 * values  # weights and both averages of AdamW


def cast_weights():
    """Bytes held once autocast has ended, before Python's collector comes."""
    with pretend_gpu() as gpu:
        weight = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        gc.disable()
        before = gpu.live[0]
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
            torch.exp(weight)  # in float32
            within = gpu.live[0] - before
        after = gpu.live[0] - before
        gc.enable()
    return within, after


def test_casts_of_weights_go_with_their_autocast():
    assert launch.ranks(cast_weights, n=1)[0] == (4 * MIB, 0)

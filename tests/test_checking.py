"""The tools that checks are written with."""

import functools
import os
import random
import time
import weakref
from collections import deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.cuda import is_available

from dlojz_tp import launch
from dlojz_tp.judging.checking import close, describe, mistake_of, pretended, verdict_of, verdicts
from dlojz_tp.judging.checking.compare import side_by_side
from dlojz_tp.judging.probes.gpus import on_one_gpu, watched
from dlojz_tp.judging.probes.memory import attributes, held_bytes
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire, sent, until, volume
from dlojz_tp.launch import busy
from dlojz_tp.measure.operations import Operations, copies, elements_read, syncs
from dlojz_tp.works.balise import BaliseNotDone, todo


@pytest.mark.parametrize("cause", [True, False])
def test_an_unfinished_balise_in_anothers_error_is_not_done(cause):
    """As torch.compile wraps what a function raises while it is traced."""

    def check(answer):
        yield "it compiles"
        try:
            answer(4)
        except BaliseNotDone as missing:
            raise RuntimeError("backend='eager' raised:") from (missing if cause else None)

    found = verdict_of(check, (todo,), number=4, title="Try", hints={})
    assert found.verdict == "not done" and "balise 4 is not done yet" in found.hint


def test_close_knows_dtypes_shapes_and_nests():
    assert close(torch.tensor(1.0 + 1e-6), torch.tensor(1.0)) and not close(1.001, 1.0)
    assert close(torch.tensor(1.01, dtype=torch.bfloat16), 1.0) and not close(torch.tensor([1]), torch.tensor(1))
    assert close(torch.tensor([float("nan")]), torch.tensor([float("nan")])) and not close(None, 1.0)
    assert close([1.0, torch.ones(2)], (1.0, torch.ones(2))) and not close([1.0], [1.0, 2.0])
    assert not close(torch.tensor(3), torch.tensor(4)) and not close("a", 1.0)


def test_nearest_names_the_mistake():
    known = {"half": 0.5, "double": lambda: 2.0}
    assert mistake_of(2.0, known, "other") == "double" and mistake_of(3.0, known, "other") == "other"


def test_apart_shows_where_large_tensors_differ():
    due, got = torch.zeros(3, 5), torch.zeros(3, 5)
    due[0, 0] = got[0, 0] = 1.0
    got[2, 1] = 0.5
    assert describe(due) == describe(got) and side_by_side(due, got) == ("0 at [2, 1]", "0.5 at [2, 1]")
    assert side_by_side([due, due], [due, got]) == side_by_side(due, got)
    assert side_by_side("a", "a") == side_by_side(due, due[0]) == ("", "")


def test_a_keyword_that_the_answer_wrote_is_no_fault_of_its_signature():
    def wrong(x, *, bias=None):
        return sorted(x, order=bias)

    def wrong_dictionary(x, *, bias=None):
        made = {"order": bias}
        return sorted(x, **made)

    def call(f, **options):  # hands on what it was given
        return f([1], **options)

    for answer, slug in ((wrong, "raised"), (wrong_dictionary, "raised"), (lambda x: x, "signature")):
        verdict = verdict_of(lambda f: iter([call(f, bias=2)]), (answer,), number=1, title="", hints={})
        assert verdict.slug == slug, verdict.hint


def test_subnormal_numbers_count_while_a_check_runs():
    def least(answer):
        yield "the least number"
        assert torch.tensor(5e-324, dtype=torch.float64).mul(1.0).item() > 0

    torch.set_flush_denormal(True)
    try:
        verdict = verdict_of(least, (None,), number=1, title="", hints={})
        assert torch.tensor(5e-324, dtype=torch.float64).mul(1.0).item() == 0  # as it was
    finally:
        torch.set_flush_denormal(False)
    assert verdict.passed, verdict.hint


def test_describe_is_short():
    assert "2×30" in describe(torch.zeros(2, 30)) and len(describe("x" * 999)) < 210
    assert "nan" in describe(torch.tensor(float("nan"))) and "meta" in describe(torch.ones(3, device="meta"))
    assert describe([torch.tensor(0.5), (torch.ones(2), 1 / 3)]) == "[0.5, ([1, 1], 0.333333)]"
    assert describe({"a": [torch.zeros(9)]}) == "{'a': [tensor 9 float32, from 0 to 0]}"


def test_operations_keep_no_tensor():
    made = []

    def tensor():
        made.append(torch.zeros(3))
        return made[-1]

    with Operations() as operations:
        torch.stack([tensor(), tensor()]).add_(1)
        torch.zeros(3)[tensor().bool()]
    alive = [weakref.ref(x) for x in made]
    made.clear()
    assert operations.log and not [x for x in alive if x() is not None]


def test_operations_count_reads_and_synchronisations():
    values = torch.arange(100.0)
    with Operations() as operations:
        part = values[10:30].sum()
        part.item()
        values[:7].tolist()
    assert elements_read(operations, values) == 27 and len(syncs(operations)) == 2
    x = torch.randn(4, 4, requires_grad=True)
    with Operations() as operations:
        (x @ x).sum().backward()
    assert operations.calls["aten.mm"] == 3  # the backward pass is seen too


def test_shapes_choices_and_arrays_are_no_reads_of_all():
    values = torch.arange(100.0)
    with Operations() as operations:
        values.new_zeros(())
        torch.zeros_like(values)
        values[[3, 4]].sum()
        values.index_select(0, torch.tensor([1, 2, 3]))
        values.numpy()
    assert elements_read(operations, values) == 5 and syncs(operations) == ["python.numpy"]


def test_printing_waits_and_one_hot_of_known_classes_does_not():
    labels = torch.tensor([1, 2])
    with Operations() as operations:
        F.one_hot(labels, 4)
        F.one_hot(labels, num_classes=4)
    assert not syncs(operations)
    for reads in (lambda: F.one_hot(labels), lambda: str(labels), lambda: f"{labels}", lambda: f"{labels.sum():d}"):
        with Operations() as operations:
            reads()
        assert syncs(operations)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_copies_between_devices(mode):
    x = torch.ones(3)
    with mode(), Operations() as operations:
        x.to("meta", non_blocking=True)
        x.to("meta")
        torch.empty(3, device="meta").copy_(x, non_blocking=True)
    assert copies(operations, "cpu", "meta") == [True, False, True]


def on_a_gpu(gpu, device):
    x, y = torch.ones(4).pin_memory(), torch.ones(4)

    def program(x, y):
        print("once is enough")
        (x.to(device, non_blocking=True) > 0).any().item()
        y.to(device, non_blocking=True)
        x.pin_memory()
        return y.to(device) + y

    return watched(gpu, program, x, y), watched(gpu, lambda: x.cuda() + x.to(device)), watched(gpu, str, x.to(device))


def test_what_a_gpu_would_show_is_told_in_words(capsys):
    program, elsewhere, printed = on_one_gpu(on_a_gpu)
    assert program.reads == ["a value is read, in `(x.to(device, non_blocking=True) > 0).any().item()`"]
    assert program.unpinned == [", in `y.to(device, non_blocking=True)`"]
    assert len(program.there) == 3 and len(program.pinned) == 1
    assert program.misplaced and not program.other_gpu and "cpu" in program.error
    assert elsewhere.misplaced and elsewhere.other_gpu
    assert len(printed.reads) == 1 and "printed" in printed.reads[0]
    assert not capsys.readouterr().out


def test_what_fails_on_a_gpu_without_a_known_word_is_not_judged():
    assert on_one_gpu(lambda gpu, device: 1 / 0) is None
    with pytest.raises(launch.RankError, match="division by zero"):
        on_one_gpu(lambda gpu, device: 1 / 0, must=True)


def traffic_of(size):
    x = torch.ones(size)
    with Traffic() as traffic:
        dist.all_reduce(x)
        parts = [torch.empty(size) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
    return traffic.names(), traffic.volume()


def traffic_into_tensors():
    whole, part = torch.ones(8), torch.ones(4)
    with Traffic() as traffic:
        dist.barrier()
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        torch.distributed._functional_collectives.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD).sum()
    return [(call.name, call.bytes) for call in traffic.calls], traffic.names()[0]


def test_traffic_counts_what_is_handed_in_not_what_is_written():
    wanted = [("all_gather", 16), ("reduce_scatter", 32), ("reduce_scatter", 32)]
    assert launch.ranks(traffic_into_tensors, n=2) == [(wanted, "barrier")] * 2


def test_traffic_counts_collectives_and_bytes():
    for names, size in launch.ranks(traffic_of, 25, n=2):
        assert names == ["all_reduce", "all_gather"] and size == 200


def messages_and_groups():
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    with Traffic() as traffic:
        traffic.mark("before")
        if rank < 2:
            dist.all_reduce(torch.ones(6, dtype=torch.float64), group=pair)
            (dist.send if rank else dist.recv)(torch.ones(3), 1 - rank)
        traffic.mark("after")
        dist.broadcast(torch.ones(3), 2)
    return traffic.events


def test_traffic_tells_groups_peers_dtypes_and_order():
    found = launch.ranks(messages_and_groups, n=3)
    for rank, other in enumerate(("recv", "send")):
        before, total, message, after, cast = found[rank]
        assert (before[:2], after[:2]) == (("before", None), ("after", None))
        assert total == ("all_reduce", 48, 2, None, torch.float64)
        assert message == (other, 12, 3, 1 - rank, torch.float32) and cast == ("broadcast", 12, 3, 2, torch.float32)
        assert until(found[rank], "after") == [before, total, message] and sent(found[rank]) == [total, message, cast]
        assert volume(found[rank]) == 72 and on_the_wire(found[rank]) == 48 + 12 * rank + 8
    assert sent(found[2]) == [cast]


def test_held_bytes_counts_shared_memory_once():
    x = torch.zeros(100)
    assert held_bytes([x, {"view": x[:10]}, (torch.zeros(5, dtype=torch.int8),)]) == 405


def test_held_bytes_looks_into_objects():
    class Slots:
        __slots__ = ("x",)

    class Keeper:
        pass

    keeper, slots = Keeper(), Slots()
    slots.x, keeper.slots, keeper.itself = torch.zeros(10), slots, keeper
    keeper.queue = deque([torch.zeros(5).numpy(), "text", len, Keeper])
    assert held_bytes(keeper) == 60 and attributes(slots) == {"x": slots.x}


def asks_by_name():
    return is_available()


def test_pretended_reaches_functions_imported_by_name():
    real = torch.cuda.is_available

    def inside():
        return (is_available(), asks_by_name(), torch.cuda.is_available(), real())

    for answer in (inside, functools.partial(inside)):
        with pretended([(torch.cuda, "is_available", lambda: "pretended")], answer):
            assert answer() == ("pretended",) * 4
    assert torch.cuda.is_available is real and is_available is real and "pretended" not in inside()


TABLE, PARTIAL = {"gpu": torch.cuda.is_available}, functools.partial(torch.cuda.is_available)


def test_pretended_reaches_tables_partials_and_defaults():
    def inside(gpu=is_available, *, named=is_available):
        return gpu(), named(), TABLE["gpu"](), PARTIAL()

    with pretended([(torch.cuda, "is_available", lambda: "pretended")], inside):
        assert inside() == ("pretended",) * 4
    assert "pretended" not in inside() and TABLE["gpu"] is is_available


def test_what_cannot_be_used_is_not_called_a_mistake_in_the_answers_code():
    code = "def check(answer):\n    yield 'something'\n    answer() + 1"
    namespace = {}
    exec(compile(code, launch.__file__, "exec"), namespace)  # stands for a line of the course

    def slug(answer):
        return verdict_of(namespace["check"], (answer,), number=1, title="", hints={}).slug

    assert slug(lambda: 1 / 0) == "raised" and slug(lambda: [1]) == "unusable"


def test_the_line_below_is_there_where_an_error_was_caught_and_another_one_raised():
    code = (
        "def check(answer):\n    yield 'something'\n"
        "    try:\n        answer()\n    except Exception as e:\n        raise ValueError from e"
    )
    namespace = {}
    exec(compile(code, launch.__file__, "exec"), namespace)  # stands for a line of the course
    verdict = verdict_of(namespace["check"], (lambda: 1 / 0,), number=1, title="", hints={})
    assert verdict.slug == "raised" and "1 / 0" in verdict.details.splitlines()[0]


def test_an_error_that_stands_behind_itself_is_told():
    def answer():
        try:
            raise ValueError
        except ValueError as error:
            raise error from error

    def check(answer):
        yield "something"
        answer()

    assert verdict_of(check, (answer,), number=1, title="", hints={}).slug == "raised"


def test_checks_run_their_ranks_on_the_cpu(monkeypatch):
    """On a node with several GPUs NCCL would refuse the CPU tensors that checks hand to ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    seen = []

    def check():
        seen.append(launch.backend(2))
        yield "nothing"

    assert verdict_of(check, (), number=1, title="", hints={}).passed
    assert (seen, launch.backend(2)) == (["gloo"], "nccl")


def test_a_verdict_depends_neither_on_the_settings_nor_on_the_draws_of_the_notebook():
    def check():
        state = (torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled())
        seen.append(
            (*state, torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.ones(2).dtype)
        )
        seen[-1] += (torch.rand(1).item(), random.random(), np.random.random())  # noqa: NPY002
        yield "the settings"
        torch.set_grad_enabled(False)

    seen = []
    assert verdict_of(check, (), number=1, title="", hints={}).passed
    draw = torch.rand(1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autograd.set_detect_anomaly(True), torch.autocast("cpu"):
            assert verdict_of(check, (), number=1, title="", hints={}).passed
            assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu") and torch.is_anomaly_enabled()
        assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta" and torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
    assert seen[0] == seen[1] and seen[0][:4] == (torch.float32, "cpu", True, False)
    assert torch.equal(before, torch.get_rng_state()) and draw.item() != seen[0][6]


def test_a_busy_machine_gives_more_time(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * os.cpu_count(), 0, 0))
    assert busy.factor() == 3.0
    clock = busy.Clock()
    now = time.monotonic()
    for spent, waited, passed in ((9, 0, False), (31, 0, True), (40, 35, False), (59, 58, False), (61, 60, True)):
        monkeypatch.setattr(time, "monotonic", lambda spent=spent: now + spent)
        monkeypatch.setattr(busy.proc, "waited", lambda _, waited=waited: clock._waited + waited)
        assert clock.passed(10) == passed, (spent, waited)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0, 0))
    assert busy.factor() == 1.0


def test_a_failed_rank_is_told_in_words_and_its_stack_is_folded():
    def check():
        yield "it runs"
        trace = 'Traceback:\n  File "/tmp/kernel/1.py", line 3, in f\n    x.foo\n    ~~~~~\nAttributeError: foo'
        raise launch.RankError(1, 2, "raised", "raised AttributeError: foo", trace)

    verdict = verdict_of(check, (), number=1, title="", hints={})
    assert verdict.hint == "rank 1 of 2 raised AttributeError: foo\n1.py, line 3: x.foo"
    assert verdict.slug == "rank-failed" and verdict.details.startswith("Traceback")


@pytest.mark.parametrize(
    "expected, got, texts",
    [
        (["dict"], ["str", "dict"], ("dict", "str, dict")),
        ([""], ["", "cores"], ("", "cores")),
        ([], ["labels on cpu"], ("", "labels on cpu")),
        ({}, "another object", ("", "another object")),
        (["a parameter"], [], ("a parameter", "nothing")),
        (False, True, ("", "")),
        (["a", 1], [2], ("['a', 1]", "[2]")),
        (None, "an error", ("", "an error")),
    ],
)
def test_words_are_shown_without_brackets(expected, got, texts):
    assert verdicts._texts(expected, got) == texts

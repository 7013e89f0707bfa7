"""A run of pytest reads the banks of those works whose answers it may ask for, and of no others."""

from types import SimpleNamespace

import pytest

from dlojz_tp.works import source
from tests import chosen_works

TEXT = "test_answer[04_profiler-2-right-L\ntest_answer[04_profiler-2-no-wait-L"


@pytest.mark.parametrize(("keyword", "held"), [
    ("profiler-2-", True),
    ("Profiler-2-no-wait-L17]", True),  # lines are not known before the bank is read
    ("fsdp", False),
    ("fsdp or no-wait", True),
    ("profiler and not fsdp", True),
    ("profiler and fsdp", False),
    ("not fsdp", True),
    ("not profiler-2 and not profiler-3", True),  # it need not be in all of them
])  # fmt: skip
def test_a_word_that_is_in_no_name_of_a_work_chooses_it_not(keyword, held):
    assert chosen_works.may_hold(keyword, TEXT) == held


def chosen(*arguments, keyword=""):
    config = SimpleNamespace(args=list(arguments), option=SimpleNamespace(keyword=keyword))
    return [work.name for work in chosen_works.of(config, [source.find(name) for name in source.names()])]


def test_the_works_that_are_asked_for():
    assert chosen("tests/test_answers.py", keyword="fine_tuning-1-") == ["21_fine_tuning"]
    assert chosen("tests/test_answers.py::test_answer[09_ddp-1-right-L3]") == ["09_ddp"]
    assert chosen("tests") == chosen("tests/test_answers.py::test_answer") == source.names()
    assert "20_deepspeed_and_friends" in chosen("tests", keyword="ipynb or _and_friends and not friends-1")
    assert "21_fine_tuning" not in chosen("tests", keyword="ipynb or _and_friends and not friends-1")

"""On a busy core, which the test makes itself, no right answer fails. DLOJZ_BUSY_VERDICTS=200 judges more of them.

It is one core of the machine: the tests that run beside have the others, and would fail for time.
"""

import contextlib
import itertools
import os
import subprocess
import sys

import psutil
import pytest

from dlojz_tp import course, launch
from dlojz_tp.judging import checks
from dlojz_tp.works import source
from tests.answers.bank import before

LOAD = 15  # busy programs on it
BALISES = (
    ("08_data_parallel_under_the_hood", 1), ("00_welcome", 2), ("10_learning_rate_and_large_batch", 3),
    ("00_welcome", 1), ("08_data_parallel_under_the_hood", 2), ("11_hyperparameter_search", 1),
)  # fmt: skip
VERDICTS = int(os.environ.get("DLOJZ_BUSY_VERDICTS", "4"))


@pytest.fixture
def busy_machine():
    launch.ranks(abs, 1)  # a cold start would take most of the time
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]  # its server of ranks, too
    cores = ours[0].cpu_affinity()
    _hold(ours, cores[-1:])
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(LOAD)]
    yield
    for other in others:
        other.kill()
        other.wait()
    _hold(ours, cores)


def _hold(processes, cores):
    """Have these run on these cores, and what they start."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.cpu_affinity(cores)


def test_no_right_answer_fails_on_a_busy_machine(request):
    works = {name: source.find(name) for name, _ in BALISES}
    answers = {}
    for name, number in BALISES[:VERDICTS]:
        names = before(name, number + 1)
        answers[name, number] = tuple(names[each] for each in works[name].balises[number].answers)
        checks.modules(works[name].module)
    request.getfixturevalue("busy_machine")
    found = [
        course.judge(works[name], number, given)
        for (name, number), given in itertools.islice(itertools.cycle(answers.items()), VERDICTS)
    ]
    assert len(found) == VERDICTS
    assert {verdict.verdict for verdict in found} <= {"pass", "could not judge"}, [v for v in found if not v.passed]

"""`--skip-unchanged`: a test that passed on this machine is not run again before something that it depends on changes.

Every run notes its passes in the checkout's .pytest_cache, by fingerprint (`fingerprints`): so a pass outlives other
edits, and the numbers of lines. A notebook is skipped whole or not at all. A pass at the second try is none.
"""

import collections
import functools
import time

import pytest

from dlojz_tp.authoring import banks
from dlojz_tp.works import source
from tests import fingerprints

KEY, DAYS = "dlojz/passed", 60
STARTED = time.time_ns()


def pytest_addoption(parser):
    parser.addoption("--skip-unchanged", action="store_true", help="leave out what passed here before")


def pytest_configure(config):
    fingerprints.machine()  # before libraries write into the environment
    if source.ROOT == fingerprints.ROOT:  # else the tests look at another checkout than this one
        config.pluginmanager.register(Skips(config), "skip_unchanged")


class Skips:
    """The plugin of one process: the controller keeps the passes, workers get them from it."""

    def __init__(self, config):
        self.config, self.worker = config, hasattr(config, "workerinput")
        self.known = set(config.workerinput["passed"]) if self.worker else set(self._noted())
        self.passed, self.failed, self.left_out = set(), set(), {}

    def _noted(self) -> dict[str, int]:
        """{fingerprint: day of its last pass}"""
        return self.config.cache.get(KEY, {}) if hasattr(self.config, "cache") else {}  # -p no:cacheprovider

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["passed"] = sorted(self.known) if self.config.option.skip_unchanged else []

    @pytest.hookimpl(trylast=True)  # after what -k and -m leave out
    def pytest_collection_modifyitems(self, config, items):
        self.whole = not config.option.keyword and not any("::" in arg for arg in config.args)
        if config.option.skip_unchanged:
            notebooks = collections.defaultdict(list)
            for item in items:
                self._note(item)
                if item.path.suffix == ".ipynb":
                    notebooks[item.path].append(item)
            again = {path for path, cells in notebooks.items() if any(cell.print_ not in self.known for cell in cells)}
            unchanged = [item for item in items if item.print_ in self.known and item.path not in again]
            self.left_out = dict(collections.Counter(map(_kind, unchanged)))
            left_out = set(map(id, unchanged))
            items[:] = [item for item in items if id(item) not in left_out]
            config.hook.pytest_deselected(items=unchanged)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Where nothing is left out, only the process that runs a test asks what it depends on."""
        if not hasattr(item, "files"):
            self._note(item)

    def _note(self, item):
        item.print_, item.files = None, ()
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.suffix == ".ipynb":
            if not self.whole:  # cells that ran without those before them
                return
            texts, files = fingerprints.notebook(item.path)
            texts = [*texts, item.name]
        elif hasattr(parameters.get("answer"), "slug"):
            texts, files = fingerprints.answer(parameters["answer"], _lines(parameters["answer"].work))
        else:
            given = (getattr(value, "name", value) for value in parameters.values())
            works = frozenset(value for value in given if value in source.names())
            texts, files = [item.nodeid], fingerprints.unit(item.path, works)
        item.print_, item.files = fingerprints.of([item.path.parent.name, *texts], files), files
        item.user_properties.append(("fingerprint", item.print_))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        if report.when == "call" and report.passed and _touched(item.files):
            report.user_properties = [pair for pair in report.user_properties if pair[0] != "fingerprint"]

    def pytest_runtest_logreport(self, report):
        found = dict(report.user_properties).get("fingerprint")
        if not report.passed:  # failed, skipped, or a first try that failed
            self.failed.add(found)
        elif report.when == "call":
            self.passed.add(found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.worker:
            self.config.workeroutput["left_out"] = self.left_out
            return
        today = int(time.time() // 86400)
        noted = {one: day for one, day in self._noted().items() if today - day < DAYS}
        noted |= dict.fromkeys(self.passed - {None}, today)
        if hasattr(self.config, "cache") and self.passed | self.failed:
            self.config.cache.set(KEY, {one: day for one, day in noted.items() if one not in self.failed})
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter):
        if self.left_out:
            counts = ", ".join(f"{number} {kind}" for kind, number in self.left_out.items())
            terminalreporter.write_line(
                f"not run again: {counts}. They passed here, and nothing that they depend on has changed since; "
                "make test-all runs everything."
            )


@functools.cache
def _lines(work: str) -> dict[str, set[int]]:
    """The lines of all answers to a work, by file."""
    lines = collections.defaultdict(set)
    for one in banks.of(source.find(work)).answers:
        lines[one.file].add(one.line)
    return lines


def _kind(item) -> str:
    if item.path.suffix == ".ipynb":
        return "cells of notebooks"
    return "answers" if item.name.startswith("test_answer[") else "other tests"


def _touched(files) -> bool:
    """Whether one of the files was written, or taken away, while the tests ran: then nobody knows what passed."""
    try:
        return any(path.stat().st_ctime_ns > STARTED for path in files)
    except FileNotFoundError:
        return True

"""Says at the end of a run what each practical work and each slow file of tests cost in seconds of processor time.

Counted are the process that runs the tests and all below it, those that have ended too: ranks are children of a server
that lives on. Processes that leave the family before they end, as the ranks of a killed notebook, are missed.
"""

import collections
import contextlib
import os
import re
import resource

import psutil
import pytest

from tests.fingerprints import source

KEY = "dlojz/cpu_seconds"
ALL = {"tests", "solutions", "notebooks"}
SHOWN = 5.0  # seconds: what costs less is summed up
COLUMNS = ("answers", "solution", "notebook", "tests")


def pytest_configure(config):
    config.pluginmanager.register(Seconds(config), "cpu_seconds")


class Seconds:
    """The plugin of one process; the controller sums up what its workers send."""

    def __init__(self, config):
        self.config, self.spent = config, collections.Counter()
        self.last = None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.last = used() if self.last is None else self.last
        yield
        if nextitem is None or _key(nextitem) != _key(item):
            now = used()
            self.spent[_key(item)] += max(now - self.last, 0)  # a server that was killed took its ranks' seconds along
            self.last = now

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.spent.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_sessionfinish(self, exitstatus):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu_seconds"] = dict(self.spent)
        elif self.spent and exitstatus < pytest.ExitCode.INTERRUPTED and self._all() and hasattr(self.config, "cache"):
            self.config.cache.set(KEY, dict(self.spent))  # `make weight` shows it

    def _all(self) -> bool:
        """Whether this is what `make test-all` runs: else a part of a work would look like all of it."""
        option = self.config.option
        part = option.skip_unchanged or option.keyword or option.markexpr or os.environ.get("DLOJZ_TURN")
        return set(self.config.args) == ALL and not part

    def pytest_terminal_summary(self, terminalreporter):
        rows = collections.defaultdict(collections.Counter)
        for key, seconds in self.spent.items():
            name, column = key.split("|")
            rows[name][column] += seconds
        small = [name for name, row in rows.items() if row.total() < SHOWN]
        for name in small:
            rows["the rest"].update(rows.pop(name))
        total = sum(self.spent.values())
        if total < 60 or hasattr(self.config, "workerinput"):
            return
        terminalreporter.section("seconds of processor time")
        terminalreporter.write_line("".join(f"{word:>10}" for word in (*COLUMNS, "all")))
        for name in sorted(rows):
            row = rows[name]
            numbers = [f"{row[column]:10.0f}" if row[column] else " " * 10 for column in COLUMNS]
            terminalreporter.write_line(f"{''.join(numbers)}{row.total():10.0f}  {name}")
        terminalreporter.write_line(f"{total:{10 * len(COLUMNS) + 10}.0f}  together")


def used() -> float:
    """Seconds of processor time of this process and all its children, living and ended."""
    mine = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = sum(each.ru_utime + each.ru_stime for each in mine)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _key(item) -> str:
    """The work, or the file, that a test belongs to, and its column of the table."""
    if item.path.suffix == ".ipynb":
        return f"{item.path.stem}|{'solution' if item.path.parent.name == 'solutions' else 'notebook'}"
    work = next((name for name in source.names() if re.search(rf"\[{name}\b", item.name)), None)
    if item.path.name == "test_answers.py" and work:
        return f"{work}|{'answers' if item.name.startswith('test_answer[') else 'tests'}"
    return f"{item.path.name}|tests"

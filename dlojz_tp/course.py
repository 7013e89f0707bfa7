"""What a notebook opens: checks, help for anyone who is late, and progress."""

import dataclasses
import inspect
import os

from dlojz_tp import guesses, progress
from dlojz_tp.cards import render
from dlojz_tp.cards.verdict import BROKEN, DONE, EDGE, Verdict
from dlojz_tp.classroom import telling
from dlojz_tp.judging import checks, contest
from dlojz_tp.judging.checking import breakage, mistakes, originals, verdicts
from dlojz_tp.judging.checking.usual_state import usual_state
from dlojz_tp.launch import starting
from dlojz_tp.works import balise, open_task, running, source


class CheckFailed(Exception):
    """A verdict was not a pass while DLOJZ_STRICT asks for an error; only automatic runs set it."""


GIVEN = "by catch_up"
REPLACED = (
    "Nothing is counted: the check calls this function too. Leave out the line that replaces it, restart the kernel. "
    "To count calls, put the original back in a `finally`."
)
MISUSED = "not callable", "has no attribute"
HIDDEN = "Nothing is counted. Give the variable another name, run `del {name}`, then the first cell, and check again."
LONG_S = 5.0  # a verdict that takes longer needs a word
_given: dict[tuple[str, int], list] = {}  # what catch_up defined for a balise of a work, in this process
_passed: dict[tuple[str, int], tuple] = {}  # the trainee's own answers whose last verdict here is a full pass


class Course:
    """An open practical work. Get one with `course.open(name)`."""

    def __init__(self, work: source.Work, namespace: dict):
        self.work, self._namespace = work, namespace
        self._stands_in: set[int] = set()  # balises for which the course's answers stand, unasked

    def __repr__(self):
        return f"{self.work.title} · {len(self.work.balises)} balises"

    def __reduce__(self):  # a function of the notebook that mentions `tp` can then travel to a rank
        return _use, (self.work, {})

    def check(self, number: int, *answers):
        """Judge the answers of balise `number` and show the verdict; never raises for a wrong answer."""
        if number not in self.work.balises:
            return self._no_such(number)
        names = self.work.balises[number].answers
        if len(answers) != len(names):
            call = f"tp.check({', '.join([str(number), *names])})"
            return render.show(render.line(f"balise {number} is checked with what you wrote for it: {call}"))
        from dlojz_tp.cards import calm

        given = _given.get((self.work.name, number), [])
        theirs = any(answer is one for answer in answers for one in given)
        found = calm.not_run(self.work.balises[number], answers)
        if not found and theirs and number in self._stands_in:
            return render.show(
                render.line(f"balise {number} is further: to be judged, write yours at todo({number})", GIVEN)
            )
        found = found or self._judged(number, answers)
        if found.verdict in DONE and theirs:
            found = dataclasses.replace(found, verdict=GIVEN)
        if found.verdict != BROKEN:
            progress.record(self.work.name, number, found.verdict)
            _passed.pop((self.work.name, number), None)
        if found.verdict == "pass":
            _passed[self.work.name, number] = answers
        telling.tell(self.work.name, number, found.verdict, found.slug)
        render.show(render.verdict(found))
        wrong = found.verdict in ("fail", EDGE, BROKEN) and found.slug != verdicts.NOT_INSTALLED
        if wrong and os.environ.get("DLOJZ_STRICT"):
            raise CheckFailed(f"balise {number}: {found.slug or found.got}: {found.hint}")
        return None

    def show(self, number: int, *answers):
        """Show the verdict on an answer without counting it: for looking at wrong ones."""
        render.show(render.verdict(self._judged(number, answers)))

    def _judged(self, number, answers):
        text = f"judging balise {number} for more than {LONG_S:.0f} s: your code still runs; the Stop button ends it"
        with starting.said_after(LONG_S, text):
            return judge(self.work, number, answers)

    def catch_up(self, number: int | str):
        """Define the reference solutions of balises 1 to `number` in the notebook, and show them, folded.

        "further": from now on, of each balise that is further, when its cell runs without an answer.
        """
        if not self.work.solved:
            return render.show(render.line("the course's answers are not in this copy of it: ask your instructor"))
        if number == "further":
            return self._fill_further()
        if number not in self.work.balises:
            return self._no_such(number)
        self._stands_in.difference_update(range(1, number + 1))
        balises = [self.work.balises[k] for k in range(1, number + 1)]
        names = ", ".join(name for each in balises for name in each.answers)
        said = f"now defined by the course: {names}. Your own cells are unchanged; what passes with this is marked so."
        return self._define(balises, said)

    def race(self, number: int):
        """Time the answers of balise `number` against the course's and PyTorch's own, in turn; keep the best ratio.

        Only what the check has passed in this kernel is timed. Never raises for an answer.
        """
        if number not in self.work.balises:
            return self._no_such(number)
        answers = tuple(self._namespace.get(name) for name in self.work.balises[number].answers)
        if why := contest.refused(self.work, number) or self._unraced(number, answers):
            return render.show(render.line(why))
        with starting.said_after(
            LONG_S, f"racing balise {number} for more than {LONG_S:.0f} s: the Stop button ends it"
        ):
            kept = contest.run(self.work, number, answers, self._solution(number))
        if kept and os.environ.get("DLOJZ_RACE") == "1":
            telling.tell(self.work.name, number, telling.RACED, **kept._asdict())
        return None

    def _unraced(self, number, answers) -> str:
        """Why these answers are not raced, in a line; empty if the check has passed these very objects."""
        from dlojz_tp.cards import calm

        names, passed = self.work.balises[number].answers, _passed.get((self.work.name, number))
        call = f"tp.check({', '.join([str(number), *names])})"
        if passed is None:
            return f"balise {number} does not race before an answer of your own has passed in this kernel: first {call}"
        changed = [name for name, now, then in zip(names, answers, passed, strict=True) if now is not then]
        if changed or calm.not_run(self.work.balises[number], answers):
            which = ", ".join(changed or names)
            return f"balise {number} does not race: {which} has changed since it passed, so check it again: {call}"
        return ""

    def _solution(self, number):
        """The course's answers to a balise, in a namespace of their own; None where it has none here."""
        if not self.work.solved:
            return None
        namespace = dict(self._namespace)
        try:
            for n in range(1, number + 1):
                _run(self.work.balises[n], namespace)
        except Exception as error:  # of a cell above that did not run
            what = f"{type(error).__name__}: {error}"
            return render.show(render.line(f"the course's answer cannot be defined here, so it does not race ({what})"))
        return tuple(namespace[name] for name in self.work.balises[number].answers)

    def _define(self, balises, said):
        codes = [_run(each, self._namespace) for each in balises]
        for each in balises:
            _given[self.work.name, each.number] = [self._namespace[name] for name in each.answers]
        return render.show(render.line(said, GIVEN, code=("how the course writes them", "\n\n\n".join(codes))))

    def _fill_further(self):
        from dlojz_tp.cards import calm

        def fill(number):
            balise = self.work.balises.get(number)
            if balise is not None and balise.further:
                self._stands_in.add(number)
                try:
                    self._define([balise], f"balise {number} is further: the course's answer stands in for yours")
                except Exception as error:  # of a cell above that did not run
                    render.show(render.line(f"balise {number} stays undone: {type(error).__name__}: {error}"))

        calm.fill_holes(fill)
        core = ", ".join(str(n) for n, balise in self.work.balises.items() if not balise.further)
        said = f"the core is balises {core}, about {self.work.core} minutes; others are filled in until you write them"
        render.show(render.line(said, GIVEN))

    def open_task(self, number: int):
        """Put a cell below with the names, signatures and docstrings of a balise and nothing else: write all of it.

        `tp.check(number, ...)` judges it as ever, and `back_to(number)` puts the guided cell below.
        """
        said = f"balise {number}: write all of the cell below. tp.back_to({number}) brings the guided cell back."
        self._put_below(number, open_task.stub, said)

    def back_to(self, number: int):
        """Put the guided cell of a balise below, as the notebook had it."""
        self._put_below(number, lambda each: each.code, f"the guided cell of balise {number} is below")

    def _put_below(self, number, text_of, said):
        if number not in self.work.balises:
            return self._no_such(number)
        try:
            text = text_of(source.guided(self.work.name).balises[number])
        except OSError as error:
            problem = f"the course's own notebook cannot be read: {error.strerror or error}"
            return render.show(render.line(problem, "fail"))
        shell = _shell()
        if shell is None:
            return print(text)
        shell.set_next_input(text)
        return render.show(render.line(said))

    def _no_such(self, number):
        last = max(self.work.balises, default=0)
        render.show(render.line(f"{self.work.name} has no balise {number!r}: they are numbered 1 to {last}"))

    def predict(self, question: str, guess=..., choices: tuple[str, ...] = ()) -> guesses.Guess:
        """Guess what the next cells measure: a number, a range (low, high), one of `choices`, or ... for none yet."""
        return guesses.predict(self.work.name, question, guess, choices)

    def progress(self):
        """Show the last verdict on each balise, here or in an earlier run, and guesses beside what was measured."""
        state = progress.load(self.work.name)
        rows = [(n, b.title + b.about, state.get(n, "not done")) for n, b in self.work.balises.items()]
        core = {n for n, b in self.work.balises.items() if not b.further}
        render.show(render.progress(self.work.title, rows, core, guesses.lines(self.work.name)))


def open(name: str, namespace: dict | None = None) -> Course:  # noqa: A001  (it reads course.open(...))
    """Open the practical work `name`, such as "00_welcome", for the notebook or script that calls it.

    namespace: where `catch_up` defines solutions; default the caller's globals.
    Raises source.UnknownWork with the names that exist.
    """
    work = source.find(name)
    if namespace is None:
        namespace = inspect.stack()[1].frame.f_globals
    opened = _use(work, namespace)
    telling.tell(work.name, 0, telling.OPENED)
    from dlojz_tp import launch, report
    from dlojz_tp.cards import calm
    from dlojz_tp.launch import magic

    calm.install()
    magic.install()
    report.ground()
    launch.warm(*checks.names(work.module))  # so that the first verdict over ranks comes at once
    return opened


def judge(work: source.Work, number: int, answers: tuple) -> Verdict:
    """The verdict on the answers of one balise, in this process. Raises KeyError for an unknown balise."""
    title = work.balises[number].title
    if what := originals.replaced():
        return Verdict(number, title, BROKEN, got=what, hint=REPLACED)
    with usual_state():  # a check computes some of its truths when it is first imported; and a verdict shows tensors
        found = _judge(work, number, title, answers)
    if found.verdict in (*DONE, "fail") and (what := originals.replaced()):
        return Verdict(number, title, BROKEN, found.seconds, got=what, hint=REPLACED)
    if found.verdict == "fail" and any(words in found.hint for words in MISUSED):
        code = "\n".join(cell.text for cell in work.cells if cell.kind == "code")
        if hidden := originals.hidden(answers, code):
            name, value = hidden
            what = f"{name} is a variable of this notebook ({type(value).__name__}) and hides what it stands for"
            return Verdict(number, title, BROKEN, found.seconds, got=what, hint=HIDDEN.format(name=name))
    return found


def _judge(work, number, title, answers):
    try:
        check = checks.check(work.module, number)
        records = mistakes.load(work.module, number)
        edges = mistakes.edges(work.module, number)
        hints = verdicts.hints_of(checks.hints(work.module), records)
    except Exception as error:
        return Verdict(number, title, BROKEN, got=f"{type(error).__name__}: {error}", hint=breakage.REPORT)
    return verdicts.verdict_of(
        check, answers, number=number, title=title, hints=hints, known=records["mistakes"], edges=edges
    )


def _run(each: source.Balise, namespace: dict) -> str:
    """Define the course's answers to a balise in a namespace; returns their code."""
    code, file = source.without_markers(each.code), f"<solution of balise {each.number}>"
    running.run(code, file, namespace)
    return code


def _shell():
    """The notebook that runs this; None elsewhere."""
    from IPython import get_ipython

    return get_ipython()


def _use(work, namespace):
    balise.remember_titles({n: b.title for n, b in work.balises.items()})
    return Course(work, namespace)

"""Run a check on an answer and turn whatever happens into a verdict."""

import contextlib
import functools
import inspect
import io
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping

from dlojz_tp.cards.verdict import BROKEN, EDGE, NOT_RUN, Verdict
from dlojz_tp.frameworks import NotInstalled
from dlojz_tp.judging.checking import breakage
from dlojz_tp.judging.checking.usual_state import usual_state
from dlojz_tp.judging.checking.wrong import Case, Wrong, in_case
from dlojz_tp.launch import LaunchError, RankError, busy, client, stacks
from dlojz_tp.launch.alarm import Overdue, deadline
from dlojz_tp.launch.errors import TooBusy
from dlojz_tp.measure.collector import earlier_set_aside
from dlojz_tp.works.balise import BaliseNotDone

DEADLINE = 30.0  # seconds for one check, on a machine that does nothing else: no endless loop must hold the trainee
NOT_INSTALLED = "not-installed"  # the slug where a check needs a library that is not here
LONG = 60  # characters: what a hint holds of it is not said again below
NONE = "nothing"  # in the place of an empty list
PRINTED = 2000  # characters of the answer's own prints that are shown again


# Mistakes that any answer can make. A check's own HINTS come first.
COMMON_HINTS = {
    "nothing-returned": "Nothing was returned (None). Does the function end with a return? What works in place, such as "
    "dist.all_reduce(x) or x.zero_grad(), returns None itself.",
    "raised": "Your code raised {error}. Read the line below: it is the last one of yours that ran.",
    "unusable": "What came back cannot be used as the text above says: {error}. Look at its type, its shape and its dtype.",
    "signature": "The function cannot be called as the text above it says: {error}. Keep the names and the order of its "
    "arguments.",
    "not-callable": "A function or a class was expected here, not {error}. Run the cell that defines it, then this one.",
    "not-run": NOT_RUN,
    "endless": "Nothing came back after {seconds:.0f} s. Is there a loop that never ends, or a wait for something that "
    "never comes?",
    "left": "Your code ended the program ({error}). Return from the function instead.",
    "rank-failed": "{error}",
    "wrong-device": "A tensor was made on another device than the input's: {error}. Create it with device=x.device.",
    "hidden-sync": "This makes the CPU wait for the GPU: {error}. Keep the value on the device as a tensor.",
}


def verdict_of(
    check: Callable,
    answers: tuple,
    *,
    number: int,
    title: str,
    hints: dict[str, str],
    known: list[dict] = (),
    edges: Mapping[str, set[tuple[str, str]]] | None = None,
    deadline: float = DEADLINE,
) -> Verdict:
    """Run `check(*answers)` and return its verdict. Never raises for a wrong answer; KeyboardInterrupt passes through.

    hints: {slug: text} of the check's module. known: the recorded mistakes of the balise, one of which may name a wrong
    value. edges: its mistakes at the edge, as `Case` has them. deadline: seconds, more on a busy machine. The caller's
    settings and random state are kept, and have no part in the verdict.
    """
    found = _once(check, answers, number, title, hints, Case(known, edges or {}), deadline)
    # a new server may help, and a disk that was full for a moment; nothing helps where all the time was used in vain
    if found.verdict == BROKEN and found.slug != NOT_INSTALLED and found.seconds < deadline:
        found = _once(check, answers, number, title, hints, Case(known, edges or {}), deadline)
    if found.verdict in ("fail", EDGE, BROKEN) and client.updated():
        return Verdict(number, title, BROKEN, found.seconds, got=breakage.MIXED, hint=breakage.UPDATED)
    if found.verdict in ("fail", EDGE) and (short := breakage.out_of_space()):
        return Verdict(number, title, BROKEN, found.seconds, got=short[0], hint=short[1])
    return found


def after_effects(
    check: Callable, answers: tuple, slug: str, *, hints: dict[str, str], known: list[dict]
) -> set[tuple[str, str]]:
    """The looks, as (claim, slug), that fail after the mistake `slug` in an answer that makes it."""
    case = Case(known, {slug: set()}, learning=True)
    _once(check, answers, 0, "", hints, case, DEADLINE)
    return case.overlooked


def _once(check, answers, number, title, hints, case, deadline) -> Verdict:
    seen: list[str] = []
    looking = ""
    out = io.StringIO()
    start, clock, peak = time.perf_counter(), busy.Clock(), breakage.peak()

    def verdict(word, **more):
        spent = time.perf_counter() - start
        failed = {claim for _, claim in case.kept} | ({looking} if word not in ("pass", EDGE) else set())
        held = tuple(claim for claim in dict.fromkeys(seen) if claim not in failed)
        return Verdict(number, title, word, spent, held, printed=_shorten(out.getvalue()), **more)

    def fail(slug, fields, word="fail", claim=None, **more):
        hint = hints.get(slug) or COMMON_HINTS.get(slug)
        if not hint:
            raise breakage.HintMissing(
                f"balise {number} has no hint {slug!r} on record or in a HINTS. If its bank has one, write the records: "
                "python -m dlojz_tp answers WORK BALISE --records"
            )
        text = _filled(hint, fields)
        if len(more.get("got", "")) > LONG and more["got"] in text:
            more["got"] = ""  # said already
        return verdict(word, failed=looking if claim is None else claim, slug=slug, hint=text, **more)

    def fail_with(wrong, claim=None, word="fail"):
        slug, near = case.named(wrong)
        expected, got = _texts(wrong.expected, wrong.got)
        seen_there = {"expected": expected, "got": got, "evidence": wrong.evidence or {}, "near": tuple(near)}
        return fail(slug, wrong.fields, word, claim, where=wrong.where, **seen_there)

    try:
        # many checks ask for full collections, to see what an answer keeps
        with (
            usual_state(),
            _ranks_on_cpu(),
            earlier_set_aside(),
            contextlib.redirect_stdout(out),
            deadline_of(deadline, clock),
            in_case(case),
        ):
            for claim in check(*answers):
                if looking:
                    seen.append(looking)
                looking = case.looking = claim
            if not looking:
                raise breakage.LookedAtNothing(f"the check of balise {number} looked at nothing")
            seen.append(looking)
        return fail_with(*case.kept[0], word=EDGE) if case.kept else verdict("pass")
    except BaliseNotDone as missing:
        return verdict("not done", hint=str(missing))
    except NotInstalled as missing:
        return verdict(BROKEN, slug=NOT_INSTALLED, got=str(missing), hint=missing.todo)
    except Wrong as wrong:
        if case.kept and wrong.evidence and case.named(wrong)[0] == wrong.slug:  # no known mistake: it may come of that
            return fail_with(*case.kept[0])
        return fail_with(wrong)
    except Overdue as late:
        spent = time.perf_counter() - start
        # the alarm rings on while what ranks leave is cleared away: what came before it tells more
        broke = next((error for error in stacks.chain(late) if isinstance(error, LaunchError)), None)
        if not broke and clock.had(deadline):
            return fail("endless", fields={"seconds": spent})
        what = breakage.broken(broke or TooBusy(f"the machine is too busy: {spent:.0f} s were not enough"), False)
        return verdict(BROKEN, got=what[0], hint=what[1])
    except SystemExit as error:
        return fail("left", fields={"error": f"SystemExit({error.code!r})"})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if missing := undone(error):
            return verdict("not done", hint=str(missing))
        if what := breakage.broken(error, _own_frames(error), breakage.peak() - peak):
            return verdict(BROKEN, got=what[0], hint=what[1])
        if case.kept:  # it may come of that
            return fail_with(*case.kept[0])
        slug, message = recognise(error)
        return fail(slug, fields={"error": message}, details=own_lines(error))


def undone(error: BaseException) -> BaliseNotDone | None:
    """The unfinished balise that an error comes from: compilers and loaders wrap it in errors of their own."""
    return next((one for one in stacks.chain(error) if isinstance(one, BaliseNotDone)), None)


def recognise(error: BaseException) -> tuple[str, str]:
    """Name the common mistake that an exception shows: (slug in COMMON_HINTS, what to say of it)."""
    message = f"{type(error).__name__}: {stacks.headline(error)}".strip()
    if isinstance(error, RankError):
        return "rank-failed", error.in_words()
    called_wrongly = ("missing", "takes", "unexpected keyword", "multiple values")  # not: float() argument must be ...
    misfit = isinstance(error, TypeError) and "()" in message and any(words in message for words in called_wrongly)
    word = re.search(r"unexpected keyword argument '(\w+)'", message)
    written = word and any(f"{word[1]}=" in (frame.line or "") for frame in _own_frames(error)[-1:])
    # what an answer hands on, it was given itself: by its own **options, not by a dictionary that it has made
    handed_on = word and not written and _takes_options(error)
    if misfit and (handed_on or not _called_by_them(error)):
        return "signature", str(error)
    if type(error).__name__ == "DataDependentOutputException" or "cannot be called on meta tensors" in message:
        return "hidden-sync", message
    if "out of meta tensor" in message:
        return "hidden-sync", "a copy from the device to the CPU"
    if "same device" in message or "found two different devices" in message or "expected device meta" in message:
        return "wrong-device", message
    return "raised" if _own_frames(error) else "unusable", message


def own_lines(error: BaseException) -> str:
    """The traceback of `error` without the frames of the course and of the libraries; of a rank, what it sent."""
    if isinstance(error, RankError):
        return error.traceback
    lines = [f"line {f.lineno}, in {f.name}: {(f.line or '').strip()}" for f in _own_frames(error)[-4:]]
    return "\n".join([*lines, f"{type(error).__name__}: {stacks.message(error)}"])[:1500]


def _called_by_them(error: BaseException) -> bool:
    """Whether the call that did not fit is in the answer itself: then the answer's own signature is right."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and stacks.is_trainee(frames[-1].filename)


def _takes_options(error: BaseException) -> bool:
    """Whether the innermost function of the answer's has **options of its own."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    mine = [code for code in codes if stacks.is_trainee(code.co_filename)]
    return bool(mine) and bool(mine[-1].co_flags & inspect.CO_VARKEYWORDS)


def _own_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """The lines of the answer's in the traceback of `error`, or else of what it was raised from."""
    for one in stacks.chain(error):
        frames = traceback.extract_tb(one.__traceback__)
        if mine := [frame for frame in frames if stacks.is_trainee(frame.filename)]:
            return mine
    return []


def hints_of(own: dict[str, str], records: dict | None = None) -> dict[str, str]:
    """The hints that a check can give: those on record, those of its work (`checks.hints`) and the common ones."""
    return {**COMMON_HINTS, **own, **(records or {}).get("hints", {})}


def _filled(hint: str, fields: dict) -> str:
    """The hint with its {fields}. A field that was not given is a fault of the check: the trainee reads on without it."""
    try:
        text = hint.format(**fields)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        if os.environ.get("DLOJZ_STRICT"):
            given = ", ".join(fields) or "nothing"
            raise breakage.HintMissing(f"a look gives {given}, which doesn't fill its hint: {hint}") from error
        text = re.sub(r"\{[^{}]*\}", "…", hint)
    return re.sub(r"(?<!\.)([.!?])\.(?=\s|$)", r"\1", text)  # an error's own full stop, and the hint's


def _texts(expected, got) -> tuple[str, str]:
    """Both in words; of large tensors that read the same, what stands where they are farthest apart."""
    from dlojz_tp.judging.checking.compare import side_by_side

    expected = _in_dtype_of(got, expected)
    if isinstance(expected, bool) and isinstance(got, bool):  # the hint says more
        return "", ""
    texts = [_text(one) for one in (expected, got)]
    if texts[0] in (NONE, "{}"):  # of what is wrong
        texts[0] = ""
    if texts[0] == texts[1]:
        texts = side_by_side(expected, got)
    return tuple(re.sub(r" at 0x[0-9a-f]+", "", text) for text in texts)


def _text(value) -> str:
    """A value in words: of a list of words no brackets, and for an empty one NONE."""
    from dlojz_tp.judging.checking.compare import describe

    if value is None or isinstance(value, str):
        return value or ""
    if type(value) is list and all(isinstance(one, str) for one in value):
        return ", ".join(filter(None, value)) or NONE
    return describe(value)


def _in_dtype_of(got, expected):
    """Truths are float64; beside other numbers in an answer of fewer bits, the dtype would look like the mistake."""
    import torch

    from dlojz_tp.judging.checking.compare import close

    if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor) and got.shape == expected.shape):
        return expected
    floats = got.dtype in (torch.float32, torch.bfloat16, torch.float16) and expected.dtype == torch.float64
    return (
        expected.to(got.dtype)
        if floats and not close(got, expected, max(1e-4, torch.finfo(got.dtype).eps))
        else expected
    )


def _shorten(text: str) -> str:
    return text if len(text) <= PRINTED else f"… ({len(text) - PRINTED} characters left out)\n{text[-PRINTED:]}"


@contextlib.contextmanager
def _ranks_on_cpu():
    """Checks hand CPU tensors to ranks, in float64: NCCL would refuse them on a node with several GPUs."""
    from dlojz_tp.launch import place

    with place.on_cpu():
        yield


def deadline_of(seconds: float, clock: busy.Clock | None = None):
    """Inside, Overdue is raised in this thread after `seconds`, more on a busy machine, by a clock that began just now."""
    return deadline(seconds, over=functools.partial((clock or busy.Clock()).passed, seconds))

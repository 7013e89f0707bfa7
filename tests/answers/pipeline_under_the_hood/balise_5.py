"""Answers to balise 5 of 15_pipeline_under_the_hood: schedules as data."""

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 5, whole=True)

bank.hint(
    "library-schedule",
    "{name} comes from a library. Here you write it yourself.",
)
bank.instead(
    "library-schedule",
    '''
def one_f_one_b(stage, n_stages, n_micro_batches):
    """Cheat: PyTorch's list of actions of 1F1B."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    warm = min(n_stages - 1 - stage, n_micro_batches)
    ops = _get_1f1b_rank_ops(1, n_stages, warm, n_micro_batches - warm, warm, stage, lambda k: stage, lambda k: stage)
    return [("F" if a.computation_type.name == "FORWARD" else "B", a.microbatch_index) for a in ops if a is not None]
''',
)

bank.instead(
    "library-schedule",
    '''
def gpipe(stage, n_stages, n_micro_batches, _library=planner.gpipe):
    """Cheat: the course's own, kept as a default argument."""
    return [tuple(a)[:2] for a in _library(n_stages, n_micro_batches)[stage]]


def one_f_one_b(stage, n_stages, n_micro_batches, _library=planner.one_f_one_b):
    return [tuple(a)[:2] for a in _library(n_stages, n_micro_batches)[stage]]
''',
)

bank.instead(
    "library-schedule",
    '''
def one_f_one_b(stage, n_stages, n_micro_batches):
    """Cheat: the course's own, made anew from its text."""
    import inspect

    space = {"_positive": lambda *_: None}
    exec(inspect.getsource(planner.one_f_one_b), space)
    return space["one_f_one_b"](n_stages, n_micro_batches)[stage]
''',
)

bank.instead(
    "library-schedule",
    '''
def gpipe(stage, n_stages, n_micro_batches):
    """Cheat: the whole file, run under another name."""
    from pathlib import Path

    space = {"__name__": "mine"}
    exec(Path(planner.__file__).with_name("schedules.py").read_text(), space)
    return space["gpipe"](n_stages, n_micro_batches)[stage]
''',
)


# ---- schedules
WARM = "warm_up = min(n_stages - stage - 1, n_micro_batches)"


bank.hint(
    "gpipes-memory",
    "Stage {stage} of {n_stages} keeps {got} micro-batches, as many as with GPipe. In 1F1B a "
    "backward follows each forward as soon as the pipeline is full, and stage s keeps at most "
    "n_stages − s.",
)
bank.slip("gpipes-memory", (WARM, "warm_up = n_micro_batches"))
bank.hint(
    "one-more-kept",
    "Stage {stage} of {n_stages} keeps {got} micro-batches, one more than n_stages − stage. How many forwards "
    "come before the pairs?",
)
bank.slip("one-more-kept", (WARM, "warm_up = min(n_stages - 1, n_micro_batches)"))
bank.slip("one-more-kept", (WARM, "warm_up = min(n_stages - stage, n_micro_batches)"), variant=True)
bank.hint(
    "more-kept",
    "Stage {stage} of {n_stages} keeps {got} micro-batches, but n_stages − stage is the most. The "
    "number of forwards before the pairs depends on both.",
)
bank.slip("more-kept", (WARM, "warm_up = min(4 - stage - 1, n_micro_batches)"))
bank.slip("more-kept", (WARM, "warm_up = min(3 - stage, n_micro_batches)"), variant=True)
bank.slip(
    "gpipes-memory",
    ("    actions = [", "    return gpipe(stage, n_stages, n_micro_batches)\n    actions = ["),
    variant=True,
)
bank.hint(
    "no-overlap",
    "The step takes {got} units of time on {n_stages} stages, but {best} are enough: stages wait "
    "when they could work. Are there enough forwards at the start?",
)
bank.slip("no-overlap", (WARM, "warm_up = 0"))
bank.slip("no-overlap", (WARM, "warm_up = min((n_stages - stage - 1) // 2, n_micro_batches)"), variant=True)
bank.hint(
    "fewer-than-stages",
    "It fails with fewer micro-batches than stages: {error}. A stage can't start with more "
    "forwards than there are micro-batches.",
    edge=True,
)
bank.slip("fewer-than-stages", (WARM, "warm_up = n_stages - stage - 1"))
bank.slip("fewer-than-stages", (WARM, "warm_up = n_stages - stage - 1 if n_stages > n_micro_batches else min(n_stages - stage - 1, n_micro_batches)"), variant=True)  # fmt: skip
bank.hint(
    "incomplete",
    "This isn't a whole step: {error}.",
)
bank.slip("incomplete", (' + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)]', ""))
bank.slip("incomplete", ("range(n_micro_batches - warm_up, n_micro_batches)", "range(n_micro_batches - warm_up, n_micro_batches - 1)"), variant=True)  # fmt: skip
bank.hint(
    "1f1b-order",
    "In 1F1B, forwards and backwards both follow the order of the micro-batches: the oldest one's "
    "gradient comes back first.",
)
bank.slip(
    "1f1b-order",
    (
        "for k in range(n_micro_batches - warm_up, n_micro_batches)",
        "for k in reversed(range(n_micro_batches - warm_up, n_micro_batches))",
    ),
)
bank.slip("1f1b-order", ("    return actions + ", "    return actions[::1] + "), ("for k in range(n_micro_batches - warm_up, n_micro_batches)", "for k in sorted(range(n_micro_batches - warm_up, n_micro_batches), reverse=True)"), variant=True)  # fmt: skip
bank.hint(
    "gpipe-backwards",
    "The backwards go in reverse order: the last micro-batch comes first, because the last stage has just computed it.",
)
bank.slip("gpipe-backwards", ("reversed(range(n_micro_batches))", "range(n_micro_batches)"))
bank.slip("gpipe-backwards", ("reversed(range(n_micro_batches))", "sorted(range(n_micro_batches))"), variant=True)
bank.hint(
    "gpipe-forwards",
    "GPipe does all forwards first, in the order of the micro-batches, then the backwards.",
)
bank.slip(
    "gpipe-forwards",
    ("forwards = [", "forwards = list(reversed(["),
    (
        "for k in range(n_micro_batches)]\n    return forwards",
        "for k in range(n_micro_batches)]))\n    return forwards",
    ),
)
bank.slip("gpipe-forwards", ("    return forwards + ", "    return forwards[::-1] + "), variant=True)
bank.hint(
    "other-micro-batch",
    "There are {m} micro-batches, numbered from 0; the list names {got}.",
)
bank.slip(
    "other-micro-batch",
    (
        'forwards = [("F", k) for k in range(n_micro_batches)]',
        'forwards = [("F", k + 1) for k in range(n_micro_batches)]',
    ),
)
bank.slip("other-micro-batch", ("reversed(range(n_micro_batches))", "range(n_micro_batches, 0, -1)"), variant=True)
bank.hint(
    "not-a-list",
    'Return a list of actions such as ("F", 0) and ("B", 0); you returned {kind}. A schedule is run '
    "again in each step, but a generator (yield) is used up after one.",
)
bank.slip("not-a-list", ("    return forwards + ", "    forwards + "))
bank.slip(
    "not-a-list",
    ('forwards = [("F", k)', 'forwards = [f"F{k}"'),
    ('[("B", k) for k in reversed', '[f"B{k}" for k in reversed'),
)
bank.hint(
    "would-deadlock",
    "On real ranks this would never end, so it wasn't run: {error}.",
)
bank.slip("would-deadlock", ("    warm_up = min(n_stages - stage - 1, n_micro_batches)", "    warm_up = min(stage, n_micro_batches)"))  # fmt: skip
bank.slip("would-deadlock", (WARM, "warm_up = min(stage + 0 * n_stages, n_micro_batches)"), variant=True)
bank.text(
    "library-schedule",
    """
def gpipe(stage, n_stages, n_micro_batches):
    return planner.gpipe(n_stages, n_micro_batches)[stage]

def one_f_one_b(stage, n_stages, n_micro_batches):
    return planner.one_f_one_b(n_stages, n_micro_batches)[stage]
""",
)
bank.text(
    "library-schedule",
    """
from dlojz_tp.planner.schedules import gpipe as ready, one_f_one_b as ready_too

def gpipe(stage, n_stages, n_micro_batches):
    return ready(n_stages, n_micro_batches)[stage]

def one_f_one_b(stage, n_stages, n_micro_batches):
    return ready_too(n_stages, n_micro_batches)[stage]
""",
    variant=True,
)
bank.text(
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    return [("F", k) for k in range(n_micro_batches)] + [("B", k) for k in range(n_micro_batches - 1, -1, -1)]

def one_f_one_b(stage, n_stages, n_micro_batches):
    """Turn by turn: the backward of a micro-batch comes as many turns after its forward as stages lie behind."""
    late, actions = n_stages - stage - 1, []
    for turn in range(n_micro_batches + late):
        if turn < n_micro_batches:
            actions.append(("F", turn))
        if turn >= late:
            actions.append(("B", turn - late))
    return actions
''',
)
bank.text(
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    actions = []
    for kind in "FB":
        numbers = list(range(n_micro_batches))
        actions.extend((kind, k) for k in (numbers if kind == "F" else numbers[::-1]))
    return actions

def one_f_one_b(stage, n_stages, n_micro_batches):
    """By a rule: backward whenever as many are kept as may be."""
    actions, forward, backward = [], 0, 0
    while backward < n_micro_batches:
        if forward < n_micro_batches and forward - backward < n_stages - stage:
            actions.append(("F", forward))
            forward += 1
        else:
            actions.append(("B", backward))
            backward += 1
    return actions
''',
)
bank.text(
    None,
    '''
def gpipe(stage, n_stages, n_micro_batches):
    return (*(("F", k) for k in range(n_micro_batches)), *(("B", n_micro_batches - 1 - k) for k in range(n_micro_batches)))

def one_f_one_b(stage, n_stages, n_micro_batches):
    """Two queues."""
    late = n_stages - stage - 1
    order = []
    queue_f, queue_b = list(range(n_micro_batches)), list(range(n_micro_batches))
    for _ in range(min(late, n_micro_batches)):
        order.append(["F", queue_f.pop(0)])
    while queue_b:
        if queue_f:
            order.append(["F", queue_f.pop(0)])
        order.append(["B", queue_b.pop(0)])
    return [tuple(action) for action in order]
''',
)
bank.slip("not-a-list", ('return forwards + [("B", k) for k in reversed(range(n_micro_batches))]',
          'yield from forwards\n    yield from (("B", k) for k in reversed(range(n_micro_batches)))'))  # fmt: skip
bank.slip("not-a-list", ("    return actions + ", "    yield from actions + "), variant=True)

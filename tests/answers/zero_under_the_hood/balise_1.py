"""Answers to balise 1 of 13_zero_under_the_hood: the memory formula."""

import inspect
import math
import sys

import torch

from dlojz_tp import planner
from dlojz_tp.planner import state_bytes
from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 1, whole=True)
slip = bank.slip

TABLE = """
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    widths = {"adam": 8, "momentum": 4, "sgd": 0}
    sizes = [2, 2, 4 + widths[optimizer]] if mixed_precision else [4, 4, widths[optimizer]]
    sizes = [n_parameters * s for s in sizes]
    for k in range(stage):
        sizes[2 - k] /= world_size
    return sizes
"""
bank.text(None, TABLE)


@bank.right()
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    each = math.ceil(n_parameters / world_size)  # the padded shard of a rank
    held = [each if stage > k else n_parameters for k in (2, 1, 0)]
    master = 4 * mixed_precision
    state = 8 if optimizer == "adam" else 4 if optimizer == "momentum" else 0
    low = 2 if mixed_precision else 4
    return torch.tensor(held, dtype=torch.float64) * torch.tensor([low, low, master + state])


@bank.right()
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    psi, n = n_parameters, world_size
    k = {"adam": 12, "momentum": 8, "sgd": 4}[optimizer]
    low = 2
    if not mixed_precision:
        k, low = k - 4, 4
    match stage:
        case 0:
            return low * psi, low * psi, k * psi
        case 1:
            return low * psi, low * psi, k * psi / n
        case 2:
            return low * psi, low * psi / n, k * psi / n
        case 3:
            return low * psi / n, low * psi / n, k * psi / n


slip("nothing-returned", ("return (", "result = ("))

bank.hint("planner-called", "planner.state_bytes has this formula. Here you write it yourself: three products.")


@bank.wrong("planner-called")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    found = state_bytes(n_parameters, world_size, stage, optimizer=optimizer, mixed_precision=mixed_precision)
    return found.parameters, found.gradients, found.optimizer


@bank.wrong("planner-called", variant=True)
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    found = planner.state_bytes(n_parameters, world_size, stage, optimizer=optimizer, mixed_precision=mixed_precision)
    return found.parameters, found.gradients, found.optimizer


bank.hint("check-called", "That is the check's own formula. Here you write it yourself: three products.")


@bank.wrong("check-called")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    theirs = sys._getframe(1).f_globals["_due"]  # whoever calls this knows what is due
    return theirs(n_parameters, world_size, stage, optimizer, mixed_precision)


@bank.wrong("check-called", variant=True)
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    for frame in inspect.stack():
        for name, value in frame.frame.f_globals.items():
            if callable(value) and name == "_due":
                return value(n_parameters, world_size, stage, optimizer, mixed_precision)
    return 0, 0, 0


bank.hint("not-three", "Three numbers are expected: (parameters, gradients, optimizer).")


@bank.wrong("not-three")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    return 16 * n_parameters / world_size


bank.variant("not-three", TABLE, ("return sizes", "return sizes[:2]"))

bank.hint("in-gigabytes", "The unit is bytes: leave the division by 1e9 to the code that prints them.", edge=True)
slip("in-gigabytes", ("share = n_parameters / world_size", "n_parameters /= 1e9; share = n_parameters / world_size"))
bank.variant("in-gigabytes", TABLE, ("n_parameters * s for", "n_parameters * s / 2**30 for"))

bank.hint("master-forgotten", "In mixed precision the optimizer also keeps a float32 copy of the parameters: 4 "
                                 "more bytes for each, sharded like its states.", edge=True)  # fmt: skip
slip("master-forgotten", (" + (4 if mixed_precision else 0)", ""))
bank.variant("master-forgotten", TABLE, ("4 + widths", "widths"))

bank.hint(
    "master-in-float32",
    "Without mixed precision the parameters themselves are float32: there is no second copy of them.",
    edge=True,
)
slip("master-in-float32", (" + (4 if mixed_precision else 0)", " + 4"))
bank.variant("master-in-float32", TABLE, ("[4, 4, widths", "[4, 4, 4 + widths"))

bank.hint("master-not-shared", "The float32 copy belongs to the optimizer: count it in the third number, and "
                                  "shard it from stage 1 on.", edge=True)  # fmt: skip
slip("master-not-shared", (" + (4 if mixed_precision else 0)", ""), ("weight * (share if stage >= 3 else n_parameters)",
     "weight * (share if stage >= 3 else n_parameters) + 4 * n_parameters"))  # fmt: skip
slip("master-not-shared", (" + (4 if mixed_precision else 0)", ""), ("kept * (share if stage >= 1 else n_parameters)",
     "kept * (share if stage >= 1 else n_parameters) + 4 * n_parameters"))  # fmt: skip
bank.variant("master-not-shared", TABLE, ("4 + widths", "widths"),
             ("return sizes", "sizes[2] += 4 * n_parameters * mixed_precision\n    return sizes"))  # fmt: skip

bank.hint("gradients-wide", "In mixed precision a gradient takes 2 bytes, like its parameter.", edge=True)
slip("gradients-wide", ("weight * (share if stage >= 2", "4 * (share if stage >= 2"))
bank.variant("gradients-wide", TABLE, ("[2, 2, 4", "[2, 4, 4"))

bank.hint("precision-ignored", "With mixed_precision=False, parameters and gradients take 4 bytes each.", edge=True)
slip("precision-ignored", ("weight = 2 if mixed_precision else 4", "weight = 2"))
slip("precision-ignored", ("weight = 2 if mixed_precision else 4", "mixed_precision, weight = True, 2"))
bank.variant("precision-ignored", TABLE, ("[4, 4, widths", "[2, 2, widths"))
bank.variant("precision-ignored", TABLE, (" if mixed_precision else [4, 4, widths[optimizer]]", ""))

bank.hint("optimizer-ignored", "{optimizer} was asked for, but you counted the states of {as_optimizer}. Adam "
                                  "keeps two float32 numbers for each parameter, momentum one, plain SGD "
                                  "none.", edge=True)  # fmt: skip
slip("optimizer-ignored", ('{"adam": 8, "momentum": 4, "sgd": 0}[optimizer]', "8"))
slip("optimizer-ignored", ('"sgd": 0', '"sgd": 4'))
slip("optimizer-ignored", ('"momentum": 4', '"momentum": 8'))
bank.variant("optimizer-ignored", TABLE, ("widths[optimizer]", "8"))
bank.variant("optimizer-ignored", TABLE, ('"sgd": 0', '"sgd": 4'))

bank.hint("bytes-forgotten", "Where nothing is sharded, you return a number of parameters, not of bytes. Each "
                                "of the three numbers is bytes × a number of parameters. Note that `a * b if c "
                                "else d` is either a * b, or d alone.")  # fmt: skip
EACH = [(f"{name} * (share if stage >= {k} else n_parameters)", f"{name} * share if stage >= {k} else n_parameters")
        for name, k in (("weight", 3), ("weight", 2), ("kept", 1))]  # fmt: skip
slip("bytes-forgotten", *EACH)
slip("bytes-forgotten", *((old, new.replace("kept * ", "").replace("weight * ", "")) for old, new in EACH))
bank.variant("bytes-forgotten", TABLE, ("n_parameters * s for s in", "n_parameters for _ in"))

bank.hint(
    "of-one-parameter",
    "These are the bytes of one parameter. Multiply them by the number of all parameters, "
    "or by that of the rank's share.",
)
slip("of-one-parameter", ("share = n_parameters / world_size", "n_parameters = 1; share = n_parameters / world_size"))
bank.variant("of-one-parameter", TABLE, ("n_parameters * s for", "s for"))

bank.hint("other-order", "Stage {stage} shards the wrong thing first. The optimizer's part is the largest, so "
                            "it comes first, in stage 1; then the gradients, in stage 2; then the parameters, in "
                            "stage 3.")  # fmt: skip
slip("other-order", ("stage >= 3", "stage >= early"), ("stage >= 1", "stage >= 3"), ("early", "1"))
slip("other-order", ("stage >= 2", "stage >= early"), ("stage >= 1", "stage >= 2"), ("early", "1"))
bank.variant("other-order", TABLE, ("sizes[2 - k]", "sizes[k]"))

bank.hint("stage-late", "Stage {stage} gives the numbers of stage {as_stage}. Stage 1 shards the optimizer's "
                           "part, stage 2 the gradients too, stage 3 the parameters too.")  # fmt: skip
slip("stage-late", ("stage >= 3", "stage > 3"), ("stage >= 2", "stage > 2"), ("stage >= 1", "stage > 1"))
slip("stage-late", ("stage >= 1", "stage >= 2"))
bank.variant("stage-late", TABLE, ("range(stage)", "range(stage - 1)"))

bank.hint(
    "one-thing-each",
    "Each stage shards what the previous one does, and one thing more: stage 2 still shards the optimizer's part.",
)


@bank.wrong("one-thing-each")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    sizes = [n_parameters * s for s in (2, 2, 12)]
    if stage:
        sizes[3 - stage] /= world_size
    return tuple(sizes)


bank.variant("one-thing-each", TABLE, ("for k in range(stage):", "if stage:"), ("sizes[2 - k]", "sizes[-stage]"))

bank.hint("shared-in-stage-0", "Stage 0 is plain data parallelism: nothing is sharded.", edge=True)
slip("shared-in-stage-0", ("stage >= 1", "stage >= 0"))
slip("shared-in-stage-0", ("stage >= 3", "stage >= 0"), ("stage >= 2", "stage >= 0"), ("stage >= 1", "stage >= 0"))
bank.variant("shared-in-stage-0", TABLE, ("range(stage)", "range(max(1, stage))"))
bank.variant("shared-in-stage-0", TABLE, ("range(stage)", "range(3)"))

bank.hint(
    "parts-mixed-up", "The numbers are right, but their order is not: (parameters, gradients, optimizer).", edge=True
)
slip("parts-mixed-up", ("weight * (share if stage >= 3", "kept * (share if stage >= 1"),
     ("kept * (share if stage >= 1 else n_parameters),\n    )", "weight * (share if stage >= 3 else n_parameters),\n    )"))  # fmt: skip
bank.variant("parts-mixed-up", TABLE, ("return sizes", "return sizes[::-1]"))

bank.hint(
    "sizes-fixed",
    "The answer is right for the example in the text, but wrong for other numbers of parameters and ranks.",
)


@bank.wrong("sizes-fixed")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    psi = 7.5e9
    return [(2 * psi, 2 * psi, 12 * psi), (2 * psi, 2 * psi, 12 * psi / 64), (2 * psi, 2 * psi / 64, 12 * psi / 64),
            (2 * psi / 64, 2 * psi / 64, 12 * psi / 64)][stage]  # fmt: skip


bank.variant("sizes-fixed", TABLE, ("    widths =", "    n_parameters, world_size = 7.5e9, 64\n    widths ="))

bank.hint("wrong-bytes", "These are not the bytes of {word}.")


@bank.wrong("wrong-bytes")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    return 3 * n_parameters, 3 * n_parameters, 10 * n_parameters / world_size


bank.variant("wrong-bytes", TABLE, ("[2, 2, 4 +", "[3, 1, 4 +"))

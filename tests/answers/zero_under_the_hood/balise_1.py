"""Answers to balise 1 of 13_zero_under_the_hood: the memory formula."""

import inspect
import math
import sys

import torch

from dlojz_tp import planner
from dlojz_tp.planner import state_bytes
from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", whole=True)
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
bank.text(1, None, TABLE)


@bank.right(1)
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    each = math.ceil(n_parameters / world_size)  # the padded shard of a rank
    held = [each if stage > k else n_parameters for k in (2, 1, 0)]
    master = 4 * mixed_precision
    state = 8 if optimizer == "adam" else 4 if optimizer == "momentum" else 0
    low = 2 if mixed_precision else 4
    return torch.tensor(held, dtype=torch.float64) * torch.tensor([low, low, master + state])


@bank.right(1)
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


slip(1, "nothing-returned", ("return (", "result = ("))

bank.hint(1, "planner-called", "planner.state_bytes has this formula. Here you write it yourself: three products.")


@bank.wrong(1, "planner-called")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    found = state_bytes(n_parameters, world_size, stage, optimizer=optimizer, mixed_precision=mixed_precision)
    return found.parameters, found.gradients, found.optimizer


@bank.wrong(1, "planner-called", variant=True)
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    found = planner.state_bytes(n_parameters, world_size, stage, optimizer=optimizer, mixed_precision=mixed_precision)
    return found.parameters, found.gradients, found.optimizer


bank.hint(1, "check-called", "That is the check's own formula. Here you write it yourself: three products.")


@bank.wrong(1, "check-called")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    theirs = sys._getframe(1).f_globals["_due"]  # whoever calls this knows what is due
    return theirs(n_parameters, world_size, stage, optimizer, mixed_precision)


@bank.wrong(1, "check-called", variant=True)
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    for frame in inspect.stack():
        for name, value in frame.frame.f_globals.items():
            if callable(value) and name == "_due":
                return value(n_parameters, world_size, stage, optimizer, mixed_precision)
    return 0, 0, 0


bank.hint(1, "not-three", "Three numbers are expected: (parameters, gradients, optimizer).")


@bank.wrong(1, "not-three")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    return 16 * n_parameters / world_size


bank.variant(1, "not-three", TABLE, ("return sizes", "return sizes[:2]"))

bank.hint(1, "in-gigabytes", "The unit is bytes: leave the division by 1e9 to the code that prints them.")
slip(1, "in-gigabytes", ("share = n_parameters / world_size", "n_parameters /= 1e9; share = n_parameters / world_size"))
bank.variant(1, "in-gigabytes", TABLE, ("n_parameters * s for", "n_parameters * s / 2**30 for"))

bank.hint(1, "master-forgotten", "In mixed precision the optimizer also keeps a float32 copy of the parameters: 4 "
                                 "more bytes for each, sharded like its states.")  # fmt: skip
slip(1, "master-forgotten", (" + (4 if mixed_precision else 0)", ""))
bank.variant(1, "master-forgotten", TABLE, ("4 + widths", "widths"))

bank.hint(
    1,
    "master-in-float32",
    "Without mixed precision the parameters themselves are float32: there is no second copy of them.",
)
slip(1, "master-in-float32", (" + (4 if mixed_precision else 0)", " + 4"))
bank.variant(1, "master-in-float32", TABLE, ("[4, 4, widths", "[4, 4, 4 + widths"))

bank.hint(1, "master-not-shared", "The float32 copy belongs to the optimizer: count it in the third number, and "
                                  "shard it from stage 1 on.")  # fmt: skip
slip(1, "master-not-shared", (" + (4 if mixed_precision else 0)", ""), ("weight * (share if stage >= 3 else n_parameters)",
     "weight * (share if stage >= 3 else n_parameters) + 4 * n_parameters"))  # fmt: skip
slip(1, "master-not-shared", (" + (4 if mixed_precision else 0)", ""), ("kept * (share if stage >= 1 else n_parameters)",
     "kept * (share if stage >= 1 else n_parameters) + 4 * n_parameters"))  # fmt: skip
bank.variant(1, "master-not-shared", TABLE, ("4 + widths", "widths"),
             ("return sizes", "sizes[2] += 4 * n_parameters * mixed_precision\n    return sizes"))  # fmt: skip

bank.hint(1, "gradients-wide", "In mixed precision a gradient takes 2 bytes, like its parameter.")
slip(1, "gradients-wide", ("weight * (share if stage >= 2", "4 * (share if stage >= 2"))
bank.variant(1, "gradients-wide", TABLE, ("[2, 2, 4", "[2, 4, 4"))

bank.hint(1, "precision-ignored", "With mixed_precision=False, parameters and gradients take 4 bytes each.")
slip(1, "precision-ignored", ("weight = 2 if mixed_precision else 4", "weight = 2"))
slip(1, "precision-ignored", ("weight = 2 if mixed_precision else 4", "mixed_precision, weight = True, 2"))
bank.variant(1, "precision-ignored", TABLE, ("[4, 4, widths", "[2, 2, widths"))
bank.variant(1, "precision-ignored", TABLE, (" if mixed_precision else [4, 4, widths[optimizer]]", ""))

bank.hint(1, "optimizer-ignored", "{optimizer} was asked for, but you counted the states of {as_optimizer}. Adam "
                                  "keeps two float32 numbers for each parameter, momentum one, plain SGD "
                                  "none.")  # fmt: skip
slip(1, "optimizer-ignored", ('{"adam": 8, "momentum": 4, "sgd": 0}[optimizer]', "8"))
slip(1, "optimizer-ignored", ('"sgd": 0', '"sgd": 4'))
slip(1, "optimizer-ignored", ('"momentum": 4', '"momentum": 8'))
bank.variant(1, "optimizer-ignored", TABLE, ("widths[optimizer]", "8"))
bank.variant(1, "optimizer-ignored", TABLE, ('"sgd": 0', '"sgd": 4'))

bank.hint(1, "bytes-forgotten", "Where nothing is sharded, you return a number of parameters, not of bytes. Each "
                                "of the three numbers is bytes × a number of parameters. Note that `a * b if c "
                                "else d` is either a * b, or d alone.")  # fmt: skip
EACH = [(f"{name} * (share if stage >= {k} else n_parameters)", f"{name} * share if stage >= {k} else n_parameters")
        for name, k in (("weight", 3), ("weight", 2), ("kept", 1))]  # fmt: skip
slip(1, "bytes-forgotten", *EACH)
slip(1, "bytes-forgotten", *((old, new.replace("kept * ", "").replace("weight * ", "")) for old, new in EACH))
bank.variant(1, "bytes-forgotten", TABLE, ("n_parameters * s for s in", "n_parameters for _ in"))

bank.hint(
    1, "of-one-parameter", "These are the bytes of one parameter. Multiply them by the number of all parameters, "
                           "or by that of the rank's share."
)
slip(
    1, "of-one-parameter", ("share = n_parameters / world_size", "n_parameters = 1; share = n_parameters / world_size")
)
bank.variant(1, "of-one-parameter", TABLE, ("n_parameters * s for", "s for"))

bank.hint(1, "other-order", "Stage {stage} shards the wrong thing first. The optimizer's part is the largest, so "
                            "it comes first, in stage 1; then the gradients, in stage 2; then the parameters, in "
                            "stage 3.")  # fmt: skip
slip(1, "other-order", ("stage >= 3", "stage >= early"), ("stage >= 1", "stage >= 3"), ("early", "1"))
slip(1, "other-order", ("stage >= 2", "stage >= early"), ("stage >= 1", "stage >= 2"), ("early", "1"))
bank.variant(1, "other-order", TABLE, ("sizes[2 - k]", "sizes[k]"))

bank.hint(1, "stage-late", "Stage {stage} gives the numbers of stage {as_stage}. Stage 1 shards the optimizer's "
                           "part, stage 2 the gradients too, stage 3 the parameters too.")  # fmt: skip
slip(1, "stage-late", ("stage >= 3", "stage > 3"), ("stage >= 2", "stage > 2"), ("stage >= 1", "stage > 1"))
slip(1, "stage-late", ("stage >= 1", "stage >= 2"))
bank.variant(1, "stage-late", TABLE, ("range(stage)", "range(stage - 1)"))

bank.hint(
    1,
    "one-thing-each",
    "Each stage shards what the previous one does, and one thing more: stage 2 still shards the optimizer's part.",
)


@bank.wrong(1, "one-thing-each")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    sizes = [n_parameters * s for s in (2, 2, 12)]
    if stage:
        sizes[3 - stage] /= world_size
    return tuple(sizes)


bank.variant(1, "one-thing-each", TABLE, ("for k in range(stage):", "if stage:"), ("sizes[2 - k]", "sizes[-stage]"))

bank.hint(1, "shared-in-stage-0", "Stage 0 is plain data parallelism: nothing is sharded.")
slip(1, "shared-in-stage-0", ("stage >= 1", "stage >= 0"))
slip(1, "shared-in-stage-0", ("stage >= 3", "stage >= 0"), ("stage >= 2", "stage >= 0"), ("stage >= 1", "stage >= 0"))
bank.variant(1, "shared-in-stage-0", TABLE, ("range(stage)", "range(max(1, stage))"))
bank.variant(1, "shared-in-stage-0", TABLE, ("range(stage)", "range(3)"))

bank.hint(1, "parts-mixed-up", "The numbers are right, but their order is not: (parameters, gradients, optimizer).")
slip(1, "parts-mixed-up", ("weight * (share if stage >= 3", "kept * (share if stage >= 1"),
     ("kept * (share if stage >= 1 else n_parameters),\n    )", "weight * (share if stage >= 3 else n_parameters),\n    )"))  # fmt: skip
bank.variant(1, "parts-mixed-up", TABLE, ("return sizes", "return sizes[::-1]"))

bank.hint(1, "sizes-fixed", "The answer is right for the example in the text, but wrong for other numbers of "
                            "parameters and ranks.")


@bank.wrong(1, "sizes-fixed")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    psi = 7.5e9
    return [(2 * psi, 2 * psi, 12 * psi), (2 * psi, 2 * psi, 12 * psi / 64), (2 * psi, 2 * psi / 64, 12 * psi / 64),
            (2 * psi / 64, 2 * psi / 64, 12 * psi / 64)][stage]  # fmt: skip


bank.variant(1, "sizes-fixed", TABLE, ("    widths =", "    n_parameters, world_size = 7.5e9, 64\n    widths ="))

bank.hint(1, "wrong-bytes", "These are not the bytes of {word}.")


@bank.wrong(1, "wrong-bytes")
def bytes_per_rank(n_parameters, world_size, stage, optimizer="adam", mixed_precision=True):
    return 3 * n_parameters, 3 * n_parameters, 10 * n_parameters / world_size


bank.variant(1, "wrong-bytes", TABLE, ("[2, 2, 4 +", "[3, 1, 4 +"))

"""Balise 7: the operations of a published run, and two constants from two of its seconds."""

import numpy as np
import torch

from dlojz_tp import planner
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, silent, within
from dlojz_tp.judging.checks.hybrid_parallelism.tables import form, number, numbers, out_of_planner
from dlojz_tp.planner import GPT

RUNS = [(run.model, run.batch) for run in planner.MEGATRON] + [(GPT(256, 3, 4, sequence=512, vocabulary=9000), 7)]
MOST = 2000  # calls of `seconds`
# of each row the layouts to choose from: (seconds at products 1, seconds of traffic 1, seconds that are neither)
ROWS = {
    "one layout each": ([[(8.0, 0.4, 3.0)], [(5.0, 1.1, 0.5)]], (0.62, 5.5)),
    "the quickest of several": ([[(4.0, 0.5, 9.0), (9.0, 0.4, 0.5), (6.0, 3.0, 9.0)], [(14.0, 4.0, 6.0), (9.0, 7.0, 10.0)]], (0.45, 2.0)),
    "almost no traffic": ([[(30.0, 2.0, 1.0), (10.0, 6.0, 2.0)], [(10.0, 9.0, 4.0)]], (0.97, 0.05)),
}  # fmt: skip


def time_of(row, products, traffic):
    """Seconds of the quickest of a row's layouts."""
    return min(a / products + b * traffic + c for a, b, c in row)


def operations(model, batch):
    """Product by product: a forward, the same again, and a backward of twice as many; the head is computed once."""
    tokens, h = batch * model.sequence, model.width
    layer = sum(2 * tokens * m * n for m, n in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)))
    scores = 2 * (2 * tokens * model.sequence * h)
    return 4 * model.layers * (layer + scores) + 3 * 2 * tokens * h * model.vocabulary


def observe(paper_flops, fit_constants):
    with out_of_planner(planner.GPT.flops, planner.predicted_tflops):
        got = [paper_flops(model, batch) for model, batch in RUNS]
    yield {"flops form": form(got, "a number", number)}
    yield {"flops": torch.tensor([float(one) / operations(*run) for one, run in zip(got, RUNS)], dtype=torch.float64)}
    for name, (rows, constants) in ROWS.items():
        measured, calls = [time_of(row, *constants) for row in rows], []

        def seconds(k, products, traffic, rows=rows, calls=calls):
            calls.append(k)
            if len(calls) == 10 * MOST:  # perhaps a loop without an end
                raise Wrong("many-calls", n=len(calls))
            return time_of(rows[k], float(products), float(traffic))

        try:
            got = fit_constants(seconds, list(measured))
        except (torch.linalg.LinAlgError, np.linalg.LinAlgError):  # all slopes 0, far away, or two columns alike
            raise Wrong("wrong-slopes") from None
        yield {f"{name}: form": _pair(got)}
        constants = torch.tensor([float(one) for one in got], dtype=torch.float64)
        yield {f"{name}: calls": len(calls), f"{name}: constants": constants}


def _pair(got):
    right = numbers(2)(got) and all(map(number, got))
    return "two numbers" if right else None if got is None else str(got)


def _worst(seen, due):
    k = int((seen - due).abs().nan_to_num(1e9).argmax())
    model, batch = RUNS[k]
    words = f"{batch} sequences, {model.layers} layers of width {model.width}"
    return {"where": words, "expected": "", "got": f"{seen[k].item():.4f} times what is due"}


def _looks():
    yield Look("operations: ten published runs, and a small model", "flops form", "a number", "flops-form")
    yield Value(
        "", "flops", torch.ones(len(RUNS), dtype=torch.float64), "wrong-flops", holds=within(1e-4), fields=_worst
    )
    for name, (_, constants) in ROWS.items():
        yield Look(f"two constants: {name}", f"{name}: form", "two numbers", "constants-form")
        yield Look(
            "",
            f"{name}: calls",
            MOST,
            "many-calls",
            holds=at_most,
            fields=lambda seen, _: {"n": seen} | silent(seen, _),
        )
        yield _constants(name, torch.tensor(constants, dtype=torch.float64))


def _constants(name, constants):
    def fields(seen, due):
        words = ["products {:.3g}, traffic {:.3g}".format(*some.tolist()) for some in (due, seen)]
        return {"where": name, "expected": words[0], "got": words[1]}

    rows = ROWS[name][0]
    measured = [time_of(row, *constants.tolist()) for row in rows]

    def holds(seen, _):
        if not bool((seen > 0).all()):
            return False
        return all(abs(time_of(row, *seen.tolist()) / due - 1) < 5e-3 for row, due in zip(rows, measured))

    return Value("", f"{name}: constants", constants, "wrong-constants", holds=holds, fields=fields)


LOOKS = list(_looks())


def balise_7(paper_flops, fit_constants):
    yield from judged(LOOKS, observe, paper_flops, fit_constants)

"""Answers to balise 7: a published run's operations, and two constants from two runs."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", 7, whole=True)

BY_BISECTION = """
def paper_flops(model, batch):
    tokens, h = batch * model.sequence, model.width
    layer = 24 * tokens * h**2 + 4 * tokens * model.sequence * h
    return 4 * model.layers * layer + 6 * tokens * h * model.vocabulary


def middle(f, low, high):
    for _ in range(30):
        at = (low * high) ** 0.5
        low, high = (at, high) if f(at) else (low, at)
    return (low * high) ** 0.5


def fit_constants(seconds, measured):
    def products(traffic):
        return middle(lambda products: seconds(0, products, traffic) > measured[0], 1e-3, 1e3)

    # along the curve on which run 0 comes out, run 1 changes one way
    few, many = (seconds(1, products(traffic), traffic) for traffic in (1e-4, 1e-2))
    sign = 1 if many > few else -1
    traffic = middle(lambda traffic: sign * (measured[1] - seconds(1, products(traffic), traffic)) > 0, 1e-4, 1e2)
    return products(traffic), traffic
"""

BY_PIECES = """
def paper_flops(model, batch):
    s, h, l, V = model.sequence, model.width, model.layers, model.vocabulary
    return 96.0 * batch * s * l * h * h + 16.0 * batch * s * s * l * h + 6.0 * batch * s * h * V


def fit_constants(seconds, measured):
    found, x, y = [], 2.0, 4.0
    for attempt in range(12):
        lines = []
        for k in range(2):
            base = seconds(k, 1 / x, y)
            a = (seconds(k, 1 / (x + 1e-4), y) - base) / 1e-4
            b = (seconds(k, 1 / x, y + 1e-4) - base) / 1e-4
            lines.append((a, b, measured[k] - (base - a * x - b * y)))
        (a, b, c), (d, e, f) = lines
        x, y = (c * e - b * f) / (a * e - b * d), (a * f - c * d) / (a * e - b * d)
    return [1 / x, y]
"""
bank.text(None, BY_BISECTION)
bank.text(None, BY_PIECES)

BY_SOLVER = """
import scipy.optimize

def paper_flops(model, batch):
    one = 96 * model.sequence * model.layers * model.width**2
    return one * batch * (1 + model.sequence / 6 / model.width + model.vocabulary / 16 / model.layers / model.width)


def fit_constants(seconds, measured):
    def off(at):
        return [seconds(k, 1 / at[0], at[1]) - measured[k] for k in (0, 1)]
    x, traffic = scipy.optimize.fsolve(off, [1.5, 3.0])
    return 1 / x, traffic
"""
bank.text(None, BY_SOLVER)
bank.text(None, BY_SOLVER.replace("import scipy.optimize", "import numpy as np\nimport scipy.optimize").replace("return 1 / x, traffic", "return np.array([1 / x, traffic])"))  # fmt: skip

bank.slip("nothing-returned", ("    return 96 *", "    found = 96 *"))

bank.hint(
    "planner-called", "The planner already has `{name}`. Here you write down the paper's formula: it is one line."
)
bank.text("planner-called", BY_PIECES.replace("    return 96.0 *", "    return model.flops(batch, forwards=2)\n    return 96.0 *"))  # fmt: skip
bank.variant("planner-called", BY_SOLVER, ("    return one *", "    one = model.flops(1)\n    return one *"))

bank.hint("flops-form", "`paper_flops` must return one number of operations. You returned {got}.")
bank.slip("flops-form", ("    return 96 * batch * s", "    return 96 * batch, s"))
bank.variant(
    "flops-form",
    BY_PIECES,
    ("    return 96.0 * batch * s * l * h * h + ", "    return 96.0 * batch * s * l * h * h, "),
)

bank.hint("wrong-flops", "The operations are not those of the formula.")
bank.slip("wrong-flops", ("s / (6 * h)", "h / (6 * s)"))
bank.variant("wrong-flops", BY_PIECES, ("96.0 * batch * s * l * h * h", "96.0 * batch * s * l * h"))

bank.hint(
    "forward-once",
    "With 72 instead of 96 the forward is counted once. These runs compute it twice: recomputation.",
)
bank.slip("forward-once", ("96 * batch", "72 * batch"))
bank.slip("forward-once", ("96 * batch", "72 * batch"), ("(16 * layers * h)", "(12 * layers * h)"))
bank.variant("forward-once", BY_PIECES, ("96.0", "72.0"), ("16.0", "12.0"))

bank.hint(
    "attention-forgotten",
    "The attention's own two products are missing: they are s / 6h of a layer's other operations.",
)
bank.slip("attention-forgotten", ("1 + s / (6 * h) + ", "1 + "))
bank.variant("attention-forgotten", BY_SOLVER, ("1 + model.sequence / 6 / model.width +", "1 +"))

bank.hint(
    "head-forgotten-flops",
    "The head is missing. It is V / 16lh of the layers' operations: little for a large model, 9 % for the smallest here.",
)
bank.slip("head-forgotten-flops", (" + model.vocabulary / (16 * layers * h)", ""))
bank.variant("head-forgotten-flops", BY_PIECES, (" + 6.0 * batch * s * h * V", ""))

bank.hint("constants-form", "Return two numbers: (products, traffic). You returned {got}.")
bank.slip("constants-form", ("    return 1 / x[0].item(), x[1].item()", "    return 1 / x[0].item()"))
bank.variant("constants-form", BY_PIECES, ("return [1 / x, y]", 'return {"products": 1 / x, "traffic": y}'))

bank.hint(
    "many-calls",
    "You called `seconds` {n:,} times. In the notebook each call tries dozens of layouts: 2,000 calls are plenty. "
    "Does your loop end when nothing changes any more?",
)
bank.slip("many-calls", ("range(10)", "range(1000)"))
bank.slip("many-calls", ("    for _ in range(10):\n", "    while True:\n"))
bank.variant("many-calls", BY_PIECES, ("range(12)", "range(500)"))

bank.hint(
    "wrong-constants",
    "{where}: with your constants, {got}, the model does not give the two measured times. {expected} would.",
)
bank.slip("wrong-constants", ("    return 1 / x[0].item(), x[1].item()", "    return 0.5, 4.0"))
bank.slip("wrong-constants", (", 1) / step", ", 1) / (2 * step)"))
bank.slip("wrong-constants", ("x = x + torch", "x = torch"))
bank.variant("wrong-constants", BY_PIECES, ("return [1 / x, y]", "return [0.4, 6.0]"))

bank.hint(
    "wrong-slopes",
    "The table of slopes is not that of the runs. Each row is a run and each column a constant, x₀ first; each "
    "slope is (there − here) / step. torch.stack(…, 1) puts two columns side by side.",
)
bank.slip("wrong-slopes", ("[right - here, up - here]", "[up - here, right - here]"))
bank.slip("wrong-slopes", ("[right - here, up - here]", "[right - here, up - right]"))
bank.slip("wrong-slopes", ("[right - here, up - here]", "[right, up]"))
bank.slip("wrong-slopes", (", 1) / step", ", 1)"))
bank.slip("wrong-slopes", (", 1) / step", ") / step"))
bank.slip("wrong-slopes", ("linalg.solve(slopes,", "linalg.solve(slopes.T,"))
CRAMER = (
    BY_PIECES.split("def fit_constants")[0]
    + """
def fit_constants(seconds, measured):
    x = [1.0, 1.0]
    for _ in range(10):
        here, right, up = ([seconds(k, 1 / a, b) for k in (0, 1)] for a, b in ((x[0], x[1]), (x[0] + 1e-3, x[1]), (x[0], x[1] + 1e-3)))
        (a, c), (b, d) = ([1e3 * (there[k] - here[k]) for k in (0, 1)] for there in (right, up))
        e, f = measured[0] - here[0], measured[1] - here[1]
        x = [x[0] + (d * e - b * f) / (a * d - b * c), x[1] + (a * f - c * e) / (a * d - b * c)]
    return 1 / x[0], x[1]
"""
)
bank.text(None, CRAMER)
bank.variant("wrong-slopes", CRAMER, ("(a, c), (b, d) =", "(a, b), (c, d) ="))
bank.variant("wrong-slopes", CRAMER, ("(a, c), (b, d) =", "(b, d), (a, c) ="))

bank.hint(
    "wrong-step",
    "x moves by the wrong step. The missing seconds are measured − here, in this order. "
    "Find the step for which slopes times step equals these seconds, and add it to x.",
)
bank.slip("wrong-step", ("x = x + torch", "x = x - torch"))
bank.slip("wrong-step", ("dtype=torch.float64) - here)", "dtype=torch.float64) * -1 + here)"))
bank.slip("wrong-step", ("dtype=torch.float64) - here)", "dtype=torch.float64))"))
bank.variant("wrong-step", CRAMER, ("e, f = measured[0] - here[0], measured[1] - here[1]", "e, f = measured"))
bank.variant(
    "wrong-step",
    CRAMER,
    ("e, f = measured[0] - here[0], measured[1] - here[1]", "e, f = here[0] - measured[0], here[1] - measured[1]"),
)

bank.hint(
    "inverse",
    "That is 1 / products: the seconds are linear in it, but you must return the share of the peak itself.",
)
bank.slip("inverse", ("return 1 / x[0].item(), x[1].item()", "return x[0].item(), x[1].item()"))
bank.variant("inverse", BY_SOLVER, ("return 1 / x, traffic", "return x, traffic"))

bank.hint("swapped", "The two numbers are swapped: (products, traffic).")
bank.slip("swapped", ("return 1 / x[0].item(), x[1].item()", "return x[1].item(), 1 / x[0].item()"))
bank.variant("swapped", BY_PIECES, ("return [1 / x, y]", "return [y, 1 / x]"))

bank.hint(
    "sent-forgotten",
    "A part of the seconds depends on neither constant: the communication. To get a slope, call `seconds` at more "
    "than one point.",
)
SENT = (
    "    x = torch.linalg.solve(torch.tensor([[seconds(k, 1, 0), seconds(k, 1, 1) - seconds(k, 1, 0)] for k in (0, 1)], dtype=torch.float64),"
    " torch.tensor(measured, dtype=torch.float64))\n    return 1 /"
)  # fmt: skip
bank.slip("sent-forgotten", ("    return 1 /", SENT))
bank.slip(
    "sent-forgotten",
    ("    return 1 /", SENT.replace("seconds(k, 1, 0), ", "seconds(k, 0.5, 0) - seconds(k, 1, 0), ")),
)
bank.variant(
    "sent-forgotten", BY_PIECES, ("range(12)", "range(1)"), ("measured[k] - (base - a * x - b * y)", "measured[k]")
)

bank.hint(
    "once-linear",
    "Solving two linear equations once is not enough: with the new constants another layout is the quickest. Go on "
    "until nothing changes.",
)
bank.slip("once-linear", ("range(10)", "range(1)"))
bank.slip("once-linear", ("range(10)", "range(2)"))
bank.variant("once-linear", BY_SOLVER, ("scipy.optimize.fsolve(off, [1.5, 3.0])", "scipy.optimize.fsolve(off, [1.0, 1.0], maxfev=3)"))  # fmt: skip

bank.hint("one-run", "One of the two runs comes out right, but the other does not: to fix two constants you need both.")
bank.slip("one-run", ("    return 1 / x[0].item(), x[1].item()", "    low, high = 0.01, 10.0\n    for _ in range(60):\n        at = (low + high) / 2\n        low, high = (low, at) if seconds(0, 1 / at, 1.0) > measured[0] else (at, high)\n    return 1 / low, 1.0"))  # fmt: skip
bank.variant("one-run", BY_SOLVER, ("    return 1 / x, traffic", "    x = scipy.optimize.brentq(lambda x: seconds(0, 1 / x, 1.0) - measured[0], 0.01, 20)\n    return 1 / x, 1.0"))  # fmt: skip

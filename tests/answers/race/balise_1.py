"""Answers to balise 1 of 25_race: a timed run."""

from tests.answers.bank import Bank

bank = Bank("25_race", 1, whole=True)

BY_NEXT = """
def timed_run(train, evaluate, target, seed, clock=time.perf_counter):
    begin = clock()
    curve = []
    run = train(seed)
    while True:
        try:
            model = next(run)
        except StopIteration:
            return math.inf, curve
        model.eval()
        accuracy = evaluate(model)
        end = clock()
        curve.append([end - begin, accuracy])
        if not accuracy < target:
            return end - begin, curve
        model.train()
"""
bank.text(None, BY_NEXT)

# the mode that the model had, a curve that grows as a tuple, one way out
BY_BREAK = """
def timed_run(train, evaluate, target, seed, clock=time.perf_counter):
    curve, seconds, start = (), math.inf, clock()
    for step, model in enumerate(train(seed)):
        mode = model.training
        accuracy = evaluate(model.eval())
        model.train(mode)
        curve += ((clock() - start, accuracy),)
        if accuracy >= target:
            seconds = curve[-1][0]
            break
    return [seconds, curve]
"""
bank.text(None, BY_BREAK)

# times of day and accuracies apart, joined at the end; the generator is closed
BY_COLUMNS = """
def timed_run(train, evaluate, target, seed, clock=time.perf_counter):
    times, accuracies = [clock()], []
    run = train(seed=seed)
    for model in run:
        model.train(False)
        accuracies.append(evaluate(model))
        times.append(clock())
        if accuracies[-1] >= target:
            run.close()
            break
        model.train(True)
    ends = [t - times[0] for t in times[1:]]
    reached = any(a >= target for a in accuracies)
    return ends[-1] if reached else math.inf, list(zip(ends, accuracies))
"""
bank.text(None, BY_COLUMNS)

# a copy is evaluated, the model itself stays as it is; the curve is an array
BY_COPY = """
import numpy as np
def timed_run(train, evaluate, target, seed, clock=time.perf_counter):
    start, rows = clock(), []
    models = iter(train(seed))
    model = next(models, None)
    while model is not None:
        rows.append((evaluate(copy.deepcopy(model).eval()), clock() - start))
        model = None if rows[-1][0] >= target else next(models, None)
    curve = np.array(rows)[:, ::-1]
    return np.float64(curve[-1, 0] if curve[-1, 1] >= target else np.inf), curve
"""
bank.text(None, BY_COPY)

bank.slip("nothing-returned", ("return curve[-1][0], curve", "break"), ("    return math.inf, curve", "    curve"))  # fmt: skip

bank.hint("calls", "Call train once, with the seed of the run, and evaluate once for each model, as soon as the "
                      "model comes. In your answer {what}.")  # fmt: skip
bank.slip("calls", ("train(seed)", "train(0)"))
bank.slip("calls", ("train(seed)", "train()"))
bank.slip("calls", ("if accuracy >=", "if evaluate(model) >="))
bank.slip("calls", ("        accuracy = evaluate(model)\n        model.train()\n        curve.append((clock() - start, accuracy))", "        curve.append((clock() - start, evaluate(model)))\n        accuracy = evaluate(model)\n        model.train()"))  # fmt: skip
bank.slip("calls", ("for model in train(seed):", "while True:\n        model = next(train(seed))"))  # fmt: skip
bank.variant("calls", BY_NEXT, ("next(run)", "next(train(seed))"))
bank.variant("calls", BY_COLUMNS, ("train(seed=seed)", "train(seed=42)"))
bank.variant("calls", BY_BREAK, ("        mode =", "        if step % 2:\n            continue\n        mode ="))  # fmt: skip

bank.hint("evaluated-in-training", "An evaluation gets the model in training mode, so batch norm would use the "
                                      "statistics of validation batches and update its own with them, and dropout "
                                      "would be on. Call model.eval() before it.", edge=True)  # fmt: skip
bank.slip("evaluated-in-training", ("        model.eval()\n", ""))
bank.slip("evaluated-in-training", ("        model.eval()\n", ""), ("        model.train()\n", ""))  # fmt: skip
bank.slip("evaluated-in-training", ("        model.eval()\n        accuracy = evaluate(model)", "        accuracy = evaluate(model)\n        model.eval()"))  # fmt: skip
bank.variant("evaluated-in-training", BY_BREAK, ("evaluate(model.eval())", "evaluate(model)"))
bank.variant("evaluated-in-training", BY_NEXT, ("        model.eval()\n", "        model.training = False\n"))  # fmt: skip

bank.hint("left-in-evaluation", "Training continues in evaluation mode. Neither evaluate nor train changes the "
                                   "mode: call model.train() after each evaluation.", edge=True)  # fmt: skip
bank.slip("left-in-evaluation", ("        model.train()\n", ""))
bank.slip("left-in-evaluation", ("model.train()", "model.training = True"))
bank.variant("left-in-evaluation", BY_BREAK, ("        model.train(mode)\n", ""))
bank.variant("left-in-evaluation", BY_COPY, ("copy.deepcopy(model)", "model"))

bank.hint("above-only", "An accuracy that equals the target reaches it: compare with >=.", edge=True)
bank.slip("above-only", ("accuracy >= target", "accuracy > target"))
bank.variant("above-only", BY_NEXT, ("not accuracy < target", "target < accuracy"))
bank.variant("above-only", BY_COPY, ("[0] >= target", "[0] > target"))

bank.hint("other-end", "Training must end with the first evaluation that is not below the target, not one part "
                          "later and not one part earlier. Leave the loop there, and only there, before you ask "
                          "for the next model.")  # fmt: skip
bank.slip("other-end", ("            return curve[-1][0], curve\n    return math.inf, curve", "            best = min(best, curve[-1][0])\n    return best, curve"), ("start, curve = clock(), []", "best, start, curve = math.inf, clock(), []"))  # fmt: skip
bank.slip("other-end", ("    return math.inf, curve", "        return math.inf, curve"))
bank.slip("calls", ("for model in train(seed)", "for model in list(train(seed))"))
bank.slip("other-end", ("        model.eval()\n", "        if curve and curve[-1][1] >= target:\n            return curve[-1][0], curve\n        model.eval()\n"), ("        if accuracy >= target:\n            return curve[-1][0], curve\n", ""))  # fmt: skip
bank.variant("other-end", BY_COPY, ("None if rows[-1][0] >= target else next(models, None)", "next(models, None)"), ("curve[-1, 0] if curve[-1, 1] >= target", "curve[curve[:, 1] >= target][0, 0] if (curve[:, 1] >= target).any()"))  # fmt: skip
bank.variant("other-end", BY_COLUMNS, ("            run.close()\n", "            next(run, None)\n"))  # fmt: skip
bank.variant("other-end", BY_BREAK, ("            break\n", "            break\n        if step == 2:\n            break\n"))  # fmt: skip

bank.hint("run-form", "timed_run returns two things: the seconds, a number, and the curve, a list with a pair (seconds, accuracy) for each evaluation.")  # fmt: skip
bank.slip("run-form", ("return curve[-1][0], curve", "return curve[-1][0]"))
bank.slip("run-form", ("(clock() - start, accuracy)", "accuracy"), ("curve[-1][0]", "clock() - start"))  # fmt: skip
bank.slip("run-form", ("return curve[-1][0], curve", "return curve, curve[-1][0]"))
bank.variant("run-form", BY_COLUMNS, ("list(zip(ends, accuracies))", "zip(ends, accuracies)"))
bank.variant("run-form", BY_BREAK, ("return [seconds, curve]", "return seconds, *curve"))

bank.hint("own-clock", "You never read the given clock. Read the time only with clock(): its default is "
                          "time.perf_counter.", edge=True)  # fmt: skip
bank.slip("own-clock", ("clock()", "time.perf_counter()"))
bank.variant("own-clock", BY_COLUMNS, ("clock()", "time.time()"))

bank.hint("wrong-curve", "The curve has a pair (seconds, accuracy), in this order, for every evaluation, "
                            "including the one that reaches the target, and also in a run that never reaches it.")  # fmt: skip
bank.slip("wrong-curve", ("        curve.append((clock() - start, accuracy))\n        if accuracy >= target:\n            return curve[-1][0], curve", "        if accuracy >= target:\n            return clock() - start, curve\n        curve.append((clock() - start, accuracy))"))  # fmt: skip
bank.slip("wrong-curve", ("(clock() - start, accuracy)", "(accuracy, clock() - start)"), ("curve[-1][0]", "curve[-1][1]"))  # fmt: skip
bank.slip("wrong-curve", ("return math.inf, curve", "return math.inf, []"))
bank.variant("wrong-curve", BY_NEXT, ("[end - begin, accuracy]", "[end - begin, max(accuracy, *(a for _, a in curve), 0)]"))  # fmt: skip
bank.variant("wrong-curve", BY_BREAK, ("        curve +=", "        if accuracy < target:\n          curve +="), ("curve[-1][0]", "clock() - start"))  # fmt: skip

bank.hint("started-late", "You start the clock too late. train(seed) may read data as soon as it is called: "
                             "read the clock before the call.", edge=True)  # fmt: skip
bank.slip("started-late", ("start, curve = clock(), []\n    for model in train(seed):", "curve, run = [], train(seed)\n    start = clock()\n    for model in run:"))  # fmt: skip
bank.slip("started-late", ("start, curve = clock(), []", "start, curve = None, []"), ("        model.eval()", "        start = start or clock()\n        model.eval()"))  # fmt: skip
bank.slip("started-late", ("start, curve = clock(), []", "start, curve = None, []"), ("        curve.append", "        start = start or clock()\n        curve.append"))  # fmt: skip
bank.variant("started-late", BY_NEXT, ("    begin = clock()\n", ""), ("    while True", "    begin = clock()\n    while True"))  # fmt: skip
bank.variant("started-late", BY_COLUMNS, ("times, accuracies = [clock()], []\n    run = train(seed=seed)", "run = train(seed)\n    times, accuracies = [clock()], []"))  # fmt: skip

bank.hint("evaluation-left-out", "Your seconds leave out evaluations. The clock never pauses, and it stops "
                                    "after the evaluation that reaches the target. Subtract nothing, and read the "
                                    "clock after evaluate has returned.")  # fmt: skip
bank.slip("evaluation-left-out", ("        model.eval()", "        end = clock()\n        model.eval()"), ("clock() - start, accuracy", "end - start, accuracy"))  # fmt: skip
bank.slip("evaluation-left-out", ("        accuracy = evaluate(model)", "        paused = clock()\n        accuracy = evaluate(model)\n        start += clock() - paused"))  # fmt: skip
bank.slip("evaluation-left-out", ("        model.eval()", "        end = clock()\n        model.eval()"), ("return curve[-1][0], curve", "return end - start, curve"))  # fmt: skip
bank.variant("evaluation-left-out", BY_NEXT, ("        accuracy = evaluate(model)\n        end = clock()", "        end = clock()\n        accuracy = evaluate(model)"))  # fmt: skip
bank.variant("evaluation-left-out", BY_BREAK, ("        accuracy = evaluate(model.eval())", "        before = clock()\n        accuracy = evaluate(model.eval())\n        start += clock() - before"))  # fmt: skip

bank.hint("wrong-seconds", "Count all seconds from one start, before train(seed) is called. The curve has the "
                              "end of each evaluation, and the seconds of the run are the end of the evaluation "
                              "that reaches the target.")  # fmt: skip
bank.slip("wrong-seconds", ("        if accuracy", "        start = clock()\n        if accuracy"))  # fmt: skip
bank.slip("wrong-seconds", ("clock() - start", "clock()"))
bank.slip("wrong-seconds", ("return curve[-1][0], curve", "return curve[0][0], curve"))
bank.slip("wrong-seconds", ("return curve[-1][0], curve", "return sum(seconds for seconds, _ in curve), curve"))  # fmt: skip
bank.variant("wrong-seconds", BY_COLUMNS, ("t - times[0] for t in times[1:]", "b - a for a, b in zip(times, times[1:])"))  # fmt: skip
bank.variant("wrong-seconds", BY_BREAK, ("seconds = curve[-1][0]", "seconds = 1000 * curve[-1][0]"))  # fmt: skip

bank.hint("unreached", "A run that ends without reaching the target takes math.inf seconds, and its curve is "
                          "still returned. Your answer gave: {got}.")  # fmt: skip
bank.slip("unreached", ("return math.inf, curve", "return curve[-1][0], curve"))
bank.slip("unreached", ("    return math.inf, curve", ""))
bank.slip("unreached", ("return math.inf, curve", "return None, curve"))
bank.slip("unreached", ("return math.inf, curve", "return math.inf"))
bank.slip("unreached", ("for model in train(seed):", "run = train(seed)\n    while True:\n        model = next(run)"))  # fmt: skip
bank.variant("unreached", BY_BREAK, ("seconds, start = (), math.inf,", "seconds, start = (), 0.0,"))  # fmt: skip
bank.variant("unreached", BY_NEXT, ("return math.inf, curve", "raise"))

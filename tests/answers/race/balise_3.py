"""Answers to balise 3 of 25_race: which rules the logs of several runs break."""

from tests.answers.bank import Bank

bank = Bank("25_race", 3, whole=True)

# rule by rule
BY_RULE = """
def audit(logs, validation, test, every):
    def reads(log, *keys):
        return [event for event in log if event["key"] in keys]

    def value(log, key):
        return next(event["value"] for event in log if event["key"] == key)

    def at(log, key):
        return next(event["time_ms"] for event in log if event["key"] == key)

    def too_long(log):
        row = longest = 0
        for event in reads(log, "train_read", "eval_read"):
            if event["key"] == "eval_read":
                row = 0
            else:
                row += len(event["value"])
                longest = max(row, longest)
        return longest > every

    def early(log):
        return any(event["time_ms"] < at(log, "run_start") for event in reads(log, "train_read", "eval_read"))

    def short(log):
        return value(log, "result") * 1000 < (at(log, "run_stop") - at(log, "run_start")) * 0.99

    seeds = [value(log, "seed") for log in logs]
    signs = {
        "validation images": lambda log: any(number in validation for event in reads(log, "train_read") for number in event["value"]),
        "test images": lambda log: any(test.intersection(event["value"]) for event in reads(log, "train_read", "eval_read")),
        "sparse evaluation": lambda log: too_long(log) or any(validation.difference(event["value"]) for event in reads(log, "eval_read")),
        "warm start": lambda log: value(log, "weights_from") != "random",
        "clock": lambda log: early(log) or short(log),
        "seed": lambda log: seeds.count(value(log, "seed")) > 1,
    }
    return {rule: [run for run, log in enumerate(logs) if sign(log)] for rule, sign in signs.items()}
"""  # fmt: skip
bank.text(None, BY_RULE)

# event by event
BY_EVENT = """
def audit(logs, validation, test, every):
    broken = defaultdict(set)
    runs_of = defaultdict(list)
    for run, log in enumerate(logs):
        start, row = None, 0
        for event in log:
            key, value, now = event["key"], event["value"], event["time_ms"]
            if key == "seed":
                runs_of[value].append(run)
            elif key == "weights_from" and value != "random":
                broken["warm start"].add(run)
            elif key == "run_start":
                start = now
            elif key == "run_stop":
                seconds = (now - start) / 1000
            elif key == "result" and value / seconds < 0.99:
                broken["clock"].add(run)
            if key not in ("train_read", "eval_read"):
                continue
            if start is None:
                broken["clock"].add(run)
            if any(number in test for number in value):
                broken["test images"].add(run)
            if key == "train_read":
                row += len(value)
                if not validation.isdisjoint(value):
                    broken["validation images"].add(run)
                if row > every:
                    broken["sparse evaluation"].add(run)
            else:
                row = 0
                if not validation.issubset(value):
                    broken["sparse evaluation"].add(run)
    for runs in runs_of.values():
        if len(runs) > 1:
            broken["seed"].update(runs)
    return {rule: sorted(broken[rule]) for rule in RULES}
"""
bank.text(None, BY_EVENT)

# with numpy: tables of runs and rules; tuples
BY_TABLE = """
def audit(logs, validation, test, every):
    import numpy as np

    table = np.zeros((len(logs), len(RULES)), dtype=bool)
    for run, log in enumerate(logs):
        last = {event["key"]: event for event in log}
        train = [np.array(e["value"]) for e in log if e["key"] == "train_read"]
        evals = [np.array(e["value"]) for e in log if e["key"] == "eval_read"]
        marks = np.array([0] + [len(e["value"]) if e["key"] == "train_read" else -1 for e in log if e["key"].endswith("_read")] + [-1])
        rows = [marks[a + 1 : b].sum() for a, b in itertools.pairwise([-1, *np.flatnonzero(marks < 0)])]
        first = min(e["time_ms"] for e in log if e["key"].endswith("_read"))
        spent = last["run_stop"]["time_ms"] - last["run_start"]["time_ms"]
        table[run] = (
            np.isin(np.concatenate(train), list(validation)).any(),
            np.isin(np.concatenate(train + evals), list(test)).any(),
            max(rows) > every or not all(np.isin(list(validation), e).all() for e in evals),
            last["weights_from"]["value"] != "random",
            first < last["run_start"]["time_ms"] or 1000 * last["result"]["value"] < 0.99 * spent,
            sum(e["value"] == last["seed"]["value"] for other in logs for e in other if e["key"] == "seed") > 1,
        )
    return {rule: tuple(np.flatnonzero(table[:, k])) for k, rule in enumerate(RULES)}
"""
bank.text(None, BY_TABLE)

# sets, and all signs of an event in one table
BY_SIGNS = """
def audit(logs, validation, test, every):
    broken = {rule: set() for rule in RULES}
    values = [{event["key"]: event["value"] for event in log} for log in logs]
    times = [{event["key"]: event["time_ms"] for event in log} for log in logs]
    seeds = Counter(each["seed"] for each in values)
    for run, log in enumerate(logs):
        in_a_row, start = 0, times[run]["run_start"]
        for event in log:
            if event["key"] in ("train_read", "eval_read"):
                numbers, training = set(event["value"]), event["key"] == "train_read"
                in_a_row = in_a_row + len(event["value"]) if training else 0
                signs = {
                    "validation images": training and numbers & validation,
                    "test images": numbers & test,
                    "sparse evaluation": in_a_row > every or not (training or validation <= numbers),
                    "clock": event["time_ms"] < start,
                }
                for rule in signs:
                    if signs[rule]:
                        broken[rule].add(run)
        if values[run]["weights_from"] != "random":
            broken["warm start"].add(run)
        if values[run]["result"] < 0.99 * (times[run]["run_stop"] - start) / 1000:
            broken["clock"].add(run)
        if seeds[values[run]["seed"]] > 1:
            broken["seed"].add(run)
    return {rule: sorted(runs) for rule, runs in broken.items()}
"""
bank.text(None, BY_SIGNS)


def slip(slug, *changes):
    code = BY_SIGNS
    for old, new in changes:
        assert old in code, f"the answer has no {old!r}"
        code = code.replace(old, new)
    bank.text(slug, code)


slip("nothing-returned", ("return {rule: sorted(runs) for rule, runs in broken.items()}", "sorted(broken)"))

bank.hint("no-entry", "The dictionary needs an entry for {rules}: an empty list if no run breaks the rule.")
slip("no-entry", ("in broken.items()}", "in broken.items() if runs}"))
slip("no-entry", ("return {rule: sorted(runs) for rule, runs in broken.items()}", "return list(broken.values())"))
bank.variant("no-entry", BY_EVENT, ("for rule in RULES}", "for rule in broken}"))

bank.hint(
    "wrong-runs",
    "An entry is a list of run numbers, counted from 0, in ascending order. A run appears "
    "in it once, however often it breaks the rule.",
)
slip( "wrong-runs", ("enumerate(logs)", "enumerate(logs, 1)"), ("times[run]", "times[run - 1]"), ("values[run]", "values[run - 1]"))  # fmt: skip
slip("wrong-runs", ("rule: set()", "rule: []"), (".add(run)", ".append(run)"))
slip("wrong-runs", ("sorted(runs) for", "sorted(map(str, runs)) for"))
slip("wrong-runs", ("sorted(runs) for", "sorted(runs, reverse=True) for"))
bank.variant("wrong-runs", BY_RULE, ("[run for run, log in enumerate(logs) if sign(log)]", "[bool(sign(log)) for log in logs]"))  # fmt: skip
bank.variant("wrong-runs", BY_EVENT, ("sorted(broken[rule])", "broken[rule]"))

bank.hint("one-event", "A log has many train_read and eval_read events, but you look at only one of each. A "
                          "dictionary by key, for example, keeps only the last.")  # fmt: skip
slip("one-event", ("for event in log:", "for event in {event['key']: event for event in log}.values():"))
slip("one-event", ("for event in log:", "for event in {event['key']: event for event in log[::-1]}.values():"))
slip( "one-event", ("in_a_row, start = 0,", "seen, in_a_row, start = set(), 0,"), ('if event["key"] in ("train_read", "eval_read"):', 'if event["key"] in ("train_read", "eval_read") and not (event["key"] in seen or seen.add(event["key"])):'))  # fmt: skip
bank.variant("one-event", BY_RULE, ("return [event for event in log if event", "return [event for event in {event['key']: event for event in log}.values() if event"))  # fmt: skip

bank.hint("evaluation-is-no-training", "An evaluation is supposed to read the validation images. This rule is "
                                          "only about train_read.")  # fmt: skip
slip("evaluation-is-no-training", ('"validation images": training and', '"validation images":'))
bank.variant("evaluation-is-no-training", BY_RULE, ('for event in reads(log, "train_read") for', 'for event in reads(log, "train_read", "eval_read") for'))  # fmt: skip

bank.hint("other-runs", "One run breaks the rule, but you name all runs. Judge each run by its own log.")
slip("other-runs", ("rule: sorted(runs)", "rule: list(range(len(logs))) if runs else []"))
bank.variant("other-runs", BY_RULE, ("[run for run, log in enumerate(logs) if sign(log)]", "[*range(len(logs))] if any(map(sign, logs)) else []"))  # fmt: skip

bank.hint("each-batch-alone", "You compare each batch with `every` separately. Add up the images of all batches "
                                 "since the last evaluation.")  # fmt: skip
slip("each-batch-alone", ("in_a_row + len", "len"))
bank.variant("each-batch-alone", BY_EVENT, ("row += len", "row = len"))

bank.hint("not-reset", "Your count continues where it should restart. It is 0 at the beginning of each log, and "
                          "after each evaluation.")  # fmt: skip
slip("not-reset", ("if training else 0", "if training else in_a_row"))
slip( "not-reset", ("    for run, log in enumerate(logs):\n        in_a_row, start = 0, times", "    in_a_row = 0\n    for run, log in enumerate(logs):\n        start = times"))  # fmt: skip
bank.variant("not-reset", BY_EVENT, ("                row = 0\n", ""))
bank.variant("not-reset", BY_EVENT, ("    for run, log", "    row = 0\n    for run, log"), ("start, row = None, 0", "start = None"))  # fmt: skip

bank.hint("read-before-start", "A run reads data before run_start, and you don't notice it. Compare the time of "
                                  "each train_read and each eval_read with that of run_start.")  # fmt: skip
slip("read-before-start", ('"clock": event["time_ms"] < start', '"clock": False'))
slip("read-before-start", ('"clock": event["time_ms"] < start', '"clock": not training and event["time_ms"] < start'))
slip("read-before-start", ('"clock": event["time_ms"] < start', '"clock": training and event["time_ms"] < start'))
bank.variant("read-before-start", BY_RULE, ("early(log) or short(log)", "short(log)"))

bank.hint(
    "wrong-unit",
    "time_ms is in milliseconds, the claimed result in seconds. Convert both to the same unit before you compare them.",
)
slip("wrong-unit", (" / 1000", ""))
slip("wrong-unit", ('["result"] <', '["result"] / 1000 <'), ("- start) / 1000", "- start)"))
slip("wrong-unit", (" / 1000", " * 1000"))
bank.variant("wrong-unit", BY_EVENT, (" / 1000", ""))

bank.hint("first-goes-free", "You let the first run with a seed off, and name only the later ones. All runs "
                                "that share a seed break the rule.")  # fmt: skip
slip( "first-goes-free", ('seeds[values[run]["seed"]] > 1', 'values[run]["seed"] in [each["seed"] for each in values[:run]]'))  # fmt: skip
bank.variant("first-goes-free", BY_EVENT, ('broken["seed"].update(runs)', 'broken["seed"].update(runs[1:])'))

bank.hint("one-rule", "You miss a rule where another one is broken too. Test all rules on all events, whatever "
                         "you have found before.")  # fmt: skip
slip("one-rule", ("broken[rule].add(run)\n", "broken[rule].add(run)\n                        break\n"))
slip( "one-rule", ("    return {rule", "    import itertools\n    for one, other in itertools.combinations(RULES, 2):\n        broken[other] -= broken[one]\n    return {rule"))  # fmt: skip
bank.variant("one-rule", BY_EVENT, ('if key == "train_read":\n', 'elif key == "train_read":\n'))
bank.variant("one-rule", BY_RULE, ("    return {rule", "    gone = set()\n    return {rule"), ("if sign(log)]", "if run not in gone and sign(log) and not gone.add(run)]"))  # fmt: skip

bank.hint("wrong-rule", "{rule}: {means}.")
slip("wrong-rule", ("training and numbers & validation", "training and numbers == validation"))
slip("wrong-rule", ("training and numbers & validation", "training and numbers <= validation"))
slip("wrong-rule", ("training and numbers & validation", "numbers & validation is not None"))
slip("wrong-rule", ('event["time_ms"] < start', 'event["time_ms"] > start'))
slip("wrong-rule", ('"test images": numbers & test', '"test images": training and numbers & test'))
slip("wrong-rule", ("validation <= numbers", "validation == numbers"))
slip("wrong-rule", ("validation <= numbers", 'len(event["value"]) >= len(validation)'))
slip("wrong-rule", ("in_a_row > every", "in_a_row >= every"))
slip("wrong-rule", ("in_a_row > every or not (training or validation <= numbers)", "in_a_row > every"))
slip("wrong-rule", ("in_a_row > every or not (training", "not (training"))
slip("wrong-rule", (" != ", " == "))
slip("wrong-rule", ('["result"] < 0.99', '["result"] > 0.99'))
slip("wrong-rule", ('["result"] < 0.99 *', '["result"] <'))
slip("wrong-rule", ('["result"] < 0.99', '["result"] < 0'))
slip("wrong-rule", ("- start) / 1000", ") / 1000"))
slip("wrong-rule", ('(times[run]["run_stop"] - start)', '(times[run]["run_stop"] - log[0]["time_ms"])'))
slip("wrong-rule", ('seeds[values[run]["seed"]] > 1', 'run and values[run]["seed"] == values[run - 1]["seed"]'))
bank.variant("wrong-rule", BY_EVENT, ('!= "random"', 'and "random" not in value'))
bank.variant("wrong-rule", BY_EVENT, ("                if row > every", "            elif True:\n                if row > every"), ("            else:\n                row = 0\n", "                row = 0\n"))  # fmt: skip
bank.variant("wrong-rule", BY_RULE, ("row += len(event[\"value\"])", "row = len(distinct := distinct | set(event['value']))"), ("row = longest = 0", "row = longest = 0\n        distinct = set()"), ("                row = 0", "                row, distinct = 0, set()"))  # fmt: skip

bank.slip("each-batch-alone", ("in_a_row = in_a_row + len", "in_a_row = len"))
bank.slip(
    "not-reset",
    ("        in_a_row = 0\n        for event", "        for event"),
    ("    for run, log", "    in_a_row = 0\n    for run, log"),
)
bank.slip("wrong-unit", (" / 1000", ""))

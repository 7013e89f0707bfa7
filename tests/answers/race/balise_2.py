"""Answers to balise 2 of 25_race: a result, and the bootstrap of a speed-up."""

from tests.answers.bank import Bank

bank = Bank("25_race", 2, whole=True)

# all draws at once
BY_NUMPY = """
import numpy as np


def result(seconds):
    kept = np.sort(seconds, axis=-1)[..., 1:-1]
    return kept.mean(-1)


def speedup(reference, entry, draws=2000, seed=0):
    rng = np.random.default_rng(seed)
    reference, entry = np.array(reference), np.array(entry)
    a, b = (result(runs[rng.integers(0, len(runs), (draws, len(runs)))]) for runs in (reference, entry))
    good = np.isfinite(a) & np.isfinite(b)
    ratios = a[good] / b[good]
    return result(reference) / result(entry), *np.quantile(ratios, [0.05, 0.95])
"""
bank.text(None, BY_NUMPY)

# a sum without the ends, draws one by one, quantiles of the library
BY_LOOP = """
import statistics


def result(seconds):
    failed = [s for s in seconds if s == math.inf]
    if len(failed) > 1:
        return math.inf
    seconds = [s for s in seconds if s != math.inf]
    seconds.remove(min(seconds))
    if not failed:
        seconds.remove(max(seconds))
    return statistics.fmean(seconds)


def speedup(reference, entry, draws=2000, seed=0):
    random.seed(seed)
    ratios = []
    for _ in range(draws):
        first = [random.choice(reference) for _ in reference]
        second = [random.choice(entry) for _ in entry]
        a, b = result(first), result(second)
        if a < math.inf and b < math.inf:
            ratios.append(a / b)
    cuts = statistics.quantiles(ratios, n=20)
    return [result(reference) / result(entry), cuts[0], cuts[-1]]
"""
bank.text(None, BY_LOOP)

# tensors; a draw without results is drawn anew
BY_TORCH = """
def result(seconds):
    kept = torch.as_tensor(seconds, dtype=torch.float64).sort().values[1:-1]
    return kept.mean()


def speedup(reference, entry, draws=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reference, entry = torch.tensor(reference), torch.tensor(entry)

    def draw(runs):
        while True:
            found = result(runs[torch.randint(len(runs), (len(runs),), generator=generator)])
            if found.isfinite():
                return found

    ratios = torch.stack([draw(reference) / draw(entry) for _ in range(draws)])
    return torch.stack([result(reference) / result(entry), *ratios.quantile(torch.tensor([0.05, 0.95]).double())])
"""
bank.text(None, BY_TORCH)

DRAW = "luck.choices(runs, k=len(runs))"
KEPT = "    kept = sorted(seconds)[1:-1]\n"

bank.slip("nothing-returned", ("return sum(kept)", "sum(kept)"))
bank.slip("nothing-returned", ("return result(reference)", "result(reference)"))

bank.hint("three-numbers", "result returns one number; speedup returns three: (ratio, low, high). You returned: "
                              "{got}.")  # fmt: skip
bank.slip("three-numbers", ("return sum(kept) / len(kept)", "return kept"))
bank.slip("three-numbers", ("return result(reference) / result(entry), low, high", "return low, high"))  # fmt: skip
bank.slip("three-numbers", (", low, high\n", ", (low, high)\n"))
bank.variant("three-numbers", BY_NUMPY, ("*np.quantile", "np.quantile"))
bank.variant("three-numbers", BY_LOOP, ("cuts[0], cuts[-1]]", "*cuts]"))

bank.hint("changes-list", "You changed the given list: list.sort and list.remove work in place. Leave the runs "
                             "as they are: sorted(seconds) is a new list.", edge=True)  # fmt: skip
bank.slip("changes-list", (KEPT, "    seconds.sort()\n    kept = seconds[1:-1]\n"))
bank.slip("changes-list", ("    luck =", "    reference.sort()\n    luck ="))
bank.variant("changes-list", BY_LOOP, ("    seconds = [s for s in seconds if s != math.inf]\n", ""), ("if not failed:\n        seconds.remove(max(seconds))", "seconds.remove(max(seconds))"))  # fmt: skip

bank.hint("wrong-result", "Leave out one fastest and one slowest run, no more and no fewer. The result is the "
                             "mean of all the others.")  # fmt: skip
bank.slip("wrong-result", ("[1:-1]", ""))
bank.slip("wrong-result", ("return sum(kept) / len(kept)", "return 0.0"))
bank.slip("wrong-result", ("[1:-1]", "[:-1]"))
bank.slip("wrong-result", ("[1:-1]", "[1:]"))
bank.slip("wrong-result", ("[1:-1]", "[1:4]"))
bank.slip("wrong-result", ("sorted(seconds)", "list(seconds)"))
bank.slip("wrong-result", ("sum(kept) / len(kept)", "kept[len(kept) // 2]"))
bank.slip("wrong-result", ("sum(kept) / len(kept)", "sum(kept) / len(seconds)"))
bank.slip("wrong-result", (KEPT, "    kept = [s for s in seconds if min(seconds) < s < max(seconds)] or seconds\n"))  # fmt: skip
bank.variant("wrong-result", BY_NUMPY, ("kept.mean(-1)", "np.median(kept, -1)"))
bank.variant("wrong-result", BY_LOOP, ("    seconds.remove(min(seconds))\n", ""))
bank.variant("wrong-result", BY_TORCH, ("[1:-1]", "[1:]"))

bank.hint("failed-runs", "A run that never reached the target is the slowest: math.inf comes last in the order. "
                            "One such run is left out as the slowest, as any other would be. With a second one, "
                            "the mean is math.inf, and so is the result.")  # fmt: skip
bank.slip("failed-runs", ("sorted(seconds)", "sorted(s for s in seconds if s < math.inf)"), ("return sum(kept) / len(kept)", "return sum(kept) / len(kept) if kept else math.inf"))  # fmt: skip
bank.slip("failed-runs", (KEPT, "    kept = [s for s in sorted(seconds)[1:-1] if s < math.inf]\n"), ("return sum(kept) / len(kept)", "return sum(kept) / max(1, len(kept))"))  # fmt: skip
bank.slip("failed-runs", (KEPT, "    kept = sorted(seconds)[1:-1] if max(seconds) < math.inf else [math.inf]\n"))  # fmt: skip
bank.slip("failed-runs", (KEPT + "    return sum(kept) / len(kept)", "    return (sum(seconds) - min(seconds) - max(seconds)) / (len(seconds) - 2)"))  # fmt: skip
bank.slip("failed-runs", ("sorted(seconds)", "sorted(s for s in seconds if s < math.inf)"))
bank.variant("failed-runs", BY_LOOP, ("if not failed", "if len(seconds) > 1"))
bank.variant("failed-runs", BY_NUMPY, ("return kept.mean(-1)", "return np.where(np.isfinite(kept), kept, 0).sum(-1) / np.isfinite(kept).sum(-1).clip(1)"))  # fmt: skip

bank.hint("wrong-ratio", "The ratio is result(reference) / result(entry), with the runs as they were given, so "
                            "that more is better: a ratio of 2 means half the time.")  # fmt: skip
bank.slip("wrong-ratio", ("return result(reference) / result(entry)", "return result(entry) / result(reference)"))  # fmt: skip
bank.slip("wrong-ratio", ("return result(reference) / result(entry)", "return sum(ratios) / len(ratios)"))  # fmt: skip
bank.slip("wrong-ratio", ("return result(reference) / result(entry)", "return ratios[len(ratios) // 2]"))  # fmt: skip
bank.slip("wrong-ratio", ("return result(reference) / result(entry)", "return sum(reference) / sum(entry)"))  # fmt: skip
bank.variant("wrong-ratio", BY_TORCH, ("result(reference) / result(entry)", "result(entry) / result(reference)"), ("draw(reference) / draw(entry)", "draw(entry) / draw(reference)"))  # fmt: skip
bank.variant("wrong-ratio", BY_LOOP, ("[result(reference) / result(entry)", "[statistics.median(ratios)"))  # fmt: skip

bank.hint("no-spread", "low is not below high. Draw other runs each time, with replacement, from one generator "
                          "that is made before all draws. Then sort the ratios.")  # fmt: skip
bank.slip("no-spread", (DRAW, "luck.sample(runs, k=len(runs))"))
bank.slip("no-spread", (DRAW, "random.Random(seed).choices(runs, k=len(runs))"))
bank.slip("no-spread", ("(0.05, 0.95)", "(0.95, 0.05)"))
bank.variant("no-spread", BY_NUMPY, ("rng.integers(0, len(runs), (draws, len(runs)))", "rng.permuted(np.tile(np.arange(len(runs)), (draws, 1)), axis=1)"))  # fmt: skip
bank.variant("no-spread", BY_TORCH, ("torch.randint(len(runs), (len(runs),), generator=generator)", "torch.randperm(len(runs), generator=generator)"))  # fmt: skip

bank.hint("paired", "You draw from both lists with the same random numbers: where one has slow runs, so has the "
                       "other, and the ratios stay too close together. Draw from each list separately, with one "
                       "generator for all draws.", edge=True)  # fmt: skip
bank.slip("paired", ("luck = random.Random(seed)", "luck = [random.Random(seed), random.Random(seed)]"), ("luck.choices", "own.choices"), ("for runs in (reference, entry)", "for own, runs in zip(luck, (reference, entry))"))  # fmt: skip
bank.slip("paired", ("    drawn =", "    places = [luck.choices(range(len(reference)), k=len(reference)) for _ in range(draws)]\n    drawn ="), (DRAW, "[runs[i % len(runs)] for i in some]"), ("for _ in range(draws)]\n    ratios", "for some in places]\n    ratios"))  # fmt: skip
bank.variant("paired", BY_NUMPY, ("runs[rng.integers", "runs[np.random.default_rng(seed).integers"))  # fmt: skip
bank.variant("paired", BY_LOOP, ("        first =", "        where = [random.randrange(max(len(reference), len(entry))) for _ in range(max(len(reference), len(entry)))]\n        first ="), ("random.choice(reference) for _ in reference", "reference[i % len(reference)] for i in where[:len(reference)]"), ("random.choice(entry) for _ in entry", "entry[i % len(entry)] for i in where[:len(entry)]"))  # fmt: skip

bank.hint("other-quantiles", "About 95 of 100 draws are between your low and high. Nine out of ten are asked "
                                "for: 5 % of the draws are below low, 5 % above high.", edge=True)  # fmt: skip
bank.slip("other-quantiles", ("(0.05, 0.95)", "(0.025, 0.975)"))
bank.variant("other-quantiles", BY_NUMPY, ("[0.05, 0.95]", "[0.025, 0.975]"))
bank.variant("other-quantiles", BY_LOOP, ("n=20", "n=40"))

bank.hint("mean-of-draws", "You seem to compare the draws by the mean of all runs. Pass the drawn runs to "
                              "result, as you do with the lists themselves.")  # fmt: skip
bank.slip("mean-of-draws", (f"result({DRAW})", f"sum({DRAW}) / len(runs)"))
bank.variant("mean-of-draws", BY_NUMPY, ("(result(runs[rng.integers(0, len(runs), (draws, len(runs)))])", "(runs[rng.integers(0, len(runs), (draws, len(runs)))].mean(-1)"))  # fmt: skip
bank.variant("mean-of-draws", BY_LOOP, ("a, b = result(first), result(second)", "a, b = statistics.fmean(first), statistics.fmean(second)"))  # fmt: skip

bank.hint("failed-counted", "Leave out the draws in which either list has no result (two or more infinite "
                               "runs), and no others. Test both results: finite / math.inf is 0, and 0 is finite. "
                               "Draw from all runs, including the infinite ones.", edge=True)  # fmt: skip
bank.slip("failed-counted", (" if math.isfinite(a) and math.isfinite(b)", ""))
bank.slip("failed-counted", (" if math.isfinite(a) and math.isfinite(b)", " if math.isfinite(a / b)"))  # fmt: skip
bank.slip("failed-counted", (" if math.isfinite(a) and math.isfinite(b)", " if math.isfinite(b)"))  # fmt: skip
bank.slip("failed-counted", (DRAW, "luck.choices([s for s in runs if s < math.inf], k=len(runs))"))  # fmt: skip
bank.slip("failed-counted", (DRAW, "drawn"), ("for runs in (reference, entry)] for _ in range(draws)]", "for drawn in pair] for pair in [[luck.choices(runs, k=len(runs)) for runs in (reference, entry)] for _ in range(draws)] if math.inf not in pair[0] + pair[1]]"))  # fmt: skip
bank.variant("failed-counted", BY_NUMPY, ("good = np.isfinite(a) & np.isfinite(b)", "good = ~np.isnan(a / b)"))  # fmt: skip
bank.variant("failed-counted", BY_LOOP, ("if a < math.inf and b < math.inf", "if a < math.inf"))

bank.hint("argument-ignored", "{what}. `seed` decides which runs are drawn, `draws` how many times.", edge=True)
bank.slip("argument-ignored", ("luck = random.Random(seed)", "luck = random"))
bank.slip("argument-ignored", ("random.Random(seed)", "random.Random(0)"))
bank.slip("argument-ignored", ("range(draws)", "range(2000)"))
bank.variant("argument-ignored", BY_NUMPY, ("default_rng(seed)", "default_rng()"))
bank.variant("argument-ignored", BY_LOOP, ("random.seed(seed)", "random.seed(1234)"))
bank.variant("argument-ignored", BY_TORCH, ("range(draws)", "range(1500)"))

bank.hint("wrong-draws", "In each draw, len(reference) runs come from reference and len(entry) from entry, with replacement, and result(first) / result(second) is one ratio. low and high are the 5 % and the 95 % quantile of these ratios themselves.")  # fmt: skip
bank.slip("wrong-draws", ("sorted(a / b for", "sorted(b / a for"))
bank.slip("wrong-draws", ("sorted(a / b for a, b", "sorted(result(reference) / b for a, b"))
bank.slip("wrong-draws", ("sorted(a / b for a, b", "sorted(a / result(entry) for a, b"))
bank.slip("wrong-draws", (DRAW, "luck.choices(reference + entry, k=len(runs))"))
bank.slip("wrong-draws", ("k=len(runs)", "k=2 * len(runs)"))
bank.slip("wrong-draws", ("k=len(runs)", "k=max(3, len(runs) - 1)"))
bank.slip("wrong-draws", ("int(share * len(ratios))", "round(share * (len(ratios) - 1)) and (0 if share < 0.5 else -1)"))  # fmt: skip
bank.slip("wrong-draws", ("    low, high =", "    mean = sum(ratios) / len(ratios)\n    error = math.sqrt(sum((r - mean) ** 2 for r in ratios) / len(ratios))\n    low, high = mean - error, mean + error\n    _ ="))  # fmt: skip
bank.variant("wrong-draws", BY_LOOP, ("        second = [random.choice(entry) for _ in entry]\n", ""), ("result(second)", "result(entry)"))  # fmt: skip
bank.variant("wrong-draws", BY_NUMPY, ("np.quantile(ratios, [0.05, 0.95])", "(ratios.mean() + np.array([-1, 1]) * ratios.std() / len(ratios) ** 0.5)"))  # fmt: skip

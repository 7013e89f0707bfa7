"""Answers to balise 1."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 1, whole=True)

# tried one by one
BY_SEARCH = """
def batch_sizes(n_ranks, batch=None, micro=None, accumulation=None):
    given = dict(n_ranks=n_ranks, batch=batch, micro=micro, accumulation=accumulation)
    if batch is None and micro is None:
        raise ValueError("nothing to go by")
    for name, number in given.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}, and has to be 1 or more")
    if accumulation is None and (batch is None or micro is None):
        accumulation = 1
    if batch is None:
        return micro * accumulation * n_ranks, micro, accumulation
    fits = []
    for total in range(1, 4 * batch + 200):
        for m in [micro] if micro else range(1, total + 1):
            steps, rest = divmod(total, m * n_ranks)
            if rest == 0 and steps and accumulation in (None, steps):
                if total == batch:
                    return batch, m, steps
                fits.append(total)
    below, above = [t for t in fits if t < batch][-1:], [t for t in fits if t > batch][:1]
    raise ValueError(f"{batch} samples? Take {below + above}")


def from_words(library, words, n_ranks):
    steps = words.get("gradient_accumulation_steps", 1)
    match library:
        case "deepspeed":
            return batch_sizes(n_ranks, words.get("train_batch_size"), words.get("train_micro_batch_size_per_gpu"),
                               words.get("gradient_accumulation_steps"))
        case "transformers":
            micro = words.get("per_device_train_batch_size", 8)
        case "accelerate":
            micro, rest = divmod(words["batch_size"], n_ranks) if words.get("split_batches") else (words["batch_size"], 0)
            if rest:
                raise ValueError(f"{n_ranks} ranks do not divide {words}")
        case "fabric":
            micro, steps = words["batch_size"], words.get("every", 1)
    return [steps * micro * n_ranks, micro, steps]
"""
bank.text(None, BY_SEARCH)

# case by case, as DeepSpeed does, with products first
BY_CASES = """
def batch_sizes(n_ranks, batch=None, micro=None, accumulation=None):
    if min(x for x in (n_ranks, batch, micro, accumulation) if x is not None) < 1:
        raise ValueError("below 1")
    match (batch, micro, accumulation):
        case (None, None, _):
            raise ValueError("train_batch_size or train_micro_batch_size_per_gpu is needed")
        case (None, _, None):
            return micro * n_ranks, micro, 1
        case (None, _, _):
            return micro * n_ranks * accumulation, micro, accumulation
        case (_, None, None):
            divisor, found = n_ranks, (batch, batch // n_ranks, 1)
        case (_, None, _):
            divisor, found = n_ranks * accumulation, (batch, batch // (n_ranks * accumulation), accumulation)
        case (_, _, None):
            divisor, found = n_ranks * micro, (batch, micro, batch // (n_ranks * micro))
        case _:
            if micro * accumulation * n_ranks != batch:
                raise ValueError(f"{micro} x {accumulation} x {n_ranks} = {micro * accumulation * n_ranks}")
            return batch, micro, accumulation
    if batch % divisor:
        low = batch // divisor * divisor
        raise ValueError(f"try {low or 'more:'} {low + divisor}")
    return found


def from_words(library, words, n_ranks):
    if library == "deepspeed":
        short = {"train_batch_size": "batch", "train_micro_batch_size_per_gpu": "micro", "gradient_accumulation_steps": "accumulation"}
        return batch_sizes(n_ranks, **{short[word]: number for word, number in words.items()})
    if library == "transformers":
        words = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1} | words
        return batch_sizes(n_ranks, micro=words["per_device_train_batch_size"], accumulation=words["gradient_accumulation_steps"])
    if library == "fabric":
        return batch_sizes(n_ranks, micro=words["batch_size"], accumulation=words.get("every"))
    k = words.get("gradient_accumulation_steps", 1)
    if words.get("split_batches", False):
        return batch_sizes(n_ranks, batch=k * words["batch_size"], accumulation=k)
    return batch_sizes(n_ranks, micro=words["batch_size"], accumulation=k)
"""
bank.text(None, BY_CASES)

MICRO = "micro or most, accumulation or (most if micro else 1)"

bank.hint("not-three", "Return three whole numbers, (batch, micro, accumulation), as a tuple.")
bank.slip("not-three", (f"return batch, {MICRO}", f"return batch, {MICRO.split(',')[0]}"))
bank.slip("not-three", ("batch // unit)", "batch / unit)"))
bank.variant("not-three", BY_CASES, ("return micro * n_ranks, micro, 1", "return micro * n_ranks"))

bank.hint("refused-right", "These numbers fit together, but you raised a ValueError.")
bank.slip("refused-right", ("if batch is None and micro is None", "if micro is None"))
bank.slip("refused-right", ("batch = batch or unit", "batch = batch or micro"))
bank.variant(
    "refused-right",
    BY_CASES,
    (
        "case (None, _, None):\n            return micro * n_ranks, micro, 1",
        "case (None, _, None):\n            raise ValueError('too little')",
    ),
)

bank.hint(
    "ranks-forgotten",
    "The number of ranks is missing: `batch` counts the samples of all ranks, `micro` those of one rank.",
)
bank.slip("ranks-forgotten", ("unit = n_ranks * ", "unit = "))
for there in ("batch // n_ranks, 1", "batch // (n_ranks * accumulation)", "batch // (n_ranks * micro)"):
    bank.text("ranks-forgotten", BY_CASES.replace(there, there.replace("n_ranks * ", "").replace("// n_ranks", "")))
bank.text("ranks-forgotten", BY_CASES.replace("return micro * n_ranks * acc", "return micro * acc"))
bank.text("ranks-forgotten", BY_CASES.replace("return micro * n_ranks, micro, 1", "return micro, micro, 1"))
bank.variant(
    "ranks-forgotten",
    BY_SEARCH,
    ("return micro * accumulation * n_ranks", "return micro * accumulation"),
    ("divmod(total, m * n_ranks)", "divmod(total, m)"),
)

bank.hint(
    "swapped",
    "`micro` and `accumulation` are swapped. Compute the one of the two that is not given. If only `batch` is "
    "given, everything goes into one forward.",
)
bank.slip("swapped", (MICRO, "accumulation or most, micro or (most if accumulation else 1)"))
bank.slip("swapped", (MICRO, "micro or (most if accumulation else 1), accumulation or most"))
bank.variant("swapped", BY_CASES, ("(batch, batch // n_ranks, 1)", "(batch, 1, batch // n_ranks)"))

bank.hint(
    "wrong-third",
    "In every case, batch = micro × accumulation × ranks, and the numbers that are given must stay the same.",
)
bank.text(
    "wrong-third", BY_CASES.replace("micro * n_ranks * accumulation, micro", "micro + n_ranks + accumulation, micro")
)
bank.slip("wrong-third", (MICRO, "most, most"))
bank.variant("wrong-third", BY_SEARCH, ("return batch, m, steps", "return batch, 2 * m, steps"))

bank.hint("wrong-defaults", "If only one of `batch` and `micro` is given, `accumulation` is 1.")
bank.slip(
    "wrong-defaults",
    (MICRO, "micro or most, accumulation or (most if micro and most > 1 else 2)"),
    ("unit = n_ranks * (micro or 1) * (accumulation or 1)", "unit = n_ranks * (micro or 1) * (accumulation or 1)"),
)
bank.variant("wrong-defaults", BY_CASES, ("return micro * n_ranks, micro, 1", "return 2 * micro * n_ranks, micro, 2"))

bank.hint(
    "not-refused",
    "These numbers contradict each other, but you raised no ValueError. A division rounds down: multiply again and "
    "compare. With micro and accumulation given, only one batch fits.",
)
bank.slip("not-refused", ("if batch != most * unit", "if False"))
bank.slip("not-refused", ("if batch != most * unit", "if batch < most * unit"))
bank.slip("not-refused", ("raise ValueError(f", "raise AssertionError(f"))
bank.slip(
    "not-refused", ("most = 1 if micro and accumulation else max(1, batch // unit)", "most = max(1, batch // unit)")
)
bank.variant("not-refused", BY_CASES, ("if batch % divisor:", "if batch < divisor:"))
bank.variant("not-refused", BY_CASES, ("if micro * accumulation * n_ranks != batch", "if batch % (micro * n_ranks)"))

bank.hint(
    "below-one", "A number below 1 is not a size: raise a ValueError. Note that `if not batch` treats 0 as missing."
)
bank.slip("below-one", ("number < 1", "number < 0"))
bank.slip("below-one", ("for number in (n_ranks, batch, micro, accumulation)", "for number in (batch, micro)"))
bank.variant(
    "below-one",
    BY_CASES,
    ("if min(x for x in (n_ranks, batch, micro, accumulation) if x is not None) < 1", "if n_ranks < 1"),
)

bank.hint(
    "neither-accepted",
    "Neither `batch` nor `micro` is given, so nothing says how much fits into memory. Raise a ValueError.",
)
bank.slip(
    "neither-accepted",
    (
        '    if batch is None and micro is None:\n        raise ValueError("give the samples of a step (batch) or of one forward on one rank (micro)")\n',
        "",
    ),
)
bank.variant(
    "neither-accepted",
    BY_CASES,
    (
        'case (None, None, _):\n            raise ValueError("train_batch_size or train_micro_batch_size_per_gpu is needed")',
        "case (None, None, _):\n            return batch_sizes(n_ranks, None, 1, accumulation)",
    ),
)

bank.hint(
    "nearest-unnamed",
    "The message does not name {batches}. A step must be a multiple of the product of the given numbers and the "
    "ranks. Name the multiple below `batch`, if there is one, and the multiple above it. If all three are given, "
    "name only their product.",
)
bank.slip("nearest-unnamed", (", (most + 1) * unit}", "}"))
bank.slip("nearest-unnamed", ("{' or '.join(map(str, sorted(fits)))} would", "look again"))
bank.slip(
    "nearest-unnamed",
    ("unit = n_ranks * (micro or 1) * (accumulation or 1)", "unit = n_ranks * (micro or 1) * (accumulation or 1)"),
    ("{' or '.join(map(str, sorted(fits)))} would", "take a multiple of {n_ranks}"),
)
bank.variant("nearest-unnamed", BY_CASES, ("{low or 'more:'} {low + divisor}", "{low}"))

bank.hint(
    "names-more",
    "The message also names {batches}, which are not the nearest to {batch}. Of the batches that would fit, name "
    "only the one below and the one above.",
)
bank.slip("names-more", ("{most * unit, (most + 1) * unit}", "{k * unit for k in range(1, 9)}"))
bank.slip("names-more", ("{' or '.join(map(str, sorted(fits)))} would", "one of {[*range(1000)]} would"))
bank.variant("names-more", BY_CASES, ("{low + divisor}", "{low + divisor} {low + 2 * divisor}"))
bank.variant("names-more", BY_SEARCH, ("t > batch][:1]", "t > batch][:2]"))

bank.hint("names-zero", "The message offers 0, which is not a batch size: no size below {batch} would fit.")
bank.slip(
    "names-zero",
    ("max(1, batch // unit)", "batch // unit"),
    (" or batch < unit else", " else"),
)
bank.variant("names-zero", BY_CASES, ("{low or 'more:'} {low", "{low} {low"))
bank.text(
    None,
    BY_CASES.replace(
        "try {low or 'more:'}", "{batch} = {batch // divisor} x {divisor} + {batch % divisor}; {low or 'only'}"
    ),
)

bank.hint(
    "default-of-transformers",
    "transformers has a default: without `per_device_train_batch_size`, it takes 8 samples per rank.",
)
bank.slip("default-of-transformers", ('"per_device_train_batch_size", 8', '"per_device_train_batch_size", 1'))
bank.variant(
    "default-of-transformers", BY_CASES, ('"per_device_train_batch_size": 8', '"per_device_train_batch_size": 1')
)

bank.hint(
    "split-taken-whole",
    "With `split_batches=True`, the DataLoader's batch is split over the ranks: `batch_size` is what all of them "
    "together take in one forward.",
)
bank.slip("split-taken-whole", ('if words.get("split_batches")', "if False"))
bank.variant("split-taken-whole", BY_CASES, ('if words.get("split_batches", False)', 'if words.get("split", False)'))

bank.hint("split-false", "`split_batches` is given as False. Check its value, not whether the key is there.")
bank.slip("split-false", ('words.get("split_batches")', '"split_batches" in words'))
bank.variant("split-false", BY_CASES, ('words.get("split_batches", False)', '"split_batches" in words'))
bank.variant("split-false", BY_SEARCH, ('words.get("split_batches")', '"split_batches" in words'))

bank.hint(
    "split-swallows-accumulation",
    "The DataLoader's batch is one forward of all ranks; a step has `gradient_accumulation_steps` of them.",
)
bank.slip(
    "split-swallows-accumulation",
    ('words["batch_size"] * accumulation, None, accumulation', 'words["batch_size"], None, 1'),
)
bank.variant(
    "split-swallows-accumulation",
    BY_CASES,
    ('batch=k * words["batch_size"], accumulation=k', 'batch=words["batch_size"]'),
)

bank.hint(
    "loader-for-all",
    "A DataLoader's `batch_size` is what one rank takes in one forward, unless Accelerate gets `split_batches=True`.",
)
bank.slip("loader-for-all", ('if words.get("split_batches")', 'if library == "accelerate"'))
bank.slip("loader-for-all", ('if words.get("split_batches")', 'if library == "fabric" or words.get("split_batches")'))
bank.text("loader-for-all", BY_CASES.replace('"split_batches", False', '"split_batches", True'))
bank.variant("loader-for-all", BY_CASES, ('if words.get("split_batches", False)', 'if library == "accelerate"'))

bank.hint(
    "words-accumulation-forgotten",
    "A step has several forwards of each rank. The words say how many, but you do not read them.",
)
bank.slip(
    "words-accumulation-forgotten",
    ("return batch_sizes(n_ranks, None, micro, accumulation)", "return batch_sizes(n_ranks, None, micro)"),
)
bank.slip(
    "words-accumulation-forgotten",
    ('"every" if library == "fabric" else "gradient_accumulation_steps"', '"gradient_accumulation_steps"'),
)
bank.slip(
    "words-accumulation-forgotten", ('"every" if library == "fabric" else "gradient_accumulation_steps"', '"every"')
)
bank.variant("words-accumulation-forgotten", BY_CASES, ('accumulation=words.get("every")', "accumulation=None"))

bank.hint(
    "words-refused",
    "These words fit together, but you raised a ValueError. Read the table again: which of the three numbers does "
    "each word give, and is it for one rank or for all of them?",
)
bank.slip(
    "words-refused",
    (
        '"train_batch_size", "train_micro_batch_size_per_gpu", "grad',
        '"train_micro_batch_size_per_gpu", "train_batch_size", "grad',
    ),
)
bank.variant(
    "words-refused",
    BY_CASES,
    ('micro=words["per_device_train_batch_size"]', 'batch=words["per_device_train_batch_size"]'),
)

bank.hint(
    "wrong-words",
    "Read the table again: which of the three numbers does each word give, and is it for one rank or for all of them?",
)
bank.slip(
    "wrong-words", ("batch_sizes(n_ranks, None, micro, accumulation)", "batch_sizes(1, None, micro, accumulation)")
)
bank.slip(
    "wrong-words",
    ("return batch_sizes(n_ranks, *map(words.get, keys))", "return batch_sizes(n_ranks, *map(words.get, keys[:2]))"),
)
bank.variant(
    "wrong-words", BY_CASES, ('micro=words["per_device_train_batch_size"], accumulation', "micro=1, accumulation")
)

bank.hint(
    "words-changed",
    "You wrote to the dictionary of words. The next call with it, for other ranks, then gets other words.",
)
SPLIT = '    if words.get("split_batches"):'
bank.slip("words-changed", (SPLIT, SPLIT.replace("get", "pop").replace('")', '", False)')))
bank.slip("words-changed", (SPLIT, '    words.setdefault("split_batches", False)\n' + SPLIT))
bank.variant("words-changed", BY_CASES, ('words.get("split_batches", False)', 'words.pop("split_batches", False)'))

bank.hint("words-not-refused", "This cannot be split evenly over the ranks: raise a ValueError.")
bank.slip(
    "words-not-refused",
    (
        'batch_sizes(n_ranks, words["batch_size"] * accumulation, None, accumulation)',
        '(words["batch_size"] * accumulation, words["batch_size"] // n_ranks, accumulation)',
    ),
)
bank.variant(
    "words-not-refused",
    BY_SEARCH,
    ('            if rest:\n                raise ValueError(f"{n_ranks} ranks do not divide {words}")\n', ""),
)

bank.slip("raised", ("unit = n_ranks * (micro or 1) * (accumulation or 1)", "unit = n_ranks * micro * accumulation"))
bank.slip("raised", ('words.get("per_device_train_batch_size", 8)', 'words["per_device_train_batch_size"]'))

"""Answers to balise 2 of 21_fine_tuning: features, computed once."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning")

# into a tensor that is made at the first batch; statistics by sums
BY_LOOPS = """
def features(body, images, batch=250):
    was = body.training
    body.train(False)
    found = None
    for start in range(0, len(images), batch):
        with torch.no_grad():
            rows = body(images[start : start + batch])
        if found is None:
            found = torch.empty(len(images), rows.shape[1])
        found[start : start + batch] = rows
    if was:
        body.train()
    return found


def standardised(train, *others):
    mean = train.sum(0) / len(train)
    deviation = ((train - mean) ** 2).mean(0).sqrt()
    result = [(train - mean) / (deviation + 0.1)]
    for some in others:
        result.append((some - mean) / (deviation + 0.1))
    return result
"""
PASSES = "[body(some) for some in images.split(batch)]"
DEVIATION = "train.std(0, correction=0) + 0.1"
bank.text(2, None, BY_LOOPS)
bank.slip(2, None, (PASSES, "[body(some) for some in torch.utils.data.DataLoader(images, batch)]"))
bank.slip(2, None, ("torch.no_grad()", "torch.inference_mode()"), ("return [(some - mean) / deviation for some in (train, *others)]", "return tuple((some - mean) / deviation for some in (train, *others))"))  # fmt: skip
bank.slip(2, None, (PASSES, "[body(some) for some in images.chunk(math.ceil(len(images) / batch))]"), (DEVIATION, "train.var(0, unbiased=False).sqrt() + 0.1"))  # fmt: skip

bank.hint(2, "wrong-form", "What you return has the wrong form. `features` returns one tensor (n, d); "
                           "`standardised` returns a list, `train` first, each entry in its own shape.")  # fmt: skip
bank.slip(2, "wrong-form", ("torch.cat([body(some) for some in images.split(batch)])", PASSES))
bank.variant(2, "wrong-form", BY_LOOPS, ("return found", "return found.T"))

bank.hint(2, "last-batch-lost", "You leave out some images. The last batch may be smaller than `batch`, or be the "
                                "only one.")  # fmt: skip
bank.slip(2, "last-batch-lost", (PASSES, "[body(images[k * batch : (k + 1) * batch]) for k in range(len(images) // batch)]"))  # fmt: skip
bank.variant(2, "last-batch-lost", BY_LOOPS, ("return found", "return found[: len(images) // batch * batch]"))

bank.hint(2, "graph-kept", "The features carry a graph, and with it all the activations of all images. Compute "
                           "them under `torch.no_grad()`.")  # fmt: skip
bank.slip(2, "graph-kept", ("with torch.no_grad():", "if True:"))
bank.variant(2, "graph-kept", BY_LOOPS, ("with torch.no_grad():", "with torch.enable_grad():"))

bank.hint(2, "awake-pass", "Some modules of the body are in training mode during a pass. Dropout then draws random "
                           "masks, and batch norm uses the batch's statistics and updates its own. Call "
                           "`body.eval()` first.")  # fmt: skip
bank.slip(2, "awake-pass", ("    body.eval()\n", ""))
bank.slip(2, "awake-pass", ("    body.eval()\n", "    body.training = False\n"))
bank.variant(2, "awake-pass", BY_LOOPS, ("body.train(False)", "body.train()"))

bank.hint(2, "other-batches", "You don't give the body `batch` images at a time. More of them per pass may not fit "
                              "in memory; more passes than batches take longer.")  # fmt: skip
bank.slip(2, "other-batches", (PASSES, "[body(images)]"))
bank.slip(2, "other-batches", ("images.split(batch)", "images.chunk(batch)"))
bank.variant(2, "other-batches", BY_LOOPS, ("range(0, len(images), batch)", "[0]"), ("[start : start + batch]", "[start:]"))  # fmt: skip
bank.slip(2, "other-batches", ("images.split(batch)", "images.split(1)"))
bank.variant(2, "other-batches", BY_LOOPS, ("rows = body(", "rows = [body(images[:1]) for _ in range(5)] and body("))  # fmt: skip
bank.hint(2, "wrong-features", "These are not each image's features in the order of the images. Apply `body` to "
                               "each batch in turn, without changing it.")  # fmt: skip
bank.slip(2, "wrong-features", ("images.split(batch)", "images.split(batch)[::-1]"))
bank.variant(2, "wrong-features", BY_LOOPS, ("return found", "return found.flip(0)"))

bank.hint(2, "mode-left", "Afterwards the body has another mode than before. Remember `body.training` first, and "
                          "restore it.")  # fmt: skip
bank.slip(2, "mode-left", ("    body.train(mode)\n", ""))
bank.slip(2, "mode-left", ("    body.train(mode)\n", "    body.train()\n"))
bank.variant(2, "mode-left", BY_LOOPS, ("    if was:\n        body.train()", "    body.train(not was)"))

bank.slip(2, "wrong-features", ("body(some) for", "F.normalize(body(some)) for"))
bank.variant(2, "wrong-features", BY_LOOPS, ("] = rows", "] = rows - rows.mean(0)"))

bank.hint(2, "inputs-changed", "You changed what you were given. Make new tensors: in-place operations change the "
                               "caller's.")  # fmt: skip
bank.slip(2, "inputs-changed", ("(some - mean) / deviation for", "some.sub_(mean).div_(deviation) for"))
bank.variant(2, "inputs-changed", BY_LOOPS, ("result = [(train - mean)", "result = [train.sub_(mean)"))
bank.slip(2, "wrong-form", ("in (train, *others)]", "in others]"))
bank.variant(2, "wrong-form", BY_LOOPS, ("return result", "return torch.cat(result)"))

bank.hint(2, "correction", "With `correction=1`, PyTorch's default, the deviation of a single row is NaN. Use "
                           "`correction=0`.")  # fmt: skip
bank.slip(2, "correction", ("train.std(0, correction=0)", "train.std(0)"))
bank.variant(2, "correction", BY_LOOPS, ("((train - mean) ** 2).mean(0)", "(((train - mean) ** 2).sum(0) / (len(train) - 1))"))  # fmt: skip

bank.hint(2, "all-together", "The shift and scale of `train` depend on the other sets. Take the statistics from "
                             "`train` alone.")  # fmt: skip
bank.slip(2, "all-together", ("train.mean(0), train.std", "torch.cat((train, *others)).mean(0), train.std"))
bank.variant(2, "all-together", BY_LOOPS, ("    mean = train", "    mean = torch.cat([train, *others]).mean(0) if others else train"))  # fmt: skip

bank.hint(2, "own-statistics", "The other sets have another shift and scale than `train`. Use the mean and "
                               "deviation of `train` for all sets.")  # fmt: skip
bank.slip(2, "own-statistics", ("(some - mean) / deviation", "(some - some.mean(0)) / (some.std(0, correction=0) + 0.1)"))  # fmt: skip
bank.slip(2, "own-statistics", ("(some - mean) / deviation", "(some - some.mean(0)) / deviation"))
bank.variant(2, "own-statistics", BY_LOOPS, ("result.append((some - mean)", "result.append((some - some.mean(0))"))  # fmt: skip

bank.hint(2, "wrong-standard", "Each feature, minus its mean over the rows of `train`, divided by its standard "
                               "deviation plus 0.1. A constant feature and a single row give zeros.")  # fmt: skip
bank.slip(2, "wrong-standard", (DEVIATION, "train.std(0, correction=0)"))
bank.slip(2, "wrong-standard", (DEVIATION, "train.std(correction=0) + 0.1"))
bank.slip(2, "wrong-standard", (DEVIATION, "(train.var(0, correction=0) + 0.1).sqrt()"))
bank.variant(2, "wrong-standard", BY_LOOPS, ("(deviation + 0.1)", "deviation.clamp(min=0.1)"))

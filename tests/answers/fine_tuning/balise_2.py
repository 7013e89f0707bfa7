"""Answers to balise 2 of 21_fine_tuning: features, computed once."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 2)

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
bank.text(None, BY_LOOPS)
bank.slip(None, (PASSES, "[body(some) for some in torch.utils.data.DataLoader(images, batch)]"))
bank.slip(None, ("torch.no_grad()", "torch.inference_mode()"), ("return [(some - mean) / deviation for some in (train, *others)]", "return tuple((some - mean) / deviation for some in (train, *others))"))  # fmt: skip
bank.slip(None, (PASSES, "[body(some) for some in images.chunk(math.ceil(len(images) / batch))]"), (DEVIATION, "train.var(0, unbiased=False).sqrt() + 0.1"))  # fmt: skip

bank.hint("wrong-form", "What you return has the wrong form. `features` returns one tensor (n, d); "
                           "`standardised` returns a list, `train` first, each entry in its own shape.")  # fmt: skip
bank.slip("wrong-form", ("torch.cat([body(some) for some in images.split(batch)])", PASSES))
bank.variant("wrong-form", BY_LOOPS, ("return found", "return found.T"))

bank.hint("last-batch-lost", "You leave out some images. The last batch may be smaller than `batch`, or be the "
                                "only one.")  # fmt: skip
bank.slip("last-batch-lost", (PASSES, "[body(images[k * batch : (k + 1) * batch]) for k in range(len(images) // batch)]"))  # fmt: skip
bank.variant("last-batch-lost", BY_LOOPS, ("return found", "return found[: len(images) // batch * batch]"))

bank.hint("graph-kept", "The features carry a graph, and with it all the activations of all images. Compute "
                           "them under `torch.no_grad()`.", edge=True)  # fmt: skip
bank.slip("graph-kept", ("with torch.no_grad():", "if True:"))
bank.variant("graph-kept", BY_LOOPS, ("with torch.no_grad():", "with torch.enable_grad():"))

bank.hint("awake-pass", "Some modules of the body are in training mode during a pass. Dropout then draws random "
                           "masks, and batch norm uses the batch's statistics and updates its own. Call "
                           "`body.eval()` first.")  # fmt: skip
bank.slip("awake-pass", ("    body.eval()\n", ""))
bank.slip("awake-pass", ("    body.eval()\n", "    body.training = False\n"))
bank.variant("awake-pass", BY_LOOPS, ("body.train(False)", "body.train()"))

bank.hint("other-batches", "You don't give the body `batch` images at a time. More of them per pass may not fit "
                              "in memory; more passes than batches take longer.", edge=True)  # fmt: skip
bank.slip("other-batches", (PASSES, "[body(images)]"))
bank.slip("other-batches", ("images.split(batch)", "images.chunk(batch)"))
bank.variant("other-batches", BY_LOOPS, ("range(0, len(images), batch)", "[0]"), ("[start : start + batch]", "[start:]"))  # fmt: skip
bank.slip("other-batches", ("images.split(batch)", "images.split(1)"))
bank.variant("other-batches", BY_LOOPS, ("rows = body(", "rows = [body(images[:1]) for _ in range(5)] and body("))  # fmt: skip
bank.hint("wrong-features", "These are not each image's features in the order of the images. Apply `body` to "
                               "each batch in turn, without changing it.")  # fmt: skip
bank.slip("wrong-features", ("images.split(batch)", "images.split(batch)[::-1]"))
bank.variant("wrong-features", BY_LOOPS, ("return found", "return found.flip(0)"))

bank.hint("mode-left", "Afterwards the body has another mode than before. Remember `body.training` first, and "
                          "restore it.", edge=True)  # fmt: skip
bank.slip("mode-left", ("    body.train(mode)\n", ""))
bank.slip("mode-left", ("    body.train(mode)\n", "    body.train()\n"))
bank.variant("mode-left", BY_LOOPS, ("    if was:\n        body.train()", "    body.train(not was)"))

bank.slip("wrong-features", ("body(some) for", "F.normalize(body(some)) for"))
bank.variant("wrong-features", BY_LOOPS, ("] = rows", "] = rows - rows.mean(0)"))

bank.hint("inputs-changed", "You changed what you were given. Make new tensors: in-place operations change the "
                               "caller's.", edge=True)  # fmt: skip
bank.slip("inputs-changed", ("(some - mean) / deviation for", "some.sub_(mean).div_(deviation) for"))
bank.variant("inputs-changed", BY_LOOPS, ("result = [(train - mean)", "result = [train.sub_(mean)"))
bank.slip("wrong-form", ("in (train, *others)]", "in others]"))
bank.variant("wrong-form", BY_LOOPS, ("return result", "return torch.cat(result)"))

bank.hint("correction", "With `correction=1`, PyTorch's default, the deviation of a single row is NaN. Use "
                           "`correction=0`.", edge=True)  # fmt: skip
bank.slip("correction", ("train.std(0, correction=0)", "train.std(0)"))
bank.variant("correction", BY_LOOPS, ("((train - mean) ** 2).mean(0)", "(((train - mean) ** 2).sum(0) / (len(train) - 1))"))  # fmt: skip

bank.hint("all-together", "The shift and scale of `train` depend on the other sets. Take the statistics from "
                             "`train` alone.")  # fmt: skip
bank.slip("all-together", ("train.mean(0), train.std", "torch.cat((train, *others)).mean(0), train.std"))
bank.variant("all-together", BY_LOOPS, ("    mean = train", "    mean = torch.cat([train, *others]).mean(0) if others else train"))  # fmt: skip

bank.hint("own-statistics", "The other sets have another shift and scale than `train`. Use the mean and "
                               "deviation of `train` for all sets.")  # fmt: skip
bank.slip("own-statistics", ("(some - mean) / deviation", "(some - some.mean(0)) / (some.std(0, correction=0) + 0.1)"))  # fmt: skip
bank.slip("own-statistics", ("(some - mean) / deviation", "(some - some.mean(0)) / deviation"))
bank.variant("own-statistics", BY_LOOPS, ("result.append((some - mean)", "result.append((some - some.mean(0))"))  # fmt: skip

bank.hint("wrong-standard", "Each feature, minus its mean over the rows of `train`, divided by its standard "
                               "deviation plus 0.1. A constant feature and a single row give zeros.")  # fmt: skip
bank.slip("wrong-standard", (DEVIATION, "train.std(0, correction=0)"))
bank.slip("wrong-standard", (DEVIATION, "train.std(correction=0) + 0.1"))
bank.slip("wrong-standard", (DEVIATION, "(train.var(0, correction=0) + 0.1).sqrt()"))
bank.variant("wrong-standard", BY_LOOPS, ("(deviation + 0.1)", "deviation.clamp(min=0.1)"))

"""Answers to balise 6 of 23_inference: beam search whose beams share blocks."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 6, whole=True)

# lists of Python numbers; an only child goes on with its parent's table; room is made for the survivors
LISTS = """
def beam_search(pool, table, length, logits, width, count, step):
    logs = torch.log_softmax(logits, dim=0).tolist()
    first = sorted(range(len(logs)), key=logs.__getitem__, reverse=True)[:width]
    beams = []
    for token in first:
        beams.append((logs[token], [token], pool.fork(table)))
    pool.release(table)
    while len(beams[0][1]) < count:
        places = [length + len(text) - 1 for _, text, _ in beams]
        for (_, _, own), place in zip(beams, places):
            pool.extend(own, place, 1)
        last = torch.tensor([text[-1] for _, text, _ in beams])
        out = torch.log_softmax(step([own for _, _, own in beams], places, last), dim=-1).tolist()
        every = [(score + log, k, token) for k, (score, _, _) in enumerate(beams) for token, log in enumerate(out[k])]
        every.sort(key=lambda one: one[0], reverse=True)
        best, taken, children = every[:width], set(), []
        for score, k, token in best:
            own = pool.fork(beams[k][2]) if k in taken else beams[k][2]
            taken.add(k)
            children.append((score, beams[k][1] + [token], own))
        for k, (_, _, own) in enumerate(beams):
            if k not in taken:
                pool.release(own)
        beams = children
    for _, _, own in beams:
        pool.release(own)
    return torch.tensor([text for _, text, _ in beams]), torch.tensor([score for score, _, _ in beams], dtype=logits.dtype)
"""
bank.text(None, LISTS)
bank.text(None, LISTS.replace(", dtype=logits.dtype", ""))

# tensors that are filled; the best are sorted out of a flat row; where each came from is read back at the end
BACKWARDS = """
def beam_search(pool, table, length, logits, width, count, step):
    v = logits.numel()
    tokens = torch.zeros(count, width, dtype=torch.int64)
    parents = torch.zeros(count, width, dtype=torch.int64)
    total = logits - logits.logsumexp(0)
    total, tokens[0] = [each[:width] for each in total.sort(descending=True)]
    tables = [table] + [pool.fork(table) for _ in range(width - 1)]
    for k in range(1, count):
        place = length + k - 1
        for own in tables:
            pool.extend(own, place, 1)
        out = step(tables, width * [place], tokens[k - 1])
        candidates = (total.unsqueeze(1) + out - out.logsumexp(1, keepdim=True)).reshape(-1)
        best = candidates.argsort(descending=True)[:width]
        total = candidates[best]
        parents[k], tokens[k] = torch.div(best, v, rounding_mode="floor"), best.remainder(v)
        children = [pool.fork(tables[int(p)]) for p in parents[k]]
        while tables:
            pool.release(tables.pop())
        tables = children
    while tables:
        pool.release(tables.pop())
    row, texts = torch.arange(width), torch.zeros(width, count, dtype=torch.int64)
    for k in reversed(range(count)):
        texts[:, k] = tokens[k][row]
        row = parents[k][row]
    return texts, total
"""
bank.text(None, BACKWARDS)
bank.slip(None, ("            pool.extend(each, at, 1)\n        following", "            pool.extend(each, at, 1)\n        assert len(tables) == width\n        following"))  # fmt: skip

bank.slip("nothing-returned", ("    return texts, scores\n", ""))

bank.hint("result-form", "Return the tokens, int64 (width, count), and the scores (width,).")
bank.slip("result-form", ("return texts, scores", "return scores, texts"))
bank.slip("result-form", ("return texts, scores", "return texts[:1], scores[:1]"))
bank.slip("result-form", ("return texts, scores", "return texts, scores[:, None]"))
bank.slip("result-form", ("range(length, length + count - 1)", "range(length, length + count)"), ("    return texts, scores", "    return texts, scores"))  # fmt: skip
bank.variant("result-form", BACKWARDS, ("return texts, total", "return texts.T, total"))

bank.hint("steps", "You called the model for {got} instead of {expected}: the logits of the prompt give the "
                      "first token, and the logits after the last token are not needed.")  # fmt: skip
bank.slip("steps", ("    for each in tables:\n        pool.release(each)\n    return", "    for each in tables:\n        pool.extend(each, length + count - 1, 1)\n    step(tables, [length + count - 1] * width, tokens)\n    for each in tables:\n        pool.release(each)\n    return"))  # fmt: skip
bank.slip("steps", ("range(length, length + count - 1)", "range(length, length + count)"), ("return texts, scores", "return texts[:, :count], scores"))  # fmt: skip
bank.variant("steps", LISTS, ("    for _, _, own in beams:\n        pool.release", "    for _, text, own in beams:\n        pool.extend(own, length + count - 1, 1)\n        step([own], [length + count - 1], torch.tensor(text[-1:]))\n        pool.release"))  # fmt: skip

bank.hint("step-rows", "step takes all beams together: a table, a length and a token for each. One step with "
                          "many beams costs little more than a step with one.")  # fmt: skip
bank.slip("step-rows", ("step(tables, [at] * width, tokens)", "step(tables, [at], tokens)"), ("following =", "each = None\n        following ="), ("following.shape[1], best", "following.shape[1] % len(tables), best"))  # fmt: skip
bank.slip("step-rows", ("step(tables, [at] * width, tokens)", "torch.cat([step([each], [at], token[None]) for each, token in zip(tables, tokens)])"))  # fmt: skip
bank.variant("step-rows", BACKWARDS, ("width * [place], tokens[k - 1]", "width * [place], tokens[k - 1].unsqueeze(1).expand(-1, 1).squeeze(1)[: len(tables)].repeat(2)"))  # fmt: skip

bank.hint("not-extended", "There was no room in the table for a token. Before each step, extend every table by "
                             "one token; the token goes to the place `length`, the first after its text.")  # fmt: skip
bank.slip("not-extended", ("            pool.extend(each, at, 1)\n", "            pass\n"))
bank.slip(
    "not-extended",
    ("        for each in tables:\n            pool.extend(each, at, 1)\n", "        pool.extend(tables[0], at, 1)\n"),
)
bank.slip("not-extended", ("pool.extend(each, at, 1)", "pool.extend(each, at - 1, 1)"))
bank.variant("not-extended", LISTS, ("pool.extend(own, place, 1)", "pool.extend(own, place, 0)"))

bank.hint("written-into", "A token was written into a block that another beam also holds. Each beam needs its "
                             "own table, from pool.fork; and extend, called before each step, copies the block "
                             "that will be written into.")  # fmt: skip
bank.slip("written-into", ("[pool.fork(table) for _ in range(width)]", "[list(table) for _ in range(width)]"), ("    pool.release(table)\n", ""))  # fmt: skip
bank.slip("written-into", ("[pool.fork(tables[parent]) for parent in parents.tolist()]", "[tables[parent][:] for parent in parents.tolist()]"), ("        for each in before:\n            pool.release(each)\n", ""))  # fmt: skip
bank.slip("written-into", ("[pool.fork(tables[parent]) for parent in parents.tolist()]", "[tables[parent] for parent in parents.tolist()]"), ("        for each in before:\n            pool.release(each)\n", ""))  # fmt: skip
bank.variant("written-into", BACKWARDS, ("[table] + [pool.fork(table) for _ in range(width - 1)]", "[table] + [table.copy() for _ in range(width - 1)]"))  # fmt: skip

bank.hint("wrong-beams", "These are not the best continuations: {where}.")
bank.slip("wrong-beams", ("scores[:, None] + following", "scores[:, None] * 0.9 + following"))
bank.variant("wrong-beams", LISTS, ("best, taken, children = every[:width]", "best, taken, children = every[: width - 1] + every[width : width + 1]"))  # fmt: skip

bank.hint("scores-not-added", "You count only the last token. A beam's score is the sum over all its tokens.")
bank.slip("scores-not-added", ("(scores[:, None] + following)", "following"))
bank.variant("scores-not-added", LISTS, ("[(score + log, k, token)", "[(log, k, token)"))

bank.hint("raw-logits", "You add up raw logits. They have no common scale; log_softmax turns them into "
                           "logarithms of probabilities.")  # fmt: skip
bank.slip("raw-logits", ("step(tables, [at] * width, tokens).log_softmax(-1)", "step(tables, [at] * width, tokens)"))
bank.slip("raw-logits", ("tokens).log_softmax(-1)", "tokens)"), ("logits.log_softmax(-1)", "logits"))
bank.variant("raw-logits", BACKWARDS, (" - out.logsumexp(1, keepdim=True)", ""))

bank.hint("wrong-axis", "The softmax runs over the beams. The probabilities of all tokens that may follow one "
                           "beam must add up to 1: take log_softmax along the vocabulary, the last axis.")  # fmt: skip
bank.slip("wrong-axis", ("tokens).log_softmax(-1)", "tokens).log_softmax(0)"))
bank.variant("wrong-axis", LISTS, ("last), dim=-1)", "last), dim=0)"))

bank.hint("probabilities-added", "You add probabilities. The probabilities of successive tokens multiply: add "
                                    "their logarithms, from log_softmax.")  # fmt: skip
bank.slip("probabilities-added", ("tokens).log_softmax(-1)", "tokens).softmax(-1)"))
bank.slip("probabilities-added", ("tokens).log_softmax(-1)", "tokens).softmax(-1)"), ("logits.log_softmax(-1)", "logits.softmax(-1)"))  # fmt: skip
bank.variant("probabilities-added", LISTS, ("torch.log_softmax(step(", "torch.softmax(step("))

bank.hint("underflow", "A score is infinite: {where}. The probability of a long text is below the smallest "
                          "positive number, and becomes 0. Add logarithms, and never go back to probabilities.")  # fmt: skip
bank.slip("underflow", ("(scores[:, None] + following).flatten().topk(width)", "(scores.exp()[:, None] * following.exp()).log().flatten().topk(width)"))  # fmt: skip
bank.variant("underflow", BACKWARDS, ("logits - logits.logsumexp(0)", "logits.softmax(0)"), ("total.unsqueeze(1) + out - out.logsumexp(1, keepdim=True)", "total.unsqueeze(1) * out.softmax(1)"), ("return texts, total", "return texts, total.log()"))  # fmt: skip

bank.hint("taken-apart", "You decode a place in the flat row of all candidates wrongly. The place is parent · "
                            "vocabulary + token: divided by the vocabulary, the quotient is the parent and the "
                            "remainder is the token.")  # fmt: skip
bank.slip("taken-apart", ("best // following.shape[1], best % following.shape[1]", "best % width, best // width"))
bank.slip("taken-apart", ("best // following.shape[1], best % following.shape[1]", "best % following.shape[1] % width, best // following.shape[1]"))  # fmt: skip
bank.variant("taken-apart", BACKWARDS, ('torch.div(best, v, rounding_mode="floor"), best.remainder(v)', 'best.remainder(width), torch.div(best, width, rounding_mode="floor")'))  # fmt: skip

bank.hint("old-scores", "The scores of the next step are not those of the surviving beams. The score of a child "
                           "is its parent's score plus the logarithm of its own token's probability, as topk "
                           "returns it.")  # fmt: skip
bank.slip("old-scores", ("scores, best = (", "_, best = ("), ("topk(width)\n        parents", "topk(width)\n        scores = scores[best // following.shape[1]]\n        parents"))  # fmt: skip
bank.slip("old-scores", ("scores, best = (", "_, best = ("))
bank.variant("old-scores", BACKWARDS, ("        total = candidates[best]\n", "        total = total[torch.div(best, v, rounding_mode='floor')]\n"))  # fmt: skip

bank.hint("each-its-own", "Each beam continues with its own best token. The beams must compete: keep the best "
                             "of all continuations of all beams, whatever their parents are.")  # fmt: skip
COMPETE = "        scores, best = (scores[:, None] + following).flatten().topk(width)\n"
bank.slip("each-its-own", (COMPETE, "        scores, best = (scores[:, None] + following).max(1)\n        best = best + following.shape[1] * torch.arange(width)\n"))  # fmt: skip
bank.slip("each-its-own", (COMPETE, "        scores, best = (scores[:, None] + following).max(1)\n        scores, order = scores.sort(descending=True)\n        best = (best + following.shape[1] * torch.arange(width))[order]\n"))  # fmt: skip
bank.variant("each-its-own", LISTS, ("best, taken, children = every[:width]", "best, taken, children = [next(one for one in every if one[1] == k) for k in range(width)]"))  # fmt: skip

bank.hint("texts-not-moved", "The text of a beam is that of its row before the step. The new beam in this row "
                                "may have another parent: take the parent's text.")  # fmt: skip
bank.slip("texts-not-moved", ("texts[parents]", "texts"))
bank.variant("texts-not-moved", BACKWARDS, ("        row = parents[k][row]\n", ""))

bank.hint("tables-not-moved", "The model continues from the history of another beam. Tables must follow their "
                                 "beams, as the texts do.")  # fmt: skip
bank.slip("tables-not-moved", ("[pool.fork(tables[parent]) for parent in parents.tolist()]", "[pool.fork(each) for each in tables]"))  # fmt: skip
bank.variant("tables-not-moved", BACKWARDS, ("        children = [pool.fork(tables[int(p)]) for p in parents[k]]\n        while tables:\n            pool.release(tables.pop())\n        tables = children\n", ""))  # fmt: skip

bank.hint("all-begin-alike", "All beams begin with the same token and stay identical. The first tokens must be "
                                "the `width` best ones.")  # fmt: skip
bank.slip("all-begin-alike", ("logits.log_softmax(-1).topk(width)", "(each.expand(width) for each in logits.log_softmax(-1).max(-1))"))  # fmt: skip
bank.variant("all-begin-alike", LISTS, ("first = sorted(range(len(logs)), key=logs.__getitem__, reverse=True)[:width]", "first = [max(range(len(logs)), key=logs.__getitem__)] * width"))  # fmt: skip

bank.hint("released-first", "You released tables before their children had forked them. A released table is "
                               "empty, and its blocks are free: the next sequence that needs blocks gets them, and "
                               "overwrites the history. Fork first.")  # fmt: skip
bank.slip("released-first", ("        before, tables = tables, [pool.fork(tables[parent]) for parent in parents.tolist()]\n        for each in before:\n            pool.release(each)\n", "        before = tables\n        for each in before:\n            pool.release(each)\n        tables = [pool.fork(before[parent]) for parent in parents.tolist()]\n        for each in tables:\n            pool.extend(each, 0, at + 1)\n"))  # fmt: skip
bank.slip("released-first", ("    tables, texts = [pool.fork(table) for _ in range(width)], tokens[:, None]\n    pool.release(table)\n", "    pool.release(table)\n    tables, texts = [pool.fork(table) for _ in range(width)], tokens[:, None]\n    for each in tables:\n        pool.extend(each, 0, length)\n"))  # fmt: skip
NAMED = "        for each in before:\n            pool.release(each)\n"
bank.slip("released-first", ("        before, tables = tables, [pool.fork(tables[parent]) for parent in parents.tolist()]\n" + NAMED, "        before = [list(each) for each in tables]\n        for each in tables:\n            pool.release(each)\n        tables = [pool.fork(before[parent]) for parent in parents.tolist()]\n"))  # fmt: skip
bank.variant("released-first", BACKWARDS, ("        children = [pool.fork(tables[int(p)]) for p in parents[k]]\n        while tables:\n            pool.release(tables.pop())\n        tables = children\n", "        kept = [each.copy() for each in tables]\n        while tables:\n            pool.release(tables.pop())\n        tables = [pool.fork(kept[int(p)]) for p in parents[k]]\n"))  # fmt: skip
bank.variant("released-first", LISTS, ("        beams.append((logs[token], [token], pool.fork(table)))\n    pool.release(table)\n", "        beams.append((logs[token], [token], []))\n        pool.extend(beams[-1][2], 0, length)\n    pool.release(table)\n"))  # fmt: skip

bank.hint("wrong-scores", "The tokens are right, but their scores are not the sums of the logarithms: {where}.")
bank.slip("wrong-scores", ("return texts, scores", "return texts, scores / count"))
bank.slip("wrong-scores", ("return texts, scores", "return texts, scores.exp()"))
bank.variant("wrong-scores", BACKWARDS, ("return texts, total", "return texts, total.sort().values"))

bank.hint("too-many-blocks", "You hold more blocks than the beams need ({got} instead of {expected}; {where}). "
                                "Release beams that have no children before the next step; what two beams have in "
                                "common must exist only once.")  # fmt: skip
bank.slip("too-many-blocks", ("        for each in before:\n            pool.release(each)\n", ""))
bank.slip("too-many-blocks", ("tokens[:, None]\n    pool.release(table)\n", "tokens[:, None]\n"))
bank.variant(
    "too-many-blocks",
    LISTS,
    ("            if k not in taken:\n                pool.release(own)\n", "            pass\n"),
)

bank.hint("looked-into", "You read or write the keys, values or holders of the pool yourself. This is the work "
                            "of the pool and of step: fork shares blocks, and extend copies those that will be "
                            "written into.")  # fmt: skip
COPIED = "        pool.extend(copy, 0, len(own) * pool.size)\n        pool.keys[:, copy], pool.values[:, copy] = pool.keys[:, own], pool.values[:, own]\n"
bank.slip("looked-into", ("        before, tables = tables, [pool.fork(tables[parent]) for parent in parents.tolist()]\n", "        before, tables = tables, []\n        for own in (before[parent] for parent in parents.tolist()):\n            copy = []\n" + COPIED.replace("        pool", "            pool") + "            tables.append(copy)\n"))  # fmt: skip
bank.variant("looked-into", LISTS, ("    beams = []\n", "    beams = []\n    def copied(own):\n        copy = []\n" + COPIED + "        return copy\n\n"), ("pool.fork(beams[k][2]) if k in taken", "copied(beams[k][2]) if k in taken"))  # fmt: skip

bank.hint("kept-at-end", "{n} blocks are still held at the end. Release the table of the prompt and those of "
                            "the last beams.")  # fmt: skip
bank.slip("kept-at-end", ("    for each in tables:\n        pool.release(each)\n    return", "    return"))
bank.slip(
    "kept-at-end",
    ("    for each in tables:\n        pool.release(each)\n    return", "    pool.release(tables[0])\n    return"),
)
bank.variant("kept-at-end", BACKWARDS, ("    while tables:\n        pool.release(tables.pop())\n    row", "    row"))

bank.slip(None, (".flatten().topk(width)", ".flatten().topk(width, sorted=False)"))
bank.slip(
    None, (".flatten().topk(width)", ".flatten().topk(width)\n        scores, best = scores.flip(0), best.flip(0)")
)

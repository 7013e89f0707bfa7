"""Answers to balise 5 of 23_inference: speculative decoding."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 5, whole=True)

# one place after the other
LOOP = """
def verify(target, draft, drafted, uniforms):
    for i, (token, u) in enumerate(zip(drafted.tolist(), uniforms.tolist())):
        p, q = target[i], draft[i]
        if u * q[token] >= p[token]:
            missing = torch.relu(p - q)
            return i, missing / missing.sum()
    return len(drafted), target[-1]
"""
bank.text(None, LOOP)

# the draft padded with a row of zeros: then "all kept" is a refusal that misses everything; first refusal by nonzero
PADDED = """
def verify(target, draft, drafted, uniforms):
    p = target[:-1].gather(1, drafted[:, None])[:, 0]
    q = draft.gather(1, drafted[:, None])[:, 0]
    refused = torch.nonzero(torch.minimum(p / q, torch.ones_like(p)) <= uniforms)[:, 0].tolist()
    kept = torch.tensor((refused + [len(drafted)])[0])
    padded = torch.cat([draft, torch.zeros_like(target[:1])])
    left = torch.maximum(target[kept] - padded[kept], torch.zeros_like(target[kept]))
    return kept, left / left.sum()
"""
bank.text(None, PADDED)
bank.slip(None, ("(target[kept] - draft[kept]).clamp(min=0)", "target[kept] - torch.minimum(target[kept], draft[kept])"))  # fmt: skip
bank.slip(None, ("uniforms < target[places, drafted] / draft[places, drafted]", "torch.log(uniforms) < target[places, drafted].log() - draft[places, drafted].log()"))  # fmt: skip
bank.slip(None, ("missing / missing.sum()", "missing / (missing.sum() + 1e-9)"), ("return kept, target[kept]", "return stays.sum(), target[kept].double()"))  # fmt: skip
bank.slip("nothing-returned", ("return kept, target[kept]", "return"), ("return kept, missing", "kept, missing"))

bank.hint("speculation-form", "Return two things, even when all tokens are kept: how many are kept, as a whole "
                                 "number, and a distribution of shape (v,). You returned {got}.")  # fmt: skip
bank.slip("speculation-form", ("return kept, target[kept]", "return kept, None"))
bank.slip("speculation-form", ("return kept, missing / missing.sum()", "return kept, int((missing / missing.sum()).argmax())"))  # fmt: skip
bank.slip("speculation-form", ("return kept, target[kept]", "return kept, target[kept:]"))
bank.slip("speculation-form", ("kept = int(stays.long().cumprod(0).sum())", "kept = stays.long().cumprod(0)"), ("return kept, target[kept]", "return kept, target[-1]"), ("if kept ==", "if kept.sum() =="), ("target[kept] - draft[kept]", "target[kept.sum()] - draft[kept.sum()]"))  # fmt: skip
bank.variant("speculation-form", LOOP, ("return len(drafted), target[-1]", "return len(drafted)"))

bank.hint("inputs-changed", "You overwrote {what}, which others still need. Work on new tensors, without "
                               "operations that end in _.")  # fmt: skip
bank.slip("inputs-changed", ("(target[kept] - draft[kept]).clamp(min=0)", "target[kept].sub_(draft[kept]).clamp_(min=0)"))  # fmt: skip
bank.variant("inputs-changed", LOOP, ("torch.relu(p - q)", "p.sub_(q).relu_()"))

bank.hint(
    "own-random",
    "The same inputs gave two answers. Compare with the uniforms that you are given, and draw none yourself.",
)
bank.slip("own-random", ("stays = uniforms <", "stays = torch.rand(len(drafted)) <"))
bank.variant("own-random", LOOP, ("u * q[token]", "torch.rand(()) * q[token]"))

bank.hint("wrong-kept", "The number of kept tokens is wrong. Keep token i if u < p(x) / q(x), where x is the "
                           "drafted token, and if all tokens before it are kept.")  # fmt: skip
bank.slip("wrong-kept", ("kept = int(stays.long().cumprod(0).sum())", "kept = int(stays.all()) * len(drafted)"))
bank.slip("wrong-kept", ("target[places, drafted]", "target[places + 1, drafted]"))
bank.variant("wrong-kept", LOOP, ("p, q = target[i], draft[i]", "p, q = target[i + 1], draft[i]"))

bank.hint("none-refused", "When no token is refused, you keep none, as if the first had been refused: there is "
                             "no first refusal, and `argmax` then returns 0. Keep all tokens.")  # fmt: skip
bank.slip("none-refused", ("int(stays.long().cumprod(0).sum())", "int((~stays).long().argmax())"))
bank.variant("none-refused", PADDED, ("(refused + [len(drafted)])[0]", "(refused + [0])[0]"))

bank.hint("never-kept", "You never keep a token, so drafting is useless. Keep a token if u < p(x) / q(x).")
bank.slip("never-kept", ("kept = int(stays.long().cumprod(0).sum())", "kept = 0"))
bank.variant("never-kept", LOOP, ("if u * q[token] >= p[token]:", "if u >= 0:"))

bank.hint("never-refused", "You keep every token, even one that the target finds far less likely than the draft "
                              "does. Only with p(x) ≥ q(x) is a token always kept.")  # fmt: skip
bank.slip("never-refused", ("kept = int(stays.long().cumprod(0).sum())", "kept = len(drafted)"))
bank.slip("never-refused", ("target[places, drafted] / draft[places, drafted]", "(target[places, drafted] / draft[places, drafted]).clamp(min=1)"))  # fmt: skip
bank.variant("never-refused", LOOP, ("u * q[token] >= p[token]", "u >= max(1, p[token] / q[token])"))

bank.hint("after-a-refusal", "You also count tokens after a refused one. They were judged as the continuation "
                                "of a text that is no longer valid: keep only the tokens before the first refusal.")  # fmt: skip
bank.slip("after-a-refusal", ("int(stays.long().cumprod(0).sum())", "int(stays.sum())"))
bank.variant("after-a-refusal", PADDED, ("(refused + [len(drafted)])[0]", "len(drafted) - len(refused)"))
bank.variant("after-a-refusal", LOOP, ("    for i", "    kept = sum(u * draft[i][x] < target[i][x] for i, (x, u) in enumerate(zip(drafted.tolist(), uniforms.tolist())))\n    if kept < len(drafted):\n        missing = torch.relu(target[kept] - draft[kept])\n        return int(kept), missing / missing.sum()\n    for i"))  # fmt: skip

bank.hint("turned-ratio", "The ratio is upside down. A token that the target likes better than the draft does, "
                             "p > q, is always kept: use p(x) / q(x).")  # fmt: skip
bank.slip("turned-ratio", ("target[places, drafted] / draft[places, drafted]", "draft[places, drafted] / target[places, drafted]"))  # fmt: skip
bank.variant("turned-ratio", LOOP, ("u * q[token] >= p[token]", "u * p[token] >= q[token]"))

bank.hint("without-q", "You keep the token with probability p(x), as if all tokens had been equally likely to "
                          "be drafted. It was drawn from q: divide by q(x).")  # fmt: skip
bank.slip("without-q", (" / draft[places, drafted]", ""))
bank.variant("without-q", LOOP, ("u * q[token] >=", "u >="))

bank.hint("difference", "You compare the uniform with the difference p(x) - q(x). The fraction of the drafted "
                           "tokens x that may be kept is the ratio p(x) / q(x), or all of them where p is larger.")  # fmt: skip
bank.slip("difference", ("target[places, drafted] / draft", "target[places, drafted] - draft"))
bank.variant("difference", LOOP, ("u * q[token] >= p[token]", "u + q[token] >= p[token]"))

bank.hint("no-chance", "You keep a token only if the target finds it at least as likely as the draft does, and "
                          "you don't use the uniforms. With p < q, it is still kept with probability p / q.")  # fmt: skip
bank.slip("no-chance", ("uniforms < target[places, drafted] / draft[places, drafted]", "target[places, drafted] >= draft[places, drafted]"))  # fmt: skip
bank.variant("no-chance", LOOP, ("u * q[token] >= p[token]", "q[token] > p[token]"))

bank.hint("greedy", "You keep a token if it is the one that the target finds most likely. This writes what "
                       "temperature 0 would, not what p says.")  # fmt: skip
bank.slip("greedy", ("uniforms < target[places, drafted] / draft[places, drafted]", "target[places].argmax(1) == drafted"))  # fmt: skip
bank.variant("greedy", LOOP, ("u * q[token] >= p[token]", "token != p.argmax()"))

bank.hint(
    "refused-and-kept",
    "The comparison is the wrong way round: keep a token when the uniform is small, "
    "refuse it when the uniform is large.",
)
bank.slip("refused-and-kept", ("uniforms <", "uniforms >"))
bank.variant("refused-and-kept", LOOP, (">= p[token]", "< p[token]"))

bank.hint("impossible-kept", "You kept a token to which the target gives probability 0, because its uniform was "
                                "0. torch.rand can return 0: use u < p / q, not ≤.")  # fmt: skip
bank.slip("impossible-kept", ("uniforms <", "uniforms <="))
bank.variant("impossible-kept", LOOP, (">= p[token]", "> p[token]"))

bank.hint("equal-refused", "Where draft and target agree, no token may be refused, however large the uniform "
                              "is: p / q is 1 there. Don't shift the ratio or bound it below 1.")  # fmt: skip
bank.slip("equal-refused", ("/ draft[places, drafted]", "/ (draft[places, drafted] + 1e-3)"))
bank.variant("equal-refused", LOOP, ("u * q[token]", "u * (q[token] + 1e-3)"))

bank.hint("rare-refused", "A token with p(x) = 0.000005 and q(x) = 0.00001 has a ratio of 0.5, like any other "
                             "token with half the probability. Don't bound q(x) from below: a drafted token has a "
                             "q(x) above 0.")  # fmt: skip
bank.slip("rare-refused", ("/ draft[places, drafted]", "/ draft[places, drafted].clamp(min=1e-3)"))
bank.variant("rare-refused", LOOP, ("u * q[token]", "u * max(q[token], 1e-4)"))

bank.hint("not-normalised", "The numbers after a refusal add up to {got}. Divide max(0, p - q) by its sum, "
                               "which is the probability of a refusal there.")  # fmt: skip
bank.slip("not-normalised", ("missing / missing.sum()", "missing"))
bank.variant("not-normalised", LOOP, ("missing / missing.sum()", "missing"))

bank.hint("not-clamped", "The numbers after a refusal add up to {got}. The differences p - q add up to 0: what "
                            "p has more in some places, q has more in others. Set the negative ones to 0, then "
                            "divide by the sum.")  # fmt: skip
bank.slip("not-clamped", ("return kept, missing / missing.sum()", "row = target[kept] - draft[kept]\n    return kept, row"))  # fmt: skip
bank.slip("not-clamped", ("(target[kept] - draft[kept]).clamp(min=0)", "target[kept] - draft[kept]"))
bank.variant("not-clamped", LOOP, ("torch.relu(p - q)", "p - q"))

bank.hint("wrong-next", "The number of kept tokens is right, but the distribution of the next token is not. "
                           "After a refusal, take max(0, p - q) at the refused place, divided by its sum. When all "
                           "are kept, take the target's last row.")  # fmt: skip
bank.slip("wrong-next", ("missing / missing.sum()", "(missing / missing.sum()).sqrt() / (missing / missing.sum()).sqrt().sum()"))  # fmt: skip
bank.slip("wrong-next", ("(target[kept] - draft[kept]).clamp(min=0)", "torch.minimum(target[kept], draft[kept])"))
bank.variant("wrong-next", LOOP, ("return i, missing", "missing = missing**3\n            return i, missing"))

bank.hint("target-again", "After a refusal you draw the next token from the whole p. The kept tokens already "
                             "account for a part of p, so the tokens that the draft likes come out too often: draw "
                             "from max(0, p - q).")  # fmt: skip
bank.slip("target-again", ("(target[kept] - draft[kept]).clamp(min=0)", "target[kept]"))
bank.variant("target-again", LOOP, ("torch.relu(p - q)", "p"))

bank.hint("only-without-it", "You remove the refused token from p and leave the rest as it is. What the draft "
                                "says about the *other* tokens counts too: use max(0, p - q) for all tokens.")  # fmt: skip
bank.slip("only-without-it", ("missing = (target[kept] - draft[kept]).clamp(min=0)", "missing = target[kept].clone()\n    missing[drafted[kept]] = 0"))  # fmt: skip
bank.variant("only-without-it", LOOP, ("torch.relu(p - q)", "torch.where(torch.arange(len(p)) == token, 0.0, p)"))

bank.hint("differences", "Where p < q, nothing is missing: count these differences as 0, not as |p - q|.")
bank.slip("differences", (".clamp(min=0)", ".abs()"))
bank.variant("differences", LOOP, ("torch.relu(p - q)", "torch.maximum(p - q, q - p)"))

bank.hint("too-much-drafted", "You use max(0, q - p), where the draft says too much: these are the tokens that "
                                 "were refused. The others are missing: use max(0, p - q).")  # fmt: skip
bank.slip("too-much-drafted", ("(target[kept] - draft[kept])", "(draft[kept] - target[kept])"))
bank.variant("too-much-drafted", LOOP, ("torch.relu(p - q)", "torch.relu(q - p)"))

bank.hint("softened", "You apply a softmax to the differences. They are already probabilities: set the negative "
                         "ones to 0, and divide by the sum.")  # fmt: skip
bank.slip("softened", ("return kept, missing / missing.sum()", "return kept, missing.softmax(0)"))
bank.slip("softened", ("return kept, missing / missing.sum()", "return kept, (target[kept] - draft[kept]).softmax(0)"))  # fmt: skip
bank.variant("softened", LOOP, ("missing / missing.sum()", "missing.softmax(0)"))
bank.variant("softened", PADDED, ("left / left.sum()", "(left / left.sum()).softmax(0) if len(refused) else left"))

bank.hint("other-place", "After a refusal, the distribution is that of another place. Use the refused one: row "
                            "`kept` of target and draft, numbered from 0.")  # fmt: skip
bank.slip("other-place", ("target[kept] - draft[kept]", "target[-2] - draft[-1]"))
bank.slip("other-place", ("target[kept] - draft[kept]", "target[0] - draft[0]"))
bank.slip("other-place", ("target[kept] - draft[kept]", "target[kept + 1] - draft[kept]"))
bank.slip("other-place", ("target[kept] - draft[kept]", "target[kept - 1] - draft[kept - 1]"))
bank.variant("other-place", LOOP, ("p, q = target[i], draft[i]", "p, q = target[i], draft[i]\n        last = target[-2], draft[-1]"), ("torch.relu(p - q)", "torch.relu(last[0] - last[1])"))  # fmt: skip

bank.hint("last-drafted-row", "When all tokens are kept, you draw the next one from the target's row for the "
                                 "last drafted token. The row after it, target[k], is for the token to come.")  # fmt: skip
bank.slip("last-drafted-row", ("return kept, target[kept]", "return kept, target[max(kept - 1, 0)]"))
bank.variant("last-drafted-row", LOOP, ("target[-1]", "target[-2] if len(drafted) else target[-1]"))

bank.hint("other-counts", "Three drafted tokens come out right, four don't: over many rounds, the counts differ "
                             "from the target's. Did you hard-code a size?")  # fmt: skip
bank.slip("other-counts", ("return kept, target[kept]", "return kept, target[min(kept, 3)]"))
bank.variant("other-counts", LOOP, ("target[-1]", "target[:4][-1]"))

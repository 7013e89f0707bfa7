"""Answers to balise 6 of 25_race: an exponential moving average of a model."""

from tests.answers.bank import Bank

bank = Bank("25_race", whole=True)

# a copied model, its parameters and buffers in pairs
COPIED_MODEL = """
class WeightAverage:
    def __init__(self, model, decay):
        self.model, self.most, self.t = copy.deepcopy(model).eval().requires_grad_(False), decay, 1

    @torch.no_grad()
    def update(self, model):
        keep = self.most
        if keep > (1 + self.t) / (10 + self.t):
            keep = (1 + self.t) / (10 + self.t)
        pairs = list(zip(self.model.parameters(), model.parameters())) + list(zip(self.model.buffers(), model.buffers()))
        for mean, now in pairs:
            if mean.dtype.is_floating_point:
                mean.mul_(keep).add_(now, alpha=1 - keep)
            else:
                mean.copy_(now)
        self.t += 1

    def into(self, model):
        model.load_state_dict(self.model.state_dict())
"""
bank.text(6, None, COPIED_MODEL)

# new tensors at each update, from the state's values in float64; written one by one
BY_NAME = """
class WeightAverage:
    def __init__(self, model, decay):
        self.decay, self.updates = decay, 0
        self.state = {}
        for name, tensor in model.state_dict().items():
            self.state[name] = tensor.double() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.clone()

    @torch.no_grad()
    def update(self, model):
        self.updates = self.updates + 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        now = model.state_dict()
        self.state = {
            name: d * old + (1 - d) * now[name] if now[name].is_floating_point() else now[name].clone()
            for name, old in self.state.items()
        }

    def into(self, model):
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(self.state[name])
"""
bank.text(6, None, BY_NAME)

# PyTorch's own class: its first update would copy, and it would average whole numbers
NATIVE = """
class WeightAverage:
    def __init__(self, model, decay):
        def moved(mean, now, t):
            if not now.is_floating_point():
                return now
            d = min(decay, (1 + int(t)) / (10 + int(t)))
            return mean * d + now * (1 - d)

        self.mean = torch.optim.swa_utils.AveragedModel(model, avg_fn=moved, use_buffers=True)
        self.mean.n_averaged += 1

    def update(self, model):
        self.mean.update_parameters(model)

    def into(self, model):
        model.load_state_dict(self.mean.module.state_dict())
"""
bank.text(6, None, NATIVE)

# all floats in one call; the decays come from a generator
FOREACH = """
class WeightAverage:
    def __init__(self, model, decay):
        self.decays = (min(decay, (1 + t) / (10 + t)) for t in itertools.count(1))
        self.tensors = [one.detach().clone() for one in self.listed(model)]

    @staticmethod
    def listed(model):
        return list(model.state_dict().values())

    @torch.no_grad()
    def update(self, model):
        share, now = 1 - next(self.decays), self.listed(model)
        floats = [k for k, one in enumerate(now) if one.is_floating_point()]
        torch._foreach_lerp_([self.tensors[k] for k in floats], [now[k] for k in floats], share)
        for k in set(range(len(now))) - set(floats):
            self.tensors[k] = now[k].clone()

    @torch.no_grad()
    def into(self, model):
        torch._foreach_copy_(self.listed(model), self.tensors)
"""
bank.text(6, None, FOREACH)
bank.slip(6, None, ("self.values[name].lerp_(new, 1 - decay)", "self.values[name] += (1 - decay) * (new - self.values[name])"))  # fmt: skip
bank.slip(6, None, ("value.detach().clone()", "copy.deepcopy(value)"))

bank.hint(6, "shared-memory", "The model and the average change each other. `state_dict()` and `parameters()` give "
                              "the model's own tensors: clone what you keep, and write only into the average.")  # fmt: skip
bank.slip(6, "shared-memory", ("value.detach().clone()", "value.detach()"))
bank.slip(6, "shared-memory", ("self.values[name].lerp_(new, 1 - decay)", "self.values[name] = new.lerp_(self.values[name], decay)"))  # fmt: skip
bank.slip(6, "shared-memory", ("self.values[name].copy_(new)", "self.values[name] = new"))
bank.slip(6, "shared-memory", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "dict(model.state_dict())"))  # fmt: skip
bank.variant(6, "shared-memory", COPIED_MODEL, ("copy.deepcopy(model).eval().requires_grad_(False)", "copy.copy(model)"))  # fmt: skip
bank.variant(6, "shared-memory", BY_NAME, ("else now[name].clone()", "else now[name]"))

bank.hint(6, "wrong-start", "The average begins with the weights that `__init__` was given, not with zeros and not "
                            "with those of the first update. `into` writes all of them.")  # fmt: skip
bank.slip(6, "wrong-start", ("value.detach().clone()", "torch.zeros_like(value)"))
bank.slip(6, "wrong-start", ("model.load_state_dict(self.values)", "model.state_dict().update(self.values)"))
bank.slip(6, "wrong-start", ("        for name, new in", "        decay = decay if self.updates > 1 else 0\n        for name, new in"))  # fmt: skip
bank.slip(6, "wrong-start", ("        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))\n", "        t = self.updates - 1\n        decay = min(self.decay, (1 + t) / (10 + t)) if t else 0\n"))  # fmt: skip
bank.variant(6, "wrong-start", NATIVE, ("        self.mean.n_averaged += 1\n", ""))
bank.variant(6, "wrong-start", FOREACH, ("one.detach().clone()", "torch.empty_like(one).fill_(0)"))

bank.hint(6, "buffers-left-out", "You don't average batch norm's running mean and variance. They are buffers: "
                                 "`parameters()` does not have them, `state_dict()` does.")  # fmt: skip
bank.slip(6, "buffers-left-out", ("if new.is_floating_point():", 'if new.is_floating_point() and "running" not in name:'))  # fmt: skip
bank.slip(6, "buffers-left-out", ("if new.is_floating_point():", "if name in dict(model.named_parameters(remove_duplicate=False)):"))  # fmt: skip
bank.slip(6, "buffers-left-out", ("model.state_dict().items()}", "model.named_parameters(remove_duplicate=False)}"),
          ("in model.state_dict().items()", "in model.named_parameters(remove_duplicate=False)"), ("(self.values)", "(self.values, strict=False)"))  # fmt: skip
bank.variant(6, "buffers-left-out", COPIED_MODEL, (" + list(zip(self.model.buffers(), model.buffers()))", ""))
bank.variant(6, "buffers-left-out", NATIVE, ("use_buffers=True", "use_buffers=False"))

bank.hint(6, "integers-not-copied", "Batch norm's counter and other buffers of whole numbers must be copied as "
                                    "they are: an average of counts is not a count.")  # fmt: skip
bank.slip(6, "integers-not-copied", ("            else:\n                self.values[name].copy_(new)\n", ""))
bank.slip(6, "integers-not-copied", ("self.values[name].copy_(new)", "self.values[name] = decay * self.values[name] + (1 - decay) * new"))  # fmt: skip
bank.slip(6, "integers-not-copied", ("self.values[name].copy_(new)", "self.values[name] = new.float()"))
bank.variant(6, "integers-not-copied", BY_NAME, (" if now[name].is_floating_point() else now[name].clone()", ""))
bank.variant(6, "integers-not-copied", NATIVE, ("            if not now.is_floating_point():\n                return now\n", ""))  # fmt: skip

bank.hint(6, "tied-twice", "A tied weight moves twice per update: `state_dict()` has two names for it, and here "
                           "both are one tensor. Copy name by name, or go through `parameters()` and `buffers()`, "
                           "which list it once.")  # fmt: skip
bank.slip(6, "tied-twice", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "copy.deepcopy(model).state_dict()"))  # fmt: skip
bank.slip(6, "tied-twice", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "copy.deepcopy(model.state_dict())"))  # fmt: skip
bank.variant(6, "tied-twice", COPIED_MODEL, ("pairs = list(zip(self.model.parameters(), model.parameters())) + list(zip(self.model.buffers(), model.buffers()))",
             "pairs = zip(self.model.state_dict().values(), model.state_dict().values())"))  # fmt: skip

bank.hint(6, "not-the-smaller", "d is the smaller of two values: (1 + t) / (10 + t) in the first updates, and "
                                "`decay` as soon as that is smaller.")  # fmt: skip
bank.slip(6, "not-the-smaller", ("min(self.decay,", "max(self.decay,"))
bank.slip(6, "not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "self.decay"))
bank.slip(6, "not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "(1 + self.updates) / (10 + self.updates)"))  # fmt: skip
bank.slip(6, "not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "self.decay * (1 + self.updates) / (10 + self.updates)"))  # fmt: skip
bank.variant(6, "not-the-smaller", COPIED_MODEL, ("keep > (1", "keep < (1"))
bank.variant(6, "not-the-smaller", NATIVE, ("min(decay, (1 + int(t)) / (10 + int(t)))", "decay"))

bank.hint(6, "miscounted", "t counts the updates from 1: it is 1 in the first update, and one more in each later one.")
bank.slip(6, "miscounted", ("        self.updates += 1\n", ""))
bank.slip(6, "miscounted", ("        self.updates += 1\n", "        self.updates = 1\n"))
bank.slip(6, "miscounted", ("        self.updates += 1\n        decay", "        decay"), ("self.values[name].copy_(new)\n", "self.values[name].copy_(new)\n        self.updates += 1\n"))  # fmt: skip
bank.slip(6, "miscounted", ("self.updates += 1", "self.updates += 2"))
bank.variant(6, "miscounted", COPIED_MODEL, ("decay, 1\n", "decay, 0\n"))
bank.variant(6, "miscounted", FOREACH, ("itertools.count(1)", "itertools.count(0)"))

bank.hint(6, "weights-swapped", "You have swapped d and 1 - d: the average keeps the share d. `a.lerp_(b, s)` "
                                "takes the share s of b.")  # fmt: skip
bank.slip(6, "weights-swapped", ("lerp_(new, 1 - decay)", "lerp_(new, decay)"))
bank.variant(6, "weights-swapped", BY_NAME, ("d * old + (1 - d) * now[name]", "(1 - d) * old + d * now[name]"))

bank.hint(6, "wrong-average", "The average of {names} is wrong. It becomes d times its old value plus 1 - d times "
                              "the model's current value, with d = min(decay, (1 + t) / (10 + t)), for every "
                              "floating-point tensor of any dtype.")  # fmt: skip
bank.slip(6, "wrong-average", ("self.values[name].lerp_(new, 1 - decay)", "self.values[name].add_(new, alpha=1 - decay)"))  # fmt: skip
for typed in ("(1 + self.updates) / (9 + self.updates)", "self.updates / (10 + self.updates)", "self.updates / (1 + self.updates)", "(1 + self.updates) / (11 + self.updates)"):  # fmt: skip
    bank.slip(6, "wrong-average", ("(1 + self.updates) / (10 + self.updates)", typed))
bank.slip(6, "wrong-average", ("new.is_floating_point()", "new.dtype == torch.float32"))
bank.variant(6, "wrong-average", COPIED_MODEL, ("mean.mul_(keep).add_(now, alpha=1 - keep)", "mean.copy_((mean + now) / 2)"))  # fmt: skip

bank.hint(6, "graph-kept", "The average holds a graph: autograd records what is computed from parameters. Detach "
                           "in `__init__`, and update under `torch.no_grad()`.")  # fmt: skip
bank.slip(6, "graph-kept", ("value.detach().clone()", "value.clone()"), ("for name, value in model.state_dict()", "for name, value in model.state_dict(keep_vars=True)"))  # fmt: skip
bank.variant(6, "graph-kept", FOREACH, ("one.detach().clone()", "one.clone()"), ("model.state_dict().values()", "model.state_dict(keep_vars=True).values()"))  # fmt: skip

bank.hint(6, "into-replaces", "`into` replaces the model's tensors, by new ones or by the average's own. Copy "
                              "numbers into its existing tensors, as `load_state_dict` and `copy_` do: an "
                              "optimizer holds them, and later updates must not reach them.")  # fmt: skip
bank.slip(6, "into-replaces", ("load_state_dict(self.values)", "load_state_dict(self.values, assign=True)"))
bank.slip(6, "into-replaces", ("model.load_state_dict(self.values)", "for name, one in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:\n            if name in self.values:\n                one.data = self.values[name]"))  # fmt: skip
bank.variant(6, "into-replaces", COPIED_MODEL, ("self.model.state_dict())", "copy.deepcopy(self.model.state_dict()), assign=True)"))  # fmt: skip

bank.hint(6, "history-kept", "You hold {copies} copies of the model's numbers after 33 updates. The formula needs "
                             "only one: the current average.")  # fmt: skip
HISTORY = """
class WeightAverage:
    def __init__(self, model, decay):
        self.decay, self.past = decay, [copy.deepcopy(model.state_dict())]

    def update(self, model):
        self.past.append(copy.deepcopy(model.state_dict()))

    def into(self, model):
        kept = [min(self.decay, (1 + t) / (10 + t)) for t in range(1, len(self.past))]
        shares = [math.prod(kept[k:]) * (1 - kept[k - 1] if k else 1) for k in range(len(self.past))]
        mean = {name: sum(s * past[name].double() for s, past in zip(shares, self.past)) if one.is_floating_point() else one
                for name, one in self.past[-1].items()}
        model.load_state_dict(mean)
"""
bank.text(6, "history-kept", HISTORY)
bank.variant(6, "history-kept", BY_NAME, ("        now = model.state_dict()\n", "        now = model.state_dict()\n        self.before = self.before + [self.state]\n"),
             ("self.state = {}\n", "self.state, self.before = {}, []\n"))  # fmt: skip

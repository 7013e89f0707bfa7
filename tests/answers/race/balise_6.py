"""Answers to balise 6 of 25_race: an exponential moving average of a model."""

from tests.answers.bank import Bank

bank = Bank("25_race", 6, whole=True)

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
bank.text(None, COPIED_MODEL)

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
bank.text(None, BY_NAME)

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
bank.text(None, NATIVE)

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
bank.text(None, FOREACH)
bank.slip(None, ("self.values[name].lerp_(new, 1 - decay)", "self.values[name] += (1 - decay) * (new - self.values[name])"))  # fmt: skip
bank.slip(None, ("value.detach().clone()", "copy.deepcopy(value)"))

bank.hint("shared-memory", "The model and the average change each other. `state_dict()` and `parameters()` give "
                              "the model's own tensors: clone what you keep, and write only into the average.")  # fmt: skip
bank.slip("shared-memory", ("value.detach().clone()", "value.detach()"))
bank.slip("shared-memory", ("self.values[name].lerp_(new, 1 - decay)", "self.values[name] = new.lerp_(self.values[name], decay)"))  # fmt: skip
bank.slip("shared-memory", ("self.values[name].copy_(new)", "self.values[name] = new"))
bank.slip("shared-memory", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "dict(model.state_dict())"))  # fmt: skip
bank.variant("shared-memory", COPIED_MODEL, ("copy.deepcopy(model).eval().requires_grad_(False)", "copy.copy(model)"))  # fmt: skip
bank.variant("shared-memory", BY_NAME, ("else now[name].clone()", "else now[name]"))

bank.hint("wrong-start", "The average begins with the weights that `__init__` was given, not with zeros and not "
                            "with those of the first update. `into` writes all of them.")  # fmt: skip
bank.slip("wrong-start", ("value.detach().clone()", "torch.zeros_like(value)"))
bank.slip("wrong-start", ("model.load_state_dict(self.values)", "model.state_dict().update(self.values)"))
bank.slip("wrong-start", ("        for name, new in", "        decay = decay if self.updates > 1 else 0\n        for name, new in"))  # fmt: skip
bank.slip("wrong-start", ("        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))\n", "        t = self.updates - 1\n        decay = min(self.decay, (1 + t) / (10 + t)) if t else 0\n"))  # fmt: skip
bank.variant("wrong-start", NATIVE, ("        self.mean.n_averaged += 1\n", ""))
bank.variant("wrong-start", FOREACH, ("one.detach().clone()", "torch.empty_like(one).fill_(0)"))

bank.hint("buffers-left-out", "You don't average batch norm's running mean and variance. They are buffers: "
                                 "`parameters()` does not have them, `state_dict()` does.")  # fmt: skip
bank.slip("buffers-left-out", ("if new.is_floating_point():", 'if new.is_floating_point() and "running" not in name:'))  # fmt: skip
bank.slip("buffers-left-out", ("if new.is_floating_point():", "if name in dict(model.named_parameters(remove_duplicate=False)):"))  # fmt: skip
bank.slip("buffers-left-out", ("model.state_dict().items()}", "model.named_parameters(remove_duplicate=False)}"),
          ("in model.state_dict().items()", "in model.named_parameters(remove_duplicate=False)"), ("(self.values)", "(self.values, strict=False)"))  # fmt: skip
bank.variant("buffers-left-out", COPIED_MODEL, (" + list(zip(self.model.buffers(), model.buffers()))", ""))
bank.variant("buffers-left-out", NATIVE, ("use_buffers=True", "use_buffers=False"))

bank.hint("integers-not-copied", "Batch norm's counter and other buffers of whole numbers must be copied as "
                                    "they are: an average of counts is not a count.")  # fmt: skip
bank.slip("integers-not-copied", ("            else:\n                self.values[name].copy_(new)\n", ""))
bank.slip("integers-not-copied", ("self.values[name].copy_(new)", "self.values[name] = decay * self.values[name] + (1 - decay) * new"))  # fmt: skip
bank.slip("integers-not-copied", ("self.values[name].copy_(new)", "self.values[name] = new.float()"))
bank.variant("integers-not-copied", BY_NAME, (" if now[name].is_floating_point() else now[name].clone()", ""))
bank.variant("integers-not-copied", NATIVE, ("            if not now.is_floating_point():\n                return now\n", ""))  # fmt: skip

bank.hint("tied-twice", "A tied weight moves twice per update: `state_dict()` has two names for it, and here "
                           "both are one tensor. Copy name by name, or go through `parameters()` and `buffers()`, "
                           "which list it once.")  # fmt: skip
bank.slip("tied-twice", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "copy.deepcopy(model).state_dict()"))  # fmt: skip
bank.slip("tied-twice", ("{name: value.detach().clone() for name, value in model.state_dict().items()}", "copy.deepcopy(model.state_dict())"))  # fmt: skip
bank.variant("tied-twice", COPIED_MODEL, ("pairs = list(zip(self.model.parameters(), model.parameters())) + list(zip(self.model.buffers(), model.buffers()))",
             "pairs = zip(self.model.state_dict().values(), model.state_dict().values())"))  # fmt: skip

bank.hint("not-the-smaller", "d is the smaller of two values: (1 + t) / (10 + t) in the first updates, and "
                                "`decay` as soon as that is smaller.")  # fmt: skip
bank.slip("not-the-smaller", ("min(self.decay,", "max(self.decay,"))
bank.slip("not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "self.decay"))
bank.slip("not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "(1 + self.updates) / (10 + self.updates)"))  # fmt: skip
bank.slip("not-the-smaller", ("min(self.decay, (1 + self.updates) / (10 + self.updates))", "self.decay * (1 + self.updates) / (10 + self.updates)"))  # fmt: skip
bank.variant("not-the-smaller", COPIED_MODEL, ("keep > (1", "keep < (1"))
bank.variant("not-the-smaller", NATIVE, ("min(decay, (1 + int(t)) / (10 + int(t)))", "decay"))

bank.hint("miscounted", "t counts the updates from 1: it is 1 in the first update, and one more in each later one.")
bank.slip("miscounted", ("        self.updates += 1\n", ""))
bank.slip("miscounted", ("        self.updates += 1\n", "        self.updates = 1\n"))
bank.slip("miscounted", ("        self.updates += 1\n        decay", "        decay"), ("self.values[name].copy_(new)\n", "self.values[name].copy_(new)\n        self.updates += 1\n"))  # fmt: skip
bank.slip("miscounted", ("self.updates += 1", "self.updates += 2"))
bank.variant("miscounted", COPIED_MODEL, ("decay, 1\n", "decay, 0\n"))
bank.variant("miscounted", FOREACH, ("itertools.count(1)", "itertools.count(0)"))

bank.hint("weights-swapped", "You have swapped d and 1 - d: the average keeps the share d. `a.lerp_(b, s)` "
                                "takes the share s of b.")  # fmt: skip
bank.slip("weights-swapped", ("lerp_(new, 1 - decay)", "lerp_(new, decay)"))
bank.variant("weights-swapped", BY_NAME, ("d * old + (1 - d) * now[name]", "(1 - d) * old + d * now[name]"))

bank.hint("wrong-average", "The average of {names} is wrong. It becomes d times its old value plus 1 - d times "
                              "the model's current value, with d = min(decay, (1 + t) / (10 + t)), for every "
                              "floating-point tensor of any dtype.")  # fmt: skip
bank.slip("wrong-average", ("self.values[name].lerp_(new, 1 - decay)", "self.values[name].add_(new, alpha=1 - decay)"))  # fmt: skip
for typed in ("(1 + self.updates) / (9 + self.updates)", "self.updates / (10 + self.updates)", "self.updates / (1 + self.updates)", "(1 + self.updates) / (11 + self.updates)"):  # fmt: skip
    bank.slip("wrong-average", ("(1 + self.updates) / (10 + self.updates)", typed))
bank.slip("wrong-average", ("new.is_floating_point()", "new.dtype == torch.float32"))
bank.variant("wrong-average", COPIED_MODEL, ("mean.mul_(keep).add_(now, alpha=1 - keep)", "mean.copy_((mean + now) / 2)"))  # fmt: skip

bank.hint("graph-kept", "The average holds a graph: autograd records what is computed from parameters. Detach "
                           "in `__init__`, and update under `torch.no_grad()`.")  # fmt: skip
bank.slip("graph-kept", ("value.detach().clone()", "value.clone()"), ("for name, value in model.state_dict()", "for name, value in model.state_dict(keep_vars=True)"))  # fmt: skip
bank.variant("graph-kept", FOREACH, ("one.detach().clone()", "one.clone()"), ("model.state_dict().values()", "model.state_dict(keep_vars=True).values()"))  # fmt: skip

bank.hint("into-replaces", "`into` replaces the model's tensors, by new ones or by the average's own. Copy "
                              "numbers into its existing tensors, as `load_state_dict` and `copy_` do: an "
                              "optimizer holds them, and later updates must not reach them.")  # fmt: skip
bank.slip("into-replaces", ("load_state_dict(self.values)", "load_state_dict(self.values, assign=True)"))
bank.slip("into-replaces", ("model.load_state_dict(self.values)", "for name, one in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:\n            if name in self.values:\n                one.data = self.values[name]"))  # fmt: skip
bank.variant("into-replaces", COPIED_MODEL, ("self.model.state_dict())", "copy.deepcopy(self.model.state_dict()), assign=True)"))  # fmt: skip

bank.hint("history-kept", "You hold {copies} copies of the model's numbers after 33 updates. The formula needs "
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
bank.text("history-kept", HISTORY)
bank.variant("history-kept", BY_NAME, ("        now = model.state_dict()\n", "        now = model.state_dict()\n        self.before = self.before + [self.state]\n"),
             ("self.state = {}\n", "self.state, self.before = {}, []\n"))  # fmt: skip

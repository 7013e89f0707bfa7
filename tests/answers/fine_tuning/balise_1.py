"""Answers to balise 1 of 21_fine_tuning: a frozen body."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 1)

# by loops, the two parts one after the other
BY_LOOPS = """
class Transfer(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head
        for p in self.body.parameters():
            p.requires_grad = False
        self.body.eval()

    def train(self, mode=True):
        self.training = mode
        self.head.train(mode)
        for module in self.body.modules():
            module.training = False
        return self

    def forward(self, x):
        with torch.no_grad():
            found = self.body(x)
        return self.head(found)


def learning(model):
    found = []
    for p in model.parameters():
        if p.requires_grad:
            found.append(p)
    return found
"""
bank.text(None, BY_LOOPS)
bank.slip(None, ("self.train(self.training)", "self.body.eval()"))
bank.slip(None, ("return [p for p in model.parameters() if p.requires_grad]", "return filter(lambda p: p.requires_grad, model.parameters())"))  # fmt: skip
bank.slip(None, ("super().train(mode)\n        self.body.eval()\n        return self", "super().train(mode)\n        self.body.train(False)\n        return self"))  # fmt: skip
bank.slip(None, ("return [p for p in model.parameters() if p.requires_grad]", "return tuple({id(p): p for module in model.modules() for p in module.parameters() if p.requires_grad}.values())"))  # fmt: skip

bank.hint("body-learns", "Parameters of the body still learn: {what}. Set `requires_grad` to False for all of "
                            "them when you create the model.")  # fmt: skip
bank.slip("body-learns", ("        body.requires_grad_(False)\n", ""))
bank.slip("body-learns", ("body.requires_grad_(False)", "body.requires_grad = False"))
bank.variant("body-learns", BY_LOOPS, ("self.body.parameters()", "self.body.parameters(recurse=False)"))

bank.hint("head-frozen", "Parameters of the head don't learn: {what}. Freeze only the body.")
bank.slip("head-frozen", ("body.requires_grad_(False)", "self.requires_grad_(False)"))
bank.variant("head-frozen", BY_LOOPS, ("self.body.parameters()", "self.parameters()"))

bank.hint("awake-at-first", "The body arrived in training mode and is still in it. Set its mode in `__init__`, "
                               "too: nobody is obliged to call `train` first.", edge=True)  # fmt: skip
bank.slip("awake-at-first", ("        self.train(self.training)\n", ""))
bank.variant("awake-at-first", BY_LOOPS, ("        self.body.eval()\n", ""))

bank.hint("body-awake", "The body is in training mode after `{where}`. `nn.Module.train` sets the mode of "
                           "everything below: put the body back in evaluation mode after it.")  # fmt: skip
bank.slip("body-awake", ("self.train(self.training)", "self.body.eval()"), ("super().train(mode)\n        self.body.eval()", "super().train(mode)"))  # fmt: skip
bank.slip("body-awake", ("self.train(self.training)", "self.body.eval()"), ("super().train(mode)\n        self.body.eval()", "self.body.eval()\n        super().train(mode)"))  # fmt: skip
bank.variant("body-awake", BY_LOOPS, ("            module.training = False", "            module.training = mode"))  # fmt: skip

bank.hint("parts-awake", "The body itself is in evaluation mode after `{where}`, but modules below it are not. "
                            "Its batch norms have their own modes; `body.eval()` sets all of them.", edge=True)  # fmt: skip
bank.slip("parts-awake", ("self.train(self.training)", "self.body.eval()"), ("super().train(mode)\n        self.body.eval()", "super().train(mode)\n        self.body.training = False"))  # fmt: skip
bank.variant("parts-awake", BY_LOOPS, ("for module in self.body.modules():", "for module in [self.body.train(mode)]:"))  # fmt: skip

bank.hint("head-stuck", "After `{where}`, the head is not in that mode. It learns, so its dropout and batch "
                           "norm follow `mode`.", edge=True)  # fmt: skip
bank.slip("head-stuck", ("super().train(mode)", "super().train(False)"))
bank.slip("head-stuck", ("super().train(mode)", "super().train()"))
bank.variant("head-stuck", BY_LOOPS, ("        self.head.train(mode)\n", ""))

bank.hint("train-returns", "`train` returns {what}. `nn.Module.train` returns the module itself, and `eval` "
                              "returns what `train` returns. Return self.", edge=True)  # fmt: skip
bank.slip("train-returns", ("self.body.eval()\n        return self", "self.body.eval()"))
bank.slip("train-returns", ("self.body.eval()\n        return self", "return self.body.eval()"))
bank.variant("train-returns", BY_LOOPS, ("        return self\n", "        return self.head\n"))

LIST = "[p for p in model.parameters() if p.requires_grad]"
bank.hint("others-in-list", "`learning` lists more than the parameters that learn. An optimizer would keep the "
                               "frozen ones for nothing.", edge=True)  # fmt: skip
bank.slip("others-in-list", (LIST, "list(model.parameters())"))
bank.slip("others-in-list", (LIST, "[(n, p) for n, p in model.named_parameters() if p.requires_grad]"))
bank.variant("others-in-list", BY_LOOPS, ("        if p.requires_grad:\n", "        if p is not None:\n"))

bank.hint("listed-twice", "`learning` lists a parameter more than once. Two layers may share one, and modules "
                             "contain other modules: `model.parameters()` yields each once.", edge=True)  # fmt: skip
bank.slip("listed-twice", (LIST, "[p for m in model.modules() for p in m.parameters() if p.requires_grad]"))  # fmt: skip
bank.slip("listed-twice", (LIST, "[p for m in model.modules() for p in m.parameters(recurse=False) if p.requires_grad]"))  # fmt: skip
bank.variant("listed-twice", BY_LOOPS, ("in model.parameters():", "in [p for m in model.modules() for p in m._parameters.values() if p is not None]:"))  # fmt: skip

bank.hint("missing-in-list", "A parameter that learns is not in the list. Parts of the body may be thawed "
                                "later, and `learning` takes any model: check `requires_grad` of each parameter.")  # fmt: skip
bank.slip("missing-in-list", (LIST, "list(model.head.parameters())"))
bank.variant("missing-in-list", BY_LOOPS, ("in model.parameters():", "in model.head.parameters():"))

# of another model these raise, which needs no hint
bank.slip("raised", (LIST, "[p for part in (model.body, model.head) for p in part.parameters() if p.requires_grad]"))  # fmt: skip
bank.variant("raised", BY_LOOPS, ("in model.parameters():", "in [*model.head.parameters(), *model.body.parameters()]:"))  # fmt: skip

bank.hint("no-graph", "The loss has no graph, so the head gets no gradients. Run the head with gradients on; "
                         "only the body needs none.")  # fmt: skip
bank.slip("no-graph", ("return self.head(self.body(x))", "with torch.no_grad():\n            return self.head(self.body(x))"))  # fmt: skip
bank.variant("no-graph", BY_LOOPS, ("        return self.head(found)", "            return self.head(found)"))  # fmt: skip

bank.hint("body-moved", "Training changed the body: {what}. Its weights and running statistics must not change "
                           "in any step.")  # fmt: skip
bank.slip("body-moved", ("return self.head(self.body(x))", "return self.head(self.body.train(self.training)(x))"))  # fmt: skip
bank.variant("body-moved", BY_LOOPS, ("found = self.body(x)", "found = self.body.train()(x)"))

"""Answers to balise 2 of 10_learning_rate_and_large_batch: a learning-rate finder that leaves nothing behind."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 2, whole=True)

IN_PLACE = """
def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    weights = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    held = copy.deepcopy(optimizer.state_dict())
    states = random_states()
    generator = getattr(batches, "generator", None)
    order = None if generator is None else generator.get_state()

    def endless():
        while True:
            for batch in batches:
                yield batch

    try:
        rates, smoothed, running, best = [], [], 0, None
        for k, (x, y) in zip(range(n), endless()):
            rates.append(math.exp(math.log(low) + k * math.log(high / low) / (n - 1)))
            set_rates(optimizer, rates[-1])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            running = beta * running + (1 - beta) * float(loss.detach())
            smoothed.append(running / (1 - beta ** (k + 1)))
            best = smoothed[-1] if best is None else min(best, smoothed[-1])
            if not smoothed[-1] <= 4 * best:
                return rates[:-1], smoothed[:-1]
            optimizer.step()
        return rates, smoothed
    finally:
        model.load_state_dict(weights)
        for p, g in zip(model.parameters(), gradients):
            p.grad = g
        for module, training in zip(model.modules(), modes):
            module.training = training
        optimizer.load_state_dict(held)
        set_random_states(states)
        if order is not None:
            generator.set_state(order)


def propose(rates, losses):
    k = min(range(len(losses)), key=losses.__getitem__)
    if k == 0:
        raise ValueError("no decline")
    fallen = [(losses[0] - one) / (losses[0] - losses[k]) for one in losses]
    return [rates[[share >= 0.1 for share in fallen].index(True)], rates[k] * 0.25]
"""
bank.text(None, IN_PLACE)

CLASS = """
class Kept:
    def __init__(self, model, optimizer, batches):
        self.model, self.optimizer = model, optimizer
        self.before = copy.deepcopy([list(model.parameters()), list(model.buffers())])
        self.gradients = [p.grad for p in model.parameters()]
        self.modes = {module: module.training for module in model.modules()}
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.state = {p: copy.deepcopy(held) for p, held in optimizer.state.items()}
        self.generators = [g for g in [getattr(batches, "generator", None)] if g is not None]

    def __enter__(self):
        self.states = random_states(), [g.get_state() for g in self.generators]
        for p in self.model.parameters():
            p.grad = None

    def __exit__(self, *error):
        with torch.no_grad():
            for now, before in zip((list(self.model.parameters()), list(self.model.buffers())), self.before):
                for mine, old in zip(now, before):
                    mine.copy_(old)
        for p, g in zip(self.model.parameters(), self.gradients):
            p.grad = g
        for module, training in self.modes.items():
            module.training = training
        for group, old in zip(self.optimizer.param_groups, self.groups):
            group.clear()
            group.update(old)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        set_random_states(self.states[0])
        for g, state in zip(self.generators, self.states[1]):
            g.set_state(state)


def find_rates(model, batches, optimizer, low=1e-5, high=10.0, n=100, beta=0.9):
    every = np.geomspace(low, high, n)
    smoothed, total, weight = [], 0.0, 0.0
    with Kept(model, optimizer, batches):
        while True:
            for x, y in batches:
                k = len(smoothed)
                if k == n:
                    return every, np.array(smoothed)
                set_rates(optimizer, float(every[k]))
                loss = F.cross_entropy(model(x), y)
                total, weight = beta * total + loss.item(), beta * weight + 1
                s = total / weight
                if not np.isfinite(s) or (k and s > 4 * min(smoothed)):
                    return every[:k], np.array(smoothed)
                smoothed.append(s)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()


def propose(rates, losses):
    rates, losses = np.asarray(rates), np.asarray(losses)
    if (losses >= losses[0]).all():
        raise ValueError("the loss rose from the beginning")
    k = losses.argmin()
    return rates[np.flatnonzero(losses <= 0.9 * losses[0] + 0.1 * losses[k])[0]], rates[k] / 4
"""
bank.text(None, CLASS)

bank.slip("nothing-returned", ("        return rates, losses\n", ""))

bank.hint(
    "find-form", "find_rates returns two lists of the same length, rates and smoothed losses. Yours returns {got}."
)
bank.slip("find-form", ("            rates.append(rate)\n            losses.append(smooth)\n", "            losses.append(smooth)\n"), (
    "            set_rates(optimizer, rate)\n", "            set_rates(optimizer, rate)\n            rates.append(rate)\n"), (
    "        return rates, losses\n", "        return rates + [10.0], losses\n"))  # fmt: skip
bank.variant("find-form", CLASS, ("return every, np.array(smoothed)", "return dict(zip(every, smoothed))"), (
    "return every[:k], np.array(smoothed)", "return every[: k + 1], np.array(smoothed)"))  # fmt: skip

bank.hint("wrong-rates", "The rates are wrong. The first one is `low`, the n-th one `high`, and each is the "
                            "same factor above the one before.")  # fmt: skip
bank.slip("wrong-rates", ("low * (high / low) ** (k / (n - 1))", "low + (high - low) * k / (n - 1)"))
bank.slip("wrong-rates", ("(k / (n - 1))", "(k / n)"))
bank.slip("wrong-rates", ("low * (high / low) ** (k / (n - 1))", "low * 10**k"))
bank.variant("wrong-rates", IN_PLACE, ("/ (n - 1))", "/ n)"))

bank.hint("length", "You made {n} steps; {due} are expected. When an epoch ends too early, begin another one. "
                       "While the loss has not diverged, continue to the n-th step, and no further.")  # fmt: skip
bank.slip("length", ("                iterator = iter(batches)\n                batch = next(iterator)\n", "                if k:\n                    break\n                iterator = iter(batches)\n                batch = next(iterator)\n"))  # fmt: skip
bank.variant("length", CLASS, ("        while True:\n", "        for _ in range(1):\n"), ("                optimizer.step()\n\n", "                optimizer.step()\n        return every[: len(smoothed)], np.array(smoothed)\n\n"))  # fmt: skip

bank.hint("stopped-early", "The search ended after {n} steps, within the first epoch, where {due} are expected: "
                              "your smoothed loss rose to more than 4 times its smallest value, although the "
                              "losses did not. Without the division by 1 - beta**(k + 1), the running mean begins "
                              "near 0 and rises. If you put the divided value back into the running mean, it is "
                              "divided again at the next step: keep the two apart, as average and smooth.")  # fmt: skip
bank.slip("stopped-early", ("average / (1 - beta ** (k + 1))", "average"))
bank.slip("stopped-early", ("            smooth = average / (1 - beta ** (k + 1))\n", "            average = smooth = average / (1 - beta ** (k + 1))\n"))  # fmt: skip
bank.variant("stopped-early", CLASS, ("s = total / weight", "s = total * (1 - beta)"))

bank.hint("loss-behind", "You record the loss after each step, on the batch that was just trained on. Record "
                            "the loss before the step: the gradient is taken of that one.")  # fmt: skip
bank.slip("loss-behind", ("            optimizer.step()\n", "            optimizer.step()\n            loss = F.cross_entropy(model(batch[0]), batch[1])\n"))  # fmt: skip
bank.variant("loss-behind", CLASS, ("                total, weight = beta * total + loss.item(), beta * weight + 1\n", "                optimizer.zero_grad()\n                loss.backward()\n                optimizer.step()\n                loss = F.cross_entropy(model(x), y)\n                total, weight = beta * total + loss.item(), beta * weight + 1\n"), ("                smoothed.append(s)\n                optimizer.zero_grad(set_to_none=True)\n                loss.backward()\n                optimizer.step()\n", "                smoothed.append(s)\n"))  # fmt: skip

bank.hint("searched-in-eval", "The model came in training mode, but the search runs it in eval mode, so dropout "
                                 "and batch statistics play no part in its losses. Like train, leave the mode as "
                                 "it is.")  # fmt: skip
bank.slip("searched-in-eval", ("    model, optimizer = copy.deepcopy((model, optimizer))\n", "    model, optimizer = copy.deepcopy((model, optimizer))\n    model.eval()\n"))  # fmt: skip
bank.variant("searched-in-eval", IN_PLACE, ("    def endless():\n", "    model.eval()\n\n    def endless():\n"))

bank.hint("wrong-losses", "The rates are right, but the smoothed losses are not. Do you divide the running mean "
                             "of the losses by 1 - beta**(k + 1)? Do you train on each batch at its own rate?")  # fmt: skip
bank.slip("wrong-losses", ("average = beta * average + (1 - beta) * loss.item()", "average = (1 - beta) * average + beta * loss.item()"))  # fmt: skip
bank.variant("wrong-losses", IN_PLACE, ("running = beta * running + (1 - beta) * float", "running = (1 - beta) * running + beta * float"))  # fmt: skip

bank.hint("scale-lost", "The losses come from a training in which all groups have the same rate. set_rates "
                           'takes group["lr_scale"] into account.')  # fmt: skip
bank.slip("scale-lost", ("            set_rates(optimizer, rate)\n", '            for group in optimizer.param_groups:\n                group["lr"] = rate\n'))  # fmt: skip
bank.variant("scale-lost", IN_PLACE, ("            set_rates(optimizer, rates[-1])\n", '            for group in optimizer.param_groups:\n                group.update(lr=rates[-1])\n'))  # fmt: skip

bank.hint(
    "not-corrected", "You don't divide the running mean by 1 - beta**(k + 1), so it begins near 0 and seems to rise."
)
bank.slip("not-corrected", ("average / (1 - beta ** (k + 1))", "average"), ("smooth > 4 * min(losses, default=math.inf)", "smooth > 40 * min(losses, default=math.inf)"))  # fmt: skip
bank.slip("not-corrected", ("average / (1 - beta ** (k + 1))", "average / (1 - beta)"), ("smooth > 4 * min(losses, default=math.inf)", "smooth > 40 * min(losses, default=math.inf)"))  # fmt: skip
bank.variant("not-corrected", CLASS, ("s = total / weight", "s = total * (1 - beta)"), ("s > 4 * min(smoothed)", "s > 400 * min(smoothed)"))  # fmt: skip

bank.hint("corrected-late", "The correction is off by one step. After the first batch, k = 0, the divisor is 1 "
                               "- beta: the first smoothed loss is the first loss.")  # fmt: skip
bank.slip("corrected-late", ("beta ** (k + 1)", "beta ** (k + 2)"))
bank.variant("corrected-late", IN_PLACE, ("beta ** (k + 1)", "beta ** (k + 2)"))

bank.hint("not-smoothed", "These are the losses of single batches. They are not smoothed.")
bank.slip("not-smoothed", ("losses.append(smooth)", "losses.append(loss.item())"))
bank.variant("not-smoothed", IN_PLACE, ("running / (1 - beta ** (k + 1))", "float(loss.detach())"))

bank.hint("not-trained", "The losses are those of a model that is not trained at all. Does the optimizer hold "
                            "the parameters of the model whose loss you compute?")  # fmt: skip
bank.slip("not-trained", ("model, optimizer = copy.deepcopy((model, optimizer))", "model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)"))  # fmt: skip
bank.slip("not-trained", ("            optimizer.step()\n", ""))
bank.variant("not-trained", CLASS, ("                optimizer.step()\n", ""))

bank.hint(
    "gradients-add-up",
    "The losses come from a training in which gradients add up over the batches. Clear them before each batch.",
)
bank.slip("gradients-add-up", ("            optimizer.zero_grad()\n", ""))
bank.variant("gradients-add-up", IN_PLACE, ("            optimizer.zero_grad()\n", ""))

bank.hint("epoch-repeated", "The losses are those of one epoch's batches, repeated. itertools.cycle stores the "
                               "batches, and keeps all of them in memory. Begin a new epoch with iter(batches).")  # fmt: skip
bank.slip("epoch-repeated", ("iterator = [], [], 0.0, iter(())", "iterator = [], [], 0.0, __import__('itertools').cycle(batches)"))  # fmt: skip
bank.variant("epoch-repeated", IN_PLACE, ("        while True:\n            for batch in batches:", "        every = list(batches)\n        while True:\n            for batch in every:"))  # fmt: skip

bank.hint("wrong-stop", "The search returned {n} steps, but {due} come before the divergence. Stop when the "
                           "*smoothed* loss is above 4 times the *smallest* smoothed one so far, and leave that "
                           "step out.")  # fmt: skip
bank.slip(
    "wrong-stop", ("smooth > 4 * min(losses, default=math.inf)", "loss.item() > 4 * min(losses, default=math.inf)")
)
bank.slip("wrong-stop", ("smooth > 4 * min(losses, default=math.inf)", "smooth > 4 * (losses or [math.inf])[0]"))
bank.slip("wrong-stop", ("smooth > 4 * min(losses, default=math.inf)", "smooth > 4 * (losses or [math.inf])[-1]"))
bank.slip("wrong-stop", (" or smooth > 4 * min(losses, default=math.inf)", ""))
bank.variant("wrong-stop", IN_PLACE, ("return rates[:-1], smoothed[:-1]", "return rates, smoothed"))

bank.hint("nan-kept", "The eighth batch has a loss that is not finite, so seven steps come before it. A "
                         "comparison with NaN is always false: use math.isfinite.")  # fmt: skip
bank.slip("nan-kept", ("not math.isfinite(smooth) or ", ""))
bank.variant("nan-kept", IN_PLACE, ("not smoothed[-1] <= 4 * best", "smoothed[-1] > 4 * best"))

bank.hint("changed", "After the search, something is not as it was: {what}.")
bank.slip("changed", ("    model, optimizer = copy.deepcopy((model, optimizer))\n", "    optimizer = type(optimizer)(optimizer.param_groups, lr=0.1, momentum=0.9)\n"))  # fmt: skip
bank.slip("changed", ("    model, optimizer = copy.deepcopy((model, optimizer))\n", "    for module in model.modules():\n        module.train()\n    model, optimizer = copy.deepcopy((model, optimizer))\n"))  # fmt: skip
bank.variant("changed", IN_PLACE, ("copy.deepcopy(model.state_dict())", "model.state_dict()"))
bank.variant("changed", CLASS, ("list(model.buffers())])", "[]])"))

bank.hint("gradients-not-back", "After the search, something is not as it was: {what}. Set gradients that were "
                                   "None back to None, and the others to their old values.")  # fmt: skip
bank.slip("gradients-not-back", ("        set_random_states(states)\n", "        set_random_states(states)\n        for p in given.parameters():\n            p.grad = None\n"), (
    "    model, optimizer = copy", "    given = model\n    model, optimizer = copy"))  # fmt: skip
bank.variant("gradients-not-back", IN_PLACE, ("        for p, g in zip(model.parameters(), gradients):\n            p.grad = g\n", "        optimizer.zero_grad()\n"))  # fmt: skip
bank.variant("gradients-not-back", CLASS, ("            p.grad = g\n", "            p.grad = g if g is None else torch.zeros_like(g)\n"))  # fmt: skip

bank.hint(
    "optimizer-changed",
    "After the search, the optimizer is not as it was: {what}. Its momentum would carry the explosion into the "
    "training.",
)
bank.slip("optimizer-changed", ("    model, optimizer = copy.deepcopy((model, optimizer))\n", "    given, (model, optimizer) = optimizer, copy.deepcopy((model, optimizer))\n"), (
    "        set_random_states(states)\n", '        set_random_states(states)\n        for group in given.param_groups:\n            group["lr"] = low\n'))  # fmt: skip
bank.variant("optimizer-changed", IN_PLACE, ("        optimizer.load_state_dict(held)\n", ""))
bank.variant("optimizer-changed", IN_PLACE, ("copy.deepcopy(optimizer.state_dict())", "optimizer.state_dict()"))

bank.hint("random-changed", "After the search, the random numbers continue differently: {what}. Shuffling, "
                               "dropout and augmentation have drawn some. Use random_states and set_random_states.")  # fmt: skip
bank.slip("random-changed", ("        set_random_states(states)\n", "        pass\n"))
bank.slip("random-changed", ("        set_random_states(states)\n", '        torch.set_rng_state(states["torch"])\n'))
bank.slip("random-changed", ("        set_random_states(states)\n", "        torch.manual_seed(0)\n"))
bank.variant("random-changed", IN_PLACE, ("        set_random_states(states)\n", "        set_random_states(random_states())\n"))  # fmt: skip

bank.hint("generator-changed", "After the search, the loader would shuffle differently than without it. It has "
                                  "its own generator, batches.generator: save its get_state().")  # fmt: skip
bank.slip("generator-changed", ("            generator.set_state(own)\n", "            pass\n"))
bank.slip(
    "generator-changed",
    ("            generator.set_state(own)\n", "            generator.manual_seed(generator.initial_seed())\n"),
)
bank.variant("generator-changed", CLASS, ("            g.set_state(state)\n", "            g.manual_seed(0)\n"))

bank.hint("error-swallowed", "A file of the data set could not be read, and find_rates returned as if nothing "
                                "had happened. `finally:` restores everything and lets the error through.")  # fmt: skip
bank.slip("error-swallowed", ("    finally:\n", "    except Exception:\n        return rates, losses\n    finally:\n"))
bank.variant("error-swallowed", CLASS, ("        set_random_states(self.states[0])\n", "        set_random_states(self.states[0])\n        self.done = True\n"), (
    "            g.set_state(state)\n", "            g.set_state(state)\n        return True\n"))  # fmt: skip

bank.hint("left-after-error", "Reading a batch raised an error, and something is not as it was: {what}. The "
                                 "code that restores it belongs in a `finally:`.")  # fmt: skip
bank.slip("left-after-error", ("        return rates, losses\n    finally:\n", "    except ValueError:\n        raise\n    else:\n"), (
    "            generator.set_state(own)\n", "            generator.set_state(own)\n        return rates, losses\n"))  # fmt: skip
bank.variant("left-after-error", CLASS, ("    def __exit__(self, *error):\n", "    def __exit__(self, *error):\n        if error[0]:\n            return\n"))  # fmt: skip

bank.hint("propose-form", "propose returns two rates, (smallest, largest).")
bank.slip("propose-form", ("    return smallest, rates[losses.index(lowest)] / 4\n", "    return rates[losses.index(lowest)] / 4\n"))  # fmt: skip
bank.variant("propose-form", CLASS, (", rates[k] / 4\n", ", rates[k], rates[k] / 4\n"))

bank.hint(
    "wrong-largest", "The largest rate is wrong. It is a quarter of the rate at which the smoothed loss is lowest."
)
bank.slip("wrong-largest", ("rates[losses.index(lowest)] / 4", "rates[losses.index(lowest)]"))
bank.slip("wrong-largest", ("rates[losses.index(lowest)] / 4", "rates[losses.index(lowest) // 4]"))
bank.slip("wrong-largest", ("rates[losses.index(lowest)] / 4", "rates[-1] / 4"))
bank.slip("wrong-largest", ("rates[losses.index(lowest)] / 4", "rates[losses.index(lowest) - 2]"))
bank.hint("swapped", "propose returns the largest rate first. The order is (smallest, largest).")
bank.slip("swapped", ("    return smallest, rates[losses.index(lowest)] / 4\n", "    return rates[losses.index(lowest)] / 4, smallest\n"))  # fmt: skip
bank.variant("swapped", IN_PLACE, ("return [rates[[share", "return [rates[k] / 4, rates[[share"), (".index(True)], rates[k] * 0.25]", ".index(True)]]"))  # fmt: skip
bank.variant("wrong-largest", IN_PLACE, ("rates[k] * 0.25", "rates[k] / 10"))

bank.hint("wrong-smallest", "The smallest rate is wrong. It is the first one at which the loss has fallen by a "
                               "tenth of the fall from the first loss to the lowest.")  # fmt: skip
bank.slip("wrong-smallest", ("losses[0] - 0.1 * (losses[0] - lowest)", "0.1 * losses[0]"), ("if loss <= line)", "if loss <= line or rate > 0.1)"))  # fmt: skip
bank.slip("wrong-smallest", ("losses[0] - 0.1 * (losses[0] - lowest)", "losses[0]"), ("loss <= line", "loss < line"))
bank.slip("wrong-smallest", ("losses[0] - 0.1 * (losses[0] - lowest)", "0.9 * losses[0]"))
bank.slip("wrong-smallest", ("losses[0] - 0.1 * (losses[0] - lowest)", "lowest + 0.1 * (losses[0] - lowest)"))
bank.variant("wrong-smallest", IN_PLACE, ("share >= 0.1 for", "share >= 0.5 for"))

bank.hint(
    "never-fell",
    "For losses that only rise, such as 1.0, 1.1, 1.5, 2.0, there is nothing to propose: raise a ValueError.",
)
bank.slip("never-fell", ("    if lowest == losses[0]:\n        raise ValueError(\"the loss never fell: begin at a lower rate\")\n", ""))  # fmt: skip
bank.variant(
    "never-fell", CLASS, ('        raise ValueError("the loss rose from the beginning")\n', "        return None\n")
)

bank.hint(
    "beta-exchanged",
    "You have swapped β and 1 − β. The mean keeps β of its old value and takes 1 − β of the new loss.",
)
bank.slip("beta-exchanged", (
    "average = beta * average + (1 - beta) *", "average = (1 - beta) * average + beta *"), ("(1 - beta ** (k", "(1 - (1 - beta) ** (k"))  # fmt: skip
bank.variant("beta-exchanged", IN_PLACE, (
    "running = beta * running + (1 - beta) *", "running = (1 - beta) * running + beta *"), ("(1 - beta ** (k", "(1 - (1 - beta) ** (k"))  # fmt: skip

bank.hint(
    "graphs-held",
    "The smoothed losses hold the graphs of all batches, which stay in memory. Use the number, loss.item().",
)
bank.slip("graphs-held", ("(1 - beta) * loss.item()", "(1 - beta) * loss"))
bank.variant("graphs-held", IN_PLACE, ("float(loss.detach())", "loss"))

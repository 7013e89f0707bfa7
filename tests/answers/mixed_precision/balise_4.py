"""Answers to balise 4 of 02_mixed_precision: the dynamic loss scaler."""

import math

import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 4)


class Base:
    """A right scaler in plain operations, with methods to be replaced by mistakes."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.s, self.growth, self.backoff, self.interval = init_scale, growth_factor, backoff_factor, growth_interval
        self.good, self.finite, self.bad = 0, None, False

    def gradients(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def scale(self, loss):
        return loss * self.s

    def look(self, gradients):
        return torch.stack([g.isfinite().all() for g in gradients]).all()

    def unscale_(self, optimizer):
        if self.finite is not None:
            raise RuntimeError("unscaled already")
        gradients = self.gradients(optimizer)
        for g in gradients:
            g.div_(self.s)
        self.finite = self.look(gradients)

    def step(self, optimizer):
        if self.finite is None:
            self.unscale_(optimizer)
        self.bad = not self.finite.item()
        if not self.bad:
            optimizer.step()

    def update(self):
        if self.bad:
            self.s, self.good = self.s * self.backoff, 0
        else:
            self.good += 1
            if self.good >= self.interval:
                self.s, self.good = self.s * self.growth, 0
        self.finite, self.bad = None, False

    def get_scale(self):
        return float(self.s)


wrong = bank.wrong


# ---------------------------------------------------------------- right

bank.right()(Base)


@bank.right()
class LossScaler:
    """Everything on the device, as PyTorch does it; new gradient tensors; the sum tells what is not finite."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.s = torch.tensor(float(init_scale))
        self.tracker = torch.zeros((), dtype=torch.int32)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.state, self.found_inf = "ready", None

    def scale(self, loss):
        self.s = self.s.to(loss.device)
        return self.s * loss

    def unscale_(self, optimizer):
        if self.state != "ready":
            raise RuntimeError("unscale_() has already been called")
        inverse, total = 1 / self.s, 0
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad = p.grad * inverse
                        total = total + (p.grad * 0).sum()
        self.found_inf = torch.isnan(total)
        self.state = "unscaled"

    def step(self, optimizer):
        if self.state == "ready":
            self.unscale_(optimizer)
        self.state = "stepped"
        if not self.found_inf:
            return optimizer.step()
        return None

    def update(self):
        grown = self.tracker + 1 == self.growth_interval
        factor = torch.where(self.found_inf, self.backoff_factor, torch.where(grown, self.growth_factor, 1.0))
        self.tracker = torch.where(self.found_inf | grown, 0, self.tracker + 1)
        self.s = self.s * factor
        self.state = "ready"

    def get_scale(self):
        return self.s.item()


@bank.right()
class LossScaler(Base):
    """Looks at the scaled gradients first, with max; counts down; get_scale gives a tensor of one value."""

    def unscale_(self, optimizer):
        if self.finite is not None:
            raise RuntimeError
        gradients = self.gradients(optimizer)
        self.finite = torch.stack([g.abs().max() for g in gradients]).max() < math.inf  # NaN is not smaller
        torch._foreach_div_(gradients, self.s)

    def get_scale(self):
        return torch.tensor(self.s)


# ---------------------------------------------------------------- wrong


bank.hint("wrong-trace", "The scale is not the one that torch.amp.GradScaler has after the same steps.")


@wrong("wrong-trace")
class LossScaler(Base):
    """Never lets the scale fall below one."""

    def update(self):
        super().update()
        self.s = max(self.s, 1.0)


bank.hint("library-scaler", "You call PyTorch's GradScaler. Write your own: you will race against it.")


@wrong("library-scaler")
class LossScaler(torch.amp.GradScaler):
    def __init__(self, **options):
        super().__init__("cpu", **options)


@wrong("library-scaler", variant=True)
class LossScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.inner = torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, growth_interval)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@wrong("nothing-returned")
class LossScaler(Base):
    def scale(self, loss):
        loss * self.s


bank.hint("loss-detached", "scale(loss) lost the graph, so backward() can't start from it.")


@wrong("loss-detached", variant=True)
class LossScaler(Base):
    def scale(self, loss):
        return torch.tensor(loss.item() * self.s)


bank.hint("scale-not-applied", "scale(loss) must be the loss times the scale.")


@wrong("scale-not-applied", variant=True)
class LossScaler(Base):
    def scale(self, loss):
        return loss / self.s


bank.hint("loss-overwritten", "scale() changed the loss itself. Return a new tensor.")


@wrong("loss-overwritten", variant=True)
class LossScaler(Base):
    def scale(self, loss):
        return loss.mul_(self.s)


bank.hint("never-divided", "After unscale_ the gradients are still scaled.")


@wrong("never-divided")
class LossScaler(Base):
    def unscale_(self, optimizer):
        for g in self.gradients(optimizer):
            g = g / self.s  # noqa: PLW2901
        self.finite = self.look(self.gradients(optimizer))


@wrong("never-divided", variant=True)
class LossScaler(Base):
    def unscale_(self, optimizer):
        for g in self.gradients(optimizer):
            g.mul_(self.s)
        self.finite = self.look(self.gradients(optimizer))


bank.hint("first-group-only", "You looked only at the first parameter group. An optimizer may have several.")


@wrong("first-group-only")
class LossScaler(Base):
    def gradients(self, optimizer):
        return [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]


@wrong("first-group-only", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([g.isfinite().all() for g in gradients[:2]]).all()


bank.hint("none-gradient", "Leave out a parameter without a gradient (None): {error}")


@wrong("none-gradient", variant=True)
class LossScaler(Base):
    def gradients(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"]]


bank.hint("inf-missed", "A gradient is {kind} in {where_word} parameter, but the optimizer stepped all the same.")


@wrong("inf-missed")
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([~g.isnan().any() for g in gradients]).all()


@wrong("inf-missed")
class LossScaler(Base):
    def look(self, gradients):
        return gradients[0].isfinite().all()


@wrong("inf-missed")
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([g.max() < math.inf for g in gradients]).all()  # −inf is smaller


bank.hint("nan-missed", "A gradient is NaN, but the optimizer stepped all the same. NaN is not infinite: "
          "torch.isfinite detects both.")  # fmt: skip


@wrong("nan-missed", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        return ~torch.stack([g.isinf().any() for g in gradients]).any()


bank.hint("finite-taken-for-overflow", "All gradients are finite, the largest is 1e30, but the step was skipped. "
          "Their squares overflow, and float16's largest number is no limit in float32: check whether the values "
          "themselves are finite.")  # fmt: skip


@wrong("finite-taken-for-overflow", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([g.norm() for g in gradients]).norm().isfinite()


bank.hint("always-skipped", "All gradients are finite, but the optimizer did not step.")


@wrong("always-skipped", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        return ~super().look(gradients) & False


@wrong("inf-missed", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        return ~super().look(gradients)


bank.hint("divided-twice", "You call unscale_ before step, and step divides the gradients a second time.")


@wrong("divided-twice", variant=True)
class LossScaler(Base):
    def step(self, optimizer):
        self.finite = None
        super().step(optimizer)


bank.hint("unscaled-by-nobody", "If unscale_ was not called before, step() must do it. Here it stepped with scaled "
          "gradients.")  # fmt: skip


@wrong("unscaled-by-nobody", variant=True)
class LossScaler(Base):
    def step(self, optimizer):
        if self.finite is None:
            self.finite = self.look(self.gradients(optimizer))
        super().step(optimizer)


bank.hint("second-unscale-allowed", "A second unscale_ before update() must raise RuntimeError, as in PyTorch. "
          "Otherwise it divides again.")  # fmt: skip


@wrong("second-unscale-allowed")
class LossScaler(Base):
    def unscale_(self, optimizer):
        self.finite = None
        super().unscale_(optimizer)


bank.hint("unscale-refused", "After update() a new step begins, so unscale_ must be allowed again: {error}")


@wrong("unscale-refused", variant=True)
class LossScaler(Base):
    def update(self):
        finite = self.finite
        super().update()
        self.finite = finite


bank.hint("scale-not-a-number", "get_scale() must return the scale as a Python float.")


@wrong("scale-not-a-number", variant=True)
class LossScaler(Base):
    def get_scale(self):
        return None


bank.hint("no-backoff", "After an overflow, multiply the scale by backoff_factor.")


@wrong("no-backoff", variant=True)
class LossScaler(Base):
    def update(self):
        before = self.s
        bad = self.bad
        super().update()
        self.s = before if bad else self.s


bank.hint("no-growth", "After growth_interval good steps in a row, multiply the scale by growth_factor.")


@wrong("no-growth", variant=True)
class LossScaler(Base):
    def update(self):
        before, bad = self.s, self.bad
        super().update()
        self.s = self.s if bad else before


bank.hint("counter-not-reset-by-overflow", "An overflow ends the run of good steps: count from 0 again.")


@wrong("counter-not-reset-by-overflow", variant=True)
class LossScaler(Base):
    def update(self):
        good, bad = self.good, self.bad
        super().update()
        if bad:
            self.good = good


bank.hint("counter-not-reset-by-growth", "After it has grown, the scale grows again only after another "
          "growth_interval good steps.")  # fmt: skip


@wrong("counter-not-reset-by-growth", variant=True)
class LossScaler(Base):
    def update(self):
        if self.bad:
            self.s, self.good = self.s * self.backoff, 0
        else:
            self.good += 1
            if self.good >= self.interval:
                self.s *= self.growth
        self.finite, self.bad = None, False


bank.hint("grows-too-late", "The scale grows one step too late: the step that completes growth_interval good steps "
          "counts.")  # fmt: skip


@wrong("grows-too-late", variant=True)
class LossScaler(Base):
    def update(self):
        if self.bad:
            self.s, self.good = self.s * self.backoff, 0
        else:
            self.good += 1
            if self.good > self.interval:
                self.s, self.good = self.s * self.growth, 0
        self.finite, self.bad = None, False


bank.hint("grows-too-early", "The scale grows one step too early.")


@wrong("grows-too-early", variant=True)
class LossScaler(Base):
    def __init__(self, init_scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval - 1)


bank.hint("factors-hard-coded", "The factors are arguments. Here growth_factor is {growth} and backoff_factor is "
          "{backoff}.")  # fmt: skip


@wrong("factors-hard-coded", variant=True)
class LossScaler(Base):
    def __init__(self, init_scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        super().__init__(init_scale, 2.0, 0.5, growth_interval)


bank.hint("growth-capped", "The scale grew to {got_scale:g} and no further. Only overflows limit it.")


@wrong("growth-capped")
class LossScaler(Base):
    def __init__(self, init_scale=2.0**16, *args, **options):
        super().__init__(init_scale, *args, **options)
        self.first = init_scale

    def update(self):
        super().update()
        self.s = min(self.s, self.first)


@wrong("growth-capped", variant=True)
class LossScaler(Base):
    """Careful with large scales."""

    def update(self):
        super().update()
        self.s = min(self.s, 2.0**24)


bank.hint("overflow-remembered", "After the first overflow, every step counts as an overflow. Clear that record in "
          "update().")  # fmt: skip


@wrong("overflow-remembered", variant=True)
class LossScaler(Base):
    def look(self, gradients):
        self.all = super().look(gradients) & getattr(self, "all", torch.tensor(True))
        return self.all


bank.hint("scale-moved-in-step", "The scale changed before update(), so a second optimizer in the same step would "
          "be unscaled wrongly.")  # fmt: skip


@wrong("scale-moved-in-step", variant=True)
class LossScaler(Base):
    def step(self, optimizer):
        super().step(optimizer)
        if self.bad:
            self.s *= self.backoff

    def update(self):
        backoff, self.backoff = self.backoff, 1.0
        super().update()
        self.backoff = backoff


@wrong("wrong-trace", variant=True)
class LossScaler(Base):
    def update(self):
        super().update()
        self.s = max(self.s, 16.0)  # never below


bank.hint("weights-differ", "The scales agree, but the weights do not: they differ from those of SGD on the true "
          "gradients.")  # fmt: skip


@wrong("weights-differ", variant=True)
class LossScaler(Base):
    def step(self, optimizer):
        super().step(optimizer)
        if self.bad:  # "a small step instead of none"
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.99)


bank.hint("many-reads", "You read {n} values from the device in a step with three gradients. One is enough: "
          "combine the results of the checks on the device, read once, and keep the value.")  # fmt: skip


@wrong("many-reads")
class LossScaler(Base):
    def look(self, gradients):
        return torch.tensor(all(bool(g.isfinite().all()) for g in gradients))


@wrong("many-reads", variant=True)
class LossScaler(Base):
    def update(self):
        self.bad = not bool(self.finite)
        super().update()


@wrong("second-unscale-allowed", variant=True)
class LossScaler(Base):
    def unscale_(self, optimizer):
        assert self.finite is None
        super().unscale_(optimizer)


bank.hint("read-in-unscale", "unscale_ reads a value from the device ({error}), so the CPU waits there. Keep the "
          "result as a tensor until step() has to decide.")  # fmt: skip


@wrong("read-in-unscale", variant=True)
class LossScaler(Base):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self.finite = bool(self.finite)

    def step(self, optimizer):
        if self.finite is None:
            self.unscale_(optimizer)
        self.bad = not self.finite
        if not self.bad:
            optimizer.step()


bank.hint("scaler-not-on-gpu", "On a GPU, a tensor is in the CPU's memory: {error}. Create the tensors you check "
          "the gradients with on the gradients' device.")  # fmt: skip
bank.slip("scaler-not-on-gpu", ("torch.zeros((), device=device)", "torch.zeros(())"))
bank.slip(
    "scaler-not-on-gpu",
    ("self.found = torch.zeros((), device=device)", 'self.found = torch.zeros((), device="cpu")'),
    variant=True,
)
bank.slip("scaler-not-on-gpu", ("1 / self.value, device=device", "1 / self.value"))

"""Answers to balise 4 of 02_mixed_precision: the dynamic loss scaler."""

import math

import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision")


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


def wrong(slug):
    return bank.wrong(4, slug)


# ---------------------------------------------------------------- right

bank.right(4)(Base)


@bank.right(4)
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


@bank.right(4)
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


@wrong("wrong-trace")
class LossScaler(Base):
    """Never lets the scale fall below one."""

    def update(self):
        super().update()
        self.s = max(self.s, 1.0)


@wrong("library-scaler")
class LossScaler(torch.amp.GradScaler):
    def __init__(self, **options):
        super().__init__("cpu", **options)


@wrong("library-scaler")
class LossScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.inner = torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, growth_interval)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@wrong("nothing-returned")
class LossScaler(Base):
    def scale(self, loss):
        loss * self.s


@wrong("loss-detached")
class LossScaler(Base):
    def scale(self, loss):
        return torch.tensor(loss.item() * self.s)


@wrong("scale-not-applied")
class LossScaler(Base):
    def scale(self, loss):
        return loss / self.s


@wrong("loss-overwritten")
class LossScaler(Base):
    def scale(self, loss):
        return loss.mul_(self.s)


@wrong("never-divided")
class LossScaler(Base):
    def unscale_(self, optimizer):
        for g in self.gradients(optimizer):
            g = g / self.s  # noqa: PLW2901
        self.finite = self.look(self.gradients(optimizer))


@wrong("never-divided")
class LossScaler(Base):
    def unscale_(self, optimizer):
        for g in self.gradients(optimizer):
            g.mul_(self.s)
        self.finite = self.look(self.gradients(optimizer))


@wrong("first-group-only")
class LossScaler(Base):
    def gradients(self, optimizer):
        return [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]


@wrong("first-group-only")
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([g.isfinite().all() for g in gradients[:2]]).all()


@wrong("none-gradient")
class LossScaler(Base):
    def gradients(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"]]


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


@wrong("nan-missed")
class LossScaler(Base):
    def look(self, gradients):
        return ~torch.stack([g.isinf().any() for g in gradients]).any()


@wrong("finite-taken-for-overflow")
class LossScaler(Base):
    def look(self, gradients):
        return torch.stack([g.norm() for g in gradients]).norm().isfinite()


@wrong("always-skipped")
class LossScaler(Base):
    def look(self, gradients):
        return ~super().look(gradients) & False


@wrong("inf-missed")
class LossScaler(Base):
    def look(self, gradients):
        return ~super().look(gradients)


@wrong("divided-twice")
class LossScaler(Base):
    def step(self, optimizer):
        self.finite = None
        super().step(optimizer)


@wrong("unscaled-by-nobody")
class LossScaler(Base):
    def step(self, optimizer):
        if self.finite is None:
            self.finite = self.look(self.gradients(optimizer))
        super().step(optimizer)


@wrong("second-unscale-allowed")
class LossScaler(Base):
    def unscale_(self, optimizer):
        self.finite = None
        super().unscale_(optimizer)


@wrong("unscale-refused")
class LossScaler(Base):
    def update(self):
        finite = self.finite
        super().update()
        self.finite = finite


@wrong("scale-not-a-number")
class LossScaler(Base):
    def get_scale(self):
        return None


@wrong("no-backoff")
class LossScaler(Base):
    def update(self):
        before = self.s
        bad = self.bad
        super().update()
        self.s = before if bad else self.s


@wrong("no-growth")
class LossScaler(Base):
    def update(self):
        before, bad = self.s, self.bad
        super().update()
        self.s = self.s if bad else before


@wrong("counter-not-reset-by-overflow")
class LossScaler(Base):
    def update(self):
        good, bad = self.good, self.bad
        super().update()
        if bad:
            self.good = good


@wrong("counter-not-reset-by-growth")
class LossScaler(Base):
    def update(self):
        if self.bad:
            self.s, self.good = self.s * self.backoff, 0
        else:
            self.good += 1
            if self.good >= self.interval:
                self.s *= self.growth
        self.finite, self.bad = None, False


@wrong("grows-too-late")
class LossScaler(Base):
    def update(self):
        if self.bad:
            self.s, self.good = self.s * self.backoff, 0
        else:
            self.good += 1
            if self.good > self.interval:
                self.s, self.good = self.s * self.growth, 0
        self.finite, self.bad = None, False


@wrong("grows-too-early")
class LossScaler(Base):
    def __init__(self, init_scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval - 1)


@wrong("factors-hard-coded")
class LossScaler(Base):
    def __init__(self, init_scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        super().__init__(init_scale, 2.0, 0.5, growth_interval)


@wrong("growth-capped")
class LossScaler(Base):
    def __init__(self, init_scale=2.0**16, *args, **options):
        super().__init__(init_scale, *args, **options)
        self.first = init_scale

    def update(self):
        super().update()
        self.s = min(self.s, self.first)


@wrong("growth-capped")
class LossScaler(Base):
    """Careful with large scales."""

    def update(self):
        super().update()
        self.s = min(self.s, 2.0**24)


@wrong("overflow-remembered")
class LossScaler(Base):
    def look(self, gradients):
        self.all = super().look(gradients) & getattr(self, "all", torch.tensor(True))
        return self.all


@wrong("scale-moved-in-step")
class LossScaler(Base):
    def step(self, optimizer):
        super().step(optimizer)
        if self.bad:
            self.s *= self.backoff

    def update(self):
        backoff, self.backoff = self.backoff, 1.0
        super().update()
        self.backoff = backoff


@wrong("wrong-trace")
class LossScaler(Base):
    def update(self):
        super().update()
        self.s = max(self.s, 16.0)  # never below


@wrong("weights-differ")
class LossScaler(Base):
    def step(self, optimizer):
        super().step(optimizer)
        if self.bad:  # "a small step instead of none"
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.99)


@wrong("many-reads")
class LossScaler(Base):
    def look(self, gradients):
        return torch.tensor(all(bool(g.isfinite().all()) for g in gradients))


@wrong("many-reads")
class LossScaler(Base):
    def update(self):
        self.bad = not bool(self.finite)
        super().update()


@wrong("second-unscale-allowed")
class LossScaler(Base):
    def unscale_(self, optimizer):
        assert self.finite is None
        super().unscale_(optimizer)


@wrong("read-in-unscale")
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


bank.slip(4, "scaler-not-on-gpu", ("torch.zeros((), device=device)", "torch.zeros(())"))
bank.slip(4, "scaler-not-on-gpu", ("self.found = torch.zeros((), device=device)", 'self.found = torch.zeros((), device="cpu")'), variant=True)
bank.slip(4, "scaler-not-on-gpu", ("1 / self.value, device=device", "1 / self.value"))

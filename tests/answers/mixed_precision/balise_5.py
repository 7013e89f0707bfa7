"""Answers to balise 5 of 02_mixed_precision: the unit in the last place, and masters."""

import numpy as np
import torch

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 5)


def ulp(x):
    """By the next number."""
    size = x.abs()
    return torch.nextafter(size, torch.full_like(size, torch.inf)).double() - size.double()


def ulp_by_exponent(x):
    """By the exponent, from NumPy."""
    info = torch.finfo(x.dtype)
    _, exponent = np.frexp(np.maximum(x.double().abs().numpy(), info.smallest_normal))
    return torch.from_numpy(info.eps * 2.0 ** (exponent - 1))


def ulp_by_bits(x):
    """By bit patterns, in the dtype itself."""
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.abs().view(whole) + 1).view(x.dtype) - x.abs()


class Masters:
    """Right, in plain operations, with parts to be replaced by mistakes."""

    keep, moments, share = torch.float32, torch.float32, 1.0

    def __init__(self, parameters, lr, momentum=0.9):
        self.p, self.lr, self.mu = list(parameters), lr, momentum
        self.w = [p.detach().to(self.keep, copy=True) for p in self.p]
        self.v = [torch.zeros_like(w, dtype=self.moments) for w in self.w]

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.p):
            if p.grad is None:
                continue
            self.v[i] = (self.mu * self.v[i] + self.share * p.grad.float()).to(self.moments)
            self.w[i] = (self.w[i] - self.lr * self.v[i].float()).to(self.keep)
            self.write(p, self.w[i])

    def write(self, p, w):
        p.copy_(w)

    def zero_grad(self):
        for p in self.p:
            p.grad = None


class Wrapped:
    """PyTorch's SGD over the masters; gradients set to zero, not to None."""

    let_go = True

    def __init__(self, parameters, lr, momentum=0.9):
        self.p = list(parameters)
        self.w = [torch.nn.Parameter(p.detach().clone().float()) for p in self.p]
        self.sgd = torch.optim.SGD(self.w, lr=lr, momentum=momentum)

    def step(self):
        for p, w in zip(self.p, self.w):
            w.grad = None if p.grad is None else p.grad.float()
        self.sgd.step()
        with torch.no_grad():
            for p, w in zip(self.p, self.w):
                if p.grad is not None:
                    p.copy_(w)
        if self.let_go:
            self.sgd.zero_grad()

    def zero_grad(self):
        for p in self.p:
            if p.grad is not None:
                p.grad.zero_()


class Subclass(torch.optim.Optimizer):
    """A torch optimizer, its masters in its state, made when first needed; v takes the learning rate."""

    def __init__(self, parameters, lr, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["w"], state["v"] = p.float(), torch.zeros_like(p, dtype=torch.float32)
                    state["v"].mul_(group["momentum"]).add_(p.grad.float(), alpha=group["lr"])
                    state["w"].sub_(state["v"])
                    p.data.copy_(state["w"].data)


class Foreach(Masters):
    """Lists at once, the data pointer of the parameter set anew."""

    @torch.no_grad()
    def step(self):
        chosen = [i for i, p in enumerate(self.p) if p.grad is not None]
        v, w = [self.v[i] for i in chosen], [self.w[i] for i in chosen]
        torch._foreach_mul_(v, self.mu)
        torch._foreach_add_(v, [self.p[i].grad.float() for i in chosen])
        torch._foreach_add_(w, v, alpha=-self.lr)
        for i in chosen:
            self.p[i].data = self.w[i].to(self.p[i].dtype)


bank.several(None, ulp, Masters)
bank.several(None, ulp_by_exponent, Wrapped)
bank.several(None, ulp_by_bits, Subclass)
bank.several(None, ulp, Foreach)


# ---------------------------------------------------------------- wrong: the unit


def by_log(x):
    """The logarithm in the dtype of x rounds up just below a power of two."""
    return torch.finfo(x.dtype).eps * 2.0 ** torch.floor(torch.log2(x.abs())).double()


def below(x):
    """The distance to the next smaller number."""
    size = x.abs()
    return size.double() - torch.nextafter(size, torch.zeros_like(size)).double()


def normal_only(x):
    size = x.double().abs()
    _, exponent = torch.frexp(size)
    found = torch.finfo(x.dtype).eps * 2.0 ** (exponent - 1).double()
    return torch.where(size == 0, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps, found)


def normal_no_zero(x):
    _, exponent = torch.frexp(x.double().abs())
    return torch.finfo(x.dtype).eps * 2.0 ** (exponent - 1).double()


bank.several("nothing-returned", lambda x: None, Masters)
bank.hint("ulp-changes-x", "You changed x itself. A method whose name ends in _ writes into its tensor.")
bank.several("ulp-changes-x", lambda x: ulp(x.abs_()), Masters, variant=True)
bank.hint("ulp-shape", "Return one number for each value of x, in the same shape.")
bank.several("ulp-shape", lambda x: ulp(x)[0], Masters)
bank.several("ulp-shape", lambda x: torch.finfo(x.dtype).eps, Masters, variant=True)
bank.hint("ulp-negative", "A distance is never negative. For a negative x, take the distance at its absolute value.")
bank.several("ulp-negative", lambda x: ulp(x) * x.sign().double() if x[0] < 0 else ulp(x), Masters, variant=True)
bank.hint("ulp-relative", "You return a fraction of x. The distance is the same from one power of two to the next: "
          "for 1.0 and for 1.99.")  # fmt: skip
bank.several("ulp-relative", lambda x: torch.finfo(x.dtype).eps * x.abs().double(), Masters, variant=True)
bank.hint("ulp-constant", "This is the distance at 1. It doubles with each power of two.")
bank.several("ulp-constant", lambda x: torch.full_like(x, torch.finfo(x.dtype).eps), Masters, variant=True)
bank.hint("ulp-float32", "This is the distance in float32. Use the dtype of x.")
bank.several("ulp-float32", lambda x: ulp(x.float()), Masters, variant=True)
bank.hint("ulp-half", "This is half a unit, the largest rounding error. Return the whole distance.")
bank.several("ulp-half", lambda x: ulp(x) / 2, Masters, variant=True)
bank.hint("ulp-at-power", "At a power of two, or just below one, the exponent is off by one. Logarithms are "
          "rounded, but torch.frexp is exact.")  # fmt: skip
bank.several("ulp-at-power", by_log, Masters, variant=True)
bank.hint("ulp-wrong", "This is not the distance from |x| to the next larger number of its dtype.")
bank.several("ulp-wrong", below, Masters, variant=True)
bank.hint("ulp-at-zero", "The next number after 0 is the smallest subnormal: {wanted:.3g}.")
bank.several("ulp-at-zero", normal_no_zero, Masters, variant=True)
bank.hint("ulp-subnormal", "Among subnormals the distance no longer shrinks: it stays {wanted:.3g}.")
bank.several("ulp-subnormal", normal_only, Masters, variant=True)

# ---------------------------------------------------------------- wrong: the masters


class InFloat32(Masters):
    def write(self, p, w):
        p.data = w.clone()


class NotWritten(Masters):
    def write(self, p, w):
        p = w.to(p.dtype)  # a name, not the parameter


class FromParameters(Masters):
    """Float32 for the moment of the update only."""

    def __init__(self, parameters, lr, momentum=0.9):
        self.p, self.lr, self.mu = list(parameters), lr, momentum
        self.v = [torch.zeros_like(p, dtype=torch.float32) for p in self.p]

    @torch.no_grad()
    def step(self):
        for p, v in zip(self.p, self.v):
            if p.grad is not None:
                v.mul_(self.mu).add_(p.grad.float())
                p.copy_(p.float() - self.lr * v)


class NarrowUpdate(Masters):
    """Has masters, and does not write them."""

    def write(self, p, w):
        i = next(i for i, q in enumerate(self.p) if q is p)
        p.sub_((self.lr * self.v[i]).to(p.dtype))


class VelocityLate(Masters):
    """The master moves by the velocity of the step before."""

    @torch.no_grad()
    def step(self):
        for p, w, v in zip(self.p, self.w, self.v):
            if p.grad is not None:
                w.add_(v, alpha=-self.lr)
                p.copy_(w)
                v.mul_(self.mu).add_(p.grad)


class InHalf(Masters):
    keep = torch.bfloat16


class HalfMomentum(Masters):
    moments = torch.bfloat16


class Dampened(Masters):
    @torch.no_grad()
    def step(self):
        self.share = 1 - self.mu
        super().step()


class NoMomentum(Masters):
    @torch.no_grad()
    def step(self):
        self.mu = 0.0
        super().step()


class AllHaveGradients(Masters):
    @torch.no_grad()
    def step(self):
        for p, w, v in zip(self.p, self.w, self.v):
            v.mul_(self.mu).add_(p.grad.float())
            w.sub_(self.lr * v)
            p.copy_(w)


class Decays(Masters):
    @torch.no_grad()
    def step(self):
        super().step()
        for p, w in zip(self.p, self.w):
            if p.grad is None:
                p.copy_(w.mul_(0.9))


class KeepsGradients(Masters):
    def zero_grad(self):
        pass


class WrappedKeeps(Wrapped):
    let_go = False


class Wasteful(Masters):
    """A second set of masters, "to be safe"."""

    def __init__(self, parameters, lr, momentum=0.9):
        super().__init__(parameters, lr, momentum)
        self.first = [w.clone() for w in self.w]
        self.last = [w.clone() for w in self.w]


class Nesterov(Masters):
    @torch.no_grad()
    def step(self):
        for p, w, v in zip(self.p, self.w, self.v):
            if p.grad is not None:
                v.mul_(self.mu).add_(p.grad.float())
                w.sub_(self.lr * (p.grad.float() + self.mu * v))
                p.copy_(w)


bank.hint("parameters-widened", "After the step a parameter is in {got_dtype}. The model computes in 16 bits: "
          "write the rounded master into the parameter.")  # fmt: skip
bank.several("parameters-widened", ulp, InFloat32, variant=True)
bank.hint("parameters-replaced", "The model's own parameters did not change. Write into them (copy_) instead of "
          "making new ones.")  # fmt: skip
bank.several("parameters-replaced", ulp, NotWritten, variant=True)
bank.hint("masters-not-kept", "Small updates are lost: the parameters don't move. Make the masters once, in "
          "float32, and keep them. In each step, write every parameter from its master, rounded once to the "
          "parameter's dtype.")  # fmt: skip
bank.several("masters-not-kept", ulp, FromParameters)
bank.several("masters-not-kept", ulp, InHalf)
bank.several("masters-not-kept", ulp, NarrowUpdate, variant=True)
bank.hint("velocity-late", "The first step with momentum moves nothing. Update v with the gradient first, then the "
          "master with v.")  # fmt: skip
bank.several("velocity-late", ulp, VelocityLate, variant=True)
bank.hint("momentum-in-half", "The momentum is kept in 16 bits, so anything below half a unit is lost there too.")
bank.several("momentum-in-half", ulp, HalfMomentum, variant=True)
bank.hint("momentum-dampened", "Add the whole new gradient to the momentum: v ← momentum · v + g, without (1 − "
          "momentum).")  # fmt: skip
bank.several("momentum-dampened", ulp, Dampened, variant=True)
bank.hint("momentum-ignored", "These are the weights of SGD without momentum.")
bank.several("momentum-ignored", ulp, NoMomentum, variant=True)
bank.hint("grad-none", "Leave a parameter without a gradient as it is: {error}")
bank.several("grad-none", ulp, AllHaveGradients, variant=True)
bank.hint("frozen-moved", "A parameter without a gradient moved.")
bank.several("frozen-moved", ulp, Decays, variant=True)
bank.hint("zero-grad-missing", "After zero_grad() the gradients are still there, so the next backward adds to them.")
bank.several("zero-grad-missing", ulp, KeepsGradients, variant=True)
bank.hint("float32-gradients-kept", "Between two steps you keep {got_bytes:.0f} bytes per parameter, but masters "
          "and momentum take 8. Free the float32 gradients.")  # fmt: skip
bank.several("float32-gradients-kept", ulp, WrappedKeeps, variant=True)
bank.hint("too-much-memory", "Between two steps you keep {got_bytes:.0f} bytes per parameter, but masters and "
          "momentum take 8.")  # fmt: skip
bank.several("too-much-memory", ulp, Wasteful, variant=True)
bank.hint("sgd-wrong", "The parameters are not those of SGD in float32, rounded.")
bank.several("sgd-wrong", ulp, Nesterov, variant=True)


class InNumpy(Masters):
    """Right on a CPU only."""

    def __init__(self, parameters, lr, momentum=0.9):
        self.p, self.lr, self.mu = list(parameters), lr, momentum
        self.w = [p.detach().float().numpy().copy() for p in self.p]
        self.v = [np.zeros_like(w) for w in self.w]

    @torch.no_grad()
    def step(self):
        for p, w, v in zip(self.p, self.w, self.v):
            if p.grad is not None:
                v *= self.mu
                v += p.grad.float().numpy()
                w -= self.lr * v
                p.copy_(torch.from_numpy(w))


class OnTheCpu(Masters):
    def __init__(self, parameters, lr, momentum=0.9):
        self.p, self.lr, self.mu = list(parameters), lr, momentum
        self.w = [p.detach().float() for p in self.p]
        self.v = [torch.zeros(p.shape) for p in self.p]


bank.hint("leaves-the-device", "When the parameters are on a GPU, the optimizer creates a tensor elsewhere, or the "
          "CPU waits: {error}")  # fmt: skip
bank.several("leaves-the-device", ulp, InNumpy)
bank.several("leaves-the-device", ulp, OnTheCpu, variant=True)
bank.hint("generator-used-up", "The optimizer moves nothing when you pass it model.parameters(), a generator: "
          "list(parameters) in the line above has used the generator up. Go through self.parameters.")  # fmt: skip
bank.slip("generator-used-up", ("for p in self.parameters]", "for p in parameters]"), variant=True)

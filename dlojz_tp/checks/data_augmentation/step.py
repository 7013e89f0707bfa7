"""Balise 7: MixUp or CutMix drawn for each batch, inside a training step."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.checking import close
from dlojz_tp.checking.looks import Look, Value, at_most, judged, shape, within
from dlojz_tp.checks.data_augmentation.devices import SEEDS, observe_seeds, on_meta, stays

CLASSES, BATCHES, ALPHA = 4, 400, 50.0
# of λ, if α = ALPHA
LIMITS = {"mix": ("MixUp", 0.15, 0.85), "cut": ("CutMix", 0.2, 0.95), "both": ("MixUp or CutMix", 0.15, 0.95)}
IMAGES, LABELS = torch.arange(12.0).view(-1, 1, 1, 1).repeat(1, 3, 8, 10), torch.arange(12) % CLASSES
HOT = F.one_hot(LABELS, CLASSES).float()
GIVEN = 0.7 * HOT.flip(0) + 0.3 * HOT  # labels that are soft already


def _kind(images, mixed):
    """ "mix" where values lie between those of images, "cut" where pixels come from two images, "none", or "both"."""
    levels, own = mixed.flatten(1), images.flatten(1)[:, 0]
    level, whole = levels[:, 0], levels.amax(1) == levels.amin(1)
    moved, integer = (level - own).abs() > 1e-5, (level - level.round()).abs() < 1e-4
    cut = ~whole | (moved & integer)
    mix = moved & ~cut
    return "both" if cut.any() and mix.any() else "cut" if cut.any() else "mix" if mix.any() else "none"


def _lambdas(mix_or_cut):
    """With a large α all λ are near one half; CutMix's boxes are then clipped, but none is small or covers the image."""
    mixer, images = mix_or_cut(12, ALPHA).train(), IMAGES.repeat(1, 1, 3, 3)
    torch.manual_seed(5)
    kept, names = {kind: [] for kind in (*LIMITS, "none")}, []
    for _ in range(24):
        mixed, soft = mixer(images.clone(), torch.arange(12))
        names.append(int((soft > 1e-6).sum(1).max()))
        own = soft.diagonal().double()
        kept[_kind(images, mixed)].append(own[own < 1 - 1e-6])
    shared = [kind for kind in LIMITS if kept[kind] and all(len(own) > 4 and own.std() < 1e-4 for own in kept[kind])]
    found = {kind: torch.cat([torch.full((1,), 0.5).double(), *kept[kind]]) for kind in LIMITS}
    spread = {kind: (λ.min().item(), λ.max().item()) for kind, λ in found.items()}
    return {"soft": shape(soft), "names": max(names), "shared": shared, "spread": spread}


def observe(mix_or_cut):
    """Three runs of six batches, the first two from one seed; λ; which of the two is drawn; eval mode."""
    mixer = mix_or_cut(CLASSES, 1.0)
    yield {"module": isinstance(mixer, nn.Module)}
    yield {"shapes": shape(mixer.train()(IMAGES.clone(), LABELS))}
    yield {"mixed": not all(close(mixer(IMAGES.clone(), LABELS)[0], IMAGES) for _ in range(6))}
    yield observe_seeds(lambda: [mixer(IMAGES.clone(), LABELS) for _ in range(3)])
    yield _lambdas(mix_or_cut)
    torch.manual_seed(0)
    yield {"drawn": [_kind(IMAGES, mixer(IMAGES.clone(), LABELS)[0]) for _ in range(BATCHES)]}
    got, soft = mixer.eval()(IMAGES.clone(), LABELS)
    yield {"eval": got, "eval shape": shape(soft), "eval labels": soft}
    try:
        yield {"given": mixer(IMAGES.clone(), GIVEN.clone())[1]}
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        yield {"given": str(error).split("\n")[0]}
    yield {"few": shape(mixer(IMAGES.clone(), 0 * LABELS)[1])}

    def draws(images, labels):
        torch.manual_seed(0)
        return [
            one for k in range(9) for one in copy.deepcopy(mixer).train(k > 0)(images, labels)
        ]  # both kinds come up

    yield {"device": on_meta(draws, IMAGES, LABELS)}


def _out(seen):
    """The first kind whose λ spread too far."""
    return next((k for k, (_, low, high) in LIMITS.items() if seen[k][0] < low or seen[k][1] > high), None)


def _drawn(claim, see, holds, hint):
    """A look at which of the two was drawn for each batch."""
    return Look(claim, lambda o: see(o["drawn"]), "drawn fairly", hint, lambda seen, _: holds(seen),
                lambda seen, _: {"n": BATCHES, "none": seen, "share": seen / BATCHES, "changes": seen})  # fmt: skip


LOOKS = [
    Look("something for each batch", "module", True, "not-a-module"),
    Look("", "shapes", [tuple(IMAGES.shape), (12, CLASSES)], "mixer-form"),
    Look("", "mixed", True, "never-mixed"),
    *SEEDS,
    Look("by your own mixup and cutmix: one λ for each image, from α", "soft", (12, 12), "mixer-form"),
    Look("", "names", 2, "mixed-by-both", at_most, lambda seen, _: {"n": seen}),
    Look("", "shared", [], "lambda-of-batch", fields=lambda seen, _: {"got": "", "where": LIMITS[seen[0]][0]}),
    Look("", "spread", None, "alpha-ignored", lambda seen, _: _out(seen) is None,
         lambda seen, _: {"alpha": ALPHA, "kind": LIMITS[_out(seen)][0], "low": seen[_out(seen)][0], "high": seen[_out(seen)][1]}),
    # a MixUp whose λ are all 0 or 1, or a CutMix of full boxes, would be taken for the other: rare at α = 1
    _drawn("in training, MixUp or CutMix for the whole batch, half of the time each", lambda d: d.count("both"),
           lambda n: n <= BATCHES // 4, "chosen-for-each-image"),
    _drawn("", lambda d: d.count("mix"), bool, "never-mixup"),
    _drawn("", lambda d: d.count("cut"), bool, "never-cutmix"),
    _drawn("", lambda d: d.count("none"), lambda n: n <= BATCHES // 10, "often-unmixed"),
    # 400 fair draws leave these ranges with few seeds in 100,000; randn() < 0.5 is 0.69
    _drawn("", lambda d: d.count("mix"), lambda n: 0.4 < n / BATCHES < 0.6, "unfair"),
    _drawn("", lambda d: sum((a == "mix") != (b == "mix") for a, b in zip(d, d[1:])), lambda n: 0.3 < n / BATCHES < 0.7, "takes-turns"),
    Look("in eval mode, images as they came and one-hot labels; soft ones stay as they are", "eval", IMAGES, "mixes-in-eval"),
    Look("", "eval shape", (12, CLASSES), "eval-labels-hard"),
    Look("", "eval labels", HOT, "mixes-in-eval"),
    Look("", "given", GIVEN, "eval-soft-labels", fields=lambda seen, _: {"error": seen if isinstance(seen, str) else "others came back"}),
    Look("", "few", (12, CLASSES), "classes-forgotten", fields=lambda *_: {"where": "a batch of class 0 alone, in eval mode"}),
    stays("on the images' device, nothing read back", "draw-waits"),
]  # fmt: skip


class _Mix(nn.Module):
    """Stands for the trainee's: halves each image with the next; notes how it is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, images, labels):
        self.calls.append(" and ".join(n for n, t in (("images", images), ("labels", labels)) if t.is_cpu))
        soft = torch.eye(CLASSES, device=images.device)[labels] if labels.dim() == 1 else labels
        return (images + images.roll(1, 0)) / 2, 0.6 * soft + 0.4 * soft.roll(1, 0)


def _made(device="cpu"):
    """A network of one layer, a mixer, an optimizer."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(240, CLASSES)).to(device)
    return model, _Mix(), torch.optim.SGD(model.parameters(), lr=0.1)


BATCH = torch.randn(6, 3, 8, 10, generator=torch.Generator().manual_seed(1)), torch.arange(6) % CLASSES


def _truth():
    """The loss, and the weights after one step and after two."""
    (model, mix, optimizer), found = _made(), []
    for _ in range(2):
        mixed, soft = mix(*BATCH)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mixed), soft)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), model[1].weight.detach().clone()]
    return found


LOSS, ONCE, _, TWICE = _truth()


def observe_step(train_step):
    """What one step does, the weights after a second one; what was still on the CPU when it was mixed."""
    (model, mix, optimizer), forwards = _made(), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    mix.eval()
    loss = train_step(model, mix, *BATCH, optimizer, torch.device("cpu"))
    yield {"form": "with a graph" if getattr(loss, "requires_grad", False) else shape(loss), "loss": loss}
    yield {"calls": len(mix.calls), "modes": [mix.training, model.training], "forwards": len(forwards)}
    yield {"weights": model[1].weight.detach().clone()}
    train_step(model, mix, *BATCH, optimizer, torch.device("cpu"))
    yield {"second": model[1].weight.detach()}
    model, mix, optimizer = _made("meta")
    yield {"device": on_meta(lambda: train_step(model, mix, *BATCH, optimizer, torch.device("meta")))}
    yield {"left": mix.calls[0]}


STEP = [
    Look("the step: moved, mixed once, trained on the soft labels", "form", (), "step-form"),
    Look("", lambda o: o["calls"] > 0, True, "step-not-mixed"),
    Look("", "modes", [False, True], "step-changes-mode"),
    Look("", "forwards", 1, "step-two-forwards", at_most, lambda seen, _: {"n": seen}),
    Look("", "calls", 1, "step-mixed-twice", fields=lambda seen, _: {"n": seen}),
    Value("", "weights", ONCE, "step-wrong-weights", within(1e-5)),
    Look("", "loss", LOSS, "step-wrong-loss", within(1e-4)),
    Look("", "second", TWICE, "step-old-gradients", within(1e-5), lambda *_: {"where": "the second step"}),
    stays("", "step-syncs"),
    Look("", "left", "", "step-mixes-on-cpu", fields=lambda seen, _: {"what": f"{seen} on the CPU"}),
]


def balise_7(mix_or_cut, train_step):
    yield from judged(LOOKS, observe, mix_or_cut)
    yield from judged(STEP, observe_step, train_step)

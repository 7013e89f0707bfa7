"""Balise 7: MixUp or CutMix drawn for each batch, inside a training step."""

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, shape, tried, within
from dlojz_tp.judging.checks.data_augmentation.devices import INFERENCE, SEEDS, in_inference, observe_seeds
from dlojz_tp.judging.probes.gpus import Seen, on_gpu, on_one_gpu, watched
from dlojz_tp.judging.probes.shared_looks import stays

IMAGES, LABELS, CLASSES = torch.arange(12.0).view(-1, 1, 1, 1).repeat(1, 1, 16, 20), torch.arange(12), 13
HOT = F.one_hot(LABELS, CLASSES).float()
GIVEN = 0.7 * HOT.flip(0) + 0.3 * HOT  # labels that are soft already
BATCHES, ALPHA = 300, 50.0  # all λ are near one half: CutMix's boxes are clipped, but none is empty or covers the image


def _draws(mixer):
    """Many batches: which of the two was drawn, and with which λ."""
    torch.manual_seed(0)
    mixed, soft = map(torch.stack, zip(*(mixer(IMAGES.clone(), LABELS.clone()) for _ in range(BATCHES))))
    mixed = mixed.flatten(2)  # (BATCHES, 12, pixels)
    pasted, moved = mixed.amax(2) - mixed.amin(2) > 1e-4, (mixed - IMAGES.flatten(1)).abs().amax(2) > 1e-4
    cut = pasted.any(1)
    own = soft.diagonal(dim1=1, dim2=2).double()
    own = own.where(own < 1 - 1e-6, torch.nan)  # but for images that a permutation leaves alone
    drawn = [(kind, own[which]) for kind, which in (("MixUp", ~cut), ("CutMix", cut)) if which.any()]
    return {
        "none": (~moved.any(1)).double().mean().item(),
        "names": int((soft > 1e-6).sum(2).max()),
        "one λ": [kind for kind, λ in drawn if λ.diff(dim=1).abs().nanmedian() < 1e-4],
        "spread": [[kind, *(round(one.item(), 3) for one in λ.nan_to_num(0.5).aminmax())] for kind, λ in drawn],
        "both": int((cut & (moved & ~pasted).any(1)).sum()),
        "share": (~cut).double().mean().item(),
        "changes": (cut[1:] != cut[:-1]).double().mean().item(),
    }


def observe(mix_or_cut):
    """What is drawn in training, from seeds too; eval mode; a GPU."""
    mixer = mix_or_cut(CLASSES, ALPHA)
    yield {"module": isinstance(mixer, nn.Module)}
    images, labels = IMAGES.clone(), LABELS.clone()
    several = [mixer.train()(images, labels) for _ in range(8)]  # both come up
    yield {"shapes": shape(several[-1]), "inference": in_inference(several)}
    yield {"images kept": images.equal(IMAGES), "labels kept": labels.equal(LABELS)}
    yield _draws(mixer)
    yield observe_seeds(lambda: [mixer(IMAGES.clone(), LABELS.clone()) for _ in range(3)])
    got, soft = mixer.eval()(IMAGES.clone(), LABELS.clone())
    yield {"eval": got, "eval shape": shape(soft), "eval labels": soft, "eval kind": form(soft).split()[0]}
    yield {"eval of half": form(mixer(IMAGES.bfloat16(), LABELS.clone())[1]).split()[0]}
    yield {"given": tried(lambda: mixer(IMAGES.clone(), GIVEN.clone())[1])}

    def draws(images, labels):  # both come up
        return [mixer.train(training)(images, labels) for training in [False] + [True] * 16]

    yield {"device": on_gpu(draws, IMAGES, LABELS)}


LOOKS = [
    Look("something for each batch", "module", True, "not-a-module"),
    Look("", "shapes", [tuple(IMAGES.shape), (12, CLASSES)], "mixer-form"),
    INFERENCE,
    Look("", "images kept", True, "images-changed"),
    Look("", "labels kept", True, "labels-changed"),
    Look("", "none", 0.0, lambda seen, _: "never-mixed" if seen == 1 else "often-unmixed"),
    *SEEDS,
    Look("by your own mixup and cutmix: one λ for each image, from α", "names", 2, "mixed-by-both", holds=at_most),
    Look("", "one λ", [], "lambda-of-batch"),
    Look("", lambda o: [one for one in o["spread"] if one[1] < 0.15 or one[2] > 0.97], [], "alpha-ignored"),
    Look("in training, MixUp or CutMix for the whole batch, half of the time each", "both", 0, "chosen-for-each-image"),
    # 300 fair draws leave 0.38 to 0.62 with few seeds in 100,000; randn() < 0.5 is 0.69
    Look("", "share", 0.5, lambda seen, _: {0: "never-mixup", 1: "never-cutmix"}.get(seen, "unfair"), holds=within(0.08)),
    Look("", "changes", 0.5, "takes-turns", holds=within(0.13)),
    Look("in eval mode, images unchanged, labels one-hot or unchanged", "eval", IMAGES, "mixes-in-eval"),
    Look("", "eval shape", [12, CLASSES], lambda seen, _: "classes-forgotten" if seen[1:] else "eval-labels-hard"),
    Look("", "eval kind", "float32", "eval-labels-dtype"),
    Look("", "eval labels", HOT, "mixes-in-eval"),
    Look("", "eval of half", "float32", "eval-labels-dtype"),
    Look("", "given", GIVEN, "eval-soft-labels"),
    stays("on the images' device, nothing read back", "draw-waits"),
]  # fmt: skip


class _Mix(nn.Module):
    """Stands for the trainee's: halves each image with the next; notes what it is given on the CPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, images, labels):
        self.calls.append(" and ".join(n for n, t in (("images", images), ("labels", labels)) if t.is_cpu))
        soft = torch.eye(4, device=images.device)[labels] if labels.dim() == 1 else labels
        return (images + images.roll(1, 0)) / 2, 0.6 * soft + 0.4 * soft.roll(1, 0)


def _right(model, mix, images, labels, optimizer, device):
    """The truth, with PyTorch's own loss."""
    images, soft = mix(images.to(device), labels.to(device))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), soft)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _made(device):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(240, 4)).to(device)
    given = torch.randn(6, 3, 8, 10), torch.arange(6) % 4, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, _Mix(), *given, torch.device(device)


def _step_on_gpu(gpu, device, train_step):
    """What is noted in a step on the GPU, and what was on the CPU when it was mixed."""
    model, mix, *given = _made(device)
    seen = watched(gpu, train_step, model, mix, *given)
    return seen, "".join(mix.calls[:1])


def _observe_numbers(train_step):
    """What one step does, the weights after a second one."""
    model, mix, *given = _made("cpu")
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    loss = train_step(model, mix.eval(), *given)
    yield {"form": "with a graph" if getattr(loss, "requires_grad", False) else shape(loss), "loss": loss}
    yield {"calls": len(mix.calls), "modes": [mix.training, model.training], "forwards": len(forwards)}
    yield {"weights": model[1].weight.detach().clone()}
    fresh = _made("cpu")[2:4]
    yield {
        "step images kept": given[0].equal(fresh[0]) and not given[0].requires_grad,
        "step labels kept": given[1].equal(fresh[1]),
    }
    train_step(model, mix, *given)
    yield {"second": model[1].weight.detach()}


def observe_step(train_step):
    """The numbers; what was still on the CPU when it was mixed, on a GPU."""
    yield from _observe_numbers(train_step)
    seen, left = on_one_gpu(_step_on_gpu, train_step) or (Seen(), "")
    yield {"device": seen.fault, "left": left}


DUE = {key: value for part in _observe_numbers(_right) for key, value in part.items()}
STEP = [
    Look("the step: moved, mixed once, trained on the soft labels", "form", (), "step-form"),
    Look("", "calls", 1, lambda seen, _: "step-mixed-twice" if seen else "step-not-mixed"),
    Look("", "modes", [False, True], "step-changes-mode"),
    Look("", "forwards", 1, "step-two-forwards", holds=at_most),
    Value("", "weights", DUE["weights"], "step-wrong-weights", holds=within(1e-5)),
    Look("", "loss", DUE["loss"], "step-wrong-loss", holds=within(1e-4)),
    Look("", "step images kept", True, "images-changed"),
    Look("", "step labels kept", True, "labels-changed"),
    Look("", "second", DUE["second"], "step-old-gradients", holds=within(1e-5)),
    stays("", "step-syncs"),
    Look("", "left", "", "step-mixes-on-cpu"),
]


def balise_7(mix_or_cut, train_step):
    yield from judged(LOOKS, observe, mix_or_cut)
    yield from judged(STEP, observe_step, train_step)

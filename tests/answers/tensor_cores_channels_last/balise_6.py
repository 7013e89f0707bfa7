"""Answers to balise 6 of 03_tensor_cores_channels_last."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 6)

LAST = torch.channels_last
# the network that the notebook gives: its own cell is run here
GIVEN = {"torch": torch, "nn": nn, "F": F}
exec(next(cell.text for cell in source.find(bank.work).cells if "class Given(" in cell.text), GIVEN)
Given = GIVEN["Given"]


class Mended(Given):
    """Statistics over dimension 1, without permuting; a repeated kernel; no view at the end."""

    def norm(self, x):
        mean = x.mean(1, keepdim=True)
        x = (x - mean) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + self.ln.eps)
        return x * self.ln.weight[:, None, None] + self.ln.bias[:, None, None]

    def blur(self, x):
        c = x.size(1)
        return F.conv2d(x, self.kernel.repeat(c, 1, 1, 1), stride=2, padding=1, groups=c)

    def forward(self, images):
        x = self.bn(self.stem(images)).relu() + self.position
        x = self.norm(self.body(x)).relu()
        x = self.deep(self.blur(x)).relu()
        return self.head(x.mean(dim=(2, 3)))


def prepare(model):
    return model.to(memory_format=LAST)


def to_device(images, labels, device):
    images = images.to(device=device, memory_format=LAST, non_blocking=True)
    return images, labels.to(device=device, non_blocking=True)


bank.several(None, Mended, prepare, to_device)


class Permuted(Given):
    """As the given one, without .contiguous(); the layer norm by function."""

    def norm(self, x):
        y = F.layer_norm(x.movedim(1, -1), (x.shape[1],), self.ln.weight, self.ln.bias)
        return y.movedim(-1, 1)

    def blur(self, x):
        return F.conv2d(x, self.kernel.expand(x.shape[1], -1, -1, -1), None, 2, 1, 1, x.shape[1])

    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).view(len(x), -1))


def prepare_by_hand(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=LAST)
    return model


def to_device_first(images, labels, device):
    """The format on the device, after the copy: one reordering too."""
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    return [images.contiguous(memory_format=LAST), labels]


bank.several(None, Permuted, prepare_by_hand, to_device_first)


class Averaged(Permuted):
    """The blur by two average pools: 1 2 1 is 1 1 twice. Asks for its format where it need not."""

    def blur(self, x):
        x = F.pad(x, (1, 1, 1, 1))
        x = F.avg_pool2d(x, 2, stride=1)
        return F.avg_pool2d(x, 2, stride=2)

    def norm(self, x):
        x = x.contiguous(memory_format=LAST)
        return self.ln(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous(memory_format=LAST)


def to_device_copy(images, labels, device):
    """With a buffer of its own."""
    out = torch.empty_like(images, device=device, memory_format=LAST)
    return out.copy_(images, non_blocking=True), labels.to(device, non_blocking=True)


bank.several(None, Averaged, prepare, to_device_copy)


class Shifted(Permuted):
    """The blur as a sum of shifted images."""

    def blur(self, x):
        h, w = x.shape[2:]
        x = F.pad(x, (1, 1, 1, 1))
        rows = x[:, :, 0:h:2] + 2 * x[:, :, 1 : h + 1 : 2] + x[:, :, 2 : h + 2 : 2]
        return (rows[..., 0:w:2] + 2 * rows[..., 1 : w + 1 : 2] + rows[..., 2 : w + 2 : 2]) / 16


bank.several(None, Shifted, lambda model: model.to(memory_format=LAST), to_device)


class WithLayer(Mended):
    """The blur as a frozen layer."""

    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.smooth = nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24, bias=False).requires_grad_(False)
        self.smooth.weight.copy_(self.kernel.expand(24, 1, 3, 3))

    def blur(self, x):
        return self.smooth(x)


bank.several(None, WithLayer, prepare, to_device)


class Separable(Mended):
    """The blur by rows, then by columns."""

    def blur(self, x):
        c, line = x.shape[1], self.kernel[:, :, 1:2] * 2
        x = F.conv2d(x, line.expand(c, 1, 1, 3), stride=(1, 2), padding=(0, 1), groups=c)
        return F.conv2d(x, line.mT.expand(c, 1, 3, 1), stride=(2, 1), padding=(1, 0), groups=c)


bank.several(None, Separable, prepare, to_device)


def wrong(slug, mended=Mended, prepare=prepare, to_device=to_device, variant=False):
    bank.several(slug, mended, prepare, to_device, variant=variant)


# At the edge: which parameters and which objects, images that need no reordering, what only a GPU shows, views with gaps.

# ------------------------------------------------- prepare


def prepare_nothing(model):
    return model


def prepare_convolutions(model):
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(memory_format=LAST)
    return model


def prepare_children(model):
    for p in model.parameters(recurse=False):
        p.data = p.data.contiguous(memory_format=LAST) if p.dim() == 4 else p.data
    for layer in model.children():
        for p in layer.parameters(recurse=False):
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=LAST)
    for b in model.buffers():
        b.data = b.data.contiguous(memory_format=LAST) if b.dim() == 4 else b.data
    return model


def prepare_in_place(model):
    model.to(memory_format=LAST)


def prepare_state(model):
    return model.to(memory_format=LAST).state_dict()


def prepare_fresh(model):
    return type(model)(7, 12).to(memory_format=LAST)


def prepare_permuted(model):
    for p in model.parameters():
        if p.dim() == 4:
            p.data = p.data.permute(0, 2, 3, 1)
    return model


def prepare_anew(model):
    for layer in model.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            setattr(
                layer, name, nn.Parameter(p.detach().contiguous(memory_format=LAST) if p.dim() == 4 else p.detach())
            )
    return model.to(memory_format=LAST)


bank.hint(
    "parameters-replaced",
    "The model has new parameters, so an optimizer made before would train the old ones. Convert them in place, as "
    "Module.to() does.",
    edge=True,
)
wrong("parameters-replaced", prepare=prepare_anew)

bank.hint("not-prepared", "No parameter is in channels_last after prepare(). Modules also have .to(memory_format=…).")
wrong("not-prepared", prepare=prepare_nothing, variant=True)

bank.hint(
    "parameter-left",
    "{name} has 4 dimensions and is still contiguous, so it meets channels_last tensors in each step. Convert the "
    "whole model, not only its convolutions and not only the outermost modules.",
    edge=True,
)
wrong("parameter-left", prepare=prepare_convolutions)
wrong("parameter-left", prepare=prepare_children, variant=True)
wrong("nothing-returned", prepare=prepare_in_place)

bank.hint("prepare-returns-model", "prepare() must return the model, an nn.Module.")
wrong("prepare-returns-model", prepare=prepare_state, variant=True)

bank.hint(
    "weights-replaced",
    "prepare() changes the values or the names of the parameters. Only their strides may change.",
)
wrong("weights-replaced", prepare=prepare_fresh)
wrong("weights-replaced", prepare=prepare_permuted, variant=True)


# ------------------------------------------------- to_device


def copied(slug, variant=False):
    return lambda to_device: wrong(slug, to_device=to_device, variant=variant) or to_device


bank.hint("images-contiguous", "The images come out contiguous, so the first convolution has to reorder them.")


@copied("images-contiguous")
def to_device_plain(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


@copied("images-contiguous", variant=True)
def to_device_forgets(images, labels, device):
    images = images.to(memory_format=LAST)
    images = images.to(device, non_blocking=True).contiguous()
    return images, labels.to(device, non_blocking=True)


bank.hint(
    "images-permuted",
    "The shape of the images has changed. channels_last only affects the strides: the shape stays N, C, H, W.",
)


@copied("images-permuted", variant=True)
def to_device_permute(images, labels, device):
    return images.to(device, non_blocking=True).permute(0, 2, 3, 1), labels.to(device, non_blocking=True)


bank.hint(
    "labels-have-no-channels",
    "Only tensors with 4 dimensions have channels. Leave the labels' format alone ({error}).",
)


@copied("labels-have-no-channels", variant=True)
def to_device_labels(images, labels, device):
    return tuple(t.to(device, memory_format=LAST, non_blocking=True) for t in (images, labels))


bank.hint("images-changed", "The values or the dtype of the images or labels have changed.")


@copied("images-changed")
def to_device_half(images, labels, device):
    images = images.to(device, torch.bfloat16, memory_format=LAST, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


@copied("images-changed", variant=True)
def to_device_reread(images, labels, device):
    n, c, h, w = images.shape
    images = images.reshape(n, h, w, c).permute(0, 3, 1, 2).to(device, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


bank.hint("left-on-cpu", "Images and labels are not both on `device`: {error}")


@copied("left-on-cpu")
def to_device_images_only(images, labels, device):
    return images.to(device, memory_format=LAST, non_blocking=True), labels


@copied("left-on-cpu")
def to_device_none(images, labels, device):
    return images.to(memory_format=LAST), labels


@copied("left-on-cpu", variant=True)
def to_device_names_one(images, labels, device):
    images = images.to("cuda", memory_format=LAST, non_blocking=True)
    return images, labels.to("cuda", non_blocking=True)


bank.hint(
    "copy-blocks",
    "Your copy makes the CPU wait until it is done. With non_blocking=True the CPU can go on.",
    edge=True,
)


@copied("copy-blocks")
def to_device_blocks(images, labels, device):
    return images.to(device, memory_format=LAST), labels.to(device)


bank.hint(
    "images-converted-twice",
    "The images are reordered {n} times on the way. Once is enough, and none is needed if they come in channels_last.",
    edge=True,
)


@copied("images-converted-twice")
def to_device_twice(images, labels, device):
    images = images.contiguous().to(device, non_blocking=True)
    return images.to(memory_format=LAST), labels.to(device, non_blocking=True)


bank.hint("pair-of-tensors", "to_device() must return (images, labels).")


@copied("pair-of-tensors", variant=True)
def to_device_images(images, labels, device):
    return images.to(device, memory_format=LAST, non_blocking=True)


@copied("nothing-returned")
def to_device_nothing(images, labels, device):
    images.to(device, memory_format=LAST, non_blocking=True)


# ------------------------------------------------- the network


def network(slug, variant=False):
    return lambda mended: wrong(slug, mended=mended, variant=variant) or mended


bank.hint(
    "other-parameters",
    "Mended must have the parameters of the given network, with the same names, and no others to train: the network's "
    "weights will be loaded into it.",
)


@network("other-parameters")
class TrainableBlur(WithLayer):
    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.smooth.requires_grad_()


@network("other-parameters", variant=True)
class Renamed(Mended):
    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.first = self.stem
        del self.stem


bank.hint(
    "norm-converts",
    "norm() still reorders its input or its output. Look at the strides of x.permute(0, 2, 3, 1) when x is in "
    "channels_last: there is nothing left to copy.",
)


@network("norm-converts")
class NotMended(Given):
    """The network as it was given."""


@network("norm-converts")
class NormContiguous(Mended):
    def norm(self, x):
        return self.ln(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


@network("norm-converts", variant=True)
class NormByPixels(Mended):
    def norm(self, x):
        b, c, h, w = x.shape
        y = self.ln(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return y.reshape(b, c, h * w).contiguous().view(b, c, h, w)


bank.hint("norm-differs", "norm() gives other values. It must normalise the channels of each pixel.")


@network("norm-differs")
class NormByImage(Mended):
    def norm(self, x):
        return F.group_norm(x, 1, self.ln.weight, self.ln.bias)


@network("norm-differs", variant=True)
class NormWithoutWeights(Mended):
    def norm(self, x):
        return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)


bank.hint(
    "blur-converts",
    "blur() still reorders. Merging batch and channels needs the contiguous order; a convolution with groups smooths "
    "each channel separately without merging.",
)


@network("blur-converts")
class BlurReshapes(Mended):
    def blur(self, x):
        b, c, h, w = x.shape
        x = F.conv2d(x.reshape(b * c, 1, h, w), self.kernel, stride=2, padding=1)
        return x.reshape(b, c, *x.shape[2:])


@network("blur-converts", variant=True)
class BlurConvertsBack(BlurReshapes):
    def blur(self, x):
        return super().blur(x).contiguous(memory_format=LAST)


bank.hint(
    "view-fails",
    "A .view() asks for an order that is not in memory. With channels_last, dimensions N and C cannot be merged, and "
    "neither can C and H. ({error})",
)


@network("view-fails")
class BlurViews(Mended):
    def blur(self, x):
        b, c, h, w = x.shape
        x = F.conv2d(x.view(b * c, 1, h, w), self.kernel, stride=2, padding=1)
        return x.view(b, c, *x.shape[2:])


@network("view-fails", variant=True)
class HeadViews(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.view(len(x) * x.shape[1], -1).mean(1).view(len(x), -1))


bank.hint("blur-differs", "blur() gives other values. It must smooth each channel separately, with the same kernel.")


@network("blur-differs")
class BlurSums(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(1, c, 3, 3), stride=2, padding=1).expand(-1, c, -1, -1)


@network("blur-differs", variant=True)
class BlurNoStride(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(c, 1, 3, 3), padding=1, groups=c)


bank.hint(
    "blur-computes-more",
    "blur() does {factor:.0f} times as many operations as it needs. Either it mixes all channels with a kernel that "
    "is almost all zeros (use groups), or it computes pixels and throws them away (use the stride).",
)


@network("blur-computes-more")
class BlurDense(Mended):
    def blur(self, x):
        c = x.shape[1]
        weight = torch.eye(c, dtype=x.dtype, device=x.device)[:, :, None, None] * self.kernel
        return F.conv2d(x, weight, stride=2, padding=1)


@network("blur-computes-more", variant=True)
class BlurSlices(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(c, 1, 3, 3), padding=1, groups=c)[:, :, ::2, ::2]


bank.hint(
    "view-with-gaps",
    "{name}() returns strides of neither format (a view with gaps, or rows and columns swapped), so the next "
    "convolution has to copy it first.",
    edge=True,
)


@network("view-with-gaps")
class NormTransposes(Mended):
    def norm(self, x):
        return self.ln(x.transpose(1, 3)).transpose(1, 3)


@network("view-with-gaps", variant=True)
class BlurPoolsAndSlices(Mended):
    def blur(self, x):
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2, stride=1)
        return F.avg_pool2d(x, 2, stride=1)[..., ::2, ::2]


bank.hint(
    "loops",
    "The number of operators grows with the {what}, so there is a Python loop. Let one operator do all the work.",
)


@network("loops")
class BlurLoopsChannels(Mended):
    def blur(self, x):
        parts = [F.conv2d(part, self.kernel, stride=2, padding=1) for part in x.split(1, dim=1)]
        return torch.cat(parts, 1).to(memory_format=LAST) if len(parts) == 1 else _last(parts)


def _last(parts):
    """Stack along the last place in memory."""
    return torch.stack([part[:, 0] for part in parts], -1).permute(0, 3, 1, 2)


@network("loops", variant=True)
class NormLoops(Mended):
    def norm(self, x):
        images = [self.ln(image.permute(1, 2, 0)) for image in x]
        return torch.stack(images).permute(0, 3, 1, 2)


bank.hint(
    "forward-converts",
    "The forward pass still reorders: {error}. A .contiguous() without memory_format asks for the old format, and so "
    "do some reshapes.",
)


@network("forward-converts")
class KeepsContiguous(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x.contiguous())))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@network("forward-converts")
class ConvertsAgain(Mended):
    def forward(self, images):
        return super().forward(images.contiguous().to(memory_format=LAST))


@network("forward-converts", variant=True)
class FlattensEarly(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.reshape(len(x) * x.shape[1], -1).mean(1).view(len(x), -1))


bank.hint("forward-differs", "The logits differ from those of the given network.")


@network("forward-differs")
class NoPosition(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images)))
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.mean((2, 3)))


@network("forward-differs", variant=True)
class PoolsByMaximum(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.amax((2, 3)))


@network("nothing-returned")
class ForwardNothing(Mended):
    def forward(self, images):
        super().forward(images)


bank.hint("gradients-differ", "The gradient of {name} differs from that of the given network.")


@network("gradients-differ")
class NoGradientInNorm(Mended):
    def norm(self, x):
        return super().norm(x).detach()


@network("gradients-differ", variant=True)
class BlurWithoutGradient(Mended):
    def blur(self, x):
        with torch.no_grad():
            return super().blur(x)


class _Reorders(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, gradient):
        return gradient.to(memory_format=LAST).contiguous().to(memory_format=LAST)


bank.hint("backward-converts", "The backward pass copies into another order: {error}.")


@network("backward-converts", variant=True)
class BackwardConverts(Mended):
    def blur(self, x):
        return super().blur(_Reorders.apply(x))


def prepare_copy(model):
    """The given model keeps its format: its copy is converted."""
    return copy.deepcopy(model).to(memory_format=LAST)


bank.hint(
    "model-copied",
    "prepare() returns another model and leaves the given one as it was, so an optimizer made before would train the "
    "old one. Module.to() converts in place.",
    edge=True,
)
wrong("model-copied", prepare=prepare_copy)


bank.hint(
    "converted-before-copy",
    "You reorder the images on the CPU, into new memory that is not pinned, so the copy to a GPU waits, and the CPU "
    "has done the work. Pass device and memory_format to .to() together, or reorder after the copy.",
    edge=True,
)


@copied("converted-before-copy")
def to_device_cpu_first(images, labels, device):
    images = images.contiguous(memory_format=LAST).to(device, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


def prepare_and_learn(model):
    return model.to(memory_format=LAST).requires_grad_(True)


bank.hint(
    "frozen-otherwise",
    "After prepare(), other parameters require a gradient than before: either frozen ones learn, or trainable ones "
    "are frozen.",
    edge=True,
)
bank.several("frozen-otherwise", Mended, prepare_and_learn, to_device)


# ------------------------------------------------- the same mistakes at the edge, made otherwise


def prepare_and_freeze(model):
    return model.to(memory_format=LAST).requires_grad_(False)


def prepare_assigned(model):
    state = {name: one.to(memory_format=LAST) if one.dim() == 4 else one for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


wrong("frozen-otherwise", prepare=prepare_and_freeze, variant=True)
wrong("parameters-replaced", prepare=prepare_assigned, variant=True)
wrong("model-copied", prepare=lambda model: copy.copy(model.to(memory_format=LAST)), variant=True)


@copied("images-converted-twice", variant=True)
def to_device_tidied(images, labels, device):
    images = images.contiguous().to(device, memory_format=LAST, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


@copied("converted-before-copy", variant=True)
def to_device_two_steps(images, labels, device):
    return images.to(memory_format=LAST).to(device, non_blocking=True), labels.to(device, non_blocking=True)


@copied("copy-blocks", variant=True)
def to_device_labels_block(images, labels, device):
    return images.to(device, non_blocking=True).to(memory_format=LAST), labels.to(device)

"""Answers to balise 6 of 03_tensor_cores_channels_last."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last")

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


bank.several(6, None, Mended, prepare, to_device)


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


bank.several(6, None, Permuted, prepare_by_hand, to_device_first)


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


bank.several(6, None, Averaged, prepare, to_device_copy)


class Shifted(Permuted):
    """The blur as a sum of shifted images."""

    def blur(self, x):
        h, w = x.shape[2:]
        x = F.pad(x, (1, 1, 1, 1))
        rows = x[:, :, 0:h:2] + 2 * x[:, :, 1 : h + 1 : 2] + x[:, :, 2 : h + 2 : 2]
        return (rows[..., 0:w:2] + 2 * rows[..., 1 : w + 1 : 2] + rows[..., 2 : w + 2 : 2]) / 16


bank.several(6, None, Shifted, lambda model: model.to(memory_format=LAST), to_device)


class WithLayer(Mended):
    """The blur as a frozen layer."""

    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.smooth = nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24, bias=False).requires_grad_(False)
        self.smooth.weight.copy_(self.kernel.expand(24, 1, 3, 3))

    def blur(self, x):
        return self.smooth(x)


bank.several(6, None, WithLayer, prepare, to_device)


class Separable(Mended):
    """The blur by rows, then by columns."""

    def blur(self, x):
        c, line = x.shape[1], self.kernel[:, :, 1:2] * 2
        x = F.conv2d(x, line.expand(c, 1, 1, 3), stride=(1, 2), padding=(0, 1), groups=c)
        return F.conv2d(x, line.mT.expand(c, 1, 3, 1), stride=(2, 1), padding=(1, 0), groups=c)


bank.several(6, None, Separable, prepare, to_device)


def wrong(slug, mended=Mended, prepare=prepare, to_device=to_device):
    bank.several(6, slug, mended, prepare, to_device)


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


wrong("parameters-replaced", prepare=prepare_anew)
wrong("not-prepared", prepare=prepare_nothing)
wrong("parameter-left", prepare=prepare_convolutions)
wrong("parameter-left", prepare=prepare_children)
wrong("nothing-returned", prepare=prepare_in_place)
wrong("prepare-returns-model", prepare=prepare_state)
wrong("weights-replaced", prepare=prepare_fresh)
wrong("weights-replaced", prepare=prepare_permuted)


# ------------------------------------------------- to_device


def copied(slug):
    return lambda to_device: wrong(slug, to_device=to_device) or to_device


@copied("images-contiguous")
def to_device_plain(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


@copied("images-contiguous")
def to_device_forgets(images, labels, device):
    images = images.to(memory_format=LAST)
    images = images.to(device, non_blocking=True).contiguous()
    return images, labels.to(device, non_blocking=True)


@copied("images-permuted")
def to_device_permute(images, labels, device):
    return images.to(device, non_blocking=True).permute(0, 2, 3, 1), labels.to(device, non_blocking=True)


@copied("labels-have-no-channels")
def to_device_labels(images, labels, device):
    return tuple(t.to(device, memory_format=LAST, non_blocking=True) for t in (images, labels))


@copied("images-changed")
def to_device_half(images, labels, device):
    images = images.to(device, torch.bfloat16, memory_format=LAST, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


@copied("images-changed")
def to_device_reread(images, labels, device):
    n, c, h, w = images.shape
    images = images.reshape(n, h, w, c).permute(0, 3, 1, 2).to(device, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


@copied("left-on-cpu")
def to_device_images_only(images, labels, device):
    return images.to(device, memory_format=LAST, non_blocking=True), labels


@copied("left-on-cpu")
def to_device_none(images, labels, device):
    return images.to(memory_format=LAST), labels


@copied("left-on-cpu")
def to_device_names_one(images, labels, device):
    images = images.to("cuda", memory_format=LAST, non_blocking=True)
    return images, labels.to("cuda", non_blocking=True)


@copied("copy-blocks")
def to_device_blocks(images, labels, device):
    return images.to(device, memory_format=LAST), labels.to(device)


@copied("images-converted-twice")
def to_device_twice(images, labels, device):
    images = images.contiguous().to(device, non_blocking=True)
    return images.to(memory_format=LAST), labels.to(device, non_blocking=True)


@copied("pair-of-tensors")
def to_device_images(images, labels, device):
    return images.to(device, memory_format=LAST, non_blocking=True)


@copied("nothing-returned")
def to_device_nothing(images, labels, device):
    images.to(device, memory_format=LAST, non_blocking=True)


# ------------------------------------------------- the network


def network(slug):
    return lambda mended: wrong(slug, mended=mended) or mended


@network("other-parameters")
class TrainableBlur(WithLayer):
    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.smooth.requires_grad_()


@network("other-parameters")
class Renamed(Mended):
    def __init__(self, classes=10, size=16):
        super().__init__(classes, size)
        self.first = self.stem
        del self.stem


@network("norm-converts")
class NotMended(Given):
    """The network as it was given."""


@network("norm-converts")
class NormContiguous(Mended):
    def norm(self, x):
        return self.ln(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


@network("norm-converts")
class NormByPixels(Mended):
    def norm(self, x):
        b, c, h, w = x.shape
        y = self.ln(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return y.reshape(b, c, h * w).contiguous().view(b, c, h, w)


@network("norm-differs")
class NormByImage(Mended):
    def norm(self, x):
        return F.group_norm(x, 1, self.ln.weight, self.ln.bias)


@network("norm-differs")
class NormWithoutWeights(Mended):
    def norm(self, x):
        return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)


@network("blur-converts")
class BlurReshapes(Mended):
    def blur(self, x):
        b, c, h, w = x.shape
        x = F.conv2d(x.reshape(b * c, 1, h, w), self.kernel, stride=2, padding=1)
        return x.reshape(b, c, *x.shape[2:])


@network("blur-converts")
class BlurConvertsBack(BlurReshapes):
    def blur(self, x):
        return super().blur(x).contiguous(memory_format=LAST)


@network("view-fails")
class BlurViews(Mended):
    def blur(self, x):
        b, c, h, w = x.shape
        x = F.conv2d(x.view(b * c, 1, h, w), self.kernel, stride=2, padding=1)
        return x.view(b, c, *x.shape[2:])


@network("view-fails")
class HeadViews(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.view(len(x) * x.shape[1], -1).mean(1).view(len(x), -1))


@network("blur-differs")
class BlurSums(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(1, c, 3, 3), stride=2, padding=1).expand(-1, c, -1, -1)


@network("blur-differs")
class BlurNoStride(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(c, 1, 3, 3), padding=1, groups=c)


@network("blur-computes-more")
class BlurDense(Mended):
    def blur(self, x):
        c = x.shape[1]
        weight = torch.eye(c, dtype=x.dtype, device=x.device)[:, :, None, None] * self.kernel
        return F.conv2d(x, weight, stride=2, padding=1)


@network("blur-computes-more")
class BlurSlices(Mended):
    def blur(self, x):
        c = x.shape[1]
        return F.conv2d(x, self.kernel.expand(c, 1, 3, 3), padding=1, groups=c)[:, :, ::2, ::2]


@network("view-with-gaps")
class NormTransposes(Mended):
    def norm(self, x):
        return self.ln(x.transpose(1, 3)).transpose(1, 3)


@network("view-with-gaps")
class BlurPoolsAndSlices(Mended):
    def blur(self, x):
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2, stride=1)
        return F.avg_pool2d(x, 2, stride=1)[..., ::2, ::2]


@network("loops")
class BlurLoopsChannels(Mended):
    def blur(self, x):
        parts = [F.conv2d(part, self.kernel, stride=2, padding=1) for part in x.split(1, dim=1)]
        return torch.cat(parts, 1).to(memory_format=LAST) if len(parts) == 1 else _last(parts)


def _last(parts):
    """Stack along the last place in memory."""
    return torch.stack([part[:, 0] for part in parts], -1).permute(0, 3, 1, 2)


@network("loops")
class NormLoops(Mended):
    def norm(self, x):
        images = [self.ln(image.permute(1, 2, 0)) for image in x]
        return torch.stack(images).permute(0, 3, 1, 2)


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


@network("forward-converts")
class FlattensEarly(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images))) + self.position
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.reshape(len(x) * x.shape[1], -1).mean(1).view(len(x), -1))


@network("forward-differs")
class NoPosition(Mended):
    def forward(self, images):
        x = F.relu(self.bn(self.stem(images)))
        x = F.relu(self.norm(self.body(x)))
        x = F.relu(self.deep(self.blur(x)))
        return self.head(x.mean((2, 3)))


@network("forward-differs")
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


@network("gradients-differ")
class NoGradientInNorm(Mended):
    def norm(self, x):
        return super().norm(x).detach()


@network("gradients-differ")
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


@network("backward-converts")
class BackwardConverts(Mended):
    def blur(self, x):
        return super().blur(_Reorders.apply(x))


def prepare_copy(model):
    """The given model keeps its format: its copy is converted."""
    return copy.deepcopy(model).to(memory_format=LAST)


wrong("model-copied", prepare=prepare_copy)


@copied("converted-before-copy")
def to_device_cpu_first(images, labels, device):
    images = images.contiguous(memory_format=LAST).to(device, non_blocking=True)
    return images, labels.to(device, non_blocking=True)


def prepare_and_learn(model):
    return model.to(memory_format=LAST).requires_grad_(True)


bank.several(6, "frozen-otherwise", Mended, prepare_and_learn, to_device)

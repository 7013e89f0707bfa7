"""The training run that the practical works on one device make faster, one technique after the other.

Always the same network, images and number of steps, so that the gain of a technique can be set beside that of another.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from dlojz_tp import data, measure
from dlojz_tp.scale import brief, scale
from dlojz_tp.training import precision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels, for pixels in [0, 1]
_scalers: WeakKeyDictionary[torch.optim.Optimizer, torch.amp.GradScaler] = WeakKeyDictionary()


@dataclass(frozen=True)
class Setting:
    """Sizes of the run: network, pixels of a side, images in a batch, loader processes, steps timed and not timed."""

    architecture: str
    image_size: int
    batch_size: int
    workers: int
    steps: int
    warmup: int


def setting() -> Setting:
    """The sizes of this machine's scale: those of a real training with a GPU, a few seconds on two cores without."""
    if scale() == "full":
        workers, warmup = (2, 1) if brief() else (8, 10)
        return Setting("resnet50", 224, 128, workers, steps=40, warmup=warmup)
    return Setting("resnet18", 64, 32, workers=2, steps=12, warmup=1 if brief() else 3)


def device() -> torch.device:
    """Where the run takes place: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(classes: int) -> torch.nn.Module:
    """The network, on the device, with the same random weights at each call."""
    torch.manual_seed(0)
    return getattr(models, setting().architecture)(num_classes=classes).to(device())


def fast_model(classes: int) -> torch.nn.Module:
    """The same network in channels last, for `fast_step`."""
    return make_model(classes).to(memory_format=torch.channels_last)


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def make_transform(size: int) -> Callable:
    """Return a function: PIL image -> float32 tensor (3, size, size), a random window, normalised."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def decoded(path: str):
    """Decode an image, as ImageFolder does; a file that is damaged is named."""
    try:
        return default_loader(path)
    except OSError as error:
        todo = "`python -m dlojz_tp doctor` says what to do"
        raise data.DataDamaged(f"{path} cannot be decoded ({error}): {todo}") from error


def make_loader(**options) -> DataLoader:
    """The loader over the training images. options: those of DataLoader that shall differ from the usual ones here."""
    size = setting()
    usual = {
        "batch_size": size.batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": size.workers,
        "pin_memory": device().type == "cuda",
        "generator": torch.Generator().manual_seed(0),
    }
    photos = ImageFolder(data.image_set().root / "train", make_transform(size.image_size), loader=decoded)
    return DataLoader(photos, **usual | options)


def plain_step(model, images, labels, optimizer, device):
    """A step in float32 that never waits: images (b, 3, h, w), labels (b,). Returns loss () and logits, detached."""
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


def fast_step(model, images, labels, optimizer, device):
    """`mixed_step` in channels last: images (b, 3, h, w) are converted on the device."""
    images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
    return mixed_step(model, images, labels, optimizer, device)


def mixed_step(model, images, labels, optimizer, device):
    """A step in this machine's fast precision. images (b, 3, h, w), labels (b,), in the memory format they come in.

    Returns loss () and logits (b, classes), detached. See `precision.fast_dtype`: bfloat16 where it pays; float16, with
    loss scaling, on GPUs whose Tensor Cores know no bfloat16; float32 on processors without instructions for it.
    """
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    optimizer.zero_grad()
    dtype = precision.fast_dtype(device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler = _scaler(optimizer, device.type, dtype)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


def _scaler(optimizer, device_type, dtype) -> torch.amp.GradScaler:
    """The optimizer's own loss scaler, kept from step to step; one that does nothing where the range is float32's."""
    if optimizer not in _scalers:
        _scalers[optimizer] = torch.amp.GradScaler(device_type, enabled=dtype == torch.float16)
    return _scalers[optimizer]


def run(
    name: str,
    step: Callable = plain_step,
    *,
    model: torch.nn.Module | None = None,
    loader: Iterable | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> measure.Record:
    """Train for the setting's steps, loading included, and time loading and step.

    Args:
        name: what runs, as tables and figures show it.
        step: called as step(model, images, labels, optimizer, device); returns the loss first (tensor or number).
        model: on the device already; `None` is a new one.
        loader: of batches (images, labels), gone through again when it ends; `None` is `make_loader()`.
        optimizer: over the model's parameters; `None` is a new one.

    Returns:
        A run record with phases "loading" and "step".

    Raises:
        ValueError: for a loader without batches.
    """
    size, where = setting(), device()
    loader = make_loader() if loader is None else loader
    model = make_model(len(data.image_set().classes)) if model is None else model
    optimizer = make_optimizer(model.parameters()) if optimizer is None else optimizer
    model.train()
    chrono, losses = measure.Chronometer(where, warmup=size.warmup), []
    for images, labels in chrono.steps(_again_and_again(loader), n=size.warmup + size.steps):
        with chrono.step():
            losses.append(torch.as_tensor(step(model, images, labels, optimizer, where)[0]))
    settings = {"batch_size": size.batch_size, "image_size": size.image_size, "model": size.architecture}
    return chrono.record(name, losses=torch.stack(losses).float(), **settings)


def _again_and_again(loader):
    while True:
        batches = 0
        for batch in loader:
            batches += 1
            yield batch
        if not batches:
            raise ValueError("the loader gave no batch: is drop_last on, with fewer images than a batch?")

"""A small network pretrained on ten of the course's photographs, and the light it was trained under."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import made
from .places import DataDamaged, data_root

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

WHAT = "the pretrained network"
FORMAT = 1
MADE_BY = "make_pretrained"
FILES = ["vision.safetensors"]
DEFAULTS = {"epochs": 24, "seed": 0}  # of the command's options
WIDTH = 16  # of the network's first layers
NEW = ("cat", "coins", "grass", "gravel", "motorcycle")  # photographs that the network has not seen
GAIN, SHIFT = 0.3, 25.0  # deviations: of the log of a colour's contrast, of its mean in grey levels


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network and what it was trained on.

    model, in eval mode: `dlojz_tp.models.small_resnet` for images as `under_lights` gives them; classes, the names of
    its outputs; accuracy, on 100 validation squares a class; version, the start of the checksum of its file.
    """

    model: "nn.Sequential"
    classes: tuple[str, ...]
    accuracy: float
    version: str

    def __repr__(self) -> str:
        return f"Pretrained({len(self.classes)} classes, accuracy {self.accuracy:.3f}, version {self.version})"


def under_lights(images: "Tensor", generator: "Generator") -> "Tensor":
    """Show each image under its own light: (N, 3, h, w) uint8 to float, about within -2 and 2.

    Contrast and mean of each colour are drawn anew for each image, so that the colour alone tells little of the class.
    Args: generator, a `torch.Generator` on the images' device: the same state gives the same lights.
    """
    import torch

    shape = (len(images), 3, 1, 1)
    gain = torch.exp(GAIN * torch.randn(shape, generator=generator, device=images.device))
    shift = SHIFT * torch.randn(shape, generator=generator, device=images.device)
    pixels = images.float()
    lit = (pixels - pixels.mean((2, 3), keepdim=True)) * gain + 128 + shift
    return (lit.clamp_(0, 255) - 128) / 58


def pretrained() -> Pretrained:
    """Load the pretrained network: a new one at each call, so that training it harms no other.

    Every byte is checked against the manifest.
    Raises DataMissing where the set is not made, DataDamaged where it is not whole, ModuleNotFoundError without
    safetensors.
    Source: made by data_scripts/make_pretrained.py.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from dlojz_tp.models import small_resnet

    root, manifest = pretrained_manifest()
    classes = tuple(manifest["classes"])
    model = small_resnet(WIDTH, len(classes))
    try:
        model.load_state_dict(load_file(root / FILES[0]))
    except (OSError, SafetensorError, RuntimeError) as error:
        why = f"{FILES[0]} does not hold the network's weights ({type(error).__name__})"
        raise _damaged(root, why, manifest) from error
    return Pretrained(model.eval(), classes, manifest["accuracy"], manifest["sha256"][:12])


def pretrained_manifest() -> tuple[Path, dict]:
    """Folder and manifest of the set; checks every byte. Raises DataMissing and DataDamaged as `pretrained` does."""
    root = data_root() / "pretrained"
    return root, made.checked(WHAT, root, MADE_BY, read, FILES, _options)


def read(folder: Path) -> dict:
    """Read the manifest of the set in `folder`. Raises FileNotFoundError or ValueError, as `made.read` does.

    Its keys: format, made_by, classes; epochs and seed, as asked; accuracy, as measured; versions; bytes (of all
    files), sizes and crc32 (of each), sha256, manifest_sha256.
    """
    return made.read(folder, MADE_BY, FORMAT, _whole)


def _whole(manifest: dict) -> bool:
    classes, accuracy = manifest["classes"], manifest["accuracy"]
    named = isinstance(classes, list) and bool(classes) and all(isinstance(name, str) for name in classes)
    return named and type(accuracy) is float and 0 <= accuracy <= 1


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, MADE_BY, _options(manifest))


def _options(manifest: dict) -> list[str]:
    return made.options(manifest, DEFAULTS)


def command_of(manifest: dict) -> str:
    """The command that makes a set with this manifest."""
    return made.command_line(MADE_BY, _options(manifest))

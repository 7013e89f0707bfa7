"""What a graphics card promises by its data sheet, and what its maker published for ResNet-50: sourced constants."""

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

GENERATIONS = ("Volta", "Ampere", "Hopper", "Blackwell", "Blackwell Ultra", "CDNA3")
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """One card. Peaks in operations a second, dense; bandwidth in bytes a second; memory in bytes.

    generation: of `GENERATIONS`; cards of one generation reach the same share of their peaks. float32: without Tensor
    Cores. tf32, bfloat16, float8, float4: on Tensor Cores; None where the card has none for it. memory: what the driver
    shows. link, network: bytes a second in one direction that a card sends inside a node, and of the node's network
    cards its share. node: cards whose links reach each other. mesh: each pair of cards has wires of its own, so that n
    cards have n − 1 of 7 parts of `link`. resnet50_float32, resnet50_mixed: images of 224 pixels trained a second on
    one card, as published (float32 stands for TF32 where the card has it; mixed precision is float16 in channels last);
    None where no figure is.
    """

    name: str
    generation: str
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None
    bandwidth: float
    memory: float
    link: float
    network: float
    float8: float | None = None
    float4: float | None = None
    node: int = 8
    mesh: bool = False
    resnet50_float32: float | None = None
    resnet50_mixed: float | None = None
    source: str = ""

    def __post_init__(self):
        if self.generation not in GENERATIONS:
            raise ValueError(f"generation is one of {', '.join(GENERATIONS)}, not {self.generation!r}")

    def peak(self, precision: str = "bfloat16") -> float:
        """Operations a second in "bfloat16" (float16 where the card has none), "float8" or "float4".

        Raises ValueError where the card has no such Tensor Cores.
        """
        peak = (self.bfloat16 or self.float16) if precision == "bfloat16" else getattr(self, precision)
        if peak is None:
            raise ValueError(f"{self.name} has no Tensor Cores for {precision}")
        return peak


# Where no source says otherwise: peaks and bandwidths are of NVIDIA's data sheet of the card, half of what it gives for
# sparse matrices; `link` is half of what it gives for NVLink in both directions; `network` is NVIDIA's DGX of the card:
# 4 cards of 100 Gb/s for 8 V100, 8 of 200 for A100, 8 of 400 since, 8 of 800 for GB300. `memory` is what nvidia-smi and
# rocm-smi print on such cards: somewhat more than a name of 80 GB says on an A100 and an H100, less on a B200.
# ResNet-50: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, "Training performance results"
# (container pytorch-21.03): DGX-1 16 GB and DGX A100 80 GB, one GPU. Nothing of the kind is published there for H100.
_V100 = Card(
    "V100", "Volta", 15.7e12, None, 125e12, None, 900e9, 16160 * MIB, 150e9, 6.25e9, resnet50_float32=367,
    resnet50_mixed=1200, source="NVIDIA V100 data sheet (SXM2, 16 GB), DGX-1",
)  # fmt: skip
_A100 = Card(
    "A100", "Ampere", 19.5e12, 156e12, 312e12, 312e12, 2039e9, 81920 * MIB, 300e9, 25e9, resnet50_float32=938,
    resnet50_mixed=2470, source="NVIDIA A100 data sheet (SXM4), DGX A100",
)  # fmt: skip
_H100 = Card(
    "H100", "Hopper", 67e12, 494.7e12, 989.4e12, 989.4e12, 3350e9, 81559 * MIB, 450e9, 50e9, 1978.9e12,
    source="NVIDIA H100 data sheet (SXM5), DGX H100",
)  # fmt: skip
CARDS = {
    card.name: card
    for card in (
        _V100,
        replace(
            _V100, name="V100-32GB", memory=32510 * MIB, resnet50_float32=None, resnet50_mixed=None,
            source="NVIDIA V100 data sheet (SXM2, 32 GB), DGX-1",
        ),
        _A100,
        replace(
            _A100, name="A100-40GB", bandwidth=1555e9, memory=40536 * MIB, resnet50_float32=None, resnet50_mixed=None,
            source="NVIDIA A100 data sheet (SXM4, 40 GB), DGX A100",
        ),
        _H100,
        replace(_H100, name="H800", link=200e9, source="as H100, with NVLink of 400 GB/s (DeepSeek-V3, section 3.1)"),
        replace(
            _H100, name="H200", bandwidth=4800e9, memory=143771 * MIB,
            source="NVIDIA H200 data sheet (SXM), DGX H200",
        ),
        Card(
            "B200", "Blackwell", 75e12, 1.125e15, 2.25e15, 2.25e15, 7700e9, 183359 * MIB, 900e9, 50e9, 4.5e15, 9e15,
            source="NVIDIA Blackwell data sheet (HGX B200), DGX B200",
        ),
        Card(
            "GB200", "Blackwell", 80e12, 1.25e15, 2.5e15, 2.5e15, 8000e9, 189471 * MIB, 900e9, 50e9, 5e15, 10e15, 72,
            source="NVIDIA GB200 NVL72 data sheet",
        ),
        Card(
            "GB300", "Blackwell Ultra", 80e12, 1.25e15, 2.5e15, 2.5e15, 8000e9, 284208 * MIB, 900e9, 100e9, 5e15, 15e15,
            72, source="NVIDIA GB300 NVL72 data sheet",
        ),
        Card(
            "MI300X", "CDNA3", 163.4e12, 653.7e12, 1307.4e12, 1307.4e12, 5300e9, 196592 * MIB, 448e9, 50e9, 2614.9e12,
            mesh=True, source="AMD MI300X data sheet (7 links of 64 GB/s); Azure ND MI300X v5 (network)",
        ),
    )
}  # fmt: skip
V100, A100, H100 = CARDS["V100"], CARDS["A100"], CARDS["H100"]


def read_card(name: str) -> Card:
    """A card by its name, or from your own file: .toml or .json, with the fields of `Card`.

    `like = "H100"` takes what the file leaves out from a card that is known.

    Raises:
        ValueError: for an unknown card, a file that cannot be read, fields that are missing, unknown or no such values.
    """
    for card in CARDS.values():
        if card.name.lower() == name.lower():
            return card
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"no card {name!r}: choose of {', '.join(CARDS)}, or give a .toml or .json file with a card")
    try:
        text = path.read_text(encoding="utf-8")
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(given, dict) or str(given.get("like", "V100")) not in CARDS:
        raise ValueError(f"{name}: a card is a table of fields; like is one of {', '.join(CARDS)}")
    like = dataclasses.asdict(CARDS[given.pop("like")]) if "like" in given else {}
    fields = {field.name: field for field in dataclasses.fields(Card)}
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in given | like]
    if missing or set(given) - set(fields):
        unknown = ", ".join(sorted(set(given) - set(fields))) or "nothing"
        raise ValueError(f"{name}: a card lacks {', '.join(missing) or 'nothing'}; unknown here: {unknown}")
    for key, value in given.items():
        kind = str if key in ("name", "source", "generation") else bool if key == "mesh" else int | float
        number = kind == int | float and not isinstance(value, bool) and isinstance(value, kind)
        if not (number and math.isfinite(value) and value > 0 if kind == int | float else isinstance(value, kind)):
            raise ValueError(
                f"{name}: {key} = {value!r} is no value for it (numbers are above 0, of bytes and seconds)"
            )
    try:
        return Card(**({"source": name} | {k: v for k, v in like.items() if k != "source"} | given))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# Operations (a multiplication and an addition are two) of ResNet-50's forward pass for an image of 224 pixels; training
# does three times that. Source: counted with FlopCounterMode on torchvision's, as the test does.
RESNET50_FORWARD_FLOP = 8.18e9

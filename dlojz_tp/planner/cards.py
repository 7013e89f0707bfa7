"""What a graphics card promises by its data sheet, and what its maker published for ResNet-50: sourced constants."""

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """One card. Peaks in operations a second, dense; bandwidth in bytes a second; memory in bytes.

    float32: without Tensor Cores. tf32, bfloat16: on Tensor Cores; None where the card has none for it.
    link, network: bytes a second in one direction that a card sends inside a node of 8, and of the node's network cards
    its share. mesh: each pair of cards has wires of its own, so that n cards have n − 1 of 7 parts of `link`.
    resnet50_float32, resnet50_mixed: images of 224 pixels trained a second on one card, as published (float32 stands
    for TF32 where the card has it; mixed precision is float16 in channels last); None where no figure is.
    """

    name: str
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None
    bandwidth: float
    memory: float
    link: float
    network: float
    mesh: bool = False
    resnet50_float32: float | None = None
    resnet50_mixed: float | None = None
    source: str = ""


# Where no source says otherwise: peaks, bandwidths and memories are of NVIDIA's data sheet of the card, half of what it
# gives for sparse matrices; `link` is half of what it gives for NVLink in both directions; `network` is NVIDIA's DGX of
# the card: 4 cards of 100 Gb/s for 8 V100, 8 of 200 for A100, 8 of 400 since.
# ResNet-50: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, "Training performance results"
# (container pytorch-21.03): DGX-1 16 GB and DGX A100 80 GB, one GPU. Nothing of the kind is published there for H100.
CARDS = {
    card.name: card
    for card in (
        Card(
            "V100", 15.7e12, None, 125e12, None, 900e9, 16e9, 150e9, 6.25e9, resnet50_float32=367, resnet50_mixed=1200,
            source="NVIDIA V100 data sheet (SXM2), DGX-1",
        ),
        Card(
            "A100", 19.5e12, 156e12, 312e12, 312e12, 2039e9, 80e9, 300e9, 25e9, resnet50_float32=938,
            resnet50_mixed=2470, source="NVIDIA A100 data sheet (SXM4), DGX A100",
        ),
        Card(
            "H100", 67e12, 494.7e12, 989.4e12, 989.4e12, 3350e9, 80e9, 450e9, 50e9,
            source="NVIDIA H100 data sheet (SXM5), DGX H100",
        ),
        Card(
            "H200", 67e12, 494.7e12, 989.4e12, 989.4e12, 4800e9, 141e9, 450e9, 50e9,
            source="NVIDIA H200 data sheet (SXM), DGX H200",
        ),
        Card(
            "B200", 75e12, 1.1e15, 2.25e15, 2.25e15, 7700e9, 180e9, 900e9, 50e9,
            source="NVIDIA Blackwell data sheet (HGX B200), DGX B200",
        ),
        Card(
            "MI300X", 163.4e12, 653.7e12, 1307.4e12, 1307.4e12, 5300e9, 192e9, 448e9, 50e9, mesh=True,
            source="AMD MI300X data sheet (7 links of 64 GB/s); Azure ND MI300X v5 (network)",
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
        kind = str if key in ("name", "source") else bool if key == "mesh" else int | float
        number = kind == int | float and not isinstance(value, bool) and isinstance(value, kind)
        if not (number and math.isfinite(value) and value > 0 if kind == int | float else isinstance(value, kind)):
            raise ValueError(
                f"{name}: {key} = {value!r} is no value for it (numbers are above 0, of bytes and seconds)"
            )
    return Card(**({"source": name} | {k: v for k, v in like.items() if k != "source"} | given))


# Seconds of ResNet-50's forward pass on one V100 in mixed precision, by images in the batch. Up to 16 it is
# the processor that decides.
# Source: the same page, "Inference performance results", DGX-1 16 GB, mixed precision, average latency.
RESNET50_FORWARD_SECONDS = {
    1: 12.78e-3, 2: 13.01e-3, 4: 13.41e-3, 8: 13.65e-3, 16: 14.0e-3, 32: 15.84e-3, 64: 23.18e-3, 128: 43.55e-3,
    256: 84.14e-3,
}  # fmt: skip

# Operations (a multiplication and an addition are two) of ResNet-50's forward pass for an image of 224 pixels; training
# does three times that. Source: counted with FlopCounterMode on torchvision's, as the test does.
RESNET50_FORWARD_FLOP = 8.18e9

"""The code text: the source of Python's standard library as token ids, and a batch of it for a language model."""

from pathlib import Path
from typing import TYPE_CHECKING

from . import made
from .places import DataDamaged, TextSet, data_root

if TYPE_CHECKING:
    from torch import Tensor

WHAT = "the code text"
FORMAT = 1
MADE_BY = "make_code_text"
FILES = ["train.npy", "val.npy", "tokenizer.json"]
DEFAULTS = {"megabytes": 4.0, "vocab": 2048, "seed": 0}  # of the command's options


def code_text() -> TextSet:
    """Load the code text: train and val as int64 tensors (N,) in memory, about a million tokens, 8 bytes each.

    Every byte is checked against the manifest. No file is in both parts; the vocabulary comes from train alone.
    Raises DataMissing where the set is not made, DataDamaged where it is not whole.
    Source: made by data_scripts/make_code_text.py.
    """
    import numpy as np
    import torch

    root, manifest = code_text_manifest()
    try:
        train, val = (np.load(root / name, allow_pickle=False) for name in FILES[:2])
        tokenizer_json = (root / FILES[2]).read_text()
    except (OSError, ValueError) as error:
        raise _damaged(root, str(error), manifest) from error
    tensors = (torch.from_numpy(part.astype(np.int64)) for part in (train, val))
    return TextSet("code_text", root, *tensors, manifest["vocab_size"], manifest["end_of_file"], tokenizer_json)


def code_text_manifest() -> tuple[Path, dict]:
    """Folder and manifest of the code text, every byte checked: some milliseconds. Raises as `code_text` does."""
    root = data_root() / "code_text"
    return root, made.checked(WHAT, root, MADE_BY, read, FILES, _options)


def read(folder: Path) -> dict:
    """Read the manifest of the set in `folder`. Raises FileNotFoundError or ValueError, as `made.read` does.

    Its keys: format, made_by, megabytes, vocab, seed (as asked); val_share; files, text_bytes, tokens (each
    {"train": N, "val": N}); vocab_size (what came out); end_of_file (a token id); versions; bytes (of all files),
    sizes and crc32 (of each), sha256, manifest_sha256.
    """
    return made.read(folder, MADE_BY, FORMAT, _whole)


def _whole(manifest: dict) -> bool:
    counts = (manifest[key][split] for key in ("files", "text_bytes", "tokens") for split in ("train", "val"))
    numbers = [*counts, manifest["vocab_size"]]
    return all(type(number) is int and number > 0 for number in numbers) and type(manifest["end_of_file"]) is int


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, MADE_BY, _options(manifest))


def _options(manifest: dict) -> list[str]:
    return made.options(manifest, DEFAULTS)


def command_of(manifest: dict) -> str:
    """The command that makes a set with this manifest."""
    return made.command_line(MADE_BY, _options(manifest))


def batch_of_text(tokens: "Tensor", batch_size: int, length: int, seed: int = 0) -> "Tensor":
    """Draw a batch for a language model: windows of the tokens at random places.

    Args: tokens (N,) integers on any device, N >= length; batch_size windows of `length` tokens each, at places that
    depend on nothing but the other arguments and the seed. A model that reads s tokens of each and foretells the next
    ones needs windows of s + 1.
    Returns (batch_size, length), of the tokens' type and device, no view of them.
    Raises ValueError for tokens of another shape, or too few of them.
    """
    import torch

    if tokens.ndim != 1:
        raise ValueError(f"tokens must be a tensor of one dimension, got shape {tuple(tokens.shape)}")
    if batch_size < 1 or length < 1:
        raise ValueError(f"batch_size and length must be at least 1, got {batch_size} and {length}")
    if len(tokens) < length:
        raise ValueError(f"a window of {length} tokens needs that many, got {len(tokens)}")
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same draw
    starts = torch.randint(len(tokens) - length + 1, (batch_size, 1), generator=generator)
    return tokens[(starts + torch.arange(length)).to(tokens.device)]

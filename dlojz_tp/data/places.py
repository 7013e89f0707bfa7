"""Where data lives, the shapes a data set comes in, and the one line a missing one gives. Standard library only."""

import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHECKOUT = Path(__file__).resolve().parents[2]


class DataMissing(Exception):
    """A data set is not there; the message is one line that says what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback.
        return [str(self)]


class DataDamaged(DataMissing):
    """A data set is there but not whole; the message is one line that says what to do."""


@dataclass(frozen=True)
class ImageSet:
    """Image files with labels: name, folder, class names, and (path, class index) of each train and val file."""

    name: str
    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    val: tuple[tuple[Path, int], ...]

    def __repr__(self) -> str:
        return (
            f"ImageSet({self.name!r}, {str(self.root)!r}, {len(self.classes)} classes, "
            f"{len(self.train)} train and {len(self.val)} val images)"
        )


@dataclass(frozen=True)
class TensorSet:
    """Images as tensors: train_x and val_x (N, channels, height, width), train_y and val_y (N,) int64, class names."""

    train_x: "Tensor"
    train_y: "Tensor"
    val_x: "Tensor"
    val_y: "Tensor"
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"TensorSet(train_x {tuple(self.train_x.shape)} {self.train_x.dtype}, "
            f"val_x {tuple(self.val_x.shape)}, {len(self.classes)} classes)"
        )


@dataclass(frozen=True, eq=False)
class TextSet:
    """Text as token ids, for language models.

    name and folder; train and val (N,) int64, ids below vocab_size; end_of_file, the id that closes each file.
    """

    name: str
    root: Path
    train: "Tensor"
    val: "Tensor"
    vocab_size: int
    end_of_file: int
    tokenizer_json: str  # its text: the set needs no file once loaded, also in another process

    def __repr__(self) -> str:
        return (
            f"TextSet({self.name!r}, {str(self.root)!r}, {len(self.train):,} train and {len(self.val):,} val tokens, "
            f"vocab_size {self.vocab_size})"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Any text has some: what the vocabulary lacks is spelt in bytes."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids) -> str:
        """Text of token ids, given as a list or as a tensor (N,); bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(getattr(ids, "tolist", lambda: list(ids))(), skip_special_tokens=False)

    @cached_property
    def _tokenizer(self):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataMissing("text is cut into tokens by the library tokenizers: pip install tokenizers") from error
        return Tokenizer.from_str(self.tokenizer_json)


def data_root() -> Path:
    """Folder of the made data sets: `DLOJZ_DATA`, else `data/` in the checkout. It may not exist yet."""
    return Path(os.environ.get("DLOJZ_DATA") or CHECKOUT / "data").expanduser().absolute()


def centre_folder(variable: str, *names: str) -> Path | None:
    """Folder of a data set that the computing centre keeps.

    Args: variable, the environment variable that names it; names, the folders tried under `$DSDIR`.
    Returns the variable's folder if it is set, existing or not; else the first existing `$DSDIR/name`; else None.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable]).expanduser().absolute()
    store = os.environ.get("DSDIR")
    candidates = [Path(store) / name for name in names] if store else []
    return next((folder for folder in candidates if folder.is_dir()), None)


def make_command(name: str) -> str:
    """Shell command that makes a data set, as it works from the current folder.

    Args: name, of a file in data_scripts/ without its ending.
    """
    script = str(CHECKOUT / "data_scripts" / f"{name}.py")
    with contextlib.suppress(OSError):  # the current folder may be gone: the full path still works
        script = min(script, os.path.relpath(script), key=len)
    found = shutil.which("python")
    same = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return shlex.join(["python" if same else sys.executable, script])

"""Make the course's text for language models: the source of Python's own standard library, cut into tokens.

    python data_scripts/make_code_text.py [--out DIR] [--megabytes 4] [--vocab 2048] [--seed 0] [--force]

Files are drawn until they hold so many megabytes; about 5 % of the text, whole files, is for validation. A byte-level
BPE is trained on the rest. The same arguments give the same bytes on the same versions of Python and of tokenizers.
Nothing is downloaded. Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import hashlib
import importlib.metadata
import io
import platform
import sys
import sysconfig
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from dlojz_tp.data import making, text  # noqa: E402

# Tests, what is not the library itself, and tables: those of encodings and pydoc_data read like no code.
LEFT_OUT = {
    "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo", "ensurepip", "encodings", "pydoc_data",
    "sitecustomize", "usercustomize",
}  # fmt: skip
VAL_SHARE = 0.05
END_OF_FILE = "<|endoftext|>"


def source_files() -> list[Path]:
    """Paths of the standard library's own modules, relative to it, sorted. No link is followed."""

    def look(folder: Path) -> list[Path]:
        files = []
        for path in sorted(folder.iterdir()):
            # No name in Python: site-packages, config-3.11-x86_64-linux-gnu. _sysconfigdata: paths of one machine.
            named = path.stem.isidentifier() and path.stem not in LEFT_OUT and not path.stem.startswith("_sysconfig")
            if not named or path.is_symlink():
                continue
            if path.is_dir():
                files += look(path)
            elif path.suffix == ".py":
                files.append(path)
        return files

    library = Path(sysconfig.get_path("stdlib"))
    try:
        return [path.relative_to(library) for path in look(library)]
    except OSError as error:
        raise unreadable(error.filename, error) from error


def unreadable(path, error: OSError) -> making.CannotMake:
    """The error for a file of the library that cannot be read."""
    return making.CannotMake(f"{path} cannot be read ({error.strerror}): use another Python")


def drawn_texts(limit: int, seed: int) -> list[str]:
    """Contents of files in the seed's order, at most `limit` bytes together; a file that no longer fits is left out."""
    library = Path(sysconfig.get_path("stdlib"))
    # A hash for each name, not a shuffle: a file more in the next Python leaves the order of the others as it is.
    names = sorted(source_files(), key=lambda path: hashlib.sha256(f"{seed} {path.as_posix()}".encode()).digest())
    texts, left = [], limit
    for name in names:
        try:
            content = (library / name).read_text("utf-8-sig")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise unreadable(library / name, error) from error
        size = len(content.encode())
        if content.strip() and END_OF_FILE not in content and content not in texts and size <= left:
            texts.append(content)
            left -= size
    if len(texts) < 2:
        raise making.CannotMake(f"{library} holds no source of the standard library: use a Python that ships it")
    return texts


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Divide the files into train and val: to val go the first that fit into its share, or else the shortest one."""
    sizes = [len(content.encode()) for content in texts]
    left, chosen = VAL_SHARE * sum(sizes), []
    for index, size in enumerate(sizes):
        if size <= left:
            chosen.append(index)
            left -= size
    chosen = chosen or [sizes.index(min(sizes))]
    train = [content for index, content in enumerate(texts) if index not in chosen]
    return train, [texts[index] for index in chosen]


def build(folder: Path, manifest: dict) -> None:
    """Write the files into the empty `folder` and the counts into the manifest."""
    import numpy as np
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    parts = dict(zip(("train", "val"), split(drawn_texts(round(manifest["megabytes"] * 1e6), manifest["seed"]))))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=manifest["vocab"],
        special_tokens=[END_OF_FILE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so that any text can be written
        show_progress=False,
    )
    tokenizer.train_from_iterator(parts["train"], trainer)
    manifest |= {"vocab_size": tokenizer.get_vocab_size(), "end_of_file": tokenizer.token_to_id(END_OF_FILE)}
    manifest |= {"files": {}, "text_bytes": {}, "tokens": {}}
    for name, texts in parts.items():
        ids = []
        for content in texts:
            ids += [*tokenizer.encode(content).ids, manifest["end_of_file"]]
        buffer = io.BytesIO()  # np.save into a file hides why it could not write
        np.save(buffer, np.array(ids, dtype=np.uint16))
        (folder / f"{name}.npy").write_bytes(buffer.getvalue())
        manifest["files"][name], manifest["tokens"][name] = len(texts), len(ids)
        manifest["text_bytes"][name] = sum(len(content.encode()) for content in texts)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")


def summary(manifest: dict) -> str:
    """What was made, in words."""
    files, tokens, size = manifest["files"], manifest["tokens"], manifest["text_bytes"]
    return (
        f"{files['train']} train and {files['val']} val files, {sum(size.values()) / 1e6:.1f} MB of text, "
        f"{tokens['train']:,} and {tokens['val']:,} tokens, vocabulary of {manifest['vocab_size']}"
    )


RECIPE = making.Recipe(text.MADE_BY, text.read, lambda manifest: text.FILES, build, summary)


def wanted_manifest(megabytes: float, vocab: int, seed: int) -> dict:
    """Write down what the set shall be; the rest comes when it is made."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("numpy", "tokenizers")}
    except importlib.metadata.PackageNotFoundError as error:
        raise making.CannotMake(f"the library {error.name} is not installed: pip install {error.name}") from error
    return {
        "format": text.FORMAT,
        "made_by": text.MADE_BY,
        "megabytes": megabytes,
        "vocab": vocab,
        "seed": seed,
        "val_share": VAL_SHARE,
        "left_out": sorted(LEFT_OUT),
        "versions": {"python": platform.python_version(), **versions},
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = making.parser(text.MADE_BY, __doc__.splitlines()[0], "code_text")
    parser.add_argument("--megabytes", type=making.decimal(0.1, 100), help="text to take, in 10^6 bytes, at most [4]")
    parser.add_argument("--vocab", type=making.number(257, 65536), help="size of the vocabulary [2048]")
    parser.set_defaults(**text.DEFAULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    return making.run(RECIPE, args, lambda: wanted_manifest(args.megabytes, args.vocab, args.seed))


if __name__ == "__main__":
    making.stop_cleanly()
    sys.exit(main())

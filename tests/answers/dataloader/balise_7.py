"""Answers to balise 7 of 05_dataloader."""

import hashlib
import io
import itertools
import random
import shutil
import tarfile
import tempfile
from pathlib import Path
from types import FunctionType

from PIL import Image
from torch.utils.data import get_worker_info

from tests.answers.bank import Bank

bank = Bank("05_dataloader", 7)


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write(
    items,
    folder,
    per_shard,
    key=lambda k, path: f"{k:06d}",
    content=Path.read_bytes,
    label=str,
    mode="w",
    name="s{:04d}.tar",
):
    """A right one in another style; wrong ones change a part of it."""
    paths = []
    rest = iter(enumerate(items))
    while chunk := list(itertools.islice(rest, per_shard)):
        path = Path(folder, name.format(len(paths)))
        with tarfile.open(path, mode) as tar:
            for k, (file, cls) in chunk:
                add(tar, f"{key(k, file)}.cls", label(cls).encode())
                add(tar, f"{key(k, file)}.jpg", content(file))
        paths.append(path)
    return paths


def samples(path):
    """Grouped by key, once the next key begins."""
    with tarfile.open(path) as tar:
        files = ((m.name.split(".", 1), tar.extractfile(m).read()) for m in tar)
        for _, group in itertools.groupby(files, key=lambda file: file[0][0]):
            sample = {name[1]: content for name, content in group}
            yield sample["jpg"], int(sample["cls"])


def own_paths(paths):
    info = get_worker_info()
    return list(paths)[info.id :: info.num_workers] if info else list(paths)


def stream(paths, buffer=1, seed=0, samples=samples, own_paths=own_paths, rng=None):
    rng, held = rng or random.Random(seed), []
    for path in own_paths(paths):
        for sample in samples(path):
            if buffer <= 1:
                yield sample
            elif len(held) < buffer:
                held.append(sample)
            else:
                k = rng.randrange(buffer)
                out, held[k] = held[k], sample
                yield out
    rng.shuffle(held)
    yield from held


def writer(slug):
    """Decorator: this write_shards, with a right stream_shards."""
    return lambda answer: bank.several(slug, answer, stream)


def streamer(slug):
    """Decorator: this stream_shards, with a right write_shards."""
    return lambda answer: bank.several(slug, write, answer)


@writer(None)
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard)


@writer(None)
def write_shards(items, folder, per_shard):
    """Keys from a digest, the file added by its name, paths as text, one loop."""
    paths, tar = [], None
    for k, (file, label) in enumerate(items):
        if k % per_shard == 0:
            if tar:
                tar.close()
            paths.append(f"{folder}/part_{k // per_shard}.tar")
            tar = tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        key = hashlib.sha1(str(file).encode()).hexdigest()
        tar.add(file, arcname=key + ".jpg")
        add(tar, key + ".cls", b"%d\n" % label)
    tar.close()
    return paths


@streamer(None)
def stream_shards(paths, buffer=1, seed=0):
    """A true stream, entry by entry, the buffer filled first."""

    def entries():
        for number, path in enumerate(paths):
            info = get_worker_info()
            if info and number % info.num_workers != info.id:
                continue
            sample = {}
            with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|*") as tar:
                for member in tar:
                    key, extension = member.name.split(".", 1)
                    if sample.get("key") != key:
                        sample = {"key": key}
                    if extension == "jpg":
                        sample["jpg"] = tar.extractfile(member).read()
                    elif extension == "cls":
                        sample["cls"] = int(tar.extractfile(member).read().decode())
                    if len(sample) == 3:
                        yield sample.pop("jpg"), sample.pop("cls")

    rng = random.Random(seed)
    source = entries()
    held = list(itertools.islice(source, buffer - 1))
    for sample in source:
        held.append(sample)
        yield held.pop(rng.randrange(len(held)))
    while held:
        yield held.pop(rng.randrange(len(held)))


@streamer(None)
def stream_shards(paths, buffer=1, seed=0):
    """A class-like iterator, contiguous shares of shards."""
    info = get_worker_info()
    n = len(paths)
    mine = paths[info.id * n // info.num_workers : (info.id + 1) * n // info.num_workers] if info else paths
    return stream(mine, buffer, seed, own_paths=list)


PLAIN = """
import io
import random
import tarfile
from pathlib import Path

from torch.utils.data import get_worker_info


def write_shards(items, folder, per_shard):
    paths = []
    for first in range(0, len(items), per_shard):
        entries = []
        for k, (path, label) in enumerate(items[first : first + per_shard], first):
            entries += [(f"{k:06d}.jpg", Path(path).read_bytes()), (f"{k:06d}.cls", str(label).encode())]
        paths.append(Path(folder, f"part{first}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for name, data in entries:
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return paths


def samples(path):
    parts = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, kind = member.name.split(".", 1)
            sample = parts.setdefault(key, {})
            if kind in ("jpg", "cls"):
                sample[kind] = tar.extractfile(member).read()
            if len(sample) == 2:
                del parts[key]
                yield sample["jpg"], int(sample["cls"])


def stream_shards(paths, buffer=1, seed=0):
    info = get_worker_info()
    rng, held = random.Random(seed), []
    for number, path in enumerate(paths):
        if info and number % info.num_workers != info.id:
            continue
        for sample in samples(path):
            held.append(sample)
            if len(held) >= buffer:
                yield held.pop(rng.randrange(len(held)))
    while held:
        yield held.pop(rng.randrange(len(held)))
"""
DRAWN = "held.pop(rng.randrange(len(held)))"
REST = f"    while held:\n        yield {DRAWN}\n"
SHARES = """        for place, sample in enumerate(samples(path)):
            if info and place % info.num_workers != info.id:
                continue
"""
bank.text(None, PLAIN)


@writer("nothing-returned")
def write_shards(items, folder, per_shard):
    write(items, folder, per_shard)


bank.hint("no-shards", "write_shards returns the list of the paths it wrote, in order.")
bank.variant("no-shards", PLAIN, ("return paths", "return len(paths)"))


@writer("no-shards")
def write_shards(items, folder, per_shard):
    return len(write(items, folder, per_shard))


@writer("no-shards")
def write_shards(items, folder, per_shard):
    return [path.name for path in write(items, folder, per_shard)]


bank.hint("not-tar", "{name} is not a plain tar file that can be read from front to back.")
bank.variant("not-tar", PLAIN, ('"w")', '"w:gz")'))


@writer("not-tar")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, mode="w:gz")


bank.hint("shard-sizes", "Each shard takes {per_shard} samples, and a last, smaller one the rest. Yours hold {sizes}.")
bank.variant("shard-sizes", PLAIN, ("first + per_shard]", "first + per_shard - 1]"))


@writer("shard-sizes")
def write_shards(items, folder, per_shard):
    return write(items, folder, -(-len(items) // per_shard))


@writer("shard-sizes")
def write_shards(items, folder, per_shard):
    return write(items[: len(items) // per_shard * per_shard] or items, folder, per_shard)


bank.hint("outside-folder", "A shard was written outside the given folder.")
bank.variant("outside-folder", PLAIN, ("Path(folder, ", 'Path(folder, "..", '))


@writer("outside-folder")
def write_shards(items, folder, per_shard):
    return write(items, Path(folder).parent, per_shard)


bank.hint("not-adjacent", "The two entries of a sample must be next to each other: a stream cannot go back.")
bank.variant("not-adjacent", PLAIN, ("in entries:", "in sorted(entries, key=lambda entry: entry[0][-3:]):"))


@writer("not-adjacent")
def write_shards(items, folder, per_shard):
    paths = []
    for first in range(0, len(items), per_shard):
        paths.append(Path(folder, f"{first}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for k, (file, _) in enumerate(items[first : first + per_shard], first):
                tar.add(file, f"{k}.jpg")
            for k, (_, label) in enumerate(items[first : first + per_shard], first):
                add(tar, f"{k}.cls", str(label).encode())
    return paths


bank.hint("wrong-entries", "A sample is an entry KEY.jpg and an entry KEY.cls, and nothing else. You wrote: {found}.")
bank.variant("wrong-entries", PLAIN, ('.cls"', '.txt"'))


@writer("wrong-entries")
def write_shards(items, folder, per_shard):
    paths = []
    for first in range(0, len(items), per_shard):
        paths.append(Path(folder, f"{first}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for k, (file, _) in enumerate(items[first : first + per_shard], first):
                tar.add(file, f"{k}.jpg")
    return paths


@writer("wrong-entries")
def write_shards(items, folder, per_shard):
    paths = []
    for first in range(0, len(items), per_shard):
        paths.append(Path(folder, f"{first}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for k, (file, label) in enumerate(items[first : first + per_shard], first):
                tar.add(file, f"{k}.jpeg")
                add(tar, f"{k}.label", str(label).encode())
    return paths


bank.hint(
    "keys-repeat",
    "Two samples share the key {key}. File names repeat from folder to folder, and numbers that start again in each "
    "shard repeat too. Number the samples over the whole set.",
)
bank.variant("keys-repeat", PLAIN, ("per_shard], first)", "per_shard])"))


@writer("keys-repeat")
def write_shards(items, folder, per_shard):
    """Numbers that begin anew in each shard."""
    return write(items, folder, per_shard, key=lambda k, path: f"{k % per_shard:04d}")


@writer("keys-repeat")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: path.stem.replace(".", "-"))


bank.hint(
    "dot-in-key",
    "The key of the entry {key!r} contains a dot or a folder: everything after the first dot counts as the extension.",
)
bank.variant("dot-in-key", PLAIN, ("{k:06d}", "{k / 10}"))


@writer("dot-in-key")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: f"{k}-{path.stem}")


@writer("dot-in-key")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: f"{path.parent.name}/{path.stem}")


bank.hint(
    "bytes-changed",
    "The bytes in the shard are not those of the file. A JPEG file that is decoded and encoded again loses quality: "
    "copy it as it is.",
)
bank.variant("bytes-changed", PLAIN, ("Path(path).read_bytes()", "Path(path).read_bytes()[:-1]"))


@writer("bytes-changed")
def write_shards(items, folder, per_shard):
    def encoded(path):
        content = io.BytesIO()
        Image.open(path).convert("RGB").save(content, "JPEG")
        return content.getvalue()

    return write(items, folder, per_shard, content=encoded)


bank.hint("label-lost", "KEY.cls must hold the label as text.")
bank.variant("label-lost", PLAIN, ("str(label).encode()", "bytes([label])"))


@writer("label-lost")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, label=chr)


@writer("label-lost")
def write_shards(items, folder, per_shard):
    return write([(path, 0) for path, _ in items], folder, per_shard)


@streamer("nothing-returned")
def stream_shards(paths, buffer=1, seed=0):
    list(stream(paths, buffer, seed))


bank.hint("not-samples", "stream_shards yields pairs (bytes, int).")
bank.variant("not-samples", PLAIN, ('int(sample["cls"])', 'sample["cls"]'))


@streamer("not-samples")
def stream_shards(paths, buffer=1, seed=0):
    return ((Image.open(io.BytesIO(content)), label) for content, label in stream(paths, buffer, seed))


@streamer("not-samples")
def stream_shards(paths, buffer=1, seed=0):
    return ((content, str(label).encode()) for content, label in stream(paths, buffer, seed))


bank.hint("samples-lost", "{n} of {all} samples never come{how}.")
bank.variant("samples-lost", PLAIN, ("while held:", "while held[1:]:"))


@streamer("samples-lost")
def stream_shards(paths, buffer=1, seed=0):
    """A sample is given when the next begins: the last of each shard never is."""

    def without_last(path):
        found = samples(path)
        previous = next(found)
        for sample in found:
            yield previous
            previous = sample

    return stream(paths, buffer, seed, without_last)


@streamer("samples-lost")
def stream_shards(paths, buffer=1, seed=0):
    """What is left in the buffer at the end is forgotten."""
    rng, held = random.Random(seed), []
    for path in own_paths(paths):
        for sample in samples(path):
            held.append(sample)
            if len(held) >= max(buffer, 1):
                yield held.pop(rng.randrange(len(held)))


@streamer("samples-lost")
def stream_shards(paths, buffer=1, seed=0):
    """Split twice: shards by worker, then samples by worker."""

    def split(path):
        info = get_worker_info()
        for k, sample in enumerate(samples(path)):
            if info is None or k % info.num_workers == info.id:
                yield sample

    return stream(paths, buffer, seed, split)


bank.hint("samples-twice", "{n} samples come more than once{how}.")
bank.variant("samples-twice", PLAIN, ("    while held:", "    yield from held\n    while held:"))


@streamer("samples-twice")
def stream_shards(paths, buffer=1, seed=0):
    """A buffer that is drawn from and never emptied."""
    rng, held = random.Random(seed), []
    for path in own_paths(paths):
        for sample in samples(path):
            held = [*held, sample][-max(buffer, 1) :]
            yield sample if buffer <= 1 else rng.choice(held)
    yield from held


bank.hint(
    "label-of-another",
    "A picture has the label of another one. The entries of a sample may come in any order, with other extensions "
    "between them: match them by key.",
)
bank.variant(
    "label-of-another",
    PLAIN,
    ("    parts = {}\n", '    parts, last = {}, b"0"\n'),
    (
        "            if len(sample) == 2:\n                del parts[key]\n",
        '            last = sample.get("cls", last)\n            if kind == "jpg":\n',
    ),
    ('int(sample["cls"])', "int(last)"),
)


@streamer("label-of-another")
def stream_shards(paths, buffer=1, seed=0):
    """Believes that .jpg comes first, and gives each picture the last label that it has seen."""

    def in_turn(path):
        label, content = 0, None
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".cls"):
                    label = int(tar.extractfile(member).read())
                    if content is not None:
                        yield content, label
                        content = None
                elif member.name.endswith(".jpg"):
                    if content is not None:
                        yield content, label
                    content = tar.extractfile(member).read()
            if content is not None:
                yield content, label

    def late(path):
        previous = 0
        for content, label in in_turn(path):
            yield content, previous
            previous = label

    return stream(paths, buffer, seed, late if "ours" in str(paths[0]) else in_turn)


@streamer("raised")
def stream_shards(paths, buffer=1, seed=0):
    """Entries two by two."""

    def pairs(path):
        with tarfile.open(path) as tar:
            members = iter(tar)
            for first in members:
                second = next(members)
                yield tar.extractfile(second).read(), int(tar.extractfile(first).read())

    return stream(paths, buffer, seed, pairs)


bank.hint(
    "library-called",
    "This is webdataset's own reader. Write your own with tarfile; the race against the library comes below.",
)
bank.variant(
    "library-called",
    PLAIN,
    (
        "\ndef stream_shards",
        '\nsamples = type(samples)(samples.__code__, {**globals(), "__name__": "webdataset"})\n\n\ndef stream_shards',
    ),
)


@streamer("library-called")
def stream_shards(paths, buffer=1, seed=0):
    """Stands for a reader of webdataset, which need not be installed: a function of a module of that name."""
    library = FunctionType(samples.__code__, {**globals(), "__name__": "webdataset.tariterators"})
    return stream(paths, buffer, seed, library)


bank.hint("extracted", "Files were written to disk while streaming. Read the entries directly from the archive.")
bank.variant(
    "extracted",
    PLAIN,
    ("import tarfile", "import shutil\nimport tarfile\nimport tempfile"),
    (
        "with tarfile.open(path) as",
        "with tempfile.NamedTemporaryFile() as copy, tarfile.open(shutil.copyfile(path, copy.name)) as",
    ),
)


@streamer("extracted")
def stream_shards(paths, buffer=1, seed=0):
    def extracted(path):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(path) as tar:
                tar.extractall(folder, filter="data")
            for file in sorted(Path(folder).glob("*.jpg")):
                yield file.read_bytes(), int(file.with_suffix(".cls").read_text())

    return stream(paths, buffer, seed, extracted)


@streamer("extracted")
def stream_shards(paths, buffer=1, seed=0):
    def copied(path):
        with tempfile.TemporaryDirectory() as folder:
            yield from samples(shutil.copyfile(path, Path(folder, "copy")))

    return stream(paths, buffer, seed, copied)


bank.hint(
    "opened-again",
    "A shard was opened {n} times for {samples} samples. Open it once and read it from front to back.",
)
bank.variant("opened-again", PLAIN, ("tar.extractfile(member)", "tarfile.open(path).extractfile(member)"))


@streamer("opened-again")
def stream_shards(paths, buffer=1, seed=0):
    """Opens the shard for each sample."""

    def one_by_one(path):
        with tarfile.open(path) as tar:
            keys = list(dict.fromkeys(name.split(".")[0] for name in tar.getnames()))
        for key in keys:
            with tarfile.open(path) as tar:
                yield tar.extractfile(f"{key}.jpg").read(), int(tar.extractfile(f"{key}.cls").read())

    return stream(paths, buffer, seed, one_by_one)


bank.hint(
    "all-opened-first",
    "All shards were opened before the first sample came out. Open one after the other: some sets have thousands.",
)
bank.variant(
    "all-opened-first",
    PLAIN,
    ("enumerate(paths)", "enumerate([tarfile.open(path) for path in paths])"),
    ("with tarfile.open(path) as", "with path as"),
)


@streamer("all-opened-first")
def stream_shards(paths, buffer=1, seed=0):
    opened = [tarfile.open(path) for path in own_paths(paths)]

    def of(tar):
        files = ((m.name.split(".", 1), tar.extractfile(m).read()) for m in tar)
        for _, group in itertools.groupby(files, key=lambda file: file[0][0]):
            sample = {name[1]: content for name, content in group}
            yield sample["jpg"], int(sample["cls"])

    return stream(opened, buffer, seed, of, list)


bank.hint(
    "whole-shard",
    "Streaming a shard of {size} used {peak} of memory: the whole shard, or a list of its samples, is held.",
)
bank.variant("whole-shard", PLAIN, ("in samples(path)", "in list(samples(path))"))


@streamer("whole-shard")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, seed, lambda path: list(samples(path)))


@streamer("whole-shard")
def stream_shards(paths, buffer=1, seed=0):
    def loaded(path):
        with tarfile.open(fileobj=io.BytesIO(Path(path).read_bytes())) as tar:
            found = {}
            for member in tar:
                key, extension = member.name.split(".", 1)
                found.setdefault(key, {})[extension] = tar.extractfile(member).read()
        return ((sample["jpg"], int(sample["cls"])) for sample in found.values())

    return stream(paths, buffer, seed, loaded)


bank.hint(
    "order-changed",
    "With buffer=1, the samples must come in the order of the shards: each sample leaves as soon as it is in the "
    "buffer.",
)
bank.variant("order-changed", PLAIN, ("enumerate(paths)", "enumerate(sorted(paths, reverse=True))"))


@streamer("order-changed")
def stream_shards(paths, buffer=1, seed=0):
    shuffled = random.Random(seed).sample(list(paths), len(paths))
    return stream(shuffled, buffer, seed)


bank.hint(
    "not-mixed",
    "With buffer={buffer}, the samples still come in the order of the shards, except for the last {buffer}. Give out "
    "a random one of the samples in the buffer, not the first.",
)
bank.variant("not-mixed", PLAIN, (DRAWN, "held.pop(0)"))


@streamer("not-mixed")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, 1, seed)


class Always:
    """In place of a generator: the same place each time; the rest is shuffled at the end."""

    def __init__(self, place, seed=0):
        self.place, self.shuffle = place, random.Random(seed).shuffle

    def randrange(self, n):
        return min(n - 1, self.place)


def leaving(place):
    """A stream in which the sample at place(rng, number held) leaves; the rest is shuffled at the end."""

    def stream_shards(paths, buffer=1, seed=0):
        rng, held = random.Random(seed), []
        for path in own_paths(paths):
            for sample in samples(path):
                held.append(sample)
                if len(held) >= max(1, buffer):
                    yield held.pop(place(rng, len(held)))
        rng.shuffle(held)
        yield from held

    return stream_shards


streamer("not-mixed")(leaving(lambda rng, n: 0))  # first in, first out
streamer("not-mixed")(leaving(lambda rng, n: rng.randrange(max(1, n - 1))))  # never the newest: of two, the older one

bank.hint(
    "same-place",
    "The sample always leaves from the same place in the buffer. Draw a new place for each sample, from a generator "
    "made once, before the loop.",
)
bank.variant("same-place", PLAIN, (DRAWN, "held.pop()"))


streamer("same-place")(leaving(lambda rng, n: -1))  # last in, first out

bank.hint(
    "corner-only",
    "With buffer={buffer}, no sample came more than {n} places early: you give out samples from only a part of the "
    "buffer. Draw from all samples in it.",
)
bank.variant("corner-only", PLAIN, ("randrange(len(held))", "randrange(min(2, len(held)))"))


streamer("corner-only")(leaving(lambda rng, n: rng.randrange(min(2, n))))


@streamer("same-place")
def stream_shards(paths, buffer=1, seed=0):
    """Seeds anew for each sample."""
    return stream(paths, buffer, seed, rng=Always(random.Random(seed).randrange(max(1, buffer)), seed))


bank.hint(
    "shard-by-shard",
    "The buffer is emptied at the end of each shard, so samples of different shards never mix. Keep it filled from "
    "shard to shard.",
)
bank.variant("shard-by-shard", PLAIN, (REST, f"        while held:\n            yield {DRAWN}\n"))


@streamer("shard-by-shard")
def stream_shards(paths, buffer=1, seed=0):
    for path in own_paths(paths):
        yield from stream([path], buffer, seed, own_paths=list)


bank.hint(
    "buffer-too-large",
    "A sample came {n} places early with a buffer of {buffer}: you hold more samples than the buffer allows.",
)
bank.variant("buffer-too-large", PLAIN, ("len(held) >= buffer", "len(held) >= 3 * buffer - 2"))


@streamer("buffer-too-large")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, 2 * buffer if buffer > 1 else 1, seed)


@streamer("buffer-too-large")
def stream_shards(paths, buffer=1, seed=0):
    """Shuffles the shards too: at once everything is mixed."""
    shuffled = random.Random(seed).sample(list(paths), len(paths)) if buffer > 1 else paths
    return stream(shuffled, buffer, seed)


bank.hint("seed-ignored", "Two seeds gave the same order, except perhaps for the last {buffer} samples.")
bank.variant("seed-ignored", PLAIN, ("Random(seed)", "Random(0)"))


@streamer("seed-ignored")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, 0)


bank.hint("seed-not-enough", "The same seed gave two orders: draw from your own generator, random.Random(seed).")
bank.variant("seed-not-enough", PLAIN, ("random.Random(seed)", "random"))


@streamer("seed-not-enough")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, seed, rng=random)


bank.hint("workers-repeat", "Two workers gave the same samples. Each must read its own shards: ask get_worker_info().")
bank.variant("workers-repeat", PLAIN, ("number % info.num_workers != info.id", "False"))


@streamer("workers-repeat")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, seed, own_paths=list)


bank.hint(
    "workers-read-all",
    "A worker opened {n} of {shards} shards to give its share. First choose the shards, then open them.",
)
bank.variant(
    "workers-read-all",
    PLAIN,
    ("info and number", "None and number"),
    ("        for sample in samples(path):\n", SHARES),
)


@streamer("workers-read-all")
def stream_shards(paths, buffer=1, seed=0):
    numbers = itertools.count()

    def split(path):
        info = get_worker_info()
        for sample in samples(path):
            if info is None or next(numbers) % info.num_workers == info.id:
                yield sample

    return stream(paths, buffer, seed, split, list)


@writer("signature")
def write_shards(items, folder):
    return write(items, folder, 5)


bank.hint(
    "closed-blocks",
    "The samples are mixed in blocks of {buffer}: the buffer is filled, emptied completely and filled again. So no "
    "sample ever leaves its block, and while the buffer fills, nothing is ready. Let one sample leave whenever the "
    "next comes in.",
)
bank.variant(
    "closed-blocks",
    PLAIN,
    (f"                yield {DRAWN}", f"                while held:\n                    yield {DRAWN}"),
)


@streamer("closed-blocks")
def stream_shards(paths, buffer=1, seed=0):
    """Filled, shuffled, given away, filled anew."""
    rng, block = random.Random(seed), []
    for path in own_paths(paths):
        for sample in samples(path):
            block.append(sample)
            if len(block) == buffer:
                rng.shuffle(block)
                yield from block
                block = []
    rng.shuffle(block)
    yield from block


@streamer("closed-blocks")
def stream_shards(paths, buffer=1, seed=0):
    """Slices of all that comes, each in an order of its own."""
    rng = random.Random(seed)
    everything = (sample for path in own_paths(paths) for sample in samples(path))
    while block := list(itertools.islice(everything, buffer)):
        yield from rng.sample(block, len(block))


bank.slip("keys-repeat", ("{number:08d}.jpg", "{number % 100:02d}.jpg"), ("{number:08d}.cls", "{number % 100:02d}.cls"))
bank.slip(
    "keys-repeat",
    ("{number:08d}.jpg", "{label}-{number % per_shard}.jpg"),
    ("{number:08d}.cls", "{label}-{number % per_shard}.cls"),
)

bank.hint(
    "no-bytes",
    "The entry of a picture is empty: addfile reads as many bytes as TarInfo.size says, which is 0 until you set it.",
)
bank.variant("no-bytes", PLAIN, ("entry.size = len(data)", 'entry.size = len(data) if name.endswith("cls") else 0'))


bank.slip(
    "no-bytes",
    (
        'tar.add(path, arcname=f"{number:08d}.jpg")',
        'tar.addfile(tarfile.TarInfo(f"{number:08d}.jpg"), open(path, "rb"))',
    ),
)
bank.slip("keys-repeat", ("items[first : first + per_shard], first)", "items[first : first + per_shard])"))
bank.slip("order-changed", ("len(held) >= buffer", "len(held) > buffer"))

bank.hint(
    "paths-changed",
    "You changed the list of shards that you were given: {left} of {n} are left. A second pass over it reads other "
    "shards, or none.",
)
bank.variant(
    "paths-changed",
    PLAIN,
    ("for number, path in enumerate(paths):\n", "for number in range(len(paths)):\n        path = paths.pop(0)\n"),
)


bank.slip("paths-changed", ("    for path in mine:\n", "    while mine:\n        path = mine.pop(0)\n"))

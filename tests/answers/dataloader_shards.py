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

bank = Bank("05_dataloader")


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
    return lambda answer: bank.several(7, slug, answer, stream)


def streamer(slug):
    """Decorator: this stream_shards, with a right write_shards."""
    return lambda answer: bank.several(7, slug, write, answer)


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


@writer("nothing-returned")
def write_shards(items, folder, per_shard):
    write(items, folder, per_shard)


@writer("no-shards")
def write_shards(items, folder, per_shard):
    return len(write(items, folder, per_shard))


@writer("no-shards")
def write_shards(items, folder, per_shard):
    return [path.name for path in write(items, folder, per_shard)]


@writer("not-tar")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, mode="w:gz")


@writer("shard-sizes")
def write_shards(items, folder, per_shard):
    return write(items, folder, -(-len(items) // per_shard))


@writer("shard-sizes")
def write_shards(items, folder, per_shard):
    return write(items[: len(items) // per_shard * per_shard] or items, folder, per_shard)


@writer("outside-folder")
def write_shards(items, folder, per_shard):
    return write(items, Path(folder).parent, per_shard)


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


@writer("keys-repeat")
def write_shards(items, folder, per_shard):
    """Numbers that begin anew in each shard."""
    return write(items, folder, per_shard, key=lambda k, path: f"{k % per_shard:04d}")


@writer("keys-repeat")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: path.stem.replace(".", "-"))


@writer("dot-in-key")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: f"{k}-{path.stem}")


@writer("dot-in-key")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, key=lambda k, path: f"{path.parent.name}/{path.stem}")


@writer("bytes-changed")
def write_shards(items, folder, per_shard):
    def encoded(path):
        content = io.BytesIO()
        Image.open(path).convert("RGB").save(content, "JPEG")
        return content.getvalue()

    return write(items, folder, per_shard, content=encoded)


@writer("label-lost")
def write_shards(items, folder, per_shard):
    return write(items, folder, per_shard, label=chr)


@writer("label-lost")
def write_shards(items, folder, per_shard):
    return write([(path, 0) for path, _ in items], folder, per_shard)


@streamer("nothing-returned")
def stream_shards(paths, buffer=1, seed=0):
    list(stream(paths, buffer, seed))


@streamer("not-samples")
def stream_shards(paths, buffer=1, seed=0):
    return ((Image.open(io.BytesIO(content)), label) for content, label in stream(paths, buffer, seed))


@streamer("not-samples")
def stream_shards(paths, buffer=1, seed=0):
    return ((content, str(label).encode()) for content, label in stream(paths, buffer, seed))


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


@streamer("samples-twice")
def stream_shards(paths, buffer=1, seed=0):
    """A buffer that is drawn from and never emptied."""
    rng, held = random.Random(seed), []
    for path in own_paths(paths):
        for sample in samples(path):
            held = [*held, sample][-max(buffer, 1) :]
            yield sample if buffer <= 1 else rng.choice(held)
    yield from held


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


@streamer("library-called")
def stream_shards(paths, buffer=1, seed=0):
    """Stands for a reader of webdataset, which need not be installed: a function of a module of that name."""
    library = FunctionType(samples.__code__, {**globals(), "__name__": "webdataset.tariterators"})
    return stream(paths, buffer, seed, library)


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


@streamer("all-opened-first")
def stream_shards(paths, buffer=1, seed=0):
    opened = [tarfile.open(path) for path in own_paths(paths)]

    def of(tar):
        files = ((m.name.split(".", 1), tar.extractfile(m).read()) for m in tar)
        for _, group in itertools.groupby(files, key=lambda file: file[0][0]):
            sample = {name[1]: content for name, content in group}
            yield sample["jpg"], int(sample["cls"])

    return stream(opened, buffer, seed, of, list)


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


@streamer("order-changed")
def stream_shards(paths, buffer=1, seed=0):
    shuffled = random.Random(seed).sample(list(paths), len(paths))
    return stream(shuffled, buffer, seed)


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
streamer("same-place")(leaving(lambda rng, n: -1))  # last in, first out
streamer("corner-only")(leaving(lambda rng, n: rng.randrange(min(2, n))))


@streamer("same-place")
def stream_shards(paths, buffer=1, seed=0):
    """Seeds anew for each sample."""
    return stream(paths, buffer, seed, rng=Always(random.Random(seed).randrange(max(1, buffer)), seed))


@streamer("shard-by-shard")
def stream_shards(paths, buffer=1, seed=0):
    for path in own_paths(paths):
        yield from stream([path], buffer, seed, own_paths=list)


@streamer("buffer-too-large")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, 2 * buffer if buffer > 1 else 1, seed)


@streamer("buffer-too-large")
def stream_shards(paths, buffer=1, seed=0):
    """Shuffles the shards too: at once everything is mixed."""
    shuffled = random.Random(seed).sample(list(paths), len(paths)) if buffer > 1 else paths
    return stream(shuffled, buffer, seed)


@streamer("seed-ignored")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, 0)


@streamer("seed-not-enough")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, seed, rng=random)


@streamer("workers-repeat")
def stream_shards(paths, buffer=1, seed=0):
    return stream(paths, buffer, seed, own_paths=list)


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


bank.slip(
    7, "keys-repeat", ("{number:08d}.jpg", "{number % 100:02d}.jpg"), ("{number:08d}.cls", "{number % 100:02d}.cls")
)
bank.slip(
    7,
    "keys-repeat",
    ("{number:08d}.jpg", "{label}-{number % per_shard}.jpg"),
    ("{number:08d}.cls", "{label}-{number % per_shard}.cls"),
)
bank.slip(
    7,
    "no-bytes",
    (
        'tar.add(path, arcname=f"{number:08d}.jpg")',
        'tar.addfile(tarfile.TarInfo(f"{number:08d}.jpg"), open(path, "rb"))',
    ),
)
bank.slip(7, "keys-repeat", ("items[first : first + per_shard], first)", "items[first : first + per_shard])"))
bank.slip(7, "order-changed", ("len(held) >= buffer", "len(held) > buffer"))
bank.slip(7, "paths-changed", ("    for path in mine:\n", "    while mine:\n        path = mine.pop(0)\n"))

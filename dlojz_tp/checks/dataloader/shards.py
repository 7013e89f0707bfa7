"""Balise 7: shards, written and streamed. Files opened and memory are counted, not guessed."""

import io
import random
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

from PIL import Image

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.dataloader.stream import _in_worker
from dlojz_tp.probes.files import Opened

HINTS = {
    "no-shards": "write_shards returns the list of the paths it wrote, in order.",
    "not-tar": "{name} is not a plain tar file that can be read from front to back.",
    "shard-sizes": "Each shard takes {per_shard} samples, and a last, smaller one the rest. Yours hold {sizes}.",
    "outside-folder": "A shard was written outside the given folder.",
    "not-adjacent": "The two entries of a sample must be next to each other: a stream cannot go back.",
    "wrong-entries": "A sample is an entry KEY.jpg and an entry KEY.cls, and nothing else. You wrote: {found}.",
    "keys-repeat": "Two samples share the key {key}. File names repeat from folder to folder, and numbers that "
                   "start again in each shard repeat too. Number the samples over the whole set.",
    "dot-in-key": "The key of the entry {key!r} contains a dot or a folder: everything after the first dot counts "
                  "as the extension.",
    "bytes-changed": "The bytes in the shard are not those of the file. A JPEG file that is decoded and encoded "
                     "again loses quality: copy it as it is.",
    "no-bytes": "The entry of a picture is empty: addfile reads as many bytes as TarInfo.size says, which is 0 "
                "until you set it.",
    "label-lost": "KEY.cls must hold the label as text.",
    "not-samples": "stream_shards yields pairs (bytes, int).",
    "paths-changed": "You changed the list of shards that you were given: {left} of {n} are left. A second pass "
                     "over it reads other shards, or none.",
    "samples-lost": "{n} of {all} samples never come{how}.",
    "samples-twice": "{n} samples come more than once{how}.",
    "label-of-another": "A picture has the label of another one. The entries of a sample may come in any order, "
                        "with other extensions between them: match them by key.",
    "library-called": "This is webdataset's own reader. Write your own with tarfile; the race against the library "
                      "comes below.",
    "extracted": "Files were written to disk while streaming. Read the entries directly from the archive.",
    "opened-again": "A shard was opened {n} times for {samples} samples. Open it once and read it from front to back.",
    "all-opened-first": "All shards were opened before the first sample came out. Open one after the other: some "
                        "sets have thousands.",
    "whole-shard": "Streaming a shard of {size} used {peak} of memory: the whole shard, or a list of its samples, "
                   "is held.",
    "order-changed": "With buffer=1, the samples must come in the order of the shards: each sample leaves as soon "
                     "as it is in the buffer.",
    "not-mixed": "With buffer={buffer}, the samples still come in the order of the shards, except for the last "
                 "{buffer}. Give out a random one of the samples in the buffer, not the first.",
    "same-place": "The sample always leaves from the same place in the buffer. Draw a new place for each sample, "
                  "from a generator made once, before the loop.",
    "corner-only": "With buffer={buffer}, no sample came more than {n} places early: you give out samples from "
                   "only a part of the buffer. Draw from all samples in it.",
    "shard-by-shard": "The buffer is emptied at the end of each shard, so samples of different shards never mix. "
                      "Keep it filled from shard to shard.",
    "closed-blocks": "The samples are mixed in blocks of {buffer}: the buffer is filled, emptied completely and "
                     "filled again. So no sample ever leaves its block, and while the buffer fills, nothing is "
                     "ready. Let one sample leave whenever the next comes in.",
    "buffer-too-large": "A sample came {n} places early with a buffer of {buffer}: you hold more samples than the "
                        "buffer allows.",
    "seed-ignored": "Two seeds gave the same order, except perhaps for the last {buffer} samples.",
    "seed-not-enough": "The same seed gave two orders: draw from your own generator, random.Random(seed).",
    "workers-repeat": "Two workers gave the same samples. Each must read its own shards: ask get_worker_info().",
    "workers-read-all": "A worker opened {n} of {shards} shards to give its share. First choose the shards, then "
                        "open them.",
}


def balise_7(write_shards, stream_shards):
    """Files of random bytes; the shards are read back with the standard library."""
    with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
        folder = Path(folder)
        yield "shards as webdataset reads them: KEY.jpg and KEY.cls, side by side"
        many = _files(folder, 130)
        items = many[:23]
        shards = _written(write_shards, items, folder / "shards", 5)
        _written(write_shards, items[:8], folder / "even", 4)
        _written(write_shards, items[:2], folder / "few", 100)
        _written(write_shards, many, folder / "many", 10)
        yield "streamed: every sample once, with its label, in order"
        ours = _ours(folder / "ours", items)
        _in_order(stream_shards, shards, items, "")
        _in_order(stream_shards, ours, items, ", from shards with .cls first and other extensions")
        yield "nothing is written to disk, and one shard is open at a time"
        _opens(stream_shards, ours, folder)
        yield "a shard is opened once, and never held whole in memory"
        _memory(stream_shards, folder)
        yield "a shuffle buffer: mixed, within its size, the same for the same seed"
        _mixed(stream_shards, ours, items)
        yield "split over workers: each reads its own shards"
        _workers(stream_shards, ours, items, folder)


def _files(folder, n):
    """n small JPEG files in class folders; the same file names in each, as in real sets."""
    items = []
    for k in range(n):
        path = folder / f"class.{k % 3}" / f"img.{k // 3}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (k * 9 % 256, 255 - k, k)).save(path, quality=90)
        # bytes after the end of a JPEG file are no fault, and get lost when it is encoded again
        path.write_bytes(path.read_bytes() + b"tail %d" % k)
        items.append((path, 100 + (7 * k) % 11))
    return items


def _written(write_shards, items, folder, per_shard):
    folder.mkdir()
    shards = write_shards(list(items), folder, per_shard)
    if shards is None:
        raise Wrong("nothing-returned")
    try:
        paths = [Path(shard) for shard in shards]
    except TypeError:
        raise Wrong("no-shards", got=shards) from None
    if not paths or not all(path.is_file() for path in paths):
        raise Wrong("no-shards", got=[path.name for path in paths])
    if any(folder.resolve() not in path.resolve().parents for path in paths):
        raise Wrong("outside-folder")
    samples = [_entries(path) for path in paths]
    _right_entries(samples)
    sizes = [len(found) for found in samples]
    wanted = [min(per_shard, len(items) - first) for first in range(0, len(items), per_shard)]
    if sizes != wanted:
        raise Wrong(
            "shard-sizes", expected=str(wanted), got=str(sizes), per_shard=per_shard, sizes=", ".join(map(str, sizes))
        )
    for (path, label), (_, sample) in zip(items, [pair for found in samples for pair in found], strict=True):
        if not sample["jpg"]:
            raise Wrong("no-bytes", expected=f"{path.stat().st_size} bytes", got="0 bytes")
        if sample["jpg"] != path.read_bytes():
            raise Wrong("bytes-changed", expected=f"{path.stat().st_size} bytes", got=f"{len(sample['jpg'])} bytes")
        if sample["cls"].strip() != str(label).encode():
            raise Wrong("label-lost", expected=str(label), got=str(sample["cls"][:20]))
    return shards


def _entries(path):
    """The samples of a shard, [(key, {extension: bytes})], runs of entries with one key; read as a stream."""
    found = []
    try:
        with tarfile.open(path, "r|") as tar:
            for member in tar:
                if member.isdir():
                    continue
                key, _, extension = member.name.partition(".")
                if not found or found[-1][0] != key or extension in found[-1][1]:
                    found.append((key, {}))
                content = tar.extractfile(member)
                found[-1][1][extension] = content.read() if content else b""
    except tarfile.TarError as error:
        raise Wrong("not-tar", got=str(error), name=path.name) from error
    return found


def _right_entries(samples):
    every = [pair for found in samples for pair in found]
    for key, sample in every:
        extensions = set(sample)
        if "/" in key or any("." in extension for extension in extensions):
            raise Wrong("dot-in-key", key=f"{key}.{min(extensions)}")
    keys = [key for key, _ in every]
    halves = [key for key, sample in every if set(sample) in ({"jpg"}, {"cls"})]
    if halves and all(halves.count(key) == 2 for key in set(halves)):
        raise Wrong("not-adjacent", got=", ".join(f"{key}.{min(sample)}" for key, sample in every[:4]))
    for key, sample in every:
        if set(sample) != {"jpg", "cls"}:
            raise Wrong("wrong-entries", found=", ".join(f"{key}.{extension}" for extension in sample))
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise Wrong("keys-repeat", key=repeated)


def _ours(folder, items, per_shard=4):
    """Shards as other tools write them: extensions in alphabetical order, one more among them."""
    folder.mkdir()
    paths = []
    for first in range(0, len(items), per_shard):
        paths.append(folder / f"train-{first:04d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for k, (path, label) in enumerate(items[first : first + per_shard], first):
                entries = {"cls": str(label).encode(), "json": b'{"n": 1}', "jpg": path.read_bytes()}
                order = list(entries) if k % 2 else list(reversed(entries))
                for extension in order:
                    info = tarfile.TarInfo(f"sample{k:05d}.{extension}")
                    info.size = len(entries[extension])
                    tar.addfile(info, io.BytesIO(entries[extension]))
    return paths


def _streamed(stream_shards, shards, *args):
    given = list(shards)
    got = stream_shards(given, *args)
    if got is None:
        raise Wrong("nothing-returned")
    found = []
    for sample in got:
        right = isinstance(sample, tuple | list) and len(sample) == 2
        if not right or not isinstance(sample[0], bytes | bytearray) or not isinstance(sample[1], int):
            raise Wrong("not-samples", got=sample)
        found.append((bytes(sample[0]), sample[1]))
    if given != list(shards):
        raise Wrong("paths-changed", n=len(shards), left=len(given))
    return found


def _complete(found, items, where):
    wanted = [(path.read_bytes(), label) for path, label in items]
    lost = len(wanted) - len({content for content, _ in found} & {content for content, _ in wanted})
    if lost:
        raise Wrong("samples-lost", n=lost, all=len(wanted), how=where)
    if len(found) > len(wanted):
        raise Wrong("samples-twice", n=len(found) - len(wanted), how=where)
    if sorted(found) != sorted(wanted):
        raise Wrong("label-of-another")
    return [[content for content, _ in wanted].index(content) for content, _ in found]


def _in_order(stream_shards, shards, items, where):
    order = _complete(_streamed(stream_shards, shards), items, where)
    if order != list(range(len(items))):
        raise Wrong("order-changed", expected="0, 1, 2, …", got=f"{', '.join(map(str, order[:8]))}, …")


def _opens(stream_shards, shards, folder):
    with Opened("/", watched=("webdataset",)) as opened:
        samples = iter(stream_shards(list(shards), 1, 0))
        next(samples)
        first = len({path for path in opened.reads if path.endswith(".tar")})
        for _ in samples:
            pass
    if opened.libraries:
        raise Wrong("library-called")
    if opened.writes:
        raise Wrong("extracted", got=f"{len(opened.writes)} files, such as {Path(opened.writes[0]).name}")
    if first == len(shards):
        raise Wrong("all-opened-first")


def _memory(stream_shards, folder):
    """A shard of 60 samples of 100 kB; a stream holds a few of them."""
    path, sample = folder / "large.tar", random.Random(3).randbytes(100_000)
    with tarfile.open(path, "w") as tar:
        for k in range(60):
            for extension, content in (("jpg", sample), ("cls", b"1")):
                info = tarfile.TarInfo(f"{k:05d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    with Opened(folder) as opened:
        n = sum(1 for _ in stream_shards([path], 1, 0))
    # tarfile.open without a mode tries four formats, and so opens a shard up to four times: that is allowed
    if len(opened.reads) > 5:
        raise Wrong("opened-again", n=len(opened.reads), samples=n)
    for buffer in (1, 5):
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        n = sum(1 for _ in stream_shards([path], buffer, 0))
        peak = tracemalloc.get_traced_memory()[1] - before
        if not tracing:
            tracemalloc.stop()
        if n != 60:
            raise Wrong("samples-lost", n=60 - n, all=60, how=", from one shard")
        if peak > (buffer + 12) * 100_000:
            raise Wrong("whole-shard", peak=f"{peak / 1e6:.1f} MB", size="6.0 MB", where=f"buffer={buffer}")


def _mixed(stream_shards, shards, items):
    where = ", with a shuffle buffer"
    first = _complete(_streamed(stream_shards, shards, 6, 1), items, where)
    # at the end the rest leaves, in any order: what a buffer is shows before
    lead = len(items) - 6
    if first[:lead] == list(range(lead)):
        raise Wrong("not-mixed", buffer=6)
    for buffer in (6, 2, 100):
        random.seed(buffer)
        order = _complete(_streamed(stream_shards, shards, buffer, 1), items, where)
        if buffer == 2 and order[: len(items) - 2] == list(range(len(items) - 2)):
            raise Wrong("not-mixed", buffer=2)
        # sample i cannot leave before it was read: with b held, at most b - 1 places early (one more is allowed)
        early = max(sample - place for place, sample in enumerate(order))
        if early > buffer:
            raise Wrong("buffer-too-large", n=early, buffer=buffer)
    second = _complete(_streamed(stream_shards, shards, 6, 2), items, where)
    for slug, blocks in (("shard-by-shard", [4]), ("closed-blocks", [5, 6, 7])):
        if any(all(_closed(order, block) for order in (first, second)) for block in blocks):
            raise Wrong(slug, buffer=6)
    early = [[sample - place for place, sample in enumerate(order[:lead])] for order in (first, second)]
    if all(len(set(places)) <= 2 for places in early):
        raise Wrong("same-place", got=f"{', '.join(map(str, first[:8]))}, …")
    if max(map(max, early)) < 3:  # of 34 draws from 5 or 6 that are held, none but the first three: never by chance
        raise Wrong("corner-only", n=max(map(max, early)), buffer=6)
    random.seed(77)
    if first != _complete(_streamed(stream_shards, shards, 6, 1), items, where):
        raise Wrong("seed-not-enough")
    if first[:lead] == second[:lead]:
        raise Wrong("seed-ignored", buffer=6)


def _closed(order, block):
    """Whether each block of places holds just the samples of that block: by chance that happens less than once in 10⁴."""
    return all(max(order[:end]) < end for end in range(block, len(order), block))


def _workers(stream_shards, shards, items, folder):
    for workers in (2, 3, 7):
        found, opened_by = [], []
        for number in range(workers):
            with _in_worker(number, workers), Opened(folder) as opened:
                found.append(_streamed(stream_shards, shards, 3, 1))
            opened_by.append(len(set(opened.reads)))
        if set(found[0]) & set(found[1]):
            raise Wrong("workers-repeat", where=f"{workers} workers")
        where = f", with {workers} workers and {len(shards)} shards"
        _complete([sample for part in found for sample in part], items, where)
        if workers < len(shards) and max(opened_by) > -(-len(shards) // workers):
            raise Wrong("workers-read-all", n=max(opened_by), shards=len(shards))

"""Balise 7: shards, written and streamed. Files opened and memory are counted, not guessed."""

import functools
import io
import random
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

from PIL import Image

from dlojz_tp.judging.checking.looks import Look, above, at_most, judged, silent, tried
from dlojz_tp.judging.checks.dataloader.pretended_worker import in_worker
from dlojz_tp.judging.probes.files import Opened

WRITTEN = {"shards": (23, 5), "even": (8, 4), "few": (2, 100), "many": (130, 10)}  # folder: (items, per_shard)
N, OURS = 23, 6  # samples that are streamed, and our shards that hold them
MIXED = {"first": (6, 1), "two": (2, 1), "all": (100, 1), "second": (6, 2), "again": (6, 1)}  # name: (buffer, seed)
HELD = 1, 5  # buffers with which memory is measured
WORKERS = 2, 3, 7


def observe(write_shards, stream_shards, folder):
    """Files of random bytes; the shards are read back with the standard library."""
    many, shards = _files(folder, 130), {}
    for name, (n, per_shard) in WRITTEN.items():
        (folder / name).mkdir()
        shards[name] = write_shards(many[:n], folder / name, per_shard)
        yield from _written(name, shards[name], folder / name, many[:n])
    ours, found = _ours(folder / "ours", many[:N]), functools.partial(_found, many[:N])
    yield from found("theirs", _streamed(stream_shards, shards["shards"]))
    yield from found("ours", _streamed(stream_shards, ours))
    with Opened("/", watched=("webdataset",)) as opened:
        samples = iter(stream_shards(list(ours), 1, 0))
        next(samples)
        first = {path for path in opened.reads if path.endswith(".tar")}
        list(samples)
    yield {"libraries": sorted(opened.libraries), "writes": opened.writes, "opened first": len(first)}
    yield from _memory(stream_shards, folder)
    for name, more in MIXED.items():
        random.seed(name)  # which no order may depend on
        yield from found(name, _streamed(stream_shards, ours, *more))
    for workers in WORKERS:
        streams, opened_by = [], []
        for number in range(workers):
            with in_worker(number, workers), Opened(folder) as opened:
                streams.append(_streamed(stream_shards, ours, 3, 1))
            opened_by.append(len(set(opened.reads)))
        yield from found(workers, *streams)
        yield {(workers, "opened"): max(opened_by)}


def _files(folder, n):
    """n small JPEG files in class folders; the same file names in each, as in real sets."""
    items = []
    for k in range(n):
        path = folder / f"class.{k % 3}" / f"img.{k // 3}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (k * 9 % 256, 255 - k, k)).save(path, quality=90)
        # bytes after the end of a JPEG file are no fault, and get lost when it is encoded again
        path.write_bytes(path.read_bytes() + b"tail %d" % k)
        items.append((path, _label(k)))
    return items


def _label(k):
    return 100 + (7 * k) % 11


def _written(name, shards, folder, items):
    """The shards, read as a stream: which files they are, their entries, what these hold."""
    paths = shards if shards is None else tried(lambda: [Path(shard) for shard in shards])
    yield {(name, "paths"): paths}
    yield {(name, "outside"): [path.name for path in paths if folder.resolve() not in path.resolve().parents]}
    read = [(path.name, tried(_entries, path)) for path in paths]
    yield {(name, "unread"): [pair for pair in read if isinstance(pair[1], str)]}
    every = [pair for _, found in read for pair in found]
    keys = [key for key, _ in every]
    halves = [key for key, sample in every if set(sample) in ({"jpg"}, {"cls"})]
    apart = halves and all(halves.count(key) == 2 for key in halves)
    entries = [", ".join(f"{key}.{extension}" for extension in sample) for key, sample in every]
    yield {
        (name, "dots"): [f"{key}.{min(sample)}" for key, sample in every if "/" in key or "." in "".join(sample)],
        (name, "apart"): [", ".join(entries[:4])] if apart else [],
        (name, "entries"): [text for text, (_, sample) in zip(entries, every) if set(sample) != {"jpg", "cls"}],
        (name, "repeated"): [key for key in keys if keys.count(key) > 1],
        (name, "sizes"): [len(found) for _, found in read],
    }
    pairs = [(path.read_bytes(), sample["jpg"]) for (path, _), (_, sample) in zip(items, every, strict=True)]
    yield {
        (name, "empty"): [key for key, sample in every if not sample["jpg"]],
        (name, "changed"): [(len(due), len(got)) for due, got in pairs if got != due],
        (name, "labels"): [sample["cls"].strip().decode(errors="replace") for _, sample in every],
    }


def _entries(path):
    """The samples of a shard, [(key, {extension: bytes})], runs of entries with one key; read as a stream."""
    found = []
    with tarfile.open(path, "r|") as tar:
        for member in tar:
            if member.isdir():
                continue
            key, _, extension = member.name.partition(".")
            if not found or found[-1][0] != key or extension in found[-1][1]:
                found.append((key, {}))
            content = tar.extractfile(member)
            found[-1][1][extension] = content.read() if content else b""
    return found


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
                    _add(tar, f"sample{k:05d}.{extension}", entries[extension])
    return paths


def _add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _streamed(stream_shards, shards, *args):
    """What comes, to the first thing that is no sample; the paths that were given, before and after."""
    given, found = list(shards), []
    got = stream_shards(given, *args)
    for sample in () if got is None else got:
        found.append(sample)
        if not _is_sample(sample):
            break
    return None if got is None else found, list(shards), given


def _is_sample(sample):
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    return pair and isinstance(sample[0], bytes | bytearray) and isinstance(sample[1], int)


def _found(items, name, *streams):
    """What came of the items in one stream, or in those of all workers; their order as places in `items`."""
    samples = [sample for found, *_ in streams for sample in found or ()]
    yield {
        (name, "others"): None if streams[0][0] is None else [one for one in samples if not _is_sample(one)],
        (name, "paths"): [(len(before), len(after)) for _, before, after in streams if before != after],
    }
    places = {path.read_bytes(): k for k, (path, _) in enumerate(items)}
    order = [places.get(bytes(content), -1) for content, _ in samples]
    firsts = [{bytes(content) for content, _ in found} for found, *_ in streams[:2]]
    yield {
        (name, "in two"): len(streams) > 1 and not firsts[0].isdisjoint(firsts[1]),
        (name, "lost"): len({*range(len(items))} - {*order}),
        (name, "twice"): max(0, len(order) - len(items)),
        (name, "labels"): all(label == _label(k) for k, (_, label) in zip(order, samples)),
        (name, "order"): order,
    }


def _memory(stream_shards, folder):
    """A shard of 60 samples of 100 kB; a stream holds a few of them."""
    path, sample = folder / "large.tar", random.Random(3).randbytes(100_000)
    with tarfile.open(path, "w") as tar:
        for k in range(60):
            _add(tar, f"{k:05d}.jpg", sample)
            _add(tar, f"{k:05d}.cls", b"1")
    with Opened(folder) as opened:
        list(stream_shards([path], 1, 0))
    yield {"opened": len(opened.reads)}
    for buffer in HELD:
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        n = sum(1 for _ in stream_shards([path], buffer, 0))
        peak = tracemalloc.get_traced_memory()[1] - before
        if not tracing:
            tracemalloc.stop()
        yield {("missing", buffer): 60 - n, ("peak", buffer): peak}


def _first(name):
    """A look's fields: the first of what was seen."""
    return lambda seen, due: silent(seen, due) | {name: seen[0]}


def _writer(name, claim=""):
    """Looks at what was written in one of the cases."""
    n, per_shard = WRITTEN[name]
    return [
        Look(claim, (name, "paths"), "paths of files", "no-shards",
             holds=lambda seen, _: isinstance(seen, list) and bool(seen) and all(map(Path.is_file, seen))),
        Look("", (name, "outside"), [], "outside-folder", fields=_first("got")),
        Look("", (name, "unread"), [], "not-tar",
             fields=lambda seen, _: {"expected": "", "name": seen[0][0], "got": seen[0][1]}),
        Look("", (name, "dots"), [], "dot-in-key", fields=_first("key")),
        Look("", (name, "apart"), [], "not-adjacent", fields=_first("got")),
        Look("", (name, "entries"), [], "wrong-entries", fields=_first("found")),
        Look("", (name, "repeated"), [], "keys-repeat", fields=_first("key")),
        Look("", (name, "sizes"), [min(per_shard, n - first) for first in range(0, n, per_shard)], "shard-sizes",
             fields=lambda seen, _: {"per_shard": per_shard, "sizes": ", ".join(map(str, seen))}),
        Look("", (name, "empty"), [], "no-bytes", fields=silent),
        Look("", (name, "changed"), [], "bytes-changed",
             fields=lambda seen, _: {"expected": f"{seen[0][0]} bytes", "got": f"{seen[0][1]} bytes"}),
        Look("", (name, "labels"), [str(_label(k)) for k in range(n)], "label-lost"),
    ]  # fmt: skip


def _counted(n, how):
    return lambda seen, due: silent(seen, due) | {"n": seen, "all": n, "how": how, "where": how.strip(", ")}


def _complete(name, how, claim=""):
    """Looks at whether each sample comes once."""
    return [
        Look(claim, (name, "others"), [], "not-samples", fields=_first("got")),
        Look("", (name, "paths"), [], "paths-changed",
             fields=lambda seen, _: {"expected": "", "got": "", "n": seen[0][0], "left": seen[0][1]}),
        Look("", (name, "in two"), False, "workers-repeat", fields=_counted(N, how)),
        Look("", (name, "lost"), 0, "samples-lost", fields=_counted(N, how)),
        Look("", (name, "twice"), 0, "samples-twice", fields=_counted(N, how)),
        Look("", (name, "labels"), True, "label-of-another"),
    ]  # fmt: skip


def _early(order):
    """How many places each sample comes early."""
    return [sample - place for place, sample in enumerate(order)]


def _two_seeds(o):
    return o["first", "order"], o["second", "order"]


def _leads(o):
    """Of two seeds, how early the samples come that leave while the buffer is full."""
    return [_early(order)[: N - 6] for order in _two_seeds(o)]


def _crosses(orders, blocks):
    """Whether samples leave their block, for each size of blocks: by chance none does in less than one of 10⁴."""
    return all(any(max(one[:end]) >= end for one in orders for end in range(size, N, size)) for size in blocks)


def _is_mixed(order, buffer):
    """At the end the rest leaves, in any order: what a buffer is shows before."""
    return buffer > N or order[: N - buffer] != [*range(N - buffer)]


def _in_buffer(order, buffer):
    """Sample i cannot leave before it was read: with b held, at most b - 1 places early (one more is allowed)."""
    return max(_early(order)) <= buffer


def _too_early(seen, due):
    return silent(seen, due) | {"n": max(_early(seen)), "buffer": due}


def _mixed(name, claim=""):
    return [
        *_complete(name, ", with a shuffle buffer", claim),
        Look("", (name, "order"), MIXED[name][0], "not-mixed", holds=_is_mixed, fields=_too_early),
        Look("", (name, "order"), MIXED[name][0], "buffer-too-large", holds=_in_buffer, fields=_too_early),
    ]


def _of_six(seen, due):
    return silent(seen, due) | {"n": seen, "buffer": 6}


LOOKS = [
    *_writer("shards", "shards as webdataset reads them: KEY.jpg and KEY.cls, side by side"),
    *(look for name in ("even", "few", "many") for look in _writer(name)),
    *_complete("theirs", "", "streamed: every sample once, with its label, in order"),
    Look("", ("theirs", "order"), [*range(N)], "order-changed"),
    *_complete("ours", ", from shards with .cls first and other extensions"),
    Look("", ("ours", "order"), [*range(N)], "order-changed"),
    Look("nothing is written to disk, and one shard is open at a time", "libraries", [], "library-called",
         fields=silent),
    Look("", "writes", [], "extracted", fields=_first("got")),
    Look("", "opened first", OURS - 1, "all-opened-first", holds=at_most),
    # tarfile.open without a mode tries four formats, and so opens a shard up to four times: that is allowed
    Look("a shard is opened once, and never held whole in memory", "opened", 5, "opened-again", holds=at_most,
         fields=lambda seen, _: {"n": seen, "samples": 60}),
    *(look for buffer in HELD for look in (
        Look("", ("missing", buffer), 0, "samples-lost", holds=at_most, fields=_counted(60, ", from one shard")),
        Look("", ("peak", buffer), (buffer + 12) * 100_000, "whole-shard", holds=at_most,
             fields=lambda seen, _: {"expected": "", "got": "", "peak": f"{seen / 1e6:.1f} MB", "size": "6.0 MB"}))),
    *_mixed("first", "a shuffle buffer: mixed, within its size, the same for the same seed"),
    *(look for name in ("two", "all", "second") for look in _mixed(name)),
    Look("", _two_seeds, [4], "shard-by-shard", holds=_crosses, fields=_of_six),
    Look("", _two_seeds, [5, 6, 7], "closed-blocks", holds=_crosses, fields=_of_six),
    Look("", lambda o: max(len({*lead}) for lead in _leads(o)), 2, "same-place", holds=above, fields=_of_six),
    # of 34 draws from 5 or 6 that are held, none but the first three: never by chance
    Look("", lambda o: max(map(max, _leads(o))), 2, "corner-only", holds=above, fields=_of_six),
    *_complete("again", ", with a shuffle buffer"),
    Look("", lambda o: o["first", "order"] == o["again", "order"], True, "seed-not-enough"),
    Look("", lambda o: _leads(o)[0] == _leads(o)[1], False, "seed-ignored", fields=_of_six),
    *(look for workers in WORKERS for look in (
        *_complete(workers, f", with {workers} workers and {OURS} shards",
                   "split over workers: each reads its own shards" * (workers == 2)),
        Look("", (workers, "opened"), -(-OURS // workers) if workers < OURS else OURS, "workers-read-all",
             holds=at_most, fields=lambda seen, _: {"n": seen, "shards": OURS}))),
]  # fmt: skip


def balise_7(write_shards, stream_shards):
    with tempfile.TemporaryDirectory(prefix="dlojz-") as folder:
        yield from judged(LOOKS, observe, write_shards, stream_shards, Path(folder))

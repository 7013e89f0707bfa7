"""Answers to 13_zero_under_the_hood: a checkpoint in pieces."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 10, whole=True)

# a mark in each step's folder; the newest folder that has one counts; pieces are put together with torch.cat
bank.text(None, '''
import os
import shutil

def save_shards(folder, step, shards, lengths):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = Path(folder) / f"{step:012d}"
    if rank == 0:
        if place.exists() and not (place / "complete.json").exists():
            shutil.rmtree(place)
        place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    values = {name: value.detach().to("cpu", copy=True) for name, value in shards.items()}
    torch.save({"values": values, "lengths": lengths, "n": n}, place / f"rank{rank:05d}.pt")
    dist.barrier()
    if rank == 0:
        (place / "complete.tmp").write_text(json.dumps({"n": n, "lengths": dict(lengths)}))
        (place / "complete.tmp").rename(place / "complete.json")
    dist.barrier()

def load_shards(folder):
    marks = sorted(Path(folder).glob("*/complete.json"))
    if not marks:
        return None
    about, place = json.loads(marks[-1].read_text()), marks[-1].parent
    rank, now, n = dist.get_rank(), dist.get_world_size(), about["n"]
    found, opened = {}, {}

    def values(k):
        if k not in opened:
            opened.clear()
            opened[k] = torch.load(place / f"rank{k:05d}.pt", weights_only=True)["values"]
        return opened[k]

    wanted = {}
    for name, length in about["lengths"].items():
        old, new = -(-length // n), -(-length // now)
        wanted[name] = old, new, rank * new, min(length, (rank + 1) * new)
        found[name] = []
    for k in range(n):
        for name, (old, new, begin, end) in wanted.items():
            low, high = max(begin, k * old), min(end, (k + 1) * old)
            if low < high:
                found[name].append(values(k)[name][low - k * old : high - k * old].clone())
    for name, pieces in found.items():
        if not pieces:
            pieces.append(values(min(rank, n - 1))[name][:0])
        whole = torch.cat(pieces)
        found[name] = torch.nn.functional.pad(whole, (0, wanted[name][1] - len(whole)))
    return int(place.name), found
''')  # fmt: skip

# one file for each name and rank, marks in a folder of their own, the old checkpoint removed afterwards
bank.text(None, '''
import os
import shutil

def save_shards(folder, step, shards, lengths):
    folder, rank, n = Path(folder), dist.get_rank(), dist.get_world_size()
    place = folder / f"data-{step}-{n}"
    if (folder / "latest").exists() and torch.load(folder / "latest")["place"] == place.name:
        place = folder / f"{place.name}-b"
    place.mkdir(parents=True, exist_ok=True)
    for name, value in shards.items():
        with open(place / f"{name}.{rank}.tmp", "wb") as file:
            torch.save(value.clone(), file)
        os.rename(place / f"{name}.{rank}.tmp", place / f"{name}.{rank}")
    dist.barrier()
    if rank == 0:
        temporary = folder / "new"
        torch.save({"step": step, "n": n, "lengths": dict(lengths), "place": place.name}, temporary)
        os.replace(temporary, folder / "latest")
        for other in folder.glob("data-*"):
            if other != place:
                shutil.rmtree(other)
    dist.barrier()

def load_shards(folder):
    try:
        mark = torch.load(Path(folder) / "latest", weights_only=True)
    except FileNotFoundError:
        return None
    place, n, now, rank = Path(folder) / mark["place"], mark["n"], dist.get_world_size(), dist.get_rank()
    shards = {}
    for name, length in mark["lengths"].items():
        old, new = -(-length // n), -(-length // now)
        first = min(rank * new // old, n - 1)
        last = min(max(rank * new + new - 1, 0) // old, n - 1)
        pieces = [torch.load(place / f"{name}.{k}", mmap=True, weights_only=True) for k in range(first, last + 1)]
        joined = torch.cat(pieces)
        begin = rank * new - first * old
        own = joined[begin : begin + new]
        keep = max(0, min(new, length - rank * new))
        shards[name] = torch.cat([own[:keep], own.new_zeros(new - keep)])
    return mark["step"], shards
''')  # fmt: skip

# numpy files, written whole and moved; the mark is a folder's name
bank.text(None, '''
import os

import numpy

def save_shards(folder, step, shards, lengths):
    rank, n, folder = dist.get_rank(), dist.get_world_size(), Path(folder)
    place = folder / f"writing-{step}-{n}"
    place.mkdir(parents=True, exist_ok=True)
    for name, value in shards.items():
        numpy.save(place / f"{name}-{rank}.npy", value.detach().cpu().float().numpy())
    dist.barrier()
    if rank == 0:
        kinds = {name: str(value.dtype)[6:] for name, value in shards.items()}
        (place / "about.json").write_text(json.dumps([step, n, kinds, lengths]))
        os.rename(place, folder / f"complete-{step}-{n}")
    dist.barrier()

def load_shards(folder):
    places = sorted(Path(folder).glob("complete-*"), key=lambda place: int(place.name.split("-")[1]))
    if not places:
        return None
    step, n, kinds, lengths = json.loads((places[-1] / "about.json").read_text())
    rank, now = dist.get_rank(), dist.get_world_size()
    shards = {}
    for name, length in lengths.items():
        old, new = -(-length // n), -(-length // now)
        own = torch.zeros(new)
        for k in range(n):
            a, b = max(rank * new, k * old), min(rank * new + new, k * old + old, length)
            if a < b:
                piece = numpy.load(places[-1] / f"{name}-{k}.npy", mmap_mode="r")[a - k * old : b - k * old]
                own[a - rank * new : b - rank * new] = torch.from_numpy(piece.copy())
        shards[name] = own.to(getattr(torch, kinds[name]))
    return step, shards
''')  # fmt: skip

# a symbolic link to the newest folder; a mark in it that names what it must hold
LINKED = """
import os

def save_shards(folder, step, shards, lengths):
    rank, n = dist.get_rank(), dist.get_world_size()
    name = f"{step}.{n}"
    if os.path.realpath(f"{folder}/newest").endswith(f"/{name}"):
        name += ".again"
    place = os.path.join(folder, name)
    os.makedirs(place, exist_ok=True)
    with open(f"{place}/{rank}.pt", "wb") as file:
        torch.save([(name, t.detach().clone()) for name, t in shards.items()], file)
        file.flush()
        os.fsync(file.fileno())
    everyone = [None] * n
    dist.all_gather_object(everyone, step)
    if rank == 0:
        with open(f"{place}/about.json", "w") as file:
            json.dump({"n": n, "lengths": lengths, "step": step}, file)
        if os.path.islink(f"{folder}/next"):
            os.unlink(f"{folder}/next")
        os.symlink(name, f"{folder}/next")
        os.replace(f"{folder}/next", f"{folder}/newest")
    dist.barrier()

def load_shards(folder):
    if not os.path.exists(f"{folder}/newest"):
        return None
    with open(f"{folder}/newest/about.json") as file:
        about = json.load(file)
    rank, now, shards = dist.get_rank(), dist.get_world_size(), {}
    for name, length in about["lengths"].items():
        old, new = -(-length // about["n"]), -(-length // now)
        at, pieces = rank * new, []
        while at < min(length, (rank + 1) * new):
            source = dict(torch.load(f"{folder}/newest/{at // old}.pt", mmap=True, weights_only=True))[name]
            until = min(length, (rank + 1) * new, (at // old + 1) * old)
            pieces.append(source[at % old : at % old + until - at].clone())
            at = until
        if not pieces:
            pieces = [dict(torch.load(f"{folder}/newest/0.pt", mmap=True, weights_only=True))[name][:0].clone()]
        pieces.append(pieces[0].new_zeros(new - sum(map(len, pieces))))
        shards[name] = torch.cat(pieces)
    return about["step"], shards
"""
bank.text(None, LINKED)
bank.text("written-over", LINKED.replace('name += ".again"', "pass"))

bank.slip("not-saved", ("    return mark", "    mark"))
bank.slip("not-saved", ('(folder / "mark.partial").replace(folder / "mark.json")', "pass"))
bank.slip("gathered-to-save", (
    "    partial, file =",
    "    for name in shards:\n        everyone = [torch.empty_like(shards[name]) for _ in range(world_size)]\n"
    "        dist.all_gather(everyone, shards[name].contiguous())\n    partial, file =",
))  # fmt: skip
bank.slip("whole-storage-saved", ("t.detach().cpu().clone()", "t.detach().cpu()"))
bank.slip("saved-again-by-all", (
    "    dist.barrier()\n    if rank == 0:",
    "    for copy in range(3):\n        torch.save({n: t.clone() for n, t in shards.items()}, place / f'{rank}.{copy}')\n    dist.barrier()\n    if rank == 0:",
))  # fmt: skip
bank.slip("returned-too-early", ('folder / "mark.json")\n    dist.barrier()\n', 'folder / "mark.json")\n'))
bank.slip("marked-too-early", ("partial.replace(file)\n    dist.barrier()\n", "partial.replace(file)\n"))
bank.slip(
    "marked-too-early",
    ("partial.replace(file)\n    dist.barrier()\n", "dist.barrier()\n    partial.replace(file)\n"),
)
bank.slip("marked-too-early", (  # the mark first, then the file
    '    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)\n'
    '    partial.replace(file)\n    dist.barrier()\n', "",
), ('folder / "mark.json")\n    dist.barrier()\n', 'folder / "mark.json")\n'
    '    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)\n'
    '    partial.replace(file)\n    dist.barrier()\n'))  # fmt: skip
bank.slip("old-checkpoint-lost", (  # the old mark is removed before the new one is there
    "    place.mkdir(", '    if rank == 0:\n        (folder / "mark.json").unlink(missing_ok=True)\n    dist.barrier()\n    place.mkdir(',
))  # fmt: skip
ELSEWHERE = """    if last.exists() and json.loads(last.read_text())["place"] == place.name:
        place = folder / f"{place.name}-again"  # never write where the mark points
"""
# written over the old files
bank.slip("half-new", ('f"step-{step}-of-{world_size}"', '"latest"'), (ELSEWHERE, ""))
bank.slip("half-new", ('f"step-{step}-of-{world_size}"', '"latest"'), (ELSEWHERE, ""),
          ('    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)\n'
           '    partial.replace(file)\n',
           "    torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, file)\n"))  # fmt: skip
bank.slip("interrupted-unloadable", (
    '        (folder / "mark.partial").write_text(json.dumps(mark))\n        (folder / "mark.partial").replace(folder / "mark.json")\n',
    '        (folder / "mark.json").write_text(json.dumps(mark))\n',
))  # fmt: skip
# all files in one folder, and what is there is read
bank.text("leftover-mixed", '''
import os

def save_shards(folder, step, shards, lengths):
    rank, place = dist.get_rank(), Path(folder) / f"step-{step:06d}"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{rank}.pt"
    torch.save({name: t.clone() for name, t in shards.items()}, f"{file}.partial")
    os.replace(f"{file}.partial", file)
    dist.barrier()
    if rank == 0:
        (place / "mark").write_text(json.dumps(lengths))
        os.replace(place / "mark", place / "mark.json")
    dist.barrier()

def load_shards(folder):
    marks = sorted(Path(folder).glob("step-*/mark.json"))
    if not marks:
        return None
    place = marks[-1].parent
    files = sorted(place.glob("*.pt"))
    shards = {}
    for name, length in json.loads(marks[-1].read_text()).items():
        then, now = (-(-length // n) for n in (len(files), dist.get_world_size()))
        begin = dist.get_rank() * now
        for k, file in enumerate(files):
            low, high = max(begin, k * then), min(begin + now, (k + 1) * then, length)
            kind = torch.bfloat16 if name == "half" else torch.float32
            own = shards.setdefault(name, torch.zeros(now, dtype=kind))
            if low < high:
                piece = torch.load(file, mmap=True, weights_only=True)[name]
                own[low - begin : high - begin] = piece[low - k * then : high - k * then]
    return int(place.name[5:]), shards
''')  # fmt: skip
bank.slip("no-checkpoint-not-none", ('    if not (Path(folder) / "mark.json").exists():\n        return None\n', ""))
bank.slip("no-checkpoint-not-none", ("        return None\n", "        return 0, {}\n"))
bank.slip("not-a-pair", ('return mark["step"], shards', "return shards"))
bank.slip("not-a-pair", ('return mark["step"], shards', 'return {"step": mark["step"]} | shards'))
bank.slip("wrong-step", ('return mark["step"], shards', 'return mark["step"] + 1, shards'))
bank.slip("wrong-step", ('f"step-{step}-of-{world_size}"', 'f"step-{step}"'), (  # sorted by name, 9 comes after 10
    'Path(folder) / mark["place"]', 'sorted(Path(folder).glob("step-*"))[-1]'),
    ('return mark["step"]', 'return int(files[0].parent.name[5:])'))  # fmt: skip
bank.slip("names-differ", ("shards[name]", 'shards[name.replace(".", "_")]'))
bank.slip("old-sizes", (
    "then, now = (-(-length // n) for n in (len(files), dist.get_world_size()))",
    "then = now = -(-length // len(files))"),
    ("begin = dist.get_rank() * now", "begin = min(dist.get_rank(), len(files) - 1) * now"))  # fmt: skip
bank.slip("old-sizes", (  # the padding of then is cut as well
    "dist.get_world_size()))\n", "dist.get_world_size()))\n        length = then * len(files)\n        now = -(-length // dist.get_world_size())\n",
))  # fmt: skip
bank.slip("dtype-changed", ('dtype=getattr(torch, mark["dtypes"][name])', "dtype=torch.float32"))
bank.slip("dtype-changed", (".cpu().clone()", ".cpu().float().clone()"), ("str(t.dtype)", "str(torch.float32)"))
bank.slip("wrong-part", ("begin = dist.get_rank() * now", "begin = 0 * now"))
bank.slip("wrong-part", (
    "        for k, file in enumerate(files):\n", "        for k, file in enumerate(files[dist.get_rank() % len(files)] for _ in files):\n",
))  # fmt: skip
bank.slip("reads-everything", ("            if low < high:\n                piece = torch.load(file, mmap=True, weights_only=True, map_location=\"cpu\")[name]\n",
                                   "            piece = torch.load(file, weights_only=True)[name]\n            if low < high:\n"))  # fmt: skip
# all files are mapped, and one is read
bank.slip("reads-everything", (
    "    for name, length in mark", "    everything = [torch.load(f, mmap=True, weights_only=True) for f in files]\n    for name, length in mark"),
    ('torch.load(file, mmap=True, weights_only=True, map_location="cpu")[name]', "everything[k][name]"))  # fmt: skip
bank.slip("reads-everything", (
    "    for name, length in mark", "    everything = [torch.load(f, mmap=True, weights_only=True) for f in files]\n"
    "    everything = [{n: t.clone() for n, t in d.items()} for d in everything]\n    for name, length in mark",
))  # fmt: skip
bank.slip("whole-in-memory", (  # each rank puts all shards together, to cut them anew
    '    return mark["step"], shards', """    n, found = dist.get_world_size(), {}
    for name, t in shards.items():
        found[name] = [torch.empty_like(t) for _ in range(n)]
        dist.all_gather(found[name], t)
    return mark["step"], {name: parts[dist.get_rank()] for name, parts in found.items()}"""))  # fmt: skip
bank.slip("still-the-file", (  # a short cut for as many ranks as saved
    "        for k, file in enumerate(files):\n", """        if len(files) == dist.get_world_size():
            shards[name] = torch.load(files[dist.get_rank()], mmap=True, weights_only=True)[name]
            continue
        for k, file in enumerate(files):
"""))  # fmt: skip
bank.text("still-the-file", '''
import numpy

def save_shards(folder, step, shards, lengths):
    rank, n = dist.get_rank(), dist.get_world_size()
    place = Path(folder) / f"{step}-{n}"
    place.mkdir(parents=True, exist_ok=True)
    for name, t in shards.items():
        t.detach().float().numpy().tofile(place / f"{name}.{rank}")
    dist.barrier()
    if rank == 0:
        kinds = {name: str(t.dtype).split(".")[1] for name, t in shards.items()}
        (place / "mark.partial").write_text(json.dumps([step, n, lengths, kinds]))
        (place / "mark.partial").replace(place / "mark")
    dist.barrier()

def load_shards(folder):
    marks = sorted(Path(folder).glob("*/mark"), key=lambda mark: int(mark.parent.name.split("-")[0]))
    if not marks:
        return None
    step, then, lengths, kinds = json.loads(marks[-1].read_text())
    place, now, rank, shards = marks[-1].parent, dist.get_world_size(), dist.get_rank(), {}
    for name, length in lengths.items():
        old, new = -(-length // then), -(-length // now)
        pieces, at, end = [], rank * new, min((rank + 1) * new, length)
        while at < end:
            values = numpy.memmap(place / f"{name}.{at // old}", dtype="float32", mode="c")
            until = min(end, (at // old + 1) * old)
            pieces.append(torch.from_numpy(values[at % old : at % old + until - at]))
            at = until
        if sum(map(len, pieces)) < new:
            pieces.append(torch.zeros(new - sum(map(len, pieces))))
        shards[name] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(getattr(torch, kinds[name]))
    return step, shards
''')  # fmt: skip
bank.text("checkpoint-borrowed", '''
import torch.distributed.checkpoint as dcp

def save_shards(folder, step, shards, lengths):
    rank = dist.get_rank()
    place = Path(folder) / f"step-{step}"
    dcp.save({f"{name}.{rank}": t.clone() for name, t in shards.items()}, checkpoint_id=place)
    if rank == 0:
        (place / "mark").write_text(json.dumps([step, dist.get_world_size(), lengths]))
    dist.barrier()

def load_shards(folder):
    marks = sorted(Path(folder).glob("step-*/mark"))
    if not marks:
        return None
    step, then, lengths = json.loads(marks[-1].read_text())
    state = {f"{name}.{k}": torch.zeros(-(-n // then)) for name, n in lengths.items() for k in range(then)}
    dcp.load(state, checkpoint_id=marks[-1].parent)
    found = {}
    for name, n in lengths.items():
        whole = torch.cat([state[f"{name}.{k}"] for k in range(then)])[:n]
        each = -(-n // dist.get_world_size())
        whole = torch.cat([whole, whole.new_zeros(each * dist.get_world_size() - n)])
        found[name] = whole.split(each)[dist.get_rank()].clone()
    return step, found
''')  # fmt: skip
bank.text("checkpoint-borrowed", '''
from torch.distributed.checkpoint import FileSystemWriter, save

def save_shards(folder, step, shards, lengths):
    writer = FileSystemWriter(Path(folder) / f"step-{step}", thread_count=1)
    save({f"{name}.{dist.get_rank()}": t for name, t in shards.items()}, storage_writer=writer)

def load_shards(folder):
    return None
''')  # fmt: skip
bank.slip("unsafe-load", ("weights_only=True", "weights_only=False"))
bank.slip("objects-saved", ("{name: t.detach().cpu().clone() for name, t in shards.items()}",
                                "{name: (t.detach().cpu().clone(), Path(folder)) for name, t in shards.items()}"),
          ('map_location="cpu")[name]', 'map_location="cpu")[name][0]'))  # fmt: skip
bank.text(
    "nothing-written",
    """
KEPT = {}


def save_shards(folder, step, shards, lengths):
    KEPT[str(folder)] = step, {name: t.clone() for name, t in shards.items()}


def load_shards(folder):
    return KEPT.get(str(folder))
""",
)
bank.slip("leftover-refused", (
    "    partial, file =", "    if (place / f'{rank}.pt').exists():\n        raise FileExistsError('already saved')\n    partial, file =",
))  # fmt: skip
bank.slip("leftover-refused", ("    place.mkdir(parents=True, exist_ok=True)\n",
          "    if rank == 0:\n        place.mkdir(parents=True)\n    dist.barrier()\n"))  # fmt: skip
bank.slip(
    "leftover-mixed",
    ("    torch.save({", "    if file.exists():\n        file.replace(partial)\n    else:\n        torch.save({"),
)
bank.slip("written-over", ('        place = folder / f"{place.name}-again"', "        pass"))
bank.slip(
    "interrupted-unloadable",
    (
        '        (folder / "mark.partial").write_text(json.dumps(mark))\n        (folder / "mark.partial").replace(folder / "mark.json")\n',
        """        opened = open(folder / "mark.partial", "w")
        opened.write(json.dumps(mark))
        (folder / "mark.partial").replace(folder / "mark.json")
        opened.close()
""",
    ),
)
bank.slip(None, ("torch.save({name: t.detach().cpu().clone() for name, t in shards.items()}, partial)",
          "torch.save(obj={name: t.detach().cpu().clone() for name, t in shards.items()}, f=partial)"),
          ("torch.load(file, mmap=True", "torch.load(f=file, mmap=True"))  # fmt: skip

"""Balise 7: a checkpoint written by one rank, whole or not at all, and resumed on another number of ranks."""

import contextlib
import functools
import resource
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, silent, within
from dlojz_tp.judging.probes.files import Opened, unsafe_loads
from dlojz_tp.judging.probes.gpus import on_gpus
from dlojz_tp.judging.probes.late_rank import Waits
from dlojz_tp.judging.probes.networks import mean_losses
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.judging.probes.traffic import Traffic

BATCH, EPOCHS, SAVED_AFTER, OTHER_EPOCH = 12, 4, 2, 7
NO_MORE = "on rank 1 no more than on rank 0"
PATIENCE = 2.0  # seconds that rank 0 gives a rank which waits in a way that nobody sees, for the file itself, say


class Network(nn.Module):
    """A small network with a buffer that changes at every training step, as batch norm's do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.temperature.mul_(0.97)
        return self.second(torch.tanh(self.first(x))) / self.temperature


def _made(seed=0):
    torch.manual_seed(seed)
    model = Network()
    # one that resumes is made with another rate: that of the checkpoint has to come back
    return model, torch.optim.SGD(model.parameters(), lr=0.05 if seed else 0.2, momentum=0.9)


def _losses(model, optimizer, epochs):
    """The mean loss of each step over all ranks; the order of the samples depends on the epoch alone."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(36, 4, generator=generator, dtype=torch.float64), torch.randint(3, (36,), generator=generator)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    orders = (torch.randperm(36, generator=torch.Generator().manual_seed(epoch)) for epoch in epochs)
    shares = (batch[rank::size] for order in orders for batch in order.split(BATCH))
    return mean_losses(optimizer, (F.cross_entropy(model(x[mine]), y[mine]) for mine in shares))


@functools.cache
def _uninterrupted():
    """One process: (its state when the others save, the losses of the steps after that)."""
    model, optimizer = _made()
    _losses(model, optimizer, range(SAVED_AFTER))
    state = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return state, _losses(model, optimizer, range(SAVED_AFTER, EPOCHS))


_WAITS: list[Waits] = []


def _late(*_):
    """A hook that pickle finds by its name."""
    _WAITS[-1].others_wait(limit=PATIENCE, besides=("back",))


def _save(save_checkpoint, path):
    """On a rank: train, save to a path of its own (who writes?), then to the common one (who waits?)."""
    rank = dist.get_rank()
    model, optimizer = _made()
    parallel = DistributedDataParallel(model)
    _losses(parallel, optimizer, range(SAVED_AFTER))
    own = path.parent / f"rank{rank}"
    own.mkdir()
    save_checkpoint(own / path.name, parallel, optimizer, OTHER_EPOCH)
    with Waits("checkpoint") as waits:
        if rank == 0:  # it writes late: a rank that does not wait is back by then
            _WAITS.append(waits)
            late = model.register_state_dict_post_hook(_late)
        save_checkpoint(path, parallel, optimizer, SAVED_AFTER)
        there = path.exists()
        waits.tell("back")
    if rank == 0:
        late.remove()
    dist.barrier()
    kept = path.stat().st_ino if there else None  # a file that is moved into place is another file
    dist.barrier()
    with Opened(path.parent) as opened:
        save_checkpoint(path, parallel, optimizer, SAVED_AFTER)
    return {
        "there": there, "file": path.exists(), "written": [entry.name for entry in own.iterdir()],
        "in place": there and path.stat().st_ino == kept, "moves": opened.moves,
    }  # fmt: skip


def _names(tree):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key)
            yield from _names(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _names(value)


def _resume(load_checkpoint, path):
    """On a rank: load into a network with other weights, and go on."""
    model, optimizer = _made(seed=5 + dist.get_rank())
    wrapped = DistributedDataParallel(model) if dist.get_world_size() % 2 == 0 else model  # both must do
    with unsafe_loads() as unsafe:
        epoch = load_checkpoint(path, wrapped, optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {
        "replaced": [name for name, p in model.named_parameters() if id(p) not in held], "unsafe": bool(unsafe),
        "epoch": epoch if type(epoch) is int else repr(epoch), "losses": [],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
    }  # fmt: skip
    other = load_checkpoint(path.parent / "rank0" / path.name, *_made())
    found["other"] = "None" if other is None else other
    epochs = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, found["epoch"])  # a rank that goes on without the others waits for ever
    if epochs == [SAVED_AFTER] * len(epochs):
        found["losses"] = _losses(DistributedDataParallel(model), optimizer, range(epoch, EPOCHS))
    return found


def _resume_on_gpu(gpu, save_checkpoint, load_checkpoint, path):
    """On a rank with a GPU: save, load into another network; (bytes that lay on another GPU meanwhile, whose it is)."""
    rank = dist.get_rank()
    device = torch.device("cuda", 1 - rank)  # as on a second node: not the number of the rank
    torch.cuda.set_device(device)
    models = []
    for _ in range(2):
        model = _made(seed=rank)[0].to(device)
        models.append((model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)))
    model, optimizer = models[0]
    model(torch.ones(2, 4, dtype=torch.float64, device=device)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, 1)
    dist.barrier()
    load_checkpoint(path, *models[1])
    return {"loaded": (gpu.peak[rank], 1 - rank)}


def _begin(load_checkpoint, path):
    """On a rank: load what is not there."""
    model, optimizer = _made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = {"epoch": "", "error": "something else came back"}
    try:
        found["epoch"] = load_checkpoint(path, model, optimizer)
    except (OSError, RuntimeError, ValueError) as error:
        found["error"] = f"it raised {type(error).__name__}"
    return {"begun": found | {"kept": all(close(model.state_dict()[name], value) for name, value in before.items())}}


def _save_on_full_disk(save_checkpoint, path):
    """On a rank: no file of rank 0 may grow beyond half of the checkpoint. Returns (whether it raised, collectives)."""
    model, optimizer = _made()
    _losses(model, optimizer, range(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails with an error, as on a full disk
    limit = path.stat().st_size // 2
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit if dist.get_rank() == 0 else hard, hard))
    raised = True
    with Traffic() as traffic:
        try:
            with contextlib.suppress(OSError, RuntimeError):
                save_checkpoint(path, model, optimizer, 3)
                raised = False
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    dist.destroy_process_group()  # whoever still waits for this rank gets an error, as when a process ends
    return raised, len(traffic.events)


def _full_disk(save_checkpoint, path, saved):
    """What is left of the old checkpoint; and how the new one took its place when rank 0 `saved` it."""
    before, moves = path.read_bytes(), saved["moves"]
    (failed, calls), (_, awaited) = on_ranks(_save_on_full_disk, save_checkpoint, path, sizes=(2,), timeout=15)[2]
    left = "no file" if not path.exists() else "the old file" if path.read_bytes() == before else "a damaged file"
    return saved | {
        "file": left, "failed": failed,
        "calls": NO_MORE if awaited <= calls else f"{calls} collectives on rank 0, {awaited} on rank 1",
        "away": ["moved away" if target else "removed" for source, target in moves if source == path],
        "elsewhere": [one.parent for one, target in moves if target == path and path.parent not in one.parents],
    }  # fmt: skip


def _content(path):
    try:
        names = list(_names(torch.load(path, weights_only=True)))
    except Exception:
        return {"content": "a file with Python objects"}
    return {"content": "tensors and numbers", "prefixed": [name for name in names if name.startswith("module.")]}


def _restored(name):
    """A look at a parameter or buffer after loading."""
    slug = "buffers-forgotten" if name == "temperature" else "weights-forgotten"

    def find(ranks):
        due, values = _uninterrupted()[0][name], [rank["state"][name] for rank in ranks]
        for rank, got in enumerate(values):
            if not close(got, due, 1e-7):
                told = {"expected": due, "got": got, "where": f"rank {rank} of {len(ranks)}"}
                return "ranks-resume-apart" if rank else slug, told
        return None

    return recognised("", find)


def _optimizer_or_more(got, due):
    return "optimizer-forgotten" if close(got[0], due[0], 1e-7) else "resume-wrong"


def _loaded(got, _):
    return {"got": got[0], "other": got[1]}


def _nothing_done(got, due):
    return got["kept"] and got["epoch"] == due and got["epoch"] is not False


ON_RANK_1 = {"rank": 1, "where": "rank 1 of 2"}
SAVING = [
    Look("only rank 0 writes, and all ranks return when the file is there",
         lambda ranks: all(ranks[0][key] for key in ("file", "written", "there")), True, "nothing-saved"),
    Look("", lambda ranks: ranks[1]["written"], [], "all-ranks-write", fields={"expected": ""} | ON_RANK_1),
    Look("", lambda ranks: ranks[1]["there"], True, "no-barrier", fields=ON_RANK_1),
]  # fmt: skip
CONTENT = [
    Look("the file holds only tensors and numbers, under the network's own names",
         "content", "tensors and numbers", "whole-module-pickled"),
    Look("", "prefixed", [], "module-prefix", fields=silent),
]  # fmt: skip
RESUMING = [
    each_rank("resumed on 1, 2, 3 and 4 ranks, the losses are those of the uninterrupted run",
              "replaced", [], "parameters-replaced", fields=lambda got, due: {"name": got[0]} | silent(got, due)),
    *map(_restored, ("first.weight", "first.bias", "second.weight", "second.bias", "temperature")),
    each_rank("", "epoch", SAVED_AFTER, "epoch-forgotten"),
    each_rank("", "other", OTHER_EPOCH, "epoch-forgotten"),
    each_rank("", "unsafe", False, "unsafe-load", fields=silent),
    each_rank("", "losses", lambda _: _uninterrupted()[1], _optimizer_or_more, holds=within(1e-7)),
]  # fmt: skip
ON_GPUS = [
    each_rank("where each of two ranks has a GPU, neither loads onto the other's GPU", "loaded", 0, "loaded-onto-other",
              holds=lambda got, due: got[0] == due, fields=_loaded),
]  # fmt: skip
BEGINNING = [
    each_rank("if there is no file, training starts from the beginning", "begun", 0, "no-file-no-zero",
              holds=_nothing_done, fields=lambda got, _: {"error": got["error"], "got": got["epoch"]}),
]  # fmt: skip
FULL = [
    Look("if the disk fills up while writing, the old checkpoint stays intact and no rank keeps waiting",
         "file", "the old file", "old-file-lost"),
    Look("", "failed", True, "failure-hidden"),
    Look("", "calls", NO_MORE, "others-left-waiting"),
    Look("", "in place", False, "copied-into-place"),
    Look("", "away", [], "away-for-a-moment", fields=lambda seen, due: {"how": seen[0]} | silent(seen, due)),
    Look("", "elsewhere", [], "written-elsewhere", fields=lambda seen, due: {"folder": seen[0]} | silent(seen, due)),
]  # fmt: skip


def balise_7(save_checkpoint, load_checkpoint):
    """Trained on 2 ranks, saved, resumed on 1, 3 and 4; then a disk that fills up while the file is written."""
    on_two = functools.partial(on_ranks, sizes=(2,), timeout=15)
    with tempfile.TemporaryDirectory(prefix="dlojz-check-") as folder:
        path = Path(folder) / "two" / "checkpoint.pt"
        path.parent.mkdir()
        yield SAVING[0].claim
        ranks = on_two(_save, save_checkpoint, path)[2]
        yield from judged(SAVING, lambda: ranks)
        yield from judged(CONTENT, _content, path)
        yield RESUMING[0].claim
        for size, found in on_ranks(_resume, load_checkpoint, path, timeout=15).items():
            yield from judged(RESUMING, lambda found=found: found, at=size)
        given = save_checkpoint, load_checkpoint, path.parent / "gpu.pt"
        yield from judged(ON_GPUS, lambda: on_gpus(_resume_on_gpu, *given, known=(), timeout=15) or [])
        yield from judged(BEGINNING, lambda: on_two(_begin, load_checkpoint, Path(folder) / "none.pt")[2])
        yield from judged(FULL, _full_disk, save_checkpoint, path, ranks[0])

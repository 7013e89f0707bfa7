"""Balise 7: a checkpoint written by one rank, whole or not at all, and resumed on another number of ranks."""

import contextlib
import resource
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.files import Opened, unsafe_loads
from dlojz_tp.probes.gpus import on_gpus
from dlojz_tp.probes.late_rank import Waits
from dlojz_tp.probes.networks import mean_losses
from dlojz_tp.probes.ranks import on_ranks
from dlojz_tp.probes.traffic import Traffic

HINTS = {
    "nothing-saved": "No file was written to `path`.",
    "all-ranks-write": "Rank {rank} wrote the file too. Several writers damage a file: only rank 0 may write.",
    "no-barrier": "Rank {rank} returned before the file was there. It might load, or end the job, too early: wait "
                  "for rank 0.",
    "whole-module-pickled": "The file does not load with weights_only=True, because it holds Python objects. Save "
                            "state_dicts and plain numbers.",
    "old-file-lost": "Writing failed half-way (the disk was full), and the old checkpoint is gone too. Write to "
                     "another file in the same folder, and move it into place when it is complete.",
    "copied-into-place": "You write the complete file a second time, over the old one. If this stops half-way, the "
                         "checkpoint is damaged: move the new file into place (Path.replace).",
    "away-for-a-moment": "The old file was {how} before the new one had its name. A process that is killed between "
                         "the two leaves no checkpoint at `path`. Path.replace puts the new file in the place of "
                         "the old one in a single operation.",
    "written-elsewhere": "You wrote the new file in {folder}. If that is another file system, the file is copied "
                         "instead of moved, and a copy may stop half-way. Write it into the folder of `path`.",
    "failure-hidden": "Writing failed, but save_checkpoint raised no error. Let the error through.",
    "others-left-waiting": "Writing failed on rank 0, and rank 1 waits until the group's time limit for a message "
                           "that rank 0 never sends. Tell the other ranks whether it worked, so that they raise "
                           "too.",
    "module-prefix": "The names in the file start with 'module.', so it loads only into a wrapped network. Save "
                     "the state of the network inside.",
    "epoch-forgotten": "load_checkpoint must return the number of epochs already done.",
    "parameters-replaced": "{name} is another object after loading, but the optimizer still holds the old one and "
                           "would update that. Write into the existing parameters, without assign=True.",
    "optimizer-forgotten": "The first losses after resuming are right, but later ones are not. The optimizer's "
                           "state (momentum, learning rate) is part of the checkpoint.",
    "buffers-forgotten": "The parameters were restored, but the buffers were not. state_dict() has both.",
    "weights-forgotten": "After loading, the network doesn't have the weights that were saved.",
    "ranks-resume-apart": "After loading, the ranks have different states. Every rank has to load.",
    "no-file-no-zero": "If there is no file, load_checkpoint must change nothing and return 0: {error}",
    "loaded-onto-other": "Where each rank has a GPU, rank {rank} loads {got} bytes onto the GPU of rank {other}. "
                         "torch.load puts a tensor back where it was saved, and on a second node the GPU numbers "
                         "start at 0 again. Two ranks then fill that GPU, and if it doesn't exist, loading fails. "
                         "Set map_location to the network's device, or to the CPU.",
    "unsafe-load": "With weights_only=False, a file can run any code while it loads. This file holds tensors and "
                   "plain numbers, which load with weights_only=True.",
    "resume-wrong": "When resumed on {size} ranks, the losses are not those of the uninterrupted run.",
}

BATCH, EPOCHS, SAVED_AFTER, OTHER_EPOCH = 12, 4, 2, 7
PATIENCE = 2.0  # seconds that rank 0 gives a rank which waits in a way that nobody sees, for the file itself, say


def balise_7(save_checkpoint, load_checkpoint):
    """Trained on 2 ranks, saved, resumed on 1, 3 and 4; then a disk that fills up while the file is written."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    with tempfile.TemporaryDirectory(prefix="dlojz-check-") as folder:
        path = Path(folder) / "two" / "checkpoint.pt"
        path.parent.mkdir()
        yield "only rank 0 writes, and all ranks return when the file is there"
        ranks = on_ranks(_save, save_checkpoint, path, sizes=(2,), timeout=15)[2]
        _right_saving(path, ranks)
        yield "the file holds only tensors and numbers, under the network's own names"
        _right_content(path)
        yield "resumed on 1, 2, 3 and 4 ranks, the losses are those of the uninterrupted run"
        truth = _uninterrupted()
        for size, found in on_ranks(_resume, load_checkpoint, path, timeout=15).items():
            _right_resuming(size, found, truth)
        yield "where each of two ranks has a GPU, neither loads onto the other's GPU"
        found = on_gpus(_resume_on_gpu, save_checkpoint, load_checkpoint, path.parent / "gpu.pt", known=(), timeout=15)
        for rank, nbytes in enumerate(found or ()):
            if nbytes:
                where = f"rank {rank} of 2, whose GPU is cuda:{1 - rank}"
                raise Wrong("loaded-onto-other", rank=rank, other=1 - rank, expected="0 bytes", got=nbytes, where=where)
        yield "if there is no file, training starts from the beginning"
        on_ranks(_right_beginning, load_checkpoint, Path(folder) / "none.pt", sizes=(2,), timeout=15)
        yield "if the disk fills up while writing, the old checkpoint stays intact and no rank keeps waiting"
        before = path.read_bytes()
        (failed, calls), (_, awaited) = on_ranks(_save_on_full_disk, save_checkpoint, path, sizes=(2,), timeout=15)[2]
        if not path.exists() or path.read_bytes() != before:
            raise Wrong("old-file-lost", got="no file" if not path.exists() else "a damaged file")
        if not failed:
            raise Wrong("failure-hidden")
        if awaited > calls:
            raise Wrong(
                "others-left-waiting", expected=f"{calls} collectives on both ranks", got=f"{awaited} on rank 1"
            )
        if ranks[0][2]:
            raise Wrong("copied-into-place")
        _right_moves(path, ranks[0][3])


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
    shares = (
        batch[rank::size]
        for epoch in epochs
        for batch in torch.randperm(36, generator=torch.Generator().manual_seed(epoch)).split(BATCH)
    )
    return mean_losses(optimizer, (F.cross_entropy(model(x[mine]), y[mine]) for mine in shares))


def _uninterrupted():
    model, optimizer = _made()
    return _losses(model, optimizer, range(EPOCHS))[SAVED_AFTER * 3 :]


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
        if rank == 0:  # it writes late: who does not wait is back by then
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
    in_place = there and path.stat().st_ino == kept
    return there, [entry.name for entry in own.iterdir()], in_place, opened.moves


def _right_moves(path, moves):
    for source, target in moves:
        if source == path:
            raise Wrong("away-for-a-moment", how="moved away" if target else "removed")
        if target == path and path.parent not in source.parents:
            raise Wrong("written-elsewhere", folder=source.parent)


def _right_saving(path, ranks):
    if not path.exists() or not ranks[0][1]:
        raise Wrong("nothing-saved", expected=f"a file {path.name}", got="no file")
    for rank, (there, written, *_) in enumerate(ranks):
        if rank and written:
            raise Wrong("all-ranks-write", got=", ".join(written), where=f"rank {rank} of 2", rank=rank)
        if not there:
            raise Wrong("no-barrier" if rank else "nothing-saved", where=f"rank {rank} of 2", rank=rank)


def _right_content(path):
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        raise Wrong("whole-module-pickled", got="a file with Python objects") from error
    if any(name.startswith("module.") for name in _names(content)):
        raise Wrong("module-prefix")


def _names(tree):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key)
            yield from _names(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _names(value)


def _resume(load_checkpoint, path):
    """On a rank: load into a network with other weights, and go on. Returns (epoch, epoch of another file, state, whether code
    might have run, losses)."""
    model, optimizer = _made(seed=5 + dist.get_rank())
    wrapped = DistributedDataParallel(model) if dist.get_world_size() % 2 == 0 else model  # both must do
    with unsafe_loads() as unsafe:
        epoch = load_checkpoint(path, wrapped, optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if other := next((name for name, p in model.named_parameters() if id(p) not in held), ""):
        raise Wrong("parameters-replaced", name=other)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = load_checkpoint(path.parent / "rank0" / path.name, *_made())
    epochs = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, epoch)  # who goes on without the others waits for ever
    if any(not isinstance(told, int) or told != SAVED_AFTER for told in epochs):
        return epoch, other, state, bool(unsafe), []
    losses = _losses(DistributedDataParallel(model), optimizer, range(epoch, EPOCHS))
    return epoch, other, state, bool(unsafe), losses


def _resume_on_gpu(gpu, save_checkpoint, load_checkpoint, path):
    """On a rank with a GPU: save, load into another network; bytes that lay on the other rank's GPU meanwhile."""
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
    return gpu.peak[rank]


def _right_resuming(size, ranks, truth):
    model, optimizer = _made()
    _losses(model, optimizer, range(SAVED_AFTER))
    for rank, (epoch, other, state, unsafe, _) in enumerate(ranks):
        where = f"rank {rank} of {size}"
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if close(state[name], value, 1e-7):
                continue
            if close(ranks[0][2][name], value, 1e-7):
                expected, got = f"{ranks[0][0]}, as rank 0 returned", f"{epoch}, and other weights"
                raise Wrong("ranks-resume-apart", expected=expected, got=got, where=f"{where}, {name}")
            slug = "buffers-forgotten" if name == "temperature" else "weights-forgotten"
            raise Wrong(slug, expected=value, got=state[name], where=f"{where}, {name}")
        if type(epoch) is not int or epoch != SAVED_AFTER:
            raise Wrong("epoch-forgotten", expected=SAVED_AFTER, got=repr(epoch), where=where)
        if other != OTHER_EPOCH:
            raise Wrong("epoch-forgotten", expected=OTHER_EPOCH, got=other, where=f"{where}, another file")
        if unsafe:
            raise Wrong("unsafe-load", where=where)
    for rank, (*_, losses) in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if not close(losses, truth, 1e-7):
            slug = "optimizer-forgotten" if close(losses[0], truth[0], 1e-7) else "resume-wrong"
            raise Wrong(slug, expected=truth, got=losses, where=where, size=size)


def _right_beginning(load_checkpoint, path):
    model, optimizer = _made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        epoch = load_checkpoint(path, model, optimizer)
    except (OSError, RuntimeError, ValueError) as error:
        raise Wrong("no-file-no-zero", error=f"it raised {type(error).__name__}") from error
    if (
        epoch != 0
        or epoch is False
        or not all(close(model.state_dict()[name], value) for name, value in before.items())
    ):
        raise Wrong("no-file-no-zero", expected=0, got=epoch, error="something else came back")


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

# %% [markdown] tags=["slide"]
# # The data loader: batches that are ready before you ask for them · about 110 min, core 45
#
# A GPU that waits for its batch costs as much as one that works. You write a data set over files, a recorder that shows
# who waits for whom, and a function that chooses loader options from trials.
#
# **What you will gain.** The seconds that a step waits for its batch. Without workers, each step waits until a whole
# batch is loaded. Your loader works ahead, so a step waits only when the cores can't keep up.

# %% tags=["setup"] jupyter={"source_hidden": true}
import io
import multiprocessing
import os
import queue
import random
import statistics
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchvision.transforms import RandomResizedCrop, v2

from dlojz_tp import course, data, gains, measure, planner, recorded, report, scale, todo, training_run, worth

tp = course.open("05_dataloader")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = training_run.setting().image_size  # pixels of a side
BATCH = training_run.setting().batch_size
WORKERS = training_run.setting().workers  # the largest number that is tried
N_FILES = 2000 if FULL else 400  # photographs that are read, written and streamed
STEPS = 40 if FULL else 8  # batches of a trial
PRETENDED_STEP = 0.05  # seconds: a step of the simulated device, if there is no GPU

# %% jupyter={"source_hidden": true}
photos = data.image_set()
files = random.Random(0).sample(photos.train, min(N_FILES, len(photos.train)))
transform, large_transform = training_run.make_transform(SIZE), training_run.make_transform(224)


def fresh_model():
    return training_run.fast_model(len(photos.classes))


network = fresh_model() if DEVICE.type == "cuda" else None
optimizer = training_run.make_optimizer(network.parameters()) if network else None
MEAN, STD = (255 * torch.tensor(c, device=DEVICE)[:, None, None] for c in (training_run.MEAN, training_run.STD))


def byte_step(model, images, labels, optimizer, device):
    """training_run.fast_step for images of bytes (b, 3, h, w), already on the device."""
    return training_run.fast_step(model, (images.float() - MEAN) / STD, labels, optimizer, device)


def show_waits(*records):
    """Means over the counted steps of each record."""
    rows = []
    for record in records:
        steps = measure.counted_steps(record)
        waited, whole = (statistics.mean(step[part] for step in steps) for part in ("loading", "total"))
        rows.append((record.name, waited, whole, BATCH / whole))
    seconds = measure.human_seconds
    report.table({"loader": "{}", "a step waits": seconds, "a step takes": seconds, "images/s": "{:,.0f}"}, rows)


# %% [markdown]
# ## The baseline: how long does a step wait?
#
# On a GPU, the step is a training step. On a CPU, the network and the workers would compete for the same cores, so a
# **simulated device** takes the network's place: its step takes 50 ms and uses no core.


# %%
def device_step(images, labels):
    """A step that is over when it returns: training on a GPU, a simulated device elsewhere."""
    if network is None:
        time.sleep(PRETENDED_STEP)
        return
    step = byte_step if images.dtype == torch.uint8 else training_run.fast_step
    step(network, images, labels, optimizer, DEVICE)
    torch.cuda.synchronize()


def waits(name, loader, steps=STEPS, **settings):
    """A run record: the wait for each batch ("loading"), the step, and both ("total")."""
    chrono = measure.Chronometer("cpu", warmup=3)  # steps are over when they return: the CPU's clock is enough
    for images, labels in chrono.steps(loader, n=steps + 3):
        with chrono.step():
            device_step(images, labels)
    return chrono.record(name, batch_size=BATCH, **settings)


without = waits("no workers", training_run.make_loader(num_workers=0))
show_waits(without)
print(gains.expected("05_dataloader"))

# %% [markdown] tags=["slide"]
# ## The idea
#
# Loading a batch takes one process $t_\text{load}$ seconds, and a step takes $t_\text{step}$. If the two take turns,
# each waits for the other. With $w$ workers that load ahead, only the slower side counts:
#
# $$T_\text{sync} = n\,(t_\text{load} + t_\text{step})
# \qquad\qquad
# T_\text{async} \approx t_\text{load} + n\,\max\!\left(\frac{t_\text{load}}{w},\ t_\text{step}\right)$$
#
# The figure draws this formula for 60 ms of loading and 30 ms per step.


# %% tags=["slide"] jupyter={"source_hidden": true}
def drawn(load, step, n, workers):
    """Events of a perfect loader: a picture of the formula, not a measurement."""
    events, free = [], 0.0
    for i in range(n):
        begin = free if workers == 0 else load * (i // workers)
        got = max(free, begin + load)
        events += [("loading", i % workers if workers else -1, begin, begin + load)]
        events += [("waiting", -1, free, got), ("step", -1, got, got + step)]
        free = got + step
    return events


pictures = {"in turn": 0, "one worker": 1, "two workers": 2}
report.timeline({name: drawn(0.06, 0.03, 6, workers) for name, workers in pictures.items()})

# %% [markdown]
# ## A data set over files
#
# ### Balise 1 · A data set over JPEG files · about 13 min
#
# A data set keeps *paths*, and decodes a picture only when it is asked for. Each worker gets a copy of the data set, so
# keep no open file and no decoded picture in it.
#
# `items` is a list of `(path, label)`. Item `i` is `(transform(picture), label)`: the full-size picture as a PIL image
# in RGB (some files are grey or CMYK), and the label as an `int`.
#
# Some files are missing, cut short or not pictures at all. Raise an error whose message **names the file**; never skip
# it. An index that is too large raises `IndexError`, as for a list.
#
# <details><summary>Hint</summary>
#
# `Image.open` reads only the header. `convert` decodes the pixels, and fails if the file was cut short. `with
# Image.open(path) as image:` closes the file. `raise RuntimeError(f"…{path}…") from error` keeps the cause.
# </details>


# %% tags=["balise-1"]
class JpegFiles(Dataset):
    """Items (transform(picture), label) from a list of (path, label)."""

    def __init__(self, items, transform):
        self.items = list(items)
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        """Return (transform(picture), label). Raises an error that names the file if it cannot be decoded."""
        # BEGIN SOLUTION
        path, label = self.items[index]
        try:
            with Image.open(path) as image:
                picture = image.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise RuntimeError(f"cannot decode {path}: {error}") from error
        return self.transform(picture), int(label)
        # END SOLUTION


# %%
tp.check(1, JpegFiles)

# %% [markdown]
# ## Who waits for whom?
#
# The given `Timed` adds a stamp to each item: when it was loaded, and by which process.


# %% tags=["setup"] jupyter={"source_hidden": true}
class Timed(Dataset):
    """Items (image, label, stamp); stamp: float64 (begin, end, worker), worker is -1 in the main process."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        begin = time.monotonic()
        image, label = self.dataset[index]
        info = get_worker_info()
        worker = info.id if info else -1
        return image, label, torch.tensor([begin, time.monotonic(), worker], dtype=torch.float64)


# %% [markdown]
# ### Balise 2 · Record a timeline, and predict it · about 15 min
#
# `record_events(loader, step)` goes once through batches `(images, labels, stamps)` and calls `step(images, labels)` on
# each. It returns three events `(kind, worker, begin, end)` for each batch, with times of `time.monotonic()` as Python
# floats:
#
# - `"loading"`: from `loading_event(stamps)`, which is given;
# - `"waiting"`, worker -1: from asking for the batch to having it;
# - `"step"`, worker -1: the call of `step`.
#
# The first wait includes the start of the loader. **Where do you read the clock?**
#
# `predicted_seconds(loading, step, n, workers)` is $T_\text{async}$; `loading` and `step` are the seconds of a batch.
# The case without workers is given.
#
# <details><summary>Hint</summary>
#
# A `for` loop asks for the next batch right after its body has run. Read the clock before the loop, when the body
# begins, and after the step, when the next batch is asked for.
# </details>


# %% tags=["balise-2", "slide-mistake=wait-includes-step"]
def loading_event(stamps):
    """The event of a batch's stamps (b, 3): from the start of its first image to the end of its last."""
    return "loading", int(stamps[0, 2]), stamps[:, 0].min().item(), stamps[:, 1].max().item()


def record_events(loader, step):
    """Go once through `loader`; return [(kind, worker, begin, end)], kinds "loading", "waiting", "step"."""
    events = []
    # BEGIN SOLUTION
    asked = time.monotonic()
    for images, labels, stamps in loader:
        got = time.monotonic()
        step(images, labels)
        done = time.monotonic()
        events += [loading_event(stamps), ("waiting", -1, asked, got), ("step", -1, got, done)]
        asked = time.monotonic()
    # END SOLUTION
    return events


def predicted_seconds(loading, step, n, workers):
    """Seconds of n steps: a batch takes one process `loading` seconds, a step `step`; workers 0: in turn."""
    if workers == 0:
        return n * (loading + step)
    # BEGIN SOLUTION
    return loading + n * max(loading / workers, step)
    # END SOLUTION


# %%
tp.check(2, record_events, predicted_seconds)


# %% tags=["slide"]
def timed_loader(workers):
    items = (files * STEPS)[: (STEPS + 4) * BATCH]
    return DataLoader(Timed(JpegFiles(items, transform)), BATCH, num_workers=workers, pin_memory=DEVICE.type == "cuda")


if DEVICE.type == "cuda":
    record_events(timed_loader(WORKERS), device_step)  # warm up
events = {f"{w} workers" if w else "in turn": record_events(timed_loader(w), device_step) for w in (0, WORKERS)}
report.timeline(events)


# %% jupyter={"source_hidden": true}
def lengths(found, kind):
    return [end - begin for k, _, begin, end in found if k == kind]


load, step = (statistics.median(lengths(events["in turn"], kind)) for kind in ("loading", "step"))
rows = []
for workers, (name, found) in zip((0, WORKERS), events.items()):
    took = max(end for *_, end in found) - min(begin for *_, begin, _ in found)
    first, *later = lengths(found, "waiting")
    predicted = predicted_seconds(load, step, len(later) + 1, workers)
    rows.append((name, predicted, took, first, statistics.mean(later)))
seconds = measure.human_seconds
report.table({"loader": "{}", "predicted": seconds, "measured": seconds, "first wait": seconds,
              "mean of later waits": seconds}, rows)  # fmt: skip

# %% [markdown]
# The prediction leaves out the start of the workers. It is in the first wait, and comes back in each epoch unless
# `persistent_workers=True`.

# %% [markdown]
# ## Random numbers in workers
#
# At the start of a worker, PyTorch seeds the three **global** generators: `torch`, `random` and `numpy.random`. It
# doesn't know about a generator that **your data set owns**. Old tutorials add a `worker_init_fn`.

# %%
different = tp.predict(
    "A data set owns numpy.random.default_rng(0). Two workers each draw one number from it, in two epochs. How many "
    "different values are among the four numbers?",
    ...,
)


# %% tags=["setup"] jupyter={"source_hidden": true}
class Draws(Dataset):
    """Items: what an augmentation would draw from the data set's own generator, and from numpy's global one."""

    def __init__(self, n=4):
        self.n, self.rng = n, np.random.default_rng(0)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return get_worker_info().id, self.rng.random(), np.random.random()


# %%
def old_recipe(worker_id):  # copied from one project to the next since 2017
    np.random.seed(np.random.get_state()[1][0] + worker_id)


rows = [(name, epoch, *numbers)
        for name, init in {"none": None, "the old recipe": old_recipe}.items()
        for epoch in range(2)
        for numbers in DataLoader(Draws(2), None, num_workers=2, worker_init_fn=init)]  # fmt: skip
report.table({"worker_init_fn": "{}", "epoch": "{}", "worker": "{}", "own": "{:.3f}", "numpy": "{:.3f}"}, rows)
why = "Each worker starts from a copy of the same generator, and in the next epoch from a fresh copy."
different.shows(len({own for *_, own, _ in rows}), "{:.0f}", why)

# %% [markdown]
# The old recipe makes numpy's numbers repeat in every epoch.
#
# ### Balise 3 · Random numbers that are right in every worker · further · about 10 min
#
# Return a `DataLoader` over `dataset` with `options` (`batch_size`, `num_workers` of 1 or more, …). Its items draw from
# the three global generators and from `dataset.rng`, which you make in each worker with `numpy.random.default_rng`,
# even if the data set has none yet.
#
# - No two workers and no two epochs draw the same numbers.
# - The same `seed` gives the same numbers, epoch by epoch, whatever else the program draws.
# - No two pairs of `seed` and `rank` share numbers. `seed + rank` fails: rank 1 with seed 5 repeats rank 0 with seed 6.
#
# <details><summary>Hint</summary>
#
# Once an epoch, the loader draws a number from its `generator=`, and the workers' seeds come from that number. If you
# pass your own generator, they depend on nothing else in the program. `np.random.SeedSequence([seed, rank])` mixes two
# numbers; its `generate_state(1)[0]`, as an `int`, suits `manual_seed`. `worker_init_fn(worker_id)` runs in each worker
# after PyTorch has seeded it: there `torch.initial_seed()` differs from worker to worker and epoch to epoch, and
# `get_worker_info().dataset` is the worker's own copy.
# </details>


# %% tags=["balise-3"]
def seed_worker(worker_id):
    """Runs at the start of each worker: give its copy of the data set its own generator."""
    # BEGIN SOLUTION
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())
    # END SOLUTION


def seeded_loader(dataset, seed, rank=0, **options):
    """A DataLoader whose random numbers depend on seed, rank, epoch and worker, and on nothing else."""
    # BEGIN SOLUTION
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    generator = torch.Generator().manual_seed(mixed)
    return DataLoader(dataset, generator=generator, worker_init_fn=seed_worker, **options)
    # END SOLUTION


# %%
tp.check(3, seeded_loader)

# %% [markdown]
# ## Options from trials
#
# `num_workers` processes load, and each keeps `prefetch_factor` batches ready. `pin_memory` lets a GPU copy without the
# CPU's help. `persistent_workers` outlive the epoch. Timings are noisy, so each choice is tried several times.
#
# ### Balise 4 · Choose the loader's options from trials · about 11 min
#
# `trials[choice]` lists the run records of a choice (a tuple of the four options), and `memory[choice]` is its largest
# peak in bytes. `measure.counted_steps(record)` lists the steps without the warm-up, each `{"total": seconds, …}`.
# Write
#
# 1. `seconds[choice]`, the time of a step. Workers deliver in bursts: most steps don't wait, and one in $w$ waits a
#    long time. One disturbed trial among three must not change the result. Mean or median, and over what?
# 2. `cheapest`: of all choices within `tolerance` of the fastest (0.05: 5 %), the one with the fewest workers, then the
#   least memory.
#
# <details><summary>Hint</summary>
#
# A median over the steps of a trial misses the long waits: take their mean. Over trials, take the median. `min(choices,
# key=lambda choice: (…, …))` compares the first numbers, then the second.
# </details>

# %% tags=["setup"] jupyter={"source_hidden": true}
OPTIONS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


# %% tags=["balise-4"]
def choose_options(records, tolerance=0.05):
    """The cheapest options within `tolerance` of the fastest, as {name: value}. Raises ValueError if none is left."""
    trials, failed = {}, set()
    for record in records:
        choice = tuple(record.settings[name] for name in OPTIONS)
        if record.out_of_memory:
            failed.add(choice)
        elif measure.counted_steps(record):
            trials.setdefault(choice, []).append(record)
    seconds, memory = {}, {}
    for choice, found in trials.items():
        if choice in failed:
            continue
        memory[choice] = max(max(record.peak_memory_bytes, default=0) for record in found)
        # the seconds of a step with this choice: seconds[choice]
        # BEGIN SOLUTION
        means = [statistics.mean(step["total"] for step in measure.counted_steps(record)) for record in found]
        seconds[choice] = statistics.median(means)
        # END SOLUTION
    if not seconds:
        raise ValueError("no choice of options is left: every trial failed or counted no step")
    # the choice to take: cheapest
    # BEGIN SOLUTION
    good = [choice for choice in seconds if seconds[choice] <= (1 + tolerance) * min(seconds.values())]
    cheapest = min(good, key=lambda choice: (choice[0], memory[choice]))
    # END SOLUTION
    return dict(zip(OPTIONS, cheapest))


# %%
tp.check(4, choose_options)


# %%
def trial(options):
    """A run record with these options; memory is estimated: the batches that the workers may hold ready."""
    loader = DataLoader(JpegFiles((files * STEPS)[: (STEPS + 4) * BATCH], transform), BATCH, **options)
    held = max(1, options["num_workers"] * (options["prefetch_factor"] or 0)) * BATCH * 3 * SIZE * SIZE * 4
    return waits("trial", loader, peak_memory_bytes=[held], memory_kind="estimated", **options)


pinned = DEVICE.type == "cuda"
choices = [(0, None, pinned, False), (1, 2, pinned, False), (WORKERS, 2, pinned, False), (WORKERS, 4, pinned, False)]
choices += [(4, 2, pinned, False), (WORKERS, 2, False, False)] if FULL else []
records = [trial(dict(zip(OPTIONS, choice))) for _ in measure.rounds(3) for choice in choices]
chosen = choose_options(records)

# %% jupyter={"source_hidden": true}
rows = []
for record in sorted(records, key=lambda record: str([record.settings[name] for name in OPTIONS])):
    mean = statistics.mean(step["total"] for step in measure.counted_steps(record))
    rows.append((*(str(record.settings[name]) for name in OPTIONS), mean, record.images_per_second))
report.table(dict.fromkeys(OPTIONS, "{}") | {"a step takes": measure.human_seconds, "images/s": "{:,.0f}"}, rows)
print("\nchosen:", chosen)

# %% [markdown]
# ## A stream, split over workers and ranks
#
# Every worker of every rank runs `__iter__` of a stream (`IterableDataset`) on its own copy. Without a split, each
# image arrives once **per worker**.
#
# ### Balise 5 · A stream split over workers and ranks · further · about 14 min
#
# All workers of all ranks draw the same `order` from the seed and the epoch; this code is given. Each worker then
# yields its part, and **reads only that**. One way, with two ranks of two workers:
#
# | place in `order` | 0 | 1 | 2 | 3 | 4 | … |
# |---|---|---|---|---|---|---|
# | goes to rank, worker | 0, 0 | 0, 1 | 1, 0 | 1, 1 | 0, 0 | … |
#
# Every item must come exactly once, for any number of ranks and workers, and also without workers. With `even=True`,
# all parts have the same size, as large as possible, and the rest is dropped: ranks with different numbers of steps
# would wait for each other forever.
#
# <details><summary>Hint</summary>
#
# `get_worker_info()` is `None` in the main process, else it has `id` and `num_workers`. Number the parts. A slice with
# a step, `order[part::parts]`, takes every `parts`-th place. Drop from the *shuffled* order. Otherwise the same items
# are dropped in every epoch.
# </details>


# %% tags=["balise-5"]
class SplitStream(IterableDataset):
    """Yields this rank's and this worker's share of `items`, in an order drawn from seed and epoch."""

    def __init__(self, items, seed=0, rank=0, world_size=1, even=False):
        self.items, self.seed, self.rank, self.world_size, self.even = items, seed, rank, world_size, even
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        """Called in the main process before each epoch; persistent workers must see it."""
        self.epoch.fill_(epoch)

    def __iter__(self):
        mixed = int(np.random.SeedSequence([self.seed, self.epoch.item()]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(len(self.items), generator=generator).tolist()  # the same in all workers of all ranks
        # BEGIN SOLUTION
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self.rank * workers + worker, self.world_size * workers
        if self.even:
            order = order[: len(order) // parts * parts]
        for index in order[part::parts]:
            yield self.items[index]
        # END SOLUTION


# %%
tp.check(5, SplitStream)

# %% [markdown]
# ## Resume mid-epoch · further
#
# To resume after batch $k$ of an epoch, save the seed, the epoch and the number of batches that **the loop has used**.
# Can the *sampler*, which hands indices to the workers, count them?

# %%
ahead = tp.predict(
    "Two workers, prefetch_factor=2: once the loop has taken 3 batches, how many has the sampler handed out?", ...
)


# %% jupyter={"source_hidden": true}
class FromPlace(Sampler):
    """The indices of n items in an order drawn from the seed, from place `start` on; `given`: handed out so far."""

    def __init__(self, n, seed, start=0):
        self.n, self.seed, self.start, self.given = n, seed, start, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed)).tolist()
        for index in order[self.start :]:  # what comes before is neither read nor decoded
            self.given += 1
            yield index


def from_batch(batches, seed=7):
    """A loader of 40 items in batches of 4 that starts after the first `batches`, and its sampler."""
    sampler = FromPlace(40, seed, start=4 * batches)
    return DataLoader(range(40), 4, sampler=sampler, num_workers=2, prefetch_factor=2), sampler


whole = [batch.tolist() for batch in from_batch(0)[0]]
loader, sampler = from_batch(0)
running = iter(loader)
used = [next(running).tolist() for _ in range(3)]
handed_out, state = sampler.given // 4, {"seed": 7, "batches": len(used)}
del running  # here the job ends; `state` was saved beside the weights
resumed = [batch.tolist() for batch in from_batch(**state)[0]]
print(f"resumed at batch 3, the batches are the same as in the whole epoch: {resumed == whole[3:]}")
why = "The loader keeps each worker prefetch_factor batches ahead, and a sampler would count these as used."
ahead.shows(handed_out, "{:.0f}", why)

# %% [markdown]
# `torchdata.stateful_dataloader.StatefulDataLoader` replaces `DataLoader` and counts the batches that it *yielded*:
# `loader.state_dict()` goes into the checkpoint.

# %% [markdown]
# ## Copy while the network computes
#
# A **prefetcher** brings batches to the GPU in a thread, and copies in its own *stream*: work in one stream can run at
# the same time as work in another. The computing stream must **wait** for the copy's event, or it reads memory that
# isn't filled yet. And `record_stream` must tell the allocator that the computing stream **uses** the tensor, or the
# next copy may overwrite its memory too early.
#
# ### Balise 6 · A prefetcher · further · about 20 min
#
# A thread works ahead of the loop:
#
# ```
# thread, _fill:    take a place  →  next(batches)  →  _copy: in a stream of its own  →  put it into `ready`
# loop, __iter__:   get it from `ready`  →  give the place back  →  _hand_over: wait for the copy  →  yield it
# ```
#
# `free` is a semaphore of `depth` places: `acquire` takes one or waits, `release` gives one back. At most `depth`
# batches are then ahead of the one in use, **if the thread takes its place before it asks the loader**. At the end, the
# loop sets `stop` and adds a place to wake the thread, which must then look at `stop`. Copy in `self.stream`.
#
# **Write all of it:** `tp.open_task(6)` gives you only names and a docstring. Load and copy ahead of the loop, and
# leave no thread when it ends.
#
# <details><summary>Hint</summary>
#
# `next(batches, ready)` returns `ready` after the last batch. `with torch.cuda.stream(self.stream):` does nothing for
# `None`. `each_tensor(batch, function)`, given, makes a new batch. `self.stream.record_event()` marks the end of the
# copy; a stream waits with `wait_event`. Each thread has its own `torch.cuda.current_stream(device)`: ask for it in the
# loop.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
def each_tensor(batch, function):
    """Apply a function to every tensor of a nest of tuples, lists and dictionaries; return the new nest."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: each_tensor(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(each_tensor(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, function) for value in batch)
    return batch


# %% tags=["balise-6"]
class Prefetcher:
    """Batches of `loader` on `device` (torch.device), in order, at most `depth` ahead of the one in use.

    Only __init__ and __iter__ are called: arrange the rest as you like. Each loop starts a thread that goes through
    `loader` once; nothing is taken without a loop. While the loop works on a batch, the thread takes `depth` more, and
    not one beyond. Batches that the loop has finished with aren't held. An error of the loader is raised in the loop, in
    its place. When the loop ends, by `break` or an error too, the thread takes no further batch and has ended, even if
    the loop must wait for the batch that the loader is making.

    Only tensors are copied, and only their device changes: `each_tensor(batch, function)` replaces each tensor in a nest
    of tuples, named tuples, lists and dictionaries. On a GPU, copy the loader's own pinned tensors with
    non_blocking=True, in a stream of its own. The main thread never waits for the device: when the loop takes a batch,
    the stream that is current there (each thread has its own) waits for the copy, and record_stream tells the allocator
    that this stream uses each tensor.
    """

    def __init__(self, loader, device, depth=2):
        self.loader, self.device, self.depth = loader, torch.device(device), depth
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __iter__(self):
        free, ready, stop = threading.Semaphore(self.depth), queue.SimpleQueue(), threading.Event()
        batches = iter(self.loader)  # here: worker processes are best started by the main thread
        thread = threading.Thread(target=self._fill, args=(batches, free, ready, stop), daemon=True)
        thread.start()
        try:
            while True:
                kind, found, copied = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise found
                # `found` is a batch, `copied` what _copy returned beside it
                # BEGIN SOLUTION
                free.release()
                self._hand_over(found, copied)
                # END SOLUTION
                yield found
        finally:  # also where the loop breaks: wake the thread, or the join never ends
            stop.set()
            free.release()
            thread.join()

    def _fill(self, batches, free, ready, stop):
        """Runs in the thread."""
        try:
            while True:
                # take a place; then `batch` is the loader's next one, or `ready` if there is none
                # BEGIN SOLUTION
                free.acquire()
                if stop.is_set():
                    break
                batch = next(batches, ready)  # ready stands for "no more": no batch can be that object
                # END SOLUTION
                if batch is ready:
                    ready.put(("end", None, None))
                    break
                ready.put(("batch", *self._copy(batch)))
        except BaseException as error:  # whatever it is, the loop must hear of it
            ready.put(("error", error, None))

    def _copy(self, batch):
        """A pair: the batch on the device, and the event that marks the end of the copy (None without a GPU)."""
        # BEGIN SOLUTION
        with torch.cuda.stream(self.stream):  # without a stream, this does nothing
            moved = each_tensor(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
            return moved, self.stream.record_event() if self.stream else None
        # END SOLUTION

    def _hand_over(self, batch, copied):
        """Runs in the loop: its stream waits for the copy, and the allocator learns who uses the batch."""
        if copied is not None:
            # BEGIN SOLUTION
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            each_tensor(batch, lambda tensor: tensor.record_stream(current))
            # END SOLUTION


# %%
tp.check(6, Prefetcher)

# %% [markdown]
# ## A million small files, or a thousand large ones
#
# Each file that is opened on a parallel file system costs a request to a metadata server that all users share.
# **Shards** are tar archives of a few thousand samples that are read from front to back. The files of a sample share a
# name, its key: `00000007.jpg`, `00000007.cls`.
#
# ### Balise 7 · Write shards, and stream them · further · about 16 min
#
# `write_shards(items, folder, per_shard)`: add the two entries of each sample next to each other: `KEY.jpg` (the file,
# unchanged) and `KEY.cls` (the label as text). No two samples of the whole set share a key, and a key contains neither
# a dot nor a folder.
#
# `stream_shards(paths, buffer, seed)` yields samples `(bytes, label)`; `samples_of` reads a shard. Write
#
# - the split: a worker opens only its own part of the shards;
# - the **shuffle buffer**: hold what comes in. As soon as `buffer` samples are held, one of them, drawn at random,
#   leaves. It may be the newcomer, so `buffer=1` keeps the order. With a buffer of 3:
#
# ```
# comes in:   a    b    c    d    e    f
# held:       a    ab   abc  acd  cde  cdf  …
# leaves:               b    a    e    …
# ```
#
# <details><summary>Hint</summary>
#
# `tar.add(file, arcname=name)` copies a file under another name. `enumerate(…, first)` continues the numbers from shard
# to shard. `paths[k::n]` is worker `k`'s part (see `get_worker_info()`). Removing the last item of a list is quick:
# swap the drawn sample with the last one, then `pop`. </details>


# %% tags=["balise-7"]
def add_text(tar, name, text):
    """Add an entry `name` that holds a text to an open tar file."""
    info = tarfile.TarInfo(name)
    info.size = len(text.encode())
    tar.addfile(info, io.BytesIO(text.encode()))


def write_shards(items, folder, per_shard):
    """Write (path, label) items as tar shards into `folder`; return the shards' paths, in order."""
    shards = []
    for first in range(0, len(items), per_shard):
        shards.append(Path(folder) / f"shard-{first // per_shard:06d}.tar")
        with tarfile.open(shards[-1], "w", dereference=True) as tar:  # items[first : first + per_shard] go into it
            # BEGIN SOLUTION
            for number, (path, label) in enumerate(items[first : first + per_shard], first):
                tar.add(path, arcname=f"{number:08d}.jpg")
                add_text(tar, f"{number:08d}.cls", str(label))
            # END SOLUTION
    return shards


def stream_shards(paths, buffer=1, seed=0):
    """Yield (bytes of a JPEG file, label) from this worker's shards, through a shuffle buffer."""
    info = get_worker_info()
    # this worker's shards: mine
    # BEGIN SOLUTION
    mine = paths[info.id :: info.num_workers] if info else paths
    # END SOLUTION
    rng, held = random.Random(seed), []
    for path in mine:
        for sample in samples_of(path):
            # BEGIN SOLUTION
            held.append(sample)
            if len(held) >= buffer:
                place = rng.randrange(len(held))
                held[place], held[-1] = held[-1], held[place]
                yield held.pop()
            # END SOLUTION
    rng.shuffle(held)
    yield from held


def samples_of(path):
    """Yield (bytes, label) of one shard, in its order. "r|" reads a stream: no seeking, nothing extracted to disk."""
    with tarfile.open(path, "r|") as tar:
        current, parts = None, {}
        for member in tar:
            key, _, kind = member.name.partition(".")
            if key != current:
                current, parts = key, {}
            if kind in ("jpg", "cls"):  # other extensions are ignored
                parts[kind] = tar.extractfile(member).read()
            if len(parts) == 2:
                yield parts["jpg"], int(parts["cls"])
                parts = {}
            tar.members.clear()  # tarfile keeps the headers of all it has passed


# %%
tp.check(7, write_shards, stream_shards)

# %% jupyter={"source_hidden": true}
shard_folder = tempfile.TemporaryDirectory()
shards = write_shards(files, shard_folder.name, per_shard=100)
candidates = {"your stream_shards": lambda: sum(1 for _ in stream_shards(shards, buffer=50))}
print(
    f"{candidates['your stream_shards']()} photographs: {len(files)} files to open in an epoch, or {len(shards)} shards"
)
try:
    import webdataset
except ImportError:
    print("webdataset is not installed: pip install webdataset")
else:
    library = webdataset.WebDataset([str(path) for path in shards], shardshuffle=False, empty_check=False)
    library = library.shuffle(50).to_tuple("jpg", "cls")
    candidates["webdataset"] = lambda: sum(1 for _ in library)
    print(measure.race(candidates, repeats=5, warmup=1, device="cpu", calls=1))

# %% [markdown]
# ## Decode less · further
#
# A JPEG file stores frequencies, so a decoder can leave out the high ones and return a picture of half, a quarter or an
# eighth of the size with less work (`Image.draft`). `DraftedFiles` draws the window **before** it decodes, from the
# size in the header.


# %% tags=["setup"] jupyter={"source_hidden": true}
class DraftedFiles(Dataset):
    """Items (uint8 window (3, size, size), label); decoded at the smallest scale that the drawn window allows."""

    def __init__(self, items, size):
        self.items, self.size = items, size
        self.finish = v2.Compose([v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        with Image.open(path) as image:
            top, left, height, width = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            whole = image.size
            shrink = max(1, min(height, width) // self.size)
            image.draft("RGB", (whole[0] // shrink, whole[1] // shrink))  # the decoder takes 1/1, 1/2, 1/4 or 1/8
            x, y = image.size[0] / whole[0], image.size[1] / whole[1]
            box = (left * x, top * y, (left + width) * x, (top + height) * y)
            picture = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        return self.finish(picture), label


# %% jupyter={"source_hidden": true}
to_bytes = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
usual, drafted = JpegFiles(files, to_bytes), DraftedFiles(files, SIZE)
measure.race(
    {
        "window drawn first, fewer pixels decoded": lambda: [drafted[i] for i in range(40)],
        "whole photograph decoded": lambda: [usual[i] for i in range(40)],
    },
    repeats=5, warmup=1, device="cpu", calls=1,
)  # fmt: skip

# %% [markdown]
# ## Measured again
#
# Your loader uses the chosen options, seeds its workers, decodes less, and sends **bytes**, not floats, in **large
# messages**; your prefetcher copies ahead.


# %% jupyter={"source_hidden": true}
class Pieces:
    """Cuts the large batches of a loader into small ones; nothing is copied."""

    def __init__(self, loader, batch_size):
        self.loader, self.batch_size = loader, batch_size

    def __iter__(self):
        for images, labels in self.loader:
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size))


MESSAGE = BATCH if FULL else 4 * BATCH  # photographs that a worker sends at a time

# %% tags=["slide"]
options = chosen | {"persistent_workers": chosen["num_workers"] > 0}
large = seeded_loader(DraftedFiles(photos.train, SIZE), 0, batch_size=MESSAGE, shuffle=True, drop_last=True, **options)
yours = Pieces(Prefetcher(large, DEVICE), BATCH)
show_waits(without, waits("your loader", yours, steps=4 * STEPS))

# %% [markdown]
# If a step still waits, there are too few cores, or they are busy with something else.
#
# The training run of this series now uses its usual loader, then yours. Without a GPU, the network and the workers
# share the cores, so only decoding less can help:

# %%
before = training_run.run("usual loader", training_run.fast_step, model=fresh_model())

# %%
after = training_run.run("your loader", byte_step, model=fresh_model(), loader=yours)
gains.keep("05_dataloader", "loader chosen by trials, prefetcher, fewer pixels, bytes", before=before, after=after)
gains.table()

# %% [markdown]
# The next work begins with the usual loader again: **this gain is not carried over**.
#
# ## Against the pure decode rate · further
#
# A loader can't be faster than processes that only decode the same files. Its **share** is its rate divided by theirs,
# on the same number of cores. The last column counts core seconds instead of elapsed time; trust it if other
# programs are running too.


# %% jupyter={"source_hidden": true}
def decode_alone(dataset, warm, gate, answers):
    """A process that only decodes; it reports its start, end and core seconds, without the first `warm` items."""
    torch.set_num_threads(1)
    for i in range(warm):  # a forked process copies memory at first, and so do the loader's workers
        dataset[i]
    gate.wait()
    begin, core = time.monotonic(), time.process_time()
    for i in range(warm, len(dataset)):
        dataset[i]
    answers.put((begin, time.monotonic(), time.process_time() - core))


def pure_rate(items, convert, workers, warm):
    """What `workers` processes decode and convert with nothing around them: photographs/s, core seconds a photograph.

    warm: photographs that each of them decodes first, and that do not count.
    """
    JpegFiles(items, convert)[0]  # here first: a mistake shows in this process
    fork = multiprocessing.get_context("fork")
    gate, answers = fork.Barrier(workers), fork.SimpleQueue()
    parts = [(JpegFiles(items[i::workers], convert), warm, gate, answers) for i in range(workers)]
    started = [fork.Process(target=decode_alone, args=part, daemon=True) for part in parts]
    for process in started:
        process.start()
    begins, ends, cores = zip(*(answers.get() for _ in started))
    for process in started:
        process.join()
    counted = len(items) - workers * warm
    return counted / (max(ends) - min(begins)), sum(cores) / counted


def core_seconds():
    """Core seconds that this process and its workers have used so far."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children()))


def loader_rate(items, convert, workers, message):
    """pure_rate's figures for what arrives in the training loop; `message`: photographs that a worker sends at once."""
    options = {"num_workers": workers, "prefetch_factor": 2, "pin_memory": DEVICE.type == "cuda"}
    batches = seeded_loader(JpegFiles(items, convert), 0, batch_size=message, **options)
    bursts, marks = len(batches) // workers, []
    for number, _batch in enumerate(Prefetcher(batches, DEVICE), 1):
        # messages come in bursts of one a worker: count from the end of the first burst to the end of the last
        if number in (workers, bursts * workers):
            marks.append((time.monotonic(), core_seconds()))
    seconds, cores = (end - begin for begin, end in zip(*marks))
    photographs = (bursts - 1) * workers * message
    return photographs / seconds, cores / photographs


# %% jupyter={"source_hidden": true}
cores = min(WORKERS, len(os.sched_getaffinity(0)))
many = (files * 40)[: BATCH * (80 if FULL else 32)]
kinds = {"float32, a batch a message": (transform, BATCH), f"bytes, {MESSAGE // BATCH} a message": (to_bytes, MESSAGE)}
measured = [  # in turn, so that what disturbs one disturbs all
    (name, *pure_rate(many, convert, cores, warm=message), *loader_rate(many, convert, cores, message))
    for _ in measure.rounds(3)
    for name, (convert, message) in kinds.items()
]
rows = []
for name in kinds:
    pure, pure_core, arrived, arrived_core = zip(*(found[1:] for found in measured if found[0] == name))
    shares = sorted(brought / alone for brought, alone in zip(arrived, pure))
    share, in_core = statistics.median(shares), statistics.median(a / b for a, b in zip(pure_core, arrived_core))
    spread = f"{shares[0]:.2f} to {shares[-1]:.2f}"
    rows.append((name, statistics.median(pure), statistics.median(arrived), share, spread, in_core))
report.table({"loader": "{}", f"{cores} processes decode, images/s": "{:,.0f}", "loader brings": "{:,.0f}",
              "share": "{:.2f}", "in three trials": "{}", "in core seconds": "{:.2f}"}, rows)  # fmt: skip
brings = {"workers": cores, "share": share, "in core seconds": in_core}
recorded.note("05_dataloader", "share", brings | {"photographs_per_second": statistics.median(arrived)})
if gpu := recorded.load("05_dataloader", "share"):
    print(f"recorded on {recorded.where('05_dataloader')}: {gpu}")

# %% [markdown]
# ## Past this machine · further
#
# How many cores does a GPU need? The *estimate* divides NVIDIA's published rates of ResNet-50 by the decode rate of one
# core here at 224 pixels and by your loader's share.


# %% jupyter={"source_hidden": true}
def photographs_per_second(read, items):
    """Photographs per second of a core's time, with one thread as in a worker. The first 20 warm up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for item in items[:20]:
        read(item)
    start = time.process_time()  # of this process: what others compute meanwhile does not count
    for item in items[20:]:
        read(item)
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    return (len(items) - 20) / seconds


large_bytes = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
readers = {
    "float32": JpegFiles(files, large_transform).__getitem__,
    "bytes": JpegFiles(files, large_bytes).__getitem__,
    "bytes, fewer pixels": DraftedFiles(files, 224).__getitem__,
}
rates = {name: photographs_per_second(read, range(120)) for name, read in readers.items()}
brought = min(1.0, in_core)  # of the pure rate: that of bytes, the last that was measured
cards = [card for card in (planner.V100, planner.A100, planner.H100) if card.resnet50_mixed]  # with a published rate
report.table({"cores for one GPU (estimate)": "{}", "images/s": "{:,}"} | dict.fromkeys(rates, "{:.1f}"),
             [(card.name, card.resnet50_mixed, *(card.resnet50_mixed / rate / brought for rate in rates.values()))
              for card in cards])  # fmt: skip

# %% [markdown]
# Nodes often have ten to twenty cores per GPU. If those don't suffice, shrink the files once, before training.
#
# The last table shows the training run on a **modelled** card, whose batches come at eight times the decode rate of one
# core here:

# %% jupyter={"source_hidden": true}
one, yours = rates["float32"], 8 * rates["bytes, fewer pixels"] * brought  # images/s
usual = 8 * one
pair = f"usual loader ({usual:,.0f} images/s)", f"your loader ({yours:,.0f} images/s)"
come = {  # seconds a batch; one worker that is eight times as fast stands for eight
    f"in turn ({one:,.0f} images/s)": worth.Loading(128 / one),
    pair[0]: worth.Loading(128 / usual, workers=1),
    pair[1]: worth.Loading(128 / yours, workers=1, prefetched=True),
    "no loading": worth.Loading(),
    "no loading, copied ahead": worth.Loading(prefetched=True),
}
steps = dict.fromkeys(come, training_run.fast_step)
worth.table(steps, makes=worth.Mixed, loading=come, keep="05_dataloader", pair=pair)

# %%
shard_folder.cleanup()
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>You go from 4 to 16 workers on 8 cores, and an epoch takes longer. Why?</summary>
#
# Decoding keeps a core busy, so 16 processes on 8 cores take turns, and each holds memory. Beyond the number of cores,
# a worker only helps if it waits for files.
# </details>
#
# <details><summary>The memory of the node grows during the epoch, although no batch is kept. Why?</summary>
#
# Forked workers share the parent's memory until they write to it. Python's reference counters write to every object
# that is looked at, so a list of millions of paths is copied, page by page. Keep such a list as one array.
# </details>
#
# <details><summary>Two ranks begin with <code>torch.manual_seed(0)</code> and use default loaders. What is wrong?</summary>
#
# Both loaders draw the order and the workers' seeds from global generators in the same state: both ranks train
# on the *same images* with the same windows and flips. A DistributedSampler (09) gives each rank its own part; the
# windows and flips still repeat unless the seed depends on the rank.
# </details>
#
# ## To remember
#
# Loading costs nothing as long as $t_\text{load} / w$ is below $t_\text{step}$; draw the timeline before you change an
# option. Choose options from trials, and take the cheapest of the good ones. Give every worker, epoch and rank its own
# seed, and split streams over workers and ranks. When the cores are the limit, decode less. Next: **compilation**,
# which shortens the step.

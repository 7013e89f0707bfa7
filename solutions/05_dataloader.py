# %% [markdown]
# # The data loader: batches that are there before they are asked for · about 95 min, core 40
#
# A GPU that waits for its batch costs as much as one that works. Here you write the parts of an input pipeline
# yourself: a data set over files, a recorder that shows who waits for whom, a choice of options that rests on trials.
# Further on: random numbers that are right in every worker, a stream split over workers and ranks, a prefetcher, shards.
#
# **What you will gain.** The next cells measure how many photographs *one core of this machine* decodes in a second,
# and set that beside what GPUs train on in a second.

# %% tags=["setup"]
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
import traceback
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

# %% [markdown]
# All sizes are here.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = training_run.setting().image_size  # pixels of a side
BATCH = training_run.setting().batch_size
WORKERS = training_run.setting().workers  # the most that are tried
N_FILES = 2000 if FULL else 400  # photographs that are read, written and streamed
STEPS = 40 if FULL else 8  # batches of a trial
PRETENDED_STEP = 0.03  # seconds: a step of the pretended device, where there is no GPU

# %%
photos = data.image_set()
files = random.Random(0).sample(photos.train, min(N_FILES, len(photos.train)))
transform, large_transform = training_run.make_transform(SIZE), training_run.make_transform(224)


def decode(path):
    """A JPEG file -> float32 tensor (3, 224, 224), a random window."""
    with Image.open(path) as image:
        return large_transform(image.convert("RGB"))


def photographs_per_second(read, items):
    """What one core decodes in a second of its time, as a worker does: with a single thread. The first 20 warm up."""
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


one_core = photographs_per_second(decode, [path for path, _ in files[:170]])
print(f"measured: one core here decodes {one_core:,.0f} photographs/s to 224 × 224 pixels")

# %%
CARDS = [
    card for card in (planner.V100, planner.A100, planner.H100) if card.resnet50_mixed
]  # those with a published rate
for card in CARDS:
    wanted = card.resnet50_mixed  # images/s, ResNet-50 at 224 pixels in mixed precision
    alone = (1 / one_core) / (1 / one_core + 1 / wanted)  # part of the time lost if one process does everything in turn
    print(f"estimate: {card.name} trains on {wanted:,} images/s: it wants {wanted / one_core:4.0f} such cores; "
          f"with one, in turn, it waits {alone:.0%} of the time")  # fmt: skip
print(gains.expected("05_dataloader"))

# %% [markdown]
# The lines marked *estimate* set the rates that NVIDIA has published for these cards (none for newer ones) beside the
# decode rate just measured. The faster the card, the more the loader decides. And a loader has one honest measure:
# **the share of the pure decode rate of its cores that arrives in the training loop**. At the end yours is measured
# against it. In the *modelled* line, the rates in brackets are eight times what one core of the machine that ran the
# solution decodes.
#
# ## The idea
#
# Loading a batch takes one process $t_\text{load}$ seconds, a step takes $t_\text{step}$. In turn, each waits for the
# other. With $w$ workers that load ahead, only the slower side counts:
#
# $$T_\text{sync} = n\,(t_\text{load} + t_\text{step})
# \qquad\qquad
# T_\text{async} \approx t_\text{load} + n\,\max\!\left(\frac{t_\text{load}}{w},\ t_\text{step}\right)$$
#
# The first batch has nothing to hide behind. (Where loading is the slower side, this counts a little too much: one load
# less one step a worker.) The picture is drawn, not measured: 60 ms to load, 30 ms a step.


# %% jupyter={"source_hidden": true}
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
# ## The baseline, measured first
#
# The training run of this series with its usual loader. Channels last is on, and mixed precision where the device
# computes faster in it, as 02 and 03 left it.


# %%
def fresh_model():
    return training_run.fast_model(len(photos.classes))


before = training_run.run("usual loader", training_run.fast_step, model=fresh_model())
print(f"usual loader on {DEVICE}: {before.images_per_second:,.0f} images/s")

# %% [markdown]
# ## A data set over files

# %% [markdown]
# ### Balise 1 · A data set over JPEG files · about 10 min
#
# A data set keeps *paths*, and decodes a picture when it is asked for one. Each worker process gets a copy of it, so
# no open file, no picture and no finished item stays in it.
#
# `items` is a list of `(path, label)`. Item `i` is `(transform(picture), label)`: the picture as decoded, at full size,
# a PIL image in RGB (grey and CMYK files exist in every large set), the label an `int`.
#
# Among a million files some are missing, cut short, or no picture at all. Then raise an error whose message **names the
# file**: nothing else helps whoever reads the log. Never skip it. But an index that is too large is no damaged file:
# `dataset[len(dataset)]` raises `IndexError`, as a list does.
#
# Given are `__init__` and `__len__`. About 7 lines.
#
# <details><summary>Hint</summary>
#
# `Image.open` reads the header only; the pixels are decoded by `convert`, and that is where a file that was cut short
# fails. `with Image.open(path) as image:` closes the file. `raise RuntimeError(f"…{path}…") from error` keeps the cause.
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
# What you would read in a training log when one file of the set is damaged:

# %%
with tempfile.TemporaryDirectory() as folder:
    cut_short = Path(folder) / "cut_short.jpg"
    cut_short.write_bytes(Path(files[0][0]).read_bytes()[:5000])
    try:
        JpegFiles([(cut_short, 0)], transform)[0]
    except Exception as error:
        print("".join(traceback.format_exception_only(error)).replace(folder, "…"))

# %% [markdown]
# ## Who waits for whom?
#
# `Timed` is given: it adds to each item when it was loaded, and by which process. `time.monotonic()` reads one clock of
# the machine, so times from different processes can be compared (on Linux).


# %% tags=["setup"]
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
# ### Balise 2 · Record a timeline, and predict it · about 12 min
#
# `record_events(loader, step)` goes once through a loader of batches `(images, labels, stamps)`, calls `step(images,
# labels)` on each, and returns a list of events `(kind, worker, begin, end)`, three a batch, times as Python floats from
# `time.monotonic()`:
#
# - `"loading"`: by whom and when is in the stamps; `loading_event(stamps)` is given;
# - `"waiting"`, worker -1: from asking for the batch to having it;
# - `"step"`, worker -1: the call of `step`.
#
# **Where must the clock be read?** The first wait includes the start of the loader.
#
# `predicted_seconds(loading, step, n, workers)` is the formula above; `loading` and `step` are the seconds of a batch. The
# case without workers is given. About 8 lines in all.
#
# <details><summary>Hint</summary>
#
# A `for` loop asks for the next batch right after its body has run: read the clock before the loop, when the body
# begins, and after the step, which is also when the next batch is asked for.
# </details>


# %% tags=["balise-2"]
def loading_event(stamps):
    """Of a batch's stamps (b, 3): from the begin of its first image to the end of its last."""
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

# %% [markdown]
# Now on real photographs. With a GPU the step is the training step. Without one, workers and network would share the same
# cores, and nothing could hide behind anything; so the step here is a **pretended device**: it takes 30 ms and no core.


# %%
network = fresh_model() if DEVICE.type == "cuda" else None
optimizer = training_run.make_optimizer(network.parameters()) if network else None


def device_step(images, labels):
    """A step that is over when it returns: training on a GPU, a pretended device elsewhere."""
    if network is None:
        time.sleep(PRETENDED_STEP)
        return
    training_run.fast_step(network, images, labels, optimizer, DEVICE)
    torch.cuda.synchronize()


def timed_loader(workers):
    items = (files * STEPS)[: (STEPS + 4) * BATCH]
    return DataLoader(Timed(JpegFiles(items, transform)), BATCH, num_workers=workers, pin_memory=DEVICE.type == "cuda")


# %%
if DEVICE.type == "cuda":
    record_events(timed_loader(WORKERS), device_step)  # warm up
events = {f"{w} workers" if w else "in turn": record_events(timed_loader(w), device_step) for w in (0, WORKERS)}
report.timeline(events)

# %%
seconds = {kind: statistics.median(end - begin for k, _, begin, end in events["in turn"] if k == kind)
           for kind in ("loading", "step")}  # fmt: skip
for workers, found in zip((0, WORKERS), events.values()):
    n = sum(kind == "step" for kind, *_ in found)
    took = max(end for *_, end in found) - min(begin for *_, begin, _ in found)
    predicted = predicted_seconds(seconds["loading"], seconds["step"], n, workers)
    first = next(end - begin for kind, _, begin, end in found if kind == "waiting")
    print(
        f"{workers} workers, {n} steps: predicted {predicted:.2f} s, measured {took:.2f} s; first batch: {first:.2f} s"
    )

# %% [markdown]
# The prediction leaves out the start of the workers: it is in the first wait of the picture, and comes back at each
# epoch unless `persistent_workers=True`. Where loading is the slower side it also counts about one load too many. The
# two errors may cancel. And the main process needs a core too: it unpacks what the workers send.
#
# ## Random numbers in workers
#
# An augmentation draws random numbers. PyTorch gives every worker, when it starts, new seeds for the three **global**
# generators: `torch`, `random` and (since version 1.9) `numpy.random`. Workers start anew in every epoch, unless they are persistent. What of a generator that **your data set owns**,
# such as the `numpy.random.default_rng()` that NumPy recommends? And of a `worker_init_fn` from an old tutorial? Guess
# before you look.

# %%
different = tp.predict(
    "A data set owns numpy.random.default_rng(0). Two workers draw from it once each, in two epochs: how many of "
    "the four numbers are different?",
    ...,
)


# %% tags=["setup"]
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


owned = set()
for name, init in {"no worker_init_fn": None, "the old recipe": old_recipe}.items():
    print(f"{name:<20}{'worker':>8}{'own rng':>10}{'numpy':>10}")
    for epoch in range(2):
        for worker, own, numpys in DataLoader(Draws(2), None, num_workers=2, worker_init_fn=init):
            print(f"  epoch {epoch:<12}{worker:>8}{own:>10.3f}{numpys:>10.3f}")
            owned.add(own)
why = "Each worker starts from a copy of the same generator, and in the next epoch from a fresh copy."
different.shows(len(owned), "{:.0f}", why)

# %% [markdown]
# A network would see each augmentation over and over. And the old recipe makes numpy's numbers repeat from epoch to
# epoch: after today's way of seeding, the word of the state that it reads is the same constant in every worker.

# %% [markdown]
# ### Balise 3 · Random numbers that are right in every worker · further · about 6 min
#
# Return a `DataLoader` over `dataset` with `options` (`batch_size`, `num_workers` of 1 or more, …), whose random
# numbers are right: those of the three global generators, and those of `dataset.rng`, made by
# `numpy.random.default_rng`; set it even where a data set has none. Right means
#
# - no two workers draw the same numbers, and no two epochs;
# - the same `seed` gives the same numbers, epoch by epoch, whatever else the program drew meanwhile;
# - no two pairs of `seed` and `rank` share them. (`seed + rank` will not do: rank 1 with seed 5 would repeat rank 0
#   with seed 6.)
#
# About 4 lines in all.
#
# <details><summary>Hint</summary>
#
# Once an epoch, the loader draws a number from its `generator=`; from that come the workers' seeds. A generator of your own
# depends on nothing else in the program. `np.random.SeedSequence([seed, rank])` mixes two numbers; its
# `generate_state(1)[0]`, made an `int`, suits `manual_seed`. `worker_init_fn(worker_id)` runs in each worker after PyTorch
# has seeded it: there `torch.initial_seed()` differs from worker to worker and epoch to epoch, and
# `get_worker_info().dataset` is the worker's own copy.
# </details>


# %% tags=["balise-3"]
def seed_worker(worker_id):
    """Runs at the start of each worker: give its copy of the data set a generator of its own."""
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

# %%
loader = seeded_loader(Draws(2), 0, batch_size=None, num_workers=2)
for epoch in range(2):
    print(f"epoch {epoch}:", "   ".join(f"worker {w}: {own:.3f}, {numpys:.3f}" for w, own, numpys in loader))

# %% [markdown]
# ## Options from trials, not by taste
#
# Four options decide most: `num_workers` processes load; each holds `prefetch_factor` batches ready; `pin_memory` puts
# batches where a GPU can fetch them without the processor's help; `persistent_workers` outlive the epoch. Which? A trial
# runs some steps and gives a run record. Trials are noisy, so each choice is tried several times.

# %% [markdown]
# ### Balise 4 · Choose the loader's options from trials · about 8 min
#
# `records` are run records, several for each choice. Given is the sorting: `trials[choice]` lists the records of a choice (a
# tuple of the four options) that did not run out of memory; `memory[choice]` is the largest peak, in bytes.
# `measure.counted_steps(record)` lists the steps of a record without its warm-up, each `{"total": seconds, …}`. You decide:
#
# 1. **How many seconds does a step take with this choice?** Workers deliver in bursts: most steps wait for nothing, one in
#    $w$ waits long. And one disturbed trial among three must not change anything. Mean or median, and over what?
# 2. **Which choice is best?** Not the fastest. Of all that are within `tolerance` of its time (0.05: 5 %), take the
#    cheapest: fewest workers, then least memory. A process that brings 2 % is better spent elsewhere.
#
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# A median over the steps of a trial does not see the long waits: take their mean. Over trials it is the other way
# round. `min(choices, key=lambda choice: (…, …))` compares the first numbers, then the second.
# </details>

# %% tags=["setup"]
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

# %% [markdown]
# The trials of this machine, three of each choice in turn, with the step of the picture above. Memory is an estimate:
# the batches that the workers may hold ready.


# %%
def trial(options):
    """A run record of STEPS steps with these options; steps of the picture above."""
    items = JpegFiles((files * STEPS)[: (STEPS + 4) * BATCH], transform)
    chrono = measure.Chronometer("cpu", warmup=3)  # the step is over when it returns: the clock of the CPU is right
    for images, labels in chrono.steps(DataLoader(items, BATCH, **options), n=STEPS + 3):
        with chrono.step():
            device_step(images, labels)
    ahead = max(1, options["num_workers"] * (options["prefetch_factor"] or 0))
    held = ahead * BATCH * 3 * SIZE * SIZE * 4
    return chrono.record("trial", peak_memory_bytes=[held], memory_kind="estimated", batch_size=BATCH, **options)


pinned = DEVICE.type == "cuda"
choices = [(0, None, pinned, False), (1, 2, pinned, False), (WORKERS, 2, pinned, False), (WORKERS, 4, pinned, False)]
choices += [(4, 2, pinned, False), (WORKERS, 2, False, False)] if FULL else []
records = [trial(dict(zip(OPTIONS, choice))) for _ in measure.rounds(3) for choice in choices]

# %%
print("".join(f"{name:>20}" for name in OPTIONS), f"{'step':>12}{'images/s':>12}")
for record in records:
    steps = measure.counted_steps(record)
    mean = sum(step["total"] for step in steps) / len(steps)
    words = "".join(f"{str(record.settings[name]):>20}" for name in OPTIONS)
    print(words, f"{measure.human_seconds(mean):>12}{record.images_per_second:>12,.0f}")
chosen = choose_options(records)
print("\nchosen:", chosen)

# %% [markdown]
# `pin_memory` only pays where copies go to a GPU, `persistent_workers` only at the start of an epoch, which these trials
# leave out: turn it on when epochs are short.
#
# ## A stream, split over workers and ranks
#
# A stream (`IterableDataset`) has no index: it is read from front to back, as sets are that do not fit on a disk. Every
# worker of every rank runs `__iter__` on its own copy. Unless they agree on who gives what, each image comes once **per
# worker**.

# %% [markdown]
# ### Balise 5 · A stream split over workers and ranks · further · about 10 min
#
# All workers of all ranks draw the *same* order of `items`, from seed and epoch alone; that is given. Then each takes its part
# of it, and **reads only that**, for reading is what costs. One way of many, with two ranks of two workers:
#
# | place in `order` | 0 | 1 | 2 | 3 | 4 | … |
# |---|---|---|---|---|---|---|
# | goes to rank, worker | 0, 0 | 0, 1 | 1, 0 | 1, 1 | 0, 0 | … |
#
# Every item comes exactly once, whatever the number of ranks and workers; there may be no workers at all. With `even=True`
# all parts have the same size, as large as possible, and what is left over is dropped: ranks that make different numbers of
# steps would wait for each other for ever.
#
# The epoch stands in *shared* memory (given), so `set_epoch` in the main process reaches workers that run already.
# About 7 lines.
#
# <details><summary>Hint</summary>
#
# `get_worker_info()` is `None` in the main process, else it has `id` and `num_workers`. Number the parts; a slice with a
# step, `order[part::parts]`, takes every `parts`-th place. Drop from the *shuffled* order, or the same items would never
# be seen.
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

# %%
stream = SplitStream(range(10), even=False)
loader = DataLoader(stream, batch_size=3, num_workers=2, persistent_workers=True)
for epoch in range(2):
    stream.set_epoch(epoch)
    print(f"epoch {epoch}:", "  ".join(str(batch.tolist()) for batch in loader))
del loader

# %% [markdown]
# Ten items over two workers, in batches of three: each worker makes its own batches, so two are smaller, not one.
#
# ## Resume in mid-epoch · further
#
# A job ends after batch $k$ of an epoch: its time is over. Weights and optimizer were saved. If the loader begins the
# epoch anew, the first images are seen twice and the last ones perhaps never. So save its place too. Where the order
# depends on seed and epoch alone, the place is three numbers: seed, epoch, and how many batches **the loop has used**.
# May the *sampler*, which hands the indices to the workers, count them? Guess.

# %%
ahead = tp.predict(
    "Two workers, prefetch_factor=2. The loop has taken 3 batches. How many has the sampler handed out by then?", ...
)


# %%
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
    """A loader of 40 items in batches of 4, which goes on after so many batches; and its sampler."""
    sampler = FromPlace(40, seed, start=4 * batches)
    return DataLoader(range(40), 4, sampler=sampler, num_workers=2, prefetch_factor=2), sampler


whole = [batch.tolist() for batch in from_batch(0)[0]]
loader, sampler = from_batch(0)
running = iter(loader)
used = [next(running).tolist() for _ in range(3)]
handed_out, state = sampler.given // 4, {"seed": 7, "batches": len(used)}
del running  # here the job ends; `state` was saved beside the weights
resumed = [batch.tolist() for batch in from_batch(**state)[0]]
print(f"resumed at batch 3, the next ones are those of the whole epoch: {resumed == whole[3:]}")
why = "Each worker is kept prefetch_factor batches ahead: a sampler that counts takes these for used."
ahead.shows(handed_out, "{:.0f}", why)

# %% [markdown]
# `torchdata.stateful_dataloader.StatefulDataLoader` does this for you, in place of `DataLoader`: `loader.state_dict()` goes
# into the checkpoint, `loader.load_state_dict(state)` goes on there. It counts the batches that were *yielded*, and skips as
# many; a sampler or a data set with a `state_dict` of its own is asked for it, in each worker. It does not look across
# ranks: each saves its own. (Documentation of torchdata, *Stateful DataLoader*; `pip install torchdata`.) The augmentations'
# random numbers are not resumed by counting: they begin anew with the workers, unless that state is saved too.
#
# ## Copy while the network computes
#
# Workers bring batches to the main process; somebody still has to bring them to the GPU. A **prefetcher** does so in a
# thread, and copies in a *stream* of its own: work queued in one stream runs beside work in another. Two rules come with
# that. The computing stream must **wait** for the copy, or it computes on memory that is not yet filled. And the allocator
# must be told that the computing stream **uses** the tensor (`record_stream`), or it hands the memory to the next copy too
# early.

# %% [markdown]
# ### Balise 6 · A prefetcher · further · about 17 min
#
# `Prefetcher(loader, device, depth)` gives the batches of `loader` as they are, in order, on `device`. Two run beside each other:
#
# ```
# thread, _fill:    take a place  →  next(batches)  →  _copy: in a stream of its own  →  put it into `ready`
# loop, __iter__:   get it from `ready`  →  give the place back  →  _hand_over: wait for the copy  →  yield it
# ```
#
# `free` is a semaphore of `depth` places: `acquire` takes one, and waits where none is left; `release` gives one back. So at
# most `depth` batches are taken beyond the one in use, **if the thread takes its place before it asks the loader**. At the
# end `stop` is set, and the thread woken by one more place: it must look at `stop` then.
#
# Given: the queue, the thread, its end, and the way of an error to the loop. Yours, about 12 lines: what the thread
# does before a batch is copied, what the loop does before it yields one, the copy (non-blocking, in `self.stream`), and the
# handing over, where nobody waits but the stream that is current **in the loop**.
#
# <details><summary>Hint</summary>
#
# `next(batches, ready)` gives `ready` where there is no more. `with torch.cuda.stream(self.stream):` does nothing where
# that is `None`; `each_tensor(batch, function)`, given, makes a new batch. `self.stream.record_event()` marks the end
# of the copy; a stream waits with `wait_event`. Each thread has its own `torch.cuda.current_stream(device)`: ask for it
# in the loop.
# </details>


# %% tags=["setup"]
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

    Only __init__ and __iter__ are called: arrange the rest as you like.
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
                # a place; then `batch`, the loader's next one, or `ready` if there is no more
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
        except BaseException as error:  # whatever it is, the loop must learn of it
            ready.put(("error", error, None))

    def _copy(self, batch):
        """A pair: the batch on the device, and the event that tells that the copy is done (None without a GPU)."""
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
# Without a GPU it still hides a loader that has no workers behind a device: ten steps of it at most.


# %%
def seconds_of(batches):
    start = time.perf_counter()
    for images, labels in batches:
        device_step(images, labels)
    return time.perf_counter() - start


some = DataLoader(JpegFiles(files[: 10 * BATCH], transform), BATCH, pin_memory=DEVICE.type == "cuda")
loops = {"no workers": some, "no workers, your prefetcher": Prefetcher(some, DEVICE)}
taken = [{name: seconds_of(loop) for name, loop in loops.items()} for _ in range(3)]  # in turn
for name in loops:
    print(f"ten steps, {name + ':':<28} {sorted(one[name] for one in taken)[1]:.2f} s, the median of three")

# %% [markdown]
# ## A million small files, or a thousand large ones
#
# Opening a file on a parallel file system asks a metadata server that all users share: a million small files an epoch
# is a million questions. **Shards** are the way out: tar archives of some thousand samples, read from front to back.
# In the layout of *webdataset*, the files of a sample share a name, its key, and differ in the extension: `00000007.jpg`
# and `00000007.cls`.

# %% [markdown]
# ### Balise 7 · Write shards, and stream them · further · about 13 min
#
# `write_shards(items, folder, per_shard)`: yours are the two entries of each sample, `KEY.jpg` (the file, unchanged) and
# `KEY.cls` (the label as text). They stand next to each other, for a stream cannot look back; no two samples of the whole
# set share a key, and a key holds neither a dot nor a folder.
#
# `stream_shards(paths, buffer, seed)` yields samples `(bytes, label)`; reading one shard is given (`samples_of`). Yours:
#
# - **who reads what**: in a worker, only its own part of the shards is opened;
# - **a shuffle buffer**. A stream cannot be shuffled, but mixed: what comes in is held, and as soon as `buffer` samples are
#   held, one of them, drawn at random, leaves. It may be the newcomer, so `buffer=1` keeps the order of the shards. At the
#   end the rest leaves (given). A buffer of 3:
#
# ```
# comes in:   a    b    c    d    e    f
# held:       a    ab   abc  acd  cde  cdf  …
# leaves:               b    a    e    …
# ```
#
# About 10 lines in all.
#
# <details><summary>Hint</summary>
#
# `tar.add(file, arcname=name)` copies a file under another name; `enumerate(…, first)` numbers on from shard to shard.
# `paths[k::n]`, with what `get_worker_info()` says, is a worker's part. A list is quick to take from at its end: swap the
# one that was drawn with the last, then `pop`.
# </details>


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
    """Yield (bytes, label) of one shard, in its order. "r|" reads a stream: nothing is sought, nothing extracted to disk."""
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

# %%
shard_folder = tempfile.TemporaryDirectory()
shards = write_shards(files, shard_folder.name, per_shard=100)
streamed = sum(1 for _ in stream_shards(shards, buffer=50))
print(f"{streamed} photographs: {len(files)} files to open in an epoch, or {len(shards)} shards")

# %% [markdown]
# Used with a loader, the bytes are decoded in the worker, as before, and `torch.initial_seed()` gives each worker another seed in
# each epoch. What a stream gives up: the order is only as random as its buffer.


# %%
class ShardStream(IterableDataset):
    """Items (image, label) from shards; to be used with DataLoader(num_workers ≤ number of shards)."""

    def __init__(self, shards, transform, buffer=50):
        self.shards, self.transform, self.buffer = shards, transform, buffer

    def __iter__(self):
        for content, label in stream_shards(self.shards, self.buffer, torch.initial_seed()):
            with Image.open(io.BytesIO(content)) as image:
                yield self.transform(image.convert("RGB")), label


image, label = next(iter(ShardStream(shards, transform)))  # here first: a mistake shows in this process
batches = DataLoader(ShardStream(shards, transform), BATCH, num_workers=2)
print(f"{sum(len(labels) for _, labels in batches)} photographs in {len(shards)} shards, by two workers")

# %% [markdown]
# ## Measured again: against the pure decode rate
#
# What could a loader reach at best? As many processes as it has workers, decoding the same files with nothing around
# them: no batch, no queue, no main process. A loader's **share** is its rate over that rate, on the same number of cores.


# %%
def decode_alone(dataset, warm, gate, answers):
    """A process that only decodes; it says when it began and ended, and what it took of its core (s), `warm` left out."""
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

    warm: photographs that each of them does first, and that do not count.
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


# %%
def core_seconds():
    """What this process and its workers have taken of their cores so far."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children()))


def loader_rate(items, convert, workers, message):
    """What arrives in the training loop, as pure_rate gives it; `message`: photographs that a worker sends at a time."""
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


# %% [markdown]
# Two things are between a loader and its share. A float32 image is four times as large as the same image in bytes, and
# goes through shared memory. And each message from a worker has a price, whatever its size. So: **send bytes**, make
# floats of them on the device, and send **several batches at once** where they are small. Each loader is compared with
# the pure rate of *its own* conversion. Guess first.

# %%
plain = tp.predict("What share of the pure decode rate does a loader bring that sends float32, a batch a message?", ...)

# %%
to_bytes = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
MESSAGE = BATCH if FULL else 4 * BATCH  # photographs that a worker sends at a time
cores = min(WORKERS, len(os.sched_getaffinity(0)))
many = (files * 40)[: BATCH * (80 if FULL else 32)]
kinds = {"float32, a batch a message": (transform, BATCH), f"bytes, {MESSAGE // BATCH} a message": (to_bytes, MESSAGE)}
measured = [  # in turn, so that what disturbs one disturbs all
    (name, *pure_rate(many, convert, cores, warm=message), *loader_rate(many, convert, cores, message))
    for _ in measure.rounds(3)
    for name, (convert, message) in kinds.items()
]

# %%
shares_of = {}
print(f"{'':<27}{cores} processes decode   loader brings   share (three trials)   share in core seconds")
for name in kinds:
    pure, pure_core, arrived, arrived_core = zip(*(found[1:] for found in measured if found[0] == name))
    shares = sorted(brought / alone for brought, alone in zip(arrived, pure))
    share = statistics.median(shares)
    in_core = statistics.median(alone / brought for alone, brought in zip(pure_core, arrived_core))
    spread = f"{share:.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(
        f"{name:<27}{statistics.median(pure):18,.0f}/s{statistics.median(arrived):14,.0f}/s{spread:>23}{in_core:24.2f}"
    )
    shares_of[name] = share
why = "Decoding takes far longer than sending what was decoded; with small files or fast cores less is left of it."
plain.shows(next(iter(shares_of.values())), "{:.2f}", why)
brings = {"workers": cores, "share": share, "in core seconds": in_core}
recorded.note("05_dataloader", "share", brings | {"photographs_per_second": statistics.median(arrived)})
gpu = recorded.load("05_dataloader", "share")
print(
    f"recorded on {recorded.where('05_dataloader')}: {gpu}" if gpu else "No figures of a GPU machine are recorded yet."
)

# %% [markdown]
# The figure to reach is 0.95; what is above 1 is an error of the measurement, and the trials say how large that is. The last
# column counts what the cores really did, main process included, instead of the time that passed: the one to believe where
# others compute too. If yours is much lower: are there more workers than cores? Does a collate function copy twice?
#
# ## Decode less · further
#
# After that, only the decoding itself can become cheaper. A JPEG file is stored as frequencies, so a decoder can leave the
# high ones out and give a half, a quarter or an eighth of the size for less work (`Image.draft`). The trick is to draw the
# window **before** decoding: `Image.open` has read only the header, but the size is known.


# %% tags=["setup"]
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


# %%
usual, drafted = JpegFiles(files, to_bytes), DraftedFiles(files, SIZE)
measure.race(
    {
        "window drawn first, fewer pixels decoded": lambda: [drafted[i] for i in range(40)],
        "whole photograph decoded": lambda: [usual[i] for i in range(40)],
    },
    repeats=5, warmup=1, device="cpu", calls=1,
)  # fmt: skip

# %% [markdown]
# ## Race against a library · further
#
# `webdataset` streams the same shards. One pass over all of them, no decoding:

# %%
candidates = {"your stream_shards": lambda: sum(1 for _ in stream_shards(shards, buffer=50))}
try:
    import webdataset
except ImportError:
    print("webdataset is not installed: pip install webdataset")
else:
    library = webdataset.WebDataset([str(path) for path in shards], shardshuffle=False, empty_check=False)
    library = library.shuffle(50).to_tuple("jpg", "cls")
    candidates["webdataset"] = lambda: sum(1 for _ in library)

# %%
measure.race(candidates, repeats=5, warmup=1, device="cpu", calls=1) if len(candidates) > 1 else None

# %% [markdown]
# ## The red thread
#
# The training run twice more: with its usual loader, and with yours: the options that the trials chose, seeds that are
# right, windows drawn before decoding, bytes in large messages, your prefetcher. The step makes floats of the bytes.


# %%
class Pieces:
    """Cuts the large batches of a loader into small ones; nothing is copied."""

    def __init__(self, loader, batch_size):
        self.loader, self.batch_size = loader, batch_size

    def __iter__(self):
        for images, labels in self.loader:
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size))


MEAN, STD = (255 * torch.tensor(c, device=DEVICE)[:, None, None] for c in (training_run.MEAN, training_run.STD))


def byte_step(model, images, labels, optimizer, device):
    """training_run.fast_step for images of bytes (b, 3, h, w), already on the device."""
    return training_run.fast_step(model, (images.float() - MEAN) / STD, labels, optimizer, device)


# %%
options = chosen | {"persistent_workers": chosen["num_workers"] > 0}
loader = seeded_loader(DraftedFiles(photos.train, SIZE), 0, batch_size=MESSAGE, shuffle=True, drop_last=True, **options)
loader = Pieces(Prefetcher(loader, DEVICE), BATCH)
before = training_run.run("usual loader", training_run.fast_step, model=fresh_model())
after = training_run.run("your loader", byte_step, model=fresh_model(), loader=loader)
gains.keep("05_dataloader", "loader chosen by trials, prefetcher, fewer pixels, bytes", before=before, after=after)
gains.table()

# %%
report.compare([before, after])

# %% [markdown]
# The next work begins again with the usual loader, so that its own gain stands alone: **this gain is not carried on**. In a
# run of your own you would keep both.
#
# Without a GPU, network and workers share the cores, and there is nothing to hide behind. What is gained is decoding that
# is no longer done. Read the images a second: the table's loading is a median over steps, and of the batches that come in
# one message, all but the first wait for nothing.
#
# ## Past this machine · further
#
# How many cores does a GPU want, if your loader brings this share of what they decode? An *estimate*: images/s as at
# the beginning, and the decode rate of one core, measured here for windows of 224 pixels.

# %%
large_bytes = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
readers = {
    "float32": JpegFiles(files, large_transform).__getitem__,
    "bytes": JpegFiles(files, large_bytes).__getitem__,
    "bytes, fewer pixels": DraftedFiles(files, 224).__getitem__,
}
rates = {name: photographs_per_second(read, range(120)) for name, read in readers.items()}
brought = min(1.0, in_core)  # of the pure rate: that of bytes, the last that was measured
print(f"{'cores for one GPU (estimate)':<32}" + "".join(f"{name:>20}" for name in rates))
for card in CARDS:
    wanted = card.resnet50_mixed
    print(
        f"{card.name:<10}{wanted:8,} images/s    "
        + "".join(f"{wanted / rate / brought:20.1f}" for rate in rates.values())
    )
print("\nand the files that ImageNet's 1,281,167 photographs open in an epoch:", "1,281,167, or", 1_281_167 // 1000 + 1,
      "shards of 1,000")  # fmt: skip

# %% [markdown]
# The first column is the estimate of the beginning, divided by your loader's share. At 224 pixels there is less to
# leave out; the last column may bring nothing. Nodes often have ten to twenty cores a GPU, some fewer. Where the sum
# does not come out: smaller files prepared once, decoding on the GPU, or a network that costs more.
#
# The training run on a **modelled** card whose batches come at eight times the rate that one core of *this* machine
# decodes. The usual loader is taken to bring all that they decode, yours its share, copied in a stream of its own.

# %%
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

# %% [markdown]
# ## Three questions
#
# <details><summary>You go from 4 to 16 workers on 8 cores, and an epoch takes longer. Why?</summary>
#
# Decoding keeps a core busy; 16 processes on 8 cores take turns, and each holds memory. Beyond the cores, a worker only
# helps if it waits for files.
# </details>
#
# <details><summary>The memory of the node grows during the epoch, although no batch is kept. Why?</summary>
#
# Forked workers share the parent's memory until they write to it. Python's counters of references write to every
# object that is looked at, so a list of millions of paths is copied, page by page. Keep such lists as one array.
# </details>
#
# <details><summary>Two ranks begin with <code>torch.manual_seed(0)</code> and use default loaders. What is wrong?</summary>
#
# Both loaders draw the order from the same global generator in the same state, and the seeds of their workers too: both
# ranks train on the *same images* with the same windows and flips. A DistributedSampler (09) gives each rank a part of its
# own; the windows and flips still repeat from rank to rank, unless the seed holds the rank.
# </details>
#
# ## To remember
#
# Loading is free as long as $t_\text{load} / w$ is below $t_\text{step}$; draw the timeline before you turn a knob.
# Options come from trials, the cheapest of the good ones. Random numbers have to be right in every worker, epoch and
# rank, and a stream is split over them. The best loader delivers what its cores can decode; after that,
# decode less. Next: **compilation**, which makes the other bar of the timeline shorter.

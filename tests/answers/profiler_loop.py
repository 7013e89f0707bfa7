"""Answers to balise 1 of 04_profiler: a profiled loop."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

# ---------------------------------------------------------------- right

bank.text(
    1,
    None,
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "loop.json")
    prof = torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(path),
        record_shapes=True,
    )
    prof.start()
    iterator = iter(loader)
    for _ in range(len(loader)):
        with torch.profiler.record_function("loading"):
            images, labels = next(iterator)
        with torch.profiler.record_function("optimizer"):
            optimizer.zero_grad()
        with torch.profiler.record_function("forward"):
            loss = forward(model, images, labels)
        with torch.profiler.record_function("backward"):
            loss.backward()
        with torch.profiler.record_function("optimizer"):
            optimizer.step()
        prof.step()
    prof.stop()
    return prof
""",
)
bank.text(  # exported at the end; a generator that labels the loading; a schedule of one's own
    1,
    None,
    """
def labelled(loader):
    batches = iter(loader)
    while True:
        with record_function("loading"):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    action = torch.profiler.ProfilerAction

    def when(step):
        if step == 1:
            return action.WARMUP
        if 2 <= step < 2 + active:
            return action.RECORD_AND_SAVE if step == 1 + active else action.RECORD
        return action.NONE

    with profile(schedule=when) as prof:
        for images, labels in labelled(loader):
            with record_function("forward"):
                loss = forward(model, images, labels)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            prof.step()
    prof.export_chrome_trace(str(folder / "trace.json"))
    return prof
""",
)
bank.text(  # stepped at the begin of each step but the first; labels as functions
    1,
    None,
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    folder = Path(folder)
    if not folder.exists():
        folder.mkdir(0o700)

    def save(prof):
        prof.export_chrome_trace(str(folder / f"steps-{prof.step_num}.json"))

    def labelled(name, function, *args):
        with record_function(name):
            return function(*args)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    batches = iter(loader)
    with profile(schedule=schedule(wait=1, warmup=1, active=active, repeat=1), on_trace_ready=save) as prof:
        while (batch := labelled("loading", next, batches, None)) is not None:
            loss = labelled("forward", forward, model, *batch)
            labelled("backward", loss.backward)
            labelled("optimizer", update)
            prof.step()
    return prof
""",
)
bank.text(  # the label is opened and closed by hand around a `for`
    1,
    None,
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(f"{folder}/trace.json"),
    ) as prof:
        label = record_function("loading")
        label.__enter__()
        for images, labels in loader:
            label.__exit__(None, None, None)
            with record_function("forward"):
                loss = forward(model, images, labels)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                model.zero_grad()
            prof.step()
            label = record_function("loading")
            label.__enter__()
        label.__exit__(None, None, None)
    return prof
""",
)
bank.text(  # the handler that was made for TensorBoard
    1,
    None,
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    ready = torch.profiler.tensorboard_trace_handler(str(folder))
    batches, n = iter(loader), len(loader)
    with profile(schedule=schedule(wait=1, warmup=1, active=active, repeat=1), on_trace_ready=ready) as prof:
        for _ in range(n):
            with record_function("loading"):
                images, labels = next(batches)
            with record_function("forward"):
                loss = forward(model, images, labels)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                for p in model.parameters():
                    p.grad = None
            prof.step()
    return prof
""",
)
bank.slip(1, "trace-name", ('"trace.json"', '"trace.json.gz"'))
bank.slip(1, None, ("profile_memory=True,", "with_stack=True,"))

# ---------------------------------------------------------------- wrong

bank.slip(1, "step-not-called", ("            profiler.step()\n", ""))
bank.slip(
    1,
    "no-trace",
    ('        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / "trace.json")),\n', ""),
)
bank.slip(1, "no-trace", ('"trace.json"', '"trace.txt"'))
bank.slip(1, "trace-elsewhere", ('str(folder / "trace.json")', '"trace.json"'))
bank.slip(1, "trace-elsewhere", ('str(folder / "trace.json")', 'str(folder.parent / "trace.json")'))
bank.slip(  # in the folder, and beside the notebook too
    1,
    "trace-elsewhere",
    (
        "                return profiler\n",
        "                Path('copy.json').write_bytes((folder / 'trace.json').read_bytes())\n                return profiler\n",
    ),
)
bank.slip(
    1,
    "not-json",
    ("lambda profiler: profiler.export_chrome_trace(str(folder / \"trace.json\"))",
     "lambda profiler: (folder / \"trace.json\").write_text(str(profiler.key_averages()))"),
)  # fmt: skip
bank.slip(1, "not-private", ("mode=0o700, ", ""))
bank.slip(1, "not-private", ("0o700", "0o755"))
bank.slip(1, "not-private", ("mode=0o700", "mode=700"))
bank.slip(
    1,
    "steps-unmarked",
    ("        schedule=when,\n", ""),
    ("            profiler.step()\n", ""),
)
bank.slip(1, "steps-unmarked", ("        schedule=when,\n", ""))
bank.slip(1, "warmup-recorded", ("wait=1, warmup=1", "wait=0, warmup=1"))
bank.slip(1, "no-warmup", ("wait=1, warmup=1, active=active", "wait=0, warmup=0, active=active + 2"))
bank.slip(1, "recorded-late", ("wait=1, warmup=1", "wait=2, warmup=1"))
bank.slip(1, "recorded-late", ("wait=1, warmup=1", "wait=1, warmup=2"))
bank.slip(1, "recorded-again", (", repeat=1", ""))
bank.slip(1, "recorded-again", ("repeat=1", "repeat=2"))
bank.slip(1, "too-many-steps", ("active=active,", "active=len(loader) - 2,"))
bank.slip(1, "too-many-steps", ("active=active,", "active=max(2, active),"))
bank.slip(1, "too-few-steps", ("active=active,", "active=1,"))
bank.slip(1, "too-few-steps", ("active=active,", "active=3,"))  # the default instead of the argument
bank.slip(
    1, "too-few-steps", ("            profiler.step()\n", "            profiler.step()\n            profiler.step()\n")
)
bank.slip(
    1,
    "label-missing",
    (
        '            with record_function("loading"):\n                batch = next(batches, None)\n',
        "            batch = next(batches, None)\n",
    ),
)
bank.slip(1, "label-missing", ('"optimizer"', '"update"'))
bank.slip(
    1,
    "label-misplaced",
    (
        '            with record_function("loading"):\n                batch = next(batches, None)\n',
        '            batch = next(batches, None)\n            with record_function("loading"):\n                pass\n',
    ),
)
bank.slip(
    1,
    "label-misplaced",
    ('            with record_function("backward"):\n                loss.backward()\n',
     '            loss.backward()\n            with record_function("backward"):\n                pass\n'),
)  # fmt: skip
bank.slip(1, "label-misplaced", ("iter(loader)", "iter(list(loader))"))
bank.slip(
    1,
    "label-too-wide",
    (
        '            with record_function("backward"):\n                loss.backward()\n            with record_function("optimizer"):\n                optimizer.step()\n                optimizer.zero_grad()\n',
        '            with record_function("backward"):\n                loss.backward()\n                with record_function("optimizer"):\n                    optimizer.step()\n                    optimizer.zero_grad()\n',
    ),
)
bank.slip(
    1,
    "label-too-wide",
    (
        '                loss = forward(model, *batch)\n            with record_function("backward"):\n                loss.backward()\n',
        '                loss = forward(model, *batch)\n                with record_function("backward"):\n                    loss.backward()\n',
    ),
)
# gradients cleared, but not under the label of the update
CLEARED = "                optimizer.zero_grad()\n"
bank.slip(1, "label-misplaced", (CLEARED, "            optimizer.zero_grad()\n"))
bank.slip(1, "label-misplaced", (CLEARED, "            model.zero_grad(set_to_none=False)\n"))
bank.slip(
    1,
    "label-misplaced",
    (CLEARED, ""),
    ("                loss.backward()\n", "                optimizer.zero_grad()\n                loss.backward()\n"),
)
bank.slip(1, "profiler-not-returned", ("                return profiler\n", "                return folder\n"))
bank.slip(1, "profiler-not-returned", ("                return profiler\n", "                break\n"))
bank.slip(
    1,
    "batch-not-trained",
    (
        "            profiler.step()\n",
        "            profiler.step()\n            if profiler.step_num == 2 + active:\n                return profiler\n",
    ),
)
bank.slip(1, "gradients-add-up", ("                optimizer.zero_grad()\n", ""))
bank.slip(
    1,
    "weights-still",
    (
        "                optimizer.step()\n                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n                optimizer.step()\n",
    ),
)
bank.slip(
    1,
    "forward-again",
    (
        "                loss = forward(model, *batch)\n",
        "                loss = forward(model, *batch) * 0 + forward(model, *batch)\n",
    ),
)
bank.slip(1, "forward-again", ("iter(loader)", "iter([*loader, *loader])"))
bank.slip(1, "folder-there", (", exist_ok=True", ""))
bank.slip(1, "profiler-not-returned", ("return profiler\n", "return profiler.key_averages()\n"))
bank.text(  # the next batch is asked for at the end of a step; two loops, of which only the first is profiled
    1,
    None,
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    batches = iter(loader)

    def load():
        with record_function("loading"):
            return next(batches, None)

    def step(batch):
        with record_function("optimizer"):
            optimizer.zero_grad()
        with record_function("forward"):
            loss = forward(model, *batch)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        return load()

    batch = load()
    with profile(schedule=schedule(wait=1, warmup=1, active=active, repeat=1)) as prof:
        while batch is not None and prof.step_num < 2 + active:
            batch = step(batch)
            prof.step()
    prof.export_chrome_trace(str(folder / "trace.json"))
    while batch is not None:
        batch = step(batch)
    return prof
""",
)
bank.slip(1, "weights-differ", ("                optimizer.step()\n                optimizer.zero_grad()\n",
                                "                optimizer.step()\n                optimizer.zero_grad()\n                model.eval()\n"))  # fmt: skip
bank.slip(  # the record also ends with the block
    1,
    None,
    (
        "            profiler.step()\n",
        "            if profiler.step_num < len(loader) - 1:\n                profiler.step()\n",
    ),
)
bank.slip(
    1,
    "warmup-recorded",
    ("            profiler.step()\n", ""),
    (
        '            with record_function("loading"):\n',
        '            profiler.step()\n            with record_function("loading"):\n',
    ),
)
bank.text(
    1,
    "steps-unmarked",
    """
def profiled_loop(model, loader, optimizer, forward, folder, active=3):
    folder = Path(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    with torch.autograd.profiler.profile() as prof:
        for images, labels in loader:
            loss = forward(model, images, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    prof.export_chrome_trace(str(folder / "trace.json"))
    return prof
""",
)
bank.slip(1, "no-warmup", ("wait=1, warmup=1", "wait=2, warmup=0"))

bank.slip(
    1,
    "step-in-label",
    ("            profiler.step()\n", ""),
    ("                optimizer.zero_grad()\n", "                optimizer.zero_grad()\n                profiler.step()\n"),
)

# the end of a step is where its update is over
END = "            profiler.step()\n"
FORWARD = "                loss = forward(model, *batch)\n"
bank.slip(1, "step-inside", (END, ""), (FORWARD, FORWARD + END))
bank.slip(
    1,
    "step-inside",
    (END, ""),
    ('            with record_function("optimizer"):\n', END + '            with record_function("optimizer"):\n'),
    variant=True,
)

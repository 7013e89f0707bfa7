"""Answers to balise 1 of 04_profiler: a profiled loop."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 1, whole=True)

# ---------------------------------------------------------------- right

bank.text(
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
bank.hint("trace-name", "Put the trace directly in the folder, as one file with a name that ends in .json: the cells "
          "below look for that.", edge=True)  # fmt: skip
bank.slip("trace-name", ('"trace.json"', '"trace.json.gz"'), variant=True)
bank.slip(None, ("profile_memory=True,", "with_stack=True,"))

# ---------------------------------------------------------------- wrong

bank.hint("step-not-called", "Nothing was recorded, because you never told the profiler that a step had ended. Call "
          "its step() at the end of each step.")  # fmt: skip
bank.slip("step-not-called", ("            profiler.step()\n", ""), variant=True)
bank.hint("no-trace", "There is no trace in the given folder. Does on_trace_ready call export_chrome_trace with a "
          "path in that folder?")  # fmt: skip
bank.slip(
    "no-trace",
    ('        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / "trace.json")),\n', ""),
)
bank.slip("no-trace", ('"trace.json"', '"trace.txt"'), variant=True)
bank.hint("trace-elsewhere", "You wrote a trace to {place}. It belongs in the given folder, and nowhere else.", edge=True)  # fmt: skip
bank.slip("trace-elsewhere", ('str(folder / "trace.json")', '"trace.json"'))
bank.slip("trace-elsewhere", ('str(folder / "trace.json")', 'str(folder.parent / "trace.json")'))
bank.slip(  # in the folder, and beside the notebook too
    "trace-elsewhere",
    (
        "                return profiler\n",
        "                Path('copy.json').write_bytes((folder / 'trace.json').read_bytes())\n                return profiler\n",
    ),
    variant=True,
)
bank.hint("not-json", "The file in the folder cannot be read as a trace: {error}.")
bank.slip("not-json",
    ("lambda profiler: profiler.export_chrome_trace(str(folder / \"trace.json\"))",
     "lambda profiler: (folder / \"trace.json\").write_text(str(profiler.key_averages()))"),
    variant=True)  # fmt: skip
bank.hint("not-private", "Other users can look into the folder: its mode is {mode}. A trace shows paths and names. "
          "Create the folder with mode 0o700.", edge=True)  # fmt: skip
bank.slip("not-private", ("mode=0o700, ", ""))
bank.slip("not-private", ("0o700", "0o755"))
bank.slip("not-private", ("mode=0o700", "mode=700"), variant=True)
bank.hint("steps-unmarked", "The trace has no steps: without a schedule, the profiler records everything and marks "
          "no steps.")  # fmt: skip
bank.slip(
    "steps-unmarked",
    ("        schedule=when,\n", ""),
    ("            profiler.step()\n", ""),
)
bank.slip("steps-unmarked", ("        schedule=when,\n", ""))
bank.hint("warmup-recorded", "The recording starts with step {first}, counted from 0. The first step waits and the "
          "second warms up, so it should start with step 2. (And step() is called at the end of a step, not at its "
          "start.)", edge=True)  # fmt: skip
bank.slip("warmup-recorded", ("wait=1, warmup=1", "wait=0, warmup=1"))
bank.hint("no-warmup", "The profiler has no warm-up step, so the first recorded step would include what it does at "
          "its own start.")  # fmt: skip
bank.slip("no-warmup", ("wait=1, warmup=1, active=active", "wait=0, warmup=0, active=active + 2"))
bank.hint("recorded-late", "The recording starts with step {first}, counted from 0. After one step that waits and "
          "one that warms up, it should start with step 2.", edge=True)  # fmt: skip
bank.slip("recorded-late", ("wait=1, warmup=1", "wait=2, warmup=1"))
bank.slip("recorded-late", ("wait=1, warmup=1", "wait=1, warmup=2"), variant=True)
bank.hint("recorded-again", "The cycle of waiting, warming up and recording started again, and later steps ({first} "
          "to {last}) replaced the first ones. Set how often it repeats.", edge=True)  # fmt: skip
bank.slip("recorded-again", (", repeat=1", ""))
bank.slip("recorded-again", ("repeat=1", "repeat=2"), variant=True)
bank.hint("too-many-steps", "You recorded {n} steps instead of {wanted}. The rest of a long loader must not be "
          "recorded.")  # fmt: skip
bank.slip("too-many-steps", ("active=active,", "active=len(loader) - 2,"))
bank.slip("too-many-steps", ("active=active,", "active=max(2, active),"), variant=True)
bank.hint("too-few-steps", "You recorded {n} steps instead of {wanted}. Do you call step() once per step, and use "
          "`active`?")  # fmt: skip
bank.slip("too-few-steps", ("active=active,", "active=1,"))
bank.slip("too-few-steps", ("active=active,", "active=3,"))  # the default instead of the argument
bank.slip(
    "too-few-steps",
    ("            profiler.step()\n", "            profiler.step()\n            profiler.step()\n"),
    variant=True,
)
bank.hint("label-missing", "The label {name!r} is in {n} of {wanted} steps.")
bank.slip(
    "label-missing",
    (
        '            with record_function("loading"):\n                batch = next(batches, None)\n',
        "            batch = next(batches, None)\n",
    ),
)
bank.slip("label-missing", ('"optimizer"', '"update"'), variant=True)
bank.hint("label-misplaced", "The label {name!r} doesn't cover {what}. It measures what is inside its `with` block.")
bank.slip(
    "label-misplaced",
    (
        '            with record_function("loading"):\n                batch = next(batches, None)\n',
        '            batch = next(batches, None)\n            with record_function("loading"):\n                pass\n',
    ),
)
bank.slip("label-misplaced",
    ('            with record_function("backward"):\n                loss.backward()\n',
     '            loss.backward()\n            with record_function("backward"):\n                pass\n'),
)  # fmt: skip
bank.slip("label-misplaced", ("iter(loader)", "iter(list(loader))"))
bank.hint("label-too-wide", "The label {name!r} also covers {what}, so its time is not that of a single part.")
bank.slip(
    "label-too-wide",
    (
        '            with record_function("backward"):\n                loss.backward()\n            with record_function("optimizer"):\n                optimizer.step()\n                optimizer.zero_grad()\n',
        '            with record_function("backward"):\n                loss.backward()\n                with record_function("optimizer"):\n                    optimizer.step()\n                    optimizer.zero_grad()\n',
    ),
)
bank.slip(
    "label-too-wide",
    (
        '                loss = forward(model, *batch)\n            with record_function("backward"):\n                loss.backward()\n',
        '                loss = forward(model, *batch)\n                with record_function("backward"):\n                    loss.backward()\n',
    ),
    variant=True,
)
# gradients cleared, but not under the label of the update
CLEARED = "                optimizer.zero_grad()\n"
bank.slip("label-misplaced", (CLEARED, "            optimizer.zero_grad()\n"))
bank.slip("label-misplaced", (CLEARED, "            model.zero_grad(set_to_none=False)\n"))
bank.slip(
    "label-misplaced",
    (CLEARED, ""),
    ("                loss.backward()\n", "                optimizer.zero_grad()\n                loss.backward()\n"),
    variant=True,
)
bank.hint("profiler-not-returned", "Return the profiler: its key_averages() are needed next.")
bank.slip("profiler-not-returned", ("                return profiler\n", "                return folder\n"))
bank.slip("profiler-not-returned", ("                return profiler\n", "                break\n"))
bank.hint("batch-not-trained", "You trained on {n} of {wanted} batches. Only the recording ends; the loop goes on.")
bank.slip(
    "batch-not-trained",
    (
        "            profiler.step()\n",
        "            profiler.step()\n            if profiler.step_num == 2 + active:\n                return profiler\n",
    ),
    variant=True,
)
bank.hint("gradients-add-up", "The weights are those of a loop that never clears its gradients: they add up from one "
          "step to the next.")  # fmt: skip
bank.slip("gradients-add-up", ("                optimizer.zero_grad()\n", ""), variant=True)
bank.hint("weights-still", "The weights did not change. Do you call the optimizer's step() after backward() and "
          "before you clear the gradients?")  # fmt: skip
bank.slip(
    "weights-still",
    (
        "                optimizer.step()\n                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n                optimizer.step()\n",
    ),
    variant=True,
)
bank.hint("forward-again", "You called `forward` {n} times for {wanted} batches. Once per batch is enough.")
bank.slip(
    "forward-again",
    (
        "                loss = forward(model, *batch)\n",
        "                loss = forward(model, *batch) * 0 + forward(model, *batch)\n",
    ),
)
bank.slip("forward-again", ("iter(loader)", "iter([*loader, *loader])"), variant=True)
bank.hint("folder-there", "Your code fails when the folder already exists. It may or may not exist: exist_ok=True.", edge=True)  # fmt: skip
bank.slip("folder-there", (", exist_ok=True", ""), variant=True)
bank.slip("profiler-not-returned", ("return profiler\n", "return profiler.key_averages()\n"), variant=True)
bank.text(  # the next batch is asked for at the end of a step; two loops, of which only the first is profiled
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
bank.hint("weights-differ", "After the loop, the weights differ from those of a plain loop over the same batches.")
bank.slip("weights-differ", ("                optimizer.step()\n                optimizer.zero_grad()\n",
                                "                optimizer.step()\n                optimizer.zero_grad()\n                model.eval()\n"), variant=True)  # fmt: skip
bank.slip(  # the record also ends with the block
    None,
    (
        "            profiler.step()\n",
        "            if profiler.step_num < len(loader) - 1:\n                profiler.step()\n",
    ),
)
bank.slip(
    "warmup-recorded",
    ("            profiler.step()\n", ""),
    (
        '            with record_function("loading"):\n',
        '            profiler.step()\n            with record_function("loading"):\n',
    ),
    variant=True,
)
bank.text(
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
    variant=True,
)
bank.slip("no-warmup", ("wait=1, warmup=1", "wait=2, warmup=0"), variant=True)

bank.hint("step-in-label", "You call the profiler's step() inside the label {name!r}, so the label ends in the next "
          "step. Call it after the last label of a step.", edge=True)  # fmt: skip
bank.slip(
    "step-in-label",
    ("            profiler.step()\n", ""),
    (
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n                profiler.step()\n",
    ),
    variant=True,
)

# the end of a step is where its update is over
END = "            profiler.step()\n"
FORWARD = "                loss = forward(model, *batch)\n"
bank.hint("step-inside", "You call the profiler's step() in the middle of a step, so the update of one step is "
          "recorded in the next. Call it at the end of each step.")  # fmt: skip
bank.slip("step-inside", (END, ""), (FORWARD, FORWARD + END))
bank.slip(
    "step-inside",
    (END, ""),
    ('            with record_function("optimizer"):\n', END + '            with record_function("optimizer"):\n'),
    variant=True,
)

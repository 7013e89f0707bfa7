"""Answers to balise 8 of 10_learning_rate_and_large_batch: a run that is resumed exactly."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 8, whole=True)

OTHER = """
import os
from pathlib import Path


class Batches:
    def __init__(self, x, y, size, seed=0):
        self.x, self.y, self.size, self.seed = x, y, size, seed
        self.epoch, self.done = 0, 0

    def order(self):
        return torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))

    def __iter__(self):
        order = self.order()
        while self.done * self.size < len(order):
            start = self.done * self.size
            rows = order[start : start + self.size]
            self.done += 1
            yield torch.index_select(self.x, 0, rows), torch.index_select(self.y, 0, rows)
        self.done = 0
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


def save_checkpoint(path, **parts):
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        torch.save([random_states(), [(name, part.state_dict()) for name, part in parts.items()]], file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)


def load_checkpoint(path, **parts):
    with open(path, "rb") as file:
        states, saved = torch.load(file, weights_only=True)
    saved = dict(saved)
    for name in parts:
        parts[name].load_state_dict(saved[name])
    set_random_states(states)
"""
bank.text(None, OTHER)

BYTES = OTHER.replace(
    """    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        torch.save([random_states(), [(name, part.state_dict()) for name, part in parts.items()]], file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).rename(path)
""",
    """    import io, shutil
    saved = {name: part.state_dict() for name, part in parts.items()}
    saved["random states"] = random_states()
    memory = io.BytesIO()
    torch.save(saved, memory)
    beside = Path(path).with_suffix(".part")
    beside.write_bytes(memory.getvalue())
    shutil.move(beside, path)
""",
).replace(
    """    with open(path, "rb") as file:
        states, saved = torch.load(file, weights_only=True)
    saved = dict(saved)
""",
    """    saved = torch.load(path)
    states = saved.pop("random states")
""",
)
assert "BytesIO" in BYTES and "torch.load(path)" in BYTES
bank.text(None, BYTES)  # weights_only=True is torch's own default

bank.hint("wrong-batches", "The batches do not follow self.order(). Give x[rows] and y[rows], with `size` rows "
                              "each and a smaller last batch. The second epoch has its own order.")  # fmt: skip
bank.slip("wrong-batches", ("self.order().split(self.size)", "torch.arange(len(self.x)).split(self.size)"))
bank.slip("wrong-batches", ("yield self.x[rows], self.y[rows]", "yield self.x[rows], self.y[: len(rows)]"))
bank.variant(
    "wrong-batches", OTHER, ("        order = self.order()\n", "        order = torch.randperm(len(self.x))\n")
)

bank.hint("counted-late", "In the loop's body, after the first and the second batch, (epoch, done) are {got}, "
                             "not {expected}. Code after `yield` runs only when the next batch is asked for. A "
                             "checkpoint made in the body would train on this batch twice.")  # fmt: skip
bank.slip("counted-late", ("            self.done += 1\n            yield self.x[rows], self.y[rows]\n", "            yield self.x[rows], self.y[rows]\n            self.done += 1\n"))  # fmt: skip
bank.slip("counted-late", ("            self.done += 1\n            yield self.x[rows], self.y[rows]\n        self.epoch", "            yield self.x[rows], self.y[rows]\n        self.epoch"))  # fmt: skip
bank.variant("counted-late", OTHER, ("            self.done += 1\n", ""), ("index_select(self.y, 0, rows)\n", "index_select(self.y, 0, rows)\n            self.done += 1\n"))  # fmt: skip

bank.hint("wrong-count", "In the loop's body, after the first two batches or the one after a break, (epoch, "
                            "done) are {got}, not {expected}. done counts the batches of the epoch that have been "
                            "handed out so far.")  # fmt: skip
bank.slip("wrong-count", ("            self.done += 1\n", "            self.done += len(rows)\n"), ("[self.done :]", "[self.done // self.size :]"))  # fmt: skip
bank.slip("wrong-count", ("        for rows in self.order().split(self.size)[self.done :]:\n            self.done += 1\n",
          "        for k, rows in enumerate(self.order().split(self.size)[self.done :], 1):\n            self.done = k\n"))  # fmt: skip
bank.variant("wrong-count", OTHER, ("        self.done = 0\n        self.epoch += 1\n", "        self.done = 0\n"), ("        order = self.order()\n", "        order = self.order()\n        self.epoch += 1\n"))  # fmt: skip

bank.hint(
    "begins-again",
    "A second loop over the same epoch does not give the rest of its batches. Begin at batch number self.done.",
)
bank.slip("begins-again", ("[self.done :]", ""))
bank.slip(
    "begins-again", ("        for rows in self.order()", "        self.done = 0\n        for rows in self.order()")
)
bank.variant("begins-again", OTHER, ("        order = self.order()\n", "        order, self.done = self.order(), 0\n"))

bank.hint("left-is-ended", "A loop was left by `break` in the middle of an epoch, and the next loop began the "
                              "next epoch. The epoch is over only after the last batch: not in a `finally:`.")  # fmt: skip
bank.slip("left-is-ended", ("        for rows in self.order().split(self.size)[self.done :]:\n            self.done += 1\n            yield self.x[rows], self.y[rows]\n        self.epoch, self.done = self.epoch + 1, 0\n", "        try:\n            for rows in self.order().split(self.size)[self.done :]:\n                self.done += 1\n                yield self.x[rows], self.y[rows]\n        finally:\n            self.epoch, self.done = self.epoch + 1, 0\n"))  # fmt: skip
bank.variant("left-is-ended", OTHER, ("            yield torch.index_select(self.x, 0, rows), torch.index_select(self.y, 0, rows)\n", "            try:\n                yield torch.index_select(self.x, 0, rows), torch.index_select(self.y, 0, rows)\n            except GeneratorExit:\n                self.epoch, self.done = self.epoch + 1, 0\n                raise\n"))  # fmt: skip

bank.hint("never-ends", "Your generator goes on into the next epoch. It must end with the epoch: another `for` "
                           "loop reads the next one.")  # fmt: skip
bank.slip("never-ends", ("        for rows in self.order().split(self.size)[self.done :]:\n            self.done += 1\n            yield self.x[rows], self.y[rows]\n        self.epoch, self.done = self.epoch + 1, 0\n", "        while True:\n            for rows in self.order().split(self.size)[self.done :]:\n                self.done += 1\n                yield self.x[rows], self.y[rows]\n            self.epoch, self.done = self.epoch + 1, 0\n"))  # fmt: skip
bank.variant("never-ends", OTHER, ("        self.epoch += 1\n", "        self.epoch += 1\n        yield from self\n"))

bank.hint("epoch-stays", "After the last batch, (epoch, done) are {got}, not {expected}. The next epoch has "
                            "another order, and begins at its first batch.")  # fmt: skip
bank.slip("epoch-stays", ("        self.epoch, self.done = self.epoch + 1, 0\n", ""))
bank.slip("epoch-stays", ("        self.epoch, self.done = self.epoch + 1, 0\n", "        self.done = 0\n"))
bank.variant("epoch-stays", OTHER, ("        self.done = 0\n        self.epoch += 1\n", "        self.epoch += 1\n"))

bank.hint("no-file", "After save_checkpoint, the given path does not hold what was saved.")
bank.slip("no-file", ('    Path(f"{path}.new").replace(path)\n', ""))
bank.slip("no-file", ('    Path(f"{path}.new").replace(path)\n', '    Path(f"{path}.new").replace(path) if not Path(path).exists() else None\n'))  # fmt: skip
bank.variant("no-file", OTHER, ("    Path(file.name).rename(path)\n", ""))

bank.hint("not-one-file", "The checkpoint was moved to another folder and loaded from there: {error}. Put "
                             "everything into one file: two files are never replaced at the same moment.")  # fmt: skip
bank.slip("not-one-file", ('"random": random_states()}, f"{path}.new")\n', '}, f"{path}.new")\n    torch.save(random_states(), f"{path}.random")\n'), ('    set_random_states(saved["random"])', '    set_random_states(torch.load(f"{path}.random", weights_only=True))'))  # fmt: skip
bank.variant("not-one-file", OTHER, ("    Path(file.name).rename(path)\n", "    Path(file.name).rename(path)\n    Path(f'{path}.all').write_bytes(path.read_bytes())\n"), ('open(path, "rb")', 'open(f"{path}.all", "rb")'))  # fmt: skip

bank.hint(
    "save-changes",
    "Saving changed something: {what}. A run that saves must continue exactly like one that does not.",
)
bank.slip("save-changes", ('    torch.save({', '    new = f"{path}.{random.random()}"\n    torch.save({'), ('random_states()}, f"{path}.new")', "random_states()}, new)"), ('Path(f"{path}.new")', "Path(new)"))  # fmt: skip
bank.variant("save-changes", OTHER, ("    path = Path(path)\n", "    path, _ = Path(path), random.random()\n"))

bank.hint("part-not-loaded", "After load_checkpoint, new objects do not have the saved state: {what}.")
bank.slip("part-not-loaded", ("        part.load_state_dict(saved", "        if name != 'scaler':\n            part.load_state_dict(saved"))  # fmt: skip
bank.slip("part-not-loaded", ("        part.load_state_dict(saved", "        part.state_dict().update(saved"))
bank.slip("part-not-loaded", ("    for name, part in parts.items():\n        part.load_state_dict(saved[\"parts\"][name])\n", "    for name, part in saved['parts'].items():\n        parts[name] = part\n"))  # fmt: skip
bank.variant("part-not-loaded", OTHER, ("    for name in parts:\n", "    for name in ['network', 'student', 'teacher']:\n        if name not in parts:\n            continue\n"))  # fmt: skip

bank.hint("random-not-loaded", "After load_checkpoint, these are not as they were saved: {what}. Dropout, "
                                  "shuffling and augmentation would continue with other numbers.")  # fmt: skip
bank.slip("random-not-loaded", ('    set_random_states(saved["random"])\n', ""))
bank.slip(
    "random-not-loaded",
    ('    set_random_states(saved["random"])\n', "    torch.set_rng_state(saved['random']['torch'])\n"),
)
bank.slip("random-not-loaded", ('    set_random_states(saved["random"])\n', "    set_random_states(random_states())\n"))
bank.variant("random-not-loaded", OTHER, ("    set_random_states(states)\n", "    torch.manual_seed(0)\n"))

bank.hint("goes-on-otherwise", "Everything was loaded as it was saved, but the run continued differently "
                                  "({what}). Does the optimizer still train the parameters of the model? Does "
                                  "something draw random numbers when the loop starts again, as a DataLoader does? "
                                  "And what are (epoch, done) after an epoch's last batch?")  # fmt: skip
bank.slip("goes-on-otherwise", ("        part.load_state_dict(saved", "        keep = {'assign': True} if isinstance(part, nn.Module) else {}\n        part.load_state_dict(saved"), ("[name])\n", "[name], **keep)\n"))  # fmt: skip
bank.variant("goes-on-otherwise", OTHER, ("        parts[name].load_state_dict(saved[name])\n", "        parts[name].load_state_dict(saved[name])\n        if isinstance(parts[name], nn.Module):\n            parts[name].eval()\n"))  # fmt: skip

bank.hint("half-written", "You overwrite the old checkpoint while the new one is written: a job that is killed "
                             "then has none. Write to another file in the folder, and let it replace the old one "
                             "(Path.replace).")  # fmt: skip
bank.slip("half-written", ('random_states()}, f"{path}.new")\n    Path(f"{path}.new").replace(path)\n', "random_states()}, path)\n"))  # fmt: skip
bank.slip(
    "half-written",
    ('    Path(f"{path}.new").replace(path)\n', "    __import__('shutil').copyfile(f'{path}.new', path)\n"),
)
bank.variant("half-written", BYTES, ("    beside.write_bytes(memory.getvalue())\n    shutil.move(beside, path)\n", "    Path(path).write_bytes(memory.getvalue())\n"))  # fmt: skip

bank.hint("old-removed", "You remove the old checkpoint, or move it away, before the new one is in its place: a "
                            "job that is killed in between finds none. Path.replace does both at once.")  # fmt: skip
bank.slip("old-removed", ('    Path(f"{path}.new").replace(path)\n', '    Path(path).unlink(missing_ok=True)\n    Path(f"{path}.new").rename(path)\n'))  # fmt: skip
bank.slip("old-removed", ('    Path(f"{path}.new").replace(path)\n', '    if Path(path).exists():\n        Path(path).rename(f"{path}.old")\n    Path(f"{path}.new").replace(path)\n'))  # fmt: skip
bank.variant("old-removed", OTHER, ("    Path(file.name).rename(path)\n", "    if os.path.exists(path):\n        os.remove(path)\n    os.rename(file.name, path)\n"))  # fmt: skip

bank.hint("other-folder", "You write the new file in another folder. On a cluster that may be another disk, and "
                             "a file cannot be moved there in one go. Write it next to the old one.")  # fmt: skip
bank.slip("other-folder", ('random_states()}, f"{path}.new")\n    Path(f"{path}.new")', 'random_states()}, f"{tempfile.gettempdir()}/{Path(path).name}.new")\n    Path(f"{tempfile.gettempdir()}/{Path(path).name}.new")'))  # fmt: skip
bank.variant("other-folder", OTHER, ("NamedTemporaryFile(dir=path.parent, ", "NamedTemporaryFile("))

bank.hint("random-early", "A part draws random numbers while it is loaded, so they no longer continue from "
                             "where they were saved. Set the random states last.")  # fmt: skip
bank.slip("random-early", ('    for name, part in parts.items():\n        part.load_state_dict(saved["parts"][name])\n    set_random_states(saved["random"])\n', '    set_random_states(saved["random"])\n    for name, part in parts.items():\n        part.load_state_dict(saved["parts"][name])\n'))  # fmt: skip
bank.variant("random-early", OTHER, ("    for name in parts:\n", "    set_random_states(states)\n    for name in parts:\n"), ("(saved[name])\n    set_random_states(states)\n", "(saved[name])\n"))  # fmt: skip

bank.hint("fewer-parts", "The file holds a student and a teacher, and load_checkpoint was given only the "
                            "student: {error}. Go through the parts that are given, not through those in the file.")  # fmt: skip
bank.slip("fewer-parts", ("    for name, part in parts.items():\n        part.load_state_dict(saved[\"parts\"][name])\n", "    for name, state in saved[\"parts\"].items():\n        parts[name].load_state_dict(state)\n"))  # fmt: skip
bank.variant("fewer-parts", OTHER, ("    for name in parts:\n", "    for name in saved:\n"))

bank.hint("save-silent", "A part could not be saved, and your code hides the error. Let it reach the caller: a "
                            "run that relies on a missing checkpoint is lost.")  # fmt: skip
bank.slip("save-silent", ('    torch.save({"parts": states, "random": random_states()}, f"{path}.new")\n', '    try:\n        torch.save({"parts": states, "random": random_states()}, f"{path}.new")\n    except Exception:\n        return\n'))  # fmt: skip
bank.variant("save-silent", BYTES, ("    torch.save(saved, memory)\n", "    try:\n        torch.save(saved, memory)\n    except TypeError:\n        return\n"))  # fmt: skip

bank.hint("own-names", "save_checkpoint(path, student=..., teacher=...) and loading it again fail: {error}. "
                          "Accept any part with a state_dict, under any name.")  # fmt: skip
bank.slip("own-names", ("for name, part in parts.items():\n        part.load", "for name, part in [('network', parts['network']), *parts.items()]:\n        part.load"))  # fmt: skip
bank.variant("own-names", OTHER, ("    path = Path(path)\n", "    path, optimizer = Path(path), parts['optimizer']\n"))

bank.hint("runs-code", "Loading ran code from the file. torch.load(..., weights_only=True) accepts only tensors "
                          "and plain types.")  # fmt: skip
bank.slip("runs-code", ("weights_only=True", "weights_only=False"))
bank.variant("runs-code", OTHER, ("weights_only=True", "weights_only=False"))

"""Answers to balise 9 of 09_ddp: all that a job hands on to its next start."""

from tests.answers.bank import Bank

bank = Bank("09_ddp", 9, whole=True)

# one flat dictionary, the parts by their names in it
FLAT = """
class Everything:
    def __init__(self, **parts):
        self.parts, self.epoch, self.batch, self.random = parts, 0, 0, None

    def collect(self):
        mine = [None] * dist.get_world_size()
        dist.all_gather_object(mine, random_states())
        self.random = mine

    def state_dict(self):
        found = {f"part {name}": self.parts[name].state_dict() for name in self.parts}
        found["place"] = torch.tensor([self.epoch, self.batch])
        found["random"] = {rank: states for rank, states in enumerate(self.random)}
        return found

    def load_state_dict(self, state):
        self.epoch, self.batch = state["place"].tolist()
        for name in self.parts:
            self.parts[name].load_state_dict(state[f"part {name}"])
        mine = state["random"][dist.get_rank()]
        set_random_states(mine)
"""
PARTS = "{name: part.state_dict() for name, part in self.parts.items()}"
LOADED = '            part.load_state_dict(state["parts"][name])\n'
SET = '        set_random_states(state["random"][dist.get_rank()])\n'
FOR = "        for name, part in self.parts.items():\n"

bank.text(None, FLAT)
bank.text(None, FLAT.replace('found["place"] = torch.tensor([self.epoch, self.batch])', 'found["place"] = torch.tensor([self.epoch, self.batch]).clone()').replace("found = {f", "found = {'version': 1} | {f"))  # fmt: skip
bank.slip(None, ('"random": self.random}', '"random": tuple(self.random)}'))

bank.slip("nothing-returned", ('        return {"parts"', '        found = {"parts"'))

bank.hint("state-waits", "state_dict waits for the other ranks, but they never call it: in save_checkpoint only "
                            "rank 0 does. `collect` has already put what the ranks exchange into `self.random`.")  # fmt: skip
bank.slip("state-waits", ("        states = {", "        self.collect()\n        states = {"))
bank.variant("state-waits", FLAT, ("        found = {", "        dist.barrier()\n        found = {"))

bank.hint(
    "not-plain",
    "The state does not load with weights_only=True, because it holds Python objects. Ask each part for its "
    "state_dict().",
)
bank.slip("not-plain", (PARTS, "dict(self.parts)"))
bank.slip("not-plain", (PARTS, "[part for part in self.parts.values()]"))
bank.variant("not-plain", FLAT, ("self.parts[name].state_dict()", "self.parts[name]"))

bank.hint("part-forgotten", "The part {name!r} does not continue where it was. Save and load the state of every "
                               "part in `self.parts`, under its name.")  # fmt: skip
bank.slip("part-forgotten", (FOR + LOADED, ""))
bank.slip(
    "part-forgotten",
    (FOR + LOADED, '        self.parts["optimizer"].load_state_dict(state["parts"]["optimizer"])\n'),
)
bank.slip("part-forgotten", (FOR + LOADED, '        self.parts = state["parts"]\n'))
bank.variant("part-forgotten", FLAT, ("        for name in self.parts:\n", "        for name in ('optimizer', 'scheduler', 'scaler'):\n"))  # fmt: skip

bank.hint(
    "place-forgotten", "The loader starts somewhere else. `epoch` and `batch` are part of the state: restore them."
)
bank.slip("place-forgotten", ('        self.epoch, self.batch = state["epoch"], state["batch"]\n', ""))
bank.slip("place-forgotten", ('        self.epoch, self.batch = state["epoch"], state["batch"]\n', '        self.epoch = state["epoch"]\n'))  # fmt: skip
bank.variant("place-forgotten", FLAT, ("self.epoch, self.batch = state", "self.batch, self.epoch = state"))

bank.hint("random-forgotten", "After loading, a rank draws other random numbers than it would have drawn. "
                                 "Restore what `collect` has saved, with set_random_states.")  # fmt: skip
bank.slip("random-forgotten", (SET, ""))
bank.slip("random-forgotten", (SET, "        torch.manual_seed(dist.get_rank())\n"))
bank.variant("random-forgotten", FLAT, ("        set_random_states(mine)\n", "        self.random = mine\n"))

bank.hint("random-of-gpu", "On a GPU, dropout draws from the GPU's generator, which you don't restore. Pass "
                              "everything that `random_states` gave for this rank to set_random_states.")  # fmt: skip
bank.slip("random-of-gpu", (SET, '        torch.set_rng_state(state["random"][dist.get_rank()][0])\n'))
bank.variant("random-of-gpu", FLAT, ("set_random_states(mine)", "set_random_states(mine[:1])"))

bank.hint(
    "random-of-rank-0",
    "All ranks now draw the numbers of rank 0. Save `self.random`, which has one entry per rank, and restore the "
    "entry of this rank.",
)
bank.slip("random-of-rank-0", ('state["random"][dist.get_rank()]', 'state["random"][0]'))
bank.slip("random-of-rank-0", ('"random": self.random}', '"random": random_states()}'), ('state["random"][dist.get_rank()]', 'state["random"]'))  # fmt: skip
bank.slip("random-of-rank-0", ('"random": self.random}', '"random": [random_states()] * len(self.random)}'))
bank.variant("random-of-rank-0", FLAT, ('state["random"][dist.get_rank()]', 'next(iter(state["random"].values()))'))

bank.hint(
    "random-too-early",
    "You restore the random states before you load a part that draws numbers itself. Restore them last.",
)
bank.slip("random-too-early", (FOR + LOADED, SET + FOR + LOADED), (LOADED + '        self.epoch, self.batch = state["epoch"], state["batch"]\n' + SET, LOADED + '        self.epoch, self.batch = state["epoch"], state["batch"]\n'))  # fmt: skip
bank.variant("random-too-early", FLAT, ("        for name in self.parts:\n", "        set_random_states(state['random'][dist.get_rank()])\n        for name in self.parts:\n"), ("        set_random_states(mine)\n", ""))  # fmt: skip

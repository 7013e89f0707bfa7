"""Answers to balise 7 of 25_race: joules of a counter, and what a job costs."""

from tests.answers.bank import Bank

bank = Bank("25_race", 7, whole=True)

# loops, whole hours and kilowatts first
BY_LOOPS = """
def joules(counter, wrap):
    total, last = 0, counter[0]
    for now in counter[1:]:
        total += now - last
        if now < last:
            total += wrap
        last = now
    return total / 1_000_000


def cost(seconds, gpus, machine, grid):
    hours = seconds / 3600
    nodes, left = divmod(gpus, machine.gpus)
    if left:
        nodes += 1
    unused = nodes * machine.gpus - gpus
    kilowatts = (nodes * machine.base_watts + gpus * machine.gpu_watts + unused * machine.idle_watts) / 1000
    kwh = kilowatts * hours * grid.pue
    price = {"node": nodes, "gpu": gpus}[machine.per] * machine.euros * hours
    return [kwh, price, kwh * grid.grams]
"""
bank.text(None, BY_LOOPS)

# numpy, and node after node
BY_NODES = """
import numpy as np


def joules(counter, wrap):
    steps = np.diff(np.array(counter))
    return np.where(steps < 0, steps + wrap, steps).sum() * 1e-6


def cost(seconds, gpus, machine, grid):
    watts, nodes, left = 0, 0, gpus
    while left > 0:
        used = min(left, machine.gpus)
        watts += machine.base_watts + used * machine.gpu_watts + (machine.gpus - used) * machine.idle_watts
        nodes, left = nodes + 1, left - used
    kwh = seconds * watts * grid.pue / 1000 / 3600
    rate = machine.euros * gpus
    if machine.per == "node":
        rate = machine.euros * nodes
    return np.array([kwh, rate / 3600 * seconds, kwh * grid.grams])
"""
bank.text(None, BY_NODES)

# tensors, in joules to the end
BY_TENSORS = """
def joules(counter, wrap):
    counter = torch.tensor(counter)
    return counter.diff().remainder(wrap).sum().double() / 1e6


def cost(seconds, gpus, machine, grid):
    nodes = -(-gpus // machine.gpus)
    idle = -gpus % machine.gpus
    energy = grid.pue * seconds * (nodes * machine.base_watts + gpus * machine.gpu_watts + idle * machine.idle_watts)
    return torch.tensor([energy / 3.6e6, (nodes if machine.per == "node" else gpus) * machine.euros * seconds / 3600,
                         energy * grid.grams / 3.6e6], dtype=torch.float64)
"""
bank.text(None, BY_TENSORS)
bank.slip(None, ("(b - a) % wrap", "(b - a if b >= a else wrap - a + b)"))

bank.slip("nothing-returned", ("return sum(", "sum("))
bank.slip("nothing-returned", ("return kwh, billed", "kwh, billed"))

bank.hint("wrap-ignored", "Where a reading is below the previous one, the counter has restarted from 0. Add "
                             "`wrap` to that difference.")  # fmt: skip
bank.slip("wrap-ignored", ("(b - a) % wrap", "(b - a)"))
bank.slip("wrap-ignored", ("sum((b - a) % wrap for a, b in zip(counter, counter[1:]))", "(counter[-1] - counter[0])"))  # fmt: skip
bank.slip("wrap-ignored", ("(b - a) % wrap", "abs(b - a)"))
bank.slip("wrap-ignored", ("(b - a) % wrap", "max(b - a, 0)"))
bank.slip("wrap-ignored", ("(b - a) % wrap", "(b - a if b >= a else b)"))
bank.slip("wrap-ignored", ("sum((b - a) % wrap for a, b in zip(counter, counter[1:]))", "(max(counter) - min(counter))"))  # fmt: skip
bank.variant("wrap-ignored", BY_LOOPS, ("            total += wrap\n", "            total += 0\n"))
bank.variant("wrap-ignored", BY_NODES, ("np.where(steps < 0, steps + wrap, steps).sum()", "np.abs(steps).sum()"))

bank.hint("one-difference", "The first and the last reading don't tell how often the counter has restarted. Add "
                               "up the differences of neighbouring readings, each `% wrap`.")  # fmt: skip
bank.slip("one-difference", ("sum((b - a) % wrap for a, b in zip(counter, counter[1:]))", "((counter[-1] - counter[0]) % wrap)"))  # fmt: skip
bank.slip("one-difference", ("sum((b - a) % wrap for a, b in zip(counter, counter[1:]))", "(sum(b - a for a, b in zip(counter, counter[1:])) % wrap)"))  # fmt: skip
bank.variant("one-difference", BY_NODES, ("np.where(steps < 0, steps + wrap, steps).sum()", "(steps.sum() if steps.sum() >= 0 else steps.sum() + wrap)"))  # fmt: skip

bank.hint("other-unit-than-joules", "The counter is in microjoules. Divide by a million once, at the end.")
bank.slip("other-unit-than-joules", (" / 1e6", ""))
bank.slip("other-unit-than-joules", (" / 1e6", " / 1e3"))
bank.slip("other-unit-than-joules", (" / 1e6", " / 1e9"))
bank.variant("other-unit-than-joules", BY_LOOPS, ("total / 1_000_000", "total"))
bank.variant("other-unit-than-joules", BY_NODES, ("1e-6", "1e-3"))

bank.hint("wrong-joules", "joules: add up the differences of neighbouring readings, each modulo `wrap`, and divide by a million.")  # fmt: skip
bank.slip("wrong-joules", ("zip(counter, counter[1:])", "zip(counter[1:], counter[2:])"))
bank.slip("wrong-joules", ("(b - a) % wrap", "(a - b) % wrap"))
bank.slip("wrong-joules", ("sum((b - a) % wrap for a, b in zip(counter, counter[1:]))", "sum(counter)"))
bank.variant("wrong-joules", BY_TENSORS, (".diff().remainder(wrap).sum()", ".diff().remainder(wrap).double().mean()"))  # fmt: skip

bank.hint("not-three", "cost returns three numbers in this order: (kWh, euros, grams).")
bank.slip("not-three", ("return kwh, billed * machine.euros * seconds / 3600, kwh * grid.grams", "return kwh"))
bank.slip("not-three", ("kwh, billed * machine.euros * seconds / 3600, ", "billed * machine.euros * seconds / 3600, kwh, "))  # fmt: skip
bank.slip("not-three", (", billed * machine.euros * seconds / 3600, kwh * grid.grams", ", kwh * grid.grams, billed * machine.euros * seconds / 3600"))  # fmt: skip
bank.variant("not-three", BY_LOOPS, ("[kwh, price, kwh * grid.grams]", "(kwh, price)"))
bank.variant("not-three", BY_LOOPS, ("[kwh, price, kwh * grid.grams]", "(price, kwh, kwh * grid.grams)"))

bank.hint("wrong-nodes", "A job takes whole nodes, as few as possible for its cards: with nodes of 8, one node "
                            "for 8 cards, two for 9. All cards of these nodes count, used or not.")  # fmt: skip
bank.slip("wrong-nodes", ("math.ceil(gpus / machine.gpus)", "gpus / machine.gpus"))
bank.slip("wrong-nodes", ("math.ceil(gpus / machine.gpus)", "gpus // machine.gpus"))
bank.slip("wrong-nodes", ("math.ceil(gpus / machine.gpus)", "max(1, gpus // machine.gpus)"))
bank.slip("wrong-nodes", ("math.ceil(gpus / machine.gpus)", "round(gpus / machine.gpus)"))
bank.variant("wrong-nodes", BY_LOOPS, ("        nodes += 1\n", "        pass\n"))
bank.variant("wrong-nodes", BY_TENSORS, ("-(-gpus // machine.gpus)", "gpus / machine.gpus"), ("-gpus % machine.gpus", "0"))  # fmt: skip

bank.slip("wrong-nodes", ("math.ceil(gpus / machine.gpus)", "gpus // machine.gpus + 1"))
bank.variant("wrong-nodes", BY_LOOPS, ("    if left:\n        nodes += 1\n", "    nodes += 1\n"))

bank.hint("idle-forgotten", "The nodes of a job have cards that it doesn't use. Each of them takes "
                               "`idle_watts`, not zero and not as much as a card in use.")  # fmt: skip
bank.slip("idle-forgotten", (" + idle * machine.idle_watts", ""))
bank.slip("idle-forgotten", ("gpus * machine.gpu_watts + idle * machine.idle_watts", "nodes * machine.gpus * machine.gpu_watts"))  # fmt: skip
bank.slip("idle-forgotten", ("idle = nodes * machine.gpus - gpus", "idle = machine.gpus - gpus"))
bank.variant("idle-forgotten", BY_NODES, ("(machine.gpus - used) * machine.idle_watts", "0"))
bank.variant("idle-forgotten", BY_LOOPS, ("gpus * machine.gpu_watts + unused * machine.idle_watts", "(gpus + unused) * machine.gpu_watts"))  # fmt: skip

bank.hint("base-once", "`base_watts` is the power of one node without its cards. Every node of the job takes it, once.")
bank.slip("base-once", ("nodes * machine.base_watts", "machine.base_watts"))
bank.slip("base-once", ("nodes * machine.base_watts", "gpus * machine.base_watts"))
bank.variant("base-once", BY_LOOPS, ("(nodes * machine.base_watts", "(machine.base_watts"))

bank.hint("pue-forgotten", "For each joule that the machine uses, the site takes `grid.pue` joules. kWh and "
                              "grams count what the site takes.")  # fmt: skip
bank.slip("pue-forgotten", ("watts * grid.pue * seconds", "watts * seconds"))
bank.slip("pue-forgotten", ("kwh * grid.grams", "kwh / grid.pue * grid.grams"))
bank.slip("pue-forgotten", ("watts * grid.pue * seconds", "watts / grid.pue * seconds"))
bank.slip("pue-forgotten", ("watts * grid.pue * seconds", "watts * seconds"), ("return kwh,", "return kwh * grid.pue,"))  # fmt: skip
bank.variant("pue-forgotten", BY_LOOPS, ("hours * grid.pue", "hours"))
bank.variant("pue-forgotten", BY_TENSORS, ("energy * grid.grams", "energy / grid.pue * grid.grams"))

bank.hint("other-unit-than-kwh", "The first number must be in kWh. Watts times seconds are joules, and a kWh is "
                                    "3.6 million joules.")  # fmt: skip
bank.slip("other-unit-than-kwh", ("seconds / 3.6e6", "seconds"))
bank.slip("other-unit-than-kwh", ("seconds / 3.6e6", "seconds / 3600"))
bank.slip("other-unit-than-kwh", ("seconds / 3.6e6", "seconds / 1000"))
bank.variant("other-unit-than-kwh", BY_LOOPS, (" / 1000\n", "\n"))
bank.variant("other-unit-than-kwh", BY_NODES, (" / 1000 / 3600", ""))

bank.hint("wrong-bill", 'The price is `euros` times hours, for each node if `per` is "node", otherwise for each '
                           "card in use. Cooling is not on this bill: no PUE.")  # fmt: skip
bank.slip("wrong-bill", ("machine.euros * seconds / 3600", "machine.euros * seconds"))
bank.slip("wrong-bill", ("machine.euros * seconds / 3600", "machine.euros * grid.pue * seconds / 3600"))
bank.slip("wrong-bill", ('nodes if machine.per == "node" else gpus', 'gpus if machine.per == "node" else nodes'))
bank.slip("wrong-bill", ('nodes if machine.per == "node" else gpus', "nodes"))
bank.slip("wrong-bill", ('nodes if machine.per == "node" else gpus', "gpus"))
bank.slip("wrong-bill", ('nodes if machine.per == "node" else gpus', "gpus / machine.gpus if machine.per == 'node' else gpus"))  # fmt: skip
bank.slip("wrong-bill", ('nodes if machine.per == "node" else gpus', "nodes if machine.per == 'node' else nodes * machine.gpus"))  # fmt: skip
bank.variant("wrong-bill", BY_LOOPS, ('"node": nodes, "gpu": gpus', '"node": gpus, "gpu": nodes'))
bank.variant("wrong-bill", BY_NODES, ("rate = machine.euros * gpus", "rate = machine.euros * gpus * grid.pue"))

bank.hint("wrong-energy", "The power in watts is nodes · base_watts + cards in use · gpu_watts + the other "
                             "cards · idle_watts. Multiply by PUE and seconds to get the energy; grams are kWh · "
                             "grid.grams.")  # fmt: skip
bank.slip("wrong-energy", ("kwh * grid.grams", "kwh * grid.grams / 1000"))
bank.slip("wrong-energy", ("kwh * grid.grams", "watts * grid.grams"))
bank.slip("wrong-energy", ("nodes * machine.base_watts + ", ""))
bank.variant("wrong-energy", BY_LOOPS, ("kwh * grid.grams]", "kwh / grid.grams]"))

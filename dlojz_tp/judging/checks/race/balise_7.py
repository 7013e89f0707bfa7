"""Balise 7: joules of a counter that starts again; energy, price and CO2 of jobs, worked out by hand."""

from dataclasses import dataclass

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, numbers

RANGE = 262_143_328_850  # microjoules after which a server's counter starts again
READINGS = {  # counter, wrap: joules
    "two readings": ([1_000_000, 4_500_000], RANGE, 3.5),
    "many readings": ([5, 500_005, 2_000_005, 2_000_005, 7_750_005], RANGE, 7.75),
    "started again once": ([262_142_000_000, 671_150], RANGE, 2.0),
    "once, exactly at 0": ([7_000_000, 9_000_000, 0], 10_000_000, 3.0),
    "once, past the first reading": ([2_000_000, 8_000_000, 3_500_000], 10_000_000, 11.5),
    "twice": ([9_000_000, 1_000_000, 6_000_000, 9_500_000, 500_000], 10_000_000, 11.5),
    "three times": ([0, 4_000_000, 1_000_000, 4_750_000, 2_000_000, 250_000], 5_000_000, 15.25),
    "nothing taken": ([1_234_567, 1_234_567, 1_234_567], RANGE, 0.0),
}


@dataclass(frozen=True)
class Machine:
    gpus: int
    base_watts: float
    gpu_watts: float
    idle_watts: float
    euros: float
    per: str


@dataclass(frozen=True)
class Grid:
    grams: float
    pue: float


DESK = Machine(1, 100, 200, 30, 0.5, "gpu")
NODES, CARDS = (Machine(8, 1000, 300, 50, *price) for price in ((24, "node"), (3, "gpu")))
NO_IDLE = Machine(4, 600, 400, 0, 8, "node")
JOBS = {  # seconds, cards, machine, grid: kWh, euros, grams
    "the only card of a machine, one hour": (3600, 1, DESK, Grid(50, 1), (0.3, 0.5, 15)),
    "3 such machines, one hour": (3600, 3, DESK, Grid(50, 1.5), (1.35, 1.5, 67.5)),
    "8 cards on nodes of 8, 2 hours": (7200, 8, NODES, Grid(400, 1), (6.8, 48, 2720)),
    "9 cards on nodes of 8, one hour, paid by the node": (3600, 9, NODES, Grid(60, 1.5), (7.575, 48, 454.5)),
    "9 cards on nodes of 8, one hour, paid by the card": (3600, 9, CARDS, Grid(100, 1), (5.05, 27, 505)),
    "1 card on a node of 8, 24 hours, paid by the card": (86400, 1, CARDS, Grid(381, 1.5), (59.4, 72, 22631.4)),
    "2 cards on a node of 4, half an hour, no idle watts": (1800, 2, NO_IDLE, Grid(662, 1.2), (0.84, 4, 556.08)),
    "16 cards on nodes of 4, 9 seconds": (9, 16, NO_IDLE, Grid(50, 1.1), (0.0242, 0.08, 1.21)),
    "17 cards on nodes of 8, 15 hours": (54000, 17, NODES, Grid(200, 1.2), (152.1, 1080, 30420)),
}
DUE = torch.tensor([due for *_, due in JOBS.values()], dtype=torch.float64)


def observe(joules, cost):
    """Joules; how many numbers cost returns; each as a part of the true one."""
    found = [joules(list(counter), wrap) for counter, wrap, _ in READINGS.values()]
    yield {"joules": None if found[0] is None else torch.tensor([float(one) for one in found], dtype=torch.float64)}
    got = [numbers(cost(*job)) for *job, _ in JOBS.values()]
    yield {"numbers": None if got[0] is None else [len(one or []) for one in got]}
    parts = torch.tensor(got, dtype=torch.float64) / DUE
    yield dict(zip(("kWh", "euros", "grams"), parts.T))


def of_reading(seen, due):
    k = int(((seen - due).abs() > 1e-9).int().argmax())
    name, (counter, wrap, _) = list(READINGS.items())[k]
    return {"where": f"{name}: counter={counter}, wrap={wrap}", "expected": f"{due[k]:g} J", "got": f"{seen[k]:g}"}


def of_job(column, unit):
    """Fields: the first job that is wrong."""

    def fields(seen, due):
        k = int(((seen - due).abs() > 1e-9).int().argmax())
        (name, (*_, machine, grid, _)), true = list(JOBS.items())[k], DUE[k, column].item()
        return {
            "where": f"{name}; {machine}, {grid}",
            "expected": f"{true:.6g} {unit}",
            "got": f"{true * seen[k].item():.6g}",
        }

    return fields


ONES = torch.ones(len(JOBS), dtype=torch.float64)
LOOKS = [
    Value("joules: the counter rises, and restarts once, twice, three times", "joules",
          torch.tensor([due for *_, due in READINGS.values()], dtype=torch.float64), "wrong-joules", fields=of_reading),
    Look("cost returns three numbers", "numbers", [3] * len(JOBS), "not-three"),
    Value("kWh: one card, full nodes, one card too many, no idle watts, several PUE", "kWh", ONES, "wrong-energy", fields=of_job(0, "kWh")),
    Value("euros, by the node and by the card", "euros", ONES, "wrong-bill", fields=of_job(1, "euros")),
    Value("grams of CO2", "grams", ONES, "wrong-energy", fields=of_job(2, "g")),
]  # fmt: skip


def balise_7(joules, cost):
    yield from judged(LOOKS, observe, joules, cost)

"""How long `check all` takes for a class: notebooks made from the solutions, with some balises left as holes.

`python benchmarks/grade_a_class.py --trainees 20 --works 15` prints wall and processor seconds. No verdict is kept from
one notebook for another, so equal answers make it no quicker.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dlojz_tp.works import source

LEFT = 0.15  # of the balises are not done


def hand_in(folder: Path, work: source.Work, rng: random.Random) -> None:
    """A notebook as a trainee would leave it."""
    notebook = json.loads((source.NOTEBOOKS / f"{work.name}.ipynb").read_text())
    holes = [c for c in notebook["cells"] if any(t.startswith("balise-") for t in c["metadata"].get("tags", []))]
    for cell, balise in zip(holes, work.balises.values(), strict=True):
        if rng.random() >= LEFT:
            cell["source"] = source.without_markers(balise.code)
    folder.mkdir(exist_ok=True)
    (folder / f"{work.name}.ipynb").write_text(json.dumps(notebook))


def main():
    """Make a class, grade it, say what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainees", type=int, default=20)
    parser.add_argument("--works", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as made:
        for k in range(options.trainees):
            for name in source.names()[: options.works]:
                hand_in(Path(made) / f"trainee{k:02}", source.find(name), rng)
        start = time.perf_counter()
        words = [sys.executable, "-m", "dlojz_tp", "check", "all", made, "--csv", f"{made}/all.csv"]
        done = subprocess.run(words + ["--jobs", str(options.jobs)] * bool(options.jobs), cwd=source.ROOT)
        wall, spent = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"exit status {done.returncode}: {wall:.0f} s, {spent.ru_utime + spent.ru_stime:.0f} s of processor time")


if __name__ == "__main__":
    main()

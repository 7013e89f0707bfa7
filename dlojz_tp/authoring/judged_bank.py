"""Judge answers of a bank, in a process of the tree that is asked: `answering` starts it, here or in another commit.

So it uses of the course only what commits have in common. It reads a job as JSON, {"work", "balises", "only"}, and
writes one JSON object a line, one for each answer, to the file that is its argument. only: places in the bank, or null.
"""

import functools
import inspect
import json
import re
import runpy
import string
import sys
import time
from pathlib import Path

MEASURED = re.compile(r"\d+\.\d+|0x[0-9a-f]+")  # differs from run to run


def main(target: str):
    """Judge what standard input asks for."""
    from dlojz_tp import course
    from dlojz_tp.works import source

    job = json.load(sys.stdin)
    work = source.find(job["work"])
    bank = runpy.run_path(str(Path(__file__).with_name("banks.py")))["of"](work)
    words = []
    course.verdicts._filled = functools.partial(_noted, course.verdicts._filled, words)
    with Path(target).open("w", encoding="utf-8") as file:
        for place, answer in enumerate(bank.answers):
            if answer.balise in job["balises"] and (job["only"] is None or place in job["only"]):
                words.clear()
                start = time.perf_counter()
                verdict = course.judge(work, answer.balise, answer.answers)
                seconds = time.perf_counter() - start
                edge = answer.slug in bank.edges.get(answer.balise, ())
                told = {key: getattr(verdict, key) for key in ("verdict", "slug", "hint", "expected", "got", "details")}
                due = {"name": str(answer), "balise": answer.balise, "due": answer.slug, "edge": edge}
                found = {"place": place, "text": _text(answer), "seconds": seconds, "words": sorted(words)}
                file.write(json.dumps(due | found | told) + "\n")
                file.flush()


def _noted(filled, words: list[str], hint: str, fields: dict) -> str:
    """Fill a hint as the course does, and note the words that fill it. A number that is measured is noted as "#"."""
    words.clear()
    for _, name, spec, conversion in string.Formatter().parse(hint):
        if name:
            try:
                value, _ = string.Formatter().get_field(name, (), fields)
                text = "{" + name + f"!{conversion}" * bool(conversion) + f":{spec}" * bool(spec) + "}"
                text = string.Formatter().vformat(text, (), fields)
                words.append("#" if isinstance(value, float) else MEASURED.sub("#", text))
            except (LookupError, AttributeError, TypeError, ValueError):
                words.append(f"no {name}")
    return filled(hint, fields)


def _text(answer) -> str:
    """The text of an answer, or of its functions; "" where there is none."""
    try:
        return answer.written or answer.code or "\n".join(map(inspect.getsource, answer.answers))
    except (OSError, TypeError):
        return ""


if __name__ == "__main__":  # a checkpoint of the bank's functions must find nothing of this file
    main(sys.argv[1])

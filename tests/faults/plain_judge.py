"""A judge that imports no torch: what a keeper does with its processes does not depend on what they compute."""

import dataclasses
from pathlib import Path

from dlojz_tp.cards.verdict import Verdict

ANSWERS = {1: "describe_machine", 2: "distributed_sum"}


def judge_all(_work: str):
    """As `command.judge_all`; an answer is right if it returns 7."""

    def judge(_note_kill, path: str, number: int) -> dict:
        names = {}
        exec(Path(path).read_text(), names)
        return dataclasses.asdict(Verdict(number, "t", "pass" if names[ANSWERS[number]]() == 7 else "fail"))

    return judge

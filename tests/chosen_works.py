"""The works whose banks a run of pytest needs: the others are not read."""

import itertools
import re

from _pytest.mark.expression import Expression

from dlojz_tp.authoring import banks
from dlojz_tp.works.source import Work

EVERY = "test_answers.py", "flaky", "pytestmark"  # what -k finds in each of these tests
MOST = 10  # words of a -k whose every combination is tried


def of(config, works: list[Work]) -> list[Work]:
    """Those of `works` with an answer that may be among the tests which pytest's arguments ask for. In doubt all."""
    if config.args and all("[" in arg for arg in config.args):  # names of tests, such as a summary shows
        return [work for work in works if any(f"[{work.name}-" in arg for arg in config.args)]
    return [work for work in works if may_hold(config.option.keyword, names(work))] if config.option.keyword else works


def names(work: Work) -> str:
    """What the names of the tests of its answers are made of: without the bank, a text in its files may be a slug."""
    paths = (banks.FOLDER / work.module).glob("*.py")
    bank = "".join(path.read_text(encoding="utf-8") for path in paths)
    slugs = {"right", *re.findall(r'"([\w -]+)"', bank)}
    answers = [f"test_answer[{work.name}-{number}-{slug}-L" for number in work.balises for slug in slugs]
    return "\n".join([*EVERY, *answers])


def may_hold(keyword: str, text: str) -> bool:
    """Whether the -k `keyword` may hold of a test whose name is made of `text`: a word that isn't in there does not."""
    words = set(re.findall(r"[^\s()]+", keyword)) - {"and", "or", "not"}
    known = [word for word in words if "[" in word or word.rstrip("]0123456789").lower() in text.lower()]
    if len(known) > MOST:
        return True
    expression = Expression.compile(keyword)
    for held in itertools.product([False, True], repeat=len(known)):
        found = dict(zip(known, held))
        if expression.evaluate(lambda word, found=found, **_: found.get(word, False)):
            return True
    return False

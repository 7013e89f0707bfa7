"""What a trainee notebook has where an answer is still missing."""

import re

_titles: dict[int, str] = {}  # of the practical work opened last in this process


class BaliseNotDone(Exception):
    """The code of a balise was called before it was written.

    number: the balise. title: its title, found in the open practical work when not given.
    """

    def __init__(self, number: int, title: str | None = None):
        if isinstance(number, str):  # a DataLoader hands on what its worker raised as kind(text of the traceback)
            found = re.search(r"balise (\d+) is not done yet", number)
            number = int(found[1]) if found else 0
        super().__init__(number, title)
        self.number = number
        self.title = title

    def __str__(self):
        title = self.title or _titles.get(self.number)
        if not title:
            return f"balise {self.number} is not done yet"
        first, *rest = title.split(" ")
        if first[1:] == first[1:].lower():  # MixUp and RMSNorm keep their letters
            first = first.lower()
        return f"balise {self.number} is not done yet: {' '.join([first, *rest])}"


def todo(number: int):
    """Mark the place where the trainee writes balise `number`; raises BaliseNotDone when it is reached."""
    raise BaliseNotDone(number, _titles.get(number))


def remember_titles(titles: dict[int, str]):
    """Let messages name the balises of the practical work that was opened last."""
    _titles.clear()
    _titles.update(titles)

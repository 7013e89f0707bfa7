"""The field's terms, one sentence each, from docs/glossary.md, and links from a work's text to them.

An entry of that page is a line, `- **all-reduce**: An all-reduce ...`. In brackets after the term stand other words
that mean it. A comment `<!-- not in 21 -->` names works in which the word means something else.
"""

import re
from dataclasses import dataclass

from dlojz_tp.works.source import ROOT

PAGE = ROOT / "docs" / "glossary.md"
_ENTRY = re.compile(
    r"^- \*\*(?P<term>.+?)\*\*(?: \((?P<others>.+?)\))?: (?P<said>.+?)(?: <!-- not in (?P<but>[\d ]+) -->)?$"
)
# no term is linked in these: folded text, code, formulas, links, headings, tags
_KEPT = re.compile(
    r"<details>.*?</details>|^```.*?^```|`[^`]*`|\$\$.*?\$\$|\$[^$]+\$|!?\[[^\]]*\]\([^)]*\)|^#.*?$|<[^>]+>",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Term:
    """An entry. words: the term itself and others that mean it. but: numbers of works that use the word otherwise."""

    name: str
    said: str
    words: tuple[str, ...]
    but: frozenset[str] = frozenset()


def read(text: str) -> list[Term]:
    """The entries of the page, in its order."""
    found = []
    for entry in filter(None, map(_ENTRY.match, text.splitlines())):
        others = entry["others"].split(", ") if entry["others"] else []
        found.append(
            Term(entry["term"], entry["said"], (entry["term"], *others), frozenset((entry["but"] or "").split()))
        )
    return found


def linked(text: str, terms: list[Term], seen: set[str]) -> str:
    """Markdown with a link from the first use of each term; `seen`, the terms that have one, grows.

    A term before a number, as in "rank 0", gets none.
    """
    words = {_plain(word): term for term in terms for word in term.words}
    if not words:
        return text
    longest = sorted(words, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(_looked_for, longest))})(?![\w/-]|\.\w|\s+\d)")

    def link(found):
        shown = " ".join(found[0].split())
        term = next(
            (words[key] for key in (_plain(shown), _plain(shown)[:-1], _plain(shown)[:-2]) if key in words), None
        )
        if term is None or term.name in seen:
            return found[0]
        seen.add(term.name)
        return f"{{term}}`{shown} <{term.name}>`"

    parts, end = [], 0
    for kept in _KEPT.finditer(text):
        parts += [pattern.sub(link, text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join(parts) + pattern.sub(link, text[end:])


def page(text: str, first: dict[str, str]) -> str:
    """The page for Sphinx, its entries in alphabetical order. first: {term: the work that uses it first}."""
    terms = sorted(read(text), key=lambda term: term.name.lower())
    entries = []
    for term in terms:
        work = first.get(term.name)
        entries.append(
            f"{term.name}\n  {term.said}" + (f" First used in [{work[:2]}](../works/{work}.ipynb)." if work else "")
        )
    head = "\n".join(line for line in text.splitlines() if not _ENTRY.match(line)).rstrip()
    return head + "\n\n````{glossary}\n" + "\n\n".join(entries) + "\n````\n"


def _plain(word: str) -> str:
    """A word as it is looked up: its first letter is small, unless it is an abbreviation."""
    return word if word[1:2].isupper() else word[:1].lower() + word[1:]


def _looked_for(word: str) -> str:
    """The pattern of a word: at the start of a sentence or not, over a line's end, and in the plural."""
    first = re.escape(word[0]) if word[1:2].isupper() else f"[{word[0].lower()}{word[0].upper()}]"
    return first + re.escape(word[1:]).replace(r"\ ", r"\s+") + "(?:s|es)?"

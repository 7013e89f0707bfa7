"""The speaker's notes on slides: what the page of the instructor says of a practical work."""

import re

from dlojz_tp.works.source import ROOT

PAGE = ROOT / "docs" / "instructor.md"
IDEA, ASK, STICK, GPU = "Idea", "They ask", "They stick", "On a GPU"
_ITEM = re.compile(r"^- \*\*(.+?)\.\*\* (.+?)(?=^- \*\*|\Z)", re.MULTILINE | re.DOTALL)


def of_work(text: str, name: str) -> dict[str, str]:
    """What the page `text` says of the work `name`: {"Idea": markdown, "They ask": ..., ...}; {} if nothing."""
    found = re.search(rf"^### {name[:2]} · .*?\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    return {key: " ".join(said.split()) for key, said in _ITEM.findall(found[1])} if found else {}


def distributed(slides: list, notes: dict[str, str]) -> list[str]:
    """The notes for each slide, in markdown.

    A mistake gets *They stick*, with its own balise in bold; the last slide gets the questions; the last one that shows
    something measured gets what to show on a GPU; all others get the idea.
    """
    measured = [k for k, each in enumerate(slides) if each.measured]
    texts = []
    for k, each in enumerate(slides):
        keys = [STICK] if each.balise else [ASK] if k == len(slides) - 1 else [] if k in measured[-1:] else [IDEA]
        keys += [GPU] * (k in measured[-1:])
        said = "\n\n".join(f"**{key}.** {notes[key]}" for key in keys if key in notes)
        texts.append(re.sub(rf" {each.balise}: ", f" **{each.balise}:** ", said))
    return texts

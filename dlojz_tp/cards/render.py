"""Show verdicts and progress: small HTML in a notebook (both of Lab's themes), plain text elsewhere."""

import html
import textwrap

from dlojz_tp.cards.verdict import BROKEN, DONE, EDGE, Verdict

_MARK = {"pass": "★", EDGE: "✓", "by catch_up": "»", "fail": "✗", "not done": "…", BROKEN: "⚠"}
# readable on white and on dark: the colour is carried by a border and a tint, the text keeps the theme's own colour
_COLOUR = {
    "pass": "46, 160, 67",
    EDGE: "180, 120, 12",
    "by catch_up": "56, 132, 222",
    "fail": "229, 83, 75",
    "not done": "128, 128, 128",
    BROKEN: "137, 87, 229",
}
_STYLE = (
    "border-left:4px solid rgb({c});background:rgba({c},.09);padding:8px 14px;margin:2px 0;max-width:52em;"
    "border-radius:3px;line-height:1.5;overflow-wrap:anywhere;color:var(--jp-content-font-color1, inherit)"
)

NO_VERDICT = "could not judge: what follows says nothing of your code"


class Card:
    """Something that shows itself as HTML in a notebook and as text elsewhere."""

    def __init__(self, text: str, html_text: str):
        self._text, self._html = text, html_text

    def __repr__(self):
        return self._text

    def _repr_html_(self):
        return self._html


def verdict(v: Verdict) -> Card:
    """The verdict on a balise."""
    return Card(_verdict_text(v), _verdict_html(v))


def line(
    text: str, kind: str = "not done", code: tuple[str, str] = ("", ""), folded: tuple[str, str] = ("", "")
) -> Card:
    """One calm line, such as "balise 3 is not done yet".

    code: a title, and Python to unfold (notebooks only). folded: a title, and words to unfold; plain text has both.
    """
    marked = f"{'✓' if kind == 'pass' else _MARK[kind]} {text}"
    below = _folded(code[0], code[1] and _highlighted(code[1]), "pre") + _folded(folded[0], _e(folded[1]))
    plain = marked + f"\n    {folded[0]}: {folded[1]}" * bool(folded[1])
    return Card(plain, f'<div style="{_STYLE.format(c=_COLOUR[kind])}">{_e(marked)}{below}</div>')


def progress(
    title: str,
    rows: list[tuple[int, str, str]],
    core: frozenset[int] | set[int] = frozenset(),
    guesses: list[tuple[str, bool]] = (),
) -> Card:
    """A line for each balise, and for each guess.

    rows: (number, title, verdict). core: numbers; named where it is not all. guesses: (in words, whether as expected).
    """
    robust, edge, given = (sum(word == asked for _, _, word in rows) for asked in ("pass", EDGE, "by catch_up"))
    done = robust + edge
    head = f"{title}: {done} of {len(rows)} balises done" + f", {edge} of them {EDGE}" * bool(edge)
    head += f", {given} by catch_up" * bool(given)
    if 0 < len(core) < len(rows):
        head += f", {sum(number in core and word in DONE for number, _, word in rows)} of {len(core)} of the core"
    text = [head, *(f"  {_MARK[word]} {number:2}  {name}{_by(word)}" for number, name, word in rows)]
    marked = [("✓" if right else _MARK["by catch_up"], words) for words, right in guesses]
    text += [f"  {mark}     {words}" for mark, words in marked]
    share = 100 / max(1, len(rows))
    items = "".join(
        f'<div><span style="color:rgb({_COLOUR[word]});display:inline-block;width:1.6em">{_MARK[word]}</span>'
        f'<b>{number}</b>&nbsp; {_e(name)}<span style="opacity:.7">{_by(word)}</span></div>'
        for number, name, word in rows
    )
    parts = "".join(
        f'<div style="background:rgb({_COLOUR[word]});height:6px;width:{count * share:.1f}%"></div>'
        for word, count in (("pass", robust), (EDGE, edge), ("by catch_up", given))
    )
    guessed = "".join(f'<div style="opacity:.85">{mark}&nbsp; {_e(words)}</div>' for mark, words in marked)
    page = (
        f'<div style="{_STYLE.format(c=_COLOUR["pass" if done == len(rows) else "not done"])}"><b>{_e(head)}</b>'
        f'<div style="display:flex;background:rgba(128,128,128,.25);border-radius:3px;overflow:hidden;margin:6px 0">'
        f"{parts}</div>{items}{guessed}</div>"
    )
    return Card("\n".join(text), page)


def _by(word):
    return f" · {word}" if word in (EDGE, "by catch_up") else ""


def _said(word):
    return f" · works, {EDGE}" if word == EDGE else _by(word)


def _rows(v: Verdict) -> list[tuple[str, str]]:
    rows = [("where", v.where), ("expected", v.expected), ("got", v.got), ("hint", v.hint)]
    if v.verdict == BROKEN:
        rows = [("missing" if v.slug else "broken", v.got), ("what now", v.hint)]
    return [(name, value) for name, value in rows if value]


def _verdict_text(v: Verdict) -> str:
    head = f"{_MARK[v.verdict]} balise {v.balise} · {v.title}{_said(v.verdict)}"
    if v.verdict == "not done":
        return f"{_MARK[v.verdict]} {v.hint}"
    lines = [f"{head}   ({v.seconds:.2f} s)", *(f"    ✓ {claim}" for claim in v.seen)]
    if v.verdict == BROKEN:
        lines.append(f"    {NO_VERDICT}")
    if v.verdict in ("fail", EDGE, BROKEN):
        if v.verdict != BROKEN:
            lines.append(f"    ✗ {v.failed}" if v.failed else "    ✗")
        for name, value in _rows(v):
            wrapped = textwrap.wrap(value, 92) if "\n" not in value else value.splitlines()
            lines.append(f"      {name:<9} {wrapped[0] if wrapped else ''}")
            lines.extend(" " * 16 + more for more in wrapped[1:])
        if v.details:
            lines.append(textwrap.indent(v.details, " " * 6))
        if v.printed:
            lines.append("      printed by your code:\n" + textwrap.indent(v.printed.rstrip(), " " * 8))
    return "\n".join(lines)


def _verdict_html(v: Verdict) -> str:
    colour = _COLOUR[v.verdict]
    if v.verdict == "not done":
        return line(v.hint)._repr_html_()
    title = _e(v.title) + _said(v.verdict)
    head = (
        f'<b><span style="color:rgb({colour})">{_MARK[v.verdict]}</span> Balise {v.balise} · {title}</b>'
        f' <span style="opacity:.7;font-size:85%">{v.seconds:.2f} s</span>'
    )
    good = f'<span style="color:rgb({_COLOUR["pass"]})">✓</span>'
    bad = f'<span style="color:rgb({_COLOUR[EDGE if v.verdict == EDGE else "fail"]})">✗</span>'
    parts = "".join(f'<div>{good} <span style="opacity:.85">{_e(claim)}</span></div>' for claim in v.seen)
    if v.verdict == BROKEN:
        parts += f"<div><b>{NO_VERDICT}</b></div>"
    if v.verdict in ("fail", EDGE, BROKEN):
        parts += f"<div>{bad} <b>{_e(v.failed)}</b></div>" if v.failed else ""
        cells = "".join(
            f'<div style="opacity:.7">{name}</div><div style="white-space:pre-wrap;{_weight(name)}">{_e(value)}</div>'
            for name, value in _rows(v)
        )
        parts += f'<div style="display:grid;grid-template-columns:5.5em 1fr;margin:4px 0 2px 1.2em">{cells}</div>'
        parts += _folded("your code, where it happened", _e(v.details), unfolded=v.slug == "raised")
        parts += _folded("printed by your code", _e(v.printed))
    return f'<div style="{_STYLE.format(c=colour)}">{head}{parts}</div>'


def _weight(name):
    return "font-weight:600" if name == "hint" else "font-family:var(--jp-code-font-family, monospace);font-size:90%"


def _folded(title, inside, wrapping="pre-wrap", unfolded=False):
    """inside: HTML."""
    if not inside:
        return ""
    style = f"margin:4px 0;background:transparent;color:inherit;white-space:{wrapping};overflow-x:auto;font-size:90%"
    opened = " open" if unfolded else ""
    return (
        f'<details style="margin-left:1.2em"{opened}><summary style="opacity:.7">{title}</summary>'
        f'<pre style="{style}">{inside}</pre></details>'
    )


_SYNTAX = {  # JupyterLab's own colours in both themes; elsewhere those of its light theme
    "Token.Keyword": "var(--jp-mirror-editor-keyword-color, #008000);font-weight:bold",
    "Token.Operator.Word": "var(--jp-mirror-editor-keyword-color, #008000);font-weight:bold",
    "Token.Name.Function": "var(--jp-mirror-editor-def-color, #0000ff)",
    "Token.Name.Class": "var(--jp-mirror-editor-def-color, #0000ff)",
    "Token.Name.Decorator": "var(--jp-mirror-editor-meta-color, #aa22ff)",
    "Token.Name.Builtin": "var(--jp-mirror-editor-builtin-color, #008000)",
    "Token.Literal.String": "var(--jp-mirror-editor-string-color, #ba2121)",
    "Token.Literal.Number": "var(--jp-mirror-editor-number-color, #080)",
    "Token.Comment": "var(--jp-mirror-editor-comment-color, #408080);font-style:italic",
}


def _highlighted(code: str) -> str:
    """Python as HTML in colours; plain where pygments is missing, which comes with IPython."""
    try:
        from pygments.lexers.python import PythonLexer
    except ImportError:
        return _e(code)
    parts = []
    for kind, text in PythonLexer().get_tokens(code):
        colour = next((c for name, c in _SYNTAX.items() if str(kind).startswith(name)), "")
        parts.append(f'<span style="color:{colour}">{_e(text)}</span>' if colour else _e(text))
    return "".join(parts)


def show(card: Card) -> None:
    """Show it in a notebook; print it elsewhere."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(card)
        return
    if get_ipython() is None:
        print(card)
    else:
        display(card)


def _e(text) -> str:
    return html.escape(str(text))

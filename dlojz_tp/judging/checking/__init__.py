"""How an answer is judged. What it is watched with lies in `dlojz_tp.judging.probes`.

A check is a generator in `dlojz_tp/judging/checks/NAME/` called `balise_N`. It receives the answers, and before each
thing it looks at it yields what that is, in a few words. It raises `Wrong` with the name of a hint where the answer
fails.
"""

from dlojz_tp.judging.checking.compare import close, describe, mistake_of, tolerance
from dlojz_tp.judging.checking.pretend import pretended
from dlojz_tp.judging.checking.verdicts import Verdict, verdict_of
from dlojz_tp.judging.checking.wrong import Wrong, edge

__all__ = [
    "Verdict",
    "Wrong",
    "close",
    "describe",
    "edge",
    "mistake_of",
    "pretended",
    "tolerance",
    "verdict_of",
]

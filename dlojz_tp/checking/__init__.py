"""How an answer is judged. What it is watched with lies in `dlojz_tp.probes`.

A check is a generator in `dlojz_tp/checks/NAME.py` called `balise_N`. It receives the answers, and before each thing
it looks at it yields what that is, in a few words. It raises `Wrong` with the name of a hint where the answer fails.
"""

from dlojz_tp.checking.compare import close, describe, nearest, tolerance
from dlojz_tp.checking.judging import Verdict, Wrong, judge, merged
from dlojz_tp.checking.pretend import pretended

__all__ = ["Verdict", "Wrong", "close", "describe", "judge", "merged", "nearest", "pretended", "tolerance"]

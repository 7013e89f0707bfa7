"""What came out when an answer was judged."""

from dataclasses import dataclass, field

# the hint of a verdict that needs no check
NOT_RUN = (
    "The cell that defines {name} did not run ({error}), so an older one would be judged. Mend that cell, run it, "
    "then check again."
)

BROKEN = "could not judge"
EDGE = "not yet robust"  # the idea is right, and a case at its edge is not
DONE = ("pass", EDGE)  # what counts as done


@dataclass(frozen=True)
class Verdict:
    """What came out. seen: what held. failed: what was looked at then.

    verdict: "pass"; "not yet robust" where only mistakes at the edge were found, of which the first is told; "fail";
    "not done"; "by catch_up" where the course's own code was judged; or "could not judge" where the machine or the
    course broke, or a library is not installed: it says nothing of the answer, and is not counted.
    """

    balise: int
    title: str
    verdict: str
    seconds: float = 0.0
    seen: tuple[str, ...] = ()
    failed: str = ""
    slug: str = ""
    hint: str = ""
    expected: str = ""
    got: str = ""
    where: str = ""
    details: str = ""  # the answer's own traceback
    printed: str = field(default="", compare=False)
    evidence: dict = field(default_factory=dict, compare=False)  # of a wrong value: what the look saw
    near: tuple = field(default=(), compare=False)  # known mistakes, the nearest first: (slug, distance)

    @property
    def passed(self) -> bool:
        """True for "pass": nothing was found to mend."""
        return self.verdict == "pass"

    def to_json(self) -> dict:
        """The fields that the command line prints."""
        keys = ("balise", "title", "verdict", "failed", "expected", "got", "where", "hint")
        return {key: getattr(self, key) for key in keys} | {"seconds": round(self.seconds, 3)}

"""One reason why training is slower than it could be, with its evidence, its cost and what to change.

Promises: a rule is a pure function of the evidence; it returns nothing rather than a guess. Reasons are
sorted by their predicted saving, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Slowdown:
    """One reason."""

    code: str
    """The kind of reason, such as `decode`: the same in the JSON, the docs and the tests."""
    text: str
    """What is slow, in one sentence with the numbers that show it."""
    saving: float
    """The fraction of the present time that the change is predicted to save: 0.2 means 1.25 times the speed. 0 if it
    cannot be predicted."""
    flag: str = ""
    """The change, as it is typed: `data.workers=8`. Empty if no setting helps."""
    fix: str = ""
    """What to do, in a sentence, if the flag is not enough."""
    images_per_s: float = 0.0
    """The present speed; 0 if it is not known."""

    @property
    def predicted_images_per_s(self) -> float:
        """The speed after the change."""
        return self.images_per_s / (1 - self.saving)

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            **asdict(self),
            "images_per_s": self.images_per_s or None,
            "predicted_images_per_s": self.predicted_images_per_s or None,
        }


def ranked(found: Iterable[Slowdown]) -> list[Slowdown]:
    """The largest saving first."""
    return sorted(found, key=lambda each: -each.saving)

"""The broken samples of a run: counted and listed. Too many of them end the run.

Promises: a sample counts once, however often it is read. The list depends on the data and the recipe, not on the
number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.feed.sample import BadSample

SHOWN = 3


class BadSamples:
    """The broken samples of one dataset. `limit` is how many there may be."""

    def __init__(self, what: str, samples: int, fraction: float) -> None:
        self.what, self.samples = what, samples
        # From the decimal number as it was written: 0.29 of 100 is 29, although the float is a little less.
        self.limit = math.ceil(Fraction(repr(float(fraction))) * samples)
        self.bad: dict[int, str] = {}

    def add(self, bad: Iterable[BadSample]) -> None:
        """Adds broken samples. Refuses to continue if there are too many."""
        for sample, why in bad:
            self.bad.setdefault(sample, printable(why))
        if len(self.bad) > self.limit:
            raise UserError(
                f"{len(self.bad):,} of {self.samples:,} {self.what} samples are broken; data.bad_limit allows "
                f"{self.limit:,}: {self.some()}",
                fix="`drumline verify` lists all of them; restore or remove them, or raise data.bad_limit",
            )

    def merge(self, others: Sequence[dict[int, str]]) -> None:
        """Adds what other processes found."""
        for other in others:
            self.add(BadSample(sample, why) for sample, why in other.items())

    def lines(self) -> list[str]:
        """Every broken sample, one per line, in the order of sample ids."""
        return [f"{self.what}\t{sample}\t{why}" for sample, why in sorted(self.bad.items())]

    def some(self) -> str:
        """The first of them, for a message."""
        shown = [why for _, why in sorted(self.bad.items())[:SHOWN]]
        rest = len(self.bad) - len(shown)
        return "; ".join(shown) + (f"; and {rest:,} more" if rest else "")

"""A generator that is seeded again in every step: the same dropout and augmentation each time.

Promises: reads the state of the CPU generator in the first steps, changes nothing. A loop that draws nothing from it
is never reported.
"""

from __future__ import annotations

import hashlib

import torch

from drumline.guards.finding import Finding

_WATCHED = 8
_IN_A_ROW = 3


class Seeds:
    """The CPU generator at the first forward pass of a step and before the step."""

    def __init__(self) -> None:
        self._at_forward: str | None = None
        self._before: tuple[str, str] | None = None
        self._same = 0

    def forward(self, steps: int) -> None:
        """A forward pass begins."""
        if steps < _WATCHED and self._at_forward is None:
            self._at_forward = _state()

    def look(self, step: int) -> Finding | None:
        """Before a step."""
        began, self._at_forward = self._at_forward, None
        if step > _WATCHED or began is None:
            return None
        now = (began, _state())
        drawn = now[0] != now[1]
        self._same = self._same + 1 if drawn and now == self._before else 0
        self._before = now
        if self._same != _IN_A_ROW - 1:
            return None
        return Finding(
            "seed",
            "the random generator is in the same state in every step: dropout and augmentation repeat",
            "torch.manual_seed in the loop",
            f"step {step - _IN_A_ROW + 1}",
            "seed once, before the loop",
        )


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()

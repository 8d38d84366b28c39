"""A random generator that is seeded again in every step: dropout and augmentation repeat.

Promises: reads the state of the CPU generator in the first steps and changes nothing. A loop that draws nothing from
it is never reported.
"""

from __future__ import annotations

import hashlib

import torch

from drumline.guards.finding import Finding

_WATCHED_STEPS = 8
_REPEATS = 3
"""Steps in a row with the same states that are reported."""


class Seeds:
    """The states of the CPU generator at the first forward pass of a step and before its update."""

    def __init__(self) -> None:
        self._at_forward: str | None = None
        self._last: tuple[str, str] | None = None
        self._same = 0

    def forward(self, steps: int) -> None:
        """A forward pass begins."""
        if steps < _WATCHED_STEPS and self._at_forward is None:
            self._at_forward = _state()

    def check(self, step: int) -> Finding | None:
        """Just before the optimizer steps."""
        before, self._at_forward = self._at_forward, None
        if step > _WATCHED_STEPS or before is None:
            return None
        now = (before, _state())
        drawn = now[0] != now[1]
        self._same = self._same + 1 if drawn and now == self._last else 0
        self._last = now
        if self._same != _REPEATS - 1:
            return None
        return Finding(
            "seed",
            "the random generator is in the same state in every step: dropout and augmentation repeat",
            "torch.manual_seed in the loop",
            f"step {step - _REPEATS + 1}",
            "seed once, before the loop",
        )


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()

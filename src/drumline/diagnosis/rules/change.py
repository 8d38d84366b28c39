"""Rules (to be filled)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drumline.diagnosis.figures import Figures
from drumline.diagnosis.slowdown import Slowdown

RULES: tuple[Callable[[Figures], Iterable[Slowdown]], ...] = ()

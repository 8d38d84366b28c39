"""The figures that the rules read: a run's steady state in one interval, and whether a change of its recipe is valid.

Promises: a saving is a fraction of the whole time, with evaluations and checkpoints. A flag is given only if the
recipe accepts it and its value changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drumline.config.fields import WrongValue, from_text, from_toml, recipe_fields, value_of, with_values
from drumline.config.recipe import Recipe
from drumline.config.rules import problems
from drumline.config.sources import names_code
from drumline.core.account import BETWEEN_STEPS, EXCHANGE, PARTS
from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Evidence, Interval, merged
from drumline.diagnosis.slowdown import Slowdown

MOST_SAVED = 0.99
OTHERS_WORTH = 0.25
"""Fraction of the machine's cores that other programs use, above which they matter."""
ENOUGH = 4
"""The first interval is left out if the others have its steps divided by this."""
HOST_PARTS = tuple(part for part in PARTS if part not in BETWEEN_STEPS)
"""The parts of a step."""


@dataclass(frozen=True)
class Figures:
    """What the rules read."""

    evidence: Evidence

    @cached_property
    def whole(self) -> Interval:
        """All intervals as one, without the first if the others say enough: it includes what happens only once."""
        return merged(self.steady)

    @property
    def steady(self) -> Sequence[Interval]:
        intervals = self.evidence.intervals
        first, rest = (sum(each.steps for each in part) for part in (intervals[:1], intervals[1:]))
        return intervals[1:] if rest >= first / ENOUGH else intervals

    def get(self, name: str) -> tuple[float, ...]:
        return self.whole.get(name)

    def mean(self, name: str) -> float:
        return self.whole.mean(name)

    def known(self, *names: str) -> bool:
        """Whether all of these were recorded."""
        return all(name in self.whole.values for name in names)

    def fact(self, name: str, default: Any = None) -> Any:
        return self.whole.facts.get(name, default)

    @property
    def ranks(self) -> int:
        return self.whole.ranks

    @property
    def step_ms(self) -> float:
        """A step of the slowest rank."""
        return max(self.get("step_ms"))

    @property
    def wall_ms(self) -> float:
        """A step with its part of evaluations and saves."""
        return max(self.whole.walls)

    @property
    def batch(self) -> float:
        """Samples per step, over all ranks."""
        return self.whole.images_per_s * self.step_ms / 1e3

    @property
    def images_per_s(self) -> float:
        """Over all the time, with evaluations and saves."""
        return self.batch / self.wall_ms * 1e3

    @property
    def on_gpu(self) -> bool:
        """Whether the device is not the host."""
        return bool(self.fact("gpu", self.evidence.environment.get("cuda") is not None))

    @property
    def cores(self) -> int:
        """Of this machine, as far as the run may use them; 0 if that is not known."""
        return int(self.fact("cores", 0))

    @property
    def local_ranks(self) -> int:
        """Processes on this machine."""
        return int(self.fact("local_ranks", self.ranks))

    @property
    def free_cores(self) -> float:
        """Cores of this machine that no program used."""
        return max(0.0, self.cores - max(self.get("busy_cores"))) if self.known("busy_cores") else 0.0

    @property
    def other_cores(self) -> float:
        """Cores that other programs use, on the machine where they use most."""
        return max((max(0.0, busy - own) for busy, own in self._cores_of_machines()), default=0.0)

    @property
    def own_cores(self) -> float:
        """Cores that this run uses, on the machine where other programs use most."""
        return max(self._cores_of_machines(), key=lambda each: each[0] - each[1], default=(0.0, 0.0))[1]

    def _cores_of_machines(self) -> list[tuple[float, float]]:
        """Of each machine whose processes are all known: its busy cores, and those of them that this run uses."""
        if not self.known("busy_cores", "own_cores"):
            return []
        size = self.local_ranks
        machines = [slice(first, first + size) for first in range(0, self.ranks - size + 1, size)]
        return [(max(self.get("busy_cores")[each]), sum(self.get("own_cores")[each])) for each in machines]

    @property
    def machine_is_busy(self) -> bool:
        """Whether other programs use so many cores that this run waits for some."""
        return self.other_cores >= OTHERS_WORTH * self.fact("machine_cores", max(1, self.cores))

    @property
    def fixed_ms(self) -> float:
        """What a step takes on the host whatever its batch, without guards, which have a rule of their own."""
        names = ("host_compute_ms", "host_optimizer_ms", "host_log_ms", "host_other_ms")
        return sum(map(self.mean, names))

    def share(self, taken_ms: float) -> str:
        """`12 % of each step (12.0 ms of 100 ms)`."""
        return f"{percent(taken_ms / self.step_ms)} of each step ({ms(taken_ms)} of {ms(self.step_ms)})"

    def speed_without(self, taken_ms: float) -> str:
        """The speed of steps that do not take this long."""
        return rate(self.batch / max(self.step_ms - taken_ms, 1e-9) * 1e3, "img")

    def larger_batch(self, times: int) -> str:
        """The flag for so many batches of now in one."""
        batch = self.setting("data.batch")
        return self.flag("data.batch", batch * times) if isinstance(batch, int) else ""

    def part(self, rank: int, name: str) -> float:
        """What a rank's host did."""
        return self.get(f"host_{name}_ms")[rank]

    def busy(self, rank: int) -> float:
        """A step of this rank alone: without waiting for the others."""
        return self.get("step_ms")[rank] - self.part(rank, EXCHANGE)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe; None for a user's own loop."""
        return _recipe_of(self.evidence.recipe) if self.evidence.recipe else None

    def setting(self, name: str) -> Any:
        """A field of the recipe; None if there is no recipe."""
        return value_of(self.recipe, name) if self.recipe is not None else None

    def flag(self, name: str, value: Any) -> str:
        """`name=value` if the recipe accepts it and it is a change; otherwise empty."""
        if self.recipe is None:
            return ""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            typed = from_text(recipe_fields()[name].hint, [text])
        except WrongValue:
            return ""
        changed = with_values(self.recipe, {name: typed})
        if typed == value_of(self.recipe, name):
            return ""
        before = {problem.field for problem in problems(self.recipe)}
        if any(problem.field not in before for problem in problems(changed)):
            return ""
        return f"{name}={text}"

    def own_code(self, *fields: str) -> list[str]:
        """The user's own code that these fields name, as `train.loss = own:slow`."""
        named = []
        for name in fields:
            value = self.setting(name)
            named += [
                f"{name} = {each}"
                for each in (value if isinstance(value, tuple) else (value,))
                if each and names_code(each)
            ]
        return named

    def slowdown(
        self, code: str, text: str, saved_ms: float = 0.0, flag: str = "", fix: str = ""
    ) -> Slowdown:
        """A reason whose removal saves this many milliseconds of each step."""
        saving = min(MOST_SAVED, max(0.0, saved_ms / self.wall_ms))
        return Slowdown(code, text, saving, flag, fix, self.images_per_s)


def _recipe_of(settings: Mapping[str, Any]) -> Recipe | None:
    """The recipe with these settings, as far as this version knows them."""
    known, values = recipe_fields(), {}
    for name, raw in settings.items():
        if name in known:
            try:
                values[name] = from_toml(known[name].hint, raw)
            except WrongValue:
                return None
    return with_values(Recipe(), values)


def ms(milliseconds: float) -> str:
    """`12.3 ms`, `1.45 s`."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1e3:.3g} s"
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 1 else 2}f} ms"

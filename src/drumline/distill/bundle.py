"""The student and everything trained beside it, as one module with one forward.

Promises: one DDP wraps it, so no helper's gradient can stay on its own process; features are returned, never kept;
the student inside is untouched and leaves alone (`student`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from drumline.distill.method import Needs, Taps
from drumline.models.base import Output


class Said(NamedTuple):
    """What the bundle returns."""

    logits: Tensor
    taps: dict[str, Tensor]
    """The student's, as far as a method needs them."""
    helped: dict[str, dict[str, Tensor]]
    """Method to what its helper returned."""


class Bundle(nn.Module):
    """`student` maps images to logits; called with `taps=True`, to (logits, taps)."""

    def __init__(
        self,
        student: nn.Module,
        helpers: Mapping[str, nn.Module],
        needs: Mapping[str, Needs],
        asking: Collection[str] = (),
        runs_student: bool = True,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.student = student
        self.helpers = nn.ModuleDict(helpers)
        self.needs = {
            name: need if name in asking else Needs(need.student, ()) for name, need in needs.items()
        }
        """What helpers read; the teacher's taps only for those that are `asking` for them."""
        self.taps = tuple(dict.fromkeys(tap for need in needs.values() for tap in need.student))
        self.runs_student, self.classes = runs_student, classes

    def forward(self, images: Tensor, teacher_taps: Taps) -> Said:
        """One forward of the student, then of each helper. The teacher's taps may be missing where none asks."""
        if not self.runs_student:
            return self.after(images.new_zeros((len(images), self.classes)), teacher_taps)
        return self.after(
            self.student(images, taps=True) if self.taps else self.student(images), teacher_taps
        )

    def after(self, output: Output, teacher_taps: Taps) -> Said:
        """What is made of the student's output."""
        logits, taps = (output, {}) if isinstance(output, Tensor) else output
        helped = {
            name: helper(_only(taps, self.needs[name].student), _only(teacher_taps, self.needs[name].teacher))
            for name, helper in self.helpers.items()
        }
        return Said(logits, _only(taps, self.taps), helped)


def _only(taps: Taps, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: taps[name] for name in names}

"""What methods on pooled vectors begin with: that both networks have one, and a common width for the two.

Refuses networks without a pooled vector.
"""

from __future__ import annotations

from torch import Tensor, nn

from drumline.distill.method import Anatomy, Needs, Taps
from drumline.distill.methods.pairing import require_tap


def require_pooled(method: str, student: Anatomy, teacher: Anatomy) -> Needs:
    """The pooled vectors of both networks, or a `UserError`."""
    return Needs((require_tap(method, student, "pooled"),), (require_tap(method, teacher, "pooled"),))


class Embeddings(nn.Module):
    """One linear layer for each network, from its pooled vector to a common width."""

    def __init__(self, student: Anatomy, teacher: Anatomy, dim: int) -> None:
        super().__init__()
        self.student = nn.Linear(student.shapes["pooled"][0], dim)
        self.teacher = nn.Linear(teacher.shapes["pooled"][0], dim)

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        """`student` and `teacher`, both N x dim."""
        return {"student": self.student(student["pooled"]), "teacher": self.teacher(teacher["pooled"])}

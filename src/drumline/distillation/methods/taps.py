"""What methods on features start from: paired taps, pooled vectors, a common grid for two maps, unit vectors.

Promises: stages are paired from the last one backwards. Maps of different sizes are averaged down to the smaller
height and the smaller width. Rejects networks that lack a tap or have too few stages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.distillation.method import Needs, NetworkInfo, Taps
from drumline.models.base import pool_to

Pair = tuple[str, str]
"""A tap of the student, and the teacher's tap that it is compared with."""


def stages_among(names: Iterable[str]) -> list[str]:
    """The taps named `stageN`, ordered by N."""
    numbers = [name.removeprefix("stage") for name in names if name.startswith("stage")]
    return [f"stage{number}" for number in sorted(int(number) for number in numbers if number.isdecimal())]


def paired_stages(student: Iterable[str], teacher: Iterable[str]) -> list[Pair]:
    """Pairs the stages of two networks, last with last and so on backwards; returns them in forward order."""
    mine, theirs = stages_among(student), stages_among(teacher)
    count = min(len(mine), len(theirs))
    return list(zip(mine[len(mine) - count :], theirs[len(theirs) - count :], strict=True))


def require_pairs(method: str, student: NetworkInfo, teacher: NetworkInfo, least: int = 1) -> list[Pair]:
    """`paired_stages`; raises a `UserError` if there are fewer than `least`."""
    pairs = paired_stages(student.shapes, teacher.shapes)
    if len(pairs) < least:
        counts = " and ".join(f"{network.name} has {len(network.stages)}" for network in (student, teacher))
        raise UserError(
            f"distill.method = {method}: needs at least {least} named stage{'s' * (least > 1)} in each network; "
            f"{counts}",
            "name stages with distill.student_taps and distill.teacher_taps, or use a method on logits such as kd",
        )
    return pairs


def require_tap(method: str, network: NetworkInfo, tap: str) -> str:
    """The tap; raises a `UserError` if the network lacks it."""
    if tap not in network.shapes:
        raise UserError(
            f"distill.method = {method}: reads the tap `{tap}`, which {network.name} does not have (its taps: "
            f"{', '.join(network.shapes) or 'none'})",
            "name the module with distill.student_taps or distill.teacher_taps, or use a method on logits such as kd",
        )
    return tap


def last_stage(method: str, network: NetworkInfo) -> str:
    """The deepest stage; raises a `UserError` if there is none."""
    return require_tap(method, network, network.stages[-1] if network.stages else "stage1")


def require_pooled(method: str, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
    """The pooled vectors of both networks; raises a `UserError` if one has none."""
    return Needs((require_tap(method, student, "pooled"),), (require_tap(method, teacher, "pooled"),))


def needs_of(pairs: list[Pair]) -> Needs:
    """The taps of all pairs."""
    return Needs(tuple(mine for mine, _ in pairs), tuple(theirs for _, theirs in pairs))


def common_grid(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    """The smaller height and the smaller width of two shapes (..., H, W)."""
    return min(one[-2], other[-2]), min(one[-1], other[-1])


def at_common_size(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both maps, averaged down to the common grid."""
    grid = common_grid(one.shape, other.shape)
    return pool_to(one, grid), pool_to(other, grid)


def sum_of(losses: list[Tensor]) -> Tensor:
    """The sum of a non-empty list of (n,) losses."""
    return torch.stack(losses).sum(0)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last axis. A vector with ‖x‖² below the smallest normal number becomes zero and gets no
    gradient, instead of an infinite one."""
    square = x.square().sum(-1, keepdim=True)
    some = square > torch.finfo(x.dtype).tiny
    return torch.where(some, x, 0) / torch.where(some, square, 1).sqrt()


class Embeddings(nn.Module):
    """One linear layer per network, from its pooled vector to a common width."""

    def __init__(self, student: NetworkInfo, teacher: NetworkInfo, dim: int) -> None:
        super().__init__()
        self.student = nn.Linear(student.shapes["pooled"][0], dim)
        self.teacher = nn.Linear(teacher.shapes["pooled"][0], dim)

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        """`student` and `teacher`, both N x dim."""
        return {"student": self.student(student["pooled"]), "teacher": self.teacher(teacher["pooled"])}

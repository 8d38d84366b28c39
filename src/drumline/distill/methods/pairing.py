"""Which taps of two networks are compared, and on which grid: what every method on feature maps begins with.

Promises: stages of two networks are paired from the last one backwards; maps of two sizes meet at the smaller height
and the smaller width, by means. Refuses networks that lack a tap or have too few stages to pair.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.distill.method import Anatomy, Needs
from drumline.models.base import pool_to

Pair = tuple[str, str]
"""A tap of the student and the teacher's tap that it is compared with."""


def stages_among(names: Iterable[str]) -> list[str]:
    """The `stageN` among some taps, in the order of N."""
    numbers = [name.removeprefix("stage") for name in names if name.startswith("stage")]
    return [f"stage{number}" for number in sorted(int(number) for number in numbers if number.isdecimal())]


def paired_stages(student: Iterable[str], teacher: Iterable[str]) -> list[Pair]:
    """The `stageN` among two networks' taps, last with last and so on backwards while both have one; in order."""
    mine, theirs = stages_among(student), stages_among(teacher)
    count = min(len(mine), len(theirs))
    return list(zip(mine[len(mine) - count :], theirs[len(theirs) - count :], strict=True))


def require_pairs(method: str, student: Anatomy, teacher: Anatomy, least: int = 1) -> list[Pair]:
    """`paired_stages`, at least so many of them or a `UserError`."""
    pairs = paired_stages(student.shapes, teacher.shapes)
    if len(pairs) < least:
        counts = " and ".join(f"{len(network.stages)} of {network.name}" for network in (student, teacher))
        raise UserError(
            f"distill.method = {method}: it needs {least} or more named stages of each network; it has {counts}",
            "name stages by distill.student_taps and distill.teacher_taps, or use a method on logits such as kd",
        )
    return pairs


def require_tap(method: str, network: Anatomy, tap: str) -> str:
    """The tap, or a `UserError` where the network lacks it."""
    if tap not in network.shapes:
        raise UserError(
            f"distill.method = {method}: reads the tap `{tap}`, and {network.name} has none (it has: "
            f"{', '.join(network.shapes) or 'no taps'})",
            "name its place by distill.student_taps or distill.teacher_taps, or use a method on logits such as kd",
        )
    return tap


def last_stage(method: str, network: Anatomy) -> str:
    """The deepest stage, or a `UserError` where there is none."""
    return require_tap(method, network, network.stages[-1] if network.stages else "stage1")


def needs_of(pairs: list[Pair]) -> Needs:
    """Both sides of all pairs."""
    return Needs(tuple(mine for mine, _ in pairs), tuple(theirs for _, theirs in pairs))


def common_grid(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    """The smaller height and the smaller width of two shapes that end in them."""
    return min(one[-2], other[-2]), min(one[-1], other[-1])


def at_common_size(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two maps, each brought down to the common grid by means."""
    grid = common_grid(one.shape, other.shape)
    return pool_to(one, grid), pool_to(other, grid)


def sum_of(losses: list[Tensor]) -> Tensor:
    """The sum of the pairs' (n,) losses, of which there is at least one."""
    return torch.stack(losses).sum(0)

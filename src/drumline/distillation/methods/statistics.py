"""Methods that compare statistics of feature maps, one sample at a time: nst, kdsvd and fsp.

Promises: a sample's loss depends on that sample alone; the batch loss is the mean over samples. No tensor of channels
× channels × positions is built. Gradients are finite for maps of zeros and for equal singular values. Rejects
networks with too few stages to pair and, for kdsvd and fsp, stages of different widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Pair,
    Variant,
    Weights,
    at_common_size,
    common_grid,
    needs_of,
    paired_stages,
    require_pairs,
    sum_of,
)
from drumline.distillation.methods.singular import singular_vectors
from drumline.models.base import pool_to


def nst(student: Tensor, teacher: Tensor) -> Tensor:
    """(n,): MMD² between the channels of two maps, with the kernel k(x, y) = (xᵀy)².

    mean k(s_i, s_j) + mean k(t_i, t_j) − 2 mean k(s_i, t_j), where s_i and t_j are the maps of single channels at the
    common size, normalised over positions (a channel of zeros stays zero). With channels as the rows of S and T, the
    sum of k over all pairs is ‖S Tᵀ‖² = ⟨SᵀS, TᵀT⟩; the form with the smaller matrices is used.
    """
    student, teacher = at_common_size(student, teacher)
    s, t = F.normalize(student.flatten(2), dim=2), F.normalize(teacher.flatten(2), dim=2)
    mine, theirs, places = s.shape[1], t.shape[1], s.shape[2]
    if 2 * places**2 <= mine**2 + mine * theirs + theirs**2:
        return (s.mT @ s / mine - t.mT @ t / theirs).square().sum((1, 2))
    return _kernel_mean(s, s) + _kernel_mean(t, t) - 2 * _kernel_mean(s, t)


def kdsvd(student: list[Tensor], teacher: list[Tensor], k: int = 1) -> Tensor:
    """(n,): compares how the leading singular vectors of one stage relate to those of the next, by radial functions.

    A map is a matrix X of positions × channels. `singular_vectors` gives its leading right singular vectors, k of the
    teacher and k + 3 of the student; they are indexed by channels, so widths must be equal and sizes may differ. The
    teacher's v_m are signed so that Σ_i v_im ≥ 0, because a decomposition leaves the sign open. The student's u_m is
    the candidate with the largest |cosine| to v_m, times the sign of that cosine. With σ_m = ‖X_t v_m‖, scaled to
    Σ σ_m² = 1, channel i of a stage has the coordinates σ_m v_im (teacher) and σ_m u_im (student). For channel i of a
    stage and j of the next one, R_ijm = exp(−(p_im − q_jm)²/8). The loss is Σ_ijm (R_ijm(student) − R_ijm(teacher))²,
    summed over consecutive stages.
    """
    points = [_aligned(mine, theirs, k) for mine, theirs in zip(student, teacher, strict=True)]
    losses = [
        _radial_gap(mine, next_mine, theirs, next_theirs)
        for (mine, theirs), (next_mine, next_theirs) in pairwise(points)
    ]
    return sum_of(losses)


def flow(lower: Tensor, upper: Tensor, variant: Variant = "paper") -> Tensor:
    """(n, C, D): G = X Yᵀ/(h·w), the products of two maps' channels, averaged over positions; the FSP matrix.

    The larger map is max-pooled to the size of the smaller, as in the paper, or averaged if the sizes do not divide.
    RepDistiller always averages.
    """
    grid = common_grid(lower.shape, upper.shape)
    pool = _strongest if variant == "paper" else pool_to
    x, y = pool(lower, grid).flatten(2), pool(upper, grid).flatten(2)
    return x @ y.mT / x.shape[2]


def fsp(student: list[Tensor], teacher: list[Tensor], variant: Variant = "paper") -> Tensor:
    """(n,): Σ over consecutive maps of the mean squared difference of `flow` between student and teacher."""
    losses = [
        (flow(*mine, variant) - flow(*theirs, variant)).square().mean((1, 2))
        for mine, theirs in zip(pairwise(student), pairwise(teacher), strict=True)
    ]
    return sum_of(losses)


@dataclass(frozen=True)
class Nst(Method):
    """Neuron selectivity transfer (Huang and Wang, 2017): the distribution of each channel over positions."""

    name: ClassVar[str] = "nst"
    reads: ClassVar[str] = "stages"
    weights: ClassVar[Weights] = Weights(b=50.0)

    def loss(self, inputs: LossInputs) -> Tensor:
        return sum_of([nst(mine, theirs) for mine, theirs in zip(*_maps(inputs), strict=True)])


@dataclass(frozen=True)
class Kdsvd(Method):
    """Singular value decomposition (Lee et al., 2018): leading directions over channels, from stage to
    stage."""

    name: ClassVar[str] = "kdsvd"
    reads: ClassVar[str] = "two or more stages of equal widths"
    weights: ClassVar[Weights] = Weights(b=1.0)

    k: Annotated[int, Range(1)] = 1
    """Singular vectors of the teacher per stage."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        pairs = require_pairs(self.name, student, teacher, least=2)
        _require_equal_widths(self.name, "singular vectors over channels", pairs, student, teacher)
        return needs_of(pairs)

    def loss(self, inputs: LossInputs) -> Tensor:
        return kdsvd(*_maps(inputs), self.k)


@dataclass(frozen=True)
class Fsp(Method):
    """Flow of the solution procedure (Yim et al., 2017): products of channels of consecutive maps.

    The initial phase matches the student's `flow` to the teacher's. `b` is its weight; its loss has no other term.
    """

    name: ClassVar[str] = "fsp"
    reads: ClassVar[str] = "stem, stages of equal widths"
    weights: ClassVar[Weights] = Weights(b=1.0)
    initial_epochs: ClassVar[float] = 30.0
    only_initial: ClassVar[bool] = True

    variant: Variant = "paper"
    """`paper` pools the larger of two maps by its maximum, `repdistiller` by its mean."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The stem and all common stages. Rejects networks whose channels differ there."""
        pairs = require_pairs(self.name, student, teacher)
        if "stem" in student.shapes and "stem" in teacher.shapes:
            pairs = [("stem", "stem"), *pairs]
        _require_equal_widths(self.name, "products of channels", pairs, student, teacher)
        return needs_of(pairs)

    def loss(self, inputs: LossInputs) -> Tensor:
        """`fsp` from the stem to the last stage."""
        mine, theirs = _maps(inputs)
        if "stem" in inputs.taps and "stem" in inputs.teacher_taps:
            mine, theirs = [inputs.taps["stem"], *mine], [inputs.teacher_taps["stem"], *theirs]
        return fsp(mine, theirs, self.variant)


_MORE_CANDIDATES = 3
_BLOCK = 1 << 24
"""Elements of the largest tensor that `kdsvd` builds: a block of channels × channels × k."""


def _kernel_mean(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT).square().mean((1, 2))


def _aligned(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The coordinates of channels (n, C, k) for student and teacher, as `kdsvd` defines them."""
    s, t = student.flatten(2).mT, teacher.flatten(2).mT
    theirs = singular_vectors(t, min(k, *t.shape[1:]))
    theirs = theirs * _signs(theirs.sum(1, keepdim=True))
    candidates = singular_vectors(s, min(k + _MORE_CANDIDATES, *s.shape[1:]))
    cosines = candidates.detach().mT @ theirs
    best = cosines.abs().argmax(1, keepdim=True)
    rows = torch.arange(cosines.shape[1], device=best.device).view(1, -1, 1)
    # ±1 for the best candidate of each column, 0 elsewhere.
    choice = (rows == best).to(s.dtype) * _signs(cosines)
    scale = F.normalize((t @ theirs).square().sum(1, keepdim=True).sqrt(), dim=2)
    return candidates @ choice * scale, theirs * scale


def _signs(x: Tensor) -> Tensor:
    """−1 or 1; 1 for zero."""
    return 1 - 2 * (x < 0).to(x.dtype)


def _radial_gap(mine: Tensor, next_mine: Tensor, theirs: Tensor, next_theirs: Tensor) -> Tensor:
    """(n,): Σ_ijm (R_ijm(mine) − R_ijm(theirs))², in blocks of channels i that the backward recomputes."""
    count, channels, width = mine.shape[0], mine.shape[1], min(mine.shape[2], next_mine.shape[2])
    mine, next_mine = mine[:, :, :width], next_mine[:, :, :width]
    theirs, next_theirs = theirs[:, :, :width], next_theirs[:, :, :width]
    rows = max(1, _BLOCK // (count * next_mine.shape[1] * width))
    if rows >= channels:
        return _radial_gap_block(mine, next_mine, theirs, next_theirs)
    losses = [
        checkpoint(
            _radial_gap_block, a, next_mine, b, next_theirs, use_reentrant=False, preserve_rng_state=False
        )
        for a, b in zip(mine.split(rows, 1), theirs.split(rows, 1), strict=True)
    ]
    return sum_of(losses)


def _radial_gap_block(mine: Tensor, next_mine: Tensor, theirs: Tensor, next_theirs: Tensor) -> Tensor:
    return (_radial(mine, next_mine) - _radial(theirs, next_theirs)).square().sum((1, 2, 3))


def _radial(points: Tensor, others: Tensor) -> Tensor:
    return (-(points[:, :, None] - others[:, None]).square() / 8).exp()


def _strongest(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Max-pooling to a grid that divides the map, else `pool_to`. Windows do not overlap, so the backward is
    deterministic."""
    height, width = x.shape[-2:]
    if (height, width) == grid:
        return x
    if height % grid[0] or width % grid[1]:
        return pool_to(x, grid)
    return F.max_pool2d(x, (height // grid[0], width // grid[1]))


def _maps(inputs: LossInputs) -> tuple[list[Tensor], list[Tensor]]:
    """The maps of the paired stages, of student and teacher."""
    pairs = paired_stages(inputs.taps, inputs.teacher_taps)
    return [inputs.taps[mine] for mine, _ in pairs], [inputs.teacher_taps[theirs] for _, theirs in pairs]


def _require_equal_widths(
    method: str, compares: str, pairs: list[Pair], student: NetworkInfo, teacher: NetworkInfo
) -> None:
    """Raises a `UserError` unless there are two or more taps and both networks have the same channels at each."""
    mine = [student.shapes[name][0] for name, _ in pairs]
    theirs = [teacher.shapes[name][0] for _, name in pairs]
    if mine != theirs or len(pairs) < 2:
        raise UserError(
            f"distill.method = {method}: compares {compares}, so both networks need the same channels at two or more "
            f"taps; {student.name} has {_listed(mine)}, {teacher.name} has {_listed(theirs)}",
            "use two networks of one family, such as resnet56 and resnet20, or a method for any channels, such as "
            "nst or attention",
        )


def _listed(channels: list[int]) -> str:
    return "/".join(str(width) for width in channels)

"""Leading singular vectors of many matrices, with their exact gradient and without waiting for the GPU.

Promises: plain products of matrices, no library decomposition, because those copy their status to the host. Every
result is finite, also for matrices of zeros and for equal singular values, whose vectors are not defined: there the
gradient is bounded instead of infinite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SQUARINGS = 9
"""High powers of the matrix are made by squaring, up to 2^9."""
_LEAST_ENERGY = 1e-12
_LEAST_NORM = 1e-5
_LEAST_GAP = 1e-5
"""Smallest difference of two eigenvalues, as a fraction of their sum over all, that the gradient divides by."""


def singular_vectors(x: Tensor, count: int) -> Tensor:
    """The `count` leading right singular vectors of matrices (n, P, C), as columns of (n, C, count), in order.

    The eigenvectors of XᵀX or, if P < C, those of XXᵀ times Xᵀ. Vector m has an error of the order
    (σ_{m+1}/σ_m)^1000. Vectors with σ² below about 1e-5 of ‖X‖² fade to zero.
    """
    energy = x.square().sum((1, 2), keepdim=True) + _LEAST_ENERGY
    if x.shape[1] >= x.shape[2]:
        return _Eigenvectors.apply(x.mT @ x / energy, count)
    return _normalised(x.mT @ _Eigenvectors.apply(x @ x.mT / energy, count) / energy.sqrt())


class _Eigenvectors(torch.autograd.Function):
    """The leading eigenvectors of symmetric matrices G (n, d, d) without negative eigenvalues, whose sum is 1.

    With eigenvalues λ, the gradient is that of du_m = Σ_{j≠m} u_j (u_jᵀ dG u_m)/(λ_m − λ_j).
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> Tensor:
        """One after the other, from what G has left without the ones before."""
        found: list[Tensor] = []
        rest = matrix
        for _ in range(count):
            found.append(_leading(rest))
            rest = rest - found[-1] @ (found[-1].mT @ (rest @ found[-1])) @ found[-1].mT
        vectors = torch.cat(found, 2)
        ctx.save_for_backward(matrix, vectors)
        return vectors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        matrix, found = ctx.saved_tensors
        values = (found * (matrix @ found)).sum(1)
        inside = found.mT @ grads[0]
        gaps = values[:, None, :] - values[:, :, None]  # of j (rows) and m (columns)
        within = found @ (inside * _inverse(gaps))
        # For the other eigenvectors, 1/(λ_m − G) is the sum over all r of G^r/λ_m^(r+1): the product of all
        # 1 + (G/λ_m)^(2^i). Without the found ones, G has no eigenvalue above the last of theirs.
        outside = grads[0] - found @ inside
        rest = matrix - (found * values[:, None]) @ found.mT
        last = values[:, -1:, None].clamp_min(_LEAST_GAP)
        power, ratio = rest / last, (last / values[:, None].clamp_min(_LEAST_GAP)).clamp(max=1)
        for _ in range(_SQUARINGS):
            outside = outside + power @ outside * ratio
            power, ratio = power @ power, ratio.square()
        outside = outside * _inverse(values)[:, None]
        return (within + outside) @ found.mT, None


def _leading(matrix: Tensor) -> Tensor:
    """The first eigenvector, (n, d, 1): the largest column of a high power of G, in which the others have vanished.
    Its largest element is positive."""
    power = matrix
    for _ in range(_SQUARINGS):
        power = power / (power.square().sum((1, 2), keepdim=True).sqrt() + torch.finfo(power.dtype).tiny)
        power = power @ power
    largest = power.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None].expand(-1, matrix.shape[1], 1)
    vector = power.gather(2, largest)
    vector = vector / (vector.square().sum(1, keepdim=True).sqrt() + torch.finfo(vector.dtype).tiny)
    return _normalised(matrix @ vector)


def _normalised(columns: Tensor) -> Tensor:
    """w/√(‖w‖² + 1e-10), so that neither a column of rounding errors nor its gradient is amplified."""
    return columns / (columns.square().sum(1, keepdim=True) + _LEAST_NORM**2).sqrt()


def _inverse(x: Tensor) -> Tensor:
    """1/x, but bounded: x/(x² + ε²), which is 0 at 0."""
    return x / (x.square() + _LEAST_GAP**2)

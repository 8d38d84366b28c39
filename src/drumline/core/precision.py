"""The precisions in which a model computes, in one table.

Promises: every autocast block of Drumline is `autocast`. The table does not import torch: recipes and help read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drumline.core.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Precision:
    """How forward and backward compute. Parameters and their gradients stay in fp32."""

    name: str
    autocast_type: str = ""
    """The name of the torch type that autocast computes in. Empty: no autocast."""
    scales_loss: bool = False
    """Whether the loss must be scaled, because small gradients would become 0."""
    needs_gpu: bool = False
    tolerance: float = 0.0
    """The relative difference between two ways to compute the same that rounding to `autocast_type` may cause."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast computes in; None without autocast."""
        import torch

        return getattr(torch, self.autocast_type) if self.autocast_type else None


FP32 = Precision("fp32")
BF16 = Precision("bf16", "bfloat16", tolerance=2e-2)
FP16 = Precision("fp16", "float16", scales_loss=True, needs_gpu=True, tolerance=2e-2)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16)}
"""Values of the recipe's `precision` fields, besides `auto`."""


def resolve_precision(
    wanted: str, device: torch.device, why_no_scaler: str = "", field: str = "train.precision"
) -> Precision:
    """The precision that a `precision` field asks for. `auto` is fp32 on a CPU; on a GPU bf16 where it is supported,
    else fp16. `why_no_scaler` says why scaling the loss cannot work; empty: it can."""
    import torch

    if wanted == "auto":
        if device.type == "cpu":
            return FP32
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return BF16
        return FP32 if why_no_scaler else FP16
    precision = PRECISIONS[wanted]
    if precision.scales_loss and why_no_scaler:
        raise UserError(f"{field} = {wanted}: {why_no_scaler}", "use bf16 or fp32")
    if precision.needs_gpu and device.type == "cpu":
        raise UserError(f"{field} = {wanted} needs a GPU", "use bf16 or fp32 on a CPU")
    return precision


def autocast(device: torch.device, precision: Precision, cached: bool | None = None) -> torch.autocast:
    """Computes in this precision where torch considers that safe. fp32 also ends another autocast. `cached` says
    whether converted weights are kept; None is torch's default."""
    import torch

    dtype = precision.autocast_dtype
    return torch.autocast(
        device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cached
    )

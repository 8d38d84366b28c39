"""How torch computes: its precision, whether kernels repeat their bits, and contexts that leave no trace.

Promises: every autocast block of Drumline is `autocast`. Whatever happens inside `leave_no_trace`, the tensors,
training modes, gradients and random generators named to it are as before, at the same addresses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from drumline.core.compiler import use_deterministic_algorithms
from drumline.core.environment import threads_asked
from drumline.core.errors import UserError
from drumline.core.machine import cores_per_process


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> torch.autocast:
    """Computes in `dtype` where torch considers that safe. None computes in fp32, also inside another autocast."""
    kind = device if isinstance(device, str) else device.type
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def resolve_precision(
    wanted: str, device: torch.device, why_no_fp16: str = "", field: str = "train.precision"
) -> torch.dtype | None:
    """The autocast type of a `precision` field. None computes in fp32. `auto` is fp32 on a CPU; on a GPU bf16 where
    it is supported, else fp16. `why_no_fp16` says why a loss scaler, which fp16 needs, cannot work."""
    if wanted == "auto":
        if device.type == "cpu":
            return None
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return None if why_no_fp16 else torch.float16
    if wanted == "fp16" and why_no_fp16:
        raise UserError(f"{field} = fp16: {why_no_fp16}", "use bf16 or fp32")
    if wanted == "fp16" and device.type == "cpu":
        raise UserError(f"{field} = fp16 needs a GPU", "use bf16 or fp32 on a CPU")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


def set_deterministic(deterministic: bool) -> None:
    """Selects kernels that repeat their bits, or the fastest ones."""
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    use_deterministic_algorithms(deterministic)
    # Filling fresh memory guards against reading it uninitialised; our kernels write before they read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def threads_per_process(
    wanted: int | str, local_size: int, strict: bool = False, env: Mapping[str, str] = os.environ
) -> int:
    """CPU threads for arithmetic: the recipe's, else the user's OMP_NUM_THREADS, else the cores divided by the
    processes of this machine. Their number decides the order of additions, so strict mode's depends on the recipe
    alone."""
    if isinstance(wanted, int):
        return wanted
    return 1 if strict else threads_asked(env) or cores_per_process(local_size)

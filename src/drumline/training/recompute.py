"""Gradient checkpointing (torch.utils.checkpoint) by block: activations are recomputed in backward.

Promises: the same losses, gradients and buffers as without. Recomputing a block runs its BatchNorm a second
time, which by itself would update the running statistics twice a step; here the second run leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from drumline.core.errors import UserError
from drumline.models.base import repeated_blocks


def recompute_blocks(model: nn.Module) -> int:
    """Makes every repeated block of the model recompute its activations; returns how many there are."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(
            f"train.gradient_checkpointing = true: {type(model).__name__} has no repeated blocks to recompute",
            "leave the option off, or give a model of your own a method blocks() that lists them",
        )
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    if torch.compiler.is_compiling():
        # Compiled code recomputes tensors, not Python: BatchNorm's buffers are written once anyway.
        return checkpoint(forward, *args, use_reentrant=False, **named)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=partial(_contexts, block),
        determinism_check="default",
        **named,
    )


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_untouched(block)


@contextmanager
def _statistics_untouched(block: nn.Module) -> Iterator[None]:
    """In training, BatchNorm normalises by the batch whatever its statistics: the second run writes to other buffers,
    which are never read. (Turning tracking off would save other tensors for backward.) Only buffers are changed:
    strict mode keeps these apart for shards that take turns in the middle of this."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.training]
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name in ("running_mean", "running_var"):
            if (statistics := norm._buffers[name]) is not None:
                norm._buffers[name] = torch.empty_like(statistics)
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)

"""Non-finite values: whether gradients have one, and where the first one arose.

Promises: `mark_nonfinite` never waits for the device and works inside a CUDA graph. Large finite values are never
taken for infinite ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from drumline.parallel.sharded import local_shard

KINDS = ("parameter", "batch", "teacher", "output", "loss", "gradient")
"""Where a non-finite value can arise, in the order of a step. The earliest one is the cause of the others."""


@dataclass(frozen=True)
class Origin:
    """The first non-finite value that a rank found. `kind` is one of `KINDS`."""

    kind: str
    name: str = ""
    samples: tuple[int, ...] = ()
    """The sample ids of the non-finite rows, if the value has one row per sample and not all are non-finite."""
    stage: int = 0
    """The pipeline stage. A value that one stage passes to the next, or back, is found again there."""

    @property
    def order(self) -> tuple[int, int]:
        """The lowest one came first."""
        return KINDS.index(self.kind), -self.stage if self.kind == "gradient" else self.stage

    def __str__(self) -> str:
        return {
            "parameter": f"parameter '{self.name}' was not finite before this step",
            "batch": f"the batch itself is not finite ({self.name})",
            "teacher": f"the output of {self.name} in the teacher is the first that is not finite",
            "output": f"the output of {self.name} is the first that is not finite",
            "loss": "the model's outputs are finite, but the loss or its gradient is not",
            "gradient": f"outputs and loss are finite; in backward, the gradient of '{self.name}' is the first that "
            "is not",
        }[self.kind]


def earliest(origins: Sequence[Origin | None]) -> int:
    """The index of the rank whose value came first; the lowest of several, and 0 if no rank found any."""
    found = [(origin.order, index) for index, origin in enumerate(origins) if origin is not None]
    return min(found)[1] if found else 0


def mark_nonfinite(gradients: list[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> None:
    """Sets `found` to 1 if a gradient on its device is not finite. `one` is a 1 on the same device.

    Uses the loss scaler's kernel, which is by far the fastest and leaves gradients as they are at a scale of 1.
    """
    if gradients:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether every value is finite. Waits for the device."""
    # The norm of large values can overflow, so a non-finite norm is checked again value by value.
    for tensors in _by_kind(gradients).values():
        # In fp32 for half types, whose own norm overflows at once.
        norms = torch._foreach_norm(tensors, 2, torch.float32 if tensors[0].element_size() < 4 else None)
        if not math.isfinite(torch.stack(norms).sum().item()):
            return all(is_finite(tensor) for tensor in gradients)
    return True


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of each tensor, on the device of the first. It overflows only if the values do."""
    norms = [torch.stack(torch._foreach_norm(same, math.inf)) for same in _by_kind(tensors).values()]
    if len(norms) == 1:
        return norms[0]
    return torch.cat([norm.to(tensors[0].device, torch.float64) for norm in norms])


def dense_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The values of the gradients that exist. Sparse gradients give their stored values."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [each._values() if each.is_sparse else each for each in gradients if each.numel()]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values that this process holds are finite. Waits for the device."""
    if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(local_shard(tensor.detach())).all())


def first_parameter(named: Mapping[str, torch.Tensor]) -> str | None:
    """The first parameter that is not finite. Reads all of them at once, so the device is waited for only once."""
    here = {name: local_shard(each.detach()) for name, each in named.items() if not each.is_meta}
    here = {name: each for name, each in here.items() if each.is_floating_point() or each.is_complex()}
    if not here:
        return None
    home = next(iter(here.values())).device
    finite = torch.stack([torch.isfinite(each).all().to(home) for each in here.values()]).tolist()
    return next((name for name, good in zip(here, finite, strict=True) if not good), None)


def first_gradient(gradients: Mapping[str, torch.Tensor | None]) -> str | None:
    """The first parameter whose gradient is not finite, in the order of backward. `gradients` is in the order of the
    model."""
    for name, gradient in reversed(list(gradients.items())):
        if gradient is not None and not is_finite(gradient._values() if gradient.is_sparse else gradient):
            return name
    return None


@contextmanager
def watched_outputs(
    module: nn.Module, found: Callable[[str, nn.Module, torch.Tensor], None]
) -> Iterator[None]:
    """Calls `found` with each module, by name, that gives a non-finite output, and with that output."""

    def check(name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if not is_finite(tensor):
                found(name, part, tensor)
                return

    handles = [part.register_forward_hook(partial(check, name)) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_name(name: str, layer: nn.Module) -> str:
    """`Conv2d 'body.0'`, or the type alone for the whole model."""
    kind = type(layer).__name__
    return f"{kind} '{name}'" if name else kind


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors by device and type: one fused kernel handles each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups

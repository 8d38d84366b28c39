"""Notices a gradient that is not finite, on the device, and keeps it out of the model.

Promises: one fused pass over the gradients and a tiny kernel per step, no host sync, nothing that a CUDA graph cannot
hold. Gradients are looked at after their exchange, so all ranks see the same. From then on no optimizer step changes
anything (`action = stop`), or that one step does not (`warn`: running statistics are put back too); the host learns
of it late, by a copy that it looks at about every tenth of a second. With a loss scaler (fp16) infinite gradients are
normal and its own business; there a loss that is not finite counts, and nothing is held back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from drumline.core.host_copy import HostCopy

POLL_SECONDS = 0.1


def advice(autocast: torch.dtype | None) -> str:
    """What to try in a run that diverges. Suggests fp32 only if the run does not use it already."""
    more = ", or use train.precision=fp32" if autocast is not None else ""
    return f"lower optim.lr, or add optim.warmup_epochs or optim.clip{more}"


class Finite:
    """Watches the gradients of one optimizer. `holds` says whether an update is held back for ever or once."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        action: str,
        scaled: bool,
    ) -> None:
        self.once = action == "warn" and not scaled
        self.scaled = scaled
        self.found = torch.zeros((), device=device)
        """1 when this step's (or, held for ever, any step's) gradients are not finite."""
        self._one = torch.ones((), device=device)
        self.tally = torch.zeros(3, dtype=torch.float64, device=device)
        """Steps looked at, steps held back, and which was the last of these; held for ever, the second alone."""
        self._gradients_of = [p for group in optimizer.param_groups for p in group["params"]]
        self._kept = _Kept(module) if self.once else None
        self._copy: tuple[int, HostCopy] | None = None
        self._looked_at = -math.inf
        if not scaled:
            # Torch's contract for loss scaling, which the fused kernels keep: 1 means leave everything as it is.
            optimizer.found_inf = self.found  # type: ignore[attr-defined]

    def live(self) -> list[torch.Tensor]:
        """The tensors that a step writes, to be put back after a rehearsal."""
        return [self.found, self.tally, *(self._kept.flat if self._kept else ())]

    def begin(self) -> None:
        """Before the first step, when a checkpoint has been loaded."""
        if self._kept is not None:
            self._kept.keep()

    @torch.no_grad()
    def look(self, loss_sum: torch.Tensor, agree: Callable[[torch.Tensor], None]) -> None:
        """After the gradients' exchange, before the optimizer. `loss_sum` is looked at under a loss scaler only;
        `agree` asks those who hold other parts of the model."""
        if self.scaled:
            self.found.copy_(torch.maximum(self.found, (~torch.isfinite(loss_sum)).float()))
        else:
            if self.once:
                self.found.zero_()
            self._look_at([p.grad for p in self._gradients_of if p.grad is not None])
        agree(self.found)
        self.tally[1].add_(self.found)
        if self.once:
            self.tally[0].add_(1)
            self.tally[2].copy_(torch.maximum(self.tally[2], self.tally[0] * self.found))

    def _look_at(self, gradients: Sequence[torch.Tensor]) -> None:
        """One pass on each device that holds some of them."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, each in by_device.items():
            if device == self.found.device:
                torch._amp_foreach_non_finite_check_and_unscale_(each, self.found, self._one)
            elif device.type != "meta":
                there = torch.zeros((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(each, there, self._one.to(device))
                self.found.copy_(torch.maximum(self.found, there.to(self.found.device)))

    def put_back(self) -> None:
        """After the running statistics were brought together: those of a held step are the ones before it."""
        if self._kept is not None:
            self._kept.settle(self.found)

    def poll(self, step: int) -> int:
        """The step whose gradients were not finite (the first, or the last of those held back once), or 0. `step`
        counts finished ones. Never waits; looks every tenth of a second."""
        if self._copy is None:
            now = time.monotonic()
            if now - self._looked_at < POLL_SECONDS:
                return 0
            self._looked_at = now
            self._copy = (step, HostCopy(self.tally))
        at, late = self._copy
        if not late.done:
            return 0
        self._copy = None
        return self.step_of(at, late.values())

    @property
    def held(self) -> int:
        """How many steps were held back. Waits for the device."""
        return int(self.tally[1])

    def step_of(self, at: int, tally: torch.Tensor) -> int:
        """What `poll` gives, from the tally as it was after step `at`."""
        looked, held, last = (int(value) for value in tally.tolist())
        if not held:
            return 0
        return at - (looked - last) if self.once else at - held + 1


class _Kept:
    """The buffers of a module as they were after the last step that counted, by type in one piece each."""

    def __init__(self, module: nn.Module) -> None:
        buffers = sorted(
            {id(each): each for each in module.buffers() if each.numel() and not each.is_meta}.values(),
            key=lambda buffer: (str(buffer.dtype), str(buffer.device)),
        )
        self.groups = [list(group) for _, group in groupby(buffers, key=lambda b: (b.dtype, b.device))]
        self.flat = [_flat(group) for group in self.groups]

    def keep(self) -> None:
        """Takes the buffers as they are."""
        for buffers, kept in zip(self.groups, self.flat, strict=True):
            kept.copy_(_flat(buffers))

    @torch.no_grad()
    def settle(self, found: torch.Tensor) -> None:
        """Puts the kept values back where `found` is 1, else keeps the new ones."""
        for buffers, kept in zip(self.groups, self.flat, strict=True):
            kept.copy_(torch.where(found.to(kept.device) > 0, kept, _flat(buffers)))
            parts = kept.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(
                buffers, [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)]
            )


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

"""Non-finite gradients of a run: found on the device, kept out of the model, then explained.

Promises: one fused pass over the gradients and a tiny kernel per step, no host sync, nothing that a CUDA graph cannot
hold. Gradients are checked after their exchange, so all ranks see the same. From the first bad step on, no update
changes anything (`action = stop`), or only that step is skipped (`warn`: running statistics are restored too). The
host reads a copy of the result about every tenth of a second. A loss scaler (fp16) handles infinite gradients itself;
with one, a non-finite loss counts, and nothing is skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from drumline.core.files import write_bytes
from drumline.core.host_copy import HostCopy
from drumline.core.precision import FP32, Precision
from drumline.data.feed.batch import Batch
from drumline.guards.checks.nonfinite import Origin, earliest, mark_nonfinite
from drumline.guards.finding import Finding, listed
from drumline.parallel.world import World

POLL_SECONDS = 0.1
"""How often the host reads the copy."""


def advice(precision: Precision, origin: Origin | None = None) -> str:
    """What to try if a run diverges. Suggests fp32 only if the run does not use it already."""
    if origin is not None and origin.kind == "teacher":
        return "use --distill.teacher_precision fp32, or a different teacher"
    more = ", or use train.precision=fp32" if precision is not FP32 else ""
    return f"lower optim.lr, or add optim.warmup_epochs or optim.clip{more}"


class NonFiniteGate:
    """Checks the gradients of one optimizer, and skips updates with non-finite ones: only these (`once`), or all from
    the first on."""

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
        """1 if the gradients of this step are not finite; unless `once`, also if those of an earlier step were
        not."""
        self._one = torch.ones((), device=device)
        self.tally = torch.zeros(3, dtype=torch.float64, device=device)
        """Steps checked, steps skipped, and the last of these. Unless `once`, only the second is counted."""
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._buffers = _SavedBuffers(module) if self.once else None
        self._copy: tuple[int, HostCopy] | None = None
        self._read_at = -math.inf
        if not scaled:
            # torch's contract for loss scaling, which the fused kernels follow: 1 means leave everything as it is.
            optimizer.found_inf = self.found  # type: ignore[attr-defined]

    def live(self) -> list[torch.Tensor]:
        """The tensors that a step writes, to be restored after a rehearsal."""
        return [self.found, self.tally, *(self._buffers.flat if self._buffers else ())]

    def begin(self) -> None:
        """Before the first step, after a checkpoint has been loaded."""
        if self._buffers is not None:
            self._buffers.save()

    @torch.no_grad()
    def check(self, loss_sum: torch.Tensor, agree: Callable[[torch.Tensor], object]) -> None:
        """After the exchange of gradients, before the update. `loss_sum` is checked under a loss scaler only; `agree`
        combines the result with the processes that hold the rest of the model."""
        if self.scaled:
            self.found.copy_(torch.maximum(self.found, (~torch.isfinite(loss_sum)).float()))
        else:
            if self.once:
                self.found.zero_()
            self._check_gradients([p.grad for p in self._parameters if p.grad is not None])
        agree(self.found)
        self.tally[1].add_(self.found)
        if self.once:
            self.tally[0].add_(1)
            self.tally[2].copy_(torch.maximum(self.tally[2], self.tally[0] * self.found))

    def _check_gradients(self, gradients: list[torch.Tensor]) -> None:
        """One pass on each device that has gradients."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, each in by_device.items():
            if device == self.found.device:
                mark_nonfinite(each, self.found, self._one)
            elif device.type != "meta":
                there = torch.zeros((), device=device)
                mark_nonfinite(each, there, self._one.to(device))
                self.found.copy_(torch.maximum(self.found, there.to(self.found.device)))

    def restore_buffers(self) -> None:
        """After the running statistics were combined: restores those before a skipped step."""
        if self._buffers is not None:
            self._buffers.restore(self.found)

    def poll(self, step: int) -> int:
        """The step whose gradients were not finite (the first, or with `once` the last), or 0. `step` is the number
        of finished steps. Never waits; reads the device every tenth of a second."""
        if self._copy is None:
            now = time.monotonic()
            if now - self._read_at < POLL_SECONDS:
                return 0
            self._read_at = now
            self._copy = (step, HostCopy(self.tally))
        at, late = self._copy
        if not late.done:
            return 0
        self._copy = None
        return self.step_of(at, late.values())

    @property
    def skipped(self) -> int:
        """The number of skipped steps. Waits for the device."""
        return int(self.tally[1])

    def step_of(self, at: int, tally: torch.Tensor) -> int:
        """The result of `poll`, from the tally after step `at`."""
        checked, skipped, last = (int(value) for value in tally.tolist())
        if not skipped:
            return 0
        return at - (checked - last) if self.once else at - skipped + 1


class _SavedBuffers:
    """The buffers of a module after the last step that was not skipped, in one flat tensor per device and type."""

    def __init__(self, module: nn.Module) -> None:
        buffers = sorted(
            {id(each): each for each in module.buffers() if each.numel() and not each.is_meta}.values(),
            key=lambda buffer: (str(buffer.dtype), str(buffer.device)),
        )
        self.groups = [list(group) for _, group in groupby(buffers, key=lambda b: (b.dtype, b.device))]
        self.flat = [_flat(group) for group in self.groups]

    def save(self) -> None:
        """Saves the buffers as they are."""
        for buffers, saved in zip(self.groups, self.flat, strict=True):
            saved.copy_(_flat(buffers))

    @torch.no_grad()
    def restore(self, found: torch.Tensor) -> None:
        """Restores the saved values if `found` is 1, else saves the new ones."""
        for buffers, saved in zip(self.groups, self.flat, strict=True):
            saved.copy_(torch.where(found.to(saved.device) > 0, saved, _flat(buffers)))
            pieces = saved.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(
                buffers, [piece.view(b.shape) for piece, b in zip(pieces, buffers, strict=True)]
            )


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def agree(mine: Origin | None, batch: Batch, world: World) -> tuple[int, Origin | None, Batch]:
    """The rank whose non-finite value came first, that value, and that rank's batch, on every rank."""
    origins: list[Origin | None] = world.all_gather_object(mine)
    rank = earliest(origins)
    theirs = Batch(*(tensor.cpu() for tensor in batch)) if world.rank == rank else None
    return rank, origins[rank], world.all_gather_object(theirs)[rank]


def save_batch(folder: Path, batch: Batch, step: int, rank: int, resume: str) -> str:
    """Writes the batch into the run folder. Returns a sentence that says where it is, and that the command `resume`
    repeats the step. A full disk must not hide the finding."""
    path = folder / f"offending-step-{step}-rank-{rank}.safetensors"
    again = f"`{resume}` repeats this step"
    try:
        write_bytes(path, save({name: tensor.contiguous() for name, tensor in batch._asdict().items()}))
    except OSError as error:
        return f"The batch could not be saved ({error.strerror}); {again}"
    return f"The batch is in {path}; {again}"


def nonfinite_finding(
    step: int, rank: int, ranks: int, origin: Origin | None, batch: torch.Tensor, value: str, fix: str
) -> Finding:
    """The finding about a step. `batch` holds the sample ids of the rank; `value` is "loss" or "gradient"."""
    samples = origin.samples if origin is not None and origin.samples else tuple(batch.tolist())
    why = origin or "repeated, the step is finite: it depends on something besides its batch"
    return Finding(
        "non-finite",
        f"the {value} of step {step:,} is NaN or infinite: {why}",
        where=f"rank {rank} of {ranks}, samples {listed([str(sample) for sample in samples], most=8)}",
        since=f"step {step:,}",
        fix=fix,
    )

"""Teachers that run beside the student: one, or an ensemble.

Promises: in evaluation mode and without gradients, on this process's own device, in its own precision; `check` proves
it, and that not one bit of them has changed since they were loaded. The forward runs in inference mode and makes
nothing wait. Ensembles average softened probabilities or logits by given shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from drumline.data.views import Batch
from drumline.errors import UserError
from drumline.launch.world import World
from drumline.state.fingerprint import fingerprints, state_sha256

Rule = Literal["probabilities", "logits"]
_SIXTEEN_BIT = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class Taught(NamedTuple):
    """What a teacher says of a batch: ordinary tensors without gradient."""

    logits: Tensor
    taps: dict[str, Tensor]


@dataclass
class Teacher:
    """One or several frozen networks, called on normalised images."""

    modules: Sequence[nn.Module]
    """Bare, for state and checks."""
    device: torch.device
    taps: tuple[str, ...] = ()
    """Read from the only module; an ensemble has none."""
    autocast: torch.dtype | None = None
    rule: Rule = "probabilities"
    shares: tuple[float, ...] = (1.0,)
    temperature: float = 1.0
    compiled: bool = False
    _identity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.modules) == len(self.shares)
        assert not self.taps or len(self.modules) == 1
        for module in self.modules:
            module.eval().requires_grad_(False)
            if self.autocast is not None:
                # What autocast would do at every step, done once; norms stay in fp32, as there.
                for part in module.modules():
                    # Not subclasses: one may compute its weights from what it stores, in fp32 under autocast.
                    if type(part) in _SIXTEEN_BIT:
                        part.to(self.autocast)
            if self.compiled:
                # Evaluation and training batches differ in length: a graph for each, none for any.
                module.compile(dynamic=False)
        self._identity = self._fingerprints()

    def __call__(self, images: Tensor) -> Taught:
        with torch.inference_mode(), self._precision():
            if self.taps:
                logits, taps = self.modules[0](images, taps=True)
                said = Taught(logits, {name: taps[name] for name in self.taps})
            elif len(self.modules) == 1:
                said = Taught(self.modules[0](images), {})
            else:
                said = Taught(self._together([module(images) for module in self.modules]), {})
        # An inference tensor may not be saved for backward, its copy may.
        return Taught(said.logits.clone(), {name: tap.clone() for name, tap in said.taps.items()})

    def agree(self, world: World) -> None:
        """Raises where the ranks were given different teachers."""
        ranks = world.gather_integers(self._identity)
        odd = [rank for rank in range(world.size) if not torch.equal(ranks[rank], ranks[0])]
        if odd:
            raise UserError(
                f"distill.teacher_weights: rank(s) {odd} have another teacher than rank 0",
                "give every machine the same weights",
            )

    def check(self) -> None:
        """Raises where a teacher trains, holds a gradient, lies on another device or has changed."""
        for module in self.modules:
            for name, part in module.named_modules():
                if part.training:
                    raise _wrong(f"{name or type(part).__name__} is in training mode", "call eval() on it")
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.requires_grad or tensor.grad is not None:
                    raise _wrong(f"{name} takes gradients", "call requires_grad_(False) on it")
                if tensor.device != self.device:
                    where = f"{name} is on {tensor.device}, this process computes on {self.device}"
                    raise _wrong(where, "move it to the process's own device")
        if (self._fingerprints() != self._identity).any():
            raise _wrong(
                "weights or statistics have changed since they were loaded", "look for what wrote them"
            )

    def _precision(self) -> torch.autocast:
        enabled = self.autocast is not None
        return torch.autocast(self.device.type, dtype=self.autocast or torch.bfloat16, enabled=enabled)

    def _together(self, logits: list[Tensor]) -> Tensor:
        return ensemble(logits, self.shares, self.rule, self.temperature)

    def _fingerprints(self) -> Tensor:
        return torch.cat(
            [
                fingerprints(dict([*module.named_parameters(), *module.named_buffers()]))
                for module in self.modules
            ]
        )


@dataclass(frozen=True)
class Live:
    """A teacher that is computed at every step."""

    teacher: Teacher

    def __call__(self, images: Tensor, batch: Batch) -> Taught:
        return self.teacher(images)


def _wrong(what: str, fix: str) -> UserError:
    return UserError(f"the teacher's {what}: it would not be the teacher that was loaded", fix)


def ensemble(logits: Sequence[Tensor], shares: Sequence[float], rule: Rule, temperature: float) -> Tensor:
    """The logits of several teachers as those of one, in fp32.

    `logits`: Σ wₖ zₖ. `probabilities`: z = T · log Σ wₖ softmax(zₖ / T), so that softmax(z / T) is exactly the mean
    of the teachers' softened probabilities. Shares are scaled to sum to 1.
    """
    weights = [share / sum(shares) for share in shares]
    if rule == "logits":
        return torch.stack([w * z.float() for w, z in zip(weights, logits, strict=True)]).sum(0)
    logs = [
        torch.log_softmax(z.float() / temperature, dim=-1) + math.log(w)
        for w, z in zip(weights, logits, strict=True)
    ]
    return temperature * torch.logsumexp(torch.stack(logs), dim=0)


def weights_sha256(modules: Sequence[nn.Module]) -> str:
    """What a cache knows a teacher by: every byte of its parameters and buffers."""
    tensors = {
        f"{number}/{name}": tensor
        for number, module in enumerate(modules)
        for name, tensor in module.state_dict().items()
    }
    return state_sha256({"model": tensors})

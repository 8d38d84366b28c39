"""Teachers that run beside the student: one, or an ensemble.

Promises: in evaluation mode and without gradients, on this process's own device (in stages: each tensor on the device
of its stage, or given up where another process computes that), in its own precision; `check` proves it, and that not
one bit of them has changed since they were loaded. The forward runs in inference mode and makes nothing wait.
Ensembles average softened probabilities or logits by given shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from drumline.core.arithmetic import autocast
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.world import World
from drumline.state.fingerprint import fingerprints_of, state_sha256

Way = Callable[[Sequence[tuple[int, ...]], Callable[[int], Tensor]], Sequence[Any]]
"""How a module is computed on several batches: from their shapes, and what gives the images of each, to the module's
output on each, or to nothing where another process has that."""
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
    _ways: Sequence[Way] = field(init=False)
    _homes: dict[tuple[int, str], torch.device] = field(init=False, default_factory=dict)
    """Where tensors lie, but on the device."""
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
        self._ways = [partial(_whole, module, bool(self.taps)) for module in self.modules]
        self._identity = self._fingerprints()

    def __call__(self, images: Tensor) -> Taught:
        (said,) = self.hear([tuple(images.shape)], lambda number: images)
        return said

    def hear(self, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor]) -> list[Taught]:
        """What is said of several batches of these shapes; nothing where the teacher's last stage is not."""
        with torch.inference_mode(), self._precision():
            outputs = [way(shapes, feed) for way in self._ways]
            said = [self._joined(each) for each in zip(*outputs, strict=True)]
        # An inference tensor may not be saved for backward, its copy may.
        return [
            Taught(logits.clone(), {name: tap.clone() for name, tap in taps.items()}) for logits, taps in said
        ]

    def lay(self, ways: Sequence[Way]) -> None:
        """From now on computed in these ways, by tensors that lie as they do now; those on the meta device are other
        processes'. What is here must be what was loaded."""
        assert len(ways) == len(self.modules)
        loaded, here = self._identity, [not tensor.is_meta for _, _, tensor in self._named()]
        self._ways = ways
        self._homes = {(number, name): tensor.device for number, name, tensor in self._named()}
        self._identity = self._fingerprints()
        assert torch.equal(self._identity.cpu(), loaded.cpu()[torch.tensor(here)]), "moved, and changed by it"

    def leave(self) -> None:
        """Gives the memory back, where nobody will ask."""
        for module in self.modules:
            module.to("meta")

    def agree(self, world: World) -> None:
        """Raises where the ranks were given different teachers."""
        ranks = world.all_gather_integers(self._identity.to(self.device))
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
        for number, name, tensor in self._named():
            if tensor.requires_grad or tensor.grad is not None:
                raise _wrong(f"{name} takes gradients", "call requires_grad_(False) on it")
            home = self._homes.get((number, name), self.device)
            if tensor.device != home:
                whose = "its stage" if self._homes else "this process"
                raise _wrong(
                    f"{name} is on {tensor.device}, {whose} computes on {home}",
                    "move it to the device of its stage"
                    if self._homes
                    else "move it to the process's own device",
                )
        if (self._fingerprints() != self._identity).any():
            raise _wrong(
                "weights or statistics have changed since they were loaded", "look for what wrote them"
            )

    def _precision(self) -> torch.autocast:
        return autocast(self.device, self.autocast)

    def _joined(self, outputs: Sequence[Any]) -> Taught:
        """All modules' outputs on a batch as what one teacher says."""
        if self.taps:
            logits, taps = outputs[0]
            return Taught(logits, {name: taps[name] for name in self.taps})
        if len(outputs) == 1:
            return Taught(outputs[0], {})
        return Taught(ensemble(outputs, self.shares, self.rule, self.temperature), {})

    def _named(self) -> list[tuple[int, str, Tensor]]:
        """Every tensor with its name and the number of its module."""
        return [
            (number, name, tensor)
            for number, module in enumerate(self.modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]

    def _fingerprints(self) -> Tensor:
        """Of the tensors that are here."""
        return fingerprints_of([tensor for _, _, tensor in self._named() if not tensor.is_meta])


@dataclass(frozen=True)
class Live:
    """A teacher that is computed at every step."""

    teacher: Teacher

    def __call__(self, images: Tensor, batch: Batch) -> Taught:
        return self.teacher(images)


def _whole(
    module: nn.Module, taps: bool, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor]
) -> list[Any]:
    """A module's outputs, one batch after the other."""
    return [module(feed(each), taps=True) if taps else module(feed(each)) for each in range(len(shapes))]


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

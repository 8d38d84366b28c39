"""Repeats a step whose gradients were not finite, and finds the first value that was not.

Promises: the batch is made again (batches are pure functions) with the same random numbers, and nothing of the run
changes. The first non-finite value is a parameter before the step, the output of a layer of a teacher or of the
model, the loss, or a parameter's gradient; it is named with its samples if its rows show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import torch
from torch import nn

from drumline.data.feed.batch import Batch
from drumline.guards.checks.nonfinite import (
    Origin,
    first_gradient,
    first_parameter,
    is_finite,
    layer_name,
    watched_outputs,
)
from drumline.training.step import TrainStep

Pieces = dict[int, tuple[int, Batch]]
"""For each thread, the pipeline stage that it runs and the micro-batch: shards of strict mode may take turns."""


def find_origin(step: TrainStep, batch: Batch, index: int) -> Origin | None:
    """Repeats optimizer step `index` on this rank's batch. All ranks call it. None if everything is finite now."""
    found: list[Origin] = []
    module = step.state.module
    name = first_parameter(dict(module.named_parameters()))
    if name is not None:
        found.append(Origin("parameter", name))
    shared = step.strategy.shared_backward()
    current = shared.computing if shared is not None else {}
    with ExitStack() as watched:
        watched.enter_context(_watched_layers(module, "output", found, current))
        for teacher in step.objective.teachers:
            watched.enter_context(_watched_layers(teacher, "teacher", found, current))
        if shared is not None:
            watched.enter_context(_watched_gradients(shared.parameters, found))
            step.recompute(batch, index, _OwnPasses(step, found, current))
        else:
            watched.enter_context(step.uncompiled())  # compiled code calls no hooks
            step.recompute(batch, index, _LocalPasses(step, found, current))
    return min(found, key=lambda origin: origin.order, default=None)


@contextmanager
def _watched_layers(module: nn.Module, kind: str, found: list[Origin], current: Pieces) -> Iterator[None]:
    """Checks every layer's output. `current` says what each thread runs."""

    def record(name: str, layer: nn.Module, output: torch.Tensor) -> None:
        if not any(origin.kind == kind for origin in found):
            stage, piece = current.get(get_ident(), (0, None))
            rows = _rows(output, piece.samples if piece else None)
            found.append(Origin(kind, layer_name(name, layer), rows, stage))

    with watched_outputs(module, record):
        yield


@contextmanager
def _watched_gradients(
    stages: Mapping[int, Iterable[tuple[str, nn.Parameter]]], found: list[Origin]
) -> Iterator[None]:
    """Checks gradients as they are computed: in stages before replicas exchange theirs, and in a sharded module in
    this process's shards."""

    def check(stage: int, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not found and not is_finite(parameter.grad):
            found.append(Origin("gradient", name, stage=stage))

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(check, stage, name))
        for stage, named in stages.items()
        for name, parameter in named
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _OwnPasses:
    """The step's own passes, for layouts whose backward involves other processes and cannot be run here alone."""

    step: TrainStep
    found: list[Origin]
    current: Pieces

    def images(self, batch: Batch) -> torch.Tensor:
        return self.step.images(batch)

    def loss(self, batch: Batch) -> torch.Tensor:
        stage, _ = self.current.get(get_ident(), (0, batch))
        self.current[get_ident()] = stage, batch
        loss = self.step.loss(batch)
        if not self.found and not is_finite(loss):
            self.found.append(Origin("loss"))
        return loss


@dataclass(frozen=True)
class _LocalPasses:
    """Replaces a step's passes. Gradients are computed by name, so they are not exchanged. Backward runs even if
    forward has shown the value: layers may communicate with other processes in it, which run it too."""

    step: TrainStep
    found: list[Origin]
    current: Pieces

    def images(self, batch: Batch) -> torch.Tensor:
        return self.step.images(batch)

    def loss(self, batch: Batch) -> torch.Tensor:
        step, found = self.step, self.found
        self.current[get_ident()] = 0, batch
        sums = step.loss_sums(step.state.module, batch)
        named = {name: p for name, p in step.state.module.named_parameters() if p.requires_grad}
        loss = sums.loss * (step.strategy.weight / step.global_batch)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        if not found and not is_finite(sums.loss):
            found.append(Origin("loss"))
        if not found:
            name = first_gradient(dict(zip(named, gradients, strict=True)))
            found += [Origin("gradient", name)] if name is not None else []
        return torch.zeros((), device=loss.device, requires_grad=True)


def _rows(output: torch.Tensor, samples: torch.Tensor | None) -> tuple[int, ...]:
    """The samples whose rows are not finite, if the output has a row per sample and not all are non-finite."""
    if samples is None or output.ndim == 0 or len(output) != len(samples):
        return ()
    bad = ~torch.isfinite(output.reshape(len(output), -1)).all(dim=1)
    return () if bad.all() else tuple(samples.to(bad.device)[bad].tolist())

"""Which layer was it? A step whose gradients were not finite, gone through once more with open eyes.

Promises: the batch is made again (batches are pure functions), random numbers are keyed as they were, and nothing of
the run is changed; the first thing that is not finite is named: a parameter before the step, a layer's output, the
loss, or a parameter's gradient; with the samples, where rows tell them apart. All ranks look and agree on one answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from drumline.core.files import write_bytes
from drumline.data.feed.batch import Batch
from drumline.guards.checks.nonfinite import tensors_in
from drumline.guards.finding import Finding
from drumline.parallel.local import local_shard
from drumline.parallel.world import World
from drumline.train.state import TrainState
from drumline.train.step import TrainStep

_KINDS = ("parameter", "output", "loss", "gradient")
Named = tuple[str, nn.Parameter]
Pieces = dict[int, tuple[int, Batch]]
"""Thread to the stage that it runs, and to the piece of the batch: shards of strict mode may take turns."""


@dataclass(frozen=True)
class Culprit:
    """The first thing on a rank that was not finite. `kind` is one of parameter, output, loss, gradient."""

    kind: str
    name: str
    samples: tuple[int, ...] = ()
    """Sample ids of the rows, where it has one for each sample and not all are."""
    stage: int = 0
    """Of a pipeline. What one stage gives to the next, or back, is found there once more."""

    @property
    def order(self) -> tuple[int, int]:
        """The lowest was first."""
        return _KINDS.index(self.kind), -self.stage if self.kind == "gradient" else self.stage

    def __str__(self) -> str:
        return {
            "parameter": f"parameter {self.name!r} held such a value before the step",
            "output": f"the first such value is in the output of {self.name}",
            "loss": "all layers' outputs were finite, the loss was not",
            "gradient": f"the loss was finite; the first such gradient, going backward, is of {self.name!r}",
        }[self.kind]


def examine(step: TrainStep, batch: Batch, index: int) -> Culprit | None:
    """Replays optimizer step `index` on this rank's batch. All ranks call it. None when all is finite this time."""
    found: list[Culprit] = []
    module = step.state.module
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and not _finite(parameter):
            found.append(Culprit("parameter", name))
            break
    strategy = step.strategy
    current: Pieces = {} if strategy.computing is None else strategy.computing
    if stages := strategy.stage_parameters():
        own = current if strategy.computing is None else None
        with _watched(module, found, current), _watched_gradients(stages, found):
            step.replay(batch, index, _LookingOn(step, found, own))
    else:
        # A compiled model would not call the hooks.
        compiled = strategy.recipe.train.compile
        stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with _watched(module, found, current), stance:
            step.replay(batch, index, _Looking(step, found, current))
    return min(found, key=lambda culprit: culprit.order, default=None)


def agree(mine: Culprit | None, batch: Batch, world: World) -> tuple[int, Culprit | None, Batch]:
    """The rank and the culprit that count (earliest kind, lowest rank), and that rank's batch, on every rank."""
    all_of_them: list[Culprit | None] = world.all_gather_object(mine)
    named = [(culprit.order, rank) for rank, culprit in enumerate(all_of_them) if culprit]
    rank = min(named)[1] if named else 0
    theirs = world.all_gather_object(
        Batch(*(tensor.cpu() for tensor in batch)) if world.rank == rank else None
    )[rank]
    return rank, all_of_them[rank], theirs


def keep_batch(folder: Path, batch: Batch, step: int, rank: int, resume: str) -> str:
    """Writes the batch into the run folder; says where it is and how to come to the step again, by the command
    `resume`. A full disk must not hide what was found."""
    path = folder / f"offending-step-{step}-rank-{rank}.safetensors"
    again = f"`{resume}` repeats this step"
    try:
        write_bytes(path, save({name: tensor.contiguous() for name, tensor in batch._asdict().items()}))
    except OSError as error:
        return f"The batch could not be saved ({error.strerror}); {again}"
    return f"The batch is in {path}; {again}"


def not_finite(
    step: int, rank: int, culprit: Culprit | None, batch: Batch, saved: str, world: World, what: str, fix: str
) -> Finding:
    """The finding, in words."""
    samples = culprit.samples if culprit is not None and culprit.samples else tuple(batch.samples.tolist())
    shown = ", ".join(map(str, samples[:8])) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
    why = (
        str(culprit)
        if culprit
        else "gone through again, the step is finite: something else than its batch decides"
    )
    return Finding(
        "non-finite",
        f"the {what} of step {step:,} is NaN or infinite: {why}",
        where=f"rank {rank} of {world.size}, samples {shown}",
        since=f"step {step:,}",
        fix=f"{fix}. {saved}",
    )


def parameter_findings(state: TrainState, step: int, fix: str) -> list[Finding]:
    """A parameter of this process that an update has left without a finite value, although the gradients were finite:
    the next step would show it, but the state is scored or saved before. Waits for the device."""
    named = [
        (name, local_shard(each.detach()))
        for name, each in state.module.named_parameters()
        if not each.is_meta
    ]
    if not named:
        return []
    home = named[0][1].device
    finite = torch.stack([torch.isfinite(each).all().to(home) for _, each in named]).tolist()
    if all(finite):
        return []
    name, _ = named[finite.index(False)]
    return [
        Finding(
            "non-finite",
            f"parameter {name!r} is NaN or infinite after step {step:,}: the update overflowed",
            where=repr(name),
            since=f"step {step:,}",
            fix=fix,
        )
    ]


@contextmanager
def _watched(module: nn.Module, found: list[Culprit], current: Pieces) -> Iterator[None]:
    """Looks at every part's output; `current` is told what each thread runs."""

    def looked(name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        if any(culprit.kind == "output" for culprit in found):
            return
        for tensor in tensors_in(output):
            if not _finite(tensor):
                words = (
                    f"{name!r} ({type(part).__name__})"
                    if name
                    else f"the whole model ({type(part).__name__})"
                )
                stage, piece = current.get(get_ident(), (0, None))
                rows = _rows(tensor, piece.samples if piece else None)
                found.append(Culprit("output", words, rows, stage))
                return

    handles = [part.register_forward_hook(partial(looked, name)) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched_gradients(stages: Mapping[int, Iterable[Named]], found: list[Culprit]) -> Iterator[None]:
    """Looks at gradients as they come: in stages before replicas bring theirs together, of a sharded module in this
    process's parts."""

    def looked(stage: int, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not found and not _finite(parameter.grad):
            found.append(Culprit("gradient", name, stage=stage))

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(looked, stage, name))
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
class _LookingOn:
    """A step's own passes, where backward goes from process to process and is not to be asked for here."""

    step: TrainStep
    found: list[Culprit]
    current: Pieces | None = None

    def images(self, batch: Batch) -> torch.Tensor:
        return self.step.images(batch)

    def loss(self, batch: Batch) -> torch.Tensor:
        if self.current is not None:
            self.current[get_ident()] = 0, batch
        loss = self.step.loss(batch)
        if not self.found and not _finite(loss):
            self.found.append(Culprit("loss", ""))
        return loss


@dataclass(frozen=True)
class _Looking:
    """In the place of a step's passes. Gradients are asked for by name, so they are not exchanged. Backward runs
    whatever forward has shown: parts of the model may meet other processes in it, and these come there too."""

    step: TrainStep
    found: list[Culprit]
    current: Pieces

    def images(self, batch: Batch) -> torch.Tensor:
        return self.step.images(batch)

    def loss(self, batch: Batch) -> torch.Tensor:
        step, found = self.step, self.found
        self.current[get_ident()] = 0, batch
        outcome = step.outcome(step.state.module, batch)
        named = [(name, p) for name, p in step.state.module.named_parameters() if p.requires_grad]
        loss = outcome.loss * (step.strategy.weight / step.global_batch)
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
        nothing = torch.zeros((), device=loss.device, requires_grad=True)
        if found:
            return nothing
        if not _finite(outcome.loss):
            found.append(Culprit("loss", ""))
            return nothing
        for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
            if gradient is not None and not _finite(gradient):
                found.append(Culprit("gradient", name))
                break
        return nothing


def _rows(tensor: torch.Tensor, samples: torch.Tensor | None) -> tuple[int, ...]:
    if samples is None or tensor.ndim == 0 or len(tensor) != len(samples):
        return ()
    bad = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(dim=1)
    return () if bad.all() else tuple(samples.to(bad.device)[bad].tolist())


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local_shard(tensor.detach())).all())

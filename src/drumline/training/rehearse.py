"""Tries the first step without effect before a run takes it.

Promises: afterwards the run is as it was. Compiled code, gradient buckets and library workspaces exist; parameters
without a gradient, random numbers that no seed reaches and a softmax before the loss are reported; the layout has its
certificate; the step is recorded as a CUDA graph where that is possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch, make_batch
from drumline.data.feed.own_transform import PROBED, REPEATABLE, unrepeatable
from drumline.data.feed.sampler import Request
from drumline.training.certificate import certify
from drumline.training.losses import OwnLoss
from drumline.training.run import Run
from drumline.training.step import NotCapturable
from drumline.training.task import Classification


def rehearse(run: Run, batch: Batch) -> None:
    """Runs the first step once without effect, and records it as a CUDA graph where that is possible."""
    if run.recipe.train.compile:
        run.log("compiling the model; the first steps take a while")
    try:
        with _sparse_gradients(run) as sparse, _logits(run) as logits:
            run.step.rehearse(batch)
    except RuntimeError as error:
        if sparse or "sparse" in str(error).lower():
            raise _no_sparse(sparse or _sparse_layers(run.state.module)) from error
        if "deterministic" not in str(error):
            raise
        raise UserError(
            f"run.deterministic = true: {str(error).strip().splitlines()[0]}",
            "use --run.no-deterministic, or another model",
        ) from error
    _check_gradients(run)
    _check_draws(run)
    _check_logits(run, logits)
    _check_transform(run)
    if (reference := run.strategy.reference()) is not None:
        folder = run.folder.path if run.folder else None
        certify(run.step, reference, batch, run.position.step, folder, run.log)
    why_not = why_not_captured(run)
    if not why_not:
        try:
            run.step.capture(batch)
        except NotCapturable as reason:
            why_not = f"the model cannot be captured ({reason})"
            if run.recipe.train.capture == "on":
                raise UserError(f"train.capture = on: {why_not}", "use auto or off") from reason
    if run.timeline is not None and why_not:
        with run.timeline.recording():
            run.step.recompute(batch, run.position.step)
        run.timeline.predict()
        run.timeline.begin(run.position.step)
    run.not_captured = why_not
    if run.world.device.type == "cuda":
        run.log(f"no CUDA graph: {why_not}" if why_not else "the whole step runs as one CUDA graph")


def why_not_captured(run: Run) -> str:
    """Why the step is not recorded as a CUDA graph; empty where it can be."""
    recipe = run.recipe
    if recipe.train.capture == "off":
        return "train.capture = off"
    reason = ""
    if run.world.device.type != "cuda":
        reason = "no GPU"
    elif not (reason := run.strategy.why_not_captured()):
        if run.task.spans_devices:
            reason = "the teacher spans several GPUs"
        elif names_code(recipe.optim.name):
            reason = f"optim.name = {recipe.optim.name} reads its learning rate on the host"
        elif recipe.train.gradient_checkpointing:
            reason = "gradient checkpointing saves and restores generator states on the host"
    if reason and recipe.train.capture == "on":
        raise UserError(f"train.capture = on is not possible: {reason}", "use auto or off")
    return reason


@contextmanager
def _sparse_gradients(run: Run) -> Iterator[list[str]]:
    """Collects the parameters whose gradients are sparse. Skips a compiled model, which would compile the hooks,
    too."""
    found: list[str] = []

    def check(name: str, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            found.append(name)

    handles = [
        parameter.register_hook(partial(check, name))
        for name, parameter in run.state.module.named_parameters()
        if parameter.requires_grad and not parameter.is_meta and not run.recipe.train.compile
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _logits(run: Run) -> Iterator[list[torch.Tensor]]:
    """Collects what the model gives to a loss of ours on the labels."""
    found: list[torch.Tensor] = []
    objective = run.task.objective
    if not isinstance(objective, Classification) or isinstance(objective.loss, OwnLoss):
        yield found
        return
    loss = objective.loss

    def record(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found.append(logits.detach())
        return loss(logits, labels)

    objective.loss = record
    try:
        yield found
    finally:
        objective.loss = loss


def _sparse_layers(module: nn.Module) -> list[str]:
    """The layers made with `sparse=True`, for FSDP, whose gradients belong to tensors other than the parameters."""
    return [
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]


def _no_sparse(names: list[str]) -> UserError:
    what = f"the gradient of {', '.join(dict.fromkeys(names))}" if names else "a gradient"
    return UserError(
        f"{what} is sparse: gradients are checked, clipped, exchanged and applied as dense tensors",
        "make the layer with sparse=False, as in nn.Embedding(..., sparse=False)",
    )


def _check_gradients(run: Run) -> None:
    """Reports parameters that the rehearsed step left without a gradient. All processes call it."""
    every = run.world.all_gather_object(run.step.without_gradient)
    idle = list(dict.fromkeys(name for names in every for name in names))
    if not idle:
        return
    what = f"{len(idle)} trainable parameter(s) got no gradient: {', '.join(idle[:5])}"
    if run.strategy.needs_all_gradients:
        raise UserError(
            f"{what}; processes cannot exchange gradients that some never have",
            "use them in forward, remove them, or set requires_grad_(False) on them",
        )
    run.log(f"WARNING: {what}. They are never trained")


def _check_draws(run: Run) -> None:
    """Reports a model that draws random numbers which no seed repeats. All processes call it."""
    if not any(run.world.all_gather_object(run.step.draws_elsewhere)):
        return
    what = "the model draws from Python's `random` or from `numpy.random`, which no seed of the run reaches"
    if run.recipe.run.strict:
        raise UserError(
            f"run.strict: {what}", "draw with torch.rand in its forward, or leave out --run.strict"
        )
    run.log(f"WARNING: {what}: the run cannot be repeated. Draw with torch.rand in its forward")


def _check_logits(run: Run, logits: list[torch.Tensor]) -> None:
    """Reports a model that returns probabilities. All processes call it."""
    if any(run.world.all_gather_object(bool(logits) and all(map(_probabilities, logits)))):
        run.log(
            "WARNING: the outputs of the model are probabilities (none is negative, and each row sums to 1), but the "
            "loss expects logits, so the model learns slowly. Remove the softmax at the end of the model"
        )


def _probabilities(outputs: torch.Tensor) -> bool:
    return bool((outputs >= 0).all() and ((outputs.sum(dim=1) - 1).abs() <= 1e-4).all())


def _check_transform(run: Run) -> None:
    """Reports a data.transform whose result does not depend only on the image and its generator. All processes call
    it."""
    sets, recipe = run.sets, run.recipe
    if not sets.transform.own:
        return
    request = next(
        iter(sets.requests(recipe, run.strategy.batch_slice(), run.position.step, run.plan.total)), None
    )
    why = ""
    if request is not None and run.strategy.grid.reads:
        few = Request(request.epoch, request.samples[:PROBED])
        images = make_batch(sets.train, replace(sets.transform, own=""), recipe.run.seed, few).batch.images
        why = unrepeatable(images.numpy(), sets.train, sets.transform, recipe.run.seed, few)
    why = next(filter(None, run.world.all_gather_object(why)), "")
    what = f"data.transform {recipe.data.transform}: {why}"
    if why and recipe.run.strict:
        raise UserError(f"run.strict: {what}", REPEATABLE)
    if why:
        run.log(f"WARNING: {what}: the run cannot be repeated. {REPEATABLE[0].upper()}{REPEATABLE[1:]}")

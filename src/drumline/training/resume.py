"""Resumes from a checkpoint: rank 0 reads it, and every process restores what it holds.

Promises: a checkpoint that does not fit this recipe is rejected before a byte is written. Different settings and a
different environment are logged, and rejected in strict mode, which promises the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drumline.config.recipe import Recipe
from drumline.config.toml import dump_recipe, flat_recipe
from drumline.core.arithmetic import threads_per_process
from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.data.classes import describe_difference
from drumline.data.identity import changed_samples
from drumline.observe.text_log import RESUMED
from drumline.parallel.strategy import Gathered
from drumline.parallel.world import World
from drumline.state.checkpoint import read_checkpoint
from drumline.state.folder import repeatable
from drumline.state.manifest import Manifest, Position, read_manifest
from drumline.state.model_record import ModelRecord, record_of
from drumline.state.provenance import changed_environment, changed_settings
from drumline.state.tensors import Groups
from drumline.training.schedule import Plan
from drumline.training.state import TrainState
from drumline.training.task import Task

FROZEN = "frozen"
"""The key of the frozen parameters in a checkpoint's environment."""
Slots = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and type of each tensor of the optimizer."""


def restore(
    recipe: Recipe,
    plan: Plan,
    state: TrainState,
    task: Task,
    checkpoint: Path,
    environment: dict[str, Any],
) -> tuple[Position, list[str]]:
    """Loads on rank 0 and scatters. Returns the position, and messages about what differs."""
    strategy, world = state.strategy, state.strategy.world
    live = state.tensors()
    own = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in live["optimizer"].items()}
    # In a pipeline, each process has an optimizer of its own stage.
    slots: Slots = {key: slot for each in world.all_gather_object(own) for key, slot in each.items()}
    groups: Gathered | None = None
    memory: dict[str, torch.Tensor] = {}
    position = Position(step=0, per_epoch=plan.per_epoch)
    messages: list[str] = []
    if world.is_rank_zero:
        try:
            manifest, groups = read_checkpoint(checkpoint)
        except CorruptError as reason:
            raise UserError(f"cannot resume: {reason}", "give another checkpoint of the run") from reason
        memory = groups.pop("memory", {})
        groups = _refrozen(groups, manifest.environment.get(FROZEN), state.frozen, slots)
        strict = recipe.run.strict
        position, messages = compare_manifest(recipe, manifest, environment, checkpoint)
        messages.insert(0, f"{RESUMED}{checkpoint} at step {position.step:,}")
        changes = changed_environment(manifest.environment, environment, strict)
        if changes and strict:
            raise UserError(
                f"run.strict: {checkpoint} was made in a different environment, so the same bits cannot be promised: "
                f"{'; '.join(changes)}",
                "resume in the environment it was made in, or continue without the promise: --run.no-strict",
            )
        if changes:
            messages.append(f"resumed in a different environment, the bits may differ: {'; '.join(changes)}")
    position = world.broadcast_object(position)
    check_position(plan, position, checkpoint)
    strategy.scatter(groups, live, checkpoint)
    if strategy.grid.places > 1:
        memory = world.broadcast_object(memory)  # the process that computes the loss restores it
    task.objective.restore(memory)
    if position.scaler:
        state.scaler.load_state_dict(dict(position.scaler))
    return position, messages


def compare_manifest(
    recipe: Recipe, manifest: Manifest, environment: Mapping[str, Any], checkpoint: Path
) -> tuple[Position, list[str]]:
    """The position of a checkpoint, and messages about classes, settings and data that differ. Rejects other classes,
    and in strict mode different training data. Of `environment`, uses the record of the model and the data."""
    position, strict = manifest.position, recipe.run.strict
    messages = compare_records(record_of(manifest.environment), record_of(environment), checkpoint)
    changes = changed_settings(manifest.recipe, dump_recipe(repeatable(recipe)), strict)
    if changes:
        messages.append(f"resumed with different settings, the result may differ: {'; '.join(changes)}")
    before = flat_recipe(manifest.recipe).get("checkpoint.best", "top1")
    if before != recipe.checkpoint.best:
        position = forget_best(position)
        messages.append(
            f"checkpoint.best: {before} -> {recipe.checkpoint.best}: earlier evaluations no longer count as best"
        )
    warnings = compare_data(manifest.environment, environment, checkpoint, strict)
    if "evaluation" in warnings:
        position = forget_best(position)
        warnings["evaluation"] += "; earlier evaluations no longer count as best"
    return position, [*messages, *warnings.values()]


def check_position(plan: Plan, position: Position, checkpoint: Path) -> None:
    """Rejects a checkpoint that is not a step of this plan."""
    if position.per_epoch != plan.per_epoch:
        raise UserError(
            f"{checkpoint} has {position.per_epoch} steps per epoch, this recipe has {plan.per_epoch}",
            "resume with the data and the global batch (data.batch) the run was started with",
        )
    if position.step > plan.total:
        raise UserError(
            f"{checkpoint} is at step {position.step:,}, the recipe ends at {plan.total:,}",
            "raise train.epochs or train.steps, or resume from an earlier checkpoint",
        )


def forget_best(position: Position) -> Position:
    """The position of a run whose earlier evaluations no longer count."""
    return replace(position, best_step=-1, best_value=-1.0, evaluations_since_best=0)


def compare_records(then: ModelRecord | None, now: ModelRecord | None, checkpoint: Path) -> list[str]:
    """Messages about classes and image preparation that differ from the checkpoint's. Rejects different classes."""
    if then is None or now is None:
        return [f"{checkpoint} has no record of its class names: they are taken to be the data's"]
    (a, b), messages = (then.classes, now.classes), []
    if a.names != b.names:
        if len(a) != len(b) or (a.named and b.named):
            known = set(a.names)
            unknown = [name for name in b.names if name not in known]
            difference = describe_difference(a, b, unknown, ("the checkpoint", "the data"))
            raise UserError(
                f"{checkpoint} was trained on other classes: {difference}",
                "resume with the data it was trained on (data.path), under its class names; to train these weights "
                "on other classes, start a new run with --model.weights",
            )
        messages.append(
            f"the checkpoint or the data has no class names: {len(a):,} classes are matched by number"
        )
    if changes := then.other_images(now):
        messages.append(
            f"resumed with different image preparation, the result may differ: {'; '.join(changes)}"
        )
    return messages


def compare_data(
    then: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path, strict: bool
) -> dict[str, str]:
    """A warning for each set whose samples differ from the checkpoint's. Strict mode rejects changed training
    data."""
    before, warnings = then.get("data"), dict[str, str]()
    for side, summary in now["data"].items():
        if not isinstance(before, dict) or not isinstance(before.get(side), dict):
            continue  # earlier versions did not record it
        changed = changed_samples(before[side], summary)
        if changed and strict and side == "training":
            raise UserError(
                f"run.strict: the {side} set differs from that of {checkpoint}, so the same bits cannot be promised: "
                f"{changed}",
                "resume with the run's original data (data.path), or continue without the promise: --run.no-strict",
            )
        if changed:
            warnings[side] = (
                f"WARNING: the {side} set has changed since {checkpoint.name}, so the result may differ: {changed}"
            )
    return warnings


def _refrozen(groups: Groups, frozen: object, now: Collection[str], slots: Slots) -> Gathered:
    """The groups of a checkpoint that froze different parameters: the optimizer state starts at zero for parameters
    that are now trained, and is dropped for those that no longer are."""
    before = {str(name) for name in frozen} if isinstance(frozen, list) else set()
    optimizer = {
        key: tensor
        for key, tensor in groups.get("optimizer", {}).items()
        if _parameter(key) in before or _parameter(key) not in now
    }
    for key, (shape, dtype) in slots.items():
        if _parameter(key) in before:
            optimizer.setdefault(key, torch.zeros(shape, dtype=dtype))
    return {**{name: dict(group) for name, group in groups.items()}, "optimizer": optimizer}


def _parameter(key: str) -> str:
    """The parameter of a tensor of the optimizer, which is called `slot/parameter`."""
    return key.partition("/")[2]


def saved_facts(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """The environment of the run that wrote the checkpoint, with its strategy's facts, and the checkpoint's step."""
    try:
        manifest = read_manifest(checkpoint)
        return dict(manifest.environment), manifest.position.step
    except CorruptError as reason:
        raise UserError(f"cannot resume: {reason}", "give another checkpoint of the run") from reason


def threads_of(recipe: Recipe, saved: Mapping[str, Any], world: World) -> int:
    """A resumed run keeps its number of threads: on a CPU it decides the order of additions."""
    if recipe.parallel.threads == "auto" and saved:
        return int(saved.get("threads", 1))
    return threads_per_process(recipe.parallel.threads, world.local_size, recipe.run.strict)

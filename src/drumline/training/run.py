"""A run from its recipe to the point where the next step can be taken, fresh or resumed.

Promises: rank 0 alone touches the run folder and broadcasts what it read, so machines need no common disk; a resumed
run has the threads it was started with and continues at the exact sample; what was chosen is logged. A start that is
refused, crashes or is killed before its first step leaves the files of an earlier start as they were.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.config.recipe import Recipe
from drumline.config.toml import dump_recipe
from drumline.core import lock
from drumline.core.arithmetic import set_deterministic
from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.core.text import counted
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches, LoaderWorkers
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.observe import text_log
from drumline.observe.display import Display, make_display
from drumline.observe.run_log import RunLog
from drumline.parallel.norm import explain_one_value
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World
from drumline.state.checkpoint import checkpoints
from drumline.state.folder import (
    UNSAVED,
    Opened,
    open_run,
    repeatable,
    write_facts,
)
from drumline.state.manager import CheckpointManager, set_aside
from drumline.state.manifest import Position
from drumline.state.model_record import ENVIRONMENT
from drumline.state.provenance import describe_environment
from drumline.state.shards import ShardWriter
from drumline.training import metrics
from drumline.training.consistency import check_data, check_recipes, check_software
from drumline.training.model import model_record
from drumline.training.reporter import MeterReader, RunReporter
from drumline.training.resume import restore, saved_environment, threads_of
from drumline.training.schedule import make_plan
from drumline.training.sets import Sets, normaliser, open_sets
from drumline.training.state import build_state
from drumline.training.step import TrainStep
from drumline.training.task import Builder
from drumline.training.timeline import StepTimeline


class RunOutput:
    """What rank 0 writes in the run folder: the log and the checkpoints. The folder is not changed before `begin`."""

    def __init__(
        self,
        folder: Opened,
        recipe: Recipe,
        environment: dict[str, Any],
        position: Position,
        display: Display,
        cleanup: ExitStack,
    ) -> None:
        self.folder, self.environment, self.position = folder, environment, position
        self.text = dump_recipe(repeatable(recipe))
        self.begun = False
        self.run_log = RunLog(folder.path, display.log)
        cleanup.callback(self.run_log.close)
        self.run_log.log(f"{text_log.STARTED}{_command(environment)}", show=False)
        self.run_log.log(f"run folder {folder.path}")
        self.manager = CheckpointManager(
            folder.checkpoints,
            recipe.checkpoint.keep,
            self.text,
            environment,
            self.run_log.flush,
            self.run_log.log,
            partial(self.run_log.log, show=False),
            self._saved,
        )
        cleanup.callback(self.manager.close)

    def _saved(self) -> None:
        """The first checkpoint is there."""
        marker = self.folder.path / UNSAVED
        if marker.exists():
            lock.check(self.folder.path)
            marker.unlink(missing_ok=True)

    def begin(self) -> None:
        """From here on the run writes its folder. Each change may be the last, so their order always leaves a folder
        that can be resumed: checkpoints beyond the position are set aside before the log of their steps is cut."""
        if self.begun:
            return
        path, step = self.folder.path, self.position.step
        self.run_log.check()
        self.manager.begin()
        try:
            lock.check(path)
            if checkpoints(self.folder.checkpoints):
                (path / UNSAVED).unlink(missing_ok=True)
            else:
                (path / UNSAVED).write_text("No checkpoint of this run has been saved yet.\n")
            write_facts(path, self.text, self.environment)
            beyond = self.manager.set_aside_after(step)
            # Weights of an earlier stop would pass for those of this run, should it be killed.
            if os.path.lexists(path / "weights"):
                set_aside(path / "weights")
        except OSError as error:
            raise UserError(
                f"cannot write the run folder {path}: {error.strerror or error}",
                "free space there, or give another --run.dir",
            ) from error
        self.run_log.begin(keep_until_step=step)
        self.begun = True
        if beyond:
            self.run_log.log(f"beyond step {step:,}, set aside as step-N.aside: {', '.join(beyond)}")


class Run:
    """A training run in this process.

    Life: the constructor opens the data and the run folder, builds the model and lays it out, and loads the
    checkpoint to resume from. `training/rehearse.py` tries the first step; `begin` then lets it write its folder,
    and `training/loop.py` takes the steps. `cleanup` closes everything that the constructor opened, in reverse order.
    """

    def __init__(self, recipe: Recipe, world: World, build: Builder, cleanup: ExitStack) -> None:
        enter(Phase.STARTING)
        self.recipe, self.world = recipe, world
        display = make_display(world.rank)
        cleanup.callback(display.end)
        set_deterministic(recipe.run.deterministic)
        check_recipes(recipe, world)
        messages = check_software(recipe, world)
        self.sets = open_sets(recipe, world)
        identity = check_data(self.sets, recipe.run.seed, world)
        self.plan = make_plan(recipe, len(self.sets.train))
        self.strategy = create_strategy(recipe, world)
        cleanup.enter_context(explain_one_value(self.strategy.smallest_batch()))
        self.folder: Opened | None = self._open_folder(cleanup)
        """The run folder, on rank 0."""
        checkpoint: Path | None = world.broadcast_object(self.folder.resume_from if self.folder else None)
        saved: Mapping[str, Any] = world.broadcast_object(
            saved_environment(checkpoint) if checkpoint and world.is_rank_zero else {}
        )
        threads = world.broadcast_object(threads_of(recipe, saved, world))
        torch.set_num_threads(threads)

        self.task = build(recipe, self.sets, self.plan, self.strategy, display)
        self.metrics = (*metrics.METRICS, *self.task.metrics)
        """What each evaluation measures."""
        self.state = build_state(
            self.strategy,
            self.task.module,
            self.task.model,
            cut=self.task.cut,
            image_size=self.sets.transform.size,
            saved=saved,
            log=display.log,
        )
        self.step = TrainStep(
            self.state,
            self.task.objective,
            normaliser(self.sets, recipe),
            NonFiniteGate(
                self.state.module,
                self.state.optimizer,
                world.device,
                action=recipe.guard.action,
                scaled=self.state.scaler.is_enabled(),
            ),
        )
        environment = self._environment(threads, identity)
        self.position = Position(step=0, per_epoch=self.plan.per_epoch)
        """Where the run starts."""
        self.moved: bool = world.broadcast_object(self.folder.resumes_elsewhere if self.folder else False)
        """Whether it resumes from a checkpoint of a different run folder."""
        resumed: list[str] = []
        if checkpoint is not None:
            self.position, resumed = restore(
                recipe, self.plan, self.state, self.task, checkpoint, environment
            )
            if self.moved:
                self.position = replace(self.position, best_step=-1, best_accuracy=-1.0)
        self.output = self._open_output(environment, display, cleanup)
        """What is written in the run folder, on rank 0."""
        self.shard_writer = ShardWriter() if recipe.checkpoint.sharded and self.output is None else None
        """Writes shards of checkpoints, on the other ranks."""
        if self.shard_writer is not None:
            cleanup.callback(self.shard_writer.close)
        self.reporter = RunReporter(
            self.output.run_log if self.output is not None else RunLog(None),
            display,
            MeterReader(self.step.meter, world),
            world,
            total=self.plan.total,
            per_epoch=self.plan.per_epoch,
            batch=recipe.data.batch,
            terms=self.task.objective.terms,
            metrics=self.metrics,
            classes=len(self.sets.train.classes),
        )
        self.timeline = StepTimeline.of(
            self.strategy,
            recipe.model.name,
            self.folder.path if self.folder else None,
            self.reporter.run_log.log,
        )
        for message in (
            *self._summary(threads),
            *messages,
            *self.strategy.messages(),
            *self.task.messages,
            *(self.folder.notes if self.folder else ()),
            *resumed,
        ):
            self.log(message)

    @property
    def manager(self) -> CheckpointManager | None:
        """Of the checkpoints, on rank 0."""
        return self.output.manager if self.output is not None else None

    def log(self, text: str, show: bool = True) -> None:
        """A line for the log, and for the screen unless it is details."""
        self.reporter.run_log.log(text, show)

    def begin(self) -> None:
        """Everything was opened and tried: the run may change its folder."""
        if self.output is not None:
            self.output.begin()

    def batches(self, first_step: int, last_step: int) -> Batches:
        """This process's batches of these steps, with what the task adds to them."""
        return self._batches(self.sets, first_step, last_step)

    def single_batch(self, step: int) -> Batch:
        """This process's batch of a step, made without workers: whatever runs next to a rehearsal would be taken for
        a part of the step, and may break its capture."""
        sets = replace(self.sets, workers=LoaderWorkers("threads", 0))
        with closing(self._batches(sets, step, step + 1)) as batches:
            return next(batches)

    def _batches(self, sets: Sets, first_step: int, last_step: int) -> Batches:
        grid, rows = self.strategy.grid, self.strategy.batch_slice()
        # The process that computes the loss reads too: a broken sample has the label of its substitute.
        blank = not grid.reads and not grid.ends
        batches = sets.training(self.recipe, rows, first_step, last_step, blank)
        return self.task.feed(batches, sets.requests(self.recipe, rows, first_step, last_step))

    def _open_folder(self, cleanup: ExitStack) -> Opened | None:
        if not self.world.is_rank_zero:
            return None
        folder = open_run(self.recipe, self.sets.name)
        cleanup.callback(folder.leave)
        return folder

    def _open_output(
        self, environment: dict[str, Any], display: Display, cleanup: ExitStack
    ) -> RunOutput | None:
        if self.folder is None:
            return None
        output = RunOutput(self.folder, self.recipe, environment, self.position, display, cleanup)
        if not self.folder.holds_run:
            output.begin()  # there is nothing to lose, and the rehearsal can log what it finds
        return output

    def _environment(self, threads: int, identity: dict[str, Any]) -> dict[str, Any]:
        """What the run runs on, as environment.json and checkpoints record it."""
        world = self.world
        return {
            **describe_environment(world.device, world.size, world.backend, threads),
            **self.strategy.facts(),
            ENVIRONMENT: model_record(self.recipe, self.sets).as_json(),
            "data": identity,
        }

    def _summary(self, threads: int) -> list[str]:
        """The first lines of the log: model, data, processes, length."""
        recipe, sets, plan, world = self.recipe, self.sets, self.plan, self.world
        parameters = sum(parameter.numel() for parameter in self.task.model.parameters())
        classes = counted(len(sets.train.classes), "class", "classes")
        device = f"CPU, {threads} thread{'s' * (threads > 1)}{' each' * (world.size > 1)}"
        if world.device.type == "cuda":
            device = torch.cuda.get_device_name(world.device)
        left_out = len(sets.train) - plan.per_epoch * recipe.data.batch
        lines = [
            f"{recipe.model.name}: {parameters:,} parameters, {self.step.precision.name}; {sets.name}: "
            f"{len(sets.train):,} to train, {len(sets.eval):,} to evaluate, {classes}, "
            f"{sets.transform.size} px, {sets.transform.augment}",
            f"{world.size} process{'es' * (world.size > 1)} on {device}"
            + (f" over {world.backend}" if world.size > 1 else "")
            + f"; global batch {recipe.data.batch}, {counted(plan.total, 'step')}, {plan.per_epoch:,} per epoch"
            + (f" ({counted(left_out, 'sample')} left out, different ones each epoch)" if left_out else ""),
            *sets.warnings,
        ]
        if sets.workers_why:
            lines.append(sets.workers_why)
        if world.shares_gpu:
            lines.append("several processes share a GPU: the result is right, but not faster")
        return lines


def _command(environment: dict[str, Any]) -> str:
    """What was typed, and what ran it."""
    program, *argv = environment["command"]
    typed = "drumline" if Path(program).name in ("drumline", "__main__.py") else program
    versions = [f"{name} {environment['packages'][name]}" for name in ("drumline", "torch")]
    return f"{shlex.join([typed, *argv])} ({', '.join(versions)}; process {os.getpid()} on {environment['host']})"

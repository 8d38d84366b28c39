"""A run, opened: everything from its recipe to the point where the next step can be taken, fresh or resumed.

Promises: only rank 0 accesses the run folder, and it broadcasts what it read, so machines need no shared disk, except
for sharded checkpoints, of which every process writes its own shards. A resumed run has the number of threads it was
started with and continues at the exact sample. Every choice is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.config.recipe import Recipe
from drumline.core.arithmetic import set_deterministic
from drumline.core.heartbeat import Phase, enter
from drumline.core.text import counted, printable
from drumline.data.classes import Classes
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches, LoaderWorkers
from drumline.data.feed.own_transform import load_transform
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.observe.display import Display, make_display
from drumline.observe.nvml import gpu_reader
from drumline.observe.run_log import RunLog
from drumline.observe.sampler import Sampler
from drumline.observe.timeline import StepTimeline
from drumline.parallel.norm import explain_one_value
from drumline.parallel.strategy import SetupContext, Strategy, create_strategy
from drumline.parallel.world import World
from drumline.state.folder import Opened, open_run
from drumline.state.manager import CheckpointManager
from drumline.state.manifest import Position
from drumline.state.model_record import ENVIRONMENT
from drumline.state.provenance import describe_environment
from drumline.state.shards import ShardWriter
from drumline.training import metrics
from drumline.training.best import best_metric, early_stop
from drumline.training.consistency import check_data, check_recipes, check_software
from drumline.training.defaults import choose_defaults
from drumline.training.metrics import Metric
from drumline.training.model import choose_head_rate, model_record, size_warning
from drumline.training.output import RunOutput
from drumline.training.reporter import MeterReader, RunReporter
from drumline.training.resume import FROZEN, forget_best, restore, saved_facts, threads_of
from drumline.training.schedule import Plan, make_plan
from drumline.training.sets import Sets, normaliser, open_sets, write_bad_samples
from drumline.training.state import TrainState, build_state, describe_trained
from drumline.training.step import TrainStep
from drumline.training.task import Builder, Classification, Task
from drumline.training.trend import Trend

FEW = 10
"""Up to this number of classes, the log names them."""


class Run:
    """A training run in this process.

    The constructor opens the data and the run folder, builds the model, and loads the checkpoint to resume from. Then
    `training/rehearse.py` tries the first step, `begin` lets the run write its folder, and `training/loop.py` takes
    the steps. `cleanup` closes everything that the constructor opened, in reverse order.
    """

    sets: Sets
    plan: Plan
    strategy: Strategy
    folder: Opened | None
    """The run folder, on rank 0."""
    task: Task
    metrics: tuple[Metric, ...]
    """What each evaluation measures."""
    best_metric: Metric
    """Decides which evaluation is the best."""
    state: TrainState
    step: TrainStep
    position: Position
    """Where the run starts."""
    last_step: int
    """The step at which it ends, or is opened again because frozen modules start to train."""
    branched: bool
    """Whether it resumes from a checkpoint of a different run folder."""
    output: RunOutput | None
    """What is written in the run folder, on rank 0."""
    shard_writer: ShardWriter | None
    """Writes shards of checkpoints, on the other ranks."""
    reporter: RunReporter
    timeline: StepTimeline | None
    not_captured: str = ""
    """Why the step is not a CUDA graph, once the rehearsal has tried."""

    def __init__(self, recipe: Recipe, world: World, build: Builder, cleanup: ExitStack) -> None:
        enter(Phase.STARTING)
        self.world = world
        display = make_display(world.rank)
        cleanup.callback(display.end)
        cleanup.callback(load_transform.cache_clear)
        set_deterministic(recipe.run.deterministic)

        # Data: the same recipe, software and samples on every rank.
        check_recipes(recipe, world)
        messages = check_software(recipe, world)
        self.sets = open_sets(recipe, world)
        identity = check_data(self.sets, recipe.run.seed, world)
        recipe, chosen = choose_defaults(recipe, len(self.sets.train))
        recipe, head = choose_head_rate(recipe, Classes.of(self.sets.train), world)
        self.recipe = recipe.check()
        self.plan = make_plan(recipe, len(self.sets.train))
        self.strategy = create_strategy(recipe, world)
        cleanup.enter_context(explain_one_value(self.strategy.smallest_batch()))

        # Run folder: what to resume from. The number of threads decides the order of additions on a CPU.
        checkpoint = self._open_folder(cleanup)
        saved, step = self._saved(checkpoint)
        threads = world.broadcast_object(threads_of(recipe, saved, world))
        torch.set_num_threads(threads)

        # Model: built, distributed, restored.
        self.last_step = self.plan.unfreeze if step < self.plan.unfreeze else self.plan.total
        self._build(build, saved, display, step)
        environment = self._environment(threads, identity)
        resumed = self._resume(checkpoint, environment)

        # Output.
        self._open_output(environment, display, cleanup)
        for message in self.task.shown:
            self.log(message, show=False)
        for message in (
            *self._summary(threads),
            *filter(None, [chosen, head]),
            *messages,
            *self.strategy.messages(),
            *self.task.messages,
            *(self.folder.notes if self.folder else ()),
            *resumed,
        ):
            self.log(message)

    @property
    def manager(self) -> CheckpointManager | None:
        """The checkpoint manager; None except on rank 0."""
        return self.output.manager if self.output is not None else None

    def early_stop(self, position: Position) -> str:
        """The reason for stopping at a position before the last step; empty if the run continues."""
        return early_stop(position, self.recipe.train.patience, self.plan.total, self.best_metric)

    def log(self, text: str, show: bool = True) -> None:
        """Adds a line to the log, and to the screen if `show`."""
        self.reporter.run_log.log(text, show)

    def record(self, text: str) -> None:
        """A line for log.txt from a signal handler."""
        if self.output is not None:
            self.output.record(text)

    def record_broken_samples(self) -> None:
        """Writes the list of broken samples into the run folder."""
        if self.output is not None and self.output.begun:
            write_bad_samples(self.sets.bad, self.output.folder.path)

    def begin(self) -> None:
        """Lets the run write to its folder. Called once everything has been opened and rehearsed."""
        if self.output is not None:
            self.output.begin()

    def batches(self, first_step: int, last_step: int) -> Batches:
        """This process's batches of these steps, with what the task adds to them."""
        return self._batches(self.sets, first_step, last_step)

    def single_batch(self, step: int) -> Batch:
        """This process's batch of a step, made without workers: threads that run next to a rehearsal would be taken
        for a part of the step, and could break its capture."""
        sets = replace(self.sets, workers=LoaderWorkers("threads", 0))
        with closing(self._batches(sets, step, step + 1)) as batches:
            return next(batches)

    def _batches(self, sets: Sets, first_step: int, last_step: int) -> Batches:
        grid, rows = self.strategy.grid, self.strategy.batch_slice()
        # The process that computes the loss reads, too: a broken sample has the label of its substitute.
        blank = not grid.reads and not grid.ends
        batches = sets.training(self.recipe, rows, first_step, last_step, blank)
        return self.task.extend_batches(batches, sets.requests(self.recipe, rows, first_step, last_step))

    def _open_folder(self, cleanup: ExitStack) -> Path | None:
        """Locks the run folder. Returns the checkpoint to resume from."""
        self.folder = None
        if self.world.is_rank_zero:
            self.folder = open_run(self.recipe, self.sets.name)
            cleanup.callback(self.folder.leave)
        checkpoint: Path | None = self.world.broadcast_object(
            self.folder.resume_from if self.folder else None
        )
        return checkpoint

    def _saved(self, checkpoint: Path | None) -> tuple[Mapping[str, Any], int]:
        """The environment of the run that wrote the checkpoint, with its strategy's facts, and the checkpoint's
        step."""
        saved: tuple[Mapping[str, Any], int] = self.world.broadcast_object(
            saved_facts(checkpoint) if checkpoint and self.world.is_rank_zero else ({}, 0)
        )
        return saved

    def _build(self, build: Builder, saved: Mapping[str, Any], display: Display, step: int) -> None:
        """Builds the task, its state as the strategy distributes it after `step` steps, and the step."""
        recipe, world = self.recipe, self.world
        self.task = build(recipe, self.sets, self.plan, self.strategy, display)
        self.metrics = (*metrics.METRICS, *self.task.metrics)
        self.best_metric = best_metric(recipe.checkpoint.best, self.metrics, len(self.sets.train.classes))
        self.state = build_state(
            self.strategy,
            self.task.module,
            self.task.model,
            SetupContext(self.task.cut, self.sets.transform.size, saved, display.log),
            frozen=() if self.plan.unfreeze and step >= self.plan.unfreeze else recipe.train.freeze,
        )
        self.task.objective.use_average(self.state.average.module if self.state.average else None)
        gate = NonFiniteGate(
            self.state.module,
            self.state.optimizer,
            world.device,
            action=recipe.guard.action,
            scaled=self.state.scaler.is_enabled(),
        )
        self.step = TrainStep(self.state, self.task.objective, normaliser(self.sets, recipe), gate)

    def _resume(self, checkpoint: Path | None, environment: dict[str, Any]) -> list[str]:
        """Sets the position, and restores the state from a checkpoint. Returns messages about what differs."""
        self.position = Position(step=0, per_epoch=self.plan.per_epoch)
        self.branched = self.world.broadcast_object(self.folder.branched if self.folder else False)
        if checkpoint is None:
            return []
        self.position, messages = restore(
            self.recipe, self.plan, self.state, self.task, checkpoint, environment
        )
        if self.branched:
            self.position = forget_best(self.position)
        return messages

    def _open_output(self, environment: dict[str, Any], display: Display, cleanup: ExitStack) -> None:
        """Opens what the run writes: log and checkpoints on rank 0, shards on the other ranks."""
        recipe, world = self.recipe, self.world
        self.output = self.shard_writer = None
        if self.folder is not None:
            self.output = RunOutput(self.folder, recipe, environment, self.position, display, cleanup)
            if not self.folder.holds_run:
                self.output.begin()  # there is nothing to lose, and the rehearsal can log its results
        elif recipe.checkpoint.sharded:
            self.shard_writer = ShardWriter()
            cleanup.callback(self.shard_writer.close)
        sampler = Sampler(device=gpu_reader(world.device))
        cleanup.callback(sampler.stop)
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
            trend=self._trend(),
            feed=self.sets.times,
            sampler=sampler,
        )
        self.timeline = StepTimeline.of(
            self.strategy,
            recipe.model.name,
            self.folder.path if self.folder else None,
            self.reporter.run_log.log,
        )

    def _trend(self) -> Trend:
        """Detects that this run does not learn."""
        labels, plan = self.sets.eval.labels, self.plan
        guess = float(np.unique(labels, return_counts=True)[1].max() / len(labels))
        known = isinstance(self.task.objective, Classification) and self.recipe.train.loss == "cross_entropy"
        return Trend(len(self.sets.train.classes), guess, plan.total, plan.per_epoch, known)

    def _environment(self, threads: int, identity: dict[str, Any]) -> dict[str, Any]:
        """The environment of this run, as environment.json and checkpoints record it."""
        world = self.world
        return {
            **describe_environment(world.device, world.size, world.backend, threads),
            **self.strategy.facts(),
            **({FROZEN: list(self.state.frozen)} if self.state.frozen else {}),
            ENVIRONMENT: model_record(self.recipe, self.sets).as_json(),
            "data": identity,
        }

    def _summary(self, threads: int) -> list[str]:
        """The first lines of the log: model, data, processes, length."""
        recipe, sets, plan, world = self.recipe, self.sets, self.plan, self.world
        parameters = sum(parameter.numel() for parameter in self.task.model.parameters())
        classes = counted(len(sets.train.classes), "class", "classes")
        if len(sets.train.classes) <= FEW and Classes.of(sets.train).named:
            classes += f" ({', '.join(map(printable, sets.train.classes))})"
        device = f"CPU, {threads} thread{'s' * (threads > 1)}{' each' * (world.size > 1)}"
        if world.device.type == "cuda":
            device = torch.cuda.get_device_name(world.device)
        left_out = (
            len(sets.train) - plan.per_epoch * recipe.data.batch if recipe.data.balance == "none" else 0
        )
        lines = [
            f"{recipe.model.name}: {parameters:,} parameters, {self.step.precision.name}; {sets.name}: "
            f"{len(sets.train):,} to train, {len(sets.eval):,} to evaluate, {classes}, "
            f"{sets.transform.size} px, {sets.transform.augment}",
            f"{world.size} process{'es' * (world.size > 1)} on {device}"
            + (f" over {world.backend}" if world.size > 1 else "")
            + f"; global batch {recipe.data.batch}, {counted(plan.total, 'step')}, {plan.per_epoch:,} per epoch"
            + (f" ({counted(left_out, 'sample')} left out, different ones each epoch)" if left_out else ""),
            *describe_trained(self.state.module, recipe, plan, self.state.frozen, self.state.factors),
            *size_warning(recipe, sets.transform.size),
            *sets.warnings,
            *sets.sampling(recipe),
        ]
        if sets.workers_why:
            lines.append(sets.workers_why)
        if world.shares_gpu:
            lines.append("several processes share a GPU: the result is right, but not faster")
        return lines

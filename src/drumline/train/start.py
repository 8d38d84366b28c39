"""Brings a run to the point where its next step can be taken, fresh or resumed.

Promises: rank 0 alone touches the run folder and shares what it read, so machines need no common disk; a
resumed run has the threads it was started with and stands at the exact sample; what was chosen is said. A start that
is refused, crashes or is killed before its first step leaves the files of an earlier start as they were.
"""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.config.recipe import Recipe
from drumline.config.rules import shard_count
from drumline.config.toml import dump_recipe
from drumline.core import lock
from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.core.text import counted
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches, Workers
from drumline.models.copies import copy_model
from drumline.observe import text_log
from drumline.observe.display import Display, make_display
from drumline.observe.run_log import RunLog
from drumline.parallel.grid import Grid, make_grid
from drumline.parallel.holding import Holding, Parts, Whole
from drumline.parallel.layout import Recorded, data_parallel_word, resolve_layout
from drumline.parallel.world import World
from drumline.state.checkpoint import checkpoints
from drumline.state.folder import (
    UNSAVED,
    Opened,
    open_run,
    repeatable,
    write_facts,
)
from drumline.state.manager import CheckpointManager, ShardWriter, set_aside
from drumline.state.manifest import Position
from drumline.state.model_record import ENVIRONMENT
from drumline.state.provenance import describe_environment
from drumline.train import prepare, spread
from drumline.train.agreement import check_data, check_recipes, check_software
from drumline.train.assemble import prepare_state
from drumline.train.finite import Finite
from drumline.train.meter import MeterReader
from drumline.train.norms import few_samples
from drumline.train.prepare_model import model_record
from drumline.train.reporter import Reporter
from drumline.train.resume import cut_of, take_up, threads_of
from drumline.train.staged import Laid, lane_names, lay_in_stages, prepare_shape
from drumline.train.state import TrainState
from drumline.train.step import TrainStep
from drumline.train.task import Builder, Task
from drumline.train.timeline import Picture


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
        self.run_log = RunLog.waiting(folder.path, display.log)
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
            lambda: (folder.path / UNSAVED).unlink(missing_ok=True),
        )
        cleanup.callback(self.manager.close)

    def begin(self) -> None:
        """From here on the run writes its folder. Each change can be the last, so they come in an order that leaves
        a folder to go on with: checkpoints beyond the position leave before the log of their steps does."""
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


@dataclass(frozen=True)
class Running:
    """A run that is ready to step."""

    recipe: Recipe
    world: World
    grid: Grid
    """How the processes are laid over the model; `world` is all of them."""
    sets: prepare.Sets
    plan: prepare.Plan
    task: Task
    state: TrainState
    step: TrainStep
    reporter: Reporter
    position: Position
    folder: Opened | None
    """On rank 0 only, like `manager`."""
    manager: CheckpointManager | None
    output: RunOutput | None
    moved_in: bool
    """Goes on from a checkpoint of another run folder."""
    holding: Holding
    shard_writer: ShardWriter | None
    """Of a sharded checkpoint, on the ranks that have no manager."""
    twin: list[torch.nn.Module]
    """A copy of a model that is sharded, for the certificate, which takes it out."""
    laid: Laid | None
    """The model in stages, where the layout has them."""
    picture: Picture | None
    """Of one of its steps."""

    def log(self, text: str, show: bool = True) -> None:
        """A line for the log, and for the screen unless it is details."""
        self.reporter.run_log.log(text, show)

    def begin(self) -> None:
        """Everything was opened and tried: the run may change its folder."""
        if self.output is not None:
            self.output.begin()

    def batches(self, first_step: int, last_step: int) -> Batches:
        """This rank's batches of these steps, with what the task adds to them."""
        return self._fed(self.sets, first_step, last_step)

    def rehearsal(self, step: int) -> Batch:
        """This rank's batch of a step, made by nobody else: what runs beside a rehearsal would be taken for the
        step's own doing, and may break its capture."""
        with closing(self._fed(replace(self.sets, workers=Workers("threads", 0)), step, step + 1)) as batches:
            return next(batches)

    def _fed(self, sets: prepare.Sets, first_step: int, last_step: int) -> Batches:
        peers = self.grid.peers
        # The last place reads too: a broken sample's label is that of its substitute.
        blank = not self.grid.reads and not self.grid.ends
        batches = sets.training(self.recipe, peers, first_step, last_step, blank)
        return self.task.feed(batches, sets.requests(self.recipe, peers, first_step, last_step))


def start(recipe: Recipe, world: World, build: Builder, cleanup: ExitStack) -> Running:
    """Opens data, folder and output, builds the model, and loads the checkpoint to go on from."""
    enter(Phase.STARTING)
    display = make_display(world.rank)
    cleanup.callback(display.end)
    prepare.set_arithmetic(recipe.run.deterministic)
    check_recipes(recipe, world)
    set_up_words = check_software(recipe, world)
    sets = prepare.prepare_sets(recipe, world)
    identity = check_data(sets, recipe.run.seed, world)
    plan = prepare.prepare_plan(recipe, len(sets.train), world)
    shape = prepare_shape(recipe, world)
    grid = make_grid(world, shape.places if shape else 1)
    folder = open_run(recipe, sets.name) if world.is_rank_zero else None
    if folder is not None:
        cleanup.callback(folder.leave)
    checkpoint: Path | None = world.broadcast_object(folder.resume_from if folder else None)
    threads = world.broadcast_object(threads_of(recipe, checkpoint, world) if world.is_rank_zero else 0)
    torch.set_num_threads(threads)

    task = build(recipe, sets, plan, grid, display)
    before: tuple[str, ...] = world.broadcast_object(
        cut_of(checkpoint) if world.is_rank_zero and shape else ()
    )
    laid = lay_in_stages(recipe, task, sets, grid, shape, display, before) if shape else None
    twin = [_on_host(task.module)] if recipe.parallel.layout == "fsdp" else []
    state = prepare_state(recipe, task.module, world, task.model, laid.exchange.staged.tail if laid else None)
    holding = _holding(state, grid, world)
    shard_writer = ShardWriter() if recipe.checkpoint.sharded and not world.is_rank_zero else None
    if shard_writer is not None:
        cleanup.callback(shard_writer.close)
    step = TrainStep(
        state,
        task.objective,
        prepare.normaliser(sets, recipe, world),
        world,
        laid.exchange if laid else spread.prepare_exchange(recipe, state, world, task.together),
        seed=recipe.run.seed,
        global_batch=recipe.data.batch,
        autocast=prepare.precision(recipe, world),
        clip=recipe.optim.clip,
        finite=Finite(
            state.module,
            state.optimizer,
            world.device,
            action=recipe.guard.action,
            scaled=state.scaler.is_enabled(),
        ),
    )
    environment = describe_environment(world.device, world.size, world.backend, threads)
    if laid is not None:
        environment["cut"] = [segment.name for segment in laid.segments[1:]]
    environment[ENVIRONMENT] = model_record(recipe, sets).as_json()
    environment["data"] = identity
    position = Position(step=0, per_epoch=plan.per_epoch)
    resume_words: list[str] = []
    moved_in: bool = world.broadcast_object(folder.resumes_elsewhere if folder else False)
    if checkpoint is not None:
        position, resume_words = take_up(recipe, plan, state, task, checkpoint, world, environment, holding)
        if moved_in:
            position = replace(position, best_step=-1, best_accuracy=-1.0)

    output = (
        RunOutput(folder, recipe, environment, position, display, cleanup) if folder is not None else None
    )
    run_log = output.run_log if output is not None else RunLog(None)
    if output is not None and not output.folder.holds_run:
        output.begin()  # nothing to lose, and what the rehearsal finds has a place
    reporter = Reporter(
        run_log,
        display,
        MeterReader(step.meter, world),
        world,
        total=plan.total,
        per_epoch=plan.per_epoch,
        batch=recipe.data.batch,
        terms=task.objective.terms,
        classes=len(sets.train.classes),
    )
    run = Running(
        recipe=recipe,
        world=world,
        grid=grid,
        sets=sets,
        plan=plan,
        task=task,
        state=state,
        step=step,
        reporter=reporter,
        position=position,
        folder=folder,
        manager=output.manager if output is not None else None,
        output=output,
        moved_in=moved_in,
        holding=holding,
        shard_writer=shard_writer,
        twin=twin,
        laid=laid,
        picture=_picture(recipe, laid, step, world, folder, run_log),
    )
    words = _opening_words(recipe, sets, plan, task.model, step, world, threads)
    for word in (
        *words,
        *set_up_words,
        *(laid.words if laid else (few_samples(recipe, task.module, world),)),
        *task.words,
        *(folder.notes if folder else ()),
        *resume_words,
    ):
        if word:
            run.log(word)
    return run


def _on_host(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of it, without room for two on the device."""
    device = next(module.parameters()).device
    made = copy_model(module.cpu())
    module.to(device)
    return made


def _holding(state: TrainState, grid: Grid, world: World) -> Holding:
    if state.held is not None:
        from drumline.parallel.fsdp import Sharded

        return Sharded(world)
    return Parts(grid) if grid.places > 1 else Whole(world)


def _picture(
    recipe: Recipe,
    laid: Laid | None,
    step: TrainStep,
    world: World,
    folder: Opened | None,
    run_log: RunLog,
) -> Picture | None:
    """Where there is more to see than one forward and one backward."""
    path, name = folder.path if folder else None, recipe.model.name
    if laid is not None:
        shape = laid.exchange.shape
        title = (
            f"{name}, {recipe.parallel.layout} {shape.schedule}, {shape.stages} stages, {shape.micro_batches} "
            "micro-batches"
        )
        # Lanes of other replicas have the same numbers and look alike.
        first = world if laid.exchange.grid.replicas == 1 else laid.exchange.grid.down
        return Picture(laid.exchange, title, lane_names(laid.segments, shape), first, path, run_log.log)
    exchange, micro = step.exchange, recipe.train.accumulate
    if not isinstance(exchange, Recorded) or (world.size == 1 and micro == 1):
        return None
    layout = resolve_layout(recipe.parallel.layout, world)
    title = f"{name}, {layout}, {world.size} process(es), {micro} micro-batch(es)"

    def log(text: str) -> None:
        # Whole models side by side have no bubble that a person would wait for.
        run_log.log(text, show=text.startswith("WARNING"))

    return Picture(exchange, title, [f"rank {rank}" for rank in range(world.size)], world, path, log)


def _command(environment: dict[str, Any]) -> str:
    """What was typed, and what ran it."""
    program, *words = environment["command"]
    typed = "drumline" if Path(program).name in ("drumline", "__main__.py") else program
    versions = [f"{name} {environment['packages'][name]}" for name in ("drumline", "torch")]
    return f"{shlex.join([typed, *words])} ({', '.join(versions)}; process {os.getpid()} on {environment['host']})"


def _strict_word(shards: int, recipe: Recipe, world: World) -> str:
    uneven = f"; {world.size} processes share them unevenly, some wait" if shards % world.size else ""
    compiled = "; not promised for compiled models (train.compile)" if recipe.train.compile else ""
    return (
        f"strict: {shards} shards of {recipe.data.batch // shards} samples, the same bits on 1 to {shards} processes "
        f"with the same kind of device and software{uneven}{compiled}"
    )


def _opening_words(
    recipe: Recipe,
    sets: prepare.Sets,
    plan: prepare.Plan,
    module: torch.nn.Module,
    step: TrainStep,
    world: World,
    threads: int,
) -> list[str]:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    classes = counted(len(sets.train.classes), "class", "classes")
    precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[step.autocast]
    device = f"CPU, {threads} thread{'s' * (threads > 1)}{' each' * (world.size > 1)}"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    left_out = len(sets.train) - plan.per_epoch * recipe.data.batch
    words = [
        f"{recipe.model.name}: {parameters:,} parameters, {precision}; {sets.name}: {len(sets.train):,} to train, "
        f"{len(sets.eval):,} to evaluate, {classes}, {sets.transform.size} px, "
        f"{sets.transform.augment}",
        f"{world.size} process{'es' * (world.size > 1)} on {device}"
        + (f" over {world.backend}" if world.size > 1 else "")
        + f"; global batch {recipe.data.batch}, {counted(plan.total, 'step')}, {plan.per_epoch:,} per epoch"
        + (f" ({counted(left_out, 'sample')} left out, different ones each epoch)" if left_out else ""),
    ]
    if recipe.run.strict:
        words.append(_strict_word(shard_count(recipe), recipe, world))
    words += sets.warnings
    if sets.workers_why:
        words.append(sets.workers_why)
    if world.shares_gpu:
        words.append("several processes share a GPU: right, but not faster")
    if resolve_layout(recipe.parallel.layout, world) == "dp":
        words.append(data_parallel_word(torch.cuda.device_count()))
    return words

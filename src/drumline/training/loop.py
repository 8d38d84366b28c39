"""A training run from start to end: open, rehearse, step, evaluate, save, finish.

Promises: after the first three steps, the loop waits for the device only at evaluations, saves and ends of epochs. In
between, it reads numbers from the device and from other ranks at least one step after it has asked for them, and
background threads write the files. A run that is stopped or killed and then resumed takes the same steps with the
same bits. The guards check each state before it is saved.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.account import CHECKPOINT, COMPUTE, DATA, EVALUATION, GUARDS, LOG, OTHER, account
from drumline.core.environment import LAUNCHER
from drumline.core.errors import LostError
from drumline.core.heartbeat import Phase, beat, enter
from drumline.data.feed.batch import Batch
from drumline.guards.run.nonfinite import advice
from drumline.observe import text_log
from drumline.parallel.world import World
from drumline.state.folder import restart_recipe, resume_command
from drumline.state.manifest import Position
from drumline.state.tensors import Groups
from drumline.training.best import after_evaluation, is_better
from drumline.training.evaluate import score_module
from drumline.training.guards import RunGuards
from drumline.training.metrics import Score, no_result
from drumline.training.output import TrainResult, closing_line
from drumline.training.rehearse import rehearse
from drumline.training.run import Run
from drumline.training.sets import describe_bad_samples, gather_bad_samples
from drumline.training.speed import speed_facts
from drumline.training.stop import StopSign
from drumline.training.task import Builder, classification


def train(recipe: Recipe, world: World, build: Builder = classification) -> TrainResult:
    """Runs the recipe on the task that `build` makes of it. Every rank calls it and gets the same result.

    When frozen modules start to train, the run is saved and opened again, as if it had been stopped and resumed. This
    rebuilds the layout, the optimizer and a captured graph, and a kill around this step changes nothing."""
    began, stop = time.monotonic(), StopSign(world)
    with ExitStack() as signals:
        while True:
            with _out_of_memory(world), ExitStack() as cleanup:
                run = Run(recipe, world, build, cleanup)
                try:
                    guards = RunGuards(run)
                    with stop.attached(guards.poll, run.record):
                        result = _train(run, guards, stop, signals, began)
                except BaseException as error:
                    if (
                        LAUNCHER not in os.environ
                    ):  # a launcher records why its workers ended, whichever rank failed
                        run.reporter.failed(error)
                    raise
                finally:
                    run.record_broken_samples()  # even if too many of them ended the run
            if result is not None:
                return result
            name = world.broadcast_object(run.folder.path.name if run.folder is not None else "")
            recipe = restart_recipe(recipe, name, "auto")
            del run, guards
            gc.collect()  # frees its model, gradient buckets and graphs


def _train(
    run: Run, guards: RunGuards, stop: StopSign, signals: ExitStack, began: float
) -> TrainResult | None:
    """The result; None if the run has to be opened again to continue."""
    if run.branched:
        run.begin()  # before the rehearsal: the new folder needs a checkpoint of its own to resume from
        save(run, run.position, guards)
    if not stop.watching:
        signals.enter_context(stop)
    early = run.early_stop(run.position)
    if run.position.step < run.plan.total and not early:
        rehearse(run, run.single_batch(run.position.step))
    run.begin()
    if early:
        command = resume_command(run.recipe, run.folder.path) if run.folder else ""
        run.log(f"already finished: {early}. To train longer: {command} train.patience=0, or a higher value")
    position, score = take_steps(run, guards, stop)
    ended = position.step == run.plan.total or bool(run.early_stop(position))
    if position.step == run.last_step and not (ended or stop.stopped_by):
        names = ", ".join(run.recipe.train.freeze)
        run.log(f"{text_log.STOPPED}after step {position.step:,}, to unfreeze {names}")
        return None
    if ended and score is None and run.task.evaluates:
        model, average = score_model(run)
        score = average or model
    return finish(run, position, score, stop, time.monotonic() - began)


@contextmanager
def _out_of_memory(world: World) -> Iterator[None]:
    """Reports that memory ran out as an error that a restart may fix."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or ["no memory left"])[0]
        raise LostError(
            f"out of memory on {world.device}: {reason}",
            "give a smaller data.batch, a larger train.accumulate, train.precision bf16 or "
            "train.gradient_checkpointing; also check that no other program uses the memory",
        ) from error


def take_steps(run: Run, guards: RunGuards, stop: StopSign) -> tuple[Position, Score | None]:
    """Takes the remaining steps, or those until a stop is requested. Returns the position and the last score."""
    plan, reporter, position = run.plan, run.reporter, run.position
    last = run.last_step
    score: Score | None = None
    if position.step == plan.total or run.early_stop(position):
        return position, score
    guards.begin()
    with closing(run.batches(position.step, last)) as batches:
        batch = next(batches)
        reporter.begin(position.step, speed_facts(run))
        enter(Phase.STARTING)
        for index in range(position.step, last):
            rate = plan.schedule(index)
            account.enter(GUARDS)
            guards.before(index)
            account.enter(COMPUTE)
            take_step(run, batch, index, rate)

            done = index + 1
            position = replace(position, step=done)
            due = plan.due(done, run.task.evaluates)
            # Before an evaluation or a save: both see only states that pass the guards.
            account.enter(GUARDS)
            guards.after(done, batch, due.save, due.evaluation)
            account.enter(LOG)
            reporter.step_done(done, rate, due, stop.seconds_per_step)
            account.enter(OTHER)
            if due.evaluation:
                score, position = evaluate(run, position)
            if due.epoch_end or done == run.position.step + 1:
                run.task.objective.check()

            early = run.early_stop(position) if due.evaluation else ""
            stopping = stop.seen(done) and done < plan.total and not early
            if stop.alarm:
                guards.alarm(stop.alarm)
            if stopping and not due.log:
                reporter.log_steps(done, rate)
            if due.save or stopping or early or position.best_step == done:
                save(run, position, guards, must=stopping or bool(early) or done == last)
            if stopping or early or done == last < plan.total:
                if run.manager is not None:
                    run.manager.wait()
                break
            beat(done)
            if done < last:
                account.enter(DATA)
                batch = next(batches)
                account.enter(OTHER)
        stop.finish()
    enter(Phase.ENDING)
    guards.end()
    reporter.stopped(position.step)
    reporter.drain()
    return position, score


def take_step(run: Run, batch: Batch, index: int, rate: float) -> None:
    """One optimizer step, timed, and recorded if it is the one that the timeline shows."""
    if run.timeline is not None:
        run.timeline.before(index)
    run.reporter.clock.step_begin()
    run.step(batch, index, rate)
    run.reporter.clock.step_end()
    if run.timeline is not None:
        run.timeline.after(index)


def evaluate(run: Run, position: Position) -> tuple[Score, Position]:
    """Scores the model and, if there is one, its average, which is then judged. Updates the best score."""
    with account.within(EVALUATION):
        run.reporter.drain()
        score, average = score_model(run)
        gather_bad_samples(run.sets.bad, run.world)
        run.record_broken_samples()
    judged = average or score
    nonfinite = max(score.nonfinite, judged.nonfinite)
    value = judged.values[run.best_metric.name]
    best = is_better(run.best_metric, value, position) and not nonfinite and not _nonfinite_weights(run)
    if nonfinite:
        run.log(
            f"WARNING: the model's output is not finite for {nonfinite:,} of {judged.samples:,} samples: "
            f"the run has diverged. To prevent this, {advice(run.step.precision)}"
        )
    run.reporter.evaluated(position.step, score, average, best, run.best_metric.name)
    return judged, after_evaluation(position, value, best)


def _nonfinite_weights(run: Run) -> bool:
    """Whether some weights are not finite, although they score well (a ReLU hides -inf). Logs them. Every rank calls
    it."""
    names = sorted({name for names in run.world.all_gather_object(run.state.nonfinite()) for name in names})
    if names:
        run.log(
            f"WARNING: {', '.join(names[:3])}{', ...' if names[3:] else ''} contain{'s' * (len(names) == 1)} NaN or "
            "infinity: this evaluation does not count as the best"
        )
    return bool(names)


def score_model(run: Run) -> tuple[Score, Score | None]:
    """The model's score on the evaluation set, and its average's if there is one."""

    def score_of(module: nn.Module) -> Score:
        watch = partial(run.reporter.display.evaluation, total=len(run.sets.eval))
        grid = run.strategy.grid
        with run.strategy.evaluation(module) as scored:
            return score_module(
                scored,
                run.sets,
                run.recipe,
                grid,
                watch,
                metrics=run.metrics,
                blank=not grid.reads,
                precision=run.step.precision,
            )

    average = run.state.average
    return score_of(run.state.model), score_of(average.module) if average else None


def save(run: Run, position: Position, guards: RunGuards, must: bool = False) -> None:
    """Lets the guards check the state, writes pending log lines, then hands a snapshot to the writer. The last
    checkpoint, a new best and a requested one `must` be saved; others are skipped while the disk is busy."""
    with account.within(CHECKPOINT):
        _save(run, position, guards, must)
    run.reporter.pause(position.step)


def _save(run: Run, position: Position, guards: RunGuards, must: bool) -> None:
    enter(Phase.SAVING)
    guards.before_save(position.step)
    run.reporter.drain()
    memory = run.task.objective.collect() if run.strategy.grid.ends else {}
    scaler = run.state.scaler.state_dict() if run.state.scaler.is_enabled() else {}
    position = replace(position, scaler=scaler)
    must = must or position.step in (position.best_step, run.plan.total)
    whole = {"memory": memory} if memory else {}
    if run.recipe.checkpoint.sharded:
        _save_sharded(run, position, whole, must)
    else:
        groups = run.strategy.gather(run.state.tensors() | whole)
        if run.manager is not None:
            run.manager.save(groups, position, must)


def _save_sharded(run: Run, position: Position, whole: Groups, must: bool) -> None:
    """Every process writes its shards; rank 0 joins them into a checkpoint."""
    temporary = run.world.broadcast_object(run.manager.begin_sharded(position, must) if run.manager else None)
    if temporary is None:
        return
    shards = run.strategy.shards(run.state.tensors())
    if run.manager is not None:
        run.manager.save_sharded(temporary, shards, run.world.size, position, whole)
    elif run.shard_writer is not None:
        run.shard_writer.save(temporary, shards, run.world.rank, run.world.size)


def finish(run: Run, position: Position, score: Score | None, stop: StopSign, seconds: float) -> TrainResult:
    """Exports the weights, writes the closing line of the log, and returns the result."""
    run.reporter.display.end()
    gather_bad_samples(run.sets.bad, run.world)
    for message in describe_bad_samples(run.sets.bad):
        run.log(message)
    group = run.state.exported
    last = run.strategy.gather({"last": run.state.tensors()[group]}).get("last", {})
    if run.output is not None:
        run.output.export(last, position, group)
    per_epoch, judged, early = run.plan.per_epoch, position.best_step >= 0, run.early_stop(position)
    finished = position.step == run.plan.total or bool(early)
    result = TrainResult(
        run=run.world.broadcast_object(str(run.folder.path) if run.folder else ""),
        finished=finished,
        step=position.step,
        epoch=round(position.step / per_epoch, 3),
        metrics=(score.result() if score else no_result(run.metrics)) | dict(run.task.facts),
        best_metric=run.best_metric.name,
        best_value=position.best_value if judged else None,
        best_top1=position.best_value if judged and run.best_metric.name == "top1" else None,
        best_epoch=round(position.best_step / per_epoch, 3) if judged else None,
        stopped_early=early,
        images_per_s=round(run.reporter.images_per_s, 1),
        broken_samples=sum(len(bad_samples.bad) for bad_samples in run.sets.bad),
        stopped_by="" if finished else stop.stopped_by,
    )
    signal = "" if LAUNCHER in os.environ else stop.signal  # a launcher forwards its own signals
    run.log(closing_line(result, run.recipe, run.task, run.metrics, run.plan.total, seconds, signal))
    return result

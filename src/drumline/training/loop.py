"""A training run from start to end: open, resume, step, evaluate, save.

Promises: the loop itself never waits for the device, a file or another rank's news; a run that is stopped or
killed and resumed takes the same steps with the same bits; the guards check what is saved before it is saved.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core import lock
from drumline.core.environment import LAUNCHER
from drumline.core.errors import LostError, UserError
from drumline.core.files import CorruptError, write_file
from drumline.core.heartbeat import Phase, beat, enter
from drumline.core.lock import Superseded
from drumline.core.text import duration
from drumline.guards.run.guards import RunGuards
from drumline.guards.run.nonfinite import advice
from drumline.observe import text_log
from drumline.parallel.world import World
from drumline.state.checkpoint import read_group, verify_checkpoint, write_checksums
from drumline.state.folder import resume_command
from drumline.state.manifest import Position
from drumline.state.model_record import record_of
from drumline.state.tensors import Groups, verify_file
from drumline.state.weights import export_tensors
from drumline.training.evaluate import score_module
from drumline.training.guards import make_guards
from drumline.training.metrics import Score, describe, no_result
from drumline.training.rehearse import rehearse
from drumline.training.run import Run
from drumline.training.sets import describe_bad_samples, gather_bad_samples, write_bad_samples
from drumline.training.stop import StopSign
from drumline.training.task import Builder, classification


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    run: str
    finished: bool
    step: int
    epoch: float
    metrics: Mapping[str, Any]
    """Of the last evaluation, by name; None where there was none. Also what the task reports, such as
    `teacher_top1`."""
    best_top1: float | None
    best_epoch: float | None
    images_per_s: float
    broken_samples: int
    stopped_by: str = ""
    """The signal that stopped the run before its last step; empty if it finished."""

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        result: dict[str, Any] = {}
        for name, value in vars(self).items():
            result |= value if name == "metrics" else {name: value}
        return result


def train(recipe: Recipe, world: World, build: Builder = classification) -> TrainResult:
    """Runs the recipe on the task that `build` makes of it. Every rank calls it, and every rank gets the same
    result."""
    with _out_of_memory(world), ExitStack() as cleanup:
        run = Run(recipe, world, build, cleanup)
        if run.folder is not None:
            # However the run ends, too many broken samples included.
            cleanup.callback(_record_broken, run)
        began = time.monotonic()
        cleanup.push(partial(_record_failure, run))
        guards = make_guards(run)
        if run.moved:
            run.begin()
            save(run, run.position, guards)
        with StopSign(world, guards.poll, partial(_record, run)) as stop:
            position, score = take_steps(run, stop, guards)
            if position.step == run.plan.total and score is None and run.task.evaluates:
                model, average = score_model(run)
                score = average or model
            run.reporter.display.end()
            report_broken(run)
            export(run, position)
            result = _result(run, position, score)
            if not result.finished:
                result = replace(result, stopped_by=stop.stopped_by)
            asked_by = "" if LAUNCHER in os.environ else stop.signal  # a launcher forwards its own signals
            run.log(_closing_line(run, result, asked_by, time.monotonic() - began))
        return result


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


def take_steps(run: Run, stop: StopSign, guards: RunGuards) -> tuple[Position, Score | None]:
    """Takes the remaining steps, or those until a stop is requested."""
    recipe, plan, reporter, position = run.recipe, run.plan, run.reporter, run.position
    score: Score | None = None
    if position.step >= plan.total:
        run.begin()
        return position, score
    rehearse(run, run.single_batch(position.step))
    run.begin()
    guards.begin()
    with closing(run.batches(position.step, plan.total)) as batches:
        batch = next(batches)
        reporter.display.begin(plan.total, position.step, plan.total / plan.per_epoch)
        clock = reporter.clock
        reporter.pause(position.step)
        enter(Phase.STARTING)
        for index in range(position.step, plan.total):
            rate = plan.schedule(index)
            guards.before(index)
            if run.timeline is not None:
                run.timeline.before(index)
            clock.step_begin()
            run.step(batch, index, rate)
            clock.step_end()
            if run.timeline is not None:
                run.timeline.after(index)

            done = index + 1
            position = replace(position, step=done)
            evaluating, saving = (
                run.task.evaluates and plan.evaluates_after(done),
                plan.saves_after(done, recipe.checkpoint.every_steps),
            )
            # Before an evaluation or a save: both see only states that pass the guards.
            guards.after(done, batch, saving, evaluating)
            epoch_ends = done % plan.per_epoch == 0
            # A line at each save, so that the log of a resumed run equals that of an uninterrupted one.
            logs = done % recipe.train.log_every == 0 or evaluating or saving or epoch_ends
            if logs:
                reporter.log_steps(done, rate, not_evaluated=epoch_ends and not evaluating)
            else:
                reporter.peek(done, stop.seconds_per_step)
            reporter.step_done(done, rate)
            if evaluating:
                score, position = evaluate_run(run, position)
            if done == run.position.step + 1 or epoch_ends:
                run.task.objective.check()
            stopping = stop.seen(done) and done < plan.total
            if stop.alarm:
                guards.alarm(stop.alarm)
            if stopping and not logs:
                reporter.log_steps(done, rate)
            if saving or stopping or position.best_step == done:
                save(run, position, guards, must=stopping)
            if stopping:
                if run.manager is not None:
                    run.manager.wait()
                break
            beat(done)
            if done < plan.total:
                clock.data_begin()
                batch = next(batches)
                clock.data_end()
        stop.finish()
    enter(Phase.ENDING)
    guards.end()
    reporter.drain()
    return position, score


def evaluate_run(run: Run, position: Position) -> tuple[Score, Position]:
    """Scores the model, and its average, which then counts. Updates the best score."""
    run.reporter.drain()
    score, average = score_model(run)
    gather_bad_samples(run.sets.bad, run.world)
    _record_broken(run)
    counts = average or score
    nonfinite = max(score.nonfinite, counts.nonfinite)
    best = counts.accuracy > position.best_accuracy and not nonfinite and not _nonfinite_weights(run)
    if nonfinite:
        run.log(
            f"WARNING: the model's output is not finite for {nonfinite:,} of {counts.samples:,} samples: "
            f"the run has diverged. To prevent this, {advice(run.step.precision)}"
        )
    if best:
        position = replace(position, best_step=position.step, best_accuracy=counts.accuracy)
    run.reporter.evaluated(position.step, score, average, best)
    return counts, position


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
    run.reporter.pause(position.step)


def _save_sharded(run: Run, position: Position, whole: Groups, must: bool) -> None:
    """Every process writes its shards; rank 0 makes them a checkpoint."""
    temporary = run.world.broadcast_object(run.manager.begin_sharded(position, must) if run.manager else None)
    if temporary is None:
        return
    shards = run.strategy.shards(run.state.tensors())
    if run.manager is not None:
        run.manager.save_sharded(temporary, shards, run.world.size, position, whole)
    elif run.shard_writer is not None:
        run.shard_writer.save(temporary, shards, run.world.rank, run.world.size)


def report_broken(run: Run) -> None:
    """Logs which samples could not be read; `write_bad_samples` lists them all in the run folder."""
    gather_bad_samples(run.sets.bad, run.world)
    for message in describe_bad_samples(run.sets.bad):
        run.log(message)


def _record_broken(run: Run) -> None:
    if run.output is not None and run.output.begun:
        write_bad_samples(run.sets.bad, run.output.folder.path)


def export(run: Run, position: Position) -> None:
    """Plain weights of the last and of the best model (the averaged ones where there is an average)."""
    average = run.state.average
    last = run.state.tensors()["average" if average else "model"]
    last = run.strategy.gather({"last": last}).get("last", {})
    if run.folder is None or run.manager is None:
        return
    run.manager.wait()
    folder = run.folder.path / "weights"
    best = run.folder.checkpoints / f"step-{position.best_step}"
    try:
        lock.check(folder)
        folder.mkdir(exist_ok=True)
        record = record_of(run.manager.environment)
        export_tensors(last, folder / "last.safetensors", record)
        if best.exists():
            group = "average" if average else "model"
            manifest = verify_checkpoint(best)
            expected = manifest.files.get(f"{group}.safetensors")
            # A file of an earlier version has no record in it.
            if expected and (record_of(manifest.environment) or not record):
                write_file(
                    folder / "best.safetensors", partial(_copy, best / f"{group}.safetensors", expected)
                )
            elif group in manifest.groups:
                export_tensors(read_group(best, group), folder / "best.safetensors", record)
        write_checksums(folder)
        _remove_replaced(folder)
    except CorruptError as reason:
        run.log(f"WARNING: weights/best.safetensors is not written, its checkpoint does not verify: {reason}")
        write_checksums(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the weights below {folder}: {error.strerror or error}",
            "free space or repair the disk; the same command with --checkpoint.resume auto then writes them",
        ) from error


def _remove_replaced(weights: Path) -> None:
    """Deletes the weights of earlier stops, unless some were not written again: their checkpoint may be gone."""
    lock.check(weights)
    for aside in weights.parent.glob("weights*.aside"):
        if all((weights / file.name).exists() for file in aside.glob("*.safetensors")):
            shutil.rmtree(aside, ignore_errors=True)


def _closing_line(run: Run, result: TrainResult, stopped_by: str, seconds: float) -> str:
    """The last line of a run: what was reached, where it is, and what to do next."""
    found = result.metrics
    score = describe(found, run.metrics[:1]) or "not evaluated"
    if result.best_top1 is not None:
        score += f", best {result.best_top1:.2%} at epoch {result.best_epoch:g}"
    if extra := ", ".join(filter(None, [run.task.summary, describe(found, run.task.metrics)])):
        score += f"; {extra}"
    if result.finished:
        eval_command = f"; next: drumline eval {shlex.quote(result.run)}" if run.task.evaluates else ""
        took = duration(seconds)
        return f"{text_log.FINISHED}{score}, in {took}; weights in {result.run}/weights{eval_command}"
    resume = f"; to resume: {resume_command(run.recipe, Path(result.run))}" if run.task.evaluates else ""
    return (
        f"{text_log.STOPPED}{stopped_by or 'on request'} after step {result.step:,} of {run.plan.total:,}, {score}; "
        f"saved in {result.run}{resume}"
    )


def _record(run: Run, text: str) -> None:
    """For a signal handler: appends to log.txt directly."""
    if run.output is not None and run.output.begun:
        with suppress(Superseded, OSError):
            lock.check(run.output.folder.path)
            text_log.append_entry(run.output.folder.path, text)


def _record_failure(run: Run, kind: object, error: BaseException | None, trace: object) -> None:
    """Does nothing below our launcher, which records why its workers ended, whichever rank failed."""
    if error is not None and LAUNCHER not in os.environ:
        run.reporter.failed(error)


def _copy(source: Path, expected: dict[str, Any], target: Path) -> None:
    shutil.copyfile(source, target)
    verify_file(target, expected["bytes"], expected["sha256"])


def _result(run: Run, position: Position, score: Score | None) -> TrainResult:
    per_epoch, judged = run.plan.per_epoch, position.best_step >= 0
    return TrainResult(
        run=run.world.broadcast_object(str(run.folder.path) if run.folder else ""),
        finished=position.step == run.plan.total,
        step=position.step,
        epoch=round(position.step / per_epoch, 3),
        metrics=(score.result() if score else no_result(run.metrics)) | dict(run.task.facts),
        best_top1=position.best_accuracy if judged else None,
        best_epoch=round(position.best_step / per_epoch, 3) if judged else None,
        images_per_s=round(run.reporter.images_per_s, 1),
        broken_samples=sum(len(bad_samples.bad) for bad_samples in run.sets.bad),
    )

"""What a run writes in its folder, on rank 0: the log, checkpoints, and at the end the weights and the result.

Promises: a start that is rejected, crashes or is killed before its first step leaves the files of an earlier start as
they were. Exported weights come from checkpoints that verify, and replace those of an earlier stop only when they are
complete.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumline.config.recipe import Recipe
from drumline.config.toml import dump_recipe
from drumline.core import lock
from drumline.core.errors import UserError
from drumline.core.files import CorruptError, write_file
from drumline.core.lock import Superseded
from drumline.core.text import duration
from drumline.observe import text_log
from drumline.observe.display import Display
from drumline.observe.run_log import RunLog
from drumline.observe.trackers import RunFacts
from drumline.state.checkpoint import checkpoints, read_group, verify_checkpoint, write_checksums
from drumline.state.folder import UNSAVED, Opened, eval_command, repeatable, resume_command, write_facts
from drumline.state.manager import CheckpointManager, set_aside
from drumline.state.manifest import Position
from drumline.state.model_record import record_of
from drumline.state.tensors import Tensors, verify_file
from drumline.state.weights import export_tensors
from drumline.training.metrics import Metric, describe
from drumline.training.task import Task


class RunOutput:
    """The run folder, as rank 0 writes it. Nothing in the folder changes before `begin`."""

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
        path = folder.path
        # An initial phase of a distillation has a name only inside the run that it belongs to.
        name = f"{path.parent.name}/{path.name}" if path.name.startswith("initial-") else path.name
        facts = RunFacts(name, str(path), asdict(repeatable(recipe)))
        self.run_log = RunLog(path, display.log, recipe.run.trackers, facts)
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

    def begin(self) -> None:
        """Starts to write the folder. Any change may be the last one, so their order always leaves a folder that can
        be resumed: checkpoints beyond the position are set aside before the log of their steps is cut."""
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
            # If this run is killed, weights of an earlier stop would look like its own.
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

    def record(self, text: str) -> None:
        """Appends a line to log.txt directly. For a signal handler."""
        if self.begun:
            with suppress(Superseded, OSError):
                lock.check(self.folder.path)
                text_log.append_entry(self.folder.path, text)

    def export(self, last: Tensors, position: Position, group: str) -> None:
        """Writes plain weights of the last and of the best model. `group` is the group of a checkpoint that holds
        them: the averaged model if there is an average."""
        self.manager.wait()
        folder = self.folder.path / "weights"
        best = self.folder.checkpoints / f"step-{position.best_step}"
        record = record_of(self.environment)
        try:
            lock.check(folder)
            folder.mkdir(exist_ok=True)
            export_tensors(last, folder / "last.safetensors", record)
            if best.exists():
                self._export_best(best, folder / "best.safetensors", group)
            write_checksums(folder)
            _remove_replaced(folder)
        except CorruptError as reason:
            self.run_log.log(
                f"WARNING: weights/best.safetensors is not written, its checkpoint does not verify: {reason}"
            )
            write_checksums(folder)
        except OSError as error:
            raise UserError(
                f"cannot write the weights below {folder}: {error.strerror or error}",
                "free space or repair the disk; the same command with --checkpoint.resume auto then writes them",
            ) from error

    def _export_best(self, checkpoint: Path, target: Path, group: str) -> None:
        manifest, record = verify_checkpoint(checkpoint), record_of(self.environment)
        source = checkpoint / f"{group}.safetensors"
        expected = manifest.files.get(source.name)
        # A file of an earlier version has no record in it.
        if expected and (record_of(manifest.environment) or not record):
            write_file(target, partial(_copy, source, expected))
        elif group in manifest.groups:
            export_tensors(read_group(checkpoint, group), target, record)

    def _saved(self) -> None:
        """Called after each save: the run has a checkpoint now."""
        marker = self.folder.path / UNSAVED
        if marker.exists():
            lock.check(self.folder.path)
            marker.unlink(missing_ok=True)


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
    best_metric: str
    """`checkpoint.best`."""
    best_value: float | None
    best_top1: float | None
    """The best value, if the metric is top1."""
    best_epoch: float | None
    images_per_s: float
    broken_samples: int
    stopped_by: str = ""
    """The signal that stopped the run before its last step; empty if it finished."""
    stopped_early: str = ""
    """Why the run finished before its last step (`train.patience`); empty if it did not."""

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        result: dict[str, Any] = {}
        for name, value in vars(self).items():
            result |= value if name == "metrics" else {name: value}
        return result


def closing_line(
    result: TrainResult,
    recipe: Recipe,
    task: Task,
    metrics: Sequence[Metric],
    total: int,
    seconds: float,
    signal: str,
) -> str:
    """The last line of a run's log: what it reached, where the result is, and what to do next. `signal` is the one
    that this process received."""
    score = describe(result.metrics, metrics[:1]) or "not evaluated"
    if result.best_value is not None:
        metric = next(metric for metric in metrics if metric.name == result.best_metric)
        name = "" if metric is metrics[0] else f"{metric.label or metric.name} "
        score += f", best {name}{metric.text(result.best_value)} at epoch {result.best_epoch:g}"
    if extra := ", ".join(filter(None, [task.summary, describe(result.metrics, task.metrics)])):
        score += f"; {extra}"
    if result.finished:
        following = f"; next: {eval_command(recipe, result.run)}" if task.evaluates else ""
        took = duration(seconds)
        early = f"stopped early after epoch {result.epoch:.4g}: {result.stopped_early}; "
        return (
            f"{text_log.FINISHED}{early if result.stopped_early else ''}{score}, in {took}; "
            f"weights in {result.run}/weights{following}"
        )
    resume = f"; to resume: {resume_command(recipe, Path(result.run))}" if task.evaluates else ""
    return (
        f"{text_log.STOPPED}{signal or 'on request'} after step {result.step:,} of {total:,}, {score}; "
        f"saved in {result.run}{resume}"
    )


def _command(environment: dict[str, Any]) -> str:
    """The command line, and the versions and the process that run it."""
    program, *argv = environment["command"]
    typed = "drumline" if Path(program).name in ("drumline", "__main__.py") else program
    versions = [f"{name} {environment['packages'][name]}" for name in ("drumline", "torch")]
    return f"{shlex.join([typed, *argv])} ({', '.join(versions)}; process {os.getpid()} on {environment['host']})"


def _copy(source: Path, expected: dict[str, Any], target: Path) -> None:
    shutil.copyfile(source, target)
    verify_file(target, expected["bytes"], expected["sha256"])


def _remove_replaced(weights: Path) -> None:
    """Deletes the weights of earlier stops, unless some were not written again: their checkpoint may be gone."""
    lock.check(weights)
    for aside in weights.parent.glob("weights*.aside"):
        if all((weights / file.name).exists() for file in aside.glob("*.safetensors")):
            shutil.rmtree(aside, ignore_errors=True)

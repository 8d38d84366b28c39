"""Trackers, which receive the metrics of a run: TensorBoard, W&B, MLflow and trackio, behind one interface.

Promises: `TRACKERS` has all of them. TensorBoard writes its event file in the run folder, on the thread of the run
log. The others run in a process of their own (`tracker_process.py`) and are imported there. Each gets the recipe, the
same numbers under the same names, and how the run ended; a resumed run continues its tracker's run. A tracker that
fails is reported once and then switched off. Rejects a tracker that is not installed.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from drumline.core.errors import UserError
from drumline.core.files import append_to, write_text
from drumline.core.machine import host_name

RUN_ID = "tracker-id"
"""The file in a run folder that holds the id of the run in its trackers."""


@dataclass(frozen=True)
class RunFacts:
    """What a tracker receives about a run before its first numbers."""

    name: str
    folder: str
    recipe: Mapping[str, Mapping[str, Any]]
    """The values by section and key."""
    step: int | None = None
    """The step after which the log continues; None for a log that keeps all it has."""
    id: str = ""
    """Unique to this run, and the same whenever it is resumed. Empty for TensorBoard, which does not need it."""


class Tracker(Protocol):
    """Calls come in this order: `open`, `write` for each line of numbers, `finish`. Any may raise."""

    def open(self, run: RunFacts) -> str:
        """Returns where to see the run, for the log."""

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        """`state` is finished, stopped (and may be resumed) or failed; `summary` has the best score."""


class TensorBoard:
    """One event file in the run folder."""

    def open(self, run: RunFacts) -> str:
        """Opens an event file without TensorBoard's own thread and without a buffer: nothing may be written after
        another process has taken over the run folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{host_name()}.{os.getpid()}.0"
        self._writer = RecordWriter(append_to(Path(run.folder, name)))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if run.step is not None:
            # What SummaryWriter writes for its purge_step: hides the later events of earlier files.
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=now, step=run.step + 1, session_log=start)
            self._writer.write(event.SerializeToString())
        return ""

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        """Writes one event with all numbers: 8 of them take 88 us, and 596 us through SummaryWriter.add_scalar, with
        the interpreter lock held and the training loop waiting for it."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        event = self._event(wall_time=time_s, step=step, summary=self._summary(value=values))
        self._writer.write(event.SerializeToString())

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Its step is ours, so it ignores the steps that a killed run repeats after it is resumed."""

    def open(self, run: RunFacts) -> str:
        for name, value in {"PROJECT": "drumline", "NAME": run.name, "DIR": run.folder}.items():
            os.environ.setdefault(f"WANDB_{name}", value)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            id=run.id,
            resume="allow",
            config=dict(run.recipe),
            allow_val_change=True,
            # No command line, code or repository; its system metrics are those of the process that trains.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_stats_pid=os.getppid(),
            ),
        )
        if not self._run.offline:
            return str(self._run.url)
        folder = Path(self._run.dir).parent
        return f"offline; to upload it: wandb sync {folder}"

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "state": state})
        codes = {"finished": 0, "stopped": 255}  # 255: as W&B itself reports Ctrl-C
        self._run.finish(exit_code=codes.get(state, 1))


class MLflow:
    """MLflow, through its client: the fluent functions would set tags with the user, the command and the commit."""

    TAG = "drumline.id"
    PARAMETERS = 100
    """The most values that MLflow accepts at once."""
    LONGEST = 6000
    """The longest parameter that MLflow accepts, in characters."""

    def open(self, run: RunFacts) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # otherwise MLflow 3.17 refuses file: addresses
        from mlflow import get_tracking_uri
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "drumline")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {self.TAG: run.id}
            self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            values = [
                Param(f"{section}.{key}", str(value)[: self.LONGEST])
                for section, fields in run.recipe.items()
                for key, value in fields.items()
            ]
            for start in range(0, len(values), self.PARAMETERS):
                self._client.log_batch(self._id, params=values[start : start + self.PARAMETERS])
        return f"run {self._id} of experiment {name} in {get_tracking_uri()}"

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(name, value, int(time_s * 1000), step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=entries)

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        self.write(time.time(), 0, summary)
        self._client.set_tag(self._id, "drumline.state", state)
        self._client.set_terminated(
            self._id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED")
        )


class Trackio:
    """trackio, which knows runs by their names and has no states."""

    _step = 0

    def open(self, run: RunFacts) -> str:
        import trackio

        name = f"{run.name}-{run.id[:6]}"
        self._run = trackio.init("drumline", name, config=dict(run.recipe), resume="allow", embed=False)
        return f"run {name}; to see it: trackio show --project drumline"

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)
        self._step = step

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        if summary:
            self._run.log(dict(summary), step=self._step)
        self._run.finish()


TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By the name in `run.trackers`, which is also the name of the package."""


def check_installed(names: Sequence[str]) -> None:
    """Raises a `UserError` for a tracker that cannot be imported. A missing TensorBoard does not end a run."""
    missing = [name for name in names if name not in ("none", "tensorboard") and not _is_installed(name)]
    if missing:
        raise UserError(
            f"run.trackers = {','.join(names)}: {' and '.join(missing)} cannot be imported",
            f"pip install {' '.join(missing)}, or remove {'it' if len(missing) == 1 else 'them'} from run.trackers",
        )


def _is_installed(name: str) -> bool:
    # Not a folder `wandb` in the working directory, which would count as a package without code.
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def run_id(folder: Path) -> str:
    """The id of the run in this folder, from its file or new."""
    with suppress(OSError, ValueError):
        if re.fullmatch(r"[0-9a-f]{12}", known := (folder / RUN_ID).read_text().strip()):
            return known
    new = uuid.uuid4().hex[:12]
    write_text(folder / RUN_ID, f"{new}\n")
    return new

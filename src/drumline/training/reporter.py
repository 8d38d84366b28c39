"""Reports the progress of a run to its log and the display, without slowing it down.

Promises: a loss is the mean over the global batches since the previous line. Sums are read off the device late, in
order and completely, so that no step waits for them; the display has a loss from the first step on, about a second
old. The times of every rank are always measured, and written after some seconds, every half minute and with each
evaluation. log.txt has a line for every epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from traceback import format_exception
from typing import Any

from drumline.core.account import account
from drumline.core.errors import UserError
from drumline.core.host_copy import HostCopy
from drumline.core.text import loss_text
from drumline.data.feed.times import FeedTimes
from drumline.observe import text_log
from drumline.observe.clock import BatchEvents, StepClock, StepTimes
from drumline.observe.display import Display, Progress
from drumline.observe.run_log import RunLog
from drumline.observe.sampler import Sampler
from drumline.observe.windows import StepWindows
from drumline.parallel.world import World
from drumline.training.interval import IntervalTimes
from drumline.training.metrics import Metric, Score, describe
from drumline.training.schedule import Due
from drumline.training.task import Meter
from drumline.training.trend import Trend

DRAW_SECONDS = 0.2
PEEK_SECONDS = 1.0
"""Between two losses that are read for the display alone."""


class RunReporter:
    """The progress of one run, from all ranks to the log and the display of rank 0."""

    def __init__(
        self,
        run_log: RunLog,
        display: Display,
        meters: MeterReader,
        world: World,
        total: int,
        per_epoch: int,
        batch: int,
        terms: tuple[str, ...] = (),
        metrics: Sequence[Metric] = (),
        classes: int = 1000,
        trend: Trend | None = None,
        feed: FeedTimes | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        feed = feed or FeedTimes()
        self.metrics, self.classes, self.trend = metrics, classes, trend
        self.run_log, self.display, self.meters, self.world = run_log, display, meters, world
        self.total, self.per_epoch, self.batch, self.terms = total, per_epoch, batch, terms
        self.clock = StepClock(world.device)
        self.images_per_s = 0.0
        self._latest = Progress(0.0, total / per_epoch, 0, total, None, 0.0, 0.0, 0.0)
        self.step = 0
        """The number of finished steps."""
        self._drawn_at = perf_counter()
        self._next_peek = 0
        self._loss_sum, self._samples = 0.0, 0
        self._not_evaluated: set[int] = set()
        """Steps that end an epoch without an evaluation."""
        self._logged_at = (0, perf_counter())
        """The step and the time from which the speed on the display is measured."""
        self._requested: dict[int, tuple[StepTimes, float]] = {}
        self.interval = IntervalTimes(world, feed, sampler)
        self.windows = StepWindows(world.rank, {"host": account, "feed": feed.account})
        self.clock.batch_events = lambda: BatchEvents(feed.arrived, feed.ready)
        self._trained_s: list[tuple[int, float]] = []
        """Steps and seconds of the intervals since the last evaluation."""

    def begin(self, done: int, facts: Mapping[str, Any]) -> None:
        """Shows the bar. Called with the number of finished steps once the first batch is there, and with what the
        lines of times say about the run."""
        self.interval.facts = facts
        self.display.begin(self.total, done, self.total / self.per_epoch)
        self.clock.begin()
        self.interval.begin()
        self.windows.begin(done)
        self.pause(done)

    def step_done(self, done: int, rate: float, due: Due, seconds_per_step: float) -> None:
        """Called by all ranks after every step, with the same arguments. Logs the steps since the previous line if
        that is due, and moves the bar by what the host knows."""
        self.step = done
        self.windows.step_done(done)
        self._log_times()
        interval_due = not due.evaluation and self.interval.due(done, seconds_per_step)
        if due.log:
            self.log_steps(done, rate, not_evaluated=due.epoch_end and not due.evaluation)
        elif done >= self._next_peek:
            self.meters.peek(done)
            self._next_peek = done + (max(1, int(PEEK_SECONDS / seconds_per_step)) if seconds_per_step else 1)
        if interval_due:
            self._end_interval(done)
        now = perf_counter()
        if now - self._drawn_at < DRAW_SECONDS:
            return
        self._drawn_at = now
        since, at = self._logged_at
        speed = (done - since) * self.batch / (now - at) if done > since else self._latest.images_per_s
        seen = self.meters.peeked()
        if seen is not None and seen.samples and seen.step > self._latest.loss_step:
            self._latest = replace(self._latest, loss=seen.loss, loss_step=seen.step)
        self._show(done, rate, *self._pace(self.clock.so_far(), speed))

    def log_steps(self, done: int, rate: float, not_evaluated: bool = False) -> None:
        """Requests the numbers of the steps since the last call, and logs those that have arrived. `not_evaluated`:
        an epoch ends here without an evaluation, and log.txt gets a line for it once its loss is known."""
        times = self.clock.take()
        self._logged_at = (done, perf_counter())
        self.interval.add(times)
        self._requested[done] = (times, rate)
        if not_evaluated:
            self._not_evaluated.add(done)
        self.meters.request(done)
        self._log_readings(self.meters.ready())

    def drain(self) -> None:
        """Waits for the numbers that have not arrived, and logs them."""
        self._log_readings(self.meters.drain())

    def evaluated(self, done: int, score: Score, average: Score | None, best: bool, metric: str) -> None:
        """Logs an evaluation, whether it is the best one by this metric, and every rank's times since the previous
        one."""
        epoch = done / self.per_epoch
        averaged = {f"average_{name}": value for name, value in average.values.items()} if average else {}
        self.run_log.metric(
            "eval",
            step=done,
            epoch=epoch,
            **score.values,
            **score.counts,
            samples=score.samples,
            best=best,
            best_metric=metric,
            **averaged,
        )
        measured = describe(score.result(), self.metrics, self.classes, epoch=True)
        line = f"epoch {epoch:.4g}: {self._trained()}{measured}"
        if average:
            line += f", averaged weights {average.accuracy:.2%}"
        line += " (best)" if best else ""
        self.display.result(line)
        self.run_log.log(line, show=False)
        if self.trend and (warning := self.trend.accuracy(done, score.correct, score.samples)):
            self.run_log.log(warning)
        self.stopped(done)
        self.windows.begin(done)
        self.pause(done)

    def pause(self, done: int) -> None:
        """After an evaluation or a save, which the speed leaves out."""
        self.clock.resume()
        self._logged_at = (done, perf_counter())

    def failed(self, error: BaseException) -> None:
        """Writes the last line of a log whose run ends with an error."""
        text = str(error) if isinstance(error, UserError) else "".join(format_exception(error)).rstrip()
        self.run_log.log(f"{text_log.FAILED}after step {self.step:,}: {text}", show=False)

    def _trained(self) -> str:
        """The mean loss of training since the previous epoch."""
        loss, samples = self._loss_sum, self._samples
        self._loss_sum, self._samples = 0.0, 0
        return f"loss {loss_text(loss / samples)}, " if samples else ""

    def _show(self, done: int, rate: float, images_per_s: float, data_share: float) -> None:
        lag = (done - self._latest.loss_step) * self.batch / max(images_per_s, 1e-9)
        self._latest = replace(
            self._latest,
            step=done,
            epoch=done / self.per_epoch,
            images_per_s=images_per_s,
            data_share=data_share,
            lr=rate,
            loss_lag_s=lag,
        )
        self.display.step(self._latest)

    def stopped(self, done: int) -> None:
        """Logs the times since the last evaluation, at the next one or at the end."""
        self._end_interval(done, wait=True)
        self._log_window()

    def _end_interval(self, done: int, wait: bool = False) -> None:
        """Requests the times since the last interval. An evaluation waits for them, and the speed of the run is that
        since the one before."""
        self._log_times(wait=True)
        self.interval.add(self.clock.take())
        self.interval.request(done)
        self._log_times(wait)
        if wait and self._trained_s:
            steps, seconds = map(sum, zip(*self._trained_s, strict=True))
            self.images_per_s = self.batch * steps / max(seconds, 1e-9)
            self._trained_s = []

    def _log_window(self) -> None:
        """Every rank has a window of the same steps, or none has."""
        window = self.windows.take()
        if window:
            self.run_log.trace(self.world.all_gather_object(window))

    def _log_times(self, wait: bool = False) -> None:
        arrived = self.interval.arrived(wait)
        if arrived is None:
            return
        step, measured = arrived
        step_s = max(measured["step_ms"]) / 1e3
        self._trained_s.append((measured["steps"], measured["steps"] * step_s))
        images_per_s = self.batch / max(1e-9, step_s)
        epoch = step / self.per_epoch
        self.run_log.metric("times", step=step, epoch=epoch, **measured, images_per_s=images_per_s)

    def _pace(self, times: StepTimes, images_per_s: float) -> tuple[float, float]:
        """Images per second, and the share of the time that the device waits for data. The host may be ahead of a
        GPU, so its own speed is not the run's."""
        device_s = times.data_s + times.compute_s + times.late_s
        if self.world.device.type == "cuda" and device_s > 0:
            images_per_s = times.steps * self.batch / device_s
        return images_per_s, times.data_s / device_s if device_s > 0 else 0.0

    def _log_readings(self, readings: list[Reading]) -> None:
        for reading in readings:
            times, rate = self._requested.pop(reading.step)
            images_per_s, data_share = self._pace(times, times.steps * self.batch / max(times.step_s, 1e-9))
            epoch = reading.step / self.per_epoch
            terms = zip(self.terms, reading.terms, strict=True)
            self.run_log.metric(
                "train",
                step=reading.step,
                epoch=epoch,
                loss=reading.loss,
                top1=reading.accuracy,
                lr=rate,
                images_per_s=images_per_s,
                data_share=data_share,
                **{name: total / max(1, reading.samples) for name, total in terms},
            )
            if self.trend and (warning := self.trend.loss(reading.step, reading.loss)):
                self.run_log.log(warning)
            self._loss_sum += reading.loss_sum
            self._samples += reading.samples
            if reading.step in self._not_evaluated:
                self._not_evaluated.remove(reading.step)
                self.run_log.log(f"epoch {epoch:.4g}: {self._trained()}not evaluated", show=False)
            self._latest = replace(self._latest, loss=reading.loss, loss_step=reading.step)
            self._show(reading.step, rate, images_per_s, data_share)


@dataclass(frozen=True)
class Reading:
    """Sums over the whole world since the previous reading."""

    step: int
    loss_sum: float
    correct: int
    samples: int
    terms: tuple[float, ...] = ()
    """Sums of the objective's own terms."""
    unlabelled: int = 0
    """Samples without a label, which are not counted in `accuracy`."""

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.samples - self.unlabelled)


class MeterReader:
    """Reads a step's meter from time to time. A reading arrives once the device has passed the point of the request,
    and in order."""

    def __init__(self, meter: Meter, world: World) -> None:
        self.meter, self.world = meter, world
        self._requested: deque[tuple[int, HostCopy]] = deque()
        self._peeks: deque[tuple[int, HostCopy]] = deque()

    def request(self, step: int) -> None:
        """Adds the meter up over the ranks, starts its copy to the host and sets it to zero."""
        self._requested.append((step, self._copy()))
        self.meter.sums.zero_()

    def peek(self, step: int) -> None:
        """Starts a copy of the sums so far and leaves the meter as it is. Every rank calls it at the same step."""
        self._peeks.append((step, self._copy()))

    def peeked(self) -> Reading | None:
        """The newest peek that has arrived since the last call. Never waits."""
        arrived = _arrived(self._peeks)
        return arrived[-1] if arrived else None

    def ready(self) -> list[Reading]:
        """The readings that have arrived, oldest first. Never waits."""
        return _arrived(self._requested)

    def drain(self) -> list[Reading]:
        """All readings that were requested. Waits for them."""
        return [_reading(*self._requested.popleft()) for _ in range(len(self._requested))]

    def _copy(self) -> HostCopy:
        return HostCopy(self.world.all_reduce(self.meter.sums.clone()))


def _arrived(copies: deque[tuple[int, HostCopy]]) -> list[Reading]:
    arrived = []
    while copies and copies[0][1].done:
        arrived.append(_reading(*copies.popleft()))
    return arrived


def _reading(step: int, copy: HostCopy) -> Reading:
    loss, correct, samples, unlabelled, *terms = copy.values().tolist()
    return Reading(step, loss, int(correct), int(samples), tuple(terms), int(unlabelled))

"""Reports the progress of a run to its log and the display, without slowing it down.

Promises: loss is the mean over the global batch since the line before; per-rank data, compute and step times
are measured always and written once per evaluation; numbers arrive late rather than stop the device. The display has
a loss from the first step on, about a second old. log.txt has a line for every epoch.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from traceback import format_exception

from drumline.core.errors import UserError
from drumline.core.text import loss_text
from drumline.observe import text_log
from drumline.observe.clock import StepClock, Times
from drumline.observe.display import Display, Progress
from drumline.observe.run_log import RunLog
from drumline.parallel.world import World
from drumline.training.evaluate import Score
from drumline.training.meter import MeterReader, Reading

DRAW_SECONDS = 0.2
GLANCE_SECONDS = 1.0
"""Between two losses that are read for the display alone."""


class Reporter:
    """Everything said between two steps goes through here."""

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
        classes: int = 1000,
    ) -> None:
        self.classes = classes
        self.run_log, self.display, self.meters, self.world = run_log, display, meters, world
        self.total, self.per_epoch, self.batch, self.terms = total, per_epoch, batch, terms
        self.clock = StepClock(world.device)
        self.images_per_s = 0.0
        self._latest = Progress(
            epoch=0.0,
            epochs=total / per_epoch,
            step=0,
            steps=total,
            loss=None,
            images_per_s=0.0,
            data_share=0.0,
            lr=0.0,
        )
        self.step = 0
        """Steps done, for what is said when the run ends early."""
        self._drawn_at = perf_counter()
        self._glance_at = 0
        self._loss_sum, self._samples = 0.0, 0
        self._unscored: set[int] = set()
        self._tick_at = (0, perf_counter())
        self._asked: dict[int, tuple[Times, float]] = {}
        self._since_evaluation: list[Times] = []

    def moved(self, done: int, rate: float) -> None:
        """Moves the bar between two ticks, from what the host knows. Every step calls this."""
        self.step = done
        now = perf_counter()
        if now - self._drawn_at < DRAW_SECONDS:
            return
        self._drawn_at = now
        since, at = self._tick_at
        speed = (done - since) * self.batch / (now - at) if done > since else self._latest.images_per_s
        seen = self.meters.glanced()
        if seen is not None and seen.samples and seen.step > self._latest.loss_step:
            self._latest = replace(self._latest, loss=seen.loss, loss_step=seen.step)
        self._show(done, rate, speed, self.clock.data_share())

    def glance(self, done: int, seconds_per_step: float) -> None:
        """Asks for the loss so far, for the display, about once a second. All ranks call it after every step that
        has no tick, with the same arguments."""
        if done >= self._glance_at:
            self.meters.glance(done)
            self._glance_at = done + (
                max(1, int(GLANCE_SECONDS / seconds_per_step)) if seconds_per_step else 1
            )

    def tick(self, done: int, rate: float, unscored: bool = False) -> None:
        """Asks for the numbers up to here and passes on those that have arrived. `unscored`: an epoch ends here
        without an evaluation, and log.txt gets a line for it as soon as its loss is known."""
        times = self.clock.take()
        self._tick_at = (done, perf_counter())
        self._since_evaluation.append(times)
        self._asked[done] = (times, rate)
        if unscored:
            self._unscored.add(done)
        self.meters.request(done)
        self._pass_on(self.meters.ready())

    def drain(self) -> None:
        """Passes on all that is still on its way."""
        self._pass_on(self.meters.drain())

    def evaluated(self, done: int, score: Score, average: Score | None, best: bool) -> None:
        """One evaluation, and every rank's times since the one before."""
        epoch = done / self.per_epoch
        extra = {"average_top1": average.accuracy, "average_loss": average.loss} if average else {}
        agreement = (average or score).agreement
        if agreement is not None:
            extra["agreement"] = agreement
        self.run_log.metric(
            "eval",
            step=done,
            epoch=epoch,
            top1=score.accuracy,
            top5=score.accuracy5,
            loss=score.loss,
            correct=score.top1,
            samples=score.samples,
            **extra,
        )
        line = (
            f"epoch {epoch:.4g}: {self._trained()}top-1 {score.accuracy:.2%}, "
            + (f"top-5 {score.accuracy5:.2%}, " if self.classes > 5 else "")
            + f"evaluation loss {loss_text(score.loss)}"
        )
        if average:
            line += f", averaged weights {average.accuracy:.2%}"
        if agreement is not None:
            line += f", agreement {agreement:.2%}"
        line += " (best)" if best else ""
        self.display.result(line)
        self.run_log.log(line, show=False)
        self._write_times(done)
        self.pause(done)

    def pause(self, done: int) -> None:
        """Leaves what was not training (an evaluation, a save) out of the times."""
        self.clock.take()
        self._tick_at = (done, perf_counter())

    def failed(self, error: BaseException) -> None:
        """The last line of a log whose run ends with an error."""
        text = str(error) if isinstance(error, UserError) else "".join(format_exception(error)).rstrip()
        self.run_log.log(f"{text_log.FAILED}after step {self.step:,}: {text}", show=False)

    def _trained(self) -> str:
        """The mean loss of training since the epoch before."""
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

    def _write_times(self, done: int) -> None:
        steps = sum(times.steps for times in self._since_evaluation)
        if not steps:
            return
        sums = [
            sum(getattr(times, name) for times in self._since_evaluation)
            for name in ("data_s", "compute_s", "wall_s")
        ]
        self._since_evaluation.clear()
        ranks = self.world.all_gather_floats([1e3 * value / steps for value in sums])
        data, compute, wall = (list(column) for column in zip(*ranks, strict=True))
        self.images_per_s = self.batch / max(1e-9, max(wall) / 1e3)
        self.run_log.metric(
            "times",
            step=done,
            epoch=done / self.per_epoch,
            steps=steps,
            data_ms=data,
            compute_ms=compute,
            step_ms=wall,
            images_per_s=self.images_per_s,
        )

    def _pass_on(self, readings: list[Reading]) -> None:
        for reading in readings:
            times, rate = self._asked.pop(reading.step)
            wall = max(times.wall_s, 1e-9)
            images_per_s = times.steps * self.batch / wall
            epoch = reading.step / self.per_epoch
            self.run_log.metric(
                "train",
                step=reading.step,
                epoch=epoch,
                loss=reading.loss,
                top1=reading.accuracy,
                lr=rate,
                images_per_s=images_per_s,
                data_share=times.data_s / wall,
                **{
                    name: total / max(1, reading.samples)
                    for name, total in zip(self.terms, reading.terms, strict=True)
                },
            )
            self._loss_sum += reading.loss_sum
            self._samples += reading.samples
            if reading.step in self._unscored:
                self._unscored.remove(reading.step)
                line = f"epoch {epoch:.4g}: {self._trained()}not evaluated"
                self.run_log.log(line, show=False)
            self._latest = replace(self._latest, loss=reading.loss, loss_step=reading.step)
            self._show(reading.step, rate, images_per_s, times.data_s / wall)

"""Tells the logbook and the display how a run is going, without holding it up.

Promises: loss is the mean over the global batch since the line before; per-rank data, compute and step times
are measured always and written once per evaluation; numbers arrive late rather than stop the device.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from drumline.launch.world import World
from drumline.observe.clock import StepClock, Times
from drumline.observe.display import Display, Progress
from drumline.observe.logbook import Logbook
from drumline.train.evaluate import Score
from drumline.train.meter import MeterReader, Reading

DRAW_SECONDS = 0.2


class Reporter:
    """Everything said between two steps goes through here."""

    def __init__(
        self,
        logbook: Logbook,
        display: Display,
        meters: MeterReader,
        world: World,
        total: int,
        per_epoch: int,
        batch: int,
        terms: tuple[str, ...] = (),
    ) -> None:
        self.logbook, self.display, self.meters, self.world = logbook, display, meters, world
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
        self._drawn_at = perf_counter()
        self._tick_at = (0, perf_counter())
        self._asked: dict[int, tuple[Times, float]] = {}
        self._since_evaluation: list[Times] = []

    def moved(self, done: int, rate: float) -> None:
        """Moves the bar between two ticks, from what the host knows. Every step calls this."""
        now = perf_counter()
        if now - self._drawn_at < DRAW_SECONDS:
            return
        self._drawn_at = now
        since, at = self._tick_at
        self._latest = replace(
            self._latest,
            step=done,
            epoch=done / self.per_epoch,
            images_per_s=(done - since) * self.batch / (now - at)
            if done > since
            else self._latest.images_per_s,
            data_share=self.clock.data_share(),
            lr=rate,
        )
        self.display.step(self._latest)

    def tick(self, done: int, rate: float) -> None:
        """Asks for the numbers up to here and passes on those that have arrived."""
        times = self.clock.take()
        self._tick_at = (done, perf_counter())
        self._since_evaluation.append(times)
        self._asked[done] = (times, rate)
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
        self.logbook.metric(
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
        words = f"epoch {epoch:.4g}: top-1 {score.accuracy:.2%}, top-5 {score.accuracy5:.2%}, loss {score.loss:.4f}"
        if average:
            words += f", averaged weights {average.accuracy:.2%}"
        if agreement is not None:
            words += f", agreement {agreement:.2%}"
        self.display.result(words + (" (best)" if best else ""))
        self._write_times(done)
        self.pause(done)

    def pause(self, done: int) -> None:
        """Leaves what was not training (an evaluation, a save) out of the times."""
        self.clock.take()
        self._tick_at = (done, perf_counter())

    def _write_times(self, done: int) -> None:
        steps = sum(times.steps for times in self._since_evaluation)
        if not steps:
            return
        sums = [
            sum(getattr(times, name) for times in self._since_evaluation)
            for name in ("data_s", "compute_s", "wall_s")
        ]
        self._since_evaluation.clear()
        ranks = self.world.gather([1e3 * value / steps for value in sums])
        data, compute, wall = (list(column) for column in zip(*ranks, strict=True))
        self.images_per_s = self.batch / max(1e-9, max(wall) / 1e3)
        self.logbook.metric(
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
            self.logbook.metric(
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
            self._latest = replace(
                self._latest,
                epoch=epoch,
                step=reading.step,
                loss=reading.loss,
                images_per_s=images_per_s,
                data_share=times.data_s / wall,
                lr=rate,
            )
            self.display.step(self._latest)

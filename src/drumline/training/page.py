"""Records the data of a run's report, and writes the report: in the background during training, and at the end.

Promises: the loop waits for it only to collect the predictions of a new best evaluation from all processes. The
thread works for at most a hundredth of the time. Nothing that fails here ends a run: it is one warning.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.core import lock
from drumline.core.files import write_text
from drumline.data.feed.batch import Batch, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.sources import EncodedDataset
from drumline.data.sources.base import NO_LABEL
from drumline.parallel.world import World
from drumline.report.record import (
    BATCH,
    FACTS,
    FOLDER,
    MISTAKES,
    Evaluation,
    Sheet,
    Tile,
    make_sheet,
    write_evaluation,
    write_sheet,
)
from drumline.report.scores import NO_CLASS
from drumline.report.units import FIXED_POINT
from drumline.training.predictions import Predictions
from drumline.training.sets import Sets
from drumline.training.task import mixed

PICTURES = 24
SHARE = 0.01
"""The part of a run's time that pages may take."""
EXPECTED_S = 0.2
"""What the first page is expected to take: a run of less than 100 times this has one page, at its end."""
WAIT_S = 30.0
"""How long the end of a run waits for a page that is being written to a disk that hangs."""


@dataclass
class RunPage:
    """The page of one run. Every rank has one; that of rank 0 writes into `folder`."""

    folder: Path | None
    sets: Sets
    world: World
    seed: int
    teacher: torch.Tensor | None
    """What `Task.teacher_predictions` says."""
    log: Callable[[str], None]
    begun: Callable[[], bool]
    """Whether the run may write into its folder."""
    facts: dict[str, Any]
    """What the page says about the model and the data."""
    _best: Evaluation | None = None
    """The newest best evaluation of this process."""
    _written: Evaluation | None = None
    """That of which the folder has the predictions."""
    _sheet: Sheet | None = None
    """The pictures of the first batch, until they are written."""
    _thread: threading.Thread | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _news: threading.Event = field(default_factory=threading.Event)
    _facts_due: bool = True
    _failure: Exception | None = None
    """The first one. The thread leaves its report to the loop: the log may be closed meanwhile."""
    _reported: bool = False

    def first_batch(self, batch: Batch, step: int) -> None:
        """Takes pictures of this process's first batch, as the model sees them. Waits for the device."""
        if self.folder is None:
            return
        try:
            self._sheet = batch_sheet(batch, self.sets, step, PICTURES)
        except Exception as error:
            self._failure = error

    def recording(self) -> Predictions:
        """Collects the predictions of an evaluation."""
        return Predictions(len(self.sets.eval), self.world.device)

    def evaluated(self, step: int, seen: Predictions, best: bool) -> None:
        """After each evaluation; every rank calls it."""
        if best:
            predictions, probabilities = seen.gather(self.world)
            teacher = None
            if self.teacher is not None:
                teacher = (self.world.all_reduce(self.teacher + 1).cpu() - 1).numpy()
            if self.folder is not None:
                self._best = Evaluation(step, self.sets.eval.labels, predictions, probabilities, teacher)
        self._report()
        self._news.set()
        if self.folder is not None and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="page", daemon=True)
            self._thread.start()

    def close(self, log: Callable[[str], None]) -> None:
        """Writes the last page. Called once the log of the run is complete; `log` is for a warning after that."""
        self._closing.set()
        self.log = log
        if self._thread is not None:
            self._thread.join(WAIT_S)
        if self._thread is not None and self._thread.is_alive():
            self._failure = self._failure or TimeoutError(f"not written within {WAIT_S:.0f} s")
        else:
            self._write()
        self._report()

    def _work(self) -> None:
        pause = EXPECTED_S / SHARE
        while not self._closing.wait(pause):
            if not self._news.is_set():
                continue
            self._news.clear()
            began = time.perf_counter()
            self._write()
            pause = max(pause, (time.perf_counter() - began) / SHARE)

    def _write(self) -> None:
        """Writes what is new, then the page. What fails is tried again the next time."""
        if self.folder is None or not self.begun():
            return
        try:
            from drumline.report.page import write_page

            lock.check(self.folder)
            folder = self.folder / FOLDER
            if self._facts_due:
                folder.mkdir(exist_ok=True)
                write_text(folder / FACTS, json.dumps(self.facts), durable=False)
                self._facts_due = False
            if (sheet := self._sheet) is not None:
                write_sheet(folder / BATCH, sheet)
                self._sheet = None
            if (evaluation := self._best) is not None and evaluation is not self._written:
                write_evaluation(folder, evaluation)
                mistakes = mistakes_sheet(evaluation, self.sets, self.seed, PICTURES)
                if mistakes is None:
                    (folder / MISTAKES).unlink(missing_ok=True)
                else:
                    write_sheet(folder / MISTAKES, mistakes)
                self._written = evaluation
            write_page(self.folder)
        except Exception as error:
            self._failure = self._failure or error

    def _report(self) -> None:
        """Reports the first failure, once."""
        if (error := self._failure) is not None and not self._reported:
            self._reported = True
            self.log(
                f"WARNING: the report of this run is not written ({type(error).__name__}: {error}); "
                "the run itself is not affected"
            )


def batch_sheet(batch: Batch, sets: Sets, step: int, most: int) -> Sheet:
    """The first images of a batch, augmented and mixed."""
    images, mix = batch.images[:most], batch.mix[:most]
    if mix.shape[1]:
        planes = mixed(images.permute(0, 3, 1, 2).float(), mix)
        images = planes.round().clamp(0, 255).byte().permute(0, 2, 3, 1)
    names = sets.train.classes
    labels = [names[label] if label != NO_LABEL else "no label" for label in batch.labels[:most].tolist()]
    shares = mix[:, 1].tolist() if mix.shape[1] else [1.0] * len(labels)
    captions = []
    for number, (label, share) in enumerate(zip(labels, shares, strict=True)):
        alone = share == 1 or number ^ 1 >= len(labels)
        captions.append(label if alone else f"{share:.0%} {label}, {1 - share:.0%} {labels[number ^ 1]}")
    return make_sheet(images.cpu().numpy(), tuple(map(Tile, captions)), step)


def mistakes_sheet(evaluation: Evaluation, sets: Sets, seed: int, most: int) -> Sheet | None:
    """The wrong predictions with the highest probability; None if all are right."""
    wrong = np.flatnonzero(
        (evaluation.labels != evaluation.predictions) & (evaluation.predictions != NO_CLASS)
    )
    worst = wrong[np.argsort(-evaluation.probabilities[wrong], kind="stable")[:most]]
    if not len(worst):
        return None
    request = Request(0, worst.astype(np.int64))
    made = make_batch(sets.eval, sets.transform.for_evaluation(), seed, request)
    names = (*sets.eval.classes,)

    def name(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    files = sets.eval.sample_names(worst) if isinstance(sets.eval, EncodedDataset) else [""] * len(worst)
    tiles = tuple(
        Tile(
            name(int(evaluation.labels[sample])),
            name(int(evaluation.predictions[sample])),
            int(evaluation.probabilities[sample]) / FIXED_POINT,
            file or f"sample {sample:,}",
        )
        for sample, file in zip(worst.tolist(), files, strict=True)
    )
    return make_sheet(made.batch.images.numpy(), tiles, evaluation.step)

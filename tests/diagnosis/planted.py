"""Runs with a planted problem, the code by which `why` must name it, and healthy runs. Used by the tests and by
`benchmarks/why_recall.py`.

Some evidence is made idle (`idle`) before it is judged: the machines that run tests are busy with other programs, and
then the cores, and not the workers, would be the limit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.diagnosis.evidence import Evidence, read_evidence
from drumline.diagnosis.rules import diagnose
from drumline.diagnosis.slowdown import Slowdown
from tests.diagnosis import slow_code

BUSY = "machine-busy"
"""True on most machines that run tests, and no fault of a run."""


SHORT_EPOCHS = ("evaluation", "checkpoint")
"""True of many of these runs, whose epochs take a part of a second."""


@dataclass(frozen=True)
class Case:
    """A short run."""

    name: str
    args: tuple[str, ...]
    code: str = ""
    """That of its problem; empty for a healthy run."""
    also: tuple[str, ...] = ()
    """Codes that are true of it, too."""
    mentions: str = ""
    """What the sentence must name."""

    @property
    def allowed(self) -> tuple[str, ...]:
        return (self.code, *self.also, BUSY, *(SHORT_EPOCHS if self.code else ()))


DIGITS = ("data.source=digits", "parallel.threads=1", "data.batch=48", "model.name=resnet8", "train.steps=87")
"""3 epochs of 29 steps."""
SMALL = (
    *("data.source=digits", "parallel.threads=1", "data.batch=96", "model.name=slow_code:small"),
    *("train.epochs=9", "optim.lr=0.01", "checkpoint.every_epochs=0"),
)
"""9 epochs of 14 steps, each of a few milliseconds."""
FILES = (
    *("parallel.threads=1", "data.size=32", "data.batch=16", "data.pool=threads", "data.workers=2"),
    *("model.name=slow_code:small", "optim.lr=0.01", "train.epochs=3", "data.path=none"),
    "checkpoint.every_epochs=0",
)
"""3 epochs of 20 steps, from JPEG files."""
TWO = ("parallel.processes=2",)

PLANTED = (
    Case("slow disk", (*FILES, "data.source=slow_code:slow_files"), "disk"),
    Case(
        "slow decode",
        (*FILES, "data.source=slow_code:large_files", "train.epochs=4"),
        "decode",
        also=("evaluation",),
    ),
    Case(
        "too few workers",
        (*FILES, "data.source=slow_code:large_files", "data.workers=1", "train.epochs=4"),
        "workers",
        also=("evaluation",),
    ),
    Case(
        "slow transform", (*SMALL, "train.epochs=2", "data.transform=slow_code:slow_transform"), "transform"
    ),
    Case("too many threads", (*DIGITS, "train.steps=6", "parallel.threads=16"), "threads"),
    Case(
        "one slow rank",
        (*SMALL, *TWO, "train.epochs=4", "train.loss=slow_code:slow_on_rank_1"),
        "slow-rank",
        mentions="rank 1",
    ),
    Case(
        "logging on rank 0",
        (*SMALL, *TWO, "train.epochs=4", "train.loss=slow_code:logging_on_rank_0"),
        "rank-0",
        mentions="_send",
    ),
    Case(
        "a hook that waits",
        (*SMALL, "train.epochs=4", "train.loss=slow_code:sleeping_loss"),
        "stall",
        mentions="sleeping_loss",
    ),
    Case("guards at each step", (*SMALL, "train.epochs=5", "guard.every=1"), "guards"),
    Case("growing memory", (*SMALL, "train.loss=slow_code:keeping_loss"), "memory"),
    Case("open files", (*SMALL, "train.loss=slow_code:opening_loss"), "descriptors"),
    Case("throughput decay", (*SMALL, "train.loss=slow_code:ageing_loss"), "decay", mentions="forward"),
    Case(
        "exposed exchange",
        (*SMALL, *TWO, "model.name=slow_code:wide", "train.epochs=4", "data.batch=32"),
        "exchange",
    ),
    Case(
        "tiny batch",
        (*DIGITS, "data.batch=2", "train.steps=200", "train.eval_every=0.1"),
        "small-batch",
        also=("evaluation",),
    ),
    Case("evaluation-heavy", (*DIGITS, "train.eval_every=0.04"), "evaluation"),
    Case("checkpoint-heavy", (*DIGITS, "checkpoint.every_steps=1"), "checkpoint", also=("guards",)),
    Case(
        "cold first epoch",
        (*FILES, "data.source=slow_code:cold_files", "train.epochs=4"),
        "cold-start",
        also=("feed",),
    ),
)

HELD_OUT = (
    Case("slow disk, uneven", (*FILES, "data.source=slow_code:slower_files", "data.workers=1"), "disk"),
    Case(
        "slow decode, larger",
        (*FILES, "data.source=slow_code:larger_files", "train.epochs=6"),
        "decode",
        ("evaluation",),
    ),
    Case(
        "one worker, larger",
        (*FILES, "data.source=slow_code:larger_files", "data.workers=1", "train.epochs=6"),
        "workers",
        ("evaluation",),
    ),
    Case(
        "busy transform", (*DIGITS, "train.steps=58", "data.transform=slow_code:busy_transform"), "transform"
    ),
    Case(
        "transform of files",
        (*FILES, "data.source=slow_code:files", "data.workers=1", "data.transform=slow_code:slow_transform"),
        "transform",
    ),
    Case(
        "threads and processes",
        (*DIGITS, *TWO, "train.steps=6", "parallel.threads=8"),
        "threads",
        ("exchange",),
    ),
    Case(
        "slow rank, larger model",
        (*DIGITS, *TWO, "train.loss=slow_code:slow_on_rank_1"),
        "slow-rank",
        (),
        "rank 1",
    ),
    Case(
        "rank 0, larger model",
        (*DIGITS, *TWO, "train.loss=slow_code:logging_on_rank_0"),
        "rank-0",
        (),
        "_send",
    ),
    Case("hook writes files", (*DIGITS, "train.loss=slow_code:writing_loss"), "stall", (), "writing_loss"),
    Case("kept losses", (*SMALL, "train.loss=slow_code:keeping_graphs"), "memory"),
    Case(
        "open files, two processes",
        (*SMALL, *TWO, "train.loss=slow_code:opening_loss"),
        "descriptors",
        ("exchange",),
    ),
    Case("decay, larger model", (*SMALL, "model.name=resnet8", "train.loss=slow_code:ageing_loss"), "decay"),
    Case(
        "exchange, wider",
        (*SMALL, *TWO, "model.name=slow_code:wider", "train.steps=60", "data.batch=16"),
        "exchange",
        ("small-batch",),
    ),
    Case(
        "batch of 1",
        (*SMALL, "data.batch=1", "train.epochs=1", "train.steps=300", "train.eval_every=0.1"),
        "small-batch",
        ("logging", "evaluation"),
    ),
    Case(
        "evaluation, larger model",
        (*DIGITS, "model.name=resnet20", "train.steps=29", "train.eval_every=0.14"),
        "evaluation",
    ),
    Case(
        "saves, every 2 steps",
        (*DIGITS, "model.name=resnet20", "train.steps=40", "checkpoint.every_steps=2"),
        "checkpoint",
        ("guards",),
    ),
    Case("guards, larger model", (*DIGITS, "guard.every=1"), "guards"),
    Case(
        "cold, one worker",
        (*FILES, "data.source=slow_code:cold_files", "data.workers=1"),
        "cold-start",
        ("feed",),
    ),
)
"""Variants: other sizes, models and workers, written after the rules."""

HEALTHY = (
    Case("digits", DIGITS),
    Case("digits, 9 epochs", (*SMALL, "model.name=resnet8")),
    Case("batch of 192", (*DIGITS, "data.batch=192", "train.steps=21")),
    Case(
        "own loss and transform",
        (*DIGITS, "train.loss=slow_code:plain_loss", "data.transform=slow_code:bright"),
    ),
    Case("JPEG files", (*FILES, "data.source=slow_code:files", "model.name=slow_code:convolutions")),
    Case("two processes", (*DIGITS, *TWO, "model.name=resnet20", "data.batch=192", "train.steps=21")),
)
HEALTHY_HELD_OUT = (
    Case("strict mode", (*DIGITS, "run.strict=true", "train.steps=58")),
    Case(
        "JPEG files, one worker",
        (
            *FILES,
            "data.source=slow_code:files",
            "data.workers=1",
            "data.batch=32",
            "model.name=slow_code:convolutions",
        ),
    ),
    Case("AdamW", (*DIGITS, "optim.name=adamw", "optim.lr=0.001")),
    Case("moving average", (*DIGITS, "train.ema=0.99", "model.name=resnet20", "train.steps=58")),
    Case("mixup and erasing", (*DIGITS, "data.mixup=0.2", "data.erasing=0.3", "model.name=resnet20")),
    Case("two processes, resnet8", (*DIGITS, *TWO, "data.batch=384", "train.epochs=9", "train.steps=0")),
)


def run_case(case: Case, folder: Path, run: Callable[..., object]) -> Evidence:
    """Trains it below `folder`, by `run(*arguments, folder=...)`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(slow_code.__file__, folder)
    run("train", *case.args, "run.name=case", folder=folder)
    return read_evidence(folder / "runs/case")


def judge(case: Case, evidence: Evidence) -> list[Slowdown]:
    """What `why` finds. A healthy run is judged as it is."""
    return diagnose(idle(evidence) if case.code else evidence)


def idle(evidence: Evidence) -> Evidence:
    """As if no other program had used the cores."""

    def alone(values: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        own = values.get("own_cores", (0.0,))
        return values | {"busy_cores": (sum(own),) * len(own)}

    intervals = [replace(each, values=alone(dict(each.values))) for each in evidence.intervals]
    return replace(evidence, intervals=intervals)


def described(found: list[Slowdown]) -> str:
    return json.dumps([each.as_dict() for each in found], indent=1)

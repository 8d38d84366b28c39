"""What `distill_quality.py` prints: its runs as a markdown table, the missing ones, and what they show.

A difference counts only if it exceeds the spread of both sides. A method with fewer than two runs gets no verdict.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumline.core.errors import UserError
from drumline.distillation.presets import published

LITERATURE = 240
"""Epochs of the literature's schedule."""


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a table share."""

    set: str
    data: str
    teacher: str
    student: str
    epochs: float
    teacher_epochs: float
    batch: int
    lr: float
    methods: tuple[str, ...]
    """The student alone first."""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A run to make: the arguments of `drumline train` or `drumline distill`, without paths."""

    method: str
    seed: int
    words: str


@dataclass(frozen=True)
class Done:
    """A finished run, as in results.json."""

    method: str
    seed: int
    words: str
    teacher: str
    """SHA-256 of the teacher's weights; the teacher's own entry has it too."""
    machine: str
    correct: int
    samples: int
    top1: float
    best_top1: float
    best_epoch: float
    agreement: float | None
    images_per_s: float
    seconds: float

    def answers(self, job: Job, teacher: str) -> bool:
        """Whether this is the result of that job with that teacher."""
        wanted = (job.method, job.seed, job.words, teacher)
        return (self.method, self.seed, self.words, self.teacher) == wanted


def report(
    setting: Setting,
    jobs: Sequence[Job],
    teacher: Job,
    taught: Done,
    book: Sequence[Done],
    why_missing: Mapping[Job, str],
) -> list[str]:
    """The lines to print. `taught` is the teacher's run, `book` holds all runs."""
    runs = {job: next((done for done in book if done.answers(job, taught.teacher)), None) for job in jobs}
    by_method: dict[str, list[Done]] = {
        name: [done for job, done in runs.items() if done and job.method == name] for name in setting.methods
    }
    machines = sorted({done.machine for done in (taught, *runs.values()) if done})
    words = [
        f"{' and '.join(machines)}; {setting.set}: {setting.teacher} teaches {setting.student}, seeds "
        f"{', '.join(map(str, setting.seeds))}, {taught.samples:,} samples to evaluate",
        f"A shortened schedule: {setting.epochs:g} epochs instead of the {LITERATURE} of the literature; milestones, "
        f"warm-ups and initial stages in proportion. The teacher: {setting.teacher_epochs:g} epochs, seed 0.",
        "last: top-1 of the last epoch. best: top-1 of the best evaluated epoch. spread: the difference between two "
        "runs, or the sample deviation of more. agreement: the fraction of samples where student and teacher predict "
        "the same class. seconds: the total time of a run.",
    ]
    table = [
        "| method | runs | last, mean | spread | by seed | gain over alone, points | best, mean | "
        f"agreement with teacher | seconds | published, {LITERATURE} epochs |",
        "|---|---|---|---|---|---|---|---|---|---|",
        _row(setting, "teacher", [taught], []),
        *(_row(setting, name, done, by_method["alone"]) for name, done in by_method.items() if done),
    ]
    missing = [
        f"Missing: {job.method}, seed {job.seed}: {why_missing.get(job, 'not started')}"
        for job, done in runs.items()
        if done is None
    ]
    blocks = [*([line] for line in words), table, missing, _commands(setting, jobs, teacher)]
    lines = [line for block in blocks if block for line in ("", *block)]
    return [*lines, "", verdict(by_method)]


def verdict(by_method: Mapping[str, Sequence[Done]]) -> str:
    """Which methods beat the student alone by more than the sum of both half-spreads."""
    alone = [done.top1 for done in by_method["alone"]]
    better: list[str] = []
    not_better: list[str] = []
    unsaid: list[str] = []
    for name, done in by_method.items():
        last = [each.top1 for each in done]
        if name == "alone":
            continue
        if min(len(last), len(alone)) < 2:
            unsaid.append(name)
            continue
        difference, noise = _mean(last) - _mean(alone), half_spread(last) + half_spread(alone)
        gain = f"{name} ({100 * difference:+.2f} points, half-spreads {100 * noise:.2f})"
        (better if difference > noise else not_better).append(gain)
    text = f"Better than alone by more than the sum of the two half-spreads: {', '.join(better) or 'none'}."
    text += f" Not: {', '.join(not_better)}." if not_better else ""
    return text + (f" Fewer than two runs, so no verdict: {', '.join(unsaid)}." if unsaid else "")


def spread(values: Sequence[float]) -> float:
    """The difference between two values, or the sample deviation of more."""
    return max(values) - min(values) if len(values) == 2 else statistics.stdev(values)


def half_spread(values: Sequence[float]) -> float:
    """How far runs are from their mean: half the difference between two, or the sample deviation of more."""
    return spread(values) / 2 if len(values) == 2 else spread(values)


def _row(setting: Setting, name: str, done: Sequence[Done], alone: Sequence[Done]) -> str:
    last = [each.top1 for each in done]
    agreed = [each.agreement for each in done if each.agreement is not None]
    compared = alone and name != "alone"
    cells = [
        name,
        str(len(done)),
        f"{_mean(last):.2%}",
        f"{100 * spread(last):.2f}" if len(last) > 1 else "-",
        ", ".join(f"{100 * value:.2f}" for value in last),
        f"{100 * (_mean(last) - _mean([each.top1 for each in alone])):+.2f}" if compared else "-",
        f"{_mean([each.best_top1 for each in done]):.2%}",
        f"{_mean(agreed):.2%}" if agreed else "-",
        f"{_mean([each.seconds for each in done]):.0f}",
        _published(setting, name),
    ]
    return f"| {' | '.join(cells)} |"


def _published(setting: Setting, name: str) -> str:
    """The accuracy that the authors report for the full schedule, or "-"."""
    networks = {"teacher": setting.teacher, "alone": setting.student}.get(
        name, f"{setting.teacher}-{setting.student}"
    )
    try:
        figure = published(f"{setting.set}/{name.partition('@')[0]}/{networks.replace('cifar/', '')}")
    except UserError:
        figure = None
    return "-" if figure is None else f"{figure:.2f}"


def _commands(setting: Setting, jobs: Sequence[Job], teacher: Job) -> list[str]:
    """The commands of the runs, once per method. The folders differ from those of the table's runs."""
    data = f" data.path={setting.data}" if setting.data else ""
    alone, *others = jobs[: len(setting.methods)]
    lines = [
        f"Commands, with seed {alone.seed}: the teacher, the student alone, and `drumline distill` in place of "
        "`drumline train` with the arguments that each method adds to the student's:",
        "",
        f"    drumline train {teacher.words}{data} run.name=teacher",
        f"    drumline train {alone.words}{data}",
        "    + distill.teacher_weights=runs/teacher/weights/last.safetensors, and one of:",
    ]
    return lines + [f"    + {job.words.removeprefix(alone.words).strip()}" for job in others]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)

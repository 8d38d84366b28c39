"""What `distill_table.py` prints: its runs as a markdown table, the missing ones, and what they show.

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
CLOSE = 0.5
"""Points from a published figure within which a mean reproduces it."""


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a table share."""

    set: str
    data: str
    pair: str
    """TEACHER-STUDENT."""
    epochs: float
    methods: tuple[str, ...]
    """The student alone first."""
    seeds: tuple[int, ...]

    @property
    def teacher(self) -> str:
        return self.pair.partition("-")[0]

    @property
    def student(self) -> str:
        return self.pair.partition("-")[2]


@dataclass(frozen=True)
class Job:
    """A run to make: the arguments of `drumline train` or `drumline distill`, without paths."""

    method: str
    seed: int
    words: str


@dataclass(frozen=True)
class Done:
    """A finished run, as in results.json."""

    pair: str
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
    agreement: float | None

    def answers(self, pair: str, job: Job, teacher: str) -> bool:
        """Whether this is the result of that job with that teacher."""
        wanted = (pair, job.method, job.seed, job.words, teacher)
        return (self.pair, self.method, self.seed, self.words, self.teacher) == wanted


def report(
    setting: Setting,
    jobs: Sequence[Job],
    teacher: Job,
    taught: Done,
    book: Sequence[Done],
    why_missing: Mapping[Job, str],
) -> list[str]:
    """The lines to print. `taught` is the teacher's run, `book` holds all runs."""
    runs = {
        job: next((done for done in book if done.answers(setting.pair, job, taught.teacher)), None)
        for job in jobs
    }
    by_method: dict[str, list[Done]] = {
        name: [done for job, done in runs.items() if done and job.method == name] for name in setting.methods
    }
    machines = sorted({done.machine for done in (taught, *runs.values()) if done})
    words = [
        f"{' and '.join(machines)}; {setting.set}: {setting.teacher} teaches {setting.student}, {setting.epochs:g} "
        f"epochs, seeds {', '.join(map(str, setting.seeds))} (teacher: 0), {taught.samples:,} samples to evaluate",
        "last: top-1 of the last epoch. best: top-1 of the best evaluated epoch. spread: the difference between two "
        "runs, or the sample deviation of more. agreement: the fraction of samples where student and teacher predict "
        "the same class. published: the figure of `drumline distill --presets`, which says whose it is.",
    ]
    table = [
        "| method | runs | last, mean | spread | by seed | gain over alone, points | best, mean | agreement | "
        "published | difference |",
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
    lines += ["", verdict(by_method)]
    return lines + (["", reproduction(setting, by_method)] if setting.epochs == LITERATURE else [])


def reproduction(setting: Setting, by_method: Mapping[str, Sequence[Done]]) -> str:
    """Which methods reach their published figure."""
    differences = {
        name: 100 * _mean([each.top1 for each in done]) - figure
        for name, done in by_method.items()
        if done and (figure := _published(setting, name)) is not None
    }
    near, far = (
        [f"{name} ({points:+.2f})" for name, points in differences.items() if (abs(points) <= CLOSE) == close]
        for close in (True, False)
    )
    text = f"Within {CLOSE:g} points of the published figure: {', '.join(near) or 'none'}."
    return text + (f" Not: {', '.join(far)}." if far else "")


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
    figure = _published(setting, name)
    cells = [
        name,
        str(len(done)),
        f"{_mean(last):.2%}",
        f"{100 * spread(last):.2f}" if len(last) > 1 else "-",
        ", ".join(f"{100 * value:.2f}" for value in last),
        f"{100 * (_mean(last) - _mean([each.top1 for each in alone])):+.2f}" if compared else "-",
        f"{_mean([each.best_top1 for each in done]):.2%}",
        f"{_mean(agreed):.2%}" if agreed else "-",
        "-" if figure is None else f"{figure:.2f}",
        "-" if figure is None else f"{100 * _mean(last) - figure:+.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _published(setting: Setting, name: str) -> float | None:
    """The accuracy that the authors report for the full schedule, or None."""
    networks = {"teacher": setting.teacher, "alone": setting.student}.get(name, setting.pair)
    try:
        return published(f"{setting.set}/{name.partition('@')[0]}/{networks}")
    except UserError:
        return None


def _commands(setting: Setting, jobs: Sequence[Job], teacher: Job) -> list[str]:
    """The commands of the runs, once per method. The folders differ from those of the table's runs."""
    data = f" data.path={setting.data}" if setting.data else ""
    alone, *others = jobs[: len(setting.methods)]
    shared = alone.words.split()
    lines = [
        f"Commands, with seed {alone.seed}: the teacher, the student alone, and `drumline distill` in place of "
        "`drumline train` with what each method adds to the student's:",
        "",
        f"    drumline train {teacher.words}{data} run.name=teacher",
        f"    drumline train {alone.words}{data}",
        "    + distill.teacher_weights=runs/teacher, and one of:",
    ]
    added = [" ".join(word for word in job.words.split() if word not in shared) for job in others]
    return lines + [f"    + {words}" for words in added]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)

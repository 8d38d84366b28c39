"""What `distill_quality.py` prints: its runs as a markdown table, what is missing, and what they show.

Promises: a difference counts only beyond the spread of both sides, and of fewer than two runs nothing is said.
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
    """What all runs of a table share."""

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
    """A run to be made: the words after `drumline train` or `drumline distill`, less the places of files."""

    method: str
    seed: int
    words: str


@dataclass(frozen=True)
class Done:
    """A run that was made, as it stands in results.json."""

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
        """Whether this is that job, done with that teacher."""
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
        f"A shortened schedule: {setting.epochs:g} epochs, where the literature takes {LITERATURE}; milestones, "
        f"warm-ups and initial stages in proportion. The teacher: {setting.teacher_epochs:g} epochs, seed 0.",
        "last: top-1 of the last epoch. best: of the best epoch that was evaluated. spread: largest less smallest of "
        "two runs, the sample deviation of more. agrees: share of the samples with the teacher's first guess. "
        "seconds: a run from start to end.",
    ]
    table = [
        "| method | runs | last, mean | spread | by seed | gain over alone, points | best, mean | agrees | seconds | "
        f"published, {LITERATURE} epochs |",
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
    """Which methods beat the student alone by more than the half-spreads of both together."""
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
        told = f"{name} ({100 * difference:+.2f} points, half-spreads {100 * noise:.2f})"
        (better if difference > noise else not_better).append(told)
    told = f"Better than alone by more than the two half-spreads added: {', '.join(better) or 'none'}."
    told += f" Not: {', '.join(not_better)}." if not_better else ""
    return told + (f" Fewer than two runs, so nothing is said: {', '.join(unsaid)}." if unsaid else "")


def spread(values: Sequence[float]) -> float:
    """Largest less smallest of two, the sample deviation of more."""
    return max(values) - min(values) if len(values) == 2 else statistics.stdev(values)


def half_spread(values: Sequence[float]) -> float:
    """How far runs lie from their mean: half the distance of two, the sample deviation of more."""
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
    """What the authors report for the whole schedule, where they do."""
    networks = {"teacher": setting.teacher, "alone": setting.student}.get(
        name, f"{setting.teacher}-{setting.student}"
    )
    try:
        figure = published(f"{setting.set}/{name.partition('@')[0]}/{networks.replace('cifar/', '')}")
    except UserError:
        figure = None
    return "-" if figure is None else f"{figure:.2f}"


def _commands(setting: Setting, jobs: Sequence[Job], teacher: Job) -> list[str]:
    """What was run, once per method. In the runs of the table the folders are others."""
    data = f" data.path={setting.data}" if setting.data else ""
    alone, *others = jobs[: len(setting.methods)]
    lines = [
        f"Commands, with seed {alone.seed}: the teacher, the student alone, and `drumline distill` in place of "
        "`drumline train` with what each method adds to the student's words:",
        "",
        f"    drumline train {teacher.words}{data} run.name=teacher",
        f"    drumline train {alone.words}{data}",
        "    + distill.teacher_weights=runs/teacher/weights/last.safetensors, and one of:",
    ]
    return lines + [f"    + {job.words.removeprefix(alone.words).strip()}" for job in others]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)

"""The runs of a folder, each with what it reached and with the settings in which it differs from the others.

Promises: reads only small files (recipe.toml, metrics.jsonl, log.txt) and changes nothing; a run that is under way,
was killed, or has damaged files is listed too. `differences` is pure.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.config.toml import flat_recipe
from drumline.core import lock
from drumline.core.files import CorruptError, read_small
from drumline.observe.run_log import METRICS, TRACE
from drumline.observe.text_log import FAILED, FINISHED, LOG, STARTED, STOPPED

_MAX_BYTES = 1 << 28
_ENDS = {FINISHED: "finished", STOPPED: "stopped", FAILED: "failed"}
_SAME_RUN = ("run.dir", "run.name", "checkpoint.", "launch.", "parallel.node_rank", "parallel.rendezvous")
"""Settings that say where a run is and how it is kept alive, not what it computes."""


@dataclass(frozen=True)
class RunSummary:
    """A run as its folder describes it."""

    path: str
    state: str
    """`running`, `finished`, `stopped`, `failed`, or `killed` if its log just ends."""
    started: float = math.nan
    """When it was first started, in seconds since 1970."""
    seconds: float = 0.0
    """How long it has run, without the pauses before resumes."""
    step: int = 0
    epoch: float = 0.0
    top1: float | None = None
    """Top-1 of the last evaluation, like `loss`: of the averaged weights if there are any."""
    loss: float | None = None
    best_metric: str = "top1"
    """The recipe's `checkpoint.best`."""
    best_value: float | None = None
    """The value of that metric in the best evaluation: of the averaged weights, if there are any."""
    best_top1: float | None = None
    """`best_value` if the metric is top1."""
    best_epoch: float | None = None
    settings: Mapping[str, Any] | None = field(default_factory=dict)
    """Its recipe: dotted names and values. None if recipe.toml is missing or damaged."""


def find_runs(folders: Sequence[Path]) -> list[RunSummary]:
    """The runs below the folders, or the folders themselves if they are runs; in the order of their start."""
    found = {path.resolve(): path for folder in folders for path in _run_folders(folder)}
    return sorted(map(summarize, found.values()), key=lambda run: (run.started, run.path))


def _run_folders(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif folder.is_dir():
        yield from filter(is_run, sorted(folder.iterdir()))


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run writes."""
    return any((folder / name).is_file() for name in ("recipe.toml", LOG, METRICS))


def summarize(path: Path) -> RunSummary:
    """A run folder in one value."""
    text = _read(path / LOG)
    starts, seconds, end = _sections(text)
    state = "running" if lock.is_held(path) else end
    lines = metric_lines(path)
    last: dict[str, Any] = lines[-1] if lines else {}
    scores = [line for line in lines if line.get("kind") == "eval" and isinstance(line.get("top1"), float)]
    settings = run_settings(path)
    metric = str((settings or {}).get("checkpoint.best", "top1"))
    best = _best(scores, metric)
    value = _judged(best, metric)
    return RunSummary(
        str(path),
        state,
        starts,
        seconds,
        int(last.get("step", 0)),
        float(last.get("epoch", 0.0)),
        _judged(scores[-1], "top1") if scores else None,
        _judged(scores[-1] if scores else last, "loss"),
        metric,
        value,
        value if metric == "top1" else None,
        best.get("epoch"),
        settings,
    )


def _judged(line: Mapping[str, Any], metric: str) -> float | None:
    """A metric of an evaluation: of the averaged weights if there are any."""
    value: float | None = line.get(f"average_{metric}", line.get(metric))
    return value


def _best(scores: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The best evaluation of the run by its metric, which a resume may have changed. Earlier versions did not record
    it; then the one with the highest top-1."""
    if any("best" in line for line in scores):
        best: dict[str, Any] = next((line for line in reversed(scores) if line.get("best") is True), {})
        return best if best.get("best_metric", metric) == metric else {}
    return max(scores, key=lambda line: line["top1"], default={})


def differences(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """For each run the settings that are not the same in all runs whose recipe is readable."""
    recipes = [run.settings for run in runs if run.settings is not None]
    names = {name: None for recipe in recipes for name in recipe if not name.startswith(_SAME_RUN)}
    missing = object()
    varied = [
        name
        for name in names
        if any(recipe.get(name, missing) != recipes[0].get(name, missing) for recipe in recipes)
    ]
    return [
        {name: run.settings[name] for name in varied if name in run.settings} if run.settings else {}
        for run in runs
    ]


@dataclass(frozen=True)
class Statistics:
    """The variation of a number over runs."""

    mean: float
    std: float
    """The sample standard deviation: divided by one less than the number of runs."""
    min: float
    max: float


def statistics_of(values: Sequence[float | None]) -> Statistics | None:
    """The variation of the values; None if there are fewer than two, or one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    return Statistics(statistics.fmean(known), statistics.stdev(known), min(known), max(known))


def repeats(runs: Sequence[RunSummary], field: str = "run.seed") -> list[list[RunSummary]]:
    """The finished runs that differ only in this field, in groups of two or more. Of runs with the same value, the
    first counts."""
    groups: dict[str, dict[Any, RunSummary]] = {}
    for run in runs:
        if run.settings and run.state == "finished":
            own = {name: value for name, value in run.settings.items() if not name.startswith(_SAME_RUN)}
            own |= {field: None, "checkpoint.best": run.best_metric}
            group = groups.setdefault(json.dumps(own, sort_keys=True, default=str), {})
            group.setdefault(run.settings.get(field), run)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def _sections(text: str) -> tuple[float, float, str]:
    """When the log begins, how many seconds its processes ran, and how the last of them ended."""
    began, first, last, seconds, state = math.nan, math.nan, math.nan, 0.0, "killed"
    for now, message in _entries(text):
        if message.startswith(STARTED):
            seconds += 0.0 if math.isnan(first) else last - first
            began = now if math.isnan(began) else began
            first, state = now, "killed"
        state = next((name for opening, name in _ENDS.items() if message.startswith(opening)), state)
        last = now
    return began, seconds if math.isnan(first) else seconds + last - first, state


def _entries(text: str) -> Iterator[tuple[float, str]]:
    """The entries of a log.txt: seconds since 1970, by this machine's time zone, and the first line of the text."""
    for line in text.splitlines():
        if not line[:1].isdigit():
            continue
        stamp, _, message = line.partition("  ")
        try:
            yield time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")), message
        except ValueError:
            continue


def log_entries(path: Path) -> list[tuple[float, str]]:
    """The entries of a run's log.txt."""
    return list(_entries(_read(path / LOG)))


def window_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's trace.jsonl that are complete."""
    return [line for line in map(_parsed, _read(path / TRACE).splitlines()) if line]


def metric_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are complete."""
    return [line for line in map(_parsed, _read(path / METRICS).splitlines()) if line]


def run_settings(path: Path) -> dict[str, Any] | None:
    """A run's recipe: dotted names and values. None if it cannot be read."""
    try:
        return flat_recipe(_read(path / "recipe.toml")) or None
    except (tomllib.TOMLDecodeError, AttributeError):  # not TOML, or not in sections
        return None


def _parsed(line: str) -> dict[str, Any]:
    """A line of metrics.jsonl; empty if it is damaged, as the last one of a killed run may be."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> str:
    try:
        return read_small(path, _MAX_BYTES).decode("utf-8", "replace")
    except (CorruptError, OSError):
        return ""

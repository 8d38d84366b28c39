"""The three arms of a measurement: the same training on synthetic data, on cold files and on files in memory.

Promises: the arms differ in nothing but the data. From them come the stalls of DS-Analyzer (Mohan et al., 2021): the
prep stall is what decoding and augmenting cost, the fetch stall what the disk costs. An arm that cannot be
measured is left out and reported, never guessed. `measure` runs the arms; the rest is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.config.fields import recipe_fields
from drumline.config.sources import names_code
from drumline.core.machine import usable_memory
from drumline.core.progress import progress
from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.page_cache import Dropped, drop
from drumline.diagnosis.rules import diagnose
from drumline.diagnosis.slowdown import Slowdown, ranked
from drumline.diagnosis.trial import NO_PAUSES, Command, TrialFailed, announced, error_of, run_trial

SYNTHETIC, CACHED, COLD = "synthetic", "cached", "cold"
ARMS = {
    SYNTHETIC: "synthetic data",
    CACHED: "files in memory",
    COLD: "files on disk",
}
WORTH = 0.1
"""A stall below this fraction of the time is not reported."""
SURE = 2.0
"""Standard errors that a stall must exceed."""
FITS = 0.8
"""Data up to this fraction of the memory stays there after the first epoch."""
OF_DATA = ("disk", "workers", "decode", "transform", "feed", "data")
"""The reasons whose removal cannot make a run faster than it is on synthetic data."""
_KEPT = ("data.batch", "data.size", "data.mixup", "data.cutmix")
"""Settings of the data that change what the model computes."""


@dataclass(frozen=True)
class Measured:
    """What the arms have shown."""

    evidence: Evidence
    """Of the arm that is like the run after its first epoch, with the speeds of all arms."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The standard error of each speed, as a fraction."""
    dropped: Dropped | None = None
    """None: the data is in the memory of the process."""
    cold: bool = False
    """Whether the run reads its files from the disk in every epoch, because they do not fit into the memory."""
    notes: Sequence[str] = ()
    """What could not be measured."""


def prep_stall(arms: Mapping[str, float]) -> float | None:
    """The fraction of the time spent making batches, with the files in memory."""
    return _stall(arms, CACHED, SYNTHETIC)


def fetch_stall(arms: Mapping[str, float]) -> float | None:
    """The fraction of the time spent reading, with the files on disk."""
    return _stall(arms, COLD, CACHED)


def _stall(arms: Mapping[str, float], slow: str, fast: str) -> float | None:
    if slow not in arms or fast not in arms:
        return None
    return max(0.0, 1 - arms[slow] / arms[fast])


def findings(measured: Measured) -> list[Slowdown]:
    """The reasons of the rules, none of them predicted to be faster than synthetic data, and those that only the arms
    show."""
    evidence = measured.evidence
    found = [_within_synthetic(each, evidence.arms) for each in diagnose(evidence)]
    if not any(each.code in OF_DATA for each in found):
        found += _from_arms(measured)
    return ranked(found)


def _within_synthetic(found: Slowdown, arms: Mapping[str, float]) -> Slowdown:
    most = arms.get(SYNTHETIC)
    if found.code not in OF_DATA or not most or found.predicted_images_per_s <= most:
        return found
    return replace(found, saving=max(0.0, 1 - found.images_per_s / most))


def _from_arms(measured: Measured) -> Iterator[Slowdown]:
    """A stall that no rule has explained."""
    arms, now = measured.evidence.arms, Figures(measured.evidence).images_per_s
    for code, stall, slow, fast, what in (
        ("prep", prep_stall(arms), CACHED, SYNTHETIC, "making batches"),
        ("fetch", fetch_stall(arms) if measured.cold else None, COLD, CACHED, "reading files"),
    ):
        if stall is None or stall < WORTH:
            continue
        if stall < SURE * math.hypot(measured.errors.get(slow, 0.0), measured.errors.get(fast, 0.0)):
            continue
        text = (
            f"{what} takes {percent(stall)} of the time: {rate(arms[slow], 'img')} with {ARMS[slow]}, "
            f"{rate(arms[fast], 'img')} with {ARMS[fast]}"
        )
        yield Slowdown(code, text, stall, fix=_FIXES[code], images_per_s=now)


_FIXES = {
    "prep": "find the best number of workers with `drumline why --sweep workers=1,2,4`, or store smaller images with "
    "`drumline pack`",
    "fetch": "store the data in a few large files with `drumline pack DATA OUT`, or use a faster or local disk, or "
    "more memory",
}


def lines(measured: Measured) -> list[str]:
    """The arms and the stalls, for people."""
    arms, dropped = measured.evidence.arms, measured.dropped
    once = "" if measured.cold else ", in the first epoch only"
    shown = {
        SYNTHETIC: "what the model can process",
        CACHED: _stalled("prep stall", prep_stall(arms), "making batches"),
        COLD: _stalled("fetch stall", fetch_stall(arms), f"reading files{once}"),
    }
    titles = ARMS if dropped is not None else {**ARMS, CACHED: "the data"}
    speeds = {name: rate(speed, "img") for name, speed in arms.items()}
    width = max(map(len, speeds.values()))
    found = [
        f"{titles[name]:<15}  {speeds[name]:>{width}} {_plus_minus(measured.errors[name])}  {text}".rstrip()
        for name, text in shown.items()
        if name in arms
    ]
    return [*found, *measured.notes]


def _plus_minus(error: float) -> str:
    return f"± {percent(error)}" if math.isfinite(error) else "± ?"


def _stalled(name: str, stall: float | None, what: str) -> str:
    return "" if stall is None else f"{name} {percent(stall)}: {what}"


_TIED = ("distill.cache", "distill.unlabelled")
"""Settings that only work with the real images. A cache would be filled with those of others."""


def synthetic_settings(evidence: Evidence) -> list[str]:
    """Settings that replace the data of a run by synthetic images of the same size and number."""
    model, data = evidence.environment["model"], evidence.environment["data"]["training"]
    path = f"classes={model['outputs']},size={model['size']},samples={data['samples']}"
    given = {
        "data.source": "synthetic",
        "data.path": path,
        "data.batch": str(evidence.recipe["data.batch"]),
        "data.size": str(model["size"]),
    }
    reset = {
        name: _text(each.default)
        for name, each in recipe_fields().items()
        if (each.section == "data" and name not in _KEPT) or name == "train.class_weights"
        if _plain(evidence.recipe.get(name, each.default)) != _plain(each.default)
    }
    return [f"{name}={value}" for name, value in (reset | given).items()]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def files_of(settings: Mapping[str, Any]) -> list[Path] | None:
    """The files and folders that a recipe's data is read from while it trains; None if it is read only once."""
    from drumline.data.sources import detect_source

    path, labels = settings["data.path"], settings["data.labels"]
    source = detect_source(settings["data.source"], path, labels=labels)
    if names_code(source):
        return [Path(path)] if path and Path(path).exists() else []
    if source not in _READ_AS_NEEDED:
        return None
    # Without a path, those of a label file are relative to its folder.
    data = Path(path) if path else Path(labels).parent
    return [data if data.exists() else data.parent]  # a pattern of shards names files in a folder


_READ_AS_NEEDED = ("folder", "labels", "tar", "webdataset", "packed")


def measure(
    command: Command, settings: Mapping[str, Any], seconds: float, say: Callable[[str], None]
) -> Measured:
    """Runs the arms. `settings` is the recipe of the command: dotted names and values. A command that cannot run on
    its own data raises; an arm that cannot is left out."""
    files = files_of(settings)
    arms, errors, notes = dict[str, float](), dict[str, float](), list[str]()
    dropped: Dropped | None = None
    cold, cached = Evidence(()), Evidence(())
    names = [CACHED, SYNTHETIC] if files is None else [COLD, CACHED, SYNTHETIC]
    if tied := [name for name in _TIED if settings[name]]:
        names.remove(SYNTHETIC)
        notes.append(f"{ARMS[SYNTHETIC]}: not measured: {tied[0]} needs the real images")
    say(announced(len(names), seconds))
    for name in progress(names, "short runs"):
        if name == COLD:
            assert files is not None
            dropped = drop(files)
            if not dropped.worked:
                notes.append(_not_dropped(dropped))
                continue
            found = cold = run_cold(command, seconds)
        elif name == CACHED:
            found = cached = run_trial(command, seconds, within=same_samples(cold))
            if (
                len(cached.intervals) < 2
            ):  # what the cold arm has read is too little to be measured when it is fast
                found = cached = run_trial(command, seconds)
                notes.append(
                    f"{ARMS[CACHED]}: some were read from disk; a larger --seconds reads more of them before"
                )
        else:
            try:
                found = run_trial(command.having(*NO_PAUSES, *synthetic_settings(cached)), seconds)
            except TrialFailed as error:
                notes.append(f"{ARMS[name]}: not measured: {error.what}")
                continue
        if len(found.intervals) < 2:
            notes.append(f"{ARMS[name]}: not measured: one epoch is too short")
            continue
        arms[name] = Figures(found).whole.images_per_s
        errors[name] = error_of(found.intervals[1:])
        say(f"{ARMS[name]}: {rate(arms[name], 'img')}")
    large = COLD in arms and dropped is not None and dropped.bytes > FITS * usable_memory()
    return Measured(replace(cold if large else cached, arms=arms), errors, dropped, large, notes)


def run_cold(command: Command, seconds: float) -> Evidence:
    """A short run of the first epoch, which reads files that were dropped from memory."""
    return run_trial(command.having(*NO_PAUSES), seconds, within=lambda interval: interval.epoch <= 1)


def same_samples(cold: Evidence) -> Callable[[Interval], bool]:
    """Whether an interval has only samples that the cold arm has read: those of the same steps, or all."""
    if not cold.intervals:
        return lambda interval: True
    last = cold.intervals[-1]
    per_epoch = last.step / last.epoch
    if last.step + last.steps > per_epoch:
        return lambda interval: True
    return lambda interval: interval.step <= last.step


def _not_dropped(dropped: Dropped) -> str:
    """Why the files are not cold."""
    if not dropped.files:
        why = "the data has no files of its own that could be dropped from memory"
    elif dropped.still_cached is None:
        why = "the file system (such as one in memory) does not report whether its files are in memory"
    else:
        why = f"{percent(dropped.still_cached)} of the files are still in memory: other programs hold them"
    return f"{ARMS[COLD]}: not measured: {why}"

"""A run as a trace in Chrome's format, which ui.perfetto.dev opens: what every rank did, and when.

Promises: pure, from what the run folder records. Slices of a track nest, and do not overlap otherwise; its times
rise. The clocks of the ranks' machines align their tracks. What a run did not record is missing: single steps outside
the windows of trace.jsonl, and all single steps of a GPU, whose track has the means of each interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from drumline.core.text import counted, percent
from drumline.observe.runs import log_entries, metric_lines, window_lines
from drumline.observe.text_log import FAILED, FINISHED, STARTED, STOPPED

Event = dict[str, Any]
RUN, STEPS, FEED, DEVICE = 1, 2, 3, 4
"""The tracks of a rank, as thread numbers."""
TRACKS = {RUN: "run", STEPS: "host: single steps", FEED: "feed", DEVICE: "GPU (means)"}
_COUNTERS = {
    "cores": ("own_cores", "busy_cores"),
    "memory (MB)": ("memory_mb",),
    "disk (MB/s)": ("disk_mb_s",),
    "open files": ("descriptors",),
    "GPU use": ("gpu_use",),
    "GPU memory (MB)": ("gpu_memory_mb",),
    "GPU clock (of maximum)": ("gpu_clock",),
    "GPU power (W)": ("gpu_watts",),
}
"""Counters of each rank, with the names in metrics.jsonl."""
_SHOWN = (STARTED, FINISHED, STOPPED, FAILED, "saved checkpoint", "launcher: ", "WARNING", "resum")
"""Beginnings of the lines of log.txt that become events."""
_MOST_POINTS = 20_000
"""Points of a curve; of more, every second, third, ... is taken."""
_HOUR_PART = 900
"""Time zones differ by multiples of this many seconds."""


@dataclass(frozen=True)
class Records:
    """What a run folder has recorded."""

    name: str
    metrics: Sequence[Mapping[str, Any]]
    windows: Sequence[Mapping[str, Any]] = ()
    log: Sequence[tuple[float, str]] = ()


@dataclass
class _Times:
    """The lines of times, with the moments at which each interval began and ended on each rank."""

    line: Mapping[str, Any]
    began: list[float] = field(default_factory=list)
    ended: float = 0.0


def read_records(run: Path) -> Records:
    """The records in a run folder."""
    return Records(run.name, metric_lines(run), window_lines(run), log_entries(run))


def trace_json(records: Records) -> bytes:
    """The trace as a file."""
    events = trace_events(records)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": records.name}}
    return json.dumps(document, separators=(",", ":")).encode()


def trace_events(records: Records) -> list[Event]:
    """The events of a run: names of tracks first, then in the order of time, in microseconds since the first one."""
    times = _intervals(records.metrics)
    found = [
        *_interval_slices(times),
        *_step_slices(records.windows),
        *_counters(times),
        *_curves(records.metrics),
        *_evaluations(records.metrics),
        *_log_events(records),
    ]
    if not found:
        return []
    first = min(event["ts"] for event in found)
    for event in found:
        event["ts"] = round(1e6 * (event["ts"] - first), 1)
        if "dur" in event:
            event["dur"] = round(1e6 * event["dur"], 1)
    found.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))  # what contains others comes first
    used = {(event["pid"], event["tid"]) for event in found}
    return [*_names(used), *found]


def _names(used: Iterable[tuple[int, int]]) -> Iterator[Event]:
    tracks = sorted(used)
    for pid in sorted({pid for pid, _ in tracks}):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {pid}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for pid, tid in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": TRACKS[tid]}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(pid: int, tid: int, name: str, began: float, ended: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": TRACKS[tid],
        "pid": pid,
        "tid": tid,
        "ts": began,
        "dur": max(0.0, ended - began),
        "args": args,
    }


def _intervals(metrics: Sequence[Mapping[str, Any]]) -> list[_Times]:
    """The lines of times. Each was written when its interval ended, and says how long it took."""
    found: list[_Times] = []
    for line in metrics:
        if line.get("kind") != "times":
            continue
        before = found[-1].ended if found else -math.inf
        ended = max(float(line["time"]), before)
        took = [
            line["steps"] * (step + between) / 1e3
            for step, between in zip(line["step_ms"], _between(line), strict=True)
        ]
        found.append(_Times(line, [max(ended - each, before) for each in took], ended))
    return found


def _between(line: Mapping[str, Any]) -> list[float]:
    """Milliseconds of evaluations and saves for each step, by rank."""
    none = [0.0] * len(line["step_ms"])
    return [
        a + b
        for a, b in zip(
            line.get("host_evaluation_ms", none), line.get("host_checkpoint_ms", none), strict=True
        )
    ]


def _interval_slices(times: Sequence[_Times]) -> Iterator[Event]:
    """What each rank did between two lines of times: saving first, because a save follows an evaluation; then steps;
    then the evaluation. On a GPU, what the device did, added up."""
    for one in times:
        line, steps = one.line, one.line["steps"]
        for rank, began in enumerate(one.began):
            values = {
                name: value[rank]
                for name, value in line.items()
                if isinstance(value, list) and len(value) == len(one.began) and _is_known(value[rank])
            }
            saved = min(began + _seconds(values, "host_checkpoint_ms", steps), one.ended)
            evaluates = max(one.ended - _seconds(values, "host_evaluation_ms", steps), saved)
            if saved > began:
                yield _slice(rank, RUN, "saving", began, saved)
            if evaluates > saved:
                name = f"steps {line['step'] - steps + 1:,} to {line['step']:,}"
                yield _slice(rank, RUN, name, saved, evaluates, **values)
            if one.ended > evaluates:
                yield _slice(rank, RUN, "evaluation", evaluates, one.ended)
            if line.get("gpu"):
                yield from _device_slices(rank, values, steps, saved, evaluates)


def _device_slices(
    rank: int, values: Mapping[str, Any], steps: int, began: float, ended: float
) -> Iterator[Event]:
    """The parts of an interval one after the other, as long as they took in total."""
    copy = values.get("copy_ms") or 0.0
    parts = {
        "computing": values.get("compute_ms"),
        "copying": copy,
        "waiting for data": (values.get("data_ms") or 0.0) - copy,
        "waiting for the host": values.get("late_ms"),
    }
    at = began
    for name, part_ms in parts.items():
        end = min(at + (part_ms or 0.0) * steps / 1e3, ended)
        if end > at:
            share = percent((end - at) / (ended - began))
            yield _slice(rank, DEVICE, f"{name}, {share}, in {counted(steps, 'step')}", at, end)
        at = end


def _seconds(values: Mapping[str, Any], name: str, steps: int) -> float:
    return (values.get(name) or 0.0) * steps / 1e3


def _step_slices(windows: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """The single steps in the windows, and the parts in them."""
    for window in windows:
        rank, base = window["rank"], float(window["time"])
        ends = [(base + at / 1e6, step) for at, step in window["steps"]]
        for (began, _), (ended, step) in pairwise(ends):
            yield _slice(rank, STEPS, f"step {step:,}", began, ended)
        last = ends[-1][0]
        for tid, track in ((STEPS, "host"), (FEED, "feed")):
            parts = [(base + at / 1e6, name) for at, name in window["tracks"].get(track, ())]
            end = last if tid == STEPS else base + window["end_us"] / 1e6
            cuts = [at for at, _ in ends] if tid == STEPS else []
            for began, ended, name in _cut(parts, end, cuts):
                yield _slice(rank, tid, name, began, ended)


def _cut(
    parts: Sequence[tuple[float, str]], end: float, cuts: Sequence[float]
) -> Iterator[tuple[float, float, str]]:
    """Parts with their ends. A part that lasts over the end of a step is cut there, so that it lies in one step."""
    ahead = list(reversed(cuts))
    for (began, name), (until, _) in pairwise([*parts, (end, "")]):
        at, ended = began, min(until, end)
        while ahead and ahead[-1] <= at:
            ahead.pop()
        while ahead and ahead[-1] < ended:
            cut = ahead.pop()
            yield at, cut, name
            at = cut
        if ended > at:
            yield at, ended, name


def _counters(times: Sequence[_Times]) -> Iterator[Event]:
    """What an interval used, from its beginning."""
    for one in times:
        for rank, began in enumerate(one.began):
            for title, names in _COUNTERS.items():
                values = {name: one.line[name][rank] for name in names if name in one.line}
                yield from _counter(rank, title, began, values)
            parts = {
                name.removeprefix("host_").removesuffix("_ms"): value[rank]
                for name, value in one.line.items()
                if name.startswith("host_")
            }
            yield from _counter(rank, "host (ms of a step)", began, parts)


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _counter(pid: int, name: str, at: float, values: Mapping[str, float | None]) -> Iterator[Event]:
    known = {key: value for key, value in values.items() if _is_known(value)}
    if known:
        yield {"ph": "C", "name": name, "pid": pid, "tid": RUN, "ts": at, "args": known}


def _curves(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """Speed, loss and learning rate."""
    lines = [line for line in metrics if line.get("kind") == "train"]
    for line in lines[:: len(lines) // _MOST_POINTS + 1]:
        for name, title in (("images_per_s", "images/s"), ("loss", "loss"), ("lr", "learning rate")):
            yield from _counter(0, title, float(line["time"]), {name: line.get(name)})


def _evaluations(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    for line in metrics:
        if line.get("kind") == "eval":
            metric = line.get("best_metric", "top1")
            value = line.get(metric)
            text = "best" if line.get("best") else "evaluation"
            text += f": {metric} {value:.4g}" if isinstance(value, int | float) else ""
            yield _instant(float(line["time"]), text, step=line.get("step"), epoch=line.get("epoch"))


def _log_events(records: Records) -> Iterator[Event]:
    """Starts, restarts, faults, checkpoints and ends. log.txt has whole seconds, in the time zone of its machine."""
    shift = _time_zone(records)
    for at, text in records.log:
        if text.startswith(_SHOWN):
            yield _instant(at + shift, text.partition(": ")[0] if len(text) > 80 else text, text=text)


def _time_zone(records: Records) -> float:
    """The difference between the time zone of the machine that wrote the log and ours."""
    epochs = [at for at, text in records.log if text.startswith("epoch ")]
    scored = [float(line["time"]) for line in records.metrics if line.get("kind") == "eval"]
    if not epochs or not scored:
        return 0.0
    return float(_HOUR_PART * round((scored[-1] - epochs[-1]) / _HOUR_PART))


def _instant(at: float, name: str, **args: Any) -> Event:
    return {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": RUN, "ts": at, "args": args}

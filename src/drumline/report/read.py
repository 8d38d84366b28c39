"""A run folder as values for its page.

Promises: reads the files of the folder alone, so a copy of it is enough, and works while the run trains. Missing or
damaged values are left out, never invented.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline.core import lock
from drumline.core.files import CorruptError, read_small
from drumline.diagnosis.evidence import Evidence, read_evidence
from drumline.diagnosis.rules import diagnose
from drumline.diagnosis.slowdown import Slowdown
from drumline.observe.runs import RunSummary, metric_lines, summarize
from drumline.observe.text_log import (
    FAILED,
    FINISHED,
    LAUNCHER,
    LOG,
    REMOVED,
    RESUMED,
    STARTED,
    STOPPED,
    WARNING,
)
from drumline.report.record import (
    BATCH,
    FACTS,
    FOLDER,
    MISTAKES,
    Evaluation,
    Sheet,
    read_evaluation,
    read_sheet,
)
from drumline.report.scores import Report

_MAX_BYTES = 1 << 26
_TAIL = 1 << 12
ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the content of a damaged or foreign file may raise."""
_CHAIN = re.compile(r"^(\d+) chain ([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    """A line of the log that says how the run was kept alive, or warns."""

    time: str
    kind: str
    """`started`, `resumed`, `removed` (lines of the log after the step of a resume), `killed`, `stopped`, `failed`,
    `finished`, `launcher` or `warning`."""
    text: str


@dataclass(frozen=True)
class RunFacts:
    """Everything that a page shows of a run."""

    summary: RunSummary
    train: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl of this kind, in the order of their steps; so are the next."""
    evals: Sequence[Mapping[str, Any]]
    evidence: Evidence
    slowdowns: Sequence[Slowdown] | None
    """None if nothing is known about the times."""
    events: Sequence[Event]
    facts: Mapping[str, Any]
    """What training recorded about the model and the data: `parameters`, `samples`, `total`, ..."""
    evaluation: Evaluation | None
    mistakes: Sheet | None
    batch: Sheet | None
    certificate: Mapping[str, Any] | None
    timeline: bytes
    """A picture (SVG); empty if there is none."""
    fingerprints: tuple[int, str] | None
    """The last step of the chain, and its value."""

    @property
    def name(self) -> str:
        return Path(self.summary.path).resolve().name

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.summary.settings or {}

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.evidence.environment

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; numbers if they have none."""
        model = self.environment.get("model")
        classes = model.get("classes", 0) if isinstance(model, dict) else 0
        if isinstance(classes, list):
            return tuple(map(str, classes))
        return tuple(map(str, range(classes if isinstance(classes, int) else 0)))

    @cached_property
    def report(self) -> Report | None:
        """The predictions of the best evaluation, if the log has it."""
        found = self.evaluation
        if found is None or not any(
            line.get("step") == found.step and line.get("best") is True for line in self.evals
        ):
            return None
        return found.report(self.classes)

    @property
    def best(self) -> Mapping[str, Any]:
        """The best evaluation; the last one if none is marked; empty if there is none."""
        marked = (line for line in reversed(self.evals) if line.get("best") is True)
        return next(marked, self.evals[-1] if self.evals else {})

    def score(self, line: Mapping[str, Any], metric: str) -> float | None:
        """A metric of an evaluation: of the averaged weights if there are any."""
        value = line.get(f"average_{metric}", line.get(metric))
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_run(run: Path) -> RunFacts:
    """Reads a run folder."""
    summary, lines, evidence = summarize(run), metric_lines(run), _evidence(run)
    events, ended = _events(_text(run / LOG))
    if ended and lock.is_held(run):
        summary = replace(summary, state=ended)  # its process is about to end
    svg, certificate = _bytes(run / "timeline.svg"), _json(run / "certificate.json")
    return RunFacts(
        summary=summary,
        train=[line for line in lines if line.get("kind") == "train" and _placed(line)],
        evals=[line for line in lines if line.get("kind") == "eval" and _placed(line)],
        evidence=evidence,
        slowdowns=_slowdowns(evidence),
        events=events,
        facts=_json(run / FOLDER / FACTS) or {},
        evaluation=read_evaluation(run),
        mistakes=read_sheet(run / FOLDER / MISTAKES),
        batch=read_sheet(run / FOLDER / BATCH),
        certificate=certificate,
        timeline=svg,
        fingerprints=_chain(run / "fingerprints.txt"),
    )


def _evidence(run: Path) -> Evidence:
    try:
        found = read_evidence(run)
    except ODD:
        return Evidence(())
    return found if isinstance(found.environment, dict) else replace(found, environment={})


def _slowdowns(evidence: Evidence) -> Sequence[Slowdown] | None:
    if not evidence.intervals:
        return None
    try:
        return diagnose(evidence)
    except ODD:
        return None


def _placed(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and isinstance(line.get("epoch"), int | float)


_ENDS = {FINISHED: "finished", STOPPED: "stopped", FAILED: "failed"}
_KINDS = {
    STARTED: "started",
    **_ENDS,
    LAUNCHER: "launcher",
    WARNING: "warning",
    RESUMED: "resumed",
    REMOVED: "removed",
}


def _events(text: str) -> tuple[list[Event], str]:
    """The events of a log, and how it ends; empty if its last process left no closing line."""
    events: list[Event] = []
    open_since = ended = ""
    for line in text.splitlines():
        stamp, _, message = line.partition("  ")
        if not line[:1].isdigit():
            if (
                events and events[-1].kind == "failed" and not open_since
            ):  # the last line of a traceback says why
                events[-1] = replace(
                    events[-1], text=f"{events[-1].text.partition(' … ')[0]} … {line.strip()}"
                )
            continue
        kind = next((kind for opening, kind in _KINDS.items() if message.startswith(opening)), "")
        if kind == "started":
            if open_since:
                events.append(
                    Event(
                        open_since,
                        "killed",
                        "ended without a closing line: killed, out of memory or power cut",
                    )
                )
            ended = ""
        if kind in _ENDS.values():
            ended, open_since = kind, ""
        elif kind == "started" or open_since:
            open_since = stamp
        if kind:
            events.append(Event(stamp, kind, message.removeprefix(next(filter(message.startswith, _KINDS)))))
    return events, ended


def now() -> str:
    """The time, as the log writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _chain(path: Path) -> tuple[int, str] | None:
    """The last link of the chain of fingerprints, from the end of a file that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            found = _CHAIN.findall(file.read().decode("utf-8", "replace"))
    except OSError:
        return None
    return (int(found[-1][0]), found[-1][1]) if found else None


def _bytes(path: Path) -> bytes:
    try:
        return read_small(path, _MAX_BYTES)
    except (CorruptError, OSError):
        return b""


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(_bytes(path))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

"""The runs and kills of `faults.py`: their log and the tables."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

KINDS = (
    "a rank",
    "rank 0",
    "a loader process",
    "the launcher",
    "all processes",
    "during a save",
    "before the checkpoint's rename",
)


@dataclass
class Kill:
    """One SIGKILL and its consequences."""

    kind: str
    at: float
    step: int
    by_itself: bool
    """Whether the launcher had to restart the run."""
    processes: int
    resumed: int | None = None
    """The step the run resumed from; None if the next kill came first."""
    recovered: float | None = None
    """The time of the first step after it."""


@dataclass
class Run:
    """One finished run and what happened to it."""

    layout: str = "strict"
    source: str = ""
    kills: list[Kill] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    """Processes of each start."""
    orphans: int = 0
    unexplained: list[str] = field(default_factory=list)
    """The error output of commands that failed without a kill."""
    same: bool = False
    """Whether it has the hash of the uninterrupted run."""


def report(runs: Sequence[Run]) -> str:
    """The table."""
    every = [kill for run in runs for kill in run.kills]
    lines = [
        f"{os.cpu_count()} CPU cores, torch {torch.__version__}: {len(every):,} kills\n",
        "| killed | kills | steps lost, mean / max | recovery time, s, p50 / p99 |",
        "|---|---|---|---|",
    ]
    rows: list[tuple[str, Sequence[Kill]]] = [
        (kind, [kill for kill in every if kill.kind == kind]) for kind in KINDS
    ]
    rows.append(("of these, restarted by the launcher", [kill for kill in every if kill.by_itself]))
    rows.append(("all", every))
    for name, kills in rows:
        back = [kill for kill in kills if kill.recovered is not None]
        lost = [max(0, kill.step - (kill.resumed or 0)) for kill in back]
        waits = sorted((kill.recovered or 0) - kill.at for kill in back)
        what = f"{statistics.mean(lost):.1f} / {max(lost)}" if lost else "-"
        wait = f"{quantile(waits, 0.5):.1f} / {quantile(waits, 0.99):.1f}" if waits else "-"
        lines.append(f"| {name} | {len(kills):,} | {what} | {wait} |")
    lines += [
        "\n| layout | kills | runs finished | with the uninterrupted run's bits | starts x processes |",
        "|---|---|---|---|---|",
    ]
    for layout in sorted({run.layout for run in runs}):
        of = [run for run in runs if run.layout == layout]
        kills, same = sum(len(run.kills) for run in of), sum(run.same for run in of)
        lines.append(f"| {layout} | {kills:,} | {len(of)} | {same} | {_starts(of)} |")
    strange = [text for run in runs for text in run.unexplained]
    lines += [
        f"\n{sum(run.same for run in runs):,} of {len(runs):,} finished runs "
        "have the same hash as the uninterrupted run;",
        f"starts by number of processes: {_starts(runs)}; orphans: {sum(run.orphans for run in runs)};",
        f"failures that a kill does not explain: {len(strange)}",
        *strange[:3],
    ]
    return "\n".join(lines)


def well(runs: Sequence[Run]) -> bool:
    return bool(runs) and all(run.same and not run.orphans and not run.unexplained for run in runs)


def logged(paths: Sequence[Path]) -> list[Run]:
    """The runs in the logs of earlier calls."""
    found = []
    for line in (line for path in paths for line in path.read_text().splitlines()):
        content = json.loads(line)
        found.append(Run(**{**content, "kills": [Kill(**kill) for kill in content["kills"]]}))
    return found


def _starts(runs: Sequence[Run]) -> str:
    sizes = Counter(size for run in runs for size in run.worlds)
    return ", ".join(f"{count:,} x {size}" for size, count in sorted(sizes.items()))


def quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]

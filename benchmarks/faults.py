"""Kills processes of strict runs at random instants, a thousand times, and looks at the bits they end with.

    python benchmarks/faults.py --kills 1000 --jobs 8          # the long part
    python benchmarks/faults.py --kills 12 --jobs 1            # a minute or two
    python benchmarks/faults.py --report a.jsonl b.jsonl       # one table of what several (--log FILE) have found
    python benchmarks/fault_outcomes.py                        # disk full, bit flips and the like

Every job trains one of two recipes (strict mode, 4 shards) again and again: the embedded digits, or image files that
loader processes decode. While a run is under way something of it is killed with SIGKILL: a rank, rank 0, a loader
process, the launcher, everything at once, rank 0 while it writes a checkpoint or just before the checkpoint gets its
name. Then the run goes on, on a random number of processes from 1 to 4: by itself where its launcher lives
(`--launch.restarts`), else by the same command again. A run that was let finish must have the hash of the run that
nobody touched. Prints a markdown table. Runs are written to memory (/dev/shm) if there is such a place: what a kill
leaves behind is the same there, and a thousand runs do not wait for a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from drumline.state.inspect import inspect

KINDS = (
    "a rank",
    "rank 0",
    "a loader process",
    "the launcher",
    "everything",
    "while saving",
    "before the rename",
)
STEPS, SHARDS = 240, 4
SOURCES = {
    "digits": ("data.source=digits", "data.batch=48", "data.workers=0"),
    "files": (
        "data.source=folder",
        "data.path=images",
        "data.size=16",
        "data.batch=24",
        "data.pool=processes",
        "data.workers=1",
    ),
}
RECIPE = (
    "model.name=resnet8",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.log_every=1",
    "run.strict=true",
    f"run.shards={SHARDS}",
    "run.device=cpu",
    "checkpoint.every_steps=5",
    "checkpoint.every_epochs=0",
    "checkpoint.resume=auto",
)
EARLY, START_SECONDS, STEP_SECONDS = 0.5, 4.0, 1.0
"""This share of the kills falls within so many seconds after a start, the others so soon after it steps again."""


@dataclass
class Kill:
    """One SIGKILL and what came of it."""

    kind: str
    at: float
    step: int
    by_itself: bool
    """Whether the launcher was to restart it."""
    processes: int
    resumed: int | None = None
    """The step gone on from; None where the next kill came before that."""
    recovered: float | None = None
    """When the first step after it was done."""


@dataclass
class Run:
    """One run that came to its end, and all that happened to it."""

    kills: list[Kill] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    """Processes of each start."""
    orphans: int = 0
    unexplained: list[str] = field(default_factory=list)
    """What a command that nobody had touched said when it failed."""
    same: bool = False
    """Whether it has the hash of the run that nobody touched."""


class Tally:
    """What all jobs found, together."""

    def __init__(self, wanted: int, log: Path | None) -> None:
        self.wanted, self.log = wanted, log
        self.kills = 0
        self.runs: list[Run] = []
        self._lock = threading.Lock()

    @property
    def enough(self) -> bool:
        return self.kills >= self.wanted

    def killed(self) -> None:
        with self._lock:
            self.kills += 1

    def finished(self, run: Run) -> None:
        with self._lock:
            self.runs.append(run)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")


class Job:
    """Runs of one folder, one after the other, until there are enough kills."""

    def __init__(self, folder: Path, source: str, whole: str, seed: int, tally: Tally) -> None:
        self.folder, self.source, self.whole = folder, source, whole
        self.tally, self.random = tally, random.Random(seed)
        self.run = folder / "runs" / "run-0"
        self.story = Run()

    def work(self) -> None:
        number = 0
        while not self.tally.enough:
            self.run, self.story = self.folder / "runs" / f"run-{number}", Run()
            while not self.finished_once():
                continue
            self.story.same = sha256(self.run) == self.whole
            self.tally.finished(self.story)
            shutil.rmtree(self.run)
            number += 1

    @property
    def last(self) -> Kill | None:
        return self.story.kills[-1] if self.story.kills else None

    def finished_once(self) -> bool:
        """Starts the run once more; whether it came to its end. It is let finish when there are enough kills."""
        processes, restarts = self.random.randint(1, SHARDS), self.random.choice((0, 1000))
        self.story.worlds.append(processes)
        process = begin(self.folder, self.source, self.run.name, processes, restarts)
        killed = False
        while process.poll() is None and not self.tally.enough:
            self.wait(process)
            if process.poll() is not None or self.tally.enough:
                break
            if self.kill(process, processes, restarts > 0):
                killed = True
                if self.last is not None and not self.last.by_itself:
                    break
        while process.poll() is None:
            self.observe()
            time.sleep(0.02)
        said = process.communicate()[1]
        self.observe()
        self.count_orphans()
        if process.returncode and not killed:
            self.story.unexplained.append(said[-1500:])
        return process.returncode == 0

    def wait(self, process: subprocess.Popen[str]) -> None:
        """For the instant of the next kill."""
        early, begun = self.random.random() < EARLY, time.time()
        if not early:
            while process.poll() is None and self.steps()[1] < begun and not self.tally.enough:
                self.observe()
                time.sleep(0.02)
        until = time.time() + self.random.uniform(0, START_SECONDS if early else STEP_SECONDS)
        while process.poll() is None and time.time() < until:
            self.observe()
            time.sleep(0.02)

    def kill(self, process: subprocess.Popen[str], processes: int, restarts: bool) -> bool:
        """Whether somebody was there to be killed."""
        for kind in self.random.sample(KINDS, len(KINDS)):
            victims = self.victims(process.pid, kind)
            if victims:
                break
        else:
            return False
        launcher_lives = process.pid not in victims
        kill = Kill(kind, time.time(), self.steps()[0], restarts and launcher_lives, processes)
        if _sigkill(victims) == 0:
            return False
        self.story.kills.append(kill)
        self.tally.killed()
        return True

    def victims(self, pid: int, kind: str) -> list[int]:
        """Whom to kill; nobody where there is no such process (yet)."""
        family = _family(pid)
        ranks = {rank: each.pid for each in family if (rank := _rank(each)) is not None}
        ranks = ranks or {0: pid}
        loaders = [each.pid for each in family if _loads(each)]
        saving = self.run / "checkpoints"
        if kind == "while saving" and not _soon(lambda: any(saving.glob("*.tmp"))):
            return []
        if kind == "before the rename" and not _soon(lambda: any(saving.glob("*.tmp/manifest.json"))):
            return []
        return {
            "a rank": [self.random.choice(sorted(ranks.values()))],
            "a loader process": [self.random.choice(loaders)] if loaders else [],
            "the launcher": [pid],
            "everything": [pid, *(each.pid for each in family)],
        }.get(kind, [ranks[0]] if 0 in ranks else [])

    def observe(self) -> None:
        """Notes the first step after the last kill."""
        kill = self.last
        if kill is None or kill.recovered is not None:
            return
        step, at = self.steps()
        resumed = self.resumed_at()
        # A run steps on for a moment when its loader dies: only what follows the log of a new start counts.
        if step and resumed is not None and kill.at < resumed[0] < at:
            kill.recovered, kill.resumed = at, resumed[1]

    def steps(self) -> tuple[int, float]:
        """The last step in the metrics, and its time."""
        try:
            lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
            last = json.loads(lines[-1])
        except (OSError, IndexError, json.JSONDecodeError):
            return 0, 0.0
        return int(last.get("step") or 0), float(last["time"])

    def resumed_at(self) -> tuple[float, int] | None:
        """When the run last began to step, by the age of its log, and at which step."""
        try:
            text = (self.run / "log.txt").read_text()
            changed = (self.run / "log.txt").stat().st_mtime
        except OSError:
            return None
        places = [line for line in text.splitlines() if "resumed from" in line]
        return changed, int(places[-1].rpartition("step ")[2].replace(",", "")) if places else 0

    def count_orphans(self) -> None:
        """Nothing of the run may be alive a second after its command has ended."""
        mark, deadline = str(self.folder), time.monotonic() + 1.0
        while (left := _processes_of(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.story.orphans += len(left)


def begin(folder: Path, source: str, name: str, processes: int, restarts: int) -> subprocess.Popen[str]:
    """The command of a user."""
    words = ["train", *SOURCES[source], *RECIPE, f"run.dir={folder / 'runs'}", f"run.name={name}"]
    words += [f"parallel.processes={processes}", f"launch.restarts={restarts}"]
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DRUMLINE_FAULTS": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_images(folder: Path) -> None:
    """Noise in four classes, for a run whose images must be read and decoded."""
    noise = np.random.default_rng(0)
    for split, each in (("train", 60), ("val", 6)):
        for number in range(4 * each):
            path = folder / "images" / split / f"class-{number % 4}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)


def sha256(run: Path) -> str:
    """What `drumline verify` says."""
    found = inspect(run)
    return found.state_sha256 if found.sound else f"not sound: {'; '.join(found.unsound)}"


def untouched(base: Path, source: str) -> str:
    """The hash of a run that nobody kills."""
    folder = base / f"untouched-{source}"
    write_images(folder)
    process = begin(folder, source, "whole", 1, 0)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    return sha256(folder / "runs" / "whole")


def report(runs: Sequence[Run]) -> str:
    """The table."""
    every = [kill for run in runs for kill in run.kills]
    lines = [
        f"{os.cpu_count()} CPU cores, torch {torch.__version__}: {len(every):,} kills\n",
        "| killed | times | steps lost, mean / most | training again after, s, p50 / p99 |",
        "|---|---|---|---|",
    ]
    rows: list[tuple[str, Sequence[Kill]]] = [
        (kind, [kill for kill in every if kill.kind == kind]) for kind in KINDS
    ]
    rows.append(("restarted by the launcher", [kill for kill in every if kill.by_itself]))
    rows.append(("all", every))
    for name, kills in rows:
        back = [kill for kill in kills if kill.recovered is not None]
        lost = [max(0, kill.step - (kill.resumed or 0)) for kill in back]
        waits = sorted((kill.recovered or 0) - kill.at for kill in back)
        what = f"{statistics.mean(lost):.1f} / {max(lost)}" if lost else "-"
        wait = f"{quantile(waits, 0.5):.1f} / {quantile(waits, 0.99):.1f}" if waits else "-"
        lines.append(f"| {name} | {len(kills):,} | {what} | {wait} |")
    sizes = Counter(size for run in runs for size in run.worlds)
    starts = ", ".join(f"{count:,} x {size}" for size, count in sorted(sizes.items()))
    strange = [text for run in runs for text in run.unexplained]
    lines += [
        f"\n{sum(run.same for run in runs):,} of {len(runs):,} finished runs have the hash of the untouched one;",
        f"starts by number of processes: {starts}; orphans: {sum(run.orphans for run in runs)};",
        f"failures that no kill explains: {len(strange)}",
        *strange[:3],
    ]
    return "\n".join(lines)


def well(runs: Sequence[Run]) -> bool:
    return bool(runs) and all(run.same and not run.orphans and not run.unexplained for run in runs)


def logged(paths: Sequence[Path]) -> list[Run]:
    """What earlier calls have written."""
    found = []
    for line in (line for path in paths for line in path.read_text().splitlines()):
        content = json.loads(line)
        found.append(Run(**{**content, "kills": [Kill(**kill) for kill in content["kills"]]}))
    return found


def quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _rank(process: psutil.Process) -> int | None:
    """Of a worker of the run; loader processes inherit the variable, but do not run the command."""
    try:
        words = process.cmdline()
        return int(process.environ()["RANK"]) if "train" in words and "drumline" in words else None
    except (psutil.Error, KeyError):
        return None


def _loads(process: psutil.Process) -> bool:
    """Whether a fork server of ours has made it: it then has the server's command line."""
    try:
        made_by = process.parent()
        words = process.cmdline()
        return (
            any("drumline.data" in word for word in words)
            and made_by is not None
            and made_by.cmdline() == words
        )
    except psutil.Error:
        return False


def _processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DRUMLINE_FAULTS") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _soon(happens: Callable[[], bool], seconds: float = 0.5) -> bool:
    """Looks as fast as it can, so that the kill falls into what it waits for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.0002)
    return False


def _sigkill(pids: Sequence[int]) -> int:
    """How many of them it reached."""
    reached = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            reached += 1
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop killing after this long")
    parser.add_argument("--log", type=Path, help="append each finished run to this file")
    parser.add_argument("--report", type=Path, nargs="+", help="only print the table of these logs")
    args = parser.parse_args()
    if args.report:
        runs = logged(args.report)
        print(report(runs))
        return int(not well(runs))
    begun = time.monotonic()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="drumline-faults-", dir=memory) as base:
        whole = {source: untouched(Path(base), source) for source in SOURCES}
        tally = Tally(args.kills, args.log)
        threads = []
        for number in range(args.jobs):
            folder, source = Path(base) / f"job-{number}", list(SOURCES)[number % len(SOURCES)]
            write_images(folder)
            job = Job(folder, source, whole[source], args.seed + number, tally)
            threads.append(threading.Thread(target=job.work))
            threads[-1].start()
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() - begun > 60 * args.minutes:
                tally.wanted = 0
            if sys.stderr.isatty():
                print(f"\r{tally.kills:,} kills", end="", file=sys.stderr, flush=True)
            time.sleep(0.5)
    print(report(tally.runs))
    return int(not well(tally.runs))


if __name__ == "__main__":
    sys.exit(main())

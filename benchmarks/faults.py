"""Kills processes of runs at random times, in every layout, and compares the bits that the runs end with.

    python benchmarks/faults.py --kills 200 --jobs 8 --log a.jsonl     # the long part: all layouts, 1 to 4 processes
    python benchmarks/faults.py --kills 12 --jobs 1 --layouts ddp,fsdp --most 2
    python benchmarks/faults.py --report a.jsonl b.jsonl               # one table of the logs of several calls
    python benchmarks/faults.py --small                                # one kill: a check that the script works
    python benchmarks/fault_outcomes.py                                # full disks, bit flips and similar faults

Each job trains one run after another: a layout (strict, single, ddp, fsdp, pipeline, data x pipeline), a number of
processes, and a source (the embedded digits, or image files that loader processes decode). During a run, the job
kills part of it with SIGKILL: a rank, rank 0, a loader process, the launcher, all processes, rank 0 while it writes
a checkpoint, or rank 0 just before it renames the checkpoint. Then the run continues: restarted by its launcher if
that is alive (`--launch.restarts`), otherwise with the same command. A strict run continues on a random number of
processes, the others on the same number. After `--per-run` kills, a run is left to finish. It must end with the
hash of the same run without kills.

Prints markdown tables. `--log` appends each finished run to a file, and `--report` adds up such files. Exits with 1
if a hash differs, a process is left over, or a command fails without a kill. Needs nothing besides Drumline. Runs
are written to memory (/dev/shm) if it exists, so that many runs do not wait for a disk; a kill leaves the same
files there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from PIL import Image

from drumline.state.verify import verify_run
from faults_processes import family, is_loader, processes_of, rank_of, sigkill, soon
from faults_report import KINDS, Kill, Run, logged, report, well
from harness import Parser

STEPS, SMALL_STEPS, SHARDS = 240, 30, 4
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
    "train.eval_every=0",
    "train.log_every=1",
    "run.device=cpu",
    "parallel.threads=1",
    "checkpoint.every_steps=5",
    "checkpoint.every_epochs=0",
    "checkpoint.resume=auto",
)
PIPELINE = ("parallel.layout=pipeline", "parallel.micro_batches=4", "parallel.split=even")
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "strict": (("run.strict=true", f"run.shards={SHARDS}"), ((1, 2, 3, 4),)),
    "single": (("parallel.layout=single",), ((1,),)),
    "ddp": (("parallel.layout=ddp",), ((2,), (3,), (4,))),
    "fsdp": (("parallel.layout=fsdp",), ((2,), (3,), (4,))),
    "pipeline": (PIPELINE, ((2,), (3,))),
    "data x pipeline": ((*PIPELINE, "parallel.stages=2"), ((4,),)),
}
"""What each layout adds to the recipe, and its numbers of processes. Within a group of numbers, a run has the same
bits, so each of its starts may use a different one."""
EARLY, START_SECONDS, STEP_SECONDS = 0.5, 4.0, 1.0
"""The fraction of kills within START_SECONDS of a start. The others come within STEP_SECONDS of its first step."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    layout: str
    source: str
    worlds: tuple[int, ...]
    steps: int

    def words(self) -> list[str]:
        return [*SOURCES[self.source], *RECIPE, *LAYOUTS[self.layout][0], f"train.steps={self.steps}"]

    def __str__(self) -> str:
        return f"{self.layout}-{self.source}-{self.worlds[0]}".replace(" ", "-")


def settings(layouts: Sequence[str], most: int, steps: int) -> list[Setting]:
    """Every setting with at most `most` processes, alternating between the layouts."""
    found = []
    for source in SOURCES:
        for layout in layouts:
            for group in LAYOUTS[layout][1]:
                if worlds := tuple(size for size in group if size <= most):
                    found.append(Setting(layout, source, worlds, steps))
    return found


class Uninterrupted:
    """The hashes of runs without kills, each computed when it is first needed."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._found: dict[Setting, str] = {}
        self._lock = threading.Lock()
        self._locks: dict[Setting, threading.Lock] = {}

    def __getitem__(self, setting: Setting) -> str:
        with self._lock:
            lock = self._locks.setdefault(setting, threading.Lock())
        with lock:
            if setting not in self._found:
                self._found[setting] = self._train(setting)
            return self._found[setting]

    def _train(self, setting: Setting) -> str:
        folder = self._base / f"uninterrupted-{setting}"
        write_images(folder)
        process = begin(folder, setting, "whole", setting.worlds[0], 0)
        said = process.communicate()[1]
        assert process.returncode == 0, said
        return sha256(folder / "runs" / "whole")


class Tally:
    """The results of all jobs."""

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


class Shared(Iterator[Setting]):
    """One iterator for all jobs."""

    def __init__(self, items: Iterator[Setting]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __next__(self) -> Setting:
        with self._lock:
            return next(self._items)


class Job:
    """Runs of one folder, one after the other, until there are enough kills."""

    def __init__(
        self,
        folder: Path,
        plan: Iterator[Setting],
        whole: Uninterrupted,
        seed: int,
        per_run: int,
        tally: Tally,
    ) -> None:
        self.folder, self.plan, self.whole, self.per_run = folder, plan, whole, per_run
        self.tally, self.random = tally, random.Random(seed)
        self.run = folder / "runs" / "run-0"
        self.story = Run()

    def work(self) -> None:
        """Reports every error, which would otherwise be lost with the thread."""
        number = 0
        while not self.tally.enough:
            setting = next(self.plan)
            self.run, self.story = self.folder / "runs" / f"run-{number}", Run(setting.layout, setting.source)
            try:
                while not self.finished_once(setting):
                    if len(self.story.unexplained) >= 3:
                        break
                found = sha256(self.run)
                self.story.same = found == self.whole[setting]
            except Exception as error:
                self.story.unexplained.append(f"{setting}: {type(error).__name__}: {error}")
            self.tally.finished(self.story)
            shutil.rmtree(self.run, ignore_errors=True)
            number += 1

    @property
    def spared(self) -> bool:
        """Whether the run is left to finish."""
        return self.tally.enough or len(self.story.kills) >= self.per_run

    @property
    def last(self) -> Kill | None:
        return self.story.kills[-1] if self.story.kills else None

    def finished_once(self, setting: Setting) -> bool:
        """Starts the run once more. Returns whether it finished."""
        processes, restarts = self.random.choice(setting.worlds), self.random.choice((0, 1000))
        self.story.worlds.append(processes)
        process = begin(self.folder, setting, self.run.name, processes, restarts)
        killed = False
        while process.poll() is None and not self.spared:
            self.wait(process)
            if process.poll() is not None or self.spared:
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
        """Waits for the time of the next kill."""
        early, begun = self.random.random() < EARLY, time.time()
        if not early:
            while process.poll() is None and self.steps()[1] < begun and not self.spared:
                self.observe()
                time.sleep(0.02)
        until = time.time() + self.random.uniform(0, START_SECONDS if early else STEP_SECONDS)
        while process.poll() is None and time.time() < until:
            self.observe()
            time.sleep(0.02)

    def kill(self, process: subprocess.Popen[str], processes: int, restarts: bool) -> bool:
        """Kills something. Returns False if there was no process to kill."""
        for kind in self.random.sample(KINDS, len(KINDS)):
            victims = self.victims(process.pid, kind)
            if victims:
                break
        else:
            return False
        launcher_lives = process.pid not in victims
        kill = Kill(kind, time.time(), self.steps()[0], restarts and launcher_lives, processes)
        if sigkill(victims) == 0:
            return False
        self.story.kills.append(kill)
        self.tally.killed()
        return True

    def victims(self, pid: int, kind: str) -> list[int]:
        """The processes to kill; empty if there is none of this kind (yet)."""
        members = family(pid)
        ranks = {rank: each.pid for each in members if (rank := rank_of(each)) is not None}
        ranks = ranks or {0: pid}
        loaders = [each.pid for each in members if is_loader(each)]
        saving = self.run / "checkpoints"
        if kind == "during a save" and not soon(lambda: any(saving.glob("*.tmp"))):
            return []
        if kind == "before the checkpoint's rename" and not soon(
            lambda: any(saving.glob("*.tmp/manifest.json"))
        ):
            return []
        return {
            "a rank": [self.random.choice(sorted(ranks.values()))],
            "a loader process": [self.random.choice(loaders)] if loaders else [],
            "the launcher": [pid],
            "all processes": [pid, *(each.pid for each in members)],
        }.get(kind, [ranks[0]] if 0 in ranks else [])

    def observe(self) -> None:
        """Records the first step after the last kill."""
        kill = self.last
        if kill is None or kill.recovered is not None:
            return
        step, at = self.steps()
        resumed = self.resumed_at()
        # A run takes a few more steps after its loader dies, so only steps after a new start count.
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
        """When the run last resumed, by the age of its log, and at which step."""
        try:
            text = (self.run / "log.txt").read_text()
            changed = (self.run / "log.txt").stat().st_mtime
        except OSError:
            return None
        places = [line for line in text.splitlines() if "resumed from" in line]
        return changed, int(places[-1].rpartition("step ")[2].replace(",", "")) if places else 0

    def count_orphans(self) -> None:
        """Counts the processes of the run that are alive a second after its command has ended."""
        mark, deadline = str(self.folder), time.monotonic() + 1.0
        while (left := processes_of(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.story.orphans += len(left)


def begin(folder: Path, setting: Setting, name: str, processes: int, restarts: int) -> subprocess.Popen[str]:
    """Starts the command."""
    words = ["train", *setting.words(), f"run.dir={folder / 'runs'}", f"run.name={name}"]
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
    """Writes noise in four classes, for a run that reads and decodes images."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for split, each in (("train", 60), ("val", 6)):
        for number in range(4 * each):
            path = folder / "images" / split / f"class-{number % 4}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)


def sha256(run: Path) -> str:
    """The hash that `drumline verify` reports."""
    found = verify_run(run)
    return found.state_sha256 if found.sound else f"not sound: {'; '.join(found.unsound)}"


def main() -> int:
    parser = Parser(__doc__, kills=1, jobs=1, layouts="strict", most=1, steps=SMALL_STEPS)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--per-run", type=int, default=5, help="kills before a run is left to finish")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"default: {','.join(LAYOUTS)}")
    parser.add_argument("--most", type=int, default=SHARDS, help="the most processes of a run")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop killing after this time")
    parser.add_argument("--log", type=Path, help="append each finished run to this file")
    parser.add_argument("--report", type=Path, nargs="+", help="only print the tables of these logs")
    args = parser.parse_args()
    if args.report:
        runs = logged(args.report)
        print(report(runs))
        return int(not well(runs))
    if unknown := set(args.layouts.split(",")) - set(LAYOUTS):
        parser.error(f"--layouts: {', '.join(sorted(unknown))}: choose from {', '.join(LAYOUTS)}")
    every = settings(args.layouts.split(","), args.most, args.steps)
    if not every:
        parser.error(f"--most {args.most}: the layouts {args.layouts} need more processes")
    random.Random(args.seed).shuffle(every)
    begun, plan = time.monotonic(), Shared(cycle(every))
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="drumline-faults-", dir=memory) as base:
        whole, tally = Uninterrupted(Path(base)), Tally(args.kills, args.log)
        threads = []
        for number in range(args.jobs):
            folder = Path(base) / f"job-{number}"
            write_images(folder)
            job = Job(folder, plan, whole, args.seed + number, args.per_run, tally)
            threads.append(threading.Thread(target=job.work))
            threads[-1].start()
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() - begun > 60 * args.minutes:
                tally.wanted = 0
            if sys.stderr.isatty():
                print(f"\r{tally.kills:,} kills", end="", file=sys.stderr, flush=True)
            time.sleep(0.1)
    print(report(tally.runs))
    return int(not well(tally.runs))


if __name__ == "__main__":
    sys.exit(main())

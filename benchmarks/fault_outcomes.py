"""What happens to a run if its machine, its disk or its files fail? One row per fault.

Trains a tiny network on the embedded digits with the command `drumline`, once without a fault and then once per
fault: signals, a full or read-only disk during a run, and every kind of damage to every file of the newest
checkpoint. Each row shows what the command reported, its exit code, the result of `drumline verify`, and whether
the run, resumed with `--checkpoint.resume auto`, ended with the bits (parameters, buffers and optimizer) of the run
without a fault. The disk is a small tmpfs, or a limit on the size of files if a tmpfs cannot be mounted; the first
line says which. Exits with 1 if any row is not as expected.

    python benchmarks/fault_outcomes.py [--jobs 2] [--small]
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import Parser

RECIPE = (
    *("data.source=digits", "data.batch=48", "data.workers=0", "model.name=resnet8", "train.ema=0.9"),
    *("parallel.threads=1", "checkpoint.every_steps=7", "checkpoint.keep=99"),
)
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "average.safetensors")
SAVED = 3
"""The checkpoints of a damaged run. The newest one gets the damage."""
TMPFS = "size=24m"
MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """A row. `good` says whether it is as expected."""

    fault: str
    said: str
    code: int
    verified: str
    resumed: str
    good: bool


@dataclass(frozen=True)
class Bench:
    """The folder of the runs, and the hash that each should end with."""

    folder: Path
    epochs: int
    sha256: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        return (*RECIPE, f"train.epochs={self.epochs}")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="faults to try at the same time")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder), epochs=1 if asked.small else 2)
        whole = drumline("train", *bench.words, "run.name=whole", folder=bench.folder)
        assert whole.returncode == 0, whole.stderr
        bench = Bench(bench.folder, bench.epochs, state_of(bench.folder, "whole")[1])
        mounts = can_mount(bench.folder) and not asked.small
        disk = f"a tmpfs of {TMPFS.partition('=')[2]}" if mounts else "a limit on the size of files"
        print(f"The disk is {disk}. The run without a fault ends with {bench.sha256[:16]}.\n")
        print("| fault | what drumline did | exit | verify | resumed |\n|---|---|---|---|---|", flush=True)
        faults = [*damages(bench)][2:5:2] if asked.small else [*damages(bench), *accidents(bench, mounts)]
        with ThreadPoolExecutor(asked.jobs) as pool:
            outcomes = list(pool.map(report_row, faults))
    good = sum(outcome.good for outcome in outcomes)
    print(f"\n{good} of {len(outcomes)} as expected, in {time.monotonic() - began:.0f} s.")
    return 0 if good == len(outcomes) else 1


def report_row(fault: Callable[[], Outcome]) -> Outcome:
    """Tries a fault and prints its row."""
    outcome = fault()
    mark = "" if outcome.good else " (NOT AS EXPECTED)"
    cells = (outcome.fault, outcome.said + mark, outcome.code, outcome.verified, outcome.resumed)
    print(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |", flush=True)
    return outcome


# Damage to checkpoints.


def damages(bench: Bench) -> Iterator[Callable[[], Outcome]]:
    """Every kind of damage, to each file of the newest checkpoint and to folders."""

    def of_file(what: str, name: str, change: Callable[[Path], None]) -> Callable[[], Outcome]:
        return lambda: damaged(bench, f"{what}: {name}", lambda saved: change(saved[-1] / name))

    for name in FILES:
        yield of_file("cut to half", name, lambda path: os.truncate(path, path.stat().st_size // 2))
    for name in FILES:
        yield of_file("one bit flipped", name, flip)
    for name in FILES:
        yield of_file("missing", name, Path.unlink)

    def renamed(saved: list[Path]) -> None:
        saved[-1].rename(saved[-1].with_name("step-50"))

    def old_manifest(saved: list[Path]) -> None:
        """As after an interrupted copy over a folder: name and manifest belong to the previous checkpoint."""
        for name in FILES[1:]:
            (saved[-1] / name).replace(saved[-2] / name)
        shutil.rmtree(saved[-1])

    def stale(saved: list[Path]) -> None:
        shutil.copytree(saved[-2], saved[-1].with_name("step-50.tmp"))
        (saved[-1].with_name("step-50.tmp") / "manifest.json").unlink()
        shutil.copytree(saved[-2], saved[-1].with_name("step-57.aside"))

    def all_bad(saved: list[Path]) -> None:
        for checkpoint in saved:
            flip(checkpoint / "model.safetensors")

    yield lambda: damaged(bench, "a checkpoint under another step's name", renamed)
    yield lambda: damaged(bench, "old manifest, new shards", old_manifest)
    yield lambda: damaged(bench, "stale temporary folders", stale, falls_back=False)
    yield lambda: damaged(bench, "one bit flipped in every checkpoint", all_bad, hopeless=True)


def damaged(
    bench: Bench,
    fault: str,
    change: Callable[[list[Path]], None],
    falls_back: bool = True,
    hopeless: bool = False,
) -> Outcome:
    """A run as a kill after its third save leaves it: damaged, verified and resumed."""
    name = "".join(letter if letter.isalnum() else "-" for letter in fault)
    run = bench.folder / "runs" / name
    shutil.copytree(bench.folder / "runs" / "whole", run)
    shutil.rmtree(run / "weights")
    saved = checkpoints(run)
    for checkpoint in saved[SAVED:]:
        shutil.rmtree(checkpoint)
    change(saved[:SAVED])
    looked = drumline("verify", f"runs/{name}", folder=bench.folder)
    bad = sum(line.startswith("BAD") for line in looked.stdout.splitlines())
    done = drumline("train", *bench.words, f"run.name={name}", *RESUME, folder=bench.folder)
    if hopeless:
        good = done.returncode == 2 and "no checkpoint verifies" in done.stderr and looked.returncode == 1
        return Outcome(fault, "rejected: no checkpoint verifies", done.returncode, f"{bad} bad", "-", good)
    resumed = [line for line in done.stderr.splitlines() if "resumed from" in line]
    loud = "WARNING: a checkpoint does not verify" in done.stderr
    start = resumed[0].split("/")[-1].split()[0] if resumed else "nothing"
    said = f"{'warned, ' if loud else ''}resumed from {start} of {', '.join(path.name for path in saved[:SAVED])}"
    code, same = same_bits(bench, name, done)
    good = same and code == 0 and loud == falls_back and looked.returncode == int(falls_back)
    return Outcome(fault, said, code, f"{bad} bad" if bad else "sound", words_of(same), good)


# Faults during a run.

RESUME = ("checkpoint.resume=auto",)


def accidents(bench: Bench, mounts: bool) -> Iterator[Callable[[], Outcome]]:
    def killed(fault: str, which: signal.Signals) -> Outcome:
        name = which.name
        run = begin(bench, name)
        wait_for_save(bench.folder / "runs" / name, run)
        run.send_signal(which)
        code = run.wait(60)
        stopped = "stopped: " in run.said()
        verified, _ = state_of(bench.folder, name)
        again = drumline("train", *bench.words, f"run.name={name}", *RESUME, folder=bench.folder)
        _, same = same_bits(bench, name, again)
        said = "saved and stopped" if stopped else "died"
        expected = (143, True) if which == signal.SIGTERM else (-9, False)
        return Outcome(fault, said, code, verified, words_of(same), same and (code, stopped) == expected)

    def stopped_for_a_while() -> Outcome:
        run = begin(bench, "stopped")
        wait_for_save(bench.folder / "runs" / "stopped", run)
        run.send_signal(signal.SIGSTOP)
        time.sleep(2)
        run.send_signal(signal.SIGCONT)
        code = run.wait(120)
        verified, sha256 = state_of(bench.folder, "stopped")
        same = sha256 == bench.sha256
        return Outcome(
            "SIGSTOP, 2 s later SIGCONT", "continued", code, verified, "not needed, " + words_of(same), same
        )

    def disk_full(lasts: bool) -> Outcome:
        name = "full-for-good" if lasts else "full-for-a-while"
        with small_disk(bench.folder / name, mounts) as disk:
            run = begin(bench, name, run_dir=disk.folder)
            wait_for_save(disk.folder / name, run)
            disk.fill(run)
            run.wait_for_line("WARNING: step-")
            if not lasts:
                disk.free(run)
            code = run.wait(120)
            failed = run.said().count("WARNING: step-")
            disk.free(run)
            verified, sha256 = state_of(disk.folder, name, ".")
            same, resumed = sha256 == bench.sha256, "not needed, "
            if lasts:
                words = (f"run.dir={disk.folder}", f"run.name={name}", *RESUME)
                again = drumline("train", *bench.words, *words, folder=bench.folder)
                same, resumed = same_bits(bench, name, again, disk.folder)[1], ""
            left = [path.name for path in (disk.folder / name / "checkpoints").glob("*.tmp")]
        how = "for good" if lasts else "for a while"
        said = f"warned of {failed} failed saves, {'gave up' if code else 'trained on'}"
        good = same and not left and (code, failed >= 1) == (2 if lasts else 0, True) and verified == "sound"
        return Outcome(f"disk full {how}", said, code, verified, resumed + words_of(same), good)

    def read_only_folder() -> Outcome:
        run = begin(bench, "read-only")
        saved = bench.folder / "runs" / "read-only" / "checkpoints"
        wait_for_save(saved.parent, run)
        saved.chmod(0o555)
        run.wait_for_line("WARNING: step-")
        saved.chmod(0o755)
        code = run.wait(120)
        verified, sha256 = state_of(bench.folder, "read-only")
        same = sha256 == bench.sha256
        said = f"warned of {run.said().count('WARNING: step-')} failed saves, trained on"
        good = same and code == 0 and verified == "sound"
        return Outcome(
            "folder read-only for a while", said, code, verified, "not needed, " + words_of(same), good
        )

    def read_only_place() -> Outcome:
        place = bench.folder / "read-only-place"
        place.mkdir(mode=0o555)
        done = drumline("train", *bench.words, f"run.dir={place}", folder=bench.folder)
        good = done.returncode == 2 and "cannot write the run folder" in done.stderr
        return Outcome(
            "run.dir read-only", "rejected: " + first_line(done.stderr), done.returncode, "-", "-", good
        )

    def two_at_once() -> Outcome:
        run = begin(bench, "both")
        wait_for_save(bench.folder / "runs" / "both", run)
        run.send_signal(signal.SIGSTOP)  # so that it is not finished before the other starts
        words = ("run.name=both", *RESUME)
        other = drumline("train", *bench.words, *words, folder=bench.folder)
        run.send_signal(signal.SIGCONT)
        code = run.wait(120)
        verified, sha256 = state_of(bench.folder, "both")
        good = sha256 == bench.sha256 and code == 0 and other.returncode == 2
        said = "rejected the second: " + first_line(other.stderr)
        return Outcome(
            "a second run on the same folder",
            said,
            other.returncode,
            verified,
            "not needed, the same bits",
            good,
        )

    yield lambda: killed("SIGTERM", signal.SIGTERM)
    yield lambda: killed("SIGKILL", signal.SIGKILL)
    yield stopped_for_a_while
    yield lambda: disk_full(lasts=False)
    yield lambda: disk_full(lasts=True)
    yield read_only_folder
    yield read_only_place
    yield two_at_once


# The command line.


def drumline(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env=environment(),
        preexec_fn=obey_modes,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


class Begun:
    """A running command and its output so far."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._run = subprocess.Popen(
            [sys.executable, "-m", "drumline", *words],
            cwd=folder,
            env=environment(),
            preexec_fn=obey_modes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._run.pid
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._run.stderr is not None
        for line in self._run.stderr:
            self._lines.append(line)

    def send_signal(self, which: signal.Signals) -> None:
        self._run.send_signal(which)

    def poll(self) -> int | None:
        return self._run.poll()

    def said(self) -> str:
        return "".join(self._lines)

    def wait(self, seconds: float) -> int:
        code = self._run.wait(seconds)
        self._reader.join(5)
        return code

    def wait_for_line(self, start: str, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not any(line.startswith(start) for line in list(self._lines)):
            assert self.poll() is None, f"ended without {start!r}: {self.said()}"
            assert time.monotonic() < until, f"timed out waiting for {start!r}: {self.said()}"
            time.sleep(0.005)


def begin(bench: Bench, name: str, run_dir: Path | None = None) -> Begun:
    words = ["train", *bench.words, f"run.name={name}", *([f"run.dir={run_dir}"] if run_dir else [])]
    return Begun(words, bench.folder)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def obey_modes() -> None:
    """Root can write to read-only folders, except without these two capabilities (DAC_OVERRIDE, DAC_READ_SEARCH)."""
    prctl, drop_from_bounding_set = ctypes.CDLL(None).prctl, 24
    for capability in (1, 2):
        prctl(drop_from_bounding_set, capability, 0, 0, 0)


def wait_for_save(folder: Path, run: Begun, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not checkpoints(folder):
        assert run.poll() is None, f"ended before it saved: {run.said()}"
        assert time.monotonic() < until, f"timed out waiting for a save: {run.said()}"
        time.sleep(0.005)


def checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def state_of(folder: Path, name: str, runs: str = "runs") -> tuple[str, str]:
    """The result of `drumline verify` for a run, and the hash of its newest state."""
    done = drumline("verify", str(folder / runs / name), folder=folder)
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode in (0, 1) else {"state_sha256": ""}
    verified = {0: "sound", 1: f"{len(found.get('unsound', ()))} bad"}.get(
        done.returncode, first_line(done.stderr)
    )
    return verified, found["state_sha256"]


def same_bits(
    bench: Bench, name: str, done: subprocess.CompletedProcess[str], runs: Path | None = None
) -> tuple[int, bool]:
    """The exit code of a finished run, and whether it ended like the one without a fault."""
    newest = checkpoints((runs or bench.folder / "runs") / name)[-1]
    sha256 = json.loads((newest / "manifest.json").read_text())["state_sha256"]
    return done.returncode, done.returncode == 0 and sha256 == bench.sha256


def words_of(same: bool) -> str:
    return "the same bits" if same else "DIFFERENT BITS"


def first_line(text: str) -> str:
    found = [line for line in text.splitlines() if line.startswith("drumline: ")]
    return found[0].removeprefix("drumline: ")[:110] if found else text.strip()[-110:]


def flip(path: Path) -> None:
    """The lowest bit of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# A disk that can be full.


@dataclass(frozen=True)
class SmallDisk:
    """A folder with little space: a tmpfs that a ballast file fills, or a limit on the size of the run's files."""

    folder: Path
    mounted: bool

    def fill(self, run: Begun) -> None:
        if not self.mounted:
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (MIB // 4, resource.RLIM_INFINITY))
            return
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            size = MIB
            while size >= 512:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self, run: Begun) -> None:
        if self.mounted:
            (self.folder / "ballast").unlink(missing_ok=True)
        elif run.poll() is None:
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path, mounted: bool) -> Iterator[SmallDisk]:
    folder.mkdir()
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", TMPFS, "tmpfs", str(folder)], check=True)
    try:
        yield SmallDisk(folder, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a tmpfs."""
    place = folder / "mount"
    place.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    return tried.returncode == 0


if __name__ == "__main__":
    sys.exit(main())

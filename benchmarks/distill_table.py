"""Does distillation reach the published accuracies? Trains the teachers and students of pairs, several at a time.

    python benchmarks/distill_table.py --data cifar100.npz --out FOLDER --pairs resnet32x4-resnet8x4 --jobs 8

On CIFAR-100, each run is a preset of `drumline distill --presets` at its full length of 240 epochs. `--epochs`
shortens all runs; milestones, warm-ups and initial phases shrink in proportion. Imagenette and the embedded digits,
which have no presets, use the same schedule and the weights of each method's paper. A method may be combined
(`crd+kd`), use standardised logits (`kd+ls`), or change fields of the recipe's section `distill` (`dist@T=4`).

Each run is a process of its own in a run folder of its own. `--jobs` run at a time: the networks of CIFAR-100 are too
small for one of them to fill a GPU. (Processes share a GPU at the same time only under `nvidia-cuda-mps-control -d`,
otherwise in turns.) Ctrl-C, or the end of `--budget` seconds, saves all of them; the same command continues them.
Finished runs are listed in OUT/results.json and are not repeated; `--budget 0` prints what exists. OUT can move to a
different machine between two sittings: it holds the weights of the teachers and the newest checkpoints of
unfinished runs. Prints a markdown table per pair beside the published accuracies, the missing runs and the commands.
Exits with 1 if a run failed.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.files import write_text
from drumline.distillation.methods import METHODS as KINDS
from drumline.distillation.presets import preset_arguments, preset_names
from drumline.distillation.selection import select_methods
from drumline.state.checkpoint import checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from distill_report import LITERATURE, Done, Job, Setting, report
from harness import Parser

MILESTONES = (150, 180, 210)
EVALUATIONS = 6
CHECKPOINTS = 12
GRACE_S = 60.0
"""How long a run that was asked to stop may take to save itself."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of a run that was asked to stop; the last one while it was starting."""
SETS = {
    "cifar100": ("data.source=cifar100 data.augment=shift-flip", 64, "resnet32x4-resnet8x4"),
    "imagenette": ("data.source=folder data.size=160", 64, "resnet34-resnet18"),
    "digits": ("data.source=digits parallel.threads=1", 64, "resnet8x4-resnet8"),
}
"""For each set, its arguments, the batch, and the default pair: teacher-student."""
METHODS = "kd attention similarity crd dkd dist reviewkd srd hint"
SMALL = {"set": "digits", "epochs": 0.5, "methods": ["kd"], "seeds": [0], "jobs": 2}


def main() -> int:
    begun = time.monotonic()
    options = arguments()
    settings = [setting_of(options, pair) for pair in options.pairs]
    try:
        jobs = {setting.pair: jobs_of(setting) for setting in settings}
    except UserError as error:
        print(f"distill_table: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    table = Table(options.out, options.jobs, begun + options.budget)
    try:
        table.make([Run(setting, teacher_of(setting)) for setting in settings])
        taught = [(setting, done.teacher) for setting in settings if (done := table.teacher(setting))]
        # The first seed of every pair before the second of any.
        rounds = zip(*([Run(each, job, sha) for job in jobs[each.pair]] for each, sha in taught), strict=True)
        table.make([run for each in rounds for run in each])
    except KeyboardInterrupt:
        print("distill_table: interrupted; the same command continues the runs", file=sys.stderr)
    for setting in settings:
        teacher = table.teacher(setting)
        missing = {run.job: why for run, why in table.missing.items() if run.setting == setting}
        if teacher is None:
            why = missing.get(teacher_of(setting), "not started")
            print(f"{setting.pair}: the teacher is not trained yet ({why}), so there is nothing to show.")
        else:
            lines = report(setting, jobs[setting.pair], teacher_of(setting), teacher, table.book, missing)
            print("\n".join(lines), flush=True)
    return 1 if any(why.startswith("failed") for why in table.missing.values()) else 0


def arguments() -> Namespace:
    parser = Parser(__doc__, **SMALL)
    parser.add_argument("--set", choices=SETS, default="cifar100")
    parser.add_argument("--data", default="", metavar="PATH", help="path of the set; the digits need none")
    parser.add_argument(
        "--pairs", nargs="+", metavar="TEACHER-STUDENT", help="default: a standard pair of the set"
    )
    parser.add_argument("--methods", nargs="+", default=METHODS.split(), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--epochs", type=float, default=float(LITERATURE), help="epochs of every run")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="then save and stop"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("distill-table"))
    options = parser.parse_args()
    options.pairs = options.pairs or [SETS[options.set][2]]
    if options.set != "digits" and not options.data:
        parser.error(f"--data is missing: give the path of {options.set}")
    return options


# ---- what to run


def setting_of(options: Namespace, pair: str) -> Setting:
    methods = ("alone", *dict.fromkeys(name for name in options.methods if name != "alone"))
    return Setting(options.set, options.data, pair, options.epochs, methods, tuple(options.seeds))


def teacher_of(setting: Setting) -> Job:
    return Job("teacher", 0, " ".join(recipe_words(setting, "teacher", 0)))


def jobs_of(setting: Setting) -> list[Job]:
    """The runs of all students: every method with the first seed, then with the next. Raises `UserError` for an
    unknown method."""
    jobs = []
    for seed in setting.seeds:
        for method in setting.methods:
            words = recipe_words(setting, method, seed)
            recipe = Recipe.from_args([*words, *data_words(setting)])
            if method != "alone":
                select_methods(recipe.distill)
            jobs.append(Job(method, seed, " ".join(words)))
    return jobs


def recipe_words(setting: Setting, method: str, seed: int) -> list[str]:
    """The arguments of a run: those of its preset if there is one, shortened to the epochs of the table."""
    joined, *changes = method.split("@")
    networks = {"teacher": setting.teacher, "alone": setting.student}.get(method, setting.pair)
    preset = f"{setting.set}/{joined}/{networks}"
    words = preset_arguments(preset) if preset in preset_names() else own_words(setting, joined)
    return [
        *shortened(words, setting.epochs / LITERATURE),
        *(f"distill.{change}" for change in changes),
        *(["data.source=npz"] if setting.data.endswith(".npz") else []),
        f"train.eval_every={setting.epochs / EVALUATIONS:g}",
        f"checkpoint.every_epochs={setting.epochs / CHECKPOINTS:g}",
        "checkpoint.keep=1",
        f"run.seed={seed}",
    ]


def data_words(setting: Setting) -> list[str]:
    """Where the data is, which does not belong to the recipe of a run."""
    return [f"data.path={Path(setting.data).absolute()}"] if setting.data else []


def own_words(setting: Setting, method: str) -> list[str]:
    """The schedule of the literature for a set without presets. A method gets the weights of its paper."""
    data, batch, _ = SETS[setting.set]
    words = [
        *data.split(),
        f"data.batch={batch}",
        f"model.name={setting.teacher if method == 'teacher' else setting.student}",
        f"optim.lr={0.05 * batch / 64:g}",
        "optim.momentum=0.9",
        "optim.weight_decay=5e-4",
        "optim.schedule=step",
        f"optim.milestones={','.join(map(str, MILESTONES))}",
        f"train.epochs={LITERATURE}",
    ]
    if method in ("teacher", "alone"):
        return words
    names = [name for name in method.split("+") if name != "ls"]
    words += [f"distill.teacher={setting.teacher}", f"distill.method={','.join(names)}"]
    return words + (["distill.standardise=true"] if "ls" in method.split("+") else [])


def shortened(words: Sequence[str], part: float) -> list[str]:
    """The same recipe with its epochs, milestones, warm-ups and initial phases multiplied by `part`."""
    if part == 1:
        return [*words]
    fields = dict(word.split("=", 1) for word in words)
    for key in ("train.epochs", "optim.milestones"):
        fields[key] = ",".join(f"{float(number) * part:g}" for number in fields[key].split(","))
    kinds = [KINDS[name] for name in fields.get("distill.method", "").split(",") if name in KINDS]
    options = re.sub(
        r"(?<=warmup[:=])[0-9.]+",
        lambda found: f"{float(found[0]) * part:g}",
        fields.get("distill.options", ""),
    )
    if "warmup" not in options:
        warm = [f"{kind.name}.warmup:{kind.warmup * part:g}" for kind in kinds if kind.warmup]
        options = ",".join(filter(None, [options, *warm]))
    if options:
        fields["distill.options"] = options
    if initial := max((kind.initial_epochs for kind in kinds), default=0.0):
        fields["distill.initial_epochs"] = f"{initial * part:g}"
    return [f"{key}={value}" for key, value in fields.items()]


# ---- running


@dataclass(frozen=True)
class Run:
    """One run of one pair."""

    setting: Setting
    job: Job
    teacher: str = ""
    """SHA-256 of the teacher's weights; empty for the teacher itself."""

    @property
    def name(self) -> str:
        """The name of its run folder; a different recipe or teacher gets a different one."""
        recipe = hashlib.sha256(f"{self.job.words}{self.teacher}".encode()).hexdigest()[:8]
        method = re.sub(r"[^\w+.-]", "_", self.job.method)
        return f"{self.setting.pair}-{method}-{self.job.seed}-{recipe}"

    def __str__(self) -> str:
        return f"{self.setting.pair}: {self.job.method}, seed {self.job.seed}"


@dataclass
class Table:
    """The results in a folder, and the runs that add to them."""

    out: Path
    at_a_time: int
    deadline: float
    book: list[Done] = field(default_factory=list)
    missing: dict[Run, str] = field(default_factory=dict)
    """Why a run has no result."""

    def __post_init__(self) -> None:
        if self._results.exists():
            self.book = [Done(**entry) for entry in json.loads(self._results.read_text())["runs"]]

    def teacher(self, setting: Setting) -> Done | None:
        """The result of a pair's teacher, if its weights are there."""
        run = Run(setting, teacher_of(setting))
        weights = self._teacher_weights(run)
        found = sha256(weights) if weights.exists() else ""
        return next((done for done in self.book if done.answers(setting.pair, run.job, found)), None)

    def make(self, runs: Sequence[Run]) -> None:
        """Makes those runs that have no result yet, several at a time, until the deadline."""
        waiting = [run for run in runs if not self._done(run)]
        started: dict[Run, subprocess.Popen[str]] = {}
        try:
            while (waiting or started) and time.monotonic() < self.deadline:
                while waiting and len(started) < self.at_a_time:
                    run = waiting.pop(0)
                    started[run] = self._start(run)
                time.sleep(0.1)
                for run in [run for run, process in started.items() if process.poll() is not None]:
                    self._end(run, started.pop(run).returncode)
        finally:
            for process in started.values():
                process.send_signal(signal.SIGTERM)
            for run, process in started.items():
                try:
                    self._end(run, process.wait(GRACE_S))
                except subprocess.TimeoutExpired:
                    process.kill()
                    self.missing[run] = "killed, because it did not stop; it resumes from its last checkpoint"
        self.missing |= dict.fromkeys(waiting, "no time left")

    def _done(self, run: Run) -> bool:
        if not run.teacher:
            return self.teacher(run.setting) is not None
        return any(done.answers(run.setting.pair, run.job, run.teacher) for done in self.book)

    def _start(self, run: Run) -> subprocess.Popen[str]:
        setting = run.setting
        words = [*run.job.words.split(), *data_words(setting)]
        words += [f"run.dir={self._runs}", f"run.name={run.name}", "checkpoint.resume=auto"]
        command = "train"
        if run.job.method not in ("teacher", "alone"):
            command = "distill"
            words.append(
                f"distill.teacher_weights={self._teacher_weights(Run(setting, teacher_of(setting)))}"
            )
        self._runs.mkdir(exist_ok=True)
        print(f"{run}: starts", file=sys.stderr)
        with self._printed(run).open("w") as out, self._log(run).open("a") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "drumline", command, *words], stdout=out, stderr=err, text=True
            )

    def _end(self, run: Run, code: int) -> None:
        """Enters the result of a process that has ended. Keeps of a stopped run what continues it, the newest
        checkpoint, and nothing of the folder of a finished one."""
        folder = self._runs / run.name
        if code in STOPPED:
            older = [path for each in folder.rglob("checkpoints") for path in checkpoints(each)[:-1]]
            for path in (*older, *folder.rglob("weights")):
                shutil.rmtree(path)
            self.missing[run] = "saved; the same command continues it"
            return
        if code:
            last = self._log(run).read_text().strip().splitlines()[-1:]
            self.missing[run] = f"failed with exit code {code}: {' '.join(last)} ({self._log(run)})"
            print(f"{run}: {self.missing[run]}", file=sys.stderr)
            return
        result = json.loads(self._printed(run).read_text().splitlines()[-1])
        teacher = run.teacher
        if not teacher:
            weights = (folder / "weights" / "last.safetensors").replace(self._teacher_weights(run))
            teacher = sha256(weights)
        done = Done(
            pair=run.setting.pair,
            method=run.job.method,
            seed=run.job.seed,
            words=run.job.words,
            teacher=teacher,
            machine=f"{machine()}, torch {torch.__version__}",
            correct=result["correct"],
            samples=result["samples"],
            top1=result["top1"],
            best_top1=result["best_top1"],
            agreement=result.get("agreement"),
        )
        self.book.append(done)
        write_text(self._results, json.dumps({"runs": [asdict(each) for each in self.book]}, indent=1) + "\n")
        shutil.rmtree(folder)
        print(f"{run}: top-1 {done.top1:.2%}", file=sys.stderr)

    @property
    def _results(self) -> Path:
        return self.out / "results.json"

    @property
    def _runs(self) -> Path:
        return self.out.absolute() / "runs"

    def _teacher_weights(self, run: Run) -> Path:
        return self.out.absolute() / f"{run.name}.safetensors"

    def _printed(self, run: Run) -> Path:
        return self._runs / f"{run.name}.json"

    def _log(self, run: Run) -> Path:
        return self._runs / f"{run.name}.log"


def machine() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {platform.machine()}"


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())

"""Are distilled students better than the same student alone? Trains a teacher, then every student.

    python benchmarks/distill_quality.py --set cifar100 --data FOLDER --out FOLDER --epochs 30 --seeds 0,1

The schedule is that of the literature for CIFAR-100 (240 epochs, learning rate divided by 10 at 150, 180 and 210),
shortened to `--epochs`: the same for the student alone and for every method. A method's warm-up and initial stage
shrink with it. Loss weights are those of each method's paper. A method may be combined (`crd+kd`), use logit
standardisation (`kd+ls`), or change fields of the recipe's section `distill` (`dist@T=4`).

Each finished run is written to OUT/results.json and is not repeated, so several calls, each with its `--budget` of
seconds, add up; `--budget 0` prints what exists. The data: CIFAR's official files or an .npz; Imagenette: class
folders under train/ and val/. Prints a markdown table, the missing runs, the commands, and which methods beat the
student alone by more than the spread. Exits with 1 if a run failed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch

from drumline.config.recipe import Distill, Recipe
from drumline.core.errors import UserError
from drumline.core.files import write_text
from drumline.data.classes import Classes
from drumline.distillation.methods import METHODS
from drumline.distillation.run import distill
from drumline.distillation.selection import select_methods
from drumline.distillation.teacher import agreement_metric, load_teachers
from drumline.observe.display import Display
from drumline.parallel.process_group import pick_device, resolve_device_type
from drumline.parallel.strategy import Strategy
from drumline.parallel.world import World, single_process
from drumline.training.evaluate import score_module
from drumline.training.loop import train
from drumline.training.metrics import Outputs
from drumline.training.output import TrainResult
from drumline.training.schedule import Plan
from drumline.training.sets import Sets
from drumline.training.task import Task, classification

sys.path.insert(0, str(Path(__file__).parent))
from distill_table import LITERATURE, Done, Job, Setting, report
from harness import Parser

MILESTONES = (150, 180, 210)
EVALUATIONS = 6
SETS = {
    "cifar100": ("data.augment=shift-flip", 128, "resnet32x4", "resnet8x4"),
    "cifar10": ("data.augment=shift-flip", 128, "resnet32x4", "resnet8x4"),
    "imagenette": ("data.source=folder data.size=160", 64, "resnet34", "resnet18"),
    "digits": ("data.source=digits parallel.threads=1", 64, "resnet8x4", "resnet8"),
}
"""For each set, its arguments and the default batch, teacher and student."""
SMALL = {"set": "digits", "epochs": 0.5, "methods": "alone,kd", "seeds": "0"}


def main() -> int:
    begun = time.perf_counter()
    setting, out, budget = arguments()
    try:
        jobs = students(setting)
    except UserError as error:
        print(f"distill_quality: {error}", file=sys.stderr)
        return 2
    # With deterministic algorithms, torch requires it for cuBLAS.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = single_process(pick_device(resolve_device_type("auto"), 0))
    out.mkdir(parents=True, exist_ok=True)
    book = read(out)
    why_missing: dict[Job, str] = {}

    def in_time(seconds: float) -> bool:
        return budget - (time.perf_counter() - begun) > seconds

    teacher = Job("teacher", 0, " ".join(schedule(setting, setting.teacher, setting.teacher_epochs, seed=0)))
    taught = known_teacher(book, teacher, out)
    if taught is None and in_time(0.0):
        taught = train_teacher(setting, teacher, book, out, world)
    if taught is None:
        print("The teacher is not trained yet, so there is nothing to show.")
        return 0
    for job in jobs:
        if any(done.answers(job, taught.teacher) for done in book):
            continue
        # Before the first student, only the teacher's time is known.
        known = [each.seconds for each in book if each.teacher == taught.teacher and each.method != "teacher"]
        if not in_time(max(known, default=taught.seconds)):
            why_missing[job] = "no time left"
            continue
        try:
            book.append(teach(setting, job, teacher, taught, out, world))
        except Interrupted:
            why_missing[job] = "interrupted"
            break
        except Exception as error:  # a method that fails must not cost the others their runs
            traceback.print_exc()
            why_missing[job] = f"failed: {type(error).__name__}: {error}"
        else:
            write(out, book)
    print("\n".join(report(setting, jobs, teacher, taught, book, why_missing)), flush=True)
    return 1 if any(word.startswith("failed") for word in why_missing.values()) else 0


def arguments() -> tuple[Setting, Path, float]:
    """What to run, the output folder, and the budget in seconds."""
    parser = Parser(__doc__, **SMALL)
    parser.add_argument("--set", choices=SETS, default="cifar100")
    parser.add_argument("--data", default="", metavar="PATH", help="path of the set; the digits need none")
    parser.add_argument("--teacher", help="default: resnet32x4 on CIFAR")
    parser.add_argument("--student", help="default: resnet8x4 on CIFAR")
    parser.add_argument(
        "--epochs", type=float, default=30.0, help=f"epochs of a student; the literature has {LITERATURE}"
    )
    parser.add_argument("--teacher-epochs", type=float, help="epochs of the teacher; default: --epochs")
    parser.add_argument("--methods", default="alone,kd,dkd,dist,crd,reviewkd")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--batch", type=int, help="default: 128 on CIFAR")
    parser.add_argument("--lr", type=float, help="default: 0.05 per 64 samples of the batch")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no run that may take longer")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("distill-quality"))
    args = parser.parse_args()
    if args.set != "digits" and not args.data:
        parser.error(f"--data is missing: give the path of {args.set}")
    _, batch, teacher, student = SETS[args.set]
    batch = args.batch or batch
    others = dict.fromkeys(name for name in args.methods.split(",") if name != "alone")
    setting = Setting(
        set=args.set,
        data=args.data,
        teacher=args.teacher or teacher,
        student=args.student or student,
        epochs=args.epochs,
        teacher_epochs=args.teacher_epochs or args.epochs,
        batch=batch,
        lr=args.lr or 0.05 * batch / 64,
        methods=("alone", *others),
        seeds=tuple(int(seed) for seed in args.seeds.split(",")),
    )
    return setting, args.out, float("inf") if args.budget is None else args.budget


def students(setting: Setting) -> list[Job]:
    """The runs of all students: every method with the first seed, then with the second. Raises `UserError` for an
    unknown method."""
    jobs = []
    for seed in setting.seeds:
        for method in setting.methods:
            words = schedule(setting, setting.student, setting.epochs, seed)
            if method != "alone":
                words += [f"distill.teacher={setting.teacher}", *method_words(method, setting.epochs)]
            jobs.append(Job(method, seed, " ".join(words)))
            select_methods(recipe_of(setting, jobs[-1], []).distill)
    return jobs


def schedule(setting: Setting, model: str, epochs: float, seed: int) -> list[str]:
    """The arguments that the teacher, the student alone and every method share."""
    words = SETS[setting.set][0].split()
    if setting.set.startswith("cifar"):
        words.append(f"data.source={'npz' if setting.data.endswith('.npz') else setting.set}")
    milestones = ",".join(f"{epochs * milestone / LITERATURE:g}" for milestone in MILESTONES)
    return [
        *words,
        f"data.batch={setting.batch}",
        f"model.name={model}",
        f"optim.lr={setting.lr:g}",
        "optim.momentum=0.9",
        "optim.nesterov=true",
        "optim.weight_decay=5e-4",
        "optim.schedule=step",
        f"optim.milestones={milestones}",
        f"train.epochs={epochs:g}",
        f"train.eval_every={epochs / EVALUATIONS:g}",
        "checkpoint.every_epochs=0",
        f"run.seed={seed}",
    ]


def method_words(method: str, epochs: float) -> list[str]:
    """A method with its paper's weights; its warm-up and initial stage take the same fraction of the run as there."""
    joined, *changes = method.split("@")
    names = [name for name in joined.split("+") if name != "ls"]
    words = [f"distill.method={','.join(names)}", *(f"distill.{change}" for change in changes)]
    if "ls" in joined.split("+"):
        words.append("distill.standardise=true")
    kinds = {name: METHODS[name] for name in names if name in METHODS}
    warm = [
        f"{name}.warmup:{kind.warmup * epochs / LITERATURE:g}"
        for name, kind in kinds.items()
        if any(option.name == "warmup" for option in fields(kind))  # type: ignore[arg-type]
    ]
    if warm:
        words.append(f"distill.options={','.join(warm)}")
    if initial := max((kind.initial_epochs for kind in kinds.values()), default=0.0):
        words.append(f"distill.initial_epochs={initial * epochs / LITERATURE:g}")
    return words


def read(out: Path) -> list[Done]:
    file = out / "results.json"
    return [Done(**entry) for entry in json.loads(file.read_text())["runs"]] if file.exists() else []


def write(out: Path, book: Sequence[Done]) -> None:
    write_text(out / "results.json", json.dumps({"runs": [asdict(done) for done in book]}, indent=1) + "\n")


def teacher_weights(teacher: Job, out: Path) -> Path:
    """The path of the teacher's last weights; every recipe has its own run folder."""
    name = hashlib.sha256(teacher.words.encode()).hexdigest()[:8]
    return out / f"teacher-{name}" / "weights" / "last.safetensors"


def known_teacher(book: Sequence[Done], teacher: Job, out: Path) -> Done | None:
    """The teacher of an earlier call, if its weights are still there."""
    weights = teacher_weights(teacher, out)
    found = sha256(weights) if weights.exists() else ""
    return next((done for done in book if done.answers(teacher, found)), None)


def train_teacher(setting: Setting, teacher: Job, book: list[Done], out: Path, world: World) -> Done | None:
    """Trains it, or resumes a killed call. Returns None if it was interrupted."""
    weights = teacher_weights(teacher, out)
    folder = weights.parents[1]
    places = [f"run.dir={folder.parent}", f"run.name={folder.name}", "checkpoint.resume=auto"]
    try:
        result, seconds = timed(train, recipe_of(setting, teacher, places), world)
    except Interrupted:
        return None
    done = entry(teacher, sha256(weights), result, seconds)
    # The same recipe gives the same bits on the same kind of machine; then this replaces the earlier entry.
    book[:] = [each for each in book if not each.answers(teacher, done.teacher)] + [done]
    write(out, book)
    return done


def teach(setting: Setting, job: Job, teacher: Job, taught: Done, out: Path, world: World) -> Done:
    """One student's run, in a temporary folder."""
    weights = str(teacher_weights(teacher, out))
    with tempfile.TemporaryDirectory() as folder:
        places = [f"run.dir={folder}"]
        run: Callable[[Recipe, World], TrainResult] = distill
        if job.method == "alone":
            watched = Distill(teacher=(setting.teacher,), teacher_weights=(weights,))
            run = partial(train, build=partial(beside_teacher, teacher=watched))
        else:
            places.append(f"distill.teacher_weights={weights}")
        result, seconds = timed(run, recipe_of(setting, job, places), world)
    return entry(job, taught.teacher, result, seconds)


def beside_teacher(
    recipe: Recipe, sets: Sets, plan: Plan, strategy: Strategy, display: Display, *, teacher: Distill
) -> Task:
    """Plain training that also measures the agreement with a teacher it does not learn from."""
    grid = strategy.grid
    (loaded,) = load_teachers(replace(recipe, distill=teacher), Classes.of(sets.train), grid.world)
    guesses = torch.full((len(sets.eval),), -1, device=grid.world.device)

    def record(outputs: Outputs) -> None:
        guesses[outputs.samples] = outputs.logits.argmax(dim=1)

    score_module(loaded.module, sets, recipe, grid, record=record, precision=strategy.precision)
    return replace(
        classification(recipe, sets, plan, strategy, display), metrics=(agreement_metric(guesses),)
    )


class Interrupted(Exception):
    """The run was interrupted."""


def timed(
    run: Callable[[Recipe, World], TrainResult], recipe: Recipe, world: World
) -> tuple[TrainResult, float]:
    """The result, and its total seconds. Frees what the run held on the GPU."""
    begun = time.perf_counter()
    try:
        result = run(recipe, world)
    finally:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    if not result.finished:
        raise Interrupted
    return result, time.perf_counter() - begun


def recipe_of(setting: Setting, job: Job, places: Sequence[str]) -> Recipe:
    data = [f"data.path={setting.data}"] if setting.data else []
    return Recipe.from_args([*job.words.split(), *data, *places])


def entry(job: Job, teacher: str, result: TrainResult, seconds: float) -> Done:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    return Done(
        method=job.method,
        seed=job.seed,
        words=job.words,
        teacher=teacher,
        machine=f"{device}, torch {torch.__version__}",
        correct=result.metrics["correct"],
        samples=result.metrics["samples"],
        top1=result.metrics["top1"],
        best_top1=result.best_top1 or 0.0,
        best_epoch=result.best_epoch or 0.0,
        agreement=result.metrics.get("agreement"),
        images_per_s=result.images_per_s,
        seconds=round(seconds, 1),
    )


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())

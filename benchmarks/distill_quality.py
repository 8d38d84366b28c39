"""Are distilled students better than the same student alone? Trains a teacher, then every student, with seeds.

    python benchmarks/distill_quality.py --set cifar100 --data FOLDER --out FOLDER --epochs 30 --seeds 0,1

The schedule is the literature's for CIFAR-100 (240 epochs, the rate divided by 10 at 150, 180 and 210) shortened to
`--epochs`, the same for the student alone and for every method; warm-ups and initial stages of methods shrink with it.
Weights are those of each method's paper. A method may be `crd+kd` or `kd+ls` (logit standardisation). Each run is
written to OUT/results.json when it is done and never repeated, so that several calls, each with its `--budget` of
seconds, add up; `--budget 0` only prints. FOLDER of the data: CIFAR's files as published or an .npz; Imagenette: class
folders under train/ and val/. Prints a markdown table, what is missing, and who beats the student alone by more than
the spread.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from drumline.arguments import parse
from drumline.distill.choose import choose
from drumline.distill.load import load_teachers
from drumline.distill.methods import METHODS
from drumline.distill.presets import published
from drumline.distill.run import distill
from drumline.errors import UserError
from drumline.launch.world import World, alone, pick_device, resolve_device_type
from drumline.observe.display import Display
from drumline.recipe import Distill, Recipe
from drumline.state.atomic import write_text
from drumline.train.loop import Result, train
from drumline.train.prepare import Plan, Sets
from drumline.train.score import score_module
from drumline.train.task import Task, classification

LITERATURE, MILESTONES = 240, (150, 180, 210)
RATE = 0.05 / 64
"""The literature's learning rate for a sample of the batch."""
EVALUATIONS = 6
SETS = {
    "cifar100": ("data.augment=shift-flip", 128, "resnet32x4", "resnet8x4"),
    "cifar10": ("data.augment=shift-flip", 128, "resnet32x4", "resnet8x4"),
    "imagenette": ("data.source=folder data.size=160", 64, "resnet34", "resnet18"),
    "digits": ("data.source=digits", 64, "resnet8x4", "resnet8"),
}
"""How each set is read, its batch, teacher and student, unless told otherwise."""
QUICK = {"set": "digits", "epochs": 2.0, "methods": "alone,kd", "seeds": "0"}


@dataclass(frozen=True)
class Job:
    """A run to be made: the words after `drumline train` or `drumline distill`, less the places of files."""

    method: str
    seed: int
    words: str


@dataclass(frozen=True)
class Done:
    """A run that was made, as it stands in results.json."""

    method: str
    seed: int
    words: str
    teacher: str
    """SHA-256 of the teacher's weights; the teacher's own row has it too."""
    machine: str
    correct: int
    samples: int
    top1: float
    best_top1: float
    best_epoch: float
    agreement: float | None
    images_per_s: float
    seconds: float

    def answers(self, job: Job, teacher: str) -> bool:
        return (self.method, self.seed, self.words, self.teacher) == (
            job.method,
            job.seed,
            job.words,
            teacher,
        )


def main() -> int:
    begun = time.perf_counter()
    args = arguments()
    try:
        jobs = planned(args)
    except UserError as error:
        print(f"distill_quality: {error}", file=sys.stderr)
        return 2
    # torch refuses cuBLAS without it where deterministic algorithms are asked for.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = alone(pick_device(resolve_device_type("auto"), 0))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    book = read(out)
    why_missing: dict[Job, str] = {}
    teacher = teacher_job(args)
    taught = known_teacher(book, teacher, out)

    def time_left(longest: float) -> bool:
        return args.budget is None or args.budget - (time.perf_counter() - begun) > longest

    if taught is None and time_left(0.0):
        taught = trained_teacher(args, teacher, book, out, world)
    for job in jobs:
        ours = [done for done in book if taught and done.teacher == taught.teacher]
        if taught is None or any(done.answers(job, taught.teacher) for done in ours):
            continue
        # A student takes about as long as other students; only before the first is the teacher all there is to go by.
        students = [done.seconds for done in ours if done.method != "teacher"]
        if not time_left(max(students, default=taught.seconds)):
            why_missing[job] = "no time left"
            continue
        try:
            book.append(student(args, job, taught, out, world))
        except Interrupted:
            break
        except Exception as error:  # one method's failure must not cost the others their time on the machine
            traceback.print_exc()
            why_missing[job] = f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        else:
            write(out, book)
    print("\n".join(report(args, jobs, teacher, taught, book, why_missing)), flush=True)
    return 1 if any(word.startswith("failed") for word in why_missing.values()) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="cifar100")
    parser.add_argument("--data", default="", metavar="PATH", help="where the set lies; the digits need none")
    parser.add_argument("--teacher", help="default: resnet32x4 on CIFAR")
    parser.add_argument("--student", help="default: resnet8x4 on CIFAR")
    parser.add_argument("--epochs", type=float, default=30.0, help=f"of {LITERATURE} in the literature")
    parser.add_argument("--teacher-epochs", type=float, help="default: as many as the students")
    parser.add_argument("--methods", default="alone,kd,dkd,dist,crd,reviewkd")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--batch", type=int, help="default: 128 on CIFAR")
    parser.add_argument("--lr", type=float, help="default: 0.05 for a batch of 64, in proportion")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no run that may not end in time"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a minute on a CPU: embedded digits, 2 epochs")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    if args.set != "digits" and not args.data:
        parser.error(f"--data: where does {args.set} lie?")
    _, batch, teacher, student = SETS[args.set]
    args.teacher, args.student = args.teacher or teacher, args.student or student
    args.batch = args.batch or batch
    args.lr = args.lr or RATE * args.batch
    args.teacher_epochs = args.teacher_epochs or args.epochs
    methods = [name for name in args.methods.split(",") if name != "alone"]
    args.methods = ["alone", *methods]
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    return args


def planned(args: argparse.Namespace) -> list[Job]:
    """Every student's run, all methods with the first seed before any with the second. Refuses what no run takes."""
    jobs = []
    for seed in args.seeds:
        for method in args.methods:
            words = [*schedule(args, args.student, args.epochs), f"run.seed={seed}"]
            if method != "alone":
                words += [f"distill.teacher={args.teacher}", *method_words(method, args.epochs)]
            jobs.append(Job(method, seed, " ".join(words)))
            recipe = parse(words, "distill", "").recipe
            if method != "alone":
                choose(recipe.distill)
    return jobs


def teacher_job(args: argparse.Namespace) -> Job:
    words = [*schedule(args, args.teacher, args.teacher_epochs), "run.seed=0"]
    return Job("teacher", 0, " ".join(words))


def schedule(args: argparse.Namespace, model: str, epochs: float) -> list[str]:
    source = f"data.source={'npz' if args.data.endswith('.npz') else args.set} "
    milestones = ",".join(f"{epochs * milestone / LITERATURE:g}" for milestone in MILESTONES)
    return [
        *(source if args.set.startswith("cifar") else "").split(),
        *SETS[args.set][0].split(),
        f"data.batch={args.batch}",
        f"model.name={model}",
        f"train.epochs={epochs:g}",
        f"optim.lr={args.lr:g}",
        "optim.momentum=0.9",
        "optim.nesterov=true",
        "optim.weight_decay=5e-4",
        "optim.schedule=step",
        f"optim.milestones={milestones}",
        f"train.eval_every={epochs / EVALUATIONS:g}",
        "checkpoint.every_epochs=0",
    ]


def method_words(method: str, epochs: float) -> list[str]:
    """A method with its paper's weights, and what it does over 20 or 30 of 240 epochs in as large a part of these."""
    names = [name for name in method.split("+") if name != "ls"]
    words = [f"distill.method={','.join(names)}"]
    words += ["distill.standardise=true"] if "ls" in method.split("+") else []
    for name in names:
        kind = METHODS.get(name)
        if kind is None:
            continue
        if any(each.name == "warmup" for each in fields(kind)):  # type: ignore[arg-type]
            words.append(f"distill.options={name}.warmup:{kind.warmup * epochs / LITERATURE:g}")
        if kind.initial_epochs:
            words.append(f"distill.initial_epochs={kind.initial_epochs * epochs / LITERATURE:g}")
    return words


def read(out: Path) -> list[Done]:
    file = out / "results.json"
    return [Done(**row) for row in json.loads(file.read_text())["runs"]] if file.exists() else []


def write(out: Path, book: Sequence[Done]) -> None:
    write_text(out / "results.json", json.dumps({"runs": [asdict(done) for done in book]}, indent=1) + "\n")


def teacher_weights(job: Job, out: Path) -> Path:
    """Where the teacher's last weights lie: a folder for each recipe of it."""
    name = hashlib.sha256(job.words.encode()).hexdigest()[:8]
    return out / f"teacher-{name}" / "weights" / "last.safetensors"


def known_teacher(book: Sequence[Done], job: Job, out: Path) -> Done | None:
    """The teacher of an earlier call, if its weights are still there."""
    weights = teacher_weights(job, out)
    found = [done for done in book if done.method == "teacher" and done.words == job.words]
    return found[-1] if found and weights.exists() and found[-1].teacher == sha256(weights) else None


def trained_teacher(
    args: argparse.Namespace, job: Job, book: list[Done], out: Path, world: World
) -> Done | None:
    """Trains the teacher, or goes on where a killed call left it. None where it was asked to stop."""
    weights = teacher_weights(job, out)
    folder = weights.parents[1]
    places = [f"run.dir={folder.parent}", f"run.name={folder.name}", "checkpoint.resume=auto"]
    try:
        result, seconds = timed(train, recipe_of(args, job, places), world)
    except Interrupted:
        return None
    done = entry(job, sha256(weights), result, seconds)
    book[:] = [each for each in book if (each.method, each.words) != ("teacher", job.words)] + [done]
    write(out, book)
    return done


def student(args: argparse.Namespace, job: Job, taught: Done, out: Path, world: World) -> Done:
    weights = str(teacher_weights(teacher_job(args), out))
    with tempfile.TemporaryDirectory() as folder:
        places = [f"run.dir={folder}"]
        if job.method == "alone":
            teacher = Distill(teacher=(args.teacher,), teacher_weights=(weights,))
            run = partial(train, build=partial(beside_teacher, teacher=teacher))
        else:
            places.append(f"distill.teacher_weights={weights}")
            run = partial(distill)
        result, seconds = timed(run, recipe_of(args, job, places), world)
    return entry(job, taught.teacher, result, seconds)


def beside_teacher(
    recipe: Recipe, sets: Sets, plan: Plan, world: World, display: Display, *, teacher: Distill
) -> Task:
    """Plain training, told how often it agrees with a teacher that it never learns from."""
    (loaded,) = load_teachers(replace(recipe, distill=teacher), len(sets.train.classes), world)
    guesses = torch.full((len(sets.eval),), -1, device=world.device)
    score_module(loaded.module, sets, recipe, world, record=guesses)
    return replace(classification(recipe, sets, plan, world, display), rival=guesses)


class Interrupted(Exception):
    """Somebody asked the run to stop."""


def timed(run: Callable[[Recipe, World], Result], recipe: Recipe, world: World) -> tuple[Result, float]:
    """The result, and seconds from start to end. Leaves the GPU's memory as free as it was."""
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


def recipe_of(args: argparse.Namespace, job: Job, places: Sequence[str]) -> Recipe:
    data = [f"data.path={args.data}"] if args.data else []
    return parse([*job.words.split(), *data, *places], "distill", "").recipe


def entry(job: Job, teacher: str, result: Result, seconds: float) -> Done:
    assert result.top1 is not None and result.best_top1 is not None and result.best_epoch is not None
    return Done(
        method=job.method,
        seed=job.seed,
        words=job.words,
        teacher=teacher,
        machine=machine(),
        correct=result.correct,
        samples=result.samples,
        top1=result.top1,
        best_top1=result.best_top1,
        best_epoch=result.best_epoch,
        agreement=result.agreement,
        images_per_s=result.images_per_s,
        seconds=round(seconds, 1),
    )


def machine() -> str:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    return f"{device}, torch {torch.__version__}"


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def report(
    args: argparse.Namespace,
    jobs: Sequence[Job],
    teacher: Job,
    taught: Done | None,
    book: Sequence[Done],
    why_missing: dict[Job, str],
) -> list[str]:
    """The table of what is done, the commands, and what it shows."""
    if taught is None:
        return ["The teacher is not trained yet: nothing to show."]
    runs = {job: next((done for done in book if done.answers(job, taught.teacher)), None) for job in jobs}
    by_method = {
        name: [done for job, done in runs.items() if done and job.method == name] for name in args.methods
    }
    machines = sorted({done.machine for done in (taught, *(done for done in runs.values() if done))})
    two = len(args.seeds) == 2
    lines = [
        "",
        f"{' and '.join(machines)}; {args.set}, {args.teacher} teaches {args.student}; seeds "
        f"{', '.join(map(str, args.seeds))}",
        "",
        f"{args.epochs:g} epochs, where the literature takes {LITERATURE}; its milestones, warm-ups and initial stages "
        f"in proportion. The teacher: {args.teacher_epochs:g} epochs, seed 0. Batch {args.batch}, rate {args.lr:g}.",
        "`last` is top-1 of the last epoch, `best` of the best of the "
        f"{EVALUATIONS} evaluated ones; `spread` is {'largest less smallest' if two else 'the sample deviation'}; "
        "`agrees`: share of evaluation samples with the teacher's first guess. Seconds: start to end of a run.",
        "",
        f"| method | runs | last, mean | spread | by seed | to alone, points | best, mean | agrees | seconds | "
        f"published, {LITERATURE} epochs |",
        "|---|---|---|---|---|---|---|---|---|---|",
        row(args, "teacher", [taught], None),
        *(row(args, name, done, by_method["alone"]) for name, done in by_method.items() if done),
        "",
    ]
    missing = [job for job, done in runs.items() if done is None]
    lines += [
        f"Missing: {job.method} with seed {job.seed} ({why_missing.get(job, 'not started')})"
        for job in missing
    ]
    lines += ["", f"Commands (data.path={args.data or '-'}; other seeds alike):", ""]
    lines.append(f"    drumline train {teacher.words} run.name=teacher")
    for job in jobs:
        if job.seed == args.seeds[0]:
            command = "train" if job.method == "alone" else "distill"
            weights = "" if job.method == "alone" else " distill.teacher_weights=runs/teacher"
            lines.append(f"    drumline {command} {job.words}{weights}")
    return [*lines, "", verdict(by_method)]


def row(args: argparse.Namespace, name: str, done: Sequence[Done], others: Sequence[Done] | None) -> str:
    last = [each.top1 for each in done]
    agreed = [each.agreement for each in done if each.agreement is not None]
    difference = "-"
    if others and name != "alone":
        difference = f"{100 * (mean(last) - mean([each.top1 for each in others])):+.2f}"
    cells = [
        name,
        str(len(done)),
        f"{mean(last):.2%}",
        f"{100 * spread(last):.2f}" if len(last) > 1 else "-",
        ", ".join(f"{100 * value:.2f}" for value in last),
        difference,
        f"{mean([each.best_top1 for each in done]):.2%}",
        f"{mean(agreed):.2%}" if agreed else "-",
        f"{mean([each.seconds for each in done]):.0f}",
        published_words(args, name),
    ]
    return f"| {' | '.join(cells)} |"


def published_words(args: argparse.Namespace, name: str) -> str:
    """What the authors report for the whole schedule, where they do."""
    lone = {"teacher": args.teacher, "alone": args.student}
    networks = lone.get(name, f"{args.teacher}-{args.student}").replace("cifar/", "")
    try:
        figure = published(f"{args.set}/{name}/{networks}")
    except UserError:
        figure = None
    return "-" if figure is None else f"{figure:.2f}"


def verdict(by_method: dict[str, list[Done]]) -> str:
    """Which methods beat the student alone by more than the half-spreads of both together."""
    base = [done.top1 for done in by_method["alone"]]
    better, not_better, unsaid = [], [], []
    for name, done in by_method.items():
        last = [each.top1 for each in done]
        if name == "alone":
            continue
        if len(last) < 2 or len(base) < 2:
            unsaid.append(name)
            continue
        difference, noise = mean(last) - mean(base), half_spread(last) + half_spread(base)
        told = f"{name} ({100 * difference:+.2f} points, half-spreads {100 * noise:.2f})"
        (better if difference > noise else not_better).append(told)
    return (
        f"Better than alone by more than the two half-spreads: {', '.join(better) or 'none'}. "
        f"Not: {', '.join(not_better) or 'none'}. "
        f"Fewer than two seeds, so nothing is said: {', '.join(unsaid) or 'none'}."
    )


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """Largest less smallest of two, the sample deviation of more."""
    return max(values) - min(values) if len(values) == 2 else statistics.stdev(values)


def half_spread(values: Sequence[float]) -> float:
    """How far values lie from their mean: half the distance of two, the sample deviation of more."""
    return spread(values) / 2 if len(values) == 2 else spread(values)


if __name__ == "__main__":
    raise SystemExit(main())

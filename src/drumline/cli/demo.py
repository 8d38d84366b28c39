"""`drumline demo`: a teacher, a student alone and a distilled student, on the embedded digits, as three commands.

Prints every command as you would type it. The student alone and the distilled one differ only in the teacher. The
runs are in one new folder, and the last of them is verified.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drumline.cli.help import Command
from drumline.config.arguments import RecipeOptions, read_recipe
from drumline.core.text import print_result

COMMAND = Command(
    name="demo",
    usage="[section.key=value ...] [--dry-run]",
    about="""
        On the 1,797 embedded handwritten digits: train a teacher (resnet8x4), train a small
        student (resnet8, one sixteenth its size) alone, distil the teacher into the same
        student, verify that run, and compare the three. Each run uses two processes. Takes
        about a minute on two CPU cores. Any field of the recipe can be set for all three runs.
    """,
    options=RecipeOptions,
    examples="""
  drumline demo
  drumline demo parallel.processes=1 run.device=cpu
  drumline demo --dry-run        print the commands, run nothing
""",
)

SHARED = (
    "data.source=digits",
    "data.batch=64",
    "optim.warmup_epochs=1",
    "optim.nesterov=true",
    "parallel.processes=2",
)
TEACHER = ("model.name=resnet8x4", "train.epochs=10", "optim.lr=0.1")
STUDENT = ("model.name=resnet8", "train.epochs=5", "optim.lr=0.05")
AIMS = (
    "train a teacher",
    "train a small student alone, for comparison",
    "distil the teacher into the same student",
    "verify the student's run, byte by byte",
)


def main(argv: list[str]) -> int:
    """Runs the commands one after the other."""
    from drumline.cli import main as drumline

    asked = read_recipe([*SHARED, *argv], "demo", RecipeOptions)
    dry = asked.options.dry_run
    base = Path(asked.recipe.run.dir)
    folder = base / ("demo-N" if asked.recipe.run.name == "auto" else asked.recipe.run.name)
    if asked.recipe.run.name == "auto" and not dry:
        from drumline.state.folder import next_free

        base.mkdir(parents=True, exist_ok=True)
        folder = next_free(base, "demo")
    common = [*SHARED, *(word for word in argv if word != "--dry-run"), f"run.dir={folder}"]
    taught = [f"distill.teacher_weights={folder / 'teacher'}", "run.name=taught"]
    commands = [
        ["train", *TEACHER, *common, "run.name=teacher"],
        ["train", *STUDENT, *common, "run.name=alone"],
        ["distill", *STUDENT, *common, *taught],
        ["verify", str(folder / "taught")],
    ]
    for number, (command, aim) in enumerate(zip(commands, AIMS, strict=True), 1):
        shown = f"\n[{number} of {len(commands)}] {aim}\n$ drumline {' '.join(command)}"
        print(shown, file=sys.stderr, flush=True)
        if not dry and (code := drumline(command)):
            return code
    if not dry:
        _compare(folder)
        epochs, steps = asked.recipe.train.epochs, asked.recipe.train.steps
        if steps or (epochs != "auto" and epochs < 5):
            print(
                "These runs were shorter than the demo's own (10 epochs for the teacher, 5 for the students), so the "
                "comparison says little: leave out train.epochs and train.steps for a fair one.",
                file=sys.stderr,
            )
    return 0


def _compare(folder: Path) -> None:
    """Prints the three scores side by side, as the runs recorded them."""
    scores = {name: _last_evaluation(folder / name) for name in ("teacher", "alone", "taught")}
    print("\n            top-1    correct", file=sys.stderr)
    for name, score in scores.items():
        agrees = f"   agrees with the teacher on {score['agreement']:.1%}" if "agreement" in score else ""
        correct = f"{score['correct']} of {score['samples']}"
        print(f"  {name:<8} {score['top1']:>7.2%}   {correct}{agrees}", file=sys.stderr)
    print("\nnext: drumline train data.path=FOLDER model.name=resnet18 run.name=NAME", file=sys.stderr)
    summary: dict[str, Any] = {f"{name}_top1": score["top1"] for name, score in scores.items()}
    print_result({"folder": str(folder), **summary, "agreement": scores["taught"]["agreement"]})


def _last_evaluation(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["kind"] == "eval")

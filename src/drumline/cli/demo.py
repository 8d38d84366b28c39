"""`drumline demo`: a teacher, a student alone and a student taught, on the embedded digits, as three commands.

Promises: every command is printed as one would type it; the student alone and the taught one differ in the teacher
only; the runs land in one new folder, and the last of them is verified.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.config.arguments import parse
from drumline.core.result import print_result
from drumline.state.folder import next_free

HELP = """usage: drumline demo [section.key=value ...]

On the 1,797 embedded handwritten digits, with two processes each: train a teacher (resnet8x4), train a small student
(resnet8, a sixteenth of its size) alone, teach the same student by the teacher, verify the run, and compare. Takes
about a minute on two CPU cores. Any recipe field may be changed, for all three runs.

examples:
  drumline demo
  drumline demo train.epochs=3 parallel.processes=1
  drumline demo --dry-run                               print the commands, run nothing
"""

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
    "teach the same student by the teacher",
    "verify the student's run, byte by byte",
)


def demo(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Runs the commands one after the other by `run`, which takes a command line and gives its exit code."""
    if "-h" in words or "--help" in words:
        print(HELP, end="")
        return 0
    asked = parse([*SHARED, *words], "demo", HELP)
    dry = asked.dry_run
    base = Path(asked.recipe.run.dir)
    folder = base / ("demo-N" if asked.recipe.run.name == "auto" else asked.recipe.run.name)
    if asked.recipe.run.name == "auto" and not dry:
        base.mkdir(parents=True, exist_ok=True)
        folder = next_free(base, "demo")
    common = [*SHARED, *words, f"run.dir={folder}"]
    taught = [f"distill.teacher_weights={folder / 'teacher'}", "run.name=taught"]
    lines = [
        ["train", *TEACHER, *common, "run.name=teacher"],
        ["train", *STUDENT, *common, "run.name=alone"],
        ["distill", *STUDENT, *common, *taught],
        ["verify", str(folder / "taught")],
    ]
    for number, (line, aim) in enumerate(zip(lines, AIMS, strict=True), 1):
        print(f"\n[{number} of {len(lines)}] {aim}\n$ drumline {' '.join(line)}", file=sys.stderr, flush=True)
        if not dry and (code := run(line)):
            return code
    if not dry:
        _compare(folder)
    return 0


def _compare(folder: Path) -> None:
    """The three scores side by side, as the runs wrote them down."""
    scores = {name: _last_evaluation(folder / name) for name in ("teacher", "alone", "taught")}
    print("\n            top-1    right", file=sys.stderr)
    for name, score in scores.items():
        agrees = f"   agrees with the teacher on {score['agreement']:.1%}" if "agreement" in score else ""
        right = f"{score['correct']} of {score['samples']}"
        print(f"  {name:<8} {score['top1']:>7.2%}   {right}{agrees}", file=sys.stderr)
    print("\nnext: drumline train data.path=FOLDER model.name=resnet18 run.name=NAME", file=sys.stderr)
    summary: dict[str, Any] = {f"{name}_top1": score["top1"] for name, score in scores.items()}
    print_result({"folder": str(folder), **summary, "agreement": scores["taught"]["agreement"]})


def _last_evaluation(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["kind"] == "eval")

"""`drumline train`: one run of a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

from drumline.cli.help import Command
from drumline.cli.repeat import RepeatOptions, dry_run, recipes, repeat
from drumline.config.arguments import read_recipe
from drumline.config.fields import sections
from drumline.config.recipe import Distill, Recipe
from drumline.core.errors import UserError

COMMON = (
    "data.path",
    "data.batch",
    "model.name",
    "model.weights",
    "optim.name",
    "optim.lr",
    "train.epochs",
    "parallel.processes",
    "run.name",
    "checkpoint.resume",
)
COMMAND = Command(
    name="train",
    usage="[RECIPE.toml] [section.key=value ...] [options]",
    about="""
        Train a model. Every field has a default: `drumline train` alone trains on the
        embedded digits. The run folder gets the recipe, metrics, checkpoints and weights.
    """,
    options=RepeatOptions,
    examples="""
  drumline train data.path=photos model.name=resnet50
  drumline train data.path=photos --repeat 5   five seeds: mean and spread
  drumline train data.path=photos finetune=torchvision:resnet50
  drumline train recipe.toml optim.lr=0.2 --train.compile
  drumline train --optim.name adamw --optim.betas 0.9 0.99 optim.lr=1e-3
  drumline train recipe.toml --dry-run       show what would happen
  drumline train --dry-run > recipe.toml     start a recipe file of your own
""",
    sections=tuple(section for section in sections() if section != "distill"),
    common=COMMON,
)


def main(argv: list[str]) -> int:
    argv = with_preset(argv)
    invocation = read_recipe(argv, "train", RepeatOptions)
    if invocation.recipe.distill != Distill():
        raise UserError(
            "train has no teacher, but fields of [distill] are set", "use drumline distill, or remove them"
        )
    runs = recipes(invocation.recipe, invocation.options.repeat, invocation.origins)
    if invocation.options.dry_run:
        return dry_run(invocation, runs, "train")
    return run(["train", *argv], runs, "train", invocation.origins)


def with_preset(argv: list[str]) -> list[str]:
    """Replaces the name of a published recipe at the start of a command line by the settings it stands for."""
    from drumline.distillation.presets import is_preset, preset_arguments

    if not argv or not is_preset(argv[0]):
        return argv
    preset = preset_arguments(argv[0])
    if not any(text.lstrip("-").startswith(("data.path", "data.source")) for text in (*preset, *argv[1:])):
        raise UserError(f"{argv[0]} needs its images", "give --data.path FOLDER")
    return [*preset, *argv[1:]]


def run(argv: list[str], runs: Sequence[Recipe], job: str, given: Collection[str]) -> int:
    """Trains a recipe, or several one after the other; returns the exit code. `argv` is the command line, `given` are
    the fields that the user has set."""
    model = runs[0].model
    announce(argv[0], model.weights if model.name == "auto" else model.name)
    if len(runs) > 1:
        return repeat(runs, job)

    from drumline.launch.start import run

    return run(argv, runs[0], job, given=given)


def announce(command: str, subject: str) -> None:
    """Prints a first line on a terminal before the import of torch, which takes seconds."""
    if sys.stderr is not None and sys.stderr.isatty() and "RANK" not in os.environ:
        from drumline import __version__
        from drumline.observe.text_log import say

        say(f"drumline {__version__}: {command} {subject}")

"""`--repeat N`: trains a recipe with N seeds, one run after the other, and prints how much the results vary.

Promises: the run with seed S is `NAME-seedS` and has the same bits as a separate run with `run.seed=S`. After a stop
or a kill, the same command continues: it skips finished runs and resumes an interrupted one. Different settings under
the same name are rejected, so the runs of a summary differ only in the seed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drumline.config.arguments import Invocation, RecipeOptions
from drumline.config.fields import recipe_fields, with_values
from drumline.config.limits import Range
from drumline.config.recipe import Recipe
from drumline.config.toml import dump_recipe
from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.core.files import read_small, write_text
from drumline.core.text import print_result
from drumline.observe.text_log import say

if TYPE_CHECKING:
    from drumline.observe.runs import RunSummary

_LARGEST_RECIPE = 1 << 20


@dataclass(frozen=True)
class RepeatOptions(RecipeOptions):
    """The options of a command that trains."""

    repeat: Annotated[int, Range(1, 1000)] = 1
    """Train with this many seeds, starting at run.seed, as runs NAME-seedS, and print the mean and the standard
    deviation of their results. Repeat the command to continue after an interruption."""


def recipes(recipe: Recipe, count: int, given: Collection[str] = ()) -> list[Recipe]:
    """The recipe of each run. Rejects recipes that cannot be repeated. `given`: the fields that the user has set."""
    if count == 1:
        return [recipe]
    run, parallel = recipe.run, recipe.parallel
    if read_rank_info(os.environ) is not None or parallel.nodes > 1:
        raise UserError(
            f"--repeat {count}: works only on one machine and without torchrun or Slurm's srun",
            "run one command for each seed: run.seed=0 run.name=NAME-seed0, and so on",
        )
    if recipe.checkpoint.resume not in ("never", "auto"):
        raise UserError(
            f"--repeat {count}: every run starts from its own seed, not from checkpoint.resume = "
            f"{recipe.checkpoint.resume}",
            "remove checkpoint.resume; to start from trained weights, set model.weights",
        )
    from drumline.training.model import resolve_model

    recipe = with_values(recipe, resolve_model(recipe, given=given))
    name = run.name
    if name == "auto":
        from drumline.data.sources import detect_source
        from drumline.state.folder import auto_stem

        source = detect_source(recipe.data.source, recipe.data.path, labels=recipe.data.labels)
        name = auto_stem(source, recipe.data.path, recipe.model.name)
    return [
        replace(
            recipe,
            run=replace(run, seed=seed, name=f"{name}-seed{seed}"),
            checkpoint=replace(recipe.checkpoint, resume="never"),
        ).check()
        for seed in range(run.seed, run.seed + count)
    ]


def dry_run(
    invocation: Invocation[RepeatOptions], runs: Sequence[Recipe], job: Literal["train", "distill"]
) -> int:
    """Prints what the first run would do; returns the exit code."""
    from drumline.cli.dry_run import show

    code = show(replace(invocation, recipe=runs[0]), job)
    if len(runs) > 1:
        say(f"{len(runs)} runs, with run.seed {runs[0].run.seed} to {runs[-1].run.seed}")
    return code


def repeat(runs: Sequence[Recipe], job: str) -> int:
    """Trains the recipes one after the other; returns the exit code."""
    from drumline.launch.start import start
    from drumline.observe.runs import summarize

    folders = [Path(recipe.run.dir) / recipe.run.name for recipe in runs]
    _check_settings(runs[0], folders)
    for number, (recipe, folder) in enumerate(zip(runs, folders, strict=True), 1):
        what = f"run {number} of {len(runs)}: seed {recipe.run.seed}, {folder}"
        if summarize(folder).state == "finished":
            say(f"{what}, is already finished")
            continue
        say(what)
        try:
            resume = "auto" if folder.exists() else "never"
            recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume=resume))
            result = start(recipe, job, given=recipe_fields())  # `recipes` has resolved it
        except BaseException:
            _report(folders[: number - 1])
            say(f"seed {recipe.run.seed} did not finish; repeat the command to continue with it")
            raise
        gc.collect()  # frees its model and graphs before the next run allocates its own
        if not result["finished"]:
            _report(folders[: number - 1])
            say(f"stopped at seed {recipe.run.seed}; repeat the command to continue with it")
            print_result(_result(folders[:number], finished=False))
            return 128 + signal.Signals[result["stopped_by"]]
    _report(folders)
    print_result(_result(folders, finished=True))
    return 0


def _check_settings(recipe: Recipe, folders: Sequence[Path]) -> None:
    """Records the settings next to the run folders, or compares them with those of an earlier command."""
    from drumline.state.folder import found_of_run, repeatable
    from drumline.state.provenance import changed_settings

    name = recipe.run.name.removesuffix(f"-seed{recipe.run.seed}")
    file = Path(recipe.run.dir) / f"{name}-seeds.toml"
    settings = dump_recipe(repeatable(replace(recipe, run=replace(recipe.run, name=name, seed=0))))
    fix = "choose another run.name, or repeat the earlier command"
    if file.exists():
        changes = changed_settings(read_small(file, _LARGEST_RECIPE).decode("utf-8", "replace"), settings)
        if changes:
            raise UserError(f"{file}: the earlier runs have different settings: {'; '.join(changes)}", fix)
        return
    if taken := [folder for folder in folders if found_of_run(folder)]:
        raise UserError(f"{taken[0]} contains a run that --repeat did not start", "choose another run.name")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, settings)


def _report(folders: Sequence[Path]) -> None:
    """Prints the runs so far, and how much their results vary."""
    from drumline.cli.runs import repeat_lines, table
    from drumline.observe.runs import differences, summarize

    runs = [summarize(folder) for folder in folders]
    if not runs or sys.stderr is None:
        return
    width = get_terminal_size().columns if sys.stderr.isatty() else 1 << 16
    for line in ("", *table(runs, differences(runs), width), *repeat_lines(runs)):
        print(line, file=sys.stderr)


def _result(folders: Sequence[Path], finished: bool) -> dict[str, Any]:
    from drumline.observe.runs import statistics_of, summarize

    runs = [summarize(folder) for folder in folders]
    ended = [run for run in runs if run.state == "finished"]
    figures = {
        name: asdict(found) if (found := statistics_of([getattr(run, name) for run in ended])) else None
        for name in ("top1", "loss", "best_value")
    }
    return {
        "finished": finished,
        "best_metric": runs[0].best_metric,
        **figures,
        "runs": list(map(_row, runs)),
    }


def _row(run: RunSummary) -> dict[str, Any]:
    row = asdict(run)
    settings = row.pop("settings") or {}
    return {"run": row.pop("path"), "seed": settings.get("run.seed"), **row}

"""The commands as functions: `drumline.train`, `drumline.distill` and `drumline.evaluate`.

Promises: the same results and files as the command line; metrics are returned as a dict; a mistake raises `UserError`
and never ends the process. Works in scripts without `if __name__ == "__main__"` and in notebooks.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from drumline.config.recipe import Recipe
from drumline.launch.start import start


def train(recipe: Recipe) -> dict[str, Any]:
    """Trains a model and returns the final metrics: `run` (its folder), `finished`, `step`, `top1`, `loss`, ...

    One process trains in this process; `parallel.processes` starts more of them. `finished` is False if the run was
    interrupted: it has saved, and `checkpoint.resume=auto` continues it.
    """
    return start(recipe, "train")


def distill(recipe: Recipe) -> dict[str, Any]:
    """Trains a student with a teacher (`distill.teacher_weights`); otherwise the same as `train`."""
    return start(recipe, "distill")


def evaluate(path: str | PathLike[str], *settings: str) -> dict[str, Any]:
    """Scores a run folder, a checkpoint or a weights file on the evaluation split, each sample once.

    `settings` override the recipe of the run: `evaluate("runs/photos", "data.path=other")`. Returns `samples`,
    `correct`, `top1`, `top5`, `loss`, ...
    """
    from drumline.cli.eval import read_invocation

    return start(read_invocation([fspath(path), *settings]).recipe, "eval")

"""The commands as functions: `drumline.train`, `drumline.distill` and `drumline.evaluate`.

Promises: the same results and files as the command line. A mistake raises `UserError` and never ends the process.
Works in notebooks, and in scripts without `if __name__ == "__main__"`.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.launch.start import start


def train(recipe: Recipe) -> dict[str, Any]:
    """Trains a model.

    Example:

        recipe = drumline.Recipe.from_args(["data.path=photos", "model.name=resnet18", "train.epochs=20"])
        result = drumline.train(recipe)
        print(f"{result['top1']:.2%}, saved in {result['run']}")

    Args:
        recipe: The whole configuration. `Recipe.from_args` reads settings as on the command line.

    Returns:
        The result as a dict, the same as the JSON line of the command. `run` (str) is the run folder; `finished`
        (bool) is False if a signal stopped the run, which has saved and continues with `checkpoint.resume=auto`;
        `step` (int) and `epoch` (float) say where it ended; `top1`, `top5`, `loss` (float or None), `correct` and
        `samples` (int) are those of the last evaluation; `best_metric` (str), `best_value` and `best_epoch` (float or
        None) are those of the best one, and so is `best_top1` if the metric is top1; `stopped_early` (str) is the
        reason if `train.patience` ended the run.

    Raises:
        UserError: The recipe, the data or the machine needs a change; the message says which.
        RuntimeError: A worker process failed; the message has its traceback.

    The model trains in this process, unless `parallel.processes` asks for more: then each one is started and
    supervised.
    """
    return start(_checked(recipe), "train")


def distill(recipe: Recipe) -> dict[str, Any]:
    """Trains a student with a teacher.

    Example:

        settings = ["data.path=photos", "model.name=resnet18", "distill.teacher_weights=runs/teacher"]
        result = drumline.distill(drumline.Recipe.from_args(settings))

    Args:
        recipe: The whole configuration. `distill.teacher_weights` names the teacher: a run folder, a checkpoint or a
            weights file.

    Returns:
        The result as a dict, as from `train`, with `teacher_top1` (float) besides.

    Raises:
        UserError, RuntimeError: as `train`.
    """
    return start(_checked(recipe), "distill")


def evaluate(
    path: str | PathLike[str],
    *settings: str,
    per_class: bool = False,
    predictions: str | PathLike[str] = "",
    confusion: str | PathLike[str] = "",
) -> dict[str, Any]:
    """Scores a model on the evaluation split, each sample exactly once.

    Example:

        score = drumline.evaluate("runs/photos-resnet18-1", "data.path=other-photos")
        print(f"{score['correct']} of {score['samples']}")

    Args:
        path: A run folder, a checkpoint or a weights file.
        settings: Settings that override the recipe of the run, such as `"data.batch=64"`.
        per_class: Adds `per_class` to the result: a dict for each class, with `class`, `samples`, `correct`,
            `accuracy`, `precision`, `f1`, and `confused_with`, the class that it is most often confused with.
        predictions: A CSV file to write, with a row for each sample.
        confusion: A CSV file to write, with the confusion matrix.

    Returns:
        The score as a dict: `samples` and `correct` (int), `top1`, `top5`, `loss`, `balanced_accuracy`, `macro_f1`,
        `calibration_error` and `mean_confidence` (float; None if an output of the model is not finite), `classes`,
        `nonfinite_samples`, `broken_samples` (int), `weights` (str).

    Raises:
        UserError: There are no weights at `path`, or they do not fit the data.
    """
    from drumline.cli.eval import read_invocation, report_options

    if not isinstance(path, str | PathLike):
        raise UserError(
            f"evaluate takes a path and settings, not a {type(path).__name__}",
            'write drumline.evaluate("runs/photos", "data.batch=64")',
        )
    invocation = read_invocation([fspath(path), *settings])
    options = replace(
        invocation.options,
        per_class=per_class or invocation.options.per_class,
        predictions=fspath(predictions) or invocation.options.predictions,
        confusion=fspath(confusion) or invocation.options.confusion,
    )
    return start(invocation.recipe, "eval", report_options(options))


def _checked(recipe: Recipe) -> Recipe:
    """The recipe itself. Rejects a list of arguments or anything else in its place."""
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"expected a Recipe, not a {type(recipe).__name__}",
            "build it with drumline.Recipe.from_args([...])",
        )
    return recipe

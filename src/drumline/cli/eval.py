"""`drumline eval`: score a trained model.

A run folder, one of its checkpoints or its weights bring the recipe of the run. Weights alone bring what their record
has: model, image size, mean and standard deviation. The command line overrides both. Code that a file names runs only
if the command line names or trusts it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.cli.help import Command
from drumline.cli.train import announce
from drumline.config.arguments import COMMAND_LINE, Invocation, RecipeOptions, read_recipe
from drumline.config.fields import fields_of
from drumline.config.learning import Data
from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.core.files import check_output
from drumline.report.units import BINS
from drumline.training.metrics import METRICS

_METRICS = "\n        ".join(
    f"  {', '.join(filter(None, (metric.name, metric.count))):<17}  {metric.about}" for metric in METRICS
)


@dataclass(frozen=True)
class Options(RecipeOptions):
    """The options of `drumline eval`."""

    per_class: bool = False
    """Show each class: samples, correct, accuracy, and the class that it is most often confused with. Of many
    classes, only the worst."""
    predictions: str = ""
    """Write a CSV file with a row for each sample: path, label, prediction, probability, and whether it is
    correct."""
    confusion: str = ""
    """Write the confusion matrix as a CSV file: a row for each label, a column for each prediction."""


COMMAND = Command(
    name="eval",
    usage="PATH [section.key=value ...] [options]",
    about=f"""
        Score a trained model on the evaluation split: every sample once, on any number of
        processes. PATH is one of
          RUN                       a run folder: its best weights, else its last,
                                    else its newest checkpoint
          RUN/checkpoints/step-N    one of its checkpoints
          RUN/weights[/FILE]        weights of a run
          WEIGHTS                   a .safetensors, .pt or .pth file of any origin
          RECIPE.toml               a recipe that sets model.weights

        A run brings its recipe: model, data, image size, mean and standard deviation. Weights
        that Drumline exported bring all of it except the data, from any folder. For other
        weights, the model is the built-in one that fits, or model.name; give data.size,
        data.mean and data.std if they differ from the defaults.

        Classes are matched by name. Data that has its classes in a different order, or only
        some of them, is scored correctly; a class that the model was not trained on is an
        error. Data without class names (idx, npz) must have as many classes as the model.

        Data does not need splits: class folders alone, or val/ alone, are scored in full. If
        the data has both splits, only the evaluation split (val/) is scored. A run's
        data.holdout, data.folds and data.labels apply only to its own data.

        useful fields:
          data.path=FOLDER          other data: its evaluation split, or all of it if it
                                    has no splits
          model.name=NAME           the model of weights from elsewhere
          data.size=N               a different image size
          train.precision=fp32      a different precision
          parallel.processes=N      more processes: the same score, sooner
          run.device=cpu            without the GPU
        Every field of `drumline train --help` is accepted; those of the optimizer, for
        example, have no effect.

        If stdout is not a terminal, its last line is JSON: weights, samples,
        nonfinite_samples, classes, model_classes, broken_samples, with --per-class a list
        `per_class`, and the metrics (null if they are not finite):
        {_METRICS}
          balanced_accuracy  mean accuracy of the classes that have samples
          macro_f1           mean F1 of the classes that have samples or predictions
          calibration_error  expected calibration error, in {BINS} bins of equal width
          mean_confidence    mean probability of the predicted classes

        Exit code 0: scored. 2: an error, with a fix, such as different classes or NaN in the
        weights.
    """,
    options=Options,
    examples="""
  drumline eval runs/photos                        the best weights of a run
  drumline eval runs/photos/checkpoints/step-500   one of its checkpoints
  drumline eval runs/photos --per-class            which classes go wrong
  drumline eval runs/photos --predictions all.csv --confusion matrix.csv
  drumline eval runs/photos data.path=other        on other photographs
  drumline eval runs/photos data.path=photos/val   all images of a folder
  drumline eval best.safetensors data.path=photos  exported weights, anywhere
  drumline eval resnet50.pth data.path=photos
""",
)
HERE = (
    "parallel.nodes=1",
    "parallel.node_rank=auto",
    "parallel.rendezvous=",
    "launch.min_nodes=auto",
    "launch.restarts=0",
)
"""A model is scored on this machine, and the score is not resumed."""


def main(argv: list[str]) -> int:
    argv = _path_first(argv)
    if argv and _is_path(argv[0]):
        announce("eval", argv[0])

    from drumline.launch.start import run, without_garbage_collection

    with without_garbage_collection():
        invocation = read_invocation(argv)
        reports = report_options(invocation.options)
    if invocation.options.dry_run:
        from drumline.cli.dry_run import show

        return show(invocation, "eval")

    return run(["eval", *argv], invocation.recipe, "eval", reports)


def report_options(options: Options) -> dict[str, Any]:
    """The options of the job. Rejects a file that cannot be written before any work is done."""
    files = {"predictions": options.predictions, "confusion": options.confusion}
    for name, file in files.items():
        if file:
            check_output(f"--{name}", Path(file))
    if options.predictions and Path(options.predictions).resolve() == Path(options.confusion).resolve():
        raise UserError(
            f"--predictions and --confusion are both {options.confusion}", "give two different files"
        )
    return {"per_class": options.per_class, **files}


def read_invocation(argv: list[str]) -> Invocation[Options]:
    """The recipe by which a model is scored: that of its run, with what the arguments change."""
    from drumline.state.folder import run_of

    path = Path(argv[0]) if argv and _is_path(argv[0]) else None
    invocation = read_recipe([*_settings(path), *argv[1:]] if path else argv, "eval", Options)
    if path is not None:
        _reject_unknowns(path, invocation)
        invocation = _without_the_runs_division(path, invocation)
    if not invocation.recipe.model.weights:
        beside = argv and argv[0].endswith("recipe.toml") and run_of(Path(argv[0]))
        raise UserError(
            "eval needs a model",
            f"did you mean `drumline eval {shlex.quote(str(Path(argv[0]).parent))}`?"
            if beside
            else "give a run folder, a checkpoint or a weights file as the first argument",
        )
    return invocation


def _path_first(argv: list[str]) -> list[str]:
    """The arguments, with options that precede the path moved behind it."""
    known, first = fields_of(Options), 0
    while first < len(argv) and argv[first].startswith("--"):
        name, equals, _ = argv[first].removeprefix("--").partition("=")
        if (option := known.get(name.replace("-", "_"))) is None:
            return argv
        first += 1 if option.hint is bool or equals else 2
    return [*argv[first:], *argv[:first]]


def _is_path(text: str) -> bool:
    return not text.startswith("-") and "=" not in text and not text.endswith(".toml")


def _settings(path: Path) -> list[str]:
    """The arguments that a path stands for: the run's recipe, what the record of the weights has, the weights."""
    from drumline.inference.export.load import exported_format
    from drumline.state.folder import run_of
    from drumline.state.weights import resolve_weights, weights_record

    if not path.exists():
        raise UserError(f"{path} does not exist", "give a run folder, a checkpoint or a weights file")
    if exported_format(path):
        raise UserError(
            f"{path} is an exported file, which eval cannot score",
            "score the run that it was exported from; `drumline export` reports the accuracy of both",
        )
    run = run_of(path)
    record = weights_record(resolve_weights(path))
    argv = [str(run / "recipe.toml"), *HERE] if run else []
    if record is not None:
        argv += [f"{field}={value}" for field, value in record.settings().items()]
        if run is None and not names_code(record.model):
            argv.append(f"model.name={record.model}")
        if run is None and record.args:
            argv.append(f"model.args={','.join(record.args)}")
    return [*argv, f"model.weights={path}"]


def _without_the_runs_division(path: Path, invocation: Invocation[Options]) -> Invocation[Options]:
    """For data other than the run's own, drops the run's label file and division. Fields that the command line sets
    stay."""
    from drumline.config.toml import load_recipe
    from drumline.state.folder import run_of

    data, given, run = invocation.recipe.data, invocation.origins, run_of(path)
    if run is None:
        return invocation
    own = load_recipe(str(run / "recipe.toml")).recipe.data

    def differs(name: str, here: str, there: str) -> bool:
        same = Path(here).expanduser().resolve() == Path(there).expanduser().resolve()
        return given.get(f"data.{name}") == COMMAND_LINE and not same

    elsewhere = differs("path", data.path, own.path)
    if not elsewhere and not differs("labels", data.labels, own.labels):
        return invocation
    default, dropped = Data(), {}
    for name in ("holdout", "folds", "fold", "split_seed", *(("labels",) if elsewhere else ())):
        if given.get(f"data.{name}") != COMMAND_LINE:
            dropped[name] = getattr(default, name)
    return replace(invocation, recipe=replace(invocation.recipe, data=replace(data, **dropped)))


def _reject_unknowns(path: Path, invocation: Invocation[Options]) -> None:
    """Weights alone do not name the data, and code that their record names needs trust. Without a record, the model
    is the built-in one that fits, as in training."""
    from drumline.state.folder import run_of
    from drumline.state.weights import resolve_weights, weights_record

    if run_of(path):
        return
    given, record = invocation.origins, weights_record(resolve_weights(path))
    if record is not None and "model.name" not in given:
        code = record.model
        raise UserError(
            f"{path}: its model {code} runs the code of {code.partition(':')[0]}",
            f"if you wrote or trust that code, add model.name={code}",
        )
    if "data.path" not in given and "data.source" not in given:
        raise UserError(f"{path} is not part of a run, so its data is unknown", "add data.path=FOLDER")

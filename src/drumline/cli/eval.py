"""`drumline eval`: what a path to a model means, as settings of a recipe.

Promises: a run folder, one of its checkpoints or its weights bring the run's recipe along; weights on their own bring
what their record says (model, image size, mean and deviation). The command line beats both. Code that a file names is
never run unless the command line repeats or trusts it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.config.arguments import COMMAND_LINE, Invocation, names_code, parse
from drumline.core.errors import UserError

HELP = """usage: drumline eval PATH [section.key=value ...] [--dry-run] [--trust]

Score a trained model on the evaluation split: every sample once, on any number of processes.

PATH is one of
  RUN                       a run folder: its best weights, else its last, else its newest checkpoint
  RUN/checkpoints/step-N    one of its checkpoints
  RUN/weights[/FILE]        weights of a run
  WEIGHTS                   a .safetensors, .pt or .pth file of any origin
  RECIPE.toml               a recipe that sets model.weights

A run brings its recipe: model, data, image size, mean and deviation. Weights that drumline exported bring
all of it but the data, wherever the file lies. For other weights give model.name and, where they differ from
the defaults, data.size, data.mean and data.std.

Classes are matched by name. Data that has its classes in another order, or only some of them, is scored
correctly; a class that the model was not trained on is an error. Data without class names (idx, npz) must
have as many classes as the model.

Data does not need splits: class folders alone, or val/ alone, are scored in full. If the data has both splits,
only the evaluation split (val/) is scored. A run's data.holdout applies only to its own data.

useful settings:
  data.path=FOLDER          other data: its evaluation split or, without splits, all of it
  model.name=NAME           the model of weights from elsewhere
  data.size=N               another image size
  train.precision=fp32      another precision
  parallel.processes=N      more processes: the same score, sooner
  run.device=cpu            without the GPU
Every field of `drumline train --help` is accepted; those of the optimizer, for example, have no effect.

When stdout is not a terminal, its last line is JSON: weights, samples, correct, correct5, top1, top5, loss
(null when it is not finite), nonfinite_samples, classes, broken_samples.

Exit code 0: scored. 2: an error, with what to do about it, such as other classes or NaN in the weights.

examples:
  drumline eval runs/photos                           the best weights of a run
  drumline eval runs/photos/checkpoints/step-500      one of its checkpoints
  drumline eval runs/photos data.path=other           on other photographs
  drumline eval runs/photos data.path=photos/val      all images of a folder
  drumline eval best.safetensors data.path=photos     exported weights, anywhere
  drumline eval resnet50.pth model.name=resnet50 data.path=photos
"""
HERE = (
    "parallel.nodes=1",
    "parallel.node_rank=auto",
    "parallel.rendezvous=",
    "launch.min_nodes=auto",
    "launch.restarts=0",
)
"""A score is made on this machine, and is not resumed."""


def evaluate(argv: Sequence[str]) -> int:
    """Runs the command; gives its exit code."""
    if "-h" in argv or "--help" in argv:
        print(HELP, end="")
        return 0
    from drumline.state.folder import run_of

    path = Path(argv[0]) if argv and _is_path(argv[0]) else None
    invocation = parse([*_settings(path), *argv[1:]] if path else argv, "eval", "")
    if path is not None:
        _refuse_unknowns(path, invocation)
        invocation = _without_the_runs_holdout(path, invocation)
    if not invocation.recipe.model.weights:
        beside = argv and argv[0].endswith("recipe.toml") and run_of(Path(argv[0]))
        raise UserError(
            "eval needs a model",
            f"did you mean `drumline eval {shlex.quote(str(Path(argv[0]).parent))}`?"
            if beside
            else "give a run folder, a checkpoint or a weights file as the first argument",
        )
    if invocation.dry_run:
        from drumline.cli.dry_run import show, what_would_be_scored

        return show(invocation, what_would_be_scored)

    from drumline.launch.worker import run

    return run(["eval", *argv], invocation.recipe, "drumline.train.score:score")


def _is_path(word: str) -> bool:
    return not word.startswith("-") and "=" not in word and not word.endswith(".toml")


def _settings(path: Path) -> list[str]:
    """The words that stand for a path: the run's recipe, what the weights know about themselves, the weights."""
    from drumline.state.folder import run_of
    from drumline.state.weights import resolve_weights, weights_record

    if not path.exists():
        raise UserError(f"{path} does not exist", "give a run folder, a checkpoint or a weights file")
    run = run_of(path)
    record = weights_record(resolve_weights(path))
    words = [str(run / "recipe.toml"), *HERE] if run else []
    if record is not None:
        words += [f"{field}={value}" for field, value in record.settings().items()]
        if run is None and not names_code(record.model):
            words.append(f"model.name={record.model}")
    return [*words, f"model.weights={path}"]


def _without_the_runs_holdout(path: Path, invocation: Invocation) -> Invocation:
    """Drops the run's data.holdout for other data, unless the command line sets it."""
    from drumline.config.toml import load_recipe
    from drumline.state.folder import run_of

    recipe, given, run = invocation.recipe, invocation.came_from, run_of(path)
    if run is None or given.get("data.path") != COMMAND_LINE or given.get("data.holdout") == COMMAND_LINE:
        return invocation
    own = load_recipe(str(run / "recipe.toml")).recipe.data.path
    if Path(own).expanduser().resolve() == Path(recipe.data.path).expanduser().resolve():
        return invocation
    return replace(invocation, recipe=replace(recipe, data=replace(recipe.data, holdout=0.0)))


def _refuse_unknowns(path: Path, invocation: Invocation) -> None:
    """What weights on their own leave open must be said: a default would be scored without a word."""
    from drumline.state.folder import run_of
    from drumline.state.weights import resolve_weights, weights_record

    if run_of(path):
        return
    given, record = invocation.came_from, weights_record(resolve_weights(path))
    if "model.name" not in given:
        code = record is not None and record.model
        raise UserError(
            f"{path}: its model {code} runs the code of {code.partition(':')[0]}"
            if code
            else f"{path} does not say which model it belongs to",
            f"if you wrote or trust that code, add model.name={code}"
            if code
            else "add model.name=NAME (`drumline doctor --models` lists them)",
        )
    if "data.path" not in given and "data.source" not in given:
        raise UserError(f"{path} is not part of a run, so its data is not known", "add data.path=FOLDER")

"""The score of a model on an evaluation set: for a run in progress, and as `drumline eval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.arithmetic import resolve_precision, set_deterministic, threads_per_process
from drumline.core.errors import UserError
from drumline.core.progress import progress
from drumline.core.text import loss_text
from drumline.data.classes import Classes, OtherClasses, label_map, some_names
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import evaluation_starts
from drumline.observe.display import make_display
from drumline.parallel.strategy import to_device
from drumline.parallel.world import Grid, World, make_grid
from drumline.state.model_record import ModelRecord
from drumline.state.weights import load_weights, weights_record
from drumline.training import broken
from drumline.training.agreement import check_data, check_recipes, check_software
from drumline.training.evaluate import Score, evaluate
from drumline.training.model import FIELDS, build_model, model_record, refuse_nonfinite, shared_weights
from drumline.training.sets import Sets, normaliser, open_sets


@dataclass(frozen=True)
class ScoreResult:
    """What `drumline eval` found."""

    weights: str
    samples: int
    correct: int
    correct5: int
    top1: float
    top5: float
    loss: float | None
    """None when an output was not finite, or a loss too large to be summed exactly."""
    nonfinite_samples: int
    """For which the model gave NaN or infinity; they count as wrong."""
    classes: int
    """Of the model's classes, those that the evaluation set has samples of."""
    model_classes: int
    broken_samples: int


def score_module(
    module: nn.Module,
    sets: Sets,
    recipe: Recipe,
    grid: Grid,
    watch: Callable[[int], None] = lambda done: None,
    through: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
    teacher_predictions: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    outputs: torch.Tensor | None = None,
    blank: bool = False,
    autocast: torch.dtype | None = None,
) -> Score:
    """The score of a module on the evaluation set. It returns None where another process of a replica has the output;
    with `blank`, this process does not read images. `watch` is called with the number of samples done; `through` may
    show the progress of the batches; the other arguments are those of `evaluate`."""
    world = grid.world
    with closing(sets.evaluation(recipe, grid.peers, blank)) as batches:
        return evaluate(
            module,
            through(batches),
            len(sets.eval),
            sets.eval_batch,
            normaliser(sets, recipe),
            world,
            autocast,
            watch,
            teacher_predictions,
            record,
            grid.replicas,
            outputs,
        )


def score(recipe: Recipe, world: World) -> ScoreResult:
    """Evaluates the recipe's weights; every rank gets the same result."""
    display = make_display(world.rank)
    set_deterministic(recipe.run.deterministic)
    torch.set_num_threads(threads_per_process(recipe.parallel.threads, world.local_size))
    check_recipes(recipe, world)
    messages = check_software(recipe, world)
    sets = open_sets(recipe, world, to_score=True)
    if world.size > 1:
        check_data(sets, recipe.run.seed, world)
    module, model_classes, outputs, more = model_to_score(recipe, sets, world)
    messages += more
    for message in messages:
        display.log(message)
    mine = evaluation_starts(samples=len(sets.eval), batch=sets.eval_batch, rank=world.rank, world=world.size)
    bar = partial(progress, text="evaluating", total=len(mine)) if world.is_rank_zero else iter
    autocast = resolve_precision(recipe.train.precision, world.device)
    found = score_module(
        module, sets, recipe, make_grid(world), through=bar, outputs=outputs, autocast=autocast
    )
    broken.agree(sets.bad, world)
    for line in broken.messages(sets.bad, listed=False):
        display.log(line)
    if found.nonfinite:
        display.log(
            f"WARNING: the model's output is NaN or infinite for {found.nonfinite:,} of {found.samples:,} samples, "
            "which count as wrong; there is no mean loss"
            + (". Try train.precision=fp32" if autocast is not None else "")
        )
    top5 = f"top-5 {found.accuracy5:.2%}, " if model_classes > 5 else ""
    display.result(
        f"top-1 {found.accuracy:.2%} ({found.top1:,} of {found.samples:,}), {top5}loss {loss_text(found.loss)}"
    )
    display.end()
    return ScoreResult(
        weights=recipe.model.weights,
        samples=found.samples,
        correct=found.top1,
        correct5=found.top5,
        top1=found.accuracy,
        top5=found.accuracy5,
        loss=found.loss if math.isfinite(found.loss) else None,
        nonfinite_samples=found.nonfinite,
        classes=len(np.unique(sets.eval.labels)),
        model_classes=model_classes,
        broken_samples=len(sets.bad[1].bad),
    )


def model_to_score(
    recipe: Recipe, sets: Sets, world: World
) -> tuple[nn.Module, int, torch.Tensor | None, list[str]]:
    """The recipe's model with its weights, its number of classes, the output that each of the data's labels means
    (None: of the same number), and what to say about them. Refuses weights of classes that the evaluation set does
    not have."""
    file = shared_weights(recipe.model.weights, world)
    record, data = weights_record(file), Classes.of(sets.eval)
    count = record.outputs if record else len(data)
    module = build_model(recipe, count)
    report = load_weights(module, file, fields=FIELDS)
    refuse_nonfinite(module, file)
    messages = [f"weights from {recipe.model.weights}: {report.loaded} tensors"]
    if sets.eval_spec.whole:
        messages.append(f"{recipe.data.path} has no evaluation split: scoring all {len(sets.eval):,} images")
    labels, note = None, f"{file} has no record of its class names: its classes are matched by number"
    if recipe.model.classes not in ("auto", len(data)):
        note = f"WARNING: {note}, although the model has {recipe.model.classes:,} and the data {len(data):,}"
    if record is not None:
        try:
            labels, note = label_map(
                record.classes,
                data,
                set(np.unique(sets.eval.labels).tolist()),
                by_number=recipe.model.classes == record.outputs,
            )
        except OtherClasses as difference:
            raise _other_classes(file, record, difference) from difference
        if odd := record.other_images(model_record(recipe, sets)):
            messages.append(f"images are not prepared as in training: {'; '.join(odd)}")
    messages += [note] if note else []
    outputs = None if labels is None else torch.from_numpy(labels).to(world.device)
    classes = count if recipe.model.classes == "auto" else recipe.model.classes
    return to_device(module, recipe, world.device), classes, outputs, messages


def _other_classes(file: Path, record: ModelRecord, difference: OtherClasses) -> UserError:
    named = record.classes.named
    return UserError(
        f"the classes of the evaluation set do not match those of {file}: {difference}",
        "rename the class folders to the names it was trained on, or leave out those it was not trained on; "
        f"it knows {some_names(record.classes.names)}"
        if named
        else "give data with the same number of classes; if the labels mean the same classes and the data lacks the "
        f"last ones, add model.classes={record.outputs}",
    )

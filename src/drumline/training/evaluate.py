"""Scores a model on every sample of an evaluation set, exactly once: for a run in progress, and as `drumline eval`.

Promises: batches are fixed by the set alone and dealt whole to the ranks, so each sample is computed together with
the same others on any number of processes; totals do not depend on the order of addition (`metrics.py`); the number
of samples is checked against the source, and a mismatch stops the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core import arithmetic
from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.core.precision import FP32, Precision, autocast, resolve_precision
from drumline.core.progress import progress
from drumline.data.classes import Classes, OtherClasses, label_map, some_names
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import evaluation_starts
from drumline.observe.display import make_display
from drumline.parallel.strategy import to_device
from drumline.parallel.world import Grid, World, make_grid
from drumline.report.scores import Report
from drumline.state.model_record import ModelRecord
from drumline.state.weights import load_weights, weights_record
from drumline.training import metrics as table
from drumline.training.consistency import check_data, check_recipes, check_software
from drumline.training.metrics import Metric, Outputs, Score, Sums, describe, score_of
from drumline.training.model import FIELDS, build_model, model_record, reject_nonfinite, shared_weights
from drumline.training.predictions import Predictions
from drumline.training.report_output import class_lines, summary, write_files
from drumline.training.sets import (
    Normalise,
    Sets,
    describe_bad_samples,
    gather_bad_samples,
    normaliser,
    open_sets,
)


@dataclass(frozen=True)
class EvalResult:
    """The result of `drumline eval`."""

    weights: str
    score: Score
    classes: int
    """The number of the model's classes that the evaluation set has samples of."""
    model_classes: int
    broken_samples: int
    report: Report
    per_class: bool = False
    """Whether the line of JSON lists the classes."""

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON. A metric is None if it is not finite; samples without a finite output are wrong."""
        return {
            "weights": self.weights,
            **self.score.result(),
            **self.report.result(),
            "nonfinite_samples": self.score.nonfinite,
            "classes": self.classes,
            "model_classes": self.model_classes,
            "broken_samples": self.broken_samples,
            **({"per_class": [each.as_dict() for each in self.report.classes]} if self.per_class else {}),
        }


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    samples: int,
    batch_size: int,
    normalise: Normalise,
    world: World,
    precision: Precision,
    watch: Callable[[int], None] = lambda done: None,
    metrics: Sequence[Metric] | None = None,
    record: Callable[[Outputs], None] = lambda outputs: None,
    readers: int = 1,
    outputs: torch.Tensor | None = None,
) -> Score:
    """Runs `model` in eval mode over this rank's batches and sums over the world; where the model returns None, a
    different rank has the output. `record` is called with the outputs of each of this rank's batches. `readers`
    go through the set at the same time. `outputs` maps each label to the model's output if the model numbers its
    classes differently from the data."""
    was_training = model.training
    model.eval()
    metrics = table.METRICS if metrics is None else metrics
    sums = Sums(metrics, samples)
    done = 0
    enter(Phase.STARTING)
    for batch in batches:
        images = normalise(padded(batch.images, batch_size))
        with autocast(world.device, precision):
            output = model(images)
        if output is not None:
            logits = output[: len(batch.labels)].float()
            labels = batch.labels if outputs is None else outputs[batch.labels]
            of_batch = Outputs(logits, labels, batch.samples)
            sums.add(of_batch)
            record(of_batch)
        done += len(batch.labels)
        watch(min(samples, done * readers))
        enter(Phase.EVALUATING)
    model.train(was_training)
    totals, fractions = _add_up(sums, world)
    if (scored := totals[0][0]) != samples:
        raise UserError(
            f"guard [evaluation]: {scored:,} samples were scored, the evaluation set has {samples:,}: some "
            f"were {'left out' if scored < samples else 'counted twice'}, and the score would "
            "not be the model's",
            "give every process the same evaluation set, and let its source give each sample exactly once",
        )
    return score_of(metrics, totals, fractions)


def _add_up(sums: Sums, world: World) -> tuple[list[list[int]], list[bool]]:
    """The totals over all ranks. A rank may have no sums: no batch, or no outputs."""
    shapes = world.all_gather_object([[len(each) for each in sums.sums], sums.fractions])
    lengths, fractions = next(filter(lambda shape: shape[0], shapes), ([2], []))
    here = torch.cat(sums.sums) if sums.sums else torch.zeros(sum(lengths), dtype=torch.int64)
    totals = world.all_reduce(here.to(world.device)).split(lengths)
    return [each.tolist() for each in totals], fractions


def padded(images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """A last, smaller batch filled up with black images (not counted), so that every batch has one shape."""
    missing = batch_size - len(images)
    return images if missing == 0 else F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))


def score_module(
    module: nn.Module,
    sets: Sets,
    recipe: Recipe,
    grid: Grid,
    watch: Callable[[int], None] = lambda done: None,
    through: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
    metrics: Sequence[Metric] | None = None,
    record: Callable[[Outputs], None] = lambda outputs: None,
    outputs: torch.Tensor | None = None,
    blank: bool = False,
    precision: Precision = FP32,
) -> Score:
    """The score of a module on the evaluation set. The module returns None where a different process of a replica has
    the output; with `blank`, this process does not read images. `watch` is called with the number of samples done;
    `through` may show the progress of the batches; the other arguments are those of `evaluate`."""
    with closing(sets.evaluation(recipe, grid.peers, blank)) as batches:
        return evaluate(
            module,
            through(batches),
            len(sets.eval),
            sets.eval_batch,
            normaliser(sets, recipe),
            grid.world,
            precision,
            watch,
            metrics,
            record,
            grid.replicas,
            outputs,
        )


def evaluate_weights(
    recipe: Recipe, world: World, per_class: bool = False, predictions: str = "", confusion: str = ""
) -> EvalResult:
    """Scores the recipe's weights, as `drumline eval` does; every rank gets the same result. `predictions` and
    `confusion` are files to write."""
    display = make_display(world.rank)
    arithmetic.set_deterministic(recipe.run.deterministic)
    torch.set_num_threads(arithmetic.threads_per_process(recipe.parallel.threads, world.local_size))
    check_recipes(recipe, world)
    messages = check_software(recipe, world)
    sets = open_sets(recipe, world, to_score=True)
    if world.size > 1:
        check_data(sets, recipe.run.seed, world)
    module, names, outputs, more = model_to_score(recipe, sets, world)
    for message in (*messages, *more):
        display.log(message)
    mine = evaluation_starts(samples=len(sets.eval), batch=sets.eval_batch, rank=world.rank, world=world.size)
    bar = partial(progress, text="evaluating", total=len(mine)) if world.is_rank_zero else iter
    precision = resolve_precision(recipe.train.precision, world.device)
    seen = Predictions(len(sets.eval), world.device)
    score = score_module(
        module,
        sets,
        recipe,
        make_grid(world),
        through=bar,
        outputs=outputs,
        precision=precision,
        record=seen.add,
    )
    labels = sets.eval.labels if outputs is None else outputs.cpu().numpy()[sets.eval.labels]
    predicted, probability = seen.gather(world)
    # The user's own factory may build more outputs than there are classes.
    every = (*names, *map(str, range(len(names), int(predicted.max()) + 1)))
    report = Report(every, labels, predicted, probability, finite=not score.nonfinite)
    gather_bad_samples(sets.bad, world)
    for line in describe_bad_samples(sets.bad, listed=False):
        display.log(line)
    if score.nonfinite:
        display.log(
            f"WARNING: the model's output is NaN or infinite for {score.nonfinite:,} of {score.samples:,} samples, "
            "which count as wrong; there is no mean loss"
            + (". Try train.precision=fp32" if precision is not FP32 else "")
        )
    display.result(describe(score.result(), table.METRICS, len(names)))
    display.log(summary(report))
    if per_class:
        width = get_terminal_size().columns if sys.stderr.isatty() else 100
        for line in ("", *class_lines(report, width), ""):
            display.log(line)
    if world.is_rank_zero:
        write_files(report, sets.eval, sets.bad[1].bad, predictions, confusion, display.log)
    display.end()
    return EvalResult(
        weights=recipe.model.weights,
        score=score,
        classes=len(np.unique(sets.eval.labels)),
        model_classes=len(names),
        broken_samples=len(sets.bad[1].bad),
        report=report,
        per_class=per_class,
    )


def model_to_score(
    recipe: Recipe, sets: Sets, world: World
) -> tuple[nn.Module, tuple[str, ...], torch.Tensor | None, list[str]]:
    """The recipe's model with its weights, the names of its classes, the model's output for each label of the data
    (None: the same number), and messages. Rejects weights of classes that the evaluation set does not have."""
    file = shared_weights(recipe.model.weights, world)
    record, data = weights_record(file), Classes.of(sets.eval)
    count = record.outputs if record else len(data)
    module = build_model(recipe, count)
    report = load_weights(module, file, fields=FIELDS)
    reject_nonfinite(module, file)
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
                # The numbers of a shard are those of the whole data set; a shard may lack its last classes.
                by_number=recipe.model.classes == record.outputs or sets.name == "webdataset",
            )
        except OtherClasses as difference:
            raise _other_classes(file, record, difference) from difference
        if odd := record.other_images(model_record(recipe, sets)):
            messages.append(f"images are not prepared as in training: {'; '.join(odd)}")
    messages += [note] if note else []
    outputs = None if labels is None else torch.from_numpy(labels).to(world.device)
    classes = count if recipe.model.classes == "auto" else recipe.model.classes
    # Outputs beyond the classes with a name are numbered.
    names = (record.classes if record else data).names
    names = (*names, *map(str, range(len(names), max(classes, count))))
    return to_device(module, recipe, world.device), names, outputs, messages


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

"""`--dry-run`: what a command would do, and what is wrong with it that can be seen without training.

Promises: writes nothing and starts nothing; opens the data, looks for weights, checkpoints and the run folder, and
builds the model without its memory. Code that a recipe file names is not run without `--trust`. Every mistake is
reported at once, in the words of the run that would have met it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from drumline.arguments import COMMAND_LINE, names_code
from drumline.errors import UserError
from drumline.recipe import Recipe
from drumline.recipe_file import together


def what_would_happen(recipe: Recipe, came_from: Mapping[str, str], trust: bool, distils: bool) -> list[str]:
    """The lines below a dry run's recipe. Raises a `UserError` with all that would end the run."""
    run = _DryRun(recipe, came_from, trust)
    checks: tuple[Callable[[], str], ...] = (
        run.data,
        run.model,
        run.weights,
        *((run.teachers,) if distils else ()),
        run.processes,
        run.folder,
    )
    lines, mistakes = [], []
    for check in checks:
        try:
            lines.append(check())
        except UserError as mistake:
            mistakes.append(mistake)
    if mistakes:
        raise together(mistakes)
    return [*(line for line in lines if line), "nothing was started"]


class _DryRun:
    """Each method looks at one thing and gives a line about it."""

    def __init__(self, recipe: Recipe, came_from: Mapping[str, str], trust: bool) -> None:
        self.recipe, self._came_from, self._trust = recipe, came_from, trust
        self._source = ""
        self._classes: int | None = None

    def data(self) -> str:
        from drumline.data.order import steps_per_epoch
        from drumline.data.sources import SourceSpec, detect_source, open_source

        data, train = self.recipe.data, self.recipe.train
        self._source = detect_source(data.source, data.path)
        if self._is_untrusted(self._source, "data.source"):
            return f"data: {self._source}; not opened: that runs its code (--trust)"
        opened = [
            open_source(SourceSpec(source=self._source, path=data.path, split=split, holdout=data.holdout))
            for split in ("train", "eval")
        ]
        samples = len(opened[0])
        self._classes = len(opened[0].classes)
        per_epoch = steps_per_epoch(samples, data.batch)
        if not per_epoch:
            raise UserError(
                f"data.batch = {data.batch}: the training set has only {samples} samples",
                f"give --data.batch {samples} or less",
            )
        total = train.steps or max(1, round(train.epochs * per_epoch))
        return (
            f"data: {self._source}{f' {data.path}' if data.path else ''}, {samples:,} samples to train, "
            f"{len(opened[1]):,} to evaluate, {self._classes} classes; {total:,} steps of {data.batch} samples, "
            f"{per_epoch:,} per epoch"
        )

    def model(self) -> str:
        import torch

        from drumline.train.prepare_model import build_model

        name, classes = self.recipe.model.name, self.recipe.model.classes
        if self._is_untrusted(name, "model.name"):
            return f"model: {name}; not built: that runs its code (--trust)"
        with torch.device("meta"):
            module = build_model(self.recipe, self._classes or (1000 if classes == "auto" else classes))
        return f"model: {name}, {sum(parameter.numel() for parameter in module.parameters()):,} parameters"

    def weights(self) -> str:
        from drumline.models.weights import resolve_weights

        if not self.recipe.model.weights:
            return ""
        return f"weights: {resolve_weights(self.recipe.model.weights)}"

    def teachers(self) -> str:
        from drumline.distill.choose import choose
        from drumline.distill.load import check_teachers

        distill = self.recipe.distill
        choose(distill)
        names = check_teachers(distill)
        by = ", ".join(f"{name} ({path})" for name, path in zip(names, distill.teacher_weights, strict=True))
        return f"teacher: {by}; method {'+'.join(distill.method)}"

    def processes(self) -> str:
        from drumline.launch.worker import local_processes
        from drumline.launch.world import resolve_device_type

        parallel = self.recipe.parallel
        device = resolve_device_type(self.recipe.run.device)
        count = local_processes(self.recipe, device)
        machines = f", on each of {parallel.nodes} machines" if parallel.nodes > 1 else ""
        return f"processes: {count} on the {'GPU' if device == 'cuda' else 'CPU'}{machines}"

    def folder(self) -> str:
        from drumline.state.folder import auto_stem, resume_point

        base, name = Path(self.recipe.run.dir), self.recipe.run.name
        _check_writable(base)
        found = resume_point(self.recipe)
        resumed = f", resumed from {found}" if found else ""
        if name == "auto":
            stem = auto_stem(self._source or "data", self.recipe.data.path, self.recipe.model.name)
            return f"run folder: a new one, {base}/{stem}-N{resumed}"
        return f"run folder: {base / name}{resumed}"

    def _is_untrusted(self, name: str, field: str) -> bool:
        return (
            names_code(name) and not self._trust and self._came_from.get(field, COMMAND_LINE) != COMMAND_LINE
        )


def _check_writable(base: Path) -> None:
    """The folder, or the nearest one above it that exists."""
    place = base.absolute()
    with suppress(OSError):
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            reason = "is not a folder" if not place.is_dir() else "is not writable"
            raise UserError(f"run.dir = {base}: {place} {reason}", "give another run.dir")

"""`--dry-run`: what a command would do, and every error that can be found without training.

Writes nothing and starts nothing. Opens the data, finds checkpoints and the run folder, and loads weights and
teachers into their models, as the run would. Does not run code that a recipe file names without `--trust`. All errors
are reported at once, with the message that the run would give.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drumline.config.arguments import COMMAND_LINE, Invocation, RecipeOptions, describe, named_code
from drumline.config.fields import recipe_fields, value_of, with_values
from drumline.config.sources import needs_trust
from drumline.core.errors import UserError, combined
from drumline.core.text import counted, message

if TYPE_CHECKING:
    from drumline.parallel.world import World
    from drumline.training.schedule import Plan
    from drumline.training.sets import Sets


def show(invocation: Invocation[RecipeOptions], command: Literal["train", "distill", "eval"]) -> int:
    """Prints the recipe on stdout and what would happen on stderr. Raises a `UserError` with everything that would
    end the run."""
    errors: list[UserError] = []
    try:
        invocation = _resolved(invocation, command)
    except UserError as error:
        errors.append(error)
    run = _DryRun(invocation, to_score=command == "eval")
    lines = _what_would_happen(run, command, errors)
    print(describe(run.recipe, run.origins), end="", flush=True)
    if errors:
        raise combined(errors)
    for line in lines:
        print(message(line), file=sys.stderr)
    return 0


def _resolved(invocation: Invocation[RecipeOptions], command: str) -> Invocation[RecipeOptions]:
    """The invocation with the fields that the weights decide."""
    from drumline.training.model import resolve_model

    recipe = invocation.recipe
    decided = resolve_model(recipe, images=command != "eval", given=invocation.origins)
    origin = f"from {recipe.model.weights}" if recipe.model.weights else "the default model"
    origins = {**invocation.origins, **dict.fromkeys(decided, origin)}
    return replace(invocation, recipe=with_values(recipe, decided), origins=origins)


def _what_would_happen(run: _DryRun, command: str, errors: list[UserError]) -> list[str]:
    """The lines of each check. Appends to `errors`."""
    checks = {
        "train": (
            run.trackers,
            run.data,
            run.best_metric,
            run.own_code,
            run.model,
            run.processes,
            run.folder,
        ),
        "distill": (
            run.trackers,
            run.data,
            run.best_metric,
            run.own_code,
            run.model,
            run.teachers,
            run.processes,
            run.folder,
        ),
        "eval": (run.data, run.scored, run.processes),
    }
    lines: list[str] = []
    has_name = not errors
    for check in checks[command]:
        if not has_name and check in (run.model, run.scored):
            continue
        try:
            lines += check()
        except UserError as error:
            errors.append(error)
    return [*lines, "nothing was started"]


class _DryRun:
    """Each method checks one thing with the run's own functions, and returns lines about it."""

    def __init__(self, invocation: Invocation[RecipeOptions], to_score: bool) -> None:
        self.recipe, self._to_score = invocation.recipe, to_score
        self.origins = dict(invocation.origins)
        self._trust = invocation.options.trust
        self._source = ""
        self._sets: Sets | None = None
        self._plan: Plan | None = None

    def trackers(self) -> list[str]:
        from drumline.observe.trackers import check_installed

        check_installed(self.recipe.run.trackers)
        return []

    def data(self) -> list[str]:
        from drumline.data.sources import detect_source
        from drumline.parallel.strategy import strategy_class
        from drumline.training.defaults import choose_defaults
        from drumline.training.schedule import make_plan
        from drumline.training.sets import open_sets

        given, data = self.recipe, self.recipe.data
        self._source = detect_source(data.source, data.path, labels=data.labels)
        if self._is_untrusted((self._source,), "data.source"):
            return [f"data: {self._source}; not opened, because that would run its code; --trust allows it"]
        # No workers: choosing their number would time the data.
        quick = replace(self.recipe, data=replace(data, workers=0, decode="cpu"))
        self._sets = sets = open_sets(quick, self._world(), self._to_score)
        name = f"data: {self._source}{f' {data.labels or data.path}' if data.labels or data.path else ''}"
        classes = counted(len(sets.train.classes), "class", "classes")
        if self._to_score:
            return [f"{name}, {counted(len(sets.eval), 'image')} to score, {classes}"]
        self.recipe, chosen = choose_defaults(given, len(sets.train))
        for field in recipe_fields():
            if value_of(self.recipe, field) != value_of(given, field):
                self.origins[field] = f"chosen for {counted(len(sets.train), 'sample')}"
        self.recipe.check()
        self._plan = plan = make_plan(self.recipe, len(sets.train))
        batch = self.recipe.data.batch
        world = self._whole_world()
        strategy_class(self.recipe, world.size).check(self.recipe, world)
        return [
            f"{name}, {counted(len(sets.train), 'sample')} to train, {len(sets.eval):,} to evaluate, {classes}; "
            f"{counted(plan.total, 'step')} of {counted(batch, 'sample')}, {plan.per_epoch:,} per epoch",
            *filter(None, [chosen]),
            *sets.warnings,
            *sets.sampling(self.recipe),
        ]

    def best_metric(self) -> list[str]:
        from drumline.training.best import best_metric
        from drumline.training.metrics import METRICS

        metrics = METRICS
        if self.recipe.distill.teacher_weights:
            import torch

            from drumline.distillation.measure import agreement_metric

            metrics = (*METRICS, agreement_metric(torch.empty(0)))
        best_metric(
            self.recipe.checkpoint.best, metrics, len(self._sets.train.classes) if self._sets else 1000
        )
        return []

    def own_code(self) -> list[str]:
        """The user's own code besides data, model and teacher."""
        import torch

        from drumline.data.feed.own_transform import load_transform
        from drumline.training.losses import OwnLoss
        from drumline.training.optim import build_optimizer

        classes = len(self._sets.train.classes) if self._sets else 2
        optim = self.recipe.optim
        if optim.lr == "auto":  # the data, which has the number of samples, could not be opened
            optim = replace(optim, lr=0.1)
        example = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(4))]
        checks: dict[str, Callable[[str], object]] = {
            "data.transform": load_transform,
            "optim.name": lambda name: build_optimizer(optim, example, torch.zeros(())),
            "train.loss": lambda name: OwnLoss(name, classes, torch.device("cpu")),
        }
        lines, errors = [], []
        for field, names in named_code(self.recipe, tuple(checks)).items():
            line = f"{field}: {', '.join(names)}"
            if self._is_untrusted(names, field):
                line += "; not imported, because that would run its code; --trust allows it"
            else:
                try:
                    checks[field](names[0])
                except UserError as error:
                    errors.append(error)
            lines.append(line)
        if errors:
            raise combined(errors)
        return lines

    def model(self) -> list[str]:
        import torch

        from drumline.data.classes import Classes
        from drumline.state.weights import resolve_weights
        from drumline.training.model import FIELDS, build_model, choose_head_rate, initial_model, size_warning
        from drumline.training.state import describe_trained, freeze_and_rates

        name, classes, weights = self.recipe.model.name, self.recipe.model.classes, self.recipe.model.weights
        if weights:
            resolve_weights(weights, FIELDS)
        if self._is_untrusted((name,), "model.name"):
            return [f"model: {name}; not built, because that would run its code; --trust allows it"]
        messages: tuple[str, ...] = ()
        optim = self.recipe.optim
        if optim.head_lr == "auto":  # the data, which has the classes, could not be opened
            optim = replace(optim, head_lr=1.0)
        if self._sets is not None:
            data = Classes.of(self._sets.train)
            self.recipe, head = choose_head_rate(self.recipe, data, self._world())
            optim, messages = self.recipe.optim, (head,) if head else ()
            messages += tuple(size_warning(self.recipe, self._sets.transform.size))
        if weights and self._sets is not None:
            module, loaded = initial_model(self.recipe, data, self._world())
            messages += loaded
        else:
            count = len(self._sets.train.classes) if self._sets else 1000 if classes == "auto" else classes
            with torch.device("meta"):
                module = build_model(self.recipe, count)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        frozen = freeze_and_rates(module, module, optim, self.recipe.train.freeze)
        trained = describe_trained(module, self.recipe, self._plan, *frozen) if self._plan else []
        return [f"model: {name}, {parameters:,} parameters", *messages, *trained]

    def scored(self) -> list[str]:
        from drumline.state.weights import resolve_weights
        from drumline.training.evaluate import model_to_score

        model = self.recipe.model
        file = resolve_weights(model.weights)
        if self._is_untrusted((model.name,), "model.name"):
            return [
                f"model: {model.name}, weights {file}; not built, because that would run its code; --trust allows it"
            ]
        if self._sets is None:
            return [f"model: {model.name}, weights {file}; not checked, because the data was not opened"]
        *_, messages = model_to_score(self.recipe, self._sets, self._world())
        return [f"model: {model.name}", *messages]

    def teachers(self) -> list[str]:
        from drumline.data.classes import Classes
        from drumline.distillation.measure import image_warnings
        from drumline.distillation.selection import select_methods
        from drumline.distillation.task import check_fit
        from drumline.distillation.teacher import check_teachers, load_teachers
        from drumline.training.model import initial_model

        distill, sets = self.recipe.distill, self._sets
        if self._is_untrusted(distill.method, "distill.method"):
            methods = ", ".join(distill.method)
            return [f"method: {methods}; not imported, because that would run its code; --trust allows it"]
        selection = select_methods(distill)
        names = check_teachers(distill)
        by = ", ".join(f"{name} ({path})" for name, path in zip(names, distill.teacher_weights, strict=True))
        by = by or distill.self_taught
        messages: list[str] = []
        if self._is_untrusted(names, "distill.teacher"):
            by += "; not built, because that would run its code; --trust allows it"
        elif sets is not None:
            loaded = load_teachers(self.recipe, Classes.of(sets.train), self._world())
            messages = [message for each in loaded for message in each.messages]
            messages += image_warnings(self.recipe, sets, loaded)
            if not self._is_untrusted((self.recipe.model.name,), "model.name"):
                student, _ = initial_model(self.recipe, Classes.of(sets.train), self._world())
                check_fit(self.recipe, student, loaded, sets)
        return [f"teacher: {by}; method {'+'.join(distill.method)}", *messages, selection.describe()]

    def _world(self) -> World:
        import torch

        from drumline.parallel.world import single_process

        return single_process(torch.device("cpu"))

    def _whole_world(self) -> World:
        """A world with as many processes as the run has, for counting."""
        import torch

        from drumline.launch.start import local_processes

        on_gpu = self.recipe.run.device != "cpu" and torch.cuda.is_available()
        count = local_processes(self.recipe, "cuda" if on_gpu else "cpu")
        return replace(self._world(), size=count * self.recipe.parallel.nodes)

    def processes(self) -> list[str]:
        from drumline.launch.start import local_processes
        from drumline.parallel.process_group import resolve_device_type

        parallel = self.recipe.parallel
        device = resolve_device_type(self.recipe.run.device)
        count = local_processes(self.recipe, device)
        machines = f", on each of {parallel.nodes} machines" if parallel.nodes > 1 else ""
        return [f"processes: {count} on the {'GPU' if device == 'cuda' else 'CPU'}{machines}"]

    def folder(self) -> list[str]:
        from drumline.state.folder import auto_stem, resume_point

        base, name = Path(self.recipe.run.dir), self.recipe.run.name
        _check_writable(base)
        found = resume_point(self.recipe)
        resumed = f", resumed from {found}" if found else ""
        differing = self._compared(found) if found else []
        if name == "auto":
            stem = auto_stem(self._source or "data", self.recipe.data.path, self.recipe.model.name)
            return [f"run folder: a new one, {base}/{stem}-N{resumed}", *differing]
        return [f"run folder: {base / name}{resumed or ' (new)'}", *differing]

    def _compared(self, checkpoint: Path) -> list[str]:
        """Messages about what differs from the checkpoint. Rejects one that the run could not resume from."""
        from drumline.state.manifest import read_manifest
        from drumline.state.model_record import ENVIRONMENT
        from drumline.training.consistency import check_data
        from drumline.training.model import model_record
        from drumline.training.resume import check_position, compare_manifest

        if self._sets is None or self._plan is None:
            return []
        environment = {
            ENVIRONMENT: model_record(self.recipe, self._sets).as_json(),
            "data": check_data(self._sets, self.recipe.run.seed, self._world()),
        }
        position, messages = compare_manifest(self.recipe, read_manifest(checkpoint), environment, checkpoint)
        check_position(self._plan, position, checkpoint)
        return messages

    def _is_untrusted(self, names: Iterable[str], field: str) -> bool:
        from_file = self.origins.get(field, COMMAND_LINE) != COMMAND_LINE
        return from_file and not self._trust and any(map(needs_trust, names))


def _check_writable(base: Path) -> None:
    """Checks the folder, or the nearest existing folder above it."""
    folder = base.absolute()
    with suppress(OSError):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            reason = "is not a folder" if not folder.is_dir() else "is not writable"
            raise UserError(f"run.dir = {base}: {folder} {reason}", "give a different run.dir")

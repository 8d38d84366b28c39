"""The run folder: its name, its lock, and the checkpoint that a run resumes from.

Promises: one run at a time writes a run folder. A folder that holds a run is never overwritten, unless that run had
not saved a checkpoint yet and the same settings repeat its steps. Opening a folder changes no file of an earlier run.
Resuming uses the newest checkpoint that verifies, and warns about each newer one that does not. The first start of a
run claims its folder, and restarts by the launcher continue there, whatever the command line says about names and
resuming.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from drumline.config.arguments import CODE_FIELDS, EVALUATED, named_code
from drumline.config.fields import recipe_fields, with_values
from drumline.config.recipe import Distill, Recipe
from drumline.config.sources import needs_trust
from drumline.config.toml import dump_recipe
from drumline.core.environment import CLAIMED
from drumline.core.errors import UserError
from drumline.core.files import write_file, write_text
from drumline.core.lock import FILE as LOCK
from drumline.core.lock import Lock, Superseded, acquire
from drumline.state.checkpoint import is_checkpoint, is_temporary, newest_valid
from drumline.state.provenance import changed_settings

APPENDED = ("metrics.jsonl", "log.txt", "fingerprints.txt", "events.out.tfevents.*")
"""Files that a run keeps open and appends to."""
OF_A_RUN = (
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "fingerprints.txt",
    "weights",
    "weights*.aside",
    "certificate.json",
    "broken-samples.tsv",
    "events.out.tfevents.*",
    "checkpoints/step-*",
)
"""Files that show that a folder holds a run. log.txt alone does not: it is only appended to."""
UNSAVED = ".unsaved"
"""Marks the folder of a run that has not saved a checkpoint yet."""


@dataclass(frozen=True)
class Opened:
    """A locked run folder, and the checkpoint to resume from (None: start at step 0)."""

    path: Path
    resume_from: Path | None
    notes: tuple[str, ...]
    lock: Lock
    holds_run: bool
    """Whether an earlier start of the run left files here. Change none before everything else is open."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def branched(self) -> bool:
        """Whether the run resumes from a checkpoint of a different run folder."""
        return self.resume_from is not None and self.path.resolve() not in self.resume_from.resolve().parents

    def leave(self) -> None:
        """Unlocks the folder, and removes it if the run never used it."""
        # Still locked: a lock file that another run has locked meanwhile must not be removed.
        with suppress(Superseded, OSError):
            self.lock.check()
            if not found_of_run(self.path):
                (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()  # fails if it holds other files
        self.lock.close()


def open_run(recipe: Recipe, source: str) -> Opened:
    """Finds or creates, and locks, the folder of a run. Call it on rank 0 only."""
    base = Path(recipe.run.dir)
    resume = recipe.checkpoint.resume
    elsewhere = find_checkpoint(Path(resume)) if resume not in ("auto", "never") else None
    path = base / (claim_name(recipe, source) if recipe.run.name == "auto" else recipe.run.name)
    # An earlier start of this run that was lost before its first checkpoint.
    begun = claimed() == path.name
    try:
        lock = acquire(path)
    except OSError as error:
        raise _unwritable(base, error) from error
    try:
        if lock.replaced is not None:
            _detach(path)
        resume_from, notes, found = _resume_point(recipe, path, elsewhere, begun)
    except OSError as error:
        lock.close()
        raise _unwritable(base, error) from error
    except BaseException:
        lock.close()
        raise
    remember(path.name)
    return Opened(path, resume_from, tuple(notes), lock, holds_run=bool(found))


def resume_point(recipe: Recipe) -> Path | None:
    """The checkpoint that the recipe's run would resume from, if any. Raises what `open_run` would raise, and changes
    nothing."""
    resume = recipe.checkpoint.resume
    elsewhere = find_checkpoint(Path(resume)) if resume not in ("auto", "never") else None
    if recipe.run.name == "auto":
        return elsewhere[0] if elsewhere else None
    return _resume_point(recipe, Path(recipe.run.dir) / recipe.run.name, elsewhere, begun=False)[0]


def _resume_point(
    recipe: Recipe, path: Path, elsewhere: tuple[Path, list[str]] | None, begun: bool
) -> tuple[Path | None, list[str], list[str]]:
    """The checkpoint, messages about it, and the files of a run that the folder holds."""
    resume = recipe.checkpoint.resume
    notes: list[str] = []
    resume_from: Path | None = None
    found = found_of_run(path)
    if resume == "never":
        if found:
            raise UserError(
                f"run.name = {path.name}: {path} already holds a run",
                "resume it with --checkpoint.resume auto, or choose another --run.name",
            )
    elif resume == "auto":
        resume_from, complaints = newest_valid(path / "checkpoints")
        notes += _warnings(complaints, resume_from)
        if complaints and resume_from is None:
            raise UserError(
                f"{path}: no checkpoint verifies. " + "; ".join(complaints),
                "restore one from a copy, or start again under another --run.name",
            )
        if found and resume_from is None:
            _check_unsaved(recipe, path, found, begun)
            notes.append(f"{path} has no checkpoint yet: starting again at step 0")
        elif resume_from is None and not begun and not any(path.glob("initial-*")):
            notes.append(f"nothing to resume in {path}: starting at step 0")
    else:
        assert elsewhere is not None
        resume_from, complaints = elsewhere
        notes += _warnings(complaints, resume_from)
        if found and path.resolve() not in resume_from.resolve().parents:
            if not (path / UNSAVED).exists():
                raise UserError(
                    f"run.name = {path.name}: {path} holds a different run from {resume_from}",
                    "choose another --run.name, or give the name of the run itself",
                )
            _check_unsaved(recipe, path, found, begun)
    return resume_from, notes, found


def found_of_run(path: Path) -> list[str]:
    """The names of the files of a run in a folder."""
    return [str(file.relative_to(path)) for pattern in OF_A_RUN for file in sorted(path.glob(pattern))]


def _state(folder: Path) -> str:
    """Why a folder holds no checkpoint."""
    if folder.is_dir():
        return "is empty"
    if folder.exists():
        return "is not a folder"
    return "is a broken link" if folder.is_symlink() else "is missing"


def _check_unsaved(recipe: Recipe, path: Path, found: list[str], begun: bool) -> None:
    """Raises `UserError` if starting again at step 0 would lose something that the folder holds."""
    fix = "to start over, choose another --run.name or move that folder away"
    if not (path / UNSAVED).exists():
        folder = path / "checkpoints"
        held = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise UserError(
            f"{path} holds a run ({held}) and no checkpoint to resume from: {folder} {_state(folder)}. "
            "Nothing was changed",
            f"restore or mount {folder} and try again; {fix}",
        )
    metrics = path / "metrics.jsonl"
    if begun or not metrics.exists() or not metrics.stat().st_size:
        return
    try:
        saved = (path / "recipe.toml").read_text()
        changes = changed_settings(saved, dump_recipe(repeatable(recipe)), recipe.run.strict)
    except (OSError, ValueError) as error:
        changes = [f"cannot read recipe.toml ({error})"]
    if changes:
        raise UserError(
            f"{path} holds the metrics of a run with different settings that ended before its first checkpoint: "
            f"{'; '.join(changes)}. Nothing was changed",
            fix,
        )


def _detach(path: Path) -> None:
    """Replaces the files that an earlier start of the run may still have open by copies, and removes the checkpoint
    that it was saving. If that start wakes up, what it writes goes to files that no folder lists any more."""
    for pattern in APPENDED:
        for file in path.glob(pattern):
            if file.is_file() and not file.is_symlink():
                write_file(file, partial(shutil.copyfile, file))
    for temporary in (path / "checkpoints").glob("step-*.tmp"):
        if is_temporary(temporary):
            shutil.rmtree(temporary)


def claim_name(recipe: Recipe, source: str) -> str:
    """A free name for a run, from its source and model. Creates its folder."""
    base = Path(recipe.run.dir)
    try:
        base.mkdir(parents=True, exist_ok=True)
        return next_free(base, auto_stem(source, recipe.data.path, recipe.model.name)).name
    except OSError as error:
        raise _unwritable(base, error) from error


def auto_stem(source: str, path: str, model: str) -> str:
    """The beginning of an automatic name: the name of the data folder or file (or of a source without one), and the
    model."""
    data = source.split(":")[0]
    if path:
        absolute = Path(path).expanduser().absolute()
        data = (absolute.stem if absolute.suffix.lower() in _CONTAINERS else absolute.name) or data
    stem = f"{data.lstrip('.-')[:40] or 'data'}-{model}"
    return "".join(sign if sign.isprintable() and sign not in "/:\\ " else "-" for sign in stem)


_CONTAINERS = (".npz", ".tar", ".packed", ".csv", ".tsv", ".parquet")


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """A checkpoint folder itself, or the newest valid one of a run folder, and why newer ones are not valid."""
    if not path.exists():
        raise UserError(
            f"checkpoint.resume = {path}: {path} does not exist",
            "give auto, never, a run folder or one of its checkpoints/step-N",
        )
    if is_checkpoint(path):
        return path, []
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, complaints = newest_valid(folder)
    if found is None:
        why = "; ".join(complaints) if complaints else "there is none"
        raise UserError(f"{path}: no checkpoint to use: {why}", "give a run folder that has a valid one")
    return found, complaints


def run_of(path: Path) -> Path | None:
    """The run folder of a path: the path itself, or of a checkpoint, the `weights` folder, or a file in those."""
    for candidate in dict.fromkeys((path.absolute(), path.resolve())):
        folder = candidate.parent if candidate.is_file() else candidate
        inside = folder.parent if folder.name == "weights" else folder
        run = folder.parent.parent if is_checkpoint(folder) else inside
        if (run / "recipe.toml").is_file():
            return run
    return None


def repeatable(recipe: Recipe) -> Recipe:
    """The recipe as it is saved, with absolute paths: it starts the same run from any working directory.
    `drumline train RUN/recipe.toml` starts a new run under a new name, or resumes RUN with
    `checkpoint.resume=auto`."""

    def whole(path: str) -> str:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    changed: dict[str, Any] = {"checkpoint.resume": "never"}
    for name, field in recipe_fields().items():
        if field.per_machine is not None and field.per_machine.path:
            value = getattr(getattr(recipe, field.section), field.key)
            changed[name] = whole(value) if isinstance(value, str) else tuple(map(whole, value))
    return with_values(recipe, changed)


def command_of(recipe: Recipe) -> str:
    """The command that runs a recipe."""
    return "train" if recipe.distill == Distill() else "distill"


def resume_command(recipe: Recipe, folder: Path) -> str:
    """The command that resumes a run."""
    if folder.name.startswith("initial-"):  # an initial phase, whose run has no recipe.toml yet
        name = shlex.quote(f"run.name={folder.parent.name}")
        return f"drumline {command_of(recipe)} ... {name} checkpoint.resume=auto"
    return f"drumline resume {shlex.join([str(folder), *_trust(recipe, CODE_FIELDS)])}"


def eval_command(recipe: Recipe, folder: str) -> str:
    """The command that scores a run."""
    return f"drumline eval {shlex.join([folder, *_trust(recipe, EVALUATED)])}"


def _trust(recipe: Recipe, fields: Sequence[str]) -> list[str]:
    """The option for a run whose recipe names code in these fields."""
    code = (name for names in named_code(recipe, fields).values() for name in names)
    return ["--trust"] if any(map(needs_trust, code)) else []


def write_facts(path: Path, recipe_text: str, environment: dict[str, Any]) -> None:
    """Writes recipe.toml and environment.json."""
    write_text(path / "recipe.toml", recipe_text)
    write_text(path / "environment.json", json.dumps(environment, indent=1) + "\n")


def remember(name: str) -> None:
    """Claims a run folder, on rank 0. The first name stays: later ones are folders inside it."""
    if CLAIMED in os.environ and not claimed():
        Path(os.environ[CLAIMED]).write_text(name)


def claimed() -> str:
    """The name of the folder that an earlier start of this run has claimed; empty at its first start."""
    path = os.environ.get(CLAIMED)
    return Path(path).read_text() if path else ""


def restart_resume(recipe: Recipe, name: str) -> str:
    """The value of `checkpoint.resume` for a restart in the run folder of this name. Call it on rank 0."""
    folder = Path(recipe.run.dir) / name
    if not folder.is_dir():
        raise UserError(
            f"run.dir = {recipe.run.dir}: {name}, the folder of the run to continue, does not exist",
            "if you renamed or moved it, move it back and resume with --checkpoint.resume auto; on several machines, "
            "set run.dir to a folder on a shared disk",
        )
    resume = recipe.checkpoint.resume
    saved = any(path.suffix == "" for path in (folder / "checkpoints").glob("step-*"))
    return "auto" if saved or resume == "never" else resume


def restart_recipe(recipe: Recipe, name: str, resume: str) -> Recipe:
    """The recipe of a restart."""
    return replace(
        recipe,
        run=replace(recipe.run, name=name),
        checkpoint=replace(recipe.checkpoint, resume=resume),
    )


def _unwritable(base: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run folder in {base}: {error.strerror or error}", "choose another --run.dir"
    )


def _warnings(complaints: list[str], used: Path | None) -> list[str]:
    instead = f"; using {used.name}" if used else ""
    return [
        f"WARNING: a checkpoint does not verify and is not used: {reason}{instead}" for reason in complaints
    ]


def next_free(base: Path, stem: str) -> Path:
    """A new folder `stem-N` with the smallest free N."""
    number = 1
    while True:
        try:
            (base / f"{stem}-{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return base / f"{stem}-{number}"

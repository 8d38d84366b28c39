"""The run folder: its name, its lock, and where a run goes on.

Promises: one process tree writes a run folder at a time; a folder that holds a run is never started over by
accident; resuming takes the newest checkpoint that verifies and says loudly when it had to pass one over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from drumline.errors import UserError
from drumline.launch.claimed import claimed, remember
from drumline.recipe import Recipe
from drumline.recipe_file import differing_fields
from drumline.state.atomic import write_text
from drumline.state.checkpoint import checkpoints, is_checkpoint, newest_sound

IRRELEVANT_TO_BITS = (
    "run.dir",
    "run.name",
    "data.workers",
    "data.pool",
    "data.decode",
    "data.strict",
    "data.bad_limit",
    "train.log_every",
    "parallel.timeout",
    "parallel.interface",
    "parallel.rendezvous",
    "parallel.node_rank",
)
TRIES = 100
"""How often a lock is tried for that others take away meanwhile."""
OF_THE_WORLD = ("parallel.processes", "parallel.nodes", "parallel.layout", "parallel.backend")
"""What strict mode's bits do not depend on either."""


@dataclass(frozen=True)
class Opened:
    """A run folder ready to be written, and the checkpoint to go on from (None: start)."""

    path: Path
    resume_from: Path | None
    notes: tuple[str, ...]
    lock: IO[str]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def resumes_elsewhere(self) -> bool:
        """Whether the checkpoint to go on from belongs to another run folder."""
        return self.resume_from is not None and self.path.resolve() not in self.resume_from.resolve().parents

    def leave(self) -> None:
        """Unlocks; takes the folder away again when the run never came to use it."""
        # Still locked: a file that another run has locked meanwhile must not be taken away from it.
        if not (self.path / "recipe.toml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are in it
                self.path.rmdir()
        self.lock.close()


def open_run(recipe: Recipe, source: str) -> Opened:
    """Finds or makes the folder of a run. On the writing rank only."""
    base = Path(recipe.run.dir)
    resume = recipe.checkpoint.resume
    elsewhere = find_checkpoint(Path(resume)) if resume not in ("auto", "never") else None
    path = base / (claim_name(recipe, source) if recipe.run.name == "auto" else recipe.run.name)
    # A start of this very run that was lost before its first checkpoint.
    begun = claimed() == path.name
    try:
        lock = _lock(path)
    except OSError as error:
        raise _unwritable(base, error) from error
    remember(path.name)
    notes: list[str] = []
    resume_from: Path | None = None
    holds_a_run = (path / "recipe.toml").exists() or bool(checkpoints(path / "checkpoints"))
    if resume == "never":
        if holds_a_run:
            raise UserError(
                f"run.name = {path.name}: {path} already holds a run",
                "go on with it by --checkpoint.resume auto, or give another --run.name",
            )
    elif resume == "auto":
        resume_from, complaints = newest_sound(path / "checkpoints")
        notes += _passed_over(complaints, resume_from)
        if complaints and resume_from is None:
            raise UserError(
                f"{path}: no checkpoint verifies. " + "; ".join(complaints),
                "restore one from a copy, or start again under another --run.name",
            )
    else:
        assert elsewhere is not None
        resume_from, complaints = elsewhere
        notes += _passed_over(complaints, resume_from)
        if holds_a_run and not begun and path.resolve() not in resume_from.resolve().parents:
            raise UserError(
                f"run.name = {path.name}: {path} holds another run than {resume_from}",
                "give another --run.name to go on under, or the name of the run itself",
            )
    return Opened(path, resume_from, tuple(notes), lock)


def claim_name(recipe: Recipe, source: str) -> str:
    """A free name for a run, by its source and model; its folder is made."""
    base = Path(recipe.run.dir)
    model = recipe.model.name.replace("/", "-").replace(":", "-")
    try:
        base.mkdir(parents=True, exist_ok=True)
        return next_free(base, f"{source.split(':')[0]}-{model}").name
    except OSError as error:
        raise _unwritable(base, error) from error


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """A checkpoint folder itself, or the newest sound one of a run folder."""
    if not path.exists():
        raise UserError(
            f"checkpoint.resume = {path}: {path} does not exist",
            "give auto, never, a run folder or one of its checkpoints/step-N",
        )
    if is_checkpoint(path):
        return path, []
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, complaints = newest_sound(folder)
    if found is None:
        why = "; ".join(complaints) if complaints else "there is none"
        raise UserError(f"{path}: no checkpoint to use: {why}", "give a run folder that has saved one")
    return found, complaints


def run_of(path: Path) -> Path | None:
    """The run folder that a path belongs to: itself, one of its checkpoints, its `weights`, or a file of those."""
    for place in dict.fromkeys((path.absolute(), path.resolve())):
        folder = place.parent if place.is_file() else place
        inside = folder.parent if folder.name == "weights" else folder
        run = folder.parent.parent if is_checkpoint(folder) else inside
        if (run / "recipe.toml").is_file():
            return run
    return None


def repeatable(recipe: Recipe) -> Recipe:
    """The recipe as it is saved: it starts the same run again, from any folder, in a run folder of its own."""

    def whole(path: str) -> str:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    return replace(
        recipe,
        run=replace(recipe.run, name="auto", dir=whole(recipe.run.dir)),
        data=replace(recipe.data, path=whole(recipe.data.path)),
        model=replace(recipe.model, weights=whole(recipe.model.weights)),
        distill=replace(
            recipe.distill,
            teacher_weights=tuple(whole(path) for path in recipe.distill.teacher_weights),
            cache=whole(recipe.distill.cache),
        ),
        checkpoint=replace(recipe.checkpoint, resume="never"),
    )


def write_facts(path: Path, recipe_text: str, environment: dict[str, Any]) -> None:
    """recipe.toml and environment.json."""
    write_text(path / "recipe.toml", recipe_text)
    write_text(path / "environment.json", json.dumps(environment, indent=1) + "\n")


def changed_settings(saved: str, current: str, strict: bool = False) -> list[str]:
    """Which fields that can change the result differ between two recipe texts, as `name: old -> new`."""
    irrelevant = IRRELEVANT_TO_BITS + (OF_THE_WORLD if strict else ())
    return [
        f"{name}: {old!r} -> {new!r}"
        for name, old, new in sorted(differing_fields(saved, current), key=lambda field: field[0])
        if name not in irrelevant and not name.startswith(("checkpoint.", "launch.", "guard."))
    ]


def changed_environment(saved: dict[str, Any], current: dict[str, Any], strict: bool = False) -> list[str]:
    """What differs of the things that can change bits, as `name: old -> new`."""
    names = ("device", "cuda", "cudnn", "libraries", "threads", *(() if strict else ("processes", "backend")))
    # Strict mode promises bits, and its own code makes them.
    packages = ("torch", "pillow", *(("drumline", "numpy") if strict else ()))
    pairs = {name: (saved.get(name), current.get(name)) for name in names}
    pairs |= {name: (saved.get("packages", {}).get(name), current["packages"].get(name)) for name in packages}
    return [f"{name}: {_plain(old)} -> {_plain(new)}" for name, (old, new) in pairs.items() if old != new]


def _unwritable(base: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run folder in {base}: {error.strerror or error}", "give another --run.dir"
    )


def _passed_over(complaints: list[str], used: Path | None) -> list[str]:
    instead = f"; going back to {used.name}" if used else ""
    return [
        f"WARNING: a checkpoint does not verify and is passed over: {reason}{instead}"
        for reason in complaints
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


def _lock(path: Path) -> IO[str]:
    """The folder's lock file, held until it is closed or the process ends, however it ends."""
    for _ in range(TRIES):
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # a run that never came to use the folder has just taken it away
        lock = os.fdopen(handle, "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise _not_locked(path, error) from error
        # What was opened before another run took it away locks nobody out.
        if _stands(lock, path / ".lock"):
            return lock
        lock.close()
    raise _not_locked(path, OSError(errno.ENOLCK, "the lock file keeps changing"))


def _not_locked(path: Path, error: OSError) -> UserError:
    if isinstance(error, BlockingIOError):
        return UserError(
            f"{path} is being written by another run", "wait for it to end, or give another --run.name"
        )
    return UserError(
        f"{path} cannot be locked ({error.strerror}), so nothing would keep a second run from writing there too",
        "give a --run.dir on a local disk, or mount the network share with locks (NFS: without nolock, with lockd "
        "running)",
    )


def _stands(lock: IO[str], path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _plain(value: object) -> str:
    """A value of somebody's manifest as a short text that cannot steer a terminal."""
    text = str(value)[:100]
    return "".join(sign if sign.isprintable() else "?" for sign in text)

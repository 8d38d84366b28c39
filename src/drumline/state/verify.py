"""`drumline verify` for runs: is everything that a run saved still intact?

Promises: every byte of every checkpoint and of the exported weights is read. Files that the run deletes or writes in
the meantime do not count as damage. Leftovers and missing records are reported, but are not damage.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_small
from drumline.core.text import counted
from drumline.state.chain import FILE as FINGERPRINTS
from drumline.state.chain import Damaged, read_whole
from drumline.state.checkpoint import (
    CHECKSUMS,
    RETRIES,
    checkpoints,
    is_checkpoint,
    is_temporary,
    read_checkpoint,
    read_live,
    step_of,
    verify_checksums,
)
from drumline.state.manifest import Manifest

Watch = Callable[[Iterable[Path], int], Iterable[Path]]
MAX_RECORD = 64 << 20


@dataclass(frozen=True)
class Verification:
    """The result. `state_sha256` belongs to the newest valid checkpoint, and is empty if there is none. `notes` are
    findings that are not damage."""

    path: str
    sound: bool
    checkpoints: int
    unsound: tuple[str, ...]
    step: int
    state_sha256: str
    notes: tuple[str, ...]
    lines: tuple[str, ...]


def verify_run(path: Path, watch: Watch = lambda items, total: items) -> Verification:
    """Verifies every byte of a run folder (its checkpoints, also those of initial phases, and its weights) or of one
    checkpoint. `watch` wraps the checkpoints, for a progress bar; it also gets their approximate number."""
    if not path.exists():
        raise UserError(f"{path} does not exist", "give a run folder or one of its checkpoints/step-N")
    lines: list[str] = []
    unsound: list[str] = []
    sound: dict[int, Manifest] = {}
    count = 0
    stages = [stage for stage in sorted(path.glob("initial-*")) if checkpoints(stage / "checkpoints")]
    total = sum(len(checkpoints(folder / "checkpoints")) for folder in (path, *stages)) or 1
    everything = (checkpoint for folder in (*stages, path) for checkpoint in _all_checkpoints(folder))
    for checkpoint in watch(everything, total):
        name = (
            str(checkpoint.relative_to(path)).replace("checkpoints/", "") if checkpoint != path else path.name
        )
        try:
            found = read_live(checkpoint, read_checkpoint)
        except CorruptError as reason:
            count += 1
            unsound.append(str(reason))
            lines.append(f"BAD  {name}: {reason}")
            continue
        if found is None:
            lines.append(f"gone {name}: deleted by its run meanwhile")
            continue
        count += 1
        manifest, groups = found
        if name == checkpoint.name:
            sound[manifest.position.step] = manifest
        tensors = sum(len(group) for group in groups.values())
        lines.append(f"ok   {name}: {tensors} tensors, {manifest.bytes / 2**20:,.1f} MiB")
        del groups, found  # the next one needs the memory
    if not lines:
        raise UserError(
            f"{path} holds no checkpoint", "give a run folder that has saved one, or a checkpoints/step-N"
        )
    try:
        weights = verify_checksums(path / "weights")
        if weights:
            lines.append(f"ok   weights: {counted(weights, 'file')}")
    except CorruptError as reason:
        unsound.append(str(reason))
        lines.append(f"BAD  weights: {reason}")
    notes = _notes(path)
    if not (path / "weights" / CHECKSUMS).exists() and any((path / "weights").glob("*.safetensors")):
        notes += (f"weights: {CHECKSUMS} is missing, so they cannot be verified",)
    lines += [f"note {note}" for note in notes]
    step = max(sound, default=-1)
    if sound:
        lines.append(f"newest valid step: {step}")
        lines.append(f"state sha256: {sound[step].state_sha256}")
    if unsound:
        lines.append("fix: delete the bad ones or restore them from a copy; resuming ignores them")
    return Verification(
        path=str(path),
        sound=not unsound,
        checkpoints=count,
        unsound=tuple(unsound),
        step=step,
        state_sha256=sound[step].state_sha256 if sound else "",
        notes=notes,
        lines=tuple(lines),
    )


def _all_checkpoints(path: Path) -> Iterable[Path]:
    """All checkpoints, oldest first. The folder is listed again at the end, because a running run may have written
    more and deleted the first ones."""
    if is_checkpoint(path):
        yield path
        return
    folder = path / "checkpoints" if checkpoints(path / "checkpoints") else path
    newest = -1
    for _ in range(RETRIES):
        more = [checkpoint for checkpoint in checkpoints(folder) if step_of(checkpoint) > newest]
        yield from more
        if not more:
            return
        newest = step_of(more[-1])


def _notes(path: Path) -> tuple[str, ...]:
    """Leftovers of killed runs, and records that are missing or unreadable."""
    if is_checkpoint(path):
        return ()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    notes = [
        f"{left.name}: incomplete; the next start of the run removes it"
        for left in sorted(folder.glob("step-*.tmp"))
        if is_temporary(left)
    ]
    notes += [f"{left.name}: {_ASIDE}" for left in sorted(folder.glob("step-*.aside"))]
    if folder != path:
        readers: dict[str, Callable[[Path], object]] = {
            "recipe.toml": lambda file: tomllib.loads(read_small(file, MAX_RECORD).decode()),
            "environment.json": lambda file: json.loads(read_small(file, MAX_RECORD)),
            FINGERPRINTS: _read_fingerprints,
        }
        notes += filter(None, (_record(path / name, read) for name, read in readers.items()))
    return tuple(notes)


_ASIDE = "set aside when the run resumed from an earlier step; delete it if you do not need it"


def _read_fingerprints(file: Path) -> None:
    _, torn = read_whole(file)
    if torn:
        raise Damaged(f"{torn}; `compare` ignores it, and resuming the run removes it")


def _record(file: Path, read: Callable[[Path], object]) -> str:
    try:
        read(file)
    except Damaged as reason:
        return f"{file.name}: {reason}"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except (CorruptError, ValueError, RecursionError) as error:
        return f"cannot read {file.name}: {str(error)[:120]}"
    return ""

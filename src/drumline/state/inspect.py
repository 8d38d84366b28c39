"""`drumline verify`: is everything a run saved still what was saved?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.errors import UserError
from drumline.state.checkpoint import Unsound, checkpoints, is_checkpoint, read_checkpoint, verify_checksums


@dataclass(frozen=True)
class Inspection:
    """What was found. `state_sha256` is of the newest sound checkpoint, empty when there is none."""

    path: str
    sound: bool
    checkpoints: int
    unsound: tuple[str, ...]
    step: int
    state_sha256: str
    lines: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """Checks a run folder (all of its checkpoints) or a single checkpoint, byte by byte."""
    if not path.exists():
        raise UserError(f"{path} does not exist", "give a run folder or one of its checkpoints/step-N")
    found = [path] if is_checkpoint(path) else checkpoints(path / "checkpoints") or checkpoints(path)
    if not found:
        raise UserError(
            f"{path} holds no checkpoint", "give a run folder that has saved one, or a checkpoints/step-N"
        )
    lines, unsound, step, sha256 = [], [], -1, ""
    for checkpoint in found:
        try:
            manifest, groups = read_checkpoint(checkpoint)
        except Unsound as reason:
            unsound.append(str(reason))
            lines.append(f"BAD  {checkpoint.name}: {reason}")
            continue
        step, sha256 = manifest.position.step, manifest.state_sha256
        tensors = sum(len(group) for group in groups.values())
        size = sum(int(entry["bytes"]) for entry in manifest.files.values())
        lines.append(f"ok   {checkpoint.name}: {tensors} tensors, {size / 2**20:,.1f} MiB")
    try:
        weights = verify_checksums(path / "weights")
        if weights:
            lines.append(f"ok   weights: {weights} files")
    except Unsound as reason:
        unsound.append(str(reason))
        lines.append(f"BAD  weights: {reason}")
    if sha256:
        lines.append(f"state sha256: {sha256}")
    if unsound:
        lines.append(
            "fix: delete the bad ones or restore them from a copy; resuming passes them over by itself"
        )
    return Inspection(
        path=str(path),
        sound=not unsound,
        checkpoints=len(found),
        unsound=tuple(unsound),
        step=step,
        state_sha256=sha256,
        lines=tuple(lines),
    )

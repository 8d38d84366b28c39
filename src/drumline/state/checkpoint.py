"""Checkpoints: complete, checksummed, written beside and renamed, verified before use.

A checkpoint is a folder `step-N` with `model.safetensors` (plain names: any tool loads it), `optimizer.safetensors`,
`average.safetensors` when there is a moving average, and `manifest.json` with every file's size and SHA-256, the
hash of the whole state, the recipe and the environment. Promises: a folder under its final name is whole; no byte
is used that its checksum does not cover; no pickle. Refuses to overwrite a step.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drumline.errors import UserError
from drumline.state.atomic import rename_folder, write_text
from drumline.state.fingerprint import state_sha256

Groups = Mapping[str, Mapping[str, torch.Tensor]]
FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUMS = "sha256.txt"
_STEP = re.compile(r"step-(\d+)")


class Unsound(Exception):
    """A checkpoint that does not verify; the message says which file and why."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: enough, with the recipe, to go on at the exact sample."""

    step: int
    per_epoch: int
    best_step: int = -1
    best_accuracy: float = -1.0
    scaler: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    format: int
    position: Position
    files: dict[str, dict[str, Any]]
    state_sha256: str
    recipe: str
    environment: dict[str, Any]


def write_checkpoint(
    folder: Path, groups: Groups, position: Position, recipe: str, environment: dict[str, Any]
) -> Path:
    """Writes `folder/step-N` from host tensors; returns its path. Blocking: call it off the training thread."""
    final = folder / f"step-{position.step}"
    if final.exists():
        raise FileExistsError(final)
    temporary = folder / f"step-{position.step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = {}
        for group, tensors in groups.items():
            path = temporary / f"{group}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        manifest = Manifest(FORMAT, position, files, state_sha256(groups), recipe, environment)
        (temporary / MANIFEST).write_text(_sealed(asdict(manifest)))
        rename_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own seal."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        content = json.loads(text)
    except FileNotFoundError:
        raise Unsound(f"{folder}: {MANIFEST} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Unsound(f"{folder / MANIFEST}: unreadable ({error})") from None
    # The text, not its meaning: 1E-7 for 1e-7 has changed too.
    if not isinstance(content, dict) or _sealed({k: v for k, v in content.items() if k != "seal"}) != text:
        raise Unsound(f"{folder / MANIFEST}: its checksum does not match")
    if any(Path(name).name != name for name in content["files"]):
        raise Unsound(f"{folder / MANIFEST}: names a file outside its folder")
    if content["format"] != FORMAT:
        raise Unsound(f"{folder / MANIFEST}: format {content['format']}, this version reads {FORMAT}")
    return Manifest(
        position=Position(**content["position"]),
        **{item.name: content[item.name] for item in fields(Manifest) if item.name != "position"},
    )


def verify_checkpoint(folder: Path) -> Manifest:
    """Checks every byte of a checkpoint. Raises `Unsound` naming the file."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            found = _sha256(path) if size == expected["bytes"] else ""
        except OSError as error:
            raise Unsound(f"{path}: {error.strerror}") from None
        if size != expected["bytes"]:
            raise Unsound(f"{path}: {size:,} bytes, {expected['bytes']:,} were written")
        if found != expected["sha256"]:
            raise Unsound(
                f"{path}: its checksum does not match, the content has changed since it was written"
            )
    return manifest


def read_checkpoint(folder: Path) -> tuple[Manifest, dict[str, dict[str, torch.Tensor]]]:
    """Verifies, loads, and checks the loaded state against the hash of what was saved."""
    manifest = verify_checkpoint(folder)
    groups = {Path(name).stem: load_file(folder / name) for name in manifest.files}
    if state_sha256(groups) != manifest.state_sha256:
        raise Unsound(f"{folder}: the loaded state does not have the hash that was saved")
    return manifest, groups


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or was one; a run may be called step-anything."""
    return (path / MANIFEST).exists() or _STEP.fullmatch(path.name) is not None


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints below a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a finished checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_sound(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was passed over."""
    complaints: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except Unsound as reason:
            complaints.append(str(reason))
        else:
            return path, complaints
    return None, complaints


def write_checksums(folder: Path) -> None:
    """Puts the SHA-256 of each weights file beside them, in the form that `sha256sum -c` reads."""
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.safetensors"))]
    write_text(folder / CHECKSUMS, "".join(lines))


def verify_checksums(folder: Path) -> int:
    """Checks exported weights against the checksums beside them; how many there were. Raises `Unsound`."""
    if not (folder / CHECKSUMS).exists():
        return 0
    lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    for line in lines:
        expected, _, name = line.partition("  ")
        path = folder / Path(name).name
        if not path.is_file() or _sha256(path) != expected:
            raise Unsound(f"{path}: its checksum does not match {CHECKSUMS}, or the file is gone")
    return len(lines)


def copy_into(groups: Groups, live: Groups, where: Path) -> None:
    """Writes loaded tensors into the live ones, in place. Names and shapes must agree exactly."""
    for group, tensors in live.items():
        loaded = groups.get(group, {})
        if set(loaded) != set(tensors):
            odd = sorted(set(loaded) ^ set(tensors))
            raise UserError(
                f"{where}: its {group} does not fit this recipe ({len(odd)} names differ, first {odd[0]!r})",
                "resume with the model, optimizer and average the run was started with",
            )
        for name, tensor in tensors.items():
            if loaded[name].shape != tensor.shape:
                raise UserError(
                    f"{where}: {group} {name!r} has shape {tuple(loaded[name].shape)}, the recipe's model has "
                    f"{tuple(tensor.shape)}",
                    "resume with the model and number of classes the run was started with",
                )
            with torch.no_grad():
                tensor.copy_(loaded[name])


def _sealed(content: dict[str, Any]) -> str:
    seal = hashlib.sha256(_text(content).encode()).hexdigest()
    return _text({**content, "seal": seal})


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

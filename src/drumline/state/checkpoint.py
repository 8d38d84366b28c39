"""Checkpoints: atomic, checksummed, and verified before use.

A checkpoint is a folder `step-N` with `model.safetensors` (plain names that any tool loads), `optimizer.safetensors`,
`average.safetensors` if there is a moving average, and `manifest.json` with the size and SHA-256 of every file, the
hash of the whole state, the recipe and the environment. A group may be sharded (`state/shards.py`); reading it gives
the same tensors. Promises: a folder under its final name is complete; only bytes that were hashed and verified are
used; no pickle. Rejects overwriting a step, and a folder with tensors that its manifest does not list.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from drumline.core import lock
from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_small, rename_folder, write_text
from drumline.state.fingerprint import state_sha256
from drumline.state.manifest import (
    FORMAT,
    MANIFEST,
    STEP,
    Manifest,
    Position,
    read_manifest,
)
from drumline.state.model_record import record_of
from drumline.state.shards import read_shards
from drumline.state.tensors import Groups, Tensors, file_sha256, read_tensors, verify_file, write_tensors

T = TypeVar("T")
CHECKSUMS = "sha256.txt"
_CHECKSUM = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]{1,200})")
_LOADABLE = (".safetensors", ".pt", ".pth", ".bin")
_TEMPORARY = re.compile(r"step-\d+(\.[0-9a-f]{8})?\.tmp")
_OURS = re.compile(
    r"(manifest\.json|receipt-\d+\.json|\w+(\.shard-\d+-of-\d+)?\.safetensors)(\.[0-9a-f]{8}\.tmp)?"
)


def write_checkpoint(
    folder: Path, groups: Groups, position: Position, recipe: str, environment: dict[str, Any]
) -> Path:
    """Writes `folder/step-N` from host tensors and returns its path. Blocking: keep it off the training thread."""
    temporary = begin_folder(folder, position.step)
    final = folder / f"step-{position.step}"
    record = record_of(environment)
    try:
        files = {}
        for group, tensors in groups.items():
            path = temporary / f"{group}.safetensors"
            described = record.metadata() if record and group in ("model", "average") else None
            size, sha256 = write_tensors(path, tensors, described)
            files[path.name] = {"bytes": size, "sha256": sha256}
        manifest = Manifest(FORMAT, position, files, state_sha256(groups), recipe, environment)
        manifest.write(temporary)
        rename_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def begin_folder(folder: Path, step: int) -> Path:
    """Creates the temporary folder of a checkpoint under a unique name, so that another process that writes the same
    step cannot mix its files with ours."""
    final = folder / f"step-{step}"
    if final.exists():
        raise FileExistsError(final)
    lock.check(folder)
    temporary = temporary_name(final)
    temporary.mkdir(parents=True)
    return temporary


def temporary_name(checkpoint: Path) -> Path:
    """A unique name for a checkpoint that is being written or deleted."""
    return checkpoint.with_name(f"{checkpoint.name}.{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a folder is an incomplete checkpoint, left by an interrupted save or deletion, and nothing else."""
    if not _TEMPORARY.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(_OURS.fullmatch(file.name) and file.is_file() for file in path.iterdir())


def verify_checkpoint(folder: Path, watch: Callable[[int], None] = lambda count: None) -> Manifest:
    """Verifies every byte of a checkpoint. `watch` gets the number of bytes read. Raises `CorruptError`."""
    manifest = read_manifest(folder)
    _reject_unlisted(folder, manifest)
    for name, expected in manifest.files.items():
        verify_file(folder / name, expected["bytes"], expected["sha256"], watch)
    return manifest


def read_checkpoint(folder: Path) -> tuple[Manifest, dict[str, Tensors]]:
    """Loads a checkpoint, and verifies every file and the hash of the loaded state. Each file is read once: the bytes
    that are hashed are the bytes that are loaded."""
    manifest = read_manifest(folder)
    _reject_unlisted(folder, manifest)
    groups = {group: _read_group(folder, manifest, group) for group in manifest.groups}
    if state_sha256(groups) != manifest.state_sha256:
        raise CorruptError(f"{folder}: the loaded state does not match the saved hash")
    return manifest, groups


def read_group(folder: Path, group: str) -> Tensors:
    """The verified tensors of one group."""
    manifest = read_manifest(folder)
    _reject_unlisted(folder, manifest)
    if group not in manifest.groups:
        raise CorruptError(f"{folder}: has no {group}")
    return _read_group(folder, manifest, group)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, possibly a damaged one. (A run may be called step-something too.)"""
    return (path / MANIFEST).exists() or STEP.fullmatch(path.name) is not None


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest first."""
    try:
        found = [path for path in folder.iterdir() if STEP.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"cannot read {folder}: {error.strerror}", "check its permissions and the disk"
        ) from error
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a finished checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one does not."""
    for _ in range(RETRIES):
        complaints: list[str] = []
        gone = False
        for path in reversed(checkpoints(folder)):
            try:
                if read_live(path, verify_checkpoint) is not None:
                    return path, complaints
                gone = True
            except CorruptError as reason:
                complaints.append(str(reason))
        if not gone:
            break
    return None, complaints


RETRIES = 5
"""How often to read a folder again that another process is changing."""


def read_live(path: Path, read: Callable[[Path], T]) -> T | None:
    """Calls `read` on a checkpoint whose run may still be writing. A checkpoint that is deleted or renamed meanwhile
    is not damaged: the result is None. One that is replaced meanwhile is read again."""
    for _ in range(RETRIES):
        before = _identity(path)
        try:
            return read(path)
        except CorruptError:
            after = _identity(path)
            if after is None:
                return None
            if before == after:
                raise
    return None


def write_checksums(folder: Path) -> None:
    """Writes the SHA-256 of each weights file in a folder, in the format of `sha256sum -c`."""
    lines = [f"{file_sha256(path)[1]}  {path.name}\n" for path in sorted(folder.glob("*.safetensors"))]
    write_text(folder / CHECKSUMS, "".join(lines))


def verify_checksums(folder: Path) -> int:
    """Verifies exported weights against their checksums, and returns their number. Raises `CorruptError`."""
    listed = _checksums(folder)
    if listed is None:
        return 0
    for name, expected in listed.items():
        path = folder / name
        if not path.is_file() or file_sha256(path)[1] != expected:
            raise CorruptError(f"{path}: does not match its checksum in {CHECKSUMS}, or is missing")
    if unlisted := sorted({path.name for path in folder.glob("*.safetensors")} - set(listed)):
        raise CorruptError(f"{folder / unlisted[0]}: {CHECKSUMS} does not list it")
    return len(listed)


def known_sha256(file: Path) -> str | None:
    """The SHA-256 of a file from the manifest or the list of checksums in its folder; None if there is neither.
    Raises `CorruptError` if there is one that does not list the file."""
    if (file.parent / MANIFEST).exists():
        expected: str | None = read_manifest(file.parent).files.get(file.name, {}).get("sha256")
    else:
        listed = _checksums(file.parent)
        if listed is None:
            return None
        expected = listed.get(file.name)
    if expected is None:
        raise CorruptError(f"{file}: the checksums in its folder do not list it")
    return expected


def copy_into(groups: Groups, live: Groups, where: Path) -> None:
    """Copies loaded tensors into the live ones, in place. Names, shapes and types must match exactly."""
    check_fit(groups, live, where)
    with torch.no_grad():
        for group, tensors in live.items():
            for name, tensor in tensors.items():
                tensor.copy_(groups[group][name])


def check_fit(groups: Groups, live: Groups, where: Path) -> None:
    """Raises `UserError` unless the loaded tensors have the names, shapes and types of the live ones."""
    for group, tensors in live.items():
        loaded = groups.get(group, {})
        if set(loaded) != set(tensors):
            odd = sorted(set(loaded) ^ set(tensors))
            raise UserError(
                f"{where}: its {group} does not fit ({len(odd)} names differ, the first is {odd[0]!r})",
                "resume with the model, optimizer and moving average that were saved",
            )
        for name, tensor in tensors.items():
            if loaded[name].shape != tensor.shape:
                raise UserError(
                    f"{where}: {group} {name!r} has shape {tuple(loaded[name].shape)}, the model has "
                    f"{tuple(tensor.shape)}",
                    "resume with the model and the number of classes that were saved",
                )
            if loaded[name].dtype != tensor.dtype:
                raise UserError(
                    f"{where}: {group} {name!r} has type {loaded[name].dtype}, the model has {tensor.dtype}",
                    "resume with the type that was saved: converting would round",
                )


def _read_group(folder: Path, manifest: Manifest, group: str) -> Tensors:
    if manifest.sharding is not None and group in manifest.sharding.shapes:
        return read_shards(folder, manifest, group)
    expected = manifest.files[f"{group}.safetensors"]
    return read_tensors(folder / f"{group}.safetensors", expected["bytes"], expected["sha256"])


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Differs between two folders of one name. Includes the time, because file systems reuse inode numbers."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _reject_unlisted(folder: Path, manifest: Manifest) -> None:
    """Rejects tensors that no checksum covers, which a tool could load. Other files in a checkpoint do no harm."""
    try:
        names = {path.name for path in folder.iterdir() if path.suffix in _LOADABLE}
    except OSError as error:
        raise CorruptError(f"{folder}: {error.strerror}") from None
    if odd := sorted(names - set(manifest.files)):
        raise CorruptError(f"{folder / odd[0]}: the manifest does not list it")


def _checksums(folder: Path) -> dict[str, str] | None:
    """The list of checksums in a folder, by file name; None if there is none."""
    path = folder / CHECKSUMS
    try:
        lines = read_small(path, 1 << 20).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    matches = [_CHECKSUM.fullmatch(line) for line in lines]
    if not all(matches):
        raise CorruptError(f"{path}: a line is not a checksum and a file name")
    return {match[2]: match[1] for match in matches if match}

"""The file that metrics are written to, metrics.jsonl.

Promises: it is strict JSON, without NaN. It has complete lines only, even when its disk fills up while one is
written, and a resumed run finds no line that it will write again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from drumline.core import files as atomic
from drumline.core.errors import UserError

Scalar = float | int | str | bool | None
Value = Scalar | Sequence[Scalar]


def encode(
    time_s: float, kind: str, step: int | None, epoch: float | None, values: Mapping[str, Value]
) -> str:
    """A line of metrics.jsonl. JSON has no NaN or infinity: such a value is null, and named in `nonfinite`."""
    record: dict[str, Value] = {"time": round(time_s, 3), "kind": kind, "step": step, "epoch": epoch}
    assert not record.keys() & values.keys(), f"reserved names among {sorted(values)}"
    record.update(values)
    try:
        return _ENCODE(record) + "\n"
    except ValueError:
        assert "nonfinite" not in values, "reserved name"
        bad = [name for name, value in record.items() if _finite(value) is not value]
        record = {name: _finite(value) for name, value in record.items()}
        return _ENCODE(record | {"nonfinite": bad}) + "\n"


@dataclass(frozen=True)
class Repaired:
    """How many lines were removed."""

    beyond: int
    """After the last step to keep."""
    torn: int
    """Incomplete."""


def repair(path: Path, keep_until_step: int | None) -> Repaired:
    """Removes incomplete lines, and those that a resumed run will write again. Else leaves the file untouched."""
    if not path.exists():
        return Repaired(0, 0)
    content = path.read_bytes()
    kept, repaired = _kept_lines(content, keep_until_step)
    if kept != content:
        try:
            atomic.write_bytes(path, kept)
        except OSError as error:
            raise cannot_write(path, error) from error
    return repaired


def append_to(path: Path) -> FileIO:
    """Opens a file for appending. Raises a `UserError`."""
    try:
        return atomic.append_to(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def append(file: FileIO, lines: list[str]) -> None:
    """Appends complete lines. If the disk fills up, truncates the file to its former end and raises OSError."""
    content = memoryview("".join(lines).encode("utf-8"))
    if not content:
        return
    before = os.fstat(file.fileno()).st_size
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a log that cannot be written."""
    return UserError(
        f"cannot write the log {path}: {error.strerror}",
        fix="make that folder writable and free space on its disk, then run the command again",
    )


_ENCODE = json.JSONEncoder(allow_nan=False).encode


def _finite(value: Value) -> Value:
    """The same object if all of it is finite, else a copy with None for what is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple) and not all(_is_finite(item) for item in value):
        return [item if _is_finite(item) else None for item in value]
    return value


def _is_finite(value: Scalar) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _kept_lines(content: bytes, keep_until_step: int | None) -> tuple[bytes, Repaired]:
    """A line without a step is kept or removed with the line before it. Pure."""
    kept: list[bytes] = []
    beyond = torn = 0
    is_beyond = False
    for line in content.splitlines():
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError):
            torn += 1
            continue
        if step is not None and keep_until_step is not None:
            is_beyond = step > keep_until_step
        if is_beyond:
            beyond += 1
        else:
            kept.append(line + b"\n")
    return b"".join(kept), Repaired(beyond, torn)

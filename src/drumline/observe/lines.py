"""Lines of a log file: how a metric becomes one, how whole ones get into the file, which of an old file's stay.

Promises: JSON that every reader takes, without NaN; a file holds whole lines, also when its disk fills up half-way;
a file that a resumed run goes on with has no line that this run will write again.
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
    """A line of metrics.jsonl. JSON has no NaN or infinity: such a value is null, named in `nonfinite`."""
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
    """What a log left by an earlier process lost."""

    beyond: int
    torn: int


def repair(path: Path, keep_until_step: int | None) -> Repaired:
    """Rewrite a log without what the resumed run will write again; leave a good one untouched."""
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
    """The file, open at its end; where that cannot be, in the user's terms."""
    try:
        return atomic.append_to(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def append(file: FileIO, lines: list[str]) -> None:
    """Append whole lines: a disk that fills up half-way is taken back to the end of what stood before."""
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
    """A log that the disk refuses."""
    return UserError(
        f"cannot write the log {path}: {error.strerror}",
        fix="make that folder writable, with room on its disk, and run the command again",
    )


_ENCODE = json.JSONEncoder(allow_nan=False).encode


def _finite(value: Value) -> Value:
    """The very value where all of it is finite, else with null for what is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple) and not all(_is_finite(item) for item in value):
        return [item if _is_finite(item) else None for item in value]
    return value


def _is_finite(value: Scalar) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _kept_lines(content: bytes, keep_until_step: int | None) -> tuple[bytes, Repaired]:
    """A line without a step goes the way of the line before it. Pure."""
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

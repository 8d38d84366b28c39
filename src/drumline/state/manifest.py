"""The manifest of a checkpoint: `manifest.json`, JSON with its own checksum (`core/files.py`).

Promises: a changed byte is found. A checksum does not prove who wrote a file, so every field is checked for type and
range before it is used: what an untrusted manifest holds is harmless, or reading it raises `CorruptError`. Fields
that this version does not know are ignored.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from drumline.config.toml import MAX_LINE, MAX_RECIPE
from drumline.core.files import CorruptError, read_sealed, write_sealed
from drumline.state.model_record import record_of

FORMAT = 1
FORMAT_SHARDED = 2
"""The format of a sharded checkpoint, which the first version could not read."""
MANIFEST = "manifest.json"
MAX_FILES = 64
MAX_SHARDS = 1 << 16
MAX_SHAPES = 1 << 20
MAX_THREADS = 4096
MODEL = "model.safetensors"
SHARD = re.compile(r"([a-z][a-z0-9_-]{0,60})\.shard-(0|[1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})\.safetensors")
"""The name of a shard: group, rank, number of processes."""
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
"""The name of a finished checkpoint. A step has one spelling, so no second folder can stand for the same step."""
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,60}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Position:
    """Where a run stands. With the recipe, this is enough to continue at the exact sample."""

    step: int
    per_epoch: int
    best_step: int = -1
    best_value: float = -1.0
    """The value of the recipe's `checkpoint.best` there."""
    scaler: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0


_STORED = {"best_value": "best_accuracy"}
"""Fields that have a different name in format 1, which knew only accuracy."""


@dataclass(frozen=True)
class Sharding:
    """How to join the shards of a checkpoint (`state/shards.py`)."""

    count: int
    """Shards of each group."""
    shapes: dict[str, dict[str, list[int]]]
    """The sharded groups, and in each the full shape of every tensor that is sharded by rows."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, and where and how it was made."""

    format: int
    position: Position
    files: dict[str, dict[str, Any]]
    """The size (`bytes`) and `sha256` of each file."""
    state_sha256: str
    recipe: str
    environment: dict[str, Any]
    sharding: Sharding | None = None

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors."""
        whole = [name.removesuffix(".safetensors") for name in self.files if not SHARD.fullmatch(name)]
        return [*whole, *(self.sharding.shapes if self.sharding else ())]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        content = asdict(self)
        content["position"] = {_STORED.get(name, name): held for name, held in content["position"].items()}
        sharding = content.pop("sharding")
        if sharding is not None:
            content["pieces"] = sharding
        write_sealed(folder / MANIFEST, content)


def shard_name(group: str, rank: int, count: int) -> str:
    """The file that holds one process's shard of a group."""
    return f"{group}.shard-{rank}-of-{count}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks a checkpoint's manifest, including its step against the folder's name."""
    path = folder / MANIFEST
    try:
        manifest = _checked(read_sealed(path, FORMAT_SHARDED))
    except FileNotFoundError:
        raise CorruptError(f"{folder}: {MANIFEST} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: {str(error)[:200]}") from None
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.position.step:
        raise CorruptError(f"{folder}: holds the checkpoint of step {manifest.position.step}")
    return manifest


# Each check raises ValueError and names the field.


def _checked(content: dict[str, Any]) -> Manifest:
    required = ["format", "position", "files", "state_sha256", "recipe", "environment"]
    sharded = content.get("format") == FORMAT_SHARDED
    _table(content, "the manifest", [*required, "pieces"] if sharded else required)
    sharding = _sharding(content["pieces"]) if sharded else None
    position, files = _position(content["position"]), _files(content["files"], sharding)
    if not _is_sha256(content["state_sha256"]):
        raise ValueError("state_sha256 is not a hash")
    _check_recipe(content["recipe"])
    _check_environment(content["environment"])
    return Manifest(
        content["format"],
        position,
        files,
        content["state_sha256"],
        content["recipe"],
        content["environment"],
        sharding,
    )


def _position(given: Any) -> Position:
    optional = [
        item.name for item in fields(Position) if (item.default, item.default_factory) != (MISSING, MISSING)
    ]
    _table(given, "position", [item.name for item in fields(Position) if item.name not in optional])
    names = {item.name: _STORED.get(item.name, item.name) for item in fields(Position)}
    known = {name: given[stored] for name, stored in names.items() if stored in given}
    for name, value in known.items():
        if name == "scaler":
            valid = isinstance(value, dict) and len(value) <= 16 and all(map(_is_number, value.values()))
        elif name == "best_value":
            valid = _is_number(value)
        else:
            valid = type(value) is int and -1 <= value < 1 << 60
        if not valid:
            raise ValueError(f"position.{names[name]} = {str(value)[:40]!r} is not valid")
    position = Position(**known)
    if position.step < 0 or position.per_epoch < 1 or not -1 <= position.best_step <= position.step:
        raise ValueError(
            f"position is not valid: step {position.step}, {position.per_epoch} per epoch, best step "
            f"{position.best_step}"
        )
    return position


def _sharding(given: Any) -> Sharding:
    _table(given, "pieces", ["count", "shapes"])
    count, shapes = given["count"], given["shapes"]
    if type(count) is not int or not 1 <= count <= MAX_SHARDS:
        raise ValueError(f"pieces.count = {str(count)[:20]} is not valid")
    valid = isinstance(shapes, dict) and 0 < len(shapes) <= MAX_FILES
    if not valid or not all(
        isinstance(group, dict) and len(group) <= MAX_SHAPES for group in shapes.values()
    ):
        raise ValueError("pieces.shapes is not a table of groups")
    for group in shapes.values():
        for name, shape in group.items():
            sides = isinstance(shape, list) and 0 < len(shape) <= 64
            if not sides or not all(type(side) is int and 0 <= side < 1 << 48 for side in shape):
                raise ValueError(f"pieces: the shape of {name[:60]!r} is not valid")
    return Sharding(count, shapes)


def _files(given: Any, sharding: Sharding | None) -> dict[str, dict[str, Any]]:
    groups = sharding.shapes if sharding else {}
    shards = (
        {shard_name(group, rank, sharding.count) for group in groups for rank in range(sharding.count)}
        if sharding
        else set()
    )
    if not isinstance(given, dict) or not 0 < len(given) <= MAX_FILES + len(shards):
        raise ValueError("files is not a table of files")
    if missing := sorted(shards - set(given)):
        raise ValueError(f"files does not list the shard {missing[0][:60]}")
    for name, entry in given.items():
        if name not in shards and (not _FILE.fullmatch(name) or name.removesuffix(".safetensors") in groups):
            raise ValueError(f"files lists {name[:60]!r}, which is not a file of a checkpoint")
        _table(entry, name, ["bytes", "sha256"])
        if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < 1 << 60:
            raise ValueError(f"the size of {name} is not valid")
        if not _is_sha256(entry["sha256"]):
            raise ValueError(f"the sha256 of {name} is not a hash")
    if MODEL not in given and "model" not in groups:
        raise ValueError(f"files does not list {MODEL}")
    return given


def _check_recipe(given: Any) -> None:
    fits = (
        isinstance(given, str) and len(given) <= MAX_RECIPE and max(map(len, given.split("\n"))) <= MAX_LINE
    )
    try:
        tables = tomllib.loads(given) if fits else None
    except (ValueError, RecursionError):
        tables = None
    if tables is None or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError("the recipe is not readable")


def _check_environment(given: Any) -> None:
    """Checks what is read of it; the rest is only stored."""
    _table(given, "environment", [])
    threads = given.get("threads", 1)
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"environment.threads = {str(threads)[:20]} is not valid")
    _table(given.get("packages", {}), "environment.packages", [])
    record_of(given)


def _table(given: Any, what: str, required: list[str]) -> None:
    """Checks that a value is a table with these fields. More are fine: a later version may have written them."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is not a table")
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{what} has no {missing[0]}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None

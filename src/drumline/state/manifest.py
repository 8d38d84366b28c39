"""What a checkpoint says of itself: `manifest.json`, text with the SHA-256 of itself as its seal.

Promises: the seal finds every changed byte. It proves nothing about who wrote it, so each field is checked for type
and range before anybody uses it: whatever is read from a stranger's manifest is harmless, or it is `CorruptError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from drumline.config.toml import MAX_LINE, MAX_RECIPE
from drumline.state.model_record import record_of
from drumline.state.tensors import CorruptError, read_small

FORMAT = 1
FORMAT_SHARDED = 2
"""Of checkpoints in pieces, which earlier versions cannot read."""
MANIFEST = "manifest.json"
MAX_MANIFEST = 64 << 20
"""Room for the names of many classes."""
MAX_FILES = 64
MAX_SHARDS = 1 << 16
MAX_SHAPES = 1 << 20
MAX_THREADS = 4096
MODEL = "model.safetensors"
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,60}\.safetensors")
SHARD = re.compile(r"([a-z][a-z0-9_-]{0,60})\.shard-(0|[1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})\.safetensors")
"""Group, rank, number of processes."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
"""A finished checkpoint's name. Plain digits in one spelling: no second folder can stand for the same step."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: enough, with the recipe, to go on at the exact sample."""

    step: int
    per_epoch: int
    best_step: int = -1
    best_accuracy: float = -1.0
    scaler: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """How the pieces of a sharded checkpoint are put together: see `state/shards.py`."""

    count: int
    """Pieces of each group."""
    shapes: dict[str, dict[str, list[int]]]
    """The groups in pieces, and the full shape of each tensor of theirs that is sharded by its rows."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    format: int
    position: Position
    files: dict[str, dict[str, Any]]
    state_sha256: str
    recipe: str
    environment: dict[str, Any]
    pieces: Layout | None = None

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors, whole or in pieces."""
        whole = [name.removesuffix(".safetensors") for name in self.files if not SHARD.fullmatch(name)]
        return [*whole, *(self.pieces.shapes if self.pieces else ())]

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def manifest_text(manifest: Manifest) -> str:
    """The file's content, sealed."""
    content = asdict(manifest)
    if manifest.pieces is None:
        del content["pieces"]
    return _sealed(content)


def shard_name(group: str, rank: int, count: int) -> str:
    """The file of one process's piece of a group."""
    return f"{group}.shard-{rank}-of-{count}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own seal, its fields one by one, and the folder's name."""
    path = folder / MANIFEST
    try:
        text = read_small(path, MAX_MANIFEST).decode()
        content = json.loads(text, parse_constant=_no_number)
        # The text, not its meaning: 1E-7 for 1e-7 has changed too.
        if (
            not isinstance(content, dict)
            or _sealed({k: v for k, v in content.items() if k != "seal"}) != text
        ):
            raise _Wrong("its checksum does not match")
        manifest = _checked(content)
    except FileNotFoundError:
        raise CorruptError(f"{folder}: {MANIFEST} is missing") from None
    except _Wrong as wrong:
        raise CorruptError(f"{path}: {wrong}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: unreadable ({str(error)[:120]})") from None
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.position.step:
        raise CorruptError(
            f"{folder}: is the checkpoint of step {manifest.position.step} under another step's name"
        )
    return manifest


class _Wrong(Exception):
    """A field that no manifest of ours has."""


def _checked(content: dict[str, Any]) -> Manifest:
    if content.get("format") not in (FORMAT, FORMAT_SHARDED) or type(content["format"]) is not int:
        raise _Wrong(
            f"format {str(content.get('format'))[:20]}, this version reads {FORMAT} and {FORMAT_SHARDED}"
        )
    known = {item.name for item in fields(Manifest)} | {"seal"}
    _exactly(content, known if content["format"] == FORMAT_SHARDED else known - {"pieces"}, "the manifest")
    pieces = _layout(content["pieces"]) if content["format"] == FORMAT_SHARDED else None
    position, files = _position(content["position"]), _files(content["files"], pieces)
    if not _is_sha256(content["state_sha256"]):
        raise _Wrong("state_sha256 is not a hash")
    _check_recipe(content["recipe"])
    _check_environment(content["environment"])
    return Manifest(
        content["format"],
        position,
        files,
        content["state_sha256"],
        content["recipe"],
        content["environment"],
        pieces,
    )


def _position(given: Any) -> Position:
    known = {item.name: item for item in fields(Position)}
    _exactly(given, set(known), "position")
    for name, value in given.items():
        if name == "scaler":
            fine = isinstance(value, dict) and len(value) <= 16 and all(map(_is_number, value.values()))
        elif known[name].type == "float":
            fine = _is_number(value)
        else:
            fine = type(value) is int and -1 <= value < 1 << 60
        if not fine:
            raise _Wrong(f"position.{name} = {str(value)[:40]!r} cannot be")
    position = Position(**given)
    if position.step < 0 or position.per_epoch < 1 or not -1 <= position.best_step <= position.step:
        raise _Wrong(
            f"position: step {position.step}, {position.per_epoch} per epoch, best {position.best_step}"
        )
    return position


def _layout(given: Any) -> Layout:
    _exactly(given, {"count", "shapes"}, "pieces")
    count, shapes = given["count"], given["shapes"]
    if type(count) is not int or not 1 <= count <= MAX_SHARDS:
        raise _Wrong(f"pieces.count = {str(count)[:20]} cannot be")
    fine = isinstance(shapes, dict) and 0 < len(shapes) <= MAX_FILES
    if not fine or not all(isinstance(group, dict) and len(group) <= MAX_SHAPES for group in shapes.values()):
        raise _Wrong("pieces.shapes is not a table of groups")
    for group in shapes.values():
        for name, shape in group.items():
            sides = isinstance(shape, list) and 0 < len(shape) <= 64
            if not sides or not all(type(side) is int and 0 <= side < 1 << 48 for side in shape):
                raise _Wrong(f"pieces: {name[:60]!r} has no readable shape")
    return Layout(count, shapes)


def _files(given: Any, layout: Layout | None) -> dict[str, dict[str, Any]]:
    groups = layout.shapes if layout else {}
    pieces = (
        {shard_name(group, rank, layout.count) for group in groups for rank in range(layout.count)}
        if layout
        else set()
    )
    if not isinstance(given, dict) or not 0 < len(given) <= MAX_FILES + len(pieces):
        raise _Wrong("does not list its files")
    if missing := sorted(pieces - set(given)):
        raise _Wrong(f"does not name {missing[0][:60]}, a piece of it")
    for name, entry in given.items():
        if name not in pieces and (not _FILE.fullmatch(name) or name.removesuffix(".safetensors") in groups):
            raise _Wrong(f"names {name[:60]!r}, which is no file of a checkpoint")
        _exactly(entry, {"bytes", "sha256"}, name)
        if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < 1 << 60:
            raise _Wrong(f"{name} has an impossible size")
        if not _is_sha256(entry["sha256"]):
            raise _Wrong(f"{name} has no hash")
    if MODEL not in given and "model" not in groups:
        raise _Wrong(f"does not name {MODEL}")
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
        raise _Wrong("its recipe is not readable")


def _check_environment(given: Any) -> None:
    """What others read of it; the rest is only kept."""
    if not isinstance(given, dict):
        raise _Wrong("its environment is not a table")
    threads, packages = given.get("threads", 1), given.get("packages", {})
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise _Wrong(f"environment.threads = {str(threads)[:20]} cannot be")
    if not isinstance(packages, dict):
        raise _Wrong("environment.packages is not a table")
    record_of(given)


def _exactly(given: Any, names: set[str], what: str) -> None:
    if not isinstance(given, dict) or set(given) != names:
        odd = sorted(set(given) ^ names)[:3] if isinstance(given, dict) else ["no table"]
        raise _Wrong(f"{what} has other fields than this version writes ({', '.join(map(repr, odd))})")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _sealed(content: dict[str, Any]) -> str:
    seal = hashlib.sha256(_text(content).encode()).hexdigest()
    return _text({**content, "seal": seal})


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)

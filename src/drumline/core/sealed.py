"""JSON manifests that carry their own checksum: those of checkpoints, packed sets and teacher caches.

Promises: a file is written atomically; any changed byte is found when it is read. The checksum does not prove who
wrote a file, so the caller checks the type and range of every field it uses. Fields that this version does not know
are ignored. A writer whose new fields must not be ignored raises the format number, so that older readers reject the
file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from drumline.core.files import CorruptError, read_small, write_text

Key = Literal["seal", "sha256"]
"""The field that holds the checksum. Packed sets use `sha256`: compact text is hashed, fields keep their order."""
MAX_BYTES = 256 << 20
"""Largest manifest: room for the names of many classes."""


class NewerFormat(CorruptError):
    """The file needs a newer version of drumline. `found` is its format number."""

    def __init__(self, path: Path, found: object, newest: int) -> None:
        self.found = str(found)[:20]
        super().__init__(f"{path}: format {self.found}, this version reads formats up to {newest}")


def sealed_text(content: dict[str, Any], key: Key = "seal") -> str:
    """The content as JSON text with its checksum added."""
    if key == "sha256":
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps({**content, key: digest}, indent=1) + "\n"
    digest = hashlib.sha256(_sorted(content).encode()).hexdigest()
    return _sorted({**content, key: digest})


def write_sealed(path: Path, content: dict[str, Any], key: Key = "seal") -> None:
    """Writes a manifest atomically."""
    write_text(path, sealed_text(content, key))


def read_sealed(path: Path, newest: int, *, version: str = "format", key: Key = "seal") -> dict[str, Any]:
    """The content of a manifest whose format, in the field `version`, is at most `newest`; 1 where there is none.
    Raises `CorruptError`, or FileNotFoundError."""
    return parse_sealed(read_small(path, MAX_BYTES), path, newest, version=version, key=key)


def parse_sealed(
    data: bytes, path: Path, newest: int, *, version: str = "format", key: Key = "seal"
) -> dict[str, Any]:
    """The same for bytes that were read from `path`."""
    try:
        text = data.decode()
        content = json.loads(text, parse_constant=_reject_constant)
        # The text is compared, not its meaning: 1E-7 in place of 1e-7 is a change too.
        if not isinstance(content, dict) or sealed_text(_without(content, key), key) != text:
            raise CorruptError(f"{path}: its checksum does not match")
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not readable ({str(error)[:120]})") from None
    found = content.get(version, 1)
    if type(found) is not int or not 1 <= found <= newest:
        raise NewerFormat(path, found, newest)
    return _without(content, key)


def _sorted(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True)


def _without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")

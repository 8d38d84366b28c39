"""A manifest is read as it was written, or it is rejected; fields of a later version do no harm."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from drumline.core.files import CorruptError
from drumline.core.sealed import Key, NewerFormat, read_sealed, sealed_text, write_sealed

CONTENT: dict[str, Any] = {"version": 1, "b": [1, 2.5, "ü"], "a": {"x": None}}


@pytest.mark.parametrize("key", get_args(Key))
def test_what_was_written_is_read_with_fields_that_no_version_knows(tmp_path: Path, key: Key) -> None:
    content = CONTENT | {"of a later version": {"more": True}}
    write_sealed(tmp_path / "m.json", content, key)
    assert read_sealed(tmp_path / "m.json", 1, version="version", key=key) == content


@pytest.mark.parametrize("key", get_args(Key))
def test_every_changed_byte_is_found(tmp_path: Path, key: Key) -> None:
    path = tmp_path / "m.json"
    text = sealed_text(CONTENT, key).encode()
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match=r"m\.json"):
            read_sealed(path, 1, version="version", key=key)
    path.write_bytes(text + b" ")
    with pytest.raises(CorruptError, match="checksum"):
        read_sealed(path, 1, version="version", key=key)


def test_the_formats_that_earlier_versions_wrote_are_still_written() -> None:
    """Byte for byte: caches and packed sets of two versions must not differ."""
    seal = hashlib.sha256(b'{\n "a": 2,\n "b": 1\n}').hexdigest()
    assert sealed_text({"b": 1, "a": 2}) == f'{{\n "a": 2,\n "b": 1,\n "seal": "{seal}"\n}}'
    seal = hashlib.sha256(b'{"b": 1, "a": 2}').hexdigest()
    assert sealed_text({"b": 1, "a": 2}, "sha256") == f'{{\n "b": 1,\n "a": 2,\n "sha256": "{seal}"\n}}\n'


@pytest.mark.parametrize("found", [2, 0, -1, "1", True, 1.0, None])
def test_another_format_is_rejected_with_its_number(tmp_path: Path, found: object) -> None:
    write_sealed(tmp_path / "m.json", {"format": found})
    with pytest.raises(NewerFormat) as caught:
        read_sealed(tmp_path / "m.json", 1)
    assert caught.value.found == str(found)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"a": NaN}', '{"a": 1, "a": 1}', "\0", '"x"']
)
def test_what_is_no_sealed_table_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(CorruptError, match=r"m\.json"):
        read_sealed(tmp_path / "m.json", 1)


def test_a_link_is_not_followed_and_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    write_sealed(tmp_path / "m.json", {})
    (tmp_path / "link").symlink_to("m.json")
    with pytest.raises(CorruptError, match="is a link"):
        read_sealed(tmp_path / "link", 1)
    with pytest.raises(FileNotFoundError):
        read_sealed(tmp_path / "nothing", 1)
    assert json.loads((tmp_path / "m.json").read_text()).keys() == {"seal"}

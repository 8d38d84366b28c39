"""Files are written completely or not at all, a failure leaves no file behind, and changed manifests are found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest

from drumline.core import files as atomic
from drumline.core.files import CorruptError, Key, NewerFormat, read_sealed, sealed_text, write_sealed


def test_the_content_arrives_and_no_other_file_stays(tmp_path: Path) -> None:
    atomic.write_bytes(tmp_path / "a.bin", b"\x00\xff")
    atomic.write_text(tmp_path / "a.txt", "grün\r\nline\n")
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\xff"
    assert (tmp_path / "a.txt").read_bytes() == "grün\r\nline\n".encode()
    assert _names(tmp_path) == ["a.bin", "a.txt"]


def test_the_temporary_file_is_beside_the_final_one_and_ends_in_tmp(tmp_path: Path) -> None:
    seen: list[Path] = []

    def write(temporary: Path) -> None:
        seen.append(temporary)
        temporary.write_text("x")

    atomic.write_file(tmp_path / "model.safetensors", write)
    assert seen[0].parent == tmp_path
    assert seen[0].name.startswith("model.safetensors.")
    assert seen[0].suffix == ".tmp"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("bad"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half of the ne")
        raise error

    with pytest.raises(type(error)) as caught:
        atomic.write_file(path, write)
    assert caught.value is error
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_sync_or_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="full"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["state.json"]


def test_the_file_is_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = _record_disk_calls(monkeypatch)
    atomic.write_text(tmp_path / "a", "x")
    assert events == ["sync file", "rename", "sync folder"]


def test_two_threads_writing_one_path_never_mix_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    both_open = threading.Barrier(2)

    def write_slowly(letter: str) -> None:
        def write(temporary: Path) -> None:
            with temporary.open("w") as file:
                file.write(letter * 10)
                file.flush()
                both_open.wait()
                file.write(letter * 10)

        atomic.write_file(path, write)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_slowly, "ab"))
    assert path.read_text() in ("a" * 20, "b" * 20)
    assert _names(tmp_path) == ["shared"]


def test_kill_9_in_the_middle_of_a_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state"
    atomic.write_bytes(path, b"old")
    program = (
        "import sys, time, pathlib\n"
        "from drumline.core import files as atomic\n"
        "def write(temporary):\n"
        "    temporary.write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "atomic.write_file(pathlib.Path(sys.argv[1]), write)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.read_bytes() == b"old"
    leftover = [name for name in _names(tmp_path) if name != "state"]
    assert len(leftover) == 1
    assert leftover[0].endswith(".tmp")


def test_a_folder_is_synced_whole_before_it_takes_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "step-5.tmp"
    (temporary / "inner").mkdir(parents=True)
    (temporary / "a").write_text("a")
    (temporary / "inner" / "b").write_text("b")
    events = _record_disk_calls(monkeypatch)
    atomic.rename_folder(temporary, tmp_path / "step-5")
    assert events == ["sync file", "sync folder", "sync file", "sync folder", "rename", "sync folder"]
    assert not temporary.exists()
    assert (tmp_path / "step-5" / "inner" / "b").read_text() == "b"


@pytest.mark.parametrize("kind", ["empty folder", "full folder", "file", "broken link"])
def test_a_folder_never_replaces_an_existing_file_or_folder(tmp_path: Path, kind: str) -> None:
    temporary, final = tmp_path / "new.tmp", tmp_path / "final"
    temporary.mkdir()
    (temporary / "a").write_text("new")
    if kind == "file":
        final.write_text("old")
    elif kind == "broken link":
        final.symlink_to(tmp_path / "nowhere")
    else:
        final.mkdir()
        if kind == "full folder":
            (final / "a").write_text("old")
    with pytest.raises(FileExistsError, match="final"):
        atomic.rename_folder(temporary, final)
    assert (temporary / "a").read_text() == "new"
    assert not (final / "a").exists() or (final / "a").read_text() == "old"


def test_a_file_system_without_folder_sync_is_accepted_but_a_failing_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    refuse(errno.EINVAL)
    atomic.sync_folder(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        atomic.sync_folder(tmp_path)


def test_appending_does_not_follow_a_link(tmp_path: Path) -> None:
    """In an untrusted run folder it could lead to any file of the user."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log.txt").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        atomic.append_to(tmp_path / "log.txt")
    with atomic.append_to(tmp_path / "new.txt") as file:
        file.write(b"a")
    with atomic.append_to(tmp_path / "new.txt") as file:
        file.write(b"b")
    assert ((tmp_path / "new.txt").read_text(), (tmp_path / "mine").read_text()) == ("ab", "mine")


# Manifests.

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


def test_a_link_is_not_followed_and_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    write_sealed(tmp_path / "m.json", {})
    (tmp_path / "link").symlink_to("m.json")
    with pytest.raises(CorruptError, match="is a link"):
        read_sealed(tmp_path / "link", 1)
    with pytest.raises(FileNotFoundError):
        read_sealed(tmp_path / "nothing", 1)
    assert json.loads((tmp_path / "m.json").read_text()).keys() == {"seal"}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _record_disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def note_fsync(handle: int) -> None:
        events.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        fsync(handle)

    def note_replace(*names: str) -> None:
        events.append("rename")
        replace(*names)

    def note_rename(*names: str) -> None:
        events.append("rename")
        rename(*names)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "rename", note_rename)
    return events

"""A manifest of a stranger: anybody can compute its seal, so nothing in it is believed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.files import CorruptError, write_sealed
from drumline.state.checkpoint import newest_valid, read_checkpoint, verify_checkpoint, write_checkpoint
from drumline.state.manifest import Position, read_manifest
from drumline.state.verify import verify_run

GROUPS = {
    "model": {"w": torch.ones(3)},
    "optimizer": {"m/w": torch.zeros(3)},
    "average": {"w": torch.ones(3)},
}
DEEP = 400


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    environment = {"threads": 1, "packages": {"torch": "2"}}
    return write_checkpoint(tmp_path / "checkpoints", GROUPS, Position(3, 10), "[a]\nx = 1\n", environment)


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What a stranger does: changes a manifest and seals it again."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["seal"]
    change(content)
    write_sealed(path, content)


def put(*place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in place[:-1]:
            content = content[name]
        content[place[-1]] = value

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "format text": put("format", value="1"),
    "format true": put("format", value=True),
    "format gone": lambda content: content.pop("format"),
    "a field gone": lambda content: content.pop("recipe"),
    "position list": put("position", value=[3, 10]),
    "position less": lambda content: content["position"].pop("per_epoch"),
    "step text": put("position", "step", value="3"),
    "step true": put("position", "step", value=True),
    "step float": put("position", "step", value=3.0),
    "step negative": put("position", "step", value=-1),
    "step huge": put("position", "step", value=10**400),
    "step of another": put("position", "step", value=4),
    "per_epoch zero": put("position", "per_epoch", value=0),
    "best beyond": put("position", "best_step", value=9),
    "accuracy infinite": put("position", "best_accuracy", value=float("inf")),
    "accuracy nan": put("position", "best_accuracy", value=float("nan")),
    "accuracy huge": put("position", "best_accuracy", value=10**400),
    "patience text": put("position", "evaluations_since_best", value="3"),
    "patience negative": put("position", "evaluations_since_best", value=-2),
    "scaler list": put("position", "scaler", value=[1]),
    "scaler text": put("position", "scaler", value={"scale": "1"}),
    "files list": put("files", value=["model.safetensors"]),
    "files none": put("files", value={}),
    "files many": put("files", value={f"f{n}.safetensors": {} for n in range(1000)}),
    "no model": lambda content: content["files"].pop("model.safetensors"),
    "entry text": put("files", "model.safetensors", value="x"),
    "size true": put("files", "model.safetensors", "bytes", value=True),
    "size negative": put("files", "model.safetensors", "bytes", value=-1),
    "size huge": put("files", "model.safetensors", "bytes", value=10**30),
    "hash short": put("files", "model.safetensors", "sha256", value="00"),
    "hash number": put("files", "model.safetensors", "sha256", value=7),
    "state hash": put("state_sha256", value=None),
    "state of another": put("state_sha256", value="0" * 64),
    "recipe number": put("recipe", value=7),
    "recipe not toml": put("recipe", value="= ="),
    "recipe deep": put("recipe", value="x = " + "[" * 100_000),
    "recipe of dots": put("recipe", value="a." * 200_000 + "b = 1"),
    "recipe flat": put("recipe", value="x = 1"),
    "environment list": put("environment", value=[]),
    "threads text": put("environment", "threads", value="many"),
    "threads huge": put("environment", "threads", value=10**9),
    "threads zero": put("environment", "threads", value=0),
    "packages list": put("environment", "packages", value=["torch"]),
    "a group of another name": lambda content: content["files"].update(
        {"Model.safetensors": content["files"].pop("average.safetensors")}
    ),
}
NAMES = (
    *("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.pt", "manifest.json"),
    *(".safetensors", "x\0.safetensors", "con:.safetensors", "x" * 300 + ".safetensors"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_an_impossible_field_is_damage_and_never_a_traceback(saved: Path, name: str) -> None:
    reseal(saved, HOSTILE[name])
    with pytest.raises(CorruptError) as caught:
        read_checkpoint(saved)
    assert str(saved) in str(caught.value)
    assert len(str(caught.value)) < 600
    found = verify_run(saved.parent.parent)
    assert not found.sound
    if name != "state of another":  # its bytes are what the manifest says; loading shows the lie
        assert newest_valid(saved.parent)[0] is None


@pytest.mark.parametrize(
    "place",
    [
        ("hook",),
        ("pieces",),
        ("position", "__class__"),
        ("files", "model.safetensors", "loader"),
        ("environment", "x"),
    ],
)
def test_a_field_of_a_later_version_is_ignored(saved: Path, place: tuple[str, ...]) -> None:
    before = read_manifest(saved)
    reseal(saved, put(*place, value="os.system"))
    manifest, groups = read_checkpoint(saved)
    assert (manifest.position, manifest.groups) == (before.position, before.groups)
    assert groups["model"]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_file_of_a_checkpoint_is_rejected(saved: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"]["model.safetensors"]

    reseal(saved, change)
    with pytest.raises(CorruptError, match="not a file of a checkpoint"):
        verify_checkpoint(saved)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format": 1' + "0" * 5000 + "}",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '"\\ud800"',
        "\0",
        '{"seal": 1}',
        '{"format": 1, "format": 1}',
    ],
)
def test_json_made_to_break_a_parser_is_rejected(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        read_manifest(saved)


@pytest.mark.parametrize("depth", [50, DEEP, 900, 985, 990, 5000])
def test_a_sealed_manifest_of_any_depth_is_read_or_rejected(saved: Path, depth: int) -> None:
    """Near the limit reading may work where writing again does not."""
    path = saved / "manifest.json"
    deep = path.read_text().replace('"threads": 1', '"deep": ' + "[" * depth + "]" * depth)
    path.write_text(deep)
    with pytest.raises(CorruptError):
        read_manifest(saved)
    if depth <= DEEP:
        path.write_text(deep.replace('"deep": ' + "[" * depth + "]" * depth, '"threads": 1'))
        reseal(saved, put("environment", "deep", value=nested(depth)))
        verify_checkpoint(saved)


def test_a_key_given_twice_is_rejected_however_it_is_sealed(saved: Path) -> None:
    path = saved / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 1,', '"format": 1,\n "format": 1,'))
    with pytest.raises(CorruptError, match="checksum does not match"):
        read_manifest(saved)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.sampled_from(
        [
            *(("position", name) for name in ("step", "per_epoch", "best_step", "best_accuracy", "scaler")),
            *((name,) for name in ("format", "position", "files", "state_sha256", "recipe", "environment")),
            *(("files", "model.safetensors", name) for name in ("bytes", "sha256")),
            ("environment", "threads"),
            ("environment", "packages"),
        ]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field_is_read_or_rejected(saved: Path, place: tuple[str, ...], value: Any) -> None:
    path = saved / "manifest.json"
    whole = path.read_text()
    try:
        reseal(saved, put(*place, value=value))
        try:
            manifest = read_manifest(saved)
        except CorruptError:
            return
        assert isinstance(manifest.position.step, int)
        assert manifest.bytes >= 0
    finally:
        path.write_text(whole)


@pytest.mark.parametrize("name", ["step-4", "step-30", "step-2"])
def test_a_renamed_or_copied_checkpoint_is_rejected(saved: Path, name: str) -> None:
    shutil.copytree(saved, saved.with_name(name))
    with pytest.raises(CorruptError, match="holds the checkpoint of step 3"):
        verify_checkpoint(saved.with_name(name))
    found, complaints = newest_valid(saved.parent)
    assert found == saved
    assert len(complaints) == (name != "step-2")


def test_a_copy_under_a_name_of_your_own_is_fine(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "the good one")
    assert verify_checkpoint(tmp_path / "the good one").position.step == 3


@pytest.mark.parametrize(
    "name", ["step-03", "step-+3", "step-³", "step-٣", "step-3 ", "step-3.tmp", "step-3.aside", "step-"]
)
def test_another_spelling_of_a_step_is_no_checkpoint(saved: Path, name: str) -> None:
    saved.rename(saved.with_name(name))
    assert newest_valid(saved.parent) == (None, [])


@pytest.mark.parametrize("name", ["helpers.safetensors", "model.pt", "pytorch_model.bin"])
def test_tensors_that_the_manifest_does_not_name_are_rejected(saved: Path, name: str) -> None:
    """Nobody has hashed them, and some tool may load them."""
    shutil.copyfile(saved / "model.safetensors", saved / name)
    for look in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CorruptError, match=f"{name}: the manifest does not list it"):
            look(saved)


def test_notes_left_in_a_checkpoint_do_no_harm(saved: Path) -> None:
    (saved / "notes.txt").write_text("the good one")
    (saved / ".nfs0001").write_text("")
    verify_checkpoint(saved)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "average.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_link_a_folder_or_a_pipe_for_a_file_is_rejected(saved: Path, name: str, kind: str) -> None:
    (saved / name).rename(saved.parent / "there")
    if kind == "link":
        (saved / name).symlink_to(saved.parent / "there")
    elif kind == "folder":
        (saved / name).mkdir()
    else:
        os.mkfifo(saved / name)
    for look in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CorruptError, match=name):
            look(saved)


def test_every_byte_of_the_average_is_covered_too(saved: Path) -> None:
    """The hash of the state leaves it out: two runs with and without an average hold the same model."""
    path = saved / "average.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(CorruptError, match=r"average\.safetensors"):
            read_checkpoint(saved)

"""The record of a model: what is written is read again, and a stranger's is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_sealed, write_sealed
from drumline.data.classes import Classes, numbers
from drumline.state.checkpoint import write_checkpoint
from drumline.state.manifest import Position, read_manifest
from drumline.state.model_record import ENVIRONMENT, KEY, ModelRecord, metadata_record, read_record, record_of
from drumline.state.tensors import file_metadata
from drumline.training.resume import compare_records

RECORD = ModelRecord(
    model="resnet8",
    outputs=3,
    classes=Classes(("ant", "b\udcff", "ça va"), named=True),
    size=16,
    mean=(0.1, 0.2, 1 / 3),
    std=(0.5, 0.25, 0.125),
    eval_crop=0.875,
    resize="pillow12",
    interpolation="bilinear",
    exif="ignore",
)


def changed(**fields: Any) -> dict[str, Any]:
    return json.loads(json.dumps(RECORD.as_json() | fields))


@pytest.mark.parametrize("classes", [RECORD.classes, Classes(numbers(3), named=False)])
def test_a_record_survives_json_and_metadata(classes: Classes) -> None:
    record = ModelRecord(**{**vars(RECORD), "classes": classes})
    assert read_record(json.loads(json.dumps(record.as_json()))) == record
    assert metadata_record(record.metadata()) == record
    assert metadata_record({"format": "pt"}) is None
    assert record_of({}) is None
    assert record_of({ENVIRONMENT: changed(later="a field of a later version")}) == RECORD


def test_arguments_are_kept_and_earlier_versions_had_none() -> None:
    record = ModelRecord(**{**vars(RECORD), "args": ("width:2", "norm:false")})
    assert read_record(json.loads(json.dumps(record.as_json()))) == record
    assert record.arguments == {"width": 2, "norm": False}
    earlier = changed()
    del earlier["args"]
    assert read_record(earlier) == RECORD


def test_a_checkpoint_carries_it_in_its_manifest_and_in_the_file_of_its_weights(tmp_path: Path) -> None:
    groups = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}}
    folder = write_checkpoint(tmp_path, groups, Position(1, 1), "", {ENVIRONMENT: RECORD.as_json()})
    assert record_of(read_manifest(folder).environment) == RECORD
    assert metadata_record(file_metadata(folder / "model.safetensors")) == RECORD
    assert file_metadata(folder / "optimizer.safetensors") == {}


@pytest.mark.parametrize(
    "given",
    [
        [],
        {},
        changed(model=""),
        changed(model=3),
        changed(outputs=True),
        changed(outputs=2),
        changed(outputs=10**9),
        changed(classes=["ant", "ant", "bee"]),
        changed(classes=["ant", 1, "bee"]),
        changed(classes=[]),
        changed(classes=10**9, outputs=10**6),
        changed(size=0),
        changed(size="16"),
        changed(mean=[]),
        changed(mean=[1, 2]),
        changed(mean="abc"),
        changed(std=[0.0]),
        changed(eval_crop=0),
        changed(eval_crop=float("nan")),
        changed(resize="mine"),
        changed(resize=[]),
        changed(exif=None),
        changed(args="a:1"),
        changed(args=["a"]),
        changed(args=["classes:3"]),
        changed(args=["a:1", 2]),
    ],
)
def test_an_impossible_record_is_rejected(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model record"):
        read_record(given)
    with pytest.raises(ValueError, match="model record"):
        metadata_record({KEY: json.dumps(given)})


def test_a_manifest_with_such_a_record_is_rejected(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"model": {"w": torch.ones(2)}}, Position(1, 1), "", {})
    content = read_sealed(folder / "manifest.json", 1)
    content["environment"][ENVIRONMENT] = changed(size=-1)
    write_sealed(folder / "manifest.json", content)
    with pytest.raises(CorruptError, match="size"):
        read_manifest(folder)


def test_images_prepared_otherwise_are_named() -> None:
    assert RECORD.other_images(RECORD) == []
    other = ModelRecord(**{**vars(RECORD), "size": 32, "mean": (0.1, 0.2, 0.3333333333)})
    assert RECORD.other_images(other) == ["data.size: 16 -> 32"]
    grey = ModelRecord(**{**vars(RECORD), "mean": (0.5,)})
    assert len(RECORD.other_images(grey)) == 1


def test_a_checkpoint_of_other_classes_does_not_resume() -> None:
    now = ModelRecord(**{**vars(RECORD), "size": 32})
    said = compare_records(RECORD, now, Path("step-1"))
    assert said == ["resumed with different image preparation, the result may differ: data.size: 16 -> 32"]
    assert "no record" in compare_records(None, now, Path("step-1"))[0]
    for names in (("ant", "bee", "ça va"), ("ant", "ça va", "b\udcff"), ("ant", "b\udcff")):
        other = ModelRecord(**{**vars(RECORD), "classes": Classes(names, named=True)})
        with pytest.raises(UserError, match="step-1 was trained on other classes"):
            compare_records(RECORD, other, Path("step-1"))
    three, four = (ModelRecord(**{**vars(RECORD), "classes": Classes(numbers(n), False)}) for n in (3, 4))
    assert "matched by number" in compare_records(RECORD, three, Path("step-1"))[0]
    with pytest.raises(UserError, match="has 4 classes"):
        compare_records(RECORD, four, Path("step-1"))

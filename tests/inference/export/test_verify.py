"""Differences, limits and the record: the arithmetic by which a file passes or fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.inference.export import load
from drumline.inference.export.record import Answers, ExportRecord, fixed_image, read_record, record_text
from drumline.inference.export.verify import ROUNDINGS, Comparison, Difference, difference, limit
from drumline.state.model_record import ModelRecord

MODEL = ModelRecord(
    model="resnet8",
    outputs=3,
    classes=Classes(("ash", "birch", "cedar"), named=True),
    size=24,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.25, 0.3),
    eval_crop=0.8,
    resize="pillow12",
    interpolation="bicubic",
    exif="ignore",
)
RECORD = ExportRecord(
    MODEL, "onnx", "pixels", "x", "1", "2", Answers("ab", ((0, 0.5), (2, 0.25))), "cuda", {"images": 3}
)


def test_differences_are_of_logits_and_of_probabilities() -> None:
    logits = torch.tensor([[1.0, 2.0, -40.0], [0.0, 0.0, 3.0]])
    moved = logits + torch.tensor([[0.5, 0.0, 7.0], [0.0, 0.0, 0.0]])
    found = difference(logits.softmax(1), moved.softmax(1))
    first, second = logits.log_softmax(1)[0], moved.log_softmax(1)[0]
    assert found.logits == pytest.approx(float((first - second)[:2].abs().max()), rel=1e-4), (
        "invisible: class 3"
    )
    assert found.probability_max == pytest.approx(float((first.exp() - second.exp()).abs().max()), rel=1e-4)
    assert (found.agree, found.images) == (2, 2)


def test_a_class_may_change_only_where_the_original_is_undecided() -> None:
    wanted = torch.tensor([[0.5000, 0.4999, 0.0001], [0.6, 0.3, 0.1]])
    found = torch.tensor([[0.4999, 0.5000, 0.0001], [0.3, 0.6, 0.1]])
    strict, fair = difference(wanted, found), difference(wanted, found, tie=1e-3)
    assert (strict.agree, strict.undecided, fair.agree, fair.undecided) == (0, 0, 0, 1)
    assert not fair.same_classes
    assert difference(wanted[:1], found[:1], tie=1e-3).same_classes


def test_answers_that_are_not_numbers_never_pass() -> None:
    wanted, nothing = torch.tensor([[0.5, 0.5]]), torch.tensor([[torch.nan, torch.nan]])
    found = Comparison(Difference(), 1.0)
    found.whole |= difference(wanted, nothing)
    assert not found.alike
    assert found.worst.logits == float("inf")


def test_the_limit_follows_the_floor_and_the_precision() -> None:
    quiet, loud = Difference(logits=1e-6), Difference(logits=1e-3)
    assert limit(quiet, torch.float32) == ROUNDINGS * 2**-23
    assert limit(loud, torch.float32) == 8e-3
    assert limit(quiet, torch.float16) > 1000 * limit(quiet, torch.float32)


def test_a_file_fails_for_one_pixel_one_class_or_one_batch_size() -> None:
    fine = Difference(1e-5, 1e-5, 1e-6, agree=4, images=4)
    assert Comparison(Difference(), 1e-3, fine, {1: fine, 8: fine}).alike
    assert not Comparison(Difference(), 1e-3, fine, {1: fine}, other_pixels="a.jpg").alike
    assert not Comparison(Difference(), 1e-3, fine, {1: replace(fine, agree=3)}).alike
    assert not Comparison(Difference(), 1e-3, fine, {1: fine, 8: replace(fine, logits=0.1)}).alike


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    assert read_record(record_text(RECORD), tmp_path / "a.onnx", "onnx") == RECORD


def test_a_record_that_was_changed_is_rejected(tmp_path: Path) -> None:
    content = json.loads(record_text(RECORD))
    content["model"]["eval_crop"] = 0.9
    text = json.dumps(content, indent=1, sort_keys=True)
    with pytest.raises(UserError, match="the record was changed or damaged") as caught:
        read_record(text, tmp_path / "a.onnx", "onnx")
    assert caught.value.code == "bad-record"
    with pytest.raises(UserError, match="no Drumline record") as caught:
        read_record(None, tmp_path / "a.onnx", "onnx")
    assert caught.value.code == "no-record"


@pytest.mark.parametrize(
    "wrong",
    [
        {"takes": "jpeg"},
        {"answers": {"pixels": "ab", "best": [[7, 0.5]]}},
        {"answers": {"pixels": "ab", "best": []}},
        {"answers": None},
        {"torch": 2},
        {"format": "pt2"},
        {"device": "tpu"},
    ],
)
def test_fields_of_a_record_are_checked(wrong: dict[str, object], tmp_path: Path) -> None:
    from drumline.core.files import sealed_text

    content = json.loads(record_text(RECORD))
    del content["seal"]
    content["export"] |= wrong
    with pytest.raises(UserError, match=f"the record's {next(iter(wrong))}"):
        read_record(sealed_text(content), tmp_path / "a.onnx", "onnx")


def test_the_test_image_is_the_same_everywhere() -> None:
    image = fixed_image()
    assert image.shape == (179, 263, 3)
    assert int(image.astype(np.int64).sum()) == 17083801


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same with a GPU")
@pytest.mark.parametrize(
    ("asked", "message"), [(None, "torch sees none"), ("cpu", "was exported for cuda, not for cpu")]
)
def test_a_graph_that_was_exported_for_a_gpu_needs_one(
    asked: str | None, message: str, tmp_path: Path
) -> None:
    device = None if asked is None else torch.device(asked)
    with pytest.raises(UserError, match=message):
        load.file_device(tmp_path / "a.pt2", replace(RECORD, format="pt2"), device)
    assert load.file_device(tmp_path / "a.pt", replace(RECORD, format="torchscript"), device).type == "cpu"

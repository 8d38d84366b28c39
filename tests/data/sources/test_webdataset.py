"""WebDataset shards: which files are one sample, what is reported, and random access by sample id."""

from __future__ import annotations

import io
import json
import tarfile
import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

import drumline
from drumline.core.errors import UserError
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.data.sources import DatasetSpec, EncodedDataset, detect_source, open_dataset
from drumline.data.sources.base import FaultyData, NoEvalSplit, NoTrainSplit
from drumline.data.sources.shards import MAX_SHARDS, expand
from drumline.data.sources.webdataset import LARGEST_LABEL, WebDatasetFiles
from drumline.data.verify import verify_dataset

Side = Literal["train", "eval"]
Members = list[tuple[str, bytes]]


def jpeg(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (number % 256, 40, 7)).save(file, "JPEG")
    return file.getvalue()


def shard(file: Path, members: Members) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def samples(start: int, *labels: int | str, ending: str = "jpg") -> Members:
    return [
        member
        for number, label in enumerate(labels, start)
        for member in ((f"{number:04}.{ending}", jpeg(number)), (f"{number:04}.cls", str(label).encode()))
    ]


def opened(path: Path | str, side: Side = "train", **options: Any) -> EncodedDataset:
    assert detect_source("auto", str(path)) == "webdataset"
    found = open_dataset(DatasetSpec("webdataset", str(path), side, **options))
    assert isinstance(found, WebDatasetFiles)
    return found


def classes_of(source: EncodedDataset) -> list[str]:
    return [source.classes[label] for label in source.labels]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards to train and one to evaluate."""
    shard(tmp_path / "set-train-000000.tar", samples(0, 0, 2, 1))
    shard(tmp_path / "set-train-000001.tar", samples(3, 2, 0))
    shard(tmp_path / "set-val-000000.tar", samples(9, 1, 1))
    return tmp_path


def test_a_folder_of_shards_has_their_samples_in_order_and_reads_any_of_them(folder: Path) -> None:
    train, evaluation = opened(folder), opened(folder, "eval")
    assert train.labels.tolist() == [0, 2, 1, 2, 0]
    assert evaluation.labels.tolist() == [1, 1]
    assert train.classes == evaluation.classes == ("0", "1", "2")
    for sample in (4, 0, 2, 3, 1):
        assert train.read(sample) == jpeg(sample)
    assert train.where(3) == f"{folder}/set-train-000001.tar:0003.jpg"
    assert train.sample_names(np.array([4])) == ["set-train-000001.tar/0004.jpg"]
    assert train.remarks == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a{08..11}.tar", ["a08.tar", "a09.tar", "a10.tar", "a11.tar"]),
        ("{x,y}-{0..1}.tar", ["x-0.tar", "x-1.tar", "y-0.tar", "y-1.tar"]),
        ("plain.tar", ["plain.tar"]),
    ],
)
def test_patterns_count_and_list(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


@pytest.mark.parametrize("pattern", ["a{0..9999999999}.tar", "a{0..9999}-{0..9999}.tar"])
def test_a_pattern_of_too_many_shards_is_rejected(pattern: str) -> None:
    with pytest.raises(UserError, match=rf"more than {MAX_SHARDS:,} shards"):
        expand(pattern)


def test_numbers_with_a_wide_gap_between_them_are_reported(tmp_path: Path) -> None:
    for number in ("0690000000", "0690000003", "9720000000"):
        shard(tmp_path / f"shard-{number}.tar", samples(0, 0, 1))
    (missing,) = opened(tmp_path).remarks
    assert [Path(name).name for name, _ in missing.items[:3]] == [
        "shard-0690000001.tar",
        "shard-0690000002.tar",
        "shard-0690000004.tar",
    ]
    assert len(missing.items) == 1000


def test_patterns_single_shards_and_folders_named_like_splits_are_found(folder: Path) -> None:
    assert len(opened(folder / "set-train-{000000..000001}.tar")) == 5
    both = folder / "set-{train-000000,val-000000}.tar"
    assert (len(opened(both)), len(opened(both, "eval"))) == (3, 2)
    one = folder / "set-val-000000.tar"
    assert len(opened(one)) == len(opened(one, "eval", whole=True)) == 2
    shard(folder / "deep/train/0.tar", samples(0, 1, 0))
    shard(folder / "deep/validation/0.tar", samples(2, 1))
    assert len(opened(folder / "deep")) == 2
    assert len(opened(folder / "deep", "eval")) == 1
    with pytest.raises(UserError, match=r"2 of 4 shards do not exist: .*set-train-000002.tar"):
        open_dataset(DatasetSpec("webdataset", str(folder / "set-train-{000000..000003}.tar"), "train"))


def test_labels_may_be_json_names_or_numbers_with_names_beside(tmp_path: Path) -> None:
    rows = [{"label": "dog"}, {"caption": "x", "cls": "cat"}, {"class": "dog"}]
    members = [
        member
        for number, row in enumerate(rows)
        for member in ((f"a/{number}.JPEG", jpeg(number)), (f"a/{number}.json", json.dumps(row).encode()))
    ]
    shard(tmp_path / "x.tar", members)
    assert classes_of(opened(tmp_path / "x.tar")) == ["dog", "cat", "dog"]
    shard(tmp_path / "n/x.tar", samples(0, 1, 0, ending="png"))
    (tmp_path / "n/classnames.txt").write_text("ant\nbee\ncat\n")
    source = opened(tmp_path / "n")
    assert source.classes == ("ant", "bee", "cat")
    assert classes_of(source) == ["bee", "ant"]
    (tmp_path / "n/classnames.txt").write_text("ant\n")
    with pytest.raises(UserError, match="has 1 names, but the labels go up to 1"):
        opened(tmp_path / "n")
    (tmp_path / "n/classnames.txt").write_text("ant\nant\n")
    with pytest.raises(UserError, match="names 'ant' twice"):
        opened(tmp_path / "n")


def test_a_tar_of_class_folders_is_not_a_shard(tmp_path: Path) -> None:
    shard(
        tmp_path / "c.tar", [("ant/1.jpg", jpeg(1)), ("bee/2.jpg", jpeg(2)), ("bee/2.json", b'{"camera": 3}')]
    )
    assert detect_source("auto", str(tmp_path / "c.tar")) == "tar"
    shard(tmp_path / "w.tar", [("ant/1.jpg", jpeg(1)), ("ant/1.json", b'{"label": 3}')])
    assert detect_source("auto", str(tmp_path / "w.tar")) == "webdataset"
    (tmp_path / "odd.tar").write_bytes(b"not a tar at all" * 100)
    assert detect_source("auto", str(tmp_path / "odd.tar")) == "tar"


@pytest.mark.parametrize(("ending", "label"), [("json", b'{"label": "x"}'), ("cls", b"1")])
def test_a_tar_of_class_folders_with_labels_beside_the_images_may_be_either(
    tmp_path: Path, ending: str, label: bytes
) -> None:
    many = [(f"a/{number:03}.png", jpeg(number)) for number in range(200)]
    many += [(f"a/{number:03}.{ending}", label) for number in range(200)]
    shard(tmp_path / "x.tar", [*many, ("b/1.png", jpeg(1)), (f"b/1.{ending}", label)])
    path = str(tmp_path / "x.tar")
    with pytest.raises(UserError, match="more than one data set: tar and webdataset") as raised:
        detect_source("auto", path)
    assert "--data.source tar" in raised.value.fix
    assert open_dataset(DatasetSpec("tar", path, "train")).classes == ("a", "b")
    assert len(open_dataset(DatasetSpec("webdataset", path, "train")).classes) < 3


def test_what_is_left_out_or_odd_is_reported_by_a_run_and_verify(tmp_path: Path) -> None:
    first = samples(0, 0, 1)
    first += [("lone.jpg", jpeg(7)), ("only.cls", b"1"), ("0.seg.png", jpeg(8)), (".hidden.jpg", jpeg(9))]
    apart = [("p.jpg", jpeg(3)), ("q.jpg", jpeg(4)), ("p.cls", b"0"), ("q.cls", b"1")]
    shard(tmp_path / "train-0.tar", first + apart)
    shard(tmp_path / "train-2.tar", samples(5, 1))
    shard(tmp_path / "val-0.tar", samples(6, 1))
    shard(tmp_path / "test-0.tar", samples(7, 1))
    source = opened(tmp_path)
    assert source.labels.tolist() == [0, 1, 0, 1, 1]
    assert [source.read(sample) for sample in (2, 3)] == [jpeg(3), jpeg(4)]
    assert {fault.kind: len(fault.items) for fault in source.remarks} == {
        "missing-shard": 1,
        "left-out": 1,
        "incomplete": 2,
        "scattered": 2,
    }
    assert "train-1.tar" in str(source.remarks[0])
    report = verify_dataset(tmp_path, workers=1)
    assert report.bad == 0
    assert {
        kind: report.kinds[kind] for kind in ("missing-shard", "left-out", "incomplete", "scattered")
    } == {
        "missing-shard": 1,
        "left-out": 1,
        "incomplete": 2,
        "scattered": 2,
    }


@pytest.mark.parametrize(
    ("extra", "kind", "words"),
    [
        ([("0000.jpg", b"x")], "repeated-key", "(again as 0000.jpg)"),
        ([("0000.png", b"x")], "repeated-key", "(again as 0000.png)"),
        ([("0000.cls", b"1")], "repeated-key", "(again as 0000.cls)"),
        ([("x.jpg", b"x"), ("x.cls", b" ")], "no-label", "x.cls is empty"),
        ([("x.jpg", b"x"), ("x.cls", b"-1")], "no-label", "is -1, but labels count from 0"),
        ([("x.jpg", b"x"), ("x.cls", b"\xff\xfe")], "no-label", "is not UTF-8"),
        ([("x.jpg", b"x"), ("x.cls", b"a" * (LARGEST_LABEL + 1))], "no-label", "has 1,048,577 bytes"),
        ([("x.jpg", b"x"), ("x.json", b"{")], "no-label", "is not JSON"),
        ([("x.jpg", b"x"), ("x.json", b"[" * 100_000)], "no-label", "is not JSON"),
        ([("x.jpg", b"x"), ("x.json", b'{"label": true}')], "no-label", "has none of label"),
    ],
)
def test_keys_that_repeat_and_labels_that_cannot_be_read_are_rejected(
    tmp_path: Path, extra: Members, kind: str, words: str
) -> None:
    shard(tmp_path / "a.tar", samples(0, 0, 1) + extra)
    with pytest.raises(FaultyData) as raised:
        opened(tmp_path / "a.tar")
    assert raised.value.faults[0].kind == kind
    assert words in raised.value.what
    assert verify_dataset(tmp_path / "a.tar", workers=1).kinds[kind] == 1


def test_evaluation_labels_are_classes_of_the_training_shards(folder: Path) -> None:
    shard(folder / "set-val-000001.tar", samples(20, 7))
    assert len(opened(folder)) == 5
    with pytest.raises(UserError, match=r"not classes of the training shards.*'7'"):
        opened(folder, "eval")


def test_labels_are_numbers_in_both_splits_or_in_neither(folder: Path) -> None:
    shard(folder / "set-train-000002.tar", samples(20, "cat"))
    train, evaluation = opened(folder), opened(folder, "eval")
    assert train.classes == evaluation.classes == ("0", "1", "2", "cat")
    assert classes_of(evaluation) == ["1", "1"]
    shard(folder / "set-train-000002.tar", samples(20, 3))
    shard(folder / "set-val-000001.tar", samples(30, "cat"))
    with pytest.raises(UserError, match=r"not classes of the training shards.*'cat'"):
        opened(folder, "eval")


def test_a_number_too_large_for_a_class_is_rejected_and_one_of_many_digits_is_a_name(tmp_path: Path) -> None:
    shard(tmp_path / "x.tar", samples(0, 1, 9999999999))
    with pytest.raises(UserError, match="the label 9999999999"):
        opened(tmp_path / "x.tar")
    shard(tmp_path / "y.tar", samples(0, 1, "9" * 5000))
    assert opened(tmp_path / "y.tar").classes == ("1", "9" * 5000)


def test_nothing_keeps_the_index_of_shards_once_the_data_is_closed(folder: Path) -> None:
    train, evaluation = opened(folder), opened(folder, "eval", whole=True)
    index = weakref.ref(train._index)  # type: ignore[attr-defined]
    again = opened(folder)
    assert again._index is train._index  # type: ignore[attr-defined]
    del train, again
    assert index() is None
    assert len(evaluation) == 2


def test_splits_that_are_missing_or_unclear_are_named(folder: Path, tmp_path: Path) -> None:
    shard(folder / "extra.tar", samples(0, 1))
    with pytest.raises(UserError, match=r"extra\.tar has no split in its name"):
        opened(folder)
    shard(tmp_path / "v/val-0.tar", samples(0, 1, 0))
    with pytest.raises(NoTrainSplit):
        opened(tmp_path / "v")
    assert len(opened(tmp_path / "v", "eval", whole=True)) == 2
    shard(tmp_path / "t/train-0.tar", samples(0, 1, 0, 1, 0, 1, 0))
    with pytest.raises(NoEvalSplit):
        opened(tmp_path / "t", "eval")
    with pytest.raises(NoEvalSplit, match="has only training shards"):
        opened(tmp_path / "t", "eval", whole=True)
    held = opened(tmp_path / "t", "eval", holdout=0.34)
    rest = opened(tmp_path / "t", "train", holdout=0.34)
    assert sorted(held.where(i) for i in range(2)) + sorted(rest.where(i) for i in range(4)) != []
    assert {held.where(i) for i in range(2)}.isdisjoint(rest.where(i) for i in range(4))
    assert [held.read(i) for i in range(2)] == [jpeg(int(held.where(i)[-8:-4])) for i in range(2)]


def test_a_feed_a_packed_set_and_threads_read_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    def batches(path: Path, **options: Any) -> list[tuple[list[int], bytes]]:
        with drumline.open_feed(path, batch=2, size=6, seed=1, **options) as feed:
            return [(ids.tolist(), images.numpy().tobytes()) for images, _, ids in feed]

    plain = batches(folder, workers=0)
    assert batches(folder, workers=2, pool="threads") == plain
    pack_set("auto", str(folder), tmp_path / "packed", PackOptions(), 1, False, lambda _: None)
    assert batches(tmp_path / "packed", workers=0) == plain

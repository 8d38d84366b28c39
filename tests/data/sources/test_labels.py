"""Label files: read as people write them, nothing dropped in silence, the ids of the folder source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from drumline.core.errors import UserError
from drumline.data.classes import Classes, OtherClasses, label_map
from drumline.data.sources import DatasetSpec, EncodedDataset, detect_source, open_dataset
from drumline.data.sources.base import FaultyData, NoEvalSplit, NoTrainSplit
from drumline.data.sources.divide import fold_numbers, holdout_ids, holdout_mask
from drumline.data.verify import verify_dataset

Side = Literal["train", "eval"]


def images(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 7 % 256, number // 36, 90)).save(file)


def opened(
    root: Path, text: str, side: Side = "train", name: str = "labels.csv", **options: Any
) -> EncodedDataset:
    file = root / name
    file.write_text(text)
    found = open_dataset(DatasetSpec("labels", str(root), side, labels=str(file), **options))
    assert isinstance(found, EncodedDataset)
    return found


def listed(source: EncodedDataset) -> list[tuple[str, str]]:
    """Name and class of each sample."""
    names = [Path(source.where(sample)).name for sample in range(len(source))]
    return [(name, source.classes[label]) for name, label in zip(names, source.labels, strict=True)]


THREE = "path,label,split\na.jpg,cat,train\nb.jpg,dog,train\nc.jpg,dog,val\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    images(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        THREE,
        "\ufeff" + THREE,
        THREE.replace("\n", "\r\n"),
        THREE.replace("\n", "\r"),
        THREE.replace(",", ";"),
        THREE.replace(",", "\t"),
        "\n" + THREE + "\n\n",
        "split,extra,Label,PATH\ntrain,1,cat,a.jpg\ntrain,2,dog,b.jpg\nval,3,dog,c.jpg",
        'File Name,class,Subset\n"a.jpg","cat",TRAINING\n./b.jpg, dog ,train\nx/../c.jpg,dog,Validation\n',
        "image_id,target,set\na,cat,train\nb,dog,train\nc,dog,test\n",
        "path,label,split\nc.jpg,dog,val\nb.jpg,dog,train\na.jpg,cat,train\n",
    ],
)
def test_one_table_written_in_many_ways_is_one_data_set(root: Path, text: str) -> None:
    (root / "labels.csv").write_bytes(text.encode())
    for side, expected in (("train", [("a.jpg", "cat"), ("b.jpg", "dog")]), ("eval", [("c.jpg", "dog")])):
        source = open_dataset(DatasetSpec("labels", str(root), side, labels=str(root / "labels.csv")))  # type: ignore[arg-type]
        assert isinstance(source, EncodedDataset)
        assert listed(source) == expected
        assert source.classes == ("cat", "dog")
        assert source.remarks == ()


def test_tabs_in_a_tsv_and_quoted_names_with_separators(root: Path) -> None:
    images(root, "d, e.jpg", 'say "x".jpg')
    text = 'path,label\n"d, e.jpg",cat\n"say ""x"".jpg","dog, big"\na.jpg,cat\nb.jpg,cat\nc.jpg,cat\n'
    assert ('say "x".jpg', "dog, big") in listed(opened(root, text))
    tabs = "path\tlabel\nd, e.jpg\tcat\na.jpg\tdog\nb.jpg\tdog\nc.jpg\tdog\n"
    assert listed(opened(root, tabs, name="l.tsv"))[0] == ("d, e.jpg", "cat")


def test_paths_start_from_the_folder_of_the_file_or_are_absolute(root: Path) -> None:
    images(root / "deep", "d.jpg")
    (root / "l.csv").write_text(f"path,label\na.jpg,cat\n{root}/b.jpg,dog\nc.jpg,dog\ndeep\\d.jpg,dog\n")
    assert detect_source("auto", str(root / "l.csv")) == "labels"
    assert detect_source("auto", "", labels="x.csv") == "labels"
    for spec in (
        DatasetSpec("labels", str(root / "l.csv"), "train"),
        DatasetSpec("labels", "", "train", labels=str(root / "l.csv")),
    ):
        assert len(open_dataset(spec)) == 4
    with pytest.raises(UserError, match="does not exist here") as raised:
        open_dataset(DatasetSpec("labels", str(root), "train", labels="l.csv"))
    assert f"data.labels={root}/l.csv" in raised.value.fix


def test_paths_may_mix_forms_and_lead_out_of_the_folder_from_any_working_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(root / "deep", "d.jpg", ".thumbs/t.jpg")
    (root / "l.csv").write_text(f"path,label\na.jpg,cat\n{root}/b.jpg,dog\ndeep/../c.jpg,dog\n")
    (root / "deep/up.csv").write_text("path,label\n../a.jpg,cat\nd.jpg,dog\n")
    names = []
    for place, path, labels in (
        (root, "l.csv", ""),
        (root, "", "l.csv"),
        (root, ".", "l.csv"),
        (root / "deep", "..", "../l.csv"),
    ):
        monkeypatch.chdir(place)
        source = open_dataset(DatasetSpec("labels", path, "train", labels=labels))
        assert isinstance(source, EncodedDataset)
        assert source.read(0) == (root / "a.jpg").read_bytes()
        names.append(source.sample_names(np.arange(3)))
        walked = bool(path and labels)  # only below a folder that data.path names; never in hidden ones
        assert [(fault.kind, fault.number) for fault in source.remarks] == (
            [("unlisted", 1)] if walked else []
        )
    assert names == [["a.jpg", "b.jpg", "c.jpg"]] * 4
    monkeypatch.chdir(root / "deep")
    source = open_dataset(DatasetSpec("labels", "up.csv", "train"))
    assert isinstance(source, EncodedDataset)
    assert source.sample_names(np.arange(2)) == ["a.jpg", "deep/d.jpg"]


def test_a_file_that_lists_class_folders_has_the_ids_of_the_folder_source(tmp_path: Path) -> None:
    names = [
        f"{split}/{name}"
        for split in ("train", "val")
        for name in ("b/2.jpg", "b/10.jpg", "a/x/1.jpg", "a/0.png")
    ]
    images(tmp_path, *names)
    rows = [f"{name},{name.split('/')[1]},{name.split('/')[0]}" for name in names]
    (tmp_path / "l.csv").write_text("\n".join(["path,label,split", *reversed(rows)]))
    for side in ("train", "eval"):
        ours = open_dataset(DatasetSpec("labels", str(tmp_path), side, labels=str(tmp_path / "l.csv")))  # type: ignore[arg-type]
        theirs = open_dataset(DatasetSpec("folder", str(tmp_path), side))  # type: ignore[arg-type]
        assert isinstance(ours, EncodedDataset)
        assert isinstance(theirs, EncodedDataset)
        assert ours.classes == theirs.classes
        assert [ours.where(i) for i in range(4)] == [theirs.where(i) for i in range(4)]
        assert ours.labels.tolist() == theirs.labels.tolist()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("10", "9", "2"), ("2", "9", "10")),
        (("1.0", "0.0", "10.0"), ("0", "1", "10")),
        (("1", "0.0", "1.0"), ("0", "1")),
        (("007", "10", "011"), ("007", "10", "011")),
        (("-1", "1", "0"), ("-1", "0", "1")),
        (("10", "9", "b"), ("10", "9", "b")),
    ],
)
def test_whole_numbers_are_sorted_by_value_and_other_labels_as_text(
    root: Path, labels: Sequence[str], classes: Sequence[str]
) -> None:
    rows = "\n".join(f"{name}.jpg,{label}" for name, label in zip("abc", labels, strict=True))
    assert opened(root, f"path,label\n{rows}\n").classes == tuple(classes)


def test_numbers_are_names_so_a_subset_is_matched_by_them(root: Path) -> None:
    trained = Classes.of(opened(root, "path,label\na.jpg,0\nb.jpg,1\nc.jpg,2\n"))
    scored = opened(root, "path,label\na.jpg,1\nb.jpg,0\n", "eval", whole=True)
    mapped, _ = label_map(trained, Classes.of(scored), {0, 1})
    assert mapped is not None
    assert mapped.tolist() == [0, 1]
    with pytest.raises(OtherClasses, match="'7'"):
        label_map(trained, Classes.of(opened(root, "path,label\na.jpg,7\nb.jpg,0\n")), {0, 1})


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        (
            "a.jpg,cat,train\nno.jpg,cat,train\ngone/x.jpg,cat,val\n",
            "missing",
            "files that do not exist: 2 (",
        ),
        ("a.jpg,cat,train\n./a.jpg,dog,train\n", "two-labels", "is 'cat' in line 2 and 'dog' in line 3"),
        ("a.jpg,cat,train\nx/../a.jpg,cat,val\n", "two-splits", "is in both: lines 2 and 3"),
        ("a.jpg,cat,train\nb.jpg,,train\n", "no-label", "rows without a label: 1 ("),
        ("a.jpg,cat,train\n,cat,train\n", "no-path", "rows without a path: 1 ("),
        (
            "a.jpg,cat,train\nb.jpg,cat,maybe\nc.jpg,cat,\n",
            "unknown-split",
            "rows with an unknown split (use train, val or test): 2 (",
        ),
        ("a.jpg,cat,train\nb.jpg,fox,val\n", "unknown-class", "'fox' (rows: 1)"),
        ("a.jpg,1,train\nb.jpg,01,train\n", "two-names", "written differently"),
        ("two,cat,train\na.jpg,cat,train\n", "ambiguous", "may be two.jpg or two.png"),
    ],
)
def test_what_a_run_cannot_use_is_rejected_and_listed_by_verify(
    root: Path, rows: str, kind: str, words: str
) -> None:
    images(root, "two.jpg", "two.png")
    with pytest.raises(FaultyData) as raised:
        opened(root, f"path,label,split\n{rows}")
    assert words in raised.value.what
    assert [fault.kind for fault in raised.value.faults if fault.items] == [kind]
    report = verify_dataset(root, labels=str(root / "labels.csv"), workers=1)
    assert report.kinds[kind] == len(raised.value.faults[0].items)
    assert report.bad == report.kinds[kind]
    assert report.samples == 5


def test_verify_lists_repeated_rows_beside_what_is_wrong(root: Path) -> None:
    (root / "l.csv").write_text("path,label\na.jpg,cat\na.jpg,cat\nb.jpg,\n")
    kinds = verify_dataset(root, labels=str(root / "l.csv"), workers=1).kinds
    assert kinds == {"no-label": 1, "repeated-row": 1}


def test_everything_that_is_wrong_is_reported_at_once(root: Path) -> None:
    with pytest.raises(FaultyData) as raised:
        opened(root, "path,label,split\nno.jpg,cat,train\na.jpg,,train\nb.jpg,cat,soon\nc.jpg,dog,val\n")
    assert {fault.kind for fault in raised.value.faults} >= {"missing", "no-label", "unknown-split"}


def test_if_no_file_exists_the_fix_names_the_folder_that_the_paths_begin_in(root: Path) -> None:
    images(root, "deep/img/1.jpg", "deep/img/2.jpg")
    for rows, folder in (
        ("1.jpg,cat\nno.jpg,dog\n", root / "deep/img"),
        ("img/1,cat\nimg/2,dog\n", root / "deep"),
        (f"{root.name}/a.jpg,cat\n", root.parent),
    ):
        with pytest.raises(FaultyData, match="files that do not exist") as raised:
            opened(root, f"path,label\n{rows}")
        expected = f"did you mean data.path={folder} data.labels={root / 'labels.csv'}?"
        assert raised.value.fix == f"paths are relative to data.path: {expected}"
    with pytest.raises(FaultyData) as raised:
        opened(root, "path,label\ngone.jpg,cat\n")
    assert raised.value.fix.startswith(f"paths are relative to data.path, here {root}: ")


def test_labels_that_differ_only_in_case_are_reported(root: Path) -> None:
    source = opened(root, "path,label\na.jpg,Tench\nb.jpg,tench\nc.jpg,cat\n")
    assert source.classes == ("Tench", "cat", "tench")
    (remark,) = source.remarks
    assert str(remark) == f"labels that differ only in case: 1 ({root / 'labels.csv'} Tench and tench)"
    report = verify_dataset(root, labels=str(root / "labels.csv"), workers=1)
    assert (report.bad, report.kinds["case"]) == (0, 1)


def test_what_is_left_out_is_reported(root: Path) -> None:
    images(root, "d.jpg", "other/e.jpg", "other/f.jpg", "other/.hidden.jpg", "notes/g.txt.png")
    text = THREE + "a.jpg,cat,train\nb.jpg,dog,train\n./a.jpg,cat,train\nd.jpg,bird,test\n"
    source = opened(root, text)
    assert listed(source) == [("a.jpg", "cat"), ("b.jpg", "dog")]
    assert [(fault.kind, str(fault).split(" (")[0]) for fault in source.remarks] == [
        ("repeated-row", "rows that repeat the image of an earlier row, dropped: 3"),
        ("left-out", "rows with the split test, left out because there are val rows: 1"),
        ("unlisted", "images without a row: 3"),
    ]
    assert "other (2, such as e.jpg)" in str(source.remarks[2])
    report = verify_dataset(root, labels=str(root / "labels.csv"), workers=1)
    assert report.bad == 0
    assert {kind: report.kinds[kind] for kind in ("repeated-row", "left-out", "unlisted")} == {
        "repeated-row": 3,
        "left-out": 1,
        "unlisted": 2,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jpg,cat\nb.jpg,dog\n", "has no column of paths; its first line is: a.jpg, cat"),
        ("path,breed\na.jpg,cat\n", "has no column of labels"),
        ("path,class,target\na.jpg,cat,1\n", "several columns that may be the label: 'class' and 'target'"),
        ("path,path,label\na.jpg,b.jpg,1\n", "several columns that may be the path"),
        ("path,label\na,b.jpg,cat\n", "line 2: has 3 fields, but the header has 2"),
        ("path,label\na.jpg\n", "line 2: has 1 fields"),
        ('path,label\n"a.jpg,cat\n', "is not valid CSV"),
        ("path,label\n", "has no rows"),
        ("", "labels.csv is empty"),
        ("\n\n", "labels.csv is empty"),
    ],
)
def test_unclear_files_are_rejected_with_the_line(root: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        opened(root, text)
    assert words in raised.value.what
    assert raised.value.fix


@pytest.mark.parametrize(("encoding", "words"), [("utf-16", "UTF-16"), ("latin-1", "line 3: is not UTF-8")])
def test_other_encodings_are_rejected(root: Path, encoding: str, words: str) -> None:
    (root / "l.csv").write_bytes("path,label\na.jpg,cat\nb.jpg,café\n".encode(encoding))
    with pytest.raises(UserError, match=words):
        open_dataset(DatasetSpec("labels", "", "train", labels=str(root / "l.csv")))


def test_files_without_splits_are_held_out_or_scored_whole(root: Path) -> None:
    text = "path,label\n" + "".join(f"{name}.jpg,{'xy'[name > 'b']}\n" for name in "abc")
    assert len(opened(root, text)) == 3
    with pytest.raises(NoEvalSplit):
        opened(root, text, "eval")
    assert len(opened(root, text, "eval", whole=True)) == 3
    assert listed(opened(root, text, "eval", holdout=0.5)) in ([("a.jpg", "x")], [("b.jpg", "x")])
    with pytest.raises(UserError, match="has an evaluation split of its own"):
        opened(root, THREE, holdout=0.5)


def test_files_with_only_one_split_are_scored_or_rejected_by_name(root: Path) -> None:
    scored = "path,label,split\na.jpg,cat,val\nb.jpg,dog,val\n"
    with pytest.raises(NoTrainSplit):
        opened(root, scored)
    assert len(opened(root, scored, "eval", whole=True)) == 2
    with pytest.raises(NoEvalSplit, match="only rows with the split train"):
        opened(root, scored.replace("val", "train"), "eval", whole=True)


def test_a_parquet_file_needs_pyarrow_and_says_how_to_do_without(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow") as raised:
        opened(root, "PAR1", name="l.parquet")
    assert "pip install pyarrow" in raised.value.fix
    assert "to_csv('l.csv', index=False)" in raised.value.fix


def test_the_columns_of_a_parquet_file_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "id": [1, 2, 3],
        "label": [0, 1, 1],
        "path": ["a.jpg", "b.jpg", "c.jpg"],
        "split": ["train", "train", "val"],
    }

    class Table:
        def column(self, name: str) -> Any:
            return type("Column", (), {"to_pylist": lambda _: columns[name]})()

    arrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    arrow.ArrowException = ValueError  # type: ignore[attr-defined]
    arrow.parquet = parquet  # type: ignore[attr-defined]
    parquet.read_schema = lambda _: type("Schema", (), {"names": list(columns)})()  # type: ignore[attr-defined]
    parquet.read_table = lambda _, columns: Table()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    assert listed(opened(root, "PAR1", name="l.parquet")) == [("a.jpg", "0"), ("b.jpg", "1")]


def test_a_path_with_a_nul_byte_is_named_with_its_line(root: Path) -> None:
    rows = "a.jpg,x\n" * 1000
    with pytest.raises(UserError, match=r"labels\.csv, line 1002: the path has a NUL byte"):
        opened(root, f"path,label\n{rows}~b\0c/b.jpg,y\n")


def test_a_label_of_very_many_digits_is_a_name(root: Path) -> None:
    long = "9" * 5000
    assert opened(root, f"path,label\na.jpg,{long}\nb.jpg,2\nc.jpg,10\n").classes == ("10", "2", long)


def test_a_header_without_end_is_rejected(root: Path) -> None:
    with pytest.raises(UserError, match="is not valid CSV"):
        opened(root, "path,label," + "x" * 200_000)


def test_folds_divide_each_class_as_evenly_as_possible_and_each_sample_is_in_one() -> None:
    labels = np.repeat(np.arange(4), (23, 7, 5, 14))
    for seed in (0, 3):
        numbers = fold_numbers(labels, 5, seed)
        sizes = np.bincount(numbers, minlength=5)
        assert sizes.max() - sizes.min() <= 1
        for label in range(4):
            counts = np.bincount(numbers[labels == label], minlength=5)
            assert counts.max() - counts.min() <= 1
    assert fold_numbers(labels, 5, 0).tolist() != fold_numbers(labels, 5, 3).tolist()
    assert fold_numbers(np.zeros(10, np.int64), 3).tolist() == GOLDEN_FOLDS


def test_the_only_sample_of_a_class_is_trained_on_in_every_fold() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2, 2, 2, 3])
    numbers = fold_numbers(labels, 3)
    assert numbers[[3, 8]].tolist() == [-1, -1]
    alone = np.isin(labels, (1, 3))
    assert np.array_equal(np.sort(numbers[~alone]), [0, 0, 0, 1, 1, 2, 2])
    for fold in range(3):
        spec = DatasetSpec("labels", "x", "train", folds=3, fold=fold)
        assert {3, 8} <= set(holdout_ids(labels, spec, "x").tolist())
        assert not {3, 8} & set(holdout_ids(labels, replace(spec, split="eval"), "x").tolist())
    with pytest.raises(UserError, match="only 0 samples can be divided") as raised:
        holdout_ids(np.arange(4), DatasetSpec("labels", "x", "eval", folds=3), "x")
    assert "add samples" in raised.value.fix


def test_a_split_seed_gives_another_holdout_of_the_same_sizes_and_0_the_one_of_old() -> None:
    labels = np.repeat(np.arange(3), (40, 11, 2))
    masks = [holdout_mask(labels, 0.2, seed) for seed in (0, 1, 2)]
    assert np.array_equal(masks[0], holdout_mask(labels, 0.2))
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[1], masks[2])
    assert {tuple(np.bincount(labels[mask])) for mask in masks} == {(8, 2, 1)}


def test_the_folds_of_a_source_partition_it(root: Path) -> None:
    text = "path,label\n" + "".join(f"{name}.jpg,x\n" for name in "abc")
    parts = [listed(opened(root, text, "eval", folds=3, fold=fold)) for fold in range(3)]
    assert sorted(sum(parts, [])) == [("a.jpg", "x"), ("b.jpg", "x"), ("c.jpg", "x")]  # noqa: RUF017
    for fold, part in enumerate(parts):
        trained = listed(opened(root, text, "train", folds=3, fold=fold))
        assert sorted(trained + part) == [("a.jpg", "x"), ("b.jpg", "x"), ("c.jpg", "x")]
    with pytest.raises(UserError, match="but only 3 samples can be divided"):
        opened(root, text, "eval", folds=5, fold=4)


GOLDEN_FOLDS = [0, 1, 2, 0, 0, 1, 2, 2, 0, 1]

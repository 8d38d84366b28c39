"""Image folders: ImageFolder's order, the layouts, and every error with its path and fix."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.errors import LostError, UserError
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from drumline.data.sources.base import describe_skipped
from drumline.data.sources.divide import holdout_mask


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def opened(path: Path, split: Literal["train", "eval"] = "train", holdout: float = 0.0) -> EncodedDataset:
    source = open_dataset(DatasetSpec("folder", str(path), split, holdout))
    assert isinstance(source, EncodedDataset)
    return source


def listing(source: EncodedDataset) -> list[tuple[str, int]]:
    return [(source.where(i), int(source.labels[i])) for i in range(len(source))]


def image_folder(root: Path) -> list[tuple[str, int]]:
    """torchvision's documented rule: classes sorted, os.walk sorted with links followed, names sorted."""
    endings = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
    found = []
    for label, name in enumerate(sorted(p.name for p in root.iterdir() if p.is_dir())):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            found += [(f"{folder}/{file}", label) for file in sorted(files) if file.lower().endswith(endings)]
    return found


def error_of(path: Path, split: Literal["train", "eval"] = "train", holdout: float = 0.0) -> UserError:
    with pytest.raises(UserError) as caught:
        opened(path, split, holdout)
    assert caught.value.fix
    return caught.value


NAMES = st.text("aAbB09-_+ é", min_size=1, max_size=4).filter(lambda name: name.strip() == name)
ENDINGS = st.sampled_from([".jpg", ".JPEG", ".png", ".webp", ".txt", ".gif"])
FILES = st.tuples(NAMES, st.lists(NAMES.map(lambda name: "d" + name), max_size=2), NAMES, ENDINGS)
"""Class, folders below it, name and ending of an image or of something else."""


@given(files=st.lists(FILES, min_size=1, max_size=25))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_and_labels_are_those_of_image_folder(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("set")
    for name, deeper, file, ending in files:
        put(root, f"{name}/first.png", "/".join([name, *deeper, file + ending]))
    assert listing(opened(root)) == image_folder(root)


def test_order_sorts_folders_by_whole_path_as_torchvision_does(tmp_path):
    put(tmp_path, "c/a/z.png", "c/a-b/y.png", "c/x.png", "c/a/b/w.png", "B/1.png", "B/10.png", "B/2.png")
    names = [where.removeprefix(f"{tmp_path}/") for where, _ in listing(opened(tmp_path))]
    assert names == ["B/1.png", "B/10.png", "B/2.png", "c/x.png", "c/a/z.png", "c/a-b/y.png", "c/a/b/w.png"]
    assert listing(opened(tmp_path)) == image_folder(tmp_path)


def test_reads_bytes_of_the_file_it_names(tmp_path):
    source = opened(put(tmp_path, "a/1.jpg", "a/é/2.jpg", "b/3.jpg"))
    for sample in range(3):
        assert Path(source.where(sample)).read_bytes() == source.read(sample)
    assert source.read(2) == b"b/3.jpg"
    assert (source.name, source.classes, len(source)) == ("folder", ("a", "b"), 3)


def test_file_names_that_are_not_text_are_read(tmp_path):
    put(tmp_path, "a/1.jpg")
    (tmp_path / os.fsdecode(b"a/\xff.jpg")).write_bytes(b"odd")
    assert opened(tmp_path).read(1) == b"odd"


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_split_folders_are_found_under_each_name(tmp_path, name):
    put(tmp_path, "train/a/1.png", "train/b/2.png", f"{name}/a/3.png", f"{name}/b/4.png", f"{name}/b/5.png")
    assert listing(opened(tmp_path)) == image_folder(tmp_path / "train")
    assert listing(opened(tmp_path, "eval")) == image_folder(tmp_path / name)


def test_val_wins_over_test(tmp_path):
    put(tmp_path, "train/a/1.png", "test/a/2.png", "val/a/3.png")
    assert opened(tmp_path, "eval").where(0).endswith("val/a/3.png")


def test_eval_split_may_lack_a_class_and_keeps_the_training_labels(tmp_path):
    put(tmp_path, "train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png")
    source = opened(tmp_path, "eval")
    assert source.labels.tolist() == [2]
    assert source.classes == ("a", "b", "c")


def test_a_class_may_be_called_train(tmp_path):
    put(tmp_path, "bus/1.png", "car/1.png", "train/1.png")
    assert opened(tmp_path).classes == ("bus", "car", "train")


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_folder_above_the_data_is_rejected_with_the_right_one(tmp_path, holdout):
    images = [f"{split}/{name}/{i}.png" for split in ("train", "val") for name in "ab" for i in range(5)]
    for top in ("wrap/wrap", "p/nest", "p/upper", "deep/er/set"):
        put(tmp_path / top, *images)
    put(tmp_path, "p/nest/README.txt")
    for top, meant in (
        ("wrap", [tmp_path / "wrap/wrap"]),
        ("p", [tmp_path / "p/nest", tmp_path / "p/upper"]),
        ("deep", [tmp_path / "deep/er/set"]),
    ):
        error = error_of(tmp_path / top, "train", holdout)
        assert error.fix == f"did you mean {' or '.join(f'data.path={each}' for each in meant)}?"


def test_folders_named_like_a_split_in_a_class_are_not_data_sets(tmp_path):
    put(tmp_path, "dog/train/1.png", "dog/val/2.png", "cat/deeper/1.png", "train/1.png")
    assert opened(tmp_path).classes == ("cat", "dog", "train")


def test_a_training_folder_beside_its_evaluation_split_is_rejected_with_the_folder_above(
    tmp_path, monkeypatch
):
    put(tmp_path, "p/train/a/1.png", "p/train/a/2.png", "p/val/a/3.png")
    error = error_of(tmp_path / "p/train", "eval")
    assert error.fix.startswith(f"did you mean data.path={tmp_path / 'p'}? ")
    assert len(opened(tmp_path / "p/train", "eval", 0.5)) == 1  # asked for
    monkeypatch.chdir(tmp_path / "p/train")
    assert error_of(Path(), "eval").fix.startswith(f"did you mean data.path={tmp_path / 'p'}? ")


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_label_file_beside_folders_that_are_not_its_classes_is_suggested(tmp_path, holdout):
    put(tmp_path, *(f"img/{i}.png" for i in range(9)), "notes.csv")
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"img/{i}.png,dog\n" for i in range(9)))
    error = error_of(tmp_path, "train", holdout)
    assert error.fix.startswith(f"did you mean data.labels={tmp_path / 'labels.csv'}? ")
    (tmp_path / "img").rename(tmp_path / "dog")  # the folders are the classes, and the file says the same
    assert opened(tmp_path).classes == ("dog",)


def test_hidden_files_and_folders_are_ignored(tmp_path):
    put(tmp_path, "a/1.png", "a/._1.png", "a/.cache/2.png", ".git/3.png", ".DS_Store", "README.txt")
    put(tmp_path, "__MACOSX/a/._1.png", "__MACOSX/a/2.png")
    assert [where for where, _ in listing(opened(tmp_path))] == [f"{tmp_path}/a/1.png"]


def test_links_to_files_and_folders_are_followed(tmp_path):
    put(tmp_path, "real/deep/1.png", "real/2.png", "set/a/3.png")
    (tmp_path / "set/a/4.png").symlink_to(tmp_path / "real/2.png")
    (tmp_path / "set/a/more").symlink_to(tmp_path / "real/deep")
    (tmp_path / "set/b").symlink_to(tmp_path / "real")
    assert listing(opened(tmp_path / "set")) == image_folder(tmp_path / "set")
    assert len(opened(tmp_path / "set")) == 5


@pytest.mark.parametrize("layout", ["", "train/"])
def test_holdout_divides_class_folders_alone(tmp_path, layout):
    put(tmp_path, *(f"{layout}{name}/{i}.png" for name in "abc" for i in range(20)))
    train, evaluation = opened(tmp_path, "train", 0.1), opened(tmp_path, "eval", 0.1)
    everything = [where for where, _ in image_folder(tmp_path / layout)]
    parts = [where for where, _ in listing(train)], [where for where, _ in listing(evaluation)]
    assert sorted(parts[0] + parts[1]) == sorted(everything)
    assert not set(parts[0]) & set(parts[1])
    assert np.bincount(evaluation.labels).tolist() == [2, 2, 2]
    assert parts[0] == [where for where in everything if where in parts[0]]
    assert all(Path(where).parent.name == "abc"[label] for where, label in listing(evaluation))


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=200),
    share=st.floats(0.001, 0.999),
)
def test_holdout_takes_its_fraction_of_every_class(labels, share):
    array = np.array(labels, dtype=np.int64)
    mask = holdout_mask(array, share)
    assert (mask == holdout_mask(array, share)).all()
    for label in set(labels):
        n, held = (array == label).sum(), mask[array == label].sum()
        assert held == 0 if n == 1 else 1 <= held <= n - 1
        if 1 < n * share < n - 1:
            assert abs(held - n * share) <= 0.501


def test_holdout_has_no_period():
    """Every k-th sample would take the same view of each object when files come in groups of k."""
    held = np.flatnonzero(holdout_mask(np.zeros(1000, dtype=np.int64), 0.2))
    assert len(held) == 200
    assert np.bincount(held % 5, minlength=5).min() > 20


def test_holdout_choice_is_frozen():
    held = np.flatnonzero(holdout_mask(np.arange(40) % 2, 0.1))
    assert held.tolist() == [3, 10, 18, 21]


def test_rejects_a_missing_path(tmp_path):
    error = error_of(tmp_path / "nowhere")
    assert f"{tmp_path}/nowhere does not exist" in error.what
    assert "data.path" in error.fix


def test_rejects_a_file_as_path(tmp_path):
    assert "is a file, not a folder" in error_of(put(tmp_path, "a.png") / "a.png").what


def test_rejects_an_unreadable_folder(tmp_path, monkeypatch):
    put(tmp_path, "a/1.png", "b/1.png")
    real = os.scandir

    def guarded(folder):
        if str(folder).endswith("/b"):
            raise PermissionError(13, "Permission denied", folder)
        return real(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    error = error_of(tmp_path)
    assert f"no permission to read {tmp_path}/b" in error.what
    assert "chmod" in error.fix


def test_a_sample_that_vanished_or_cannot_be_read_is_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("drumline.data.reading.PAUSES", (0.0,))
    source = opened(put(tmp_path, "a/1.png", "a/2.png"))
    (tmp_path / "a/1.png").unlink()
    (tmp_path / "a/2.png").unlink()
    (tmp_path / "a/2.png").mkdir()
    with pytest.raises(LostError, match=r"a/1\.png cannot be read: No such file or directory"):
        source.read(0)
    with pytest.raises(LostError, match=r"a/2\.png is a folder, not a regular file"):
        source.read(1)


def test_rejects_a_folder_without_class_folders(tmp_path):
    assert f"{tmp_path} has no class folders" in error_of(put(tmp_path, "notes.txt")).what
    assert "holds images (1.png) but no class folders" in error_of(put(tmp_path, "1.png")).what


def test_rejects_an_empty_class_by_name(tmp_path):
    put(tmp_path, "a/1.png")
    (tmp_path / "b").mkdir()
    error = error_of(tmp_path)
    assert f"class 'b' has no images: {tmp_path}/b" in error.what
    assert ".jpeg" in error.fix


def test_rejects_a_class_with_unknown_endings_and_names_them(tmp_path):
    assert "its files end in .gif, .heic" in error_of(put(tmp_path, "a/1.gif", "a/2.heic", "b/3.png")).what


def test_files_that_are_passed_over_are_counted_by_their_endings(tmp_path):
    put(
        tmp_path,
        "a/1.png",
        "a/deep/2.HEIC",
        "a/3.heic",
        "a/notes.txt",
        "a/.hidden",
        "a/README",
        "b/4.png",
        "b/5.png",
    )
    source = open_dataset(DatasetSpec("folder", str(tmp_path), "train", 0.0))
    assert isinstance(source, EncodedDataset)
    assert len(source) == 3
    assert source.skipped == {".heic": 2, ".txt": 1, "README": 1}
    assert describe_skipped(source) == (
        "4 files that are not images, by extension: .heic 2, .txt 1, README 1"
    )
    source.skipped = {".g\x1bif": 1}
    assert describe_skipped(source) == "1 file that is not an image, by extension: .g\\x1bif 1"


def test_rejects_eval_without_split_or_holdout(tmp_path):
    put(tmp_path, "a/1.png", "b/1.png")
    error = error_of(tmp_path, "eval")
    assert "no evaluation split, and data.holdout is 0" in error.what
    assert "--data.holdout" in error.fix
    assert len(opened(tmp_path)) == 2


def test_rejects_a_holdout_for_data_with_an_evaluation_split(tmp_path):
    put(tmp_path, "train/a/1.png", "val/a/1.png")
    assert "has an evaluation split of its own" in error_of(tmp_path, "train", 0.1).what


def test_rejects_a_holdout_that_leaves_nothing(tmp_path):
    assert "leaves nothing to evaluate" in error_of(put(tmp_path, "a/1.png", "b/1.png"), "eval", 0.1).what


def test_rejects_an_eval_class_that_training_lacks(tmp_path):
    put(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dogs/1.png")
    error = error_of(tmp_path, "eval")
    assert "'dogs'" in error.what
    assert f"{tmp_path}/train" in error.what


@pytest.mark.parametrize("name", ["Training", "val", "Testing"])
def test_rejects_split_folders_with_other_names_instead_of_using_them_as_classes(tmp_path, name):
    error = error_of(put(tmp_path, f"{name}/a/1.png", "other/b/1.png"))
    assert repr(name) in error.what
    assert "train and val" in error.fix


@pytest.mark.parametrize("link", ["a/2.png", "b", "a/deeper"])
def test_rejects_broken_links(tmp_path, link):
    put(tmp_path, "a/1.png")
    (tmp_path / link).symlink_to("/gone/away")
    error = error_of(tmp_path)
    assert f"{tmp_path}/{link} is a broken link to /gone/away" in error.what


def test_rejects_links_in_a_loop(tmp_path):
    put(tmp_path, "a/b/1.png")
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    assert "a/b/up is a link to a folder that contains it" in error_of(tmp_path).what


def test_rejects_images_beside_class_folders(tmp_path):
    error = error_of(put(tmp_path, "a/1.png", *(f"{i}.png" for i in range(5))))
    assert "images beside its class folders" in error.what
    assert "and 2 more" in error.what


def test_rejects_pipes_with_image_names(tmp_path):
    put(tmp_path, "a/1.png")
    os.mkfifo(tmp_path / "a/2.png")
    assert "a/2.png is a pipe, not a regular file" in error_of(tmp_path).what


def test_a_pickled_spec_is_small():
    spec = DatasetSpec("folder", "/data/set", "eval", 0.1)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len(pickle.dumps(spec)) < 300


@pytest.mark.parametrize("holdout", [0.0, 0.5])
def test_a_misspelt_evaluation_split_is_named(tmp_path, holdout):
    put(tmp_path, "train/a/1.png", "train/a/2.png", "train/b/1.png", "vall/a/1.png", "vall/b/1.png")
    error = error_of(tmp_path, "eval", holdout)
    assert "is 'vall' meant to be val?" in error.what
    assert ("remove data.holdout" in error.fix) is bool(holdout)
    (tmp_path / "vall").rename(tmp_path / "notes")
    if holdout:
        assert len(opened(tmp_path, "eval", holdout)) == 1


def test_an_empty_training_split_is_not_a_class(tmp_path):
    (tmp_path / "train").mkdir()
    assert error_of(tmp_path).what == f"{tmp_path}/train is empty"
    put(tmp_path, "val/a/1.png")
    assert error_of(tmp_path).what == f"{tmp_path}/train is empty"

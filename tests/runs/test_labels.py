"""Label files, folds and scores: the bits of class folders, and classes that are matched by name."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.runs.command import drumline, result, sha256, train

pytestmark = pytest.mark.slow

SMALL = (
    "model.name=resnet8",
    "data.size=8",
    "data.batch=8",
    "data.workers=1",
    "parallel.threads=1",
    "train.epochs=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three classes, and a file that lists its images."""
    top, draw, rows = tmp_path_factory.mktemp("labels"), np.random.default_rng(5), ["label,path,split"]
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            (top / "photos" / split / name).mkdir(parents=True)
            for number in range(8):
                path = f"{split}/{name}/{number}.jpg"
                Image.fromarray(draw.integers(0, 256, (12, 9, 3), np.uint8)).save(top / "photos" / path)
                rows.append(f"{name},{path},{split}")
    (top / "photos/labels.csv").write_text("\n".join(rows[:1] + rows[:0:-1]))
    return top


def test_a_label_file_gives_the_bits_and_scores_of_the_folder_that_it_lists(folder: Path) -> None:
    train(folder, "folder", "data.path=photos", recipe=SMALL)
    listed = train(folder, "listed", "data.path=photos/labels.csv", "data.pool=threads", recipe=SMALL)
    assert sha256(folder, "folder") == sha256(folder, "listed")
    assert "24 to evaluate, 3 classes (ant, bee, cat), " in (folder / "runs/listed/log.txt").read_text()
    (folder / "some.csv").write_text("path,label\n" + "".join(f"val/cat/{n}.jpg,cat\n" for n in range(8)))
    scored = result(drumline("eval", "runs/folder", "data.labels=some.csv", folder=folder))
    whole = result(drumline("eval", "runs/listed", folder=folder))
    assert whole["correct"] == listed["correct"]
    assert (scored["samples"], scored["classes"]) == (8, 1)
    (folder / "ants.csv").write_text("path,label\nval/cat/0.jpg,wasp\n")
    failed = drumline("eval", "runs/folder", "data.labels=ants.csv", folder=folder)
    assert failed.returncode == 2
    assert "the model does not have 'wasp'" in failed.stderr


def test_a_fold_is_scored_as_in_its_run_and_not_for_other_data(folder: Path) -> None:
    fold = ("data.path=photos/train", "data.folds=4", "data.fold=2")
    trained = train(folder, "fold", *fold, "data.balance=sqrt", recipe=SMALL)
    assert trained["samples"] == 6
    own = result(drumline("eval", "runs/fold", folder=folder))
    assert (own["samples"], own["correct"]) == (6, trained["correct"])
    other = result(drumline("eval", "runs/fold", "data.path=photos/val", folder=folder))
    assert other["samples"] == 24
    both = drumline("eval", "runs/fold", "data.path=photos", "data.folds=4", folder=folder)
    assert "data.folds is 4, but photos has an evaluation split of its own" in both.stderr


def test_shards_are_trained_on_and_scored_also_if_they_lack_classes(folder: Path) -> None:
    for split, labels in (("train", (0, 1, 2) * 4), ("val", (0, 1, 1, 0, 1))):
        with tarfile.open(folder / f"{split}-0.tar", "w") as archive:
            for number, label in enumerate(labels):
                image = (folder / f"photos/train/ant/{number % 8}.jpg").read_bytes()
                for ending, data in (("jpg", image), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{number}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    trained = train(folder, "shards", "data.path={train,val}-0.tar", recipe=SMALL)
    assert trained["samples"] == 5
    scored = drumline("eval", "runs/shards", "data.path=val-{0..0}.tar", folder=folder)
    assert (result(scored)["samples"], result(scored)["correct"]) == (5, trained["correct"])
    assert "the data has 2 of the model's 3 classes, matched by number" in scored.stderr
    report = result(drumline("verify", "val-{0..0}.tar", folder=folder))
    assert (report["source"], report["samples"]) == ("webdataset", 5)


def test_verify_and_pack_take_a_label_file_as_fields_or_options(folder: Path) -> None:
    report = result(drumline("verify", "data.labels=photos/labels.csv", "data.path=photos", folder=folder))
    assert report["splits"] == {"train": 24, "eval": 24}
    packed = result(drumline("pack", "photos", "packed", "--labels", "photos/labels.csv", folder=folder))
    assert (packed["train"], packed["eval"], packed["classes"]) == (24, 24, 3)

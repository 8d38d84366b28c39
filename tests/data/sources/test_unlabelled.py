"""Images without labels behind the labelled ones: their order, their labels, and the same batches by any workers."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Data
from drumline.core.errors import UserError
from drumline.data.feed.batch import make_batch
from drumline.data.feed.loader import process_batches
from drumline.data.feed.sampler import Request
from drumline.data.feed.threads import threaded_batches
from drumline.data.feed.transform import Transform, normalization
from drumline.data.identity import identify
from drumline.data.sources import ArrayDataset, DatasetSpec, EncodedDataset, open_dataset
from tests.data.test_native import needs_jpeg

OTHERS = ("a.jpg", "below/x.png", "below/deeper/y.jpg", "z.jpeg")
IN_ORDER = ["a.jpg", "z.jpeg", "below/x.png", "below/deeper/y.jpg"]


def save(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 9, 3), np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of three images as files and in a tar, and four images without labels."""
    place = tmp_path_factory.mktemp("unlabelled")
    for number in range(6):
        save(place / f"photos/{'ab'[number // 3]}/{number}.jpg", number)
    for number, name in enumerate(OTHERS):
        save(place / "others" / name, 50 + number)
    (place / "others/below/notes.txt").write_text("no image")
    for name in ("photos", "others"):
        with tarfile.open(place / f"{name}.tar", "w") as archive:
            archive.add(place / name, ".")
    images = np.random.default_rng(3).integers(0, 256, (6, 8, 8, 3), np.uint8)
    np.savez(
        place / "array.npz", x_train=images, y_train=np.arange(6) % 2, x_test=images, y_test=np.arange(6) % 2
    )
    return place


def spec(place: Path, labelled: str, others: str) -> DatasetSpec:
    source = {"photos": "folder", "photos.tar": "tar", "array.npz": "npz"}[labelled]
    return DatasetSpec(source, str(place / labelled), "train", unlabelled=str(place / others))


@pytest.mark.parametrize("labelled", ["photos", "photos.tar"])
@pytest.mark.parametrize("others", ["others", "others.tar"])
def test_labelled_samples_come_first_and_the_others_follow_by_their_paths(
    place: Path, labelled: str, others: str
) -> None:
    source = open_dataset(spec(place, labelled, others))
    assert isinstance(source, EncodedDataset)
    assert source.labels.tolist() == [0] * 3 + [1] * 3 + [-1] * 4
    assert source.classes == ("a", "b")
    names = source.sample_names(np.arange(10))
    assert names[:6] == [f"{'ab'[number // 3]}/{number}.jpg" for number in range(6)]
    assert names[6:] == IN_ORDER
    assert [source.read(6 + at) for at in range(4)] == [
        (place / "others" / name).read_bytes() for name in IN_ORDER
    ]
    assert source.where(7).endswith("z.jpeg")
    assert source.skipped == ({".txt": 1} if others == "others" else {})


@needs_jpeg
@pytest.mark.parametrize(
    ("labelled", "others"), [("photos", "others"), ("photos.tar", "others"), ("photos", "others.tar")]
)
def test_threads_and_processes_make_the_batches_of_one_thread(
    place: Path, labelled: str, others: str
) -> None:
    described = spec(place, labelled, others)
    source = open_dataset(described)
    assert isinstance(source, EncodedDataset)
    requests = [Request(0, np.array([9, 0, 7, 3])), Request(1, np.array([6, 8, 5]))]
    transform = Transform(8, "crop-flip")
    expected = [make_batch(source, transform, 5, request).batch for request in requests]
    assert expected[0].labels.tolist() == [-1, 0, -1, 1]
    threads = threaded_batches(
        source, transform, 5, requests, 2, lambda *shape: torch.empty(shape, dtype=torch.uint8)
    )
    processes = process_batches(described, source.digest(), transform, 5, requests, 1)
    for made in (threads, processes):
        for one, other in zip(expected, made, strict=True):
            assert all(map(torch.equal, one, other.batch))


def test_the_identity_covers_the_others_and_does_not_depend_on_where_they_are(
    place: Path, tmp_path: Path
) -> None:
    described = spec(place, "photos", "others")
    whole = identify(open_dataset(described), 0)
    for name in OTHERS:
        save(tmp_path / "moved" / name, 50 + OTHERS.index(name))
    moved = DatasetSpec("folder", described.path, "train", unlabelled=str(tmp_path / "moved"))
    assert identify(open_dataset(moved), 0) == whole
    save(tmp_path / "moved/a.jpg", 7)
    assert identify(open_dataset(moved), 0) != whole


def test_images_join_an_array_at_its_size_and_do_not_change_its_normalisation(place: Path) -> None:
    source, alone = (
        open_dataset(spec(place, "array.npz", "others")),
        open_dataset(DatasetSpec("npz", str(place / "array.npz"), "train")),
    )
    assert isinstance(source, ArrayDataset)
    assert isinstance(alone, ArrayDataset)
    assert source.images.shape == (10, 8, 8, 3)
    assert source.labels.tolist() == [0, 1] * 3 + [-1] * 4
    small = Image.open(place / "others/below/x.png").resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(source.images[8], np.asarray(small))
    assert normalization(Data(), source) == normalization(Data(), alone)


def test_wrong_places_are_rejected(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme.md").write_text("no image")
    for others, what in (
        ("nowhere", "does not exist"),
        (str(tmp_path / "empty"), r"has no images; its files end in \.md"),
        ("photos", "contains data.path"),
        (".", "contains data.path"),
        ("array.npz", "is not a tar archive"),
    ):
        with pytest.raises(UserError, match=what):
            open_dataset(spec(place, "photos", others))
    with pytest.raises(UserError, match="has grey images"):
        open_dataset(DatasetSpec("digits", "", "train", unlabelled=str(place / "others")))
    with pytest.raises(UserError, match="repeats a few images"):
        open_dataset(DatasetSpec("synthetic", "", "train", unlabelled=str(place / "others")))

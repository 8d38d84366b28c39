"""The key of a teacher cache: everything that determines an output, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.core.errors import UserError
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, open_dataset
from drumline.distillation.cache.folder import Key, open_cache
from drumline.distillation.cache.teacher import (
    SAMPLED_IMAGES,
    content_of,
    describe_transform,
)
from drumline.parallel.world import single_process
from tests.distillation.cache_ranks import MEAN, STD, VIEW, key

CPU = torch.device("cpu")
HERE = single_process(CPU)
TYPES = ["float32", "bfloat16", "float16"]


def test_every_part_of_a_transform_that_determines_pixels_is_in_the_key() -> None:
    base = Transform(size=8, augment="none")
    changed = {
        "size": 9,
        "augment": "crop-flip",
        "eval_crop": 0.5,
        "exif": "apply",
        "resize": "pillow11",
        "interpolation": "bicubic",
        "augmentation": Augmentation(erasing=0.5),
        "on_bad": "substitute",
        "hflip": 0.5,
        "crop_scale": (0.2, 1.0),
        "own": "tests.nowhere:f",
    }
    assert set(changed) | {"mixup", "cutmix"} == {item.name for item in fields(Transform)}
    texts = {describe_transform(replace(base, **{name: value}), MEAN, STD) for name, value in changed.items()}
    texts |= {
        describe_transform(base, (0.4,), STD),
        describe_transform(base, MEAN, (0.2,)),
        describe_transform(base, MEAN, STD),
    }
    texts |= {
        describe_transform(replace(base, augmentation=Augmentation(**each)), MEAN, STD)
        for each in ({"vflip": 0.5}, {"rotation": 9.0})
    }
    assert len(texts) == len(changed) + 5
    moving = replace(base, augment="crop-flip")
    assert describe_transform(moving, MEAN, STD) == describe_transform(
        replace(moving, eval_crop=0.5), MEAN, STD
    )


@pytest.mark.parametrize("mixed", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_transforms_that_mix_images_are_rejected(mixed: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"mixed images .* depend on their neighbour") as error:
        key(transform=replace(VIEW, **mixed))
    assert "remove distill.cache" in error.value.fix


DIFFERENT: dict[str, tuple[dict[str, object], str]] = {
    "teacher": ({"teacher": "convnet; sha256 1; fp32"}, "the teacher: sha256 0 → sha256 1"),
    "transform": ({"transform": "size=9"}, "the image transform: size=8"),
    "source": ({"source": "cifar10"}, "the data: digits → cifar10"),
    "samples": ({"samples": 1439}, "the number of samples: 1438 → 1439"),
    "labels_crc": ({"labels_crc": 1}, "the checksum of the labels: "),
    "content": ({"content": "0"}, "the images: "),
    "seed": ({"seed": 8}, "run.seed: 7 → 8"),
    "classes": ({"classes": 11}, "the teacher's number of classes: 10 → 11"),
    "top_k": ({"top_k": 3}, "logits stored per sample (0: all): 0 → 3"),
    "pooled": ({"pooled": 7}, "pooled features stored per sample (0: none): 6 → 7"),
    "dtype": ({"dtype": "float16"}, "the type of the stored numbers: float32 → float16"),
    "format": ({"format": 2}, "the format of the cache: 1 → 2"),
}


def test_the_differences_below_cover_every_field_of_the_key() -> None:
    assert set(DIFFERENT) == {item.name for item in fields(Key)}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_different_key_is_rejected_and_the_difference_named(tmp_path: Path, name: str) -> None:
    changed, words = DIFFERENT[name]
    open_cache(tmp_path / "cache", key(), HERE)
    with pytest.raises(UserError) as error:
        open_cache(tmp_path / "cache", replace(key(), **changed), HERE)  # type: ignore[arg-type]
    assert words in error.value.what
    assert error.value.what.count("→") == 1
    assert "a different folder for distill.cache, or delete" in error.value.fix


def test_a_cache_of_an_earlier_revision_serves_the_same_teacher_alone(tmp_path: Path) -> None:
    former = replace(key(), teacher="the teacher's former name")
    open_cache(tmp_path / "cache", former, HERE)
    assert open_cache(tmp_path / "cache", key(), HERE, formerly=former.teacher).key == former
    with pytest.raises(UserError, match="the teacher"):
        open_cache(tmp_path / "cache", key(), HERE, formerly="another one")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_with_features_serves_a_key_without_them(tmp_path: Path, dtype: str) -> None:
    stored = key()
    assert stored.pooled
    open_cache(tmp_path / "cache", stored, HERE)
    assert open_cache(tmp_path / "cache", replace(stored, pooled=0, dtype=dtype), HERE).key == stored
    open_cache(tmp_path / "logits", replace(stored, pooled=0), HERE)
    with pytest.raises(UserError, match="pooled features stored per sample"):
        open_cache(tmp_path / "logits", stored, HERE)


def coloured(samples: int = 200, changed: int | None = None) -> ArrayDataset:
    images = np.random.default_rng(0).integers(0, 256, (samples, 4, 4, 3), np.uint8)
    if changed is not None:
        images[changed, 3, 3, 2] ^= 1
    return ArrayDataset("npz", images, np.arange(samples, dtype=np.int64) % 2, ("a", "b"))


class Files:
    """A user's own set of files, all of one class."""

    def __init__(self, samples: int = 200, changed: int | None = None, broken: int | None = None) -> None:
        self.labels, self.classes = np.zeros(samples, np.int64), ("a",)
        self.asked: list[int] = []
        self._changed, self._broken = changed, broken

    def read(self, sample: int) -> bytes:
        self.asked.append(sample)
        if sample == self._broken:
            raise OSError("the image is truncated")  # of the content: the system's errors have a number
        return b"other" if sample == self._changed else b"%d" % sample


def own(path: str, split: str) -> Files:
    """The factory that a recipe would name."""
    return Files()


def files(monkeypatch: pytest.MonkeyPatch, **options: int) -> tuple[Dataset, Files]:
    given = Files(**options)
    monkeypatch.setattr(f"{__name__}.own", lambda path, split: given)
    return open_dataset(DatasetSpec(f"{__name__}:own", "", "train")), given


@pytest.mark.parametrize("changed", [0, 3, 199])
def test_different_images_with_the_same_labels_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    pairs: list[tuple[Dataset, Dataset]] = [
        (coloured(), coloured(changed=changed)),
        (files(monkeypatch)[0], files(monkeypatch, changed=changed)[0]),
    ]
    for number, (one, other) in enumerate(pairs):
        folder = tmp_path / str(number)
        open_cache(folder, key(source=one), HERE)
        with pytest.raises(
            UserError, match=r"was filled with different settings\. the images: \w{16} → \w{16}\n"
        ):
            open_cache(folder, key(source=other), HERE)
        open_cache(folder, key(source=one), HERE)


def test_equal_data_sets_have_equal_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(source=coloured()) == key(source=coloured())
    assert key(source=files(monkeypatch)[0]) == key(source=files(monkeypatch)[0])
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(b"%d" % number)
    alike = [open_dataset(DatasetSpec("folder", str(tmp_path), "train")) for _ in range(2)]
    before = key(source=alike[0])
    assert key(source=alike[1]) == before
    (folder / "2.jpg").write_bytes(b"3")
    assert key(source=alike[1]) == replace(before, content=content_of(alike[0])) != before


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 200, 1000])
def test_the_key_reads_a_few_images_from_the_first_to_the_last(
    monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    source, given = files(monkeypatch, samples=samples)
    content_of(source)
    assert len(given.asked) == len(set(given.asked)) == min(samples, SAMPLED_IMAGES)
    assert (min(given.asked), max(given.asked)) == (0, samples - 1)
    steps = np.diff(given.asked)
    assert samples == 1 or steps.max() - steps.min() <= 1


def test_an_unreadable_image_is_rejected_unless_the_transform_substitutes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, broken = files(monkeypatch)[0], files(monkeypatch, broken=0)[0]
    with pytest.raises(UserError, match="cannot be read"):
        key(source=broken)
    transform = replace(VIEW, on_bad="substitute")
    assert (
        key(source=broken, transform=transform)
        == key(source=broken, transform=transform)
        != key(source=whole, transform=transform)
    )


def test_all_differences_are_named_and_equal_parts_are_not(tmp_path: Path) -> None:
    open_cache(tmp_path, key(), HERE)
    other = key(transform=replace(VIEW, size=16, augment="shift-flip"), seed=3)
    with pytest.raises(UserError) as error:
        open_cache(tmp_path, other, HERE)
    assert "size=8; augment=shift → size=16; augment=shift-flip" in error.value.what
    assert "run.seed: 7 → 3" in error.value.what
    assert "interpolation" not in error.value.what

"""What a transform draws for a sample: shifts, flips, mixing; and what evaluation leaves out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform, mixing_plan, resize_array, shift_offsets
from drumline.data.image.augment import Augmentation
from drumline.data.image.geometry import evaluation_geometry, mirrored, training_geometry
from drumline.data.image.resize import resize

SEED = 11


def request(count: int, epoch: int = 3) -> Request:
    """Samples in no particular order."""
    return Request(epoch, np.random.default_rng(1).permutation(count).astype(np.int64))


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "crop-flip"])
def test_only_random_crops_are_cut_at_random(augment: str) -> None:
    sizes, samples = np.random.default_rng(0).integers(5, 90, (12, 2)), request(12).samples
    transform = Transform(24, augment, eval_crop=0.8)  # type: ignore[arg-type]
    expected = (
        training_geometry(sizes, 24, SEED, 3, samples)
        if augment == "crop-flip"
        else evaluation_geometry(sizes, 24, 0.8)
    )
    assert np.array_equal(transform.geometry(SEED, 3, samples, sizes), expected)
    assert np.array_equal(transform.geometry(SEED, 3, samples.tolist(), sizes), expected)


def test_evaluation_leaves_out_what_is_random_and_keeps_what_is_exact() -> None:
    transform = Transform(
        24,
        "crop-flip",
        eval_crop=0.7,
        exif="apply",
        mixup=0.2,
        cutmix=1.0,
        resize="pillow13",
        interpolation="bicubic",
        augmentation=Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), erasing=0.5),
        on_bad="substitute",
    )
    seen = transform.for_evaluation()
    assert seen == Transform(
        24,
        "none",
        eval_crop=0.7,
        exif="apply",
        resize="pillow13",
        interpolation="bicubic",
        on_bad="black",
    )
    assert not seen.mixes
    assert not seen.augmentation.active
    assert Transform(24, "crop-flip", on_bad="raise").for_evaluation().on_bad == "raise"
    assert seen.for_evaluation() == seen


@pytest.mark.parametrize("channels", [1, 3])
def test_array_sets_are_resized_image_by_image_or_left_as_they_are(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 20, channels), dtype=np.uint8)
    square = np.ascontiguousarray(images[:, :, :16])
    assert resize_array(square, Transform(16, "none")) is square
    for version, filter in (("pillow12", "bilinear"), ("pillow13", "lanczos")):
        transform = Transform(7, "none", resize=version, interpolation=filter)  # type: ignore[arg-type]
        for image, found in zip(images, resize_array(images, transform), strict=True):
            assert np.array_equal(
                found, resize(image, (7, 7), None, transform.resize, transform.interpolation)
            )


def test_shifts_reach_every_offset_about_equally_and_flips_are_half() -> None:
    wanted = Request(0, np.arange(20_000))
    offsets = shift_offsets(SEED, wanted, 4)
    counts = np.histogram2d(offsets[:, 0], offsets[:, 1], bins=9, range=((-0.5, 8.5), (-0.5, 8.5)))[0]
    assert counts.sum() == 20_000
    assert counts.min() > 180
    assert counts.max() < 320
    assert abs(mirrored(SEED, wanted.epoch, wanted.samples).mean() - 0.5) < 0.015


MIXES = [
    Transform(16, "none", mixup=0.4),
    Transform(16, "none", cutmix=1.0),
    Transform(16, "none", mixup=0.2, cutmix=1.0),
]


@pytest.mark.parametrize("transform", MIXES)
@given(cuts=st.lists(st.integers(0, 20), max_size=4))
def test_a_mixing_plan_is_the_same_for_every_slicing(transform: Transform, cuts: list[int]) -> None:
    wanted = request(40)
    edges = sorted({0, 40, *(2 * cut for cut in cuts)})
    parts = [
        mixing_plan(transform, SEED, Request(3, wanted.samples[low:high])) for low, high in pairwise(edges)
    ]
    assert np.array_equal(np.concatenate(parts), mixing_plan(transform, SEED, wanted))


def test_mixup_shares_are_beta_and_labels_go_with_pixels() -> None:
    plan = mixing_plan(Transform(16, "none", mixup=0.4), SEED, Request(0, np.arange(20_000)))
    assert np.array_equal(plan[:, 0], plan[:, 1])
    assert not plan[:, 2:].any()
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)).
    assert abs(plan[:, 0].mean() - 0.5) < 0.01
    assert abs(plan[:, 0].var() - 1 / (4 * 1.8)) < 0.005


def test_cutmix_boxes_are_inside_and_labels_count_their_pixels() -> None:
    plan = mixing_plan(Transform(16, "none", cutmix=1.0), SEED, Request(0, np.arange(20_000)))
    share, x0, y0, x1, y1 = plan[:, 1], *plan[:, 2:].T
    assert (plan[:, 0] == 1).all()
    assert (plan[:, 2:] == np.rint(plan[:, 2:])).all()
    assert ((x0 >= 0) & (x0 <= x1) & (x1 <= 16) & (y0 >= 0) & (y0 <= y1) & (y1 <= 16)).all()
    assert np.allclose(share, 1 - (x1 - x0) * (y1 - y0) / 256, atol=1e-6)
    # Away from the border a box of share s is a square of side sqrt(1 - s) times the image's.
    whole = (x0 > 0) & (y0 > 0) & (x1 < 16) & (y1 < 16)
    assert (np.abs((x1 - x0) - (y1 - y0))[whole] <= 1).all()
    centre = (x0 + x1)[whole] / 2
    assert abs(centre.mean() - 8) < 0.2


def test_with_both_each_sample_takes_one_of_them_about_equally() -> None:
    plan = mixing_plan(Transform(16, "none", mixup=0.2, cutmix=1.0), SEED, Request(0, np.arange(10_000)))
    blended = plan[:, 0] < 1
    assert not plan[blended, 2:].any()
    assert 0.46 < blended.mean() < 0.54

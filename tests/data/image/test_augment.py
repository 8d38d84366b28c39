"""Keyed augmentation beside a reading of the draws one sample at a time, with Pillow making the pixels."""

from __future__ import annotations

import math
import pickle
import zlib
from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from drumline.data.feed.draws import Purpose, uniform
from drumline.data.feed.sampler import Request
from drumline.data.image import pixels
from drumline.data.image.augment import (
    Augmentation,
    AugmentPlan,
    Op,
    _box_sides,
    _level,
    apply,
    colour_jitter,
    mean_colour,
    plan,
    plans,
    randaugment,
    random_erasing,
)
from tests.data.image.test_pixels import Images, hue_by_pillow, noise, photographs, transformed

SEED, EPOCH = 5, 7
EVERYTHING = Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5, fill=(124, 116, 104))


def asked(count: int, epoch: int = EPOCH) -> Request:
    return Request(epoch, np.random.default_rng(1).permutation(10 * count)[:count].astype(np.int64))


def pictures(count: int, size: int, channels: int = 3) -> Images:
    shape = (size, size, channels)
    return np.concatenate([noise(shape, count // 2), photographs(shape, count - count // 2)])


def augmented(augmentation: Augmentation, images: Images, request: Request) -> Images:
    return apply(torch.from_numpy(images), plan(augmentation, SEED, request, images.shape[1])).numpy()


def number(request: Request, purpose: Purpose, slot: int, count: int, block: int = 0) -> list[float]:
    return uniform(SEED, request.epoch, request.samples[slot : slot + 1], purpose, count, block)[0].tolist()


def as_picture(image: Images) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def by_torchvision(picture: Image.Image, name: str, sign: int, magnitude: int) -> Image.Image:
    """One operation of torchvision's RandAugment on a PIL image."""
    size = picture.width
    signed = sign * _level(
        {"Shear": 0.3, "Trans": 150.0 / 331.0 * size, "Rotat": 30.0}.get(name[:5], 0.9), magnitude
    )
    match name:
        case "Identity":
            return picture
        case "ShearX":
            return transformed(picture, pixels.shear_x(signed))
        case "ShearY":
            return transformed(picture, pixels.shear_y(signed))
        case "TranslateX":
            return transformed(picture, pixels.translate(int(signed), 0))
        case "TranslateY":
            return transformed(picture, pixels.translate(0, int(signed)))
        case "Rotate":
            return picture.rotate(signed)
        case "Posterize":
            return ImageOps.posterize(picture, 8 - round(magnitude / 7.5))
        case "Solarize":
            return ImageOps.solarize(picture, float(torch.linspace(255.0, 0.0, 31)[magnitude]))  # type: ignore[arg-type]
        case "AutoContrast":
            return ImageOps.autocontrast(picture)
        case "Equalize":
            return ImageOps.equalize(picture)
    return getattr(ImageEnhance, name)(picture).enhance(1.0 + signed)


NAMES = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color")
NAMES += ("Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("count", "magnitude"), [(1, 0), (2, 9), (3, 15), (2, 30)])
def test_randaugment_is_torchvisions_on_pillow(count: int, magnitude: int, channels: int) -> None:
    images, request = pictures(300, 30, channels), asked(300)
    ours = augmented(Augmentation(randaugment=(count, magnitude)), images, request)
    for slot, image in enumerate(images):
        picture = as_picture(image)
        draws = number(request, Purpose.RANDAUGMENT, slot, 2 * count)
        for choice, sign in zip(draws[::2], draws[1::2], strict=True):
            picture = by_torchvision(picture, NAMES[int(choice * 14)], -1 if sign < 0.5 else 1, magnitude)
        assert np.array_equal(ours[slot], np.asarray(picture).reshape(image.shape)), slot


@pytest.mark.parametrize("top", [0.3, 0.9, 30.0, 150.0 / 331.0 * 224])
def test_levels_are_torchs_linspace_except_for_its_last_bit(top: float) -> None:
    theirs = torch.linspace(0.0, top, 31).numpy()
    ours = np.array([_level(top, magnitude) for magnitude in range(31)])
    assert (np.abs(ours - theirs) <= np.spacing(theirs)).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.4, 0.1), (1.5, 0.0, 0.8, 0.5), (0.0, 0.2, 0.0, 0.0)])
def test_jitter_is_torchvisions_on_pillow(
    strengths: tuple[float, float, float, float], channels: int
) -> None:
    images, request = pictures(300, 24, channels), asked(300)
    ours = augmented(Augmentation(jitter=strengths), images, request)
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for slot, image in enumerate(images):
        picture = as_picture(image)
        order, *amounts = number(request, Purpose.JITTER, slot, 5)
        for which in list(permutations(range(4)))[int(order * 24)]:
            strength, draw = strengths[which], amounts[which]
            if which == 3 and strength:
                picture = hue_by_pillow(picture, int((-strength + draw * (strength - -strength)) * 255))
            elif strength:
                low = max(0.0, 1.0 - strength)
                picture = kinds[which](picture).enhance(low + draw * (1.0 + strength - low))
        assert np.array_equal(ours[slot], np.asarray(picture).reshape(image.shape)), slot


@pytest.mark.parametrize("channels", [1, 3])
def test_vertical_flips_and_rotations_are_pillows_and_come_first(channels: int) -> None:
    images, request = pictures(300, 31, channels), asked(300)
    ours = augmented(Augmentation(vflip=0.3, rotation=40.0), images, request)
    strong = Augmentation(vflip=0.3, rotation=40.0, randaugment=(2, 9), erasing=0.5)
    then = augmented(replace(strong, vflip=0.0, rotation=0.0), ours, request)
    assert np.array_equal(augmented(strong, images, request), then)
    flipped, angles = 0, []
    for slot, image in enumerate(images):
        picture = as_picture(image)
        if number(request, Purpose.VERTICAL_FLIP, slot, 1)[0] < 0.3:
            picture, flipped = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM), flipped + 1
        angles.append((2 * number(request, Purpose.ROTATION, slot, 1)[0] - 1) * 40.0)
        rotated = picture.rotate(angles[-1], Image.Resampling.NEAREST, fillcolor=0)
        assert np.array_equal(ours[slot], np.asarray(rotated).reshape(image.shape)), slot
    assert 60 < flipped < 120
    assert min(angles) < -38 < 38 < max(angles)


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (17, 1), (6, 3)])
def test_erasing_follows_its_rule_one_sample_at_a_time(size: int, channels: int) -> None:
    images, request = pictures(2000, size, channels), asked(2000)
    fill = (9, 8, 7)[:channels]
    ours = augmented(Augmentation(erasing=0.7, fill=fill), images, request)
    erased = 0
    for slot, image in enumerate(images):
        expected = image.copy()
        if number(request, Purpose.ERASE, slot, 1)[0] < 0.7:
            for block in range(1, 11):
                area, aspect, x, y = number(request, Purpose.ERASE, slot, 4, block)
                area = size * size * (0.02 + area * (0.33 - 0.02))
                aspect = math.exp(math.log(0.3) + aspect * (math.log(3.3) - math.log(0.3)))
                height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if height < size and width < size:
                    left, top = int(x * (size - width + 1)), int(y * (size - height + 1))
                    expected[top : top + height, left : left + width] = fill
                    erased += 1
                    break
        assert np.array_equal(ours[slot], expected), slot
    assert 1300 < erased < 1500


def test_boxes_that_never_fit_leave_the_image_alone() -> None:
    images = pictures(200, 2)
    layer = random_erasing(1.0, (0,), SEED, EPOCH, np.arange(200), 2)
    untouched = layer.ops == Op.NOTHING
    ours = augmented(Augmentation(erasing=1.0), images, Request(EPOCH, np.arange(200)))
    assert np.array_equal(ours[untouched], images[untouched])
    boxes = layer.parameters[~untouched]
    assert (boxes[:, 2:4] <= 2).all()


def test_box_sides_follow_the_exponential_function() -> None:
    draws = np.random.default_rng(0).random((20_000, 2))
    sides = _box_sides(draws[:, 0], draws[:, 1], 224)
    area = 224 * 224 * (0.02 + draws[:, 0] * 0.31)
    aspect = np.exp(math.log(0.3) + draws[:, 1] * math.log(3.3 / 0.3))
    assert np.array_equal(sides, np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=1))))


def test_every_operation_sign_and_order_is_equally_frequent() -> None:
    samples = np.arange(28_000)
    layers = randaugment(2, 9, SEED, EPOCH, samples, 32)
    for layer in layers:
        kinds = Counter(zip(layer.ops.tolist(), map(bytes, layer.parameters), strict=True))
        several = [
            count for (op, _), count in kinds.items() if op in (Op.AFFINE, Op.BRIGHTNESS, Op.SHARPNESS)
        ]
        assert len(several) == 14
        assert all(850 < count < 1150 for count in several)
        assert 1800 < (layer.ops == Op.EQUALIZE).sum() < 2200
        assert 1800 < (layer.ops == Op.NOTHING).sum() < 2200
    orders = np.stack([layer.ops for layer in colour_jitter((1, 1, 1, 0.5), SEED, EPOCH, samples)], axis=1)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert 1000 < counts.min() <= counts.max() < 1340


def test_the_augmentation_of_a_sample_does_not_depend_on_its_batch() -> None:
    images, request = pictures(60, 16), asked(60)
    whole = augmented(EVERYTHING, images, request)
    order = np.random.default_rng(2).permutation(60)
    for part in (order[:1], order[1:20], order[20:]):
        alone = augmented(EVERYTHING, images[part], Request(EPOCH, request.samples[part]))
        assert np.array_equal(alone, whole[part])


@pytest.mark.parametrize("piece", [1, 16 * 16 * 3 * 2])
def test_the_size_of_the_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    images, request = pictures(60, 16), asked(60)
    whole = augmented(EVERYTHING, images, request)
    monkeypatch.setattr("drumline.data.image.augment.HOST_PIECE", piece)
    assert np.array_equal(augmented(EVERYTHING, images, request), whole)


def test_the_three_kinds_are_independent_and_applied_in_order() -> None:
    images, request = pictures(60, 16), asked(60)
    steps = images
    for single in (
        Augmentation(randaugment=EVERYTHING.randaugment),
        Augmentation(jitter=EVERYTHING.jitter),
        Augmentation(erasing=EVERYTHING.erasing, fill=EVERYTHING.fill),
    ):
        steps = augmented(single, steps, request)
    assert np.array_equal(steps, augmented(EVERYTHING, images, request))


def test_epochs_and_seeds_have_different_augmentations() -> None:
    images = pictures(60, 16)
    first = augmented(EVERYTHING, images, asked(60))
    assert not np.array_equal(first, augmented(EVERYTHING, images, asked(60, EPOCH + 1)))
    other = plan(EVERYTHING, SEED + 1, asked(60), 16)
    assert not np.array_equal(first, apply(torch.from_numpy(images), other).numpy())


def test_plans_made_together_are_the_plans_made_alone() -> None:
    samples = np.random.default_rng(3).permutation(90).astype(np.int64)
    requests = [Request(EPOCH, samples[:40]), Request(EPOCH, samples[40:80]), Request(EPOCH, samples[80:])]
    for together, request in zip(plans(EVERYTHING, SEED, requests, 32), requests, strict=True):
        alone = plan(EVERYTHING, SEED, request, 32)
        assert np.array_equal(together.table, alone.table)
        assert together.runs == alone.runs


def test_a_plan_can_be_pickled() -> None:
    images, made = pictures(20, 16), plan(EVERYTHING, SEED, asked(20), 16)
    received = pickle.loads(pickle.dumps(made))
    assert isinstance(received, AugmentPlan)
    assert torch.equal(apply(torch.from_numpy(images), made), apply(torch.from_numpy(images), received))


def test_apply_does_not_change_its_argument() -> None:
    images = pictures(40, 16)
    before = images.copy()
    augmented(EVERYTHING, images, asked(40))
    assert np.array_equal(images, before)


def test_without_operations_the_batch_is_unchanged() -> None:
    images = pictures(4, 16)
    assert not Augmentation().active
    assert np.array_equal(augmented(Augmentation(), images, asked(4)), images)
    for one in (
        Augmentation(jitter=(0, 0, 0, 0.1)),
        Augmentation(randaugment=(1, 0)),
        Augmentation(erasing=0.1),
    ):
        assert one.active


def test_the_mean_colour_is_rounded() -> None:
    assert mean_colour((0.485, 0.456, 0.406)) == (124, 116, 104)


def test_the_draws_behind_an_augmentation_never_change() -> None:
    """Stored numbers: a change of the rules would silently change every run that augments."""
    ramp = np.add.outer(np.arange(32) * 5, np.arange(32) * 3)[..., None] + np.array([0, 40, 90])
    images = np.broadcast_to((ramp % 256).astype(np.uint8), (64, 32, 32, 3)).copy()
    result = augmented(EVERYTHING, images, Request(EPOCH, np.arange(64)))
    assert zlib.crc32(result.tobytes()) == 402190579

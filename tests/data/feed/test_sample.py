"""One sample's crop, the same with and without the native extension, for sound and damaged files; broken samples."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from drumline import native
from drumline.core.errors import UserError
from drumline.data.feed.batch import (
    SHOWN,
    SUBSTITUTES,
    BadSample,
    BadSamples,
    crop_encoded,
    load_sample,
    substitute,
)
from drumline.data.feed.draws import Purpose, bits
from drumline.data.feed.transform import Geometry, Transform, evaluation_geometry, training_geometry
from drumline.data.sources import EncodedDataset
from tests.data.damage import KINDS, flipped, good_jpeg
from tests.data.test_native import FILTERS, frame, in_three_scans, jpeg, kinds, needs_jpeg, photo

SEED = 5
Rule = Callable[[NDArray[np.int32]], Geometry]


class Memory(EncodedDataset):
    """Files in memory; None cannot be read."""

    def __init__(self, *files: bytes | None) -> None:
        super().__init__("memory", np.arange(len(files)) % 4, tuple("abcd"))
        self.files = files
        self.asked: list[int] = []

    def read(self, sample: int) -> bytes:
        self.asked.append(sample)
        data = self.files[sample]
        if data is None:
            raise UserError(f"file {sample} cannot be read", fix="check the disk")
        return data

    def where(self, sample: int) -> str:
        return f"file {sample}"


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, Transform, Rule], bytes | str]:
    """The result for a file without the native part: its pixels, or the error."""

    def run(data: bytes, transform: Transform, rule: Rule) -> bytes | str:
        with monkeypatch.context() as patch:
            patch.setattr(native, "available", lambda: False)
            patch.setattr(native, "decodes_jpeg", lambda: False)
            return outcome(data, transform, rule)

    return run


def outcome(data: bytes, transform: Transform, rule: Rule) -> bytes | str:
    try:
        return crop_encoded(data, "it", transform, rule).tobytes()
    except UserError as error:
        return error.what


def top_only(sizes: NDArray[np.int32]) -> Geometry:
    """The upper left: what lies below is never decoded natively."""
    wide, high = sizes[0].tolist()
    box = 0, 0, -(-wide // 2), -(-high // 4)
    return np.array([[*box, 8, 8, 0, 0, 0]], np.int32)


def lower_right(sizes: NDArray[np.int32]) -> Geometry:
    """Rows above are skipped."""
    wide, high = sizes[0].tolist()
    return np.array([[wide // 2, 2 * high // 3, wide, high, 8, 8, 0, 0, 1]], np.int32)


def everything(sizes: NDArray[np.int32]) -> Geometry:
    return evaluation_geometry(sizes, 8, 0.875)


RULES: tuple[Rule, ...] = (top_only, lower_right, everything)
Plainly = Callable[[bytes, Transform, Rule], bytes | str]
VIEW = Transform(8, "none")


def assert_same(data: bytes, plainly: Plainly, what: object, transform: Transform = VIEW) -> bool:
    """Both paths have the same result under every rule. Returns whether the file is good."""
    ends = [plainly(data, transform, rule) for rule in RULES]
    for rule, expected in zip(RULES, ends, strict=True):
        assert outcome(data, transform, rule) == expected, (what, rule.__name__)
    return not isinstance(ends[0], str)


HIT = kinds(2, 75, 62)
"""A file of each kind, to be damaged."""


@pytest.mark.parametrize("kind", HIT)
def test_a_changed_bit_has_the_same_result_with_and_without_the_native_part(
    kind: str, plainly: Plainly
) -> None:
    data = HIT[kind]
    draw = np.random.default_rng(3)
    scan = data.index(b"\xff\xda")
    header, coded = draw.integers(2, scan + 14, 90), draw.integers(scan + 14, len(data), 110)
    good = sum(
        assert_same(flipped(data, at, bit), plainly, (kind, at, bit))
        for at in (*header.tolist(), *coded.tolist())
        for bit in [int(draw.integers(8))]
    )
    # Some damage passes and some does not, so that both ends are compared.
    assert 10 < good < 200


@pytest.mark.parametrize("kind", HIT)
def test_a_file_truncated_anywhere_has_the_same_result(kind: str, plainly: Plainly) -> None:
    data = HIT[kind]
    places = sorted(
        {*range(0, len(data), max(1, len(data) // 70)), *range(max(0, len(data) - 12), len(data))}
    )
    for length in places:
        assert_same(data[:length], plainly, (kind, length))


@needs_jpeg
@pytest.mark.parametrize("kind", HIT)
def test_a_truncated_file_with_a_new_end_marker_has_the_same_result(kind: str, plainly: Plainly) -> None:
    """A proxy that closes what it could not fetch."""
    data = HIT[kind]
    scan = data.index(b"\xff\xda")
    for length in range(scan, len(data), max(1, (len(data) - scan) // 60)):
        ended = data[:length] + b"\xff\xd9"
        if native.jpeg_warnings(ended):
            assert_same(ended, plainly, (kind, length))


@needs_jpeg
@pytest.mark.parametrize("kind", ["progressive", "progressive 4:4:4", "progressive grey"])
def test_a_progressive_file_without_its_last_scans_has_the_same_result(kind: str, plainly: Plainly) -> None:
    data = HIT[kind]
    at = data.index(b"\xff\xda")
    while (at := data.find(b"\xff\xda", at + 1)) > 0:
        assert native.jpeg_warnings(data[:at] + b"\xff\xd9") == 0
        assert_same(data[:at] + b"\xff\xd9", plainly, (kind, at))


@pytest.mark.parametrize("kind", HIT)
def test_inserted_markers_and_lost_or_doubled_bytes_have_the_same_result(kind: str, plainly: Plainly) -> None:
    data = HIT[kind]
    draw = np.random.default_rng(4)
    scan = data.index(b"\xff\xda") + 14
    for number in range(120):
        at = int(draw.integers(scan, len(data) - 2))
        if number % 3 == 0:
            # Markers of every kind; 0xFFD9 ends the file early, which has a test of its own.
            marker = int(draw.choice([*range(0xC0, 0xD9), *range(0xDA, 0x100), 0, 1]))
            damaged = data[:at] + bytes([0xFF, marker]) + data[at:]
        elif number % 3 == 1:
            damaged = data[:at] + data[at + int(draw.integers(1, 9)) :]
        else:
            damaged = data[: at + int(draw.integers(1, 40))] + data[at:]
        assert_same(damaged, plainly, (kind, number, at))


@pytest.mark.parametrize("name", KINDS)
def test_known_kinds_of_damage_have_the_same_and_the_expected_result(name: str, plainly: Plainly) -> None:
    good = assert_same(KINDS[name](good_jpeg(3)), plainly, name)
    if KINDS[name].outcome != "either":
        assert good == (KINDS[name].outcome == "good")


def test_damage_below_the_crop_is_found_if_pillow_rejects_the_file(plainly: Plainly) -> None:
    """Coded data is looked at to its end, though rows below the crop are not decoded."""
    data = jpeg(photo(1, 80, 160), quality=90)
    assert isinstance(outcome(data, VIEW, top_only), bytes)
    for broken in (
        data[: 3 * len(data) // 4],
        data[:-2],
        data[: len(data) // 2] + b"\xff\xc4" + data[len(data) // 2 :],
    ):
        assert isinstance(plainly(broken, VIEW, top_only), str)
        assert isinstance(outcome(broken, VIEW, top_only), str)


def with_segment(data: bytes, marker: int, body: bytes, before_frame: bool = True) -> bytes:
    at = 2 if before_frame else data.index(b"\xff\xda")
    return data[:at] + bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body + data[at:]


def exif_block(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")


def multi_picture() -> bytes:
    file = io.BytesIO()
    first, second = Image.fromarray(photo(1, 60, 50)), Image.fromarray(photo(2, 60, 50))
    first.save(file, "MPO", save_all=True, append_images=[second])
    return file.getvalue()


def turned(exif_after_frame: bool) -> bytes:
    return with_segment(jpeg(photo(1, 60, 50)), 0xE1, exif_block(6), before_frame=not exif_after_frame)


@pytest.mark.parametrize("apply", ["ignore", "apply"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_images_are_rotated_by_exif_or_xmp_or_left_as_stored(
    orientation: int, apply: str, plainly: Plainly
) -> None:
    pixels = photo(1, 60, 50)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="%d"/></x:xmpmeta>' % orientation
    transform = Transform(8, "none", exif=apply)  # type: ignore[arg-type]
    untouched = outcome(jpeg(pixels), transform, everything)
    for data in (with_segment(jpeg(pixels), 0xE1, exif_block(orientation)), jpeg(pixels, xmp=xmp)):
        assert_same(data, plainly, orientation, transform)
        same = outcome(data, transform, everything) == untouched
        assert same == (apply == "ignore" or orientation == 1)


@needs_jpeg
def test_exif_behind_the_frame_header_rotates_the_image_too(plainly: Plainly) -> None:
    assert_same(turned(exif_after_frame=True), plainly, "EXIF behind SOF", Transform(8, "none", exif="apply"))


REFUSED = {
    "JFIF too short": with_segment(jpeg(photo(1, 60, 50)), 0xE0, b"JFIF"),
    "Adobe too short": with_segment(jpeg(photo(1, 60, 50)), 0xEE, b"Adobe"),
    "profile without a number": with_segment(jpeg(photo(1, 60, 50)), 0xE2, b"ICC_PROFILE\0"),
    "Photoshop block cut": with_segment(jpeg(photo(1, 60, 50)), 0xED, b"Photoshop 3.0\x008BIM\x04\x04"),
    "several pictures, index cut": flipped(multi_picture(), multi_picture().index(b"MPF\0") + 34),
    "TEM behind the frame header": jpeg(photo(1, 60, 50)).replace(b"\xff\xda", b"\xff\x01\xff\xda", 1),
    "resolution empty in EXIF": with_segment(
        jpeg(photo(1, 60, 50)),
        0xE1,
        b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x1a\0\x02\0\0\0\x01\0\0\0\0\x01\x28\0\x03\0\0\0\x01\0\x02\0\0\0\0\0\0",
    ),
}
"""Headers that Pillow rejects and libjpeg ignores."""


EMPTY_RESOLUTION = pytest.mark.xfail(
    strict=True,
    reason="Pillow fails over an empty resolution in EXIF; to look into EXIF for that would leave every camera's "
    "file to it",
)


@needs_jpeg
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=EMPTY_RESOLUTION if "resolution" in name else ()) for name in REFUSED],
)
def test_headers_that_pillow_rejects_are_rejected(name: str, plainly: Plainly) -> None:
    assert isinstance(plainly(REFUSED[name], VIEW, everything), str)
    assert_same(REFUSED[name], plainly, name)


def test_a_file_with_several_pictures_gives_the_first(plainly: Plainly) -> None:
    assert assert_same(multi_picture(), plainly, "MPO")
    assert outcome(multi_picture(), VIEW, everything) == outcome(jpeg(photo(1, 60, 50)), VIEW, everything)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("version", ["pillow12", "pillow13"])
def test_every_filter_and_version_is_the_same_with_and_without_the_native_part(
    filter: str, version: str, plainly: Plainly
) -> None:
    transform = Transform(9, "none", interpolation=filter, resize=version)  # type: ignore[arg-type]
    png = io.BytesIO()
    Image.fromarray(photo(1, 60, 50)).save(png, "PNG")
    for data in (*HIT.values(), png.getvalue()):
        for sample in range(4):

            def rule(sizes: NDArray[np.int32], sample: int = sample) -> Geometry:
                return training_geometry(sizes, 9, SEED, 0, np.array([sample]))

            assert outcome(data, transform, rule) == plainly(data, transform, rule)


@pytest.mark.parametrize("plain", [False, True])
def test_an_image_too_elongated_for_its_short_side_is_rejected_with_its_size(
    plain: bool, plainly: Plainly
) -> None:
    data = jpeg(np.zeros((1, 60_000, 3), np.uint8))

    def rule(sizes: NDArray[np.int32]) -> Geometry:
        return evaluation_geometry(sizes, 224, 0.875)

    end = (plainly if plain else outcome)(data, Transform(224, "none"), rule)
    assert isinstance(end, str)
    assert "60000 x 1" in end


GOOD = jpeg(photo(1, 40, 30))


def sources() -> Iterator[Memory]:
    yield Memory(*[jpeg(photo(seed, 30 + seed, 40)) if seed % 3 else None for seed in range(12)])
    yield Memory(*[jpeg(photo(seed, 30 + seed, 40)) if seed % 3 else GOOD[:300] for seed in range(12)])


@pytest.mark.parametrize("source", [*sources()])
@pytest.mark.parametrize("epoch", [0, 7])
def test_a_broken_sample_is_replaced_by_the_first_sound_one_that_it_draws(source: Memory, epoch: int) -> None:
    transform = Transform(16, "crop-flip", on_bad="substitute")
    for sample in range(12):
        found = load_sample(source, transform, SEED, epoch, sample)
        candidates = [sample]
        while candidates[-1] % 3 == 0:
            number = len(candidates) - 1
            words = bits(SEED, epoch, np.array([sample]), Purpose.SUBSTITUTE, number)[0]
            candidates.append(int((int(words[0]) << 32 | int(words[1])) % 12))
            assert candidates[-1] == substitute(SEED, epoch, sample, number, 12)
        assert [one.sample for one in found.bad] == candidates[:-1]
        assert all(f"file {one.sample} " in one.what for one in found.bad)
        assert found.label == source.labels[candidates[-1]]
        data = source.files[candidates[-1]]
        assert data is not None
        # With the crop draws of the sample that was asked for.
        seen = crop_encoded(
            data, "", transform, lambda sizes, s=sample: transform.geometry(SEED, epoch, [s], sizes)
        )
        assert np.array_equal(found.pixels, seen)


def test_substitutes_vary_with_epoch_and_sample_and_reach_all() -> None:
    taken = {
        (epoch, sample): substitute(SEED, epoch, sample, 0, 50) for epoch in range(20) for sample in range(20)
    }
    assert set(taken.values()) == set(range(50))
    assert len({taken[epoch, 3] for epoch in range(20)}) > 10


def test_a_black_image_keeps_the_label_and_records_the_sample() -> None:
    source = Memory(GOOD, None, GOOD)
    found = load_sample(source, Transform(16, "none", on_bad="black"), SEED, 0, 1)
    assert not found.pixels.any()
    assert found.pixels.shape == (16, 16, 3)
    assert found.label == 1
    assert [one.sample for one in found.bad] == [1]
    sound = load_sample(source, Transform(16, "none", on_bad="black"), SEED, 0, 2)
    assert sound.pixels.any()
    assert (sound.label, sound.bad) == (2, ())


def test_raise_raises_the_original_error() -> None:
    with pytest.raises(UserError, match="file 1 cannot be read") as caught:
        load_sample(Memory(GOOD, None), Transform(16, "none"), SEED, 0, 1)
    assert caught.value.fix == "check the disk"


def test_a_set_without_readable_samples_is_an_error() -> None:
    source = Memory(None, None, None)
    with pytest.raises(UserError, match="3 samples cannot be read, the last of them") as caught:
        load_sample(source, Transform(16, "none", on_bad="substitute"), SEED, 0, 1)
    assert "verify" in caught.value.fix
    assert len(source.asked) == SUBSTITUTES


def test_files_built_for_these_tests_are_sound() -> None:
    """So that the tests above compare pictures, not errors."""
    for kind, data in HIT.items():
        assert isinstance(outcome(data, VIEW, everything), bytes), kind
        assert frame(data) < data.index(b"\xff\xda")
    if native.decodes_jpeg():
        assert native.jpeg_warnings(in_three_scans(50, 40, halved=True)) == 0
        assert all(native.jpeg_warnings(data) == 0 for data in HIT.values())


def test_a_broken_sample_counts_once_and_keeps_its_first_reason() -> None:
    bad_samples = BadSamples("training", 100, 0.02)
    for epoch in range(50):
        bad_samples.add([BadSample(7, f"seen in epoch {epoch}"), BadSample(3, "file 3 is cut off")])
    assert bad_samples.bad == {7: "seen in epoch 0", 3: "file 3 is cut off"}
    assert bad_samples.lines() == ["training\t3\tfile 3 is cut off", "training\t7\tseen in epoch 0"]


@pytest.mark.parametrize(
    ("samples", "share", "limit"),
    [(100, 0.02, 2), (50, 0.01, 1), (100, 0.29, 29), (100, 0.07, 7), (10, 0.0, 0), (10, 1.0, 10)],
)
def test_one_broken_sample_more_than_allowed_is_an_error(samples: int, share: float, limit: int) -> None:
    bad_samples = BadSamples("training", samples, share)
    assert bad_samples.limit == limit
    bad_samples.add(BadSample(sample, f"file {sample}") for sample in range(limit))
    with pytest.raises(UserError, match=f"{limit + 1} of {samples} training samples") as caught:
        bad_samples.add([BadSample(samples, "one more")])
    assert "data.bad_limit" in caught.value.what
    assert f"allows {limit}" in caught.value.what
    assert bad_samples.some() in caught.value.what
    assert "drumline verify" in caught.value.fix


def test_no_broken_samples_are_never_an_error() -> None:
    bad_samples = BadSamples("training", 5, 0.0)
    bad_samples.add([])
    assert bad_samples.lines() == []
    assert bad_samples.some() == ""


@given(parts=st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=4))
def test_the_list_does_not_depend_on_the_distribution_over_processes(parts: list[list[int]]) -> None:
    everyone = BadSamples("training", 100, 1.0)
    everyone.add(BadSample(sample, f"file {sample}") for part in parts for sample in part)
    ranks = [BadSamples("training", 100, 1.0) for _ in parts]
    for rank, part in zip(ranks, parts, strict=True):
        rank.add(BadSample(sample, f"file {sample}") for sample in part)
    merged = BadSamples("training", 100, 1.0)
    merged.merge([rank.bad for rank in ranks])
    assert merged.lines() == everyone.lines()
    assert merged.lines() == [f"training\t{s}\tfile {s}" for s in sorted({s for part in parts for s in part})]


def test_merging_too_many_broken_samples_is_an_error() -> None:
    bad_samples = BadSamples("evaluation", 100, 0.02)
    with pytest.raises(UserError, match="3 of 100 evaluation samples"):
        bad_samples.merge([{1: "a", 2: "b"}, {2: "b"}, {9: "c"}])


def test_a_message_shows_the_first_and_counts_the_rest() -> None:
    bad_samples = BadSamples("training", 2000, 1.0)
    bad_samples.add(BadSample(sample, f"file {sample}") for sample in reversed(range(1234 + SHOWN)))
    assert bad_samples.some().startswith("file 0; file 1; ")
    assert bad_samples.some().endswith(f"file {SHOWN - 1}; and 1,234 more")

"""A row gives back what was put in, a folder serves one key only, and no damaged byte is used."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.data.feed.sampler import Request, rank_slice, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, open_dataset
from drumline.distillation.cache import format as cache_module
from drumline.distillation.cache.format import (
    SAMPLED_IMAGES,
    Cache,
    Key,
    content_of,
    describe_transform,
    open_cache,
)
from drumline.distillation.cache.payload import Rule, decode, differences, encode
from drumline.distillation.cache.teacher import CachedRows, with_rows
from drumline.parallel.world import single_process
from tests.distillation import cache_ranks
from tests.distillation.cache_ranks import CLASSES, MEAN, SEED, STD, VIEW, feed, filled, key, teacher
from tests.launch.ranks import one_thread

CPU = torch.device("cpu")
HERE = single_process(CPU)
TYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
    with one_thread():
        yield


def outputs(rule: Rule, count: int, seed: int, levels: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits with many ties when there are few levels."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (count, rule.classes), generator=draw) * (8 / levels)
    pooled = torch.randn(count, rule.pooled, generator=draw).to(rule.numbers) if rule.pooled else None
    return logits.to(rule.numbers), pooled


rules = st.builds(
    Rule,
    classes=st.integers(1, 40),
    dtype=st.sampled_from(TYPES),
    top=st.integers(0, 45),
    pooled=st.integers(0, 7),
)


@settings(max_examples=150)
@given(rule=rules, count=st.integers(1, 9), seed=st.integers(0, 99), levels=st.sampled_from([1, 3, 1000]))
def test_rows_give_back_what_was_put_in(rule: Rule, count: int, seed: int, levels: int) -> None:
    logits, pooled = outputs(rule, count, seed, levels)
    rows = encode(logits, pooled, rule)
    assert rows.shape == (count, rule.row_bytes)
    assert rows.dtype == torch.uint8
    back, features = decode(rows, rule)
    assert back.shape == logits.shape
    if rule.pooled:
        assert features is not None
        assert torch.equal(features, pooled)
        assert features.dtype == rule.numbers
    else:
        assert features is None
    if not rule.top:
        assert back.dtype == rule.numbers
        assert torch.equal(back, logits)
    # The same from any part of a batch: rows are cut for micro-batches.
    for first in range(count):
        part, _ = decode(rows[first:], rule)
        assert torch.equal(part, back[first:])


@settings(max_examples=100)
@given(
    rule=rules.filter(lambda rule: rule.top > 0),
    seed=st.integers(0, 99),
    levels=st.sampled_from([1, 3, 1000]),
)
def test_the_top_k_rule_equals_a_reference(rule: Rule, seed: int, levels: int) -> None:
    logits, pooled = outputs(rule, 5, seed, levels)
    found, _ = decode(encode(logits, pooled, rule), rule)
    assert found.dtype == torch.float32
    for row, got in zip(logits.double().numpy(), found.numpy(), strict=True):
        kept = sorted(range(rule.classes), key=lambda c: (-row[c], c))[: rule.top]
        others = [c for c in range(rule.classes) if c not in kept]
        mass = np.exp(row[others]).sum()
        assert [got[c] for c in kept] == [row[c] for c in kept]
        np.testing.assert_allclose(got[others], math.log(mass / len(others)), rtol=1e-5, atol=1e-6)
        wanted, have = np.exp(row) / np.exp(row).sum(), np.exp(got.astype(np.float64))
        np.testing.assert_allclose((have / have.sum())[kept], wanted[kept], rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_are_kept_whatever_they_mean(dtype: str) -> None:
    rule = Rule(4, dtype)
    logits = torch.tensor([[math.nan, math.inf, -math.inf, -0.0]]).to(rule.numbers)
    word = torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(decode(encode(logits, None, rule), rule)[0].view(word), logits.view(word))


def test_top_k_of_every_class_keeps_all() -> None:
    assert Rule(10, "float16", top=10) == Rule(10, "float16") == Rule(10, "float16", top=99)
    assert key(Rule(CLASSES, "float16", top=CLASSES)) == key(Rule(CLASSES, "float16"))


@pytest.mark.parametrize(("classes", "bytes_each"), [(65536, 2), (65537, 4)])
def test_the_highest_class_numbers_survive(classes: int, bytes_each: int) -> None:
    rule = Rule(classes, "float32", top=3)
    assert rule.row_bytes == 3 * 4 + 3 * bytes_each + 4
    logits = torch.zeros(2, classes)
    logits[0, [classes - 1, 40000, 0]] = torch.tensor([5.0, 4.0, 3.0])
    logits[1, [32767, 32768, 65535]] = torch.tensor([5.0, 4.0, 3.0])
    found, _ = decode(encode(logits, None, rule), rule)
    assert found[0, [classes - 1, 40000, 0]].tolist() == [5.0, 4.0, 3.0]
    assert found[1, [32767, 32768, 65535]].tolist() == [5.0, 4.0, 3.0]
    assert found.abs().amin() < 1e-4  # the mass of the others, log 1 each
    assert (found > 1).sum() == 6


def test_a_rest_without_any_mass_stays_without() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf]])
    rule = Rule(4, "float32", top=2)
    assert torch.equal(decode(encode(logits, None, rule), rule)[0], logits)


def test_encoding_shares_no_memory_with_the_teacher() -> None:
    logits = torch.zeros(2, 3)
    rows = encode(logits, None, Rule(3, "float32"))
    logits += 1
    assert not rows.any()


@pytest.mark.parametrize("rule", [Rule(9, "float32", pooled=2), Rule(9, "float32", top=3, pooled=2)])
def test_differences_to_live_outputs_are_the_largest_of_each_row(rule: Rule) -> None:
    logits, pooled = torch.randn(4, 9), torch.randn(4, 2)
    rows = encode(logits, pooled, rule)
    same, features = differences(rows, logits, pooled, rule)
    assert same.max() < 1e-6
    assert not features.any()
    best = logits.argmax(1)
    live, live_pooled = logits.clone(), pooled.clone()
    live[1, best[1]] -= 0.01
    live_pooled[2, 0] += 0.5
    apart, features = differences(rows, live, live_pooled, rule)
    assert apart[1] == pytest.approx(0.01, rel=1e-2)
    assert apart[[0, 2, 3]].max() < 1e-6
    assert features.tolist() == pytest.approx([0, 0, 0.5, 0], rel=1e-5)


def test_every_part_of_a_view_that_decides_pixels_is_in_the_key() -> None:
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
    }
    assert set(changed) | {"mixup", "cutmix"} == {item.name for item in fields(Transform)}
    texts = {describe_transform(replace(base, **{name: value}), MEAN, STD) for name, value in changed.items()}
    texts |= {
        describe_transform(base, (0.4,), STD),
        describe_transform(base, MEAN, (0.2,)),
        describe_transform(base, MEAN, STD),
    }
    assert len(texts) == len(changed) + 3
    moving = replace(base, augment="crop-flip")
    assert describe_transform(moving, MEAN, STD) == describe_transform(
        replace(moving, eval_crop=0.5), MEAN, STD
    )


@pytest.mark.parametrize("mixed", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_mixed_images_are_refused(mixed: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"mixed images .* depend on their neighbour") as refused:
        key(transform=replace(VIEW, **mixed))
    assert "remove distill.cache" in refused.value.fix


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
    "pooled": ({"pooled": 0}, "pooled features stored per sample (0: none): 6 → 0"),
    "dtype": ({"dtype": "float16"}, "the type of the stored numbers: float32 → float16"),
    "format": ({"format": 2}, "the format of the cache: 1 → 2"),
}


def test_the_differences_below_are_all_there_can_be() -> None:
    assert set(DIFFERENT) == {item.name for item in fields(Key)}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_key_is_refused_and_the_difference_named(tmp_path: Path, name: str) -> None:
    changed, words = DIFFERENT[name]
    open_cache(tmp_path / "cache", key(), HERE)
    with pytest.raises(UserError) as refused:
        open_cache(tmp_path / "cache", replace(key(), **changed), HERE)  # type: ignore[arg-type]
    assert words in refused.value.what
    assert refused.value.what.count("→") == 1
    assert "a different folder for distill.cache, or delete" in refused.value.fix


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
def test_other_images_with_the_same_labels_are_refused(
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


def test_equal_sets_have_equal_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_images_looked_at_are_few_and_reach_from_first_to_last(
    monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    source, given = files(monkeypatch, samples=samples)
    content_of(source)
    assert len(given.asked) == len(set(given.asked)) == min(samples, SAMPLED_IMAGES)
    assert (min(given.asked), max(given.asked)) == (0, samples - 1)
    steps = np.diff(given.asked)
    assert samples == 1 or steps.max() - steps.min() <= 1


def test_an_image_that_cannot_be_read_is_refused_unless_the_view_goes_on_without(
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


def test_two_differences_are_both_named_and_equal_parts_are_not(tmp_path: Path) -> None:
    open_cache(tmp_path, key(), HERE)
    other = key(transform=replace(VIEW, size=16, augment="shift-flip"), seed=3)
    with pytest.raises(UserError) as refused:
        open_cache(tmp_path, other, HERE)
    assert "size=8; augment=shift → size=16; augment=shift-flip" in refused.value.what
    assert "run.seed: 7 → 3" in refused.value.what
    assert "interpolation" not in refused.value.what


def test_the_same_key_opens_again_and_leaves_everything_alone(tmp_path: Path) -> None:
    first = open_cache(tmp_path / "a" / "b", key(), HERE)
    before = cache_ranks.contents(tmp_path)
    assert open_cache(tmp_path / "a" / "b", key(), HERE) == first
    assert cache_ranks.contents(tmp_path) == before
    assert list(before) == ["a/b/manifest.json"]


def test_a_folder_with_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("")
    with pytest.raises(UserError, match=r"not a cache \(it has holiday.jpg") as refused:
        open_cache(tmp_path, key(), HERE)
    assert "new folder" in refused.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_what_a_killed_run_left_in_an_empty_folder_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "manifest.json.0a1b2c3d.tmp").write_text("{")
    (tmp_path / "filling.lock").touch()
    assert open_cache(tmp_path, key(), HERE).key == key()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*cache: Not a directory"):
        open_cache(tmp_path / "cache", key(), HERE)


def changed_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a whole cache of two epochs."""
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert filled(folder, HERE)[1]
        torch.set_num_threads(threads)
    return cache_ranks.contents(folder)


@pytest.fixture
def whole(tmp_path: Path, sound: dict[str, bytes]) -> Cache:
    for name, content in sound.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return open_cache(tmp_path, key(), HERE)


def requests(epochs: range = range(2), batch: int = 64) -> list[Request]:
    per_epoch = 1438 // batch
    return list(
        training_requests(
            seed=SEED,
            samples=1438,
            batch=batch,
            first_step=epochs.start * per_epoch,
            last_step=epochs.stop * per_epoch,
            local=slice(0, batch),
        )
    )


def read_all(cache: Cache) -> list[torch.Tensor]:
    return list(CachedRows(cache).for_requests(requests()))


def read_some(cache: Cache) -> None:
    """One row of each epoch is enough: no row is given out before its epoch is verified."""
    list(CachedRows(cache).for_requests([Request(0, np.array([3])), Request(1, np.array([3]))]))


def test_a_changed_byte_anywhere_in_any_file_is_refused_by_name(
    whole: Cache, sound: dict[str, bytes]
) -> None:
    assert len(sound) == 1 + 2 * (3 + 1)
    for name, content in sound.items():
        path = whole.folder / name
        places = {0, len(content) // 2, len(content) - 1}
        if name == "epoch-00001/block-0001.rows":
            places |= set(range(len(content) - 64, len(content)))  # each byte of the trailer
        if name.endswith("txt"):
            places |= {63, 64, 65, 66, content.index(b"\n")}
        for place in places:
            changed_byte(path, place)
            with pytest.raises(UserError) as refused:
                read_some(open_cache(whole.folder, key(), HERE))
            assert str(path) in refused.value.what, (name, place, refused.value.what)
            assert "delete this" in refused.value.fix
            path.write_bytes(content)
    read_some(whole)


@pytest.mark.parametrize(("length", "reason"), [(0, "0 bytes"), (100, "100 bytes"), (None, "No such file")])
def test_a_short_or_missing_block_is_refused_by_name(whole: Cache, length: int | None, reason: str) -> None:
    path = whole.path(1, 2)
    if length is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=f"block-0002.rows: (has )?{reason}"):
        read_all(whole)


@pytest.mark.parametrize("more", [b"x", b"x\n"])
def test_a_list_with_more_than_the_blocks_is_refused(whole: Cache, more: bytes) -> None:
    path = whole.epoch_folder(0) / "sha256.txt"
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(UserError, match=r"sha256.txt: does not list 3 blocks"):
        read_all(whole)


def test_a_sound_block_in_anothers_place_is_refused(whole: Cache) -> None:
    whole.path(1, 0).write_bytes(whole.path(1, 1).read_bytes())
    with pytest.raises(UserError, match="is not block 0 of epoch 1"):
        read_all(whole)


def test_damage_is_told_when_its_epoch_is_needed_and_not_before(whole: Cache) -> None:
    changed_byte(whole.path(1, 1), 5)
    first = list(CachedRows(whole).for_requests(requests(range(1))))
    assert len(first) == 1438 // 64
    rows = CachedRows(whole).for_requests(requests())
    for _ in first:
        next(rows)
    with pytest.raises(UserError, match=r"epoch-00001/block-0001.rows: its checksum does not match"):
        next(rows)


def test_an_epoch_that_is_not_filled_is_refused(whole: Cache) -> None:
    with pytest.raises(UserError, match=r"epoch 2 is not filled \(sha256.txt is missing\)") as refused:
        list(CachedRows(whole).for_requests(requests(range(2, 3))))
    assert "fills what is missing" in refused.value.fix


def test_the_checksums_are_those_that_sha256sum_reads(whole: Cache) -> None:
    folder = whole.epoch_folder(1)
    lines = (folder / "sha256.txt").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256((folder / f'block-000{n}.rows').read_bytes()).hexdigest()}  block-000{n}.rows"
        for n in range(3)
    ]
    subprocess.run(["sha256sum", "-c", "--strict", "sha256.txt"], cwd=folder, check=True, capture_output=True)


def live(epoch: int, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of samples, each computed in the chunk that it belongs to."""
    logits, pooled = torch.empty(len(samples), CLASSES), torch.empty(len(samples), cache_ranks.WIDTH)
    run = teacher()
    for first in range(0, 1438, 256):
        ids = np.arange(first, min(first + 256, 1438))
        images = next(feed([Request(epoch, ids)])).images
        images = torch.cat([images, images.new_zeros(256 - len(ids), 8, 8, 1)])
        with torch.no_grad():
            out, features = run(images)
        where = np.flatnonzero((samples >= first) & (samples < first + 256))
        assert features is not None
        logits[where], pooled[where] = out[samples[where] - first], features[samples[where] - first]
    return logits, pooled


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_of_a_request_are_the_live_outputs_bit_for_bit(whole: Cache, world: int) -> None:
    for epoch in range(2):
        for rank in range(world):
            part = rank_slice(100, rank, world)
            asked = [
                Request(epoch, request.samples[part]) for request in requests(range(epoch, epoch + 1), 100)
            ]
            stored = list(CachedRows(whole).for_requests(asked))
            assert len(stored) == len(asked)
            logits, pooled = live(epoch, np.concatenate([request.samples for request in asked]))
            back, features = decode(torch.cat(stored), whole.key.rule)
            assert torch.equal(back, logits)
            assert features is not None
            assert torch.equal(features, pooled)
    assert not torch.equal(live(0, np.arange(9))[0], live(1, np.arange(9))[0])


def test_batches_travel_with_the_rows_of_their_own_samples(whole: Cache) -> None:
    asked = requests(batch=100)
    batches = with_rows(feed(asked), iter(asked), whole, CPU)
    for request, batch in zip(asked, batches, strict=True):
        assert batch.samples.tolist() == request.samples.tolist()
        logits, _ = decode(batch.extra, whole.key.rule)
        if request.samples[0] % 5 == 0:
            assert torch.equal(logits, live(request.epoch, request.samples)[0])


def test_closing_early_ends_the_thread_and_the_batches(whole: Cache) -> None:
    before, source = threading.active_count(), feed(requests())
    batches = with_rows(source, requests(), whole, CPU)
    next(batches)
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(source)


def test_a_whole_cache_may_be_read_only(whole: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (whole.folder / "left behind.tmp").touch()
    for name in ("mkdir", "touch", "unlink", "replace", "write_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert filled(whole.folder, HERE)[1]
    assert len(read_all(whole)) == len(requests())

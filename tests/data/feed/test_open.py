"""`drumline.open_feed`: the batches of a run for anyone's loop, in slices, resumable, each sample once."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import drumline
from drumline.config.recipe import Data, Recipe, Run
from drumline.core.errors import UserError
from drumline.data.feed.open import Feed, FeedBatch
from drumline.data.feed.sampler import bounds, evaluation_bounds
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.parallel.world import single_process
from drumline.training.sets import open_sets
from tests.data.damage import good_jpeg
from tests.data.feed.test_loader import assert_ended, children, workers_of

TRAIN, EVAL = 22, 7
FIELDS = "images", "labels", "sample_ids"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs and PNGs of different sizes."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(3)
    for split, samples in (("train", TRAIN), ("val", EVAL)):
        for number in range(samples):
            place = folder / split / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (20 + number, 31, 3), np.uint8)
            Image.fromarray(pixels).save(place / f"{number:02}.{'png' if number % 5 == 0 else 'jpg'}")
    return folder


def opened(path: Path | str, batch: int = 4, size: int | None = 16, **options: Any) -> Feed:
    return drumline.open_feed(path, batch, size, **{"workers": 2, "pool": "threads", **options})


def ids(batches: Iterable[FeedBatch]) -> list[int]:
    return [sample for batch in batches for sample in batch.sample_ids.tolist()]


def assert_same(ours: list[FeedBatch], theirs: list[FeedBatch]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def of_a_run(data: Data, seed: int, steps: int, evaluation: bool = False) -> list[FeedBatch]:
    """What `drumline train` would be fed."""
    recipe, world = Recipe(run=Run(seed=seed), data=data), single_process(torch.device("cpu"))
    sets = open_sets(recipe, world)
    made = (
        sets.evaluation(recipe, world)
        if evaluation
        else sets.training(recipe, slice(0, data.batch), 0, steps)
    )
    return [FeedBatch(batch.images.permute(0, 3, 1, 2), batch.labels, batch.samples) for batch in made]


def write_npz(folder: Path) -> Path:
    draw = np.random.default_rng(1)
    images = {
        name: draw.integers(0, 256, (n, 12, 12, 3), np.uint8) for name, n in (("train", 30), ("test", 9))
    }
    labels = {name: np.arange(len(stack)) % 3 for name, stack in images.items()}
    np.savez(
        folder / "set.npz",
        x_train=images["train"],
        y_train=labels["train"],
        x_test=images["test"],
        y_test=labels["test"],
    )
    return folder / "set.npz"


def packed(photos: Path, folder: Path) -> Path:
    return pack_set("folder", str(photos), folder / "packed", PackOptions(), 1, False, lambda _: None)


@pytest.mark.parametrize("kind", ["folder", "packed", "npz", "digits", "custom"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_the_batches_are_those_of_a_run_with_the_same_seed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, train: bool
) -> None:
    source, path = kind, str(photos)
    if kind == "packed":
        path = str(packed(photos, tmp_path))
    elif kind == "npz":
        path = str(write_npz(tmp_path))
    elif kind == "digits":
        path = ""
    elif kind == "custom":
        source, path = "own_files:make", ""
        (tmp_path / "own_files.py").write_text(
            "from tests.data.damage import good_jpeg\n"
            "class make:\n"
            "    def __init__(self, path, split):\n        self.labels = [0, 1, 0, 1, 1, 0, 1]\n"
            "    def read(self, sample):\n        return good_jpeg(sample)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
    # A run evaluates in batches of up to 256.
    batch = 4 if train else 256
    data = Data(
        source=source, path=path, batch=4, size=16, workers=2, jitter=(0.4, 0.4, 0.4, 0.1), erasing=0.5
    )
    with opened(path, batch, source=source, seed=5, jitter=data.jitter, erasing=0.5, train=train) as feed:
        ours = [batch for _ in range(2 if train else 1) for batch in feed]
    assert_same(ours, of_a_run(data, 5, len(ours), not train))


def test_images_are_nchw_in_channels_last_memory_without_a_copy(photos: Path) -> None:
    with opened(photos) as feed:
        images, labels, sample_ids = next(iter(feed))
    assert images.shape == (4, 3, 16, 16)
    assert (images.dtype, labels.dtype, sample_ids.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert images._is_view()
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_feed_has_classes_samples_length_and_position(photos: Path) -> None:
    with opened(photos, 4, rank=1, world=2) as feed:
        assert (feed.classes, feed.samples, len(feed)) == (("a", "b"), TRAIN, TRAIN // 4)
        assert (feed.rank, feed.world, feed.epoch, feed.position) == (1, 2, 0, 0)
    with drumline.open_feed("", 16) as feed:
        assert next(iter(feed)).images.shape == (16, 1, 8, 8)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_slices_of_the_ranks_make_up_the_batch_of_one_process(photos: Path, world: int) -> None:
    with opened(photos) as feed:
        whole = list(feed)
    slices = []
    for rank in range(world):
        with opened(photos, rank=rank, world=world) as feed:
            slices.append(list(feed))
    joined = [
        FeedBatch(*(torch.cat([getattr(part, name) for part in parts]) for name in FIELDS))
        for parts in zip(*slices, strict=True)
    ]
    assert_same(joined, whole)
    assert len(set(ids(whole))) == len(ids(whole)) == TRAIN // 4 * 4


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [3, 4, 5, 50])
def test_evaluation_yields_each_sample_once_and_as_many_batches_on_every_rank(
    photos: Path, world: int, batch: int
) -> None:
    found, lengths = [], set()
    for rank in range(world):
        with opened(photos, batch, train=False, rank=rank, world=world) as feed:
            batches = list(feed)
            assert ids(feed) == ids(batches)  # a second pass
            lengths |= {len(feed), len(batches)}
        found += ids(batches)
    assert sorted(found) == list(range(EVAL))
    assert len(lengths) == 1


@given(samples=st.integers(1, 200), batch=st.integers(1, 60), world=st.integers(1, 9), data=st.data())
def test_evaluation_bounds_cover_the_rest_and_give_each_process_a_slice(
    samples: int, batch: int, world: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, samples))
    cuts = evaluation_bounds(samples, max(batch, world), world, start)
    sizes = np.diff(cuts)
    assert (cuts[0], cuts[-1]) == (start, samples) or start == samples
    assert (sizes > 0).all()
    if samples - start >= world:
        assert all(np.diff(bounds(size, world)).min() > 0 for size in sizes.tolist())


def test_data_without_splits_is_evaluated_whole(photos: Path) -> None:
    with opened(photos / "val", train=False) as feed:
        assert sorted(ids(feed)) == list(range(EVAL))
    with opened(photos / "train", train=False, holdout=0.5) as feed:
        assert feed.samples == 12  # six of the eleven in each class


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_feed_opened_at_a_position_yields_the_rest(photos: Path, world: int, train: bool) -> None:
    for rank in range(world):
        options = {"rank": rank, "world": world, "train": train, "epoch": 2}
        with opened(photos, 3, **options) as feed:
            positions, whole = [0], []
            for batch in feed:
                positions.append(feed.position)
                whole.append(batch)
        for done, position in enumerate(positions[:-1]):
            with opened(photos, 3, start=position, **options) as feed:
                assert_same(list(feed), whole[done:])
        with opened(photos, 3, start=positions[-1], **options) as feed:
            assert list(feed) == []
            assert (feed.epoch, feed.position) == (3, 0)


def test_position_counts_the_batch_that_was_yielded_and_survives_a_changed_batch_and_world(
    photos: Path,
) -> None:
    with opened(photos, 4) as feed:
        order = ids(feed)
    with opened(photos, 4) as feed:
        batches = iter(feed)
        next(batches), next(batches)
        position = feed.position
    assert position == 8
    rest = []
    for rank in range(2):
        with opened(photos, 6, start=position, rank=rank, world=2) as feed:
            rest.append([batch.sample_ids.tolist() for batch in feed])
    assert [a + b for a, b in zip(*rest, strict=True)] == [order[8:14], order[14:20]]


def test_an_iteration_is_an_epoch_and_the_next_one_continues_after_a_break(photos: Path) -> None:
    with opened(photos) as feed:
        for _ in feed:
            if feed.position == 12:
                break
        assert (feed.epoch, feed.position) == (0, 12)
        rest = ids(feed)
        assert (feed.epoch, feed.position) == (1, 0)
        second = ids(feed)
        feed.set_epoch(0)
        first = ids(feed)
        assert first[12:] == rest
        assert first != second
        feed.set_epoch(1, 4)
        assert ids(feed) == second[4:]


def test_set_epoch_before_each_epoch_keeps_the_running_workers(photos: Path) -> None:
    """The habit from DistributedSampler."""
    with opened(photos) as feed:
        plain = [ids(feed) for _ in range(3)]
    found, streams = [], []
    with opened(photos) as feed:
        for epoch in range(3):
            feed.set_epoch(epoch)
            found.append(ids(feed))
            streams += feed._open
    assert found == plain
    assert all(stream is streams[0] for stream in streams)


def test_a_feed_that_is_moved_ends_its_iteration(photos: Path) -> None:
    with opened(photos) as feed:
        batches = iter(feed)
        next(batches)
        feed.set_epoch(3)
        assert list(batches) == []
        assert (feed.epoch, feed.position) == (3, 0)


@pytest.mark.parametrize(
    "options",
    [{"workers": 0, "pool": "auto"}, {"workers": 5}, {"workers": 2, "pool": "processes"}, {"pool": "auto"}],
    ids=str,
)
def test_workers_change_nothing(photos: Path, options: dict[str, Any]) -> None:
    with opened(photos) as feed:
        expected = list(feed)
    with opened(photos, **options) as feed:
        assert_same(list(feed), expected)


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("drumline")]


def test_closing_early_ends_the_threads(photos: Path) -> None:
    feed = opened(photos)
    next(iter(feed))
    assert feed_threads()
    feed.close()
    assert not feed_threads()
    assert feed.position == 4
    with pytest.raises(UserError, match="closed"):
        next(iter(feed))
    feed.close()


@pytest.mark.slow
def test_leaving_the_loop_and_the_with_block_ends_the_processes(photos: Path) -> None:
    before = children()
    with opened(photos, pool="processes") as feed:
        for _ in feed:
            break
        started = workers_of(before)
    assert len(started) >= 2
    assert_ended(started)


def test_a_feed_that_is_garbage_collected_ends_its_threads(photos: Path) -> None:
    next(iter(opened(photos)))
    assert not feed_threads()


def test_a_script_that_leaves_in_the_middle_of_an_epoch_ends_cleanly(photos: Path) -> None:
    script = f"""
import drumline
feed = drumline.open_feed({str(photos)!r}, 4, 16)
next(iter(feed))
print(feed.position)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_broken_samples_are_replaced_and_listed_or_rejected(photos: Path, tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        data = good_jpeg(number)
        (folder / f"{number}.jpg").write_bytes(data[: len(data) // 2] if number == 3 else data)
    with opened(tmp_path, 8, bad_limit=0.5) as feed:
        (batch,) = list(feed)
        (sample,) = feed.bad_samples
        assert sample in batch.sample_ids.tolist()
        assert "3.jpg" in feed.bad_samples[sample]
    with opened(tmp_path, 8, strict=True) as feed:
        for _ in range(2):  # the second attempt meets it again
            with pytest.raises(UserError, match=r"3\.jpg"):
                next(iter(feed))
        assert feed.position == 0
    with opened(tmp_path, 8, bad_limit=0.0) as feed, pytest.raises(UserError, match="bad_limit"):
        list(feed)


def test_rank_and_world_come_from_torch_or_the_environment_unless_given(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with opened(photos) as feed:
        assert (feed.rank, feed.world) == (1, 2)
    with opened(photos, rank=0, world=1) as feed:
        assert (feed.rank, feed.world) == (0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with opened(photos) as feed:
        assert (feed.rank, feed.world) == (2, 3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"batch": "many"}, "batch = 'many'"),
        ({"batch": TRAIN + 1}, f"batch = {TRAIN + 1}"),
        ({"size": 0}, "size = 0"),
        ({"rank": 0}, "world = None"),
        ({"rank": 2, "world": 2}, "rank = 2"),
        ({"rank": 0, "world": 5}, "batch = 4"),
        ({"seed": -1}, "seed = -1"),
        ({"start": TRAIN + 1}, f"start = {TRAIN + 1}"),
        ({"epoch": -1}, "epoch = -1"),
        ({"augment": "crop"}, "augment = 'crop'"),
        ({"augment": "shift"}, "augment = shift"),
        ({"jitter": (0.4,)}, "jitter"),
        ({"source": "folders"}, "folders"),
        ({"path": "/nowhere"}, "/nowhere"),
        ({"device": "gpu"}, "device = 'gpu'"),
        ({"device": "cuda:99"}, "device = 'cuda:99'"),
        ({"device": "meta"}, "device = 'meta'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(photos: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        drumline.open_feed(**{"path": photos, "batch": 4, "size": 16, **options})
    assert named in caught.value.what
    assert caught.value.fix


def test_the_help_explains_every_argument() -> None:
    text = inspect.getdoc(drumline.open_feed)
    assert text is not None
    explained = {
        name
        for line in re.findall(r"^    ([a-z]\w*(?:, \w+)*): ", text, re.MULTILINE)
        for name in line.split(", ")
    }
    assert set(inspect.signature(drumline.open_feed).parameters) == explained
    assert "with drumline.open_feed(" in text


def test_the_documented_signature_holds(photos: Path) -> None:
    with drumline.open_feed(str(photos), 4, 16, True, 0, 1, 0, 4) as feed:
        assert (feed.rank, feed.world, feed.position) == (0, 1, 4)

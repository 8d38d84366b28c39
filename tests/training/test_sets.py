"""What is chosen for the user, and what is refused before the first step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Data, Model, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.core.machine import usable_cores
from drumline.data.classes import Classes
from drumline.data.feed.balance import epoch_shares
from drumline.data.sources import ArrayDataset
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.training.losses import loss_weights
from drumline.training.model import initial_model
from drumline.training.sets import describe_sampling, open_sets
from drumline.training.state import build_state
from tests.training import tiny

ONE = single_process(torch.device("cpu"))
FOUR = Classes(("ant", "bee", "cat", "dog"), named=True)
GPU = replace(ONE, device=torch.device("cuda", 0))


def npz(folder: Path, shape: tuple[int, ...], name: str = "a.npz") -> str:
    draw = np.random.default_rng(0)
    np.savez(
        folder / name,
        images=draw.integers(0, 256, (20, *shape), dtype=np.uint8),
        labels=np.arange(20) % 3,
    )
    return str(folder / name)


def test_the_same_seed_builds_the_same_model_and_another_seed_another() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)
        module, words = initial_model(Recipe(run=Run(seed=seed), model=Model(name="resnet8")), FOUR, ONE)
        assert words == ()
        return torch.cat([parameter.flatten() for parameter in module.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_the_classifier_fits_the_data_or_is_larger() -> None:
    def outputs(classes: Any) -> int:
        module, _ = initial_model(Recipe(model=Model(name="resnet8", classes=classes)), FOUR, ONE)
        return module.head.out_features

    assert outputs("auto") == 4
    assert outputs(9) == 9
    with pytest.raises(UserError, match=r"model.classes = 3, but the data has 4 classes"):
        outputs(3)


def test_the_trainee_has_what_the_recipe_asks_for() -> None:
    module, _ = initial_model(Recipe(model=Model(name="resnet8")), FOUR, ONE)
    module.eval()
    made = build_state(create_strategy(Recipe(train=Train(ema=0.9)), ONE), module)
    assert made.forward is made.module is module
    assert module.training
    assert not made.scaler.is_enabled()
    assert made.average is not None
    assert set(made.tensors()) == {"model", "optimizer", "average"}
    assert build_state(create_strategy(Recipe(), ONE), module).average is None


def test_optimizer_tensors_carry_the_names_of_their_parameters() -> None:
    module, _ = initial_model(Recipe(model=Model(name="resnet8")), FOUR, ONE)
    tensors = build_state(create_strategy(Recipe(), ONE), module).tensors()["optimizer"]
    assert set(tensors) == {f"momentum_buffer/{name}" for name, _ in module.named_parameters()}


def test_digits_are_the_default_data() -> None:
    sets = open_sets(Recipe(), ONE)
    assert (sets.name, len(sets.train), len(sets.eval), sets.transform.size) == ("digits", 1438, 359, 8)
    assert (sets.transform.augment, sets.workers.count, sets.eval_batch) == ("shift", 0, 256)
    assert sets.workers_why == ""
    pixels = sets.train.images / 255  # type: ignore[union-attr]
    assert sets.mean == pytest.approx([pixels.mean()])
    assert sets.std == pytest.approx([pixels.std()])


def test_arrays_keep_their_size_and_must_be_square_for_auto(tmp_path: Path) -> None:
    square = open_sets(Recipe(data=Data(path=npz(tmp_path, (12, 12, 3)), holdout=0.2)), ONE)
    assert square.transform.size == 12
    wide = npz(tmp_path, (12, 16, 3), "wide.npz")
    with pytest.raises(UserError, match="the stored images are 16 x 12, not square"):
        open_sets(Recipe(data=Data(path=wide, holdout=0.2)), ONE)
    assert open_sets(Recipe(data=Data(path=wide, holdout=0.2, size=10)), ONE).transform.size == 10


@pytest.mark.parametrize(("path", "augment"), [("", "none"), ("classes=3,size=8,samples=64", "none")])
def test_synthetic_data_is_not_augmented(path: str, augment: str) -> None:
    sets = open_sets(Recipe(data=Data(source="synthetic", path=path)), ONE)
    assert sets.transform.augment == augment


def test_image_files_are_cropped_and_normalised_as_imagenet_is(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (30, 20)).save(tmp_path / split / label / "a.png")
    data = Data(path=str(tmp_path))
    sets = open_sets(Recipe(data=data), ONE)
    assert (sets.transform.size, sets.transform.augment, sets.eval_batch) == (224, "crop-flip", 2)
    assert (sets.mean, sets.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert sets.workers.count == usable_cores()
    assert str(sets.workers) in sets.workers_why
    own = replace(data, mean=(0.5,), std=(0.25,), workers=3)
    assert open_sets(Recipe(data=own), ONE).mean == (0.5,)
    assert open_sets(Recipe(data=own), ONE).workers.count == 3
    with pytest.raises(UserError, match=r"data.augment = shift"):
        open_sets(Recipe(data=replace(data, augment="shift")), ONE)


def test_ranks_share_a_global_batch_and_resume_in_the_middle() -> None:
    """Two ranks' batches put together are one rank's, from any step on; pairs to be mixed stay together."""
    recipe = Recipe(data=Data(batch=10, mixup=0.3))
    sets = open_sets(recipe, ONE)
    assert isinstance(sets.train, ArrayDataset)
    whole = list(sets.training(recipe, slice(0, recipe.data.batch), 0, 5))
    late = list(sets.training(recipe, slice(0, recipe.data.batch), 3, 5))
    assert [torch.equal(a.images, b.images) for a, b in zip(whole[3:], late, strict=True)] == [True, True]
    two = create_strategy(recipe, replace(ONE, size=2))
    slices = [two.batch_slice(rank) for rank in range(2)]
    parts = [list(sets.training(recipe, rows, 3, 5)) for rows in slices]
    assert [len(part[0].labels) for part in parts] == [4, 6]
    for number, batch in enumerate(late):
        for name, tensor in batch._asdict().items():
            joined = torch.cat([getattr(part[number], name) for part in parts])
            assert torch.equal(joined, tensor), name


def test_synthetic_batches_repeat_and_resume_at_the_same_one() -> None:
    recipe = Recipe(data=Data(source="synthetic", path="classes=3,size=8,samples=64", batch=4))
    sets = open_sets(recipe, ONE)
    first, later = (
        sets.training(recipe, slice(0, recipe.data.batch), 0, 100),
        sets.training(recipe, slice(0, recipe.data.batch), 13, 100),
    )
    seen = [next(first).samples.tolist() for _ in range(20)]
    assert seen[:4] == seen[8:12] == seen[16:20]
    assert len({tuple(samples) for samples in seen}) == 8
    assert [next(later).samples.tolist() for _ in range(7)] == seen[13:]
    first.close()
    later.close()


def test_evaluation_sees_every_sample_once_unchanged() -> None:
    recipe = Recipe(data=Data(mixup=0.5, augment="shift-flip"))
    sets = open_sets(recipe, ONE)
    assert isinstance(sets.eval, ArrayDataset)
    batches = [
        batch for rank in range(3) for batch in sets.evaluation(recipe, replace(ONE, rank=rank, size=3))
    ]
    seen = torch.cat([batch.samples for batch in batches])
    assert sorted(seen.tolist()) == list(range(359))
    for batch in batches:
        assert batch.mix.shape[1] == 0
        assert torch.equal(batch.images, torch.from_numpy(sets.eval.take(batch.samples.numpy())))


def test_an_imbalanced_set_is_reported_unless_something_is_done_about_it() -> None:
    source = tiny.imbalanced(40, 9, 4)
    (line,) = describe_sampling(source, "none", None, None)
    assert "class 'a' has 40 samples, class 'c' 4" in line
    assert "data.balance=sqrt" in line
    assert describe_sampling(tiny.imbalanced(39, 9, 4), "none", None, None) == []
    source.name = "synthetic"
    assert describe_sampling(source, "none", None, None) == []
    (line,) = describe_sampling(source, "balanced", epoch_shares(source.labels, "balanced", 10, seed=0), None)
    assert "class 'a' 17 times (40 samples)" in line or "class 'a' 16 times (40 samples)" in line
    (line,) = describe_sampling(source, "none", None, loss_weights(source, "none", None))
    assert "class 'a' 0.442 and class 'c' 4.42" in line


def test_nothing_keeps_the_data_of_a_run_that_is_over(tmp_path: Path) -> None:
    path = npz(tmp_path, (8, 8, 3))
    recipe = Recipe(data=Data(path=path, source="npz", holdout=0.2, batch=4, balance="sqrt"))
    sets = open_sets(recipe, ONE)
    assert len(sets.drawn_at(recipe, 0)) == 4
    train = weakref.ref(sets.train)
    del sets
    gc.collect()
    assert train() is None

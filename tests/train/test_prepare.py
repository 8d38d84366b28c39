"""What is chosen for the user, and what is refused before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.core.machine import usable_cores
from drumline.data.classes import Classes
from drumline.data.sources import ArrayDataset
from drumline.parallel.world import single_process
from drumline.train import assemble, prepare
from drumline.train.prepare_model import prepare_model

ONE = single_process(torch.device("cpu"))
FOUR = Classes(("ant", "bee", "cat", "dog"), named=True)
GPU = replace(ONE, device=torch.device("cuda", 0))


def plan(samples: int = 1000, world: Any = ONE, **sections: Any) -> prepare.Plan:
    return prepare.prepare_plan(Recipe(**sections), samples, world)


def npz(folder: Path, shape: tuple[int, ...], name: str = "a.npz") -> str:
    draw = np.random.default_rng(0)
    np.savez(
        folder / name,
        images=draw.integers(0, 256, (20, *shape), dtype=np.uint8),
        labels=np.arange(20) % 3,
    )
    return str(folder / name)


def test_epochs_become_steps_and_steps_win_over_epochs() -> None:
    assert (plan(data=Data(batch=100)).total, plan(data=Data(batch=100)).per_epoch) == (100, 10)
    assert plan(data=Data(batch=300), train=Train(epochs=2.5)).total == 8
    assert plan(data=Data(batch=100), train=Train(epochs=3, steps=7)).total == 7
    assert plan(data=Data(batch=1000), train=Train(epochs=0.1)).total == 1


def test_evaluation_and_saving_come_every_so_many_epochs_and_at_the_end() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=2.4, eval_every=0.5), checkpoint=Checkpoint(every_epochs=1)
    )
    assert [step for step in range(1, 25) if made.evaluates_after(step)] == [5, 10, 15, 20, 24]
    assert [step for step in range(1, 25) if made.saves_after(step, 0)] == [10, 20, 24]
    assert [step for step in range(1, 25) if made.saves_after(step, 7)] == [7, 10, 14, 20, 21, 24]


def test_zero_means_only_at_the_end() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=2, eval_every=0), checkpoint=Checkpoint(every_epochs=0)
    )
    assert [step for step in range(1, 21) if made.evaluates_after(step)] == [20]
    assert [step for step in range(1, 21) if made.saves_after(step, 0)] == [20]


def test_asking_for_more_often_than_every_step_means_every_step_not_never() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=1, eval_every=0.01), checkpoint=Checkpoint(every_epochs=0.01)
    )
    assert all(made.evaluates_after(step) and made.saves_after(step, 0) for step in range(1, 11))


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.batch = 128: the training set has only 100 samples"):
        plan(samples=100)


@pytest.mark.parametrize(("mixup", "least"), [(0.0, 12), (0.2, 24)])
def test_a_batch_that_cannot_feed_everybody_is_refused(mixup: float, least: int) -> None:
    world = replace(ONE, size=4)
    train = Train(accumulate=3)
    plan(world=world, train=train, data=Data(batch=least, mixup=mixup))
    with pytest.raises(UserError, match=f"data.batch = {least - 1} cannot feed 4 processes x 3") as caught:
        plan(world=world, train=train, data=Data(batch=least - 1, mixup=mixup))
    assert f"--data.batch {least} " in caught.value.fix


def test_the_schedule_is_built_for_the_global_batch() -> None:
    made = plan(data=Data(batch=500), optim=Optim(lr=0.1, lr_scaling="linear", reference_batch=250))
    assert made.schedule(0) == pytest.approx(0.2)
    assert made.schedule.total == made.total == 20


def test_the_same_seed_builds_the_same_model_and_another_seed_another() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)
        module, words = prepare_model(Recipe(run=Run(seed=seed), model=Model(name="resnet8")), FOUR, ONE)
        assert words == ()
        return torch.cat([parameter.flatten() for parameter in module.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_the_classifier_fits_the_data_or_is_larger() -> None:
    def outputs(classes: Any) -> int:
        module, _ = prepare_model(Recipe(model=Model(name="resnet8", classes=classes)), FOUR, ONE)
        return module.head.out_features

    assert outputs("auto") == 4
    assert outputs(9) == 9
    with pytest.raises(UserError, match=r"model.classes = 3, but the data has 4 classes"):
        outputs(3)


def test_the_trainee_has_what_the_recipe_asks_for() -> None:
    module, _ = prepare_model(Recipe(model=Model(name="resnet8")), FOUR, ONE)
    module.eval()
    made = assemble.prepare_state(Recipe(train=Train(ema=0.9)), module, ONE)
    assert made.forward is made.module is module
    assert module.training
    assert not made.scaler.is_enabled()
    assert made.average is not None
    assert set(made.tensors()) == {"model", "optimizer", "average"}
    assert assemble.prepare_state(Recipe(), module, ONE).average is None


def test_optimizer_tensors_carry_the_names_of_their_parameters() -> None:
    module, _ = prepare_model(Recipe(model=Model(name="resnet8")), FOUR, ONE)
    tensors = assemble.prepare_state(Recipe(), module, ONE).tensors()["optimizer"]
    assert set(tensors) == {f"momentum_buffer/{name}" for name, _ in module.named_parameters()}


def test_digits_are_the_data_when_nothing_is_said() -> None:
    sets = prepare.prepare_sets(Recipe(), ONE)
    assert (sets.name, len(sets.train), len(sets.eval), sets.transform.size) == ("digits", 1438, 359, 8)
    assert (sets.transform.augment, sets.workers.count, sets.eval_batch) == ("shift", 0, 256)
    assert sets.workers_why == ""
    pixels = sets.train.images / 255  # type: ignore[union-attr]
    assert sets.mean == pytest.approx([pixels.mean()])
    assert sets.std == pytest.approx([pixels.std()])


def test_arrays_keep_their_size_and_must_be_square_for_auto(tmp_path: Path) -> None:
    square = prepare.prepare_sets(Recipe(data=Data(path=npz(tmp_path, (12, 12, 3)), holdout=0.2)), ONE)
    assert square.transform.size == 12
    wide = npz(tmp_path, (12, 16, 3), "wide.npz")
    with pytest.raises(UserError, match="the stored images are 16 x 12, not square"):
        prepare.prepare_sets(Recipe(data=Data(path=wide, holdout=0.2)), ONE)
    assert prepare.prepare_sets(Recipe(data=Data(path=wide, holdout=0.2, size=10)), ONE).transform.size == 10


@pytest.mark.parametrize(("path", "augment"), [("", "none"), ("classes=3,size=8,samples=64", "none")])
def test_synthetic_data_is_not_augmented(path: str, augment: str) -> None:
    sets = prepare.prepare_sets(Recipe(data=Data(source="synthetic", path=path)), ONE)
    assert sets.transform.augment == augment


def test_image_files_are_cropped_and_normalised_as_imagenet_is(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (30, 20)).save(tmp_path / split / label / "a.png")
    data = Data(path=str(tmp_path))
    sets = prepare.prepare_sets(Recipe(data=data), ONE)
    assert (sets.transform.size, sets.transform.augment, sets.eval_batch) == (224, "crop-flip", 2)
    assert (sets.mean, sets.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert sets.workers.count == usable_cores()
    assert str(sets.workers) in sets.workers_why
    own = replace(data, mean=(0.5,), std=(0.25,), workers=3)
    assert prepare.prepare_sets(Recipe(data=own), ONE).mean == (0.5,)
    assert prepare.prepare_sets(Recipe(data=own), ONE).workers.count == 3
    with pytest.raises(UserError, match=r"data.augment = shift: image files come in many sizes"):
        prepare.prepare_sets(Recipe(data=replace(data, augment="shift")), ONE)


def test_ranks_share_a_global_batch_and_resume_in_the_middle() -> None:
    """Two ranks' batches put together are one rank's, from any step on; pairs to be mixed stay together."""
    recipe = Recipe(data=Data(batch=10, mixup=0.3))
    sets = prepare.prepare_sets(recipe, ONE)
    assert isinstance(sets.train, ArrayDataset)
    whole = list(sets.training(recipe, ONE, 0, 5))
    late = list(sets.training(recipe, ONE, 3, 5))
    assert [torch.equal(a.images, b.images) for a, b in zip(whole[3:], late, strict=True)] == [True, True]
    parts = [list(sets.training(recipe, replace(ONE, rank=rank, size=2), 3, 5)) for rank in range(2)]
    assert [len(part[0].labels) for part in parts] == [4, 6]
    for number, batch in enumerate(late):
        for name, tensor in batch._asdict().items():
            joined = torch.cat([getattr(part[number], name) for part in parts])
            assert torch.equal(joined, tensor), name


def test_synthetic_batches_repeat_and_resume_at_the_same_one() -> None:
    recipe = Recipe(data=Data(source="synthetic", path="classes=3,size=8,samples=64", batch=4))
    sets = prepare.prepare_sets(recipe, ONE)
    first, later = sets.training(recipe, ONE, 0, 100), sets.training(recipe, ONE, 13, 100)
    seen = [next(first).samples.tolist() for _ in range(20)]
    assert seen[:4] == seen[8:12] == seen[16:20]
    assert len({tuple(samples) for samples in seen}) == 8
    assert [next(later).samples.tolist() for _ in range(7)] == seen[13:]
    first.close()
    later.close()


def test_evaluation_sees_every_sample_once_unchanged() -> None:
    recipe = Recipe(data=Data(mixup=0.5, augment="shift-flip"))
    sets = prepare.prepare_sets(recipe, ONE)
    assert isinstance(sets.eval, ArrayDataset)
    batches = [
        batch for rank in range(3) for batch in sets.evaluation(recipe, replace(ONE, rank=rank, size=3))
    ]
    seen = torch.cat([batch.samples for batch in batches])
    assert sorted(seen.tolist()) == list(range(359))
    for batch in batches:
        assert batch.mix.shape[1] == 0
        assert torch.equal(batch.images, torch.from_numpy(sets.eval.take(batch.samples.numpy())))


@pytest.mark.parametrize(("wanted", "dtype"), [("auto", None), ("fp32", None), ("bf16", torch.bfloat16)])
def test_precision_on_a_cpu(wanted: Any, dtype: torch.dtype | None) -> None:
    assert prepare.precision(Recipe(train=Train(precision=wanted)), ONE) is dtype


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        prepare.precision(Recipe(train=Train(precision="fp16")), ONE)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_bf16_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert prepare.precision(Recipe(), GPU) is dtype


@pytest.mark.parametrize(
    ("recipe", "world", "reason"),
    [
        (Recipe(), ONE, "no GPU"),
        (Recipe(), replace(GPU, size=2), "several processes"),
        (Recipe(parallel=Parallel(layout="dp")), GPU, "DataParallel"),
        (Recipe(train=Train(gradient_checkpointing=True)), GPU, "gradient checkpointing"),
        (Recipe(train=Train(capture="off")), GPU, "train.capture = off"),
    ],
)
def test_a_step_is_captured_only_where_that_is_right_and_the_reason_is_given(
    recipe: Recipe, world: Any, reason: str
) -> None:
    captured, why = prepare.captures(recipe, world)
    assert not captured
    assert reason in why
    if recipe.train.capture == "auto":
        with pytest.raises(UserError, match=r"train.capture = on is not possible"):
            prepare.captures(replace(recipe, train=replace(recipe.train, capture="on")), world)


def test_one_gpu_alone_is_captured() -> None:
    assert prepare.captures(Recipe(), GPU) == (True, "")


def test_the_memory_layout_is_a_gpu_matter() -> None:
    assert prepare.channels_last(Recipe(), GPU)
    assert not prepare.channels_last(Recipe(), ONE)
    assert not prepare.channels_last(Recipe(train=Train(channels_last=False)), GPU)


def test_threads_divide_the_cores_among_the_processes() -> None:
    assert prepare.threads_per_process("auto", 1, env={}) == usable_cores()
    assert prepare.threads_per_process("auto", 10**6, env={}) == 1
    assert prepare.threads_per_process(5, 2, env={"OMP_NUM_THREADS": "3"}) == 5
    assert prepare.threads_per_process("auto", 10**6, env={"OMP_NUM_THREADS": "3"}) == 3
    assert prepare.threads_per_process("auto", 1, strict=True, env={"OMP_NUM_THREADS": "3"}) == 1

"""The values that `auto` stands for in batch, length, rate and warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.config.toml import load_recipe
from drumline.core.errors import UserError
from drumline.parallel.world import single_process
from drumline.training.defaults import RATES, choose_defaults
from drumline.training.loop import train
from drumline.training.schedule import make_plan

SIZES = [1, 2, 3, 17, 40, 100, 250, 504, 591, 1437, 2600, 9000, 50_000, 1_281_167]
TUNED = Recipe(model=Model(weights="weights.safetensors"))


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("recipe", [Recipe(), TUNED], ids=["from scratch", "fine-tuned"])
def test_every_size_has_a_plan_and_small_sets_get_enough_steps(recipe: Recipe, samples: int) -> None:
    chosen, line = choose_defaults(recipe, samples)
    plan = make_plan(chosen.check(), samples)
    assert plan.total >= 1
    assert chosen.data.batch <= max(1, samples // 2)
    assert 0 < chosen.optim.lr <= 0.1
    assert f"{samples:,} training samples" in line
    if samples >= 250:
        assert plan.total >= (1000 if recipe is not TUNED else 100)
        assert plan.per_epoch >= 12


def test_small_sets_get_smaller_batches_and_more_epochs() -> None:
    chosen = [choose_defaults(Recipe(), samples)[0] for samples in SIZES[4:]]
    batches, epochs = [each.data.batch for each in chosen], [each.train.epochs for each in chosen]
    assert batches == sorted(batches)
    assert (batches[0], batches[-1], epochs[0], epochs[-1]) == (16, 128, 80, 30)


def test_the_rate_follows_the_batch_that_is_given() -> None:
    rates = [choose_defaults(Recipe(data=Data(batch=batch)), 10_000)[0].optim.lr for batch in (64, 128, 512)]
    assert rates == [0.05, 0.1, 0.4]
    adam = [
        choose_defaults(Recipe(optim=Optim(name="adamw"), data=Data(batch=b)), 10_000)[0].optim.lr
        for b in (64, 256)
    ]
    assert adam == [0.0005, 0.001]


def test_a_recipe_that_scales_the_rate_itself_gets_the_rate_of_its_reference_batch() -> None:
    optim = Optim(lr_scaling="linear", reference_batch=512)
    assert choose_defaults(Recipe(optim=optim, data=Data(batch=64)), 10_000)[0].optim.lr == 0.4


@pytest.mark.parametrize("name", RATES)
def test_trained_weights_get_a_lower_rate_and_fewer_epochs(name: str) -> None:
    scratch = choose_defaults(Recipe(optim=Optim(name=name)), 504)[0]  # type: ignore[arg-type]
    tuned = choose_defaults(Recipe(optim=Optim(name=name), model=TUNED.model), 504)[0]  # type: ignore[arg-type]
    assert tuned.optim.lr < scratch.optim.lr
    assert tuned.train.epochs < scratch.train.epochs


def test_an_own_optimizer_needs_a_rate() -> None:
    with pytest.raises(UserError, match=r"optim.lr = auto: there is no default rate .* torch.optim:NAdam"):
        choose_defaults(Recipe(optim=Optim(name="torch.optim:NAdam")), 504)


def test_values_that_are_given_stay() -> None:
    recipe = Recipe(
        data=Data(batch=100), optim=Optim(lr=0.3, warmup_epochs=2), train=Train(epochs=7), run=Run(seed=4)
    )
    assert choose_defaults(recipe, 504) == (recipe, "")
    chosen, line = choose_defaults(Recipe(train=Train(epochs=7)), 504)
    assert chosen.train.epochs == 7
    assert "train.epochs" not in line


def test_a_recipe_without_auto_is_left_as_it_is() -> None:
    chosen, _ = choose_defaults(Recipe(), 504)
    assert choose_defaults(chosen, 504) == (chosen, "")
    assert choose_defaults(chosen, 9000) == (chosen, "")


def test_pairs_that_are_mixed_fit_into_the_smallest_batch() -> None:
    assert choose_defaults(Recipe(data=Data(mixup=0.2)), 3)[0].data.batch == 2


def test_warm_up_follows_the_steps_if_they_decide_the_length() -> None:
    chosen, _ = choose_defaults(Recipe(train=Train(steps=100)), 504)
    plan = make_plan(chosen, 504)
    assert 4 <= plan.schedule.warmup <= 6


def test_a_run_saves_the_numbers_and_resumes_with_them(tmp_path: Path) -> None:
    def run(resume: str, steps: int) -> None:
        recipe = Recipe(
            run=Run(dir=str(tmp_path), name="one", device="cpu"),
            model=Model(name="resnet8"),
            train=Train(steps=steps, eval_every=0),
            checkpoint=Checkpoint(resume=resume),
        )
        train(recipe, single_process(torch.device("cpu")))

    run("never", 2)
    saved = load_recipe(tmp_path / "one/recipe.toml").recipe
    assert (saved.data.batch, saved.optim.lr, saved.optim.warmup_epochs) == (64, 0.05, 0.0045)
    log = tmp_path / "one/log.txt"
    assert "chosen for 1,438 training samples, from scratch: data.batch=64 optim.lr=0.05 " in log.read_text()
    run("auto", 2)
    assert "resumed from" in log.read_text()
    assert "different settings" not in log.read_text()


def test_a_run_that_ends_at_chance_says_so(tmp_path: Path) -> None:
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one", device="cpu"),
        data=Data(batch=14),
        model=Model(name="resnet8"),
        optim=Optim(lr=0),
        train=Train(epochs=2, eval_every=0),
    )
    train(recipe, single_process(torch.device("cpu")))
    assert "WARNING: the model is not learning" in (tmp_path / "one/log.txt").read_text()

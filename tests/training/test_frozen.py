"""Frozen modules: nothing of them moves under any layout, and where they start to train, bits do not depend on kills
or on the number of processes."""

from __future__ import annotations

import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.parallel.world import single_process
from drumline.training import loop
from drumline.training.loop import train
from drumline.training.run import Run
from tests.launch.ranks import one_thread
from tests.training import frozen_ranks
from tests.training.frozen_ranks import IN_ONE, LAYOUTS, STEPS, UNFROZEN

pytestmark = pytest.mark.slow
FROZEN = ("layer1.", "norm.")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a layout's runs have left."""

    @cache
    def of(name: str) -> dict[str, Any]:
        if name in LAYOUTS:
            return frozen_ranks.results()[name]
        with one_thread():
            words = {**IN_ONE, "strict alone": LAYOUTS["strict"]}[name]
            folder = tmp_path_factory.mktemp("frozen")
            return frozen_ranks.trained(folder, "run", words, single_process(torch.device("cpu")))

    return of


@pytest.mark.parametrize("layout", [*LAYOUTS, *IN_ONE])
def test_frozen_modules_and_their_statistics_do_not_move_until_they_train(found: Any, layout: str) -> None:
    moved = found(layout)["moved"]
    before = [name for name in moved[UNFROZEN] if name.split()[1].startswith(FROZEN)]
    assert before == []
    assert "model layer10.0.weight" in moved[UNFROZEN]
    assert "model layer10.1.running_mean" in moved[UNFROZEN]
    for name in ("layer1.0.weight", "layer1.1.bias", "layer1.1.running_var", "norm.running_mean"):
        assert f"model {name}" in moved[UNFROZEN + 1]
        assert f"average {name}" in moved[UNFROZEN + 1]


@pytest.mark.parametrize("layout", [*LAYOUTS, *IN_ONE])
def test_frozen_parameters_have_no_optimizer_state_until_they_train(found: Any, layout: str) -> None:
    names = found(layout)["optimizer"]
    assert not any("layer1." in name for name in names[UNFROZEN])
    assert "exp_avg/layer10.0.weight" in names[UNFROZEN]
    assert {"exp_avg/layer1.0.weight", "step/layer1.1.bias"} <= set(names[UNFROZEN + 1])


@pytest.mark.parametrize("layout", [*LAYOUTS, *IN_ONE])
def test_a_kill_before_at_or_after_the_change_gives_the_same_bits(found: Any, layout: str) -> None:
    assert found(layout)["resumed"] == [True, True, True]


def test_strict_mode_has_the_same_bits_on_one_process_and_on_two(found: Any) -> None:
    one, two = found("strict alone")["last"], found("strict")["last"]
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.parametrize(("layout", "like"), [("fsdp", "ddp"), ("model", "single"), ("dp", "single")])
def test_layouts_that_normalise_alike_train_alike(found: Any, layout: str, like: str) -> None:
    ours, theirs = found(layout)["last"], found(like)["last"]
    assert ours.keys() == theirs.keys()
    for name in ours:
        # Before BatchNorm, a bias has no gradient but rounding, and the running mean follows it.
        if name.startswith("model ") and name.endswith((".0.weight", "fc.weight")):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_steps_after_the_change_are_part_of_one_log(found: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    words = (*frozen_ranks.WORDS, f"run.dir={folder}", "run.name=one", "train.log_every=1")
    result = train(Recipe.from_args(words), single_process(torch.device("cpu")))
    assert result.finished
    assert result.step == STEPS
    log = (folder / "one/log.txt").read_text()
    assert f"frozen until step {UNFROZEN}: layer1, norm" in log
    assert "left no closing line" not in log
    lines = (folder / "one/metrics.jsonl").read_text().splitlines()
    assert [f'"step": {step}' in "".join(lines) for step in range(1, STEPS + 1)] == [True] * STEPS


def test_the_run_before_the_change_is_gone_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise model, optimizer and graph would be in memory twice."""
    opened: list[weakref.ref[Any]] = []

    class Watched(Run):
        def __init__(self, *given: Any) -> None:
            assert not any(earlier() for earlier in opened)
            super().__init__(*given)
            opened.extend(
                [weakref.ref(self), weakref.ref(self.state.module), weakref.ref(self.state.optimizer)]
            )

    monkeypatch.setattr(loop, "Run", Watched)
    words = (*frozen_ranks.WORDS, f"run.dir={tmp_path}", "run.name=one")
    assert train(Recipe.from_args(words), single_process(torch.device("cpu"))).finished
    assert len(opened) == 6


def test_a_run_that_is_resumed_with_other_frozen_modules_starts_their_optimizer_state_at_zero(
    tmp_path: Path,
) -> None:
    def run(*words: str) -> None:
        fixed = (*frozen_ranks.WORDS, f"run.dir={tmp_path}", "train.unfreeze_epoch=0", *words)
        train(Recipe.from_args(fixed), single_process(torch.device("cpu")))

    run("run.name=one", "train.steps=2")
    middle = f"checkpoint.resume={tmp_path / 'one/checkpoints/step-2'}"
    run("run.name=two", middle, "train.freeze=layer10")
    names = frozen_ranks.read_checkpoint(frozen_ranks.saved(tmp_path, "two", 3))[1]["optimizer"]
    assert float(names["step/layer1.0.weight"]) == 1
    assert float(names["step/fc.weight"]) == 3
    assert "step/layer10.0.weight" not in names


def test_freezing_the_whole_model_is_an_error(tmp_path: Path) -> None:
    words = (*frozen_ranks.WORDS, f"run.dir={tmp_path}", "run.name=one", "train.freeze=backbone,fc")
    with pytest.raises(UserError, match="freezes the whole model"):
        train(Recipe.from_args(words), single_process(torch.device("cpu")))


def test_a_norm_that_a_model_freezes_by_requires_grad_alone_is_found(tmp_path: Path) -> None:
    own = ("model.name=tests.training.frozen_ranks:half_frozen", "train.unfreeze_epoch=0")

    def run(name: str, *words: str) -> None:
        fixed = (*frozen_ranks.WORDS, f"run.dir={tmp_path}", f"run.name={name}", *own, *words)
        train(Recipe.from_args(fixed), single_process(torch.device("cpu")))

    with pytest.raises(
        UserError, match=r"guard \[frozen\]: the running statistics of frozen BatchNorm"
    ) as found:
        run("one", "train.freeze=")
    assert "'layer1.1'" in found.value.what
    assert "add the layers to train.freeze" in found.value.fix
    run("two", "train.freeze=layer1")

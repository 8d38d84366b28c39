"""A run that goes on from an earlier point is the run from there on; what it leaves behind is sound."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.errors import UserError
from drumline.launch.world import alone
from drumline.parallel.holding import Whole
from drumline.recipe import Checkpoint, Data, Model, Recipe, Run, Train
from drumline.state.checkpoint import Position, read_checkpoint
from drumline.state.inspect import inspect
from drumline.state.keeper import Keeper
from drumline.train import prepare
from drumline.train.loop import Result, export, train
from drumline.train.rehearse import _check_draws
from drumline.train.step import NotCapturable, TrainStep
from tests.train import tiny

CPU = torch.device("cpu")


def test_a_stage_that_draws_from_elsewhere_is_told_of_where_the_log_is() -> None:
    said: list[str] = []
    first: Any = SimpleNamespace(
        step=SimpleNamespace(draws_elsewhere=False),
        world=SimpleNamespace(collect=lambda mine: [mine, True]),
        recipe=Recipe(),
        note=said.append,
    )
    _check_draws(first)
    assert "which no seed of the run reaches" in said[0]


def run(folder: Path, resume: str = "never", steps: int = 6, seed: int = 0) -> Result:
    return train(
        Recipe(
            run=Run(dir=str(folder), name="one", device="cpu", seed=seed),
            data=Data(batch=16),
            model=Model(name="resnet8"),
            train=Train(steps=steps, eval_every=0),
            checkpoint=Checkpoint(every_steps=2, every_epochs=0, keep=2, resume=resume),
        ),
        alone(CPU),
    )


@pytest.mark.slow
def test_a_rotten_last_checkpoint_is_replaced_by_the_resumed_run(tmp_path: Path) -> None:
    """The bad one must not stand in the way of the good one that is written again at its step."""
    run(tmp_path)
    saved = tmp_path / "one" / "checkpoints"
    before = read_checkpoint(saved / "step-6")[0].state_sha256
    with (saved / "step-6" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    result = run(tmp_path, resume="auto")
    assert result.finished
    found = inspect(tmp_path / "one")
    assert (found.sound, found.step, found.state_sha256) == (True, 6, before)
    assert "set aside" in (tmp_path / "one" / "log.txt").read_text()


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint_rewrites_what_came_after(tmp_path: Path) -> None:
    run(tmp_path)
    saved = tmp_path / "one" / "checkpoints"
    old = read_checkpoint(saved / "step-6")[0].state_sha256
    run(tmp_path, resume=str(saved / "step-4"), seed=1)
    assert inspect(tmp_path / "one").step == 6
    assert read_checkpoint(saved / "step-6")[0].state_sha256 != old


def test_best_weights_are_not_taken_from_a_rotten_checkpoint(tmp_path: Path) -> None:
    """The run itself is sound; its best checkpoint, many steps ago, has rotted since."""
    saved, notes = tmp_path / "checkpoints", list[str]()
    keeper = Keeper(saved, 3, "", {}, lambda: None)
    trained = tiny.trainee(tiny.normed())
    ended: Any = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path, checkpoints=saved),
        keeper=keeper,
        trainee=trained,
        holding=Whole(alone(torch.device("cpu"))),
        note=notes.append,
    )
    keeper.save(trained.tensors(), Position(4, 10, best_step=4))
    position, best = Position(6, 10, best_step=4), tmp_path / "weights" / "best.safetensors"
    export(ended, position)
    model = saved / "step-4" / "model.safetensors"
    assert best.read_bytes() == model.read_bytes()
    assert notes == []
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    export(ended, position)
    keeper.close()
    assert best.read_bytes() != bytes(content)
    assert len(notes) == 1
    assert "model.safetensors: its checksum does not match" in notes[0]


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_a_model_that_cannot_be_captured_trains_without_a_graph_unless_one_was_demanded(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cannot(step: TrainStep, batch: Any) -> None:
        raise NotCapturable("operation not permitted when stream is capturing")

    monkeypatch.setattr(prepare, "captures", lambda recipe, world: (True, ""))
    monkeypatch.setattr(TrainStep, "capture", cannot)
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one"),
        data=Data(batch=16),
        model=Model(name="resnet8"),
        train=Train(steps=2, eval_every=0, capture=wanted),  # type: ignore[arg-type]
    )
    if wanted == "auto":
        assert train(recipe, alone(CPU)).finished
    else:
        with pytest.raises(UserError, match=r"train.capture = on: the model cannot be captured"):
            train(recipe, alone(CPU))

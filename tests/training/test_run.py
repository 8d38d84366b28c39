"""A run that goes on from an earlier point is the run from there on; what it leaves behind is sound."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Checkpoint, Data, Model, Recipe, Run, Train
from drumline.core import lock
from drumline.core.errors import UserError
from drumline.parallel.strategy import Strategy
from drumline.parallel.world import single_process
from drumline.state.checkpoint import newest_valid, read_checkpoint, step_of
from drumline.state.folder import open_run
from drumline.state.manifest import Position
from drumline.state.provenance import describe_environment
from drumline.state.verify import verify_run
from drumline.training import rehearse
from drumline.training.loop import train
from drumline.training.output import RunOutput, TrainResult
from drumline.training.rehearse import _check_draws
from drumline.training.run import Run as TrainingRun
from drumline.training.step import NotCapturable, TrainStep
from drumline.training.task import Classification
from tests import own_code
from tests.training import tiny

CPU = torch.device("cpu")


def test_draws_without_a_seed_in_any_stage_are_logged_on_rank_0() -> None:
    said: list[str] = []
    first: Any = SimpleNamespace(
        step=SimpleNamespace(draws_elsewhere=False),
        world=SimpleNamespace(all_gather_object=lambda mine: [mine, True]),
        recipe=Recipe(),
        log=said.append,
    )
    _check_draws(first)
    assert "which no seed of the run reaches" in said[0]


@pytest.mark.parametrize(
    ("loss", "plain"), [("cross_entropy", True), ("bce", False), ("tests.own_code:focal", False)]
)
def test_only_of_a_plain_cross_entropy_it_is_known_what_a_guess_costs(loss: str, plain: bool) -> None:
    sets = SimpleNamespace(
        eval=SimpleNamespace(labels=np.array([0, 0, 1])), train=SimpleNamespace(classes=("a", "b"))
    )
    plan = SimpleNamespace(total=9, per_epoch=3)
    for objective, known in ((Classification(classes=2), plain), (object(), False)):
        opened: Any = SimpleNamespace(
            sets=sets,
            plan=plan,
            task=SimpleNamespace(objective=objective),
            recipe=Recipe(train=Train(loss=loss)),
        )
        trend = TrainingRun._trend(opened)
        assert trend.is_cross_entropy == known
        assert trend.guess == pytest.approx(2 / 3)


def recipe(
    folder: Path, resume: str = "never", steps: int = 6, seed: int = 0, model: str = "resnet8"
) -> Recipe:
    return Recipe(
        run=Run(dir=str(folder), name="one", device="cpu", seed=seed),
        data=Data(batch=16),
        model=Model(name=model),
        train=Train(steps=steps, eval_every=0),
        checkpoint=Checkpoint(every_steps=2, every_epochs=0, keep=2, resume=resume),
    )


def run(folder: Path, **settings: Any) -> TrainResult:
    return train(recipe(folder, **settings), single_process(CPU))


@pytest.mark.slow
def test_each_run_of_a_process_has_an_augmentation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second of two runs of `--repeat` would begin with what the first has left in it."""
    made: list[weakref.ref[Any]] = []

    class Watched(own_code.Shade):
        def __init__(self) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(own_code, "Shade", Watched)
    for name in ("one", "two"):
        wanted = recipe(tmp_path, steps=1)
        wanted = replace(wanted, run=replace(wanted.run, name=name))
        train(replace(wanted, data=Data(batch=16, transform="tests.own_code:Shade")), single_process(CPU))
    gc.collect()
    assert [each() for each in made] == [None, None]


def contents(folder: Path) -> dict[str, str]:
    """Every file of a run but its lock, by its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that has ended, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder / "one"


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["missing", "empty", "not mounted", "a file"])
@pytest.mark.parametrize("recipe_there", [True, False])
def test_resume_auto_never_starts_a_run_over(
    finished: Path, tmp_path: Path, checkpoints: str, recipe_there: bool
) -> None:
    one = tmp_path / "one"
    shutil.copytree(finished, one)
    shutil.rmtree(one / "checkpoints")
    if checkpoints == "empty":
        (one / "checkpoints").mkdir()
    elif checkpoints == "not mounted":
        (one / "checkpoints").symlink_to(tmp_path / "disk")
    elif checkpoints == "a file":
        (one / "checkpoints").touch()
    if not recipe_there:
        (one / "recipe.toml").unlink()
    before = contents(one)
    with pytest.raises(UserError, match=r"one holds a run \(.*\) and no checkpoint to resume from") as caught:
        run(tmp_path, resume="auto")
    assert f"restore or mount {one / 'checkpoints'}" in caught.value.fix
    assert contents(one) == before


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model", "rehearsal", "log", "recipe"])
def test_a_failed_start_leaves_the_run_unchanged(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    one = tmp_path / "one"
    shutil.copytree(finished, one)
    (one / "checkpoints" / "step-6").rename(tmp_path / "step-6")  # so that there is a log to be cut, too
    error: type[Exception] = UserError
    if where == "rehearsal":
        error = RuntimeError
        monkeypatch.setattr("drumline.training.loop.rehearse", _fail)
    elif where == "log":
        (one / "log.txt").unlink()
        (one / "log.txt").mkdir()
    elif where == "recipe":
        monkeypatch.setattr("drumline.training.output.write_facts", _no_room)
    before = contents(one)
    with pytest.raises(error):
        run(tmp_path, resume="auto", steps=8, model="resnet14" if where == "model" else "resnet8")
    assert contents(one) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "steps", "message"),
    [
        (Data(batch=32), 8, "has 89 steps per epoch, this recipe has 44"),
        (Data(batch=16), 4, "is at step 6, the recipe ends at 4"),
    ],
)
def test_a_checkpoint_of_other_steps_is_rejected_before_a_tensor_is_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Data, steps: int, message: str
) -> None:
    shutil.copytree(finished, tmp_path / "one")
    monkeypatch.setattr(Strategy, "scatter", _fail)
    wanted = replace(recipe(tmp_path, resume="auto", steps=steps), data=data)
    with pytest.raises(UserError, match=message):
        train(wanted, single_process(CPU))


@pytest.mark.slow
def test_the_best_evaluation_is_forgotten_if_the_evaluation_set_changes(tmp_path: Path) -> None:
    """Scores on different sets cannot be compared."""
    for number in range(24):
        path = tmp_path / f"data/{'abc'[number % 3]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(path)
    data = Data(path=str(tmp_path / "data"), size=8, batch=8, workers=0, folds=3)

    def ended(fold: int, steps: int) -> tuple[TrainResult, str]:
        made = recipe(tmp_path, resume="auto" if steps > 2 else "never", steps=steps)
        found = train(replace(made, data=replace(data, fold=fold)), single_process(CPU))
        return found, (tmp_path / "one/log.txt").read_text()

    ended(fold=0, steps=2)
    assert "do not count" not in ended(fold=0, steps=4)[1]
    found, log = ended(fold=1, steps=6)
    assert "the evaluation set has changed since step-4" in log
    assert "; earlier evaluations no longer count as best" in log
    assert found.best_epoch == 3, "the first evaluation on the new set"


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_start_killed_at_any_write_loses_nothing_that_cannot_be_computed_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back from step 6 to step 4, and from the beginning of each write in turn nothing more happens."""
    one, check, seen = tmp_path / "one", lock.check, []
    wanted = recipe(tmp_path, resume=str(one / "checkpoints" / "step-4"))
    facts = describe_environment(CPU, 1, "", 1)
    for last in itertools.count(1):
        shutil.copytree(finished, one)
        writes = itertools.count(1)

        def die(path: Path, writes: Iterator[int] = writes, last: int = last) -> None:
            if next(writes) >= last:
                raise RuntimeError("killed")
            check(path)

        opened, silent = open_run(wanted, "digits"), SimpleNamespace(log=lambda text: None)
        with monkeypatch.context() as patch, suppress(RuntimeError), ExitStack() as cleanup:
            output = RunOutput(opened, wanted, facts, Position(4, 89), silent, cleanup)  # type: ignore[arg-type]
            patch.setattr(lock, "check", die)
            output.begin()
        opened.lock.close()
        newest, complaints = newest_valid(one / "checkpoints")
        assert newest is not None
        assert complaints == []
        logged = [line["step"] for line in map(json.loads, (one / "metrics.jsonl").read_text().splitlines())]
        assert {2, 4, step_of(newest)} <= set(logged)
        assert any((one / name / "last.safetensors").exists() for name in ("weights", "weights.aside"))
        seen.append(step_of(newest))
        shutil.rmtree(one)
        if next(writes) < last:
            break
    assert seen[0] == 6
    assert seen[-1] == 4
    assert len(seen) > 8


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_starts_again_with_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one"
    with monkeypatch.context() as patch:
        patch.setattr("drumline.training.loop.save", _fail)  # before the first is on disk
        with pytest.raises(RuntimeError):
            run(tmp_path, resume="auto")
    assert (one / "metrics.jsonl").stat().st_size > 0
    before = contents(one)
    with pytest.raises(
        UserError, match=r"before its first checkpoint: run.seed: 0 -> 1. Nothing was changed"
    ):
        run(tmp_path, resume="auto", seed=1)
    assert contents(one) == before
    assert run(tmp_path, resume="auto").finished
    assert "no checkpoint yet: starting again at step 0" in (one / "log.txt").read_text()
    assert not (one / ".unsaved").exists()
    shutil.rmtree(one / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        run(tmp_path, resume="auto")


@pytest.mark.slow
def test_weights_of_an_earlier_stop_are_kept_until_the_new_ones_are_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one"
    shutil.copytree(finished, one)
    with monkeypatch.context() as patch:
        patch.setattr(RunOutput, "export", _fail)
        with pytest.raises(RuntimeError):
            run(tmp_path, resume="auto", steps=8)
    assert (one / "weights.aside" / "last.safetensors").exists()
    assert not (one / "weights").exists()
    shutil.copy(one / "weights.aside" / "last.safetensors", one / "weights.aside" / "other.safetensors")
    run(tmp_path, resume="auto", steps=8)
    assert (one / "weights" / "last.safetensors").exists()
    assert (one / "weights.aside" / "other.safetensors").exists(), "it has not been written again"
    (one / "weights.aside" / "other.safetensors").unlink()
    run(tmp_path, resume="auto", steps=8)
    assert [path.name for path in one.glob("weights*")] == ["weights"]


@pytest.mark.slow
def test_a_damaged_last_checkpoint_is_replaced_by_the_resumed_run(tmp_path: Path) -> None:
    """The bad one must not stand in the way of the good one that is written again at its step."""
    run(tmp_path)
    saved = tmp_path / "one" / "checkpoints"
    before = read_checkpoint(saved / "step-6")[0].state_sha256
    with (saved / "step-6" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    result = run(tmp_path, resume="auto")
    assert result.finished
    found = verify_run(tmp_path / "one")
    assert (found.sound, found.step, found.state_sha256) == (True, 6, before)
    assert "set aside" in (tmp_path / "one" / "log.txt").read_text()


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_rewrites_the_later_ones(tmp_path: Path) -> None:
    run(tmp_path)
    saved = tmp_path / "one" / "checkpoints"
    old = read_checkpoint(saved / "step-6")[0].state_sha256
    run(tmp_path, resume=str(saved / "step-4"), seed=1)
    assert verify_run(tmp_path / "one").step == 6
    assert read_checkpoint(saved / "step-6")[0].state_sha256 != old


def test_best_weights_are_not_taken_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    """The run itself is sound; its best checkpoint, many steps ago, has rotted since."""
    warnings, trained, position = list[str](), tiny.state(tiny.normed()), Position(6, 10, best_step=4)
    silent: Any = SimpleNamespace(log=warnings.append)
    opened = open_run(recipe(tmp_path), "digits")
    best = opened.path / "weights" / "best.safetensors"
    with ExitStack() as cleanup:
        cleanup.callback(opened.leave)
        facts = describe_environment(CPU, 1, "", 1)
        output = RunOutput(opened, recipe(tmp_path), facts, Position(0, 10), silent, cleanup)
        output.begin()
        output.manager.save(trained.tensors(), Position(4, 10, best_step=4))
        output.export(trained.tensors()["model"], position, "model")
        model = opened.checkpoints / "step-4" / "model.safetensors"
        assert best.read_bytes() == model.read_bytes()
        warnings.clear()
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
        output.export(trained.tensors()["model"], position, "model")
    assert best.read_bytes() != bytes(content)
    assert len(warnings) == 1
    assert "model.safetensors: its checksum does not match" in warnings[0]


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_a_model_that_cannot_be_captured_trains_without_a_graph_unless_capture_is_on(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cannot(step: TrainStep, batch: Any) -> None:
        raise NotCapturable("operation not permitted when stream is capturing")

    monkeypatch.setattr(rehearse, "why_not_captured", lambda run: "")
    monkeypatch.setattr(TrainStep, "capture", cannot)
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one"),
        data=Data(batch=16),
        model=Model(name="resnet8"),
        train=Train(steps=2, eval_every=0, capture=wanted),  # type: ignore[arg-type]
    )
    if wanted == "auto":
        assert train(recipe, single_process(CPU)).finished
    else:
        with pytest.raises(UserError, match=r"train.capture = on: the model cannot be captured"):
            train(recipe, single_process(CPU))


def _pictures(folder: Path) -> None:
    """Two classes of eight, and some to evaluate."""
    drawn = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for kind, number in itertools.product(("cats", "dogs"), range(count)):
            place = folder / split / kind
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn.integers(0, 255, (8, 8, 3), np.uint8)).save(place / f"{number}.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "change", "words"),
    [
        (
            "train",
            lambda cats: (cats / "0.png").rename(cats / "x.png"),
            "sample names, sizes, labels or order differ",
        ),
        ("train", lambda cats: (cats / "0.png").unlink(), "15 samples, previously 16"),
        ("train", lambda cats: shutil.copy(cats / "1.png", cats / "0.png"), ": sample "),
        (
            "val",
            lambda cats: (cats / "0.png").rename(cats / "x.png"),
            "sample names, sizes, labels or order differ",
        ),
    ],
)
def test_a_resume_on_changed_data_warns_and_is_rejected_in_strict_mode(
    tmp_path: Path, split: str, change: Any, words: str
) -> None:
    _pictures(tmp_path / "data")
    base = recipe(tmp_path, steps=2)
    data = Data(source="folder", path=str(tmp_path / "data"), size=8, batch=5, workers=0)
    train(replace(base, data=data), single_process(CPU))
    again = replace(recipe(tmp_path, resume="auto", steps=3), data=data)
    change(tmp_path / "data" / split / "cats")
    if split == "train":
        strict = replace(again, run=replace(again.run, strict=True, shards=1))
        with pytest.raises(UserError, match=f"the training set differs from that of .*{words}"):
            train(strict, single_process(CPU))
    train(again, single_process(CPU))
    side = "training" if split == "train" else "evaluation"
    said = (tmp_path / "one/log.txt").read_text()
    assert f"WARNING: the {side} set has changed since step-2, so the result may differ: " in said
    assert words in said
    train(replace(again, train=replace(again.train, steps=4)), single_process(CPU))
    assert (tmp_path / "one/log.txt").read_text().count(f"the {side} set has changed") == 1

"""Two runs, bit by bit: equal, or the first step and tensor, in the order of causes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drumline.cli import main
from drumline.config.recipe import Optim, Recipe
from drumline.config.toml import dump_recipe
from drumline.core.errors import UserError
from drumline.state import chain
from drumline.state.chain import record_text
from drumline.state.checkpoint import write_checkpoint
from drumline.state.compare import compare
from drumline.state.manifest import Position

ENVIRONMENT = {
    "device": "cpu",
    "cuda": None,
    "cudnn": None,
    "processes": 1,
    "backend": "none",
    "threads": 1,
    "packages": {"torch": "2.13", "pillow": "12"},
}
STEPS = (1, 2, 3, 10, 20)
Values = dict[str, dict[str, int]]


def values(step: int) -> Values:
    return {
        "ids": {"batch": step},
        "gradient": {"a": step, "b": 2 * step},
        "buffer": {"mean": step},
        "parameter": {"a": 3 * step, "b": 4 * step},
        "optimizer": {"momentum_buffer/a": 5 * step},
    }


def run(
    path: Path,
    changed: dict[int, Values] | None = None,
    steps: tuple[int, ...] = STEPS,
    short: tuple[int, ...] = (),
    recipe: Recipe = Recipe(),  # noqa: B008
    environment: dict[str, object] = ENVIRONMENT,
) -> Path:
    """A run folder with fingerprints of these steps, some of them changed."""
    path.mkdir()
    text, head = chain.HEADER, ""
    for step in steps:
        lines, head = record_text(
            step, {**values(step), **(changed or {}).get(step, {})}, step not in short, head
        )
        text += lines
    (path / chain.FILE).write_text(text)
    (path / "recipe.toml").write_text(dump_recipe(recipe))
    (path / "environment.json").write_text(json.dumps(environment))
    return path


def saved(run: Path, step: int, weight: torch.Tensor, momentum: float = 0.0) -> Path:
    groups = {"model": {"w": weight, "v": torch.ones(2)}, "optimizer": {"m/w": torch.tensor([momentum])}}
    return write_checkpoint(
        run / "checkpoints", groups, Position(step=step, per_epoch=9), dump_recipe(Recipe()), ENVIRONMENT
    )


def test_runs_with_the_same_bits_are_equal(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "a"), run(tmp_path / "b"))
    assert (found.equal, found.agreed, found.steps) == (True, 20, 5)
    assert found.lines == ("equal: the same bits at all 5 common steps, up to step 20",)


@pytest.mark.parametrize(
    ("changed", "step", "group", "tensor"),
    [
        ({20: {"parameter": {"a": 0, "b": 0}}}, 20, "parameter", "a"),
        ({10: {"parameter": {"a": 30, "b": 0}}, 20: {"ids": {"batch": 0}}}, 10, "parameter", "b"),
        ({3: {"parameter": {"a": 0, "b": 0}, "gradient": {"a": 3, "b": 0}}}, 3, "gradient", "b"),
        ({3: {"parameter": {"a": 0, "b": 0}, "ids": {"batch": 0}}}, 3, "ids", "batch"),
        ({2: {"optimizer": {"momentum_buffer/a": 0}, "buffer": {"mean": 0}}}, 2, "buffer", "mean"),
        ({1: {"optimizer": {"momentum_buffer/a": 0}}}, 1, "optimizer", "momentum_buffer/a"),
    ],
)
def test_the_first_step_and_its_first_cause_are_named(
    changed: dict[int, Values], step: int, group: str, tensor: str, tmp_path: Path
) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", changed)
    before = max((each for each in STEPS if each < step), default=0)
    for found in (compare(a, b), compare(b, a)):
        assert (found.equal, found.step, found.group, found.tensor) == (False, step, group, tensor)
        assert found.agreed == before
        assert f"first at step {step}" in found.lines[0]


def test_after_a_short_record_the_next_full_one_names_the_tensor(tmp_path: Path) -> None:
    changed = {step: {"gradient": {"a": step, "b": 0}} for step in (10, 20)}
    a = run(tmp_path / "a", short=(10,))
    found = compare(a, run(tmp_path / "b", changed, short=(10,)))
    assert (found.step, found.group, found.tensor) == (10, "gradient", "b")
    assert "at step 20, the next that lists tensors" in found.lines[0]
    assert compare(a, run(tmp_path / "c", changed, short=(10, 20))).tensor == ""


def test_differences_in_recipe_and_environment_are_reported(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    other = Recipe(optim=Optim(lr=0.2))
    b = run(
        tmp_path / "b", {2: {"ids": {"batch": 0}}}, recipe=other, environment={**ENVIRONMENT, "threads": 4}
    )
    found = compare(a, b)
    assert found.settings == ('optim.lr: "auto" -> 0.2',)
    assert found.environment == ("threads: 1 -> 4",)
    assert 'recipe: optim.lr: "auto" -> 0.2' in found.lines
    assert "environment: threads: 1 -> 4" in found.lines
    equal = compare(a, run(tmp_path / "c", recipe=other))
    assert equal.equal
    assert 'although the recipe differs: optim.lr: "auto" -> 0.2' in equal.lines


def test_runs_of_different_length_and_other_steps_are_compared_where_both_are(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", steps=(1, 2, 3, 7, 10))
    found = compare(a, b)
    assert (found.equal, found.agreed, found.steps) == (True, 10, 4)
    assert f"{a} continues to step 20" in found.lines


def test_a_tensor_that_one_run_lacks_is_named_so(tmp_path: Path) -> None:
    changed = {1: {"parameter": {"a": 3, "b": 4, "c": 1}}}
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", changed))
    assert found.tensor == "c"
    assert f"which is missing in {tmp_path / 'a'}" in found.lines[0]


def test_without_fingerprints_checkpoints_are_compared_value_by_value(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        saved(path, 5, torch.tensor([1.0, 2.0, 3.0]))
    saved(a, 9, torch.tensor([1.0, 2.0, 3.0]))
    saved(b, 9, torch.tensor([1.0, 2.5, 3.25]), momentum=1e-3)
    found = compare(a, b)
    assert (found.step, found.agreed, found.group, found.tensor) == (9, 5, "model", "w")
    assert "checkpoint step-9: 2 tensors differ; the largest differences:" in found.lines
    assert "  model w: 2 of 3 values, by up to 0.5" in found.lines


def test_checkpoints_show_how_large_a_difference_is(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", {10: {"parameter": {"a": 0, "b": 0}}})
    saved(a, 20, torch.tensor([1.0]))
    saved(b, 20, torch.tensor([float("nan")]))
    assert any("model w: 1 of 1 values, by up to inf" in line for line in compare(a, b).lines)


def test_equal_fingerprints_do_not_hide_another_checkpoint(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    saved(a, 20, torch.tensor([1.0]))
    saved(b, 20, torch.tensor([-1.0]))
    found = compare(a, b)
    assert (found.equal, found.step, found.tensor) == (False, 20, "w")


def test_minus_zero_is_another_value(tmp_path: Path) -> None:
    found = compare(
        saved(tmp_path / "a", 5, torch.tensor([0.0])), saved(tmp_path / "b", 5, torch.tensor([-0.0]))
    )
    assert not found.equal
    assert any("1 of 1 values, by up to 0" in line for line in found.lines)


def test_a_checkpoint_is_compared_with_the_run_s_own_of_its_step(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    one = saved(a, 5, torch.tensor([1.0]))
    saved(b, 5, torch.tensor([1.0]))
    saved(b, 6, torch.tensor([1.0]))
    assert compare(one, b).equal
    shutil.rmtree(b / "checkpoints/step-5")
    with pytest.raises(UserError, match="nothing to compare"):
        compare(one, b)


def test_the_same_run_twice_is_equal_and_noted(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    found = compare(a, a / ".." / "a")
    assert found.equal
    assert "note: both are the same folder" in found.lines


def test_runs_are_compared_up_to_a_torn_record(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    file = b / chain.FILE
    file.write_bytes(file.read_bytes()[:-5])
    found = compare(a, b)
    assert (found.equal, found.agreed) == (True, 10)
    assert any("the last record is incomplete and is ignored" in line for line in found.lines)


def test_another_moving_average_is_found_in_checkpoints(tmp_path: Path) -> None:
    one, other = (tmp_path / name / "checkpoints" for name in ("a", "b"))
    for folder, average in ((one, 1.0), (other, 2.0)):
        groups = {"model": {"w": torch.zeros(2)}, "average": {"w": torch.full((2,), average)}}
        write_checkpoint(folder, groups, Position(5, 29), dump_recipe(Recipe()), dict(ENVIRONMENT))
    found = compare(one / "step-5", other / "step-5")
    assert (found.equal, found.group, found.tensor) == (False, "average", "w")


def damage_chain(path: Path) -> None:
    file = path / chain.FILE
    file.write_text(file.read_text().replace("3 gradient a", "3 gradient c"))


def invent_group(path: Path) -> None:
    lines = "20 invented * 0\n"
    (path / chain.FILE).write_text(f"{chain.HEADER}{lines}20 chain {chain.chained('', lines)}\n")


def make_pipe(path: Path) -> None:
    (path / chain.FILE).unlink()
    os.mkfifo(path / chain.FILE)


def damage_checkpoint(path: Path) -> None:
    file = path / "checkpoints/step-20/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def damage_manifest(path: Path) -> None:
    file = path / "checkpoints/step-20/manifest.json"
    file.write_text(file.read_text().replace('"step": 20', '"step": 21'))


def damage_recipe(path: Path) -> None:
    (path / "recipe.toml").write_text("[run\n")


def flatten_recipe(path: Path) -> None:
    (path / "recipe.toml").write_text("run = 3\n")


def damage_environment(path: Path) -> None:
    (path / "environment.json").write_text("[1]")


@pytest.mark.parametrize(
    "damage",
    [
        damage_chain,
        invent_group,
        make_pipe,
        damage_checkpoint,
        damage_manifest,
        damage_recipe,
        flatten_recipe,
        damage_environment,
    ],
)
@pytest.mark.parametrize("ids", [0, 20], ids=["different", "equal"])
def test_damaged_files_are_rejected(
    damage: Callable[[Path], None], ids: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", {20: {"ids": {"batch": ids}}})
    for path in (a, b):
        saved(path, 20, torch.tensor([1.0]))
    damage(b)
    assert main(["compare", str(a), str(b)]) == 2
    said = capsys.readouterr().err
    assert str(b) in said
    assert "fix: " in said


@pytest.mark.parametrize("words", [[], ["one"], ["a", "b", "c"], ["a", "--loud"]])
def test_a_number_of_paths_other_than_two_is_rejected(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    assert "drumline compare" in capsys.readouterr().err


def test_a_path_without_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, said in (
        ("empty", "holds no run"),
        ("file", "is a file without weights"),
        ("none", "does not exist"),
    ):
        assert main(["compare", str(tmp_path / name), str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_the_command_exits_by_the_answer_and_ends_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = run(tmp_path / "a"), run(tmp_path / "b"), run(tmp_path / "c", {3: {"ids": {"batch": 0}}})
    assert main(["compare", str(a), str(b)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is True
    assert main(["compare", str(a), str(c)]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["equal"], found["step"], found["group"], found["agreed"]) == (False, 3, "ids", 2)


def test_its_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == 0
    said = capsys.readouterr().out
    assert "Exit code 0: equal. 1: different." in said
    assert "drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2" in said

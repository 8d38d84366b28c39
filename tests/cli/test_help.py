"""`--help`: short, complete, in 80 columns, and its examples can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drumline.cli import COMMANDS, main
from drumline.cli.repeat import RepeatOptions
from drumline.config.arguments import read_recipe
from drumline.config.fields import recipe_fields, sections


def examples_of(text: str) -> list[str]:
    block = text.partition("examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_usage_and_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(capsys, command, "nonsense", "--help")
    assert text.startswith(f"usage: drumline {command} ")
    assert max(map(len, text.split("\n"))) <= 80
    examples = examples_of(text)
    assert examples[0].startswith(f"drumline {command}")
    assert text == help_of(capsys, "help", command)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help")
    assert all(f"  {command} " in text for command in COMMANDS)
    assert max(map(len, text.split("\n"))) <= 80


def test_help_for_an_unknown_command_section_or_field_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, fix in (
        (("help", "trian"), "did you mean `drumline train`?"),
        (("train", "--help", "optm"), "did you mean optim?"),
        (("train", "--help", "optim.rl"), "did you mean optim.lr?"),
        (("--verison",), "did you mean `drumline --version`?"),
    ):
        assert main(argv) == 2
        assert fix in capsys.readouterr().err


def test_the_help_of_train_and_distill_names_every_field_and_stays_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train, distill = help_of(capsys, "train", "--help"), help_of(capsys, "distill", "--help")
    for field in recipe_fields().values():
        assert f"\n  {field.name}" in distill
        assert (f"\n  {field.name}" in train) == (field.section != "distill")
    assert len(train.splitlines()) < 260
    assert "--dry-run" in train


@pytest.mark.parametrize("section", sections())
def test_a_section_is_explained_in_full(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "train", "--help", section)
    flat = " ".join(text.split())
    assert max(map(len, text.split("\n"))) <= 80
    for field in recipe_fields().values():
        if field.section == section:
            assert field.help in flat
            assert field.takes() in flat
            assert field.help in " ".join(help_of(capsys, "train", "--help", field.name).split())


def test_the_examples_of_train_can_be_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text("")
    examples = examples_of(help_of(capsys, "train", "--help"))
    assert len(examples) == 7
    for example in examples:
        argv = re.split(r"\s{3,}| > ", example)[0].split()[2:]
        assert read_recipe(argv, "train", RepeatOptions).recipe


def test_the_help_of_eval_shows_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "eval", "--help")
    assert len(text.splitlines()) < 80
    examples = examples_of(text)
    assert all(example.startswith("drumline eval ") for example in examples)
    assert not any("optim." in example or "train." in example for example in examples)

"""Values of fields: the same rules for files and the command line, by type alone."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

import pytest

from drumline.config.fields import (
    WrongValue,
    choices,
    expected,
    from_text,
    from_toml,
    nearest,
    recipe_fields,
    with_values,
)
from drumline.config.recipe import Recipe
from drumline.config.rules import problems

Auto = int | Literal["auto"]


@pytest.mark.parametrize(
    ("hint", "raw", "value"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 1e-10, 1e-10),
        (bool, True, True),
        (str, "", ""),
        (Auto, "auto", "auto"),
        (Auto, 3, 3),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 2, 2),
        (tuple[float, ...], [], ()),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (tuple[float, float], [1, 2], (1.0, 2.0)),
        (tuple[str, ...], ["a"], ("a",)),
    ],
)
def test_a_toml_value_of_the_right_type_is_taken(hint: Any, raw: Any, value: Any) -> None:
    taken = from_toml(hint, raw)
    assert taken == value
    assert type(taken) is type(value)
    if isinstance(value, tuple):
        assert list(map(type, taken)) == list(map(type, value))


@pytest.mark.parametrize(
    ("hint", "raw"),
    [
        (int, True),
        (int, 3.0),
        (int, "3"),
        (float, True),
        (float, "3"),
        (float, float("nan")),
        (float, float("inf")),
        (float, 10**400),
        (bool, 1),
        (bool, "true"),
        (str, 3),
        (str, date(2020, 1, 1)),
        (Auto, True),
        (Auto, "Auto"),
        (Auto, 1.0),
        (Literal["a", "b"], "c"),
        (Literal[1, 2], True),
        (Literal["a"], ["a"]),
        (tuple[float, ...], 1.0),
        (tuple[float, ...], "1"),
        (tuple[float, ...], ["1"]),
        (tuple[float, ...], [[1]]),
        (tuple[float, float], [1]),
        (tuple[float, float], [1, 2, 3]),
        (float, {"a": 1}),
    ],
)
def test_a_toml_value_of_the_wrong_type_is_rejected(hint: Any, raw: Any) -> None:
    with pytest.raises(WrongValue):
        from_toml(hint, raw)


@pytest.mark.parametrize(
    ("hint", "texts", "value"),
    [
        (int, ["-3"], -3),
        (float, ["3"], 3.0),
        (bool, ["False"], False),
        (str, ["1,2"], "1,2"),
        (Auto, ["auto"], "auto"),
        (Auto, ["4"], 4),
        (Literal[1, 2], ["2"], 2),
        (tuple[float, ...], ["1,2", "3"], (1.0, 2.0, 3.0)),
        (tuple[float, ...], ["1,", "2"], (1.0, 2.0)),
        (tuple[float, ...], [""], ()),
        (tuple[float, ...], [], ()),
        (tuple[str, ...], ["a,b"], ("a", "b")),
    ],
)
def test_text_is_read_by_type(hint: Any, texts: list[str], value: Any) -> None:
    taken = from_text(hint, texts)
    assert taken == value
    assert type(taken) is type(value)


@pytest.mark.parametrize(
    ("hint", "texts"),
    [
        (int, ["1e3"]),
        (int, [""]),
        (float, ["inf"]),
        (float, ["1e999"]),
        (float, ["0.1", "0.2"]),
        (bool, ["1"]),
        (bool, []),
        (Literal["a"], ["b"]),
        (tuple[float, float], ["1"]),
    ],
)
def test_text_of_the_wrong_type_is_rejected(hint: Any, texts: list[str]) -> None:
    with pytest.raises(WrongValue):
        from_text(hint, texts)


@pytest.mark.parametrize(
    ("hint", "text", "words"),
    [
        (float, "a number", ()),
        (Auto, "a whole number or auto", ("auto",)),
        (Literal["a", "b"], "one of a, b", ("a", "b")),
        (tuple[float, float], "a list of 2 numbers", ()),
        (tuple[str, ...], "a list of texts", ()),
        (bool, "true or false", ()),
    ],
)
def test_a_type_is_described_in_plain_english(hint: Any, text: str, words: tuple[str, ...]) -> None:
    assert expected(hint) == text
    assert choices(hint) == words


@pytest.mark.parametrize(
    ("name", "guesses"),
    [
        ("optim.le", ("optim.lr",)),
        ("lr", ("optim.lr",)),
        ("train.lr", ("optim.lr",)),
        ("optimizer.lr", ("optim.lr",)),
        ("optimizer.name", ("optim.name",)),
        ("Optim.LR", ("optim.lr",)),
        ("data.eval-crop", ("data.eval_crop",)),
        ("batch_size", ("data.batch",)),
        ("optim.epoch", ("train.epochs",)),
        ("train.name", ("run.name", "model.name", "optim.name")),
        ("modle.name", ("model.name",)),
        ("zzz", ()),
        ("optim.zzz", ()),
        # Nothing of that kind exists: a name that merely looks alike misleads.
        ("data.palette", ()),
        ("launch.max_minutes", ()),
        ("data.captions", ()),
        ("train.wavelets", ()),
        ("train.dropout", ()),
        ("data.cache", ("distill.cache",)),
        # The section that was named comes first.
        ("data.worker", ("data.workers",)),
        ("data.resise", ("data.resize",)),
        ("data.batchsize", ("data.batch",)),
        ("optim.sheduler", ("optim.schedule",)),
        ("parallel.shedule", ("parallel.schedule",)),
        ("optim.warmup", ("optim.warmup_epochs",)),
        ("train.smoothing", ("train.label_smoothing",)),
        ("checkpoint.every", ("checkpoint.every_steps", "checkpoint.every_epochs")),
        # A section alone means its most important field.
        ("model", ("model.name",)),
        ("optim", ("optim.name",)),
        ("data", ("data.path",)),
        ("optimizer", ("optim.name",)),
        # What other programs call it.
        ("arch", ("model.name",)),
        ("learning_rate", ("optim.lr",)),
        ("num_classes", ("model.classes",)),
        ("img_size", ("data.size",)),
        ("num-workers", ("data.workers",)),
        ("wd", ("optim.weight_decay",)),
        ("gpus", ("parallel.processes",)),
        ("resume", ("checkpoint.resume",)),
        ("output_dir", ("run.dir",)),
        ("amp", ("train.precision",)),
        ("train.batch_size", ("data.batch",)),
        ("model.pretrained", ("model.weights",)),
        ("distill.temperature", ("distill.T",)),
    ],
)
def test_a_wrong_name_leads_to_the_field_meant(name: str, guesses: tuple[str, ...]) -> None:
    assert nearest(name) == guesses


@pytest.mark.parametrize("name", recipe_fields())
def test_an_example_shown_in_a_fix_is_itself_possible(name: str) -> None:
    value = recipe_fields()[name].example()
    assert value not in ("", ())
    found = problems(with_values(Recipe(), {name: value, "optim.schedule": "step", "run.name": "a"}))
    elsewhere = (
        "optim.schedule",
        "optim.args",
        "parallel.rendezvous",
        "parallel.virtual",
        "checkpoint.sharded",
    )
    assert name not in [p.field for p in found] or name in elsewhere  # which want another field too


@pytest.mark.parametrize(
    ("name", "value"), [("data.jitter", (0.4, 0.4, 0.4, 0.1)), ("data.randaugment", (2, 9))]
)
def test_the_example_of_a_list_is_the_one_that_its_limits_give(name: str, value: tuple[float, ...]) -> None:
    assert recipe_fields()[name].example() == value

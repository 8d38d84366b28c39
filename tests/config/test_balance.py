"""What a recipe may say about imbalanced classes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drumline.config.arguments import RecipeOptions, read_recipe
from drumline.core.errors import UserError


def error_of(*words: str) -> str:
    with pytest.raises(UserError) as raised:
        read_recipe([*words], "train", RecipeOptions)
    return str(raised.value)


@pytest.mark.parametrize(
    "value", ["cat", "cat:heavy", ":2", "cat:-1", "cat:nan", "cat:inf", "cat:1,balanced"]
)
def test_class_weights_that_are_no_names_with_weights_are_rejected(value: str) -> None:
    assert "is not a class with a weight of at least 0" in error_of(f"train.class_weights={value}")


def test_a_class_has_one_weight() -> None:
    assert "names a class twice" in error_of("train.class_weights=cat:1,cat:2")


@pytest.mark.parametrize("words", [["none"], ["balanced"], ["cat:1", "a:b:2.5"]])
def test_class_weights_are_read(words: Sequence[str]) -> None:
    read = read_recipe([f"train.class_weights={','.join(words)}"], "train", RecipeOptions)
    assert read.recipe.train.class_weights == tuple(words)


def test_combinations_without_a_meaning_are_rejected() -> None:
    assert "has no effect" in error_of("train.class_weights=balanced", "data.balance=balanced")
    assert "repeats samples within an epoch" in error_of("distill.cache=c", "data.balance=sqrt")

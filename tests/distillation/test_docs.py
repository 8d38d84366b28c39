"""The page on distillation says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from drumline.config.fields import recipe_fields
from drumline.distillation.methods import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text()
ROWS = {cells[1].strip("` "): cells for line in PAGE.splitlines() if len(cells := line.split("|")) == 7}


@pytest.mark.parametrize("name", METHODS)
def test_the_table_has_each_method_with_its_weight_and_options(name: str) -> None:
    method, (_, _, _, weight, compares, options, _) = METHODS[name], ROWS[name]
    if name == "kd":
        assert weight.strip() == f"(a {method.weights.a:g}, r {method.weights.r:g})"
    else:
        assert float(weight) == method.weights.b
        assert (method.weights.r, method.weights.a) == (1.0, 0.0)
    told = dict(re.findall(r"`(\w+)` ?([\d.]*)", options))
    own = {item.name: item.default for item in fields(method) if item.name != "T"}  # type: ignore[arg-type]
    assert told.keys() == own.keys()
    for option, value in told.items():
        assert value == "" or float(value) == own[option]
    if found := re.search(r"\bT (\d)", compares):
        assert float(found[1]) == method.weights.T


def test_every_field_that_is_named_exists() -> None:
    named = set(re.findall(r"`(?:--)?(distill\.\w+)", PAGE)) | set(re.findall(r"(distill\.\w+)=", PAGE))
    assert len(named) > 8
    assert named <= set(recipe_fields())

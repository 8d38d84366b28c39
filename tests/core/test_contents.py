"""What an object holds: changes at any depth are seen, and equal contents are equal."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drumline.core.contents import contents


def chained(value: Any) -> Any:
    """An object that refers to itself."""
    made = SimpleNamespace(inside=[{"value": value}])
    made.itself = made
    return made


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "dict": ({}, lambda each: each.update(a=1)),
    "defaultdict": (defaultdict(int), lambda each: each["n"]),
    "set": ({1}, lambda each: each.add(2)),
    "deque": (deque([1], maxlen=3), lambda each: each.append(1)),
    "nested": ([{"a": [1.0]}], lambda each: each[0]["a"].append(2)),
    "object": (SimpleNamespace(n=0), lambda each: setattr(each, "n", 1)),
    "cycle": (chained(deque()), lambda each: each.inside[0]["value"].append(0)),
    "method": (deque([1]).append, lambda each: each(2)),
    "array": (np.zeros(3), lambda each: each.fill(1)),
    "tensor": ({"a": torch.zeros(2, 3).T}, lambda each: each["a"].add_(1)),
    "bfloat16": (torch.zeros((), dtype=torch.bfloat16), lambda each: each.add_(1)),
    "module": (nn.BatchNorm1d(2), lambda each: each(torch.ones(3, 2))),
    "numpy": (np.random.default_rng(0), lambda each: each.random()),
    "torch": (torch.Generator(), lambda each: torch.rand(1, generator=each)),
    "random": (random.Random(0), lambda each: each.random()),
    "count": (itertools.count(), next),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    value, change = CHANGES[name]
    before = contents(value)
    assert contents(value) == before
    change(value)
    assert contents(value) != before


def test_what_is_known_is_not_looked_into() -> None:
    known = [0]
    value = {"a": known, "nan": float("nan"), "function": lambda: 0, "class": nn.Linear}
    before = contents(value, [known])
    known.append(1)
    assert contents(value, [known]) == before

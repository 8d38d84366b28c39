"""Layers in words, and names for them that a reader can find in the code of either model.

Promises: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.comparison.differences import Differences, Layers
from drumline.comparison.layers import IMAGE, Layer
from drumline.comparison.operators import ADDITION


@dataclass(frozen=True)
class View:
    """Both networks and their alignment, for finding names."""

    a: Layers
    b: Layers
    found: Differences
    stages: Sequence[str]

    def layers(self, side: str) -> Layers:
        return self.a if side == "A" else self.b

    def label(self, side: str, number: int) -> str:
        """A name for a layer: that of its module if it is the only one there."""
        if number == IMAGE:
            return "the images"
        layers = self.layers(side)
        layer = layers[number]
        alone = layer.kind != ADDITION and sum(each.name == layer.name for each in layers) == 1
        if layer.name and (layer.parameters or alone):
            return layer.name
        if layer.kind == ADDITION:  # a function in a module that holds more
            return f"the addition in {layer.name}" if layer.name else "an addition"
        source = layer.sources[0] if layer.sources else IMAGE
        return f"the {layer.kind} after {self.label(side, source)}"

    def partner(self, side: str, number: int) -> int | None:
        pairs = self.found.pairs
        if side == "A":
            return next((j for i, j in pairs if i == number), None)
        return next((i for i, j in pairs if j == number), None)

    def both(self, side: str, number: int) -> str:
        """The label on this side, and that on the other one if they differ."""
        label, other = self.label(side, number), self.partner(side, number)
        theirs = "A" if side == "B" else "B"
        if number == IMAGE or other is None or self.label(theirs, other) == label:
            return label
        return f"{label} ({self.label(theirs, other)} in {theirs})"

    def after(self, side: str, number: int) -> str:
        """Where a layer is: behind the one that it reads."""
        layers = self.layers(side)
        source = layers[number].sources[0] if layers[number].sources else IMAGE
        if source == IMAGE:
            return "at the beginning"
        return "after the stem" if self._follows_stem(side, number) else f"after {self.both(side, source)}"

    def _follows_stem(self, side: str, number: int) -> bool:
        """Whether a layer lies between the stem and the first layer with weights of the next stage."""
        ends = [place for place, stage in enumerate(self.stages) if stage == "stem"]
        if side == "B" or not ends or number <= ends[-1]:
            return False
        return not any(layer.parameters for layer in self.a[ends[-1] + 1 : number + 1])


def layer_text(layer: Layer) -> str:
    """`convolution 3x3, 64→128, stride 2`."""
    own = layer.settings
    parts = [f"{layer.kind} {size_text(own['kernel'])}" if "kernel" in own else layer.kind]
    if layer.parameters and layer.kind in (ADDITION, "multiplication", "concatenation"):
        parts[0] += f" of the parameter {listed(layer.parameters)}"
    if "out" in own:
        parts.append(f"{own['in']}→{own['out']}")
    plain = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for key, usual in plain.items():
        value = own.get(key)
        if key == "padding" and "kernel" in own:
            continue  # it keeps the size, or is listed as a difference
        if value is not None and set(value if isinstance(value, tuple) else (value,)) != {usual}:
            parts.append(f"{key} {value_text(key, value)}")
    if "mode" in own:
        parts[0] += f" ({own['mode']})"
    if "rate" in own:
        parts[0] += f" {own['rate']:g}"
    if "by" in own:
        parts[0] += f" by {own['by']:g}"
    return ", ".join(parts)


def size_text(value: Any) -> str:
    """`3×3` or, if all sides are equal and it is no kernel, one number."""
    if isinstance(value, tuple):
        return "×".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_text(field: str, value: Any) -> str:
    if field == "kernel":
        return size_text(value)
    if isinstance(value, tuple) and len(set(value)) == 1:
        return str(value[0])
    return "none" if value is None else size_text(value)


def listed(items: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 13 more`."""
    items = list(dict.fromkeys(items))
    if len(items) <= most + 1:
        *first, last = items
        return f"{', '.join(first)} and {last}" if first else last
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def series_text(layers: Sequence[Layer]) -> str:
    """The kinds of a few layers: `convolution 3×3, 64→64, BatchNorm and ReLU`."""
    return listed([layer_text(layer) for layer in layers], 5)


def times(ratio: float) -> str:
    """`3.1×`."""
    return f"{ratio:.3g}×" if ratio >= 10 else f"{ratio:.2g}×"

"""What differs between two networks: layers that only one of them has, different settings, different connections.

Promises: pure functions. A difference that follows from another is not listed: the input channels after a wider
layer, the size of a map after a different stride. Names of modules are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from drumline.comparison.align import Pair, align, slide
from drumline.comparison.layers import IMAGE, Layer
from drumline.comparison.operators import MASK, family

Layers = Sequence[Layer]
Changes = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Changed:
    """Partners that differ in more than what they receive."""

    a: int
    b: int
    settings: Changes


@dataclass(frozen=True)
class Gap:
    """Neighbouring layers that only one network has, and those that the other one has in their place."""

    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True)
class Wiring:
    """Partners that read different layers."""

    a: int
    b: int
    from_a: tuple[int, ...]
    from_b: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """A parameter that several layers read in one network only."""

    in_b: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Differences:
    """All differences in structure."""

    pairs: tuple[Pair, ...]
    changed: tuple[Changed, ...]
    gaps: tuple[Gap, ...]
    wiring: tuple[Wiring, ...]
    sharing: tuple[Sharing, ...]
    in_place: tuple[Pair, ...]
    """Partners of which one writes into its input."""

    @property
    def partners(self) -> dict[int, int]:
        """The layer of B for each layer of A that has one."""
        return {i: j for i, j in self.pairs if i is not None and j is not None}


def align_layers(a: Layers, b: Layers) -> list[Pair]:
    """Pairs the layers by kind, settings, parameters and shapes."""
    signatures = [
        [
            (layer.kind, tuple(sorted(layer.settings.items(), key=str)), layer.shapes, layer.output)
            for layer in layers
        ]
        for layers in (a, b)
    ]
    numbers = {
        signature: number for number, signature in enumerate(dict.fromkeys(signatures[0] + signatures[1]))
    }
    examples = {numbers[key]: layer for keys, layers in zip(signatures, (a, b), strict=True)
                for key, layer in zip(keys, layers, strict=True)}  # fmt: skip
    ones, others = ([numbers[key] for key in keys] for keys in signatures)

    @cache
    def score(one: int, other: int) -> float:
        return _similarity(examples[one], examples[other])

    pairs = align(len(a), len(b), lambda i, j: score(ones[i], others[j]), lambda i, j: ones[i] == others[j])

    def same(gap: Pair, pair: Pair) -> bool:
        side = 1 if gap[1] is None else 0
        layers, ids = (a, ones) if side == 1 else (b, others)
        mine, theirs = gap[1 - side], pair[1 - side]
        assert mine is not None
        assert theirs is not None
        return ids[mine] == ids[theirs] or layers[mine].kind == layers[theirs].kind == "addition"

    def whole(gap: Sequence[Pair]) -> tuple[int, int]:
        """Inside one module as deep as possible, in as few of its children as possible."""
        names = [(a[i] if i is not None else b[j or 0]).name.split(".") for i, j in gap]
        depth = len(_common(names))
        return depth, -len({tuple(name[: depth + 1]) for name in names})

    return slide(pairs, same, whole)


def _similarity(a: Layer, b: Layer) -> float:
    """Above 0 if two layers may be partners."""
    alike = 0.5 if a.output[1:] == b.output[1:] else 0.0
    if a.kind != b.kind:
        return 0.5 + alike if family(a.kind) == family(b.kind) else 0.0
    keys = a.settings.keys() | b.settings.keys()
    equal = sum(a.settings.get(key) == b.settings.get(key) for key in keys)
    return 2.0 + alike + 1.5 * (equal / len(keys) if keys else 1.0) + (2.0 if a.shapes == b.shapes else 0.0)


def find_differences(a: Layers, b: Layers) -> Differences:
    """Compares two networks."""
    pairs = align_layers(a, b)
    partners = [(i, j) for i, j in pairs if i is not None and j is not None]
    changed = [Changed(i, j, found) for i, j in partners if (found := _changes(a[i], b[j]))]
    return Differences(
        pairs=tuple(pairs),
        changed=tuple(changed),
        gaps=tuple(_gaps(pairs)),
        wiring=tuple(_wiring(a, b, pairs)),
        sharing=(*_sharing(a, b, dict(partners), False), *_sharing(b, a, {j: i for i, j in partners}, True)),
        in_place=tuple(
            (i, j) for i, j in partners if a[i].in_place != b[j].in_place and a[i].kind == b[j].kind
        ),
    )


def _changes(a: Layer, b: Layer) -> dict[str, tuple[Any, Any]]:
    if a.kind != b.kind:
        return {"kind": (a.kind, b.kind)}
    found = {
        key: (a.settings.get(key), b.settings.get(key))
        for key in (*a.settings, *(key for key in b.settings if key not in a.settings))
        if a.settings.get(key) != b.settings.get(key) and key != "in"
    }
    if all(_depthwise(each) for each in (a, b)):
        found.pop("groups", None)
        if all(each.settings["out"] == each.settings["in"] for each in (a, b)):
            found.pop("out", None)
    return found


def _depthwise(layer: Layer) -> bool:
    groups = layer.settings.get("groups", 1)
    return "in" in layer.settings and groups == layer.settings["in"] > 1


def _gaps(pairs: Sequence[Pair]) -> list[Gap]:
    found: list[Gap] = []
    ones: list[int] = []
    others: list[int] = []
    for i, j in [*pairs, (0, 0)]:
        if i is not None and j is not None:
            if ones or others:
                found.append(Gap(tuple(ones), tuple(others)))
            ones, others = [], []
        elif i is not None:
            ones.append(i)
        elif j is not None:
            others.append(j)
    return found


def _wiring(a: Layers, b: Layers, pairs: Sequence[Pair]) -> list[Wiring]:
    """Partners whose sources are not partners. A layer without a partner counts as its deepest source."""
    partner = {i: j for i, j in pairs if i is not None and j is not None}
    known = set(partner.values())
    found = []
    for i, j in partner.items():
        from_a = _origins(a, i, set(partner))
        from_b = _origins(b, j, known)
        if {partner.get(each, IMAGE) for each in from_a} != set(from_b):
            found.append(Wiring(i, j, from_a, from_b))
    return found


def _origins(layers: Layers, number: int, known: set[int]) -> tuple[int, ...]:
    origins = []
    for source in layers[number].sources:
        while source != IMAGE and source not in known:
            inner = [each for each in layers[source].sources if each != IMAGE]
            source = max(inner, key=lambda each: layers[each].depth, default=IMAGE)
        origins.append(source)
    return tuple(dict.fromkeys(origins))


def _sharing(one: Layers, other: Layers, partner: Mapping[int, int], in_b: bool) -> list[Sharing]:
    """Parameters that several layers of `one` read, and whose partners read different ones."""
    readers: dict[str, list[int]] = {}
    for number, layer in enumerate(one):
        for name in dict.fromkeys(layer.parameters):
            readers.setdefault(name, []).append(number)
    groups = dict.fromkeys(tuple(numbers) for numbers in readers.values() if len(numbers) > 1)
    found = []
    for numbers in groups:
        theirs = [set(other[partner[each]].parameters) for each in numbers if each in partner]
        if len(theirs) > 1 and not set.intersection(*theirs):
            found.append(Sharing(in_b, numbers))
    return found


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all paths begin with."""
    shared = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return [first for first, *_ in shared]


def common_block(layers: Sequence[Layer]) -> str:
    """The innermost module that contains all these layers."""
    return ".".join(_common([layer.name.split(".") for layer in layers]))


HIDDEN_KINDS = ("dropout", MASK)
HIDDEN_SETTINGS = ("momentum", "rate", "form", "dropout")
"""Layers and settings that do not change the values that are compared: nothing is dropped out there, and running
statistics are those before the step."""
FINE_SETTINGS = ("eps", "approximate")
"""Settings whose effect may be smaller than the tolerance of that comparison."""

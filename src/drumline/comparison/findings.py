"""The differences between two networks as sentences, the most telling first.

Promises: pure. One sentence for one mistake: a difference that repeats in many blocks, or whose parts belong together
(a stride that moved, a bias instead of a BatchNorm), is reported once. Each finding has a stable code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.comparison.differences import (
    HIDDEN_KINDS,
    HIDDEN_SETTINGS,
    Changed,
    Differences,
    Gap,
    Layers,
    Wiring,
    common_block,
)
from drumline.comparison.operators import ADDITION
from drumline.comparison.walk import IMAGE, Layer
from drumline.core.text import counted


@dataclass(frozen=True)
class Finding:
    """A difference in words."""

    code: str
    text: str
    layers: tuple[int, ...] = ()
    """Of A: where the table shows it. Layers that only B has are shown beside these."""
    hidden: bool = False
    """It cannot be seen in the values that are compared."""


@dataclass(frozen=True)
class _View:
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
        if layer.name and (layer.parameters or sum(each.name == layer.name for each in layers) == 1):
            return layer.name
        if layer.kind == ADDITION:
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
        label = self.both(side, source)
        return f"after the stem (after {label})" if self._follows_stem(side, number) else f"after {label}"

    def _follows_stem(self, side: str, number: int) -> bool:
        """Whether a layer lies between the stem and the first layer with weights of the next stage."""
        ends = [place for place, stage in enumerate(self.stages) if stage == "stem"]
        if side == "B" or not ends or number <= ends[-1]:
            return False
        return not any(layer.parameters for layer in self.a[ends[-1] + 1 : number + 1])


def find_structure(a: Layers, b: Layers, found: Differences, stages: Sequence[str]) -> list[Finding]:
    """All differences in structure, in words."""
    view = _View(a, b, found, stages)
    gaps, changed = list(found.gaps), list(found.changed)
    findings = [*_bias_for_norm(view, gaps, changed)]
    findings += [*_strides(view, changed), *_gap_findings(view, gaps), *_widths(view, changed)]
    findings += [*_changes(view, changed), *_wiring(view), *_sharing(view)]
    return findings


def layer_text(layer: Layer) -> str:
    """`convolution 3x3, 64→128, stride 2`."""
    own = layer.settings
    parts = [f"{layer.kind} {size_text(own['kernel'])}" if "kernel" in own else layer.kind]
    if "out" in own:
        parts.append(f"{own['in']}→{own['out']}")
    plain = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for key, usual in plain.items():
        value = own.get(key)
        if key == "padding" and "kernel" in own:
            continue  # it keeps the size, or is listed as a difference
        if value is not None and set(value if isinstance(value, tuple) else (value,)) != {usual}:
            parts.append(f"{key} {_value_text(key, value)}")
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


def _value_text(field: str, value: Any) -> str:
    if field == "kernel":
        return size_text(value)
    if isinstance(value, tuple) and len(set(value)) == 1:
        return str(value[0])
    return "none" if value is None else size_text(value)


def _listed(items: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 13 more`."""
    items = list(dict.fromkeys(items))
    if len(items) <= most + 1:
        *first, last = items
        return f"{', '.join(first)} and {last}" if first else last
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def _series(layers: Sequence[Layer]) -> str:
    """The kinds of a few layers: `convolution 3×3, 64→64, BatchNorm and ReLU`."""
    return _listed([layer_text(layer) for layer in layers], 5)


def _gap_findings(view: _View, gaps: Iterable[Gap]) -> Iterator[Finding]:
    groups: dict[tuple[Any, ...], list[Gap]] = {}
    for gap in gaps:
        key = tuple(tuple(layer_text(view.layers(side)[n]) for n in numbers) for side, numbers in _sides(gap))
        groups.setdefault(key, []).append(gap)
    for same in groups.values():
        first = same[0]
        if first.a and first.b:
            yield _replaced(view, same)
        else:
            yield _missing(view, "A" if first.a else "B", same)


def _sides(gap: Gap) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    return ("A", gap.a), ("B", gap.b)


def _missing(view: _View, side: str, same: Sequence[Gap]) -> Finding:
    """Layers that only `side` has."""
    layers = view.layers(side)
    numbers = same[0].a or same[0].b
    rows = [layers[n] for n in numbers]
    other = "B" if side == "A" else "A"
    where = _places(view, side, [(gap.a or gap.b)[0] for gap in same])
    inside = set(numbers)
    shown = tuple(n for gap in same for n in (gap.a or _neighbours(view, gap)))
    residual = [n for n in numbers if layers[n].kind == ADDITION and len(layers[n].sources) > 1]
    whole = any(row.parameters for row in rows) and all(layers[n].sources[0] in inside for n in residual)
    hidden = all(row.kind in HIDDEN_KINDS for row in rows)
    lacks = "B has no" if side == "A" else "B has an extra"
    if residual and not whole:
        rest = [row for row in rows if row.kind != ADDITION]
        extra = f" (with its {_series(rest)})" if rest else ""
        blocks = [layers[(gap.a or gap.b)[-1]].name for gap in same]
        named = _listed([name or "the model" for name in blocks])
        what = "no residual connection" if side == "A" else "an extra residual connection"
        many = f" ({counted(len(same), 'block')})" if len(same) > 3 else ""
        return Finding(
            "residual", f"{other if side == 'A' else 'B'} has {what}{extra} in {named}{many}", shown
        )
    if len(rows) > 4 and any(row.parameters for row in rows):
        return Finding("block", _block_text(view, side, numbers), shown)
    code = {"batch": "norm"}.get(rows[0].kind, rows[0].kind.lower().replace(" ", "-"))
    return Finding(code, f"{lacks} {_series(rows)} {where}", shown, hidden)


def _block_text(view: _View, side: str, numbers: Sequence[int]) -> str:
    layers = view.layers(side)
    rows = [layers[n] for n in numbers]
    around = common_block(rows)
    depth = len(around.split(".")) if around else 0
    children = list(dict.fromkeys(".".join(row.name.split(".")[: depth + 1]) for row in rows))
    weights = sum(row.weights for row in rows)
    size = f"{counted(len(rows), 'layer')}, {counted(weights, 'parameter')}"
    has = "B does not have" if side == "A" else "B also has"
    if len(children) > 1 and all(child != around for child in children):
        parts = len(children)
        leaf = all(sum(row.name == child for row in rows) == 1 and not child.startswith(f"{rows[0].name}.")
                   for child in children)  # fmt: skip
        if not leaf:
            where = f"{around or 'the model'}: {children[0]} to {children[-1]}"
            return f"{has} {counted(parts, 'block')} in {where} ({size})"
    return f"{has} {around or 'these layers'}: {_series(rows)} ({size})"


def _replaced(view: _View, same: Sequence[Gap]) -> Finding:
    gap = same[0]
    mine, theirs = [view.a[n] for n in gap.a], [view.b[n] for n in gap.b]
    where = _places(view, "A", [each.a[0] for each in same])
    kinds = {layer.kind for layer in (*mine, *theirs)}
    code = "pool" if any("pool" in kind or kind == "mean" for kind in kinds) else "replaced"
    return Finding(
        code,
        f"B has {_series(theirs)} where A has {_series(mine)}, {where}",
        tuple(n for each in same for n in each.a),
        all(kind in HIDDEN_KINDS for kind in kinds),
    )


def _places(view: _View, side: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return view.after(side, numbers[0])
    places = [view.after(side, number).removeprefix("after ") for number in numbers]
    return f"in {len(numbers)} places: after {_listed(places)}"


def _neighbours(view: _View, gap: Gap) -> tuple[int, ...]:
    """The layer of A in front of layers that only B has."""
    found = next((i for j in range(gap.b[0] - 1, -1, -1) if (i := view.partner("B", j)) is not None), 0)
    return (found,)


def _bias_for_norm(view: _View, gaps: list[Gap], changed: list[Changed]) -> Iterator[Finding]:
    """A BatchNorm that one network does not have behind a convolution, which has a bias instead."""
    by_layer = {("A", each.a): each for each in changed} | {("B", each.b): each for each in changed}
    groups: dict[tuple[str, str], list[tuple[Gap, Changed, int]]] = {}
    for gap in gaps:
        for side, numbers in _sides(gap):
            if len(numbers) != 1 or (gap.a and gap.b):
                continue
            layer = view.layers(side)[numbers[0]]
            source = layer.sources[0] if layer.sources else IMAGE
            near = by_layer.get((side, source))
            if layer.kind.endswith("Norm") and near is not None and "bias" in near.settings:
                biased = near.settings["bias"][1 if side == "A" else 0]
                if biased:
                    groups.setdefault((side, layer.kind), []).append((gap, near, source))
    for (side, kind), members in groups.items():
        for gap, near, _ in members:
            gaps.remove(gap)
            _without(changed, near, "bias")
        names = _listed([view.both(side, source) for *_, source in members])
        where = f"after {names}"
        text = (
            f"B has no {kind} {where}: its convolution has a bias instead"
            if side == "A"
            else f"B has {kind} {where}, where A's convolution has a bias instead"
        )
        yield Finding("norm", text, tuple(near.a for _, near, _ in members))


def _without(changed: list[Changed], each: Changed, *fields: str) -> None:
    """Removes explained settings from a difference."""
    place = next(n for n, known in enumerate(changed) if (known.a, known.b) == (each.a, each.b))
    rest = {key: value for key, value in changed[place].settings.items() if key not in fields}
    changed[place : place + 1] = [Changed(each.a, each.b, rest)] if rest else []


def _strides(view: _View, changed: list[Changed]) -> Iterator[Finding]:
    """A stride that moved from one layer to another one of the same block."""
    moved: list[tuple[Changed, Changed]] = []
    strided = [
        each for each in changed if "stride" in each.settings and view.a[each.a].kind == view.b[each.b].kind
    ]
    for one in strided:
        for other in strided:
            blocks = view.a[one.a].block, view.a[other.a].block
            if (
                one.a < other.a
                and blocks[0] == blocks[1]
                and one.settings["stride"] == other.settings["stride"][::-1]
                and not any(each in pair for pair in moved for each in (one, other))
            ):
                moved.append((one, other))
    if not moved:
        return
    places = []
    for pair in moved:
        for each in pair:
            _without(changed, each, "stride")
        big = [max(pair, key=lambda each: each.settings["stride"][side]) for side in (0, 1)]
        texts = [f"{view.label('AB'[side], (each.a, each.b)[side])} "
                 f"({size_text((view.a, view.b)[side][(each.a, each.b)[side]].settings['kernel'])})"
                 for side, each in enumerate(big)]  # fmt: skip
        places.append(f"in {texts[0]} in A, in {texts[1]} in B")
    many = f" ({counted(len(moved), 'block')} alike)" if len(moved) > 1 else ""
    number = _value_text("stride", max(moved[0][0].settings["stride"]))
    yield Finding(
        "stride", f"stride {number} is in a different layer: {places[0]}{many}",
        tuple(each.a for pair in moved for each in pair),
    )  # fmt: skip


def _widths(view: _View, changed: list[Changed]) -> Iterator[Finding]:
    wide = [each for each in changed if "out" in each.settings]
    head = max((n for n, layer in enumerate(view.a) if layer.kind in ("linear", "convolution")), default=-1)
    for each in wide:
        before, after = each.settings["out"]
        if each.a == head:
            name = view.both("A", each.a)
            text = f"the classifier has {counted(after, 'output')} in B and {before:,} in A ({name})"
            yield Finding("head", text, (each.a,))
    inner = [each for each in wide if each.a != head]
    if inner:
        ratios = {round(each.settings["out"][1] / each.settings["out"][0], 3) for each in inner}
        some = [
            f"{each.settings['out'][0]} → {each.settings['out'][1]} in {view.both('A', each.a)}"
            for each in inner
        ]
        how = f"B is {ratios.pop():g}× as wide" if len(ratios) == 1 else "the widths differ"
        many = f" in {counted(len(inner), 'layer')}"
        yield Finding("width", f"{how}{many}: {_listed(some, 2)}", tuple(each.a for each in inner))
    for each in wide:
        _without(changed, each, "out")


def _changes(view: _View, changed: Sequence[Changed]) -> Iterator[Finding]:
    groups: dict[tuple[Any, ...], list[Changed]] = {}
    for each in changed:
        kind = view.a[each.a].kind
        groups.setdefault((kind, *sorted(each.settings.items(), key=str)), []).append(each)
    for (kind, *_), same in groups.items():
        settings = same[0].settings
        total = sum(layer.kind == kind for layer in view.a)
        names = [view.both("A", each.a) for each in same]
        shown = tuple(each.a for each in same)
        every = len(same) == total and total > 2
        where = f"all {total} of them" if every else _listed(names)
        if "kind" in settings:
            places = where if every else _places(view, "A", [each.a for each in same])
            yield Finding(
                "replaced", f"B has {settings['kind'][1]} where A has {settings['kind'][0]} ({places})", shown
            )
        elif set(settings) == {"bias"}:
            yield _bias(view, kind, same, where, shown)
        else:
            texts = [f"{key} is {_value_text(key, one)} in A and {_value_text(key, other)} in B"
                     for key, (one, other) in settings.items()]  # fmt: skip
            yield Finding(
                next(iter(settings)).replace(" ", "-"),
                f"{kind} {', '.join(texts)} ({where})",
                shown,
                all(key in HIDDEN_SETTINGS for key in settings),
            )


def _bias(view: _View, kind: str, same: Sequence[Changed], where: str, shown: tuple[int, ...]) -> Finding:
    in_b = bool(same[0].settings["bias"][1])
    layers, number = (view.b, same[0].b) if in_b else (view.a, same[0].a)
    side, other = ("B", "A") if in_b else ("A", "B")
    normed = all(
        any(layer.kind == "BatchNorm" and (each.b if in_b else each.a) in layer.sources for layer in layers)
        for each in same
    )
    size = sum(
        (view.b[each.b] if in_b else view.a[each.a]).settings["out"]
        for each in same
        if "out" in layers[number].settings
    )
    extra = ", although the BatchNorm behind it subtracts it again" if normed else ""
    count = f" ({counted(size, 'parameter')})" if size else ""
    return Finding("bias", f"{kind} has a bias in {side} and none in {other}{count}{extra}: {where}", shown)


def _wiring(view: _View) -> Iterator[Finding]:
    groups: dict[str, list[Wiring]] = {}
    for each in view.found.wiring:
        groups.setdefault(view.a[each.a].kind, []).append(each)
    for kind, same in groups.items():
        first = same[0]
        reads = [" and ".join(view.label(side, n) for n in numbers) or "nothing"
                 for side, numbers in (("A", first.from_a), ("B", first.from_b))]  # fmt: skip
        more = f"; {len(same) - 1} more like it" if len(same) > 1 else ""
        where = view.both("A", first.a)
        named = where if where.startswith("the ") else f"{where} ({kind})"
        yield Finding(
            "wiring",
            f"{named} reads something else: {reads[0]} in A, {reads[1]} in B{more}",
            tuple(each.a for each in same),
        )


def _sharing(view: _View) -> Iterator[Finding]:
    for each in view.found.sharing:
        side, other = ("B", "A") if each.in_b else ("A", "B")
        names = _listed([view.label(side, number) for number in each.layers])
        shown = (
            each.layers
            if not each.in_b
            else tuple(i for n in each.layers if (i := view.partner("B", n)) is not None)
        )
        yield Finding(
            "sharing", f"{names} share their weights in {side}, and have their own in {other}", shown
        )

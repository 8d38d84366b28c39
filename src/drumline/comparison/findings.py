"""The differences between two networks as sentences, the most informative first.

Promises: pure. One sentence for one mistake: a difference that repeats in many blocks, or whose parts belong together
(a stride that moved, a bias instead of a BatchNorm), is reported once. Each finding has a stable code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.comparison.differences import (
    FINE_SETTINGS,
    HIDDEN_KINDS,
    HIDDEN_SETTINGS,
    Changed,
    Differences,
    Gap,
    Layers,
    Wiring,
    common_block,
)
from drumline.comparison.layers import IMAGE, Layer
from drumline.comparison.operators import ADDITION, MASK
from drumline.comparison.wording import View, layer_text, listed, series_text, size_text, value_text
from drumline.core.text import counted


@dataclass(frozen=True)
class Finding:
    """A difference in words."""

    code: str
    text: str
    layers: tuple[int, ...] = ()
    """Of A: where the table shows it. Layers that only B has are shown beside these."""
    hidden: bool = False
    """Part of it cannot be seen in the values that are compared, so equal values do not refute it."""
    visible: bool = True
    """Part of it can, so it explains values that differ."""


def find_structure(a: Layers, b: Layers, found: Differences, stages: Sequence[str]) -> list[Finding]:
    """All differences in structure, in words."""
    view = View(a, b, found, stages)
    gaps, changed = list(found.gaps), list(found.changed)
    findings = [*_bias_for_norm(view, gaps, changed)]
    findings += [*_strides(view, changed), *_moved(view, gaps), *_gap_findings(view, gaps)]
    findings += _widths(view, changed)
    findings += [*_changes(view, changed), *_wiring(view), *_sharing(view)]
    return findings


def _gap_findings(view: View, gaps: Iterable[Gap]) -> Iterator[Finding]:
    groups: dict[tuple[Any, ...], list[Gap]] = {}
    for gap in gaps:
        key = tuple(
            tuple(_without_rate(view.layers(side)[n]) for n in numbers) for side, numbers in _sides(gap)
        )
        groups.setdefault(key, []).append(gap)
    for same in groups.values():
        first = same[0]
        if first.a and first.b:
            yield _replaced(view, same)
        else:
            yield _missing(view, "A" if first.a else "B", same)


def _without_rate(layer: Layer) -> str:
    """Stochastic depth grows from block to block, and is one difference nevertheless."""
    return layer.kind if layer.kind == MASK else layer_text(layer)


def _rates(rows: Sequence[Layer]) -> str:
    """`0.1`, or `0.01 to 0.1`."""
    rates = sorted({float(row.settings["rate"]) for row in rows})
    return f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"


def _sides(gap: Gap) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    return ("A", gap.a), ("B", gap.b)


def _missing(view: View, side: str, same: Sequence[Gap]) -> Finding:
    """Layers that only `side` has."""
    layers = view.layers(side)
    starts = [(gap.a or gap.b)[0] for gap in same]
    numbers = same[0].a or same[0].b
    rows = [layers[n] for n in numbers]
    shown = tuple(n for gap in same for n in (gap.a or _neighbours(view, gap)))
    lacks = "B has no" if side == "A" else "B has an extra"
    if not any(row.used for row in rows):
        names = listed([row.name or row.kind for row in rows])
        text = f"{side} computes {series_text(rows)} ({names}) and does not use the result"
        return Finding("unused", text, shown)
    if any(_joins(layers, n, numbers) for n in numbers):
        rest = [row for row in rows if row.kind != ADDITION]
        extra = f" (with its {series_text(rest)})" if rest else ""
        sums = [next(layers[n] for n in (gap.a or gap.b) if layers[n].kind == ADDITION) for gap in same]
        named = listed([each.name or "the model" for each in sums])
        many = f" ({counted(len(same), 'block')})" if len(same) > 3 else ""
        hidden, _ = _effect(row.kind for row in rest)
        return Finding("residual", f"{lacks} residual connection{extra} in {named}{many}", shown, hidden)
    if len(rows) > 4 and any(row.parameters for row in rows):
        return Finding("block", _block_text(view, side, numbers), shown)
    after = ", so no gradient flows through it" if rows[0].kind == "detach" and side == "B" else ""
    what = series_text(rows)
    if rows[0].kind == MASK and len(rows) == 1:
        what = f"{MASK} {_rates([layers[start] for start in starts])}"
    text = f"{lacks} {what} {_places(view, side, starts)}{after}"
    return Finding(_code(rows[0].kind), text, shown, *_effect(row.kind for row in rows))


def _effect(kinds: Iterable[str]) -> tuple[bool, bool]:
    """`hidden` and `visible` of a finding about layers of these kinds."""
    unseen = [kind in HIDDEN_KINDS for kind in kinds]
    return any(unseen), not all(unseen)


def _code(kind: str) -> str:
    return "norm" if kind.endswith("Norm") else kind.lower().replace(" ", "-")


def _joins(layers: Layers, number: int, gap: Sequence[int]) -> bool:
    """Whether an addition of a gap joins the trunk with a shortcut. In a whole block that is missing it joins what
    the block makes with what the block reads."""
    if layers[number].kind != ADDITION or len(layers[number].sources) < 2:
        return False
    outside = [source for source in layers[number].sources if source not in gap]
    return bool(outside) and (number == gap[0] or not set(outside) <= set(layers[gap[0]].sources))


def _block_text(view: View, side: str, numbers: Sequence[int]) -> str:
    layers = view.layers(side)
    rows = [layers[n] for n in numbers]
    around = common_block(rows)
    depth = len(around.split(".")) if around else 0
    children = list(dict.fromkeys(".".join(row.name.split(".")[: depth + 1]) for row in rows))
    size = f"{counted(len(rows), 'layer')}, {counted(sum(row.weights for row in rows), 'parameter')}"
    has = "B does not have" if side == "A" else "B also has"
    per_child = len(rows) / len(children)
    if len(children) > 1 and around not in children and per_child > 4:
        return f"{has} {counted(len(children), 'block')}: {children[0]} to {children[-1]} ({size})"
    if around and all(row.name.startswith(around) for row in rows) and len(rows) > 5:
        return f"{has} the block {around} ({size})"
    return f"{has} {series_text(rows)} {view.after(side, numbers[0])} ({size})"


def _moved(view: View, gaps: list[Gap]) -> Iterator[Finding]:
    """Layers that are in a different place, a few layers away."""
    rows = {("A", i): n for n, (i, _) in enumerate(view.found.pairs) if i is not None}
    rows |= {("B", j): n for n, (_, j) in enumerate(view.found.pairs) if j is not None}
    groups: dict[str, list[tuple[Gap, Gap]]] = {}
    for one in [gap for gap in gaps if gap.a and not gap.b]:
        text = series_text([view.a[n] for n in one.a])
        for other in [gap for gap in gaps if gap.b and not gap.a]:
            near = abs(rows["A", one.a[0]] - rows["B", other.b[0]]) <= 4 + len(one.a)
            if (
                near
                and series_text([view.b[n] for n in other.b]) == text
                and one in gaps
                and view.a[one.a[0]].used
            ):
                groups.setdefault(text, []).append((one, other))
                gaps.remove(one)
                gaps.remove(other)
    for text, pairs in groups.items():
        one, other = pairs[0]
        many = f" ({len(pairs)} places)" if len(pairs) > 1 else ""
        yield Finding(
            "moved",
            f"{text} is {view.after('A', one.a[0])} in A, but {view.after('B', other.b[0])} in B{many}",
            tuple(n for pair, _ in pairs for n in pair.a),
            *_effect(view.a[n].kind for n in one.a),
        )


def _replaced(view: View, same: Sequence[Gap]) -> Finding:
    gap = same[0]
    mine, theirs = [view.a[n] for n in gap.a], [view.b[n] for n in gap.b]
    where = _places(view, "A", [each.a[0] for each in same])
    kinds = {layer.kind for layer in (*mine, *theirs)}
    code = "pool" if any("pool" in kind or kind == "mean" for kind in kinds) else "replaced"
    return Finding(
        code,
        f"B has {series_text(theirs)} where A has {series_text(mine)}, {where}",
        tuple(n for each in same for n in each.a),
        *_effect(kinds),
    )


def _places(view: View, side: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return view.after(side, numbers[0])
    places = [view.after(side, number) for number in numbers]
    if all(place.startswith("after ") for place in places):
        places = [places[0], *(place.removeprefix("after ") for place in places[1:])]
    return f"in {len(numbers)} places: {listed(places)}"


def _neighbours(view: View, gap: Gap) -> tuple[int, ...]:
    """The layer of A in front of layers that only B has."""
    found = next((i for j in range(gap.b[0] - 1, -1, -1) if (i := view.partner("B", j)) is not None), 0)
    return (found,)


def _bias_for_norm(view: View, gaps: list[Gap], changed: list[Changed]) -> Iterator[Finding]:
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
        names = listed([view.both(side, source) for *_, source in members])
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


_BLOCK = 12
"""Layers between two of the same block, at most."""


def _strides(view: View, changed: list[Changed]) -> Iterator[Finding]:
    """A stride that moved from one layer to another one of the same block."""
    moved: list[tuple[Changed, Changed]] = []
    waiting: list[Changed] = []
    for each in [
        each for each in changed if "stride" in each.settings and "kernel" in view.a[each.a].settings
    ]:
        near = [
            one
            for one in waiting
            if one.settings["stride"] == each.settings["stride"][::-1] and each.a - one.a <= _BLOCK
        ]
        if near:
            waiting.remove(near[-1])
            moved.append((near[-1], each))
        else:
            waiting.append(each)
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
    number = value_text("stride", max(moved[0][0].settings["stride"]))
    yield Finding(
        "stride", f"stride {number} is in a different layer: {places[0]}{many}",
        tuple(each.a for pair in moved for each in pair),
    )  # fmt: skip


def _widths(view: View, changed: list[Changed]) -> Iterator[Finding]:
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
        yield Finding("width", f"{how}{many}: {listed(some, 2)}", tuple(each.a for each in inner))
    for each in wide:
        _without(changed, each, "out")


def _changes(view: View, changed: Sequence[Changed]) -> Iterator[Finding]:
    groups: dict[tuple[Any, ...], list[Changed]] = {}
    for each in changed:
        kind = view.a[each.a].kind
        items: tuple[Any, ...] = tuple(
            (key, _named_groups(view, each) if key == "groups" else value)
            for key, value in each.settings.items()
        )
        if kind == MASK and set(each.settings) == {"rate"}:
            items = (("rate", ()),)
        groups.setdefault((kind, *items), []).append(each)
    for (kind, *values), same in groups.items():
        settings: dict[str, Any] = dict(values)
        if settings == {"rate": ()}:
            rows = [view.a[each.a] for each in same], [view.b[each.b] for each in same]
            settings = {"rate": (_rates(rows[0]), _rates(rows[1]))}
        total = sum(layer.kind == kind for layer in view.a)
        names = [view.both("A", each.a) for each in same]
        shown = tuple(each.a for each in same)
        every = len(same) == total and total > 2
        where = f"all {total} of them" if every else listed(names)
        if "kind" in settings:
            places = where if every else _places(view, "A", [each.a for each in same])
            yield Finding(
                "replaced", f"B has {settings['kind'][1]} where A has {settings['kind'][0]} ({places})", shown
            )
        elif set(settings) == {"bias"}:
            yield _bias(view, kind, same, where, shown)
        else:
            texts = [f"{key} is {value_text(key, one)} in A and {value_text(key, other)} in B"
                     for key, (one, other) in settings.items()]  # fmt: skip
            yield Finding(
                next(iter(settings)).replace(" ", "-"),
                f"{kind} {', '.join(texts)} ({where})",
                shown,
                any(key in (*HIDDEN_SETTINGS, *FINE_SETTINGS) for key in settings),
                not all(key in HIDDEN_SETTINGS for key in settings),
            )


def _named_groups(view: View, each: Changed) -> tuple[Any, Any]:
    """The numbers of groups; a group for each channel has a name."""
    layers = view.a[each.a], view.b[each.b]
    values = [layer.settings["groups"] for layer in layers]
    own = [value == layer.settings["in"] for value, layer in zip(values, layers, strict=True)]
    return tuple("one for each channel" if one else value for one, value in zip(own, values, strict=True))  # type: ignore[return-value]


def _bias(view: View, kind: str, same: Sequence[Changed], where: str, shown: tuple[int, ...]) -> Finding:
    side, other = ("B", "A") if same[0].settings["bias"][1] else ("A", "B")
    layers = view.layers(side)
    numbers = [each.b if side == "B" else each.a for each in same]
    normed = all(
        any(layer.kind == "BatchNorm" and number in layer.sources for layer in layers) for number in numbers
    )
    size = sum(layers[number].settings.get("out", 0) for number in numbers)
    extra = ", although the BatchNorm after it cancels it" if normed else ""
    count = f", {counted(size, 'parameter')}" if size else ""
    return Finding("bias", f"{kind} has a bias in {side} and none in {other}{extra} ({where}{count})", shown)


def _wiring(view: View) -> Iterator[Finding]:
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
            f"{named} has different inputs: {reads[0]} in A, {reads[1]} in B{more}",
            tuple(each.a for each in same),
            any(
                view.a[n].kind in HIDDEN_KINDS
                for each in same
                for n in (each.a, *each.from_a, *(view.partner("B", j) for j in each.from_b))
                if n is not None and n != IMAGE
            ),
        )


def _sharing(view: View) -> Iterator[Finding]:
    for each in view.found.sharing:
        side, other = ("B", "A") if each.in_b else ("A", "B")
        partners = [n for number in each.layers if (n := view.partner(side, number)) is not None]
        names = listed([view.label(other, number) for number in partners])
        shown = tuple(partners) if each.in_b else each.layers
        text = f"{names} have separate weights in {other}, and share them in {side}"
        yield Finding("sharing", text, shown)

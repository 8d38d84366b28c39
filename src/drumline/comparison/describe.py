"""The result of a comparison: whether two models are the same network, a sentence that says what matters, and tables.

Promises: pure. The first sentence is the answer. Costs are named only if they differ by more than they may by chance.
Lines fit the given width, whatever the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from drumline.comparison.align import Pair
from drumline.comparison.findings import Finding, find_structure, layer_text, size_text
from drumline.comparison.measure import Measured
from drumline.comparison.operators import ACTIVATIONS, ADDITION, MASK, NORMS
from drumline.comparison.walk import Layer
from drumline.core.text import counted, printable, wrapped_lines


@dataclass(frozen=True)
class Verdict:
    """The answer."""

    equal: bool
    sentence: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What does not change the values, and what is the same."""


def judge(measured: Measured) -> Verdict:
    """Whether both are the same network, and what differs."""
    structure = find_structure(measured.a, measured.b, measured.differences, measured.stages)
    values, weights = measured.values, measured.weights
    one, other = (totals.parameters for totals in measured.totals)
    visible = [each for each in structure if not each.hidden]
    alike = measured.same_shapes and one == other
    equal_values = values.equal and alike
    notes: list[str] = []
    if equal_values:
        notes += [f"without effect on the values: {each.text}" for each in visible]
        structure = [each for each in structure if each.hidden]
    findings = [*structure, *_unused(measured), *_value_findings(measured, bool(visible))]
    trained = weights is not None and weights.different > 0
    if trained and not equal_values and not visible and alike:
        findings = [each for each in findings if each.code != "values"]
    if weights is not None and weights.different:
        findings.append(Finding("weights", _weights_text(measured)))
    notes += [*_in_place(measured), *_names(measured), *_drawn(measured)]
    equal = equal_values and not findings
    if equal:
        sentence = (
            f"the same network: {counted(one, 'parameter')}{' in the same order' if measured.same_order else ''}, "
            f"equal outputs and gradients (to {_scientific(max(values.output, values.evaluation))}); "
            f"names {'are the same, too' if measured.same_names else 'differ'}"
        )
        return Verdict(True, sentence, (), tuple(notes))
    notes.append(_unchanged(measured, structure))
    sentence = "; ".join(each.text for each in findings[:2])
    if len(findings) > 2:
        sentence += f"; and {counted(len(findings) - 2, 'more difference')}"
    if costs := _consequences(measured):
        sentence += f": {costs}" if len(findings) <= 2 else f". Together: {costs}"
    return Verdict(False, sentence, tuple(findings), tuple(filter(None, notes)))


def _value_findings(measured: Measured, visible: bool) -> Iterator[Finding]:
    values = measured.values
    if values.layer is not None:
        if visible:
            return
        i = values.layer
        mine, theirs = measured.a[i], measured.b[measured.differences.partners[i]]
        names = mine.name or "the model"
        names += "" if mine.name == theirs.name else f" ({theirs.name or 'the model'} in B)"
        why = (
            " what lies before it rearranges, selects or repeats values differently, or computes with other constants"
            if mine.kind != "attention"
            else " its inputs are divided into heads differently"
        )
        yield Finding(
            "values",
            f"the layers are the same, but with equal weights the values first differ at the {mine.kind} in "
            f"{names}:{why}",
            (i,),
        )
    elif values.gradient and not visible:
        yield Finding(
            "gradients",
            f"with equal weights the outputs are equal, but the gradients first differ at {values.gradient}: look "
            "for detach(), no_grad() or requires_grad between it and the output",
        )
    elif values.evaluation > values.tolerance >= values.output and not visible:
        yield Finding(
            "evaluation", "with equal weights the outputs are equal in training, but not in evaluation mode"
        )
    elif values.output > values.tolerance and not visible:
        yield Finding("values", "the layers are the same, but with equal weights the outputs differ: in what happens "
                      "behind the last layer, or in a shape")  # fmt: skip


def _weights_text(measured: Measured) -> str:
    weights = measured.weights
    assert weights is not None
    total = weights.equal + weights.different
    return (
        f"the weights differ in {weights.different:,} of {counted(total, 'parameter tensor')}, most in "
        f"{weights.largest} (by {weights.distance:.2g} of its largest value)"
    )


def _unused(measured: Measured) -> Iterator[Finding]:
    one, other = (totals.unused for totals in measured.totals)
    if one != other:
        side, count = ("B", other) if other > one else ("A", one)
        yield Finding("unused", f"{counted(count, 'parameter')} of {side} are not used in its forward")


def _in_place(measured: Measured) -> Iterator[str]:
    pairs = measured.differences.in_place
    for side, layers in (("A", measured.a), ("B", measured.b)):
        own = [layers[pair[side == "B"] or 0] for pair in pairs]
        kinds = [layer.kind for layer in own if layer.in_place]
        if kinds:
            named = " and ".join(dict.fromkeys(kinds))
            yield f"in place in {side} only: {counted(len(kinds), 'layer')} ({named})"


def _names(measured: Measured) -> Iterator[str]:
    if measured.same_shapes and not measured.same_order:
        yield (
            "the parameters are registered in a different order, so optimizer states and weights that are copied by "
            "position do not fit"
        )


def _drawn(measured: Measured) -> Iterator[str]:
    if measured.drawn:
        first = measured.drawn[0]
        more = f", and {counted(len(measured.drawn) - 1, 'more tensor')}" if len(measured.drawn) > 1 else ""
        other = "" if first.a == first.b else f" ({first.b} in B)"
        yield (
            f"initial weights are drawn differently: {first.a}{other} has a root mean square of "
            f"{first.spread_a:.3g} in A and {first.spread_b:.3g} in B{more}"
        )


def _unchanged(measured: Measured, structure: Sequence[Finding]) -> str:
    """What does not differ, as far as the networks have it."""
    codes = {finding.code for finding in structure}
    gone = {code for code in codes if code in ("block", "replaced")}
    partners = measured.differences
    touched = {measured.a[i].kind for gap in partners.gaps for i in gap.a}
    touched |= {measured.b[j].kind for gap in partners.gaps for j in gap.b}
    touched |= {
        each for change in partners.changed for each in (measured.a[change.a].kind, measured.b[change.b].kind)
    }
    kinds = {layer.kind for layer in measured.a}
    changed = {key for change in partners.changed for key in change.settings}
    same = []
    if measured.same_shapes:
        same.append("the shapes of all parameters")
    if (
        not changed & {"kernel", "stride", "padding", "dilation", "groups"}
        and "convolution" in kinds - touched
    ):
        same.append("kernels, strides and padding of the convolutions")
    for title, members in (
        ("normalisation", {*NORMS.values()}),
        ("activations", {*ACTIVATIONS.values()}),
        ("residual connections", {ADDITION}),
        ("dropout", {"dropout", MASK}),
    ):
        if kinds & members and not touched & members:
            same.append(title)
    if not gone and not codes & {"head", "width"} and measured.a[-1].settings == measured.b[-1].settings:
        same.append("the classifier")
    return f"no difference in {', '.join(same)}" if same else ""


def _consequences(measured: Measured) -> str:
    """What the differences cost: activations by stage, and totals."""
    parts = list(_stage_ratios(measured))
    one, other = measured.totals
    kept = other.kept_bytes / one.kept_bytes if one.kept_bytes else 1.0
    flops = other.flops / one.flops if one.flops else 1.0
    if not parts and abs(kept - 1) > 0.02:
        parts.append(f"activation memory {times(kept)}")
    if abs(flops - 1) > 0.02:
        parts.append(f"FLOPs {times(flops)}")
    if max(measured.ratio, 1 / measured.ratio) > 1.25:
        slower = measured.ratio > 1
        factor = times(measured.ratio if slower else 1 / measured.ratio)
        parts.append(f"the step {factor} {'slower' if slower else 'faster'}")
    return ", ".join(parts)


def _stage_ratios(measured: Measured) -> Iterator[str]:
    ratios: dict[str, list[float]] = {}
    for i, j in measured.differences.partners.items():
        one, other = measured.a[i].output, measured.b[j].output
        if measured.stages[i] and measured.stages[i] != "head" and len(one) == len(other) and len(one) > 2:
            ratios.setdefault(measured.stages[i], []).append(prod(other) / prod(one))
    found = [(stage, round(median(each), 2)) for stage, each in ratios.items()]
    groups: list[tuple[float, list[str]]] = []
    for stage, ratio in found:
        if groups and groups[-1][0] == ratio:
            groups[-1][1].append(stage)
        else:
            groups.append((ratio, [stage]))
    for ratio, stages in groups:
        if abs(ratio - 1) > 0.02:
            how = f"{ratio:g}× larger" if ratio > 1 else f"{1 / ratio:.3g}× smaller"
            numbers = [stage.removeprefix("stage") for stage in stages if stage != "stem"]
            names = ["the stem"] if "stem" in stages else []
            if numbers:
                names.append(
                    f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}–{numbers[-1]}"
                )
            yield f"activations of {' and '.join(names)} are {how}"


def times(ratio: float) -> str:
    """`3.1×`."""
    return f"{ratio:.3g}×" if ratio >= 10 else f"{ratio:.2g}×"


def _scientific(value: float) -> str:
    return "the last bit" if value == 0 else f"{value:.0e}"


def totals_lines(measured: Measured) -> list[str]:
    """A table of both models' totals."""
    one, other = measured.totals
    rows = [
        (
            "parameters",
            f"{one.parameters:,}",
            f"{other.parameters:,}",
            _ratio(one.parameters, other.parameters),
        ),
        (
            "GFLOPs an image, forward",
            f"{one.flops / 1e9:.3g}",
            f"{other.flops / 1e9:.3g}",
            _ratio(one.flops, other.flops),
        ),
        (
            "MiB of activations an image",
            f"{one.kept_bytes / 2**20:.3g}",
            f"{other.kept_bytes / 2**20:.3g}",
            _ratio(one.kept_bytes, other.kept_bytes),
        ),
        (
            "ms a step (forward, backward)",
            f"{1000 * one.step_s:.4g}",
            f"{1000 * other.step_s:.4g}",
            times(measured.ratio),
        ),
    ]
    return [
        f"{title:<31}{a:>14}{b:>14}{ratio:>10}" for title, a, b, ratio in [("", "A", "B", "B / A"), *rows]
    ]


def _ratio(one: float, other: float) -> str:
    return "equal" if one == other else times(other / one) if one else "-"


CONTEXT, MOST = 2, 24
"""Layers shown around a difference, and rows of the table in all."""


@dataclass(frozen=True)
class _Columns:
    """The widths of the table's columns."""

    name: int
    text: int
    output: int
    number: int
    memory: bool

    @staticmethod
    def of(width: int) -> _Columns:
        memory, output, number = width >= 110, 13 if width >= 100 else 12, 8 if width >= 100 else 7
        room = width - 2 - 2 * output - (4 if memory else 2) * number
        return _Columns(room * 9 // 20, room - room * 9 // 20, output, number, memory)


def table_lines(
    measured: Measured, findings: Iterable[Finding], width: int, every: bool = False
) -> list[str]:
    """The layers around the differences, or all of them."""
    pairs = measured.differences.pairs
    named = {number for finding in findings for number in finding.layers}
    marks = [_mark(measured, pair, named) for pair in pairs]
    shown = list(range(len(pairs))) if every else _region([bool(mark.strip()) for mark in marks])
    if not shown:
        return []
    columns = _Columns.of(width)
    heads = ["MiB A", "MiB B"] if columns.memory else []
    lines = [
        "  "
        + " " * (columns.name + columns.text)
        + f"{'output A':>{columns.output}}{'output B':>{columns.output}}"
        + "".join(f"{head:>{columns.number}}" for head in (*heads, "ms A", "ms B"))
    ]
    last = -1
    for number in (*shown, len(pairs)):
        if number > last + 1:
            hidden = sum(bool(mark.strip()) for mark in marks[last + 1 : number])
            more = f", {hidden:,} of them different" if hidden else ""
            lines.append(f"  ... {counted(number - last - 1, 'layer')}{more} ...")
        if number < len(pairs):
            lines += _rows(measured, pairs[number], marks[number], columns)
        last = number
    return [line.rstrip() for line in lines]


def _mark(measured: Measured, pair: Pair, named: set[int]) -> str:
    i, j = pair
    if j is None:
        return "- "
    if i is None:
        return "+ "
    if i == measured.values.layer and i in named:
        return "≠ "
    found = measured.differences
    changed = {each.a for each in found.changed} | {each.a for each in found.wiring}
    return "~ " if i in changed else "  "


def _region(marked: Sequence[bool]) -> list[int]:
    """Positions of the first marked rows with their context, at most `MOST`."""
    near: list[int] = []
    for number, mark in enumerate(marked):
        if mark:
            around = range(max(0, number - CONTEXT), min(len(marked), number + CONTEXT + 1))
            new = [each for each in around if not near or each > near[-1]]
            if len(near) + len(new) > MOST:
                break
            near += new
    return near


def _rows(measured: Measured, pair: Pair, mark: str, columns: _Columns) -> list[str]:
    a = None if pair[0] is None else measured.a[pair[0]]
    b = None if pair[1] is None else measured.b[pair[1]]
    if mark == "~ " and a is not None and b is not None:
        return [_line("- ", a, None, columns, _own(a, b)), _line("+ ", None, b, columns, _own(b, a))]
    return [_line(mark, a, b, columns)]


def _own(layer: Layer, other: Layer) -> str:
    """The layer in words, with the settings that differ from those of the other one."""
    text = layer_text(layer)
    if layer_text(other) != text:
        return text
    extra = [
        f"{key} {size_text(value)}"
        for key, value in layer.settings.items()
        if other.settings.get(key) != value and key != "in"
    ]
    return ", ".join([text, *extra])


def _line(mark: str, a: Layer | None, b: Layer | None, columns: _Columns, text: str = "") -> str:
    shown = a or b
    assert shown is not None
    outputs = ["×".join(map(str, layer.output[1:])) if layer else "-" for layer in (a, b)]
    if outputs[0] == outputs[1]:
        outputs[1] = "="
    numbers = [f"{layer.kept_bytes / 2**20:.2f}" if layer else "-" for layer in (a, b) if columns.memory]
    numbers += [f"{1000 * layer.seconds:.2f}" if layer else "-" for layer in (a, b)]
    return (
        mark
        + _cell(shown.name or "-", columns.name)
        + _cell(text or layer_text(shown), columns.text)
        + "".join(f"{output:>{columns.output}}" for output in outputs)
        + "".join(f"{number:>{columns.number}}" for number in numbers)
    )


def _cell(text: str, width: int) -> str:
    """Text of this width, with a space behind it. What is too long loses its beginning, if it is a name."""
    text = printable(text)
    if len(text) >= width:
        text = f"…{text[len(text) - width + 2 :]}" if " " not in text else f"{text[: width - 2]}…"
    return f"{text:<{width}}"


def verdict_lines(verdict: Verdict, width: int) -> list[str]:
    """The answer, the findings behind it and the notes."""
    lines = wrapped_lines(("equal: " if verdict.equal else "different: ") + verdict.sentence, width, "  ")
    if len(verdict.findings) > 2:
        for finding in verdict.findings:
            lines += wrapped_lines(f"- {finding.text}", width, "    ", "  ")
    for note in verdict.notes:
        lines += wrapped_lines(f"note: {note}", width, "  ")
    return lines

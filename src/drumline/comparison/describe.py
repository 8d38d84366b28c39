"""The result of a comparison: whether two models are the same network, in a sentence, with the costs and notes.

Promises: pure. The first sentence is the answer. Costs are named only if they differ by more than noise.
Lines fit the given width, whatever the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from drumline.comparison.differences import HIDDEN_KINDS
from drumline.comparison.findings import Finding, find_structure
from drumline.comparison.layers import IMAGE
from drumline.comparison.measure import Measured
from drumline.comparison.operators import ACTIVATIONS, ADDITION, MASK, NORMS
from drumline.comparison.wording import layer_text, times
from drumline.core.text import counted, wrapped_lines


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
    visible = [each for each in structure if each.visible]
    alike = measured.same_shapes and one == other
    equal_values = values.equal and alike
    notes: list[str] = []
    if equal_values:
        notes += [f"without effect on the values: {each.text}" for each in structure if not each.hidden]
        structure = [each for each in structure if each.hidden] or [*_dropped_elsewhere(measured)]
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
            f"names {'are the same' if measured.same_names else 'differ'}"
        )
        return Verdict(True, sentence, (), tuple(notes))
    notes.append(_unchanged(measured, structure))
    sentence = "; ".join(each.text for each in findings[:2])
    if [each.code for each in findings] == ["weights"]:
        sentence = f"the same layers, but {sentence}"
    elif equal_values and all(each.hidden for each in findings):
        sentence = f"with equal weights the outputs and gradients are equal, but {sentence}"
    if len(findings) > 2:
        sentence += f"; and {counted(len(findings) - 2, 'more difference')}"
    if costs := _consequences(measured):
        sentence += f": {costs}" if len(findings) <= 2 else f". Together: {costs}"
    return Verdict(False, sentence, tuple(findings), tuple(filter(None, notes)))


def _dropped_elsewhere(measured: Measured) -> Iterator[Finding]:
    """Partners that drop out behind layers that are no partners: where nothing is dropped, that cannot be seen."""
    partner = measured.differences.partners | {IMAGE: IMAGE}
    for i, j in measured.differences.partners.items():
        one, other = measured.a[i], measured.b[j]
        if one.kind in HIDDEN_KINDS and {partner.get(each) for each in one.sources} != {*other.sources}:
            read = [
                " and ".join("the images" if n == IMAGE else layer_text(layers[n]) for n in layer.sources)
                for layer, layers in ((one, measured.a), (other, measured.b))
            ]
            text = f"{one.kind} ({one.name or 'the model'}) reads {read[0]} in A and {read[1]} in B"
            yield Finding("wiring", text, (i,), hidden=True)


def _value_findings(measured: Measured, visible: bool) -> Iterator[Finding]:
    values = measured.values
    if values.equal or visible:
        return
    if values.layer is not None:
        i = values.layer
        mine, theirs = measured.a[i], measured.b[measured.differences.partners[i]]
        names = mine.name or "the model"
        names += "" if mine.name == theirs.name else f" ({theirs.name or 'the model'} in B)"
        why = (
            " the code before it rearranges, selects or repeats values differently, or uses different constants"
            if mine.kind != "attention"
            else " its inputs are divided into heads differently"
        )
        yield Finding(
            "values",
            f"the layers are the same, but with equal weights the values first differ at the {mine.kind} in "
            f"{names}:{why}",
            (i,),
        )
    elif values.gradient:
        yield Finding(
            "gradients",
            f"with equal weights the outputs are equal, but the gradients first differ at {values.gradient}: look "
            "for detach(), no_grad() or requires_grad between it and the output",
        )
    elif values.evaluation > values.tolerance >= values.output:
        yield Finding(
            "evaluation", "with equal weights the outputs are equal in training, but not in evaluation mode"
        )
    elif values.output > values.tolerance:
        yield Finding("values", "the layers are the same, but with equal weights the outputs differ: look at the "
                      "code after the last layer, and at the shapes")  # fmt: skip


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
        yield Finding("unused", f"{counted(count, 'parameter')} of {side} are not used in the forward pass")


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
            "the parameters are registered in a different order or with dimensions of size 1 in other places, so "
            "optimizer states and weights cannot be copied by position"
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
    partners = measured.differences
    touched = {measured.a[i].kind for gap in partners.gaps for i in gap.a}
    touched |= {measured.b[j].kind for gap in partners.gaps for j in gap.b}
    touched |= {
        each for change in partners.changed for each in (measured.a[change.a].kind, measured.b[change.b].kind)
    }
    touched |= {measured.a[n].kind for each in structure if each.code == "wiring" for n in each.layers}
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
    if (
        not codes & {"head", "width", "block", "replaced"}
        and measured.a[-1].settings == measured.b[-1].settings
    ):
        same.append("the classifier")
    return f"no difference in {', '.join(same)}" if same else ""


_CLEAR = 1.15
"""How much slower a step must be in all rounds but one to be called slower."""


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
    ranked = sorted(measured.ratios)
    # One round may be disturbed.
    low, high = (ranked[1], ranked[-2]) if len(ranked) > 3 else (ranked[0], ranked[-1])
    if low > _CLEAR or high < 1 / _CLEAR:
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


def _scientific(value: float) -> str:
    return "the last bit" if value == 0 else f"{value:.0e}"


def verdict_lines(verdict: Verdict, width: int) -> list[str]:
    """The answer, the findings behind it and the notes."""
    lines = wrapped_lines(("equal: " if verdict.equal else "different: ") + verdict.sentence, width, "  ")
    if len(verdict.findings) > 2:
        for finding in verdict.findings:
            lines += wrapped_lines(f"- {finding.text}", width, "    ", "  ")
    for note in verdict.notes:
        lines += wrapped_lines(f"note: {note}", width, "  ")
    return lines

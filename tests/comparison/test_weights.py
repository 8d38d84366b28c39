"""A model against a file of foreign weights, by names and shapes."""

from __future__ import annotations

from torch import zeros

from drumline.comparison.weights import compare_tensors, tensor_lines

MODEL = {
    "conv.weight": zeros(4, 3),
    "conv.bias": zeros(4),
    "fc.weight": zeros(2, 4),
    "bn.num_batches_tracked": zeros(()),
}


def test_weights_that_fit_are_equal_without_batch_counters() -> None:
    found = compare_tensors(MODEL, {name: MODEL[name] for name in list(MODEL)[:3]})
    assert found.equal
    assert tensor_lines(found) == ["equal: B fits A: 3 tensors with the same names and shapes"]


def test_missing_unexpected_and_misshapen_tensors_are_named_with_the_nearest_name() -> None:
    found = compare_tensors(
        MODEL, {"conv1.weight": zeros(4, 3), "conv.bias": zeros(4), "fc.weight": zeros(5, 4)}
    )
    assert (found.missing, found.unexpected) == (("conv.weight",), ("conv1.weight",))
    assert found.nearest == {"conv.weight": "conv1.weight"}
    lines = tensor_lines(found, ["resnet9"])
    assert (
        lines[0]
        == "different: B does not fit A: 1 tensor missing, 1 tensor unexpected, 1 tensor of a different shape"
    )
    assert "only in A: conv.weight (B has conv1.weight)" in lines
    assert "different shapes: fc.weight is 5×4 in B and 2×4 in A" in lines
    assert lines[-1] == "B fits resnet9"


def test_equal_shapes_in_the_same_order_can_be_renamed() -> None:
    found = compare_tensors(MODEL, {"a": zeros(4, 3), "b": zeros(4), "c": zeros(2, 4)})
    assert found.in_order
    assert "rename the tensors one by one (a for conv.weight, b for conv.bias" in tensor_lines(found)[1]


def test_other_values_count_between_two_files_only() -> None:
    other = {**MODEL, "conv.bias": zeros(4) + 1}
    assert compare_tensors(MODEL, other).equal
    found = compare_tensors(MODEL, other, values=True)
    assert found.different == ("conv.bias",)
    assert "1 of 3 tensors have different values: conv.bias" in tensor_lines(found)[0]

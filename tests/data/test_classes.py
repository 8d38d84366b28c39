"""Classes are matched by name, and what does not match is named."""

from __future__ import annotations

import numpy as np
import pytest

from drumline.data.classes import Classes, OtherClasses, class_warnings, head_order, label_map, numbers
from drumline.data.sources.base import ArrayDataset


def named(*names: str) -> Classes:
    return Classes(names, named=True)


def numbered(count: int) -> Classes:
    return Classes(numbers(count), named=False)


def source(labels: list[int], classes: tuple[str, ...], name: str = "folder") -> ArrayDataset:
    return ArrayDataset(name, np.zeros((len(labels), 2, 2, 3), np.uint8), np.array(labels), classes)


def outputs(model: Classes, data: Classes, *present: int, by_number: bool = False) -> list[int] | None:
    found, _ = label_map(model, data, present or range(len(data)), by_number)
    return None if found is None else found.tolist()


def test_labels_in_a_different_order_or_of_some_classes_map_to_their_outputs() -> None:
    model = named("ant", "bee", "cat")
    assert outputs(model, model) is None
    assert outputs(model, named("cat", "ant", "bee")) == [2, 0, 1]
    assert outputs(model, named("bee", "cat")) == [1, 2]
    assert outputs(model, named("aaa", "bee", "cat"), 1, 2) == [-1, 1, 2]
    assert "2 of the model's 3 classes; none of 'ant'" in label_map(model, named("bee", "cat"), {0, 1})[1]


def test_folders_named_by_numbers_are_matched_by_name() -> None:
    folders = named(*sorted(numbers(12)))
    assert outputs(numbered(12), folders) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert outputs(named(*numbers(10)), named("0", "1")) == [0, 1]


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (named("ant", "bee"), named("ant", "wasp"), "does not have 'wasp'; the data does not have 'bee'"),
        (named("cat", "dog"), named("cat", "dogs"), "renamed? 'dogs' may be 'dog'"),
        (named("cat", "dog"), named("cat", "dog", "emu"), "the model does not have 'emu'"),
        (named("cat", "dog"), numbered(3), "the model has 2 classes ('cat', 'dog'), the data has 3 classes"),
        (numbered(10), numbered(5), "the model has 10 classes, the data has 5 classes"),
        (numbered(5), numbered(10), "the model has 5 classes, the data has 10 classes"),
        (named("a\x1b[2J"), named("b\n"), r"does not have 'b\n'; the data does not have 'a\x1b[2J'"),
    ],
)
def test_classes_that_do_not_match_are_named(model: Classes, data: Classes, said: str) -> None:
    with pytest.raises(OtherClasses) as caught:
        label_map(model, data, range(len(data)))
    assert said in str(caught.value)
    with pytest.raises(OtherClasses):
        head_order(model, data)


def test_numbers_are_compared_by_their_count() -> None:
    assert outputs(numbered(10), numbered(10)) is None
    found, said = label_map(named("cat", "dog"), numbered(2), {0, 1})
    assert found is None
    assert said.startswith("WARNING: the data has no class names")
    assert "the weights have no class names" in label_map(numbered(2), named("cat", "dog"), {0, 1})[1]
    assert outputs(numbered(10), numbered(5), by_number=True) is None
    with pytest.raises(OtherClasses):
        outputs(numbered(5), numbered(10), by_number=True)


def test_a_classifier_needs_the_same_classes_in_any_order() -> None:
    order, _ = head_order(named("cat", "ant"), named("ant", "cat"))
    assert order is not None
    assert order.tolist() == [1, 0]
    with pytest.raises(OtherClasses, match="the data does not have 'bee'"):
        head_order(named("ant", "bee"), named("ant"))


def test_classes_are_named_unless_they_are_the_numbers_of_an_array_source() -> None:
    assert Classes.of(source([0], ("0",))).named
    assert not Classes.of(source([0], ("0",), name="idx")).named
    assert Classes.of(source([0], ("cat",), name="npz")).named


def test_classes_missing_in_one_split_are_reported() -> None:
    names = ("ant", "bee", "cat")
    assert class_warnings(source([0, 1, 2], names), source([0, 1, 2], names)) == []
    (one,) = class_warnings(source([1], names), source([1], names))
    assert "only one class, 'bee'" in one
    (lacks,) = class_warnings(source([0, 1, 2], names), source([0, 1], names))
    assert "the evaluation set has no samples of these classes" in lacks
    assert lacks.endswith("'cat'")
    (odd,) = class_warnings(source([0, 1], names), source([0, 1, 2, 2], names))
    assert odd.startswith("WARNING: 2 evaluation samples are of classes without a training sample")
    assert class_warnings(source([0, 1], names, "synthetic"), source([0], names, "synthetic")) == []

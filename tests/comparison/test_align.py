"""Layers are paired without their names: fewest gaps, whole gaps, and an order that depends on the flow alone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from drumline.comparison.align import Pair, align, flow_order, slide


def paired(one: str, other: str) -> list[Pair]:
    return align(
        len(one),
        len(other),
        lambda i, j: 3.0 if one[i] == other[j] else 0.0,
        lambda i, j: one[i] == other[j],
    )


def shown(one: str, other: str) -> tuple[str, str]:
    pairs = paired(one, other)
    return (
        "".join("-" if i is None else one[i] for i, _ in pairs),
        "".join("-" if j is None else other[j] for _, j in pairs),
    )


def test_a_missing_layer_is_a_gap() -> None:
    assert shown("cbrpcbrcbr", "cbrcbrcbr") == ("cbrpcbrcbr", "cbr-cbrcbr")


def test_a_replaced_layer_is_two_gaps() -> None:
    assert shown("abXcd", "abYcd") in (("abX-cd", "ab-Ycd"), ("ab-Xcd", "abY-cd"))


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_every_layer_appears_once_and_in_order(one: str, other: str) -> None:
    pairs = paired(one, other)
    assert [i for i, _ in pairs if i is not None] == list(range(len(one)))
    assert [j for _, j in pairs if j is not None] == list(range(len(other)))
    assert all(one[i] == other[j] for i, j in pairs if i is not None and j is not None)


@given(st.text("abcd", max_size=10))
def test_equal_sequences_pair_one_by_one(one: str) -> None:
    assert paired(one, one) == [(n, n) for n in range(len(one))]


def test_a_gap_slides_to_where_it_is_one_block() -> None:
    blocks = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    pairs: list[Pair] = [(0, 0), (1, None), (2, None), (3, None), (4, 1), (5, 2), (6, 3), (7, 4), (8, 5)]

    def same(gap: Pair, pair: Pair) -> bool:
        assert gap[0] is not None
        assert pair[0] is not None
        return gap[0] % 3 == pair[0] % 3

    def whole(gap: Sequence[Pair]) -> int:
        return -len({blocks[i] for i, _ in gap if i is not None})

    gaps = [i for i, j in slide(pairs, same, whole) if j is None]
    assert len({blocks[i] for i in gaps if i is not None}) == 1


def test_the_order_does_not_depend_on_which_branch_runs_first() -> None:
    """A block whose shortcut (s) runs first or last: trunk, shortcut, sum."""
    shortcut_last = [[-1], [0], [1], [0], [2, 3]]  # in, c1, c2, s, sum
    shortcut_first = [[-1], [0], [0], [2], [1, 3]]  # in, s, c1, c2, sum
    assert flow_order(shortcut_last, 4)[0] == [0, 1, 2, 3, 4]
    assert flow_order(shortcut_first, 4)[0] == [0, 2, 3, 1, 4]


def test_layers_that_lead_nowhere_come_last_and_are_not_used() -> None:
    order, depth, used = flow_order([[-1], [0], [0]], 2)
    assert (order, depth, used) == ([0, 2, 1], [1, 2, 2], {0, 2})

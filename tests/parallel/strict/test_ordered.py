"""The fixed tree: the same sum however the shards are dealt, and no more on the wire than promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel.strict.ordered import Fold, Node, is_node, owned, split, whole_nodes


def written(left: str, right: str, n: int, m: int) -> str:
    """A sum as text, so that its order can be read."""
    return f"({left}+{right})"


def summed(shards: int, processes: int) -> str:
    """Each process adds what it can; the rest is added by the process that gets the pieces."""
    last: Fold[str] = Fold(shards, written)
    for held in owned(shards, processes):
        fold: Fold[str] = Fold(shards, written)
        for shard in range(*held):
            fold.push((shard, shard + 1), str(shard))
        parts = fold.take()
        assert [node for node, _ in parts] == whole_nodes(held, shards)
        for node, text in parts:
            last.push(node, text)
    ((node, text),) = last.take()
    assert node == (0, shards)
    return text


@given(st.integers(1, 40), st.data())
def test_any_number_of_processes_adds_in_the_same_order(shards: int, data: st.DataObject) -> None:
    processes = data.draw(st.integers(1, shards))
    assert summed(shards, processes) == summed(shards, 1) == summed(shards, shards)


def test_the_tree_of_a_power_of_two_is_balanced_and_others_lean_left() -> None:
    assert summed(4, 1) == "((0+1)+(2+3))"
    assert summed(6, 1) == "(((0+1)+(2+3))+(4+5))"
    assert summed(3, 1) == "((0+1)+2)"


@given(st.integers(1, 64), st.data())
def test_shards_are_dealt_once_and_evenly(shards: int, data: st.DataObject) -> None:
    processes = data.draw(st.integers(1, shards))
    parts = owned(shards, processes)
    assert [shard for held in parts for shard in range(*held)] == list(range(shards))
    sizes = [last - first for first, last in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 64), st.data())
def test_whole_nodes_cover_what_is_held_and_are_of_the_tree(shards: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, shards - 1))
    last = data.draw(st.integers(first + 1, shards))
    nodes = whole_nodes((first, last), shards)
    assert [shard for node in nodes for shard in range(*node)] == list(range(first, last))
    assert all(is_node(node, shards) for node in nodes)


@pytest.mark.parametrize("node", [(0, 2), (3, 6), (0, 7), (1, 64)])
def test_a_split_leaves_a_power_of_two_on_the_left(node: Node) -> None:
    left = split(node) - node[0]
    assert left & (left - 1) == 0
    assert 0 < node[1] - split(node) <= left


@pytest.mark.parametrize(
    ("shards", "processes", "ratio"),
    [(8, 1, 1), (8, 2, 1), (8, 4, 1), (8, 8, 1), (4, 3, 1), (12, 3, 1), (8, 3, 1.5), (6, 2, 1.5)],
)
def test_the_busiest_process_sends_what_a_ring_would_where_each_holds_one_node(
    shards: int, processes: int, ratio: float
) -> None:
    """A process with n nodes sends n vectors in the first half of a reduction, and one in the second."""
    most = max(len(whole_nodes(held, shards)) for held in owned(shards, processes))
    assert (most + 1) / 2 == ratio


def test_a_fold_holds_no_more_than_the_depth_of_the_tree() -> None:
    fold: Fold[int] = Fold(64, lambda left, right, n, m: left + right)
    most = 0
    for shard in range(64):
        fold.push((shard, shard + 1), 1)
        most = max(most, len(fold._held))
    assert fold.take() == [((0, 64), 64)]
    assert most <= 6
    assert fold.take() == []


def test_a_fold_refuses_a_gap() -> None:
    fold: Fold[int] = Fold(4, lambda left, right, n, m: left + right)
    fold.push((0, 1), 1)
    with pytest.raises(AssertionError):
        fold.push((2, 3), 1)

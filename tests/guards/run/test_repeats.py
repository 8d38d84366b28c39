"""A sample that comes twice in a global batch is a finding, unless class-balanced sampling draws it twice."""

from __future__ import annotations

import torch

from drumline.guards.checks.data import repeated_ids
from tests.largest import Largest


def found(*batches: list[int], planned: list[int]) -> str:
    finding = repeated_ids(
        [torch.tensor(ids) for ids in batches], 3, torch.tensor(planned, dtype=torch.int64)
    )
    return finding.what if finding else ""


def test_repeats_are_findings_where_no_sample_may_repeat() -> None:
    assert found([1, 2], [3, 4], planned=[]) == ""
    assert "sample 2 came twice" in found([1, 2], [2, 4], planned=[])


def test_repeats_that_are_drawn_are_none_and_further_ones_are() -> None:
    assert found([1, 2], [2, 4], planned=[2, 4, 1, 2]) == ""
    assert "sample 1 came twice" in found([1, 2], [2, 1], planned=[2, 4, 1, 2])
    assert "sample 2 came twice" in found([1, 2], [2, 2], planned=[2, 4, 1, 2])


def test_the_check_of_a_large_batch_needs_memory_in_proportion_to_it() -> None:
    drawn = torch.arange(30_000) // 2
    with Largest() as largest:
        assert repeated_ids([drawn], 3, drawn) is None
    assert largest.size == len(drawn)

"""Shards in step: one at a time, in order, and nobody is left waiting when one fails."""

from __future__ import annotations

import threading

import pytest
import torch

from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.world import single_process

CPU = torch.device("cpu")


def test_shards_run_one_at_a_time_up_to_each_meeting_in_their_order() -> None:
    together = Lockstep(single_process(CPU), 3)
    story: list[str] = []

    def work(shard: int) -> None:
        story.append(f"{shard} begins")
        rows = together.all(torch.tensor([float(shard)]))
        story.append(f"{shard} hears {rows.flatten().tolist()}")

    together.run([lambda shard=shard: work(shard) for shard in range(3)], lambda place: None)  # type: ignore[misc]
    assert story == [
        *(f"{shard} begins" for shard in range(3)),
        *(f"{shard} hears [0.0, 1.0, 2.0]" for shard in range(3)),
    ]


def test_the_switch_is_called_before_each_stretch() -> None:
    together = Lockstep(single_process(CPU), 2)
    told: list[int] = []
    together.run([lambda: together.all(torch.zeros(1))] * 2, told.append)  # type: ignore[list-item]
    assert told == [0, 1, 0, 1]


def test_a_total_is_added_in_the_trees_order() -> None:
    together = Lockstep(single_process(CPU), 4)
    values = [torch.tensor(value, dtype=torch.float32) for value in (1e8, 1.0, -1e8, 1.0)]
    found: list[torch.Tensor] = []
    together.run(
        [lambda value=value: found.append(together.total(value)) for value in values],  # type: ignore[misc]
        lambda place: None,
    )
    expected = (values[0] + values[1]) + (values[2] + values[3])
    assert [each.item() for each in found] == [expected.item()] * 4


def test_meetings_work_inside_backward() -> None:
    together = Lockstep(single_process(CPU), 2)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return together.total(grad)

    leaves = [torch.tensor([float(place + 1)], requires_grad=True) for place in range(2)]
    together.run(
        [lambda leaf=leaf: (Doubled.apply(leaf) * leaf.detach()).sum().backward() for leaf in leaves],  # type: ignore[misc]
        lambda place: None,
    )
    assert [leaf.grad.item() for leaf in leaves] == [3.0, 3.0]  # type: ignore[union-attr]


def test_an_error_of_one_shard_ends_all_and_is_raised_as_it_is() -> None:
    together = Lockstep(single_process(CPU), 3)

    def work(shard: int) -> None:
        together.all(torch.zeros(1))
        if shard == 1:
            raise ValueError("shard 1 has had enough")
        together.all(torch.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match="shard 1 has had enough"):
        together.run([lambda shard=shard: work(shard) for shard in range(3)], lambda place: None)  # type: ignore[misc]
    assert threading.active_count() == before
    together.run([lambda: None] * 3, lambda place: None)


def test_shards_that_do_not_meet_alike_are_found_out() -> None:
    together = Lockstep(single_process(CPU), 2)
    with pytest.raises(AssertionError, match="some shards have ended"):
        together.run([lambda: together.all(torch.zeros(1)), lambda: None], lambda place: None)  # type: ignore[list-item,func-returns-value]

"""Which machines take part in which round, decided without any of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from drumline.launch.failure import Failure
from drumline.launch.nodes import (
    Heard,
    Node,
    Round,
    next_round,
    node_from_fields,
    node_to_fields,
    objection,
    ranks_of,
    round_from_fields,
    worker_variables,
)


def node(letter: str, address: str = "10.0.0.1", **changes: Any) -> Node:
    made = Node(letter * 32, f"host-{letter}", address, 7, 2, 1, 4000, launch_id=letter * 32)
    return replace(made, **changes)


def heard(*members: Node, silent: float = 0.0) -> dict[str, Heard]:
    return {each.id: Heard(each, silent) for each in members}


def decide(known: dict[str, Heard], last: Round | None = None, **wanted: Any) -> Round | None:
    rules: dict[str, Any] = {"nodes": 2, "least": 2, "limit": 5.0, "stable": 99.0}
    return next_round(known, last, **rules | wanted)


A, B = node("a", "10.0.0.10"), node("b", "10.0.0.2", processes=3)


def first_round() -> Round:
    found = decide(heard(A, B))
    assert found is not None
    return found


def test_the_first_round_waits_for_all_and_numbers_them_by_address() -> None:
    assert decide(heard(A), least=1) is None
    round = first_round()
    assert (round.number, round.generation, round.launch_id) == (1, 0, B.launch_id)
    assert round.ids == (B.id, A.id)  # 10.0.0.2 comes before 10.0.0.10
    assert (round.address, round.port) == (B.address, B.port)
    assert ranks_of(round, A.id) == (1, range(3, 4), 4)
    assert [each["RANK"] for each in worker_variables(round, 0, range(3), 4, 0)] == ["0", "1", "2"]


def test_a_round_is_decided_once() -> None:
    assert decide(heard(A, B), first_round()) is None
    running = heard(replace(A, round=1, state="running"), replace(B, round=0))
    assert decide(running, first_round()) is None


def test_a_restart_has_the_next_number_and_generation_and_the_folder() -> None:
    again = [replace(each, round=1, restarts=1, launch_id=B.launch_id, folder="photos-1") for each in (A, B)]
    round = decide(heard(*again), first_round())
    assert round is not None
    assert (round.number, round.generation, round.folder) == (2, 1, "photos-1")
    assert round.launch_id == B.launch_id
    assert decide(heard(again[0], replace(again[1], state="running")), first_round()) is None


def test_a_restart_continues_with_fewer_machines_where_that_is_allowed_and_the_others_are_lost() -> None:
    here = replace(A, round=1, restarts=1, launch_id=B.launch_id)
    gone = heard(here) | heard(replace(B, round=1, state="running"), silent=5.1)
    assert decide(gone, first_round()) is None
    assert decide(gone, first_round(), least=1, stable=1.0) is None
    round = decide(gone, first_round(), least=1)
    assert round is not None
    assert (round.ids, round.generation, round.address) == ((A.id,), 1, A.address)
    silent = heard(here) | heard(replace(B, round=1, state="running"), silent=4.0)
    assert decide(silent, first_round(), least=1) is None


def test_reports_of_an_earlier_run_do_not_count_as_live_and_delay_a_round_until_they_count_as_lost() -> None:
    old = {B.id: Heard(replace(B, round=1, state="running"), 3.0, fresh=False)}
    c, d = node("c"), node("d", "10.0.0.3")
    assert decide(old | heard(c, d), first_round()) is None
    old = {B.id: replace(old[B.id], silent=6.0)}
    round = decide(old | heard(c, d), first_round())
    assert round is not None
    assert (round.number, round.generation, round.launch_id) == (2, 0, c.launch_id)


def test_one_that_comes_late_joins_the_launch_that_is_there() -> None:
    old = replace(B, round=3, restarts=2, launch_id="e" * 32, folder="photos-1")
    new = node("c", "10.0.0.1")
    round = decide(heard(old, new))
    assert round is not None
    assert (round.number, round.generation, round.folder) == (4, 2, "photos-1")
    assert round.launch_id == old.launch_id
    assert round.ids == (new.id, old.id)


def test_too_many_machines_are_not_all_taken_and_those_of_before_come_first() -> None:
    old = [replace(each, round=1) for each in (A, B)]
    round = decide(heard(*old, node("c", "10.0.0.1")))
    assert round is not None
    assert set(round.ids) == {A.id, B.id}


def test_numbered_machines_are_always_all_in_their_order() -> None:
    one, zero = replace(A, number=1), replace(B, number=0)
    round = decide(heard(one, zero))
    assert round is not None
    assert round.ids == (zero.id, one.id)
    assert decide(heard(replace(one, round=1)), least=1) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(B, nodes=3), "parallel.nodes is 2 here and 3 on host-b"),
        (replace(B, number=1), "set on some machines only"),
        (replace(B, state="left", nodes=3), ""),
        (B, ""),
    ],
)
def test_machines_with_different_commands_are_rejected(other: Node, words: str) -> None:
    assert words in objection(A, heard(A, other))
    assert bool(words) == bool(objection(A, heard(A, other)))
    assert objection(replace(A, number=1), heard(replace(B, number=1))).startswith("parallel.node_rank = 1")


def test_a_member_travels_without_the_clock_of_its_machine() -> None:
    sent = replace(A, failure=Failure(1, "boom", time=95.0))
    found = node_from_fields(node_to_fields(sent, now=100.0), now=7.0)
    assert found.failure is not None
    assert found.failure.time == 2.0  # five seconds ago
    assert replace(found, failure=None) == A
    round = first_round()
    assert round_from_fields(asdict(round) | {"ids": [*round.ids], "processes": [*round.processes]}) == round


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../x"},
        {"folder": "../up"},
        {"folder": "a\x1bb"},
        {"state": "owner"},
        {"port": 0},
        {"port": True},
        {"processes": 0},
        {"address": "host"},
        {"failure": {"rank": 1}},
        {"more": 1},
    ],
)
def test_a_member_of_another_shape_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        node_from_fields(node_to_fields(A, 0.0) | change, 0.0)


@pytest.mark.parametrize(
    "change",
    [{"ids": []}, {"ids": ["x"]}, {"processes": [0, 1]}, {"port": 70000}, {"folder": "/"}, {"number": "1"}],
)
def test_a_round_of_another_shape_is_rejected(change: dict[str, object]) -> None:
    fields = asdict(first_round())
    fields |= {"ids": [*fields["ids"]], "processes": [*fields["processes"]]}
    with pytest.raises(ValueError, match=r".+"):
        round_from_fields(fields | change)

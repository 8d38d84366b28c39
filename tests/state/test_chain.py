"""A run's fingerprints as a text: the same for the same bits, cut where a run goes on, not believed when changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.state import chain
from drumline.state.chain import (
    Damaged,
    Record,
    differing_names,
    first_group,
    is_full,
    read_whole,
    record_text,
    repair_chain,
)


def values(step: int) -> dict[str, dict[str, int]]:
    return {
        "parameter": {"w": 5 * step, "b": -step},
        "ids": {"batch": step},
        "gradient": {"w": 7 * step},
    }


def written(steps: list[int], full: bool = True) -> str:
    text, head = chain.HEADER, ""
    for step in steps:
        lines, head = record_text(step, values(step), full, head)
        text += lines
    return text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / chain.FILE
    path.write_text(written([1, 2, 3, 7]))
    return path


def read_chain(path: Path) -> list[Record]:
    records, torn = read_whole(path)
    if torn:
        raise Damaged(torn)
    return records


def test_a_record_reads_as_step_group_name_value_in_the_order_of_causes() -> None:
    text, head = record_text(3, values(3), True, "")
    lines = [line.split(" ") for line in text.splitlines()]
    assert [line[:3] for line in lines[:-1]] == [
        ["3", "ids", "*"],
        ["3", "ids", "batch"],
        ["3", "gradient", "*"],
        ["3", "gradient", "w"],
        ["3", "parameter", "*"],
        ["3", "parameter", "b"],
        ["3", "parameter", "w"],
    ]
    assert lines[5][3] == "fffffffffffffffd"
    assert lines[-1] == ["3", "chain", head]


def test_what_was_written_is_read_back(file: Path) -> None:
    records = read_chain(file)
    assert [record.step for record in records] == [1, 2, 3, 7]
    assert records[3].names["parameter", "b"] == "fffffffffffffff9"
    assert list(records[0].groups) == ["ids", "gradient", "parameter"]


def test_a_short_record_has_the_groups_of_the_full_one(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text(written([1, 2], full=False))
    short = read_chain(path)
    path.write_text(written([1, 2]))
    full = read_chain(path)
    assert [record.groups for record in short] == [record.groups for record in full]
    assert not short[0].names
    assert full[0].names


def test_the_chain_covers_all_before() -> None:
    """Two runs that ever differed end with another value, whatever comes later."""
    _, one = record_text(1, values(1), True, "")
    _, other = record_text(1, values(9), True, "")
    assert record_text(2, values(2), True, one)[1] != record_text(2, values(2), True, other)[1]


@given(number=st.integers(1, 10**7), every=st.integers(1, 1000))
def test_full_records_are_those_with_two_leading_digits(number: int, every: int) -> None:
    expected = len(str(number).rstrip("0")) <= 2
    assert is_full(number * every, every, saving=False) == (expected or number * every <= 3)
    assert is_full(number * every, every, saving=True)


def test_a_long_run_has_few_full_records() -> None:
    full = [step for step in range(1, 450_001) if step % 100 == 0 and is_full(step, 100, False)]
    assert len(full) < 250
    assert full[:3] == [100, 200, 300]


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 5, 7, 99])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_run(file: Path, kept: int) -> None:
    whole = file.read_text()
    head, word = repair_chain(file, kept)
    text = file.read_text()
    assert not word
    for step in [step for step in (1, 2, 3, 7) if step > kept]:
        lines, head = record_text(step, values(step), True, head)
        text += lines
    assert text == whole


def test_a_record_torn_by_a_kill_is_cut_off_in_silence(file: Path) -> None:
    whole, three = file.read_bytes(), written([1, 2, 3]).encode()
    for length in range(len(three) + 1, len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(Damaged, match="incomplete"):
            read_chain(file)
        head, word = repair_chain(file, 7)
        assert (file.read_bytes(), word) == (three, "")
        assert three.decode().rstrip().endswith(head)


def test_any_changed_byte_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(bytes(changed))
        with pytest.raises(Damaged):
            read_chain(file)


def test_a_changed_record_is_reported_when_a_run_resumes(file: Path) -> None:
    file.write_text(file.read_text().replace("2 gradient w", "2 gradient v"))
    _, word = repair_chain(file, 7)
    assert "changed since they were written" in word
    assert file.read_text() == written([1])


def test_a_new_run_starts_with_the_header_alone(tmp_path: Path) -> None:
    assert repair_chain(tmp_path / chain.FILE, 0) == ("", "")
    assert (tmp_path / chain.FILE).read_text() == chain.HEADER


def test_a_file_of_something_else_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("1 parameter w 00\n")
    with pytest.raises(Damaged, match="line 1"):
        read_chain(path)


def test_the_first_cause_is_named_first() -> None:
    def one(**changed: dict[str, int]) -> chain.Record:
        text, _ = record_text(4, {**values(4), **changed}, True, "")
        return next(chain.parse((chain.HEADER + text).encode()))[0]

    base = one()
    assert first_group(base, one(parameter={"w": 1, "b": 2}, gradient={"w": 1})) == "gradient"
    assert first_group(base, one(ids={"batch": 1}, gradient={"w": 1})) == "ids"
    assert differing_names(base, one(parameter={"w": 20, "b": 2, "c": 3}), "parameter") == ["b", "c"]


def test_a_name_cannot_break_out_of_its_line() -> None:
    text, _ = record_text(1, {"parameter": {"a\n9 chain 00": 1, "b c": 2}}, True, "")
    (record, _) = next(chain.parse((chain.HEADER + text).encode()))
    assert set(record.names) == {("parameter", r"a\n9 chain 00"), ("parameter", "b c")}

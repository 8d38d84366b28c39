"""What an earlier revision wrote is still read: checkpoints, a packed set, a teacher's cache. To the bit."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest

from tests.golden.check import ROUNDING, check, compare
from tests.golden.recipes import (
    CACHE,
    COMMANDS,
    INPUTS,
    STORED,
    STORED_RUNS,
    STORED_STEP,
    Golden,
    drumline,
    lay_out,
    observed,
    run,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    lay_out(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", STORED_RUNS)
def test_a_stored_run_resumes_to_the_golden_bits(name: str, folder: Path) -> None:
    shutil.copytree(STORED / name, folder / "runs" / name)
    resumed = run(folder, name, COMMANDS[name], "checkpoint.resume=auto")
    # Lines have the time at which they were written: these steps were not computed again.
    earlier = (STORED / name / "metrics.jsonl").read_text().splitlines()[:3]
    assert (resumed / "metrics.jsonl").read_text().splitlines()[:3] == earlier
    saved = resumed / "checkpoints" / STORED_STEP
    assert contents(saved) == contents(STORED / name / "checkpoints" / STORED_STEP)
    check(observed(resumed), name)


def test_a_stored_teacher_cache_gives_the_golden_bits(folder: Path) -> None:
    shutil.copytree(CACHE, folder / "cache")
    made = run(folder, "distill-cached", COMMANDS["distill-cached"])
    assert contents(folder / "cache") == contents(CACHE), "the cache was filled anew"
    check(observed(made), "distill-cached")


def test_the_stored_packed_set_is_what_pack_writes_and_verifies(folder: Path) -> None:
    drumline(["pack", "photos", "again"], folder)
    assert contents(folder / "again") == contents(INPUTS / "packed")
    drumline(["verify", "packed"], folder)  # ends with 1 where it finds anything wrong


@pytest.mark.parametrize("rounding", [None, ROUNDING])
def test_a_difference_is_found(rounding: float | None) -> None:
    golden = Golden.read().runs["single"]
    compare(copy.deepcopy(golden), golden, rounding)
    other = copy.deepcopy(golden)
    other["train"][-1]["loss"] *= 1 + 2 * ROUNDING
    with pytest.raises(AssertionError):
        compare(other, golden, rounding)


@pytest.mark.parametrize("field", ["state", "fingerprints"])
def test_a_difference_of_bits_alone_is_found(field: str) -> None:
    golden = Golden.read().runs["single"]
    other = copy.deepcopy(golden)
    other[field] = Golden.read().runs["dp"][field]
    with pytest.raises(AssertionError):
        compare(other, golden, None)

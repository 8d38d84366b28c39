"""Loops with silent mistakes are found, and healthy ones are not stopped: all of `cases`, in one process per rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.guards.cases.run import load
from tests.guards.scripts_run import ROOT

MAY_BE_INTENDED = {
    # Healthy, but just as often a mistake: warnings, no stop.
    "overfits_one_batch": {"same-samples"},
    "heads_in_turn": {"parameters"},
    "a_new_optimizer_for_each_phase": {"parameters"},
    "cosine_as_a_cycle": {"schedule"},
    "fine_tuned_in_eval_mode": {"eval-mode"},
    "layers_thawed_one_after_another": {"frozen"},  # its norm learns before it is thawed
    "head_split_between_ranks": {"bypass"},
    "weights_perturbed_and_restored_by_arithmetic": {"rounding"},
    "weights_averaged_by_hand_now_and_then": {"bypass", "drift"},
    "torchs_own_optimizer_for_local_sgd": {"bypass", "drift"},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """The reports of the guards about each case on two ranks."""
    names = list(load())
    done = subprocess.run(
        [sys.executable, "-m", "tests.guards.cases.run", "2", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_silent_mistakes_are_found_by_the_guard_that_names_them(reports: dict[str, Any]) -> None:
    missed = {
        name: reports[name]
        for name, case in load().items()
        if case.codes and not set(case.codes) & {*reports[name]["stopped"], *reports[name]["warned"]}
    }
    assert not missed, missed


@pytest.mark.slow
def test_healthy_loops_are_never_stopped_and_rarely_warned(reports: dict[str, Any]) -> None:
    for name, case in load().items():
        if not case.codes:
            one = reports[name]
            assert (one["stopped"], one["error"]) == ([], ""), (name, one["text"], one["error"])
            assert set(one["warned"]) <= MAY_BE_INTENDED.get(name, set()), (name, one["text"])
            for code in one["warned"]:
                assert f"silence: ignore=['{code}']" in one["text"]

"""The true story of docs/story-module-list.md: `module_list = module_list.module` in a distillation script."""

from __future__ import annotations

import pytest

from tests.guards.scripts_run import SCRIPTS, run_script

LINE = "module_list = module_list.module"


def accuracy(*options: str) -> float:
    outcome = run_script("story.py", 2, "--folders", "--steps", "100", *options)
    assert outcome.quiet, outcome.err[0]
    return float(outcome.out[0].split()[1])


@pytest.mark.slow
def test_plain_ddp_accepts_the_line_and_loses_half_of_the_accuracy() -> None:
    assert accuracy("--fixed", "--guard") > 80
    assert accuracy() < 55  # rank 0 has seen five of the ten classes


@pytest.mark.slow
def test_the_guard_stops_it_at_step_1_and_names_the_line_to_change() -> None:
    outcome = run_script("story.py", 2, "--guard")
    assert outcome.codes == [1, 1]
    lines = (SCRIPTS / "story.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == LINE)
    for rank in (0, 1):
        printed = outcome.finding(rank)
        assert "[bypass]: the model was taken out of its DDP wrapper" in printed
        assert f"fix: change {SCRIPTS}/story.py:{number}: `{LINE}`" in printed
        assert "`features, logits = module_list[0](x)` calls Net '0' directly" in printed
        assert "since: step 1" in printed

"""The true story of docs/story-module-list.md: `module_list = module_list.module` in a distillation script."""

from __future__ import annotations

import pytest

from tests.guards.scripts_run import SCRIPTS, run_script

LINE = "module_list = module_list.module"


def accuracy(*words: str) -> float:
    outcome = run_script("story.py", 2, "--folders", "--steps", "100", *words)
    assert outcome.quiet, outcome.err[0]
    return float(outcome.out[0].split()[1])


@pytest.mark.slow
def test_stock_ddp_lets_the_line_pass_and_half_of_the_accuracy_is_lost() -> None:
    assert accuracy("--mended", "--guard") > 80
    assert accuracy() < 55  # rank 0 has seen five of the ten classes


@pytest.mark.slow
def test_one_line_of_drumline_stops_it_at_step_1_with_the_line_to_change() -> None:
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

"""The table of guards: it is complete, docs/guards.md shows it, and both loops call its checks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import drumline
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.guards.finding import Finding, LoopState, Reports
from drumline.guards.table import GUARDS, REPORTS
from drumline.parallel.world import single_process
from drumline.training.loop import train
from tests.guards.scripts_run import ROOT

IN_RUNS_ONLY = {"foreign-parameter"}


def test_every_guard_that_the_code_names_is_in_the_table() -> None:
    sources = [path.read_text() for path in (ROOT / "src" / "drumline" / "guards").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'Finding\(\s*"([a-z-]+)"', text)}
    assert len(named) > 20
    assert named - IN_RUNS_ONLY <= set(GUARDS)


def test_the_page_shows_the_table() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_recipe_reference.py"))
    page = (ROOT / "docs" / "guards.md").read_text()
    assert maker["with_guards"](page) == page, "run `make docs`"


def on_one_rank(loop: LoopState) -> Finding:
    where = "in a run" if loop.in_run else "in a user's loop"
    return Finding("setup", f"{len(loop.parameters)} parameters", where, certain=True)


def across_ranks(reports: Reports) -> Finding:
    return Finding("setup", f"{reports.of('number')} on ranks {list(reports.ranks)}", since=reports.since)


def counted(reports: Reports) -> Finding | None:
    total = sum(reports.of("number"))
    return Finding("setup", f"{total} in all", since=reports.since) if total else None


def short_run(folder: Path) -> None:
    settings = "data.source=digits model.name=resnet8 train.steps=4 run.device=cpu parallel.threads=1"
    train(Recipe.from_args((*settings.split(), f"run.dir={folder}")), single_process(torch.device("cpu")))


def test_a_local_check_of_the_table_runs_in_a_users_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.guards.script.watch.LOCAL_CHECKS", (on_one_rank,))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with drumline.guard(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(drumline.GuardError, match=r"\[setup\]: 2 parameters\n  where: in a user's loop"):
            optimizer.step()


def test_a_local_check_of_the_table_runs_in_drumlines_own_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.training.guards.LOCAL_CHECKS", (on_one_rank,))
    with pytest.raises(UserError, match=r"\[setup\]: 29 parameters\n  where: in a run"):
        short_run(tmp_path)


def test_a_rank_check_of_the_table_runs_after_the_third_step_of_drumlines_own_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.training.guards.REPORTS", {"number": lambda loop: 7 + loop.rank})
    monkeypatch.setattr("drumline.training.guards.RANK_CHECKS", (across_ranks,))
    with pytest.raises(UserError, match=r"\[setup\]: \[7\] on ranks \[0\]\n  since: step 3"):
        short_run(tmp_path)


def test_a_rank_check_of_the_table_runs_at_the_first_steps_of_a_users_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the other comparisons, ranks do not report what it reads."""
    module = "drumline.guards.script.comparison"
    monkeypatch.setattr(f"{module}.REPORTS", {**REPORTS, "number": lambda loop: 7 + loop.rank})
    monkeypatch.setattr(f"{module}.RANK_CHECKS", (counted,))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    with drumline.guard(model, optimizer) as watch:
        for step in (1, 2, 3, 10):
            model(torch.ones(1, 2)).sum().backward()
            loop = watch._monitors.state(step)
            found[step] = watch._comparison.compare(f"0/{step}", optimizer, loop, step, lambda: None)
    assert {step: [each.what for each in findings] for step, findings in found.items()} == {
        1: ["7 in all"],
        2: [],
        3: ["7 in all"],
        10: [],
    }

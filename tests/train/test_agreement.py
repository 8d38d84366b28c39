"""Ranks that were started differently do not train."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.errors import UserError
from drumline.launch.network import free_port
from drumline.recipe import Recipe, Run
from drumline.recipe_file import dump_recipe
from drumline.state.environment import arithmetic, device_name
from drumline.train.agreement import check_arithmetic, different_fields
from tests.runs.command import TINY, environment

CPU = torch.device("cpu")


def test_only_fields_that_must_agree_are_compared() -> None:
    one = Recipe()
    other = replace(
        one,
        run=replace(one.run, seed=5, dir="elsewhere"),
        data=replace(one.data, path="there", workers=3),
        checkpoint=replace(one.checkpoint, every_steps=9),
    )
    found = different_fields(dump_recipe(one), dump_recipe(other))
    assert found == [("run.seed", 5, 0), ("checkpoint.every_steps", 9, 0)]


@pytest.mark.parametrize("strict", [True, False])
def test_ranks_that_would_compute_other_bits_are_refused_in_strict_mode(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    rank_0 = {"device": device_name(CPU), **arithmetic(CPU)}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    world: Any = SimpleNamespace(
        size=2, device=CPU, share=lambda mine: rank_0, gather=lambda mine: [[0], mine]
    )
    recipe = Recipe(run=Run(strict=strict))
    if strict:
        with pytest.raises(UserError, match="ONEDNN_MAX_CPU_ISA = SSE41 here, not set on rank 0"):
            check_arithmetic(recipe, world)
    else:
        check_arithmetic(recipe, world)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["run.seed=5", "train.eval_every=0.2", "data.path=synthetic"])
def test_a_rank_with_another_recipe_or_other_data_is_named(extra: str, tmp_path: Path) -> None:
    words = [*TINY, "run.name=x", "parallel.timeout=30"]
    if extra.startswith("data"):
        words = [
            "data.source=synthetic",
            "data.batch=48",
            "model.name=resnet8",
            "train.steps=3",
            "run.name=x",
        ]
        extra = "data.path=samples=960"
    port = str(free_port("127.0.0.1"))
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "drumline", "train", *words, *([extra] if rank else [])],
            cwd=tmp_path,
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = "".join(run.communicate(timeout=90)[1] for run in runs)
    assert [run.returncode for run in runs] == [2, 2], said
    assert "rank(s) [1] were started with" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*"))

"""Strict mode on a GPU: the same bits captured or not, and on one or two processes that share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Model, Optim, Recipe, Train
from drumline.parallel.world import single_process
from tests.distillation.ranks import write_teacher
from tests.launch.ranks import run_ranks
from tests.parallel import strict_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU_CASES = {
    **strict_ranks.cases(),
    "fp16": replace(strict_ranks.base("fp16"), train=Train(steps=4, eval_every=0, precision="fp16", ema=0.9)),
    "vgg with dropout": replace(
        strict_ranks.base("vgg"),
        model=Model(name="vgg11_bn"),
        data=replace(strict_ranks.base("vgg").data, size=32),
        optim=Optim(lr=0.01, clip=1.0),
    ),
}


def state_of(recipe: Recipe, folder: Path, name: str, capture: str) -> str:
    recipe = replace(
        recipe,
        run=replace(recipe.run, dir=str(folder), name=name, device="cuda"),
        train=replace(recipe.train, capture=capture),  # type: ignore[arg-type]
    )
    return strict_ranks.state_of(
        recipe, single_process(torch.device("cuda", 0)), folder / "teacher.safetensors"
    )


@pytest.mark.parametrize("case", list(GPU_CASES))
def test_a_captured_strict_step_gives_the_same_bits(case: str, tmp_path: Path) -> None:
    write_teacher(tmp_path)
    recipe = GPU_CASES[case]
    off = state_of(recipe, tmp_path, "off", "off")
    if recipe.train.gradient_checkpointing or case == "cumulative statistics":
        pytest.skip("not captured: torch reads a generator's state, or a BatchNorm's counter, on the host")
    assert state_of(recipe, tmp_path, "on", "on") == off


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_a_gpu_give_the_bits_of_one(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRICT_DEVICE", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = []
    for processes in (1, size):
        folder = tmp_path / str(processes)
        folder.mkdir()
        write_teacher(folder)
        run_ranks("tests.parallel.strict_ranks", processes, folder, 400)
        found.append(torch.load(folder / "0.pt", weights_only=True))
    for case in strict_ranks.cases():
        assert found[0][case] == found[1][case], case

"""What a run imports before its first step: nothing slow that it does not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "tyro")
"""Each takes a tenth of a second or more; the first two take as long as torch itself."""

SCRIPT = """
import json, sys

import torch

from drumline.cli import main
from drumline.core.arithmetic import use_deterministic_algorithms

base = ["train", "--model.name", "cifar/resnet8", "--train.steps", "1", "--run.device", "cpu"]
runs = [[], ["--optim.name", "adamw", "--run.strict"], ["--optim.name", "lamb", "--optim.clip", "1"]]
codes = [main([*base, *each]) for each in runs]
imported = [name for name in sys.argv[1:] if name in sys.modules]
deterministic = [torch.get_deterministic_debug_mode()]

import torch._inductor.config as config

compiler = [config.deterministic]
for mode in (False, True):
    use_deterministic_algorithms(mode)
    deterministic.append(torch.get_deterministic_debug_mode())
    compiler.append(config.deterministic)
print(json.dumps([codes, imported, deterministic, compiler]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    """Three runs of one step in a fresh process, which then imports the compiler."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *SLOW],
        cwd=tmp_path_factory.mktemp("startup"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_that_compiles_nothing_imports_no_compiler(runs: list[list[object]]) -> None:
    codes, imported, _, _ = runs
    assert codes == [0, 0, 0]
    assert imported == [], (
        f"a plain run imports {', '.join(map(str, imported))}: find what does with `python -X importtime -m drumline "
        f"train ...`. If it is torch {torch.__version__}, see src/drumline/core/arithmetic.py"
    )


def test_determinism_is_set_as_torch_sets_it_and_reaches_a_compiler_imported_later(
    runs: list[list[object]],
) -> None:
    _, _, deterministic, compiler = runs
    assert deterministic == [2, 0, 2]
    assert compiler == [True, False, True], "TORCHINDUCTOR_DETERMINISTIC no longer sets inductor's flag"

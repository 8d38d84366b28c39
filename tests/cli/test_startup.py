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


DDP = """
import json, sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline.core.arithmetic import eager_ddp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gradients = []
for _ in range(2):
    torch.manual_seed(0)
    with eager_ddp(compiled=False):
        ddp = DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=True)
    with ddp.no_sync():
        ddp(torch.ones(2, 3)).sum().backward()
    ddp(torch.ones(2, 3)).square().sum().backward()
    gradients.append([parameter.grad.tolist() for parameter in ddp.parameters()])
    imported = [name for name in sys.argv[1:] if name in sys.modules]
    if len(gradients) == 1:
        early = imported
        import torch._dynamo

print(json.dumps([early, gradients[0] == gradients[1], torch._dynamo.utils.get_optimize_ddp_mode()]))
dist.destroy_process_group()
"""


def test_ddp_imports_no_compiler_and_computes_the_same_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DDP, *SLOW],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    early, same, mode = json.loads(done.stdout.splitlines()[-1])
    assert early == [], f"torch {torch.__version__}: see `eager_ddp` in src/drumline/core/arithmetic.py"
    assert same
    assert mode == "ddp_optimizer", "torch changed the default that `eager_ddp` gives to DDP"

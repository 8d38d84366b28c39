"""Silent mistakes in models of one's own, trained by the command: each is named, with the step and what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch.ranks import results_of
from tests.runs.command import drumline, result

pytestmark = pytest.mark.slow

OWN = """
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(8, classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.drop(self.norm(self.conv(x)).relu().mean((2, 3)))
        return self.mistake(self.fc(x), int(self.calls))

    def mistake(self, x, step):
        return x


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


class Drifting(Net):
    def mistake(self, x, step):
        if step == 5 and rank() == 1:
            self.fc.weight.data[0, 0] += 1e-3
        return x


class Scale(nn.Module):
    def forward(self, x, factor):
        return x * factor


class Exploding(Net):
    def __init__(self, classes):
        super().__init__(classes)
        self.scale = Scale()

    def mistake(self, x, step):
        ones = torch.ones(len(x), 1)
        if step >= 5 and rank() == dist_size() - 1:
            ones[3] = float("inf")
        return self.scale(x, ones)


def dist_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Sleeping(Net):
    def mistake(self, x, step):
        if step == 5:
            self.drop.eval()
        return x


class Dozing(Net):
    def mistake(self, x, step):
        if step == 5:
            self.eval()
        return x


class Renewing(Net):
    def mistake(self, x, step):
        if step == 5:
            self.fc.weight = nn.Parameter(self.fc.weight.detach().clone())
        return x


class Astray(Net):
    def mistake(self, x, step):
        if step == 5:
            self.register_buffer("table", torch.zeros(3, device="meta"))
        return x
"""


def trained(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(OWN)
    common = (
        "data.source=digits",
        "data.batch=48",
        "train.steps=12",
        "guard.every=2",
        "run.name=x",
        "parallel.threads=1",
    )
    return drumline("train", *common, f"model.name=own:{name}", *words, folder=folder)


def stopped(done: subprocess.CompletedProcess[str]) -> str:
    """The stderr of a run that ended with a finding."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "fix: " in done.stderr
    assert "--guard.action warn" in done.stderr
    return done.stderr


def test_weights_changed_on_one_rank_are_reported_with_tensor_and_step(tmp_path: Path) -> None:
    said = stopped(trained(tmp_path, "Drifting", "parallel.processes=2"))
    assert said.count("guard [drift]") == 1
    assert "ranks have drifted apart: parameter 'fc.weight' differs on ranks 0, 1" in said
    assert "since: between step 4, after which all agreed, and step 6" in said


@pytest.mark.parametrize(("processes", "word"), [(1, "train.accumulate=1"), (2, "train.sync_bn=true")])
def test_the_layer_the_rank_and_the_sample_of_an_infinite_value_are_named(
    processes: int, word: str, tmp_path: Path
) -> None:
    """Also where layers meet other processes on their way forward and back."""
    words = ("checkpoint.every_steps=2", f"parallel.processes={processes}", word)
    said = stopped(trained(tmp_path, "Exploding", *words))
    assert said.count("guard [non-finite]: the gradient of step 5 is NaN or infinite") == 1
    assert "the output of Scale 'scale'" in said
    assert "since: step 5" in said
    run = tmp_path / "runs/x"
    file = run / f"offending-step-5-rank-{processes - 1}.safetensors"
    assert str(file.relative_to(tmp_path)) in said
    batch = load_file(file)
    assert len(batch["images"]) == 48 // processes
    assert f"rank {processes - 1} of {processes}, samples {int(batch['samples'][3])}\n" in said
    assert max(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) in (
        2,
        4,
    )  # 4, if the disk kept up
    assert "\n5 " not in (run / "fingerprints.txt").read_text()


def test_two_ranks_with_the_same_samples_are_reported_at_step_1() -> None:
    for found in results_of("tests.runs.fed_alike", 2):
        assert "guard [same-samples]: sample " in found["said"]
        assert "and 7 others came twice in one global batch, on ranks 0, 1" in found["said"]
        assert "since: step 1\n" in found["said"]


def test_with_warn_an_update_that_is_not_finite_is_skipped_and_the_run_continues(tmp_path: Path) -> None:
    done = trained(tmp_path, "Exploding", "guard.action=warn")
    assert result(done)["finished"]
    assert done.stderr.count("WARNING: guard [non-finite]: the gradient of step ") == 1
    assert "WARNING: 8 step(s) changed nothing" in done.stderr


@pytest.mark.parametrize(
    ("name", "guard", "said", "since"),
    [
        ("Sleeping", "eval-mode", "layer 'drop' (Dropout) was left in eval mode", "step 6"),
        ("Dozing", "eval-mode", "the model (Dozing) was left in eval mode", "step 6"),
        (
            "Renewing",
            "parameters",
            "a trainable parameter requires gradients but no optimizer holds it",
            "step 6",
        ),
        ("Astray", "device", "buffer 'table' is on meta, but rank 0 computes on cpu", "step 6"),
    ],
)
def test_a_model_that_breaks_itself_at_step_5_is_reported_at_the_next_check(
    name: str, guard: str, said: str, since: str, tmp_path: Path
) -> None:
    found = stopped(trained(tmp_path, name))
    assert f"guard [{guard}]: {said}" in found
    assert f"since: {since}\n" in found


def test_with_warn_each_guard_reports_once_and_the_run_finishes(tmp_path: Path) -> None:
    done = trained(tmp_path, "Sleeping", "guard.action=warn")
    assert result(done)["finished"]
    assert done.stderr.count("WARNING: guard [eval-mode]") == 1
    assert (tmp_path / "runs/x/log.txt").read_text().count("guard [eval-mode]") == 1

"""Runs in stages, as a user types them: the bits of accumulation, resumed, under other layouts, guarded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.parallel.world import single_process
from drumline.state.verify import verify_run
from drumline.training.loop import train as train_here
from tests.runs.command import begin, drumline, kill_when, metrics, result

pytestmark = pytest.mark.slow

SMALL = (
    "data.source=digits",
    "data.batch=46",
    "model.name=resnet8",
    "train.steps=6",
    "train.log_every=1",
    "checkpoint.every_steps=3",
    "checkpoint.keep=9",
    "parallel.threads=1",
    "optim.name=adamw",
    "optim.lr=0.002",
    "optim.clip=0.5",
    "train.ema=0.9",
)
"""46 samples make uneven micro-batches: 12, 12, 11, 11."""
PIECES = ("parallel.layout=pipeline", "parallel.micro_batches=4", "parallel.split=even")
OVER_TWO = (*PIECES, "parallel.processes=2")
IN_ONE = (*PIECES, "parallel.virtual=true")
GROUPS = ("model", "optimizer", "average")

OWN = '''
import torch
import torch.distributed as dist
from torch import nn


class Counting(nn.Module):
    """Kept whole by a trace, as it makes tensors; reads no numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def late(self, x):
        """From the second micro-batch of step 5 on."""
        if self.training:
            self.calls += 1
        return torch.ones(len(x), 1, dtype=torch.bool) & (self.calls >= 18)


class Boom(Counting):
    def forward(self, x):
        third = torch.arange(len(x))[:, None] == 2
        return x * torch.where(self.late(x) & third, float("inf"), 1.0)


class Drift(Counting):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        last = dist.is_initialized() and dist.get_rank() == 3
        self.weight.data += 1e-3 * (self.late(x)[0, 0] & last)
        return x * self.weight


class Keep(nn.Module):
    last = None

    def forward(self, x):
        if self.last is not None and self.training:
            x = x + self.last
        self.last = x.detach().mean(0, keepdim=True)
        return x


class Hand(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x):
        self.table = x.detach().mean(0)[:3]
        return x


class Reading(nn.Module):
    def forward(self, x):
        return x * float(x.mean())


class Depth(nn.Module):
    """Stochastic depth, with a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.full((), 0.7), persistent=False)

    def forward(self, x):
        return x * (torch.rand(len(x), 1) < self.share) / self.share if self.training else x


class Net(nn.Module):
    def __init__(self, classes, gate=nn.Identity):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.two = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.gate = gate()
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(self.gate(self.two(self.one(x)).mean((2, 3))))


class Tied(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.two.weight = self.one.weight
        self.fc = nn.Linear(3, classes)

    def forward(self, x):
        return self.fc(self.two(self.one(x).relu()).mean((2, 3)))


def booming(classes): return Net(classes, Boom)
def drifting(classes): return Net(classes, Drift)
def keeping(classes): return Net(classes, Keep)
def writing(classes): return Net(classes, Hand)
def reading(classes): return Net(classes, Reading)
def drawing(classes): return Net(classes, Depth)


def ignored(classes):
    net = Net(classes)
    net._ddp_params_and_buffers_to_ignore = ["fc.weight"]  # left there by a wrapper, a checkpoint, a copy
    return net


def hooked(classes):
    net = Net(classes)
    net.fc.weight.register_hook(lambda gradient: 0 * gradient)
    return net
'''

Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains once for each name and set of words; gives the run folder."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "own.py").write_text(OWN)

    @cache
    def trained(name: str, *words: str) -> Path:
        result(drumline("train", *SMALL, f"run.name={name}", *words, folder=folder))
        return folder / "runs" / name

    return trained


def state(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds, by group and name."""
    folder = run / "checkpoints" / f"step-{step}"
    return {
        f"{group} {name}": tensor
        for group in GROUPS
        for name, tensor in load_file(folder / f"{group}.safetensors").items()
    }


def sha256(run: Path) -> str:
    """What `drumline verify` says."""
    found = verify_run(run)
    assert found.sound
    assert found.state_sha256
    return found.state_sha256


def test_a_killed_pipeline_resumes_with_the_bits_of_an_uninterrupted_one(run: Runs) -> None:
    whole = run("two", *OVER_TWO)
    folder = whole.parents[1]
    saved = folder / "runs/killed/checkpoints/step-3"
    kill_when(saved.exists, begin("train", *SMALL, "run.name=killed", *OVER_TWO, folder=folder))
    for later in (folder / "runs/killed/checkpoints").glob("step-*"):
        if later.name != "step-3":  # saved before the signal came; something is to be left to do
            shutil.rmtree(later)
    killed = run("killed", *OVER_TWO, "checkpoint.resume=auto")
    assert "resumed from" in (killed / "log.txt").read_text()
    assert sha256(killed) == sha256(whole)
    assert (killed / "fingerprints.txt").read_bytes() == (whole / "fingerprints.txt").read_bytes()


def test_a_checkpoint_resumes_under_any_layout(run: Runs) -> None:
    """Saved by two processes: one process continues with the same bits, and a pipeline of different stages continues
    with what that one saved. DDP over the same micro-batches rounds differently."""
    two = run("two", *OVER_TWO)
    single = run("single", "train.accumulate=4", f"checkpoint.resume={two}/checkpoints/step-3")
    assert sha256(single) == sha256(two)
    back = run("back", *OVER_TWO, "parallel.split=layer3", f"checkpoint.resume={single}/checkpoints/step-3")
    assert sha256(back) == sha256(two)
    ddp = run(
        "ddp", "parallel.processes=2", "train.accumulate=2", f"checkpoint.resume={two}/checkpoints/step-3"
    )
    losses = [
        [line["loss"] for line in metrics(two.parents[1], each.name, "train") if line["step"] == 4]
        for each in (two, ddp)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    mine, theirs = state(two), state(ddp)
    assert mine.keys() == theirs.keys()
    for name in mine:
        if "running" not in name and "batches" not in name:  # DDP's are means over the processes
            assert torch.allclose(mine[name].double(), theirs[name].double(), rtol=1e-2, atol=1e-4), name


def test_sharded_runs_end_with_the_bits_of_ddp_and_resume_from_their_shards(run: Runs) -> None:
    """Not clipped: the length of a gradient is added up from its parts."""
    words = ("parallel.processes=2", "train.accumulate=2", "optim.clip=0")
    sharded = (*words, "parallel.layout=fsdp", "checkpoint.sharded=true")
    whole, plain = run("sharded", *sharded), run("unsharded", *words)
    assert sha256(whole) == sha256(plain)
    for folder in (whole, plain):
        words = "gradients of 29 of 29 parameters equal plain accumulation over 4 micro-batches, bit for bit"
        assert f"certificate: {words}" in (folder / "log.txt").read_text()
        assert json.loads((folder / "certificate.json").read_text())["passes"]
        assert "predicted: " in (folder / "timeline.svg").read_text()
    resumed = run("from pieces", *sharded, f"checkpoint.resume={whole}/checkpoints/step-3")
    assert sha256(resumed) == sha256(whole)


def test_evaluation_in_stages_is_that_of_one_process(run: Runs) -> None:
    two = run("two", *OVER_TWO)
    (line,) = (each for each in metrics(two.parents[1], "two", "eval") if each["step"] == 6)
    alone_found = result(drumline("eval", str(two), "parallel.threads=1", folder=two.parents[1]))
    assert line["average_top1"] == alone_found["top1"]


def test_the_certificate_is_logged_and_stored(run: Runs) -> None:
    two = run("two", *OVER_TWO)
    stored = json.loads((two / "certificate.json").read_text())
    assert stored["passes"]
    assert [each["wrong"] for each in stored["comparisons"]] == [0, 0, 0]
    assert [each["same_bits"] for each in stored["comparisons"]] == [29, 27, 27]
    assert stored["words"] in (two / "log.txt").read_text()
    assert "gradients of 29 of 29 parameters equal plain accumulation over 4 micro-batches" in stored["words"]


def test_ddp_that_ignores_a_parameter_is_stopped_before_training(run: Runs) -> None:
    """DDP is silent about it, and each process would train that weight alone."""
    folder = run("accumulate", "train.accumulate=4").parents[1]
    words = ("run.name=ignored", "parallel.processes=2", "model.name=own:ignored", "train.accumulate=2")
    done = drumline("train", *SMALL, *words, folder=folder)
    assert done.returncode == 2, done.stderr
    assert "certificate: the gradient of 'fc.weight' differs on rank " in done.stderr
    assert "_ddp_params_and_buffers_to_ignore" in done.stderr
    assert "Traceback" not in done.stderr
    stored = json.loads((folder / "runs" / "ignored" / "certificate.json").read_text())
    assert not stored["passes"]
    assert stored["comparisons"][0]["wrong"] == 1


def test_ddp_trains_a_model_with_hidden_state_and_warns_that_it_has_no_certificate(run: Runs) -> None:
    kept = run("kept", "parallel.processes=2", "model.name=own:keeping")
    assert "WARNING: no certificate: the model does not repeat its own step" in (kept / "log.txt").read_text()
    assert json.loads((kept / "certificate.json").read_text())["passes"] is None


def test_random_draws_of_a_model_do_not_depend_on_processes_or_a_resume(run: Runs) -> None:
    """Dropout and stochastic depth, with mixed pairs, recomputing, lamb and a buffer that is not saved: virtual
    devices, then two processes, which stay with the cut."""
    words = (
        "model.name=own:drawing",
        "data.mixup=0.2",
        "train.gradient_checkpointing=true",
        "optim.name=lamb",
    )
    whole = run("drawn", *IN_ONE, "parallel.stages=2", "parallel.split=fc", *words)
    assert "bit for bit" in (whole / "log.txt").read_text()
    resume = ("parallel.split=time", f"checkpoint.resume={whole}/checkpoints/step-3")
    resumed = run("resumed", *OVER_TWO, *words, *resume)
    assert "1: from fc (as in the run it resumes)" in (resumed / "log.txt").read_text()
    assert sha256(resumed) == sha256(whole)


def test_a_step_that_is_not_finite_is_named_and_skipped_by_every_stage(run: Runs) -> None:
    booming = run(
        "booming", *OVER_TWO, "model.name=own:booming", "guard.action=warn", "checkpoint.every_steps=4"
    )
    log = (booming / "log.txt").read_text()
    assert "the output of Boom 'gate' is the first that is not finite; where: rank 1 of 2, samples " in log
    assert "2 step(s) changed nothing" in log
    for name, tensor in state(booming, 4).items():
        if name.startswith("model"):
            assert torch.equal(tensor, state(booming)[name]), name


def test_replicas_of_a_stage_that_drift_apart_are_named(run: Runs) -> None:
    folder = run("accumulate", "train.accumulate=4").parents[1]
    words = (*PIECES, "parallel.processes=4", "parallel.stages=2", "guard.every=1", "model.name=own:drifting")
    done = drumline("train", *SMALL, "run.name=drifting", *words, folder=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "guard [drift]: ranks have drifted apart: parameter 'gate.weight'" in done.stderr
    assert "ranks 1, 3 of 4" in done.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # Stopped by the certificate.
        (
            "parallel.stages=2 parallel.virtual=true model.name=own:keeping",
            (
                "the gradient of 'one.0.weight' differs",
                "stores values from one call to the next",
                "8 of 10",
            ),
        ),
        (
            "parallel.stages=2 parallel.virtual=true model.name=own:writing",
            ("the moved buffer 'gate.table' differs", "certificate.json"),
        ),
        # Would silently be lost.
        (
            "parallel.stages=2 parallel.virtual=true model.name=own:hooked",
            ("parallel.layout = pipeline: the parameter fc.weight has a hook", "--parallel.layout ddp"),
        ),
        # Cannot be split.
        (
            "parallel.stages=17 parallel.virtual=true",
            ("parallel.stages = 17: ResNet can be cut into at most 5", "5 or less"),
        ),
        (
            "parallel.stages=4 parallel.virtual=true parallel.schedule=interleaved",
            ("parallel.stages = 4 x parallel.chunks = 2: ResNet can be cut into at most 5", "1f1b"),
        ),
        ("parallel.stages=2", ("parallel.stages = 2: this process has 1 device", "--parallel.virtual")),
        ("parallel.stages=auto", ("needs at least two devices or two processes", "--parallel.processes N")),
        (
            "parallel.stages=2 parallel.virtual=true parallel.split=layer9",
            ("parallel.split: ResNet calls no module 'layer9'", "did you mean layer"),
        ),
        (
            "parallel.stages=3 parallel.virtual=true parallel.split=layer3,layer2",
            ("parallel.split: layer2 comes before layer3", "in the order"),
        ),
        (
            "parallel.stages=2 parallel.virtual=true parallel.split=two model.name=own:Tied",
            ("parallel.split: one.weight is used by stage 0 and by stage 1", "one stage has both uses"),
        ),
        (
            "parallel.stages=2 parallel.virtual=true model.name=own:reading",
            (
                "its module 'gate' (Reading) has no output shape until it runs",
                "do not read the values of a tensor",
            ),
        ),
    ],
)
def test_a_model_or_split_that_cannot_be_trained_in_stages_is_rejected(
    words: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.from_args((*SMALL, *PIECES, *words.split()))
    threads = torch.get_num_threads()
    with pytest.raises(UserError) as caught:
        train_here(recipe, single_process(torch.device("cpu")))
    torch.set_num_threads(threads)
    for part in parts:
        assert part in str(caught.value)

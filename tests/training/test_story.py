"""log.txt alone says what ran, each epoch's loss and score, each checkpoint, and how the run ended."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.errors import LostError, UserError
from drumline.data.feed.batch import Batch
from drumline.observe import display
from drumline.parallel.world import single_process
from drumline.state.folder import eval_command, resume_command
from drumline.training.loop import train
from drumline.training.output import TrainResult
from drumline.training.step import TrainStep
from tests.training import tiny

pytestmark = pytest.mark.slow

BASE = Recipe(
    data=Data(source="digits", batch=359),  # 4 steps an epoch
    model=Model(name="resnet8"),
    train=Train(epochs=3, eval_every=2),
    checkpoint=Checkpoint(every_epochs=0),
    optim=Optim(lr=0.01, warmup_epochs=0),
    parallel=Parallel(threads=1),
)


def run(folder: Path, recipe: Recipe = BASE) -> TrainResult:
    recipe = replace(recipe, run=Run(dir=str(folder), name="one", device="cpu"))
    return train(recipe, single_process(tiny.CPU))


def lines(folder: Path) -> list[str]:
    """The entries of the log, without their times."""
    return [
        line.partition("  ")[2]
        for line in (folder / "one/log.txt").read_text().splitlines()
        if line[0].isdigit()
    ]


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, act: object) -> None:
    """Lets something happen in the middle of a run, once."""
    step = TrainStep.__call__

    def stepping(self: TrainStep, batch: Batch, index: int, rate: float) -> None:
        step(self, batch, index, rate)
        if index + 1 == number:
            monkeypatch.setattr(TrainStep, "__call__", step)
            act()  # type: ignore[operator]

    monkeypatch.setattr(TrainStep, "__call__", stepping)


def test_a_run_that_is_stopped_and_resumed_has_its_whole_story_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "PLAIN_EVERY_S", 0.0)
    after_step(monkeypatch, 9, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert not run(tmp_path).finished
    told = capfd.readouterr().err
    first = lines(tmp_path)
    assert first[0].startswith("started: ")
    assert "drumline 0." in first[0]
    assert first[1] == f"run folder {tmp_path}/one"
    assert first[2].startswith("resnet8: 78,042 parameters")
    assert re.fullmatch(r"epoch 1: loss \d\.\d{4}, not evaluated", first[4])
    assert re.fullmatch(r"epoch 2: loss \d\.\d{4}, top-1 .*%, evaluation loss \d.* \(best\)", first[5])
    assert re.fullmatch(r"saved checkpoint step-8 \(0\.\d MiB, \d\.\d s\)", first[6])
    assert first[7].startswith("saved checkpoint step-9 ")
    resume = f"drumline resume {tmp_path}/one"
    assert first[-1].startswith("stopped: SIGINT after step 9 of 12, top-1 ")
    assert first[-1].endswith(f"; saved in {tmp_path}/one; to resume: {resume}")
    assert first[-1] in told
    assert "SIGINT: finishing the step, then saving" in told
    progress = [line for line in told.splitlines() if "img/s" in line]
    assert progress
    assert not any("loss -" in line for line in progress), "the loss is there from the first step on"

    again = replace(BASE, checkpoint=replace(BASE.checkpoint, resume="auto"))
    assert run(tmp_path, again).finished
    rest = lines(tmp_path)[len(first) :]
    assert rest[0].startswith("started: ")
    assert any(line.startswith("resumed from ") for line in rest)
    assert any(re.match(r"epoch 3: loss \d\.\d{4}, top-1 ", line) for line in rest)
    assert re.match(r"finished: top-1 .*\), best .*% at epoch \d, in \d:\d\d; weights in ", rest[-1])
    assert rest[-1].endswith(f"{tmp_path}/one/weights; next: drumline eval {tmp_path}/one")
    assert not any("was killed" in line for line in lines(tmp_path))


def test_a_guard_that_stops_a_run_is_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="guard"):
        run(tmp_path, replace(BASE, optim=Optim(lr=1e6, warmup_epochs=0), train=Train(steps=8)))
    last = lines(tmp_path)[-1]
    assert re.match(r"failed: after step \d+: guard \[non-finite\]: ", last), last
    assert "fix: " in (tmp_path / "one/log.txt").read_text()


def test_an_exception_and_a_kill_are_known_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug of ours")

    after_step(monkeypatch, 3, fail)
    recipe = replace(BASE, checkpoint=Checkpoint(every_steps=2, resume="auto"), train=Train(steps=4))
    with pytest.raises(RuntimeError):
        run(tmp_path, recipe)
    text = (tmp_path / "one/log.txt").read_text()
    assert "failed: after step 2: Traceback" in text
    assert "    RuntimeError: a bug of ours\n" in text
    # As if it had been killed instead: without its last entry.
    (tmp_path / "one/log.txt").write_text(text[: text.index("failed: after")].rpartition("\n")[0] + "\n")
    assert run(tmp_path, recipe).finished
    assert (
        sum(
            "was killed (kill -9, out of memory, power cut) and left no closing line" in line
            for line in lines(tmp_path)
        )
        == 1
    )


def test_running_out_of_memory_is_reported_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")

    after_step(monkeypatch, 1, fail)
    with pytest.raises(
        LostError, match=r"out of memory on cpu: CUDA out of memory\. Tried to allocate 20 GiB"
    ):
        run(tmp_path)
    assert "OutOfMemoryError" in (tmp_path / "one/log.txt").read_text()


def test_the_command_to_resume_fits_the_run() -> None:
    assert resume_command(Recipe(), Path("runs/my run")) == "drumline resume 'runs/my run'"
    taught = replace(Recipe(), distill=replace(Recipe().distill, teacher_weights=("t",)))
    assert resume_command(taught, Path("runs/x")) == "drumline resume runs/x"
    stage = resume_command(taught, Path("runs/x/initial-fsp"))
    assert stage == "drumline distill ... run.name=x checkpoint.resume=auto"
    own = replace(Recipe(), model=Model(name="mine.nets:small"))
    assert resume_command(own, Path("runs/x")) == "drumline resume runs/x --trust"


def test_the_command_to_evaluate_trusts_the_code_that_an_evaluation_runs(tmp_path: Path) -> None:
    assert eval_command(Recipe(), "runs/my run") == "drumline eval 'runs/my run'"
    assert eval_command(replace(Recipe(), train=Train(loss="mine:loss")), "runs/x") == "drumline eval runs/x"
    own = replace(BASE, model=Model(name="tests.own_code:net"), train=Train(steps=1))
    run(tmp_path, own)
    assert lines(tmp_path)[-1].endswith(f"; next: drumline eval {tmp_path}/one --trust")

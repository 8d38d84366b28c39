"""Teachers that are trained with the student: the losses of their formulas, the same bits, and what is rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.cli import main
from drumline.config.recipe import Recipe
from drumline.data.feed.batch import Batch
from drumline.distillation.self_taught import StudentWithPeer
from drumline.distillation.task import distillation_task
from drumline.observe.display import make_display
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.training.schedule import make_plan
from drumline.training.sets import normaliser, open_sets
from drumline.training.state import build_state
from drumline.training.step import TrainStep
from tests.runs.command import drumline, metrics, result, sha256

HERE = single_process(torch.device("cpu"))
SMALL = (
    "data.source=digits",
    "data.batch=48",
    "data.workers=0",
    "model.name=resnet8",
    "parallel.threads=1",
    "optim.lr=0.05",
    "optim.schedule=constant",
    "optim.warmup_epochs=0",
    "train.eval_every=0",
    "train.log_every=1",
)
EMA = (*SMALL, "distill.teacher=ema", "train.ema=0.9")
PEER = (*SMALL, "distill.teacher=peer", "distill.r=1", "distill.a=1", "distill.T=1")


class Opened:
    """The first steps of a recipe in this process."""

    def __init__(self, *words: str) -> None:
        recipe = Recipe.from_args([*words, "train.steps=3"])
        sets = open_sets(recipe, HERE)
        recipe = replace(recipe, optim=replace(recipe.optim, head_lr=1.0)).check()
        plan, strategy = make_plan(recipe, len(sets.train)), create_strategy(recipe, HERE)
        self.task = distillation_task(recipe, sets, plan, strategy, make_display(0))
        self.state = build_state(strategy, self.task.module, self.task.model)
        self.task.objective.use_average(self.state.average.module if self.state.average else None)
        self.step = TrainStep(self.state, self.task.objective, normaliser(sets, recipe))
        self.batches = list(sets.training(recipe, slice(0, 48), 0, 3))

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.state.module.parameters()]


def kl(teacher: Tensor, student: Tensor, T: float) -> Tensor:
    """The sum over the batch of T² KL(teacher || student)."""
    p = (teacher.detach() / T).softmax(1)
    return T * T * F.kl_div((student / T).log_softmax(1), p, reduction="sum")


def test_the_average_teaches_as_it_is_after_the_previous_step() -> None:
    run = Opened(*EMA)
    assert run.state.average is not None
    for index, batch in enumerate(run.batches):
        average, student = run.state.average.module, run.state.model
        if index == 2:
            images = run.step.images(batch)
            teacher_logits = average(images)
            own = nn.Module.__call__(student, images)
            expected = 0.1 * F.cross_entropy(own, batch.labels, reduction="sum") + 0.9 * kl(
                teacher_logits, own, 4
            )
            gradient = torch.autograd.grad(expected / 48, list(student.parameters()))
            run.step.meter.sums.zero_()
        run.step(batch, index, 0.05)
    assert float(run.step.meter.loss) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert not average.training
    for ours, theirs in zip(run.gradients(), gradient, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_each_of_two_students_learns_from_the_labels_and_from_the_other() -> None:
    run = Opened(*PEER)
    module = run.task.module
    assert isinstance(module, StudentWithPeer)
    one, other = (list(part.parameters()) for part in (module.student, module.peer))
    assert not torch.equal(one[0], other[0])
    batch: Batch = run.batches[0]
    images = run.step.images(batch)
    a, b = module.student(images), module.peer(images)
    ce = [F.cross_entropy(logits, batch.labels, reduction="sum") for logits in (a, b)]
    losses = [ce[0] + kl(b, a, 1), ce[1] + kl(a, b, 1)]
    expected = [
        *torch.autograd.grad(losses[0] / 48, one, retain_graph=True),
        *torch.autograd.grad(losses[1] / 48, other),
    ]
    run.step(batch, 0, 0.05)
    for ours, theirs in zip(run.gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert float(run.step.meter.loss) == pytest.approx(float((losses[0] + losses[1]).detach()), rel=1e-5)
    terms = dict(zip(run.task.objective.terms, run.step.meter.terms.tolist(), strict=True))
    assert terms["ce"] == pytest.approx(float(ce[0].detach()), rel=1e-5)
    assert terms["peer_ce"] == pytest.approx(float(ce[1].detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [EMA, (*PEER, "distill.method=dist,kd", "distill.b=1")], ids=["ema", "peer"]
)
def test_a_strict_run_has_the_same_bits_resumed_and_on_two_processes(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    strict = (*words, "run.strict=true", "run.shards=2", "data.mixup=0.2")
    result(drumline("distill", *strict, "run.name=one", "train.steps=6", folder=tmp_path))
    other = (*strict, "run.name=two", "parallel.processes=2")
    result(drumline("distill", *other, "train.steps=3", folder=tmp_path))
    result(drumline("distill", *other, "train.steps=6", "checkpoint.resume=auto", folder=tmp_path))
    assert sha256(tmp_path, "one") == sha256(tmp_path, "two")
    assert "teacher_agreement" in metrics(tmp_path, "two", "train")[-1]


REJECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "features": ((*EMA, "distill.method=attention"), "needs methods that compare only logits"),
    "a bank": ((*PEER, "distill.method=crd"), "needs methods that compare only logits"),
    "a helper": ((*PEER, "distill.method=ctkd"), "needs methods that compare only logits"),
    "an initial phase": ((*EMA, "distill.method=factor"), "needs a trained teacher"),
    "no average": ((*SMALL, "distill.teacher=ema"), "needs the moving average of the student"),
    "weights": ((*EMA, "distill.teacher_weights=runs/a"), "is trained with the student"),
    "a cache": ((*PEER, "distill.cache=cache"), "is trained with the student"),
    "stages": (
        (*PEER, "parallel.layout=pipeline", "parallel.processes=2"),
        "needs whole models in each process",
    ),
    "fsdp": ((*EMA, "parallel.layout=fsdp", "parallel.processes=2"), "needs whole models in each process"),
    "frozen": ((*PEER, "train.freeze=layer1"), "would affect only one of the two students"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_does_not_fit_is_rejected_by_a_dry_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, what = REJECTED[name]
    assert main(["distill", "--dry-run", *words]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(("words", "taught"), [(EMA, "ema"), (PEER, "peer")])
def test_a_dry_run_names_the_teacher(
    words: tuple[str, ...], taught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["distill", "--dry-run", *words]) == 0
    assert f"teacher: {taught}; method kd" in "".join(capsys.readouterr())

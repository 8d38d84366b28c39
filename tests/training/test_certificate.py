"""A layout that computes what accumulation does is certified; one that does not stops the run."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.config.recipe import Checkpoint, Data, Model, Parallel, Recipe, Run, Train
from drumline.parallel.norm import WorldNorm, apply_norm_mode, commit_statistics
from drumline.parallel.world import single_process
from drumline.training import certificate as module
from drumline.training.certificate import (
    Certificate,
    Reference,
    as_json,
    copied,
    error_of,
    gradients_of,
    message,
    reference,
    summary,
)
from drumline.training.equality import Subject, compare, merge
from drumline.training.loop import train
from tests.training import tiny

MICRO = 4
BATCH = tiny.make(16)


def loss(model: nn.Module, micro: int) -> Tensor:
    """Of one micro-batch, weighted by the whole batch."""
    rows = slice(micro * 4, micro * 4 + 4)
    images = tiny.normalised(BATCH.images[rows])
    return nn.functional.cross_entropy(model(images), BATCH.labels[rows], reduction="sum") / len(BATCH.labels)


class TwoStages:
    """A layout by hand: the first three layers are one stage, the rest another; each on a rank of its own, or both
    on both ranks. Faults are put in on purpose."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[nn.Module, int], None] = lambda model, micro: None,
        after: Callable[[nn.Module], None] = lambda model: None,
        micros: range = range(MICRO),
    ) -> None:
        self.model, self.before, self.after, self.micros = model, before, after, micros
        self.cut = 3

    def step(self) -> None:
        for micro in self.micros:
            self.before(self.model, micro)
            loss(self._through, micro).backward()
        commit_statistics(self.model)
        self.after(self.model)

    def rehearse(self) -> dict[str, Tensor | None]:
        """The gradients; buffers are put back, as a rehearsed step does."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.step()
        for buffer, value in buffers:
            buffer.copy_(value)
        gradients = gradients_of(self.model)
        for parameter in self.model.parameters():
            parameter.grad = None
        return gradients

    def _through(self, images: Tensor) -> Tensor:
        first = self.model[: self.cut](images)
        sent = _Sent.apply(first)
        return self.model[self.cut :](sent)


class _Sent(torch.autograd.Function):
    """Carries a copy over, and a copy of its gradient back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.clone()


def certify(layout: TwoStages, expected: Reference | None = None) -> Certificate:
    """As a run does: the rehearsed step, seen by two ranks that each hold a stage."""
    model = layout.model
    expected = expected or reference(copy.deepcopy(model), loss, MICRO)
    before = copied(dict(model.named_buffers()))
    own = layout.rehearse()
    names = [name for name, _ in model.named_parameters()]
    parts = [{n: g for n, g in own.items() if (int(n[0]) < layout.cut) == (rank == 0)} for rank in (0, 1)]
    gradients = merge(
        [compare(part, expected.gradients, names, rank=rank) for rank, part in enumerate(parts)]
    )
    buffers = dict(model.named_buffers())
    untouched = compare(copied(buffers), before, list(buffers), subject=Subject.BUFFERS_UNTOUCHED)
    return Certificate((gradients, untouched), MICRO, "pipeline", "layout pipeline")


@pytest.mark.parametrize("mode", ["micro", "deferred", "frozen"])
def test_a_layout_that_computes_what_accumulation_does_is_certified(mode: str) -> None:
    model = apply_norm_mode(tiny.normed(), mode, None, MICRO).train()
    certificate = certify(TwoStages(model))
    assert error_of(certificate) is None
    assert message(certificate) == (
        "certificate: gradients of 6 of 6 parameters equal plain accumulation over 4 micro-batches, bit for bit; "
        "the rehearsal left all 3 buffers as they were"
    )
    assert summary(certificate) == "pipeline check passed: gradients match one process"
    stored = json.loads(as_json(certificate))
    assert stored["passes"]
    assert stored["comparisons"][0]["same_bits"] == 6


@pytest.mark.parametrize("mode", ["micro", "deferred", "frozen"])
def test_after_a_real_step_buffers_are_where_accumulation_puts_them(mode: str) -> None:
    model = apply_norm_mode(tiny.normed(), mode, None, MICRO).train()
    expected = reference(model, loss, MICRO)
    counts = {"micro": 4, "deferred": 1, "frozen": 0}
    assert expected.buffers["1.num_batches_tracked"] == counts[mode]
    names = list(expected.buffers)

    def judged() -> Certificate:
        now = dict(model.named_buffers())
        return Certificate(
            (compare(now, expected.buffers, names, subject=Subject.BUFFERS_MOVED),), MICRO, "pipeline", ""
        )

    TwoStages(model).step()
    assert error_of(judged()) is None
    assert message(judged()).startswith(
        "certificate: 3 of 3 buffers after a step equal plain accumulation over 4"
    )
    model[1].running_var.mul_(1.01)
    assert "the moved buffer '1.running_var' differs on rank 0" in str(error_of(judged()))


def test_the_reference_leaves_the_model_as_it_was() -> None:
    """Gradients, buffers, generators, and what deferred norms have seen; also when the loss breaks."""
    model = nn.Sequential(tiny.normed(), nn.Dropout(0.5)).train()
    apply_norm_mode(model, "deferred", None, MICRO)
    loss(model, 0).backward()
    parameters = [(parameter, parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state, generator = copied(model.state_dict()), torch.get_rng_state()

    def breaks(model: nn.Module, micro: int) -> Tensor:
        if micro == 2:
            raise RuntimeError("out of memory")
        return loss(model, micro)

    first = reference(model, loss, MICRO)
    with pytest.raises(RuntimeError, match="out of memory"):
        reference(model, breaks, MICRO)
    commit_statistics(model)
    assert model[0][1].num_batches_tracked == 0
    again = reference(model, loss, MICRO)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is grad and torch.equal(grad, value) for p, grad, value in parameters)
    # The dropout drew the same twice, and the first was not fed what the model had seen before.
    assert compare(again.gradients, first.gradients, list(first.gradients)).equal == 6
    assert compare(again.buffers, first.buffers, list(first.buffers)).equal == 3


def test_a_gradient_divided_once_too_often_is_stopped() -> None:
    def divide(model: nn.Module) -> None:
        for parameter in model[3:].parameters():
            parameter.grad.div_(MICRO)

    certificate = certify(TwoStages(tiny.normed(), after=divide))
    error = str(error_of(certificate))
    assert error.startswith(
        "certificate: the gradient of '5.weight' differs on rank 1 from plain accumulation over 4"
    )
    assert "3.8e-01 of the largest gradient of its module" in error
    assert "1e-05 passes; it is 0.25 times the reference; 2 of 6 gradients differ" in error
    assert "divides or multiplies by the number of micro-batches" in error
    assert "gradients of 4 of 6 parameters equal" in message(certificate)
    stored = json.loads(as_json(certificate))
    assert not stored["passes"]
    assert stored["comparisons"][0]["first_wrong"]["name"] == "5.weight"
    assert stored["comparisons"][0]["first_wrong"]["rank"] == 1


def test_a_missing_micro_batch_is_stopped() -> None:
    error = str(error_of(certify(TwoStages(tiny.normed(), micros=range(MICRO - 1)))))
    assert "the gradient of '0.weight' differs on rank 0" in error
    assert "times the reference" not in error


def test_statistics_that_a_rehearsal_has_moved_are_stopped() -> None:
    """A forward to find out shapes, outside of what is put back."""

    class Probing(TwoStages):
        def rehearse(self) -> dict[str, Tensor | None]:
            own = super().rehearse()
            self.model(torch.zeros(4, 3, 8, 8))
            return own

    certificate = certify(Probing(tiny.normed()))
    error = str(error_of(certificate))
    assert "the buffer '1.running_mean' was changed on rank 0 by a rehearsed step" in error
    assert "3 of 3 buffers differ" in error
    assert "3 of 3 buffers changed by the rehearsal" in message(certificate)


def test_a_parameter_that_another_stage_overwrote_is_stopped() -> None:
    """Between two micro-batches: the gradients are wrong from there on."""

    def overwrite(model: nn.Module, micro: int) -> None:
        if micro == 2:
            model[0].weight.data.mul_(1.5)

    certificate = certify(TwoStages(tiny.normed(), before=overwrite))
    assert "the gradient of '0.weight' differs" in str(error_of(certificate))


def test_a_weight_that_differs_from_the_start_is_seen_in_the_gradients() -> None:
    """One stage holds other weights than the model that was built."""
    expected = reference(tiny.normed(), loss, MICRO)
    model = tiny.normed()
    model[5].weight.data.mul_(1.5)
    assert "the gradient of '0.weight' differs" in str(error_of(certify(TwoStages(model), expected)))


def test_a_parameter_that_no_stage_holds_is_stopped() -> None:
    model = tiny.normed()
    expected = reference(model, loss, MICRO)
    own = {name: gradient for name, gradient in expected.gradients.items() if name != "1.weight"}
    report = merge([compare(own, expected.gradients, list(expected.gradients))])
    error = str(error_of(Certificate((report,), MICRO, "pipeline", "")))
    assert "the parameter '1.weight' is held by no rank" in error
    assert "parallel.split leaves it out" in error


def test_rounding_is_reported_and_passes() -> None:
    expected = reference(tiny.normed(), loss, MICRO).gradients
    names = list(expected)
    near = {name: gradient * (1 + 1e-6) for name, gradient in expected.items()}
    certificate = Certificate((compare(near, expected, names),), MICRO, "pipeline", "")
    assert error_of(certificate) is None
    text = message(certificate)
    assert (
        "gradients of 6 of 6 parameters equal plain accumulation over 4 micro-batches, 0 of them bit for bit"
        in text
    )
    assert "; the largest difference: " in text


def test_what_json_cannot_hold_is_null_with_a_reason() -> None:
    expected: dict[str, Tensor | None] = {"a": torch.zeros(3), "b": torch.full((3,), torch.nan)}
    own: dict[str, Tensor | None] = {"a": torch.ones(3), "b": torch.full((3,), torch.nan)}
    certificate = Certificate((compare(own, expected, ["a", "b"]),), MICRO, "pipeline", "")
    row = json.loads(as_json(certificate))["comparisons"][0]["first_wrong"]
    assert (row["name"], row["relative"], row["reason"]) == ("a", None, "the reference is zero")
    assert "1 have NaN or infinity in the reference too" in message(certificate)


def test_a_model_that_one_device_cannot_hold_is_trained_without_a_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "reference", full)
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="run", device="cpu"),
        data=Data(source="digits", batch=24),
        model=Model(name="resnet8"),
        train=Train(steps=2, eval_every=0),
        parallel=Parallel(
            layout="pipeline", stages=2, virtual=True, micro_batches=2, split="even", threads=1
        ),
        checkpoint=Checkpoint(every_epochs=0),
    )
    assert train(recipe, single_process(torch.device("cpu"))).finished
    told = json.loads((tmp_path / "run" / module.FILE).read_text())
    assert told["passes"] is None
    assert "does not fit" in told["words"]
    assert "WARNING: no certificate" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_disk_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_text", full)
    shown: list[str] = []
    logged: list[str] = []

    def note(text: str, show: bool = True) -> None:
        (shown if show else logged).append(text)

    module._log_uncertified("layout ddp over 2 processes", tmp_path, note)
    module._conclude(Certificate((), 2, "DDP", "layout ddp over 2 processes"), tmp_path, note)
    told = f"WARNING: the certificate is not stored, No space left on device: {tmp_path / module.FILE}"
    passed = "DDP check passed: gradients match one process"
    assert shown == [told, f"WARNING: no certificate: {module.TOO_LARGE}", told, passed]
    assert logged == ["certificate: "]


@pytest.mark.parametrize(
    ("model", "meets", "ends"),
    [
        (nn.BatchNorm2d(3), False, False),
        (nn.Sequential(nn.SyncBatchNorm(3)), False, True),
        (nn.Sequential(WorldNorm(3)), False, True),
        (nn.BatchNorm2d(3), True, True),
    ],
)
def test_none_gives_up_while_others_wait_for_it(model: nn.Module, meets: bool, ends: bool) -> None:
    """Which of several processes has no room is known to itself alone."""
    step: Any = SimpleNamespace(objective=SimpleNamespace(meets=meets))

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) if ends else nullcontext():
        assert module._fits(full, module._communicates(model, step)) is None

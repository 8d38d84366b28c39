"""The student's loss is r · cross-entropy + a · kd + Σ b · method, in fp32, also inside autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32, Precision
from drumline.data.feed.batch import Batch
from drumline.distillation.method import LossInputs, Method, Needs, Scope
from drumline.distillation.methods import METHODS
from drumline.distillation.methods.logits import Kd
from drumline.distillation.methods.relations import Similarity
from drumline.distillation.objective import AcrossRanks, Distillation, GlobalBatch, LossTerm
from drumline.distillation.selection import select_methods
from drumline.distillation.student import StudentOutput, StudentWithHelpers
from drumline.distillation.teacher import LiveTeacher, Teacher, TeacherOutput
from drumline.parallel.world import single_process
from drumline.training.step import TrainStep
from drumline.training.task import Classification, LossSums
from tests.distillation.nets import Alone
from tests.training import tiny

CPU, CLASSES, COUNT = torch.device("cpu"), tiny.CLASSES, 6
STUDENT = torch.randn(COUNT, CLASSES, generator=torch.Generator().manual_seed(1))
TAUGHT = 3 * torch.randn(COUNT, CLASSES, generator=torch.Generator().manual_seed(2))
MAP = torch.randn(COUNT, 3, 2, 2, generator=torch.Generator().manual_seed(3))
TAUGHT_MAP = torch.randn(COUNT, 5, 2, 2, generator=torch.Generator().manual_seed(4))
MIX = torch.tensor([[share, share, 0.0, 0.0, 0.0, 0.0] for share in (0.9, 0.3, 0.5, 1.0, 0.7, 0.2)])


class Given(nn.Module):
    """A student with helpers whose output is fixed."""

    def forward(self, images: Tensor, teacher_taps: dict[str, Tensor]) -> StudentOutput:
        return StudentOutput(STUDENT, {"stage1": MAP}, {"spy": {"made": MAP}})


@dataclass(frozen=True)
class Spy(Method):
    """Counts its calls and keeps what it saw."""

    name: ClassVar[str] = "spy"
    seen: list[LossInputs] = field(default_factory=list)
    per_sample: Callable[[LossInputs], Tensor] = lambda seen: seen.labels.to(seen.logits.dtype) + 1

    def loss(self, seen: LossInputs) -> Tensor:
        self.seen.append(seen)
        return self.per_sample(seen)


class OnLogits(Spy):
    on_logits: ClassVar[bool] = True


class Whole(Spy):
    scope: ClassVar[Scope] = "global_batch"


NOTHING = Needs()
MAPS = Needs(("stage1",), ("stage1",))


def part(name: str, method: Method, weight: float, needs: Needs = NOTHING) -> LossTerm:
    return LossTerm(name, method, weight, needs)


def objective(
    parts: list[LossTerm],
    r: float = 1.0,
    smoothing: float = 0.0,
    global_batch: GlobalBatch | None = None,
    **options: Any,
) -> Distillation:
    return Distillation(
        parts,
        r,
        Classification(smoothing, CLASSES),
        run_teacher=lambda images, batch: TeacherOutput(TAUGHT, {"stage1": TAUGHT_MAP}),
        global_batch=AcrossRanks(single_process(CPU), [COUNT]) if global_batch is None else global_batch,
        device=CPU,
        per_epoch=10,
        **options,
    )


def scored(made: Distillation, batch: Batch, step: int = 0) -> LossSums:
    made.at(step)
    return made(Given(), torch.empty(COUNT, 3, 8, 8), batch)


# By hand, in float64.


def rows(logits: Tensor, T: float = 1.0) -> np.ndarray:
    z = logits.numpy().astype(np.float64) / T
    powers = np.exp(z - z.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def cross_entropies(labels: Tensor) -> np.ndarray:
    return -np.log(rows(STUDENT)[np.arange(COUNT), labels.numpy()])


def kd_by_hand(T: float, student: Tensor = STUDENT, taught: Tensor = TAUGHT) -> np.ndarray:
    s, t = rows(student, T), rows(taught, T)
    return T * T * (t * (np.log(t) - np.log(s))).sum(1)


def similarity_by_hand() -> float:
    def grams(maps: Tensor) -> np.ndarray:
        flat = maps.numpy().astype(np.float64).reshape(COUNT, -1)
        gram = flat @ flat.T
        return gram / np.sqrt((gram**2).sum(1, keepdims=True))

    return float(((grams(MAP) - grams(TAUGHT_MAP)) ** 2).sum() / COUNT**2)


@pytest.mark.parametrize(("r", "a", "b"), [(0.1, 0.9, 3000.0), (1.0, 2.0, 5.0), (0.0, 1.0, 7.0)])
def test_the_loss_is_the_weighted_sum_of_labels_kd_and_method(r: float, a: float, b: float) -> None:
    batch = tiny.make(COUNT)
    found = scored(objective([part("kd", Kd(T=4.0), a), part("similarity", Similarity(), b, MAPS)], r), batch)
    ce, kd = cross_entropies(batch.labels).sum(), kd_by_hand(4.0).sum()
    relation = similarity_by_hand() * COUNT
    assert found.loss.item() == pytest.approx(r * ce + a * kd + b * relation, rel=1e-5)
    assert found.terms is not None
    agreed = (STUDENT.argmax(1) == TAUGHT.argmax(1)).sum().item()
    assert found.terms.tolist() == pytest.approx([ce, kd, relation, agreed], rel=1e-5)
    assert int(found.correct) == int((STUDENT.argmax(1) == batch.labels).sum())


def test_terms_are_named_in_the_order_of_their_sums() -> None:
    made = objective([part("kd", Kd(), 1.0), part("spy", Spy(), 2.0)])
    assert made.terms == ("ce", "kd", "spy", "teacher_agreement")


def test_label_smoothing_applies_to_the_labels_alone() -> None:
    batch = tiny.make(COUNT)
    plain, smoothed = (scored(objective([part("kd", Kd(), 1.0)], smoothing=s), batch) for s in (0.0, 0.2))
    assert plain.terms is not None
    assert smoothed.terms is not None
    assert smoothed.terms[0] != plain.terms[0]
    assert smoothed.terms[1] == plain.terms[1]


# Mixed images.


def test_kd_is_the_same_for_mixed_images() -> None:
    batch = tiny.make(COUNT, mix=MIX)
    found = scored(objective([part("kd", Kd(T=4.0), 1.0)]), batch)
    own, other = cross_entropies(batch.labels), cross_entropies(batch.labels[[1, 0, 3, 2, 5, 4]])
    share = MIX[:, 1].numpy()
    assert found.terms is not None
    assert found.terms[0].item() == pytest.approx((share * own + (1 - share) * other).sum(), rel=1e-5)
    assert found.terms[1].item() == pytest.approx(kd_by_hand(4.0).sum(), rel=1e-5)


def test_methods_that_need_one_class_per_image_declare_it() -> None:
    assert {name for name, method in METHODS.items() if not method.mixes} == {"dkd", "crd"}


@pytest.mark.parametrize("kind", [Spy, OnLogits])
def test_a_method_is_computed_once_for_mixed_images_too(kind: type[Spy]) -> None:
    method = kind()
    scored(objective([part("spy", method, 1.0)]), tiny.make(COUNT, mix=MIX))
    assert len(method.seen) == 1


# What a method receives and costs.


def test_a_method_receives_only_its_own_taps_and_helper_outputs() -> None:
    reader, other = Spy(), Spy()
    batch = tiny.make(COUNT)
    made = objective([part("spy", reader, 1.0, MAPS), part("other", other, 1.0)])
    scored(made, batch)
    (seen,), (blind,) = reader.seen, other.seen
    assert torch.equal(seen.taps["stage1"], MAP)
    assert torch.equal(seen.teacher_taps["stage1"], TAUGHT_MAP)
    assert torch.equal(seen.helper_outputs["made"], MAP)
    assert torch.equal(seen.samples, batch.samples)
    assert blind.taps == blind.teacher_taps == blind.helper_outputs == {}


@pytest.mark.parametrize(("standardise", "changed"), [(True, True), (False, False)])
def test_only_methods_on_logits_receive_standardised_logits(standardise: bool, changed: bool) -> None:
    on_logits, other = OnLogits(), Spy()
    parts = [part("logits", on_logits, 1.0), part("other", other, 1.0), part("kd", Kd(T=2.0), 1.0)]
    found = scored(objective(parts, standardise=standardise), tiny.make(COUNT))
    assert torch.equal(other.seen[0].logits, STUDENT)
    assert torch.equal(other.seen[0].teacher_logits, TAUGHT)

    def standard(z: Tensor) -> Tensor:
        z = z.double()
        return ((z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True)) if changed else z

    torch.testing.assert_close(on_logits.seen[0].logits, standard(STUDENT).float())
    torch.testing.assert_close(on_logits.seen[0].teacher_logits, standard(TAUGHT).float())
    assert found.terms is not None
    expected = kd_by_hand(2.0, standard(STUDENT), standard(TAUGHT)).sum()
    assert found.terms[3].item() == pytest.approx(expected, rel=1e-4)
    ce = cross_entropies(tiny.make(COUNT).labels).sum()
    assert found.terms[0].item() == pytest.approx(ce, rel=1e-5)


def test_a_loss_over_the_global_batch_counts_once_per_sample() -> None:
    found = scored(
        objective([part("spy", Whole(per_sample=lambda seen: seen.logits.sum() * 0 + 2), 1.0)]),
        tiny.make(COUNT),
    )
    assert found.terms is not None
    assert found.terms[1].item() == 2 * COUNT


@pytest.mark.parametrize("kind", [Spy, Whole])
def test_a_loss_whose_shape_differs_from_the_declared_scope_is_an_error(kind: type[Spy]) -> None:
    wrong = kind(per_sample=lambda seen: seen.logits.sum() if kind is Spy else seen.logits.sum(1))
    with pytest.raises(UserError, match=f"{kind.__name__}: its loss returned a tensor of shape"):
        scored(objective([part("spy", wrong, 1.0)]), tiny.make(COUNT))


def test_a_method_of_weight_zero_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a part is never built, so its loss is never called."""

    def called(self: Method, seen: LossInputs) -> Tensor:
        raise AssertionError("the loss of a method without weight was computed")

    for kind in (Kd, Similarity):
        monkeypatch.setattr(kind, "loss", called)
    chosen = select_methods(Distill(method=("kd", "dkd", "similarity"), a=0.0, b=(1.0, 0.0)))
    made = objective([part(each.name, each.method, each.weight) for each in chosen.methods], chosen.r)
    assert made.terms == ("ce", "dkd", "teacher_agreement")
    scored(made, tiny.make(COUNT))


def test_logits_of_a_wrong_width_are_rejected() -> None:
    made = objective([part("kd", Kd(), 1.0)])
    made.classification.classes = CLASSES + 1
    with pytest.raises(UserError, match="the data has 5 classes"):
        scored(made, tiny.make(COUNT))


# In a step.


def stepped(precision: Precision, parts: list[LossTerm], steps: int = 1) -> tuple[Distillation, TrainStep]:
    torch.manual_seed(0)
    student = Alone(CLASSES, (4, 4, 8))
    torch.manual_seed(1)
    teacher = Teacher([Alone(CLASSES, (8, 4, 8))], CPU, taps=[("stage1",)], precision=precision)
    made = Distillation(
        parts,
        1.0,
        Classification(0.0, CLASSES),
        run_teacher=LiveTeacher(teacher),
        global_batch=AcrossRanks(single_process(CPU), [COUNT]),
        device=CPU,
        per_epoch=10,
        teacher=teacher,
    )
    module = StudentWithHelpers(student, {}, {each.name: each.needs for each in parts})
    step = tiny.step_of(tiny.state(module, model=student), COUNT, objective=made)
    step.precision = precision
    for index in range(steps):
        step(tiny.make(COUNT, index), index, 0.1)
    return made, step


def test_the_objective_waits_for_other_processes_only_if_a_method_reads_their_samples() -> None:
    two: Any = SimpleNamespace(world=SimpleNamespace(size=2))
    sample, batch = part("spy", Spy(), 1.0), part("whole", Whole(), 1.0)
    assert not objective([sample], global_batch=two).meets
    assert objective([sample, batch], global_batch=two).meets
    assert objective([replace(sample, memory=cast(Any, object()))], global_batch=two).meets
    assert not objective([sample, batch]).meets


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_losses_are_computed_in_fp32_outside_autocast(precision: Precision) -> None:
    enabled: list[bool] = []

    def watched(seen: LossInputs) -> Tensor:
        enabled.append(torch.is_autocast_enabled("cpu"))
        tensors = [seen.logits, seen.teacher_logits, *seen.taps.values(), *seen.teacher_taps.values()]
        assert [tensor.dtype for tensor in tensors] == [torch.float32] * 4
        assert (seen.logits @ seen.logits.T).dtype == torch.float32
        return seen.logits.square().sum(1) + seen.taps["stage1"].flatten(1).sum(1)

    method = Spy(per_sample=watched)
    _, step = stepped(precision, [part("spy", method, 1.0, MAPS), part("kd", Kd(), 1.0)])
    assert enabled == [False]
    assert step.meter.sums.isfinite().all()
    rounded = method.seen[0].logits
    assert torch.equal(rounded, rounded.bfloat16().float()) is (precision is BF16)


def test_the_teacher_is_checked_and_steps_leave_it_as_it_was() -> None:
    made, step = stepped(FP32, [part("kd", Kd(), 1.0)], steps=3)
    made.check()
    assert all(parameter.grad is not None for parameter in step.state.module.parameters())
    assert made.teacher is not None
    made.teacher.modules[0].train()
    with pytest.raises(UserError, match="training mode"):
        made.check()

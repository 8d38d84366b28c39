"""Weights and temperatures change as their options say, by the step alone, without new bits for constant ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.distillation.method import Method
from drumline.distillation.methods.logits import Dist, Dkd, Kd
from drumline.distillation.objective import LossTerm
from drumline.distillation.schedules import TermSchedule
from drumline.distillation.selection import Selection, select_methods
from drumline.distillation.student import StudentOutput
from tests.distillation.test_objective import (
    COUNT,
    NOTHING,
    STUDENT,
    TAUGHT,
    cross_entropies,
    kd_by_hand,
    objective,
    scored,
)
from tests.training import tiny


def chosen(*methods: str, **fields: Any) -> Selection:
    return select_methods(Distill(method=methods, **fields))


def rejected(*methods: str, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        chosen(*methods, **fields)
    return f"{caught.value.what} | {caught.value.fix}"


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(0.0, [1, 1, 1, 1]), (4.0, [0.25, 0.5, 0.75, 1, 1]), (1.0, [1, 1]), (20.0, [0.05, 0.1])],
)
def test_a_warmup_rises_by_epochs_to_one(warmup: float, expected: list[float]) -> None:
    schedule = TermSchedule(warmup=warmup)
    for epoch, factor in enumerate(expected):
        for step in (7 * epoch, 7 * epoch + 6):
            assert schedule.weight_factor(step, 7, 1000) == pytest.approx(factor)


@pytest.mark.parametrize("end", [0.0, 0.25, 3.0])
def test_a_linear_schedule_goes_from_one_to_its_end_at_the_last_step(end: float) -> None:
    schedule = TermSchedule(schedule="linear", end=end)
    found = [schedule.weight_factor(step, 4, 11) for step in range(11)]
    assert found == pytest.approx([1 + (end - 1) * step / 10 for step in range(11)])
    assert (found[0], found[-1]) == (1.0, end)


@pytest.mark.parametrize("end", [0.0, 0.25, 3.0])
def test_a_cosine_schedule_goes_from_one_to_its_end_by_half_a_wave(end: float) -> None:
    schedule = TermSchedule(schedule="cosine", end=end)
    found = [schedule.weight_factor(step, 4, 11) for step in range(11)]
    assert found == pytest.approx(
        [end + (1 - end) * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    )
    assert (found[0], found[-1]) == (1.0, end)


def test_a_schedule_begins_when_the_warmup_is_done() -> None:
    schedule = TermSchedule(warmup=2.0, schedule="linear")
    found = [schedule.weight_factor(step, 5, 21) for step in range(21)]
    assert found[:5] == [0.5] * 5
    assert found[5:11] == [1.0] * 6
    assert found[11:] == pytest.approx([1 - step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_run_of_one_step_and_steps_after_the_last_have_a_defined_factor(shape: Any) -> None:
    schedule = TermSchedule(schedule=shape, end=0.5, T_schedule=shape, T_end=2.0)
    assert schedule.weight_factor(0, 5, 1) == 1.0
    assert schedule.temperature(4.0, 0, 1) == 4.0
    assert schedule.weight_factor(30, 5, 20) == 0.5
    assert TermSchedule(warmup=9, schedule=shape).weight_factor(3, 1, 4) == pytest.approx(4 / 9)


@pytest.mark.parametrize(("shape", "middle"), [("linear", 2.5), ("cosine", 2.5), ("constant", 4.0)])
def test_the_temperature_goes_from_its_value_to_its_end(shape: Any, middle: float) -> None:
    schedule = TermSchedule(T_schedule=shape)
    found = [schedule.temperature(4.0, step, 9) for step in (0, 4, 8)]
    assert found == pytest.approx([4.0, middle, 4.0 if shape == "constant" else 1.0])


# In the loss.


def term(name: str, method: Method, weight: float, **schedule: Any) -> LossTerm:
    return LossTerm(name, method, weight, NOTHING, schedule=TermSchedule(**schedule))


def test_each_term_has_its_own_schedule() -> None:
    batch = tiny.make(COUNT)
    made = objective(
        [
            term("kd", Kd(), 0.5, schedule="cosine", end=0.2),
            term("dkd", Dkd(), 2.0, warmup=4.0),
            term("dist", Dist(), 3.0),
        ],
        total=101,
    )
    ce = cross_entropies(batch.labels).sum()
    for step in (0, 9, 10, 50, 100, 3, 0):
        found = scored(made, batch, step)
        assert found.terms is not None
        kd, dkd, dist = found.terms[1:4].tolist()
        falling = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 100))
        rising = min(1.0, (step // 10 + 1) / 4)
        expected = ce + 0.5 * falling * kd + 2.0 * rising * dkd + 3.0 * dist
        assert found.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [Kd, Dkd, Dist])
def test_a_scheduled_temperature_is_the_loss_and_the_gradient_at_that_temperature(kind: type[Method]) -> None:
    batch = tiny.make(COUNT)
    student = STUDENT.clone().requires_grad_()

    def gradient(made: Any, step: int) -> tuple[float, torch.Tensor]:
        made.at(step)
        sums = made(lambda images, taps: StudentOutput(student, {}, {}), torch.empty(COUNT, 3, 8, 8), batch)
        (found,) = torch.autograd.grad(sums.loss, student)
        return sums.loss.item(), found

    made = objective([term("x", kind(T=4.0), 1.5, T_schedule="linear", T_end=2.0)], total=5)  # type: ignore[call-arg]
    for step, T in [(0, 4.0), (1, 3.5), (4, 2.0), (2, 3.0)]:
        fixed = objective([term("x", kind(T=T), 1.5)])  # type: ignore[call-arg]
        (loss, slope), (expected, expected_slope) = gradient(made, step), gradient(fixed, 0)
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(slope, expected_slope, rtol=1e-5, atol=1e-7)


def test_kd_by_hand_at_a_scheduled_temperature() -> None:
    made = objective([term("kd", Kd(T=4.0), 1.0, T_schedule="cosine", T_end=2.0)], total=3)
    found = scored(made, tiny.make(COUNT), 1)
    assert found.terms is not None
    assert found.terms[1].item() == pytest.approx(kd_by_hand(3.0, STUDENT, TAUGHT).sum(), rel=1e-5)


def test_a_schedule_fills_the_same_tensors_so_a_captured_step_reads_them() -> None:
    made = objective([term("kd", Kd(), 1.0, schedule="linear", T_schedule="linear")], total=9)
    made.at(0)
    method: Any = made.loss_terms[0].method
    T, storage = method.T.item(), method.T.data_ptr()
    made.at(8)
    method = made.loss_terms[0].method
    assert (T, method.T.item(), method.T.data_ptr()) == (4.0, 1.0, storage)
    assert made.live() == []


def test_the_method_that_was_given_is_left_as_it_was() -> None:
    method = Kd(T=4.0)
    made = objective([term("kd", method, 1.0, T_schedule="linear")], total=2)
    scored(made, tiny.make(COUNT), 1)
    assert method == Kd(T=4.0)


# Options.


def test_every_method_takes_the_options_of_a_schedule() -> None:
    (hint,) = chosen("hint", options=("warmup:3", "schedule:cosine", "end:0.1")).methods
    assert hint.schedule == TermSchedule(warmup=3.0, schedule="cosine", end=0.1)
    (kd,) = chosen("kd", options=("T_schedule=linear", "T_end=2")).methods
    assert kd.schedule == TermSchedule(T_schedule="linear", T_end=2.0)


def test_dkd_and_reviewkd_keep_the_warmup_of_their_authors() -> None:
    assert [each.schedule for each in chosen("dkd", "reviewkd", "hint").methods] == [
        TermSchedule(warmup=20.0),
        TermSchedule(warmup=20.0),
        TermSchedule(),
    ]
    assert chosen("dkd", options=("schedule:linear",)).methods[0].schedule.warmup == 20.0
    assert chosen("dkd", options=("warmup:0",)).methods[0].schedule == TermSchedule()


def test_kd_that_was_added_by_its_weight_takes_options_under_its_name() -> None:
    kd, crd = chosen("crd", a=1.0, options=("kd.schedule:linear", "crd.warmup:2")).methods
    assert (kd.schedule, crd.schedule) == (TermSchedule(schedule="linear"), TermSchedule(warmup=2.0))
    assert "kd.schedule:linear" in rejected("crd", options=("kd.schedule:linear",))


def test_an_option_without_a_method_means_the_only_method_or_the_one_with_a_warmup_of_its_own() -> None:
    assert chosen("crd", a=1.0, options=("warmup:2",)).methods[1].schedule == TermSchedule(warmup=2.0)
    kd, dkd = chosen("dkd", "kd", options=("warmup:3",)).methods
    assert (kd.schedule.warmup, dkd.schedule.warmup) == (0.0, 3.0)
    assert "write crd.warmup:2" in rejected("crd", "hint", options=("warmup:2",))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("warmup:-3", "warmup = -3: too small"),
        ("end:-1", "end = -1: too small"),
        ("T_end:0", "T_end = 0: too small"),
        ("warmup:nan", "warmup must be a number"),
        ("schedule:exponential", "schedule must be one of constant, linear, cosine"),
        ("schedule:cosin", "for example schedule:cosine"),
        ("end:0.5", "has no effect, because schedule is constant"),
        ("T_end:2", "has no effect, because T_schedule is constant"),
    ],
)
def test_wrong_values_are_rejected_by_name(option: str, message: str) -> None:
    assert message in rejected("kd", options=(option,))


@pytest.mark.parametrize("name", ["hint", "crd", "reviewkd"])
def test_a_temperature_schedule_of_a_method_without_temperature_is_rejected(name: str) -> None:
    message = rejected(name, options=("T_schedule:linear",))
    assert "has no option 'T_schedule'" in message
    assert f"{name}.schedule" in message
    assert f"{name}.T_end" not in message


def test_a_temperature_schedule_with_teachers_whose_probabilities_are_averaged_is_rejected() -> None:
    """They are averaged at one temperature."""
    fields: dict[str, Any] = {"teacher_weights": ("a", "b"), "options": ("T_schedule:linear",)}
    assert "distill.ensemble = probabilities" in rejected("kd", **fields)
    assert chosen("kd", **fields, ensemble="logits").methods[0].schedule.T_schedule == "linear"
    fields["teacher_weights"] = ("a",)
    assert chosen("kd", **fields).methods[0].schedule.T_schedule == "linear"


def test_an_initial_phase_that_comes_before_the_method_has_no_schedule() -> None:
    options = ("warmup:3", "schedule:linear")
    (part,) = select_methods(Distill(method=("factor",), options=options), "factor").methods
    assert part.schedule == TermSchedule()
    (part,) = select_methods(Distill(method=("fsp",), options=options), "fsp").methods
    assert part.schedule == TermSchedule(warmup=3.0, schedule="linear")


def test_the_log_line_shows_schedules() -> None:
    options = ("crd.warmup:5", "crd.schedule:cosine", "kd.T_schedule:linear", "kd.T_end:2")
    line = chosen("crd", "kd", options=options).describe()
    assert "1 kd (T linear to 2) + 0.8 crd (warm-up of 5 epochs, cosine to 0 times)" in line
    assert "1 dkd (warm-up of 20 epochs)" in chosen("dkd").describe()

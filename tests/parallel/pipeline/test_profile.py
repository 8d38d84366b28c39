"""Units are measured as the model would run them, and the model does not notice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32, Precision
from drumline.models import create_model
from drumline.parallel.pipeline import split as module
from drumline.parallel.pipeline.cut import cut_points, trace
from drumline.parallel.pipeline.profile import Profile, ProfileOptions, UnitProfile, profile
from drumline.parallel.pipeline.split import choose_split, time_split
from drumline.parallel.pipeline.stage import boundaries

CPU = torch.device("cpu")
SHAPE = (4, 3, 16, 16)


class Uneven(nn.Module):
    """The third part does most of the work. Dropout draws random numbers, BatchNorm keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.heavy = nn.Sequential(nn.Conv2d(8, 96, 9, padding=4), nn.Conv2d(96, 8, 9, padding=4))
        self.third = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.heavy(self.second(self.first(x)))).mean((2, 3))


class Skipping(nn.Module):
    """What the first part makes is kept by its activation, passes `third`, and is kept again by the product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.second, self.third, self.fourth = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x * self.fourth(self.third(self.second(x)))


class Tied(nn.Module):
    """The same weights twice, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.two_again = nn.Conv2d(3, 3, 3, padding=1)
        self.two_again.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two_again(self.two(self.one(x))))


def measured(model: nn.Module, shape: Sequence[int] = SHAPE, precision: Precision = FP32) -> Profile:
    options = ProfileOptions(tuple(shape), CPU, precision, repeats=2)
    return profile(trace(model, sample=torch.empty(shape)), options)


def test_the_model_and_the_random_generator_do_not_notice() -> None:
    model = Uneven().train()
    model(torch.randn(SHAPE)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    modes = [part.training for part in model.modules()]
    generator = torch.get_rng_state()
    measured(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(
        torch.equal(parameter.grad, gradient)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True)
        if parameter.grad is not None
    )


def test_the_heavy_unit_is_found_and_gets_a_stage_of_its_own() -> None:
    model = Uneven().train()
    traced = trace(model, sample=torch.empty(SHAPE))
    threads = torch.get_num_threads()
    # On a busy machine a small operation waits longer for its threads than it computes.
    torch.set_num_threads(1)
    try:
        names, found = choose_split(traced, 3, ProfileOptions(SHAPE, CPU))
    finally:
        torch.set_num_threads(threads)
    assert max(found.units, key=lambda unit: unit.seconds).name.startswith("heavy")
    assert "heavy" in {name.split(".")[0] for name in names}
    assert len(traced.split(names)) == 3
    assert all(unit.forward_s > 0 and unit.backward_s > 0 for unit in found.units)


@pytest.mark.parametrize("name", ["resnet8", "vgg8", "mobilenet_v2_half", "skipping"])
def test_kept_bytes_and_parameters_add_up_to_the_whole_model(name: str) -> None:
    model = (Skipping() if name == "skipping" else create_model(name, 10)).train()
    shape = (2, 3, 32, 32)
    found = measured(model, shape)
    lasting = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.randn(shape))
    assert sum(unit.activation_bytes for unit in found.units) == sum(kept.values())
    assert sum(unit.parameters for unit in found.units) == sum(p.numel() for p in model.parameters())
    assert sum(unit.parameter_bytes for unit in found.units) == sum(p.nbytes for p in model.parameters())
    del output


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_crossing_bytes_are_those_of_the_boundaries(precision: Precision) -> None:
    model = create_model("resnet8", 10).train()
    shape = (2, 3, 32, 32)
    traced = trace(model, sample=torch.empty(shape))
    stages = [stage.bind(model) for stage in traced.split([point.name for point in traced.units[1:]])]
    entering = boundaries(stages, torch.empty(shape), precision)
    found = measured(model, shape, precision=precision)
    assert [unit.crossing_bytes for unit in found.units[1:]] == [
        sum(spec.bytes for spec in specs) for specs in entering[1:]
    ]
    assert [unit.crossing_tensors for unit in found.units[1:]] == [len(specs) for specs in entering[1:]]
    assert found.units[0].crossing_bytes == 0


def test_a_frozen_beginning_takes_no_time_backward_and_keeps_nothing() -> None:
    model = Uneven().train()
    model.first.requires_grad_(False)
    first = measured(model).units[0]
    assert first.name.startswith("first")
    assert (first.backward_s, first.activation_bytes) == (0, 0)
    assert first.parameters > 0


def test_no_stage_begins_between_two_uses_of_one_parameter() -> None:
    model = Tied().train()
    traced = trace(model, sample=torch.empty(SHAPE))
    assert [point.name for point in cut_points(traced)] == ["one", "three"]
    assert [unit.name for unit in measured(model).units] == ["one", "three"]


def test_too_many_stages_are_rejected_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model("resnet8", 10)
    traced = trace(model, sample=torch.empty(2, 3, 32, 32))
    monkeypatch.setattr(module, "profile", None)
    count = len(traced.units)
    with pytest.raises(UserError, match=f"ResNet can be cut into at most {count} stages, not 17"):
        choose_split(traced, 17, ProfileOptions((2, 3, 32, 32), CPU))


def test_images_that_the_model_cannot_take_are_rejected_with_the_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 5)).train()
    traced = trace(model, sample=torch.empty(SHAPE))
    with pytest.raises(UserError, match=r"cannot take these images: at 2, with input 4 x 1024"):
        profile(traced, ProfileOptions((4, 3, 18, 18), CPU, repeats=1))


def unit(name: str, seconds: float, crossing: int = 0) -> UnitProfile:
    return UnitProfile(name, seconds / 2, seconds / 2, 0, 0, 0, crossing, 1)


def test_a_difference_that_no_measurement_repeats_yields_to_the_smaller_crossing() -> None:
    found = Profile((unit("a", 5.0), unit("b", 5.0, 9), unit("c", 0.01, 9), unit("d", 9.95, 1)), 0.0)
    assert time_split(found, 2) == ("d",)


def test_a_wide_spread_is_called_noisy() -> None:
    assert Profile((unit("a", 1.0),), 0.01).noisy == ""
    assert "differ by 12 %" in Profile((unit("a", 1.0),), 0.12).noisy

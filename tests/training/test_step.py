"""The global batch is the contract: shares, micro-batches and processes change how, never what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.recipe import Optim, Train
from drumline.core.precision import BF16
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds
from drumline.training.sets import Normalise
from drumline.training.state import TrainState
from tests.training import ranks, tiny

RATES = [0.1, 0.05, 0.2]


def everything(trained: TrainState) -> dict[str, torch.Tensor]:
    return {
        f"{group}/{name}": tensor.detach().clone()
        for group, tensors in trained.tensors().items()
        for name, tensor in tensors.items()
    }


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("values", [1, 3])
def test_normalising_is_pixel_minus_mean_over_deviation_per_channel(channels: int, values: int) -> None:
    images = torch.randint(0, 256, (2, 4, 5, channels), dtype=torch.uint8)
    mean, std = (0.3, 0.4, 0.5)[:values], (0.1, 0.2, 0.3)[:values]
    seen = Normalise.build(mean, std, tiny.CPU, channels_last=False)(images)
    assert seen.shape == (2, 3, 4, 5)
    for channel in range(3):
        pixels = images[..., channel % channels].double() / 255
        expected = (pixels - mean[channel % values]) / std[channel % values]
        torch.testing.assert_close(seen[:, channel].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_has_the_loss_and_gradient_of_the_whole_batch(accumulate: int) -> None:
    """Eleven samples: in two or three parts they are uneven."""
    batches = [tiny.make(11, seed) for seed in range(3)]
    model = tiny.plain()
    gradients = tiny.reference_steps(model, batches, RATES, tiny.SGD)
    trained = tiny.state(tiny.plain())
    step = tiny.step_of(trained, 11, accumulate=accumulate)
    for index, batch in enumerate(batches):
        with torch.no_grad():
            logits = trained.module(tiny.normalised(batch.images))
            loss = nn.functional.cross_entropy(logits, batch.labels, label_smoothing=0.1)
            correct = (logits.argmax(1) == batch.labels).sum()
        step.meter.sums.zero_()
        step(batch, index, RATES[index])
        assert step.meter.sums.tolist() == pytest.approx([11 * loss.item(), correct.item(), 11, 0], rel=1e-5)
        for parameter, gradient in zip(trained.module.parameters(), gradients[index], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(trained.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_micro_batches_cover_the_batch_and_keep_mixed_pairs_together() -> None:
    step = tiny.step_of(tiny.state(tiny.plain()), 11, accumulate=3)

    def cut(batch: Batch) -> list[Batch]:
        parts: list[Batch] = []

        class Noting:
            def images(self, piece: Batch) -> torch.Tensor:
                raise AssertionError

            def loss(self, piece: Batch) -> torch.Tensor:
                parts.append(piece)
                return torch.zeros((), requires_grad=True)

        step.strategy.gradients(batch, Noting(), step.draws)
        return parts

    assert [len(micro.labels) for micro in cut(tiny.make(11))] == [3, 4, 4]
    parts = cut(tiny.make(11, mix=torch.ones(11, 6)))
    assert [micro.samples.tolist() for micro in parts] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert [len(tensor) for tensor in parts[2]] == [5, 5, 5, 5, 0]


def test_a_mixed_step_equals_its_micro_batches() -> None:
    mix = torch.tensor([[0.3, 0.3, 0, 0, 0, 0], [1, 0.75, 0, 0, 4, 4]]).repeat(6, 1)[:11]
    states = []
    for accumulate in (1, 3):
        trained = tiny.state(tiny.plain())
        tiny.step_of(trained, 11, accumulate=accumulate)(tiny.make(11, mix=mix), 0, 0.1)
        states.append(everything(trained))
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-4, atol=1e-6)
    unmixed = tiny.state(tiny.plain())
    tiny.step_of(unmixed, 11)(tiny.make(11), 0, 0.1)
    assert not same_bits(everything(unmixed), states[0])


@pytest.mark.parametrize("model", [tiny.plain, tiny.normed, tiny.dropping])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_a_rehearsal_leaves_no_trace(model: Callable[[], nn.Module], name: Any) -> None:
    trained = tiny.state(model(), optim=Optim(name=name, lr=0.1), train=Train(ema=0.9))
    step = tiny.step_of(trained, 8, accumulate=2, clip=0.5)
    step(tiny.make(8), 0, 0.1)
    trained.optimizer.zero_grad(set_to_none=True)
    before, places = everything(trained), [t.data_ptr() for t in trained.module.parameters()]
    meter, rate, generator = step.meter.sums.clone(), trained.lr.clone(), torch.get_rng_state()
    step.rehearse(tiny.make(8, seed=1))
    assert same_bits(everything(trained), before)
    assert [t.data_ptr() for t in trained.module.parameters()] == places
    assert torch.equal(step.meter.sums, meter)
    assert torch.equal(trained.lr, rate)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in trained.module.parameters())


def test_a_rehearsal_puts_the_loss_scale_back() -> None:
    """One whose gradients overflow would halve it."""
    model = tiny.plain()
    model[6].weight.data.mul_(100)
    trained = replace(tiny.state(model), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    step = tiny.step_of(trained, 8)
    before, state = trained.scaler.state_dict(), everything(trained)
    step.rehearse(tiny.make(8))
    assert trained.scaler.state_dict() == before
    assert same_bits(everything(trained), state)
    step(tiny.make(8), 0, 0.1)
    assert trained.scaler.get_scale() == 2.0**126
    assert same_bits(everything(trained), state)


def test_a_rehearsal_puts_back_buffers_that_are_not_saved_too() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.plain()
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(images)

    model = Counting()
    step = tiny.step_of(tiny.state(model), 4)
    step.rehearse(tiny.make(4))
    assert model.calls.item() == 0
    step(tiny.make(4), 0, 0.1)
    assert model.calls.item() == 1


def test_a_rehearsal_that_fails_leaves_no_trace_either() -> None:
    trained = tiny.state(tiny.normed())
    step = tiny.step_of(trained, 4)
    before = everything(trained)
    broken = tiny.make(4)._replace(labels=torch.tensor([0, 1, 2, 99]))
    with pytest.raises(IndexError):
        step.rehearse(broken)
    assert same_bits(everything(trained), before)


def test_a_rehearsed_run_has_the_bits_of_an_unrehearsed_one() -> None:
    states = []
    for rehearsals in (0, 2):
        trained = tiny.state(tiny.normed(), train=Train(ema=0.9))
        step = tiny.step_of(trained, 8)
        if rehearsals:
            step.rehearse(tiny.make(8, seed=9))
        for index, rate in enumerate(RATES):
            step(tiny.make(8, seed=index), index, rate)
        states.append(everything(trained))
    assert same_bits(*states)


@pytest.mark.parametrize(
    ("model", "draws"), [(tiny.plain, False), (tiny.normed, False), (tiny.dropping, True)]
)
def test_a_rehearsal_finds_out_whether_the_model_draws(model: Callable[[], nn.Module], draws: bool) -> None:
    step = tiny.step_of(tiny.state(model()), 8)
    step.rehearse(tiny.make(8))
    assert step.draws.active == draws


def test_dropout_is_keyed_by_the_step() -> None:
    """The same step twice drops the same units, whatever was drawn before; another step drops others."""

    def after(index: int, noise: int) -> torch.Tensor:
        trained = tiny.state(tiny.dropping())
        step = tiny.step_of(trained, 8)
        step.rehearse(tiny.make(8))
        torch.rand(noise)
        step(tiny.make(8), index, 0.1)
        return trained.module[1].weight.detach().clone()

    assert torch.equal(after(3, 0), after(3, 100))
    assert not torch.equal(after(3, 0), after(4, 0))


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    step = tiny.step_of(tiny.state(tiny.plain()), 8)
    step.rehearse(tiny.make(8))
    before = torch.get_rng_state()
    step(tiny.make(8), 0, 0.1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_scales_the_whole_gradient_to_its_norm(clip: float) -> None:
    batch = tiny.make(8)
    gradient = tiny.reference_steps(tiny.plain(), [batch], [0.1], tiny.SGD)[0]
    norm = torch.cat([part.flatten() for part in gradient]).double().norm().item()
    trained = tiny.state(tiny.plain())
    tiny.step_of(trained, 8, clip=clip, accumulate=2)(batch, 0, 0.1)
    factor = min(1.0, clip / norm)
    for parameter, whole in zip(trained.module.parameters(), gradient, strict=True):
        torch.testing.assert_close(parameter.grad, factor * whole, rtol=1e-3, atol=1e-7)


def test_the_average_follows_every_step() -> None:
    trained = tiny.state(tiny.normed(), train=Train(ema=0.75))
    step = tiny.step_of(trained, 8)
    assert trained.average is not None
    expected = {name: tensor.double() for name, tensor in tiny.normed().state_dict().items()}
    for index in range(3):
        step(tiny.make(8, seed=index), index, 0.1)
        for name, tensor in trained.module.state_dict().items():
            expected[name] = 0.75 * expected[name] + 0.25 * tensor.double()
    for name, tensor in trained.average.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert tensor.item() == 3


def test_a_half_precision_step_stays_near_the_full_one() -> None:
    trained, half = tiny.state(tiny.plain()), tiny.state(tiny.plain())
    tiny.step_of(trained, 8)(tiny.make(8), 0, 0.1)
    in_bf16 = tiny.step_of(half, 8)
    in_bf16.precision = BF16
    in_bf16(tiny.make(8), 0, 0.1)
    for a, b in zip(trained.module.parameters(), half.module.parameters(), strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
    assert not torch.equal(trained.module[0].weight, half.module[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_three_steps_on_several_processes_equal_those_on_one(size: int) -> None:
    """Ten samples a step, in two micro-batches: three processes have uneven shares."""
    model = tiny.plain()
    gradients = tiny.reference_steps(model, [tiny.make(10, seed) for seed in range(3)], RATES, tiny.SGD)
    for result in ranks.results(size):
        found = result["steps"]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["model"][name], parameter.detach(), rtol=1e-4, atol=1e-6)
        for found_gradient, gradient in zip(found["gradients"], gradients[-1], strict=True):
            torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_holds_the_same_bits_after_every_step(size: int) -> None:
    """Parameters, running statistics, optimizer and average, with BatchNorm and dropout in the model."""
    first, *others = (result["bits"] for result in ranks.results(size))
    assert any("running_mean" in name for name in first)
    assert any(name.startswith("average/") for name in first)
    for other in others:
        assert same_bits(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_drop_different_units(size: int) -> None:
    masks = [tuple(result["dropped"].tolist()) for result in ranks.results(size)]
    assert len(set(masks)) == size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_rehearsal_on_several_processes_leaves_no_trace(size: int) -> None:
    assert [result["untouched"] for result in ranks.results(size)] == [True] * size


def test_shares_of_ten_over_three_are_uneven() -> None:
    """What the multi-process tests above rely on."""
    assert bounds(10, 3) == (0, 3, 6, 10)
    assert isinstance(tiny.make(2), Batch)

"""The average of the weights follows the model; gradient checkpointing saves memory and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from drumline.config.recipe import Recipe, Train
from drumline.core.errors import UserError
from drumline.models import create_model
from drumline.models.base import repeated_blocks
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.training.state import Average, recompute_blocks
from tests.training import tiny


def average_of(model: nn.Module, decay: float) -> Average:
    strategy = create_strategy(Recipe(), single_process(tiny.CPU))
    strategy.setup(model)
    return Average(strategy.copy_model(), model, decay)


def test_floats_are_averaged_and_counters_copied() -> None:
    model = tiny.normed()
    average = average_of(model, 0.9)
    expected = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    for _ in range(20):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.rand(tensor.shape) if tensor.is_floating_point() else 1)
        average.update()
        for name, tensor in model.state_dict().items():
            expected[name] += (1 - 0.9) * (tensor.double() - expected[name])
    for name, tensor in average.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, model.state_dict()[name])


def test_the_average_starts_as_a_copy_and_shares_no_memory() -> None:
    model = tiny.normed()
    average = average_of(model, 0.9)
    pairs = [(a, average.module.state_dict()[name]) for name, a in model.state_dict().items()]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not {a.data_ptr() for a, _ in pairs} & {b.data_ptr() for _, b in pairs}


def test_the_average_is_not_trained_and_scores_in_eval_mode() -> None:
    average = average_of(tiny.normed().train(), 0.9)
    assert not any(parameter.requires_grad for parameter in average.module.parameters())
    assert not any(module.training for module in average.module.modules())


def test_updates_stay_in_place() -> None:
    model = tiny.normed()
    average = average_of(model, 0.5)
    before = [tensor.data_ptr() for tensor in average.module.state_dict().values()]
    average.update()
    assert [tensor.data_ptr() for tensor in average.module.state_dict().values()] == before


def test_an_average_follows_a_model_whose_state_was_loaded_into_it() -> None:
    model = tiny.normed(0)
    average = average_of(model, 0.0)
    model.load_state_dict(tiny.normed(1).state_dict())
    average.update()
    for name, tensor in tiny.normed(1).state_dict().items():
        torch.testing.assert_close(average.module.state_dict()[name], tensor)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return create_model("resnet8", classes=tiny.CLASSES)


class Dropping(nn.Module):
    """Blocks with BatchNorm and dropout, without a word on which they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(3)
        )
        self.head = nn.Linear(8, tiny.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.body:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(("build", "blocks"), [(resnet, 3), (Dropping, 3)])
def test_losses_gradients_and_buffers_are_those_of_the_plain_model(
    build: Callable[[], nn.Module], blocks: int
) -> None:
    """Bit by bit over three steps; a second update of BatchNorm would show in its counter and statistics."""
    states, meters = [], []
    for recompute in (False, True):
        model = build()
        if recompute:
            assert recompute_blocks(model) == blocks
        trained = tiny.state(model)
        step = tiny.step_of(trained, 6, accumulate=2)
        step.rehearse(tiny.make(6))
        for index in range(3):
            step(tiny.make(6, index), index, 0.1)
        state = dict(trained.module.state_dict())
        gradients = {f"grad/{name}": p.grad for name, p in trained.module.named_parameters()}
        states.append({**state, **gradients})
        meters.append(step.meter.sums.tolist())
    assert meters[0] == meters[1]
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []
    counters = [tensor.item() for name, tensor in states[1].items() if "num_batches" in name]
    assert set(counters) == {6}


def test_blocks_are_really_computed_twice() -> None:
    model, calls = resnet().train(), []
    norms = [block.bn1 for block in model.blocks()]
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, args: calls.append(module))
    recompute_blocks(model)
    loss = model(torch.randn(2, 3, 8, 8)).sum()
    assert calls == norms
    loss.backward()
    assert calls == norms + norms[::-1]
    assert [norm.momentum for norm in norms] == [0.1] * 3
    assert [norm.num_batches_tracked.item() for norm in norms] == [1] * 3


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"momentum": 0.01}])
def test_any_kind_of_running_statistics_is_kept(options: dict[str, object]) -> None:
    def build() -> nn.Module:
        model = Dropping()
        for block in model.body:
            block[1] = nn.BatchNorm2d(8, **options)  # type: ignore[arg-type]
        return model

    states = []
    for recompute in (False, True):
        model = build()
        if recompute:
            recompute_blocks(model)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 3, 8, 8)).sum().backward()
        states.append([*model.state_dict().values(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_evaluation_computes_blocks_once() -> None:
    model, calls = resnet(), []
    model.blocks()[0].register_forward_pre_hook(lambda module, args: calls.append(1))
    recompute_blocks(model)
    with torch.inference_mode():
        model.eval()(torch.randn(2, 3, 8, 8))
    assert len(calls) == 1


def test_frozen_statistics_stay_frozen() -> None:
    """A BatchNorm in eval mode normalises by its statistics in both runs of the block."""
    plain, recomputed = Dropping().eval(), Dropping().eval()
    recompute_blocks(recomputed)
    images = torch.randn(4, 3, 8, 8)
    for model in (plain, recomputed):
        model(images).sum().backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_average_of_a_recomputing_model_has_blocks_of_its_own() -> None:
    """A copy of the model must not call the original's blocks."""
    model = resnet()
    trained = tiny.state(model, train=Train(gradient_checkpointing=True, ema=0.5))
    assert trained.average is not None
    images = torch.randn(2, 3, 8, 8)
    expected = resnet().eval()(images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert torch.equal(trained.average.module(images), expected)


def test_a_block_may_be_called_with_keywords() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.linear(x) * (1 if mask is None else mask)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Masked(), Masked()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, mask=torch.tensor([1.0, 0.0, 1.0, 1.0]))
            return x

    plain, recomputed = Whole(), Whole()
    recompute_blocks(recomputed)
    for model in (plain, recomputed):
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(plain.layers[0].linear.weight.grad, recomputed.layers[0].linear.weight.grad)


def test_a_model_whose_blocks_are_a_module_is_understood() -> None:
    """Many published models call a Sequential `blocks`; it is no method to be called."""

    class Published(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    model = Published()
    assert repeated_blocks(model) == list(model.blocks)


def test_containers_inside_containers_are_taken_whole() -> None:
    model = Dropping()
    assert repeated_blocks(model) == list(model.body)
    outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert repeated_blocks(outer) == list(outer)


def test_a_model_without_blocks_is_rejected() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

    with pytest.raises(UserError, match=r"gradient_checkpointing = true: Flat has no repeated blocks"):
        recompute_blocks(Flat())

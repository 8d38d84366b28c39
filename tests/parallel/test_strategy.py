"""How a model lies over a world, and that running statistics are everybody's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from drumline.config.layouts import resolve_layout
from drumline.config.recipe import Data, Parallel, Recipe, Train
from drumline.core.errors import UserError
from drumline.parallel.single import BufferMean
from drumline.parallel.strategy import create_strategy, uses_channels_last
from drumline.parallel.world import World, single_process
from tests.train import ranks, tiny

ONE = single_process(tiny.CPU)
GPU = torch.device("cuda", 0)
FOUR = replace(ONE, size=4, local_size=4)


@pytest.mark.parametrize(
    ("wanted", "world", "expected"),
    [
        ("auto", ONE, "single"),
        ("auto", FOUR, "ddp"),
        ("single", ONE, "single"),
        ("dp", ONE, "dp"),
        ("ddp", ONE, "single"),
        ("ddp", FOUR, "ddp"),
    ],
)
def test_auto_takes_what_fits_the_world(wanted: str, world: World, expected: str) -> None:
    assert resolve_layout(wanted, world.size) == expected


@pytest.mark.parametrize("wanted", ["single", "dp"])
def test_a_layout_for_one_process_is_refused_for_several(wanted: str) -> None:
    with pytest.raises(UserError, match=f"parallel.layout = {wanted} runs in one process, but 4"):
        resolve_layout(wanted, FOUR.size)


def test_a_single_layout_is_the_model_itself() -> None:
    model = tiny.plain()
    assert create_strategy(Recipe(), ONE).setup(model) is model
    dp = create_strategy(Recipe(parallel=Parallel(layout="dp")), ONE)
    assert isinstance(dp.setup(model), DataParallel)


def test_a_world_of_one_averages_nothing() -> None:
    model = tiny.normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    BufferMean(model, ONE)()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_averaging_is_one_message_written_in_place() -> None:
    class Echo(World):
        """Every other rank holds the same."""

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            messages.append(tensor.numel())
            return tensor.mul_(self.size)

    messages: list[int] = []
    model = tiny.normed()
    model[1].running_mean.uniform_()
    before = model[1].running_mean.clone()
    places = [buffer.data_ptr() for buffer in model.buffers()]
    BufferMean(model, Echo(**vars(FOUR)))()
    assert messages == [12]
    assert torch.equal(model[1].running_mean, before)
    assert [buffer.data_ptr() for buffer in model.buffers()] == places


def test_a_model_without_buffers_sends_nothing() -> None:
    BufferMean(nn.Linear(2, 2), FOUR)()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_float_buffers_become_the_mean_and_counters_stay(size: int) -> None:
    mean = sum(range(1, size + 1)) / size
    for rank, result in enumerate(ranks.results(size)):
        found = result["buffers"]
        torch.testing.assert_close(found["own"], torch.tensor([mean, -2 * mean]))
        torch.testing.assert_close(found["wide"], torch.tensor([[(mean - 1) / 3]], dtype=torch.float64))
        assert found["counter"].item() == rank


def test_a_constant_table_keeps_its_values_on_any_world() -> None:
    """Ten ranks that add tenths of a table would not get the table back."""

    class Same(World):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            mine = tensor.clone()
            for _ in range(self.size - 1):
                tensor += mine
            return tensor

    for size in range(2, 33):
        module = nn.Module()
        module.register_buffer("table", torch.arange(2000).float())
        BufferMean(module, Same(**{**vars(ONE), "size": size}))()
        assert torch.equal(module.table, torch.arange(2000).float())


@pytest.mark.parametrize(("mixup", "least"), [(0.0, 12), (0.2, 24)])
def test_a_batch_that_cannot_feed_everybody_is_refused(mixup: float, least: int) -> None:
    train = Train(accumulate=3)
    create_strategy(Recipe(train=train, data=Data(batch=least, mixup=mixup)), FOUR)
    with pytest.raises(UserError, match=f"data.batch = {least - 1} cannot feed 4 processes x 3") as caught:
        create_strategy(Recipe(train=train, data=Data(batch=least - 1, mixup=mixup)), FOUR)
    assert f"--data.batch {least} " in caught.value.fix


def test_the_memory_layout_is_a_gpu_matter() -> None:
    assert uses_channels_last(Recipe(), GPU)
    assert not uses_channels_last(Recipe(), tiny.CPU)
    assert not uses_channels_last(Recipe(train=Train(channels_last=False)), GPU)

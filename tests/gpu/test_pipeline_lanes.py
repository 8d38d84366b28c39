"""Lanes on virtual devices of one GPU: the bits of accumulation, copies beside computing, the host never waits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from drumline.parallel.lanes import Op, Recorder
from drumline.parallel.pipeline import schedule as schedules
from drumline.parallel.pipeline.lane import Lane, run_lanes
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox, Move, copy_direct, copy_through_host
from tests.parallel.pipeline import lanes
from tests.parallel.pipeline.soundness import in_flight
from tests.parallel.pipeline.test_lane import chunks_of, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


def on_gpu(count: int, channels_last: bool) -> list[tuple[Tensor, Tensor]]:
    return [(images.to(GPU), labels.to(GPU)) for images, labels in lanes.micro_batches(count, channels_last)]


def both(channels_last: bool) -> tuple[lanes.Chain, lanes.Chain]:
    return lanes.model(channels_last).to(GPU), lanes.model(channels_last).to(GPU)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("move", [copy_direct, copy_through_host])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("schedule", "ranks", "count"), [("gpipe", 2, 4), ("1f1b", 4, 5), ("interleaved", 2, 4)]
)
def test_gradients_are_those_of_accumulation(
    schedule: str, ranks: int, count: int, overlap: bool, move: Move
) -> None:
    batches = on_gpu(count, channels_last=True)
    alone, piped = both(channels_last=True)
    box = Mailbox([LaneDevice.on(GPU) for _ in range(ranks)], overlap, move)
    stages = lanes.cut(piped, ranks * chunks_of(schedule))
    for _ in range(3):
        lanes.accumulate(alone, batches)
    run = step(box, schedule, stages, batches, steps=3)
    assert lanes.differing(alone, piped) == []
    assert [lane.peak.micro_batches for lane in run] == [in_flight(lane.instructions) for lane in run]


@pytest.mark.usefixtures("repeatable")
def test_autocast_of_the_caller_holds_in_the_lanes() -> None:
    batches = on_gpu(4, channels_last=False)
    alone, piped = both(channels_last=False)
    for images, labels in batches:
        with torch.autocast("cuda", torch.bfloat16):
            value = lanes.loss(alone(images), labels)
        value.backward()
    with torch.autocast("cuda", torch.bfloat16):
        step(Mailbox([LaneDevice.on(GPU) for _ in range(2)]), "1f1b", lanes.cut(piped, 2), batches)
    assert lanes.differing(alone, piped) == []


class Burn(nn.Module):
    """Computes for a while on few multiprocessors, and gives a large tensor."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.weight = last, nn.Parameter(torch.ones((), device=GPU))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        torch.cuda._sleep(4_000_000)
        x = x * self.weight
        return x.sum() if self.last else (x,)


def test_copies_run_beside_the_computing_and_the_host_never_waits() -> None:
    """Of several steps the shortest, because page-locked memory is made whenever there is too little of it."""
    inputs = [torch.ones(8 * 2**20, device=GPU) for _ in range(6)]
    took: dict[bool, float] = {}
    for overlap in (True, False):
        stages = [Burn(last=False), Burn(last=True)]
        box = Mailbox([LaneDevice.on(GPU), LaneDevice.on(GPU)], overlap, copy_through_host)
        lists = schedules.instruction_lists("gpipe", 2, 1, len(inputs), reduces=False)
        specs = lanes.boundaries(stages, inputs)
        each = [Lane(lists[r], {r: stages[r]}, 1, specs, box.transports[r], GPU) for r in range(2)]
        run = partial(run_lanes, box, each, lambda micro: inputs[micro], lambda micro, output: output)
        for _ in range(3):
            run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(5):
            recorders = [Recorder(rank, GPU) for rank in range(2)]
            run(recorders=recorders)
            spans = [span for recorder in recorders for span in recorder.spans()]
            assert {Op.SEND_OUTPUT, Op.SEND_GRADIENT, Op.WAIT_INPUT} < {span.kind for span in spans}
            assert all(span.end >= span.start for span in spans)
            seconds = max(span.end for span in spans) - min(span.start for span in spans)
            took[overlap] = min(seconds, took.get(overlap, seconds))
    assert took[True] < 0.95 * took[False], took


def test_memory_does_not_grow_with_steps() -> None:
    batches = on_gpu(5, channels_last=True)
    _, piped = both(channels_last=True)
    box = Mailbox([LaneDevice.on(GPU) for _ in range(4)])
    step(box, "1f1b", lanes.cut(piped, 4), batches, steps=3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step(box, "1f1b", lanes.cut(piped, 4), batches, steps=20)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before

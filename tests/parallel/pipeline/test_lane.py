"""A pipeline's gradients are those of accumulation, bit by bit, and its memory is what the schedule promises."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.parallel.lanes import Op, Recorder
from drumline.parallel.pipeline import schedule as schedules
from drumline.parallel.pipeline.lane import Lane, run_lanes
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox, copy_direct
from drumline.parallel.pipeline.stage import TensorSpec
from drumline.parallel.pipeline.transport import ProcessTransport, StageTransport, dense, flat
from drumline.parallel.world import Pending, single_process
from tests.launch.ranks import one_thread, results_of
from tests.parallel.pipeline import lanes
from tests.parallel.pipeline.lanes import CPU
from tests.parallel.pipeline.soundness import in_flight

CASES = [
    (schedule, ranks, count)
    for schedule in schedules.SCHEDULES
    for ranks in (1, 2, 4)
    for count in (1, 2, 4, 5)
    if schedule != "interleaved" or count % ranks == 0
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def places(count: int) -> list[LaneDevice]:
    return [LaneDevice.on(CPU) for _ in range(count)]


def step(
    box: Mailbox,
    schedule: str,
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    steps: int = 1,
    **options: Any,
) -> list[Lane]:
    ranks = len(box.lanes)
    all_lanes = [
        lanes.lane(schedule, ranks, rank, stages, batches, box.transports[rank]) for rank in range(ranks)
    ]
    for _ in range(steps):
        run_lanes(
            box,
            all_lanes,
            lambda micro: batches[micro][0],
            lambda micro, output: lanes.loss(output, batches[micro][1]),
            **options,
        )
    return all_lanes


def chunks_of(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


@pytest.mark.parametrize(("schedule", "ranks", "count"), CASES)
def test_gradients_and_statistics_are_those_of_accumulation(schedule: str, ranks: int, count: int) -> None:
    batches = lanes.micro_batches(count)
    alone, piped = lanes.model(), lanes.model()
    for _ in range(2):
        lanes.accumulate(alone, batches)
    chunks = chunks_of(schedule)
    run = step(Mailbox(places(ranks)), schedule, lanes.cut(piped, ranks * chunks), batches, steps=2)
    assert lanes.differing(alone, piped) == []
    assert lanes.state(piped)
    for rank, lane in enumerate(run):
        promised = schedules.max_in_flight(schedule, ranks, chunks, count, rank)
        assert lane.peak.micro_batches == in_flight(lane.instructions) == promised


@pytest.mark.parametrize("overlap", [True, False])
def test_channels_last_crosses_as_it_is(overlap: bool) -> None:
    """Made contiguous at the boundary, the same numbers would go through other kernels."""
    batches = lanes.micro_batches(4, channels_last=True)
    alone, piped = lanes.model(channels_last=True), lanes.model(channels_last=True)
    lanes.accumulate(alone, batches)
    stages = lanes.cut(piped, 2)
    seen: list[tuple[int, ...]] = []
    stages[1].register_forward_pre_hook(lambda module, given: seen.append(given[0].stride()))
    step(Mailbox(places(2), overlap=overlap), "1f1b", stages, batches)
    assert lanes.differing(alone, piped) == []
    assert {stride[1] for stride in seen} == {1}


def test_autocast_of_the_caller_holds_in_the_lanes_and_not_in_their_backward() -> None:
    batches = lanes.micro_batches(4)
    alone, piped = lanes.model(), lanes.model()
    for images, labels in batches:
        with torch.autocast("cpu", torch.bfloat16):
            value = lanes.loss(alone(images), labels)
        value.backward()
    with torch.autocast("cpu", torch.bfloat16):
        step(Mailbox(places(2)), "1f1b", lanes.cut(piped, 2), batches)
    assert lanes.differing(alone, piped) == []


def test_a_backward_is_outside_autocast() -> None:
    seen: list[tuple[str, bool]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Look.apply(super().forward(x)).sum()

    inputs = [torch.ones(1, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        run_two([Looking(2, 2)], inputs)
    assert seen[-2:] == [("forward", True), ("backward", False)]


def test_what_has_gaps_is_closed_in_its_own_order() -> None:
    image = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    half = image[:, :4]
    assert dense(image) is image
    assert dense(half).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(dense(half), half)
    assert dense(torch.ones(()).expand(3, 4)).is_contiguous()
    assert torch.equal(flat(dense(torch.arange(6).view(2, 3).t())), torch.arange(6))


def test_a_frozen_first_stage_sends_and_gets_no_gradient() -> None:
    batches = lanes.micro_batches(2)
    alone, piped = lanes.model(), lanes.model()
    for whole in (alone, piped):
        whole.units[:4].requires_grad_(False)
    lanes.accumulate(alone, batches)
    step(Mailbox(places(2)), "1f1b", lanes.cut(piped, 2), batches)
    assert lanes.differing(alone, piped) == []


def test_an_input_that_nothing_uses_gets_zeros() -> None:
    class Give(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.layer(x), self.unused(x)

    class Take(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x.sum()

    first = Give()
    run_two([first, Take()], [torch.ones(1, 2)] * 2)
    assert first.unused.weight.grad is not None
    assert not first.unused.weight.grad.any()
    assert first.layer.weight.grad is not None
    assert torch.equal(first.layer.weight.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("idle", [0, 1])
def test_a_gradient_on_its_way_is_not_a_parameter_s_own(idle: int) -> None:
    """The first `.grad` may lie in the memory of an input's gradient; the next micro-batch adds to it. The parameter
    may be idle at first."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            shifted = x + self.shift.view(1, 6) if self.calls > idle else x
            return (shifted * torch.arange(6.0)).sum()

    class Give(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return (super().forward(x),)

    slow = partial(after, 0.05)
    first = Give(6, 6)
    run_two([first, Shift()], [torch.ones(1, 6)] * (2 + idle), move=slow)
    assert first.bias.grad is not None
    assert torch.equal(first.bias.grad, (2 + idle) * torch.arange(6.0))


@pytest.mark.parametrize(
    "transport",
    [Mailbox(places(1)).transports[0], ProcessTransport(single_process(CPU), single_process(CPU))],
)
def test_a_rank_that_sends_to_itself_may_change_what_it_gets(transport: StageTransport) -> None:
    """The stage before still needs its output for its own gradient."""

    class Give(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return (super().forward(x).sigmoid(),)

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2).sum()

    stages, inputs = [Give(3, 3), Double()], [torch.ones(1, 3)] * 2
    items = schedules.instruction_lists("interleaved", 1, 2, 2, reduces=False)[0]
    lane = Lane(items, dict(enumerate(stages)), 1, lanes.boundaries(stages, inputs), transport, CPU)
    lane.run(lambda micro: inputs[micro], lambda micro, output: output)
    found, stages[0].weight.grad = stages[0].weight.grad, None
    for each in inputs:
        (stages[0](each)[0] * 2).sum().backward()
    assert isinstance(found, Tensor)
    assert torch.equal(found, stages[0].weight.grad)  # type: ignore[arg-type]


def test_what_nccl_has_sent_is_given_back_before_the_step_ends() -> None:
    """A step has many micro-batches, and only some of them are under way at a time."""

    class Sending:
        size, rank, device, backend = 2, 0, CPU, "nccl"

        def __init__(self) -> None:
            self.works: list[Any] = []

        def isend(self, tensor: Tensor, to: int, tag: int) -> Pending:
            self.works.append(SimpleNamespace(done=False, wait=lambda: None))
            self.works[-1].is_completed = partial(getattr, self.works[-1], "done")
            return Pending(tensor, self.works[-1])

    world: Any = Sending()
    wire, kept = ProcessTransport(world, world), []
    for micro in range(4):
        output = torch.ones(3)
        kept.append(weakref.ref(output.untyped_storage()))
        wire.send(Op.SEND_OUTPUT, 0, micro, [output])
        del output
        for work in world.works[:-1]:  # all but the last have arrived
            work.done = True
    wire.send(Op.SEND_OUTPUT, 0, 4, [torch.ones(3)])
    assert [each() is None for each in kept] == [True, True, True, False]
    wire.finish()


def run_two(
    stages: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    overlap: bool = True,
    move: Callable[[Tensor, Tensor], None] = copy_direct,
    schedule: str = "gpipe",
    recorders: Sequence[Recorder] | None = None,
) -> float:
    """One step of a pipeline whose last stage gives the loss; the seconds it took."""
    box = Mailbox(places(len(stages)), overlap, move)
    lists = schedules.instruction_lists(schedule, len(stages), 1, len(inputs), reduces=False)
    specs = lanes.boundaries(stages, inputs)
    all_lanes = [
        Lane(items, {rank: stages[rank]}, len(stages) - 1, specs, box.transports[rank], CPU)
        for rank, items in enumerate(lists)
    ]
    start = time.perf_counter()
    run_lanes(box, all_lanes, lambda micro: inputs[micro], lambda micro, output: output, recorders=recorders)
    return time.perf_counter() - start


def after(seconds: float, into: Tensor, tensor: Tensor) -> None:
    """A slow link."""
    time.sleep(seconds)
    copy_direct(into, tensor)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float, last: bool = False) -> None:
        super().__init__()
        self.seconds, self.last, self.weight = seconds, last, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = Sleep.apply(x * self.weight, self.seconds)
        return x.sum() if self.last else (x,)


def test_slow_transfers_hide_behind_computing() -> None:
    inputs = [torch.ones(4)] * 8
    stages = [Sleeper(0.01), Sleeper(0.01, last=True)]
    took = {
        overlap: min(run_two(stages, inputs, overlap=overlap, move=partial(after, 0.008)) for _ in range(3))
        for overlap in (True, False)
    }
    # Sleeps alone: 9 x 20 ms and two transfers, against 8 ms more for each forward and each backward.
    assert took[True] < 0.8 * took[False], took


def test_spans_tell_computing_waits_and_transfers() -> None:
    inputs = [torch.ones(4)] * 3
    recorders = [Recorder(rank, CPU) for rank in range(2)]
    stages = [Sleeper(0.004), Sleeper(0.004, last=True)]
    run_two(stages, inputs, move=partial(after, 0.002), schedule="1f1b", recorders=recorders)
    spans = [span for recorder in recorders for span in recorder.spans()]
    expected = {
        (0, Op.FORWARD), (0, Op.SEND_OUTPUT), (0, Op.WAIT_GRADIENT), (0, Op.BACKWARD),
        (1, Op.WAIT_INPUT), (1, Op.FORWARD), (1, Op.BACKWARD), (1, Op.SEND_GRADIENT),
    }  # fmt: skip
    assert {(span.lane, span.kind) for span in spans} == expected
    assert len(spans) == 3 * len(expected)
    computing = [span for span in spans if span.kind in (Op.FORWARD, Op.BACKWARD)]
    assert all(span.end - span.start >= 0.004 for span in computing)
    begins = {(span.stage, span.micro): span.start for span in spans if span.kind == Op.FORWARD}
    sent = {span.micro: span.end for span in spans if span.kind == Op.SEND_OUTPUT}
    assert all(begins[1, micro] >= sent[micro] for micro in range(3))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_first_failing_lane_ends_the_others_with_its_error(schedule: str) -> None:
    batches = lanes.micro_batches(4)
    whole = lanes.model()
    stages = lanes.cut(whole, 4)
    box = Mailbox(places(4))
    specs = lanes.boundaries(stages, [images for images, _ in batches])
    calls = 0

    def fail(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("no such thing")

    hook = stages[2].register_forward_pre_hook(fail)
    lists = schedules.instruction_lists(schedule, 4, 1, 4, reduces=False)
    all_lanes = [
        Lane(items, {rank: stages[rank]}, 3, specs, box.transports[rank], CPU)
        for rank, items in enumerate(lists)
    ]
    feed = lambda micro: batches[micro][0]  # noqa: E731
    score = lambda micro, output: lanes.loss(output, batches[micro][1])  # noqa: E731
    start = time.perf_counter()
    with pytest.raises(ValueError, match="no such thing"):
        run_lanes(box, all_lanes, feed, score)
    assert time.perf_counter() - start < 10
    # The next step is whole again.
    hook.remove()
    whole.load_state_dict(lanes.model().state_dict())
    whole.zero_grad()
    run_lanes(box, all_lanes, feed, score)
    alone = lanes.model()
    lanes.accumulate(alone, batches)
    assert lanes.differing(alone, whole) == []


def test_a_transfer_that_fails_ends_the_step() -> None:
    def broken(into: Tensor, tensor: Tensor) -> None:
        raise RuntimeError("the link is down")

    with pytest.raises(RuntimeError, match="the link is down"):
        run_two([Sleeper(0), Sleeper(0, last=True)], [torch.ones(2)] * 2, move=broken)


def test_of_a_sent_output_nothing_is_kept() -> None:
    """Not even until its backward, under gpipe, unless autograd itself needs it."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def note(module: nn.Module, given: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        nonlocal most
        alive.append(weakref.ref(output[0]))
        most = max(most, sum(each() is not None for each in alive))

    stages = [Sleeper(0), Sleeper(0, last=True)]
    stages[0].register_forward_hook(note)
    run_two(stages, [torch.ones(2)] * 8, overlap=False)
    assert most == 1


def test_nothing_of_a_micro_batch_is_kept_after_its_backward() -> None:
    inputs: list[weakref.ref[Tensor]] = []
    held = []

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        held.append(sum(each() is not None for each in inputs))
        inputs.append(weakref.ref(given[0]))

    stages = [Sleeper(0), Sleeper(0, last=True)]
    stages[1].register_forward_pre_hook(note)
    run_two(stages, [torch.ones(2)] * 4, schedule="1f1b")
    assert held == [0] * len(held)
    assert len(held) == 2 * 4  # the boundaries' run of them, and the step


def test_room_for_boundaries_is_as_much_as_the_schedule_needs() -> None:
    """Under 1f1b the first rank never has more than one gradient at a time, the last one input under way and one in
    use; gpipe holds the inputs of all micro-batches."""
    batches = lanes.micro_batches(5)
    held = {}
    for schedule in ("1f1b", "gpipe"):
        run = step(Mailbox(places(2)), schedule, lanes.cut(lanes.model(), 2), batches)
        held[schedule] = [lane.peak.bytes for lane in run]
    activation, tail = 2 * 4 * 6 * 6 * 4, 2 * (8 + 3 * 4)
    both = 2 * activation  # of two micro-batches' samples: x and skip
    assert held["1f1b"] == [2 * both, 2 * (both + tail)]
    assert held["gpipe"][1] > 4 * (both + tail)


def test_threads_end_with_their_mailbox() -> None:
    before = set(threading.enumerate())
    box = Mailbox(places(2))
    assert box.run([lambda: 1, lambda: 2]) == [1, 2]
    started = set(threading.enumerate()) - before
    assert len(started) == 2 + 2 * 2
    del box
    for thread in started:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_evaluation_gives_the_outputs_of_the_whole_model(ranks: int, chunks: int) -> None:
    batches = [images for images, _ in lanes.micro_batches(5)]
    whole = lanes.model().eval()
    stages = lanes.cut(whole, ranks * chunks)
    lists = schedules.forward_lists(ranks, chunks, len(batches))
    box = Mailbox(places(ranks))
    with torch.inference_mode():
        specs = lanes.boundaries(stages, batches)
        all_lanes = [
            Lane(
                items,
                {number: stages[number] for number in range(rank, len(stages), ranks)},
                len(stages) - 1,
                specs,
                box.transports[rank],
                CPU,
            )
            for rank, items in enumerate(lists)
        ]
        outputs = box.run([partial(lane.forward_only, lambda micro: batches[micro]) for lane in all_lanes])
        expected = [whole(images) for images in batches]
    assert [len(each) for each in outputs[:-1]] == [0] * (ranks - 1)
    assert all(torch.equal(a, b) for a, b in zip(outputs[-1], expected, strict=True))
    assert len(outputs[-1]) == 5


def test_a_stage_whose_gradient_is_not_announced_is_rejected() -> None:
    stages = [Sleeper(0), Sleeper(0, last=True)]
    box = Mailbox(places(2))
    lists = schedules.instruction_lists("gpipe", 2, 1, 1, reduces=False)
    silent = lambda stage, micro: [TensorSpec((2,), torch.float32, False)]  # noqa: E731
    all_lanes = [Lane(lists[r], {r: stages[r]}, 1, silent, box.transports[r], CPU) for r in range(2)]
    with pytest.raises(AssertionError, match="output 0 of stage 0"):
        run_lanes(box, all_lanes, lambda micro: torch.ones(2), lambda micro, output: output)


@pytest.mark.slow
def test_processes_give_the_bits_of_accumulation() -> None:
    for found in results_of("tests.parallel.pipeline.lane_ranks", 2):
        assert found["wrong"] == []
        assert found["evaluated"]


@pytest.mark.slow
def test_processes_hold_what_the_schedule_promises() -> None:
    for found in results_of("tests.parallel.pipeline.lane_ranks", 2):
        assert found["in_flight"] == found["promised"]
        assert len(found["promised"]) == 10

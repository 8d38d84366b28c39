"""One rank of a pipeline over two processes: compares its own stages with accumulation, and leaves what differs.

As a program (`python -m tests.parallel.pipeline.lane_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drumline.core.environment import read_rank_info
from drumline.parallel.lanes import Recorder
from drumline.parallel.pipeline import schedule as schedules
from drumline.parallel.pipeline.lane import Lane
from drumline.parallel.pipeline.transport import ProcessTransport, StageTransport
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from tests.parallel.pipeline import lanes

Case = tuple[str, int, bool]


def cases() -> Iterator[Case]:
    for schedule in schedules.SCHEDULES:
        for count in (1, 2, 4, 5):
            if schedule != "interleaved" or count % 2 == 0:
                yield schedule, count, count == 4


def main(folder: Path) -> None:
    world = init_world(read_rank_info(os.environ), "cpu", "gloo", 60)
    onward, back = [(0, 1), (1, 0)], [(1, 0), (0, 1)]
    linked = world.split([[0, 1]], onward), world.split([[0, 1]], back)
    wrong: list[str] = []
    in_flight, promised = [], []
    for schedule, count, channels_last in cases():
        chunks = 2 if schedule == "interleaved" else 1
        wire = ProcessTransport(*linked) if chunks == 2 else ProcessTransport(world, world)
        found, lane = differing(world, wire, schedule, chunks, count, channels_last)
        wrong += [f"{schedule} {count}: {name}" for name in found]
        in_flight.append(lane.peak.micro_batches)
        promised.append(schedules.max_in_flight(schedule, world.size, chunks, count, world.rank))
    report: dict[str, Any] = {"wrong": wrong, "in_flight": in_flight, "promised": promised}
    report["evaluated"] = evaluated(world)
    torch.save(report, folder / f"{world.rank}.pt")
    world.close()


def differing(
    world: World, transport: StageTransport, schedule: str, chunks: int, count: int, channels_last: bool
) -> tuple[list[str], Lane]:
    """The names of this rank's stages whose bits are not those of one process, after two steps."""
    batches = lanes.micro_batches(count, channels_last)
    alone, piped = lanes.model(channels_last), lanes.model(channels_last)
    stages = lanes.cut(piped, world.size * chunks)
    lane = lanes.lane(schedule, world.size, world.rank, stages, batches, transport)
    recorder = Recorder(world.rank, world.device)
    for _ in range(2):
        lanes.accumulate(alone, batches)
        recorder.start()
        lane.run(
            lambda micro: batches[micro][0],
            lambda micro, output: lanes.loss(output, batches[micro][1]),
            recorder=recorder,
        )
    sends = [item for item in lane.instructions if item.kind.startswith("send")]
    noted = [span for span in recorder.spans() if span.kind.startswith("send")]
    wrong = [] if len(sends) == len(noted) else [f"{len(noted)} transfers noted of {len(sends)}"]
    expected = lanes.cut(alone, len(stages))
    for number in lane.stages:
        wrong += [f"stage {number} {name}" for name in lanes.differing(expected[number], stages[number])]
    return wrong, lane


def evaluated(world: World) -> bool:
    """Whether the last rank gets the whole model's outputs."""
    batches = [images for images, _ in lanes.micro_batches(5)]
    whole = lanes.model().eval()
    stages = lanes.cut(whole, 4)
    with torch.inference_mode():
        items = schedules.forward_lists(2, 2, len(batches))[world.rank]
        own = {number: stages[number] for number in range(world.rank, 4, 2)}
        lane = Lane(
            items, own, 3, lanes.boundaries(stages, batches), ProcessTransport(world, world), world.device
        )
        outputs = lane.forward_only(lambda micro: batches[micro])
        expected = [whole(images) for images in batches] if world.rank == 1 else []
        return len(outputs) == len(expected) and all(
            torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Runs real processes over gloo, once per world size, and hands every test what each rank found.

As a program (`python -m tests.training.ranks FOLDER`) it is one rank: all jobs in order, results to a file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.config.recipe import Train
from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.core.precision import FP32
from drumline.data.feed.sampler import evaluation_requests, rank_slice
from drumline.guards.run.fingerprints import FingerprintMonitor
from drumline.observe.run_log import RunLog
from drumline.parallel.data_parallel import BufferMean
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from drumline.training import metrics
from drumline.training.evaluate import evaluate
from drumline.training.guards import state_tensors
from drumline.training.metrics import Metric, Outputs
from drumline.training.predictions import Predictions
from drumline.training.reporter import MeterReader
from drumline.training.stop import StopSign
from tests.launch.job import is_running
from tests.launch.ranks import results_of
from tests.training import tiny

SAMPLES, EVAL_BATCH, BINS = 23, 4, 5


def _class_mean_rows(outputs: Outputs) -> torch.Tensor:
    hot = nn.functional.one_hot(outputs.labels, outputs.logits.shape[1])
    return torch.cat([hot, hot * (outputs.rank < 1)[:, None]], dim=1)


def _class_mean(totals: Sequence[float], samples: int) -> float:
    half = len(totals) // 2
    seen = [(right, count) for count, right in zip(totals[:half], totals[half:], strict=True) if count]
    return sum(right / count for right, count in seen) / len(seen)


def _calibration_rows(outputs: Outputs) -> torch.Tensor:
    confidence = outputs.logits.softmax(dim=1).amax(dim=1)
    inside = nn.functional.one_hot((confidence * BINS).long().clamp(max=BINS - 1), BINS)
    return inside * (confidence - (outputs.rank < 1).float())[:, None]


METRICS = (
    *metrics.METRICS,
    Metric("class_mean", "mean accuracy of the classes", _class_mean_rows, _class_mean),
    Metric(
        "calibration_error",
        "expected calibration error",
        _calibration_rows,
        lambda totals, samples: sum(map(abs, totals)) / samples,
    ),
)
"""The table, and metrics of several sums."""


def results(size: int) -> list[dict[str, Any]]:
    """What every rank of a world of `size` found, in rank order. Starts the processes on the first call."""
    return results_of("tests.training.ranks", size)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found: dict[str, Any] = {}
    for job in (talk, steps, bits, buffers, agreement, stops, score, failure):
        found.update(job(world, folder))
    torch.save(found, folder / f"{world.rank}.pt")
    alone_at_last(world, folder, found)


def talk(world: World, folder: Path) -> dict[str, Any]:
    """Every way of talking, with something of each rank's own to say."""
    mine = torch.tensor([world.rank + 1.0, 10.0 * world.rank])
    latest = torch.tensor([world.rank, -world.rank])
    later = world.all_reduce_max_async(latest)
    assert later is not None
    later.wait()
    return {
        "rank": world.rank,
        "backend": world.backend,
        "sum": world.all_reduce(mine.clone()).tolist(),
        "broadcast": world.broadcast(mine.clone()).tolist(),
        "share": world.broadcast_object({"path": f"from {world.rank}"}),
        "gather": world.all_gather_floats([world.rank, 0.1]),
        "integers": world.all_gather_integers(torch.tensor([2**53 + world.rank, -world.rank])).tolist(),
        "maximum": latest.tolist(),
    }


def steps(world: World, folder: Path) -> dict[str, Any]:
    """Three steps of ten samples, each in two micro-batches."""
    trained = tiny.state(tiny.plain(), world)
    step = tiny.step_of(trained, 10, accumulate=2)
    reader = MeterReader(step.meter, world)
    mine = rank_slice(10, world.rank, world.size)
    step.rehearse(tiny.part(tiny.make(10, 77), mine))
    for index, rate in enumerate((0.1, 0.05, 0.2)):
        step(tiny.part(tiny.make(10, index), mine), index, rate)
    reader.request(3)
    (reading,) = reader.drain()
    return {
        "steps": {
            "model": dict(trained.module.state_dict()),
            "gradients": [parameter.grad.clone() for parameter in trained.module.parameters()],
        },
        "reading": asdict(reading),
        "meter_after": step.meter.sums.tolist(),
    }


def bits(world: World, folder: Path) -> dict[str, Any]:
    """A model with BatchNorm and dropout, differently seeded on each rank, clipped and averaged."""
    model = nn.Sequential(*tiny.normed(world.rank)[:-1], nn.Dropout(0.5), nn.Linear(6, tiny.CLASSES))
    trained = tiny.state(model, world, train=Train(ema=0.9))
    step = tiny.step_of(trained, 10, clip=0.5)
    mine = rank_slice(10, world.rank, world.size)

    def state() -> dict[str, torch.Tensor]:
        groups = trained.tensors()
        return {
            f"{group}/{name}": t.detach().clone() for group in groups for name, t in groups[group].items()
        }

    before = state()
    step.rehearse(tiny.part(tiny.make(10, 77), mine))
    after = state()
    for index in range(3):
        step(tiny.part(tiny.make(10, index), mine), index, 0.1)
    step.draws.active = True
    step.draws.at(7)
    step.draws.switch(0)
    return {
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "bits": state(),
        "dropped": nn.functional.dropout(torch.ones(64)) > 0,
    }


def buffers(world: World, folder: Path) -> dict[str, Any]:
    """Floats of each rank's own are averaged; constants and counters stay."""
    module = nn.Module()
    module.register_buffer("own", torch.tensor([1.0, -2.0]) * (world.rank + 1))
    module.register_buffer("constant", torch.arange(100).float())
    module.register_buffer("wide", torch.tensor([[world.rank / 3]], dtype=torch.float64))
    module.register_buffer("counter", torch.tensor(world.rank))
    BufferMean(module, world)()
    return {"buffers": {name: buffer.clone() for name, buffer in module.named_buffers()}}


def agreement(world: World, folder: Path) -> dict[str, Any]:
    """One weight of the last rank moves by the smallest possible amount; later two ranks are fed the same."""
    trained = tiny.state(tiny.normed(), world)
    monitor = FingerprintMonitor(lambda: state_tensors(trained), world, RunLog(None))
    mine = torch.arange(4) + 4 * world.rank

    def seen(step: int, samples: torch.Tensor) -> list[str]:
        monitor.take(step, samples)
        return [f"{finding.what} | {finding.since}" for finding in monitor.compare().findings]

    again = torch.arange(4) if world.rank == world.size - 1 else mine
    before, fed = seen(1, mine), seen(2, again)
    if world.rank == world.size - 1:
        with torch.no_grad():
            weight = trained.module[5].weight
            weight[2, 3] = torch.nextafter(weight[2, 3], torch.tensor(9.0))
    after = seen(7, mine)
    if world.rank == world.size - 1:
        trained.module[5].weight.grad = torch.zeros(4, 6)
    return {"agreement": [before, fed, after, seen(8, mine)]}


def stops(world: World, folder: Path) -> dict[str, Any]:
    """SIGTERM reaches one rank alone, between two steps."""
    seen = -1
    with StopSign(world) as stop:
        for step in range(1, 20000):
            if world.rank == world.size - 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.seen(step):
                seen = step
                break
            time.sleep(0.001)
        stop.finish()
        asked = stop.asked
    with StopSign(world) as again:
        unasked = [again.seen(step) for step in range(1, 10)]
        again.finish()
    alarms: list[tuple[int, int]] = []
    with StopSign(world, lambda step: 7 if world.rank == world.size - 1 and step >= 7 else 0) as watching:
        for step in range(1, 20000):
            assert not watching.seen(step)
            if watching.alarm:
                alarms.append((step, watching.alarm))
            if len(alarms) == 2:  # one that went on after the first hears the next
                break
            time.sleep(0.001)
        watching.finish()
    return {"stopped_at": seen, "asked": asked, "unasked": any(unasked), "alarms": alarms}


def evaluation(world: World) -> dict[str, Any]:
    """The score of a fixed model on a fixed set, on any world."""
    batches = (
        tiny.part(tiny.make(SAMPLES, 50), slice(int(request.samples[0]), int(request.samples[-1]) + 1))
        for request in evaluation_requests(
            samples=SAMPLES, batch=EVAL_BATCH, rank=world.rank, world=world.size
        )
    )
    seen = Predictions(SAMPLES, tiny.CPU)
    found = evaluate(
        tiny.normed(3),
        batches,
        SAMPLES,
        EVAL_BATCH,
        tiny.NORMALISE,
        world,
        FP32,
        metrics=METRICS,
        record=seen.add,
    )
    predicted, probability = seen.gather(world)
    return asdict(found) | {"predictions": predicted.tolist(), "probabilities": probability.tolist()}


def score(world: World, folder: Path) -> dict[str, Any]:
    """The score; and what happens when one rank counts a sample twice."""
    found = evaluation(world)
    twice = iter([tiny.make(EVAL_BATCH)] * (2 if world.is_rank_zero else 1))
    try:
        evaluate(tiny.normed(3), twice, world.size * EVAL_BATCH, EVAL_BATCH, tiny.NORMALISE, world, FP32)
    except UserError as error:
        return {"score": found, "miscount": error.what}
    return {"score": found, "miscount": ""}


def failure(world: World, folder: Path) -> dict[str, Any]:
    """The last rank fails first."""
    if world.rank == world.size - 1:
        first = world.claim_failure()
        world.barrier()
    else:
        world.barrier()
        first = world.claim_failure()
    return {"failed_first": first}


def alone_at_last(world: World, folder: Path, found: dict[str, Any]) -> None:
    """Rank 0, which holds the meeting place, is gone; the others fail because of it."""
    pid = world.broadcast_object(os.getpid())
    world.barrier()
    if world.is_rank_zero:
        os._exit(0)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        found["failed_first_after_rank_0"] = world.claim_failure()
    except Exception:
        found["failed_first_after_rank_0"] = traceback.format_exc()
    torch.save(found, folder / f"{world.rank}.pt")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

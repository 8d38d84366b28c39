"""Trains CRD's embeddings on several global batches, on real processes over gloo or alone.

As a program (`python -m tests.distillation.bank_ranks FOLDER`) it is one rank, and leaves what it found in a file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.core.environment import read_rank_info
from drumline.distillation.method import LossInputs, NetworkInfo
from drumline.distillation.methods.contrast import ContrastBank, Crd
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from tests.launch.ranks import results_of

SAMPLES, BATCH, STEPS, CLASSES, SEED = 37, 10, 6, 4, 11
METHOD = Crd(K=50, dim=8)
STUDENT, TEACHER = (
    NetworkInfo("small", {"pooled": (5,)}, CLASSES),
    NetworkInfo("large", {"pooled": (7,)}, CLASSES),
)
LABELS = torch.arange(SAMPLES) * 7 % CLASSES


def results(size: int) -> list[dict[str, Any]]:
    """What every rank of a world of `size` found, in rank order. Starts the processes on the first call."""
    return results_of("tests.distillation.bank_ranks", size)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample ids and both networks' pooled vectors of a whole global batch."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randperm(SAMPLES, generator=generator)[:BATCH]
    return ids, torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 7, generator=generator)


def train(world: World, bank: ContrastBank, steps: range, helper: torch.nn.Module) -> list[Tensor]:
    """The losses of these steps, each followed by plain gradient descent on the embeddings."""
    losses = []
    for step in steps:
        ids, student, teacher = batch(step)
        bank.at(step)
        helped = helper({"pooled": student}, {"pooled": teacher})
        logits = torch.zeros(BATCH, CLASSES)
        loss = METHOD.loss(LossInputs(logits, logits, {}, {}, helped, LABELS[ids], ids, bank))
        helper.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in helper.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
        losses.append(loss.detach())
    return losses


def embeddings() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(5)
    return METHOD.helper(STUDENT, TEACHER)


def job(world: World) -> dict[str, Any]:
    """All steps; then again from the state in the middle, in a bank that held something else."""
    bank = METHOD.memory(LABELS, SEED, world)
    first, helper = bank.collect(), embeddings()
    losses = train(world, bank, range(STEPS // 2), helper)
    middle = world.broadcast_object(bank.collect())
    weights = {name: value.clone() for name, value in helper.state_dict().items()}
    losses += train(world, bank, range(STEPS // 2, STEPS), helper)
    last = bank.collect()
    other, again = METHOD.memory(LABELS, SEED, world), embeddings()
    for tensor in other.live():
        tensor.fill_(0.5)
    other.restore(middle)
    again.load_state_dict(weights)
    resumed = train(world, other, range(STEPS // 2, STEPS), again)
    return {
        "first": first,
        "last": last,
        "losses": torch.stack(losses),
        "resumed": {"last": other.collect(), "losses": torch.stack(resumed)},
        "held": sum(tensor.numel() for tensor in bank.live()),
        "weights": dict(helper.state_dict()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    torch.save(job(world), folder / f"{world.rank}.pt")
    world.barrier()
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

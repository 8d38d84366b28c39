"""Collects the prediction for each sample while an evaluation runs.

Promises: never waits for the device; the result has the same bits on any number of processes.
"""

from __future__ import annotations

import torch

from drumline.parallel.world import World
from drumline.report.scores import NO_CLASS, Numbers
from drumline.report.units import FIXED_POINT
from drumline.training.metrics import Outputs


class Predictions:
    """Collects the predicted class of each sample and its probability while an evaluation runs."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._rows = torch.zeros((samples, 2), dtype=torch.int64, device=device)

    def add(self, outputs: Outputs) -> None:
        """Records a batch. Never waits for the device."""
        self._rows[outputs.samples, 0] = outputs.prediction - NO_CLASS
        probability = outputs.logits.softmax(dim=1).amax(dim=1).nan_to_num(0.0)
        self._rows[outputs.samples, 1] = probability.mul(FIXED_POINT).round().long()

    def gather(self, world: World) -> tuple[Numbers, Numbers]:
        """The predicted class and the probability, in fixed point, of each sample. Every rank calls it; each sample
        was recorded on one of them."""
        predicted, probability = world.all_reduce(self._rows).cpu().unbind(dim=1)
        return (predicted + NO_CLASS).numpy(), probability.numpy()

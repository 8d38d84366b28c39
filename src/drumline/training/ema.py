"""A moving average of the weights, kept next to the model and updated on the device.

Promises: floats are averaged, counters are copied, nothing waits for the host; the average is a full state of
the model under the same names, so it saves, loads and evaluates like one.
"""

from __future__ import annotations

import torch
from torch import nn

from drumline.parallel.local import local_shard


class Average:
    """`module` is a frozen copy of `model`, laid out as it is, whose state follows it with the given decay."""

    def __init__(self, module: nn.Module, model: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        pairs = [
            (local_shard(mine), local_shard(theirs))
            for mine, theirs in zip(module.state_dict().values(), model.state_dict().values(), strict=True)
            if not mine.is_meta  # belongs to another process
        ]
        assert all(mine.shape == theirs.shape for mine, theirs in pairs)
        self._floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """average += (1 - decay) · (model - average)."""
        mine, theirs = [a for a, _ in self._floats], [b for _, b in self._floats]
        torch._foreach_lerp_(mine, theirs, 1.0 - self.decay)
        for average, counter in self._counters:
            average.copy_(counter)

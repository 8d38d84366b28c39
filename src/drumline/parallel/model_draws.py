"""Random numbers inside the model (dropout, stochastic depth): torch's generators, keyed before each step.

Promises: what a part of the global batch draws depends on (seed, step, part) alone: the part is a process's share, or
in strict mode a shard, whoever computes it and in whatever company. A step recorded as a CUDA graph draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drumline.data.feed.draws import Purpose, bits


class ModelDraws:
    """The generators of one process. Does nothing until `active`: seeding costs more than a small step."""

    def __init__(self, seed: int, parts: Sequence[int], device: torch.device) -> None:
        self.seed, self.parts, self.device = seed, np.array(parts), device
        self.active = False
        self._keys: list[int] = []
        self._current = -1
        self._left: dict[int, torch.Tensor] = {}
        self._on_gpu: list[torch.Generator] = []
        if device.type == "cuda":
            self.renew()

    def at(self, step: int) -> None:
        """Before a step, never within one."""
        if not self.active:
            return
        words = bits(self.seed, step, self.parts, Purpose.MODEL)
        self._keys = [int(first) << 31 ^ int(second) for first, second in words[:, :2]]
        self._current, self._left = -1, {}
        for generator, key in zip(self._on_gpu, self._keys, strict=False):
            generator.manual_seed(key)

    def switch(self, place: int, device: torch.device | None = None) -> None:
        """From now on this part draws, where it left off if it has drawn before; on another GPU than the process's
        own, from its beginning."""
        if not self.active or place == self._current:
            return
        if device is not None and device.type == "cuda" and device != self.device and self._keys:
            torch.cuda.default_generators[device.index].manual_seed(self._keys[place])
        if self._current >= 0:
            self._left[self._current] = torch.get_rng_state()
        self._current = place
        if place in self._left:
            torch.set_rng_state(self._left[place])
        elif self._keys:
            torch.default_generator.manual_seed(self._keys[place])
        if len(self._on_gpu) > 1:
            self._default.graphsafe_set_state(self._on_gpu[place])

    def renew(self) -> None:
        """Takes generator states that no recording has touched. With one part the device's own serves."""
        several = len(self.parts) > 1
        self._on_gpu = [self._default.clone_state() for _ in self.parts] if several else [self._default]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before a step is recorded: a replay then starts from the keys of its step."""
        if self.active and len(self._on_gpu) > 1:
            for generator in self._on_gpu:
                graph.register_generator_state(generator)

    @property
    def _default(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index]

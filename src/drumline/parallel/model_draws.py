"""Random numbers inside the model (dropout, stochastic depth): torch's generators, seeded before each step.

Promises: the numbers depend on (seed, step, stream) alone. A stream belongs to a process's slice of the global batch,
to a shard in strict mode, or to a stage and micro-batch of a pipeline, whichever process computes it. A step recorded
as a CUDA graph draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drumline.data.feed.draws import Purpose, bits


class ModelDraws:
    """The generators of one process. Does nothing until `active`: seeding costs more than a small step."""

    def __init__(self, seed: int, streams: Sequence[int], device: torch.device) -> None:
        self.seed, self.streams, self.device = seed, np.array(streams), device
        self.active = False
        self._keys: list[int] = []
        self._current = -1
        self._left: dict[int, torch.Tensor] = {}
        self._on_gpu: list[torch.Generator] = []
        if device.type == "cuda":
            self.renew()

    def at(self, step: int) -> None:
        """Seeds the streams of a step. Called before the step, never during it."""
        if not self.active:
            return
        drawn = bits(self.seed, step, self.streams, Purpose.MODEL)
        self._keys = [int(first) << 31 ^ int(second) for first, second in drawn[:, :2]]
        self._current, self._left = -1, {}
        for generator, key in zip(self._on_gpu, self._keys, strict=False):
            generator.manual_seed(key)

    def switch(self, index: int, device: torch.device | None = None) -> None:
        """Draws from this stream from now on: where it left off, if it was used before in this step; from its
        beginning on a GPU that is not the process's own."""
        if not self.active or index == self._current:
            return
        if device is not None and device.type == "cuda" and device != self.device and self._keys:
            torch.cuda.default_generators[device.index].manual_seed(self._keys[index])
        if self._current >= 0:
            self._left[self._current] = torch.get_rng_state()
        self._current = index
        if index in self._left:
            torch.set_rng_state(self._left[index])
        elif self._keys:
            torch.default_generator.manual_seed(self._keys[index])
        if len(self._on_gpu) > 1:
            self._default.graphsafe_set_state(self._on_gpu[index])

    def renew(self) -> None:
        """Creates generator states that no capture has touched. A single stream uses the device's own."""
        several = len(self.streams) > 1
        self._on_gpu = [self._default.clone_state() for _ in self.streams] if several else [self._default]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Called before a step is captured, so that a replay starts from the keys of its step."""
        if self.active and len(self._on_gpu) > 1:
            for generator in self._on_gpu:
                graph.register_generator_state(generator)

    @property
    def _default(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index]

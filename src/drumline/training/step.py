"""One optimizer step: normalise, forward, backward, exchange, update. The hot path.

Promises: no host sync, no print, no file; the loss stays on the device, in `meter`, until it is read; losses are
weighted by the global batch, however it is divided; how it is divided and how gradients are exchanged is up to the
strategy. A rehearsal runs whole steps and leaves no trace. Captured as a CUDA graph, the step gives the same bits
with one launch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import nn

from drumline.core.account import BACKWARD, COMPUTE, FORWARD, OPTIMIZER, account
from drumline.core.arithmetic import leave_no_trace
from drumline.core.precision import autocast
from drumline.data.feed.batch import Batch
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.sharded import local_shard
from drumline.parallel.strategy import ForwardPass
from drumline.training.optim import set_rate
from drumline.training.sets import Normalise
from drumline.training.state import TrainState
from drumline.training.task import LossSums, Meter, Objective, mixed

REHEARSALS = 3
"""Steps before capture: cuDNN and cuBLAS create their workspaces in the first ones."""


class NotCapturable(Exception):
    """The model does something that a CUDA graph cannot record, such as reading a value on the host."""


class TrainStep:
    """Called as `step(batch, index, rate)`: this rank's batch, the number of the step, its learning rate."""

    def __init__(
        self,
        state: TrainState,
        objective: Objective,
        normalise: Normalise,
        gate: NonFiniteGate | None = None,
    ) -> None:
        self.state, self.objective, self.normalise, self.gate = state, objective, normalise, gate
        self.strategy, self.world = state.strategy, state.strategy.world
        recipe = self.strategy.recipe
        self.precision, self.clip, self.global_batch = (
            self.strategy.precision,
            recipe.optim.clip,
            recipe.data.batch,
        )
        self.draws = ModelDraws(recipe.run.seed, self.strategy.streams, self.world.device)
        self.meter = Meter(len(objective.terms), self.world.device)
        self.without_gradient: list[str] = []
        self.draws_elsewhere = False
        """Whether the rehearsed step drew from Python's or NumPy's own generators, which no key reaches."""
        devices = dict.fromkeys((self.world.device, *self.strategy.devices))
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: Batch | None = None
        self._rate = 0.0

    def __call__(self, batch: Batch, index: int, rate: float) -> None:
        if rate != self._rate:
            set_rate(self.state.optimizer, rate)
            self._rate = rate
        self.objective.at(index)
        self.draws.at(index)
        if self._graph is None:
            self.compute(batch)
            return
        assert self._static is not None
        for static, fresh in zip(self._static, batch, strict=True):
            if fresh.numel():
                static.copy_(fresh, non_blocking=True)
        self._graph.replay()

    def compute(self, batch: Batch) -> None:
        """The whole step on the device."""
        account.enter(COMPUTE)
        state, scaler = self.state, self.state.scaler
        state.optimizer.zero_grad(set_to_none=True)
        self.strategy.gradients(batch, self, self.draws)
        account.enter(OPTIMIZER)
        if self.clip:
            scaler.unscale_(state.optimizer)
            norm = self.strategy.gradient_norm()
            held = (each for group in state.optimizer.param_groups for each in group["params"])
            nn.utils.clip_grads_with_norm_(held, self.clip, norm, foreach=True)
        if self.gate is not None:
            self.gate.check(self.meter.loss, self.strategy.grid.down.all_reduce_max)
        scaler.step(state.optimizer)
        scaler.update()
        self.strategy.average_buffers()
        if self.gate is not None:
            self.gate.restore_buffers()
        if state.average is not None:
            state.average.update()

    def rehearse(self, batch: Batch) -> None:
        """Runs the step on a batch of the right shape and restores everything. Creates DDP's final buckets, compiled
        code and library workspaces, and finds out whether the model draws random numbers."""
        with self.undone():
            before, elsewhere = self._generator_states(), _other_generators()
            self.compute(batch)
            idle = {id(parameter) for parameter in self.strategy.unused_parameters()}
            self.without_gradient = [
                name for name, parameter in self.state.module.named_parameters() if id(parameter) in idle
            ]
            after = self._generator_states()
            self.draws.active = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            self.draws_elsewhere = _other_generators() != elsewhere

    def capture(self, batch: Batch) -> None:
        """Records the step as a CUDA graph over fixed input buffers. Call after a rehearsal. Raises `NotCapturable`,
        with everything restored, when that cannot be done."""
        static = Batch(*(tensor.clone() for tensor in batch))
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), torch.cuda.Stream(self.world.device)
        side.wait_stream(current)
        with self.undone():
            with torch.cuda.stream(side), _host_reads() as reads:
                for _ in range(REHEARSALS):
                    self.compute(static)
            current.wait_stream(side)
            if reads:
                raise NotCapturable("it waits for the GPU inside the step, as .item() does")
            self.state.optimizer.zero_grad(set_to_none=True)
            generator = torch.cuda.default_generators[self.world.device.index]
            intact = generator.clone_state()
            self.draws.register(graph)
            try:
                # Thread-local: the loader's thread that pins memory may allocate meanwhile.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.compute(static)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # The state in use still waits for its capture to end, and the next dropout would raise an error.
                generator.graphsafe_set_state(intact)
                self.draws.renew()
                raise NotCapturable(str(error).strip().splitlines()[0]) from error
            finally:
                # torch does not return from the capturing stream when the capture fails.
                torch.cuda.set_stream(current)
            written = [(parameter, parameter.grad) for parameter in self.state.module.parameters()]
        for parameter, gradient in written:
            parameter.grad = gradient  # each replay writes here; guards read it
        self._graph, self._static = graph, static

    def recompute(
        self,
        batch: Batch,
        index: int,
        forward: ForwardPass | None = None,
        inspect: Callable[[], None] = lambda: None,
    ) -> None:
        """Computes the gradients of a step again, without effect: with a different forward pass, or to `inspect` them
        and the buffers."""
        written = [(parameter, parameter.grad) for parameter in self.state.module.parameters()]
        with self.undone():
            self.objective.at(index)
            self.draws.at(index)
            self.state.optimizer.zero_grad(set_to_none=True)
            self.strategy.gradients(batch, forward or self, self.draws)
            inspect()
        for parameter, gradient in written:
            parameter.grad = gradient

    @property
    def captured(self) -> bool:
        """Whether the step is one CUDA graph."""
        return self._graph is not None

    def uncompiled(self) -> AbstractContextManager[object]:
        """A context in which a compiled model runs as it was written. (Only compiled runs import the compiler.)"""
        compiled = self.strategy.recipe.train.compile
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    def images(self, batch: Batch) -> torch.Tensor:
        """The model's input: normalised and mixed images."""
        images = self.normalise(batch.images)
        return mixed(images, batch.mix) if batch.mix.shape[1] else images

    def loss_sums(self, model: nn.Module, batch: Batch) -> LossSums:
        """The objective's sums over a micro-batch."""
        images = self.images(batch)
        with autocast(self.world.device, self.precision):
            return self.objective(model, images, batch)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The scaled loss of a micro-batch, counted in the meter. Backward follows."""
        account.enter(FORWARD)
        sums = self.loss_sums(self.state.forward, batch)
        meter = self.meter
        meter.loss.add_(sums.loss.detach())
        meter.correct.add_(sums.correct)
        meter.samples.add_(len(batch.labels))
        if sums.unlabelled is not None:
            meter.unlabelled.add_(sums.unlabelled)
        if sums.terms is not None:
            meter.terms.add_(sums.terms)
        loss: torch.Tensor = self.state.scaler.scale(sums.loss * (self.strategy.weight / self.global_batch))
        account.enter(BACKWARD)
        return loss

    def _generator_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._gpus)]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restores on exit everything that a step writes, at the same addresses."""
        state = self.state
        live = [local_shard(tensor) for group in state.tensors().values() for tensor in group.values()]
        buffers = [buffer for buffer in state.module.buffers() if not buffer.is_meta]
        live += [self.meter.sums, state.lr, *buffers, *self.objective.live()]
        live += self.gate.live() if self.gate is not None else []
        scaler = state.scaler.state_dict()
        with leave_no_trace(tensors=live, devices=self._gpus):
            try:
                yield
            finally:
                if state.scaler.is_enabled():
                    state.scaler.load_state_dict(scaler)
                state.optimizer.zero_grad(set_to_none=True)


def _other_generators() -> tuple[object, ...]:
    """The states of Python's and NumPy's own generators."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


@contextmanager
def _host_reads() -> Iterator[list[str]]:
    """Collects torch's warnings about operations that make the host wait for the GPU. Found here, they do not break a
    capture: torch 2.11 never frees what a broken one has allocated."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            texts = [str(warning.message) for warning in raised]
            found += [text for text in texts if "synchronizing CUDA operation" in text]

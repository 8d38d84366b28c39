"""Which part of a step a user's loop is in, from its calls of torch.

Promises: waits for no device and no rank, and changes no tensor. Only the thread that created it is counted. Hooks
are outside compiled code. An evaluation begins when the loop opens another loader or calls the model in eval mode
without gradients. It lasts, with all that the loop does then, until the loop asks for a batch to train on or calls
the model with gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drumline.core.account import (
    BACKWARD,
    COMPUTE,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    OTHER,
    Account,
)
from drumline.diagnosis.script.loader import LoaderState, is_pinned, samples_in
from drumline.guards.script.forwards import inner_of, is_compiled, wrapper_of
from drumline.guards.script.parameters import capturing
from drumline.guards.script.taps import Listener
from drumline.observe.clock import StepClock

_LOOKED_AT = 3
"""Batches that are looked at for what does not change."""


class LoopAccount(Account):
    """An account without the time since the last change of parts: what follows the last step is not the loop's."""

    def sums(self) -> dict[str, float]:
        return dict(self._sums)


@dataclass
class Counts:
    """What was counted besides times."""

    steps: int = 0
    samples: int = 0
    batches: int = 0
    evaluated: int = 0
    """Samples in all evaluations."""
    passes: int = 0
    """Passes over the loader that have ended."""
    step_of_pass: int = 0
    """Steps since the present pass began."""
    steps_per_pass: int = 0
    """Those of the last pass; 0 if none has ended."""

    @property
    def epoch(self) -> float:
        """Passes, and the part of the present one that is done, if that is known."""
        part = self.step_of_pass / self.steps_per_pass if self.steps_per_pass else 0.0
        return self.passes + min(part, 1.0)


class LoopParts(Listener):
    """Marks the parts of one loop in an account, and its steps in a clock.

    `began` is called when the loop first trains, `stepped` after each step, `asked` and `arrived` when the loop asks
    for a batch and has it.
    """

    needs = "times"

    def __init__(
        self,
        loaders: Sequence[Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        clock: StepClock,
        parts: LoopAccount,
        began: Callable[[], None],
        stepped: Callable[[], None],
    ) -> None:
        self.counts, self.queue = Counts(), LoaderState()
        self.facts: dict[str, Any] = {}
        """What the first batches show."""
        self.asked: Callable[[], object] = lambda: None
        self.arrived: Callable[[], object] = lambda: None
        self._loaders, self._model, self._clock, self._parts = loaders, model, clock, parts
        self._begins, self._stepped = began, stepped
        self._thread = get_ident()
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        """Passes over the loaders that are trained on."""
        self._fetching: Any = None
        """The iterator that was asked for a batch and has not answered."""
        self._evaluating = self._began = self._in_step = False
        self._used = True
        """Whether the model, backward or an optimizer was called since the last batch."""
        self._outside: list[str] = []
        """The parts that saving and collectives have interrupted."""
        self._handles: list[RemovableHandle] = []
        self._hook(model, optimizers)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Batches.

    def opens(self, loader: Any) -> None:
        if self._elsewhere or self._fetching is not None:
            return
        if self._trains_on(loader):
            self._trains(DATA)
            self.queue.opens()
        else:
            self._evaluates()

    def opened(self, loader: Any, iterator: Any) -> None:
        if not self._elsewhere and self._fetching is None and self._trains_on(loader):
            self._iterators.add(iterator)
            self.queue.opened(iterator)
            self._parts.enter(OTHER)

    def asks(self, iterator: Any) -> None:
        if self._elsewhere or self._fetching is not None:
            return
        self._fetching = iterator
        if iterator in self._iterators:
            self.waits()
        else:
            self._evaluates()

    def receives(self, iterator: Any, batch: Any) -> None:
        if iterator is self._fetching and not self._elsewhere:
            self._fetching = None
            if self._evaluating:
                self.counts.evaluated += samples_in(batch)
                self._parts.enter(EVALUATION)
            else:
                self.received(batch)

    def exhausted(self, iterator: Any) -> None:
        if iterator is self._fetching and not self._elsewhere:
            self._fetching = None
            if self._evaluating:
                self._parts.enter(EVALUATION)
            else:
                self.pass_ends()

    def waits(self) -> None:
        """The loop asks for a batch to train on."""
        if not self._used:
            self._step()  # a graph is replayed, which calls nothing
        self._trains(DATA)
        self.queue.asks()
        self.asked()

    def received(self, batch: Any) -> None:
        """It has one."""
        self._used = False
        self.arrived()
        self.queue.receives()
        samples = samples_in(batch)
        self.counts.batches += 1
        self.counts.samples += samples
        if self.counts.batches <= _LOOKED_AT:
            self.facts |= {"rank_batch": samples}
            if torch.cuda.is_initialized():
                self.facts |= {"pinned": is_pinned(batch)}
        self._parts.enter(COMPUTE)

    def pass_ends(self) -> None:
        """There are no more."""
        self.counts.passes += 1
        self.counts.steps_per_pass, self.counts.step_of_pass = self.counts.step_of_pass, 0
        self._parts.enter(OTHER)

    # The step.

    def backward_begins(self, roots: Any) -> None:
        self._used = True
        if not self._evaluating and not self._elsewhere:
            self._parts.enter(BACKWARD)

    def backward_ends(self) -> None:
        if not self._evaluating and not self._elsewhere:
            self._parts.enter(OTHER)

    def updates(self) -> None:
        if not self._evaluating and not self._elsewhere:
            self._parts.enter(OPTIMIZER)

    def begins(self, part: str) -> None:
        if not self._elsewhere:
            self._outside.append(self._parts.present[1])
            if not (part == EXCHANGE and self._evaluating):
                self._parts.enter(part)

    def ends(self, part: str) -> None:
        if not self._elsewhere and self._outside:
            self._parts.enter(self._outside.pop())
            if part != EXCHANGE:
                self._clock.resume()

    def _hook(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        wrapper, inner = wrapper_of(model), inner_of(model)
        if is_compiled(model):
            # A hook inside would break its graph, and one on a module that compiles itself would be compiled.
            called = model if hasattr(model, "_orig_mod") else None
        else:
            called = wrapper.module if wrapper is not None else model
        if called is not None:
            self._handles.append(called.register_forward_pre_hook(self._forward))
        if wrapper is not None and not is_compiled(model):
            self._handles.append(wrapper.register_forward_pre_hook(self._wrapper_forward))
        if wrapper is not None:
            # Backward reaches it last. What follows is waiting for the other ranks.
            first = next((each for each in inner.parameters() if each.requires_grad), None)
            if first is not None:
                self._handles.append(first.register_post_accumulate_grad_hook(self._gradients_done))
        for number, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            after = self._after_update if number == 0 else self._after_other_update
            self._handles.append(optimizer.register_step_post_hook(after))

    def _wrapper_forward(self, module: nn.Module, args: Any) -> None:
        """DDP sends the buffers of rank 0 to the others before the forward."""
        if self._is_training_forward():
            self._begin_step()
            self._parts.enter(EXCHANGE)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._elsewhere:
            return
        if self._is_training_forward():
            self._begin_step()
            self._parts.enter(FORWARD)
        elif self._evaluating or not self._model.training:
            self._evaluates()
        else:
            self._parts.enter(FORWARD)

    def _is_training_forward(self) -> bool:
        """With gradients, unless the loop evaluates with them by mistake: in eval mode, on another loader."""
        return torch.is_grad_enabled() and (self._model.training or not self._evaluating)

    def _begin_step(self) -> None:
        self._used = True
        self._trains(None)
        if not self._in_step and not self._elsewhere and not capturing():
            self._in_step = True
            self._clock.step_begin()

    def _gradients_done(self, parameter: torch.Tensor) -> None:
        if not self._evaluating:  # on a GPU, a thread of torch's calls this
            self._parts.enter(EXCHANGE)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._used = True
        if not self._elsewhere:
            self._trains(OPTIMIZER)

    def _after_other_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._parts.enter(OTHER)

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._parts.enter(OTHER)
        if not self._elsewhere:
            self._step()

    def _step(self) -> None:
        if capturing():
            return
        if not self._in_step:
            self._clock.step_begin()
        self._in_step = False
        self._clock.step_end()
        self.counts.steps += 1
        self.counts.step_of_pass += 1
        self._stepped()

    # What the loop does.

    @property
    def _elsewhere(self) -> bool:
        """Whether this is another thread than the loop's."""
        return get_ident() != self._thread

    def _trains_on(self, loader: Any) -> bool:
        return any(loader is one for one in self._loaders)

    def _trains(self, part: str | None) -> None:
        """The loop trains, after an evaluation or at first."""
        if not self._began:
            self._began = True
            self._clock.begin()
            self._begins()
        elif self._evaluating:
            self._clock.resume()
        self._evaluating = False
        if part is not None:
            self._parts.enter(part)

    def _evaluates(self) -> None:
        if self._began:
            self._evaluating = True
            self._parts.enter(EVALUATION)

"""The tensors that cross between the stages of a cut model, found without running it.

Promises: uses fake tensors only, so no kernel runs, no random number is drawn, no buffer is written and no hook is
called. Parameters may be on the meta device: only their shapes, strides and dtypes are read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from drumline.core import arithmetic

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor that crosses into a stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether its gradient is sent back. Never in evaluation."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StageModule(nn.Module):
    """A stage of one model. It has no parameters of its own: it uses those of the model."""

    def __init__(self, root: nn.Module, forwards: Mapping[bool, Any]) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the model a second time.
        self._root = (root,)
        self._forwards = dict(forwards)

    @property
    def root(self) -> nn.Module:
        return self._root[0]

    def forward(self, *inputs: Tensor) -> Any:
        """Returns a tuple of what enters the next stage. The last stage returns what the model returns. The mode of
        the model selects the operations traced in training or in evaluation."""
        return self._forwards[self.root.training](self.root, *inputs)


def boundaries(
    stages: Sequence[StageModule], sample: Tensor, autocast: torch.dtype | None = None
) -> list[tuple[TensorSpec, ...]]:
    """The tensors that enter each stage, including the first, for a micro-batch like `sample`, whose values are not
    read. In the current mode of the model, and under autocast for the sample's type of device."""
    roots = list({id(stage.root): stage.root for stage in stages}.values())
    chain = _Chain(roots, stages)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        arithmetic.autocast(sample.device, autocast, cached=False),
        untouched(chain),
    ):
        fakes = Fakes(chain, sample.device)
        fakes.call(chain, "", (_fake(sample, sample.device),), {})
    return chain.entering


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores everything that a forward on fake tensors sets on the model's modules (a counter, the last output).
    Also restores Python's random state, from which torch numbers faked collectives such as those of SyncBatchNorm."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    tables = [table for module in modules for table in (module._parameters, module._buffers, module.__dict__)]
    before, draws = [(table, dict(table)) for table in tables], random.getstate()
    try:
        yield
    finally:
        random.setstate(draws)
        for table, content in before:
            table.clear()
            table.update(content)


class Fakes:
    """Fake copies of a model's parameters and buffers, all on one device. Created and used under a FakeTensorMode."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        by_id: dict[int, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ):
            if id(tensor) not in by_id:
                by_id[id(tensor)] = _fake(tensor, device)
            self.tensors[name] = by_id[id(tensor)]

    def call(self, module: nn.Module, within: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls a module of the root. `within` is its name there and a dot, or '' for the root itself."""
        tensors = {
            name.removeprefix(within): fake for name, fake in self.tensors.items() if name.startswith(within)
        }
        with _without_hooks(module):
            return functional_call(module, tensors, tuple(args), dict(named))


class _Chain(nn.Module):
    """The stages in sequence, with their model registered, so that it can be called with fake tensors."""

    def __init__(self, roots: Sequence[nn.Module], stages: Sequence[StageModule]) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)
        self.stages = tuple(stages)
        self.entering: list[tuple[TensorSpec, ...]] = []

    def forward(self, *inputs: Tensor) -> None:
        for stage in self.stages:
            self.entering.append(tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in inputs))
            if stage is not self.stages[-1]:
                with torch.set_grad_enabled(stage.root.training):
                    inputs = stage(*inputs)


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    kept = [(each, name, each.__dict__[name]) for each in module.modules() for name in _HOOKS]
    for each, name, hooks in kept:
        each.__dict__[name] = type(hooks)()
    try:
        yield
    finally:
        for each, name, hooks in kept:
            each.__dict__[name] = hooks

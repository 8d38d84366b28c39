"""What crosses between the stages of a cut model, found without running it.

Promises: fake tensors only: no kernel runs, no random number is drawn, no buffer is written and no hook is called.
Parameters may lie on the meta device: only their shapes, strides and dtypes are read.
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

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


@dataclass(frozen=True)
class TensorSpec:
    """Room for one crossing tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether a gradient comes back for it; never in evaluation."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StageModule(nn.Module):
    """A stage of one model. The model's tensors stay the model's own: this module has no parameters."""

    def __init__(self, root: nn.Module, forwards: Mapping[bool, Any]) -> None:
        super().__init__()
        # In a tuple, so that torch does not register the model a second time.
        self._held = (root,)
        self._forwards = dict(forwards)

    @property
    def root(self) -> nn.Module:
        return self._held[0]

    def forward(self, *inputs: Tensor) -> Any:
        """A tuple of what enters the next stage; of the last stage, what the model returns. Its way in training and
        in evaluation is chosen by the mode of the model."""
        (root,) = self._held
        return self._forwards[root.training](root, *inputs)


def boundaries(
    stages: Sequence[StageModule], sample: Tensor, autocast: torch.dtype | None = None
) -> list[tuple[TensorSpec, ...]]:
    """What enters each stage, the first one too, for a micro-batch like `sample`, whose values are not read. In the
    mode that the model is in; autocast is that of the sample's kind of device."""
    roots = list({id(stage.root): stage.root for stage in stages}.values())
    chain = _Chain(roots, stages)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast(
            sample.device.type,
            dtype=autocast or torch.bfloat16,
            enabled=autocast is not None,
            cache_enabled=False,
        ),
        untouched(chain),
    ):
        fakes = Fakes(chain, sample.device)
        fakes.call(chain, "", (_fake(sample, sample.device),), {})
    return chain.entering


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What a forward on twins sets on the model's modules (a counter, the last output) is gone afterwards. Python's
    random stands where it stood: torch numbers faked collectives, as those of synchronised norms, by it."""
    parts = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables = [table for part in parts for table in (part._parameters, part._buffers, part.__dict__)]
    before, draws = [(table, dict(table)) for table in tables], random.getstate()
    try:
        yield
    finally:
        random.setstate(draws)
        for table, content in before:
            table.clear()
            table.update(content)


class Fakes:
    """Fake twins of a model's parameters and buffers, all on one device; made and used under a fake mode."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        twins: dict[int, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ):
            if id(tensor) not in twins:
                twins[id(tensor)] = _fake(tensor, device)
            self.tensors[name] = twins[id(tensor)]

    def call(self, module: nn.Module, within: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The output of a module of the root, `within` being its name there with a dot at the end, or ''."""
        tensors = {
            name.removeprefix(within): fake for name, fake in self.tensors.items() if name.startswith(within)
        }
        with _without_hooks(module):
            return functional_call(module, tensors, tuple(args), dict(named))


class _Chain(nn.Module):
    """The stages in a row, with their model registered, for a call with other tensors than its own."""

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
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return twin.requires_grad_(tensor.requires_grad)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    kept = [(part, name, part.__dict__[name]) for part in module.modules() for name in _HOOKS]
    for part, name, hooks in kept:
        part.__dict__[name] = type(hooks)()
    try:
        yield
    finally:
        for part, name, hooks in kept:
            part.__dict__[name] = hooks

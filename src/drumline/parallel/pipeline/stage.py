"""A stage of a model: its operations, its module, the tensors that enter it, and the device that holds its own.

Promises: the tensors that cross between stages are found with fake tensors only, so no kernel runs, no random number
is drawn, no buffer is written and no hook is called. Placing the stages keeps shared tensors shared; what a different
process computes goes to the meta device, without memory, under its name.
Rejects a constant that one process would have to read on two devices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from drumline.core.errors import UserError
from drumline.core.precision import FP32, Precision, autocast
from drumline.parallel.pipeline.schedule import Shape
from drumline.parallel.world import Grid


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


@dataclass(frozen=True)
class Segment:
    """One stage of a cut, not yet bound to a model."""

    number: int
    name: str
    """The module that begins it."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    modules: tuple[str, ...]
    """Modules that it calls. All names are the model's. A tied parameter has the first of its names."""
    graphs: Mapping[bool, fx.Graph] = field(repr=False)
    """Its operations, by mode."""

    def bind(self, root: nn.Module) -> StageModule:
        """The stage as a module that uses the tensors of `root`: the traced model, or one with the same structure."""
        return StageModule(root, {training: _compiled(graph) for training, graph in self.graphs.items()})


def _compiled(graph: fx.Graph) -> Any:
    """The stage as a Python function of the model and the inputs. It looks up the model's tensors at each call."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<a stage of the model>", "exec"), scope)
    return scope["forward"]


def describe_stages(segments: Sequence[Segment]) -> str:
    """Where the stages begin."""
    return " | ".join(f"{segment.number}: from {segment.name or 'the input'}" for segment in segments)


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def boundaries(
    stages: Sequence[StageModule], sample: Tensor, precision: Precision = FP32
) -> list[tuple[TensorSpec, ...]]:
    """The tensors that enter each stage, including the first, for a micro-batch like `sample`, whose values are not
    read. In the current mode of the model, and in this precision on the sample's type of device."""
    roots = list({id(stage.root): stage.root for stage in stages}.values())
    chain = _Chain(roots, stages)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        autocast(sample.device, precision, cached=False),
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


def lane_devices(shape: Shape, own: torch.device) -> list[torch.device]:
    """The devices of this process's lanes. The last is the process's own, where labels and loss are."""
    if shape.over_processes:
        return [own]
    count = torch.cuda.device_count() if own.type == "cuda" else 1
    return [torch.device("cuda", lane % count) if count > 1 else own for lane in reversed(range(shape.lanes))]


def parameters_by_stage(
    module: nn.Module, root: nn.Module, segments: Sequence[Segment], stages: Sequence[int]
) -> dict[int, list[nn.Parameter]]:
    """The parameters of the stages that this process computes. Those outside of `root` belong to the last."""
    held = dict(root.named_parameters())
    found = {number: [held[name] for name in segments[number].parameters] for number in stages}
    used = {id(each) for group in found.values() for each in group}
    others = [each for each in module.parameters() if id(each) not in used and not each.is_meta]
    inside = {id(each) for each in held.values()}
    for each in others:
        found[max(stages) if id(each) not in inside else min(stages)].append(each)
    empty = [number for number, group in found.items() if not any(each.requires_grad for each in group)]
    if empty:
        where = segments[empty[0]].name or "the input"
        raise UserError(
            f"parallel.split: stage {empty[0]}, which begins at {where}, has nothing to train",
            "use fewer stages, or name cuts that leave each one something to train: --parallel.split NAMES, which "
            "`drumline plan --cuts MODEL` lists",
        )
    return found


def place_stages(
    module: nn.Module,
    root: nn.Module,
    segments: Sequence[Segment],
    shape: Shape,
    grid: Grid,
    lanes: Sequence[torch.device],
    channels_last: bool,
) -> None:
    """Moves every tensor of `module`, in place. `root` is the submodule that was cut; `lanes` are the devices of this
    process's lanes. What no stage uses goes with the first stage; what is outside the root, with the last."""
    readers: dict[str, list[int]] = {}
    for segment in segments:
        for used in (*segment.parameters, *segment.buffers):
            readers.setdefault(used, []).append(segment.number)
    names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    moved: dict[int, Tensor] = {}
    for layer in module.modules():
        for kind in (layer._parameters, layer._buffers):
            for key, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    name = names.get(id(tensor))
                    stages = [shape.stages - 1] if name is None else readers.get(name, [0])
                    device = device_of(stages, shape, grid, lanes, name or key)
                    moved[id(tensor)] = _moved(tensor, device, channels_last)
                kind[key] = moved[id(tensor)]  # type: ignore[assignment]


def device_of(
    stages: Sequence[int], shape: Shape, grid: Grid, lanes: Sequence[torch.device], name: str
) -> torch.device:
    """The device of a tensor that these stages read. (Only constants are read by several.)"""
    if not shape.over_processes:
        devices = {lanes[stage % shape.lanes] for stage in stages}
        if len(devices) > 1:
            raise UserError(
                f"parallel.split: {name} is read by stages {', '.join(map(str, stages))}, which one process computes "
                "on several devices",
                f"give --parallel.processes {shape.lanes} (each has its own), or cut so that one stage reads it",
            )
        return devices.pop()
    here = any(stage % shape.lanes == grid.place for stage in stages)
    return lanes[0] if here else torch.device("meta")


def _moved(tensor: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    """The tensor on that device, of the same kind; on the meta device, without values."""
    moved = tensor.detach().to(device)
    if channels_last and tensor.ndim == 4:
        moved = moved.contiguous(memory_format=torch.channels_last)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, tensor.requires_grad)
    return moved

"""Finds the stages of any network by running it once.

Promises: the probe leaves modes, buffers and random generators as they were. Rejects a tap location whose module is
not called. `tapped.py` explains what a location is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.models.locations import INPUT, Location


def find_taps(model: nn.Module, example: Tensor, named: Mapping[str, str] | None = None) -> dict[str, str]:
    """The location of each tap, found by running the model once on `example` in evaluation mode. `named` locations
    take precedence over found ones.

    If timm's `feature_info` lists the stages, they are taken from there. Otherwise a stage ends with the shallowest
    module that ends each size of the feature map: the last one before the map is halved, down to the last map. If
    there are more than four, the first is `stem`. A stage that ends in an activation module also has `stageN.pre`.
    `pooled` is the input of the linear layer that returns the logits. Feature maps are N x C x H x W. A model that
    spends less than a quarter of its layers on such maps (a vision transformer after its patches) has no stages.
    """
    log = probe(model, example)
    locations = {**_stage_locations(model, log), **(named or {})}
    locations = {**_pre_locations(model, log, locations), **locations}
    return {tap: locations[tap] for tap in sorted(locations, key=tap_order)}


def _stage_locations(model: nn.Module, log: CallLog) -> dict[str, str]:
    """The locations of stem, stages and pooled."""
    ends = _timm_ends(model, log) or _map_ends(model, log)
    names = [f"stage{number}" for number in range(1, len(ends) + 1)]
    if len(ends) > 4:
        names = ["stem", *names[:-1]]
    locations = dict(zip(names, ends, strict=True))
    head = log.head
    if head is not None and head.name and head.input is not None and head.input.tensor.dim() == 2:
        locations["pooled"] = head.name + INPUT
    return locations


def _pre_locations(model: nn.Module, log: CallLog, locations: Mapping[str, str]) -> dict[str, str]:
    """`stageN.pre` of the stages whose output comes from an activation module."""
    pre = {}
    for tap, location in locations.items():
        if not tap.startswith("stage") or tap.endswith(".pre"):
            continue
        stage = log.at(model, tap, location)
        for call in reversed(log.calls):
            if not _activates(call.module) or not stage.same_value(call.output):
                continue
            if log.last(call.module) is call and call.input is not None:
                pre[f"{tap}.pre"] = call.name + INPUT
                break
    return pre


def norm_name(tap: str, snapshots: Mapping[str, Snapshot], log: CallLog) -> str:
    """The name of the BatchNorm before a tap's activation, or '' if none is known."""
    before = snapshots.get(f"{tap}.pre")
    snapshot = before or snapshots[tap]
    norms = [call for call in reversed(log.calls) if isinstance(call.module, _BatchNorm)]
    for call in norms:
        if (
            call.output is not None
            and call.output.time <= snapshot.time
            and call.output.same_memory(snapshot)
        ):
            return call.name
    if before is None and not tap.endswith(".pre"):
        return ""
    number = int(tap.removesuffix(".pre").removeprefix("stage"))
    earlier = snapshots.get(f"stage{number - 1}", snapshots.get("stem"))
    since = earlier.time if earlier is not None else -1
    for call in norms:
        if since < call.start < snapshot.time and call.module.num_features == snapshot.tensor.shape[1]:
            return call.name
    return ""


def probe(model: nn.Module, example: Tensor, taps: bool = False) -> CallLog:
    """Runs the model once and logs every call of a module."""
    calls: list[ModuleCall] = []
    open_calls: list[ModuleCall] = []
    names = {module: name for name, module in model.named_modules()}
    clock = iter(range(1 << 62))

    def snapshot(values: object) -> Snapshot | None:
        tensor = first_tensor(values)
        return None if tensor is None else Snapshot(tensor, tensor._version, next(clock))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = snapshot((*args, *kwargs.values()))
        call = ModuleCall(names[module], module, next(clock), given)
        if open_calls:
            open_calls[-1].inner.append(call)
        open_calls.append(call)
        calls.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        open_calls.pop().output = snapshot(output)

    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with _undisturbed(model, example.device):
            # A tensor created in inference mode has no version counter.
            image = example.clone() if example.is_inference() else example
            model(image, taps=True) if taps else model(image)
    finally:
        for handle in handles:
            handle.remove()
    return CallLog(calls, (example.shape[-2], example.shape[-1]))


@dataclass(frozen=True)
class CallLog:
    """All calls of one forward in the order of their start, the model's own first."""

    calls: list[ModuleCall]
    image: tuple[int, int]

    def last(self, module: nn.Module) -> ModuleCall | None:
        return next((call for call in reversed(self.calls) if call.module is module), None)

    def at(self, model: nn.Module, tap: str, location: str) -> Snapshot:
        """The tensor at a location."""
        place = Location.parse(location)
        call = self.last(model.get_submodule(place.module))
        found = None if call is None else call.input if place.of_input else call.output
        if found is None:
            problem = "is not called in a forward" if call is None else "has no tensor there"
            raise UserError(
                f"taps: {tap}={location}: {place.module} {problem}", fix="name a different module"
            )
        return found

    @property
    def head(self) -> ModuleCall | None:
        logits = self.calls[0].output
        linear = (c for c in reversed(self.calls) if isinstance(c.module, nn.Linear) and c.output is not None)
        return next((call for call in linear if logits is not None and logits.same_value(call.output)), None)

    def size(self, snapshot: Snapshot | None) -> tuple[int, int] | None:
        """Height and width of a feature map, or None for anything else. A map has four dimensions, the last two in
        proportion to the image (unlike N x H x W x C)."""
        if snapshot is None or snapshot.tensor.dim() != 4:
            return None
        (height, width), (full_height, full_width) = snapshot.tensor.shape[2:], self.image
        alike = abs(height - width * full_height / full_width) <= 1.5
        return (height, width) if alike and height <= full_height and width <= full_width else None


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in the probe."""

    name: str
    module: nn.Module
    start: int
    input: Snapshot | None
    output: Snapshot | None = None
    inner: list[ModuleCall] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """A tensor at one moment of the probe."""

    tensor: Tensor
    version: int
    time: int

    def same_value(self, other: Snapshot | None) -> bool:
        """Whether both are the same memory, not written to in between."""
        return other is not None and self.version == other.version and self.same_memory(other)

    def same_memory(self, other: Snapshot) -> bool:
        """Whether both are the same memory in the same shape. The probe keeps every tensor, so no address is
        reused."""
        mine, theirs = self.tensor, other.tensor
        return mine is theirs or (mine.data_ptr() == theirs.data_ptr() != 0 and mine.shape == theirs.shape)


def tap_order(tap: str) -> tuple[int, int, int]:
    """stem, stage1.pre, stage1, stage2.pre, ..., pooled."""
    if not tap.startswith("stage"):
        return (0 if tap == "stem" else 2, 0, 0)
    return (1, int(tap.removesuffix(".pre").removeprefix("stage")), 0 if tap.endswith(".pre") else 1)


def first_tensor(values: object) -> Tensor | None:
    """The first tensor of an output, or of the arguments of a call. A torch.fx proxy counts as a tensor."""
    if isinstance(values, Tensor | Proxy):
        return cast("Tensor", values)
    if isinstance(values, list | tuple):
        # A plain loop: torch.compile does not support a generator expression that binds a name.
        for value in values:
            tensor = first_tensor(value)
            if tensor is not None:
                return tensor
    return None


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients. Restores modes, buffers and random generators afterwards."""
    with torch.inference_mode(False), torch.no_grad(), leave_no_trace(model, devices=[device]):
        model.eval()
        yield


def _timm_ends(model: nn.Module, log: CallLog) -> list[str]:
    """The entries of timm's `feature_info` that are N x C x H x W and not just pooled."""
    info = getattr(model, "feature_info", None)
    entries = info if isinstance(info, list | tuple) else getattr(info, "info", ())
    modules = dict(model.named_modules())
    ends = []
    for entry in entries:
        name = entry.get("module", "") if isinstance(entry, dict) else ""
        call = log.last(modules[name]) if name and name in modules else None
        if call is None:
            continue
        before = entry.get("hook_type", "") == "forward_pre"
        end = call.input if before else call.output
        if end is None or log.size(end) is None or end.tensor.shape[1] != entry.get("num_chs"):
            continue
        if before or _ends_a_stage(call.module):
            ends.append(name + INPUT if before else name)
    return ends


def _map_ends(model: nn.Module, log: CallLog) -> list[str]:
    """The module that ends each size of the feature map."""
    units: list[ModuleCall] = []
    _unfold(log.calls[0].inner, log, units)
    trunk: list[tuple[tuple[int, int], ModuleCall]] = []
    for unit in reversed(units):
        size = log.size(unit.output)
        assert size is not None
        # A map smaller than a later one is a side branch, such as squeeze-and-excitation's.
        if not trunk or size >= trunk[-1][0]:
            trunk.append((size, unit))
    runs: list[tuple[tuple[int, int], list[ModuleCall]]] = []
    for size, unit in reversed(trunk):
        if not runs or _shrinks(runs[-1][0], size, 0.7):
            pooled = size == (1, 1) and (not _layers(unit.module) or log.size(unit.input) == size)
            if runs and pooled:
                break
            runs.append((size, []))
        runs[-1][1].append(unit)
    runs = [(size, run) for size, run in runs if any(_layers(unit.module) for unit in run)]
    if 4 * sum(_layers(unit.module) for _, run in runs for unit in run) < _layers(model):
        return []
    ends = (
        [unit.name for unit in run if _ends_a_stage(unit.module) and log.last(unit.module) is unit]
        for _, run in runs
    )
    return [names[-1] for names in ends if names]


def _unfold(calls: Iterable[ModuleCall], log: CallLog, units: list[ModuleCall]) -> None:
    """Appends the shallowest calls that each return maps of one size, in order. A call that spans several sizes, or
    that turns a map into something else, is replaced by the calls inside it."""
    for call in calls:
        before, after = log.size(call.input), log.size(call.output)
        if after is None:
            if before is not None:
                _unfold(call.inner, log, units)
            continue
        opened = False
        if before is not None and call.inner:
            # One halving only starts a stage, unless no layer has worked on the larger map yet.
            inside = {size for inner in call.inner if (size := log.size(inner.output)) is not None}
            fresh = not any(log.size(unit.output) == before and _layers(unit.module) for unit in units)
            halved = _shrinks(before, after, 0.7) and {before, after} <= inside
            opened = _shrinks(before, after, 0.35) or (fresh and halved)
        if opened:
            count = len(units)
            _unfold(call.inner, log, units)
            opened = any(log.size(unit.output) == after for unit in units[count:])
        if not opened:
            units.append(call)


def _shrinks(old: tuple[int, int], new: tuple[int, int], ratio: float) -> bool:
    return new[0] < ratio * old[0] or new[1] < ratio * old[1]


def _layers(module: nn.Module) -> int:
    """How many modules in it have a weight matrix or filter of their own."""
    return sum(any(p.dim() >= 2 for p in m.parameters(recurse=False)) for m in module.modules())


def _ends_a_stage(module: nn.Module) -> bool:
    """False for pooling, dropout and identity modules."""
    return _activates(module) or next(module.parameters(), None) is not None


def _activates(module: nn.Module) -> bool:
    """Whether it is an activation function of torch or timm."""
    home = type(module).__module__.rpartition(".")[2]
    no_map = isinstance(
        module, nn.MultiheadAttention | nn.Softmax | nn.Softmax2d | nn.LogSoftmax | nn.Softmin | nn.GLU
    )
    known = home in ("activation", "activations", "activations_me") and not no_map
    return known or any(
        isinstance(module, kind) for kind in (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish)
    )

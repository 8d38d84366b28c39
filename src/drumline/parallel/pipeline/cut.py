"""Where a model can be cut into stages, and the stages themselves.

A stage is a run of the model's operations, named by the module that begins there (`layer3`, `layer2.1`). Values made
before a cut and used after it cross the cut: skip connections, images and taps are passed on from stage to stage.

Promises: the stages in sequence compute what the model computes, with the same calls in the same order, so outputs,
gradients and buffers are the same bits. Parameters, buffers and hooks stay the model's own. Training and evaluation
are traced separately and cut at the same names.
Rejects a cut if anything other than a tensor would cross it, and a cut between two uses of one parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from drumline.core.errors import UserError
from drumline.core.text import either
from drumline.models.base import repeated_blocks
from drumline.models.tapped import Tapped
from drumline.parallel.pipeline.stage import Segment
from drumline.parallel.pipeline.trace import trace_forward
from drumline.parallel.pipeline.traced import TracedForward


@dataclass(frozen=True)
class CutPoint:
    """An operation at which a stage may begin."""

    name: str
    """The shallowest module that begins here, or '' if the model does not begin with a module."""
    aliases: tuple[str, ...]
    """Every module that begins here, the shallowest first."""
    index: int
    """The number of operations before it in training."""
    crossing: tuple[str, ...]
    """What enters a stage that begins here, in training: names of operations, or of the model's input."""
    positions: tuple[int, int] = field(repr=False)
    """The number of operations before it in (evaluation, training)."""


@dataclass(frozen=True)
class Traced:
    """A model's operations and where they can be cut."""

    name: str
    model: nn.Module = field(repr=False)
    """The model that was traced."""
    points: tuple[CutPoint, ...]
    """The beginning of the model, then every legal cut, in order."""
    units: tuple[CutPoint, ...]
    """The default cut points: the beginning of the model, its repeated blocks, and its children with weights outside
    of blocks. In a model without blocks, every module with weights. None is between two uses of a tensor that a step
    changes."""
    illegal: Mapping[str, str] = field(repr=False)
    """Modules at which no stage can begin, and why."""
    records: Mapping[bool, TracedForward] = field(repr=False)
    tensors: Mapping[str, tuple[str, ...]] = field(repr=False)
    """The target of an operation (module, parameter, buffer) to the names of the tensors it uses."""
    parameters: tuple[str, ...] = field(repr=False)
    buffers: tuple[str, ...] = field(repr=False)

    def split(self, names: Sequence[str]) -> list[Segment]:
        """The stages. The first begins with the model, each other one at a name."""
        points = [self.points[0], *(self._point(name) for name in names)]
        for (before, after), name in zip(pairwise(points), names, strict=True):
            if after.index == before.index:
                raise UserError(
                    f"parallel.split: two stages would begin at {name}"
                    if before is not self.points[0]
                    else f"parallel.split: {name} is where the model, and so the first stage, begins",
                    "name a different module for each stage but the first",
                )
            if after.index < before.index:
                raise UserError(
                    f"parallel.split: {name} comes before {before.name} in the model",
                    "name the modules in the order in which the model calls them",
                )
        segments = [
            self._segment(number, first, last)
            for number, (first, last) in enumerate(pairwise((*points, None)))
            if first is not None
        ]
        self._check_shared(segments)
        return segments

    def _point(self, name: str) -> CutPoint:
        known = {alias: point for point in self.points for alias in point.aliases}
        if name in known:
            return known[name]
        if name in self.illegal:
            legal = ", ".join(point.name for point in self.units[1:])
            raise UserError(
                f"parallel.split: no stage of {self.name} can begin at {name}: {self.illegal[name]}",
                f"cut elsewhere, for example at {legal}" if legal else "use a different parallel.layout",
            )
        near = get_close_matches(name, [*known, "even", "time"], n=3, cutoff=0.4) or [
            point.name for point in self.units[1:6]
        ]
        raise UserError(
            f"parallel.split: {self.name} calls no module {name!r} that a stage could begin with",
            f"did you mean {either(near)}?" if near else "use a different parallel.layout",
        )

    def _segment(self, number: int, first: CutPoint, last: CutPoint | None) -> Segment:
        graphs = {
            training: _stage_graph(
                found, first.positions[training], last.positions[training] if last else None
            )
            for training, found in self.records.items()
        }
        nodes = [node for graph in graphs.values() for node in graph.nodes]
        targets = {str(node.target): None for node in nodes if node.op in ("call_module", "get_attr")}
        used = {name for target in targets for name in self.tensors[target]}
        return Segment(
            number,
            first.name,
            tuple(name for name in self.parameters if name in used),
            tuple(name for name in self.buffers if name in used),
            tuple({str(node.target): None for node in nodes if node.op == "call_module"}),
            graphs,
        )

    def _check_shared(self, segments: Sequence[Segment]) -> None:
        written = {name for found in self.records.values() for name in found.written_buffers}
        owner: dict[str, Segment] = {}
        for segment in segments:
            for name in (*segment.parameters, *(name for name in segment.buffers if name in written)):
                other = owner.setdefault(name, segment)
                if other is not segment:
                    what = "gradient" if name in segment.parameters else "value"
                    raise UserError(
                        f"parallel.split: {name} is used by stage {other.number} and by stage {segment.number}, "
                        f"which begins at {segment.name}: each would have its own {what}",
                        "cut so that one stage has both uses",
                    )


def trace(
    model: nn.Module,
    kwargs: Mapping[str, Any] | None = None,
    *,
    sample: Tensor,
    leaves: Collection[str] = (),
) -> Traced:
    """Traces `model(images, **kwargs)` for images with the shape (of any batch size), dtype and device of `sample`,
    whose values are not read. `leaves` names modules to keep whole, besides those that cannot be traced."""
    records = {
        training: trace_forward(model, kwargs or {}, sample, leaves, training) for training in (False, True)
    }
    prefix = "model." if isinstance(model, Tapped) else ""
    points, illegal = _points(records, prefix)
    parameters = {id(tensor): name for name, tensor in model.named_parameters()}
    buffers = {id(tensor): name for name, tensor in model.named_buffers()}
    tensors = {
        str(node.target): _tensors_of(model, str(node.target), {**parameters, **buffers})
        for found in records.values()
        for node in found.graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    units = _units(model.get_submodule(prefix[:-1]), prefix, points, records[True])
    return Traced(
        type(model.model if isinstance(model, Tapped) else model).__name__,
        model,
        points,
        (units[0], *(unit for unit in units[1:] if _keeps_together(unit, records, tensors, model))),
        illegal,
        records,
        tensors,
        tuple(parameters.values()),
        tuple(buffers.values()),
    )


def cut_points(traced: Traced, inside_blocks: bool = False) -> tuple[CutPoint, ...]:
    """Where stages may begin: at the beginning of the model and between blocks, or wherever the model can be cut. No
    cut point is between two uses of one parameter."""
    points = traced.points if inside_blocks else traced.units
    try:
        traced.split([point.name for point in points[1:]])
    except UserError:
        return (points[0], *(point for point in points[1:] if _can_cut(traced, point)))
    return points


def _can_cut(traced: Traced, point: CutPoint) -> bool:
    """Whether the model can be cut here. A tensor that two stages must not share stops every cut between its uses."""
    try:
        traced.split([point.name])
    except UserError:
        return False
    return True


def _points(
    records: Mapping[bool, TracedForward], prefix: str
) -> tuple[tuple[CutPoint, ...], dict[str, str]]:
    """The legal cut points, and the illegal ones with the reason. Names do not show the wrapper of a model with
    taps."""
    begins = {training: _first_calls(found, prefix) for training, found in records.items()}
    named: dict[tuple[int, int], list[str]] = {(0, 0): []}
    for name, position in begins[True].items():
        if name in begins[False]:
            named.setdefault((begins[False][name], position), []).append(name)
    points: list[CutPoint] = []
    illegal: dict[str, str] = {}
    for pair, names in sorted(named.items(), key=lambda found: found[0][1]):
        names.sort(key=lambda name: name.count("."))
        problem = next((why for mode in (True, False) if (why := records[mode].problem(pair[mode]))), "")
        if problem and pair != (0, 0):
            illegal |= dict.fromkeys(names, problem)
        elif points and (pair[0] <= points[-1].positions[0] or pair[1] <= points[-1].positions[1]):
            illegal |= dict.fromkeys(names, "training and evaluation call it in a different order")
        else:
            crossing = tuple(node.name for node in records[True].crossing(pair[1]))
            points.append(CutPoint(names[0] if names else "", tuple(names), pair[1], crossing, pair))
    return tuple(points), illegal


def _first_calls(found: TracedForward, prefix: str) -> dict[str, int]:
    """The position of the first call of each module."""
    begins: dict[str, int] = {}
    for call in found.calls:
        position = 0 if found.begins(call.begin) else call.begin
        if call.module.startswith(prefix):
            name = call.module.removeprefix(prefix)
            begins[name] = min(begins.get(name, position), position)
    return begins


def _units(
    model: nn.Module, prefix: str, points: Sequence[CutPoint], found: TracedForward
) -> tuple[CutPoint, ...]:
    blocks = {id(block) for block in repeated_blocks(model)}
    names = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in blocks}
    inside = [(call.begin, call.end) for call in found.calls if call.module.removeprefix(prefix) in names]
    tops = {name for name, _ in model.named_children()}
    weights = {name for name, module in model.named_modules() if name and _has_weights(module)}
    if not inside:
        heavy = [point for point in points[1:] if weights.intersection(point.aliases)]
        return (points[0], *heavy)
    return (
        points[0],
        *(
            point
            for point in points[1:]
            if names.intersection(point.aliases)
            or (
                (tops & weights).intersection(point.aliases)
                and not any(begin < point.index < end for begin, end in inside)
            )
        ),
    )


def _keeps_together(
    point: CutPoint,
    records: Mapping[bool, TracedForward],
    tensors: Mapping[str, Sequence[str]],
    model: nn.Module,
) -> bool:
    """Whether each tensor that a step changes is used on one side only."""
    changed = {name for found in records.values() for name in found.written_buffers}
    changed |= {name for name, _ in model.named_parameters()}
    for training, found in records.items():
        before, after = (
            {name for target in targets for name in tensors[target]}
            for targets in found.targets(point.positions[training])
        )
        if changed & before & after:
            return False
    return True


def _has_weights(module: nn.Module) -> bool:
    """Whether it is more than a norm, an activation or a pool."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _tensors_of(model: nn.Module, target: str, names: Mapping[int, str]) -> tuple[str, ...]:
    """The names of the tensors of a module, or of the one tensor with this name."""
    owner, _, last = target.rpartition(".")
    holder = model.get_submodule(owner)
    if last in holder._modules:
        module = model.get_submodule(target)
        return tuple(names[id(tensor)] for tensor in (*module.parameters(), *module.buffers()))
    return (names[id(getattr(holder, last))],)


def _stage_graph(found: TracedForward, first: int, last: int | None) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in found.crossing(first):
        copies[node] = graph.placeholder(node.name)

    def copied(node: fx.Node) -> fx.Node:
        """A parameter is read by the stage that uses it."""
        if node not in copies:
            assert node.op == "get_attr", f"{node} is used before its stage makes it"
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in found.nodes[first:last]:
        copies[node] = graph.node_copy(node, copied)
    if last is None:
        graph.output(fx.map_arg(found.output.args[0], copied))
    else:
        graph.output(tuple(copies[node] for node in found.crossing(last)))
    return graph

"""Taps for models that are not built in: torchvision's, timm's, the user's own.

Promises: `Tapped(model, ...)(x, taps=True)` returns `(logits, taps)` with the logits, gradients, running statistics
and random draws of `model(x)`. A tapped tensor is returned as it was at its location, even if the model overwrites it
later. Nothing is kept on the model after a forward. A model without feature maps (a vision transformer) only has
`pooled`, which serves the methods that use logits or the pooled vector, unless blocks are named as its stages.
Rejects tap names and modules that do not exist.

A tap's location is `module.name`, the module's output, or `module.name:input`, its first input. `locations.py` says
what becomes of tokens. If a module has
several outputs, the first tensor counts; if it is called several times in one forward, the last call. A function such
as `F.relu` has no location: a tap on the convolution before it is the value before the activation. `pooled` is what
the last linear layer reads, in training after a dropout right before it. Name the dropout's `:input` to get the value
before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.core.text import either
from drumline.models.base import Output, Taps, VisionModel
from drumline.models.find_taps import find_taps, first_tensor, norm_name, probe, tap_order
from drumline.models.locations import CLS, INPUT, PATCHES, Location, View, view_of

SECOND_HEAD = "distilled"
"""The tap of the logits of a distillation token."""
_TAP = re.compile(r"stem|pooled|stage[1-9][0-9]*(\.pre)?")


class Tapped(nn.Module):
    """Wraps a model, as `model`, so that it can return taps. A built-in model keeps its own taps, except those that
    `locations` redefines (and `stageN.pre` of a redefined stage)."""

    def __init__(self, model: nn.Module, locations: Mapping[str, str], example: Tensor) -> None:
        """Runs `example` once in evaluation mode to find the taps that are overwritten later in the forward and so
        must be copied. Modes, buffers and random generators stay as they were."""
        super().__init__()
        _check(locations, model)
        native = model.tap_info if isinstance(model, VisionModel) else {}
        log = probe(model, example, taps=bool(native))
        self.model = model
        self.locations = {tap: locations[tap] for tap in sorted(locations, key=tap_order)}
        self.native = tuple(
            tap for tap in native if tap not in locations and tap.removesuffix(".pre") not in locations
        )
        """Taps that the model returns itself."""
        self.taps = tuple(sorted((*self.native, *locations), key=tap_order))
        snapshots = {tap: log.at(model, tap, location) for tap, location in self.locations.items()}
        self.copied = tuple(tap for tap, found in snapshots.items() if found.tensor._version != found.version)
        """Taps that cost a copy."""
        self.norms = {tap: norm for tap in snapshots if (norm := norm_name(tap, snapshots, log))}
        """Tap to the dotted name, in `model`, of the BatchNorm before its activation."""
        self.has_second_head = hasattr(model, "set_distilled_training")
        """Whether it has a distillation token with a head of its own (timm's DeiT, or your own model with the same
        method): `use_second_head`."""
        self._slot = _Slot()
        for tap, location in self.locations.items():
            place = Location.parse(location)
            view = view_of(tap, place, snapshots[tap].tensor, log.image)
            hook = TapHook(self._slot, tap, tap in self.copied, view)
            module = model.get_submodule(place.module)
            if place.of_input:
                module.register_forward_pre_hook(hook.on_input, with_kwargs=True)
            else:
                module.register_forward_hook(hook.on_output)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps) with the taps in the order stem, stage1.pre, stage1, ..., pooled."""
        if not taps:
            return self.model(x)
        seen: Taps = {}
        versions: dict[str, int] = {}
        self._slot.seen, self._slot.versions = seen, versions
        try:
            # A built-in model may call its modules differently when asked for taps, as it was in the probe.
            ours = isinstance(self.model, VisionModel)
            logits, own = self.model(x, taps=True) if ours else (self.model(x), {})
            if isinstance(logits, tuple):
                logits, second = logits
                own = {SECOND_HEAD: second}
        finally:
            self._slot.seen, self._slot.versions = None, {}
        for tap in self.locations:
            assert tap in seen, f"tap {tap}: {self.locations[tap]} was not called in this forward"
        for tap, version in versions.items():
            assert seen[tap]._version == version, (
                f"tap {tap}: {self.locations[tap]} was overwritten later in the forward, but not in evaluation mode, "
                "so it was not copied; choose a different location"
            )
        found = {tap: seen[tap] if tap in self.locations else own[tap] for tap in self.taps}
        return logits, found | ({SECOND_HEAD: own[SECOND_HEAD]} if SECOND_HEAD in own else {})

    def use_second_head(self) -> None:
        """From now on, in training, the logits are those of the class token, and the tap `distilled` those of the
        distillation token. In evaluation, logits are the mean of both, as ever."""
        set_distilled_training: Any = self.model.set_distilled_training
        set_distilled_training(True)


def with_taps(model: nn.Module, text: str, example: Tensor) -> nn.Module:
    """The model as one that can be called with `taps=True`. `text` gives locations as in `parse_taps`. A built-in
    model is wrapped only if it does; any other model is wrapped with the locations that `find_taps` finds."""
    named = parse_taps(text, model)
    if isinstance(model, VisionModel):
        return Tapped(model, named, example) if named else model
    return Tapped(model, find_taps(model, example, named), example)


def parse_taps(text: str, model: nn.Module | None = None) -> dict[str, str]:
    """Parses `stage1=layer1,stage1.pre=layer1.1.relu:input,pooled=fc:input`. Modules without a tap, as in
    `blocks.3,blocks.7`, are the stages, in their order. Checks the modules if `model` is given."""
    locations: dict[str, str] = {}
    stages = count(1)
    for entry in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text))):
        tap, equals, location = (half.strip() for half in entry.partition("="))
        if not equals:
            tap, location = f"stage{next(stages)}", tap
        if not tap or not location:
            raise UserError(
                f"taps: {entry!r} is not TAP=MODULE", fix="write for example stage1=layer1,pooled=fc:input"
            )
        if tap in locations:
            raise UserError(
                f"taps: {tap} is given twice, as {locations[tap]} and {location}", fix="remove one of them"
            )
        locations[tap] = location
    _check(locations, model)
    return locations


def norm_before(model: nn.Module, tap: str) -> nn.Module | None:
    """The BatchNorm right before the tap's activation, if known. For a sum of branches in a model that is not built
    in, it is the one whose output the sum was written into, or else the last one called before it in the stage."""
    if isinstance(model, Tapped) and tap not in model.native:
        return model.model.get_submodule(model.norms[tap]) if tap in model.norms else None
    inner = model.model if isinstance(model, Tapped) else model
    info = inner.tap_info.get(tap) if isinstance(inner, VisionModel) else None
    return inner.get_submodule(info.norm) if info is not None and info.norm else None


class _Slot:
    """Where the hooks of one model put their tensors. It is open only while a tapped forward runs. The hooks stay on
    the modules, because torch.compile does not support hooks that come and go."""

    def __init__(self) -> None:
        self.seen: Taps | None = None
        self.versions: dict[str, int] = {}


class TapHook:
    """Puts a tensor into the slot if it is open."""

    def __init__(self, slot: _Slot, tap: str, copy: bool, view: View) -> None:
        self.slot, self.tap, self.copy, self.view = slot, tap, copy, view

    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.slot.seen is not None:
            self._keep(first_tensor((*args, *kwargs.values())))

    def on_output(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.slot.seen is not None:
            self._keep(first_tensor(output))

    def _keep(self, tensor: Tensor | None) -> None:
        assert self.slot.seen is not None
        assert tensor is not None, f"tap {self.tap}: no tensor at its location in this forward"
        if self.copy:
            tensor = tensor.clone()
        self.slot.seen[self.tap] = tensor = self.view(tensor)
        if not torch.compiler.is_compiling() and not tensor.is_inference():
            self.slot.versions[self.tap] = tensor._version


def _check(locations: Mapping[str, str], model: nn.Module | None) -> None:
    for tap, location in locations.items():
        if not _TAP.fullmatch(tap):
            raise UserError(
                f"{tap}={location}: there is no tap {tap!r}",
                fix="taps are stem, stage1, stage2, ..., stage1.pre, stage2.pre, ... (before the activation), pooled",
            )
        name = Location.parse(location).module
        if ":" in name:
            raise UserError(
                f"{tap}={location}: a location is a module name, which {INPUT}, {CLS} or {PATCHES} may follow",
                fix=f"write {tap}=MODULE{INPUT}",
            )
        modules = (
            [known for known, _ in model.named_modules(remove_duplicate=False) if known]
            if model is not None
            else [name]
        )
        if name not in modules:
            near = get_close_matches(name, modules, n=3, cutoff=0.4) or [
                known for known in modules if "." not in known
            ]
            raise UserError(
                f"{tap}={location}: {type(model).__name__} has no module {name!r}",
                fix=f"did you mean {either(near)}?",
            )

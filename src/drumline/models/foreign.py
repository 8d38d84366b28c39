"""Taps for models that are not ours: torchvision's, timm's, the user's own.

Promises: `Tapped(model, ...)(x, taps=True)` returns `(logits, taps)` with the logits, gradients, running statistics
and random draws of `model(x)`; a tapped tensor comes back as it was at its place, even if the model writes over it
later; nothing is kept on the model after a forward. A model without maps (a vision transformer) has `pooled` alone,
which serves the methods on logits and on the pooled vector. Refuses tap names and modules that do not exist.

A place is `module.name`, the module's output, or `module.name:input`, its first input. Of several outputs the first
tensor counts; of several calls in one forward the last. Code that is not a module (`F.relu`) cannot be named: a tap
on the convolution before it is the value before the activation. `pooled` is what the last linear layer reads, in
training after a dropout right before it; name the dropout's `:input` to have it before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.core.text import either
from drumline.models.find_taps import (
    INPUT,
    find_places,
    first_tensor,
    norm_name,
    pre_places,
    probe,
    stage_places,
    tap_order,
)
from drumline.models.taps import Output, Taps, VisionModel

__all__ = ["Tapped", "find_places", "norm_before", "places_from_text", "with_taps"]

_TAP = re.compile(r"stem|pooled|stage[1-9][0-9]*(\.pre)?")


class Tapped(nn.Module):
    """A model, as `model`, with names for its insides. A model of ours keeps the taps that it has itself, less
    those that `places` names anew (and `stageN.pre` of a stage that is named anew)."""

    def __init__(self, model: nn.Module, places: Mapping[str, str], example: Tensor) -> None:
        """One forward of `example` in evaluation mode tells which taps are written over later in the forward, and
        so must be copied. It leaves modes, buffers and random generators as they were."""
        super().__init__()
        _check(places, model)
        native = model.tap_info if isinstance(model, VisionModel) else {}
        record = probe(model, example, taps=bool(native))
        self.model = model
        self.places = {tap: places[tap] for tap in sorted(places, key=tap_order)}
        self.native = tuple(
            tap for tap in native if tap not in places and tap.removesuffix(".pre") not in places
        )
        """Taps that the model gives itself."""
        self.taps = tuple(sorted((*self.native, *places), key=tap_order))
        marks = {tap: record.at(model, tap, place) for tap, place in self.places.items()}
        self.copied = tuple(tap for tap, mark in marks.items() if mark.tensor._version != mark.version)
        """Taps that cost a copy."""
        self.norms = {tap: norm for tap in marks if (norm := norm_name(tap, marks, record))}
        """Tap to the dotted name, in `model`, of the BatchNorm before its activation."""
        self._slot = _Slot()
        for tap, place in self.places.items():
            hook = TapHook(self._slot, tap, tap in self.copied)
            module = model.get_submodule(place.removesuffix(INPUT))
            if place.endswith(INPUT):
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
            # A model of ours may take other ways through its modules when asked for taps, as it was in the probe.
            ours = isinstance(self.model, VisionModel)
            logits, own = self.model(x, taps=True) if ours else (self.model(x), {})
        finally:
            self._slot.seen, self._slot.versions = None, {}
        for tap in self.places:
            assert tap in seen, f"tap {tap}: {self.places[tap]} was not called in this forward"
        for tap, version in versions.items():
            assert seen[tap]._version == version, (
                f"tap {tap}: {self.places[tap]} was written over later in the forward, which it was not in "
                "evaluation mode, so it was not copied; name another place for it"
            )
        return logits, {tap: seen[tap] if tap in self.places else own[tap] for tap in self.taps}


def with_taps(model: nn.Module, places_text: str, example: Tensor) -> nn.Module:
    """The model as something that can be called with `taps=True`. A model of ours stays as it is unless the text
    names places; any other is wrapped, with the places of `find_places` where the text names none."""
    places = places_from_text(places_text, model)
    if isinstance(model, VisionModel):
        return Tapped(model, places, example) if places else model
    record = probe(model, example)
    found = {**stage_places(model, record), **places}
    return Tapped(model, {**pre_places(model, record, found), **found}, example)


def places_from_text(text: str, model: nn.Module | None = None) -> dict[str, str]:
    """`stage1=layer1,stage1.pre=layer1.1.relu:input,pooled=fc:input` as a dict; checked against the modules of
    `model` where it is given."""
    places: dict[str, str] = {}
    for entry in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text))):
        tap, equals, place = (part.strip() for part in entry.partition("="))
        if not equals or not place:
            raise UserError(
                f"{entry!r} is not TAP=PLACE", fix="write for example stage1=layer1,pooled=fc:input"
            )
        if tap in places:
            raise UserError(
                f"{tap} is given twice, as {places[tap]} and {place}", fix="leave one of them out"
            )
        places[tap] = place
    _check(places, model)
    return places


def norm_before(model: nn.Module, tap: str) -> nn.Module | None:
    """The BatchNorm right before the tap's activation, where one is known. For a sum of branches in a foreign model
    it is the one whose output the sum was written into, else the last one called before in the stage."""
    if isinstance(model, Tapped) and tap not in model.native:
        return model.model.get_submodule(model.norms[tap]) if tap in model.norms else None
    inner = model.model if isinstance(model, Tapped) else model
    info = inner.tap_info.get(tap) if isinstance(inner, VisionModel) else None
    return inner.get_submodule(info.norm) if info is not None and info.norm else None


class _Slot:
    """Where the hooks of one model put their tensors, open only while a tapped forward runs. The hooks stay on the
    modules: torch.compile does not follow hooks that come and go, but it does follow this."""

    def __init__(self) -> None:
        self.seen: Taps | None = None
        self.versions: dict[str, int] = {}


class TapHook:
    """Hands a tensor to the open slot; does nothing while it is closed."""

    def __init__(self, slot: _Slot, tap: str, copy: bool) -> None:
        self.slot, self.tap, self.copy = slot, tap, copy

    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.slot.seen is not None:
            self._keep(first_tensor((*args, *kwargs.values())))

    def on_output(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.slot.seen is not None:
            self._keep(first_tensor(output))

    def _keep(self, tensor: Tensor | None) -> None:
        assert self.slot.seen is not None
        assert tensor is not None, f"tap {self.tap}: no tensor at its place in this forward"
        if self.copy:
            tensor = tensor.clone()
        self.slot.seen[self.tap] = tensor
        if not torch.compiler.is_compiling() and not tensor.is_inference():
            self.slot.versions[self.tap] = tensor._version


def _check(places: Mapping[str, str], model: nn.Module | None) -> None:
    for tap, place in places.items():
        if not _TAP.fullmatch(tap):
            raise UserError(
                f"{tap}={place}: there is no tap {tap!r}",
                fix="taps are stem, stage1, stage2, ..., stage1.pre, stage2.pre, ... (before the activation), pooled",
            )
        name = place.removesuffix(INPUT)
        if ":" in name:
            raise UserError(
                f"{tap}={place}: a place ends in {INPUT} or has no colon",
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
                f"{tap}={place}: {type(model).__name__} has no module {name!r}",
                fix=f"did you mean {either(near)}?",
            )

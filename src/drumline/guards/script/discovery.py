"""Finds the objects that a script keeps besides the model, in memory: teachers, moving averages, other optimizers,
schedulers.

Promises: objects are read, never called. The memory is searched twice, before the first step and at the end, for a
tenth of a second each. A module that follows the model (a moving average, a target network) may be in train mode; a
teacher that does not change may not, if it has layers that depend on the mode.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils.hooks import RemovableHandle

from drumline.guards.checks.drift import digest, fingerprints
from drumline.guards.checks.model import (
    depends_on_mode,
    gradient_marks,
    teacher_in_train_mode,
    trained_teacher,
)
from drumline.guards.finding import Finding

_MOST_COPIES = 8
_NEAR = 0.5
"""A copy whose largest tensor has at least this cosine similarity with the model's follows the model."""


class SideModule:
    """One module besides the model: whether it is called, and whether it changes."""

    def __init__(self, name: str, module: nn.Module, passed: bool, is_copy: bool) -> None:
        self.name, self.module, self.passed, self.is_copy = name, module, passed, is_copy
        self.calls = 0
        self.with_gradient = False
        self.changed = False
        self._first = _two_parameters(module)
        self.handle: RemovableHandle = module.register_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        trains = any(parameter.requires_grad for parameter in module.parameters())
        self.with_gradient = self.with_gradient or (torch.is_grad_enabled() and trains)

    def follows(self) -> bool:
        """Whether it changes, or began as a copy of the model."""
        now = _two_parameters(self.module)
        self.changed = self.changed or any(
            not torch.equal(a, b) for a, b in zip(self._first, now, strict=False) if a.shape == b.shape
        )
        return self.changed or self.is_copy

    def layer_in_train_mode(self) -> str | None:
        """The first layer in train mode that depends on it."""
        for name, layer in self.module.named_modules():
            if layer.training and depends_on_mode(layer):
                return f"{type(layer).__name__} '{name}'" if name else type(layer).__name__
        return None


class Discovery:
    """The objects besides one model."""

    def __init__(
        self,
        model: nn.Module,
        outer: nn.Module,
        teachers: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._model, self._outer, self._optimizers = model, outer, list(optimizers)
        self._teachers = list(teachers)
        self.teacher_parameters: dict[str, nn.Parameter] = {
            f"{number}.{name}" if len(teachers) > 1 else name: parameter
            for number, teacher in enumerate(teachers)
            for name, parameter in teacher.named_parameters()
        }
        self._teacher_gradients = gradient_marks(self.teacher_parameters)
        self.modules: list[SideModule] = []
        self.schedulers: list[LRScheduler] = []
        self.held_elsewhere: set[int] = set()
        """The ids of parameters in optimizers that were not passed to the guard."""
        self._first_copies: dict[int, str] = {}

    def search(self) -> None:
        """Searches the memory once, before the first step."""
        modules, optimizers, schedulers, dictionaries = _objects(nn.Module, Optimizer, LRScheduler, dict)
        for _, copy, tensors, _ in self._copies(modules, dictionaries):
            self._first_copies[id(copy)] = digest(fingerprints(tensors))
        held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        mine = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        self.held_elsewhere = held - mine
        inside = {id(part) for one in schedulers for part in _inner_schedulers(one)}
        found = [one for one in schedulers if one.optimizer in self._optimizers and id(one) not in inside]
        self.schedulers = [one for one in found if type(one) is not LRScheduler]
        for number, teacher in enumerate(self._teachers):
            name = "the teacher" if len(self._teachers) == 1 else f"teacher {number}"
            self.modules.append(SideModule(name, teacher, True, self._is_copy(teacher)))
        known = {id(part) for one in (self._outer, self._model, *self._teachers) for part in one.modules()}
        for module in _roots(modules, known):
            parameters = list(module.parameters())
            # A hook would be inside the graph of a compiled module.
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            if parameters and not compiled and not any(id(p) in held for p in parameters):
                name = f"{type(module).__name__} (not in the model)"
                self.modules.append(SideModule(name, module, False, self._is_copy(module)))

    def others_train(self) -> bool:
        """Whether any parameter of an optimizer that was not passed to the guard has a gradient."""
        (optimizers,) = _objects(Optimizer)
        others = [one for one in optimizers if not any(one is mine for mine in self._optimizers)]
        return any(
            p.grad is not None for one in others for group in one.param_groups for p in group["params"]
        )

    def in_train_mode(self, step: int) -> Finding | None:
        """A teacher that does not change and is called in train mode. Certain if it was passed as a teacher."""
        for one in self.modules:
            if one.passed or (one.calls > 1 and not one.with_gradient):
                layer = None if one.follows() else one.layer_in_train_mode()
                if layer is not None:
                    return teacher_in_train_mode(one.name, layer, step, certain=one.passed)
        return None

    def trained_teacher(self, step: int) -> Finding | None:
        """A teacher that an optimizer trains or backward reaches."""
        held = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        return trained_teacher(self.teacher_parameters, held, self._teacher_gradients, step)

    def teachers(self) -> dict[str, str]:
        """A digest of each teacher that is called without gradients, as the ranks compare them."""
        found: dict[str, str] = {}
        for one in self.modules:
            if one.passed or (one.calls and not one.with_gradient):
                key = f"{one.name} {sum(p.numel() for p in one.module.parameters())}"
                found.setdefault(key, digest(fingerprints(dict(one.module.named_parameters()))))
        return found

    def copies(self) -> dict[str, list[str]]:
        """Digests of the copies of the model's weights in memory, as modules and as dictionaries by name. The first
        digit says whether a copy follows the model: it has changed since the first step, and is similar."""
        found: dict[str, list[str]] = {"module": [], "dictionary": []}
        for kind, one, tensors, near in self._copies(*_objects(nn.Module, dict)):
            value = digest(fingerprints(tensors))
            follows = near and self._first_copies.get(id(one), value) != value
            found[kind].append(f"{follows:d}{value}")
        return {kind: values[:_MOST_COPIES] for kind, values in found.items()}

    def _copies(
        self, modules: list[Any], dictionaries: list[Any]
    ) -> Iterator[tuple[str, Any, dict[str, torch.Tensor], bool]]:
        own = dict(self._model.named_parameters())
        if not own:
            return
        largest = max(own, key=lambda name: own[name].numel())
        shapes = sorted(tuple(p.shape) for p in own.values())
        known = {id(part) for part in (*self._outer.modules(), *self._model.modules())}
        for module in _roots(modules, known):
            theirs = list(module.parameters())
            if len(theirs) == len(own) and sorted(tuple(p.shape) for p in theirs) == shapes:
                near = _is_near(theirs[list(own).index(largest)], own[largest])
                yield "module", module, {str(index): p for index, p in enumerate(theirs)}, near
        for one in [one for one in dictionaries if type(one) is dict and largest in one]:
            tensors: dict[str, Any] = {name: one.get(name) for name in own}
            if all(_is_separate(tensor, own[name]) for name, tensor in tensors.items()):
                yield "dictionary", one, tensors, _is_near(one[largest], own[largest])

    def close(self) -> None:
        """Removes the hooks."""
        for one in self.modules:
            one.handle.remove()
        self.modules.clear()

    def _is_copy(self, module: nn.Module) -> bool:
        """Whether a weight of the module equals a weight of the model bit for bit."""
        weights = [p for p in module.parameters() if p.dim() > 1]
        return any(
            torch.equal(mine.detach(), theirs.detach())
            for mine in weights[:2]
            for theirs in self._model.parameters()
            if mine.shape == theirs.shape and mine.device == theirs.device and mine is not theirs
        )


def has_averager() -> bool:
    """Whether the script averages models now and then, so that ranks differ on purpose in between."""
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

    return bool(_objects(ModelAverager)[0])


def _objects(*kinds: type) -> list[list[Any]]:
    """The objects in memory of each kind, in one pass."""
    found: list[list[Any]] = [[] for _ in kinds]
    matches: dict[type, list[int]] = {}
    for one in gc.get_objects():
        # By type, not isinstance: some objects in memory import a library when asked for their class.
        kind = type(one)
        if kind not in matches:
            matches[kind] = [index for index, each in enumerate(kinds) if issubclass(kind, each)]
        for index in matches[kind]:
            found[index].append(one)
    return found


def _inner_schedulers(scheduler: LRScheduler) -> Iterator[Any]:
    if isinstance(scheduler, SequentialLR | ChainedScheduler):
        yield from scheduler._schedulers


def _roots(modules: Sequence[nn.Module], known: Collection[int]) -> list[nn.Module]:
    """Modules that are not inside another one, inside the model, or around it."""
    parts = {id(child) for module in modules for child in module.children()}
    return [
        module
        for module in modules
        if id(module) not in parts
        and id(module) not in known
        and not any(id(part) in known for part in module.modules())
    ]


def _two_parameters(module: nn.Module) -> list[torch.Tensor]:
    """Copies of the smallest and of the last parameter."""
    parameters = [p for p in module.parameters() if p.numel()]
    chosen = sorted(parameters, key=lambda p: p.numel())[:1] + parameters[-1:]
    return [parameter.detach().clone() for parameter in chosen]


def _is_separate(tensor: Any, own: torch.Tensor) -> bool:
    """Whether this is a tensor like the model's, in memory of its own."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != own.shape or tensor.layout != torch.strided:
        return False
    return tensor.device == own.device and not own.is_meta and tensor.data_ptr() != own.data_ptr()


def _is_near(copy: torch.Tensor, own: torch.Tensor) -> bool:
    if copy.shape != own.shape or copy.device != own.device:
        return False
    both = copy.detach().double().flatten(), own.detach().double().flatten()
    return bool(torch.nn.functional.cosine_similarity(*both, dim=0) > _NEAR)

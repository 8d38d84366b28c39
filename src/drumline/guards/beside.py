"""What the script keeps beside the model: teachers, moving averages, other optimizers, schedulers.

They are found in memory, so that they need not be handed over.

Promises: objects are read, never called; the memory is searched twice (before the first step and at the end), for a
tenth of a second each. A module that follows the model (a moving average, a target network) may be in train mode; a
teacher that stands still may not, if it has layers that mind the mode.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils.hooks import RemovableHandle

from drumline.guards.compare import digest, numbers
from drumline.guards.finding import Finding

_MOST_COPIES = 8


class Follower:
    """One module beside the model: whether it is called, and whether it stands still."""

    def __init__(self, name: str, module: nn.Module, handed: bool, is_copy: bool) -> None:
        self.name, self.module, self.handed, self.is_copy = name, module, handed, is_copy
        self.calls = 0
        self.with_gradient = False
        self.moved = False
        self._first = _probe(module)
        self.handle: RemovableHandle = module.register_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        trains = any(parameter.requires_grad for parameter in module.parameters())
        self.with_gradient = self.with_gradient or (torch.is_grad_enabled() and trains)

    def follows(self) -> bool:
        """Whether it changes, or began as a copy of the model."""
        now = _probe(self.module)
        self.moved = self.moved or any(
            not torch.equal(a, b) for a, b in zip(self._first, now, strict=False) if a.shape == b.shape
        )
        return self.moved or self.is_copy

    def in_train_mode(self) -> str | None:
        """The first layer in train mode that minds it."""
        for name, layer in self.module.named_modules():
            if layer.training and minds_mode(layer):
                return f"{type(layer).__name__} '{name}'" if name else type(layer).__name__
        return None


class Beside:
    """Everything beside one model."""

    def __init__(
        self,
        model: nn.Module,
        outer: nn.Module,
        teachers: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._model, self._outer, self._optimizers = model, outer, list(optimizers)
        self._teachers = list(teachers)
        self.followers: list[Follower] = []
        self.schedulers: list[LRScheduler] = []
        self.held_elsewhere: set[int] = set()
        """Parameters that an optimizer holds which was not handed over."""
        self._first_copies: dict[int, str] = {}

    def search(self) -> None:
        """Looks once through the memory, before the first step."""
        modules, optimizers, schedulers, dictionaries = _objects(nn.Module, Optimizer, LRScheduler, dict)
        for _, copy, tensors, _ in self._copies(modules, dictionaries):
            self._first_copies[id(copy)] = digest(numbers(tensors))
        held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        mine = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        self.held_elsewhere = held - mine
        inside = {id(part) for one in schedulers for part in _parts(one)}
        found = [one for one in schedulers if one.optimizer in self._optimizers and id(one) not in inside]
        self.schedulers = [one for one in found if type(one) is not LRScheduler]
        for number, teacher in enumerate(self._teachers):
            name = "the teacher" if len(self._teachers) == 1 else f"teacher {number}"
            self.followers.append(Follower(name, teacher, True, self._is_copy(teacher)))
        known = {id(part) for one in (self._outer, self._model, *self._teachers) for part in one.modules()}
        for module in _roots(modules, known):
            parameters = list(module.parameters())
            compiled = (
                getattr(module, "_compiled_call_impl", None) is not None
            )  # a hook would be inside its graph
            if parameters and not compiled and not any(id(p) in held for p in parameters):
                name = f"{type(module).__name__} (not in the model)"
                self.followers.append(Follower(name, module, False, self._is_copy(module)))

    def others_train(self) -> bool:
        """Whether any parameter of an optimizer that was not passed to the guard has a gradient."""
        (optimizers,) = _objects(Optimizer)
        others = [one for one in optimizers if not any(one is mine for mine in self._optimizers)]
        return any(
            p.grad is not None for one in others for group in one.param_groups for p in group["params"]
        )

    def in_train_mode(self, step: int) -> tuple[Finding, bool] | None:
        """A teacher that stands still and is called in train mode; and whether it was handed over as a teacher."""
        for one in self.followers:
            if one.handed or (one.calls > 1 and not one.with_gradient):
                layer = None if one.follows() else one.in_train_mode()
                if layer is not None:
                    return _train_mode(one.name, layer, step), one.handed
        return None

    def states(self) -> dict[str, str]:
        """A number for each teacher that is called without gradients, as the ranks compare them."""
        found: dict[str, str] = {}
        for one in self.followers:
            if one.handed or (one.calls and not one.with_gradient):
                key = f"{one.name} {sum(p.numel() for p in one.module.parameters())}"
                found.setdefault(key, digest(numbers(dict(one.module.named_parameters()))))
        return found

    def copies(self) -> dict[str, list[str]]:
        """Numbers of copies of the model's weights in memory, as modules and as dictionaries by name; the first digit
        says whether a copy follows the model: it has changed since the first step, and lies near."""
        found: dict[str, list[str]] = {"module": [], "dictionary": []}
        for kind, one, tensors, near in self._copies(*_objects(nn.Module, dict)):
            number = digest(numbers(tensors))
            follows = near and self._first_copies.get(id(one), number) != number
            found[kind].append(f"{follows:d}{number}")
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
                near = _near(theirs[list(own).index(largest)], own[largest])
                yield "module", module, {str(place): p for place, p in enumerate(theirs)}, near
        for one in [one for one in dictionaries if type(one) is dict and largest in one]:
            tensors: dict[str, Any] = {name: one.get(name) for name in own}
            if all(_apart(tensor, own[name]) for name, tensor in tensors.items()):
                yield "dictionary", one, tensors, _near(one[largest], own[largest])

    def close(self) -> None:
        """Takes the hooks away."""
        for one in self.followers:
            one.handle.remove()
        self.followers.clear()

    def _is_copy(self, module: nn.Module) -> bool:
        """Whether a weight of the module equals a weight of the model bit for bit."""
        weights = [p for p in module.parameters() if p.dim() > 1]
        return any(
            torch.equal(mine.detach(), theirs.detach())
            for mine in weights[:2]
            for theirs in self._model.parameters()
            if mine.shape == theirs.shape and mine.device == theirs.device and mine is not theirs
        )


def unlike_teachers(ranks: Sequence[int], said: Sequence[dict[str, str]], step: int) -> Finding | None:
    """A teacher whose parameters differ between ranks."""
    for name in said[0]:
        pair = _unlike_pair(ranks, [one.get(name) for one in said])
        if pair is not None:
            return Finding(
                "teacher",
                f"ranks use different teachers: the parameters of {name.rpartition(' ')[0]} differ",
                pair,
                f"step {step}",
                "load the teacher's weights, and update a moving average, on every rank",
            )
    return None


def unlike_copies(ranks: Sequence[int], said: Sequence[dict[str, list[str]]], steps: int) -> Finding | None:
    """Copies of the model's weights, as many on each rank, that differ between ranks."""
    for kind in ("module", "dictionary"):
        values = [sorted(each[1:] for each in one[kind]) for one in said]
        everywhere = set(values[0]).intersection(*values)
        pair = _unlike_pair(ranks, values) if len({len(each) for each in values}) == 1 else None
        if pair is not None and any(
            each[0] == "1" and each[1:] not in everywhere for one in said for each in one[kind]
        ):
            return Finding(
                "ema",
                f"a copy of the model's weights (a moving average, kept as a {kind}) differs between ranks",
                pair,
                f"seen after step {steps}",
                "update it on every rank; nothing to do if only one rank's copy is used",
            )
    return None


def _unlike_pair(ranks: Sequence[int], values: Sequence[Any]) -> str | None:
    """The first two ranks whose values differ, unless a rank has none."""
    other = next((rank for rank, value in zip(ranks, values, strict=True) if value != values[0]), None)
    return None if other is None or None in values else f"ranks {ranks[0]} and {other}"


def minds_mode(layer: nn.Module) -> bool:
    """Whether a layer works differently in train and in eval mode."""
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    if isinstance(layer, _BatchNorm):
        return layer.track_running_stats
    return isinstance(layer, nn.RReLU) or type(layer).__name__ in ("DropPath", "StochasticDepth")


def averagers() -> bool:
    """Whether the script averages models now and then: ranks differ on purpose in between."""
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

    return bool(_objects(ModelAverager)[0])


def _objects(*kinds: type) -> list[list[Any]]:
    """The objects in memory of each kind, in one pass."""
    found: list[list[Any]] = [[] for _ in kinds]
    places: dict[type, list[int]] = {}
    for one in gc.get_objects():
        # By type, not isinstance: some objects in memory import a library when asked for their class.
        kind = type(one)
        if kind not in places:
            places[kind] = [place for place, each in enumerate(kinds) if issubclass(kind, each)]
        for place in places[kind]:
            found[place].append(one)
    return found


def _parts(scheduler: LRScheduler) -> Iterator[Any]:
    if isinstance(scheduler, SequentialLR | ChainedScheduler):
        yield from scheduler._schedulers


def _roots(modules: Sequence[nn.Module], known: Collection[int]) -> list[nn.Module]:
    """Modules that are no part of another one, of the model, or around it."""
    parts = {id(child) for module in modules for child in module.children()}
    return [
        module
        for module in modules
        if id(module) not in parts
        and id(module) not in known
        and not any(id(part) in known for part in module.modules())
    ]


def _probe(module: nn.Module) -> list[torch.Tensor]:
    parameters = [p for p in module.parameters() if p.numel()]
    chosen = sorted(parameters, key=lambda p: p.numel())[:1] + parameters[-1:]
    return [parameter.detach().clone() for parameter in chosen]


def _apart(tensor: Any, own: torch.Tensor) -> bool:
    """Whether this is a tensor like the model's, in memory of its own."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != own.shape or tensor.layout != torch.strided:
        return False
    return tensor.device == own.device and not own.is_meta and tensor.data_ptr() != own.data_ptr()


def _near(copy: torch.Tensor, own: torch.Tensor) -> bool:
    if copy.shape != own.shape or copy.device != own.device:
        return False
    both = copy.detach().double().flatten(), own.detach().double().flatten()
    return bool(torch.nn.functional.cosine_similarity(*both, dim=0) > 0.5)


def _train_mode(name: str, layer: str, step: int) -> Finding:
    return Finding(
        "teacher",
        f"{name} is in train mode: dropout is on, and BatchNorm uses and changes batch statistics",
        where=layer,
        since=f"step {max(1, step - 1)}",
        fix="call teacher.eval() after whatever calls .train() on a module that holds the teacher",
    )

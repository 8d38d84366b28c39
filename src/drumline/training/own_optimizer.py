"""A user's own optimizer: `optim.name=package.module:factory`, called as `factory(groups, lr=..., weight_decay=...)`.

Most optimizers create their state in their first step, and initialise it as they like. A run needs the state from the
start, in tensors that are written in place only: checkpoints are loaded into them, and a rehearsed step is undone in
them. `OwnOptimizer` therefore learns the shapes in two trial steps without side effects and keeps a tensor for each
state, filled with zeros until the optimizer creates its own. Numbers that it counts on the host are kept in tensors,
too.

Promises: a resumed run has the bits of an uninterrupted one; a step with non-finite gradients changes nothing.
Rejects state that a checkpoint cannot hold: what the trial steps change outside `optimizer.state` and the numbers of
the parameter groups, and state that appears later. The learning rate is a number, because only torch's own optimizers
accept tensors, and not all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.config.learning import Optim
from drumline.config.limits import keyword_arguments
from drumline.core.arithmetic import EagerOptimizer, flat, leave_no_trace, undone_if
from drumline.core.contents import contents
from drumline.core.errors import UserError
from drumline.core.host_copy import HostCopy
from drumline.core.named import accepts, load_named, signature_of

CALLED = "(params, lr, weight_decay)"
TRIALS = 2
"""Trial steps that show which state an optimizer has."""
BEGUN = "begun"
"""The slot that says whether a parameter has been updated. Before that, the optimizer has no state for it."""
OF_GROUP = "group."
"""Prefix of the slots for numbers of a parameter group; each of its parameters keeps them."""
Number = bool | int | float
Slots = dict[str, Any]


def own_optimizer(optim: Optim, groups: list[dict[str, Any]]) -> OwnOptimizer:
    """The user's optimizer for these parameter groups."""
    title = f"optim.name {optim.name}"
    factory = load_named(optim.name, "optim.name", CALLED)
    arguments: dict[str, Any] = {"lr": float(optim.lr), "weight_decay": optim.weight_decay}
    kept = ["params", "factor", "weight_decay"]
    if not accepts(factory, groups, **arguments) and accepts(factory, groups, lr=arguments["lr"]):
        if optim.weight_decay:
            raise UserError(f"{title}: does not take weight_decay", "set optim.weight_decay=0")
        del arguments["weight_decay"]
        kept.remove("weight_decay")
    arguments |= keyword_arguments(optim.args)
    if not accepts(factory, groups, **arguments):
        known = ", ".join(list(getattr(signature_of(factory), "parameters", {}))[1:])
        raise UserError(
            f"{title}: cannot be called with {', '.join(arguments)}; its parameters are {known}",
            f"take the parameter groups first, then {CALLED[9:-1]} and each of optim.args by name",
        )
    if all(group["factor"] == 1 for group in groups):
        kept.remove("factor")
    plain = [
        {key: value for key, value in group.items() if key in kept} for group in groups if group["params"]
    ]

    def make() -> torch.optim.Optimizer:
        try:
            made = factory([dict(group) for group in plain], **arguments)
        except Exception as error:  # a user's factory may raise anything
            raise UserError(
                f"{title}: raised {type(error).__name__}: {error}",
                f"correct the factory or optim.args; it is called as {CALLED}",
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(
                f"{title}: returned a {type(made).__name__}, not a torch.optim.Optimizer",
                "return the optimizer itself, without a scheduler or wrapper",
            )
        held = {id(each) for group in made.param_groups for each in group["params"]}
        if held != {id(each) for group in plain for each in group["params"]}:
            raise UserError(
                f"{title}: its parameter groups are not those that it was given",
                "pass on all parameters; to keep some from training, set train.freeze",
            )
        return made

    return OwnOptimizer(title, make)


class OwnOptimizer(EagerOptimizer):
    """Holds the state of the user's optimizer, `inner`, in tensors that exist from the start."""

    _step_supports_amp_scaling = True

    def __init__(self, title: str, make: Callable[[], torch.optim.Optimizer]) -> None:
        shown = _try(title, make)
        self.title, self.inner = title, make()
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self._parameters: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self._initial = {p: _copied(self.inner.state.get(p, {})) for p in self._parameters}
        self._constants: dict[Tensor, Slots] = {}
        self._numbers: list[tuple[int, Tensor, str, type[Number]]] = []
        """The numbers on the host: index of the parameter, parameter, name, and type."""
        self._tracked = shown.group_numbers
        self._of_groups: list[dict[str, tuple[Number, Tensor]]] = []
        """For each group and number: its initial value, and the views that hold it."""
        self._attached = [False] * len(self._parameters)
        """Whether each parameter's state in `inner` uses our tensors."""
        counted = sum(isinstance(value, Number) for slots in shown.slots for value in slots.values())
        grouped = sum(
            len(names) * len(group["params"])
            for group, names in zip(self.param_groups, self._tracked, strict=True)
        )
        # Views of one vector, so that one operation reads them all.
        self._host = torch.zeros(len(self._parameters) + counted + grouped, dtype=torch.float64)
        self._begun = self._host[: len(self._parameters)]
        self._make_slots(shown)
        written = [*self._parameters, *(each for slots in self.state.values() for each in slots.values())]
        self._on_devices = by_kind([each for each in written if each.device.type != "cpu"])
        """The tensors that a step writes on GPUs, by device and type: everything but a few numbers on the host."""
        self._on_host = by_kind([each for each in written if each.device.type == "cpu"])
        self._late: tuple[HostCopy, list[Tensor]] | None = None
        """Whether the last step was skipped, and what was on the host before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.undo_skipped()
        # `GradScaler` sets both for the duration of the call; the guard sets the second permanently.
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        moving = [(n, p) for n, p in enumerate(self._parameters) if p.grad is not None]
        undone: list[list[Tensor]] = []
        if found_inf is not None:
            waits_anyway = not self._on_devices or not all(self._attached[n] for n, _ in moving)
            if waits_anyway:
                if found_inf > 0:
                    return
            else:
                undone = self._on_devices
                self._late = HostCopy(found_inf), [torch.cat(list(map(flat, kind))) for kind in self._on_host]
        if scale is not None:
            for _, p in moving:
                assert p.grad is not None
                p.grad.div_(scale.to(p.grad.device))
        self._bring_in()
        constant = self._group_constants()
        with ExitStack() as undoing:
            for tensors in undone:
                assert found_inf is not None
                undoing.enter_context(undone_if(found_inf, tensors))
            self.inner.step()
            if self._group_constants() != constant:
                raise self._hidden("numbers of its parameter groups that did not change in the trial steps,")
            self._take_out([n for n, _ in moving])

    @torch.no_grad()
    def undo_skipped(self) -> None:
        """Undoes on the host the last step, if it was skipped on a GPU: the host learns that only now, a step later.
        Call it before the state is read. May wait for the gradients of that step."""
        if self._late is None:
            return
        (skipped, before), self._late = self._late, None
        if skipped.values() > 0:
            for kind, values in zip(self._on_host, before, strict=True):
                pieces = values.split([each.numel() for each in kind])
                torch._foreach_copy_(list(map(flat, kind)), list(pieces))

    def _make_slots(self, shown: _Shown) -> None:
        free = len(self._parameters)
        for place, (p, slots) in enumerate(zip(self._parameters, shown.slots, strict=True)):
            own: Slots = {BEGUN: self._begun[place]}
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    own[slot] = torch.zeros_like(value)
                elif isinstance(value, Number):
                    own[slot] = self._host[free]
                    self._numbers.append((place, p, slot, type(value)))
                    free += 1
            self._constants[p] = {s: value for s, value in slots.items() if s not in own}
            self.state[p] = own
        for group, names in zip(self.param_groups, self._tracked, strict=True):
            self._of_groups.append({})
            for name in names:
                here = self._host[free : free + len(group["params"])]
                self._of_groups[-1][name] = group[name], here
                for p, view in zip(group["params"], here, strict=True):
                    self.state[p][f"{OF_GROUP}{name}"] = view
                free += len(here)

    def _bring_in(self) -> None:
        """Updates the inner state from our tensors, which a checkpoint or an undone rehearsal may have written."""
        begun = self._begun.bool().tolist()
        for place, p in enumerate(self._parameters):
            if begun[place] == self._attached[place]:
                continue
            ours = {s: t for s, t in self.state[p].items() if s != BEGUN and not s.startswith(OF_GROUP)}
            if begun[place]:
                self.inner.state[p] = ours | self._constants[p]
            elif self._initial[p]:
                self.inner.state[p] = _copied(self._initial[p])
            else:
                self.inner.state.pop(p, None)
            self._attached[place] = begun[place]
        for place, p, slot, kind in self._numbers:
            if begun[place]:
                self.inner.state[p][slot] = kind(self.state[p][slot])
        first = 0
        for group, names, tracked in zip(self.param_groups, self._of_groups, self._tracked, strict=True):
            of_group = begun[first : first + len(group["params"])]
            first += len(of_group)
            for name, (initial, views) in names.items():
                group[name] = tracked[name](views[of_group.index(True)]) if any(of_group) else initial

    def _take_out(self, moved: list[int]) -> None:
        """Writes the inner state after a step into our tensors."""
        for place in moved:
            p = self._parameters[place]
            ours, theirs = self.state[p], self.inner.state.get(p, {})
            for slot, value in theirs.items():
                if isinstance(value, Number) and slot in ours:
                    ours[slot].fill_(value)
                elif isinstance(value, Tensor) and slot in ours:
                    if value is not ours[slot]:
                        if (value.shape, value.dtype) != (ours[slot].shape, ours[slot].dtype):
                            raise self._hidden(f"{slot} with a changing shape or type,")
                        theirs[slot] = ours[slot].copy_(value)
                elif slot not in self._constants[p]:
                    raise self._hidden(f"{slot}, which did not exist in the trial steps and")
            if not self._attached[place]:
                self._begun[place] = 1
                self._attached[place] = True
        for group, names in zip(self.param_groups, self._of_groups, strict=True):
            for name, (_, views) in names.items():
                views.fill_(group[name])

    def _group_constants(self) -> list[Slots]:
        return [
            {k: v for k, v in group.items() if isinstance(v, Number | tuple) and k not in names}
            for group, names in zip(self.param_groups, self._tracked, strict=True)
        ]

    def _hidden(self, what: str) -> UserError:
        return _unsaved(self.title, what)


class _Shown(NamedTuple):
    """The results of the trial steps: the state of each parameter, and the numbers of the groups that change."""

    slots: list[Slots]
    group_numbers: list[dict[str, type[Number]]]


def _try(title: str, make: Callable[[], torch.optim.Optimizer]) -> _Shown:
    """Lets an optimizer take trial steps, and restores the parameters."""
    trial = make()
    parameters: list[Tensor] = [p for group in trial.param_groups for p in group["params"]]
    known = [trial, trial.state, trial.param_groups, *trial.param_groups, *parameters]

    def held() -> list[dict[str, object]]:
        """What is in the groups, and in the attributes besides groups and state."""
        tables: list[Mapping[str, Any]] = [*trial.param_groups, vars(trial)]
        return [{name: contents(value, known) for name, value in table.items()} for table in tables]

    *groups, attributes = held()
    devices = dict.fromkeys(p.device for p in parameters)
    try:
        with leave_no_trace(tensors=parameters, devices=devices):
            for _ in range(TRIALS):
                for p in parameters:
                    p.grad = torch.full_like(p, 1e-3)
                trial.step()
    except Exception as error:  # a user's optimizer may raise anything
        raise UserError(
            f"{title}: its step raised {type(error).__name__}: {error}",
            "it is called as optimizer.step(), with a dense gradient for each parameter",
        ) from error
    finally:
        for p in parameters:
            p.grad = None
    if any(isinstance(each, torch.optim.Optimizer) for each in vars(trial).values()):
        raise _unsaved(title, "the state of a second optimizer,")
    *new_groups, new_attributes = held()
    if changed := [name for name, value in new_attributes.items() if attributes.get(name) != value]:
        raise _unsaved(title, f"{', '.join(changed)} in its attributes,")
    if set(trial.state) - set(parameters):
        raise _unsaved(title, "state that belongs to no parameter,")
    slots = [dict(trial.state.get(p, {})) for p in parameters]
    for each in slots:
        for slot, value in each.items():
            if not isinstance(value, Tensor | Number | str | None):
                raise _unsaved(title, f"{slot}, a {type(value).__name__},")
            if "/" in slot or slot == BEGUN:
                raise UserError(f"{title}: a state cannot have the name {slot!r}", "rename it")
    numbers: list[dict[str, type[Number]]] = []
    for old, new, group in zip(groups, new_groups, trial.param_groups, strict=True):
        moved = [name for name, value in new.items() if old.get(name) != value]
        odd = [
            name for name in moved if name == "lr" or name not in old or not isinstance(group[name], Number)
        ]
        odd += [name for name, value in group.items() if isinstance(value, Tensor) and name != "params"]
        if odd:
            raise _unsaved(title, f"{', '.join(odd)} in its parameter groups,")
        numbers.append({name: type(group[name]) for name in moved})
    return _Shown(slots, numbers)


def _unsaved(title: str, what: str) -> UserError:
    return UserError(
        f"{title}: keeps {what} which a checkpoint cannot hold, so a resumed run would differ",
        "keep tensors and numbers in optimizer.state[parameter], and create them in the first step",
    )


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and type in a list."""
    found: dict[Any, list[Tensor]] = {}
    for each in tensors:
        found.setdefault((each.device, each.dtype), []).append(each)
    return list(found.values())


def _copied(slots: Slots) -> Slots:
    return {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}

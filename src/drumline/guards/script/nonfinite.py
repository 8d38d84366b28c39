"""Non-finite gradients of a user's loop: found before the step or, on a GPU, one step later, so that nothing waits.
Then explained, and the batch saved.

Promises for the delayed check: one fused pass over the gradients and one over the parameters per step, and a copy
that is read when the next step has been queued. A finding comes one step late, with the parameters as they were
before the bad step: they are kept from each step to the next, which takes as much memory as the parameters.

Promises for the search: parameters, buffers, modes and generators are as before. Each rank searches its own batch
without a collective (SyncBatchNorm runs as BatchNorm). Saved files are safetensors and JSON, so loading them runs no
code.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from drumline.core.arithmetic import leave_no_trace
from drumline.core.files import write_file, write_text
from drumline.core.host_copy import HostCopy
from drumline.guards.checks.nonfinite import (
    Origin,
    all_finite,
    dense_gradients,
    earliest,
    first_gradient,
    first_parameter,
    is_finite,
    largest,
    layer_name,
    mark_nonfinite,
    tensors_in,
    watched_outputs,
)
from drumline.guards.finding import Finding, rank_names
from drumline.guards.script.forwards import ModelCall, inner_of, outputs_of
from drumline.guards.script.peers import Peers

IMMEDIATE_STEPS = 3
"""The first steps are checked before the optimizer's update on a GPU too: most mistakes show there."""
_MOST_REPLACED = 16
_GATHER_SECONDS = 10.0
_FIX = {
    "parameter": "check what wrote it: a loaded file, an update outside the optimizer, an earlier step",
    "batch": "check the saved batch and the code that makes it: division by a zero deviation, broken files",
    "output": "replay the saved batch through this layer; lower the learning rate, keep the layer in fp32, or fix "
    "its inputs",
    "loss": "check the loss: log or division of 0, a square root at 0, a target out of range",
    "gradient": "check the backward of this layer (sqrt, norm, division at 0), or fp16 overflow without a GradScaler",
}


@dataclass(frozen=True)
class BadStep:
    """A step with gradients that are not finite."""

    step: int
    calls: list[ModelCall]
    ids: list[int]
    gradients_gone: bool = False
    """The gradients have been overwritten since."""


@dataclass(frozen=True)
class _Pending:
    step: int
    calls: list[ModelCall]
    ids: list[int]
    bad: HostCopy
    """Not 0 if a gradient was not finite."""


class GradientCheck:
    """Checks the gradients of all optimizers of a model."""

    def __init__(self) -> None:
        self._delayed: dict[int, DelayedCheck] = {}

    def check(
        self, number: int, held: list[torch.Tensor], step: int, calls: Sequence[ModelCall], ids: Sequence[int]
    ) -> Iterator[BadStep]:
        """Before a step of optimizer `number`, which holds these parameters: the bad step before it, whose update is
        undone while the caller handles it, or this one."""
        yield from self._last(number)
        if held and held[0].is_cuda and step > IMMEDIATE_STEPS:
            if number not in self._delayed:
                self._delayed[number] = DelayedCheck(held)
            self._delayed[number].check(step, calls, ids)
        elif not all_finite(dense_gradients(held)):
            yield BadStep(step, list(calls), list(ids))

    def remaining(self) -> Iterator[BadStep]:
        """After the last step."""
        for number in self._delayed:
            yield from self._last(number)

    def discard(self) -> None:
        """Drops the results that have not been read."""
        self._delayed.clear()

    def _last(self, number: int) -> Iterator[BadStep]:
        bad = self._delayed[number].result() if number in self._delayed else None
        if bad is not None:
            after = self._delayed[number].undo()
            yield bad
            # The caller did not stop: a warning changes nothing.
            self._delayed[number].write(after)


class DelayedCheck:
    """Checks the gradients of one optimizer without waiting for them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._held = [parameter for parameter in parameters if parameter.numel()]
        self._kept = [parameter.detach().clone() for parameter in self._held]
        kinds = {(parameter.device, parameter.dtype) for parameter in self._held}
        fast = len(kinds) == 1 and self._held[0].is_floating_point()
        self._one = torch.ones((), device=self._held[0].device) if fast else None
        self._pending: _Pending | None = None

    @torch.no_grad()
    def check(self, step: int, calls: Sequence[ModelCall], ids: Sequence[int]) -> None:
        """Just before the optimizer's update. Never waits."""
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        if gradients:
            self._pending = _Pending(step, list(calls), list(ids), HostCopy(self._nonfinite(gradients)))
        torch._foreach_copy_(self._kept, self._held)

    def _nonfinite(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Not 0 if a value is not finite."""
        if self._one is not None and not any(g.is_sparse or g.requires_grad for g in gradients):
            found = torch.zeros((), device=self._one.device)
            mark_nonfinite(gradients, found, self._one)
            return found
        return (~torch.isfinite(largest(dense_gradients(self._held)))).any()

    def result(self) -> BadStep | None:
        """The step before, if its gradients were not finite. Waits for that step if the device has not finished
        it."""
        pending, self._pending = self._pending, None
        if pending is None or not bool(pending.bad.values()):
            return None
        return BadStep(pending.step, pending.calls, pending.ids, gradients_gone=True)

    @torch.no_grad()
    def undo(self) -> list[torch.Tensor]:
        """Restores the parameters from before the step that `result` returned, and returns those after it."""
        after = [parameter.detach().clone() for parameter in self._held]
        self.write(self._kept)
        return after

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        """Writes the parameters."""
        torch._foreach_copy_(self._held, values)


class HiddenNaN:
    """NaN in the model's output, in the gradient that reaches it, or in a tensor that the script replaces, in a step
    whose gradients are all finite."""

    def __init__(self) -> None:
        self._pending: tuple[int, HostCopy] | None = None
        self._values: list[torch.Tensor] = []
        """The largest values of the step in progress."""
        self._replaced: list[torch.Tensor] = []
        """The largest values of tensors that were replaced since the last backward."""
        self._versions = 0
        self._changed = 0

    def backward_ended(self, step: int, held: Iterable[torch.Tensor]) -> None:
        """Gradients are complete. They are checked here too if the script changes them before it steps."""
        self._values += self._replaced
        self._replaced.clear()
        if step > IMMEDIATE_STEPS and not self._changed:
            return
        gradients = dense_gradients(held)
        if gradients:
            self._values.append(largest(gradients).sum())
        self._versions = _versions(gradients)

    def replaced(self, tensor: torch.Tensor) -> None:
        """The script replaces NaN in a tensor that has a gradient."""
        self._replaced.append(torch.linalg.vector_norm(tensor.detach().float(), math.inf))
        del self._replaced[:-_MOST_REPLACED]

    def restart(self) -> None:
        """The gradients were cleared after the last backward, and its NaN with them: nothing is hidden."""
        self._values.clear()

    def check(self, step: int, calls: Sequence[ModelCall], held: Iterable[torch.Tensor]) -> Finding | None:
        """A NaN in this step or, on a GPU, in the step before, if its result has arrived. Never waits."""
        values, self._values, self._replaced = self._values + self._replaced, [], []
        if step <= IMMEDIATE_STEPS:
            self._changed += _versions(dense_gradients(held)) != self._versions
        # A call that received no gradient is not part of the step.
        used = [call for call in calls if call.largest_gradients]
        values = [one for call in used for one in (*call.largest_outputs, *call.largest_gradients)] + values
        values = [value.float() for value in values if value.device == values[0].device]
        if not values:
            return None
        copy = HostCopy(torch.stack(values))
        if not values[0].is_cuda:
            return _hidden(step) if bool(torch.isnan(copy.values()).any()) else None
        pending, self._pending = self._pending, (step, copy)
        if pending is None or not pending[1].done:
            return None
        return _hidden(pending[0]) if bool(torch.isnan(pending[1].values()).any()) else None


def _versions(gradients: Iterable[torch.Tensor]) -> int:
    """A number that changes if a gradient is written or replaced."""
    return sum(gradient._version + id(gradient) for gradient in gradients)


def _hidden(step: int) -> Finding:
    return Finding(
        "hidden-nan",
        "NaN in the model's output or its gradient was replaced before the step",
        f"step {step}",
        f"step {step}",
        "find where the NaN arises (torch.autograd.set_detect_anomaly) and remove its cause",
    )


def investigate(
    bad: BadStep, model: nn.Module, peers: Peers, poll: Callable[[], None], folder: Path
) -> Finding:
    """Combines what all ranks find out about a bad step, and saves this rank's batch in `folder`."""
    key = f"non-finite/{bad.step}"
    origin = locate(bad.calls, dict(model.named_parameters()), bad.gradients_gone)
    messages = peers.gather(key, asdict(origin), poll, seconds=_GATHER_SECONDS)
    origins = [None if message is None else Origin(**message) for message in messages]
    mine = finding_of(peers.ranks, origins, bad.step)
    finding = Finding(**peers.first(f"{key}/finding", vars(mine)))
    path = save_batch(folder, bad.step, peers.rank, bad.calls, finding, bad.ids)
    return replace(finding, fix=f"{finding.fix}; each rank saved its batch, this one to {path}")


def locate(
    calls: Sequence[ModelCall], parameters: Mapping[str, torch.Tensor], gradients_gone: bool = False
) -> Origin:
    """Where a value of this rank was first not finite. `gradients_gone`: the gradients have been overwritten, so they
    are computed again."""
    name = first_parameter(parameters)
    if name is not None:
        return Origin("parameter", name)
    for call in calls:
        for index, tensor in enumerate(tensors_in((call.args, call.kwargs))):
            if not is_finite(tensor):
                return Origin("batch", f"input {index} of {type(call.module).__name__}")
    for call in calls:
        layer = _first_output(call)
        if layer is not None:
            return Origin("output", layer)
    for call in calls:
        if not all(math.isfinite(float(value)) for value in call.largest_gradients):
            return Origin("loss", call.name)
    if gradients_gone:
        return Origin("gradient", _recomputed_gradient(calls, parameters) or "")
    return Origin("gradient", first_gradient({name: p.grad for name, p in parameters.items()}) or "")


def finding_of(ranks: Sequence[int], origins: Sequence[Origin | None], step: int) -> Finding:
    """One finding for all ranks: the earliest origin, on the first rank that saw it."""
    origin = origins[earliest(origins)]
    assert origin is not None
    on = [rank for rank, one in zip(ranks, origins, strict=True) if one and one.kind == origin.kind]
    where = rank_names(on)
    if origin.kind == "gradient" and len(ranks) > 1:
        where = "gradients after the exchange between ranks: the rank of origin is unknown"
    what = f"gradients of step {step} are not finite: {origin}"
    return Finding("non-finite", what, where, f"step {step}", _FIX[origin.kind], certain=True)


def save_batch(
    folder: Path, step: int, rank: int, calls: Sequence[ModelCall], finding: Finding, ids: Sequence[int]
) -> Path:
    """Saves the step's inputs (every tensor of every call in order: `call0.input0`, ...) and the finding."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"call{number}.input{index}": tensor.detach().to("cpu").contiguous().clone()
        for number, call in enumerate(calls)
        for index, tensor in enumerate(tensors_in((call.args, call.kwargs)))
        if tensor.layout == torch.strided
    }
    path = folder / f"step-{step}-rank-{rank}.safetensors"
    write_file(path, lambda temporary: save_file(tensors, temporary))
    details = {
        "step": step,
        "rank": rank,
        "finding": str(finding),
        "modules": [type(inner_of(call.module)).__name__ for call in calls],
        "ids": list(ids),
        "torch": torch.__version__,
    }
    write_text(path.with_suffix(".json"), json.dumps(details, indent=1) + "\n")
    return path


def _first_output(call: ModelCall) -> str | None:
    """Repeats the call and names the first module whose output is not finite."""
    model = inner_of(call.module)
    found: list[str] = []

    def record(name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        found.append(layer_name(".".join(part for part in (call.name, name) if part), module))

    with watched_outputs(model, record), _unchanged(model), _as_called(call), torch.no_grad():
        model(*call.args, **call.kwargs)
    return found[0] if found else None


def _recomputed_gradient(calls: Sequence[ModelCall], parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Repeats forward and backward of each call, the last one first, and names the first parameter, in the order of
    backward, whose gradient is not finite."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    for call in reversed(calls):
        model = inner_of(call.module)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
        with _unchanged(model), _as_called(call), torch.enable_grad():
            outputs = outputs_of(model(*args, **kwargs))
            if not call.gradients:
                continue
            gradients = torch.autograd.grad(
                [outputs[index] for index in call.gradients],
                list(trained.values()),
                list(call.gradients.values()),
                allow_unused=True,
            )
        name = first_gradient(dict(zip(trained, gradients, strict=True)))
        if name is not None:
            return name
    return None


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers and generators. SyncBatchNorm runs without the other ranks."""
    alone = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in alone:
        module.forward = partial(_BatchNorm.forward, module)  # type: ignore[method-assign]
    try:
        with leave_no_trace(model, devices=[each.device for each in model.parameters()]):
            yield
    finally:
        for module in alone:
            del module.forward


@contextlib.contextmanager
def _as_called(call: ModelCall) -> Iterator[None]:
    """The autocast of the call, without compiled code, which does not run hooks inside."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in call.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield

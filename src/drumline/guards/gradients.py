"""Which parameters are trained, and whether their gradients are there and finite, just before a step.

Promises: `all_finite` reads every gradient once on its device and waits for one number; large finite gradients are
never taken for infinite ones. The rest is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from drumline.guards.finding import Finding


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether every value is finite. One fused norm per device and type; its square can overflow where the values do
    not, so a bad norm is looked at again value by value."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for tensors in groups.values():
        # In fp32 for half types, whose own norm overflows at once.
        norms = torch._foreach_norm(tensors, 2, torch.float32 if tensors[0].element_size() < 4 else None)
        if not math.isfinite(torch.stack(norms).sum().item()):
            return all(bool(torch.isfinite(tensor).all()) for tensor in gradients)
    return True


def dense_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The values of the gradients that are there."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.numel():
            found.append(gradient._values() if gradient.is_sparse else gradient)
    return found


def first_bad(names: Mapping[str, torch.Tensor]) -> str | None:
    """The parameter, in the order of backward, whose gradient is the first that is not finite."""
    for name, parameter in reversed(list(names.items())):
        gradients = dense_gradients([parameter])
        if gradients and not bool(torch.isfinite(gradients[0]).all()):
            return name
    return None


def outside(
    model: Mapping[str, nn.Parameter], held: Iterable[torch.Tensor], but: Iterable[torch.Tensor], step: int
) -> Finding | None:
    """Trainable parameters that no optimizer holds; those of the teacher (`but`) are not meant."""
    known = {id(tensor) for tensor in (*held, *but)}
    names = [name for name, p in model.items() if p.requires_grad and id(p) not in known]
    if not names:
        return None
    return Finding(
        "parameters",
        f"{_some(names)} require{'s' if len(names) == 1 else ''} gradients but no optimizer holds "
        f"{'it' if len(names) == 1 else 'them'}: never trained",
        where=f"the model's {_list(names)}",
        since=f"step {step}",
        fix="give it to the optimizer, or freeze it by requires_grad_(False); pass all optimizers, if there are "
        "several: drumline.guard(model, [first, second])",
    )


def without_gradient(names: Sequence[str], steps: int) -> Finding:
    """Trainable parameters in the optimizer that backward never reached."""
    return Finding(
        "parameters",
        f"{_some(names)} had no gradient in {'the first step' if steps == 1 else f'any of {steps} steps'}: the loss "
        f"does not depend on {'it' if len(names) == 1 else 'them'}",
        where=f"the model's {_list(names)}",
        since="step 1",
        fix="use it in forward, or freeze it by requires_grad_(False); look for a detach() or no_grad() on the way",
    )


def unconnected(steps: int) -> Finding:
    """No parameter has ever had a gradient, although backward was called."""
    return Finding(
        "parameters",
        f"no parameter had a gradient in the first {steps} steps: the loss is not connected to the model",
        where="all parameters of the model",
        since="step 1",
        fix="call backward() on a loss computed from the model's output; look for .item(), torch.tensor(...), "
        "detach() or no_grad() between the output and the loss",
    )


def never_stepped(number: int, kind: str, backwards: int) -> Finding:
    """Backward reaches the parameters of an optimizer that is never stepped."""
    return Finding(
        "parameters",
        f"optimizer {number} ({kind}) was never stepped: backward reached its parameters, but they are not trained",
        where=f"at least {backwards} backward passes",
        since="step 1",
        fix="call its step(), or do not pass it to drumline.guard",
    )


def strangers(group: int, places: Sequence[int], shapes: Sequence[tuple[int, ...]], step: int) -> Finding:
    """Parameters in the optimizer that are not in the model and have no gradient."""
    return Finding(
        "parameters",
        f"the optimizer holds tensors that are not in the model and have no gradient ({len(places)} of them)",
        where=f"param_groups[{group}]['params'][{places[0]}], shape {shapes[0]}",
        since=f"step {step}",
        fix="make the optimizer after the last change of the model (a replaced head, a copy, a reload): "
        "it steps tensors that nobody uses",
    )


def _some(names: Sequence[str]) -> str:
    return "a trainable parameter" if len(names) == 1 else f"{len(names)} trainable parameters"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more

"""Parameters that are not trained: without a gradient, outside every optimizer, or in an optimizer and not in the
model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from drumline.guards.finding import Finding, listed


def not_in_optimizer(
    named: Mapping[str, torch.Tensor], held: Iterable[torch.Tensor], since: str, fix: str = ""
) -> Finding | None:
    """Trainable parameters of a model that no optimizer holds."""
    known = {id(tensor) for tensor in held}
    names = [
        name
        for name, p in named.items()
        if p.requires_grad and id(p) not in known and not p.is_meta  # meta: another process holds it
    ]
    if not names:
        return None
    return Finding(
        "parameters",
        f"{_some(names)} require{'s' if len(names) == 1 else ''} gradients but no optimizer holds "
        f"{'it' if len(names) == 1 else 'them'}: never trained",
        where=f"the model's {_quoted(names)}",
        since=since,
        fix=fix
        or "give it to the optimizer, or freeze it by requires_grad_(False); pass all optimizers if there are "
        "several: drumline.guard(model, [first, second])",
    )


def not_in_model(guard: str, tensors: Mapping[str, torch.Tensor], since: str) -> Finding:
    """Tensors in the optimizer, by their position in it, that are not in the model."""
    first = next(iter(tensors))
    return Finding(
        guard,
        f"the optimizer holds tensors that are not in the model ({len(tensors)} of them)",
        where=f"{first}, shape {tuple(tensors[first].shape)}",
        since=since,
        fix="make the optimizer after the last change of the model (a replaced head, a copy, a reload): it updates "
        "tensors that nothing uses",
    )


def without_gradient(names: Sequence[str], steps: int) -> Finding:
    """Trainable parameters in the optimizer that backward never reached."""
    return Finding(
        "parameters",
        f"{_some(names)} had no gradient in {'the first step' if steps == 1 else f'any of {steps} steps'}: the loss "
        f"does not depend on {'it' if len(names) == 1 else 'them'}",
        where=f"the model's {_quoted(names)}",
        since="step 1",
        fix="use it in forward, or freeze it by requires_grad_(False); check for a detach() or no_grad() on the way",
    )


def unconnected(steps: int) -> Finding:
    """No parameter has ever had a gradient, although backward was called."""
    return Finding(
        "parameters",
        f"no parameter had a gradient in the first {steps} steps: the loss is not connected to the model",
        where="all parameters of the model",
        since="step 1",
        fix="call backward() on a loss computed from the model's output; check for .item(), torch.tensor(...), "
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


def _some(names: Sequence[str]) -> str:
    return "a trainable parameter" if len(names) == 1 else f"{len(names)} trainable parameters"


def _quoted(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names])

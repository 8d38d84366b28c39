"""Gradients that differ between ranks just before a step, put into words: why they were not exchanged (pure).

The difference itself is what accuses: a script that calls parts of its model directly and still exchanges gradients
is right. What was called only explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.text import counted
from drumline.guards.finding import Finding
from drumline.guards.forwards import Direct, Forwards
from drumline.guards.place import line_to_change, user_places

_THROUGH = (
    "train through the wrapper itself, model(x): DDP exchanges gradients only for its own forward. Several parts "
    "need one module with one forward that calls them; .module is for saving"
)


def evidence(forwards: Forwards) -> dict[str, Any]:
    """What this rank saw, as JSON."""
    direct = forwards.direct
    called, line = _called(direct), ""
    if forwards.wrapped_calls == 0:
        places = (*(direct.places if direct else ()), *user_places())
        first = direct.places[0] if direct and direct.places else None
        found = line_to_change(first, (place.file for place in places))
        # Without a wrapper in sight, only a line that takes one off explains anything.
        if found and (forwards.wrapper is not None or ".module" in found.text):
            line = str(found)
    return {
        "wrapped": forwards.wrapper is not None,
        "through": forwards.wrapped_calls,
        "synced": forwards.synced,
        "called": called,
        "line": line,
        "around": forwards.around,
        "around_first": _called(forwards.around_first),
    }


def stepped_around(seen: Sequence[Mapping[str, Any]], tensor: str, since: str) -> Finding | None:
    """Weights that differ between ranks after a rank stepped with the model called around its wrapper."""
    one = max(seen, key=lambda each: int(each["around"]))
    if not one["around"]:
        return None
    steps = counted(one["around"], "step")
    return Finding(
        "bypass",
        f"ranks have drifted apart: {steps} called the model around its DDP wrapper, so gradients were not exchanged",
        f"{one['around_first']}; parameter '{tensor}' differs",
        since,
        _THROUGH,
    )


def _called(direct: Direct | None) -> str:
    if direct is None:
        return ""
    name = f"{direct.kind} '{direct.name}'" if direct.name else direct.kind
    return f"{direct.places[0]} calls {name} directly" if direct.places else f"{name} is called directly"


def local_gradients(
    tensor: str, accused: Sequence[int], seen: Sequence[Mapping[str, Any]], step: int, foreign: bool
) -> Finding:
    """The finding, from the tensor that differs, the ranks, and what all ranks saw."""
    differs = f"the gradient of '{tensor}' differs on {rank_names(accused)}"
    first = next((one for one in seen if one["through"] == 0), seen[0])
    called = f"{first['called']}; " if first["called"] else ""
    if foreign:
        what = "the optimizer trains a parameter that is not in the DDP model: each rank trains its own"
        fix = (
            "put it into the module that DDP wraps: model, projection and loss in one module with one forward"
        )
        where = differs
    elif not first["wrapped"] and first["line"]:
        what = (
            "the model was taken out of its DDP wrapper: gradients are not exchanged, each rank trains alone"
        )
        where = called + differs
        fix = f"change {first['line']}\n       {_THROUGH}"
    elif not first["wrapped"]:
        what = "the model is not wrapped in DistributedDataParallel: each rank trains alone on its part of the data"
        fix = "wrap it after moving it to its device, model = DistributedDataParallel(model), and call the wrapper"
        where = called + differs
    elif first["through"] == 0:
        what = (
            "the model is called around its DDP wrapper: gradients are not exchanged, each rank trains alone"
        )
        where = called + differs
        fix = (f"change {first['line']}\n       " if first["line"] else "") + _THROUGH
    elif not first["synced"]:
        what = "the last backward before the step ran under no_sync(): gradients are not exchanged"
        where = differs
        fix = "leave no_sync() for the last micro-batch, forward and backward, before optimizer.step()"
    else:
        what = "gradients differ between ranks although DDP exchanged them: something changed them afterwards"
        where = differs
        fix = "look at what touches .grad between backward and step (clipping by a rank's own norm, another backward)"
    return Finding("bypass", what, where, f"step {step}", fix)


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

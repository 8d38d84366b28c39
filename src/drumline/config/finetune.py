"""`finetune=WEIGHTS`: a command-line argument that sets the fields of a typical fine-tuning run.

Promises: it becomes plain fields, so the saved recipe repeats the run without it. Fields that the recipe file or the
command line sets keep their values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from drumline.core.errors import UserError

FINETUNE: Mapping[str, Any] = MappingProxyType({"optim.head_lr": 10.0})
"""The fields that `finetune=WEIGHTS` sets besides `model.weights`, unless the file or the command line does."""


def without_finetune(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without `finetune=WEIGHTS`, and the weights."""
    left, weights, waiting = list[str](), None, deque(argv)
    while waiting:
        text = waiting.popleft()
        name, equals, value = text.partition("=")
        if name not in ("finetune", "--finetune") or not (equals or name.startswith("-")):
            left.append(text)
            continue
        if not equals and waiting:
            value = waiting.popleft()
        if not value:
            raise UserError(
                f"{text}: names no weights",
                "give a run folder, a weights file, or finetune=torchvision:resnet50",
            )
        weights = value
    return left, weights

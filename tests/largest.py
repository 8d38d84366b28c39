"""The size of the largest tensor that some code makes, as a measure of the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Largest(TorchFunctionMode):
    """A context in which `size` becomes the number of elements of the largest result of any torch function."""

    size = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return result

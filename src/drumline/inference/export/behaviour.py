"""Finds what an exported file cannot reproduce in a model's forward pass, each finding with its line of source.

Monitors a real pass in eval mode for random numbers of torch and Python, layers in train mode, batch statistics, and
input data that is converted to Python values, which a trace turns into constants. A branch on a shape or on a Python
value is fine. Promises: leaves the model unchanged.
"""

from __future__ import annotations

import gc
import linecache
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumline.core.arithmetic import leave_no_trace

Kind = Literal[
    "train-mode",
    "batch-statistics",
    "torch-random",
    "python-random",
    "data-value",
    "tensor-value",
    "unwatched",
]


@dataclass(frozen=True)
class Finding:
    """Something that an exported file cannot reproduce. `where` is `file:line`, or empty."""

    kind: Kind
    what: str
    where: str = ""
    code: str = ""
    """The line of source."""

    def __str__(self) -> str:
        place = f"{self.where}: `{self.code}` " if self.code else f"{self.where}: " if self.where else ""
        return f"{place}{self.what}"


FIXES: dict[Kind, str] = {
    "train-mode": "do not call train() in forward; eval mode must reach every layer",
    "batch-statistics": "normalise with the running statistics in eval mode: do not call train() in forward, and "
    "keep track_running_stats",
    "torch-random": "draw random numbers only in training, such as F.dropout(x, training=self.training)",
    "python-random": "draw random numbers and read the clock only if self.training",
    "data-value": "compute with tensors, such as torch.where(condition, a, b) or torch.cond; with --format "
    "torchscript, --how script keeps the branch",
    "unwatched": "",
    "tensor-value": "keep the value as a Python number on the module, not as a tensor",
}
"""The fix for each kind."""


def watch_forward(model: nn.Module, inputs: Tensor) -> list[Finding]:
    """The findings of a forward pass of `inputs`, each once, in the order of occurrence."""
    found: dict[Finding, None] = {}
    layers = {layer: name for name, layer in model.named_modules()}

    def check_mode(layer: nn.Module, _: Any) -> None:
        if layer.training and layer in layers:
            name = layers[layer] or "the model"
            found.setdefault(Finding("train-mode", f"{name} ({type(layer).__name__}) runs in train mode"))

    # torch.cond compiles itself, which fails under a dispatch mode. Without the compiler it runs eagerly.
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    hooks = [layer.register_forward_pre_hook(check_mode) for layer in layers]
    try:
        with leave_no_trace(model), torch.no_grad(), stance:
            given = inputs.clone()
            with _Ops(given, found) as ops, _Calls(ops):
                model(given)
            # A second pass: in the first one, libraries import modules, and some imports draw random names.
            with _python_random(found):
                model(inputs.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return list(found)


class _Ops(TorchDispatchMode):
    """Tracks which tensors depend on the input, from operator to operator."""

    supports_higher_order_operators = True

    def __init__(self, source: Tensor, found: dict[Finding, None]) -> None:
        super().__init__()
        self.found = found
        self.kept: list[Tensor] = []  # keeps storages alive, so that no address is reused
        self.tainted = set[int]()
        self.taint(source)

    def taint(self, tensor: Tensor) -> None:
        self.kept.append(tensor)
        self.tainted.add(tensor.untyped_storage()._cdata)

    def depends(self, values: Any) -> bool:
        """Whether any of the tensors depends on the input."""
        return any(each.untyped_storage()._cdata in self.tainted for each in _tensors(values))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (args, kwargs or {})
        depends, name = self.depends(values), getattr(op, "__name__", str(op)).partition(".")[0]
        if name == "_local_scalar_dense":
            self.value_taken(args[0])
        elif torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) and _draws(name, args):
            self.note("torch-random", "draws random numbers in eval mode")
        elif "batch_norm" in name and _batch_statistics(op, args):
            self.note("batch-statistics", "normalises with the statistics of the batch in eval mode")
        result = op(*args, **(kwargs or {}))
        if depends:
            written = _tensors(values) if getattr(getattr(op, "_schema", None), "is_mutable", False) else []
            for each in (*_tensors(result), *written):
                self.taint(each)
        return result

    def value_taken(self, tensor: Tensor) -> None:
        if self.depends(tensor):
            self.note("data-value", "converts input data to a Python value")
        else:
            self.note("tensor-value", "converts a tensor to a Python value")

    def note(self, kind: Kind, what: str) -> None:
        where, code = _line(sys._getframe())
        self.found.setdefault(Finding(kind, what, where, code))


class _Calls(TorchFunctionMode):
    """Finds tensors that are converted to NumPy arrays, which calls no operator."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(call, "__name__", "") in ("numpy", "__array__") and args:
            self.ops.value_taken(args[0])
        return call(*args, **(kwargs or {}))


@contextmanager
def _python_random(found: dict[Finding, None]) -> Iterator[None]:
    """Finds calls of Python's random generators and of the clock, and lines that advance a global generator of Python
    or NumPy. A profiler does not see NumPy's own calls."""
    state = _generators()

    def note(what: str, frame: FrameType, line: int) -> None:
        where, code = _source(frame, line)
        found.setdefault(Finding("python-random", what, where, code))

    def compare(frame: FrameType, line: int) -> None:
        nonlocal state
        if (now := _generators()) != state:
            state = now
            note("draws random numbers from Python or NumPy", frame, line)

    def profile(frame: FrameType, event: str, value: Any) -> None:
        owner = getattr(value, "__self__", None) if event == "c_call" else None
        called = event == "call" and frame.f_code.co_filename == random.__file__
        caller = frame.f_back if called else frame
        if caller is None or is_library(caller.f_code.co_filename):
            return
        if called or isinstance(owner, random.Random):
            note("draws random numbers from Python", caller, caller.f_lineno)
        elif getattr(owner, "__name__", "") == "time":
            note("reads the clock", caller, caller.f_lineno)

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if _is_skipped(frame):
            return None
        caller = frame.f_back
        while caller is not None and _is_skipped(caller):
            caller = caller.f_back
        if caller is not None:  # it may have drawn for an argument of this call
            compare(caller, caller.f_lineno)
        last = frame.f_lineno

        def step(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal last
            compare(frame, last)
            last = frame.f_lineno
            return step

        return step

    before = sys.getprofile(), sys.gettrace(), gc.isenabled()
    gc.disable()  # what it calls in other libraries is not the model's
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
        if before[2]:
            gc.enable()


def _generators() -> tuple[Any, ...]:
    """The states of the global generators of Python and NumPy."""
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["pos"], numpy["key"].tobytes()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _draws(name: str, args: Any) -> bool:
    """Whether an operator that can draw random numbers does: the dropout of attention may be 0."""
    return "attention" not in name or any(isinstance(each, float) and each > 0 for each in args)


def _batch_statistics(op: Any, args: Any) -> bool:
    """Whether a batch norm uses batch statistics: by its argument, or because it has no running ones."""
    schema = getattr(op, "_schema", None)
    names = [each.name for each in schema.arguments] if schema else []
    for name in ("training", "train", "use_input_stats"):
        if name in names and names.index(name) < len(args):
            return bool(args[names.index(name)])
    return "no_stats" in str(op) or ("legit" in str(op) and "running_mean" not in names)


def is_library(file: str) -> bool:
    """Whether a file belongs to torch or to Python's standard library."""
    own = file.startswith(_STANDARD) and "site-packages" not in file
    return own or file.startswith(_SKIPPED[0])


def _is_skipped(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_SKIPPED) or is_library(file)


_STANDARD = sysconfig.get_path("stdlib")
_SKIPPED = (str(Path(torch.__file__).parent), f"{Path(__file__).parents[2]}{os.sep}")


def _line(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of the model outside torch and Drumline, as `file:line` and its source; empty if there is
    none."""
    while frame is not None and (frame.f_code.co_filename.startswith((*_SKIPPED, "<"))):
        frame = frame.f_back if frame.f_code is not watch_forward.__code__ else None
    return _source(frame, frame.f_lineno) if frame is not None else ("", "")


def _source(frame: FrameType, line: int) -> tuple[str, str]:
    file = Path(frame.f_code.co_filename)
    return f"{file.name}:{line}", linecache.getline(str(file), line).strip()

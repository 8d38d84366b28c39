"""Checkpoints for your own training loop: atomic, checksummed, verified, and without pickle.

    found = checkpoints.load("out", model=model, optimizer=optimizer)
    for step in range(found.step if found else 0, steps):
        ...
        checkpoints.save("out", step=step + 1, model=model, optimizer=optimizer)

Promises: a checkpoint under its name `step-N` is complete, even after kill -9. It is verified after it is written and
before it is used, and `load` falls back to the one before if the newest is damaged. Under torch.distributed, call
`save` and `load` on every rank: rank 0 writes, and all ranks return when the checkpoint is on disk. Rejects sharded
parameters (FSDP).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.parallel.world import World
from drumline.state.checkpoint import checkpoints, copy_into, is_checkpoint, newest_valid, read_checkpoint
from drumline.state.folder import find_checkpoint
from drumline.state.manager import CheckpointManager
from drumline.state.manifest import Position
from drumline.state.provenance import PACKAGES, package_version
from drumline.state.verify import Verification, verify_run
from drumline.state.weights import unwrap

__all__ = ["Loaded", "latest", "load", "save", "verify"]

T = TypeVar("T")
_TAG = "*"


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that `load` has loaded."""

    path: Path
    step: int
    extra: dict[str, Any]
    """What `save` was given as `extra`."""
    skipped: tuple[str, ...]
    """Why newer checkpoints were not used."""


def save(
    folder: str | PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Writes the checkpoint `folder/step-N`.

    Example:

        checkpoints.save("out", step=100, model=model, optimizer=optimizer, extra={"lr": scheduler.state_dict()})

    Args:
        folder: Where the checkpoints are; it is created.
        step: The number of finished steps.
        model: The model, which may be wrapped (DDP, torch.compile).
        optimizer: Any optimizer of torch.
        extra: Numbers, text, lists, tuples, dicts and tensors, such as the state dict of a scheduler.
        keep: How many checkpoints to keep. Those older than the newest `keep` that verify are deleted.

    Returns:
        The path of the checkpoint, which is on disk and verified.

    Raises:
        UserError: The disk is full or read-only, or something cannot be saved.

    Existing checkpoints of this step or later, left by a loop that went back, are renamed to `step-N.aside`.
    """
    if step < 0 or keep < 1:
        raise UserError(f"step = {step}, keep = {keep}", "give step >= 0 and keep >= 1")
    path, groups, values = Path(folder), {"model": _state(model)}, {}
    for name, value in (("optimizer", optimizer.state_dict() if optimizer else {}), ("extra", extra or {})):
        tensors: dict[str, Tensor] = {}
        values[name] = _split(dict(value), name, tensors)
        groups |= {name: tensors} if tensors else {}

    def write() -> str:
        environment = {"packages": {name: package_version(name) for name in PACKAGES}, "loop": values}
        manager = CheckpointManager(path, keep, "", environment, flush=lambda: None)
        try:
            manager.begin()
            manager.set_aside_after(step - 1)
            manager.save(groups, Position(step, 1), must=True)
        finally:
            manager.close()
        return str(path / f"step-{step}")

    return Path(_on_rank_zero(write))


def load(
    folder: str | PathLike[str], *, model: nn.Module, optimizer: Optimizer | None = None
) -> Loaded | None:
    """Loads the newest checkpoint that verifies, in place.

    Example:

        loaded = checkpoints.load("out", model=model, optimizer=optimizer)
        first_step = loaded.step if loaded else 0

    Args:
        folder: The folder that was given to `save`, or one checkpoint.
        model: The model to load into. Names, shapes and types of its tensors must match exactly.
        optimizer: The optimizer to load into; None leaves the saved state aside.

    Returns:
        The path, step and `extra` of the checkpoint, and why newer ones were skipped; None if the folder has no
        checkpoint.

    Raises:
        UserError: No checkpoint verifies, or it does not fit the model or the optimizer.
    """

    def choose() -> tuple[str, tuple[str, ...]]:
        path = Path(folder)
        if not (is_checkpoint(path) or checkpoints(path)):
            return "", ()
        found, skipped = find_checkpoint(path)
        return str(found), tuple(skipped)

    name, skipped = _on_rank_zero(choose)
    if not name:
        return None
    path = Path(name)
    try:
        manifest, groups = read_checkpoint(path)
        stored = manifest.environment.get("loop", {})
        values = {name: _join(stored[name], groups.get(name, {})) for name in ("optimizer", "extra")}
    except (CorruptError, AttributeError, KeyError, TypeError, ValueError) as reason:
        raise UserError(f"{path} cannot be loaded: {reason}", "load an earlier checkpoint") from None
    copy_into(groups, {"model": _state(model)}, path)
    try:
        if optimizer is not None:
            optimizer.load_state_dict(values["optimizer"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{path}: the optimizer's state does not fit: {error}", "give the optimizer that was saved"
        ) from error
    return Loaded(path, manifest.position.step, values["extra"], skipped)


def latest(folder: str | PathLike[str]) -> Path | None:
    """Returns the newest checkpoint in a folder that verifies; None if there is none.

    Example: `checkpoints.latest("out")` returns `Path("out/step-300")`.
    """
    return newest_valid(Path(folder))[0]


def verify(path: str | PathLike[str]) -> Verification:
    """Reads every byte of the checkpoints in a folder, or of one checkpoint.

    Example: `checkpoints.verify("out").sound` is True if all of them verify.

    Returns:
        The result: `sound` (bool), `step` and `state_sha256` of the newest valid checkpoint, and a message for each
        damaged one in `unsound`.

    Raises:
        UserError: There is no checkpoint.
    """
    return verify_run(Path(path))


def _state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = unwrap(model).state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
            what = "sharded" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}, not a tensor"
            raise UserError(f"model: {name!r} is {what}", "save it with torch.distributed.checkpoint")
    return state


def _on_rank_zero(work: Callable[[], T]) -> T:
    """Calls `work` on rank 0 and returns its result on every rank. A `UserError` on rank 0 is raised on all."""
    world = _world_of(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size == 1:
        return work()
    outcome: tuple[T | None, tuple[str, str] | None] = None, None
    if world.is_rank_zero:
        try:
            outcome = work(), None
        except UserError as error:
            outcome = None, (error.what, error.fix)
    try:
        value, failed = world.broadcast_object(outcome)
    except RuntimeError as error:
        raise UserError(
            f"timed out waiting for the other ranks: {str(error)[:200]}",
            "call drumline.checkpoints.save and load on every rank",
        ) from error
    if failed is not None:
        raise UserError(*failed)
    return value


@lru_cache(maxsize=1)
def _world_of(group: dist.ProcessGroup) -> World:
    """The ranks of the script's process group. Messages go through gloo and never touch a GPU's stream."""
    control = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return World(rank, size, 0, 1, torch.device("cpu"), dist.get_backend(group), control=control)


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON. Its tensors are put into `tensors`, under the path that leads to them."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if isfinite(value) else {_TAG: ["float", str(value)]}
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TAG: ["tensor", name]}
    if type(value) in (list, tuple):
        items = [_split(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
        return items if type(value) is list else {_TAG: ["tuple", items]}
    if type(value) in (dict, OrderedDict, Counter) and all(type(key) in (str, int) for key in value):
        pairs = [[key, _split(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        return {_TAG: ["counter" if type(value) is Counter else "dict", pairs]}
    raise UserError(
        f"{name} holds a {type(value).__name__}, which cannot be saved",
        "save numbers, text, lists, tuples, tensors, and dicts of these with text or integer keys",
    )


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_split` was given."""
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value[_TAG]
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_join(content, tensors))
    pairs = {key: _join(item, tensors) for key, item in content}
    return Counter(pairs) if kind == "counter" else pairs

"""Reads the tensors of weights files by name: safetensors, and PyTorch files without executing anything in them.

Promises: finds the state dict wherever training scripts put it, and removes the prefixes of wrappers. Rejects files
that hold more than tensors and plain settings.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.core.text import either
from drumline.state.checkpoint import known_sha256, read_group
from drumline.state.shards import is_shard
from drumline.state.tensors import read_tensors

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightFields:
    """The recipe fields of weights and model, for messages. Calls from Python have none."""

    weights: str = "model.weights"
    name: str = "model.name"


def read_state(file: Path, fields: WeightFields | None) -> State:
    """The file's tensors by name, on the CPU."""
    if file.suffix == ".safetensors":
        try:
            if is_shard(file):
                return read_group(file.parent, "model")
            return read_tensors(file.resolve(), sha256=known_sha256(file))
        except CorruptError as reason:
            raise UserError(
                f"cannot load weights: {reason}",
                fix="the file may be truncated or damaged: copy or export it again",
            ) from reason
    if file.suffix not in _PICKLED and not file.name.endswith(".pth.tar"):
        raise UserError(
            f"{named_path(file, fields)}: unsupported weights file",
            fix=f"use .safetensors, .pth.tar, {either(_PICKLED)}",
        )
    try:
        # Many training scripts also save their arguments, in a Namespace, which is harmless.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise _unreadable(file) from error
        kept = 'checkpoint["state_dict"]' if file.suffix == ".ckpt" else "its state_dict"
        raise UserError(
            f"{file} is rejected: it holds {named[1]} besides tensors, and loading that could execute code",
            fix=f"if you trust it, load it in Python with weights_only=False and save only {kept}, preferably as "
            ".safetensors",
        ) from error
    except Exception as error:
        raise _unreadable(file) from error
    return _state_dict(file, content)


def _state_dict(file: Path, content: object) -> State:
    """The state dict in the content of a PyTorch file."""
    if isinstance(content, Mapping):
        nested = (content.get(key) for key in (*_NESTED, *_AVERAGED))
        state = next((value for value in nested if isinstance(value, Mapping)), content)
        if state and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()):
            averaged = "n_averaged" in state and all(
                key == "n_averaged" or key.startswith("module.") for key in state
            )
            return {key: each for key, each in state.items() if not (averaged and key == "n_averaged")}
        held = f"the entries {', '.join(map(str, list(state)[:5]))}" if state else "nothing"
    else:
        held = f"a {type(content).__name__}"
    raise UserError(
        f"{file} has no state dict: it holds {held}",
        fix="save model.state_dict() alone, or under the key state_dict, model or model_state_dict",
    )


_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("state_dict", "model", "model_state_dict")
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
"""A file's moving average, which is used if the file has nothing else."""


def _unreadable(file: Path) -> UserError:
    return UserError(
        f"{file} is not a PyTorch weights file",
        fix="give a file written by torch.save; this one may be truncated or damaged: copy or export it again",
    )


def unwrapped_state(state: State, model: nn.Module) -> State:
    """The same tensors without the prefixes of wrappers and of modules that contain the model."""
    state = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
    own = {key.partition(".")[0] for key in model.state_dict()}
    while len(tops := {key.partition(".")[0] for key in state}) == 1 and not tops & own:
        if not all("." in key for key in state):
            break
        state = {key.partition(".")[2]: tensor for key, tensor in state.items()}
    return state


def named_path(path: str | Path, fields: WeightFields | None) -> str:
    return f"{fields.weights} = {path}" if fields else str(path)

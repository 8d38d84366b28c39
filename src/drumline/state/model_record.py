"""The record of a trained model, stored next to its tensors: its name, its class names and its image preprocessing.

Stored as `model` in environment.json and in the manifest of each checkpoint, and as JSON under `drumline` in the
metadata of safetensors files. Promises: every field that is read is checked for type and range; unknown fields are
ignored. Files without a record, from earlier versions or other programs, give None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from drumline.config.limits import MODEL_ARGUMENTS, keyword_arguments
from drumline.data.classes import Classes, numbers

KEY = "drumline"
"""The key in the metadata of a safetensors file."""
ENVIRONMENT = "model"
"""The key in environment.json and in the manifest's environment."""
MAX_CLASSES = 1_000_000
CHOICES = {
    "resize": ("pillow12", "pillow13"),
    "interpolation": ("bilinear", "bicubic", "box", "lanczos"),
    "exif": ("ignore", "apply"),
    "fit": ("crop", "stretch"),
}


@dataclass(frozen=True)
class ModelRecord:
    """A trained model, without its tensors."""

    model: str
    """`model.name`"""
    outputs: int
    """Outputs of the classifier: more than there are classes if `model.classes` says so."""
    classes: Classes
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    eval_crop: float
    resize: str
    interpolation: str
    exif: str
    fit: str = "crop"
    """How evaluation makes an image square: `crop` resizes the short side and crops the centre; `stretch`, for sets
    of arrays, resizes both sides. Earlier versions did not record it."""
    args: tuple[str, ...] = ()
    """`model.args`. Earlier versions had none."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model's factory."""
        return dict(keyword_arguments(self.args))

    def settings(self) -> dict[str, str]:
        """The recipe fields that prepare images as in training."""
        values = {name: getattr(self, name) for name in PREPARED}
        return {f"data.{name}": _text(value) for name, value in values.items()}

    def other_images(self, now: ModelRecord) -> list[str]:
        """The differences between this and the current preprocessing, as `field: then -> now`."""
        return [
            f"data.{name}: {_text(getattr(self, name))} -> {_text(getattr(now, name))}"
            for name in PREPARED
            if not _alike(getattr(self, name), getattr(now, name))
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values. Classes without names become their number."""
        return asdict(self) | {
            "classes": list(self.classes.names) if self.classes.named else len(self.classes)
        }

    def metadata(self) -> dict[str, str]:
        """The metadata for a safetensors file."""
        return {"format": "pt", KEY: json.dumps(self.as_json())}


PREPARED = ("size", "mean", "std", "eval_crop", "resize", "interpolation", "exif")
"""Fields of `data` that decide how evaluation prepares an image."""


def record_of(environment: Mapping[str, Any]) -> ModelRecord | None:
    """The record in the environment of a run or a checkpoint. Raises ValueError."""
    stored = environment.get(ENVIRONMENT)
    return None if stored is None else read_record(stored)


def metadata_record(metadata: Mapping[str, str]) -> ModelRecord | None:
    """The record in the metadata of a safetensors file. Raises ValueError."""
    try:
        return read_record(json.loads(metadata[KEY])) if KEY in metadata else None
    except RecursionError:
        raise ValueError("the model record is nested too deeply") from None


def read_record(given: Any) -> ModelRecord:
    """A record from untrusted plain values. Raises ValueError and names the field."""
    if not isinstance(given, dict):
        raise ValueError("the model record is not a table")
    given = {"fit": "crop", "args": []} | given
    checks: dict[str, Callable[[Any], bool]] = {
        "model": _is_text,
        "outputs": lambda value: _is_count(value, MAX_CLASSES),
        "classes": _are_classes,
        "size": lambda value: _is_count(value, 1 << 16),
        "mean": _are_channels,
        "std": lambda value: _are_channels(value) and min(value) > 0,
        "eval_crop": lambda value: _is_number(value) and 0 < value <= 1,
        **{name: partial(_is_one_of, known) for name, known in CHOICES.items()},
        "args": _are_arguments,
    }
    assert list(checks) == [item.name for item in fields(ModelRecord)]
    for name, is_valid in checks.items():
        if name not in given or not is_valid(given[name]):
            raise ValueError(f"the model record's {name} = {str(given.get(name))[:40]!r} is not valid")
    classes = given["classes"]
    if given["outputs"] < (classes if isinstance(classes, int) else len(classes)):
        raise ValueError("the model record has more classes than outputs")
    known = {name: given[name] for name in checks}
    named = Classes(numbers(classes), False) if isinstance(classes, int) else Classes(tuple(classes), True)
    lists = {name: tuple(given[name]) for name in ("mean", "std", "args")}
    return ModelRecord(**known | {"classes": named} | lists)


def _is_one_of(known: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, str) and value in known


def _are_arguments(value: Any) -> bool:
    texts = isinstance(value, list | tuple) and len(value) <= 100 and all(map(_is_text, value))
    return texts and MODEL_ARGUMENTS.check(tuple(value)) is None


def _are_classes(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= MAX_CLASSES and all(map(_is_text, value)) and len(set(value)) == len(value)
    return _is_count(value, MAX_CLASSES)


def _are_channels(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) in (1, 3) and all(map(_is_number, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1024


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 < value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e6


def _alike(one: Any, other: Any) -> bool:
    """Equal up to rounding: measured means may differ in the last digits between machines."""
    if isinstance(one, tuple):
        wide = max(len(one), len(other))
        pairs = zip(_widened(one, wide), _widened(other, wide), strict=True)
        return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in pairs)
    return bool(one == other)


def _widened(values: tuple[float, ...], count: int) -> tuple[float, ...]:
    return values * count if len(values) == 1 else values


def _text(value: Any) -> str:
    return ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)

"""The record inside an exported file: model, classes, preprocessing, and the results of the verification.

The record is JSON with its own checksum, under the key `drumline` in the file's metadata. Promises: every field that
is read is checked for type and range; a record that was changed after the export is rejected. `answers` are the
original's outputs for one fixed image; `load.py` checks that the file still reproduces them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, NewerFormat, parse_sealed, sealed_text
from drumline.inference.export.formats import Device, Format
from drumline.state.model_record import ENVIRONMENT, KEY, ModelRecord, record_of

__all__ = [
    "KEY",
    "Answers",
    "ExportRecord",
    "Takes",
    "fixed_image",
    "read_record",
    "record_text",
]

Takes = Literal["pixels", "normalised"]
FORMAT = 1
"""Version of the record. A reader rejects newer ones."""
MOST_ANSWERS = 8


@dataclass(frozen=True)
class Answers:
    """The original's outputs for `fixed_image`."""

    pixels: str
    """SHA-256 of the preprocessed pixels."""
    best: tuple[tuple[int, float], ...]
    """The most likely outputs, with their probabilities."""


@dataclass(frozen=True)
class ExportRecord:
    """The record of an exported file."""

    model: ModelRecord
    format: Format
    takes: Takes
    """`pixels`: takes uint8 (batch, size, size, 3), RGB, and returns probabilities. `normalised`: takes float32
    (batch, 3, size, size) and returns logits."""
    how: str
    """How the program was made, such as `trace`."""
    drumline: str
    torch: str
    answers: Answers
    device: Device = "cpu"
    """Where the file was verified, and where it computes unless another device is asked for."""
    parity: dict[str, Any] = field(default_factory=dict)
    """The results of the verification."""

    def with_parity(self, parity: dict[str, Any]) -> ExportRecord:
        return replace(self, parity=parity)


def record_text(record: ExportRecord) -> str:
    """The record as text for the file's metadata."""
    gives = "probabilities" if record.takes == "pixels" else "logits"
    size = record.model.size
    shape = ["batch", size, size, 3] if record.takes == "pixels" else ["batch", 3, size, size]
    export = {
        "format": record.format,
        "how": record.how,
        "takes": record.takes,
        "input": {
            "dtype": "uint8" if record.takes == "pixels" else "float32",
            "shape": shape,
            "colour": "RGB",
        },
        "output": {"name": gives, "dtype": "float32", "shape": ["batch", record.model.outputs]},
        "drumline": record.drumline,
        "torch": record.torch,
        "device": record.device,
        "answers": {"pixels": record.answers.pixels, "best": [list(each) for each in record.answers.best]},
        "parity": record.parity,
    }
    return sealed_text({"format": FORMAT, ENVIRONMENT: record.model.as_json(), "export": export})


def read_record(text: str | None, file: Path, kind: Format) -> ExportRecord:
    """The record in the metadata of an exported file."""
    again = "export it again with drumline export"
    if text is None:
        raise UserError(
            f"{file} has no Drumline record, so its classes, image size and preprocessing are unknown",
            "give a file that drumline export wrote; run other files with the library that wrote them",
            "no-record",
        )
    try:
        content = parse_sealed(text.encode(), file, FORMAT)
        model, export = record_of(content), content.get("export")
        if model is None or not isinstance(export, dict):
            raise ValueError(f"the record has no {'model' if model is None else 'export'}")
        return _checked(model, export, kind)
    except NewerFormat as error:
        raise UserError(str(error), "install a newer drumline, or export it again", "newer-format") from None
    except CorruptError as error:
        what = str(error).removeprefix(f"{file}: ")
        raise UserError(f"{file}: the record was changed or damaged ({what})", again, "bad-record") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}", again, "bad-record") from None


def fixed_image() -> NDArray[np.uint8]:
    """An image that any program can compute: coarse and fine structure in whole numbers, and not square."""
    y, x = np.mgrid[:179, :263]
    channels = [(x * (3 + c) + y * (7 - c)) // 5 ^ (x * y // (29 + 11 * c)) for c in range(3)]
    return np.ascontiguousarray((np.stack(channels, axis=2) & 255).astype(np.uint8))


def pixels_digest(pixels: NDArray[np.uint8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


def _checked(model: ModelRecord, export: dict[str, Any], kind: Format) -> ExportRecord:
    answers = export.get("answers")
    checks = {
        "format": export.get("format") == kind,
        "takes": export.get("takes") in get_args(Takes),
        "how": isinstance(export.get("how"), str),
        "drumline": isinstance(export.get("drumline"), str),
        "torch": isinstance(export.get("torch"), str),
        "device": export.get("device", "cpu") in get_args(Device),
        "parity": isinstance(export.get("parity"), dict),
        "answers": isinstance(answers, dict)
        and isinstance(answers.get("pixels"), str)
        and _are_answers(answers.get("best"), model.outputs),
    }
    for name, valid in checks.items():
        if not valid:
            raise ValueError(f"the record's {name} = {str(export.get(name))[:40]!r} is invalid")
    assert isinstance(answers, dict)
    best = tuple((index, float(probability)) for index, probability in answers["best"])
    known = {name: export[name] for name in ("format", "takes", "how", "drumline", "torch", "parity")}
    device = export.get("device", "cpu")
    return ExportRecord(model, answers=Answers(answers["pixels"], best), device=device, **known)


def _are_answers(best: Any, outputs: int) -> bool:
    return (
        isinstance(best, list)
        and 0 < len(best) <= MOST_ANSWERS
        and all(isinstance(each, list) and len(each) == 2 for each in best)
        and all(type(index) is int and 0 <= index < outputs for index, _ in best)
        and all(type(value) in (int, float) and math.isfinite(value) for _, value in best)
    )

"""What training leaves in `RUN/report` for the page: the predictions of the best evaluation, and sheets of pictures.

Promises: plain numbers, text and images, which are read without executing anything. A file that is missing, damaged
or too large counts as not recorded.
"""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from drumline.core.files import CorruptError, read_small, write_bytes, write_text
from drumline.report.scores import NO_CLASS, Numbers, Report
from drumline.report.units import FIXED_POINT

FOLDER = "report"
FACTS, EVALUATION = "run.json", "evaluation.npz"
MISTAKES, BATCH = "mistakes.json", "batch.json"
MAX_BYTES = 1 << 28
MAX_CLASSES = 10**7
TILE = 96
"""The longest side of a picture, in pixels."""
LOSSLESS = 48
"""Up to this side, pictures are small enough to be stored as they are."""
_IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+=*")


@dataclass(frozen=True)
class Evaluation:
    """The predictions of one evaluation, all of whose outputs were finite, by sample id."""

    step: int
    labels: Numbers
    predictions: Numbers
    probabilities: Numbers
    """In fixed point (`units.py`)."""
    teacher: Numbers | None = None
    """The classes that a teacher predicts; -1 where it was not asked."""

    def report(self, names: tuple[str, ...]) -> Report:
        """The same with the names of the classes, of which there may be fewer than the model has outputs."""
        most = 1 + int(max(self.labels.max(), self.predictions.max()))
        every = (*names, *map(str, range(len(names), most)))
        return Report(every, self.labels, self.predictions, self.probabilities, finite=True)


@dataclass(frozen=True)
class Tile:
    """What is known about a picture."""

    label: str
    prediction: str = ""
    probability: float = 0.0
    sample: str = ""
    """Its path, or its number."""


@dataclass(frozen=True)
class Sheet:
    """Pictures of one size in one image, row by row."""

    step: int
    image: str
    """A data URI."""
    width: int
    height: int
    """Of a picture."""
    columns: int
    tiles: tuple[Tile, ...]


def make_sheet(pixels: NDArray[np.uint8], tiles: tuple[Tile, ...], step: int, columns: int = 8) -> Sheet:
    """A sheet of images (n, height, width, 1 or 3)."""
    assert len(pixels) == len(tiles) > 0
    pictures = [Image.fromarray(each.squeeze(2) if each.shape[2] == 1 else each) for each in pixels]
    scale = min(1.0, TILE / max(pictures[0].size))
    width, height = (max(1, round(side * scale)) for side in pictures[0].size)
    columns = min(columns, len(pictures))
    sheet = Image.new(pictures[0].mode, (columns * width, -(-len(pictures) // columns) * height))
    for number, picture in enumerate(pictures):
        small = picture if scale == 1 else picture.resize((width, height), Image.Resampling.BOX)
        sheet.paste(small, (number % columns * width, number // columns * height))
    kind = "png" if max(width, height) <= LOSSLESS else "jpeg"
    data = io.BytesIO()
    sheet.save(data, kind, quality=85)
    return Sheet(step, f"data:image/{kind};base64,{_base64(data.getvalue())}", width, height, columns, tiles)


def write_sheet(path: Path, sheet: Sheet) -> None:
    """One file, so that pictures and captions belong together."""
    write_text(path, json.dumps(asdict(sheet)), durable=False)


def read_sheet(path: Path) -> Sheet | None:
    """The sheet; None if there is none that can be shown."""
    try:
        content = json.loads(read_small(path, MAX_BYTES))
        tiles = tuple(Tile(**each) for each in content.pop("tiles"))
        sheet = Sheet(tiles=tiles, **content)
        sizes = (sheet.width, sheet.height, sheet.columns, len(tiles))
        texts = (text for tile in tiles for text in (tile.label, tile.prediction, tile.sample))
        probabilities = (tile.probability for tile in tiles)
        if (
            all(type(each) is int and 0 < each <= 4096 for each in sizes)
            and type(sheet.step) is int
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(each, int | float) for each in probabilities)
            and _IMAGE.fullmatch(sheet.image)
        ):
            return sheet
    except (OSError, CorruptError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # reported as not recorded
    return None


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """One file of some 12 bytes for each sample."""
    data = io.BytesIO()
    arrays: dict[str, Any] = {
        "step": np.array(evaluation.step),
        "labels": evaluation.labels.astype(np.int32),
        "predictions": evaluation.predictions.astype(np.int32),
        "probabilities": evaluation.probabilities.astype(np.int32),
    }
    if evaluation.teacher is not None:
        arrays["teacher"] = evaluation.teacher.astype(np.int32)
    np.savez(data, allow_pickle=False, **arrays)
    write_bytes(folder / EVALUATION, data.getvalue(), durable=False)


def read_evaluation(run: Path) -> Evaluation | None:
    """The evaluation that a run recorded; None if there is none that can be read."""
    try:
        data = read_small(run / FOLDER / EVALUATION, MAX_BYTES)
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if sum(member.file_size for member in members.infolist()) > MAX_BYTES:
                return None
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = {name: stored[name].astype(np.int64) for name in stored.files}
        found = Evaluation(step=int(arrays.pop("step")), **arrays)
    except (
        OSError,
        CorruptError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        MemoryError,
        zipfile.BadZipFile,
    ):
        return None
    columns = [found.labels, found.predictions, found.probabilities]
    columns += [found.teacher] if found.teacher is not None else []
    sound = (
        found.labels.ndim == 1
        and len(found.labels) > 0
        and all(each.shape == found.labels.shape for each in columns)
        and found.labels.min() >= 0
        and all(each.min() >= NO_CLASS and each.max() < MAX_CLASSES for each in (*columns[:2], *columns[3:]))
        and 0 <= found.probabilities.min() <= found.probabilities.max() <= FIXED_POINT
    )
    return found if sound else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()

"""Loads exported files: which format a file has, its record, and the program inside.

Promises: the format is recognised by content, and the record is read before any code in the file runs. A program that
can run code when it is loaded (pt2, aoti, torchscript) is loaded only if it is trusted. After loading, the file must
reproduce the recorded pixels and probabilities of the test image on this machine.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.files import MAX_BYTES
from drumline.inference.classifier import Classifier
from drumline.inference.export.formats import Format
from drumline.inference.export.record import (
    KEY,
    ExportRecord,
    fixed_image,
    pixels_digest,
    read_record,
)
from drumline.training.sets import Normalise

Program = Callable[[Tensor], Tensor]
ANSWER_TOLERANCE = 0.02
"""Allowed relative difference in a probability of the test image. Machines round differently; a wrong normalisation
or wrong weights change it far more."""
AOTI_METADATA = "_metadata.json"
"""Ending of the metadata files in an AOTInductor package."""
TITLES: dict[Format, str] = {
    "pt2": "a torch.export program",
    "onnx": "an ONNX model",
    "aoti": "an AOTInductor package",
    "torchscript": "a TorchScript program",
}


@dataclass(frozen=True, repr=False)
class ExportedModel(Classifier):
    """An exported file, ready to predict."""

    export: ExportRecord
    program: Program
    on: torch.device

    @property
    def device(self) -> torch.device:
        return self.on

    @torch.inference_mode()
    def compute(self, pixels: Tensor) -> Tensor:
        if not len(pixels):
            return torch.empty((0, self.record.outputs))
        outputs = self.program(self.inputs(pixels))
        if outputs.shape != (len(pixels), self.record.outputs):
            raise UserError(
                f"the exported file returns {tuple(outputs.shape)} for {len(pixels)} images, not "
                f"{(len(pixels), self.record.outputs)}",
                "export the model again",
                "wrong-shape",
            )
        return outputs if self.export.takes == "pixels" else outputs.float().softmax(dim=1)

    def inputs(self, pixels: Tensor) -> Tensor:
        """The input of the program for these pixels."""
        if self.export.takes == "pixels":
            return pixels
        normalise = Normalise.build(self.record.mean, self.record.std, self.on, False)
        return normalise(pixels)


def exported_format(path: Path) -> Format | None:
    """The format of an exported file, by its content; None for anything else, such as weights."""
    if not path.is_file():
        return None
    if path.suffix.lower() == ".onnx":
        return "onnx"
    if not zipfile.is_zipfile(path):
        return None
    names = _names(path)
    root = names[0].partition("/")[0] if names else ""
    if f"{root}/archive_format" in names:
        return "aoti" if any("/data/aotinductor/" in name for name in names) else "pt2"
    scripted = f"{root}/constants.pkl" in names and any(name.startswith(f"{root}/code/") for name in names)
    return "torchscript" if scripted else None


def load_exported(
    path: Path, kind: Format, trust: bool = False, device: torch.device | None = None, check: bool = True
) -> ExportedModel:
    """Loads a file that `drumline export` wrote, by default on the device of its record. `check=False` is for the
    verification, which checks more."""
    record = None if kind == "onnx" else read_record(_zip_record(path, kind), path, kind)
    if record is not None and not trust:
        raise UserError(
            f"{path} is {TITLES[kind]}, which can run code when it is loaded",
            "if you trust the file, call load_model(..., trust=True)",
            "untrusted-code",
        )
    try:
        if record is None:  # ONNX: data only, so it is loaded before its record is read
            session = _onnx_session(path, torch.device("cpu"))
            record = read_record(session.get_modelmeta().custom_metadata_map.get(KEY), path, kind)
            device = file_device(path, record, device)
            program = _onnx(session if device.type == "cpu" else _onnx_session(path, device))
        else:
            device = file_device(path, record, device)
            with quiet():
                program = _LOADERS[kind](path, device)
        model = ExportedModel(record.model, record, program, device)
        if check:
            _check_answers(model, path)
        return model
    except UserError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        raise UserError(
            f"{path} cannot be loaded: {type(error).__name__}: {reason}",
            "the file may be damaged, or may need a different machine or version: export it again",
            "unreadable",
        ) from error


def file_device(path: Path, record: ExportRecord, asked: torch.device | None) -> torch.device:
    """Where a file computes: as asked, else where it was verified. A graph of torch.export holds its device."""
    bound = record.format in ("pt2", "aoti")
    verified = record.device if bound or torch.cuda.is_available() else "cpu"
    device = asked or torch.device(verified)
    again = f"export it again with --device {device.type}, or as onnx, which runs on both"
    if bound and device.type != record.device:
        raise UserError(
            f"{path} was exported for {record.device}, not for {device.type}", again, "other-device"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        again = "see drumline doctor, or export it again with --device cpu"
        raise UserError(f"{path} runs on a GPU, and torch sees none", again, "other-device")
    return device


def _check_answers(model: ExportedModel, path: Path) -> None:
    """Rejects a file that does not reproduce the recorded pixels and probabilities of the test image."""
    pixels, answers = model.pixels(fixed_image()), model.export.answers
    if pixels_digest(pixels) != answers.pixels:
        raise UserError(
            f"{path}: the pixels of the test image differ from the recorded ones, so its preprocessing is wrong",
            "export it again",
            "wrong-pixels",
        )
    found = model.from_pixels(torch.from_numpy(pixels)[None])[0]
    for index, wanted in answers.best:
        here = float(found[index])
        if not abs(here - wanted) <= ANSWER_TOLERANCE * wanted + 1e-5:
            raise UserError(
                f"{path} does not reproduce its recorded outputs: the probability of {model.label(index)} for the "
                f"test image is {here:.4g}, not {wanted:.4g}",
                f"export it again on this machine (it was written with torch {model.export.torch}; this machine has "
                f"{torch.__version__})",
                "wrong-answers",
            )


def need(option: str, *packages: str) -> None:
    """Raises an error that names the packages that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{option} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            f"pip install 'drumline[export]', or pip install {' '.join(missing)}",
            "missing-package",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings, log lines and graph dumps of torch's exporters."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


_LOGGERS = ("torch.onnx", "torch.export", "torch._export", "torch.fx", "torch._dynamo", "onnxscript")


def _names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return []


def _zip_record(path: Path, kind: Format) -> str | None:
    """The text of the record in an archive, read without loading the program."""
    try:
        with zipfile.ZipFile(path) as archive:
            ending = AOTI_METADATA if kind == "aoti" else f"/extra/{KEY}"
            name = next((each for each in archive.namelist() if each.endswith(ending)), None)
            if name is None or archive.getinfo(name).file_size > MAX_BYTES:
                return None
            text = archive.read(name).decode()
        found = json.loads(text).get(KEY) if kind == "aoti" else text
        return found if isinstance(found, str) else None
    except (zipfile.BadZipFile, OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}", "copy or export it again", "unreadable") from error


def _onnx_session(path: Path, device: torch.device) -> Any:
    need("an ONNX model", "onnxruntime")
    import onnxruntime

    wanted = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise UserError(
            "onnxruntime has no CUDA here",
            "pip install onnxruntime-gpu, or use --device cpu",
            "missing-package",
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    provider = (wanted, {"device_id": device.index or 0}) if device.type == "cuda" else wanted
    return onnxruntime.InferenceSession(str(path), options, providers=[provider])


def _onnx(session: Any) -> Program:
    name = session.get_inputs()[0].name

    def program(inputs: Tensor) -> Tensor:
        outputs: Any = session.run(None, {name: inputs.cpu().numpy()})[0]
        return torch.from_numpy(outputs).to(inputs.device)

    return program


def _pt2(path: Path, _: torch.device) -> Program:
    program: Program = torch.export.load(path).module()
    return program


def _aoti(path: Path, device: torch.device) -> Program:
    import torch._inductor

    index = device.index or 0 if device.type == "cuda" else -1
    return torch._inductor.aoti_load_package(str(path), device_index=index)


def _torchscript(path: Path, device: torch.device) -> Program:
    program: Program = torch.jit.load(str(path), map_location=device).eval()
    return program


_LOADERS: dict[Format, Callable[[Path, torch.device], Program]] = {
    "pt2": _pt2,
    "aoti": _aoti,
    "torchscript": _torchscript,
}

"""The formats that `drumline export` writes: each turns a module into a program that can be saved with a record.

Promises: the batch dimension is dynamic, the others are fixed. The program is compiled once, and saved again when its
record changes. Errors of an exporter are passed on unchanged; `causes.py` explains them.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.inference.export.formats import Format, How
from drumline.inference.export.load import AOTI_METADATA, need, quiet
from drumline.inference.export.record import KEY

Save = Callable[[Path, str], None]
"""Writes the program and the text of its record."""


@dataclass(frozen=True)
class Program:
    """A compiled program."""

    save: Save
    how: str
    warned: tuple[tuple[str, int], ...] = ()
    """Files and lines that tracing warned about: Python values that became constants."""


def check_needs(kind: Format) -> None:
    """Rejects a format whose libraries or compiler are missing, before any work."""
    if kind == "onnx":
        need("--format onnx", "onnx", "onnxscript", "onnxruntime")
    compiler = os.environ.get("CXX", "g++")
    if kind == "aoti" and shutil.which(compiler) is None:
        raise UserError(
            f"--format aoti needs a C++ compiler, but there is no {compiler}",
            "install g++, or set CXX to a compiler; --format pt2 needs none",
            "no-compiler",
        )


def compile_program(kind: Format, module: nn.Module, example: Tensor, takes: str, how: How) -> Program:
    """Compiles a module in eval mode for batches of any size, on its device. `takes` names its input."""
    with torch.no_grad(), quiet():
        if kind == "torchscript":
            return _torchscript(module, example, how)
        # On a GPU, BatchNorm is traced as cuDNN's, which takes no larger batches.
        batch = torch.export.Dim("batch", min=1, max=65_535 if example.is_cuda else None)
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        if kind == "onnx":
            return _onnx(program, takes)
        return _aoti(program) if kind == "aoti" else _pt2(program)


def _pt2(program: torch.export.ExportedProgram) -> Program:
    def save(file: Path, record: str) -> None:
        with quiet():
            torch.export.save(program, file, extra_files={KEY: record})

    return Program(save, "torch.export")


def _aoti(program: torch.export.ExportedProgram) -> Program:
    import torch._inductor

    package = b""

    def save(file: Path, record: str) -> None:
        nonlocal package
        if not package:
            with quiet():
                # So that a batch of 1 passes the checks of AOTI_RUNTIME_CHECK_INPUTS=1.
                configs = {"aot_inductor.metadata": {KEY: ""}, "aot_inductor.check_lowerbound": False}
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(file), inductor_configs=configs
                )
            package = file.read_bytes()
        file.write_bytes(package)
        _set_aoti_record(file, record)

    return Program(save, "torch.export, AOTInductor")


def _set_aoti_record(file: Path, record: str) -> None:
    """Writes the record into the package's metadata, where C++ programs can read it, too."""
    with zipfile.ZipFile(file) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for info, content in members.items():
            if info.filename.endswith(
                AOTI_METADATA
            ):  # several; which one a loader reads depends on their order
                content = json.dumps(json.loads(content) | {KEY: record}).encode()
            archive.writestr(info.filename, content)


def _onnx(exported: torch.export.ExportedProgram, takes: str) -> Program:
    # Given a module, torch.onnx would silently fall back to a fixed batch if a dynamic one fails.
    program = torch.onnx.export(
        exported,
        dynamo=True,
        input_names=[takes],
        output_names=["probabilities" if takes == "pixels" else "logits"],
        verbose=False,
    )
    assert program is not None

    def save(file: Path, record: str) -> None:
        program.model.metadata_props[KEY] = record
        with quiet():
            program.save(str(file), external_data=False)

    return Program(save, "torch.export, torch.onnx")


def _torchscript(module: nn.Module, example: Tensor, how: How) -> Program:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "script":
            program = torch.jit.script(module)
        else:
            program = torch.jit.trace(module, (example,), check_trace=False)
    traced = {
        (each.filename, each.lineno) for each in caught if issubclass(each.category, torch.jit.TracerWarning)
    }

    def save(file: Path, record: str) -> None:
        with quiet():
            torch.jit.save(program, str(file), _extra_files={KEY: record})

    return Program(save, how, tuple(sorted(traced)))

"""`drumline.export_model`: writes a trained model for other programs, and verifies the file before it gets its name.

The order: load the original, monitor one pass for what an exported file cannot reproduce, measure the original's
noise, compile, write the file under a temporary name, load it back as `drumline predict` does, compare it with the
original on real images, add the results to its record, rename it. Promises: a failure leaves nothing under the final
name, and an existing file unchanged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import drumline
from drumline.core.errors import UserError
from drumline.core.files import check_output, write_file
from drumline.core.progress import progress
from drumline.inference.classifier import Classifier
from drumline.inference.export import causes, verify
from drumline.inference.export.behaviour import Finding, watch_forward
from drumline.inference.export.formats import ENDINGS, AnyFormat, Device, Format, How, Weights
from drumline.inference.export.graph import FromPixels
from drumline.inference.export.load import exported_format, load_exported
from drumline.inference.export.record import (
    MOST_ANSWERS,
    Answers,
    ExportRecord,
    Takes,
    fixed_image,
    pixels_digest,
    record_text,
)
from drumline.inference.export.samples import Samples, verification_samples
from drumline.inference.export.write import Program, check_needs, compile_program
from drumline.inference.model import TrainedModel, load_trained
from drumline.models.base import VisionModel
from drumline.parallel.process_group import resolve_device_type
from drumline.state.folder import run_of
from drumline.state.weights import export_tensors


def export_model(
    model: str | PathLike[str],
    format: AnyFormat,
    out: str | PathLike[str] = "",
    *,
    raw: bool = False,
    how: How = "trace",
    weights: Weights = "auto",
    images: Sequence[str] = (),
    samples: int | Literal["all"] = 512,
    device: Device = "cpu",
    trust: bool = False,
) -> dict[str, Any]:
    """Exports a trained model for other programs, verified against the original.

    Example:

        report = drumline.export_model("runs/photos", "onnx", "photos.onnx")
        print(report["top1_agreement"], report["logit_difference"])

    Args:
        model: A run folder, a checkpoint or weights.
        format: `pt2`, `onnx`, `aoti`, `torchscript` or `safetensors`.
        out: The file to write. Default: the name of the run with the extension of the format (`.aoti.pt2` for aoti),
            in the current folder.
        raw: The file takes normalised images and returns logits, instead of pixels and probabilities.
        how: `trace` or `script`, for torchscript.
        weights: `average` or `model`: the averaged (`train.ema`) or the trained weights of the newest checkpoint.
        images: Images to verify on, instead of the run's evaluation split.
        samples: How many images to verify on, or `all`.
        device: `cpu` or `cuda`: where the file is verified and timed. pt2 and aoti files run on this device only.
        trust: Allows a model that the user's own code builds.

    Returns:
        The report as a dict: `file`, `format`, `verdict`, and what was measured.

    Raises:
        UserError: The model cannot be exported, or the outputs of the file differ from the model's. The message names
            the cause, and no file is written.
    """
    path = Path(model)
    file = output_file(path, format, str(out))
    check_output("--out", file)
    if format != "torchscript" and how != "trace":
        raise UserError(f"--how {how} has no effect with --format {format}", "use --format torchscript")
    if format != "safetensors":
        check_needs(format)
    if exported_format(path):
        raise UserError(
            f"{model} is already an exported file",
            "give the run, the checkpoint or the weights that it was exported from",
        )
    resolve_device_type(device, "device")
    chosen = weights_path(path, weights)
    original = load_trained(chosen, device=device, trust=trust)
    if how == "script" and isinstance(original.model, VisionModel):
        raise UserError(
            f"--how script: TorchScript cannot compile the source of {original.record.model}, a built-in model",
            "use --how trace: built-in models have no branches on data",
        )
    found = verification_samples(path, original.record.classes, images, samples, trust)
    # In the same folder, so that renaming is atomic. Some writers require the final extension.
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent) as folder:
        staged = Path(folder, file.name)
        report = (
            _write_weights(original, found, staged)
            if format == "safetensors"
            else _write_program(original, found, staged, format, raw, how, device)
        )
        size = staged.stat().st_size

        def take(temporary: Path) -> None:
            staged.replace(temporary)

        write_file(file, take)
    head = {"file": str(out) or file.name, "format": format, "device": device}
    return head | {"bytes": size, "verdict": "ok"} | report


def output_file(model: Path, kind: AnyFormat, given: str = "") -> Path:
    """The file that is written: `--out`, or in the current folder the name of the run or the weights, different for
    each format."""
    ending = ENDINGS[kind]
    if given:
        out = Path(given).expanduser().resolve()
        if out.suffix != ending:
            raise UserError(
                f"--out {given}: --format {kind} needs the extension {ending}",
                f"give {Path(given).with_suffix(ending)}",
            )
    else:
        path = model.absolute()
        name = path.stem if path.is_file() else path.name
        named = run_of(path) if path.exists() else None
        apart = ".aoti" if kind == "aoti" else ""  # pt2 has the same extension
        out = Path.cwd() / f"{named.name if named else name}{apart}{ending}"
    if out.exists() and model.is_file() and out.samefile(model):
        raise UserError(f"{out} is the model itself", "give a different file with --out")
    return out


def weights_path(path: Path, which: Weights) -> Path:
    """The weights to export. `auto`: those that `drumline predict` uses."""
    if which == "auto":
        return path
    checkpoints = [path] if path.is_dir() and not (path / "checkpoints").is_dir() else []
    if not checkpoints:
        steps = [each for each in path.glob("checkpoints/step-*") if each.name[5:].isdigit()]
        checkpoints = sorted(steps, key=lambda each: int(each.name[5:]))[-1:]
    file = checkpoints[0] / f"{which}.safetensors" if checkpoints else path / which
    if not file.is_file():
        raise UserError(
            f"--weights {which}: {path} has no checkpoint with {which}.safetensors",
            "averaged weights exist only with train.ema"
            if which == "average"
            else "give a run or a checkpoint",
        )
    return file


def _write_weights(original: TrainedModel, samples: Samples, staged: Path) -> dict[str, Any]:
    """Writes a safetensors file with the model's record. Without a program, only the tensors can differ."""
    export_tensors(original.model.state_dict(), staged, original.record)
    floor = verify.measure_floor(original, verify.first_pixels(original, samples.samples))
    loaded = load_trained(staged, trust=True)
    found = verify.compare(original, loaded, samples.samples, floor)
    if not found.alike:
        raise causes.mismatch(found, original, loaded, verify.first_pixels(original, samples.samples), ())
    return found.evidence(samples.of) | {"unreadable": found.broken}


def _write_program(
    original: TrainedModel,
    samples: Samples,
    staged: Path,
    kind: Format,
    raw: bool,
    how: How,
    device: Device,
) -> dict[str, Any]:
    pixels = verify.first_pixels(original, samples.samples)
    findings = _watched(original, pixels)
    causes.reject_behaviour(findings)
    floor = _floor(original, pixels, findings)
    causes.reject_branches(findings, kind, how)
    takes: Takes = "normalised" if raw else "pixels"
    # Nobody else has this model: `export_model` loads it. A caller of the file needs no gradients of its weights.
    module = (original.model if raw else FromPixels(original)).eval().requires_grad_(False)
    example = pixels[torch.arange(verify.EXAMPLE_BATCH) % len(pixels)].to(original.device)
    example = original.normalised(example) if raw else example
    for _ in progress([kind], f"compiling for {kind}", 1):
        program = _compiled(kind, module, example, takes, how, findings)
        record = exported_record(original, kind, takes, program.how, device)
        _save(program, staged, record, kind)
    exported = load_exported(staged, kind, trust=True, check=False)
    warned = causes.source_lines(program.warned)
    found = _compared(original, exported, samples, floor, pixels, warned)
    found.other_size = verify.try_other_size(original, exported, found.limit)
    for batch in verify.BATCHES[:2]:
        found.latency[batch] = verify.latency(original, exported, pixels[torch.arange(batch) % len(pixels)])
    evidence = found.evidence(samples.of)
    before = exported.from_pixels(pixels)
    del exported
    program.save(staged, record_text(record.with_parity(evidence)))
    final = load_exported(staged, kind, trust=True)
    if not torch.equal(final.from_pixels(pixels), before):
        raise UserError(
            "the outputs of the file changed when its record was written", "report this bug", "unstable-file"
        )
    timed = {str(batch): {"model_ms": a, "exported_ms": b} for batch, (a, b) in found.latency.items()}
    notes = [each.what for each in findings if each.kind == "unwatched"]
    more = {
        "takes": takes,
        "how": program.how,
        "unreadable": found.broken,
        "constants": warned,
        "notes": notes,
    }
    return evidence | {"latency": timed} | more


def _watched(original: TrainedModel, pixels: Tensor) -> list[Finding]:
    inputs = original.normalised(pixels[:2])
    try:
        with torch.no_grad():
            original.model(inputs)
    except Exception as error:
        raise causes.fails_alone(error, len(inputs), always=not _computes(original, pixels)) from error
    try:
        return watch_forward(original.model, inputs)
    except Exception as error:  # some models cannot run under a dispatch mode
        what = f"the forward pass cannot be monitored ({type(error).__name__}), so only outputs were compared"
        return [Finding("unwatched", what)]


def _computes(original: TrainedModel, pixels: Tensor) -> bool:
    """Whether the model works on a batch of the export's size."""
    try:
        original.from_pixels(pixels[torch.arange(verify.EXAMPLE_BATCH) % len(pixels)])
    except Exception:  # the error of the first batch is the one that is reported
        return False
    return True


def _floor(original: TrainedModel, pixels: Tensor, findings: Sequence[Finding]) -> verify.Difference:
    """The noise of the original, which must work for every batch size and be reproducible."""
    for batch in verify.BATCHES:
        try:
            found = verify.answers(original, pixels, batch)
        except UserError:
            raise
        except Exception as error:
            raise causes.fails_alone(error, batch, always=False) from error
        if not found.isfinite().all():
            raise UserError(
                "the model returns NaN for evaluation images", "export a different checkpoint", "not-finite"
            )
    floor = verify.measure_floor(original, pixels)
    most = verify.UNSTABLE * verify.limit(verify.Difference(), verify.dtype_of(original))
    if not floor.logits <= most:
        shapes = _shape_lines("pt2", original.model, original.normalised(pixels[:2]))
        raise causes.unstable(floor.logits, most, findings, shapes)
    return floor


def _compiled(
    kind: Format,
    module: torch.nn.Module,
    example: Tensor,
    takes: Takes,
    how: How,
    findings: Sequence[Finding],
) -> Program:
    try:
        return compile_program(kind, module, example, takes, how)
    except Exception as error:
        raise causes.export_failed(error, kind, findings, _shape_lines(kind, module, example)) from error


def _save(program: Program, staged: Path, record: ExportRecord, kind: Format) -> None:
    """AOTInductor compiles when it saves."""
    try:
        program.save(staged, record_text(record))
    except Exception as error:
        raise causes.export_failed(error, kind, (), ()) from error


def _shape_lines(kind: Format, module: torch.nn.Module, example: Tensor) -> list[str]:
    """The lines that compute with a shape, found by tracing."""
    if kind == "torchscript":
        return []
    try:
        return causes.source_lines(compile_program("torchscript", module, example, "", "trace").warned)
    except Exception:  # only adds detail to the message of another error
        return []


def exported_record(
    original: TrainedModel, kind: Format, takes: Takes, how: str, device: Device
) -> ExportRecord:
    """The record of the file, without verification results."""
    pixels = original.pixels(fixed_image())
    best = original.from_pixels(torch.from_numpy(pixels)[None])[0].topk(
        min(MOST_ANSWERS, original.record.outputs)
    )
    answers = Answers(
        pixels_digest(pixels), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )
    return ExportRecord(
        original.record, kind, takes, how, drumline.__version__, str(torch.__version__), answers, device
    )


def _compared(
    original: TrainedModel,
    exported: Classifier,
    samples: Samples,
    floor: verify.Difference,
    pixels: Tensor,
    warned: Sequence[str],
) -> verify.Comparison:
    try:
        found = verify.compare(original, exported, samples.samples, floor)
    except UserError:
        raise
    except Exception as error:
        raise causes.wrong_answer(error, "images on which the model works") from error
    if not found.alike:
        raise causes.mismatch(found, original, exported, pixels, warned)
    return found

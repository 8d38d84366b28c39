"""Why an export failed, or why the outputs of a file differ from the model's, as an error with a fix.

Promises: a cause is named only with proof: a finding in a monitored pass, the exporter's own error, the line that
fails, or an experiment that reproduces the wrong outputs. Otherwise the error gives the measurements.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.text import either
from drumline.data.feed.transform import IMAGENET_MEAN, IMAGENET_STD
from drumline.inference.classifier import Classifier
from drumline.inference.export.behaviour import FIXES, Finding, Kind, is_library
from drumline.inference.export.verify import BATCHES, EXAMPLE_BATCH, Comparison, answers, difference
from drumline.inference.model import TrainedModel
from drumline.state.model_record import ModelRecord
from drumline.training.sets import Normalise

NEVER: tuple[Kind, ...] = ("train-mode", "batch-statistics", "torch-random", "python-random")
"""The kinds that no format can reproduce."""


def reject_behaviour(findings: Sequence[Finding]) -> None:
    """Rejects a model that no format can reproduce because of findings in its forward pass."""
    never = [each for each in findings if each.kind in NEVER]
    if never:
        # A line of source is more useful than the name of a layer.
        first = next((each for each in never if each.where), never[0])
        raise UserError(_listed(never), FIXES[first.kind], first.kind)


def reject_branches(findings: Sequence[Finding], kind: str, how: str) -> None:
    """Rejects branches on data that a trace would leave out. For a model that is reproducible: a script can keep
    them."""
    baked = [each for each in findings if each.kind == "data-value"]
    if baked and kind == "torchscript" and how == "trace":
        raise UserError(
            f"{_listed(baked)}: a trace would use the value of one image for all images",
            FIXES["data-value"],
            "data-branch",
        )


def _listed(findings: Sequence[Finding]) -> str:
    shown = "\n  ".join(str(each) for each in findings[:5])
    return shown + (f"\n  and {len(findings) - 5} more" if len(findings) > 5 else "")


def fails_alone(error: Exception, batch: int, always: bool) -> UserError:
    """The original fails on a batch of this size, or on any batch (`always`)."""
    place = _place(error)
    reason = f"{_short(error)}{f' ({place})' if place else ''}"
    if always:
        return UserError(
            f"the model itself fails: {reason}", "fix the model until `drumline predict` works", "model-fails"
        )
    return UserError(
        f"the model itself fails on a batch of {batch}: {reason}",
        "the batch dimension must be dynamic: use x.shape[0] or flatten(1), not a fixed batch size",
        "shape-guard",
    )


def unstable(floor: float, most: float, findings: Sequence[Finding], shapes: Sequence[str]) -> UserError:
    """The outputs of the original for the same images vary too much."""
    taken = [each for each in findings if each.kind == "data-value"]
    lines = f"\n  {_listed(taken)}" if taken else ""
    if not taken and shapes:
        lines = f"; lines that compute with a shape: {', '.join(shapes)}"
    return UserError(
        f"the model is not reproducible: its logits for the same images differ by {floor:.3g} between passes, "
        f"batch sizes or numbers of threads (noise stays below {most:.2g}){lines}",
        "an output must depend only on its own image, not on the rest of the batch, random numbers or earlier passes",
        "unstable",
    )


def export_failed(
    error: Exception, kind: str, findings: Sequence[Finding], warned: Sequence[str]
) -> UserError:
    """Why the exporter failed."""
    chain = list(_chain(error))
    names = {type(each).__name__ for each in chain}
    text = "\n".join(map(str, chain))
    for taken in ("data-value", "tensor-value"):
        listed = [each for each in findings if each.kind == taken]
        if listed and (names & {"GuardOnDataDependentSymNode", "Unsupported"} or "numpy()" in text):
            return UserError(
                f"{_listed(listed)}: --format {kind} cannot express a branch on it",
                FIXES[listed[0].kind],
                "data-branch",
            )
    if "Constraints violated" in text or "ConstraintViolationError" in names:
        reasons = re.findall(r"(?:specialized it to be a constant \(\d+\)|generated guard [^\n]*)", text)
        lines = f"; lines that compute with a shape: {', '.join(warned)}" if warned else ""
        return UserError(
            f"the model works only for some batch sizes: according to torch.export, the batch is "
            f"{_guard(reasons[0]) if reasons else 'fixed'}{lines}",
            "do not branch on the batch size or hard-code it: use x.shape[0], -1 or flatten(1)",
            "shape-guard",
        )
    if operator := re.search(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'", text):
        return UserError(
            f"the operator {operator[1]} has no translation to ONNX",
            "replace it in the model, or use --format pt2, aoti or torchscript",
            "unsupported-operator",
        )
    if names & {"InvalidCxxCompiler"} or "CppCompileError" in names:
        return UserError(
            f"--format aoti needs a working C++ compiler: {_short(chain[-1])}",
            "install g++ (or clang++, and set CXX to it), or use --format pt2, which needs none",
            "no-compiler",
        )
    place = next(filter(None, map(_place, chain)), "")
    frontend = re.search(r'File "([^"]+)", line (\d+)', text) if kind == "torchscript" else None
    if frontend:
        place = f"{Path(frontend[1]).name}:{frontend[2]}"
    fix = (
        "TorchScript compiles only a subset of Python: change the model, or use --how trace without branches on data"
        if kind == "torchscript"
        else f"try --format {'onnx' if kind == 'pt2' else 'pt2'}, or change the model"
    )
    return UserError(
        f"--format {kind} failed{f' at {place}' if place else ''}: {_short(chain[-1])}", fix, "export-failed"
    )


def _guard(reason: str) -> str:
    constant = re.search(r"constant \((\d+)\)", reason)
    if constant:
        return f"fixed to {constant[1]}"
    return "limited to " + re.sub(
        r"L\['\w+'\]\.size\(\)\[0\]", "batch", reason.removeprefix("generated guard ")
    )


def mismatch(
    found: Comparison, original: TrainedModel, exported: Classifier, pixels: Tensor, warned: Sequence[str]
) -> UserError:
    """Why the outputs of the file differ from the original's."""
    if found.other_pixels:
        return _other_pixels(found.other_pixels, original.record, exported.record)
    worst = found.worst
    measured = (
        f"the outputs of the exported file are not the model's: logits differ by {worst.logits:.3g} (the limit is "
        f"{found.limit:.2g}), probabilities by {worst.probability_max:.3g}, and {found.whole.agree:,} of "
        f"{found.whole.images:,} images keep their class"
    )
    if other := _other_normalisation(original, exported, pixels, found.limit):
        return UserError(
            f"{measured}: it normalises pixels {other}, not with mean {original.record.mean} and standard deviation "
            f"{original.record.std}",
            "export it again; if that does not help, report it",
            "wrong-normalisation",
        )
    repeated = difference(answers(exported, pixels), answers(exported, pixels))
    if repeated.logits > found.limit:
        return UserError(
            f"{measured}, and two passes of the file differ by {repeated.logits:.3g}: it draws random numbers",
            FIXES["torch-random"],
            "torch-random",
        )
    alike = [size for size, each in found.by_batch.items() if each.logits <= found.limit]
    if alike and len(alike) < len(BATCHES):
        wrong = [size for size in BATCHES if size not in alike]
        lines = f"; constants of the trace: {', '.join(warned)}" if warned else ""
        return UserError(
            f"{measured}: it is right for batches of {either(list(map(str, alike)))} and wrong for "
            f"{either(list(map(str, wrong)))}, so the batch size of the export ({EXAMPLE_BATCH}) is fixed in it"
            f"{lines}",
            "do not branch on the batch size in forward",
            "shape-guard",
        )
    lines = f"; the trace made constants in {', '.join(warned)}" if warned else ""
    return UserError(f"{measured}{lines}", "no cause was found; try a different --format", "mismatch")


def wrong_answer(error: Exception, found_in: str) -> UserError:
    """The file fails on a batch on which the original works."""
    return UserError(
        f"the exported file fails on {found_in}: {_short(error)}",
        "the batch size of the export is probably fixed in it: do not branch on the batch size in forward",
        "shape-guard",
    )


def _other_pixels(name: str, original: ModelRecord, exported: ModelRecord) -> UserError:
    """The file's record prepares an image in a different way from the original's."""
    wrong = [
        f"{each.name} is {getattr(exported, each.name)}, not {getattr(original, each.name)}"
        for each in fields(ModelRecord)
        if getattr(original, each.name) != getattr(exported, each.name)
    ]
    why = "; ".join(wrong) or "the records are equal"
    return UserError(
        f"the pixels of {name} differ from those in an evaluation: in the record of the file, {why}",
        "export it again; if that does not help, report it",
        "wrong-pixels",
    )


def _other_normalisation(
    original: TrainedModel, exported: Classifier, pixels: Tensor, tolerance: float
) -> str:
    """A wrong normalisation that produces exactly these outputs; empty if there is none."""
    record = original.record
    mean, std = (value * 3 if len(value) == 1 else value for value in (record.mean, record.std))
    one, zero = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
    byte = (1 / 255,) * 3
    mistakes = (
        ("not at all", zero, byte),
        ("to 0..1 only", zero, one),
        ("without the mean", zero, std),
        ("without the standard deviation", mean, one),
        ("with ImageNet's mean and standard deviation", IMAGENET_MEAN, IMAGENET_STD),
        ("with 0.5 and 0.5", (0.5,) * 3, (0.5,) * 3),
        ("with the channels in BGR order", mean[::-1], std[::-1]),
    )
    here = answers(exported, pixels)
    for text, wrong_mean, wrong_std in mistakes:
        if (wrong_mean, wrong_std) == (mean, std):
            continue
        normalise = Normalise.build(wrong_mean, wrong_std, original.device, channels_last=False)
        with torch.inference_mode():
            wrong = original.model(normalise(pixels.to(original.device))).float().softmax(dim=1).cpu()
        if difference(wrong, here).logits <= 4 * tolerance:
            return text
    return ""


def source_lines(warned: Sequence[tuple[str, int]]) -> list[str]:
    """The lines of the user's code that tracing warned about, as `file:line`."""
    return [f"{Path(file).name}:{line}" for file, line in warned if not is_library(file)]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, the root last."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _short(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = first.removesuffix(" at")  # as TorchScript's messages, which go on with an excerpt of the source
    return f"{type(error).__name__}: {first[:240]}" if first else type(error).__name__


def _place(error: BaseException) -> str:
    """The last line of the traceback that is in the user's code, as `file:line: code`."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not is_library(each.filename) and "/drumline/inference/" not in each.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""

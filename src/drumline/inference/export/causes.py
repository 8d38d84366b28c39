"""Why an export failed, or why a file does not answer like the original, as an error with a fix.

Promises: a cause is named only if something shows it: what the model did in a watched pass, the exporter's own error,
the line that fails, or an experiment that reproduces the wrong answers. Otherwise the error says what was measured.
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
"""What no format can repeat."""


def reject_behaviour(findings: Sequence[Finding], kind: str, how: str) -> None:
    """Rejects a model before it is exported, for what it does in a pass."""
    never = [each for each in findings if each.kind in NEVER]
    if never:
        # A line of source says more than the name of a layer.
        first = next((each for each in never if each.where), never[0])
        raise UserError(_listed(never), FIXES[first.kind], first.kind)
    baked = [each for each in findings if each.kind == "data-value"]
    if baked and kind == "torchscript" and how == "trace":
        raise UserError(
            f"{_listed(baked)}: a trace would keep the value that it has for one image, for all images",
            FIXES["data-value"],
            "data-branch",
        )


def _listed(findings: Sequence[Finding]) -> str:
    shown = "\n  ".join(str(each) for each in findings[:5])
    return shown + (f"\n  and {len(findings) - 5} more" if len(findings) > 5 else "")


def fails_alone(error: Exception, batch: int, always: bool) -> UserError:
    """The original itself cannot compute a batch of this size, or any batch (`always`)."""
    place = _place(error)
    reason = f"{_short(error)}{f' ({place})' if place else ''}"
    if always:
        return UserError(
            f"the model itself fails: {reason}", "make `drumline predict` work with it", "model-fails"
        )
    return UserError(
        f"the model itself fails on a batch of {batch}: {reason}",
        "the first dimension must be free: use x.shape[0] or flatten(1), and no fixed batch size",
        "shape-guard",
    )


def unstable(floor: float, most: float, findings: Sequence[Finding], shapes: Sequence[str]) -> UserError:
    """The original does not agree with itself."""
    taken = [each for each in findings if each.kind == "data-value"]
    lines = f"\n  {_listed(taken)}" if taken else ""
    if not taken and shapes:
        lines = f"; lines that compute with a shape: {', '.join(shapes)}"
    return UserError(
        f"the model does not agree with itself: its logits for the same images differ by {floor:.3g} between passes, "
        f"batch sizes or threads (noise stays below {most:.2g}){lines}",
        "an answer must depend on its image alone, not on the other images of the batch, chance or earlier passes",
        "unstable",
    )


def export_failed(
    error: Exception, kind: str, findings: Sequence[Finding], warned: Sequence[str]
) -> UserError:
    """Why the exporter gave up."""
    chain = list(_chain(error))
    names = {type(each).__name__ for each in chain}
    text = "\n".join(map(str, chain))
    for taken in ("data-value", "tensor-value"):
        listed = [each for each in findings if each.kind == taken]
        if listed and (names & {"GuardOnDataDependentSymNode", "Unsupported"} or "numpy()" in text):
            return UserError(
                f"{_listed(listed)}: --format {kind} cannot hold a branch on it",
                FIXES[listed[0].kind],
                "data-branch",
            )
    if "Constraints violated" in text or "ConstraintViolationError" in names:
        reasons = re.findall(r"(?:specialized it to be a constant \(\d+\)|generated guard [^\n]*)", text)
        lines = f"; lines that compute with a shape: {', '.join(warned)}" if warned else ""
        return UserError(
            f"the model works only for some batch sizes: torch.export found that the batch is "
            f"{_guard(reasons[0]) if reasons else 'fixed'}{lines}",
            "do not branch on the batch size or write it down: use x.shape[0], -1 or flatten(1)",
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
        "TorchScript compiles only a part of Python: change the model, or use --how trace, without branches on data"
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
    """Why the file does not answer like the original."""
    if found.other_pixels:
        return _other_pixels(found.other_pixels, original.record, exported.record)
    worst = found.worst
    measured = (
        f"the exported file does not answer like the original: logits differ by {worst.logits:.3g} (the limit is "
        f"{found.limit:.2g}), probabilities by {worst.probability_max:.3g}, and {found.whole.agree:,} of "
        f"{found.whole.images:,} images keep their class"
    )
    if other := _other_normalisation(original, exported, pixels, found.limit):
        return UserError(
            f"{measured}: it normalises pixels {other}, not by mean {original.record.mean} and deviation "
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
            f"{either(list(map(str, wrong)))}, so it holds the batch size of the export ({EXAMPLE_BATCH}){lines}",
            "do not branch on the batch size in forward",
            "shape-guard",
        )
    lines = f"; the trace made constants of {', '.join(warned)}" if warned else ""
    return UserError(f"{measured}{lines}", "no cause was found; try a different --format", "mismatch")


def wrong_answer(error: Exception, found_in: str) -> UserError:
    """The file fails on a batch that the original computes."""
    return UserError(
        f"the exported file fails on {found_in}: {_short(error)}",
        "it is probably specialised to the batch of the export: do not branch on the batch size in forward",
        "shape-guard",
    )


def _other_pixels(name: str, original: ModelRecord, exported: ModelRecord) -> UserError:
    """The two records prepare an image differently, or the same record does."""
    wrong = [
        f"{each.name} is {getattr(exported, each.name)}, not {getattr(original, each.name)}"
        for each in fields(ModelRecord)
        if getattr(original, each.name) != getattr(exported, each.name)
    ]
    why = "; ".join(wrong) or "the records are equal"
    return UserError(
        f"{name} does not become the pixels that evaluation gives the model: in the record of the file, {why}",
        "export it again; if that does not help, report it",
        "wrong-pixels",
    )


def _other_normalisation(
    original: TrainedModel, exported: Classifier, pixels: Tensor, tolerance: float
) -> str:
    """A mistake in the normalisation that gives exactly these wrong answers; empty if none does."""
    record = original.record
    mean, std = (value * 3 if len(value) == 1 else value for value in (record.mean, record.std))
    one, zero = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
    byte = (1 / 255,) * 3
    mistakes = (
        ("not at all", zero, byte),
        ("to 0..1 only", zero, one),
        ("without the mean", zero, std),
        ("without the deviation", mean, one),
        ("by ImageNet's mean and deviation", IMAGENET_MEAN, IMAGENET_STD),
        ("by 0.5 and 0.5", (0.5,) * 3, (0.5,) * 3),
        ("with the channels in the order BGR", mean[::-1], std[::-1]),
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
    """The lines of the user's code among those that tracing warned about, as `file:line`."""
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
    return f"{type(error).__name__}: {first[:240]}" if first else type(error).__name__


def _place(error: BaseException) -> str:
    """The last line of the traceback that is in the user's code, as `file:line: code`."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not is_library(each.filename) and "/drumline/inference/" not in each.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""

"""`drumline verify`: check a run, a checkpoint or a data set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.learning import AutoInt, Fraction, SourceName
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.files import check_output, write_output
from drumline.core.text import message, print_result, printable

if TYPE_CHECKING:
    from drumline.data.verify import DatasetReport

SHOWN = 10
"""Findings of a kind that `describe` lists; `write_list` writes all."""


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline verify`."""

    path: str
    """A run folder, a checkpoint or a data set."""
    list: str = ""
    """Write all findings to this file, one per line, separated by tabs. Data sets only."""
    labels: str = ""
    """A .csv, .tsv or .parquet file with the labels of the images in PATH (as data.labels). Data sets only."""
    holdout: Fraction = 0.0
    """Divide data without an evaluation split as data.holdout does, and compare the two parts. Data sets only."""
    folds: Annotated[int, Range(2, 1000, or_zero=True)] = 0
    """The same with the folds of data.folds. Data sets only."""
    fold: Annotated[int, Range(0)] = 0
    """As data.fold. Data sets only."""
    split_seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """As data.split_seed. Data sets only."""
    workers: Annotated[AutoInt, Range(1, 1024)] = "auto"
    """Processes that decode. Data sets only. `auto`: one per core."""
    source: SourceName = "auto"
    """What the data set is, if that cannot be detected."""


COMMAND = Command(
    name="verify",
    usage="RUN_OR_CHECKPOINT\nDATASET [options]",
    about="""
        Check every byte of every checkpoint of a run (or of one checkpoint) against its
        checksums, and print the hash of the newest state: parameters, buffers and optimizer.
        Two runs with the same hash have the same bits.

        Or check a data set (folders of images, .tar, packed set, label file, idx, CIFAR,
        npz): decode every sample as a run would, and list truncated, damaged, oversized and
        mislabelled files, files that are in both splits, and every row of a label file that
        cannot be used.

        Exit code 0: no problems. 1: problems, all of them listed.
    """,
    options=Options,
    examples="""
  drumline verify runs/photos-resnet50-1
  drumline verify photos --list broken.tsv
  drumline verify photos --labels labels.csv
  drumline verify photos/train --holdout 0.1
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "verify")
    path = Path(options.path)
    from drumline.data.sources.shards import is_pattern

    if not path.exists() and not is_pattern(options.path):
        raise UserError(f"{path} does not exist", "give a run folder, a checkpoint or a data set")
    if is_dataset(path):
        return _verify_dataset(path, options)
    if options != Options(options.path):
        raise UserError(
            f"{path} is a run or checkpoint, which takes no options",
            f"drumline verify {path}",
            code="not-data",
        )
    return _verify_run(path)


def is_dataset(path: Path) -> bool:
    """Whether a path is data rather than a run or one of its checkpoints."""
    from drumline.data.packed.format import looks_packed
    from drumline.data.sources.shards import is_pattern
    from drumline.state.checkpoint import checkpoints, is_checkpoint

    # A packed set has a manifest, too, like a checkpoint.
    if path.is_file() or is_pattern(str(path)) or looks_packed(path):
        return True
    # A distillation that was stopped in its initial phase has no checkpoints of its own yet.
    recipes = [path / "recipe.toml", *path.glob("initial-*/recipe.toml")] if path.is_dir() else []
    run = any(file.exists() for file in recipes) or checkpoints(path / "checkpoints") or checkpoints(path)
    return path.is_dir() and not run and not is_checkpoint(path)


def _verify_dataset(path: Path, options: Options) -> int:
    from drumline.data.sources import DatasetSpec
    from drumline.data.verify import verify_dataset

    listing = Path(options.list) if options.list else None
    if listing:
        check_output("--list", listing)
    workers = None if options.workers == "auto" else options.workers
    if (options.holdout and options.folds) or options.fold >= max(options.folds, 1):
        raise UserError(
            f"--holdout {options.holdout:g}, --folds {options.folds} and --fold {options.fold} cannot be combined",
            "give --holdout, or --folds N with a --fold below N",
        )
    divided = DatasetSpec(
        "auto",
        str(path),
        "train",
        options.holdout,
        folds=options.folds,
        fold=options.fold,
        split_seed=options.split_seed,
    )
    report = verify_dataset(path, options.source, workers, options.labels, divided)
    for line in describe(report):
        print(line)
    if listing:
        write_list(report, listing)
    print_result(summary(report))
    return 1 if report.bad else 0


def describe(report: DatasetReport) -> list[str]:
    """The report for people: errors, warnings, notes, and a summary."""
    from drumline.data.verify import BAD, NOTES, WARNINGS

    lines: list[str] = []
    counts = report.kinds
    for kind in (*BAD, *WARNINGS):
        word = "BAD " if kind in BAD else "warn"
        found = [finding for finding in report.findings if finding.kind == kind]
        for finding in found[:SHOWN]:
            sample = f" {finding.sample}" if finding.sample >= 0 else ""
            lines.append(f"{word} {kind} ({finding.split}{sample}): {finding.path} {finding.reason}")
        if len(found) > SHOWN:
            lines.append(f"{word} {kind}: {len(found) - SHOWN:,} more; --list FILE writes all of them")
    for kind, number in report.notes:
        lines.append(f"note {kind}: {number:,} of {report.samples:,} samples; {NOTES[kind]}")
    splits = ", ".join(f"{name} {samples:,}" for name, samples in report.splits) or "none could be opened"
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in (*BAD, *WARNINGS) if counts[kind])
    lines.append(
        f"{'BAD ' if report.bad else 'ok  '} {report.samples:,} samples ({splits}): {kinds or 'all sound'}"
    )
    if any(finding.kind in BAD and finding.sample >= 0 for finding in report.findings):
        lines.append(
            "fix: restore the bad files from where they came, or remove them; a run puts another sample in the place "
            "of each that it trains on, and scores those to evaluate as black images"
        )
    return [printable(line) for line in lines]


def summary(report: DatasetReport) -> dict[str, Any]:
    """The report for scripts (`print_result`)."""
    return {
        "path": report.path,
        "source": report.source,
        "samples": report.samples,
        "splits": dict(report.splits),
        "bad": report.bad,
        "warnings": report.warnings,
        "kinds": dict(report.kinds),
        "notes": dict(report.notes),
    }


def write_list(report: DatasetReport, file: Path) -> None:
    """Writes all findings, one per line: sample id, split, kind, path, reason, separated by tabs. A tab, line end or
    backslash inside a field is written as in C."""
    rows = ((str(f.sample), f.split, f.kind, f.path, f.reason) for f in report.findings)
    text = "".join("\t".join(_one_field(field) for field in row) + "\n" for row in rows)
    try:
        write_output(file, text.encode("utf-8", "surrogateescape"))  # names are bytes, in any encoding
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}", "give another --list") from error


def _one_field(text: str) -> str:
    """Backslashes and control characters as in C; bytes that are not UTF-8 stay, because they name the file."""
    return "".join(
        "\\\\" if sign == "\\" else ascii(sign)[1:-1] if ord(sign) < 32 or ord(sign) == 127 else sign
        for sign in text
    )


def _verify_run(path: Path) -> int:
    from drumline.core.progress import progress
    from drumline.state.verify import verify_run

    def watch(items: Iterable[Path], total: int) -> Iterable[Path]:
        return progress(items, "verifying checkpoints", total)

    verification = verify_run(path, watch)
    for line in verification.lines:
        print(message(line))
    print_result({key: value for key, value in asdict(verification).items() if key != "lines"})
    return 0 if verification.sound else 1

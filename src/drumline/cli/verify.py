"""`drumline verify`: check a run, a checkpoint or a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.limits import Range
from drumline.config.recipe import AutoInt
from drumline.core.errors import UserError
from drumline.core.text import message, print_result


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline verify`."""

    path: str
    """A run folder, a checkpoint or a data set."""
    list: str = ""
    """Write all findings to this file, one per line, separated by tabs. Data sets only."""
    workers: Annotated[AutoInt, Range(1, 1024)] = "auto"
    """Processes that decode. Data sets only. `auto`: one per core."""
    source: str = "auto"
    """What the data set is, if that cannot be detected: folder, tar, packed, idx, cifar10, cifar100, npz."""


COMMAND = Command(
    name="verify",
    usage="RUN_OR_CHECKPOINT\nDATASET [options]",
    about="""
        Check every byte of every checkpoint of a run (or of one checkpoint) against its
        checksums, and print the hash of the newest state: parameters, buffers and optimizer.
        Two runs with the same hash have the same bits.

        Or check a data set (folders of images, .tar, packed set, idx, CIFAR, npz): decode
        every sample as a run would, and list truncated, damaged, oversized and mislabelled
        files, and files that are in both splits.

        Exit code 0: no problems. 1: problems, all of them listed.
    """,
    options=Options,
    examples="""
  drumline verify runs/photos-resnet50-1
  drumline verify photos --list broken.tsv
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "verify")
    path = Path(options.path)
    if not path.exists():
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
    from drumline.state.checkpoint import checkpoints, is_checkpoint

    if path.is_file() or looks_packed(path):  # a packed set has a manifest, as checkpoints do
        return True
    # A distillation that was stopped in its initial stage has no checkpoints of its own yet.
    recipes = [path / "recipe.toml", *path.glob("initial-*/recipe.toml")] if path.is_dir() else []
    run = any(file.exists() for file in recipes) or checkpoints(path / "checkpoints") or checkpoints(path)
    return path.is_dir() and not run and not is_checkpoint(path)


def _verify_dataset(path: Path, options: Options) -> int:
    from drumline.data.verify import describe, summary, verify_dataset, write_list

    listing = Path(options.list) if options.list else None
    # Before hours of work, not after.
    if listing and (listing.is_dir() or not os.access(listing.absolute().parent, os.W_OK | os.X_OK)):
        raise UserError(f"--list {listing} cannot be written", "give a file in a folder that is writable")
    report = verify_dataset(path, options.source, None if options.workers == "auto" else options.workers)
    for line in describe(report):
        print(line)
    if listing:
        write_list(report, listing)
    print_result(summary(report))
    return 1 if report.bad else 0


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

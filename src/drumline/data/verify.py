"""`drumline verify DATASET`: every sample read and decoded once, and what is wrong with it listed.

Promises: a sample is bad here exactly when a run would refuse it (`decode` decides in both places); memory grows with
what is found and 16 bytes a sample, not with the data; the report does not depend on the number of processes. Damage
that Pillow passes over is a warning, where it can be seen: a flipped bit inside a JPEG's compressed data mostly
cannot (but in packed sets, whose samples have checksums). Changes nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import LostError, UserError
from drumline.core.files import write_bytes
from drumline.core.machine import usable_cores
from drumline.core.processes import WorkerKilled, deferred_interrupts, map_in_processes
from drumline.core.progress import progress
from drumline.core.text import printable
from drumline.data.examine import Examination, examine_range
from drumline.data.reading import patiently, read_whole
from drumline.data.sources import Dataset, DatasetSpec, EncodedDataset, detect_source, open_dataset
from drumline.data.sources.base import NoEvalSplit, describe_skipped
from drumline.data.sources.folder import EVAL_FOLDERS, EXTENSIONS
from drumline.data.sources.packed import PackedArrays

BAD = (
    "unopened",  # a whole split: no run starts on it
    "unreadable",
    "changed",  # not what was packed
    "empty",
    "not-an-image",
    "truncated",
    "damaged",
    "bomb",
    "unsupported",
)
"""Kinds that a run refuses."""
WARNINGS = (
    "suspect",  # decodes, but its file shows damage
    "mislabelled",  # the name says another format
    "passed-over",  # files of a split that are not taken for images
    "leak",  # an evaluation sample with the bytes of a training sample
)
NOTES = {
    "animated": "only the first frame is used",
    "cmyk": "turned into RGB by Pillow's simple rule",
    "16-bit": "cut to 8 bits",
}
"""Worth knowing, and counted only: in some sets every sample is of such a kind."""
SHOWN = 10
"""Findings of a kind that `describe` lists; `write_list` writes all."""
CHUNK = 16
"""Samples that a process takes at a time, some 50 ms of work."""
AHEAD = 4
"""Such tasks under way for each process."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with one sample, or (sample -1) with a split or folder."""

    split: str
    sample: int
    kind: str
    path: str
    reason: str


@dataclass(frozen=True)
class DatasetReport:
    """What was found, training split first, by sample."""

    path: str
    source: str
    splits: tuple[tuple[str, int], ...]
    """Name and number of samples of each split: train, eval, or images for those in no split."""
    findings: tuple[Finding, ...]
    notes: tuple[tuple[str, int], ...]
    """How many samples each of `NOTES` applies to."""

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self.splits)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(finding.kind for finding in self.findings)

    @property
    def bad(self) -> int:
        return sum(finding.kind in BAD for finding in self.findings)

    @property
    def warnings(self) -> int:
        return sum(finding.kind in WARNINGS for finding in self.findings)

    @property
    def sound(self) -> bool:
        """Nothing that a run would refuse; warnings may remain."""
        return self.bad == 0


def verify_dataset(path: Path, source: str = "auto", workers: int | None = None) -> DatasetReport:
    """Reads and decodes every sample of a data set, with `workers` processes (by default one per core).

    A path without data is a `UserError`; a split that does not open is a finding, and then its image files are looked
    at as they lie.
    """
    name = detect_source(source, str(path))
    splits, findings = _open_splits(path, name)
    total = sum(len(split.source) for split in splits)
    workers = min(workers or usable_cores(), -(-total // CHUNK))
    digests = {split.name: np.zeros((len(split.source), 2), np.uint64) for split in splits}
    notes: Counter[str] = Counter()
    files = all(isinstance(split.source, EncodedDataset) for split in splits)
    results = _in_processes(splits, workers) if files and workers > 1 else _in_this_process(splits)
    with closing(results), closing(progress(results, "checking", total)) as shown:
        for split, sample, result in shown:
            digests[split.name][sample] = np.frombuffer(result.digest, np.uint64)
            notes.update(result.notes)
            for kind, reason in result.findings:
                findings.append(Finding(split.name, sample, kind, split.where(sample), reason))
    findings += _leaks(splits, digests)
    order = {split: place for place, split in enumerate(("train", "eval", "images"))}
    return DatasetReport(
        path=str(path),
        source=name,
        splits=tuple((split.name, len(split.source)) for split in splits),
        findings=tuple(sorted(findings, key=lambda found: (order[found.split], found.sample))),
        notes=tuple((kind, notes[kind]) for kind in NOTES if notes[kind]),
    )


def describe(report: DatasetReport) -> list[str]:
    """The report for people: what is bad, what is doubtful, and a summary."""
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
        f"{'ok  ' if report.sound else 'BAD '} {report.samples:,} samples ({splits}): {kinds or 'all sound'}"
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
    """All findings, one a line: sample id, split, kind, path, reason, with tabs between them; a tab, line end or
    backslash inside a field is written as in C."""
    rows = ((str(f.sample), f.split, f.kind, f.path, f.reason) for f in report.findings)
    text = "".join("\t".join(_one_field(field) for field in row) + "\n" for row in rows)
    try:
        write_bytes(file, text.encode("utf-8", "surrogateescape"))  # names are bytes, in any encoding
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}", "give another --list") from error


@dataclass(frozen=True)
class _Loose:
    """Says to a process: the image files below this folder, as they lie."""

    root: str


class _LooseFiles(EncodedDataset):
    """Image files outside of any layout, sorted by path; also links to nothing and other things with such a name."""

    def __init__(self, root: str) -> None:
        self.unreadable: list[tuple[str, str]] = []
        self.paths: list[str] = []
        seen: set[tuple[int, int]] = set()
        for folder, folders, files in os.walk(root, onerror=self._note, followlinks=True):
            status = os.stat(folder)  # noqa: PTH116 (os.walk gives strings)
            if (status.st_dev, status.st_ino) in seen:  # a link to where we have been
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            names = (name for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
            self.paths += (f"{folder}{os.sep}{name}" for name in sorted(names))

    def _note(self, error: OSError) -> None:
        self.unreadable.append((str(error.filename), str(error.strerror)))

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, sample: int) -> str:
        return self.paths[sample]

    def read(self, sample: int) -> bytes:
        path = Path(self.paths[sample])
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a broken link")
        return patiently(lambda: read_whole(path), str(path))


@dataclass(frozen=True)
class _Split:
    name: str
    spec: DatasetSpec | _Loose
    source: Dataset

    def where(self, sample: int) -> str:
        if isinstance(self.source, EncodedDataset):
            return self.source.where(sample)
        return f"{self.name} image {sample}"


def _open_splits(path: Path, name: str) -> tuple[list[_Split], list[Finding]]:
    """The splits that can be examined, and a finding for each that a run could not open."""
    splits: list[_Split] = []
    findings: list[Finding] = []
    refused: UserError | None = None
    sides: tuple[Literal["train", "eval"], ...] = ("train", "eval")
    for side in sides:
        spec = DatasetSpec(name, str(path), side)
        try:
            opened = open_dataset(spec)
            if isinstance(opened, PackedArrays):
                opened.check()
            splits.append(_Split(side, spec, opened))
            if isinstance(opened, EncodedDataset) and (skipped := describe_skipped(opened)):
                findings.append(Finding(side, -1, "passed-over", str(path), f"has {skipped}"))
        except NoEvalSplit:
            continue
        except UserError as error:
            if refused is None or error.what != refused.what:  # one fault may close both
                reason = f"cannot be opened: {error.what}; fix: {error.fix}"
                findings.append(Finding(side, -1, "unopened", str(path), reason))
            refused = error
    if refused is None or name != "folder":
        return splits, findings
    loose = _loose_splits(path)
    if not any(len(split.source) for split in loose):
        raise refused
    for split in loose:
        assert isinstance(split.source, _LooseFiles)
        for folder, reason in split.source.unreadable:
            findings.append(Finding(split.name, -1, "unreadable", folder, f"cannot be read: {reason}"))
    flat = not any(entry.is_dir() for entry in path.iterdir() if not entry.name.startswith("."))
    return loose, [found for found in findings if not (flat and found.kind == "unopened")]


def _loose_splits(path: Path) -> list[_Split]:
    """The files of a folder that does not open as class folders, in splits by folder name."""
    evaluation = next((folder for folder in EVAL_FOLDERS if (path / folder).is_dir()), None)
    roots = {"images": path}
    if evaluation and (path / "train").is_dir():
        roots = {"train": path / "train", "eval": path / evaluation}
    return [_Split(name, _Loose(str(root)), _LooseFiles(str(root))) for name, root in roots.items()]


_Results = Generator[tuple[_Split, int, Examination], None, None]


def _ranges(splits: list[_Split]) -> Iterator[tuple[_Split, int, int]]:
    for split in splits:
        for start in range(0, len(split.source), CHUNK):
            yield split, start, min(start + CHUNK, len(split.source))


def _in_this_process(splits: list[_Split]) -> _Results:
    for split, start, stop in _ranges(splits):
        for sample, result in enumerate(examine_range(split.source, start, stop), start):
            yield split, sample, result


def _in_processes(splits: list[_Split], workers: int) -> _Results:
    """The same, by processes that open the data themselves; results come in order, a few ranges ahead at most."""
    tasks = ((split.spec, start, stop) for split, start, stop in _ranges(splits))
    results = map_in_processes(_examine, tasks, workers, preload=__name__, pending=AHEAD)
    split, start, _ = next(_ranges(splits))
    try:
        with closing(results), deferred_interrupts() as interrupted:
            for (split, start, _), found in zip(_ranges(splits), results, strict=True):
                for sample, result in enumerate(found, start):
                    yield split, sample, result
                if interrupted():
                    raise KeyboardInterrupt
    except WorkerKilled as error:
        raise LostError(
            f"a process was killed, at {split.where(start)} or within {AHEAD * workers * CHUNK} samples of it",
            "if memory ran out, see `dmesg`; otherwise try these files one by one",
        ) from error


def _examine(task: tuple[DatasetSpec | _Loose, int, int]) -> list[Examination]:
    spec, start, stop = task
    return examine_range(_opened(spec), start, stop)


@lru_cache(maxsize=2)
def _opened(spec: DatasetSpec | _Loose) -> Dataset:
    """The data in this process, opened for its first range."""
    return _LooseFiles(spec.root) if isinstance(spec, _Loose) else open_dataset(spec, again=True)


def _leaks(splits: list[_Split], digests: dict[str, NDArray[np.uint64]]) -> Iterator[Finding]:
    """Evaluation samples that have the bytes of a training sample."""
    by_name = {split.name: split for split in splits}
    if not {"train", "eval"} <= by_name.keys():
        return
    training, evaluation = digests["train"], digests["eval"]
    order = np.argsort(training[:, 0], kind="stable")
    place = np.searchsorted(training[order, 0], evaluation[:, 0])
    place = np.minimum(place, len(order) - 1)
    same = (training[order[place]] == evaluation).all(axis=1) & evaluation.any(axis=1)
    for sample in np.flatnonzero(same).tolist():
        twin = int(order[place[sample]])
        reason = f"has the same bytes as training sample {twin}, {by_name['train'].where(twin)}"
        yield Finding("eval", sample, "leak", by_name["eval"].where(sample), reason)


def _one_field(text: str) -> str:
    """Backslashes and control characters as in C; bytes that are no UTF-8 stay, for they name the file."""
    return "".join(
        "\\\\" if sign == "\\" else ascii(sign)[1:-1] if ord(sign) < 32 or ord(sign) == 127 else sign
        for sign in text
    )

"""The checks of `drumline verify DATASET`: reads and decodes every sample once and lists every problem.

Promises: a sample is bad here exactly when a run would reject it, since `decode` decides in both places. Memory grows
with what is found and 16 bytes a sample, not with the data. The report does not depend on the number of processes.
Damage that Pillow ignores is a warning if it can be detected: most flipped bits inside a JPEG's compressed data
cannot (but in packed sets, whose samples have checksums, all can). Changes nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import LostError, UserError
from drumline.core.machine import usable_cores
from drumline.core.processes import WorkerKilled, deferred_interrupts, map_in_processes
from drumline.core.progress import progress
from drumline.data.examine import Examination, examine_range
from drumline.data.packed.format import SPLITS
from drumline.data.reading import patiently, read_whole
from drumline.data.sources import (
    Dataset,
    DatasetSpec,
    EncodedDataset,
    detect_source,
    open_dataset,
)
from drumline.data.sources.base import Fault, FaultyData, NoEvalSplit, describe_skipped
from drumline.data.sources.folder import EVAL_FOLDERS, EXTENSIONS, is_hidden
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
    "missing",  # rows of a label file: any of these prevents a run from starting
    "ambiguous",
    "no-path",
    "no-label",
    "two-labels",
    "two-names",
    "two-splits",
    "unknown-split",
    "unknown-class",
    "repeated-key",  # of shards
)
"""Kinds that a run rejects."""
WARNINGS = (
    "suspect",  # decodes, but its file shows damage
    "mislabelled",  # the name says another format
    "passed-over",  # files of a split that are not images by their names
    "leak",  # an evaluation sample with the bytes of a training sample
    "repeated-row",
    "left-out",
    "unlisted",
    "case",
    "incomplete",
    "scattered",
    "missing-shard",
)
NOTES = {
    "animated": "only the first frame is used",
    "cmyk": "turned into RGB by Pillow's simple rule",
    "16-bit": "cut to 8 bits",
}
"""Worth knowing, and counted only: in some sets every sample is of such a kind."""
CHUNK = 16
"""Samples that a process takes at a time, some 50 ms of work."""
AHEAD = 4
"""Such tasks under way for each process."""


@dataclass(frozen=True, slots=True)
class DatasetFinding:
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
    findings: tuple[DatasetFinding, ...]
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
        """0 if a run would accept everything; warnings may remain."""
        return sum(finding.kind in BAD for finding in self.findings)

    @property
    def warnings(self) -> int:
        return sum(finding.kind in WARNINGS for finding in self.findings)


def verify_dataset(
    path: Path,
    source: str = "auto",
    workers: int | None = None,
    labels: str = "",
    divided: DatasetSpec | None = None,
) -> DatasetReport:
    """Reads and decodes every sample of a data set, with `workers` processes (by default one per core). `divided`
    says how a run would divide data without an evaluation split.

    A path without data is a `UserError`. A split that does not open is a finding, and then all image files below its
    folder are checked.
    """
    name = detect_source(source, str(path), labels=labels)
    divided = divided or DatasetSpec(name, str(path), "train")
    splits, findings = _open_splits(path, replace(divided, source=name, path=str(path), labels=labels))
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
                findings.append(DatasetFinding(split.name, sample, kind, split.where(sample), reason))
    findings += _leaks(splits, digests)
    order = ("train", "eval", "images").index
    return DatasetReport(
        path=str(path),
        source=name,
        splits=tuple((split.name, len(split.source)) for split in splits),
        findings=tuple(sorted(findings, key=lambda found: (order(found.split), found.sample))),
        notes=tuple((kind, notes[kind]) for kind in NOTES if notes[kind]),
    )


@dataclass(frozen=True)
class _Split:
    name: str
    spec: DatasetSpec | Path
    """What a process opens: a split of the data set, or the image files below a folder."""
    source: Dataset

    def where(self, sample: int) -> str:
        if isinstance(self.source, EncodedDataset):
            return self.source.where(sample)
        return f"{self.name} image {sample}"


def _open_splits(path: Path, whole: DatasetSpec) -> tuple[list[_Split], list[DatasetFinding]]:
    """The splits that can be examined, and a finding for each that a run could not open."""
    splits: list[_Split] = []
    findings: list[DatasetFinding] = []
    rejected: UserError | None = None
    for side in SPLITS:
        spec = replace(whole, split=side)
        try:
            opened = open_dataset(spec)
            if isinstance(opened, PackedArrays):
                opened.check()
            splits.append(_Split(side, spec, opened))
            if isinstance(opened, EncodedDataset) and (skipped := describe_skipped(opened)):
                findings.append(DatasetFinding(side, -1, "passed-over", str(path), f"has {skipped}"))
            if isinstance(opened, EncodedDataset):
                findings += _faults(side, opened.remarks, findings)
        except NoEvalSplit:
            continue
        except UserError as error:
            if rejected is None or error.what != rejected.what:  # one fault may close both
                if isinstance(error, FaultyData):
                    findings += _faults(side, error.faults, findings)
                else:
                    reason = f"cannot be opened: {error.what}; fix: {error.fix}"
                    findings.append(DatasetFinding(side, -1, "unopened", str(path), reason))
            rejected = error
    name = whole.source
    if name == "labels" and isinstance(rejected, FaultyData):
        root = path if path.is_dir() else path.parent
        return [_Split("images", root, LooseFiles(root))], findings
    if rejected is None or name != "folder":
        return splits, findings
    loose = _loose_splits(path)
    if not any(len(split.source) for split in loose):
        raise rejected
    for split in loose:
        assert isinstance(split.source, LooseFiles)
        for folder, reason in split.source.unreadable:
            findings.append(DatasetFinding(split.name, -1, "unreadable", folder, f"cannot be read: {reason}"))
    flat = not any(entry.is_dir() for entry in path.iterdir() if not is_hidden(entry.name))
    return loose, [found for found in findings if not (flat and found.kind == "unopened")]


def _faults(side: str, faults: Sequence[Fault], known: Sequence[DatasetFinding]) -> list[DatasetFinding]:
    """Findings for faults of the data that are not `known` from the other split."""
    before = {(each.kind, each.path, each.reason) for each in known}
    items = [(fault.kind, *item) for fault in faults for item in fault.items]
    return [DatasetFinding(side, -1, *item) for item in items if item not in before]


def _loose_splits(path: Path) -> list[_Split]:
    """The files of a folder that does not open as class folders, in splits by folder name."""
    evaluation = next((folder for folder in EVAL_FOLDERS if (path / folder).is_dir()), None)
    roots = {"images": path}
    if evaluation and (path / "train").is_dir():
        roots = {"train": path / "train", "eval": path / evaluation}
    return [_Split(name, root, LooseFiles(root)) for name, root in roots.items()]


class LooseFiles(EncodedDataset):
    """All files below a folder with an image extension, sorted by path."""

    def __init__(self, root: Path) -> None:
        self.unreadable: list[tuple[str, str]] = []
        self.paths: list[str] = []
        seen: set[tuple[int, int]] = set()

        def note(error: OSError) -> None:
            self.unreadable.append((str(error.filename), str(error.strerror)))

        for folder, folders, files in os.walk(root, onerror=note, followlinks=True):
            status = os.stat(folder)  # noqa: PTH116 (os.walk gives strings)
            if (status.st_dev, status.st_ino) in seen:  # a link back to a folder that was walked
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            names = (name for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
            self.paths += (f"{folder}{os.sep}{name}" for name in sorted(names))

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, sample: int) -> str:
        return self.paths[sample]

    def read(self, sample: int) -> bytes:
        path = Path(self.paths[sample])
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a broken link")
        return patiently(lambda: read_whole(path), str(path))


def _ranges(splits: list[_Split]) -> Iterator[tuple[_Split, int, int]]:
    for split in splits:
        for start in range(0, len(split.source), CHUNK):
            yield split, start, min(start + CHUNK, len(split.source))


def _in_this_process(splits: list[_Split]) -> Generator[tuple[_Split, int, Examination]]:
    for split, start, stop in _ranges(splits):
        for sample, result in enumerate(examine_range(split.source, start, stop), start):
            yield split, sample, result


def _in_processes(splits: list[_Split], workers: int) -> Generator[tuple[_Split, int, Examination]]:
    """The same in processes that open the data themselves. Results come in order, a few ranges ahead at most."""
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


def _examine(task: tuple[DatasetSpec | Path, int, int]) -> list[Examination]:
    spec, start, stop = task
    return examine_range(_opened(spec), start, stop)


@lru_cache(maxsize=2)
def _opened(spec: DatasetSpec | Path) -> Dataset:
    """The data in this process, opened for its first range."""
    return LooseFiles(spec) if isinstance(spec, Path) else open_dataset(spec, again=True)


def _leaks(splits: list[_Split], digests: dict[str, NDArray[np.uint64]]) -> Iterator[DatasetFinding]:
    """Evaluation samples that have the bytes of a training sample."""
    by_name = {split.name: split for split in splits}
    if not {"train", "eval"} <= by_name.keys():
        return
    training, evaluation = digests["train"], digests["eval"]
    order = np.argsort(training[:, 0], kind="stable")
    place = np.minimum(np.searchsorted(training[order, 0], evaluation[:, 0]), len(order) - 1)
    same = (training[order[place]] == evaluation).all(axis=1) & evaluation.any(axis=1)
    for sample in np.flatnonzero(same).tolist():
        twin = int(order[place[sample]])
        reason = f"has the same bytes as training sample {twin}, {by_name['train'].where(twin)}"
        yield DatasetFinding("eval", sample, "leak", by_name["eval"].where(sample), reason)

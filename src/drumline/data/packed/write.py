"""The work of `drumline pack`: every sample of a source, in order, into a packed set.

Promises: the result depends on source and options alone, not on the number of processes or on interruptions. It is
written to OUT.partial, which is renamed when it is complete and on disk. Samples that cannot be read as images are
kept unchanged and listed, so ids do not shift. Files of other origin are never touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from drumline.core.errors import UserError
from drumline.core.files import rename_folder, sync_folder, write_text
from drumline.core.lock import exclusive
from drumline.core.processes import deferred_interrupts
from drumline.core.progress import progress
from drumline.data.packed.format import (
    MANIFEST,
    RECORD,
    SPLITS,
    VERSION,
    PackedManifest,
    PackOptions,
    Split,
    SplitWriter,
    index_file,
    looks_packed,
    read_manifest,
    sealed,
    write_manifest,
)
from drumline.data.packed.stored import JPEG_QUALITY, store, stored_samples
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, detect_source, open_dataset
from drumline.data.sources.base import NoEvalSplit
from drumline.data.sources.labels import places

PROGRESS = "progress.json"
COMMIT_SECONDS = 5.0
COMMIT_BYTES = 256 << 20
ESTIMATED_FROM = 128
"""Samples of a split by which its packed size is estimated."""
ESTIMATE_MARGIN = 1.5
"""One huge image among them, or missing from them, can make the estimate that much too large or too small."""


def pack_set(
    source: str,
    path: str,
    out: Path,
    options: PackOptions,
    workers: int,
    force: bool,
    say: Callable[[str], None],
    labels: str = "",
) -> Path:
    """Packs both splits of a source into the folder `out`, or continues an interrupted pack of the same source."""
    name = detect_source(source, path, labels=labels)
    out = Path(os.path.abspath(out.expanduser()))  # noqa: PTH100 (resolve() would follow a link at `out`)
    _check_overlap(name, path, out)
    _check_target(out, force)
    job = _job(name, path, options, labels)
    partial = out.with_name(f"{out.name}.partial")
    with _writing(out), _locked(partial):
        for leftover in partial.glob("*.tmp"):
            leftover.unlink()
        if force:
            _forget_other(partial, job)
        done = _progress(partial, job)
        if done is not None:
            _announce(job, out, done, say)
            # Before any other file: it marks the folder as an unfinished pack of this job.
            _save_progress(partial, job, done)
            splits = {split: _pack_split(job, partial, split, done, workers) for split in job.sources}
            write_manifest(partial, _manifest(job, partial, splits))
            (partial / PROGRESS).unlink()
        _put_in_place(partial, out, force)
    return out


@dataclass(frozen=True)
class _Job:
    """What is to be packed, and all that decides the outcome."""

    name: str
    path: str
    options: PackOptions
    specs: dict[str, DatasetSpec]
    sources: dict[str, Dataset]
    names: dict[str, list[bytes]]
    digest: str


def _job(name: str, path: str, options: PackOptions, labels: str) -> _Job:
    specs: dict[str, DatasetSpec] = {
        split: DatasetSpec(name, path, split, options.holdout, labels=labels) for split in SPLITS
    }
    sources = {"train": open_dataset(specs["train"])}
    with suppress(NoEvalSplit):
        sources["eval"] = open_dataset(specs["eval"])
    root = str(places(specs["train"])[1] if name == "labels" else Path(path).expanduser())
    names = {split: _names(source, root) for split, source in sources.items()}
    digest = hashlib.sha256(json.dumps([VERSION, JPEG_QUALITY, name, asdict(options)]).encode())
    for split, source in sources.items():
        digest.update(json.dumps([split, len(source), source.classes]).encode())
        digest.update(source.labels.tobytes())
        for sample_name in names[split]:
            digest.update(sample_name + b"\0")
    return _Job(name, path, options, specs, sources, names, digest.hexdigest())


def _names(source: Dataset, root: str) -> list[bytes]:
    """Each sample's name within the source; arrays have none."""
    if isinstance(source, ArrayDataset):
        return [b""] * len(source)
    names = []
    for sample in range(len(source)):
        where = source.where(sample)
        inside = where.startswith((root + os.sep, root + ":"))
        names.append((where[len(root) + 1 :] if inside else where).encode("utf-8", "surrogateescape"))
    return names


def _check_overlap(name: str, path: str, out: Path) -> None:
    place = Path(path).expanduser().resolve()
    if not path or not place.exists():
        return
    target = out.resolve()
    if target == place or target in place.parents:
        raise UserError(
            f"{path} lies inside {out}, which is to be written", fix="choose another place for OUT"
        )
    if name == "folder" and place in target.parents:
        raise UserError(
            f"{out} lies inside {path} and would become one of its class folders",
            fix=f"choose a place outside, such as {place}.packed",
        )


def _check_target(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not force:
        raise UserError(f"{out} exists", fix="choose another name, or replace it with --force")
    if not looks_packed(out):
        raise UserError(
            f"{out} is not a packed set, so --force does not replace it",
            fix="choose another name, or remove it yourself",
        )


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turns errors of the disk into `UserError`s. Sources report their own, so any here is from writing."""
    again = "then run the same command again; it continues where it stopped"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on the disk of {out}", fix=f"make room, {again}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"no permission to write {error.filename or out} ({error.strerror})",
                fix="choose a folder you may write to",
            ) from error
        raise UserError(f"{out} cannot be written: {error}", fix=f"check the disk, {again}") from error


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Creates the working folder, for one process at a time."""
    partial.mkdir(parents=True, exist_ok=True)
    held = UserError(f"another process is packing into {partial}", fix="wait until it has finished")
    with ExitStack() as locks:
        try:
            # Beside the folder, which is renamed when the set is complete.
            locks.enter_context(exclusive(partial.with_name(f"{partial.name}.lock"), held))
        except OSError as error:
            # Packing does not need a lock where the file system has none.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        try:
            yield
        finally:
            with suppress(OSError):  # not empty: packing can continue; missing: it has its final name
                partial.rmdir()


def _forget_other(partial: Path, job: _Job) -> None:
    """With --force, the leftover of another pack makes way; nothing that is not of a pack does."""
    try:
        _progress(partial, job)
    except UserError:
        if not looks_packed(partial) and not (partial / PROGRESS).is_file():
            raise
        for file in partial.iterdir():
            file.unlink()
        sync_folder(partial)


def _progress(partial: Path, job: _Job) -> dict[str, Split] | None:
    """How far each split is; None when all is done but the renaming."""
    nothing = {split: Split(0, (), 0) for split in job.sources}
    file, splits = partial / PROGRESS, None
    if file.is_file():
        try:
            kept = json.loads(file.read_bytes())
            digest = kept["job"]
            splits = {
                split: Split(**{**state, "shards": tuple(state["shards"])})
                for split, state in kept["splits"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{file} is damaged", fix="start again with --force") from error
    elif (partial / MANIFEST).is_file():
        digest = read_manifest(partial).job
    elif any(partial.iterdir()):
        raise UserError(f"{partial} exists and is not an unfinished packed set", fix="move it away")
    else:
        return nothing
    if digest != job.digest:
        raise UserError(
            f"{partial} is an unfinished pack of different data or with different options",
            fix="repeat the command that started it to continue it, or give --force to start again",
        )
    return None if splits is None else {**nothing, **splits}


def _announce(job: _Job, out: Path, done: dict[str, Split], say: Callable[[str], None]) -> None:
    """Reports what will be written and its size; rejects a disk that is too small."""
    needed = sum(_estimate(source, job.options) for source in job.sources.values())
    written = sum(sum(state.shards) for state in done.values())
    free = shutil.disk_usage(out.parent).free
    counts = " + ".join(f"{len(source):,} {split}" for split, source in job.sources.items())
    say(
        f"{job.path or job.name}: {counts} samples, {len(job.sources['train'].classes):,} classes ({job.name})"
    )
    arrays = isinstance(job.sources["train"], ArrayDataset)
    if arrays:
        how = "pixels as they are"
    elif job.options.raw:
        how = "decoded pixels"
    else:
        how = "image files as they are"
    if job.options.resize_short:
        how = f"shorter sides above {job.options.resize_short} resized to it"
        if not arrays:
            how += ", as pixels" if job.options.raw else f", as JPEG of quality {JPEG_QUALITY}, 4:4:4"
        how += "; NOT pixel-equal to the originals"
    say(f"{out}: about {size_text(needed)} ({how}); {size_text(free)} are free")
    if "eval" not in job.sources:
        say("the source has no evaluation split: --data.holdout makes one when training, or --holdout here")
    if started := sum(state.samples for state in done.values()):
        say(f"continuing after {started:,} samples")
    if needed - written > ESTIMATE_MARGIN * free:
        raise UserError(
            f"{out} needs about {size_text(needed - written)}, but its disk has only {size_text(free)} free",
            fix="make room, choose another disk, or pack smaller images with --resize-short N",
        )
    if ESTIMATE_MARGIN * (needed - written) > free:
        say("WARNING: the disk may be too small. If it fills up, make room and run the same command again")


def _estimate(source: Dataset, options: PackOptions) -> int:
    """About how many bytes a split takes: exact for arrays and small sets."""
    count = 1 if isinstance(source, ArrayDataset) else ESTIMATED_FROM
    samples = np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)).tolist()
    stored = sum(len(store(source, sample, options).data) for sample in samples)
    return stored * len(source) // len(samples) + RECORD.itemsize * len(source)


def size_text(count: int) -> str:
    """1234567890 -> `1.2 GB`."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.{0 if count >= 100 * unit else 1}f} {name}"
    return f"{count} bytes"


def _pack_split(job: _Job, partial: Path, split: str, done: dict[str, Split], workers: int) -> Split:
    """Appends the missing samples, and saves its progress every few seconds."""
    source, names, state = job.sources[split], job.names[split], done[split]
    labels = source.labels.tolist()
    arrays = isinstance(source, ArrayDataset)
    with SplitWriter(partial, split, None if arrays else job.options.shard_mb << 20, state) as writer:
        next_commit, waiting = time.monotonic() + COMMIT_SECONDS, 0
        with (
            closing(
                stored_samples(source, job.specs[split], job.options, state.samples, 1 if arrays else workers)
            ) as made,
            closing(progress(made, f"packing {split}", len(source) - state.samples)) as shown,
            deferred_interrupts() as interrupted,
        ):
            for sample, stored in enumerate(shown, start=state.samples):
                writer.add(stored, labels[sample], names[sample])
                waiting += len(stored.data)
                if waiting >= COMMIT_BYTES or time.monotonic() >= next_commit or interrupted():
                    done[split] = writer.commit()
                    _save_progress(partial, job, done)
                    next_commit, waiting = time.monotonic() + COMMIT_SECONDS, 0
                if interrupted():
                    raise KeyboardInterrupt
        done[split] = writer.commit()
        _save_progress(partial, job, done)
    return done[split]


def _save_progress(partial: Path, job: _Job, done: dict[str, Split]) -> None:
    splits = {split: asdict(state) for split, state in done.items()}
    write_text(partial / PROGRESS, json.dumps({"job": job.digest, "splits": splits}))


def _manifest(job: _Job, partial: Path, splits: dict[str, Split]) -> PackedManifest:
    train = job.sources["train"]
    return PackedManifest(
        source=train.name,
        holds="arrays" if isinstance(train, ArrayDataset) else "files",
        classes=train.classes,
        options=job.options,
        job=job.digest,
        train=sealed(partial, "train", splits["train"]),
        eval=sealed(partial, "eval", splits["eval"]) if "eval" in splits else None,
    )


def _put_in_place(partial: Path, out: Path, force: bool) -> None:
    """The old set, if any, is moved aside first and removed last: one of the two is always there, whole."""
    old = out.with_name(f"{out.name}.replaced")
    if force and looks_packed(out):
        _remove(old)
        out.rename(old)
    rename_folder(partial, out)
    if force:
        _remove(old)


def _remove(old: Path) -> None:
    """A packed set, or what is left of one whose removal was interrupted: the file it is known by goes last."""
    if old.is_dir() and (looks_packed(old) or not any(old.iterdir())):
        known_by = index_file(old, "train")
        for file in sorted(old.iterdir(), key=lambda file: file == known_by):
            file.unlink()
        old.rmdir()

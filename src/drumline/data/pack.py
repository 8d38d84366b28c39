"""The work of `drumline pack`: every sample of a source, in order, into a packed set.

Promises: what comes out depends on source and options alone, not on the number of processes or on interruptions; work
goes on in OUT.partial, which gets its final name when it is whole and on disk. Samples that cannot be read as images
are kept as they are and listed, so that ids do not shift. Refuses to touch what it did not make.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from PIL import Image

from drumline.data.decode import FORMATS, MAX_PIXELS, decode
from drumline.data.jpeg import read_header
from drumline.data.packed import (
    MANIFEST,
    RECORD,
    SPLITS,
    VERSION,
    Kind,
    Manifest,
    Options,
    Split,
    SplitWriter,
    Stored,
    index_file,
    looks_packed,
    read_manifest,
    sealed,
    write_manifest,
)
from drumline.data.resize import resize
from drumline.data.sources import ArraySource, Source, SourceSpec, detect_source, open_source
from drumline.data.sources.base import Images, NoEvalSplit
from drumline.data.sources.packed import PackedFiles
from drumline.errors import UserError
from drumline.observe.display import progress
from drumline.state.atomic import rename_folder, sync_folder, write_text

JPEG_QUALITY = 95
"""Of resized images, with full colour resolution (4:4:4)."""
PROGRESS = "progress.json"
COMMIT_SECONDS = 5.0
COMMIT_BYTES = 256 << 20
CHUNK = 16
"""Samples handed to a process at a time."""
LOOKED_AT = 128
"""Samples of a split by which its packed size is estimated."""


def pack_set(
    source: str, path: str, out: Path, options: Options, workers: int, force: bool, say: Callable[[str], None]
) -> Path:
    """Packs both splits of a source into the folder `out`; goes on with an interrupted pack of the same."""
    name = detect_source(source, path)
    out = Path(os.path.abspath(out.expanduser()))  # noqa: PTH100 (resolve() would follow a link at `out`)
    _refuse_overlap(name, path, out)
    _refuse_existing(out, force)
    job = _job(name, path, options)
    partial = out.with_name(f"{out.name}.partial")
    with _writing(out), _locked(partial):
        for leftover in partial.glob("*.tmp"):
            leftover.unlink()
        if force:
            _forget_other(partial, job)
        done = _progress(partial, job)
        if done is not None:
            _announce(job, out, done, say)
            # Before any other file: from now on the folder is known as the beginning of this pack.
            _note(partial, job, done)
            splits = {split: _pack_split(job, partial, split, done, workers) for split in job.sources}
            write_manifest(partial, _manifest(job, partial, splits))
            (partial / PROGRESS).unlink()
        _put_in_place(partial, out, force)
    return out


def store(source: Source, sample: int, options: Options) -> Stored:
    """A sample as it is packed. Never fails on a bad image; a file that cannot be read at all is a `UserError`."""
    if isinstance(source, ArraySource):
        return _raw(_shortened(source.take(np.array([sample]))[0], options.resize_short))
    if isinstance(source, PackedFiles) and source.kinds[sample] >= Kind.RGB:
        source.read(sample)  # checks it
        return _raw(_shortened(source.pixels(sample), options.resize_short), int(source.orientations[sample]))
    data = source.read(sample)
    kept = as_it_is(data)
    shrinks = 0 < options.resize_short < min(kept.width, kept.height)
    if kept.width == 0 or not (options.raw or shrinks):
        return kept
    try:
        image = decode(data, source.where(sample))
    except UserError:
        return replace(kept, kind=Kind.OTHER, width=0, height=0, orientation=0)
    orientation = _orientation(image)
    if orientation is None:
        return kept
    pixels = _shortened(np.asarray(image), options.resize_short)
    return _raw(pixels, orientation) if options.raw else _jpeg(pixels, orientation)


def as_it_is(data: bytes) -> Stored:
    """An image file, not decoded: only its header is looked at. Width and height 0: it is not a readable image."""
    kind, width, height, orientation = Kind.OTHER, 0, 0, 0
    header = read_header(data)
    if header is not None and header.precision == 8:
        kind, width, height, orientation = Kind.JPEG, header.width, header.height, header.orientation
    else:
        with suppress(Exception):  # a damaged file makes Pillow raise nearly anything
            width, height = Image.open(io.BytesIO(data), formats=FORMATS).size
    if width * height > MAX_PIXELS:
        kind, width, height, orientation = Kind.OTHER, 0, 0, 0
    return Stored(data, kind, width, height, orientation, zlib.crc32(data))


def _raw(pixels: Images, orientation: int = 1) -> Stored:
    height, width, channels = pixels.shape
    data = pixels.tobytes()
    return Stored(
        data, Kind.RGB if channels == 3 else Kind.GREY, width, height, orientation, zlib.crc32(data)
    )


def _jpeg(pixels: Images, orientation: int) -> Stored:
    image, file = Image.fromarray(pixels), io.BytesIO()
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0, exif=exif)
    return as_it_is(file.getvalue())


def _shortened(pixels: Images, short: int) -> Images:
    """The shorter side at `short` pixels, where it is longer: the sizes that evaluation would resize to."""
    height, width, _ = pixels.shape
    if not 0 < short < min(width, height):
        return pixels
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    return resize(pixels, size)


def _orientation(image: Image.Image) -> int | None:
    """What `decode` with exif="apply" would go by; None where it would fail."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF data makes Pillow raise nearly anything
        return None
    return value if value in range(2, 9) else 1


@dataclass(frozen=True)
class _Job:
    """What is to be packed, and all that decides the outcome."""

    name: str
    path: str
    options: Options
    specs: dict[str, SourceSpec]
    sources: dict[str, Source]
    names: dict[str, list[bytes]]
    digest: str


def _job(name: str, path: str, options: Options) -> _Job:
    specs: dict[str, SourceSpec] = {split: SourceSpec(name, path, split, options.holdout) for split in SPLITS}
    sources = {"train": open_source(specs["train"])}
    with suppress(NoEvalSplit):
        sources["eval"] = open_source(specs["eval"])
    names = {split: _names(source, path) for split, source in sources.items()}
    digest = hashlib.sha256(json.dumps([VERSION, JPEG_QUALITY, name, asdict(options)]).encode())
    for split, source in sources.items():
        digest.update(json.dumps([split, len(source), source.classes]).encode())
        digest.update(source.labels.tobytes())
        for sample_name in names[split]:
            digest.update(sample_name + b"\0")
    return _Job(name, path, options, specs, sources, names, digest.hexdigest())


def _names(source: Source, path: str) -> list[bytes]:
    """Each sample's name within the source; arrays have none."""
    if isinstance(source, ArraySource):
        return [b""] * len(source)
    root = str(Path(path).expanduser())
    names = []
    for sample in range(len(source)):
        where = source.where(sample)
        inside = where.startswith((root + os.sep, root + ":"))
        names.append((where[len(root) + 1 :] if inside else where).encode("utf-8", "surrogateescape"))
    return names


def _refuse_overlap(name: str, path: str, out: Path) -> None:
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


def _refuse_existing(out: Path, force: bool) -> None:
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
    """The disk's errors as a user's. Sources report their own, so any here is from writing."""
    again = "then run the same command again; it goes on where it stopped"
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
    """Makes the working folder, for one process at a time."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is packing into {partial}", fix="wait until it has finished"
            ) from error
        except OSError as error:
            # Some network file systems cannot lock a folder; that alone is no reason to refuse.
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(handle)
        with suppress(OSError):  # not empty: something to go on from; not there: it has its final name
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
            raise UserError(f"{file} is damaged", fix="begin anew with --force") from error
    elif (partial / MANIFEST).is_file():
        digest = read_manifest(partial).job
    elif any(partial.iterdir()):
        raise UserError(
            f"{partial} is in the way: it is not the beginning of a packed set", fix="move it away"
        )
    else:
        return nothing
    if digest != job.digest:
        raise UserError(
            f"{partial} is the beginning of a pack of other data or with other options",
            fix="repeat the command that began it to go on with it, or give --force to begin anew",
        )
    return None if splits is None else {**nothing, **splits}


def _announce(job: _Job, out: Path, done: dict[str, Split], say: Callable[[str], None]) -> None:
    """Says what will be written and how large it will be; refuses a disk that is too small."""
    needed = sum(_estimate(source, job.options) for source in job.sources.values())
    written = sum(sum(state.shards) for state in done.values())
    free = shutil.disk_usage(out.parent).free
    counts = " + ".join(f"{len(source):,} {split}" for split, source in job.sources.items())
    say(
        f"{job.path or job.name}: {counts} samples, {len(job.sources['train'].classes):,} classes ({job.name})"
    )
    arrays = isinstance(job.sources["train"], ArraySource)
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
        say(f"going on after {started:,} samples")
    if needed - written > free:
        raise UserError(
            f"{out} needs about {size_text(needed - written)}, but its disk has only {size_text(free)} free",
            fix="make room, choose another disk, or pack smaller images with --resize-short N",
        )


def _estimate(source: Source, options: Options) -> int:
    """About how many bytes a split takes: exact for arrays and small sets."""
    looked_at = 1 if isinstance(source, ArraySource) else LOOKED_AT
    samples = np.unique(np.linspace(0, len(source) - 1, looked_at).astype(np.int64)).tolist()
    stored = sum(len(store(source, sample, options).data) for sample in samples)
    return stored * len(source) // len(samples) + RECORD.itemsize * len(source)


def size_text(count: int) -> str:
    """1234567890 -> `1.2 GB`."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.{0 if count >= 100 * unit else 1}f} {name}"
    return f"{count} bytes"


def _pack_split(job: _Job, partial: Path, split: str, done: dict[str, Split], workers: int) -> Split:
    """Appends the samples that are still missing, and notes every few seconds how far it is."""
    source, names, state = job.sources[split], job.names[split], done[split]
    labels = source.labels.tolist()
    arrays = isinstance(source, ArraySource)
    with SplitWriter(partial, split, None if arrays else job.options.shard_mb << 20, state) as writer:
        next_commit, waiting = time.monotonic() + COMMIT_SECONDS, 0
        with (
            closing(_made(job, split, state.samples, 1 if arrays else workers)) as made,
            closing(progress(made, f"packing {split}", len(source) - state.samples)) as shown,
        ):
            for sample, stored in enumerate(shown, start=state.samples):
                writer.add(stored, labels[sample], names[sample])
                waiting += len(stored.data)
                if waiting >= COMMIT_BYTES or time.monotonic() >= next_commit:
                    done[split] = writer.commit()
                    _note(partial, job, done)
                    next_commit, waiting = time.monotonic() + COMMIT_SECONDS, 0
        done[split] = writer.commit()
        _note(partial, job, done)
    return done[split]


def _note(partial: Path, job: _Job, done: dict[str, Split]) -> None:
    splits = {split: asdict(state) for split, state in done.items()}
    write_text(partial / PROGRESS, json.dumps({"job": job.digest, "splits": splits}))


def _made(job: _Job, split: str, first: int, workers: int) -> Generator[Stored]:
    """The samples from `first` on, in order, made by this process or by `workers` others."""
    source = job.sources[split]
    if workers == 1:
        for sample in range(first, len(source)):
            yield store(source, sample, job.options)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.data.pack"])
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job.specs[split], job.options))
    pending: deque[Future[list[Stored]]] = deque()
    starts = iter(range(first, len(source), CHUNK))
    try:
        while True:
            # Two chunks for each process: enough to keep it busy, and a bound on memory.
            while len(pending) < 2 * workers and (start := next(starts, None)) is not None:
                pending.append(pool.submit(_chunk, start, min(start + CHUNK, len(source))))
            if not pending:
                return
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a packing process was killed",
            fix="out of memory? Run the same command again with fewer --workers; it goes on where it stopped",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_here: tuple[SourceSpec, Source, Options] | None = None
"""What this packing process works on."""


def _start_worker(spec: SourceSpec, options: Options) -> None:
    """Ctrl-C is for the main process; and a worker must not outlive it, even if that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _here
    _here = (spec, open_source(spec), options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _chunk(first: int, end: int) -> list[Stored]:
    assert _here is not None
    _, source, options = _here
    return [store(source, sample, options) for sample in range(first, end)]


def _manifest(job: _Job, partial: Path, splits: dict[str, Split]) -> Manifest:
    train = job.sources["train"]
    return Manifest(
        source=train.name,
        holds="arrays" if isinstance(train, ArraySource) else "files",
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

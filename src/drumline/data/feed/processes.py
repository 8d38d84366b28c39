"""Batches made by processes: the way for what Python decodes, since threads of Python would wait for each other.

Promises: the batches of `make_batch`, in the order of the requests, for any number of processes; each opens the
source itself, so no data travels through process start; none outlives the trainer. A `UserError` in a worker
surfaces here as it was; a worker or a fork server that is killed is a `LostError`.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.utils import data as torch_data

from drumline.core.errors import LostError, UserError
from drumline.core.processes import end_with_owner
from drumline.data.feed.batch import HostBatch, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.sources import Dataset, DatasetSpec, open_same


@dataclass(frozen=True)
class _Refusal:
    """A `UserError` on its way out of a worker; torch would otherwise wrap it into a traceback."""

    what: str
    fix: str
    lost: bool


class _Maker(torch_data.Dataset["HostBatch | _Refusal"]):
    """Makes the batch of a request; opens the source on first use in each process."""

    def __init__(self, spec: DatasetSpec, digest: str, transform: Transform, seed: int) -> None:
        self.spec, self.digest, self.transform, self.seed = spec, digest, transform, seed
        self.source: Dataset | None = None

    def __getitem__(self, request: Request) -> HostBatch | _Refusal:
        try:
            if self.source is None:
                self.source = open_same(self.spec, self.digest)
            return make_batch(self.source, self.transform, self.seed, request)
        except UserError as error:
            return _Refusal(error.what, error.fix, isinstance(error, LostError))


def process_batches(
    spec: DatasetSpec, digest: str, transform: Transform, seed: int, requests: Iterable[Request], workers: int
) -> Generator[HostBatch, None, None]:
    """The batches of the requests, in their order. `digest` is that of the source as the trainer has opened it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.core.forkserver", "drumline.data.feed.processes"])
    iterator: Iterator[HostBatch | _Refusal] | None = None
    try:
        with warnings.catch_warnings():
            # The number of workers is the user's choice, or ours from the cores we may use.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = torch_data.DataLoader(
                _Maker(spec, digest, transform, seed),
                sampler=_Requests(requests),
                batch_size=None,
                num_workers=workers,
                prefetch_factor=2,
                multiprocessing_context=context,
                worker_init_fn=_start_worker,
                # Its own generator: the loader must not draw from the global one, whose state belongs to the model.
                generator=torch.Generator().manual_seed(0),
            )
            iterator = iter(loader)
        for result in iterator:
            if isinstance(result, _Refusal):
                raise (LostError if result.lost else UserError)(result.what, result.fix)
            yield result
    except (RuntimeError, OSError, EOFError) as error:
        if not _is_loss(error):
            raise
        raise LostError(
            f"a loader process was killed ({(str(error) or type(error).__name__).splitlines()[0]})",
            "out of memory? See `dmesg`, and try fewer data.workers or a smaller data.batch; "
            "then go on with --checkpoint.resume auto",
        ) from error
    finally:
        del iterator


def _is_loss(error: Exception) -> bool:
    """Whether a worker is gone: torch says so, or a batch was to be fetched from it at that moment; or the fork
    server that was to start it. What a worker has raised itself arrives here with the words "Caught ... in DataLoader
    worker"."""
    if isinstance(error, RuntimeError):
        return bool(re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)))
    return isinstance(error, EOFError | ConnectionError | FileNotFoundError) and "Caught" not in str(error)


class _Requests:
    """torch wants a re-iterable sampler; ours is walked once."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _start_worker(index: int) -> None:
    """Stop requests are for the trainer, and a worker must not outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _say_but_for_a_lost_trainer
    end_with_owner()


def _say_but_for_a_lost_trainer(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A trainer that is killed while it fetches a batch breaks the connection, and the thread of multiprocessing that
    hands batches over tells that as an error of this process. What samples raise goes to the trainer instead."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)

"""Batches on the device, in order, one ahead of the step.

Promises: the sequence of batches depends on the requests alone, never on the number of workers; loader
processes open the source themselves, so no data travels through process start; resuming needs only the
requests still to come. A broken sample surfaces here as the `UserError` it was in the worker.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
from torch.utils.data import DataLoader, Dataset

from drumline.data.order import Request
from drumline.data.sources import ArraySource, Source, SourceSpec, open_source
from drumline.data.views import Batch, View, make_batch
from drumline.errors import UserError
from drumline.launch.machine import cores_per_process

Batches = Generator[Batch, None, None]
"""An iterator to be closed when no more batches are wanted: that ends its workers."""
RESIDENT_BATCHES = 8


@dataclass(frozen=True)
class _Refusal:
    """A `UserError` on its way out of a worker; torch would otherwise wrap it into a traceback."""

    what: str
    fix: str


class _Maker(Dataset[Batch | _Refusal]):
    """Makes the batch of a request; opens the source on first use in each process."""

    def __init__(self, spec: SourceSpec, view: View, seed: int, source: Source | None = None) -> None:
        self.spec, self.view, self.seed, self.source = spec, view, seed, source

    def __getstate__(self) -> dict[str, object]:
        return {"spec": self.spec, "view": self.view, "seed": self.seed, "source": None}

    def __getitem__(self, request: Request) -> Batch | _Refusal:
        try:
            if self.source is None:
                self.source = open_source(self.spec)
            return make_batch(self.source, self.view, self.seed, request)
        except UserError as error:
            return _Refusal(error.what, error.fix)


def batches(
    spec: SourceSpec,
    source: Source,
    view: View,
    seed: int,
    requests: Iterable[Request],
    workers: int,
    device: torch.device,
) -> Batches:
    """The batches of the requests, in their order, on the device. Close the iterator to end the workers."""
    host = _host_batches(spec, source, view, seed, requests, workers, pin=device.type == "cuda")
    return _ahead(host, device) if device.type == "cuda" else host


def resident_batches(
    source: Source, view: View, seed: int, requests: Iterable[Request], first_step: int, device: torch.device
) -> Batches:
    """A few batches made once and repeated for ever: what the model takes when data costs nothing. Used for
    synthetic data; step n always gets batch n mod RESIDENT_BATCHES."""
    pool = [
        Batch(*(tensor.to(device) for tensor in make_batch(source, view, seed, request)))
        for request in itertools.islice(requests, RESIDENT_BATCHES)
    ]
    rotated = [pool[(first_step + i) % len(pool)] for i in range(len(pool))]
    yield from itertools.cycle(rotated)


def default_workers(source: Source, local_processes: int) -> int:
    """Arrays are cut faster than they could be sent between processes; files want every core."""
    if isinstance(source, ArraySource):
        return 0
    return cores_per_process(local_processes)


def _host_batches(
    spec: SourceSpec,
    source: Source,
    view: View,
    seed: int,
    requests: Iterable[Request],
    workers: int,
    pin: bool,
) -> Batches:
    if workers == 0:
        maker = _Maker(spec, view, seed, source)
        for request in requests:
            batch = _checked(maker[request])
            yield Batch(*(tensor.pin_memory() for tensor in batch)) if pin else batch
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drumline.data.forkserver", "drumline.data.loader"])
    with warnings.catch_warnings():
        # The number of workers is the user's choice, or ours from the cores we may use.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Maker(spec, view, seed),
            sampler=_Requests(requests),
            batch_size=None,
            num_workers=workers,
            pin_memory=pin,
            prefetch_factor=2,
            multiprocessing_context=context,
            worker_init_fn=_start_worker,
            # Its own generator: the loader must not draw from the global one, whose state belongs to the model.
            generator=torch.Generator().manual_seed(0),
        )
        iterator = iter(loader)
    try:
        for batch in iterator:
            yield _checked(batch)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a loader process was killed ({str(error).splitlines()[0]})",
            "out of memory? See `dmesg`, and try fewer data.workers or a smaller data.batch; "
            "then go on with --checkpoint.resume auto",
        ) from error
    finally:
        del iterator


def _ahead(host: Batches, device: torch.device) -> Batches:
    """Copies each batch on a side stream while the step before it computes."""
    stream = torch.cuda.Stream(device)
    ready: tuple[Batch, torch.cuda.Event] | None = None
    with closing(host):
        for host_batch in host:
            with torch.cuda.stream(stream):
                batch = Batch(*(tensor.to(device, non_blocking=True) for tensor in host_batch))
                copied = torch.cuda.Event()
                copied.record(stream)
            if ready is not None:
                yield _handed_over(ready, torch.cuda.current_stream(device))
            ready = (batch, copied)
    if ready is not None:
        yield _handed_over(ready, torch.cuda.current_stream(device))


def _handed_over(ready: tuple[Batch, torch.cuda.Event], stream: torch.cuda.Stream) -> Batch:
    batch, copied = ready
    stream.wait_event(copied)
    for tensor in batch:
        tensor.record_stream(stream)
    return batch


def _checked(result: Batch | _Refusal) -> Batch:
    if isinstance(result, _Refusal):
        raise UserError(result.what, result.fix)
    return result


class _Requests:
    """torch wants a re-iterable sampler; ours is walked once."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _start_worker(index: int) -> None:
    """Stop requests are for the trainer, and a worker must not outlive it. torch's own watchdog looks at the parent
    process, which is the fork server; and that one lives as long as a worker does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    wait([trainer.sentinel])
    os._exit(1)

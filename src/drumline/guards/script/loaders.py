"""Which samples of which data set each rank trains on, observed at the data loaders.

Promises: the order of samples is untouched, and no sample is read through `__getitem__`. Only batches that a step was
trained on count; peeking at a batch, an evaluation or an extra pass does not. Sampling with replacement, data that
each rank reads in order, data sets that differ between ranks, and data sets whose attributes cannot be read are never
reported.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from drumline.guards.checks.data import is_sampled
from drumline.guards.checks.drift import batch_fingerprint
from drumline.guards.checks.nonfinite import tensors_in
from drumline.guards.finding import Finding
from drumline.guards.script.forwards import ModelCall

_SAME_ORDER = 8
"""So many samples in the same random order are no coincidence: 1 in 8!."""
_ORDER_KEPT = 256
_SEEN_KEPT = 2048
_MOST_TENSORS = 8
_VALUES = 512
"""Values of a data set's attribute that are hashed."""
_PLAIN = (str, int, float, bool, bytes, type(None))


@dataclass
class LoaderPass:
    """One pass of a loop over a loader."""

    loader: Any
    epoch: int | None
    drawn: deque[list[int]] = field(default_factory=deque)
    order: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    one_of: int = 1
    """One in so many of the ids seen is kept."""
    count: int = 0
    repeated: bool = False

    def trained(self, ids: Sequence[int]) -> None:
        """A step was trained on these samples."""
        self.count += len(ids)
        self.order.extend(ids[: _ORDER_KEPT - len(self.order)])
        for one in ids:
            if is_sampled(one, self.one_of):
                self.repeated = self.repeated or one in self.seen
                self.seen.add(one)
        while len(self.seen) > _SEEN_KEPT:
            self.one_of *= 2
            self.seen = {one for one in self.seen if is_sampled(one, self.one_of)}


class Loaders:
    """The loaders of one training loop."""

    def __init__(self) -> None:
        self._passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._got: dict[int, tuple[LoaderPass, list[int]]] = {}
        self._evaluated: list[tuple[LoaderPass, list[int]]] = []
        self._used: list[tuple[LoaderPass, list[int]]] = []
        self._trained: list[LoaderPass] = []
        self._step: list[tuple[LoaderPass, list[int]]] = []
        """Batches of the step in progress."""
        self._repeats: Finding | None = None
        self.labels: list[torch.Tensor] = []
        """Integer vectors of the batches since the last step."""
        self._inputs: list[torch.Tensor] = []

    def reads(self, loader: Any, iterator: Any) -> None:
        """A pass begins. With persistent workers the iterator stays, and holds indices of the last pass."""
        if iterator is None:
            known = self._passes.get(getattr(loader, "_iterator", None) or self)
            if known is not None:
                self._passes[loader._iterator] = LoaderPass(loader, _epoch_of(loader))
        elif iterator not in self._passes:
            self._passes[iterator] = LoaderPass(loader, _epoch_of(loader))
        elif self._passes[iterator].loader is None:
            self._passes[iterator].loader, self._passes[iterator].epoch = loader, _epoch_of(loader)

    def draws(self, iterator: Any, indices: Any) -> None:
        """Indices of a next batch. The first are drawn while the iterator is created, before it is known."""
        if iterator not in self._passes:
            self._passes[iterator] = LoaderPass(None, None)
        ids = indices if isinstance(indices, list) else [indices]
        if all(hasattr(one, "__index__") for one in ids):
            self._passes[iterator].drawn.append([int(one) for one in ids])

    def receives(self, iterator: Any, batch: Any) -> None:
        """The loop received a batch. The last one of each loader before a forward pass counts."""
        current = self._passes.get(iterator)
        if current is None:
            return
        self._evaluated.clear()
        ids = current.drawn.popleft() if current.drawn else []
        self._got[id(current.loader)] = (current, ids)
        self._compare_workers(current, batch)
        if len(self.labels) < _MOST_TENSORS:
            tensors = list(tensors_in(batch))
            self.labels.extend(t for t in tensors if t.dim() == 1 and t.dtype == torch.int64)
            self._inputs.extend(t for t in tensors if t.dim() > 1 and t.is_floating_point())

    def forward(self, trains: bool) -> None:
        """A forward pass of the model, with or without gradients. A batch that is only used without gradients belongs
        to an evaluation; one that is used again with gradients was labelled by the model first."""
        if trains:
            for current, ids in (*self._evaluated, *self._got.values()):
                self._used.append((current, ids))
                self._step.append((current, ids))
            self._evaluated.clear()
        else:
            self._evaluated.extend(self._got.values())
        self._got.clear()

    def check(self, step: int) -> Finding | None:
        """Just before a step: its batches are trained on."""
        for current, ids in self._used:
            if not any(current is known for known in self._trained):
                self._trained.append(current)
                del self._trained[:-4]
            current.trained(ids)
        self._used.clear()
        repeats, self._repeats = self._repeats, None
        return repeats or self._same_order(step)

    def _compare_workers(self, current: LoaderPass, batch: Any) -> None:
        """The workers of a stream take turns: if each reads the whole stream, their batches repeat."""
        workers = getattr(current.loader, "num_workers", 0)
        if (
            workers < 2
            or not isinstance(current.loader.dataset, IterableDataset)
            or len(current.order) >= 2 * workers
        ):
            return
        current.order.append(batch_fingerprint(tensor for tensor in tensors_in(batch) if not tensor.is_cuda))
        first, second = set(current.order[:workers]), set(current.order[workers:])
        if len(current.order) == 2 * workers and len(first) == len(second) == 1 and first != second:
            self._repeats = Finding(
                "same-samples",
                f"every sample is read {workers} times: each worker of the loader reads the whole stream",
                type(current.loader.dataset).__name__,
                "the first batch",
                "split the stream between workers in __iter__ by torch.utils.data.get_worker_info()",
            )

    def in_order(self, calls: Sequence[ModelCall]) -> bool:
        """Whether the model was called on a batch in the loader's order."""
        for given in self._inputs:
            for tensor in tensors_in([(call.args, call.kwargs) for call in calls]):
                if tensor.shape == given.shape and len(given) > 3:
                    rows = given.flatten(1).float(), tensor.detach().flatten(1).float().to(given.device)
                    if bool((torch.nn.functional.cosine_similarity(*rows) > 0.9).all()):
                        return True
        return False

    def stepped(self) -> None:
        """A step is done."""
        self._step.clear()
        self.labels.clear()
        self._inputs.clear()

    def _same_order(self, step: int) -> Finding | None:
        for index, later in enumerate(self._trained):
            for earlier in self._trained[:index]:
                if later.loader is None or earlier.loader is None:
                    continue
                if later.loader is not earlier.loader and later.loader.dataset is not earlier.loader.dataset:
                    continue
                count = min(len(later.order), len(earlier.order))
                if count < _SAME_ORDER or later.order[:count] != earlier.order[:count]:
                    continue
                if _in_order(later.order) or later.repeated:
                    continue
                return _unshuffled(later, len(self._trained), step)
        return None

    @property
    def passes(self) -> int:
        """The number of passes that were trained on, as far as they are kept."""
        return len(self._trained)

    def summary(self) -> dict[str, Any] | None:
        """What the ranks compare: the loader that was trained on last."""
        if not self._trained or self._trained[-1].loader is None:
            return None
        last = self._trained[-1]
        loader = last.loader
        root, real = root_of(loader.dataset)
        sampler = _sampler_of(loader)
        replaces = last.repeated or isinstance(sampler, WeightedRandomSampler)
        replaces = replaces or (isinstance(sampler, RandomSampler) and sampler.replacement)
        distributed = isinstance(sampler, DistributedSampler)
        return {
            "data": columns_of(root),
            "seen": sorted(real(one) for one in last.seen),
            "one_of": last.one_of,
            "ids": sorted(real(one) for current, ids in self._step if current is last for one in ids)[
                :_SEEN_KEPT
            ],
            "replaces": bool(replaces),
            "size": None if isinstance(root, IterableDataset) else length_of(root),
            "planned": _planned(loader),
            "shuffle": [sampler.seed, last.epoch] if distributed and sampler.shuffle else None,
            "replicas": sampler.num_replicas if distributed else None,
        }


def _in_order(ids: Sequence[int]) -> bool:
    """Whether ids rise, except for a few that fall where padding begins."""
    back = sum(second < first for first, second in pairwise(ids))
    return 10 * back <= len(ids)


def _unshuffled(later: LoaderPass, passes: int, step: int) -> Finding:
    sampler = _sampler_of(later.loader)
    if hasattr(sampler, "set_epoch"):
        what = f"the sampler's epoch was {later.epoch} in all of {passes} passes"
        fix = "call loader.sampler.set_epoch(epoch) before each epoch"
    else:
        what = f"{passes} passes began with the same samples in the same random order"
        fix = "seed the sampler once, before the first epoch, or by the epoch"
    return Finding(
        "set-epoch",
        f"every epoch sees its samples in the same order: {what}",
        where=f"{type(sampler).__name__} of the loader",
        since=f"the second pass (noticed at step {step})",
        fix=fix,
    )


def _sampler_of(loader: Any) -> Any:
    """The sampler inside a batch sampler of torch, or the user's own."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return getattr(loader, "sampler", None)
    return getattr(batches, "sampler", batches)


def _epoch_of(loader: Any) -> int | None:
    epoch = getattr(_sampler_of(loader), "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _planned(loader: Any) -> int | None:
    """The number of samples in a pass of one rank, as far as the loader knows it."""
    batches = length_of(loader)
    if batches is None or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is not None:
        return int(batches * loader.batch_size)
    sampler = _sampler_of(loader)
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return batches * size
    return len(sampler) if loader.batch_sampler is None else None


def root_of(dataset: Any) -> tuple[Any, Callable[[int], int]]:
    """The data set under any Subset, and a function from an index of the outer one to an index of it."""
    chain: list[Sequence[int]] = []
    while isinstance(dataset, Subset):
        chain.append(dataset.indices)
        dataset = dataset.dataset

    def real(index: int) -> int:
        for indices in chain:
            index = int(indices[index])
        return index

    return dataset, real


def length_of(sized: Any) -> int | None:
    """The length of a loader or a data set; None if it has none, for example over an IterableDataset."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def contents_of(dataset: Any, depth: int = 3) -> dict[str, str]:
    """A hash of each attribute of a data set, and of its type and length. Includes the data sets that it wraps."""
    contents = {"type": _hash(f"{type(dataset).__name__} {length_of(dataset)}")}
    for name, value in getattr(dataset, "__dict__", {}).items():
        text = _text(value, depth)
        if text is not None:
            contents[name] = _hash(text)
    if isinstance(dataset, list | tuple):
        contents["items"] = _hash(_text(dataset, depth) or "")
    if len(contents) == 1:
        contents["own"] = str(id(dataset))  # nothing to compare: never the same on two ranks
    return contents


def columns_of(dataset: Any) -> dict[str, str]:
    """`contents_of`, and every tensor and list that is as long as the data set: as `name[labels]` if it holds one
    integer for each sample, else as `name[]`."""
    length = length_of(dataset)
    found = contents_of(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        values = value if isinstance(value, list | tuple) and _is_nested(value) else [value]
        for index, one in enumerate(values):
            if hasattr(one, "__len__") and not isinstance(one, str) and _length(one) == length and length:
                label, text = name if len(values) == 1 else f"{name}[{index}]", _text(one, 1)
                if text is not None:
                    found[f"{label}[labels]" if _is_labels(one) else f"{label}[]"] = _hash(text)
    return found


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value)


def _is_labels(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1 and "int" in str(value.dtype)
    return isinstance(value, list | tuple) and all(isinstance(one, int) for one in value[:_VALUES])


def _is_nested(value: Sequence[Any]) -> bool:
    return 0 < len(value) <= 16 and all(isinstance(one, torch.Tensor | np.ndarray) for one in value)


def _text(value: Any, depth: int) -> str | None:
    """Some evenly spaced values, as text; None for a value that cannot be read."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_cuda or value.is_meta:
            return None
        flat = value.detach().reshape(-1)
        return f"{tuple(value.shape)} {flat[:: max(1, len(flat) // _VALUES)].tolist()}"
    if isinstance(value, np.ndarray):
        values = value.reshape(-1)
        return f"{value.shape} {values[:: max(1, len(values) // _VALUES)].tolist()}"
    if isinstance(value, Dataset) and depth:
        inner = contents_of(value, depth - 1)
        return None if "own" in inner else str(inner)
    if isinstance(value, list | tuple) and depth:
        some = value[:: max(1, len(value) // _VALUES)]
        return f"{len(value)} {[_text(one, depth - 1) for one in some]}"
    if isinstance(value, dict) and depth:
        return f"{len(value)} {[(str(key), _text(one, depth - 1)) for key, one in list(value.items())[:_VALUES]]}"
    return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

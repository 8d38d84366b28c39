"""A user's own augmentation: `data.transform=package.module:function`, called once for each training sample.

It is called as `function(image, rng)` after crop and horizontal flip, with a uint8 array of height x width x channels
and a NumPy generator that is keyed by (seed, epoch, sample id). It returns an array of the same shape and type.
Promises: the result does not depend on workers, ranks or the batch, as long as the function draws only from its
generator, which `unrepeatable` checks on the first samples. A wrong result or an exception is a `UserError` that
names the sample. Unlike a broken file, the sample is not replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.core.named import check_called, instance, load_named
from drumline.data.feed.draws import Purpose, bits
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.sources import ArrayDataset, Dataset
from drumline.data.sources.base import Images

CALLED = "(image, rng)"
PROBED = 8
"""Samples on which `unrepeatable` tries the function."""
REPEATABLE = "draw every random number from its second argument, as in rng.random() or rng.integers(10)"


@lru_cache
def load_transform(name: str) -> Callable[..., Any]:
    """The function, or an object of the class, that `data.transform` names."""
    title = f"data.transform {name}"
    function = instance(load_named(name, "data.transform", CALLED), title, {}, CALLED)
    check_called(function, title, CALLED, "the image and a NumPy generator")
    return function


def generator_of(seed: int, epoch: int, key: int) -> np.random.Generator:
    """The generator of a sample in an epoch, given its key (`Request.keys`)."""
    words = bits(seed, epoch, np.array([key]), Purpose.OWN_TRANSFORM)[0].astype("<u4")
    return np.random.Generator(np.random.Philox(key=words.view("<u8")))


def transform_images(
    images: Images,
    dataset: Dataset,
    transform: Transform,
    seed: int,
    request: Request,
    map_rows: Callable[..., Any] = map,
) -> float:
    """Applies the user's function in place to each row of a batch. `map_rows` is a `map`, e.g. in threads. Returns
    the seconds that it took, added up over the rows."""
    if not transform.own:
        return 0.0
    function = load_transform(transform.own)

    def one(row: int, sample: int, key: int) -> float:
        began = perf_counter()
        rng = generator_of(seed, request.epoch, key)
        images[row] = _result(function, images[row], rng, dataset, transform, request.epoch, sample)
        return perf_counter() - began

    return sum(map_rows(one, range(len(images)), request.samples.tolist(), request.keys.tolist()), 0.0)


def unrepeatable(images: Images, dataset: Dataset, transform: Transform, seed: int, request: Request) -> str:
    """Why the function's result does not depend only on the image and its generator; empty if it seems to. Tries the
    function on a few untransformed images."""
    function = load_transform(transform.own)
    for image, sample in zip(images[:PROBED], request.samples.tolist(), strict=False):

        def made(image: Images = image, sample: int = sample) -> Images:
            rng = generator_of(seed, request.epoch, sample)
            return _result(function, image.copy(), rng, dataset, transform, request.epoch, sample)

        with _undisturbed() as drawn:
            first = made()
        if drawn:
            return f"it draws from {' and '.join(drawn)}"
        with _undisturbed():
            if not np.array_equal(first, made()):
                return "two calls with the same image and generator return different pixels"
    return ""


def _result(
    function: Callable[..., Any],
    image: Images,
    rng: np.random.Generator,
    dataset: Dataset,
    transform: Transform,
    epoch: int,
    sample: int,
) -> Images:
    """The checked result for one image, which the function may write to."""
    where = f"{dataset.name} sample {sample}" if isinstance(dataset, ArrayDataset) else dataset.where(sample)
    title, shape = f"data.transform {transform.own}", image.shape
    try:
        found = function(image, rng)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(
            f"{title}: raised {type(error).__name__} for {where} (epoch {epoch}): {error}",
            fix=f"correct the function; it is called as {CALLED} with a uint8 array of shape {shape}",
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.shape != shape:
        kind = (
            f"{found.dtype} array of shape {found.shape}"
            if isinstance(found, np.ndarray)
            else type(found).__name__
        )
        raise UserError(
            f"{title}: returned a {kind} for {where}",
            fix=f"return a uint8 NumPy array of the image's shape, {shape}; Drumline normalises it later",
        )
    return found


@contextmanager
def _undisturbed() -> Iterator[list[str]]:
    """Restores the global random generators. Afterwards, the list names those that were used."""
    used: list[str] = []
    names = ("Python's `random`", "`numpy.random`", "torch's generator")

    def states() -> tuple[Any, Any, Any]:
        name, keys, *rest = np.random.get_state()
        return (
            random.getstate(),
            (name, np.asarray(keys).tobytes(), *rest),
            torch.get_rng_state().numpy().tobytes(),
        )

    numpys = np.random.get_state()
    with leave_no_trace():
        before = states()
        yield used
        used += [name for name, old, new in zip(names, before, states(), strict=True) if old != new]
    np.random.set_state(numpys)

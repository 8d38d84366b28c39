"""Predicts images with a trained model, in batches, while the next images are decoded.

Promises: the pixels of evaluation; one result for each input, in the order of the inputs; an image that cannot be
read is a result with its error and stops nothing. Memory does not grow with the number of images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import usable_cores
from drumline.inference.classifier import Classifier, Prediction
from drumline.inference.images import ImageInput

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class PredictedImage:
    """The result for one image: its best classes, or why it could not be read."""

    image: ImageInput
    best: tuple[Prediction, ...]
    """The most likely classes, best first. Empty if there is an error."""
    error: str = ""


def predict_images(
    model: Classifier, images: Iterable[ImageInput], top: int = 1, batch: int = 64
) -> Iterator[PredictedImage]:
    """The `top` most likely classes of each image."""
    loaded = _load(model, images, ahead=2 * batch)
    while group := list(islice(loaded, batch)):
        readable = [pixels for _, pixels in group if not isinstance(pixels, str)]
        predictions = iter(model.best(readable, top) if readable else ())
        for image, pixels in group:
            if isinstance(pixels, str):
                yield PredictedImage(image, (), pixels)
            else:
                yield PredictedImage(image, next(predictions))


def _load(
    model: Classifier, images: Iterable[ImageInput], ahead: int
) -> Iterator[tuple[ImageInput, Pixels | str]]:
    """The pixels of each image, or the error that reading it gave; `ahead` images are decoded in advance."""

    def pixels_of(image: ImageInput) -> Pixels | str:
        try:
            return model.pixels(image.read(), image.name)
        except UserError as error:
            return error.what.removeprefix(image.name).strip(" :").removeprefix("is ")
        except OSError as error:
            return error.strerror or str(error)

    waiting: deque[tuple[ImageInput, Future[Pixels | str]]] = deque()
    pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="drumline-predict")
    try:
        for image in images:
            waiting.append((image, pool.submit(pixels_of, image)))
            if len(waiting) > ahead:
                first, decoded = waiting.popleft()
                yield first, decoded.result()
        while waiting:
            first, decoded = waiting.popleft()
            yield first, decoded.result()
    finally:
        pool.shutdown(cancel_futures=True)

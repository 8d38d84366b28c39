"""A pipeline of any shape gives the gradients of plain accumulation over its micro-batches, bit for bit."""

from __future__ import annotations

import pytest

from tests.launch.ranks import results_of
from tests.parallel.pipeline.equality_ranks import CASES, EVERY, Case

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_buffers_and_memory_are_those_promised(case: Case) -> None:
    """Every gradient and running statistic that a rank holds equals accumulation in one process (norms over groups:
    the whole batch too, to 1e-6), and no lane held more micro-batches than its schedule says. Batches are uneven."""
    (found,) = results_of("tests.parallel.pipeline.equality_ranks", 1, seconds=300)
    assert found[str(case)] == []


def test_every_schedule_meets_every_shape_and_norm_mode() -> None:
    assert len(set(map(str, EVERY))) == 3 * 3 * 2 * 4
    assert {case.model for case in CASES} == {
        "resnet18",
        "resnet50",
        "vgg8",
        "mobilenet",
        "unet",
        "groupnorm",
    }

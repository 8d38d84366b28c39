"""Variables that are set before CUDA starts."""

from __future__ import annotations

import pytest

from drumline.config.fields import with_values
from drumline.config.recipe import Recipe
from drumline.launch.start import cuda_settings

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_libraries_repeat_their_results_only_if_requested() -> None:
    repeat = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
    assert cuda_settings(Recipe()) == repeat
    assert cuda_settings(with_values(Recipe(), {"run.deterministic": False})) == {}


@pytest.mark.parametrize("field", ["parallel.layout", "distill.teacher_layout"])
@pytest.mark.parametrize("layout", ["model", "pipeline"])
def test_streams_of_stages_do_not_share_queues(field: str, layout: str) -> None:
    assert cuda_settings(with_values(Recipe(), {field: layout}))[QUEUES] == "32"


@pytest.mark.parametrize("layout", ["auto", "single", "dp", "ddp", "fsdp"])
def test_other_layouts_keep_the_queues_of_cuda(layout: str) -> None:
    assert QUEUES not in cuda_settings(with_values(Recipe(), {"parallel.layout": layout}))

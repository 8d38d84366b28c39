"""What decides the arithmetic of a run is on record."""

from __future__ import annotations

import pytest
import torch

from drumline.state.provenance import arithmetic

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "MKL_DEBUG_CPU_TYPE",
        "MKL_DYNAMIC",
        "OMP_DYNAMIC",
        "OMP_SCHEDULE",
        "KMP_DETERMINISTIC_REDUCTION",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "NVIDIA_TF32_OVERRIDE",
    ],
)
def test_variables_that_choose_kernels_are_recorded(name: str) -> None:
    assert arithmetic(CPU, {name: "x"}) == {**arithmetic(CPU, {}), name: "x"}


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "MKL_VERBOSE",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "HOME",
        "CUDNN_LOGINFO_DBG",
    ],
)
def test_variables_that_change_no_bits_are_not(name: str) -> None:
    assert arithmetic(CPU, {name: "x"}) == arithmetic(CPU, {})


def test_the_processors_instructions_and_the_libraries_are_recorded() -> None:
    facts = arithmetic(CPU, {})
    assert facts["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert facts["libraries"]
    assert facts["libc"]

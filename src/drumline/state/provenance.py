"""What a run ran on: software, devices, threads. Saved with the run and with every checkpoint."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from drumline.core.machine import host_name

STEERING = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables by which CUDA's libraries choose their kernels."""
DECIDING = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "KMP_",
    "OMP_",
    "GOMP_",
    "CUBLAS",
    "CUDNN_",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_",
)
"""How variables begin by which the libraries that compute choose their code, or the order of their additions."""
HARMLESS = re.compile(
    r".*(VERBOSE|LOG|DISPLAY|AFFINITY|BLOCKTIME|SETTINGS|WARNINGS|DUPLICATE_LIB_OK|STACKSIZE|SPINCOUNT|JIT_(DUMP|PROFILE)).*"
    r"|(OMP|MKL)_NUM_THREADS|OMP_(WAIT_POLICY|PROC_BIND|PLACES)|MKL_(THREADING_LAYER|SERVICE_FORCE_INTEL)"
)
"""Those of them that change speed or messages alone. The number of threads is recorded as such."""
PACKAGES = ("drumline", "torch", "numpy", "pillow", "safetensors")


def describe_environment(device: torch.device, processes: int, backend: str, threads: int) -> dict[str, Any]:
    """Plain values only; whatever may change bits is here."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": host_name(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device_name(device),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "libraries": {name: os.environ.get(name) for name in STEERING} if cuda else None,
        "arithmetic": arithmetic(device),
        "processes": processes,
        "backend": backend,
        "threads": threads,
        "command": sys.argv,
    }


def arithmetic(device: torch.device, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What decides the bits of one computation on this device beside the versions of packages: names and values, the
    same in two processes that compute alike. Call it where the run has set torch's flags."""
    facts = {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(DECIDING) and not HARMLESS.fullmatch(name)
    }
    facts |= {
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "torch build": str(torch.version.git_version)[:12],
    }
    if device.type != "cuda":
        libraries = re.findall(
            r"(Math Kernel Library Version \S+|MKL-DNN v\S+|BLAS_INFO=\w+)", torch.__config__.show()
        )
        return facts | {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "oneDNN": str(torch.backends.mkldnn.enabled),
            "libraries": ", ".join(libraries),
            "libc": " ".join(platform.libc_ver()),
        }
    major, minor = torch.cuda.get_device_capability(device)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return facts | {
        "compute capability": f"{major}.{minor}",
        "driver": _driver(),
        "cuDNN": f"enabled {cudnn.enabled}, deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}, "
        f"TF32 {cudnn.allow_tf32}",
        "reduced precision": f"fp16 {matmul.allow_fp16_reduced_precision_reduction}, "
        f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, TF32 {matmul.allow_tf32}",
    }


def _driver() -> str:
    """The version of NVIDIA's driver, as the kernel knows it."""
    with suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        return found[0] if found else ""
    return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def device_name(device: torch.device) -> str:
    """Of a processor its model too: the libraries that compute choose their code by it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}) {model}".strip()

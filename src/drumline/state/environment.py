"""What a run ran on: software, devices, threads. Saved with the run and with every checkpoint."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from drumline.launch.world import World, host_name

STEERING = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables by which CUDA's libraries choose their kernels."""
PACKAGES = ("drumline", "torch", "numpy", "pillow", "safetensors")


def describe_environment(world: World, threads: int) -> dict[str, Any]:
    """Plain values only; whatever may change bits is here."""
    cuda = world.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": host_name(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(world.device) if cuda else _processor(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "libraries": {name: os.environ.get(name) for name in STEERING} if cuda else None,
        "processes": world.size,
        "backend": world.backend,
        "threads": threads,
        "command": sys.argv,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def _processor() -> str:
    """Its model too: the libraries that compute choose their code by it."""
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}) {model}".strip()

"""A GPU's use, memory, clocks, power and throttling, as NVIDIA's driver reports them (NVML).

Promises: never waits for the device. Without the driver's library, or without one of its functions, the values are
left out. Calls the library directly: about two dozen lines replace a dependency.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

_THERMAL = 0x20 | 0x40
"""Clocks are held back by temperature: in software, in hardware."""
_POWER = 0x4 | 0x80
"""By the power limit: in software, or by the board's supply."""
_SM_CLOCK, _OK = 1, 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpu:
    """One GPU. `library` is the driver's, or a stand-in."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> Mapping[str, float]:
        """The values now; fractions are from 0 to 1."""
        found: dict[str, float] = {}
        used, memory = _Utilization(), _Memory()
        if self._ask("nvmlDeviceGetUtilizationRates", ctypes.byref(used)):
            found["gpu_use"] = used.gpu / 100
        if self._ask("nvmlDeviceGetMemoryInfo", ctypes.byref(memory)):
            found["gpu_memory_mb"] = memory.used / 2**20
        clock, highest = self._number("nvmlDeviceGetClockInfo"), self._number("nvmlDeviceGetMaxClockInfo")
        if clock is not None and highest:
            found["gpu_clock"] = clock / highest
        celsius = ctypes.c_uint()
        if self._ask("nvmlDeviceGetTemperature", 0, ctypes.byref(celsius)):
            found["gpu_celsius"] = celsius.value
        watts, limit = ctypes.c_uint(), ctypes.c_uint()
        if self._ask("nvmlDeviceGetPowerUsage", ctypes.byref(watts)) and self._ask(
            "nvmlDeviceGetEnforcedPowerLimit", ctypes.byref(limit)
        ):
            found["gpu_watts"], found["gpu_watts_limit"] = watts.value / 1e3, limit.value / 1e3
        reasons = ctypes.c_ulonglong()
        if self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons)):
            found["gpu_hot"] = float(bool(reasons.value & _THERMAL))
            found["gpu_capped"] = float(bool(reasons.value & _POWER))
        return found

    def _number(self, name: str) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._ask(name, _SM_CLOCK, ctypes.byref(value)) else None

    def _ask(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and function(self._handle, *arguments) == _OK


def gpu_reader(device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Reads the GPU's own counters; nothing without a GPU or its driver's library."""
    if device.type != "cuda":
        return dict
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:  # older than torch 2.9
        return dict
    domain, bus, slot = numbers
    gpu = _opened(f"{domain:08X}:{bus:02X}:{slot:02X}.0")
    return dict if gpu is None else gpu.read


def _opened(pci_bus_id: str) -> Gpu | None:
    """The GPU with this PCI address (`00000000:1B:00.0`); None if the driver does not know it."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        known = library.nvmlInit_v2() == _OK and (
            library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle)) == _OK
        )
    except (OSError, AttributeError):  # no library, or one without these functions
        return None
    return Gpu(library, handle) if known else None

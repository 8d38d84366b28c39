"""The driver's values, from a stand-in for its library: this has the meaning, not the presence, of a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from drumline.observe.nvml import Gpu, _opened, gpu_reader

FAILED = 3


class Library:
    """Answers like the driver. The functions in `missing` fail."""

    def __init__(self, reasons: int = 0, missing: tuple[str, ...] = ()) -> None:
        self.reasons, self.missing = reasons, missing

    def _set(self, name: str, pointer: Any, value: int) -> int:
        if name in self.missing:
            return FAILED
        pointer._obj.value = value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, pointer: Any) -> int:
        pointer._obj.gpu = 40
        return FAILED if "use" in self.missing else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, pointer: Any) -> int:
        pointer._obj.used = 3 << 30
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, pointer: Any) -> int:
        return self._set("clock", pointer, 1500)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, pointer: Any) -> int:
        return self._set("clock", pointer, 2000)

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int, pointer: Any) -> int:
        return self._set("celsius", pointer, 71)

    def nvmlDeviceGetPowerUsage(self, handle: Any, pointer: Any) -> int:
        return self._set("watts", pointer, 690_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, pointer: Any) -> int:
        return self._set("watts", pointer, 700_000)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, pointer: Any) -> int:
        return self._set("reasons", pointer, self.reasons)


@pytest.mark.parametrize(
    ("reasons", "hot", "capped"), [(0, 0, 0), (0x4, 0, 1), (0x20, 1, 0), (0x40 | 0x80, 1, 1)]
)
def test_the_values_have_names_and_units(reasons: int, hot: int, capped: int) -> None:
    assert Gpu(Library(reasons), None).read() == {
        "gpu_use": 0.4,
        "gpu_memory_mb": 3072.0,
        "gpu_clock": 0.75,
        "gpu_celsius": 71.0,
        "gpu_watts": 690.0,
        "gpu_watts_limit": 700.0,
        "gpu_hot": hot,
        "gpu_capped": capped,
    }


def test_what_the_driver_does_not_report_is_left_out() -> None:
    found = Gpu(Library(missing=("use", "clock", "reasons")), None).read()
    assert set(found) == {"gpu_memory_mb", "gpu_celsius", "gpu_watts", "gpu_watts_limit"}
    assert Gpu(object(), None).read() == {}


def test_a_library_of_a_driver_without_these_functions_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert _opened("00000000:1B:00.0") is None


def test_without_a_gpu_nothing_is_read() -> None:
    assert gpu_reader(torch.device("cpu"))() == {}

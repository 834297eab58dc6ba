"""Clocks, power, temperature and throttling of the GPU, read beside the run by a thread of its own.

NVML answers in tens of microseconds to milliseconds, too long for a step; so the latest values are
stamped into each row, at most one period old.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stepscope.records import StepRecord

PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """None where the GPU or its driver does not say."""

    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None  # NVML's bits

    def stamp(self, row: StepRecord) -> None:
        row.sm_clock_mhz, row.mem_clock_mhz = self.sm_clock_mhz, self.mem_clock_mhz
        row.power_mw, row.temperature_c = self.power_mw, self.temperature_c
        row.throttle_reasons = self.throttle_reasons


def nvml_reader(uuid: str | None, nvml: Any = None) -> tuple[Callable[[], Reading] | None, str]:
    """How to read the GPU of this UUID (None: the first), or None and the reason why not."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None, "n/a: nvidia-ml-py is not installed"
        nvml = pynvml
    try:
        nvml.nvmlInit()
        handle = _handle(nvml, uuid)
    except nvml.NVMLError as error:
        return None, f"n/a: {error}"

    def one(ask: Callable[..., Any], *kind: Any) -> int | None:
        try:
            return int(ask(handle, *kind))
        except nvml.NVMLError:
            return None

    def read() -> Reading:
        return Reading(
            one(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            one(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            one(nvml.nvmlDeviceGetPowerUsage),
            one(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            one(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )

    return read, "NVML"


def _handle(nvml: Any, uuid: str | None) -> Any:
    """By UUID, since CUDA may number the GPUs otherwise than NVML."""
    if uuid:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        except nvml.NVMLError:
            pass  # a virtual machine may know the GPU by another one
    return nvml.nvmlDeviceGetHandleByIndex(0)


class Telemetry:
    """Reads while entered; `latest` is what the last row gets."""

    def __init__(self, read: Callable[[], Reading], period_s: float = PERIOD_S) -> None:
        self._read, self._period = read, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stepscope-nvml", daemon=True)
        self.latest = read()

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._period):
            self.latest = self._read()

"""The CPU as a device: one timeline, the host's monotonic clock."""

from __future__ import annotations

import time


class HostClock:
    """Nanoseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def sleep_until(self, ns: int) -> None:
        time.sleep(max(0, ns - self.now()) / 1e9)

"""This host: what it is, how fine its clock ticks, and who else uses it while a run is on."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stepscope.records import Event

# Above this share of all CPU time used by others, a block of steps is called noisy. Spinning OpenMP
# threads collapse when one core is taken even briefly; an idle host's daemons stay below 2 %.
NOISY_SHARE = 0.05
PACKAGES = ("torch", "numpy", "tokenizers", "gguf")


# ---------------------------------------------------------------- what it is


def describe_host() -> dict[str, Any]:
    """CPU, cores this process may use, memory (bytes), OS; None where the OS does not say."""
    return {
        "cpu": cpu_model(),
        "cores": len(usable_cpus()),
        "memory_bytes": memory_bytes(),
        "os": platform.platform(terse=True),
        "machine": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that decide what a step costs; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in ("stepscope", *PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model name of the first CPU; ARM kernels give none, so the platform's name stands in."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def usable_cpus() -> set[int]:
    """The CPUs this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def machine_key() -> str:
    """Names this machine and its torch in a cache: what was measured here holds here only."""
    host = describe_host()
    parts = [platform.node(), host["cpu"], host["cores"], host["memory_bytes"], versions()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def clock_resolution_ns(
    clock: Callable[[], int] = time.perf_counter_ns, readings: int = 2000
) -> int:
    """The smallest step between two different readings of the monotonic clock, in ns."""
    smallest, last = sys.maxsize, clock()
    for _ in range(readings):
        now = clock()
        if now != last:
            smallest = min(smallest, now - last)
        last = now
    return smallest


# ---------------------------------------------------------------- foreign load


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Counters since boot (host) or since start (process); None where the OS lacks them."""

    at_ns: int
    own_cpu_ns: int  # user + system time of this process, all threads
    involuntary_switches: int | None
    busy_cpu_ns: int | None  # all CPUs, all processes, not idle, stolen time left out
    steal_ns: int | None  # time the hypervisor gave to other guests
    runnable: int | None  # processes in the run queue, this one's threads included


class ForeignLoad:
    """Reads the load of the CPUs this process may use, once per block of steps (about 20 us)."""

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        proc: Path = Path("/proc"),
        cpus: set[int] | None = None,
    ) -> None:
        usable = usable_cpus() if cpus is None else cpus
        self.cores = len(usable)
        self._names = {f"cpu{n}".encode() for n in usable}
        self._clock = clock
        self._stat = _open(proc / "stat")
        self._loadavg = _open(proc / "loadavg")
        self._tick_ns = 1_000_000_000 // (os.sysconf("SC_CLK_TCK") if self._stat else 1)

    def sample(self) -> LoadSample:
        busy, steal = self._cpu_times()
        return LoadSample(
            self._clock(), time.process_time_ns(), _switches(), busy, steal, self._runnable()
        )

    def _cpu_times(self) -> tuple[int | None, int | None]:
        """Busy and stolen ns of our CPUs.

        Lines of /proc/stat: cpuN user nice system idle iowait irq softirq steal (proc(5)).
        """
        busy = steal = found = 0
        for line in _reread(self._stat, 16_384).split(b"\n"):
            words = line.split()
            if len(words) > 8 and words[0] in self._names:
                found += 1
                busy += sum(int(words[i]) for i in (1, 2, 3, 6, 7))
                steal += int(words[8])
        if found < len(self._names):
            return None, None
        return busy * self._tick_ns, steal * self._tick_ns

    def _runnable(self) -> int | None:
        """Fourth word of /proc/loadavg: runnable/total."""
        words = _reread(self._loadavg, 128).split()
        return int(words[3].split(b"/")[0]) if len(words) > 3 else None

    def close(self) -> None:
        for handle in (self._stat, self._loadavg):
            if handle is not None:
                os.close(handle)
        self._stat = self._loadavg = None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _reread(handle: int | None, most: int) -> bytes:
    """A /proc file is made anew at each read from its start, so it is opened once."""
    if handle is None:
        return b""
    try:
        return os.pread(handle, most, 0)
    except OSError:
        return b""


def _switches() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def foreign_share(before: LoadSample, after: LoadSample, cores: int) -> float | None:
    """Share of the host's CPU time that other processes and other guests took between samples.

    (busy - own + steal) / (cores x elapsed). The kernel counts in ticks of 10 ms, so a block
    shorter than ten ticks cannot be judged and gives None.
    """
    elapsed = after.at_ns - before.at_ns
    counters = (before.busy_cpu_ns, after.busy_cpu_ns, before.steal_ns, after.steal_ns)
    if elapsed < 100_000_000 or None in counters:
        return None
    busy_before, busy_after, steal_before, steal_after = (c or 0 for c in counters)
    own = after.own_cpu_ns - before.own_cpu_ns
    foreign = busy_after - busy_before - own + steal_after - steal_before
    return min(1.0, max(0.0, foreign / (cores * elapsed)))


def noise_event(
    before: LoadSample,
    after: LoadSample,
    cores: int,
    start_ns: int = 0,
    threshold: float = NOISY_SHARE,
) -> Event | None:
    """A `noise` event for the block between two samples if others took too much CPU, else None.

    start_ns is the clock's reading at run start; events count from there.
    """
    share = foreign_share(before, after, cores)
    if share is None or share <= threshold:
        return None
    detail = f"others used {share * 100:.0f} % of {cores} cores"
    if after.involuntary_switches is not None and before.involuntary_switches is not None:
        switches = after.involuntary_switches - before.involuntary_switches
        detail += f", {switches} involuntary switches"
    if after.steal_ns is not None and before.steal_ns is not None:
        detail += f", {(after.steal_ns - before.steal_ns) / 1e6:.0f} ms stolen"
    if after.runnable is not None:
        detail += f", run queue {after.runnable}"
    return Event(before.at_ns - start_ns, after.at_ns - start_ns, "noise", None, detail)


# ---------------------------------------------------------------- garbage collection


class GcEvents:
    """Records Python's garbage collections while entered: two clock readings each, no more."""

    def __init__(self, start_ns: int = 0, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._start_ns = start_ns
        self._clock = clock
        self._began: int | None = None
        self._seen: list[tuple[int, int, int, int]] = []

    def __enter__(self) -> GcEvents:
        gc.callbacks.append(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._observe)

    def _observe(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._clock()
        elif self._began is not None:  # entered in the middle of a collection otherwise
            now = self._clock()
            self._seen.append((self._began, now, info["generation"], info["collected"]))
            self._began = None

    def take(self) -> list[Event]:
        """The collections since the last call, in order."""
        seen, self._seen = self._seen, []
        return [
            Event(
                begin - self._start_ns,
                end - self._start_ns,
                "gc",
                None,
                f"generation {generation}, {collected} collected",
            )
            for begin, end, generation, collected in seen
        ]

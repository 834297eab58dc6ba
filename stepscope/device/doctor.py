"""What works on this machine, and what will be n/a and why."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from stepscope.device.host import clock_resolution_ns, describe_host

PACKAGES = ("torch", "numpy", "gguf", "safetensors", "tokenizers", "typer", "rich", "matplotlib")


def findings() -> dict[str, Any]:
    """Facts by name; a thing that is missing says so in words."""
    import torch

    versions = {f"version {name}": _version(name) for name in ("stepscope", *PACKAGES)}
    return {
        **{f"host {key}": value for key, value in describe_host().items()},
        "clock": f"monotonic, {clock_resolution_ns()} ns resolution",
        **versions,
        "torch threads": torch.get_num_threads(),
        "cuda": _cuda(),
        "telemetry": _nvml(),
        "device timeline": _timeline(),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "n/a: not installed"


def _timeline() -> str:
    import torch

    if torch.cuda.is_available():
        return "CUDA events"
    return "n/a: on a CPU host and device share one timeline, unless --overlap is given"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "n/a: torch sees no CUDA device"
    return str(torch.cuda.get_device_name())


def _nvml() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"n/a: clocks, power and throttling need the NVIDIA driver ({error})"
    pynvml.nvmlShutdown()
    return "NVML"

"""How much host memory preempted requests may wait in."""

from __future__ import annotations

import torch

from stepscope.engine.kv import PagePool
from stepscope.engine.scheduler import Scheduler
from stepscope.models.tensors import available_memory, check_free
from stepscope.sections import EngineSection
from stepscope.text import plural


def swap_pages(
    engine: EngineSection, pool: PagePool, page_bytes: int, device: torch.device
) -> int | None:
    """Pages that may wait in host memory; None = no limit, where the free memory is unknown.

    As given, or what half of the free memory holds once the cache itself has filled.
    Raises StepscopeError for more than there is.
    """
    cache = pool.total * page_bytes if device.type == "cpu" else 0
    if engine.swap_tokens is None:
        free = available_memory()
        return None if free is None else max(free - cache, 0) // 2 // page_bytes
    pages = engine.swap_tokens // pool.page_size
    check_free(
        f"The KV cache and {pages:,} pages swapped out of it",
        cache + pages * page_bytes,
        "lower engine.swap_tokens or engine.kv_tokens",
    )
    return pages


def unswapped_notes(scheduler: Scheduler) -> list[str]:
    """A sentence if preempted requests were computed again for want of host memory."""
    count, limit = scheduler.num_unswapped, scheduler.memory.host.limit
    if not count:
        return []
    return [
        f"{plural(count, 'preempted request')} had to be computed again, as host memory for"
        f" swapping was full at {plural(limit or 0, 'page')}; raise engine.swap_tokens"
    ]

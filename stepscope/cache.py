"""Where models, ceilings and compiled steps are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "STEPSCOPE_CACHE"


def cache_directory() -> Path:
    """$STEPSCOPE_CACHE, or the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return Path(user_cache_path("stepscope"))

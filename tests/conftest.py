"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.models.load import LoadedModel

MODEL = "smollm2-135m"

# Two spinning OpenMP threads slow everything else on a small machine; must be set before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, fetched once; a test that needs it fails without it."""
    from stepscope.models.fetch import fetch

    try:
        return fetch(MODEL)
    except StepscopeError as error:
        pytest.fail(f"{error} (deselect with: -m 'not model')", pytrace=False)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in fp32, loaded once. Tests must not change its weights."""
    from stepscope.models.load import load_model

    return load_model(str(smollm2_path), "fp32")

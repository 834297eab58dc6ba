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
# (what, ids equal, max logit difference): shown as a table after the tests
PARITY = pytest.StashKey[list[tuple[str, str, str]]]()

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


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PARITY] = []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Model families against transformers, at the end of any run that tested them."""
    rows = config.stash[PARITY]
    if not rows:
        return
    terminalreporter.section("parity with transformers")
    terminalreporter.write_line(f"{'family':<52} {'ids equal':>18}  max logit difference")
    for name, ids, difference in rows:
        terminalreporter.write_line(f"{name:<52} {ids:>18}  {difference}")

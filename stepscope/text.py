"""How numbers and names look wherever a person reads them."""

from __future__ import annotations

import math

NA = "n/a"


def sig(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands separated; None and NaN are n/a, never 0."""
    if value is None or math.isnan(value):
        return NA
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{decimals}f}"


def ms(ns: float | None) -> str:
    return sig(None if ns is None else ns / 1e6)


def percent(share: float | None) -> str:
    return NA if share is None or math.isnan(share) else f"{share * 100:.0f} %"


def size(num_bytes: float | None) -> str:
    """Decimal units, as bandwidths use them."""
    if num_bytes is None:
        return NA
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{sig(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{sig(num_bytes)} TB"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listing(items: list[str], most: int = 4) -> str:
    """'a, b and c'; a long list is cut and says by how much."""
    if len(items) > most:
        return ", ".join(items[:most]) + f" and {len(items) - most} more"
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def printable(text: str) -> str:
    """Control characters made visible, so that a prompt cannot drive a terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )

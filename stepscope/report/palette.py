"""The colours of every report, once.

Phases are cool (green to blue, and greys), verdicts are warm (violet to ochre): a hue never means
both. Every colour keeps 3:1 against its page; neighbours differ in lightness, so that the order
survives without colour vision. Tests hold all three.
"""

from __future__ import annotations

PAGE = {"light": "#ffffff", "dark": "#14181f"}

# name -> (light theme, dark theme)
PHASE = {
    "recv": ("#5b8a2f", "#9cc46a"),
    "schedule": ("#1d6b3a", "#4fae74"),
    "prepare": ("#2a9470", "#7fdcb8"),
    "gather": ("#0b7285", "#35b3c7"),
    "forward": ("#2b6cb8", "#5b9be0"),
    "sample": ("#0b3d78", "#a9cdf5"),
    "d2h_wait": ("#5d6b7e", "#8b98ab"),
    "commit": ("#3f8fd0", "#3f86c8"),
    "detok": ("#12495a", "#6fc3d8"),
    "emit": ("#4d8a8c", "#8fc9cb"),
    "other": ("#85898f", "#a6abb3"),
}

VERDICT = {
    "bandwidth_bound": ("#6f3fb0", "#b08ae8"),
    "compute_bound": ("#b03a9c", "#ea86d6"),
    "launch_bound": ("#d2580c", "#f59a52"),
    "kernel_inefficient": ("#96751a", "#d9b450"),
    "host_bound": ("#8c2430", "#e0727c"),
    "copy_bound": ("#c2566f", "#f3a3b5"),
    "sampling_bound": ("#704826", "#c79a72"),
    "prefill_stall_bound": ("#d61f45", "#ff6f85"),
    "kv_pressure_bound": ("#a3480a", "#e58a4a"),
    "pause_bound": ("#5c1848", "#c86fae"),
}
NEUTRAL = ("#6b7078", "#9aa1ab")  # cannot tell, no load, anything without a colour of its own

# What the time budget adds to the phases: estimated parts of `forward`, in their verdict's hue.
BUDGET = {
    "weights": VERDICT["bandwidth_bound"],
    "kv": ("#9a6fd0", "#d3bdf5"),
    "compute": VERDICT["compute_bound"],
    "dispatch": VERDICT["launch_bound"],
    "inefficient": VERDICT["kernel_inefficient"],
    "stall": VERDICT["prefill_stall_bound"],
}
# Of several runs in one plot; told apart by dash pattern as well.
RUNS = (
    ("#1f2937", "#f3f4f6"),
    ("#b03a9c", "#ea86d6"),
    ("#0b7285", "#35b3c7"),
    ("#d2580c", "#f59a52"),
    ("#6f3fb0", "#b08ae8"),
    ("#5b8a2f", "#9cc46a"),
)


def phase(name: str) -> tuple[str, str]:
    return PHASE.get(name, NEUTRAL)


def verdict(name: str) -> tuple[str, str]:
    return VERDICT.get(name, NEUTRAL)


def budget(key: str) -> tuple[str, str]:
    """A budget line is named after a phase, after a verdict or after a part of `forward`."""
    for table in (BUDGET, PHASE, VERDICT):
        if key in table:
            return table[key]
    return NEUTRAL


def css(theme: int) -> str:
    """The colours as CSS variables: --p-PHASE, --v-VERDICT, --r-N; theme 0 light, 1 dark."""
    lines = [f"--p-{name}:{pair[theme]}" for name, pair in PHASE.items()]
    lines += [f"--v-{name}:{pair[theme]}" for name, pair in VERDICT.items()]
    lines += [f"--r-{i}:{pair[theme]}" for i, pair in enumerate(RUNS)]
    return ";".join([*lines, f"--neutral:{NEUTRAL[theme]}", f"--kv:{BUDGET['kv'][theme]}"])


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2, "relative luminance")."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2): 1 equal, 21 black on white."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)

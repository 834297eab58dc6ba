"""Imports go one way, and the command line is up before torch could be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope

ROOT = Path(stepscope.__file__).parent

# What each part of the package may import from the others, lazily or not.
BASE = {"errors", "text", "stats", "cache"}
RECORDS = BASE | {"records"}
SPEC = RECORDS | {"spec", "roofline"}
FILES = SPEC | {"checks", "store", "tables", "scenario", "sections", "values", "workload"}
ENGINE = FILES | {"engine", "device"}
RUNNER = ENGINE | {"models", "runner"}
ANALYZE = SPEC | {"analyze"}
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "records": RECORDS,
    **dict.fromkeys(("spec", "roofline"), SPEC),
    **dict.fromkeys(
        ("checks", "store", "tables", "scenario", "sections", "values", "workload"), FILES
    ),
    "engine": FILES | {"engine"},
    "device": FILES | {"device"},
    "models": ENGINE | {"models"},
    "runner": RUNNER,
    "ingest": RECORDS | {"spec", "tables", "ingest"},
    "analyze": ANALYZE,
    "report": ANALYZE | {"report"},
    "cli": RUNNER | ANALYZE | {"report", "ingest", "cli"},
}
HEAVY = ("torch", "pandas", "matplotlib", "transformers")
MAY_START_HEAVY = ("models", "runner")  # they are imported lazily themselves
MAY_USE_TORCH = ("models", "runner", "device", "cli")


# Dotted name inside the package -> source; the package itself apart.
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts): p.read_text(encoding="utf-8")
    for p in sorted(ROOT.rglob("*.py"))
    if p != ROOT / "__init__.py"
}


def part_of(module: str) -> str:
    return module.split(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name imported anywhere below; relative ones start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_directions(module: str, source: str) -> list[str]:
    own = part_of(module)
    wrong = []
    for name in imported(ast.parse(source)):
        if name.startswith("."):
            wrong.append(f"{module} imports {name}: write the absolute name")
        elif name.startswith("stepscope."):
            other = name.split(".")[1]
            if other != own and other not in ALLOWED[own]:
                wrong.append(f"{module} imports {name}")
    return wrong


def at_import(source: str) -> list[str]:
    """Modules imported when this one is: not inside functions, not for type checkers only."""
    names: list[str] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                waiting.append(ast.Module(node.orelse, []))
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += imported(ast.Module([node], []))
            waiting.append(node)
    return names


def test_imports_go_one_way() -> None:
    strangers = {part_of(m) for m in MODULES} - set(ALLOWED)
    assert not strangers, "say in this test what they may import"
    assert [w for m in MODULES for w in wrong_directions(m, MODULES[m])] == []


def test_heavy_packages_are_imported_where_they_are_needed() -> None:
    light = [m for m in MODULES if part_of(m) not in MAY_START_HEAVY]
    assert [(m, n) for m in light for n in at_import(MODULES[m]) if part_of(n) in HEAVY] == []


def test_the_engine_and_the_analysis_have_no_torch_at_all() -> None:
    without = [m for m in MODULES if part_of(m) not in MAY_USE_TORCH]
    assert {"engine.loop", "engine.policies.chunked", "analyze.verdict"} <= set(without)
    uses = [(m, n) for m in without for n in imported(ast.parse(MODULES[m]))]
    assert [(m, n) for m, n in uses if part_of(n) == "torch"] == []


@pytest.mark.parametrize(
    "module,source",
    [
        ("engine.loop", "from stepscope.models.decoder import Decoder"),
        ("engine.loop", "from stepscope import runner"),
        ("analyze.cost", "def f():\n    import stepscope.report.html"),
        ("analyze.cost", "from stepscope.store import read_run"),
        ("records", "from stepscope.spec import ModelSpec"),
        ("models.load", "if 1:\n    from stepscope.runner.probe import steps"),
        ("report.html", "from ..analyze import model"),
    ],
)
def test_a_wrong_direction_is_seen(module: str, source: str) -> None:
    assert len(wrong_directions(module, source)) == 1


@pytest.mark.parametrize(
    "source,names",
    [
        ("import torch", ["torch"]),
        ("try:\n    from torch import nn\nexcept ImportError:\n    pass", ["torch.nn"]),
        ("class A:\n    import pandas", ["pandas"]),
        ("def f():\n    import torch", []),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", ["json"]),
    ],
)
def test_what_runs_at_import_is_seen(source: str, names: list[str]) -> None:
    assert at_import(source) == names


def loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after this code."""
    tail = "\nimport sys\nprint('LOADED', *{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True
    )
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


HELP = """
import sys
from stepscope.cli import main
sys.argv = ["stepscope", {arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("arguments", ['"--help"', '"run", "--help"'])
def test_help_loads_nothing_heavy(arguments: str) -> None:
    loaded = loaded_by(HELP.format(arguments=arguments))
    assert "stepscope" in loaded and loaded.isdisjoint({*HEAVY, "numpy"})


@pytest.mark.parametrize(
    "module",
    ["stepscope.analyze", "stepscope.engine.loop", "stepscope.engine.policies", "stepscope.report"],
)
def test_importing_needs_no_torch(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_triton_is_left_alone_until_its_kernel_is_asked_for() -> None:
    code = "import stepscope.runner.execute, stepscope.models.paged"
    loaded = loaded_by(code)
    assert "torch" in loaded and "triton" not in loaded


def test_loading_would_be_seen() -> None:
    assert "numpy" in loaded_by("import numpy")

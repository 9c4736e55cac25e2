"""Rules of the house that a machine can check: who imports whom, sizes, public names, ASCII."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("recompute", "overlap")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")
PURE = (
    *(f"overlap.pipeline_model.{name}" for name in ("actions", "costs", "layout", "memory", "run", "trace")),
    "overlap.recordings",
    *(f"recompute.{name}" for name in ("checks", "config", "errors", "flags", "modules", "planner", "segments")),
    *(
        f"overlap.{name}"
        for name in (
            "builder",
            "chain",
            "clocks",
            "costs",
            "declarations",
            "declared_kinds",
            "errors",
            "expand",
            "hidden",
            "ir",
            "keeping",
            "lead",
            "lower",
        )
    ),
    *(
        f"overlap.{name}"
        for name in ("order_tables", "orders", "passes", "pieces", "plan", "search", "side", "simulate")
    ),
    "overlap.parallel.layout",
    *(f"overlap.{name}" for name in ("pipelining.layout", "pipelining.plans", "transfers")),
    "overlap.signature",
    *(f"overlap.{name}" for name in ("selective", "steady", "synthetic", "timeline", "validate")),
    *(f"overlap.memory.{name}" for name in ("bins", "facts", "ledger", "refs", "trace")),
    "overlap.planning.bins",
)
OPTIONAL = ("transformer_engine", "transformer_engine_torch", "deep_ep")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    """Return a file's path from the root, for test ids and messages."""
    return path.relative_to(ROOT).as_posix()


def files_of(module: str) -> list[Path]:
    """Return the sources of a module or package; empty where it does not exist."""
    stem = ROOT.joinpath(*module.split("."))
    return [path for path in (stem.with_suffix(".py"), *sorted(stem.rglob("*.py"))) if path.is_file()]


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of every module imported anywhere in a file, functions included.

    `from package import name` yields `package` and `package.name`, since `name` may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    """Tell whether a module is a package or inside it."""
    return module == package or module.startswith(f"{package}.")


def breaches_of_purity(source: str) -> list[str]:
    """Return the imports that a pure module may not have.

    torch, and any module of ours that is not pure itself, for that one may import torch. The bare packages
    count as not pure: their `__init__` gathers everything.
    """
    ours = [name for name in imports_of(ast.parse(source)) if name.partition(".")[0] in PACKAGES]
    torch = [name for name in imports_of(ast.parse(source)) if is_within(name, "torch")]
    return torch + [name for name in ours if not any(is_within(name, pure) for pure in PURE)]


@pytest.mark.parametrize("path", files_of("recompute"), ids=name_of)
def test_recompute_never_imports_overlap(path: Path) -> None:
    assert [name for name in imports_of(ast.parse(path.read_text())) if is_within(name, "overlap")] == []


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_never_import_torch(module: str) -> None:
    paths = files_of(module)
    if not paths:
        pytest.skip(f"{module} does not exist yet")
    assert {name_of(path): breaches_of_purity(path.read_text()) for path in paths} == {
        name_of(path): [] for path in paths
    }


@pytest.mark.parametrize(
    ("source", "breaches"),
    [
        ("import torch", ["torch"]),
        ("import torch.nn as nn", ["torch.nn"]),
        ("def f():\n    from torch import Tensor", ["torch", "torch.Tensor"]),
        ("from overlap.engine import Engine", ["overlap.engine", "overlap.engine.Engine"]),
        ("from recompute import ConfigError", ["recompute", "recompute.ConfigError"]),
        ("from recompute.errors import ConfigError", []),
        ("import torchless, os", []),
    ],
)
def test_purity_check_sees_a_breach(source: str, breaches: list[str]) -> None:
    """Negative control of the check above."""
    assert breaches_of_purity(source) == breaches


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_optional_packages_stay_in_backends(path: Path) -> None:
    if path.is_relative_to(ROOT / "overlap" / "backends"):
        return
    names = imports_of(ast.parse(path.read_text()))
    assert [name for name in names if any(is_within(name, package) for package in OPTIONAL)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_are_ascii(path: Path) -> None:
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    assert [number for number, line in lines if not line.isascii()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist(package: str) -> None:
    if not (ROOT / package / "__init__.py").is_file():
        pytest.skip(f"{package} has no public names yet")
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if name not in vars(module)] == []
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()

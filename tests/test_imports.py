"""The rules about imports and modules, as a checker that reads source text and runs nothing.

`violations(root)` applies every rule to a tree; the test below applies it to Partita.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.conftest import REPOSITORY

# What each room may import of our own, besides itself. A room is a folder or a file directly under partita/. Everything
# may import the package root, which holds the version. Imports inside functions and under TYPE_CHECKING count too.
MAY_IMPORT: dict[str, set[str]] = {
    room: set(others.split())
    for room, others in {
        "messages": "",
        "options": "messages errors",
        "remedies": "",
        "errors": "remedies",
        "foreign_paths": "remedies errors untrusted_files",
        "process": "",
        "untrusted_files": "",
        "demo": "",
        "signals": "",
        "files": "remedies errors signals",
        "extras": "remedies errors",
        "dtypes": "",
        "package": "messages remedies errors foreign_paths untrusted_files dtypes",
        "observations": "remedies",
        "diagnosis": "remedies observations",
        "partition_reports": """
            messages remedies errors foreign_paths untrusted_files files dtypes observations
            diagnosis
        """,
        "compare": "observations diagnosis partition_reports inspection support",
        "capacity": "dtypes package observations partition_reports providers",
        "drift": "errors process dtypes package observations partition_reports providers runtime",
        "explain": "messages observations diagnosis partition_reports",
        "check": "messages options errors observations partition_reports compare",
        "bench": "remedies errors observations partition_reports",
        "machine": "remedies errors observations partition_reports capacity",
        "inspection": "remedies package observations partition_reports",
        "support": "messages remedies errors dtypes observations partition_reports",
        "providers": "messages remedies errors extras files observations",
        "foreign": "messages options remedies errors foreign_paths untrusted_files dtypes package observations runtime",
        "runtime": """
            messages options remedies errors foreign_paths process untrusted_files
            signals files extras dtypes package observations diagnosis machine
            inspection support capacity providers
        """,
        "export": """
            messages options remedies errors foreign_paths process untrusted_files
            signals files extras dtypes package observations
        """,
        "library": """
            messages options remedies errors foreign_paths process untrusted_files demo signals
            files extras dtypes package observations diagnosis partition_reports compare explain
            check drift bench machine inspection support capacity providers foreign runtime export
        """,
        "serve": """
            messages options remedies errors signals package observations partition_reports check
            foreign runtime library
        """,
        "commands": """
            messages options remedies errors foreign_paths process untrusted_files demo signals
            files extras dtypes package observations diagnosis partition_reports compare explain
            check drift bench machine inspection support capacity providers foreign runtime export library
            serve
        """,
        "cli": """
            messages options remedies errors demo process signals extras package observations
            diagnosis partition_reports compare explain check drift bench machine inspection providers
            runtime export library commands
        """,
        "__main__": "cli",
    }.items()
}

# What the package root may name under TYPE_CHECKING; it imports nothing.
ROOT_OFFERS = ("library", "errors")

# Who may import a library; a name that ends with / is a folder.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("runtime/ort/",),
    "torch": ("export/",),
    "onnxscript": ("export/",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "prometheus_client": ("serve/",),
    # Errors and sections carry rows; only the edge sets them in type, and no child process loads what it needs for it.
    "rich": ("commands/", "partition_reports/render/"),
}


@dataclass(frozen=True)
class Import:
    """One imported module, by full dotted name, and the line that imports it."""

    target: str
    line: int


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module under the package folder `root`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(tree: ast.Module, known: dict[str, Path]) -> list[Import]:
    """Every import in `tree`, wherever it stands; `from a import b` names a.b when that is a module of ours."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append(Import(full if full in known else base, node.lineno))
        elif isinstance(node, ast.Call):
            found += _dynamic_import(node)
    return found


def _dynamic_import(node: ast.Call) -> list[Import]:
    """`import_module("x")` and `__import__("x")` with a literal name."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [Import(first.value, node.lineno)]
    return []


def violations(root: Path) -> list[str]:
    """Every breach of a rule in the package folder `root`, as `file:line: what`."""
    known = modules_of(root)
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(root).as_posix()
        imports = imports_of(tree, known)
        found += _of_the_root(root.name, tree, known) if name == root.name else []
        found += _layer_breaches(root.name, name, where, imports)
        found += _library_breaches(where, imports)
        if name != root.name:  # its imports are for type checkers
            edges[name] = {i.target for i in imports if i.target in known and i.target != name}
    return found + _cycles(edges)


def _layer_breaches(package: str, name: str, where: str, imports: list[Import]) -> list[str]:
    if name == package:
        return []  # what it offers it finds by name when it is asked for; see `_of_the_root`
    room = _room(package, name)
    if room not in MAY_IMPORT:
        return [f"{where}:1: {room} is in no layer; add it to MAY_IMPORT in tests/test_imports.py"]
    allowed = MAY_IMPORT[room] | {room}
    found = []
    for item in imports:
        target = _room(package, item.target)
        if target and target not in allowed:
            found.append(f"{where}:{item.line}: {room} imports {target}")
    return found


def _of_the_root(package: str, tree: ast.Module, known: dict[str, Path]) -> list[str]:
    """The root names the rooms that it offers something of, to type checkers alone: importing it loads nothing."""
    found = []
    for node in tree.body:
        checked = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for item in imports_of(ast.Module([node], []), known):
            room = _room(package, item.target)
            if room and not (checked and room in ROOT_OFFERS):
                found.append(f"__init__.py:{item.line}: the package root imports {item.target}")
    return found


def _room(package: str, dotted: str) -> str:
    """`partita.export.passes.x` -> `export`; empty for the package root and for foreign modules."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else ""


def _library_breaches(where: str, imports: list[Import]) -> list[str]:
    found = []
    for item in imports:
        library = item.target.split(".")[0]
        homes = ONLY_IN.get(library)
        if homes and not any(where == home or (home.endswith("/") and where.startswith(home)) for home in homes):
            found.append(f"{where}:{item.line}: imports {library}, which only {' and '.join(homes)} may")
    return found


def _cycles(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return ["import cycle: " + " -> ".join(error.args[1])]
    return []


def test_partita_has_no_import_violations():
    assert len(modules_of(REPOSITORY / "partita")) > 10, "the checker looked in the wrong place"
    assert violations(REPOSITORY / "partita") == []


CHILDREN = (
    "runtime.lab.placement",
    "runtime.chain.provider_check",
    "library.engine.jobs",
    "library.engine.worker_loop",
)
"""Modules that run as processes of their own, and what they import when they work."""
AT_WORK = (
    "runtime.chain.open_chain",
    "runtime.place.run_phases",
    "runtime.ort.session",
    "runtime.lab.probes",
    "partition_reports.build",
)


def test_child_processes_do_not_import_rich_or_jinja2():
    names = [f"partita.{name}" for name in (*CHILDREN, *AT_WORK)]
    script = f"import sys, {', '.join(names)}; print([name for name in ('rich', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

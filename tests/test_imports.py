"""The rules about imports and modules, as a checker that reads source text and runs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
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

# Folders whose modules may import a library.
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


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module under the package folder `root`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(tree: ast.AST, known: dict[str, Path]) -> list[tuple[str, int]]:
    """Every import in `tree` and its line; `from a import b` names a.b when that is a module of ours."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            full = [f"{base}.{alias.name}" for alias in node.names]
            found += [(name if name in known else base, node.lineno) for name in full]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.append((str(node.args[0].value), node.lineno))
    return found


def violations(known: dict[str, Path]) -> list[str]:
    """Every import that a rule forbids, as `file:line: what`."""
    found: list[str] = []
    for name, path in known.items():
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(REPOSITORY / "partita").as_posix()
        room = room_of(name)
        if room and room not in MAY_IMPORT:
            found.append(f"{where}: {room} is in no layer; add it to MAY_IMPORT in tests/test_imports.py")
        for node in tree.body:
            for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            # The root names what it offers to type checkers alone: importing it loads nothing.
            allowed = MAY_IMPORT.get(room, set()) | {room} if room else set(ROOT_OFFERS) if for_types else set()
            for target, line in imports_of(node, known):
                if room_of(target) and room_of(target) not in allowed:
                    found.append(f"{where}:{line}: {room or 'the package root'} imports {target}")
                homes = ONLY_IN.get(target.partition(".")[0], ())
                if homes and not where.startswith(homes):
                    found.append(f"{where}:{line}: imports {target}, which only {' and '.join(homes)} may")
    return found


def room_of(dotted: str) -> str:
    """`partita.export.passes.x` -> `export`; empty for the package root and for foreign modules."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "partita" and len(parts) > 1 else ""


def test_partita_has_no_import_violations():
    known = modules_of(REPOSITORY / "partita")
    assert len(known) > 10, "the checker looked in the wrong place"
    assert violations(known) == []
    edges = {name: imports_of(ast.parse(path.read_text("utf-8")), known) for name, path in known.items()}
    del edges["partita"]  # its imports are for type checkers
    TopologicalSorter({name: {to for to, _ in all} & {*known} - {name} for name, all in edges.items()}).prepare()


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

"""Partita with every sentence of its own reworded: `python -m tests.reworded`, and what it then decides, as JSON.

An import hook changes the vowels of every string in the source that reads like prose, by an amount that depends on the
file and line: whoever writes a sentence in one place and looks for it in another finds it no longer. Patterns for what
others say, type annotations and docstrings stay as they are.
"""

from __future__ import annotations

import ast
import gzip
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType, ModuleType

PROSE = re.compile(r"(?:^|[\s(,;:])[a-z]{2,}[\s,;:]+(?:\S+\s+)*?[a-z]{2,}(?:$|[\s),.;:])")
"""Two words of small letters, at least."""
MARKUP = re.compile(r"[<>\\]|\(\?|^\s*(import|from) ")
"""HTML, regular expressions and programs are no prose."""
VOWELS = "aeiou"
PATTERN_CALLS = frozenset({"compile", "search", "match", "fullmatch", "sub", "findall", "finditer", "LogPattern"})
REPOSITORY = Path(__file__).resolve().parent.parent
ARG_MAX = """<ir_version: 10, opset_import: ["" : 21]>
g (double[2,4] x) => (int64[2] y) { [relu] h = Relu(x) [arg] y = ArgMax<axis=1, keepdims=0, select_last_index=1>(h) }"""
"""CUDA has no kernel for this value of the attribute; only experiments tell."""
ROOMS = (
    *(
        "observations",
        "diagnosis",
        "partition_reports",
        "diff",
        "explain",
        "check",
        "providers",
        "runtime",
        "library",
        "commands",
        "bench",
    ),
    *(
        "support",
        "machine",
        "export",
        "cli",
        "errors",
        "remedies",
        "extras",
        "strangers",
        "files",
        "package",
        "spelling",
    ),
)


def reworded(text: str, shift: int) -> str:
    """Other vowels in every word; what stands in braces or looks like an option, a path or a name stays."""
    table = str.maketrans(VOWELS, VOWELS[shift:] + VOWELS[:shift])
    return re.sub(r"(?<![-{\w./_])[a-z]{2,}(?![\w./_}=-])", lambda word: word[0].translate(table), text)


class Reword(ast.NodeTransformer):
    """Rewords one file. `changed` counts the strings."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = 0

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """A string that reads like prose."""
        text = node.value
        if not isinstance(text, str) or not PROSE.search(text) or MARKUP.search(text):
            return node
        self.changed += 1
        shift = zlib.crc32(f"{self.name}:{node.lineno}:{node.col_offset}".encode()) % (len(VOWELS) - 1) + 1
        return ast.copy_location(ast.Constant(reworded(text, shift)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """What others say is not ours to reword."""
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return node if called in PATTERN_CALLS else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Nor are the log lines in the example of a reason."""
        return node if node.arg == "example" else self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`Literal["..."]` is a type."""
        return node if getattr(node.value, "id", "") == "Literal" else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Docstrings are read by nobody who runs it, except typer, which shows them."""
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module, reworded."""

    count = 0

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from changed source, and never cached."""
        tree = Reword(fullname)
        changed = ast.fix_missing_locations(tree.visit(ast.parse(Path(self.path).read_bytes())))
        Loader.count += tree.changed
        return compile(changed, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Puts the loader in for the rooms that say something."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only ours."""
        if not name.startswith(tuple(f"partita.{room}" for room in ROOMS)):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(name, spec.loader.path)
        return spec


def masked(value: object) -> object:
    """Without what is said: a string with a blank in it says something."""
    if isinstance(value, str):
        return "…" if " " in value.strip() else value
    if isinstance(value, dict):
        return {masked(key) if isinstance(key, str) else key: masked(entry) for key, entry in value.items()}
    return [masked(entry) for entry in value] if isinstance(value, list | tuple) else value


def decisions() -> dict[str, object]:
    """What is decided about recorded and hand-made runs: every field of the records that is no sentence."""
    from partita.check.gate import Gate, check
    from partita.check.requirements import Limits
    from partita.diagnosis.precedence import explain
    from partita.diagnosis.reasons.base import load_reasons
    from partita.compare.reports import compare
    from partita.explain.node_explanation import find
    from tests.partition_reports.reports import REPORTS

    reports = {name: make() for name, make in REPORTS.items()}
    found: dict[str, object] = {name: report.model_dump(mode="json") for name, report in reports.items()}
    found["reasons"] = [
        [reason.code, *((finding.kind, finding.ground) for finding in reason.findings(reason.example))]
        for reason in load_reasons()
    ]
    found["explained"] = [explain(reason.example)[0].code for reason in load_reasons()]
    gate = Gate(limits=Limits(0, 0, 0), max_unexplained=0, cache_in_place=True, min_tokens_per_second=1.0)
    for (one, before), (other, after) in zip(reports.items(), list(reports.items())[1:], strict=False):
        found[f"{one}-{other}"] = compare(before, after).model_dump(mode="json")
    for name, report in reports.items():
        nodes = [entry.node for entry in report.fallbacks][:3]
        found[f"nodes-{name}"] = [find(report, query).model_dump(mode="json") for query in (*nodes, "a", "nowhere")]
        found[f"gate-{name}"] = check(report, gate, name, (name, report)).model_dump(mode="json")
    return found


def exit_codes(folder: Path) -> list[tuple[str, int]]:
    """How verbs end, told by the code alone."""
    import onnx
    from onnx import TensorProto, helper

    from partita.cli import run
    from tests.partition_reports.reports import RECORDED

    report, model = folder / "report.json", folder / "model.onnx"
    report.write_bytes(gzip.decompress((RECORDED / "webgpu.json.gz").read_bytes()))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="relu")], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), model)
    found = []
    for line in (
        "--nonsense",
        "report show missing.json",
        f"report check {report}",
        f"report check {report} --max-cpu-nodes 0",
        f"report check {report} --require nodes>0",
        f"report check {report} --require nodes",
        f"report explain {report} nowhere",
        f"place {model} --provider cpu --probe-seconds 0",
        f"place {model} --provider cuda --probe-seconds 0",
        f"place {model} --provider nonsense",
        f"place {report} --provider cpu",
        "verify missing",
        "export missing out",
        "generate missing hello",
    ):
        found.append((line.replace(str(folder), ""), run(line.split())))
    return found


def work(folder: Path, checkpoint: Path) -> dict[str, object]:
    """What comes of verbs that do their work: an export with its verification, generations, and a placement with
    experiments in child processes.
    """
    import onnx
    from onnx import parser

    from partita.cli import run
    from tests.runtime.handmade_packages import handmade

    package, exported, model = handmade(folder / "package"), folder / "exported", folder / "arg.onnx"
    onnx.save(parser.parse_model(ARG_MAX), model)
    lines = {
        "verified": f"verify {package} --provider cpu",
        "generated": f"generate {package} --token-ids 3,4,5 --max-new-tokens 4 --report {folder}/generated.json",
        "exported": f"export {checkpoint} {exported} --max-length 32",
        "verified again": f"verify {exported} --provider cpu",
        "placed": f"place {model} --provider cuda,cpu --dry-run --report {folder}/placed.json",
    }
    found: dict[str, object] = {name: run(line.split()) for name, line in lines.items()}
    for name in ("generated", "placed"):
        report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        found[f"{name} nodes"] = [[node["name"], node["provider"]] for node in report["phases"][-1]["nodes"]]
        found[f"{name} fallbacks"] = [
            [
                row["node"],
                row["reason"],
                row["evidence_kind"],
                [[trial["factor"], trial["outcome"]] for trial in row["variants"]],
            ]
            for row in report["fallbacks"]
        ]
        found[f"{name} checks"] = [check["passed"] for check in report["checks"]]
    manifest = json.loads((exported / "manifest.json").read_text(encoding="utf-8"))
    found["manifest"] = [manifest["verification"]["status"], manifest["tokenizer"], manifest["graph"]["attention"]]
    return found


def reword_children(folder: Path) -> None:
    """Have Python processes that are started from now on reworded, too."""
    start = f"import sys\nsys.path.append({str(REPOSITORY)!r})\nfrom tests.reworded import Finder\n"
    (folder / "sitecustomize.py").write_text(f"{start}sys.meta_path.insert(0, Finder())\n", encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def main() -> None:
    """Print how many strings were reworded, and what was decided. Arguments: a checkpoint; `reworded` or nothing."""
    checkpoint, *words = sys.argv[1:]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as name, redirect_stdout(said), redirect_stderr(said):
        folder = Path(name)
        os.environ["PARTITA_CACHE_DIR"] = ""  # or one's experiments would be the other's
        if words == ["reworded"]:
            sys.meta_path.insert(0, Finder())
            (folder / "start").mkdir()
            reword_children(folder / "start")
        found = {
            "decided": masked(decisions()),
            "ended": exit_codes(folder),
            "worked": work(folder, Path(checkpoint)),
        }
    sys.stdout.write(json.dumps({**found, "changed": Loader.count, "said": said.getvalue()}))


if __name__ == "__main__":
    main()

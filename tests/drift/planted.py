"""Whether planted faults are found, as a table per environment: `python -m tests.drift.planted [ENVIRONMENT…]`.

`--graph`, `--kind`: only these. `--source`: against the source model in place of the CPU provider (main environment).
Packages are exported to build/drift; environments without torch get their folders.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.drift.comparison import Settings
from partita.drift.graphs import PartedGraph
from partita.drift.measure import measure
from partita.drift.records import Drift
from partita.drift.sides import Side, file_step, package_steps
from partita.errors import PartitaError
from partita.foreign.folder import Choice, open_folder
from partita.providers.resolve import parse_chain
from partita.runtime.place.inputs import input_shapes
from partita.runtime.place.onnx_model import read_onnx
from tests.conftest import REPOSITORY
from tests.contract.expectations import ENVIRONMENTS
from tests.contract.packages import checkpoint_of, key
from tests.drift.faults import FOREIGN, GRAPHS, Fault, export_package, faults_of, plant

CHAINS = {"main": "cpu", "plugins": "cpu", "webgpu": "webgpu,cpu", "openvino": "openvino,cpu", "qnn": "qnn,cpu"}
"""Environment -> the tested chain. The providers of the plugins have no device on processors of AMD."""
ONLY = {
    "openvino": ("llama-fp32", "llama-int4", "llama-primitives-fp32", "genai-int4-cpu", "optimum"),
    "webgpu": ("llama-onnx24-fp32", "llama-primitives-fp32", "llama-primitives-int4", "gemma3_text-primitives-fp32"),
    "qnn": ("llama-primitives-static-fp16", "demo-primitives-static-fp16", "genai-int4-cpu"),
}
"""Graphs of an environment, if not all. Over SwiftShader, GroupQueryAttention is wrong and float16 is missing. QNN
takes no nodes of other packages.
"""


def compare(folder: Path, faulty: Path, chain: str = "cpu", source: Path | None = None, **shapes: Any) -> Drift:
    """Both folders compared, the faulty one on `chain`; of an ONNX file, its folder. `source`: a checkpoint."""
    reference, tested = Side(folder, parse_chain("cpu")), Side(faulty, parse_chain(chain))
    if any(folder.glob("*.json")):
        manifest = open_folder(folder, Choice())
        steps = package_steps(reference, manifest)
    else:
        model = read_onnx(next(iter(folder.glob("*.onnx"))))
        steps = [file_step(model, input_shapes(model.inputs, shapes), {})]
    if source is not None:  # needs torch, which only the main environment has
        from partita.export.checkpoint.description import open_checkpoint
        from partita.library.drifting import source_side

        with TemporaryDirectory() as scratch:
            reference = source_side(folder, manifest, open_checkpoint(str(source)), steps, Path(scratch))
            return measure(str(folder), tested, reference, steps, Settings())
    return measure(str(folder), tested, reference, steps, Settings())


def judge(
    folder: Path, fault: Fault, into: Path, chain: str = "cpu", source: Path | None = None
) -> tuple[bool, bool, Drift]:
    """Whether layer and node are right, and the result. Nodes in sequence are right if the fault is among them."""
    found = compare(folder, plant(folder, fault, into), chain, source)
    shutil.rmtree(into)
    graph = PartedGraph(read_onnx(next(iter(folder.glob("*.onnx")))))
    layer = next(part for part in graph.layers() for at in part.nodes if graph.nodes[at].name == fault.node)
    names = [graph.nodes[at].name for at in layer.nodes]
    first, _, last = (found.first_node or "").partition(" to ")
    named = names[names.index(first) : names.index(last or first) + 1] if {first, last or first} <= {*names} else []
    return found.first_layer == layer.name, fault.node in named, found


def rows(chain: str, folders: dict[str, Path], kinds: list[str], sources: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """A row per control and per fault."""
    for graph, folder in folders.items():
        try:
            control = compare(folder, folder, chain, sources.get(graph))
        except PartitaError as error:
            yield {"graph": graph, "failure": str(error)}
            continue
        nodes = {**control.nodes_by_provider, **control.unused}
        right = control.is_within and not control.unused  # else nothing ran on the provider
        worst = f"{control.first_layer} {control.first_node}: {control.worst.compared_error}"
        yield {"graph": graph, "kind": "", "nodes": nodes, "right": [right] * 2, "found": worst}
        for fault in faults_of(graph, folder):
            if kinds and fault.kind not in kinds:
                continue
            with TemporaryDirectory() as scratch:
                layer, node, found = judge(folder, fault, Path(scratch) / "faulty", chain, sources.get(graph))
            node = node and (found.not_finite is None or found.not_finite.node == fault.node)  # QNN has no infinity
            seen = f"{found.first_layer} {found.first_node} ({found.basis}) {found.not_finite or ''}"
            yield {"graph": graph, "kind": fault.kind, "node": fault.node, "right": [layer, node], "found": seen}


def ensure_folders(graphs: list[str]) -> tuple[dict[str, Path], dict[str, Path]]:
    """Folders of the graphs, exported if they are not there, and the checkpoints of packages."""
    import partita

    home = REPOSITORY / "build" / "drift" / key()
    (home / "checkpoints").mkdir(parents=True, exist_ok=True)
    folders, sources = {}, {}
    for graph in graphs:

        def export(checkpoint: Path, graph: str = graph, **options: Any) -> Path:
            sources[graph] = checkpoint
            if not (home / graph).is_dir():
                partita.export(str(checkpoint), home / graph, **options)
            return home / graph

        folders[graph] = export_package(graph, export, lambda model: checkpoint_of(model, home / "checkpoints"))
    return folders, sources


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_table(environment: str, lines: Iterator[dict[str, Any]]) -> Counter[str]:
    """Print a line for every graph and every wrong row. Returns the numbers of faults, of right layers and nodes, and
    of findings of controls.
    """
    _write(f"{environment} ({CHAINS[environment]})")
    total = Counter[str]()
    for graph, entries in groupby(lines, key=lambda row: str(row["graph"])):
        control, *planted = entries
        if "failure" in control:
            _write(f"  {graph}: not run: {control['failure']}")
            continue
        layers, nodes = (sum(row["right"][at] for row in planted) for at in (0, 1))
        counts = {"faults": len(planted), "layers": layers, "nodes": nodes, "findings": not control["right"][0]}
        total.update(counts)
        _write(f"  {graph:30} {_counts(counts)}  {control['nodes']}")
        for row in (row for row in (control, *planted) if row["right"] != [True, True]):
            _write(f"    WRONG (layer, node: {row['right']}): {row}")
    _write(f"  {'all':30} {_counts(total)}")
    return total


def _counts(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {counts[name]:3}" for name in ("faults", "layers", "nodes", "findings"))


def run_environment(
    environment: str, folders: dict[str, Path], kinds: list[str], venvs: Path
) -> Iterator[dict[str, Any]]:
    """The rows of an environment, from a process of its Python."""
    python = sys.executable if environment == "main" else venvs / environment / "bin" / "python"
    folders = {graph: folder for graph, folder in folders.items() if graph in ONLY.get(environment, GRAPHS)}
    words = [f"{graph}={folder}" for graph, folder in folders.items()]
    command = [str(python), "-m", "tests.drift.planted", "--inside", CHAINS[environment], *words]
    command += [word for kind in kinds for word in ("--kind", kind)]
    variables = {**ENVIRONMENTS[environment].variables, **os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        raise RuntimeError(f"{environment}: exit code {child.returncode}")


def main(arguments: list[str]) -> int:
    """Print the table; the exit code is 1 if a control has a finding, a layer is wrong or over 5 % of nodes are."""
    parser = argparse.ArgumentParser(prog="python -m tests.drift.planted")
    parser.add_argument("environments", nargs="*", default=[*CHAINS])
    parser.add_argument("--graph", action="append", choices=GRAPHS)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--source", action="store_true")
    parser.add_argument("--venvs", type=Path, default=REPOSITORY / ".venvs")
    parser.add_argument("--inside", metavar="CHAIN", help="print JSON lines for GRAPH=FOLDER…")
    given = parser.parse_args(arguments)
    if given.inside:
        folders = {name: Path(folder) for name, _, folder in (text.partition("=") for text in given.environments)}
        for row in rows(given.inside, folders, given.kind, {}):
            _write(json.dumps(row))
        return 0
    graphs = given.graph or [graph for graph in GRAPHS if not (given.source and graph in FOREIGN)]
    folders, sources = ensure_folders(graphs)
    if given.source:
        counts = [print_table("main", rows("cpu", folders, given.kind, sources))]
    else:
        named = [*given.environments]
        counts = [print_table(name, run_environment(name, folders, given.kind, given.venvs)) for name in named]
    return int(any(n["findings"] or n["layers"] < n["faults"] or n["nodes"] < 0.95 * n["faults"] for n in counts))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # SwiftShader may crash while Python unloads it

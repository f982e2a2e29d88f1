"""Whether planted faults are found: `python -m tests.drift.planted CHAIN GRAPH=FOLDER… [--kind KIND]`.

Prints a JSON line per graph without a fault and per fault, then the counts. Exit code 1: a finding without a fault, a
wrong layer, or more than 5 % wrong nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.drift.comparison import Settings
from partita.drift.graphs import PartedGraph
from partita.drift.measure import measure
from partita.drift.records import Drift
from partita.drift.sides import Side, package_steps
from partita.errors import PartitaError
from partita.foreign.folder import Choice, open_folder
from partita.library.drifting import source_side
from partita.providers.resolve import parse_chain
from partita.runtime.place.onnx_model import read_onnx
from tests.drift.faults import Fault, faults_of, plant


def compare(folder: Path, faulty: Path, chain: str = "cpu", source: Path | None = None) -> Drift:
    """Both folders compared, the faulty one on `chain`. `source`: a checkpoint."""
    reference, tested = Side(folder, parse_chain("cpu")), Side(faulty, parse_chain(chain))
    manifest = open_folder(folder, Choice())
    steps = package_steps(reference, manifest)
    if source is not None:
        with source_side(folder, manifest, str(source), steps) as model:
            return measure(str(folder), tested, model, steps, Settings())
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


def rows(
    chain: str, graph: str, folder: Path, kinds: list[str], source: Path | None = None
) -> Iterator[dict[str, Any]]:
    """A row for the graph without a fault, and one per fault."""
    try:
        control = compare(folder, folder, chain, source)
    except PartitaError as error:
        yield {"graph": graph, "failure": str(error)}
        return
    nodes = {**control.nodes_by_provider, **control.unused}
    right = control.is_within and not control.unused  # else nothing ran on the provider
    worst = f"{control.first_layer} {control.first_node}: {control.worst.compared_error}"
    yield {"graph": graph, "kind": "", "nodes": nodes, "right": [right] * 2, "found": worst}
    for fault in faults_of(graph, folder):
        if kinds and fault.kind not in kinds:
            continue
        with TemporaryDirectory() as scratch:
            layer, node, found = judge(folder, fault, Path(scratch) / "faulty", chain, source)
        node = node and (found.not_finite is None or found.not_finite.node == fault.node)  # QNN has no infinity
        seen = f"{found.first_layer} {found.first_node} ({found.basis}) {found.not_finite or ''}"
        yield {"graph": graph, "kind": fault.kind, "node": fault.node, "right": [layer, node], "found": seen}


def counts_of(found: list[dict[str, Any]]) -> Counter[str]:
    """Numbers of faults, of right layers and nodes, of findings without a fault, and of graphs that did not run."""
    total = Counter[str]()
    for row in found:
        if "failure" in row:
            total["not run"] += 1
        elif not row["kind"]:
            total["findings"] += not row["right"][0]
        else:
            layer, node = row["right"]
            total.update(faults=1, layers=layer, nodes=node)
    return total


def are_right(counts: Counter[str]) -> bool:
    """Whether all layers and at least 95 % of the nodes are right, and no graph without a fault has a finding."""
    located = counts["layers"] == counts["faults"] and counts["nodes"] >= 0.95 * counts["faults"]
    return located and not counts["findings"]


def main(arguments: list[str]) -> int:
    """Print the rows and the counts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.drift.planted")
    parser.add_argument("chain")
    parser.add_argument("folders", nargs="+", metavar="GRAPH=FOLDER")
    parser.add_argument("--kind", action="append", default=[])
    given = parser.parse_args(arguments)
    found = []
    for graph, _, folder in (text.partition("=") for text in given.folders):
        for row in rows(given.chain, graph, Path(folder), given.kind):
            found.append(row)
            print(json.dumps(row), flush=True)  # noqa: T201
    counts = counts_of(found)
    print("counts:", dict(counts))  # noqa: T201
    return 0 if are_right(counts) else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # SwiftShader may crash while Python unloads it

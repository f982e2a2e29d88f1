"""A changed node that a provider claims is also run: one that it claims and cannot run is no remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.onnx_model import read_onnx
from partita.runtime.probes import child
from partita.runtime.probes.cases import MOST_RUN, RUN, Case, case_model, node_case, to_run
from partita.runtime.probes.graphs import cut_graph
from partita.runtime.probes.subjects import _changed_model
from partita.runtime.probes.variations import as_it_is, single

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
CPU = Resolution(known_providers()["cpu"], "active")
ADD = "g (float[N] x, float[M] y) => (float[K] z) {\n  [n] z = Add(x, y)\n}"
SLICE = "g (float[4] x, int64[1] a, int64[1] b) => (float[K] z) {\n  [n] z = Slice(x, a, a, a, b)\n}"


def case_of(text: str, folder: Path, **sizes: tuple[int, ...]) -> Case:
    path = folder / "given.onnx"
    onnx.save(parser.parse_model(HEAD + text), path)
    return node_case(cut_graph(read_onnx(path), sizes), "n")


def tried(model: onnx.ModelProto, folder: Path) -> child.Found:
    onnx.save(model, folder / "tried.onnx")
    return child._try_model(folder / "tried.onnx", CPU, True)


def test_a_node_that_is_claimed_and_does_not_run_is_not_taken(tmp_path: Path) -> None:
    broken = case_of(ADD, tmp_path, x=(2,), y=(3,))
    assert tried(case_model(broken), tmp_path).outcome == "taken"
    found = tried(to_run(case_model(broken), broken), tmp_path)
    assert found.outcome == "failed" and found.said.startswith("it claims the node, and the run fails: ")
    sound = case_of(ADD, tmp_path, x=(3,), y=(3,))
    assert tried(to_run(case_model(sound), sound), tmp_path).outcome == "taken"


def test_a_node_whose_inputs_could_make_its_run_fail_is_not_run(tmp_path: Path) -> None:
    """Inputs of integers may be positions or sizes: a Slice with steps of 0 fails on every provider."""
    stepping = case_of(SLICE, tmp_path)
    assert not to_run(case_model(stepping), stepping).metadata_props
    adding = case_of(ADD, tmp_path, x=(3,), y=(3,))
    declaring = replace(adding, declared={"o0": adding.fixed["i0"]})
    assert not to_run(case_model(declaring), declaring).metadata_props


def test_nothing_is_run_in_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}NAME", "h100")
    broken = case_of(ADD, tmp_path, x=(2,), y=(3,))
    assert tried(to_run(case_model(broken), broken), tmp_path).outcome == "taken"


def test_changed_nodes_are_run_where_their_sizes_are_known_and_small(tmp_path: Path) -> None:
    def sizes(model: onnx.ModelProto) -> dict[str, list[int]] | None:
        found = {entry.key: entry.value for entry in model.metadata_props}
        return json.loads(found[RUN]) if RUN in found else None

    case = case_of(ADD, tmp_path, x=(2,), y=(3,))
    marked = {each.change: sizes(_changed_model(each, company=False)) for each in single(case)}
    assert marked["float64 in place of float32"] == marked["Add of opset 13 in place of 14"] == {"i0": [2], "i1": [3]}
    assert marked["int32 in place of float32"] is None
    assert sizes(_changed_model(as_it_is(case), company=False)) is None
    assert sizes(to_run(case_model(case), case)) == {"i0": [2], "i1": [3]}
    for unknown in (case_of(ADD, tmp_path, x=(2,)), case_of(ADD, tmp_path, x=(MOST_RUN,), y=(1,))):
        assert sizes(to_run(case_model(unknown), unknown)) is None

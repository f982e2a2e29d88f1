"""`partita inspect`: text, HTML, Markdown and JSON views of a package and of a diff."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import partita
from partita.cli import run
from partita.compare.rows import Comparison
from partita.inspection.records import Inspection
from partita.partition_reports.render.show import load_view
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint
from tests.foreign.conftest import SAMPLES

VIEWS, DIFF_VIEWS = "partita.inspection.document", "partita.compare.document"


@pytest.fixture(scope="module")
def packages(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> tuple[Path, Path]:
    checkpoint = tiny_checkpoint("llama")
    return exported(checkpoint), exported(checkpoint, precision="int4")


@pytest.fixture(scope="module")
def found(packages: tuple[Path, Path]) -> Inspection:
    return partita.inspect(packages[1])


@pytest.fixture(scope="module")
def difference(packages: tuple[Path, Path]) -> Comparison:
    return partita.inspect(packages[0], against=packages[1])


WORDS = ("LlamaForCausalLM", "MatMulNBits", "GroupQueryAttention", "int4", "model.onnx.data", "torch", "BPE")


@pytest.mark.parametrize("view", ("html", "json", "markdown", "text"))
def test_every_view_shows_package_and_diff_contents(found, difference, view):
    shown, changes = load_view(view, VIEWS).to_text(found), load_view(view, DIFF_VIEWS).to_text(difference)
    assert [word for word in WORDS if word not in shown] == []
    assert [word for word in ("precision", "fp32", "int4", "MatMulNBits", "down_proj") if word not in changes] == []


def test_identical_modules_share_a_line(found):
    text = load_view("text", VIEWS).to_text(found)
    layers = len({module.module for module in found.modules if module.module.endswith("mlp.down_proj")})
    assert layers > 1
    assert sum("mlp.down_proj" in line for line in text.splitlines()) == 1


def test_diff_lists_changed_values_only(difference):
    named = {(each.section, each.name): (each.before, each.after) for each in difference.changes}
    assert named["model", "precision"] == ("fp32", "int4")
    assert named["operators", "com.microsoft:MatMulNBits"][0] is None
    assert ("model", "architecture") not in named and difference.equal_rows > 20
    assert all(before != after for before, after in named.values())


def test_only_package_hashes_are_attributed_to_manifest(packages):
    folder = partita.inspect(SAMPLES / "optimum", hashes=True)
    for found, said in ((partita.inspect(packages[0]), True), (folder, False)):
        text = load_view("text", VIEWS).to_text(found)
        assert all(file.sha256 for file in found.files)
        assert ("hashes from the manifest" in " ".join(text.split())) is said


def test_json_output_matches_published_schemas(packages, capsys):
    for words, schema in (([], "inspect"), (["--against", str(packages[1])], "diff")):
        assert run(["inspect", str(packages[0]), *words, "--json"]) == 0, capsys.readouterr().err
        told = json.loads(capsys.readouterr().out)
        jsonschema.validate(told, json.loads((REPOSITORY / "docs" / f"{schema}.schema.json").read_text("utf-8")))


def test_finding_and_remedy_precede_graph_section(packages, own_copy, capsys):
    folder = own_copy(packages[0])
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    assert run(["inspect", str(folder)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "damaged, not JSON" in told.split("Graph model.onnx")[0]
    assert "partita export" in told.split("Graph model.onnx")[0]

"""`partita inspect`: views of a package and of a difference, adapters, hashes, and variants of one folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import partita
from partita.cli import run
from partita.compare.packages import compare_packages
from partita.compare.rows import Comparison
from partita.errors import UsageError
from partita.inspection.records import Inspection
from partita.package.folder import AdapterRecord, FileRecord, read_manifest, write_manifest
from partita.partition_reports.render.show import load_view
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint
from tests.foreign.conftest import SAMPLES
from tests.inspection.graphs import model, save

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


# Adapters, hashes and variants


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def variants(tmp_path: Path) -> Path:
    """A folder with two models of one size, which are not the same."""
    inner = tmp_path / "hub" / "onnx"
    inner.mkdir(parents=True)
    shutil.copy(SAMPLES / "optimum" / "config.json", inner.parent)
    shutil.copy(SAMPLES / "optimum" / "model.onnx", inner)
    model = onnx.load(inner / "model.onnx")
    weight = next(each for each in model.graph.initializer if len(each.raw_data) > 1000)
    weight.raw_data = bytes(len(weight.raw_data))
    node = next(each for each in model.graph.node if each.op_type == "Add")
    node.op_type = "Sub"
    onnx.save(model, inner / "model_fp16.onnx")
    return inner.parent


def test_hashes_option_reports_sha256_of_every_file(variants: Path) -> None:
    plain = partita.inspect(variants, variant="model.onnx")
    assert all(file.sha256 is None for file in plain.files)
    read = {file.name: file.sha256 for file in partita.inspect(variants, variant="model.onnx", hashes=True).files}
    assert read == {name: sha256(variants / name) for name in read} and "onnx/model_fp16.onnx" in read
    alone = partita.inspect(variants / "onnx" / "model.onnx", hashes=True)
    assert [file.sha256 for file in alone.files] == [sha256(variants / "onnx" / "model.onnx")]


def with_weights(folder: Path, value: float) -> Path:
    """An ONNX file with all of its weights beside it."""
    weight = numpy_helper.from_array(np.full((64, 8), value, np.float32), "w")
    product = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    return save(model([product], [weight]), folder / "model.onnx", external=True)


def test_external_weights_are_hashed_and_compared(tmp_path: Path) -> None:
    one, alike, other = (
        with_weights(tmp_path / name, value) for name, value in (("one", 1), ("alike", 1), ("other", 2))
    )
    read = {file.name: file.sha256 for file in partita.inspect(one, hashes=True).files}
    assert read == {name: sha256(one.parent / name) for name in ("model.onnx", "model.onnx.data")}
    assert partita.inspect(one, against=alike, hashes=True).headline == "No differences"
    differences = partita.inspect(one, against=other, hashes=True).changes
    assert [(each.section, each.name) for each in differences] == [("files", "model.onnx.data")]


def test_unhashed_files_are_reported_as_not_compared(tmp_path: Path) -> None:
    one, other, folder = with_weights(tmp_path / "one", 1), with_weights(tmp_path / "other", 2), SAMPLES / "optimum"
    for first, second in ((one, other), (folder, folder)):
        found = partita.inspect(first, against=second)
        assert found.changes == () and "file contents were not compared" in found.headline
    assert partita.inspect(folder, against=folder, hashes=True).headline == "No differences"
    hashed = partita.inspect(one, hashes=True)
    graphs = tuple(graph.model_copy(update={"data_files": ("deep/w.data",)}) for graph in hashed.graphs)
    unlisted = hashed.model_copy(update={"graphs": graphs})
    assert "not compared" in compare_packages(unlisted, unlisted).headline, "weights outside the listed files"


def test_hub_snapshot_hashes_come_from_blob_names(variants: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    (snapshot / "onnx").mkdir(parents=True)
    for name, called in (("onnx/model.onnx", "ab" * 32), ("config.json", "cd" * 20)):  # SHA-256, and git's SHA-1
        shutil.copy(variants / name, blobs / called)
        (snapshot / name).symlink_to(blobs / called)
    found = {file.name: file.sha256 for file in partita.inspect(snapshot).files}
    assert found == {"onnx/model.onnx": "ab" * 32, "config.json": None}
    compared = partita.inspect(snapshot, against=variants, against_variant="model.onnx")
    assert not [each for each in compared.changes if each.name == "onnx/model.onnx"], "one side has no hash"


def test_variants_of_same_folder_are_compared(variants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    difference = partita.inspect(variants, against=variants, variant="model.onnx", against_variant="fp16")
    told = {(each.section, each.name) for each in difference.changes}
    assert ("operators", "Sub") in told and ("operators", "Add") in told
    asked = ["--against", str(variants), "--against-variant", "fp16", "--hashes"]
    assert run(["inspect", str(variants), "--variant", "model.onnx", *asked]) == 0
    assert "Sub" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"`against_variant=fp16` needs `against`, which is not set"):
        partita.inspect(variants, against_variant="fp16")  # type: ignore[call-overload]


def test_adapters_are_shown(
    tiny_checkpoint: TinyCheckpoint,
    exported: Exported,
    own_copy: Callable[[Path], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = exported(tiny_checkpoint("llama"))
    package = own_copy(plain)
    manifest = read_manifest(package)
    source = (FileRecord(name="adapter_model.safetensors", size_bytes=10, sha256="ab" * 32),)
    small = AdapterRecord(name="small", merged=False, kind="lora", ranks=(4, 8), modules=14, file="a", source=source)
    tuned = AdapterRecord(
        name="tuned", merged=True, kind="dora", ranks=(2,), modules=3, base_model="one/two", source=source
    )
    write_manifest(package, manifest.model_copy(update={"adapters": (small, tuned)}))
    assert partita.inspect(package).adapters == (small, tuned)
    assert run(["inspect", str(package)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "LoRA of rank 4 and 8 for 14 modules; separate, named small" in shown
    assert "DoRA of rank 2 for 3 modules, trained on one/two; merged into the weights" in shown
    assert "rows of a batch share one adapter" in shown
    different = {each.name for each in partita.inspect(plain, against=package).changes if each.section == "adapters"}
    assert {"small", "tuned"} <= different

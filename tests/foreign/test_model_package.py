"""ONNX Runtime model packages: selecting a variant and resolving its ONNX file and weights."""

from __future__ import annotations

import shutil

import pytest

import partita
from partita.errors import PackageError, UsageError
from partita.foreign.model_package import choose_variant
from tests.contract.models import matmul_relu
from tests.model_packages import over_shared_weights, write

CPU, QNN = "CPUExecutionProvider", "QNNExecutionProvider"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package").mkdir()
    return tmp_path / "package"


@pytest.fixture
def manifest(folder, tmp_path):
    return over_shared_weights(folder, matmul_relu(tmp_path / "m.onnx"), {"cpu": CPU, "qnn": QNN})


def variants(manifest):
    return manifest["components"]["main"]["variants"]


@pytest.mark.parametrize(
    ("name", "providers", "chosen"),
    [
        (None, [CPU], "cpu"),
        (None, [QNN, CPU], "qnn"),
        ("qnn", [CPU], "qnn"),
        ("main/qnn", [CPU], "qnn"),
        ("main", [CPU], "cpu"),
    ],
)
def test_variant_is_chosen_by_first_provider_or_by_name(folder, manifest, name, providers, chosen):
    found = choose_variant(folder, name, providers)
    assert found.path == folder / "main" / chosen / "model.onnx"
    assert found.weights is not None and [file.name for file in found.weights.iterdir()] == ["model.onnx.data"]


@pytest.mark.parametrize(
    ("name", "providers", "said"),
    [
        (None, ["CUDAExecutionProvider", CPU], "no variants for CUDAExecutionProvider: it has main/cpu"),
        ("gpu", [CPU], "no such variant; .* has main/cpu .CPUExecutionProvider., main/qnn"),
        (None, [], "several variants: it has main/cpu"),
        (None, [QNN], f"2 variants for {QNN}"),
    ],
)
def test_missing_or_ambiguous_variant_is_an_error(folder, manifest, name, providers, said):
    variants(manifest)["npu"] = {**variants(manifest)["qnn"], "device": "npu"}
    write(folder, manifest)
    with pytest.raises(UsageError, match=said):
        choose_variant(folder, name, providers)
    assert choose_variant(folder, "npu", [QNN]).name == "npu"


def test_external_json_files_and_moved_shared_asset_are_resolved(folder, manifest):
    info = variants(manifest)["cpu"]["executor_info"]["ort"]
    variants(manifest)["cpu"] = {"ep": CPU, "executor_info": {"ort": "ort.json"}}
    variants(manifest)["qnn"]["variant_directory"] = "qnn"
    write(folder / "main" / "cpu", info, "ort.json")
    write(folder / "main", manifest["components"]["main"], "component.json")
    (uri,) = info["session_options"].values()
    shutil.move(folder / "shared_assets" / uri.replace(":", "-"), folder / "data")
    write(folder, {"schema_version": 1, "components": {"main": "main"}, "shared_assets": {uri: "data"}})
    found = choose_variant(folder, None, [CPU])
    assert (found.path, found.weights) == (folder / "main/cpu/model.onnx", folder / "data")
    assert partita.place(folder, providers="cpu").phases[0].providers[0].nodes == 2


def test_inspect_shows_every_variant_and_counts_shared_weights_once(folder, manifest):
    found = partita.inspect(folder)
    assert (found.kind, found.findings) == ("model package", ())
    assert [graph.variant for graph in found.graphs] == [f"main/cpu ({CPU})", f"main/qnn ({QNN})"]
    assert found.weights.size_bytes == 16 * 16 * 4
    assert [graph.variant for graph in partita.inspect(folder, variant="qnn").graphs] == [f"main/qnn ({QNN})"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(schema_version="2.0"), "model package of format 2.0; Partita reads format 1.x"),
        (lambda m: m.update(components={}), "a model package without variants"),
        (lambda m: m.update(components={"main": "../other"}), "outside the model folder"),
        (lambda m: m.update(components=[]), "field components"),
        (lambda m: variants(m)["cpu"].update(executor_info={}), r"executor_info\.ort: Field required"),
        (lambda m: variants(m)["cpu"]["executor_info"]["ort"].update(model_file="../../../m"), "outside the model"),
    ],
)
def test_invalid_model_package_raises_package_error(folder, manifest, change, said):
    change(manifest)
    write(folder, manifest)
    for use in (lambda: partita.place(folder, providers="cpu"), lambda: partita.inspect(folder)):
        with pytest.raises(PackageError, match=said):
            use()


def test_missing_shared_weights_are_reported(folder, manifest):
    shutil.rmtree(folder / "shared_assets")
    with pytest.raises(PackageError, match=r"its weights file 'model.onnx.data' is missing"):
        partita.place(folder, providers="cpu")
    assert "is missing" in partita.inspect(folder).findings[0].problem

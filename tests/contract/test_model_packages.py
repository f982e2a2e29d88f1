"""Model packages of ONNX Runtime: partita opens the variant that ONNX Runtime itself selects."""

from __future__ import annotations

import json

from tests.contract.cases import cases, each_environment, only_in, targets
from tests.contract.commands import honoured
from tests.contract.packages import MODEL_PACKAGE, VARIANTS
from tests.model_packages import over_shared_weights

CPU = "CPUExecutionProvider"
OPENS = only_in("qnn", "plugins")
"""Environments whose ONNX Runtime has the API of model packages (1.32)."""
OWN_API = """
folder, component = sys.argv[1:]
context = ort.ModelPackageContext(folder)
chosen = context.select_component(component, ort.ModelPackageOptions(ort.SessionOptions()))
variants = {name: context.get_variant_ep_name(component, name) for name in context.get_variant_names(component)}
print(json.dumps({"chosen": chosen.get_selected_variant_name(), "variants": variants,
                  "outputs": run(chosen.create_session())}))
"""
RUN = """
def run(session):
    feeds = {}
    for port in session.get_inputs():
        kind = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}[port.type]
        shape = [size if isinstance(size, int) else 1 for size in port.shape]
        feeds[port.name] = np.full(shape, port.name != "logits_indices", kind)
    outputs = zip(session.get_outputs(), session.run(None, feeds))
    return {port.name: float(np.abs(value.astype(np.float64)).sum()) for port, value in outputs}
"""


@cases("target", targets)
def test_place_opens_variant_of_first_provider(environment, target, partita, model, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    over_shared_weights(folder, model("matmul_relu"), {"cpu": CPU, "other": target.ort_name})
    for chain, variant in ((target.provider, "other"), ("cpu", "cpu")):
        report = honoured(partita("place", folder, "--provider", chain, "--json")).json
        assert any(f"variant main/{variant}" in note for note in report["notes"]), report["notes"]
        (phase,) = report["phases"]
        expected = target.ort_name if chain == target.provider else CPU
        assert {share["provider"]: share["nodes"] for share in phase["providers"]} == {expected: 2}


@cases("_", OPENS)
def test_onnx_runtime_and_partita_select_same_variant(environment, _, partita, plain, model, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    over_shared_weights(folder, model("matmul_relu"), {"other": "QNNExecutionProvider", "main": CPU})
    own = json.loads(honoured(plain(RUN + OWN_API, folder, "main")).out.splitlines()[-1])
    assert (own["chosen"], own["variants"]) == ("main", {"other": "QNNExecutionProvider", "main": CPU})
    notes = honoured(partita("place", folder, "--provider", "cpu", "--json")).json["notes"]
    assert any("variant main/main" in note for note in notes)


@cases("_", OPENS)
def test_onnx_runtime_runs_exported_model_package(environment, _, packages, partita, plain):
    """ONNX Runtime's ModelPackage API gives the same outputs as the source package of the variant."""
    folder, component = packages / MODEL_PACKAGE, "decoder"
    own = json.loads(honoured(plain(RUN + OWN_API, folder, component)).out.splitlines()[-1])
    assert (own["chosen"], own["variants"]) == ("cpu", {target: name for target, (name, _) in VARIANTS.items()})
    source = packages / VARIANTS["cpu"][1] / "model.onnx"
    alone = honoured(plain(f"{RUN}print(json.dumps(run(ort.InferenceSession(sys.argv[1]))))", source))
    assert own["outputs"] == json.loads(alone.out.splitlines()[-1])
    checks = "opened = ort.ModelPackage.open(sys.argv[1]); info = opened.get_info()\n"
    checks += "print(json.dumps([[a['uri'], ort.ModelPackage.compute_directory_hash(a['resolved_path'])]"
    checks += " for a in info['shared_assets']]))"
    ((uri, computed),) = json.loads(honoured(plain(checks, folder)).out.splitlines()[-1])
    assert uri == computed, "the shared folder is named by the hash of its contents"


@each_environment()
def test_variants_of_exported_model_package_match_source_packages(environment, packages, partita):
    weights = {}
    for variant, (_, source) in VARIANTS.items():
        report = honoured(partita("place", packages / MODEL_PACKAGE, "-e", "cpu", "--variant", variant, "--json")).json
        known = honoured(partita("place", packages / source, "-e", "cpu", "--json")).json
        assert report["phases"][0]["providers"][0]["nodes"] == known["phases"][-1]["providers"][0]["nodes"]
        weights[variant] = (packages / source / "model.onnx.data").stat().st_size
    (shared,) = (packages / MODEL_PACKAGE / "shared_assets").iterdir()
    assert (shared / "model.onnx.data").stat().st_size < 0.65 * sum(weights.values())
    assert (shared / "tokenizer.json").is_file()

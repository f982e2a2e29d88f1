"""Model packages of ONNX Runtime: partita opens the variant that ONNX Runtime itself selects."""

from __future__ import annotations

import json

from tests.contract.cases import cases, only_in, targets
from tests.contract.commands import honoured
from tests.model_packages import over_shared_weights

CPU = "CPUExecutionProvider"
OPENS = only_in("qnn", "plugins")
"""Environments whose ONNX Runtime has the API of model packages (1.32)."""
OWN_API = """
folder, component = sys.argv[1:]
context = ort.ModelPackageContext(folder)
chosen = context.select_component(component, ort.ModelPackageOptions(ort.SessionOptions()))
session = chosen.create_session()
feeds = {}
for port in session.get_inputs():
    kind = {"tensor(float)": np.float32, "tensor(int64)": np.int64}[port.type]
    feeds[port.name] = np.ones([size if isinstance(size, int) else 1 for size in port.shape], kind)
outputs = session.run(None, feeds)
variants = {name: context.get_variant_ep_name(component, name) for name in context.get_variant_names(component)}
print(json.dumps({"chosen": chosen.get_selected_variant_name(), "variants": variants,
                  "outputs": {port.name: float(np.abs(value).sum())
                              for port, value in zip(session.get_outputs(), outputs)}}))
"""


@cases("target", targets)
def test_place_opens_the_variant_of_the_first_provider(environment, target, partita, model, tmp_path):
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
def test_onnx_runtime_and_partita_select_the_same_variant(environment, _, partita, plain, model, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    over_shared_weights(folder, model("matmul_relu"), {"other": "QNNExecutionProvider", "main": CPU})
    own = json.loads(honoured(plain(OWN_API, folder, "main")).out.splitlines()[-1])
    assert (own["chosen"], own["variants"]) == ("main", {"other": "QNNExecutionProvider", "main": CPU})
    notes = honoured(partita("place", folder, "--provider", "cpu", "--json")).json["notes"]
    assert any("variant main/main" in note for note in notes)

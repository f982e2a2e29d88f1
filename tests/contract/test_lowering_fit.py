"""Packages with the lowering for a provider: all nodes on it, no Memcpy nodes, verified results."""

from __future__ import annotations

import json

from tests.contract.cases import cases, packages_of
from tests.contract.commands import execute, honoured, nodes_on

CPU = "CPUExecutionProvider"


@cases("target, package", packages_of("whole"), sample=True)
def test_package_runs_entirely_on_provider_without_copies(environment, target, package, packages, partita, tmp_path):
    report = tmp_path / "report.json"
    limits = ("--max-cpu-nodes", 0, "--max-copies", 0)
    honoured(
        partita("place", packages / package, "--provider", target.provider, "--runs", 1, "--report", report, *limits)
    )
    content = json.loads(report.read_text())
    assert nodes_on(content, target.ort_name) > 0 and nodes_on(content, CPU) == 0
    assert {phase["name"] for phase in content["phases"]} == {"prefill", "decode"}
    assert content["fallbacks"] == []
    copies = [copy for phase in content["phases"] for copy in phase["copies"] if copy["kind"] == "memcpy_node"]
    assert copies == []
    cache = content["cache"]
    assert cache is None or cache["in_place_states"] == cache["states"]


@cases("target, package", packages_of("whole"), sample=True)
def test_package_verifies_on_provider(environment, target, package, packages, partita):
    done = honoured(partita("verify", packages / package, "--provider", target.provider, "--json")).json
    assert done["status"] == "verified" and done["provider"] == target.ort_name, done
    assert {"prefill", "chunked prefill", "decode 1", "decode 8"} <= {step["step"] for step in done["steps"]}


ASK = """
import time
from pathlib import Path
import onnx
from partita.providers.resolve import parse_chain, resolve_one
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.lab.tables import measure_graph
from partita.runtime.lab.laboratory import cache_for
from partita.runtime.lab.laboratory import Lab
from partita.runtime.chain.provider_check import check
(provider,) = parse_chain(sys.argv[1])
(tried,) = check([resolve_one(provider, available_ort_names(), {})])
answers = {}
for folder in map(Path, sys.argv[2:]):
    manifest = json.loads((folder / "manifest.json").read_text())
    graph = manifest["graph"]["files"][-1]
    sizes = {p["name"]: tuple(s if isinstance(s, int) else 1 for s in p["shape"]) for p in graph["inputs"]}
    sizes.update({state["past"]: tuple(state["shape"]) for state in manifest["graph"]["states"]})
    model = onnx.load(folder / graph["file"], load_external_data=False)
    lab = Lab(tried.resolution, cache_for(tried.resolution), time.monotonic() + 120)
    _, unsupported, failure, untested = measure_graph(model.SerializeToString(), sizes, lab)
    answers[manifest["graph"]["attention"]] = [sorted(unsupported), failure, untested, lab.unusable]
print(json.dumps(answers))
"""


def asked(environment):
    """Rows of target, the packages to ask it about, and the operators it must be seen to leave."""
    rows = {
        "webgpu": {"gqa": [], "onnx24": ["Attention", "TensorScatter"], "primitives": []},
        "openvino": {"gqa": ["GroupQueryAttention"], "primitives": []},
        "plugins": {"gqa": ["GroupQueryAttention"], "onnx24": ["Attention", "TensorScatter"], "primitives": []},
    }
    return [(target, rows[environment.name]) for target in environment.targets if environment.name in rows]


@cases("target, left", asked)
def test_support_check_before_export_finds_unsupported_operators(environment, target, left, packages, plain):
    """As in `export --target`: the graphs have no weight data."""
    folders = [packages / f"llama-{attention}-fp32" for attention in left]
    done = honoured(plain(ASK, target.provider, *folders))
    answers = json.loads(done.out.splitlines()[-1])
    assert answers == {name: [operators, "", 0, ""] for name, operators in left.items()}


GROUPED = """
from onnx import TensorProto, helper
tokens, heads, kv_heads, width = 8, 4, 2, 16
shapes = {"q": [1, tokens, heads * width], "k": [1, tokens, kv_heads * width], "v": [1, tokens, kv_heads * width],
          "past_k": [1, kv_heads, 64, width], "past_v": [1, kv_heads, 64, width]}
inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
inputs += [helper.make_tensor_value_info("last", TensorProto.INT32, [1])]
inputs += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "new_k", "new_v")]
node = helper.make_node("GroupQueryAttention", [value.name for value in inputs], [value.name for value in outputs],
                        domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads)
imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
graph = helper.make_graph([node], "g", inputs, outputs)
model = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
random = np.random.default_rng(0)
feed = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items() if len(name) == 1}
feed |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if len(name) > 1}
feed |= {"last": np.array([tokens - 1], np.int32), "total": np.array(tokens, np.int32)}
ours, wanted = (
    ort.InferenceSession(model, providers=[name], enable_fallback=0).run(["out"], feed)[0]
    for name in (sys.argv[1], "CPUExecutionProvider")
)
print(json.dumps([float(error) for error in np.abs(ours - wanted).max(axis=(0, 2))]))
"""


@cases("target", lambda environment: [(t,) for t in environment.targets if t.provider == "webgpu"])
def test_verify_detects_incorrect_attention_kernel(environment, target, packages, partita, plain):
    """SwiftShader runs 4 lanes; GroupQueryAttention in ONNX Runtime 1.27 may fail there after the 4th token."""
    errors = json.loads(honoured(plain(GROUPED, target.ort_name)).out.splitlines()[-1])
    assert max(errors[:4]) < 1e-5, errors
    done = partita("verify", packages / "llama-gqa-fp32", "--provider", target.provider)
    if max(errors) < 1e-3:
        honoured(done)
    else:
        assert done.code == 4 and "first difference in prefill, output logits" in done.err, done


@cases("target, package", packages_of("whole"), sample=True, heavy=("qnn",))
def test_planted_fault_is_located_on_provider(environment, target, package, packages, tmp_path):
    """Changed weights or operators in single nodes; tests/drift has more faults."""
    words = (f"{target.provider},cpu", f"{package}={packages / package}")
    kinds = ("--kind", "down-projection", "--kind", "product")
    done = honoured(execute("-m", "tests.drift.planted", *words, *kinds, folder=tmp_path))
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert len(rows) == 3 and all(row["right"] == [True, True] for row in rows), done

"""Where ONNX Runtime runs on the CPU, or leaves a provider out, without an error.

Each test shows both sides: plain ONNX Runtime is silent on this very input, and Partita is not. If a newer ONNX Runtime
stops being silent the first half fails, and the guard behind the second half may go.
"""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, targets
from tests.contract.commands import honoured, refused
from tests.contract.test_chain import ORT_NAMES

CPU = "CPUExecutionProvider"
SILENT = """
options = ort.SessionOptions()
for key, value in json.loads(sys.argv[3]).items():
    options.add_session_config_entry(key, value)
session = ort.InferenceSession(sys.argv[1], options, providers=json.loads(sys.argv[2]))
y = session.run(None, {"x": np.ones((4, 16), np.float32)})[0]
print(json.dumps({"registered": session.get_providers(), "finite": bool(np.isfinite(y).all())}))
"""
NO_ADAPTER = {"VK_ICD_FILENAMES": "/nonexistent/icd.json", "VK_DRIVER_FILES": "/nonexistent/icd.json"}


def only_in(*names):
    """Rows for these environments, without further values."""
    return lambda environment: [("",)] if environment.name in names else []


def silently(plain, file, providers, options=None, **extra):
    """What plain ONNX Runtime registers for `providers`, having run without an exception."""
    done = honoured(plain(SILENT, file, json.dumps(providers), json.dumps(options or {}), **extra))
    answer = json.loads(done.out.splitlines()[-1])
    assert answer["finite"]
    return answer["registered"]


@cases("_", only_in("main"))
def test_an_unknown_provider_name_is_retried_on_the_cpu(environment, _, plain, partita, model):
    file = model("matmul_relu")
    assert silently(plain, file, ["NoSuchExecutionProvider"]) == [CPU]
    refused(partita("place", file, "--provider", "NoSuchExecutionProvider"), "nosuch", "not_in_build")


@cases("_", only_in("webgpu"))
def test_a_provider_whose_constructor_fails_is_retried_on_the_cpu(environment, _, plain, partita, model):
    file = model("matmul_relu")
    assert silently(plain, file, ["WebGpuExecutionProvider"], **NO_ADAPTER) == [CPU]
    refused(partita("place", file, "--provider", "webgpu", **NO_ADAPTER), "webgpu", "device_missing")
    allowed = honoured(partita("place", file, "--provider", "webgpu,cpu", **NO_ADAPTER))
    assert "device_missing" in allowed.err, allowed


@cases("provider, ort_name", lambda environment: [(name, ORT_NAMES[name]) for name in environment.library_missing[:1]])
def test_a_library_that_cannot_be_loaded_leaves_the_provider_out(
    environment, provider, ort_name, plain, partita, model
):
    file = model("matmul_relu")
    assert silently(plain, file, [ort_name]) == [CPU]
    refused(partita("place", file, "--provider", provider), provider, "library_missing")


@cases("target", targets)
@pytest.mark.usefixtures("device")
def test_a_node_without_a_kernel_goes_to_the_cpu(environment, target, plain, partita, model):
    file = model("island")
    if target.wheel:
        done = honoured(plain(PLUGIN, file, target.wheel, target.ort_name))
        assert json.loads(done.out.splitlines()[-1])["registered"] == [target.ort_name, CPU]
    else:
        assert silently(plain, file, [target.ort_name]) == [target.ort_name, CPU]
    refused(partita("place", file, "--provider", target.provider), "island/Scaler", "Scaler")


PLUGIN = """
import importlib
module = importlib.import_module(sys.argv[2])
ort.register_execution_provider_library(sys.argv[3], module.get_library_path())
options = ort.SessionOptions()
devices = [device for device in ort.get_ep_devices() if device.ep_name == sys.argv[3]]
htp = getattr(module, "get_qnn_htp_path", None)
options.add_provider_for_devices(devices[:1], {"backend_path": htp()} if htp else {})
session = ort.InferenceSession(sys.argv[1], options)
session.run(None, {"x": np.ones((4, 16), np.float32)})
print(json.dumps({"registered": session.get_providers()}))
"""


@cases("_", only_in("webgpu"))
def test_an_opset_the_layout_transformer_does_not_know_drops_the_whole_provider(environment, _, plain, partita, model):
    file = model("matmul_relu", opset=TOO_OLD_OPSET)
    registered = silently(plain, file, ["WebGpuExecutionProvider"])
    assert registered[0] == "WebGpuExecutionProvider", "it is registered, and holds no node"
    refused(partita("place", file, "--provider", "webgpu"), "layer/MatMul", "opset")
    report = honoured(partita("place", file, "--provider", "webgpu,cpu"))
    assert "opset" in report.out + report.err, report


TOO_OLD_OPSET = 6
"""The layout transformer of ONNX Runtime 1.27 takes 7 to 26, and 27 does not load at all."""

"""Unusable providers: an error without the CPU in the chain; a note and a reason with it."""

from __future__ import annotations

import importlib
import json

import pytest

from partita.providers.resolve import known_providers
from partita.runtime.chain.open_chain import WITHOUT_PINS
from tests.conftest import require
from tests.contract.cases import cases, each_environment, only_in, targets
from tests.contract.commands import device_is_there, generated, honoured, nodes_on, refused, wrong_processor

PACKAGE = "llama-gqa-fp32"
CPU = "CPUExecutionProvider"
ORT_NAMES = {name: provider.ort_name for name, provider in known_providers().items()}
REASONS = ["library_missing", "device_missing", "not_in_build"]


def all_unusable(environment):
    """Rows of reason and provider; `make test` has the first provider of each reason."""
    return [(reason, provider) for reason in REASONS for provider in getattr(environment, reason)]


@cases("reason, provider", all_unusable, sample=True, heavy=("main", "openvino", "webgpu", "qnn"))
def test_unusable_provider_alone_fails_with_reason(environment, provider, reason, packages, partita):
    done = refused(generated(partita, packages / PACKAGE, provider), provider, reason)
    if reason == "library_missing":  # in the words of the loader
        assert "cannot open shared object file" in done.err and ".so" in done.err, done


@cases("reason, provider", all_unusable, sample=True, heavy=("openvino", "webgpu", "qnn"))
def test_unusable_provider_before_cpu_runs_on_cpu_with_note(
    environment, provider, reason, packages, partita, cpu_tokens, tmp_path
):
    report = tmp_path / "report.json"
    done = honoured(generated(partita, packages / PACKAGE, f"{provider},cpu", "--report", report))
    assert done.out == cpu_tokens(PACKAGE)
    assert any(provider in line and reason in line for line in done.err.splitlines()), done
    content = json.loads(report.read_text())
    (entry,) = [entry for entry in content["chain"] if entry["provider"] == ORT_NAMES[provider]]
    assert (entry["status"], entry["reason"]) == ("unavailable", reason) and entry["evidence"] and entry["remedy"]
    assert nodes_on(content, CPU) > 0 and nodes_on(content, ORT_NAMES[provider]) == 0


# `partita providers`: what this environment can run on, and why not on the rest


COMPATIBLE = """
from onnxruntime.capi import onnxruntime_pybind11_state as native
import importlib
for module, name in json.loads(sys.argv[1]):
    ort.register_execution_provider_library(name, importlib.import_module(module).get_library_path())
ask = getattr(native, "get_hardware_device_ep_incompatibility_details", None)
print(json.dumps({device.ep_name: ask and ask(device.ep_name, device.device) for device in ort.get_ep_devices()}))
"""


@each_environment()
def test_devices_list_onnx_runtime_compatibility_details(environment, partita, plain):
    """No known incompatibility, a reason with text (QNN's default backend), or unknown (ONNX Runtime 1.24, no API)."""
    libraries = json.dumps([[each.wheel, each.ort_name] for each in environment.targets if each.wheel])
    answers = json.loads(honoured(plain(COMPATIBLE, libraries)).out.splitlines()[-1])
    found = honoured(partita("providers", "--json")).json["providers"]
    said = {device["ort_name"]: device["metadata"]["ep.compatibility"] for each in found for device in each["devices"]}
    assert said and said.keys() <= answers.keys()  # a plugin also lists devices of other names, e.g. *.AUTO
    for name, answer in ((name, answers[name]) for name in said):
        if answer is None:
            assert "unknown" in said[name]
        elif not answer["reasons_bitmask"]:
            assert said[name] == "no incompatibility known to ONNX Runtime"
        else:
            assert "ONNX Runtime reports " in said[name] and answer["notes"][:20] in said[name], said[name]


@each_environment()
def test_providers_command_lists_usable_and_unavailable_with_reason(environment, partita):
    missing = [target.needs for target in environment.targets if target.needs and not device_is_there(target)]
    if missing:
        require(missing[0], available=False)
    elsewhere = {target.provider for target in environment.targets if wrong_processor(target)}
    entries = {entry["name"]: entry for entry in honoured(partita("providers", "--json")).json["providers"]}
    usable = {name for name, entry in entries.items() if entry["status"] == "usable"}
    assert usable == set(environment.usable) - elsewhere
    for reason, provider in (*all_unusable(environment), *(("device_missing", name) for name in elsewhere)):
        entry = entries[provider]
        assert (entry["status"], entry["reason"]) == ("unavailable", reason), entry
        assert entry["evidence"] and entry["remedy"], entry
    assert all("onnxruntime-openvino" in entries[name]["remedy"] for name in elsewhere & {"openvino"})


# `--provider-option NAME.key=value`: taken, or refused before anything is loaded


OF_OPTIONS = "llama-gqa-fp32"


def with_option(environment):
    return [(target,) for target in environment.targets if target.option[0]]


@cases("target", with_option)
@pytest.mark.parametrize(("name", "value"), [("", "purple"), ("no_such_option", "1")])
def test_unknown_provider_option_or_invalid_value_exits_2(environment, target, name, value, packages, partita):
    option = f"{target.provider}.{name or target.option[0]}={value}"
    done = generated(partita, packages / OF_OPTIONS, f"{target.provider},cpu", "--provider-option", option)
    refused(done, name or value, target.option[0], code=2)


# Inputs on which plain ONNX Runtime runs on the CPU, or leaves a provider out, without an error; Partita does not. If a
# newer ONNX Runtime is no longer silent the first half of a test fails, and the guard behind the second half may go.


SILENT = """
options = ort.SessionOptions()
for key, value in json.loads(sys.argv[3]).items():
    options.add_session_config_entry(key, value)
session = ort.InferenceSession(sys.argv[1], options, providers=json.loads(sys.argv[2]))
y = session.run(None, {"x": np.ones((4, 16), np.float32)})[0]
print(json.dumps({"registered": session.get_providers(), "finite": bool(np.isfinite(y).all())}))
"""
NO_ADAPTER = {"VK_ICD_FILENAMES": "/nonexistent/icd.json", "VK_DRIVER_FILES": "/nonexistent/icd.json"}


def silently(plain, file, providers, options=None, **extra):
    """What plain ONNX Runtime registers for `providers`, having run without an exception."""
    done = honoured(plain(SILENT, file, json.dumps(providers), json.dumps(options or {}), **extra))
    answer = json.loads(done.out.splitlines()[-1])
    assert answer["finite"]
    return answer["registered"]


@cases("_", only_in("webgpu"))
def test_place_fails_where_plain_ort_drops_a_provider_without_device(environment, _, plain, partita, model):
    file = model("matmul_relu")
    assert silently(plain, file, ["WebGpuExecutionProvider"], **NO_ADAPTER) == [CPU]
    refused(partita("place", file, "--provider", "webgpu", **NO_ADAPTER), "webgpu", "device_missing")
    allowed = honoured(partita("place", file, "--provider", "webgpu,cpu", **NO_ADAPTER))
    assert "device_missing" in allowed.err, allowed


def dropped(environment):
    """Rows of provider, its name in ONNX Runtime, and the reason."""
    rows = [(name, ORT_NAMES[name], "library_missing") for name in environment.library_missing[:1]]
    unknown = "NoSuchExecutionProvider"
    return [*rows, *([(unknown, unknown, "not_in_build")] if environment.name == "main" else [])]


@cases("provider, ort_name, reason", dropped)
def test_place_fails_where_plain_ort_drops_a_provider(environment, provider, ort_name, reason, plain, partita, model):
    file = model("matmul_relu")
    assert silently(plain, file, [ort_name]) == [CPU]
    refused(partita("place", file, "--provider", provider), reason)


@cases("target", targets)
def test_place_fails_where_plain_ort_runs_a_kernelless_node_on_cpu(environment, target, plain, partita, model):
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
def test_place_reports_opset_unknown_to_layout_transformer(environment, _, plain, partita, model):
    file = model("matmul_relu", opset=6)  # ONNX Runtime 1.27 takes 7 to 26, and 27 does not load
    registered = silently(plain, file, ["WebGpuExecutionProvider"])
    assert registered[0] == "WebGpuExecutionProvider", "it is registered, and holds no node"
    refused(partita("place", file, "--provider", "webgpu"), "layer/MatMul", "opset")
    report = honoured(partita("place", file, "--provider", "webgpu,cpu"))
    assert "opset" in report.out + report.err, report


# Provider libraries beside ONNX Runtime: found in their wheels, or named with `--provider-library NAME=PATH`


def plugins(environment):
    """Rows of provider: those whose library is in a wheel of its own here."""
    return [(provider,) for provider in {"qnn": ("qnn",), "plugins": ("webgpu", "openvino")}.get(environment.name, ())]


def usable_plugins(environment):
    """Rows of target."""
    return [(target,) for target in environment.targets if target.wheel]


@cases("target", usable_plugins)
@pytest.mark.parametrize("by_hand", [False, True])
def test_plugin_library_is_found_in_wheel_or_by_option(environment, target, by_hand, partita, model):
    library = importlib.import_module(target.wheel).get_library_path() if by_hand else ""
    named = ("--provider-library", f"{target.provider}={library}") if by_hand else ()
    done = honoured(partita("place", model("matmul_relu"), "--provider", target.provider, "--json", *named))
    assert nodes_on(done.json, target.ort_name) > 0


@cases("provider", plugins)
def test_invalid_or_missing_provider_library_exits_2(environment, provider, partita, model, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    for name in ("broken.so", "absent.so"):
        named = ("--provider-library", f"{provider}={tmp_path / name}")
        refused(partita("place", model("matmul_relu"), "--provider", provider, *named), name, code=2)


@cases("target", usable_plugins)
def test_plugin_failure_caused_by_pin_names_the_pin(environment, target, partita, model, tmp_path):
    """ONNX Runtime removes pinned nodes before it calls the plugin, so a failure after that is due to the pin."""
    report = tmp_path / "report.json"
    words = ("place", model("old_names"), "--provider", f"{target.provider},cpu", "--report", report)
    done = partita(*words, "--pin", "cpu:/layers.1/mlp")
    if done.code == 0:
        (phase,) = json.loads(report.read_text(encoding="utf-8"))["phases"]
        where = {node["name"]: node["provider"] for node in phase["nodes"]}
        assert where["/layers.1/mlp/MatMul"] == "CPUExecutionProvider"
        assert target.ort_name in where.values()
    else:
        refused(done, "--pin cpu:layers.1.mlp", "does not open this model with", WITHOUT_PINS.text, code=3)
    honoured(partita(*words))

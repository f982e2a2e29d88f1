"""Provider libraries beside ONNX Runtime: found in their wheels, or named with `--provider-library NAME=PATH`."""

from __future__ import annotations

import importlib
import json

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import generated, honoured, nodes_on, refused


def plugins(environment):
    """Rows of provider: those whose library is in a wheel of its own here."""
    return [(provider,) for provider in {"qnn": ("qnn",), "plugins": ("webgpu", "openvino")}.get(environment.name, ())]


def usable_plugins(environment):
    """Rows of target."""
    return [(target,) for target in environment.targets if target.wheel]


@cases("target", usable_plugins)
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_library_of_a_wheel_is_found_or_named(environment, target, by_hand, partita, model):
    library = importlib.import_module(target.wheel).get_library_path() if by_hand else ""
    named = ("--provider-library", f"{target.provider}={library}") if by_hand else ()
    done = honoured(partita("place", model("matmul_relu"), "--provider", target.provider, "--json", *named))
    assert nodes_on(done.json, target.ort_name) > 0


@cases("provider", plugins)
def test_a_file_that_is_no_library_or_absent_is_refused(environment, provider, partita, model, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    for name in ("broken.so", "absent.so"):
        named = ("--provider-library", f"{provider}={tmp_path / name}")
        refused(partita("place", model("matmul_relu"), "--provider", provider, *named), name, code=2)


@each_environment(sample=True)
def test_a_value_that_is_no_name_and_path_is_a_usage_error(environment, packages, partita):
    for value in ("qnn", "=path", "qnn="):
        done = generated(partita, packages / "llama-gqa-fp32", "cpu", "--provider-library", value)
        refused(done, "--provider-library", code=2)


@cases("target", usable_plugins)
def test_a_pin_that_the_plugin_stumbles_over_is_named_and_not_the_model(environment, target, partita, model, tmp_path):
    """ONNX Runtime takes pinned nodes out before a plugin is asked; what then fails is the pin's doing."""
    report = tmp_path / "report.json"
    words = ("place", model("old_names"), "--provider", f"{target.provider},cpu", "--report", report)
    done = partita(*words, "--pin", "cpu:/layers.1/mlp")
    if done.code == 0:
        (phase,) = json.loads(report.read_text(encoding="utf-8"))["phases"]
        where = {node["name"]: node["provider"] for node in phase["nodes"]}
        assert where["/layers.1/mlp/MatMul"] == "CPUExecutionProvider"
        assert target.ort_name in where.values()
    else:
        refused(done, "--pin cpu:layers.1.mlp", "opens this model without", code=3)
    honoured(partita(*words))

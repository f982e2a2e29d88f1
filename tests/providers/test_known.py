"""Known providers: names, remedies when missing, and log patterns."""

from __future__ import annotations

import re

import pytest

from partita.diagnosis.evidence import name_in
from partita.observations.codes import NODE_CODES, PROVIDER_CODES
from partita.providers.resolve import explain, known_providers, parse_chain, resolve

NAMES = sorted(known_providers())


@pytest.mark.parametrize("name", NAMES)
def test_provider_is_found_by_every_name_and_missing_has_remedy(name):
    provider = known_providers()[name]
    for word in provider.names():
        assert parse_chain(word.upper()) == (provider,)
    (found,) = resolve((provider,), ())
    assert found.reason == "not_in_build"
    assert found.remedy


@pytest.mark.parametrize("name", NAMES)
def test_pattern_and_remedy_codes_are_in_the_vocabulary(name):
    provider = known_providers()[name]
    assert {pattern.reason for pattern in provider.node_patterns} <= set(NODE_CODES)
    assert {pattern.reason for pattern in provider.start_patterns} <= set(PROVIDER_CODES)
    assert set(provider.remedies) <= set(PROVIDER_CODES)
    for pattern in (*provider.node_patterns, *provider.start_patterns):
        assert set(re.compile(pattern.pattern).groupindex) <= {"node", "op", "why"}


def test_slow_or_emulating_providers_are_not_chosen_automatically():
    ranks = {name: provider.rank for name, provider in known_providers().items()}
    assert {name for name, rank in ranks.items() if rank == 0} == {
        *("tensorrt", "tensorrt_rtx", "qnn", "coreml", "migraphx", "mlx")
    }
    assert max(ranks, key=lambda name: ranks[name]) == "cuda"
    assert sorted(rank for rank in ranks.values() if rank)[0] == ranks["cpu"] == 1


SAID: dict[str, list[tuple[str, tuple[str, str, str | None]]]] = {
    "cuda": [
        (
            "CUDA kernel not found in registries for Op type: Gather node name: a/Gather",
            ("no_kernel_op", "a/Gather", "Gather"),
        ),
        (
            "CUDA kernel not supported. Fallback to CPU execution provider for Op type: LSTM node name: rnn",
            ("attribute_unsupported", "rnn", "LSTM"),
        ),
        (
            "Dropping the ConvTranspose node: up to CPU because it requires asymmetric padding which the CUDA EP "
            "currently does not support",
            ("attribute_unsupported", "up", "ConvTranspose"),
        ),
    ],
    "webgpu": [
        (
            "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries "
            "for Op type: Gather node name: model.rotary_emb/Gather",
            ("no_kernel_op", "model.rotary_emb/Gather", "Gather"),
        ),
        ("Force CPU execution for node: lm_head", ("pinned_by_user", "lm_head", None)),
        (
            "ORT optimization- Force fallback to CPU execution for node: /Concat because the CPU execution path is "
            "deemed faster than overhead involved with execution on other EPs capable of executing this node",
            ("cpu_preferred", "/Concat", None),
        ),
    ],
    "qnn": [
        (
            # It names the node and not the cause, which may be its type, its attributes or its operator.
            "Unsupported nodes in QNN EP: { name: n2, type: MatMul }",
            ("no_kernel_op", "n2", "MatMul"),
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "line", "expected"), [(n, *entry) for n, entries in SAID.items() for entry in entries]
)
def test_log_lines_yield_node_operator_and_reason(name, line, expected):
    for pattern in known_providers()[name].node_patterns:
        if match := re.search(pattern.pattern, line):
            groups = match.groupdict()
            assert (pattern.reason, groups.get("node"), groups.get("op")) == expected
            return
    pytest.fail(f"no pattern of {name} knows this line")


@pytest.mark.parametrize("between", ["", ", "])
def test_every_node_in_a_qnn_list_line_is_found(between):
    listed = [f"{{ name: {name}, type: Gelu }}" for name in ("first", "a, b", "c,d", "last")]
    line = f"Unsupported nodes in QNN EP: {between.join(listed)}, "
    patterns = known_providers()["qnn"].node_patterns
    asked = ("first", "a", "b", "a, b", "c,d", "d", "last")
    found = [name for name in asked if any(name_in(line, pattern, name) for pattern in patterns)]
    assert found == ["first", "a, b", "c,d", "last"]


@pytest.mark.parametrize(
    ("name", "line", "reason", "evidence"),
    [
        (
            "cuda",
            "onnxruntime/core/session/provider_bridge_ort.cc:2043 Get() [ONNXRuntimeError] : 1 : FAIL : Failed to load "
            "library /x/libort_cuda.so with error: libcublasLt.so.13: cannot open shared object file: "
            "No such file or directory",
            "library_missing",
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
        ),
        (
            "cuda",
            "Failed to load library /x/libep.so with error: /x/libep.so: undefined symbol: OrtGetApi",
            "version_mismatch",
            "/x/libep.so: undefined symbol: OrtGetApi",
        ),
        (
            "cuda",
            'ORT runtime version "1.24.1" is below the minimum required version "1.24.4"',
            "version_mismatch",
            'ORT runtime version "1.24.1"',
        ),
        (
            "cuda",
            "CUDA failure 100: no CUDA-capable device is detected ; GPU=-1 ; hostname=x ; file=a.cc ; line=1",
            "device_missing",
            "no CUDA-capable device is detected ; GPU=-1",
        ),
        ("cuda", 'Unknown provider option: "frob".', "option_rejected", 'Unknown provider option: "frob"'),
        (
            "cuda",
            "Invalid device ID: 7, must be between 0 (inclusive) and 1 (exclusive).",
            "option_rejected",
            "Invalid device ID",
        ),
        ("cuda", "something never seen", "initialisation_failed", "something never seen"),
        (
            "openvino",
            "openvino_provider_factory.cc:141 ParseDeviceType() [ERROR] [OpenVINO] Device GPU is not available",
            "device_missing",
            "[OpenVINO] Device GPU is not available",
        ),
        (
            "openvino",
            "onnxruntime_pybind_state.cc:1053 Create() Invalid OpenVINO EP option: frob",
            "option_rejected",
            "Invalid OpenVINO EP option: frob",
        ),
        (
            "openvino",
            "a.cc:101 Parse() [ERROR] [OpenVINO] Unsupported inference precision is selected. CPU only supports FP32",
            "option_rejected",
            "[OpenVINO] Unsupported inference precision is selected. CPU only supports FP32",
        ),
        (
            "qnn",
            "FP16 precision mode is enabled but soc_model is not specified. Both parameters must be set together",
            "option_rejected",
            "FP16 precision mode is enabled but soc_model is not specified. Both parameters must be set together",
        ),
        (
            "webgpu",
            "webgpu_context.cc:76 operator() Failed to get a WebGPU adapter: No supported adapters.",
            "device_missing",
            "Failed to get a WebGPU adapter: No supported adapters",
        ),
    ],
)
def test_start_failure_reason_and_evidence_come_from_loader(name, line, reason, evidence):
    """Log lines of onnxruntime-openvino 1.24.1, onnxruntime-qnn 2.7.0 and onnxruntime-webgpu 1.27.0."""
    found = explain(known_providers()[name], [line])
    assert found.reason == reason and found.remedy
    assert found.evidence.startswith(evidence)


def test_remedy_depends_on_missing_library():
    cuda = known_providers()["cuda"]
    missing = "x.so with error: libcuda.so.1: cannot open shared object file: No such file or directory"
    assert "driver" in explain(cuda, [missing]).remedy.text
    other = explain(cuda, [missing.replace("libcuda.so.1", "libcublas.so.13")]).remedy
    assert other.command == ("pip", "install", "onnxruntime-gpu[cuda,cudnn]")


def test_evidence_is_printable_and_bounded():
    found = explain(known_providers()["cpu"], ["\x1b[31mred\x07\nand " + "long " * 200])
    assert found.evidence.isprintable()
    assert len(found.evidence) <= 300

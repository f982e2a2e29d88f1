"""Known providers: names, remedies when missing, and log patterns."""

from __future__ import annotations

import re

import pytest

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


def test_slow_or_emulating_providers_are_not_chosen_automatically():
    ranks = {name: provider.rank for name, provider in known_providers().items()}
    assert {name for name, rank in ranks.items() if rank == 0} == {
        *("tensorrt", "tensorrt_rtx", "qnn", "coreml", "migraphx", "mlx")
    }
    assert max(ranks, key=lambda name: ranks[name]) == "cuda"
    assert sorted(rank for rank in ranks.values() if rank)[0] == ranks["cpu"] == 1


def test_slow_kernel_paths_have_cause_and_remedy():
    for row in (row for provider in known_providers().values() for row in provider.kernels):
        assert bool(row.cause) == (row.remedy is not None), row
        assert re.compile(row.log) and re.compile(row.program)


LINES = {
    "cuda no_kernel_op a/Gather Gather": "CUDA kernel not found in registries for Op type: Gather node name: a/Gather",
    "cuda attribute_unsupported rnn LSTM": "CUDA kernel not supported. Fallback to CPU execution provider for Op type: "
    "LSTM node name: rnn",
    "cuda attribute_unsupported up ConvTranspose": "Dropping the ConvTranspose node: up to CPU because it requires "
    "asymmetric padding which the CUDA EP currently does not support",
    "webgpu no_kernel_op a/Gather Gather": "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu "
    "kernel not found in registries for Op type: Gather node name: a/Gather",
    "webgpu pinned_by_user lm_head None": "Force CPU execution for node: lm_head",
    "webgpu cpu_preferred /Concat None": "ORT optimization- Force fallback to CPU execution for node: /Concat because "
    "the CPU execution path is deemed faster than overhead involved with execution on other EPs",
    "qnn no_kernel_op n2 MatMul": "Unsupported nodes in QNN EP: { name: n2, type: MatMul }",
}
"""Provider, reason, node and operator -> a log line."""


@pytest.mark.parametrize("case", LINES)
def test_log_lines_yield_node_operator_and_reason(case):
    name, *expected = case.split()
    matches = ((each, re.search(each.pattern, LINES[case])) for each in known_providers()[name].node_patterns)
    pattern, groups = next((each, match.groupdict()) for each, match in matches if match)
    assert [pattern.reason, groups.get("node"), str(groups.get("op"))] == expected


@pytest.mark.parametrize("between", ["", ", "])
def test_every_node_in_a_qnn_list_line_is_found(between):
    listed = [f"{{ name: {name}, type: Gelu }}" for name in ("first", "a, b", "c,d", "last")]
    line = f"Unsupported nodes in QNN EP: {between.join(listed)}, "
    patterns = known_providers()["qnn"].node_patterns
    asked = ("first", "a", "b", "a, b", "c,d", "d", "last")
    found = [name for name in asked if any(pattern.is_about(line, name) for pattern in patterns)]
    assert found == ["first", "a, b", "c,d", "last"]


STARTS = {
    "cuda library_missing": "x.cc:2043 Get() Failed to load library /x/libort_cuda.so with error: <libcublasLt.so.13: "
    "cannot open shared object file: No such file or directory>",
    "cuda version_mismatch": "Failed to load library /x/e.so with error: </x/e.so: undefined symbol: OrtGetApi>",
    "cuda device_missing": "CUDA failure 100: <no CUDA-capable device is detected ; GPU=-1> ; hostname=x ; file=a.cc",
    "cuda option_rejected": "<Invalid device ID: 7>, must be between 0 (inclusive) and 1 (exclusive).",
    "cuda initialisation_failed": "<something never seen>",
    "openvino device_missing": "factory.cc:141 Parse() [ERROR] <[OpenVINO] Device GPU is not available>",
    "openvino option_rejected": "a.cc:101 Parse() [ERROR] <[OpenVINO] Unsupported inference precision is selected>",
    "qnn option_rejected": "<FP16 precision mode is enabled but soc_model is not specified. Both must be set>",
    "qnn version_mismatch": '<ORT runtime version "1.24.1" is below the minimum required version "1.24.4">',
    "webgpu device_missing": "context.cc:76 operator() <Failed to get a WebGPU adapter: No supported adapters>.",
}
"""Provider and reason -> a log line, with the evidence in angle brackets.

Of onnxruntime-openvino 1.24.1, onnxruntime-qnn 2.7.0 and onnxruntime-webgpu 1.27.0.
"""


@pytest.mark.parametrize("case", STARTS)
def test_start_failure_reason_and_evidence_come_from_loader(case):
    name, reason = case.split()
    line = STARTS[case]
    found = explain(known_providers()[name], [line.replace("<", "").replace(">", "")])
    assert found.reason == reason and found.remedy
    assert found.evidence.startswith(line.partition("<")[2].partition(">")[0])


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

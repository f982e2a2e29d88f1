"""Providers of the chain that cannot run here: an error by themselves, a note and a reason with the CPU behind them."""

from __future__ import annotations

import json

import pytest

from tests.contract.cases import cases, each_environment
from tests.contract.commands import generated, honoured, nodes_on, refused

PACKAGE = "llama-gqa-fp32"
CPU = "CPUExecutionProvider"
ORT_NAMES = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "qnn": "QNNExecutionProvider",
}
REASONS = ["library_missing", "device_missing", "not_in_build"]


def all_unusable(environment):
    """Rows of reason and provider; `make test` has the first provider of each reason."""
    return [(reason, provider) for reason in REASONS for provider in getattr(environment, reason)]


@cases("reason, provider", all_unusable, sample=True, heavy=("main", "openvino", "webgpu", "qnn"))
def test_alone_it_is_refused_with_its_reason(environment, provider, reason, packages, partita):
    done = refused(generated(partita, packages / PACKAGE, provider), provider, reason)
    if reason == "library_missing":  # in the words of the loader
        assert "cannot open shared object file" in done.err and ".so" in done.err, done


@cases("reason, provider", all_unusable, sample=True, heavy=("openvino", "webgpu", "qnn"))
def test_with_the_cpu_behind_it_runs_and_says_so(
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


@each_environment(sample=True)
def test_every_provider_missing_is_an_error_and_no_cpu_run(environment, packages, partita):
    names = [provider for _, provider in all_unusable(environment)][:2]
    if len(names) < 2:
        pytest.skip(f"{environment.name} has no two providers that cannot run")
    refused(generated(partita, packages / PACKAGE, ",".join(names)), *names)

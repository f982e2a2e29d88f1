"""Providers of the chain that cannot run here: an error by themselves, a note and a reason with the CPU behind them."""

from __future__ import annotations

import json

import pytest

from tests.conftest import require
from tests.contract.cases import cases, each_environment
from tests.contract.commands import device_is_there, generated, honoured, nodes_on, refused, wrong_processor

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


# `partita providers`: what this environment can run on, and why not on the rest


@each_environment()
def test_usable_providers_and_the_reasons_of_the_others(environment, partita):
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
def test_an_unknown_option_and_a_value_of_another_type_are_usage_errors(
    environment, target, name, value, packages, partita
):
    option = f"{target.provider}.{name or target.option[0]}={value}"
    done = generated(partita, packages / OF_OPTIONS, f"{target.provider},cpu", "--provider-option", option)
    refused(done, name or value, target.option[0], code=2)


@each_environment(sample=True)
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cpu.use_arena", ["--provider-option"]),
        ("elsewhere.use_arena=1", ["--provider-option"]),
        ("cpu.anything=0", ["has no option 'anything'", "attention", "huge_pages", "spinning"]),
    ],
)
def test_an_option_that_cannot_be_read_is_a_usage_error(environment, option, words, packages, partita):
    refused(generated(partita, packages / OF_OPTIONS, "cpu", "--provider-option", option), *words, code=2)


@each_environment(sample=True)
def test_an_unknown_provider_is_a_usage_error(environment, packages, partita):
    refused(generated(partita, packages / OF_OPTIONS, "nosuchprovider,cpu"), "nosuchprovider", "cpu", code=2)

"""Remedies that need a provider or a wheel outside the main environment: applying them works."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest

from partita.diagnosis.reasons import REASONS
from partita.providers.base import OTHER_RUNTIME
from partita.providers.resolve import REMEDIES
from partita.remedies import Remedy
from partita.runtime.chain.provider_state import OTHER_OPSET
from partita.runtime.lab import probes
from tests.conftest import require
from tests.contract.cases import cases
from tests.contract.commands import chain_entry, device_is_there, execute, generated, honoured
from tests.planted.cases import CASES, Case, Run
from tests.planted.judge import ORT_NAMES, Outcome, compile_library, outcomes
from tests.remedies import pattern

OPTIONS = {"--attention": 1, "--precision": 2}
"""Options of export, and which part of a package's name they are."""


def made_by(command: list[str], package: str) -> str:
    """The package of the tests that a command makes in place of another one."""
    parts = package.split("-")
    for option, place in OPTIONS.items():
        if option in command:
            parts[place] = command[command.index(option) + 1]
    return "-".join(parts)


def refusing(environment):
    """Packages that a provider, or an older ONNX Runtime as a whole, does not take all of."""
    found = [(target, name, target.provider) for target in environment.targets for name in target.refused_alone]
    older = environment.name == "openvino"  # ONNX Runtime 1.24 has no operators of opset 24
    return [*found, *((target, "llama-onnx24-fp32", "cpu") for target in environment.targets if older)]


@cases("target, package, provider", refusing, heavy=("webgpu",))
def test_suggested_export_command_yields_supported_package(
    environment, target, package, provider, packages, partita, tmp_path
):
    done = execute(
        "-m", "tests.remedies", "generate", packages / package, "hi", "--provider", provider, folder=tmp_path
    )
    commands = [command for command, _ in json.loads(done.out) if command]
    assert commands and all(command[:2] == ["partita", "export"] for command in commands), done
    made = {made_by(command, package) for command in commands} - {package}  # one that asks the provider names neither
    assert made, done
    for name in made:
        honoured(generated(partita, packages / name, provider))


# planted causes


@dataclass(frozen=True)
class Applied:
    """A case of tests/planted whose report has these remedies, and what becomes of it when they are followed."""

    case: str
    remedies: tuple[Remedy, ...] = ()
    """What is said of the provider."""
    codes: tuple[str, ...] = ()
    """Reasons of nodes, of which each has its remedy."""
    then: Run | None = None
    """What is run then; None: the control of the case, which is the graph without the cause."""

    def __str__(self) -> str:
        return self.case

    @property
    def before(self) -> Case:
        """As it is planted."""
        return PLANTED[self.case]

    @property
    def after(self) -> Case:
        """As the remedies say."""
        run = self.then or self.before.control
        assert run is not None
        return replace(self.before, name=f"{self.case}-after", run=run, arguments=())


PLANTED = {case.name: case for case in CASES}
RANGE, CAPTURED = PLANTED["webgpu-range-int64"].run, PLANTED["webgpu-capture-with-a-gap-neighbour"].run
APPLIED = (
    Applied("openvino-pad-wrap", (probes.REJECTED_REMEDY,), ("subgraph_rejected",)),
    Applied("openvino-global-pool-of-any-depth", (probes.FIX,)),
    Applied("openvino-rank-unknown", (probes.FIX,)),
    Applied("openvino-alone-before-a-gap", codes=("not_claimed",)),
    Applied("webgpu-opset-6", (OTHER_OPSET,)),
    Applied("webgpu-range-int64", codes=("option_needed",), then=replace(RANGE, options={"enableInt64": "1"})),
    Applied(
        "webgpu-capture-with-a-gap-neighbour",
        (probes.WITHOUT_SWITCH,),
        ("subgraph_rejected",),
        then=replace(CAPTURED, options={}),
    ),
    Applied("qnn-symbolic-batch", codes=("dynamic_shape",)),
)


def applied_in(environment: str) -> list[Applied]:
    """Rows of an environment."""
    return [row for row in APPLIED if row.before.environment == environment]


@pytest.fixture(scope="session")
def ended(request, tmp_path_factory) -> dict[str, Outcome]:
    """How the runs before and after ended, of all rows that this Python can run."""
    rows = applied_in(request.config.getoption("--inside"))
    return outcomes([case for row in rows for case in (row.before, row.after)], tmp_path_factory.mktemp("applied"))


@cases("applied", lambda environment: [(row,) for row in applied_in(environment.name)])
def test_applying_remedy_removes_planted_cause(environment, applied, ended):
    for target in environment.targets:
        if target.needs:
            require(target.needs, device_is_there(target))
    raised, gone = (ended[case.command].report for case in (applied.before, applied.after))
    assert raised is not None and gone is not None, ended
    ort_name = ORT_NAMES[applied.before.provider]
    was, now = (chain_entry(report, environment, ort_name) for report in (raised, gone))
    said = was["remedy"] or ""
    assert all(re.search(pattern(remedy), said) for remedy in applied.remedies), said
    remedies = {reason.code: reason.remedy for reason in REASONS.values()}
    rows = {(row["reason"], row["remedy"]) for row in raised["fallbacks"]}
    assert {(code, remedies[code]) for code in applied.codes} <= rows
    assert now["status"] == "active"
    assert not {*applied.codes, was["reason"]} & {row["reason"] for row in gone["fallbacks"]}


# other ONNX Runtimes

API = 27
"""A version of ONNX Runtime's interface that 1.24 of the environment openvino lacks, and 1.32 of qnn has."""
BUILDS = {
    "azure": ("not_in_build", REMEDIES["not_in_build"], "AzureExecutionProvider"),
    "qnn": ("version_mismatch", OTHER_RUNTIME, "QNNExecutionProvider"),
}
"""Provider -> what is said of it in the environment openvino, and not in the environment qnn."""


def builds(environment):
    fits = {"openvino": False, "qnn": True}
    return [(provider, fits[environment.name]) for provider in BUILDS if environment.name in fits]


@cases("provider, fits", builds)
def test_suggested_onnx_runtime_build_removes_reason(environment, provider, fits, partita, model, tmp_path):
    reason, remedy, ort_name = BUILDS[provider]
    name = provider if provider == "qnn" else ort_name
    library = ("--provider-library", f"qnn={compile_library(f'WANTED={API}', tmp_path)}") if provider == "qnn" else ()
    words = ("place", model("matmul_relu"), "--provider", f"{name},cpu", "--json", "--probe-seconds", "0", *library)
    entry = chain_entry(honoured(partita(*words)).json, environment, ort_name)
    if fits:
        assert entry["reason"] != reason
    else:
        assert (entry["reason"], entry["remedy"]) == (reason, remedy.text)

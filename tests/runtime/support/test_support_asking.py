"""What one session says of its variants: who is sure, and who has to be asked alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita.observations.facts import AssignedNode
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.support.asking import Asker, Verdict

CPU, OPENVINO, WEBGPU = "CPUExecutionProvider", "OpenVINOExecutionProvider", "WebGpuExecutionProvider"


def asker(name: str) -> Asker:
    return Asker(Resolution(known_providers()[name], "active"), Path(), lambda names: None)


def session(provider: str, listed: dict[str, str], plan: tuple[tuple[str, ...], ...] = (), devices: Any = ()) -> Any:
    nodes = tuple(AssignedNode(name, "Op", "", where, 0) for name, where in listed.items())
    return SimpleNamespace(registered=(provider, CPU), assigned=lambda: nodes, plan=plan, plan_devices=devices, log=())


class FailureError(Exception):
    """As NativeFailureError has it."""

    def __init__(self, kind: str, text: str, *log: str) -> None:
        super().__init__(text)
        self.error, self.log = type(kind, (Exception,), {})(text), log


def test_what_a_compiling_provider_leaves_beside_others_is_asked_alone():
    opened = session(OPENVINO, {"v0": OPENVINO, "v1": CPU})
    assert asker("openvino").opened(opened, ["v0", "v1"]) == ({"v0": Verdict("taken")}, ["v1"])
    assert asker("openvino").opened(session(OPENVINO, {"v1": CPU}), ["v1"])[0] == {"v1": Verdict("left")}


def test_any_other_provider_is_believed_at_once():
    opened = session(WEBGPU, {"v1": CPU}, (("v0",), ("v1",)), ("1", "0"))
    found, alone = asker("webgpu").opened(opened, ["v0", "v1"])
    assert (found, alone) == ({"v0": Verdict("taken"), "v1": Verdict("left")}, [])


def test_casts_around_a_kernel_of_another_type_are_no_support():
    plan = (("InsertedPrecisionFreeCast_v0_i0", "v0", "v1"),)
    opened = session(CPU, {"v0": CPU, "v1": CPU}, plan, ("0",))
    found, _ = asker("cpu").opened(opened, ["v0", "v1"])
    assert (found["v0"].outcome, found["v1"].outcome) == ("left", "taken")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("NotImplemented", "Could not find an implementation for Sin(22) node with name 'v3'"),
        (
            "RuntimeException",
            "!node_provider_type.empty() was false. Provider type for Div node with name 'v3' is not set",
        ),
    ],
)
def test_a_node_that_nobody_has_a_kernel_for_is_left(kind, text):
    found, alone = asker("webgpu").failed(FailureError(kind, text), ["v2", "v3"])  # type: ignore[arg-type]
    assert (found["v3"].outcome, alone) == ("left", [])
    assert "v2" not in found


def test_the_log_of_a_failed_session_tells_whom_the_provider_leaves():
    line = "[I:onnxruntime:, x.cc:1 f] webgpu kernel not found in registries for Op type: Sin node name: v4"
    found, alone = asker("webgpu").failed(FailureError("Fail", "some other reason", line), ["v4", "v5"])  # type: ignore[arg-type]
    assert found == {"v4": Verdict("left", "webgpu kernel not found in registries for Op type: Sin")}
    assert alone == []


def test_an_error_of_the_provider_itself_is_a_failure_of_the_variant_alone():
    found, _ = asker("openvino").failed(FailureError("EPFail", "cannot compile"), ["v0"])  # type: ignore[arg-type]
    assert found == {"v0": Verdict("failed", "cannot compile")}
    assert asker("openvino").failed(FailureError("EPFail", "cannot compile v0"), ["v0", "v1"]) == ({}, ["v0"])  # type: ignore[arg-type]


def test_a_model_that_the_cpu_provider_refuses_is_none():
    found, _ = asker("cpu").failed(FailureError("InvalidGraph", "This is an invalid model."), ["v0"])  # type: ignore[arg-type]
    assert found["v0"].outcome == "invalid"

"""Kernel paths on the CPU provider: each slow path with its control model, checked against ONNX Runtime."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import partita
from partita import process
from partita.runtime.chain import cpu_settings
from partita.runtime.lab import probes
from tests import kernel_models as models

Make = Callable[..., Path]
DYNAMIC = partial(models.packed, constant=False)
SLOW: dict[str, tuple[Make, Make, str]] = {
    "g_idx": (partial(models.packed, order=True), models.packed, "unpacked weights"),
    "float zero points": (
        partial(models.packed, zeros="float"),
        partial(models.packed, zeros="integer"),
        "unpacked weights",
    ),
    "weight of the run": (DYNAMIC, models.packed, "unpacked weights"),
    "8 bits, level 0": (partial(models.packed, bits=8, level=0), partial(models.packed, bits=8), "unpacked weights"),
    "2 bits, no level": (
        partial(models.packed, bits=2, level=None),
        partial(models.packed, bits=2),
        "unpacked weights",
    ),
    "2 bits, block 256": (
        partial(models.packed, bits=2, block=256),
        partial(models.packed, bits=2, block=128),
        "unpacked weights",
    ),
    "4 bits, level 0": (partial(models.packed, level=0), models.packed, "packed weights, float32 products"),
    "bitsandbytes": (models.bitsandbytes, models.packed, "dequantised weights"),
    "experts": (partial(models.experts, level=None), models.experts, "float32 products"),
    "dequantise": (
        partial(models.dequantised, transposed=True),
        partial(models.dequantised, transposed=False),
        "dequantised weights",
    ),
    "whole cache": (models.standard, models.grouped, "naive, whole cache"),
    "half precision": (
        partial(models.chain, kind=models.HALF),
        partial(models.chain, kind=models.FLOAT),
        "16-bit values cast to float32",
    ),
}
"""Name -> a model with a slow path, the model after its remedy, and the name of the path."""


def placed(path: Path) -> Any:
    return partita.place(str(path), "cpu", probe_seconds=0)


def paths(report: Any) -> dict[str, str]:
    """Operator -> path."""
    return {entry.op_type: entry.path for entry in report.kernel_paths}


@pytest.mark.parametrize("name", SLOW)
def test_slow_path_is_reported_and_absent_in_control_model(name, tmp_path):
    slow, control, path = SLOW[name]
    report = placed(slow(tmp_path / "slow.onnx"))
    found = [entry for entry in report.kernel_paths if entry.is_slow]
    assert {entry.path for entry in found} == {path}
    assert all(entry.cause and entry.remedy and entry.evidence for entry in found)
    assert all(entry.time_share is not None and 0 <= entry.time_share <= 1 for entry in found)
    assert {entry.evidence_kind for entry in found} == {"logged" if path == "unpacked weights" else "derived"}
    after = placed(control(tmp_path / "control.onnx"))
    assert not any(entry.is_slow for entry in after.kernel_paths), after.kernel_paths


TIMED = ("g_idx", "float zero points", "8 bits, level 0", "4 bits, level 0", "experts")


@pytest.mark.parametrize("name", TIMED)
def test_slow_path_without_log_is_detected_by_timing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "own_process", False)
    slow, _, path = SLOW[name]
    report = partita.place(str(slow(tmp_path / "slow.onnx", size=1024)), "cpu", probe_seconds=60)
    (found,) = [entry for entry in report.kernel_paths if entry.is_slow]
    assert (found.path, found.evidence_kind) == (path, "probed"), found
    assert re.fullmatch(r"time of one-node sessions: \S+ ms unchanged, \S+ ms with(out)? \S+", found.evidence)
    assert report.probing is not None and report.probing.experiments == 2


def test_nodes_of_the_same_shape_are_timed_once(tmp_path, monkeypatch):
    path = models.packed(tmp_path / "slow.onnx", level=0)
    model = onnx.load(path)
    graph = model.graph
    graph.initializer.add().CopyFrom(numpy_helper.from_array(numpy_helper.to_array(graph.initializer[1]) * 2, "others"))
    second = graph.node.add()
    second.CopyFrom(graph.node[0])
    second.name, second.input[0], second.input[2], second.output[0] = "second", "y", "others", "z"
    graph.output[0].name = "z"
    onnx.save(model, path)
    measure, timed = probes._times, []

    def counted(variant, *change):
        timed.append(variant)
        return measure(variant, *change)

    monkeypatch.setattr(probes, "_times", counted)
    report = partita.place(str(path), "cpu", probe_seconds=60)
    with_times = {entry.node for entry in report.kernel_paths if "one-node sessions" in entry.evidence}
    assert with_times == {"node", "second"} and len(timed) == 1


FORMS: list[dict[str, Any]] = [
    {"bits": bits, "block": block, "level": level}
    for bits, block, level in itertools.product((2, 4, 8), (16, 32, 256), (None, 4))
]


def test_packed_weight_rules_match_onnx_runtime_log(tmp_path, monkeypatch):
    """Derived paths equal the logged paths for every form of MatMulNBits that ONNX Runtime loads."""
    for form in FORMS:
        path = models.packed(tmp_path / "form.onnx", **form)
        logged = placed(path).kernel_paths
        with monkeypatch.context() as patch:
            patch.setattr(process, "own_process", False)
            derived = placed(path).kernel_paths
        assert [entry.path for entry in logged] == [entry.path for entry in derived] != ["unknown"], form
        assert {entry.evidence_kind for entry in derived} == {"derived"}
        unpacked = form["level"] != 4 and form["bits"] != 4 or (form["bits"] == 2 and form["block"] in (16, 256))
        assert (logged[0].path == "unpacked weights") is unpacked, form


ATTENTION: dict[str, tuple[Make, str]] = {
    "plain": (models.grouped, "flash"),
    "window": (partial(models.grouped, local_window_size=8), "flash"),
    "bias": (partial(models.grouped, extra="bias"), "flash"),
    "int8 cache": (partial(models.grouped, cache=TensorProto.INT8), "flash"),
    "softcap": (partial(models.grouped, softcap=30.0), "naive"),
    "smooth": (partial(models.grouped, smooth_softmax=1), "naive"),
    "sink": (partial(models.grouped, extra="sink"), "naive"),
    "half": (partial(models.grouped, kind=models.HALF), "naive"),
    "heads": (models.multi_head, "flash"),
    "heads, mask": (partial(models.multi_head, extra="mask"), "naive"),
    "heads, bias": (partial(models.multi_head, extra="bias"), "naive"),
    "heads, past": (partial(models.multi_head, extra="past"), "naive"),
    "heads, causal": (partial(models.multi_head, unidirectional=1), "naive"),
}
FLASH_OFF = ("ORT_GQA_DISABLE_FLASH_ATTENTION", "ORT_DISABLE_FLASH_ATTENTION")


@pytest.mark.parametrize("name", ATTENTION)
def test_flash_attention_path_matches_effect_of_disabling_flash(name, tmp_path, monkeypatch):
    """Outputs change only for nodes on the flash path when flash attention is disabled."""
    make, path = ATTENTION[name]
    file = make(tmp_path / "attention.onnx")
    first = next(iter(paths(placed(file)).values()))
    assert first == path
    outputs = []
    for off in ("0", "1"):
        for variable in FLASH_OFF:
            monkeypatch.setenv(variable, off)
        outputs.append(opened(file).run(None, feeds(file))[0])
    assert (first == "flash") is not np.array_equal(*outputs)


def test_attention_path_set_by_provider_option_is_reported(tmp_path):
    file = str(models.grouped(tmp_path / "attention.onnx"))
    report = partita.place(file, "cpu", provider_options={"cpu": {"attention": "naive"}}, probe_seconds=0)
    assert paths(report) == {"GroupQueryAttention": "naive"}


def test_convolution_layout_and_integer_matmul_paths_are_reported(tmp_path):
    found = paths(placed(models.convolution(tmp_path / "conv.onnx")))
    assert found == {"Conv": "NCHWc layout", "ReorderInput": "layout conversion", "ReorderOutput": "layout conversion"}
    file = models.integers(tmp_path / "integers.onnx")
    report = placed(file)
    exact = opened(file).run(None, {"x": np.full((1, 64), 255, np.uint8)})[0][0, 0] == 64 * 255 * 127
    unit = report.cpu[0].integer_unit
    assert paths(report)["MatMulInteger"] == (f"int8 products ({unit})" if unit else "unknown")
    assert not unit or exact


@pytest.mark.parametrize(
    ("unit", "packed", "floats"),
    [
        ("avx512_vnni", "use of avx512_vnni (the processor has it; ONNX Runtime does not report it)", None),
        ("asimddp", "use of KleidiAI (ONNX Runtime does not report it", "use of KleidiAI (ONNX Runtime"),
        ("", "", None),
    ],
)
def test_unreported_instruction_use_is_unknown(unit, packed, floats, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_settings, "integer_unit", lambda: unit)
    report = placed(models.packed(tmp_path / "packed.onnx"))
    (entry,) = report.kernel_paths
    assert entry.path == "packed weights, int8 products" and entry.unknown.startswith(packed)
    assert (f"unknown: 1 MatMulNBits node: {packed}" in " ".join(report.to_text().split())) is bool(unit)
    products = [
        entry.unknown
        for entry in placed(models.chain(tmp_path / "chain.onnx", kind=models.FLOAT)).kernel_paths
        if entry.op_type == "MatMul"
    ]
    assert bool(products) is (floats is not None) and all(text.startswith(floats or "") for text in products)


def opened(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(path: Path) -> dict[str, Any]:
    """Random inputs, which are the same in every call."""
    rng = np.random.default_rng(0)
    found = {}
    for port in onnx.load(path).graph.input:
        kind = port.type.tensor_type
        shape = [size.dim_value for size in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        found[port.name] = (rng.standard_normal(shape) * (1 if dtype.kind == "f" else 9)).astype(dtype)
    return found

"""The models of the onnx package's own backend tests: all of node/, simple/ and pytorch-*, which nobody here chose."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import onnx.backend.test

FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")
LARGEST_BYTES = 2 << 20
"""Longer models test ONNX's protobuf, and take their time."""


def names() -> dict[str, bytes]:
    """Every model, serialised, by name: node/test_abs, simple/test_expand_shape_model1."""
    found: dict[str, bytes] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy overflows on purpose in some of the expected values
        from onnx.backend.test.case.node import collect_testcases

        for case in collect_testcases(None):
            if case.model is not None:
                found[f"node/{case.name}"] = case.model.SerializeToString()
    data = Path(onnx.backend.test.__file__).parent / "data"
    for folder in FOLDERS:
        for path in sorted((data / folder).glob("*/model.onnx")):
            found[f"{folder}/{path.parent.name}"] = path.read_bytes()
    return {name: named(model) for name, model in found.items() if len(model) <= LARGEST_BYTES}


def named(raw: bytes) -> bytes:
    """The model with a name for every node, so that both sides can say which one they mean."""
    model = onnx.ModelProto.FromString(raw)
    taken = {node.name for node in model.graph.node}
    for number, node in enumerate(model.graph.node):
        node.name = node.name or next(name for name in (f"n{number}", f"node_{number}") if name not in taken)
    return model.SerializeToString()


def sample(models: dict[str, bytes], count: int) -> list[str]:
    """So many of them, spread evenly over the names."""
    listed = sorted(models)
    step = max(len(listed) // count, 1)
    return listed[::step][:count]

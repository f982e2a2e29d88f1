"""In a dry run nothing runs on the provider, so a changed node is run on the CPU provider beside the original node.

A changed node that the CPU provider cannot run, or that computes something else where only the opset or the form of its
inputs changed, is invalid. Without a run to compare with, the answer says so.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partita import dtypes
from partita.observations.facts import Factor
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.probes.cases import FLOATS, Case, case_model
from partita.runtime.tensor_types import element_of, is_fixed, sizes_of

if TYPE_CHECKING:
    import onnx

    from partita.runtime.ort.session import Session

ORIGINAL = "partita.original"
"""Metadata of a changed node: the original node's model and the sizes of the inputs, in JSON."""
SAME_VALUES: frozenset[Factor] = frozenset({"opset", "static_shape", "input", "output_shape", "rank"})
"""Changes after which a node computes the same as before."""
MOST_ELEMENTS = 1 << 22
"""Of all inputs and constants of a node that is run on the CPU provider."""
TOLERANCE = 1e-3
"""Relative and absolute; half precision is accurate to 1e-3."""


def with_original(model: onnx.ModelProto, changed: Case, original: Case, factor: Factor) -> onnx.ModelProto:
    """The model of a changed node with what `fault` needs."""
    told: dict[str, Any] = {"sizes": None}
    known = {feed.name: _sizes(changed, feed.name) or _sizes(original, feed.name) for feed in changed.feeds}
    elements = sum(MOST_ELEMENTS if sizes is None else math.prod(sizes) for sizes in known.values())
    if elements < MOST_ELEMENTS and not changed.declared:
        told = {
            "sizes": known,
            "floats": all(feed.constant or element_of(feed.kind) in FLOATS for feed in changed.feeds),
            "same_values": factor in SAME_VALUES,
            "model": base64.b64encode(case_model(original).SerializeToString(deterministic=True)).decode(),
        }
    model.metadata_props.add(key=ORIGINAL, value=json.dumps(told, sort_keys=True))
    return model


def _sizes(case: Case, name: str) -> Sequence[int] | None:
    """Sizes of an input in the run; None where they are unknown."""
    feed = case.feed(name)
    kind = feed.kind if feed is not None and is_fixed(feed.kind) else case.fixed.get(name)
    return None if kind is None else sizes_of(kind)


def fault(path: Path, told: str) -> tuple[str, bool]:
    """Why the changed node in `path` is invalid (empty: it is not), and whether it was run. `told`: of ORIGINAL."""
    from partita.runtime.ort.errors import one_line

    asked = json.loads(told)
    if asked["sizes"] is None:
        return "", False
    beside = path.with_suffix(".original.onnx")
    beside.write_bytes(base64.b64decode(asked["model"]))
    before, _ = _outputs(beside, asked["sizes"])
    after, failure = _outputs(path, asked["sizes"])
    if after is None:
        if failure and (before is not None or asked["floats"]):
            return f"the CPU provider cannot run the changed node: {one_line(failure)}", True
        return "", False
    if not asked["same_values"]:
        return "", True
    if before is None:
        return "", False
    return ("", True) if _agree(before, after) else ("the changed node computes something else than the original", True)


def _outputs(path: Path, sizes: Mapping[str, Sequence[int]]) -> tuple[list[Any] | None, str]:
    """Outputs of a model on the CPU provider; else None, and why the run failed (empty: there is no kernel)."""
    from partita.runtime.ort.session import NativeFailureError, Opening, open_native

    try:
        session = open_native(path, [Resolution(known_providers()["cpu"], "active")], Opening(optimise=False))
    except NativeFailureError as failure:
        missing = type(failure.error).__name__ == "NotImplemented"
        return None, "" if missing else str(failure)
    try:
        return _run(session, sizes)
    finally:
        session.close()


def _run(session: Session, sizes: Mapping[str, Sequence[int]]) -> tuple[list[Any] | None, str]:
    """Outputs of one run on values that follow from the names of the inputs: floats of [0.25, 1], else zeros."""
    feeds = {}
    for port in session.inputs:
        kind = dtypes.find(port.type.removeprefix("tensor(").removesuffix(")"))
        if kind is None or kind.name not in np.sctypeDict:
            return None, ""
        shape = sizes.get(port.name, (1,))
        values = np.random.default_rng(zlib.crc32(port.name.encode())).uniform(0.25, 1, shape)
        feeds[port.name] = (values if "float" in kind.name else np.zeros(shape)).astype(kind.name)
    return session.run_once(feeds)


def _agree(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether outputs are of the same shapes and values, as far as both nodes have them."""
    return all(
        first.shape == second.shape
        and (first.dtype.kind not in "fiub" or np.allclose(first, second, TOLERANCE, TOLERANCE, equal_nan=True))
        for first, second in zip(before, after, strict=False)
    )

"""Whether a provider that does not start would start without an option that it was given: asked, not read.

Messages about options are as many as providers, and some do not name the option at all. So the provider is started on a
model of one node: as it was asked for, then without each option, then without all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from partita.providers.resolve import Resolution, known_providers
from partita.providers.start import Failure, failure
from partita.runtime.ort.session import NativeFailureError, Opening, open_native

NOWHERE = Path("option-trial.onnx")
"""The name of the model in messages; it is no file."""


def by_experiment(resolution: Resolution, found: Failure) -> Failure:
    """The failure, as `option_rejected` where the provider starts without some option and does not with it.

    Only a failure whose cause nothing tells is looked into. What was said stays in the evidence.
    """
    if found.reason != "initialisation_failed" or not resolution.options:
        return found
    rejected = _rejected_options(resolution)
    if not rejected:
        return found
    named = " and ".join(f"{name}={resolution.options[name]}" for name in rejected)
    return failure(
        resolution.provider,
        "option_rejected",
        f"with {named} it does not start, without {'it' if len(rejected) == 1 else 'them'} it does: {found.evidence}",
    )


def _rejected_options(resolution: Resolution) -> tuple[str, ...]:
    """The one option without which the provider starts, else all of them where it starts without any; else none."""
    if starts(resolution):
        return ()
    for name in resolution.options:
        if starts(_without(resolution, {name})):
            return (name,)
    several = len(resolution.options) > 1 and starts(_without(resolution, resolution.options))
    return tuple(resolution.options) if several else ()


def _without(resolution: Resolution, names: Collection[str]) -> Resolution:
    """The provider without some of its options."""
    return replace(resolution, options={name: v for name, v in resolution.options.items() if name not in names})


def starts(resolution: Resolution) -> bool:
    """Whether ONNX Runtime opens a model of one node with the provider in the session."""
    cpu = known_providers()["cpu"]
    behind = [] if resolution.provider.ort_name == cpu.ort_name else [Resolution(cpu, "active")]
    try:
        session = open_native(NOWHERE, [resolution, *behind], Opening(model=_one_node()))
    except NativeFailureError:
        return False
    try:
        return resolution.provider.ort_name in session.registered
    finally:
        session.close()


def _one_node() -> bytes:
    """A Relu over four numbers, which every provider knows."""
    import onnx
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", ports[:1], ports[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())

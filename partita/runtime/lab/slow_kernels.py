"""Times nodes on slow kernel paths, unchanged and with the change that should make them faster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.session_index import index_session
from partita.observations.facts import AS_IS, NodeProbe, ProbeRun, SessionFacts
from partita.observations.kernel_rows import ABSENT, KernelRow
from partita.providers.resolve import Resolution
from partita.runtime.lab.change import Change, vary
from partita.runtime.lab.graph import CannotProbeError, cut_graph
from partita.runtime.lab.laboratory import Lab
from partita.runtime.lab.variant import Variant, identity, node_variant, to_run, variant_model
from partita.runtime.place.onnx_model import OnnxModel

if TYPE_CHECKING:
    pass


def slow_kernels(session: SessionFacts, resolution: Resolution) -> dict[str, KernelRow]:
    """Nodes that a rule puts on a slow kernel path of a provider, with the row of the rule, if it names a change."""
    provider = resolution.provider.ort_name
    if resolution.status != "active" or not any(row.probe for row in session.of(provider).kernels):
        return {}
    index = index_session(session)
    paths = [path for phase in session.phases for path in find_paths(index, phase) if path.provider == provider]
    return {path.node: path.row for path in paths if path.evidence_kind == "derived" and path.row and path.row.probe}


def time_slow_kernels(
    session: SessionFacts, model: OnnxModel, sizes: Mapping[str, tuple[int, ...]], lab: Lab
) -> SessionFacts:
    """The session with the times of its slow nodes as probes. Nodes that ONNX Runtime added or fused have none."""
    provider, slow = lab.resolution.provider.ort_name, slow_kernels(session, lab.resolution)
    if not slow:
        return session
    graph = cut_graph(model, sizes).with_observed_types({event.name: event.output_shapes for event in session.events})
    times: dict[object, tuple[ProbeRun, ...]] = {}
    probes = dict(session.of(provider).probes)
    for name, row in slow.items():
        with contextlib.suppress(CannotProbeError):
            variant = node_variant(graph, name)
            key = identity(variant), row.path
            if key not in times:
                times[key] = _times(variant, row.probe, lab)
            probes |= {name: NodeProbe(name, times[key])} if times[key] else {}
    return session.with_provider(provider, probes=probes)


def _times(variant: Variant, probe: Mapping[str, str], lab: Lab) -> tuple[ProbeRun, ...]:
    """The timed runs of a node and of the changed node; none if one of them did not run."""
    words, change = _change(probe)
    changed = vary(variant, change)
    pair = [to_run(variant_model(each), each, timed=True) for each in (variant, changed) if each is not None]
    answers = [answer for answer in lab.try_all(pair) if answer is not None and answer.seconds is not None]
    if len(answers) < 2:
        return ()
    return tuple(
        ProbeRun(factor, text, answer.outcome, answer.message, seconds=answer.seconds)
        for factor, text, answer in zip((AS_IS, "attribute"), ("", words), answers, strict=True)
    )


def _change(probe: Mapping[str, str]) -> tuple[str, Change]:
    """A change as in `KernelRow.probe`, with its text."""
    import onnx

    texts, attributes, omitted = [], dict[str, onnx.AttributeProto | None](), set[int]()
    for name, value in probe.items():
        if value == ABSENT:
            omitted.add(int(name.removeprefix("input")))
            texts.append(f"without {name}")
        else:
            attributes[name] = onnx.helper.make_attribute(name, int(value))
            texts.append(f"with {name}={value}")
    return " and ".join(texts), Change(attributes=attributes, omitted_inputs=frozenset(omitted))

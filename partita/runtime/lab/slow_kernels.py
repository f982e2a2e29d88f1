"""Times nodes on slow kernel paths, unchanged and with the change that should make them faster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from partita.diagnosis.kernel_paths import find_paths
from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import AS_IS, NodeProbe, ProbeRun, SessionFacts
from partita.providers.resolve import Resolution
from partita.runtime.lab.change import with_attributes, without
from partita.runtime.lab.graph import CannotProbeError, Graph
from partita.runtime.lab.laboratory import Lab
from partita.runtime.lab.variant import Variant, node_variant, to_run, variant_model


def slow_kernels(session: SessionFacts, resolution: Resolution) -> dict[str, tuple[str, str]]:
    """Nodes that a rule puts on a slow kernel path of a provider -> `KernelRow.probe`, if the rule has one."""
    provider = resolution.provider.ort_name
    if resolution.status != "active" or not any(row.probe for row in session.of(provider).kernels):
        return {}
    index = SessionIndex(session)
    paths = [path for phase in session.phases for path in find_paths(index, phase) if path.provider == provider]
    rows = {path.node: path.row for path in paths if path.evidence_kind == "derived"}
    return {node: row.probe for node, row in rows.items() if row is not None and row.probe is not None}


def time_slow_kernels(session: SessionFacts, graph_of: Callable[[SessionFacts], Graph], lab: Lab) -> SessionFacts:
    """The session with the times of its slow nodes as probes. Nodes that ONNX Runtime added or fused have none."""
    provider, slow = lab.resolution.provider.ort_name, slow_kernels(session, lab.resolution)
    if not slow:
        return session
    graph = graph_of(session)
    times: dict[object, tuple[ProbeRun, ...]] = {}
    probes = dict(session.of(provider).probes)
    for name, probe in slow.items():
        with contextlib.suppress(CannotProbeError):
            variant = node_variant(graph, name)
            kinds = [kind.SerializeToString() for feed in variant.feeds for kind in (feed.kind, feed.run_kind)]
            # Times do not depend on the values of constants.
            key = (probe, variant.node.SerializeToString(deterministic=True), *kinds)
            if key not in times:
                times[key] = _times(variant, *probe, lab)
            probes[name] = NodeProbe(name, times[key])
    return session.with_provider(provider, probes=probes)


def _times(variant: Variant, name: str, value: str, lab: Lab) -> tuple[ProbeRun, ...]:
    """The timed runs of a node, unchanged and with a change as in `KernelRow.probe`."""
    import onnx

    if value:
        text = f"with {name}={value}"
        changed = with_attributes(variant, {name: onnx.helper.make_attribute(name, int(value))})
    else:
        text, changed = f"without {name}", without(variant, {int(name.removeprefix("input"))})
    answers = lab.try_all([to_run(variant_model(each), each, timed=True) for each in (variant, changed)])
    return tuple(
        ProbeRun(factor, words, answer.outcome, answer.message, seconds=answer.seconds)
        for factor, words, answer in zip((AS_IS, "attribute"), ("", text), answers, strict=True)
        if answer is not None
    )

"""The wanted provider has no kernel for the operator, whatever its types, version and attributes."""

from __future__ import annotations

from partita.partition_reports.facts import LogPattern
from partita.partition_reports.probes import conclude
from partita.partition_reports.reasons.base import Context, Finding, Reason, logged, probed
from partita.partition_reports.records import ChainEntry

FINER = frozenset({"no_kernel_type", "no_kernel_version", "attribute_unsupported", "dynamic_shape"})
"""What a missing kernel turns out to be when something about the node is changed."""


def decide(context: Context) -> Finding | None:
    """Applies when experiments find nothing that the provider takes, or when it logged that it has no kernel.

    Such a line does not tell the operator from its version or its types, so an experiment that does goes before it.
    """
    shown = conclude(context.probe)
    if shown is not None and shown.code in FINER:
        return None
    return probed(context, "no_kernel_op") or logged(context, "no_kernel_op")


REASON = Reason(
    code="no_kernel_op",
    level="node",
    title="No kernel found",
    condition="the wanted provider has no kernel for the operator as this node uses it; the log does not say whether "
    "the operator itself, its version or its types are missing",
    needs="a native log line `… kernel not found in registries for Op type: <op> node name: <node>`",
    remedy="export with another opset or precision, a package also with another attention lowering, or name a provider "
    "that has the kernel first",
    example=Context(
        node="model.rotary_emb/Gather",
        op_type="Gather",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(
            "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries "
            "for Op type: Gather node name: model.rotary_emb/Gather",
        ),
        patterns=(
            LogPattern(
                "no_kernel_op",
                r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)",
            ),
        ),
    ),
    decide=decide,
)

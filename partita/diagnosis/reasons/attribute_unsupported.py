"""The preferred provider has the operator, but not as this node uses it."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

REASON = Reason(
    code="attribute_unsupported",
    level="node",
    title="Attributes or inputs not supported",
    says="{provider} does not take {op} with {before}",
    condition="the preferred provider has a kernel for the operator and considered the node, but does not support "
    "its attributes, its optional inputs or its shapes",
    needs="a native log line in which the provider rejects the node by name and with a cause, e.g. `CUDA kernel not "
    "supported. Fallback to CPU execution provider for Op type: <op> node name: <node>`; or an experiment: in "
    "isolation "
    "the node is not claimed or fails, and it is claimed without an attribute or an optional input, with an "
    "input as a constant, or with another rank, and nothing else changed, or with several of these; or no change "
    "helped, and other nodes of the operator are claimed in the same version and types",
    remedy="export the model so that this operator has what the evidence names: another attribute, one input less, a "
    "constant for an input, another rank",
    factors=("attribute", "input"),
    example=Context(
        node="decoder/ConvTranspose",
        op_type="ConvTranspose",
        provider="CPUExecutionProvider",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(
            "[W:onnxruntime:, cuda_execution_provider.cc:3120 GetCapability] Dropping the ConvTranspose node: "
            "decoder/ConvTranspose to CPU because it requires asymmetric padding which the CUDA EP currently does not "
            "support",
        ),
        patterns=(
            LogPattern(
                "attribute_unsupported",
                r"Dropping the (?P<op>ConvTranspose|NhwcConv) node: (?P<node>\S+) to CPU because (?P<why>.*)",
            ),
        ),
    ),
    steps=(RETARGET,),
)

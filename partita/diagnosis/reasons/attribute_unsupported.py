"""The preferred provider supports the operator, but not the attributes, inputs or shapes of this node."""

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
    sentence="{provider} does not support {op} with {before}",
    condition="the provider has a kernel for the operator, but does not support this node's attributes, "
    "optional inputs or shapes",
    needs="a log line with the node and the cause; or experiments: the provider supports the node with another "
    "attribute, input or rank, or supports other nodes of the operator with the same version and types",
    remedy="export the model with the change that the evidence names: another attribute, one input less or more, a "
    "constant input, or another rank",
    factors=("attribute", "input"),
    example=Context(
        node="decoder/ConvTranspose",
        op_type="ConvTranspose",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
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

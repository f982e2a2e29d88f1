"""The preferred provider starts but finds no device."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="device_missing",
    level="provider",
    title="No device found",
    condition="the provider's libraries load, but the machine has no device for it, or the driver reports none",
    needs="the provider's status and error message",
    remedy="use a machine with a device for this provider, or install the driver of the device",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="WebGpuExecutionProvider",
            status="unavailable",
            reason="device_missing",
            evidence="Failed to get a WebGPU adapter: No supported adapters.",
            remedy="install a Vulkan driver for the GPU and the loader",
        ),
    ),
    steps=(ASK_PROVIDER,),
)

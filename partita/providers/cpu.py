"""The CPU execution provider, part of every ONNX Runtime build.

It takes no options: threads and the memory arena are settings of the session. ONNX Runtime 1.31.1 accepts any provider
option for it and ignores it, which is why none is offered here.
"""

from partita.providers.base import Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    aliases=(),
    wheels=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
    device_memory="Cpu",
    preferred_attention="gqa",
    rank=1,
    remedies={
        "not_in_build": Remedy(
            "every ONNX Runtime has the CPU provider: put its files back",
            ("pip", "install", "--force-reinstall", "onnxruntime"),
        )
    },
)

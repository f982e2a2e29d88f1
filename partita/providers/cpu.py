"""The CPU execution provider, part of every ONNX Runtime build.

It takes no options: threads and the memory arena are settings of the session. ONNX Runtime 1.31.1 accepts any provider
option for it and ignores it, which is why none is offered here.
"""

from partita.providers.base import PackedWeights, Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    aliases=(),
    wheels=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
    device_memory="Cpu",
    preferred_attention="gqa",
    # Level 4 has the only fast kernels (core/mlas/lib/qnbitgemm.h). A zero point costs nothing there, because a block's
    # sum is kept anyway: 8 bytes of scale and sum per block make 5 bits per 4-bit weight of blocks of 64.
    packed_weights=PackedWeights(
        symmetric=False, accuracy_level=4, bias=True, gather=True, block_sizes={4: 64, 8: 128}
    ),
    rank=1,
    remedies={
        "not_in_build": Remedy(
            "every ONNX Runtime has the CPU provider: put its files back",
            ("pip", "install", "--force-reinstall", "onnxruntime"),
        )
    },
)

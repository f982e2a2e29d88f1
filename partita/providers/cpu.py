"""The CPU execution provider, part of every ONNX Runtime build.

ONNX Runtime 1.31.1 ignores its provider options. The options here are Partita's; `runtime/cpu` sets them through the
session configuration and environment variables.
"""

from partita.providers.base import Option, PackedWeights, Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    aliases=(),
    wheels=("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-webgpu"),
    device_memory="Cpu",
    preferred_attention="gqa",
    alternating_options={"spinning_after": "0"},  # spinning threads slow down those of the other package
    rolling_caches=True,  # verified against a full cache, ONNX Runtime 1.31.1
    # Level 4 has the only fast kernels (core/mlas/lib/qnbitgemm.h), which store a sum per block, so that zero points
    # cost nothing: with blocks of 64, scale and sum (8 bytes) make 5 bits per 4-bit weight.
    packed_weights=PackedWeights(
        symmetric=False, accuracy_level=4, bias=True, gather=True, experts=True, block_sizes={4: 64, 8: 128}
    ),
    options=(
        Option(
            "attention",
            "choice",
            "auto",
            "attention algorithm; auto: by processor and head size",
            choices=("auto", "flash", "naive"),
            partita_option=True,
        ),
        Option("huge_pages", "bool", "1", "put packed weights into pages of 2 MiB (Linux)", partita_option=True),
        Option("parallel_packing", "bool", "1", "pack weights with all threads", partita_option=True),
        Option(
            "spinning",
            "bool",
            "",
            "threads wait for work in a loop; default 1 unless threads exceed cores",
            partita_option=True,
        ),
        Option("spinning_after", "bool", "1", "threads keep spinning for a while after a run", partita_option=True),
    ),
    rank=1,
    remedies={
        "not_in_build": Remedy(
            "every ONNX Runtime has the CPU provider; reinstall it",
            ("pip", "install", "--force-reinstall", "onnxruntime"),
        )
    },
)

"""The CPU execution provider, part of every ONNX Runtime build.

ONNX Runtime 1.31.1 accepts any provider option for it and ignores it. The options here are Partita's: what can be set
on the CPU are settings of the session and variables of the environment (`runtime/cpu` decides over them).
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
    in_turns={"spinning_after": "0"},  # threads that spin on are in the way of the other's: a fifth of a short answer
    rolling_caches=True,  # equal to a whole cache in steps of one and of several tokens, ONNX Runtime 1.31.1
    # Level 4 has the only fast kernels (core/mlas/lib/qnbitgemm.h). A zero point costs nothing there, because a block's
    # sum is kept anyway: 8 bytes of scale and sum per block make 5 bits per 4-bit weight of blocks of 64.
    packed_weights=PackedWeights(
        symmetric=False, accuracy_level=4, bias=True, gather=True, experts=True, block_sizes={4: 64, 8: 128}
    ),
    options=(
        Option(
            "attention",
            "choice",
            "auto",
            "the path through attention, auto: by processor and head size",
            choices=("auto", "flash", "naive"),
            ours=True,
        ),
        Option("huge_pages", "bool", "1", "packed weights are put into pages of 2 MiB where Linux has them", ours=True),
        Option("parallel_packing", "bool", "1", "weights are packed by all threads", ours=True),
        Option(
            "spinning", "bool", "", "threads wait for work in a loop, 1 unless there are more than cores", ours=True
        ),
        Option("spinning_after", "bool", "1", "after a run, too, they wait so for the next one for a while", ours=True),
    ),
    rank=1,
    remedies={
        "not_in_build": Remedy(
            "every ONNX Runtime has the CPU provider: put its files back",
            ("pip", "install", "--force-reinstall", "onnxruntime"),
        )
    },
)

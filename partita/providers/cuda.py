"""NVIDIA GPUs through CUDA.

Option names are from libonnxruntime_providers_cuda.so 1.31.1, defaults from a session. Pointer options and ROCm tuning
are omitted. memory_budget_kb is Partita's name for an entry of the session configuration (docs/annotated_partitioning
in ONNX Runtime's repository).
"""

from dataclasses import replace

from partita.observations.patterns import KernelRow, LogPattern
from partita.providers.base import CPU_PREFERRED, Option, PackedWeights, Provider, choice
from partita.remedies import Remedy

WHEELS = Remedy("get CUDA 13 and cuDNN 9 as Python packages", ("pip", "install", "onnxruntime-gpu[cuda,cudnn]"))
DRIVER = Remedy("install the NVIDIA driver; in a container, use the NVIDIA container toolkit and pass the GPUs")
OTHER_DRIVER = Remedy("update the NVIDIA driver, or install the onnxruntime-gpu for the installed CUDA version")
NO_GPU = Remedy("run it on a machine with an NVIDIA GPU")

ATTENTION = ("GroupQueryAttention", "MultiHeadAttention", "Attention")
DRY_RUN = "1.31.1: log of one-node dry runs as H100; not timed"


def sdpa(kernel: str) -> str:
    """The line that ONNX Runtime prints about the attention kernel of a node."""
    return rf"Operator=\S+ Node=(?P<node>.*?) DataType=\S+ SdpaKernel={kernel}\b"


HALF = Remedy(
    "use half precision",
    alternative=Remedy(
        "export the checkpoint again", ("partita", "export", "{checkpoint}", "{out}", "--precision", "fp16")
    ),
)
PADDED = Remedy("pad the heads to a multiple of 8")
NO_BIAS = Remedy("remove the bias: the operator masks by the lengths of the rows, and by local_window_size")
OTHER_MASK = Remedy(
    "give the mask as attention_bias, or use GroupQueryAttention, which masks by the lengths of the rows"
)


def unfused(cause: str, remedy: Remedy, **when: tuple[str, ...]) -> KernelRow:
    """The path without a fused kernel, which writes the matrix of scores to memory."""
    return KernelRow(ATTENTION, "unfused", DRY_RUN, when=when, log=sdpa("MATH"), cause=cause, remedy=remedy)


PROVIDER = Provider(
    name="cuda",
    ort_name="CUDAExecutionProvider",
    aliases=("nvidia",),
    suggested_for=("gpu",),
    wheels=("onnxruntime-gpu",),
    device_memory="Cuda",
    preferred_attention="gqa",
    rolling_caches=True,  # ONNX Runtime's ContribOperators.md: where the buffer has as many rows as the window
    packed_weights=PackedWeights(activations="fp16"),
    rank=100,
    preload=True,
    variables=("CUDA_VISIBLE_DEVICES",),
    reads_back=True,
    capture_option="enable_cuda_graph",
    budget_option="memory_budget_kb",
    options=(
        Option("device_id", "int", "0", "number of the GPU"),
        Option("gpu_mem_limit", "int", "18446744073709551615", "largest size of the memory arena, in bytes"),
        choice("arena_extend_strategy", "kNextPowerOfTwo kSameAsRequested", "how the memory arena grows"),
        choice("cudnn_conv_algo_search", "EXHAUSTIVE HEURISTIC DEFAULT", "how a convolution algorithm is chosen"),
        Option("cudnn_conv_use_max_workspace", "bool", "1", "allow cuDNN its maximum workspace"),
        Option("cudnn_conv1d_pad_to_nc1d", "bool", "0", "pad a 1-D convolution to [N, C, 1, D], not [N, C, D, 1]"),
        Option("do_copy_in_default_stream", "bool", "1", "copy in the compute stream; 0 may race"),
        Option("enable_cuda_graph", "bool", "0", "capture the first run and replay it; needs every node on CUDA"),
        Option("enable_skip_layer_norm_strict_mode", "bool", "0", "more accurate and slower SkipLayerNormalization"),
        Option("prefer_nhwc", "bool", "0", "channels last for operators that support NHWC"),
        Option("use_ep_level_unified_stream", "bool", "0", "one stream for all nodes of this provider"),
        Option("use_tf32", "bool", "1", "round inputs of float32 matrix products to TF32"),
        Option("fuse_conv_bias", "bool", "0", "fuse convolution and bias, compiled at start"),
        Option("enable_cudnn", "bool", "1", "use cuDNN"),
        Option("external_data_loader_reading_threads", "int", "4", "threads that read weights from disk"),
        Option(
            "memory_budget_kb",
            "int",
            "",
            "stop accepting nodes when their weights and outputs exceed this many KiB",
            session_key="session.resource_cuda_partitioning_settings",
            session_suffix=",",
            minimum=1,
        ),
        Option("sdpa_kernel", "int", "0", "bit mask of allowed attention kernels; 0: ONNX Runtime decides"),
    ),
    libraries={"libcuda.so.1": DRIVER},
    node_patterns=(
        LogPattern(
            "no_kernel_op", r"CUDA kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)"
        ),
        LogPattern(
            "attribute_unsupported",
            r"(?P<why>CUDA kernel not supported)\. Fallback to CPU execution provider for Op type: (?P<op>\S+) "
            r"node name: (?P<node>\S+)",
            vague=True,
        ),
        LogPattern(
            "attribute_unsupported",
            r"Dropping the (?P<op>ConvTranspose|NhwcConv) node: (?P<node>\S+) to CPU because (?P<why>.*)",
        ),
        CPU_PREFERRED,
        LogPattern("over_budget", r"(?P<why>Resource estimation for EP '[^']+': .*)"),
        LogPattern("over_budget", r"halting assignment due to budget at node: (?P<node>\S+)"),
    ),
    debug_variables=("ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO",),
    kernels=(
        KernelRow(ATTENTION, "flash", DRY_RUN, log=sdpa("FLASH_ATTENTION")),
        KernelRow(ATTENTION, "flash (cuDNN)", DRY_RUN, log=sdpa("CUDNN_FLASH_ATTENTION")),
        KernelRow(ATTENTION, "XQA", DRY_RUN, log=sdpa("XQA")),
        KernelRow(ATTENTION, "memory-efficient", DRY_RUN, log=sdpa("EFFICIENT_ATTENTION")),
        unfused("float32 queries of this length have no fused kernel", HALF, output0=("float32",)),
        unfused("the head size is not a multiple of 8", PADDED, **{"head_size%8": tuple("1234567")}),
        unfused("fused kernels do not support attention_bias of GroupQueryAttention", NO_BIAS, input10=("*",)),
        unfused("fused kernels do not support key_padding_mask of this form", OTHER_MASK, input4=("*",)),
        KernelRow(ATTENTION, "unfused", DRY_RUN, log=sdpa("MATH")),
    ),
    remedies={
        "library_missing": WHEELS,
        "device_missing": replace(
            NO_GPU,
            alternative=Remedy(
                "show its placement without a GPU", ("partita", "place", "PATH", "--provider", "cuda,cpu", "--dry-run")
            ),
        ),
        "version_mismatch": OTHER_DRIVER,
        "initialisation_failed": Remedy("check GPU and driver", ("nvidia-smi",)),
    },
)

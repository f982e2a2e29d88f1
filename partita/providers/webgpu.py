"""Any GPU with a Vulkan, Metal or Direct3D 12 driver, through WebGPU (Dawn).

Part of the wheel onnxruntime-webgpu, or the plugin onnxruntime-ep-webgpu for a plain onnxruntime. Options are from ONNX
Runtime's page on this provider and webgpu_provider_options.h, without pointers and PIX captures. The built-in provider
reads them from the session configuration only. Tested with onnxruntime-webgpu 1.27.0.
"""

from partita.observations.patterns import KernelRow, LogPattern
from partita.providers.base import CPU_PREFERRED, Option, Plugin, ProbeValue, Provider, choice
from partita.remedies import Remedy

VULKAN = Remedy(
    "install a Vulkan driver for the GPU and the loader, on Debian",
    ("apt-get", "install", "libvulkan1", "mesa-vulkan-drivers"),
)
ATTENTION = ("GroupQueryAttention", "MultiHeadAttention")
PACKED = ("MatMulNBits",)
PROFILE = "1.27.0: program in the profile"
GRAPH = "1.27.0: optimised graph of a Conv"
CACHES = "disabled lazyRelease simple bucket"

PROVIDER = Provider(
    name="webgpu",
    ort_name="WebGpuExecutionProvider",
    aliases=("wgpu",),
    suggested_for=("gpu", "vulkan", "metal", "adreno"),
    wheels=("onnxruntime-webgpu",),
    device_memory="WebGPU_Buf",
    preferred_attention="gqa",
    variables=("VK_ICD_FILENAMES", "VK_DRIVER_FILES"),
    rank=50,
    plugin=Plugin("onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu"),
    option_prefix="ep.webgpuexecutionprovider.",
    reads_back=True,
    capture_option="enableGraphCapture",
    # It reads keys of shorter rows at the position of the longest row (1.27.0).
    even_rows=frozenset({"GroupQueryAttention"}),
    software_devices=True,
    options=(
        choice("preferredLayout", "NCHW NHWC", "layout for layout-sensitive operators", default="NHWC"),
        Option("enableGraphCapture", "bool", "0", "record the first run and replay it; needs every node on WebGPU"),
        Option(
            "enableInt64",
            "bool",
            "0",
            "int64 kernels, where supported",
            probe_value=ProbeValue("1", elements=("int64",)),
        ),
        Option("multiRotaryCacheConcatOffset", "int", "0", "offset in a rotary cache made of several"),
        Option("forceCpuNodeNames", "text", "", "names of nodes to leave to the CPU, one per line"),
        Option("deviceId", "int", "0", "number of the WebGPU context; sessions of one number share a device"),
        choice("powerPreference", "high-performance low-power", "GPU to request", default=""),
        choice("dawnBackendType", "D3D12 Vulkan", "graphics interface to use", default=""),
        Option("preserveDevice", "bool", "0", "keep the device after its last session is closed"),
        choice("validationMode", "disabled wgpuOnly basic full", "level of run-time validation", default=""),
        Option("maxStorageBufferBindingSize", "int", "", "maximum buffer size in bytes, at most the device's limit"),
        choice("storageBufferCacheMode", CACHES, "how storage buffers are kept", default="bucket"),
        choice("uniformBufferCacheMode", CACHES, "how uniform buffers are kept", default="simple"),
        choice("queryResolveBufferCacheMode", CACHES, "how buffers of time stamps are kept", default="disabled"),
        choice("defaultBufferCacheMode", CACHES, "how all other buffers are kept", default="disabled"),
    ),
    node_patterns=(
        LogPattern(
            "no_kernel_op", r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)"
        ),
        LogPattern("pinned_by_user", r"Force CPU execution for node: (?P<node>\S+)"),
        CPU_PREFERRED,
    ),
    start_patterns=(
        LogPattern("device_missing", r"(?P<why>Failed to get a WebGPU adapter.*)"),
        LogPattern("device_missing", r"(?P<why>No supported adapters.*)"),
    ),
    remedies={
        "library_missing": VULKAN,
        "device_missing": VULKAN,
        "initialisation_failed": VULKAN,
    },
    logs_runs=True,
    # Seen with onnxruntime-webgpu 1.27.0 on SwiftShader, in profiles of one-node sessions.
    kernels=(
        KernelRow(ATTENTION, "flash, split over the cache", PROFILE, program="^FlashAttentionDecode"),
        KernelRow(ATTENTION, "flash", PROFILE, program="^FlashAttention"),
        KernelRow(
            ATTENTION,
            "unfused",
            "1.27.0 on SwiftShader: 4.6 times the device time of flash",
            when={"smooth_softmax": ("1",)},
            program="^AttentionProbs",
            cause="flash does not support smooth_softmax, so the scores are written to memory",
            remedy=Remedy("replace smooth_softmax by a head_sink input of zeros, which has the same result"),
        ),
        KernelRow(ATTENTION, "unfused", PROFILE, program="^AttentionProbs"),
        KernelRow(PACKED, "int8 products (DP4A)", PROFILE, program="^DP4AMatMul"),
        KernelRow(PACKED, "float products, wide tiles", PROFILE, program="^MatMulNBitsWideTile"),
        KernelRow(PACKED, "float products", PROFILE, program="^MatMulNBits"),
        KernelRow(("Conv",), "NHWC layout", GRAPH, when={"domain": ("com.ms.internal.nhwc",)}),
        KernelRow(("Transpose",), "layout conversion", GRAPH, when={"added": ("yes",)}),
    ),
)

"""Intel CPUs, GPUs and NPUs through OpenVINO, which compiles every supported subgraph.

Part of the wheel onnxruntime-openvino, or the plugin onnxruntime-ep-openvino for a plain onnxruntime. Options are from
ONNX Runtime's page on this provider. Tested with onnxruntime-openvino 1.24.1 and the plugin 1.8.1.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import Option, PackedWeights, Plugin, Provider, choice
from partita.remedies import Remedy

WORDS = ("False", "True")
ON_CPU = Remedy(
    "with the wheel onnxruntime-openvino it can use the CPU",
    options=("--provider-option", "openvino.device_type=CPU"),
)

PROVIDER = Provider(
    name="openvino",
    ort_name="OpenVINOExecutionProvider",
    aliases=("ov",),
    suggested_for=("npu", "intel", "xpu"),
    wheels=("onnxruntime-openvino",),
    preferred_attention="primitives",
    packed_weights=PackedWeights(symmetric=False, block_sizes={4: 64, 8: 128}),
    rank=30,
    constant_defaults=True,  # adapters had no effect
    compiles=True,
    plugin=Plugin(
        "onnxruntime-ep-openvino",
        "onnxruntime_ep_openvino",
        # By default it computes float32 models in bfloat16 on CPUs that support it: error 3e-2 instead of 1e-6.
        default_options=(("load_config", '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'),),
        ignores=(
            "device_type",
            "precision",
            "num_of_threads",
            "num_streams",
            "cache_dir",
            "model_priority",
            "enable_opencl_throttling",
            "enable_qdq_optimizer",
        ),
        # GetSupportedDevices of the plugin's factory skips vendors other than 0x8086, even for CPUs.
        offered_devices="processors, GPUs and NPUs of Intel",
        no_device=Remedy(
            "the wheel onnxruntime-openvino supports any x86-64 CPU; in a separate environment",
            ("pip", "install", "onnxruntime-openvino"),
        ),
    ),
    options=(
        Option("device_type", "text", "CPU", "CPU, GPU, GPU.1, NPU, or a mix such as AUTO:GPU,CPU"),
        choice("precision", "FP32 FP16 ACCURACY", "type of arithmetic", default=""),
        Option("num_of_threads", "int", "", "threads of one run"),
        Option("num_streams", "int", "1", "concurrent runs"),
        Option("cache_dir", "path", "", "folder that keeps compiled models"),
        choice("model_priority", "LOW MEDIUM HIGH DEFAULT", "priority on a shared device", default="DEFAULT"),
        Option("enable_opencl_throttling", "bool", "False", "use less CPU while a GPU runs", off_on=WORDS),
        Option("enable_qdq_optimizer", "bool", "False", "rewrite quantised graphs for the NPU", off_on=WORDS),
        Option(
            "disable_dynamic_shapes", "bool", "False", "make all shapes static when the model is loaded", off_on=WORDS
        ),
        Option("reshape_input", "text", "", "input shapes to fix, e.g. data[1,3,60,80..120]"),
        Option("load_config", "text", "", 'JSON with properties of OpenVINO itself: {"CPU": {"NUM_STREAMS": "1"}}'),
    ),
    node_patterns=(
        LogPattern("no_kernel_op", r"(?P<why>OpenVINO does not support the following ONNX operations: .*)"),
        LogPattern("subgraph_rejected", r"(?P<why>\[OpenVINO-EP\] Supported subgraphs on OpenVINO: \d+)"),
    ),
    start_patterns=(
        LogPattern("initialisation_failed", r"(?P<why>OpenVINO does not support the following ONNX operations: [^.]*)"),
        LogPattern("device_missing", r"(?P<why>\[OpenVINO\] .*(not available|is not found|Invalid device).*)"),
        LogPattern("option_rejected", r"(?P<why>Invalid OpenVINO EP option: .*)"),
        LogPattern("option_rejected", r"(?P<why>Invalid JSON structure: .*|JSON parsing error: .*)"),
        LogPattern("option_rejected", r"(?P<why>reshape_input parameter: .*)"),
        LogPattern("option_rejected", r"(?P<why>Invalid input shape definition format: .*)"),
        LogPattern("option_rejected", r"\[ERROR\] (?P<why>\[OpenVINO\] (Unsupported|Invalid|The value).*)"),
        LogPattern("device_missing", r"(?P<why>Device with \"[^\"]+\" name is not registered.*)"),
    ),
    remedies={
        "library_missing": Remedy("reinstall it", ("pip", "install", "--force-reinstall", "onnxruntime-openvino")),
        "device_missing": Remedy("name an available device", options=("--provider-option", "openvino.device_type=CPU")),
        "initialisation_failed": ON_CPU,
    },
)

"""Qualcomm NPUs through QNN, and on x86-64 the emulator of their HTP backend, as the plugin onnxruntime-qnn 2.7.

It compiles subgraphs with static shapes in float16: packages need --static-shapes and --precision fp16. The emulator
is slower than the CPU, so the provider is not in the default chain.

Options are from onnxruntime/onnxruntime-qnn, docs/execution_providers, if the library of 2.7.0 accepts them too.
By default the emulator simulates a chip without floating-point arithmetic and fails to finalise most float graphs with
QNN_COMMON_ERROR_MEM_ALLOC (1002); `EMULATED` selects another chip.
"""

import platform

from partita.observations.patterns import LogPattern
from partita.providers.base import Option, Plugin, ProbeValue, Provider, choice
from partita.remedies import Remedy

MODES = (
    "default burst balanced high_performance high_power_saver low_balanced low_power_saver power_saver "
    "extreme_power_saver sustained_high_performance"
)

EMULATED = (("soc_model", "43"),) if platform.machine().lower() in ("x86_64", "amd64") else ()
"""The chip that the emulator simulates: SM8550, whose HTP (v73) computes in float16. Real devices need no value."""

UNIT = r"Node name: (?P<node>\S*) Node index: \d+(?=(?:\n.*Node name: .*)*\n\s*REASON : (?P<why>{})[^\n]*)"
"""Log lines of one node of an unsupported unit (LogNodeSupport in qnn_execution_provider.cc, 2.7.0)."""

NO_DEVICE = Remedy("it needs a Qualcomm NPU, or on x86-64 the emulator in onnxruntime-qnn")

PROVIDER = Provider(
    name="qnn",
    ort_name="QNNExecutionProvider",
    aliases=("qualcomm",),
    suggested_for=("npu", "snapdragon", "hexagon", "htp"),
    preferred_attention="primitives",
    compiles=True,
    cache_option="cache_dir",
    why_patterns=(
        UNIT.format(r"(?!Failed to add node)[^\n]+"),
        r"(?P<why>QNN\.\w+\(\) failed for node `(?P<node>[^`]+)` of type `[^`]+` with error code \d+)",
        UNIT.format(r"[^\n]+"),
    ),
    plugin=Plugin(
        "onnxruntime-qnn",
        "onnxruntime_qnn",
        (("backend_path", "get_qnn_htp_path"),),
        EMULATED,
        yields_to=("backend_type",),
    ),
    options=(
        Option("backend_path", "path", "", "backend library, e.g. libQnnHtp.so"),
        choice("backend_type", "cpu gpu htp saver ir", "kind of backend; excludes backend_path", default="htp"),
        Option("cache_dir", "path", "", "folder that keeps compiled graphs", partita_option=True),
        choice("htp_performance_mode", MODES, "trade-off of speed and power on the NPU"),
        choice(
            "htp_graph_finalization_optimization_mode",
            "0 1 2 3",
            "optimisation level; 3 compiles longest and runs fastest",
        ),
        Option("enable_htp_fp16_precision", "bool", "", "compute float32 models in float16; needs soc_model"),
        Option("htp_bf16_enable", "bool", "0", "compute in bfloat16; needs soc_model of 88 or more"),
        Option(
            "offload_graph_io_quantization",
            "bool",
            "1",
            "quantise inputs and outputs on the CPU",
            probe_value=ProbeValue("0", operators=("QuantizeLinear", "DequantizeLinear")),
        ),
        Option("enable_htp_shared_memory_allocator", "bool", "0", "allocate tensors in memory shared by CPU and NPU"),
        Option("enable_htp_spill_fill_buffer", "bool", "0", "spill buffer for cached contexts"),
        Option("vtcm_mb", "int", "0", "on-chip memory in MB; 0: not set"),
        Option("rpc_control_latency", "int", "0", "latency of calls to the NPU in microseconds; 0: not set"),
        choice("qnn_context_priority", "low normal normal_high high", "priority on the NPU", default="normal"),
        Option("soc_model", "int", "0", "number of the chip; 0: unknown"),
        Option("htp_arch", "int", "0", "architecture of the NPU, e.g. 73; 0: not set"),
        Option("device_id", "int", "0", "number of the device"),
        choice("profiling_level", "off basic detailed optrace", "detail of QNN's own profile"),
        Option("profiling_file_path", "path", "", "CSV file of the profile"),
        Option("op_affinity", "path", "", 'JSON file of operators to run on it: {"op_type": {"Attention": "htp"}}'),
        Option("op_packages", "text", "", "custom operators: type:library:symbol[:target],…"),
        Option("dump_json_qnn_graph", "bool", "0", "write the QNN graphs as JSON"),
        Option("json_qnn_graph_dir", "path", "", "folder of these JSON files"),
        Option("skip_qnn_version_check", "bool", "0", "accept a QNN library of another version"),
    ),
    node_patterns=(
        LogPattern("subgraph_rejected", r"(?P<why>Failed to finalize QNN graph\. .*)"),
        # One line has all nodes: {...}{...}
        LogPattern(
            "no_kernel_op",
            r"(?:Unsupported nodes in QNN EP: |\}(?:, )?)\{ name: (?P<node>.*?), type: (?P<op>\w+)(?= ?\})",
        ),
    ),
    message_patterns=(
        LogPattern("option_needed", r"by the \w+ provider option"),
        LogPattern(
            "no_kernel_op",
            r"Operators of type|operator not supported|does not support \w+ on|backend only|branch op|must be static|"
            r"Cannot get shape|[Ff]ailed|graph (in|out)put|not com\.microsoft",
        ),
        LogPattern("no_kernel_type", r"(?i)data ?type"),
        LogPattern("attribute_unsupported", r"."),
    ),
    start_patterns=(
        LogPattern("library_missing", r"(?P<why>Unable to load backend.*)"),
        LogPattern("option_rejected", r"(?P<why>\w+ (precision )?mode is enabled but soc_model is not specified.*)"),
        LogPattern("option_rejected", r"(?P<why>\w+ (precision )?mode is enabled but SoC model is \d+.*)"),
        LogPattern("option_rejected", r"(?P<why>Only one of 'backend_type' and 'backend_path' .*)"),
        LogPattern("option_rejected", r"(?P<why>Failed to parse '?backend_type'?.*)"),
    ),
    remedies={
        "library_missing": Remedy(
            "reinstall it",
            ("pip", "install", "--force-reinstall", "--no-deps", "onnxruntime-qnn"),
            alternative=Remedy("name the backend", options=("--provider-option", "qnn.backend_path=PATH")),
        ),
        "device_missing": NO_DEVICE,
        "initialisation_failed": Remedy(
            "it needs static shapes and float16",
            ("partita", "export", "CHECKPOINT", "OUT", "--target", "qnn", "--static-shapes", "--precision", "fp16"),
        ),
    },
)

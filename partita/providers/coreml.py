"""Apple's GPUs and Neural Engine through Core ML. Never run here: no Mac was at hand.

Part of the macOS wheel of onnxruntime. Options and their values are those that coreml_options.cc of ONNX Runtime
accepts, and ModelCacheDirectory from coreml_provider_factory.h. It takes static shapes best and splits decoders into
many parts, so it is not chosen automatically.
"""

from partita.observations.log_pattern import LogPattern
from partita.providers.base import OPTIONS, Option, Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="coreml",
    ort_name="CoreMLExecutionProvider",
    aliases=("apple",),
    suggested_for=("metal", "mps", "npu", "ane", "macos"),
    wheels=("onnxruntime",),
    device_memory="Cpu",
    preferred_attention="onnx24",
    compiles=True,
    options=(
        Option("ModelFormat", "choice", "NeuralNetwork", "kind of Core ML model", ("NeuralNetwork", "MLProgram")),
        Option(
            "MLComputeUnits",
            "choice",
            "ALL",
            "units that may run it",
            ("ALL", "CPUOnly", "CPUAndGPU", "CPUAndNeuralEngine"),
        ),
        Option("RequireStaticInputShapes", "bool", "0", "take only nodes whose shapes are fixed"),
        Option("EnableOnSubgraphs", "bool", "0", "also take nodes inside If, Loop and Scan"),
        Option(
            "SpecializationStrategy", "choice", "Default", "what Core ML optimises for", ("Default", "FastPrediction")
        ),
        Option("ProfileComputePlan", "bool", "0", "log the unit that Core ML plans for each operation"),
        Option("AllowLowPrecisionAccumulationOnGPU", "bool", "0", "accumulate in float16 on the GPU"),
        Option("ModelCacheDirectory", "path", "", "folder that keeps compiled models"),
    ),
    node_patterns=(
        # It names no node, so all that follows is that the provider turned down some of the graph.
        LogPattern("subgraph_rejected", r"(?P<why>CoreML does not support .*)"),
    ),
    remedies={
        "not_in_build": Remedy("on macOS, as no other system has Core ML", ("pip", "install", "onnxruntime")),
        "device_missing": Remedy("let it use the CPU", options=("--provider-option", "coreml.MLComputeUnits=CPUOnly")),
        "option_rejected": OPTIONS,
        "initialisation_failed": Remedy(
            "try the newer format of its models", options=("--provider-option", "coreml.ModelFormat=MLProgram")
        ),
    },
)

"""Apple's GPUs and Neural Engine through Core ML. Untested.

Part of the macOS wheel of onnxruntime. Options: coreml_options.cc and coreml_provider_factory.h of ONNX Runtime. It
splits decoders into many partitions, so it is not in the default chain.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import Option, Provider, choice
from partita.remedies import Remedy

PROVIDER = Provider(
    name="coreml",
    ort_name="CoreMLExecutionProvider",
    aliases=("apple",),
    suggested_for=("metal", "mps", "npu", "ane", "macos"),
    wheels=("onnxruntime",),
    compiles=True,
    options=(
        choice("ModelFormat", "NeuralNetwork MLProgram", "kind of Core ML model"),
        choice("MLComputeUnits", "ALL CPUOnly CPUAndGPU CPUAndNeuralEngine", "units that may run it"),
        Option("RequireStaticInputShapes", "bool", "0", "accept only nodes with static shapes"),
        Option("EnableOnSubgraphs", "bool", "0", "accept nodes inside If, Loop and Scan"),
        choice("SpecializationStrategy", "Default FastPrediction", "what Core ML optimises for"),
        Option("ProfileComputePlan", "bool", "0", "log the unit that Core ML plans for each operation"),
        Option("AllowLowPrecisionAccumulationOnGPU", "bool", "0", "accumulate in float16 on the GPU"),
        Option("ModelCacheDirectory", "path", "", "folder that keeps compiled models"),
    ),
    node_patterns=(
        # The line names no node.
        LogPattern("subgraph_rejected", r"(?P<why>CoreML does not support .*)"),
    ),
    remedies={
        "not_in_build": Remedy("on macOS, the only system with Core ML", ("pip", "install", "onnxruntime")),
        "device_missing": Remedy("let it use the CPU", options=("--provider-option", "coreml.MLComputeUnits=CPUOnly")),
        "initialisation_failed": Remedy(
            "try the newer format of its models", options=("--provider-option", "coreml.ModelFormat=MLProgram")
        ),
    },
)

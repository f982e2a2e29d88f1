"""Apple's GPUs and Neural Engine through Core ML. Untested.

Part of the macOS wheel of onnxruntime. It splits decoders into many partitions, so it is not in the default chain.
Options: coreml_options.cc of ONNX Runtime.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="coreml",
    ort_name="CoreMLExecutionProvider",
    aliases=("apple",),
    suggested_for=("metal", "mps", "npu", "ane", "macos"),
    wheels=("onnxruntime",),
    compiles=True,
    any_option=True,
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

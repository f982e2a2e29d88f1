"""Apple's GPUs through MLX, as the plugin onnxruntime-ep-mlx 0.31. Untested.

The wheel is for macOS 14 on Apple silicon and ONNX Runtime 1.31, and documents no options.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import Plugin, Provider
from partita.remedies import Remedy

NO_GPU = Remedy("it needs macOS 14 on a Mac with Apple silicon")

PROVIDER = Provider(
    name="mlx",
    ort_name="MLXExecutionProvider",
    preferred_attention="gqa",
    compiles=True,
    plugin=Plugin("onnxruntime-ep-mlx", "onnxruntime_ep_mlx", library_function="library_path"),
    start_patterns=(LogPattern("version_mismatch", r"(?P<why>MLXExecutionProvider requires ONNX Runtime [^(]*)"),),
    remedies={
        "not_in_build": Remedy(
            "on macOS 14 with Apple silicon, install its plugin for onnxruntime",
            ("pip", "install", "onnxruntime-ep-mlx"),
        ),
        "device_missing": NO_GPU,
    },
)

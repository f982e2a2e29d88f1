"""NVIDIA GPUs through TensorRT (TensorrtExecutionProvider, not NvTensorRTRTXExecutionProvider). Only run without a GPU.

It compiles subgraphs for minutes, so it is not in the default chain. Options: the Python bindings of onnxruntime-gpu
1.31.1 and TensorrtExecutionProviderInfo.
"""

from dataclasses import replace

from partita.observations.patterns import LogPattern
from partita.providers.base import Provider
from partita.providers.cuda import DRIVER, NO_GPU, WHEELS
from partita.remedies import Remedy

TENSORRT = Remedy("install TensorRT 10 for CUDA 13 and add the folder of its libraries to LD_LIBRARY_PATH")

PROVIDER = Provider(
    name="tensorrt",
    ort_name="TensorrtExecutionProvider",
    aliases=("trt",),
    wheels=("onnxruntime-gpu",),
    device_memory="Cuda",
    compiles=True,
    preload=True,
    any_option=True,
    libraries={"libcuda.so.1": DRIVER, "libnvinfer": TENSORRT, "libnvonnxparser": TENSORRT},
    node_patterns=(
        LogPattern("subgraph_rejected", r"(?P<why>\[TensorRT EP\] No graph will run on TensorRT execution provider)"),
    ),
    remedies={
        "library_missing": replace(WHEELS, text=f"{TENSORRT.text}, and {WHEELS.text}"),
        "device_missing": NO_GPU,
        "version_mismatch": TENSORRT,
        "initialisation_failed": Remedy("try CUDA, which needs no TensorRT", options=("--provider", "cuda")),
    },
)

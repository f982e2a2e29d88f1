"""NVIDIA RTX GPUs through TensorRT for RTX, as the plugin onnxruntime-ep-nv-tensorrt-rtx-cu13 0.5. Untested.

Options: tensorrt_rtx_provider_options.h in the wheel. Of its wheels for CUDA 12, name the library with
--provider-library.
"""

from partita.providers.base import Plugin, Provider
from partita.providers.cuda import DRIVER, NO_GPU
from partita.remedies import Remedy

WHEEL = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
AGAIN = Remedy("reinstall it", ("pip", "install", "--force-reinstall", "--no-deps", WHEEL))

PROVIDER = Provider(
    name="tensorrt_rtx",
    ort_name="NvTensorRTRTXExecutionProvider",
    aliases=("nvtensorrtrtx", "trtrtx"),
    suggested_for=("rtx",),
    device_memory="Cuda",
    compiles=True,
    plugin=Plugin(WHEEL, "onnxruntime_ep_nv_tensorrt_rtx"),
    any_option=True,
    libraries={"libcuda.so.1": DRIVER},
    remedies={
        "library_missing": AGAIN,
        "device_missing": NO_GPU,
        "initialisation_failed": Remedy("try CUDA, which needs no TensorRT", options=("--provider", "cuda")),
    },
)

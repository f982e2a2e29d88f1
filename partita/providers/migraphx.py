"""AMD GPUs through MIGraphX. Untested. It compiles for every new input shape, so it is not in the default chain.

Part of the wheel onnxruntime-migraphx (newest version 1.27.1). Options: migraphx_execution_provider_info.h of ONNX
Runtime.
"""

from partita.providers.base import Provider
from partita.remedies import Remedy

ROCM = Remedy("install ROCm and its MIGraphX package, in the version that the wheel names")

NO_GPU = Remedy("run it on a machine with an AMD GPU that ROCm supports")

PROVIDER = Provider(
    name="migraphx",
    ort_name="MIGraphXExecutionProvider",
    aliases=("amd",),
    suggested_for=("rocm", "hip", "radeon"),
    wheels=("onnxruntime-migraphx",),
    device_memory="MIGraphX",
    compiles=True,
    any_option=True,
    remedies={
        "library_missing": ROCM,
        "device_missing": NO_GPU,
        "version_mismatch": ROCM,
        "initialisation_failed": Remedy("check GPU and driver", ("rocminfo",)),
    },
)

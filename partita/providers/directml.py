"""GPUs on Windows through DirectML. Untested.

Part of the wheel onnxruntime-directml (newest version 1.24.4). Options: dml_provider_factory.cc of ONNX Runtime.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import CPU_PREFERRED, Provider
from partita.remedies import Remedy

NO_GPU = Remedy("it needs a GPU with a DirectX 12 driver")

PROVIDER = Provider(
    name="directml",
    ort_name="DmlExecutionProvider",
    aliases=("dml",),
    suggested_for=("directx", "dx12", "d3d12", "windows"),
    wheels=("onnxruntime-directml",),
    device_memory="DML",
    preferred_attention="gqa",
    rank=60,
    any_option=True,
    node_patterns=(CPU_PREFERRED,),
    start_patterns=(
        LogPattern("device_missing", r"(?P<why>No GPUs or NPUs detected\.)"),
        LogPattern("device_missing", r"(?P<why>No devices detected that match the filter criteria\.)"),
    ),
    remedies={
        "not_in_build": Remedy(
            "on Windows, in an environment without another ONNX Runtime", ("pip", "install", "onnxruntime-directml")
        ),
        "device_missing": NO_GPU,
    },
)

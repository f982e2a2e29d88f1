"""AMD GPUs through MIGraphX. Untested. It compiles for every new input shape, so it is not in the default chain.

Part of the wheel onnxruntime-migraphx (newest version 1.27.1). Options: migraphx_execution_provider_info.h of ONNX
Runtime, without pointers.
"""

from partita.providers.base import Library, Option, Provider, choice
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
    options=(
        Option("device_id", "int", "0", "number of the GPU"),
        Option("migraphx_fp16_enable", "bool", "0", "let MIGraphX compute in float16"),
        Option("migraphx_bf16_enable", "bool", "0", "let MIGraphX compute in bfloat16"),
        Option("migraphx_fp8_enable", "bool", "0", "let MIGraphX compute in float8"),
        Option("migraphx_int8_enable", "bool", "0", "let MIGraphX compute in int8"),
        Option("migraphx_int8_calibration_table_name", "text", "", "calibration table for int8"),
        Option("migraphx_int8_use_native_calibration_table", "bool", "0", "the table has MIGraphX's own format"),
        Option("migraphx_exhaustive_tune", "bool", "0", "try every kernel while compiling"),
        Option("migraphx_mem_limit", "int", "18446744073709551615", "largest size of the memory arena, in bytes"),
        choice("migraphx_arena_extend_strategy", "kNextPowerOfTwo kSameAsRequested", "how the memory arena grows"),
        Option("migraphx_model_cache_dir", "path", "", "folder that keeps compiled models"),
    ),
    libraries=(Library("libmigraphx_c.so.3", ROCM),),
    remedies={
        "library_missing": ROCM,
        "device_missing": NO_GPU,
        "version_mismatch": ROCM,
        "initialisation_failed": Remedy("check GPU and driver", ("rocminfo",)),
    },
)

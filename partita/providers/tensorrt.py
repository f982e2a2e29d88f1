"""NVIDIA GPUs through TensorRT (TensorrtExecutionProvider, not NvTensorRTRTXExecutionProvider).

It compiles subgraphs for minutes, so it is not in the default chain. Options are from the Python bindings of
onnxruntime-gpu 1.31.1 and TensorrtExecutionProviderInfo, without pointers and raw bytes; libraries are the ELF
dependencies of libonnxruntime_providers_tensorrt.so.
"""

from partita.observations.patterns import LogPattern
from partita.providers.base import Library, Option, Provider
from partita.providers.cuda import DRIVER, NO_GPU, WHEELS
from partita.remedies import Remedy

TENSORRT = Remedy("install TensorRT 10 for CUDA 13 and add the folder of its libraries to LD_LIBRARY_PATH")


def _switch(name: str, meaning: str) -> Option:
    """An option that is off by default."""
    return Option(name, "bool", "False", meaning, off_on=("False", "True"))


PROVIDER = Provider(
    name="tensorrt",
    ort_name="TensorrtExecutionProvider",
    aliases=("trt",),
    wheels=("onnxruntime-gpu",),
    device_memory="Cuda",
    compiles=True,
    preload=True,
    options=(
        Option("device_id", "int", "0", "number of the GPU"),
        Option("trt_max_partition_iterations", "int", "1000", "maximum number of partitioning attempts"),
        Option("trt_min_subgraph_size", "int", "1", "minimum nodes of a subgraph"),
        Option("trt_max_workspace_size", "int", "1073741824", "maximum workspace of an engine, in bytes"),
        _switch("trt_fp16_enable", "let TensorRT compute in float16"),
        _switch("trt_bf16_enable", "let TensorRT compute in bfloat16"),
        _switch("trt_int8_enable", "let TensorRT compute in int8"),
        Option("trt_int8_calibration_table_name", "text", "", "calibration table for int8"),
        _switch("trt_int8_use_native_calibration_table", "the table is TensorRT's own, not ONNX Runtime's"),
        _switch("trt_dla_enable", "use the deep learning accelerator of a Jetson"),
        Option("trt_dla_core", "int", "0", "number of the accelerator"),
        _switch("trt_dump_subgraphs", "write the subgraphs as ONNX files to the working folder"),
        _switch("trt_engine_cache_enable", "keep compiled engines on disk"),
        Option("trt_engine_cache_path", "path", "", "folder of the compiled engines"),
        Option("trt_engine_cache_prefix", "text", "", "prefix of engine file names"),
        _switch("trt_weight_stripped_engine_enable", "engines without weights, refitted when loaded"),
        Option("trt_onnx_model_folder_path", "path", "", "folder of the ONNX file for refitting engines"),
        _switch("trt_engine_decryption_enable", "engines on disk are encrypted"),
        Option("trt_engine_decryption_lib_path", "path", "", "library that decrypts engines"),
        _switch("trt_force_sequential_engine_build", "build engines one after the other"),
        _switch("trt_context_memory_sharing_enable", "engines share their scratch memory"),
        _switch("trt_layer_norm_fp32_fallback", "compute layer norms in float32 when float16 is on"),
        _switch("trt_timing_cache_enable", "keep kernel timings on disk, so that later builds are faster"),
        Option("trt_timing_cache_path", "path", "", "folder of the kernel timings"),
        _switch("trt_force_timing_cache", "use timings of another GPU of the same compute capability"),
        _switch("trt_detailed_build_log", "log every step of a build"),
        _switch("trt_build_heuristics_enable", "shorten a build by heuristics"),
        _switch("trt_sparsity_enable", "use structured sparsity of weights"),
        Option("trt_builder_optimization_level", "int", "3", "0 builds fastest, 5 runs fastest"),
        Option("trt_auxiliary_streams", "int", "-1", "extra streams per engine; -1: TensorRT decides"),
        Option("trt_tactic_sources", "text", "", "libraries to take kernels from, e.g. -CUDNN,+CUBLAS"),
        Option("trt_extra_plugin_lib_paths", "text", "", "libraries with TensorRT plugins"),
        Option("trt_profile_min_shapes", "text", "", "smallest input shapes: name:1x8,name:1x8"),
        Option("trt_profile_max_shapes", "text", "", "largest input shapes"),
        Option("trt_profile_opt_shapes", "text", "", "input shapes to optimise for"),
        _switch("trt_cuda_graph_enable", "capture each engine as a CUDA graph"),
        _switch("trt_engine_hw_compatible", "engines that also run on later GPUs than this one"),
        Option("trt_op_types_to_exclude", "text", "", "operators to leave to the next provider, comma-separated"),
    ),
    libraries=(
        Library("libnvinfer.so.10", TENSORRT),
        Library("libnvonnxparser.so.10", TENSORRT),
        Library("libcudart.so.13", WHEELS),
        Library("libcublas.so.13", WHEELS),
        Library("libcudnn.so.9", WHEELS),
        Library("libcuda.so.1", DRIVER),
    ),
    node_patterns=(
        LogPattern("subgraph_rejected", r"(?P<why>\[TensorRT EP\] No graph will run on TensorRT execution provider)"),
    ),
    remedies={
        "library_missing": Remedy(
            "install TensorRT 10 for CUDA 13 and add the folder of its libraries to LD_LIBRARY_PATH, and get CUDA 13 "
            "and cuDNN 9 as Python packages",
            ("pip", "install", "onnxruntime-gpu[cuda,cudnn]"),
        ),
        "device_missing": NO_GPU,
        "version_mismatch": TENSORRT,
        "initialisation_failed": Remedy("try CUDA, which needs no TensorRT", options=("--provider", "cuda")),
    },
)

"""NVIDIA RTX GPUs through TensorRT for RTX, as the plugin onnxruntime-ep-nv-tensorrt-rtx-cu13 0.5. Untested.

Options are from tensorrt_rtx_provider_options.h in the wheel, without pointers. Of its wheels for CUDA 12, name the
library with --provider-library.
"""

from partita.providers.base import Library, Option, Plugin, Provider, choice
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
    plugin=Plugin(WHEEL, "onnxruntime_ep_nv_tensorrt_rtx", no_device=NO_GPU),
    options=(
        Option("device_id", "int", "0", "number of the GPU"),
        Option("nv_max_workspace_size", "int", "0", "maximum workspace of a build, in bytes; 0: TensorRT decides"),
        Option("nv_max_shared_mem_size", "int", "0", "maximum shared memory of a kernel, in bytes; 0: no limit"),
        Option("nv_dump_subgraphs", "bool", "0", "write the subgraphs to the working folder"),
        Option("nv_detailed_build_log", "bool", "0", "log every step of a build"),
        Option("nv_profile_min_shapes", "text", "", "smallest input shapes: name:1x8;name:1x8"),
        Option("nv_profile_max_shapes", "text", "", "largest input shapes"),
        Option("nv_profile_opt_shapes", "text", "", "input shapes to optimise for"),
        Option("nv_multi_profile_enable", "bool", "0", "several sets of shapes in one session"),
        Option("enable_cuda_graph", "bool", "0", "capture CUDA graphs; needs fixed input shapes"),
        Option("nv_use_external_data_initializer", "bool", "0", "keep the weights outside the engine"),
        Option("nv_runtime_cache_path", "path", "", "folder that keeps compiled engines"),
        Option("nv_weight_streaming_budget", "text", "0", "weights in GPU memory: bytes, 512M or 50%; 0: all"),
        Option("nv_op_types_to_exclude", "text", "", "operators to leave to the next provider, comma-separated"),
        Option("nv_enable_profiling", "bool", "0", "measure the time of each layer"),
        Option("nv_profiling_output_file", "path", "", "file of these times"),
        Option("nv_use_sync_gpu_allocator", "bool", "0", "allocate with cudaMalloc, not cudaMallocAsync"),
        Option("nv_persistent_context_memory", "bool", "0", "keep scratch memory between runs"),
        Option(
            "nv_multi_rotary_cache_concat_offset", "int", "0", "position at which LongRoPE models change frequencies"
        ),
        Option("nv_weight_stripped_engine_enable_experimental", "bool", "0", "engines without weights"),
        choice("nv_target_sm", "sm86 sm89 sm120 sm121", "GPU to compile for", default=""),
    ),
    libraries=(
        Library("libcuda.so.1", DRIVER),
        Library("libcudart.so.13", AGAIN),
        Library("libtensorrt_rtx.so.1", AGAIN),
        Library("libtensorrt_onnxparser_rtx.so.1", AGAIN),
    ),
    remedies={
        "not_in_build": Remedy("install its plugin for onnxruntime", ("pip", "install", WHEEL)),
        "library_missing": AGAIN,
        "device_missing": NO_GPU,
        "initialisation_failed": Remedy("try CUDA, which needs no TensorRT", options=("--provider", "cuda")),
    },
)

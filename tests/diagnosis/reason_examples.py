"""A node for each reason that applies to it: the examples of docs/reasons.md, and the first test of every reason."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.observations.codes import ProviderCode, ReasonCode
from partita.observations.facts import OPTION, NodeProbe, ProbeRun, Substitution
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry


def _unavailable(code: ProviderCode, provider: str, evidence: str, remedy: str) -> Context:
    """A node on a provider that is unavailable for this reason."""
    entry = ChainEntry(provider=provider, status="unavailable", reason=code, evidence=evidence, remedy=remedy)
    return Context(node="model.layers.0.mlp.up_proj/MatMul", op_type="MatMul", skipped=entry)


EXAMPLES: dict[ReasonCode, Context] = {
    "not_in_build": _unavailable(
        "not_in_build",
        "WebGpuExecutionProvider",
        "onnxruntime 1.31.1 offers CPUExecutionProvider",
        "pip install onnxruntime-webgpu in an environment without another ONNX Runtime",
    ),
    "library_missing": _unavailable(
        "library_missing",
        "CUDAExecutionProvider",
        "libcublasLt.so.13: cannot open shared object file: No such file or directory",
        'pip install "onnxruntime-gpu[cuda,cudnn]"',
    ),
    "device_missing": _unavailable(
        "device_missing",
        "WebGpuExecutionProvider",
        "Failed to get a WebGPU adapter: No supported adapters.",
        "install a Vulkan driver for the GPU and the loader",
    ),
    "version_mismatch": _unavailable(
        "version_mismatch",
        "CUDAExecutionProvider",
        "CUDA driver version is insufficient for CUDA runtime version",
        "update the NVIDIA driver",
    ),
    "duplicate_runtime": _unavailable(
        "duplicate_runtime",
        "CUDAExecutionProvider",
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are installed side by side",
        "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
    ),
    "option_rejected": _unavailable(
        "option_rejected",
        "CUDAExecutionProvider",
        "Invalid device ID: 7, must be between 0 and 0 (inclusive)",
        "see `partita providers --json` for its options",
    ),
    "initialisation_failed": _unavailable(
        "initialisation_failed",
        "CUDAExecutionProvider",
        "the process was killed by SIGABRT while opening a session; its last output: terminate called "
        "without an active exception",
        "see the evidence; nvidia-smi shows whether GPU and driver answer",
    ),
    "pinned_by_user": Context(
        node="lm_head/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, webgpu_execution_provider.cc:620 GetCapability] Force CPU execution for node: "
            "lm_head/MatMul",
        ),
        patterns=(LogPattern("pinned_by_user", r"Force CPU execution for node: (?P<node>\S+)"),),
    ),
    "runtime_inserted": Context(
        node="Transpose_token_4",
        op_type="Transpose",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        is_added=True,
    ),
    "over_budget": Context(
        node="model.layers.7.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        budget="cuda.memory_budget_kb=1000",
        probe=NodeProbe("model.layers.7.mlp.up_proj/MatMul", (ProbeRun("as_is", "", "supported", ""),)),
        session_log=(
            "[I:onnxruntime:, graph_partitioner.cc:2466 Partition] Resource estimation for EP 'CUDAExecutionProvider': "
            "non-workspace memory: 526336 bytes, workspace memory: 263168 bytes, persistent prepack memory: 0 bytes, "
            "peak initialization scratch memory (not included in budget): 0 bytes, total estimated memory: 789504 "
            "bytes",
        ),
        patterns=(LogPattern("over_budget", r"(?P<why>Resource estimation for EP '[^']+': .*)"),),
    ),
    "option_needed": Context(
        node="/Range",
        op_type="Range",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Range",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun(
                    OPTION,
                    "webgpu.enableInt64=1",
                    "supported",
                    "",
                    substitution=Substitution("webgpu.enableInt64=1", "webgpu.enableInt64=0"),
                ),
            ),
        ),
    ),
    "dynamic_shape": Context(
        node="/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="QNNExecutionProvider", status="active"),
        probe=NodeProbe(
            "/MatMul",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("static_shape", "all sizes fixed", "supported", ""),
            ),
        ),
    ),
    "no_kernel_type": Context(
        node="model.layers.0.self_attn/GroupQueryAttention",
        op_type="GroupQueryAttention",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        probe=NodeProbe(
            "model.layers.0.self_attn/GroupQueryAttention",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("type", "float16 in place of float32", "supported", ""),
                ProbeRun("opset", "an older one", "rejected", ""),
            ),
        ),
    ),
    "no_kernel_version": Context(
        node="/Reshape",
        op_type="Reshape",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Reshape",
            (
                ProbeRun(
                    "as_is", "", "rejected", "CUDA kernel not found in registries for Op type: Reshape node name: probe"
                ),
                ProbeRun("opset", "Reshape of opset 23 in place of 25", "supported", ""),
            ),
        ),
    ),
    "attribute_unsupported": Context(
        node="decoder/ConvTranspose",
        op_type="ConvTranspose",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        log=(
            "[W:onnxruntime:, cuda_execution_provider.cc:3120 GetCapability] Dropping the ConvTranspose node: "
            "decoder/ConvTranspose to CPU because it requires asymmetric padding which the CUDA EP currently does not "
            "support",
        ),
        patterns=(
            LogPattern(
                "attribute_unsupported",
                r"Dropping the (?P<op>ConvTranspose|NhwcConv) node: (?P<node>\S+) to CPU because (?P<why>.*)",
            ),
        ),
    ),
    "no_kernel_op": Context(
        node="model.rotary_emb/Gather",
        op_type="Gather",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries "
            "for Op type: Gather node name: model.rotary_emb/Gather",
        ),
        patterns=(
            LogPattern(
                "no_kernel_op",
                r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)",
            ),
        ),
        probe=NodeProbe(
            "model.rotary_emb/Gather",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("type", "int32 in place of int64", "rejected", ""),
                ProbeRun("opset", "Gather of opset 11 in place of 13", "rejected", ""),
            ),
        ),
    ),
    "subgraph_rejected": Context(
        node="model.layers.0.mlp/Mul",
        op_type="Mul",
        skipped=ChainEntry(provider="TensorrtExecutionProvider", status="active"),
        patterns=(
            LogPattern(
                "subgraph_rejected", r"(?P<why>\[TensorRT EP\] No graph will run on TensorRT execution provider)"
            ),
        ),
        session_log=(
            "[W:onnxruntime:Default, tensorrt_execution_provider.cc:2790 GetCapability] [TensorRT EP] No graph will "
            "run on TensorRT execution provider",
        ),
    ),
    "cpu_preferred": Context(
        node="/Concat",
        op_type="Concat",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, fallback_cpu_capability.cc:171 operator()] ORT optimization- Force fallback to CPU "
            "execution for node: /Concat because the CPU execution path is deemed faster than overhead involved with "
            "execution on other EPs  capable of executing this node",
        ),
        patterns=(LogPattern("cpu_preferred", r"Force fallback to CPU execution for node: (?P<node>\S+) because"),),
    ),
    "not_claimed": Context(
        node="/Add",
        op_type="Add",
        skipped=ChainEntry(provider="OpenVINOExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Add",
            (ProbeRun("as_is", "", "supported", ""),),
        ),
    ),
    "unexplained": Context(
        node="model.norm/Mul",
        op_type="Mul",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
    ),
}

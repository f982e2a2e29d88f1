"""A node for each reason that applies to it: the examples of docs/reasons.md, and the first test of every reason."""

from __future__ import annotations

from typing import Any

from partita.diagnosis.evidence import Context
from partita.observations.codes import ProviderCode, ReasonCode
from partita.observations.facts import OPTION, NodeProbe, ProbeRun, Substitution
from partita.observations.patterns import LogPattern
from partita.observations.records import ChainEntry


def _unavailable(code: ProviderCode, provider: str, evidence: str, remedy: str) -> Context:
    """A node on a provider that is unavailable for this reason."""
    entry = ChainEntry(
        provider=f"{provider}ExecutionProvider", status="unavailable", reason=code, evidence=evidence, remedy=remedy
    )
    return Context(node="model.layers.0.mlp.up_proj/MatMul", op_type="MatMul", skipped=entry)


def _not_on(provider: str, node: str, *trials: ProbeRun, **changes: Any) -> Context:
    """A node that an active provider does not run, with experiments; its operator is the end of its name."""
    entry = ChainEntry(provider=f"{provider}ExecutionProvider", status="active")
    probe = NodeProbe(node, trials) if trials else None
    return Context(node, node.rpartition("/")[2].partition("_")[0], entry, probe=probe, **changes)


def _logged(
    code: ReasonCode, provider: str, node: str, line: str, pattern: str, *trials: ProbeRun, budget: str = ""
) -> Context:
    """The same with a line of the native log, about the node or the graph, and the provider's pattern for it."""
    given = {"log": (line,), "session_log": (line,), "patterns": (LogPattern(code, pattern),)}
    return _not_on(provider, node, *trials, budget=budget, **given)


LEFT, TAKEN = ProbeRun("as_is", "", "rejected", ""), ProbeRun("as_is", "", "supported", "")
GATHER, RANGE_OPTION = "model.rotary_emb/Gather", "webgpu.enableInt64"
EXAMPLES: dict[ReasonCode, Context] = {
    "not_in_build": _unavailable(
        "not_in_build",
        "WebGpu",
        "onnxruntime 1.31.1 offers CPUExecutionProvider",
        "pip install onnxruntime-webgpu in an environment without another ONNX Runtime",
    ),
    "library_missing": _unavailable(
        "library_missing",
        "CUDA",
        "libcublasLt.so.13: cannot open shared object file: No such file or directory",
        'pip install "onnxruntime-gpu[cuda,cudnn]"',
    ),
    "device_missing": _unavailable(
        "device_missing",
        "WebGpu",
        "Failed to get a WebGPU adapter: No supported adapters.",
        "install a Vulkan driver for the GPU and the loader",
    ),
    "version_mismatch": _unavailable(
        "version_mismatch",
        "CUDA",
        "CUDA driver version is insufficient for CUDA runtime version",
        "update the NVIDIA driver",
    ),
    "duplicate_runtime": _unavailable(
        "duplicate_runtime",
        "CUDA",
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are installed side by side",
        "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
    ),
    "option_rejected": _unavailable(
        "option_rejected",
        "CUDA",
        "Invalid device ID: 7, must be between 0 and 0 (inclusive)",
        "see `partita providers --json` for its options",
    ),
    "initialisation_failed": _unavailable(
        "initialisation_failed",
        "CUDA",
        "the process was killed by SIGABRT while opening a session; its last output: terminate called "
        "without an active exception",
        "see the evidence; nvidia-smi shows whether GPU and driver answer",
    ),
    "pinned_by_user": _logged(
        "pinned_by_user",
        "WebGpu",
        "lm_head/MatMul",
        "[I:onnxruntime:, webgpu_execution_provider.cc:620 GetCapability] Force CPU execution for node: lm_head/MatMul",
        r"Force CPU execution for node: (?P<node>\S+)",
    ),
    "runtime_inserted": _not_on("WebGpu", "Transpose_token_4", is_added=True),
    "over_budget": _logged(
        "over_budget",
        "CUDA",
        "model.layers.7.mlp.up_proj/MatMul",
        "[I:onnxruntime:, graph_partitioner.cc:2466 Partition] Resource estimation for EP 'CUDAExecutionProvider': "
        "non-workspace memory: 526336 bytes, workspace memory: 263168 bytes, persistent prepack memory: 0 bytes, "
        "peak initialization scratch memory (not included in budget): 0 bytes, total estimated memory: 789504 bytes",
        r"(?P<why>Resource estimation for EP '[^']+': .*)",
        TAKEN,
        budget="cuda.memory_budget_kb=1000",
    ),
    "option_needed": _not_on(
        "WebGpu",
        "/Range",
        LEFT,
        ProbeRun(
            OPTION,
            f"{RANGE_OPTION}=1",
            "supported",
            "",
            substitution=Substitution(f"{RANGE_OPTION}=1", f"{RANGE_OPTION}=0"),
        ),
    ),
    "dynamic_shape": _not_on("QNN", "/MatMul", LEFT, ProbeRun("static_shape", "all sizes fixed", "supported", "")),
    "no_kernel_type": _not_on(
        "CUDA",
        "model.layers.0.self_attn/GroupQueryAttention",
        LEFT,
        ProbeRun("type", "float16 in place of float32", "supported", ""),
        ProbeRun("opset", "an older one", "rejected", ""),
    ),
    "no_kernel_version": _not_on(
        "CUDA",
        "/Reshape",
        ProbeRun("as_is", "", "rejected", "CUDA kernel not found in registries for Op type: Reshape node name: probe"),
        ProbeRun("opset", "Reshape of opset 23 in place of 25", "supported", ""),
    ),
    "attribute_unsupported": _logged(
        "attribute_unsupported",
        "CUDA",
        "decoder/ConvTranspose",
        "[W:onnxruntime:, cuda_execution_provider.cc:3120 GetCapability] Dropping the ConvTranspose node: "
        "decoder/ConvTranspose to CPU because it requires asymmetric padding which the CUDA EP currently does not "
        "support",
        r"Dropping the (?P<op>ConvTranspose|NhwcConv) node: (?P<node>\S+) to CPU because (?P<why>.*)",
    ),
    "no_kernel_op": _logged(
        "no_kernel_op",
        "WebGpu",
        GATHER,
        "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries for "
        f"Op type: Gather node name: {GATHER}",
        r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)",
        LEFT,
        ProbeRun("type", "int32 in place of int64", "rejected", ""),
        ProbeRun("opset", "Gather of opset 11 in place of 13", "rejected", ""),
    ),
    "subgraph_rejected": _logged(
        "subgraph_rejected",
        "Tensorrt",
        "model.layers.0.mlp/Mul",
        "[W:onnxruntime:Default, tensorrt_execution_provider.cc:2790 GetCapability] [TensorRT EP] No graph will run on "
        "TensorRT execution provider",
        r"(?P<why>\[TensorRT EP\] No graph will run on TensorRT execution provider)",
    ),
    "cpu_preferred": _logged(
        "cpu_preferred",
        "CUDA",
        "/Concat",
        "[I:onnxruntime:, fallback_cpu_capability.cc:171 operator()] ORT optimization- Force fallback to CPU execution "
        "for node: /Concat because the CPU execution path is deemed faster than overhead involved with execution on "
        "other EPs  capable of executing this node",
        r"Force fallback to CPU execution for node: (?P<node>\S+) because",
    ),
    "not_claimed": _not_on("OpenVINO", "/Add", TAKEN),
    "unexplained": _not_on("WebGpu", "model.norm/Mul"),
}

"""What each environment offers, as data: the contract tests are parametrised with it, and `make` creates it.

A fact stands here when it was seen in that environment, with the versions in constraints/NAME.txt. Nothing here imports
ONNX Runtime or looks at the machine: every environment's tests are collected in the main one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MAIN = "main"

Kind = Literal[
    "host",  # computes in host memory, one kernel per node
    "device",  # has memory of its own: Memcpy nodes, device buffers
    "compiling",  # compiles whole subgraphs; a subgraph is one node of the plan
]


@dataclass(frozen=True)
class Target:
    """A provider that an environment can run on, besides cpu."""

    provider: str
    """After --provider."""
    ort_name: str
    kind: Kind
    with_cpu: tuple[str, ...] = ()
    """Packages that `PROVIDER,cpu` runs, giving the tokens of cpu alone."""
    alone: tuple[str, ...] = ()
    """Packages that run on it and nothing else."""
    whole: tuple[str, ...] = ()
    """Packages of which it takes every node, without a Memcpy node in decode, and whose known answer it computes."""
    refused_alone: tuple[str, ...] = ()
    """Packages with nodes that it does not take: exit code 3 and their table without cpu in the chain."""
    fails: tuple[str, ...] = ()
    """Packages whose session cannot be created with it in the chain, cpu or not: exit code 3."""
    foreign: tuple[str, ...] = ()
    """Sample folders of other exporters that `PROVIDER,cpu` runs, giving the tokens of cpu alone."""
    foreign_others: tuple[str, ...] = ()
    """Those that it runs with other tokens, which a plain loop over ONNX Runtime gives as well."""
    foreign_ends: tuple[str, ...] = ()
    """Those that end the process, in a plain loop as well."""
    foreign_lacks: tuple[str, ...] = ()
    """Those that the device of the tests cannot run: exit code 3."""
    rows: tuple[str, ...] = ()
    """Packages of several rows, of which `PROVIDER,cpu` gives each the tokens that it gives it alone."""
    adapters: tuple[str, ...] = ()
    """Packages made by hand, by the shapes of their graphs, whose rows it gives adapters of their own."""
    constant_defaults: tuple[str, ...] = ()
    """Those whose inputs for adapters have a default, which it would take for a constant: exit code 3."""
    option: tuple[str, str] = ("", "")
    """A provider option of type int or bool, and a value it takes."""
    wheel: str = ""
    """Module of the wheel that carries it as a library; empty when it is part of ONNX Runtime."""
    captured: tuple[str, ...] = ()
    """Packages whose decode steps it records and replays, with the tokens of the CPU."""
    off_capture: dict[str, str] = field(default_factory=dict)
    """Packages with nodes that it does not take, which no session that records may have, and the operator of one."""
    miscaptured: tuple[str, ...] = ()
    """Packages that it runs whole, and of which it leaves something out when it records."""
    needs: str = ""
    """What a machine must have, in words; empty when the wheel is enough."""
    processor: str = ""
    """The only vendor of processors that it runs on, as CPUID tells it; empty where any will do."""


@dataclass(frozen=True)
class Environment:
    """One environment: an ONNX Runtime wheel, and what can be expected of it."""

    name: str
    python_of: str
    """The environment whose Python it runs in: its own, or the main one."""
    targets: tuple[Target, ...] = ()
    library_missing: tuple[str, ...] = ()
    """Providers in the build whose libraries are not there."""
    device_missing: tuple[str, ...] = ()
    """Providers whose library loads and finds no device."""
    not_in_build: tuple[str, ...] = ()
    by_default: bool = True
    file: str = ""
    """A file that a machine must have for it to be tested at all, and `why` in words."""
    why: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that are set unless they are set already."""

    @property
    def usable(self) -> tuple[str, ...]:
        """Providers that a session can run on."""
        return (*(target.provider for target in self.targets), "cpu")


FITTING = ("llama", "qwen3", "gemma3_text", "demo")
PRIMITIVES = tuple(f"{model}-primitives-fp32" for model in FITTING)
ROWS = ("llama-gqa-fp32-rows", "llama-primitives-fp32-rows")
SOFTWARE_VULKAN = {"VK_ICD_FILENAMES": "/usr/lib/chromium/vk_swiftshader_icd.json", "XDG_RUNTIME_DIR": "/tmp"}
"""Debian's chromium package has SwiftShader, a Vulkan driver that computes on the CPU."""
WEBGPU = Target(
    provider="webgpu",
    ort_name="WebGpuExecutionProvider",
    kind="device",
    with_cpu=("llama-gqa-fp32", "llama-onnx24-fp32", "llama-gqa-fp32-static", "demo-gqa-fp32"),
    alone=("llama-gqa-fp32",),
    whole=PRIMITIVES,
    refused_alone=("llama-onnx24-fp32",),
    rows=ROWS,
    adapters=("any", "pair"),
    option=("enableGraphCapture", "0"),
    foreign=("genai-int4-cpu",),
    foreign_others=("genai-fp32-cpu",),
    foreign_ends=("optimum",),
    foreign_lacks=("genai-int4-webgpu", "genai-fp16-cuda"),
    captured=("llama-gqa-fp32", "llama-gqa-fp32-static", "qwen3-primitives-fp32"),
    off_capture={"llama-onnx24-fp32": "TensorScatter"},
    miscaptured=("demo-gqa-fp32",),
    needs="a WebGPU adapter: a GPU with a Vulkan driver, or SwiftShader from Debian's chromium package",
)
OPENVINO = Target(
    provider="openvino",
    ort_name="OpenVINOExecutionProvider",
    kind="compiling",
    with_cpu=("llama-gqa-fp32", "llama-gqa-fp32-static", "demo-gqa-fp32"),
    whole=PRIMITIVES,
    refused_alone=("llama-gqa-fp32",),
    foreign=("optimum", "genai-fp32-cpu", "genai-int4-cpu"),
    rows=ROWS,
    adapters=("pair",),
    constant_defaults=("any",),
    option=("num_of_threads", "1"),
)
OPENVINO_PLUGIN = Target(
    provider="openvino",
    ort_name="OpenVINOExecutionProvider",
    kind="compiling",
    wheel="onnxruntime_ep_openvino",
    with_cpu=("llama-gqa-fp32",),
    whole=PRIMITIVES,
    refused_alone=("llama-gqa-fp32",),
    processor="GenuineIntel",
)
QNN = Target(
    provider="qnn",
    ort_name="QNNExecutionProvider",
    kind="compiling",
    wheel="onnxruntime_qnn",
    whole=("demo-primitives-fp16-static",),
    rows=("llama-primitives-fp16-static-rows",),
    adapters=("pair",),
    fails=("llama-gqa-fp32", "llama-gqa-fp32-static"),
    foreign=("genai-fp32-cpu", "optimum", "genai-int4-cpu"),
)
"""Qualcomm's NPU backend in its host emulator, which computes in fp16: of packages no tokens are compared. Of foreign
folders it takes a few nodes, with the tokens of the CPU."""
CUDA = Target(
    provider="cuda",
    ort_name="CUDAExecutionProvider",
    kind="device",
    with_cpu=("llama-gqa-fp32", "llama-onnx24-fp32", "llama-gqa-fp32-static", "demo-gqa-fp32"),
    alone=("llama-gqa-fp16", "llama-onnx24-fp32", "llama-onnx24-fp16"),
    refused_alone=("llama-gqa-fp32",),
    option=("device_id", "0"),
    foreign=("optimum", "merged", "genai-fp32-cpu", "genai-int4-cpu", "genai-int4-webgpu"),
    rows=(*ROWS, "llama-gqa-fp16-rows"),
    adapters=("any", "pair"),
    captured=("llama-gqa-fp16", "llama-onnx24-fp32", "llama-onnx24-fp16", "qwen3-primitives-fp32"),
    off_capture={"llama-gqa-fp32": "GroupQueryAttention"},
    needs="an NVIDIA GPU with CUDA 13 and cuDNN 9",
)


ENVIRONMENTS: dict[str, Environment] = {
    entry.name: entry
    for entry in (
        Environment(MAIN, MAIN, library_missing=("cuda", "tensorrt"), not_in_build=("openvino", "webgpu", "qnn")),
        Environment("openvino", "openvino", (OPENVINO,), not_in_build=("cuda", "tensorrt", "webgpu", "qnn")),
        Environment("webgpu", "webgpu", (WEBGPU,), not_in_build=("cuda", "openvino", "qnn"), variables=SOFTWARE_VULKAN),
        Environment("qnn", "qnn", (QNN,), not_in_build=("cuda", "openvino", "webgpu")),
        Environment("plugins", "plugins", (OPENVINO_PLUGIN,), device_missing=("webgpu",), not_in_build=("cuda", "qnn")),
        Environment(
            "cuda",
            MAIN,
            (CUDA,),
            by_default=False,
            file="/dev/nvidiactl",
            why="this machine has no NVIDIA GPU, or no driver for it",
        ),
    )
}


def selected_by_default() -> tuple[str, ...]:
    """Environments that are tested when none is named."""
    return tuple(entry.name for entry in ENVIRONMENTS.values() if entry.by_default)

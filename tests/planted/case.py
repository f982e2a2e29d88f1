"""What a planted case is: a graph whose cause is known, because the same graph without it is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

NO_FALLBACK = "no fallback"
"""Expected in place of a code where the provider has all of the graph, or nothing of it executes."""
Kind = Literal["logged", "probed", "derived"]

EVIDENCE: Mapping[str, tuple[Kind, ...]] = {
    "not_in_build": ("logged", "derived"),
    "library_missing": ("logged", "derived"),
    "device_missing": ("logged", "derived"),
    "version_mismatch": ("logged", "derived"),
    "duplicate_runtime": ("logged", "derived"),
    "option_rejected": ("logged", "derived"),
    "initialisation_failed": ("logged", "derived"),
    # A log line says that no kernel was found, and never why: without an experiment these three cannot be told apart.
    "no_kernel_op": ("logged", "probed"),
    "no_kernel_version": ("probed", "derived"),
    "no_kernel_type": ("probed", "derived"),
    "attribute_unsupported": ("logged", "probed"),
    "dynamic_shape": ("logged", "probed"),
    "cpu_preferred": ("logged",),
    "subgraph_rejected": ("logged", "probed", "derived"),
    "pinned_by_user": ("logged", "derived"),
    "over_budget": ("logged", "probed"),
    "option_needed": ("probed",),
    "runtime_inserted": ("derived",),
    "not_claimed": ("probed", "derived"),
}
"""Kinds of evidence that can prove a code."""


@dataclass(frozen=True)
class Run:
    """One way to run a graph: what is planted, or its control, depends on these alone."""

    model: str
    """Graph text, see `graphs.py`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider, by their own names."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process."""
    library: str = ""
    """A library to compile and to use in place of what is installed: what to define in PLUGIN, as NAME=VALUE."""
    dry_run: bool = False
    """Over stub CUDA libraries."""


@dataclass(frozen=True)
class Case:
    """A planted cause, and the one code that is right."""

    name: str
    environment: str
    """Of tests/contract/expectations.py."""
    provider: str
    """First of the chain; the CPU follows it."""
    planted: str
    """The cause, in words."""
    expected: str
    run: Run
    control: Run | None = None
    """The same without the cause: here `node` is taken. None where only another machine or wheel could show it."""
    node: str = "planted"
    """Name of the node; empty when it has none, and is told by `op_type`."""
    op_type: str = ""
    plain_node: str = ""
    """Name that plain ONNX Runtime lists it by, where it runs by another that it was given afterwards."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `partita place`."""
    evidence: tuple[Kind, ...] = ()
    """Kinds that are accepted; empty for those of EVIDENCE."""
    says: str = ""
    """Words of the provider's own that the evidence has to have."""
    plain: bool = True
    """Plain ONNX Runtime, asked for the same run, does not put the node on the provider either."""
    two_wheels: str = ""
    """Name and version of a second wheel of ONNX Runtime that the environment claims to have."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of evidence that are accepted."""
        return self.evidence or EVIDENCE.get(self.expected, ())

    @property
    def command(self) -> str:
        """What is run; cases that differ in the node alone share one run."""
        return repr((self.environment, self.provider, self.run, self.arguments, self.two_wheels))


CONFIGURED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("cuda", "memory_budget_kb"): ("session.resource_cuda_partitioning_settings", "{},"),
}
"""Provider and option of Partita's -> entry of the session's configuration, and how it is written."""
PLUGIN = Path(__file__).with_name("failing_plugin.c")
"""A provider library that loads and gives an error."""
ORT_NAMES: Mapping[str, str] = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "qnn": "QNNExecutionProvider",
}
WHEELS: Mapping[tuple[str, str], str] = {
    ("qnn", "qnn"): "onnxruntime_qnn",
    ("plugins", "openvino"): "onnxruntime_ep_openvino",
    ("plugins", "webgpu"): "onnxruntime_ep_webgpu",
}
"""Environment and provider -> module of the wheel that carries its library."""
OPTION_PREFIX: Mapping[tuple[str, str], str] = {("webgpu", "webgpu"): "ep.webgpuexecutionprovider."}
"""Where options are entries of the session's configuration."""

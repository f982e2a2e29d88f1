"""The `Provider` record. Each provider file in this folder exposes one as `PROVIDER`; the file name is its key.

Does not import ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from partita.observations.patterns import KernelRow, LogPattern
from partita.remedies import Remedy

OTHER_RUNTIME = Remedy("install the ONNX Runtime that the library was built for")
OPTIONS = Remedy("look up its options", ("partita", "providers", "--json"))
"""For a provider that rejects an option; its message names the option."""

CPU_PREFERRED = LogPattern(
    "cpu_preferred",
    r"Force fallback to CPU execution for node: (?P<node>\S+) because (?P<why>the CPU execution path is deemed faster)",
)
"""Logged for providers that let ONNX Runtime move small shape computations to the CPU."""


@dataclass(frozen=True, slots=True)
class ProbeValue:
    """An option value with which a provider supports more nodes; probes try it on nodes that fell back."""

    value: str
    elements: tuple[str, ...] = ()
    """Only on nodes that have one of these element types; empty: any."""
    operators: tuple[str, ...] = ()
    """Only on nodes of these operators; empty: any."""


@dataclass(frozen=True, slots=True)
class Option:
    """One provider option. `kind` selects the validation of its value."""

    name: str
    kind: Literal["int", "bool", "choice", "text", "path"]
    default: str
    """Default of ONNX Runtime; empty if it depends on the machine."""
    meaning: str
    choices: tuple[str, ...] = ()
    """The values of a `choice`."""
    off_on: tuple[str, str] = ("0", "1")
    """The provider's spelling of the two values of a `bool`."""
    session_key: str = ""
    """Entry of the session configuration from which ONNX Runtime reads the option; empty: a provider option."""
    session_suffix: str = ""
    """Text to append to the value in that entry."""
    partita_option: bool = False
    """Partita reads the option; it is not passed to the provider."""
    minimum: int | None = None
    """Smallest value of an `int`."""
    probe_value: ProbeValue | None = None
    """A value with which the provider may support more nodes than with the default, if there is one."""


def choice(name: str, values: str, meaning: str, *, default: str | None = None) -> Option:
    """An option with a fixed set of values, separated by blanks. Default of ONNX Runtime: the first, or `default`."""
    listed = tuple(values.split())
    return Option(name, "choice", listed[0] if default is None else default, meaning, listed)


@dataclass(frozen=True, slots=True)
class Plugin:
    """A Python package with a provider library to register with a plain ONNX Runtime."""

    wheel: str
    """Distribution name, e.g. onnxruntime-qnn."""
    module: str
    """Module to import, e.g. onnxruntime_qnn."""
    path_options: tuple[tuple[str, str], ...] = ()
    """Provider options whose default is a path from the module: (option, function that returns the path)."""
    default_options: tuple[tuple[str, str], ...] = ()
    """Defaults of provider options: (option, value)."""
    yields_to: tuple[str, ...] = ()
    """Options that replace `path_options`: if the user sets one of them, no path is added."""
    ignores: tuple[str, ...] = ()
    """Options that the built-in provider accepts and this plugin ignores with a warning."""
    library_function: str = "get_library_path"
    """Function of the module that returns the path of its library."""
    no_device: Remedy | None = None
    """Remedy if the plugin offers no device; None: the provider's remedy for device_missing."""
    offered_devices: str = ""
    """Devices that it offers, if fewer than the provider supports: `devices of Intel`."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Format of quantised weights for a provider; probes may override it."""

    symmetric: bool = True
    """The zero point is the middle of the range; False: each block has an integer zero point."""
    accuracy_level: int = 0
    """accuracy_level of MatMulNBits: 4 allows 8-bit activations, 0 uses the type of the graph."""
    bias: bool = False
    """MatMulNBits adds the bias; False: an Add node does."""
    gather: bool = False
    """It supports GatherBlockQuantized for embeddings; used only where no probe can run."""
    experts: bool = False
    """Its QMoE matches that of the CPU provider for the same weights; if so, a probe decides on its use."""
    block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 32, 8: 32})
    """Bits -> block size."""
    activations: Literal["fp32", "fp16"] = "fp32"
    """Default of --activations."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Description of one execution provider."""

    name: str
    """Name on the command line, which is also the file name."""
    ort_name: str
    """ONNX Runtime's name, e.g. CPUExecutionProvider."""
    aliases: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    """Python packages whose ONNX Runtime contains this provider."""
    device_memory: str = "Cpu"
    """Name of the memory info of its tensors, as ONNX Runtime prints it."""
    preferred_attention: str = "onnx24"
    """Attention lowering of `--attention auto` where no probe can run."""
    suggested_for: tuple[str, ...] = ()
    """Lower-case words for which an error suggests this provider, e.g. gpu."""
    packed_weights: PackedWeights = PackedWeights()
    """Format of int8 and int4 packages."""
    rolling_caches: bool = False
    """Its GroupQueryAttention supports a rolling window cache (`sliding_window_cache`). False: it may accept the node
    and ignore the attribute.
    """
    alternating_options: Mapping[str, str] = field(default_factory=dict)
    """Default options of packages that alternate on the same cores, such as a draft package."""
    variables: tuple[str, ...] = ()
    """Environment variables that select its driver or device."""
    reads_back: bool = False
    """Copies from its memory between runs are correct, so outputs may stay on the device until they are read."""
    capture_option: str = ""
    """Option that turns on graph capture; empty if it has none."""
    even_rows: frozenset[str] = frozenset()
    """Operators with wrong results if the rows of a batch differ in length; no error is reported."""
    budget_option: str = ""
    """Option with the memory budget of its nodes; empty if it has none."""
    cache_option: str = ""
    """Option with Partita's folder of compiled graphs (EPContext nodes); empty if it has none."""
    rank: int = 0
    """Priority in the default chain, the highest first; 0: used only when named."""
    options: tuple[Option, ...] = ()
    libraries: Mapping[str, Remedy] = field(default_factory=dict)
    """Shared library that needs another remedy than `library_missing`, by the beginning of its name -> the remedy."""
    plugin: Plugin | None = None
    node_patterns: tuple[LogPattern, ...] = ()
    """Log lines about nodes that it does not support."""
    why_patterns: tuple[str, ...] = ()
    """Multi-line regular expressions with groups `node` and `why` for VERBOSE log lines about unsupported nodes, the
    most specific first. Used only in probes, which open one node.
    """
    message_patterns: tuple[LogPattern, ...] = ()
    """Its message about an unsupported node (`why`) -> the reason if no change of the node shows one; the first match
    applies. `no_kernel_op`: the message names no other cause."""
    start_patterns: tuple[LogPattern, ...] = ()
    """Log lines of a failed start; tried before the patterns shared by all providers."""
    remedies: Mapping[str, Remedy] = field(default_factory=dict)
    """Provider-level reason code -> remedy."""
    kernels: tuple[KernelRow, ...] = ()
    """Rows that name the kernel of a node, for operators with several; the first that fits applies."""
    debug_variables: tuple[str, ...] = ()
    """Environment variables with which it prints the kernels of a run; `place` sets them to 1."""
    logs_runs: bool = False
    """It logs at INFO in every run, not only when a session is opened."""
    constant_defaults: bool = False
    """It treats inputs with a default as constants and ignores the values of a run."""
    compiles: bool = False
    """It compiles a subgraph into one node; False: it runs node by node."""
    any_option: bool = False
    """Its options are not listed here and are passed on unchecked: providers that were not tested."""
    option_prefix: str = ""
    """Prefix of its options in the session configuration, for a built-in provider that ignores provider options; a
    plugin of the same provider reads provider options."""
    preload: bool = False
    """Its libraries may be in Python packages, which only ONNX Runtime's preload_dlls() finds."""
    software_devices: bool = False
    """A driver may offer it the CPU as a GPU, e.g. SwiftShader or llvmpipe for Vulkan. The provider is then usable, but
    not in the default chain."""
    library: Path | None = None
    """Path of the user's plugin library; None for a provider of ONNX Runtime or a Python package."""

    def names(self) -> tuple[str, ...]:
        """Every name a user may write for it, in lower case."""
        return (self.name, *self.aliases, self.ort_name.lower())

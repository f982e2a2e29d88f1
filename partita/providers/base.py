"""The provider record: what Partita knows about one execution provider, as data.

One file per provider in this folder exposes `PROVIDER`, one `Provider` record; the file name is the registry key.
Nothing here imports ONNX Runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from partita.observations.codes import ReasonCode
from partita.observations.log_pattern import LogPattern
from partita.remedies import Remedy

OTHER_RUNTIME = Remedy("install the ONNX Runtime that the library was built for")
OPTIONS = Remedy("look up its options", ("partita", "providers", "--json"))
"""For a provider that refuses an option; what it said names the option."""

OptionKind = Literal["int", "float", "bool", "choice", "text", "path"]


@dataclass(frozen=True, slots=True)
class Opens:
    """A value of an option with which a provider takes more nodes. Experiments try it on nodes that were left."""

    value: str
    elements: tuple[str, ...] = ()
    """Only on nodes that have one of these element types; empty: any."""
    operators: tuple[str, ...] = ()
    """Only on nodes of these operators; empty: any."""


@dataclass(frozen=True, slots=True)
class Option:
    """One provider option. `kind` decides how a value from the command line is checked."""

    name: str
    kind: OptionKind
    default: str
    """What ONNX Runtime takes when the option is left out; empty when that depends on the machine."""
    meaning: str
    choices: tuple[str, ...] = ()
    """The values of a `choice`."""
    off_on: tuple[str, str] = ("0", "1")
    """How this provider spells the two values of a `bool`."""
    session_key: str = ""
    """When not empty, ONNX Runtime itself reads the option, from this entry of the session configuration."""
    session_suffix: str = ""
    """What follows the value there."""
    ours: bool = False
    """Partita itself reads the option; the provider is not given it."""
    least: int | None = None
    """Smallest value of an `int`."""
    opens: Opens | None = None
    """The value that can make the provider take more nodes than the default does, where there is one."""


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library that a provider loads, and how to get it."""

    file: str
    """Name as the loader asks for it, e.g. libcublasLt.so.13."""
    what: str
    """The product it belongs to, e.g. cuBLAS 13."""
    remedy: Remedy


@dataclass(frozen=True, slots=True)
class Plugin:
    """A Python package that carries a provider as a library to be registered with a plain ONNX Runtime."""

    wheel: str
    """Distribution name, e.g. onnxruntime-qnn."""
    module: str
    """Module to import, e.g. onnxruntime_qnn; its `get_library_path()` names the library."""
    path_options: tuple[tuple[str, str], ...] = ()
    """Provider options whose default is a path that the module knows: (option, name of the function that says it)."""
    answers: tuple[tuple[str, str], ...] = ()
    """Provider options that the plugin gets unless the user gives them: (option, value)."""
    yields_to: tuple[str, ...] = ()
    """When the user gives one of these options, no path is added: they answer the same question."""
    ignores: tuple[str, ...] = ()
    """Options that the provider takes inside ONNX Runtime, and that this plugin ignores with a warning."""
    no_device: Remedy | None = None
    """What to do where it offers no device; None: what the provider says of a missing device."""
    takes: str = ""
    """The only devices that it offers, where that is less than the provider can compute on: `devices of Intel`."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """How integer weights are written for a provider, as far as it is known without asking it."""

    symmetric: bool = True
    """All blocks have the middle of the range as their zero point; False: each has an integer one of its own."""
    accuracy_level: int = 0
    """Of MatMulNBits: 4 lets it compute with 8-bit activations, 0 with those of the graph."""
    bias: bool = False
    """MatMulNBits takes the bias; False: an Add does."""
    gather: bool = False
    """It has GatherBlockQuantized, for embeddings; taken for granted only where it cannot be asked."""
    experts: bool = False
    """QMoE computes there what it computes on the CPU provider, from weights as they are; it is asked about then."""
    block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 32, 8: 32})
    """Weights that share a scale, by bits."""
    activations: Literal["fp32", "fp16"] = "fp32"
    """What they are multiplied with unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Provider:
    """What Partita knows about one execution provider."""

    name: str
    """The name used on the command line, which is also the file name."""
    ort_name: str
    """ONNX Runtime's name, e.g. CPUExecutionProvider."""
    aliases: tuple[str, ...]
    wheels: tuple[str, ...]
    """Python packages whose ONNX Runtime contains this provider."""
    device_memory: str
    """Name of the memory info of its tensors, as ONNX Runtime prints it."""
    preferred_attention: str
    """Attention lowering that `--attention auto` picks for it when it cannot be asked."""
    suggested_for: tuple[str, ...] = ()
    """Words in lower case that are no names of it, and for which an error suggests it, e.g. gpu."""
    packed_weights: PackedWeights = PackedWeights()
    """How int8 and int4 packages are written for it."""
    rolling_caches: bool = False
    """Its GroupQueryAttention keeps a cache of a window alone (`sliding_window_cache`). False: it may take such a node
    and leave that out of account, which no experiment with a short text shows.
    """
    in_turns: Mapping[str, str] = field(default_factory=dict)
    """Options of a package that takes turns with another on the same cores, as a draft does; a user's come first."""
    variables: tuple[str, ...] = ()
    """Variables of the environment that choose its driver or its device."""
    reads_back: bool = False
    """Copies out of its memory beside a run were seen to be right, so what a run makes may stay until it is wanted."""
    capture_option: str = ""
    """The option that has it record a run of a graph and replay it in the next; empty when it has none."""
    even_rows: frozenset[str] = frozenset()
    """Operators that it computes right only where all rows of a batch are equally long; only wrong answers tell."""
    leaves_option: str = ""
    """The option with names of nodes, one a line, that it is to leave to the CPU; empty when it has none."""
    budget_option: str = ""
    """The option that limits how much memory its nodes may need; empty when it has none."""
    rank: int = 0
    """Place in the default chain: of the usable providers the one with the highest rank leads. 0: only when named."""
    options: tuple[Option, ...] = ()
    libraries: tuple[Library, ...] = ()
    plugin: Plugin | None = None
    node_patterns: tuple[LogPattern, ...] = ()
    """What it logs about a node that it does not take."""
    says_why: tuple[str, ...] = ()
    """Regular expressions of what it logs at VERBOSE alone about a node that it does not take, most telling first: over
    several lines, with groups `node` and `why`. Experiments listen, for they open one node; whole models would drown.
    """
    start_patterns: tuple[LogPattern, ...] = ()
    """What is logged when it cannot start; tried before the patterns that all providers share."""
    remedies: Mapping[str, Remedy] = field(default_factory=dict)
    """What to do, by provider-level reason code."""
    logs_runs: bool = False
    """True when it writes log lines at INFO in every run, not only while a session is opened."""
    constant_defaults: bool = False
    """It takes inputs that have a default for constants, and reads nothing of what a run gives them."""
    compiles: bool = False
    """True when it turns a whole subgraph into one node, False when it runs node by node."""
    any_option: bool = False
    """True when its options are not known here: they are passed on unchecked."""
    option_prefix: str = ""
    """When not empty, the provider inside ONNX Runtime reads its options from the session configuration under this
    prefix and ignores the dictionary of options. A plugin of the same provider takes the dictionary."""
    preload: bool = False
    """Its libraries may lie in Python packages, where the loader does not look: ONNX Runtime's preload_dlls() does."""
    software_devices: bool = False
    """A driver may offer it the CPU in place of a GPU, e.g. SwiftShader or llvmpipe for Vulkan. On such a device it is
    usable, but not chosen by itself."""
    library: Path | None = None
    """Plugin library that the user gave by its path; None when ONNX Runtime or a Python package contains it."""

    def __post_init__(self) -> None:
        if self.library is None and not self.ort_name.endswith("ExecutionProvider"):
            raise ValueError(f"{self.name}: {self.ort_name!r} is not a name ONNX Runtime uses for a provider")
        if self.name in self.aliases or len(set(self.aliases)) != len(self.aliases):
            raise ValueError(f"{self.name}: aliases repeat a name")
        for pattern in (*self.node_patterns, *self.start_patterns):
            re.compile(pattern.pattern)
        for text in self.says_why:
            if not {"node", "why"} <= re.compile(text).groupindex.keys():
                raise ValueError(f"{self.name}: {text!r} has no groups node and why")

    def names(self) -> tuple[str, ...]:
        """Every name a user may write for it, in lower case."""
        return (self.name, *self.aliases, self.ort_name.lower())

    @property
    def plugin_takes(self) -> str:
        """What to add where its plugin offers no device, because it takes certain ones only."""
        return f"; it takes {self.plugin.takes} only" if self.plugin is not None and self.plugin.takes else ""

    def remedy(self, reason: ReasonCode) -> Remedy | None:
        """What to do about a provider-level reason; None when nothing is known."""
        return self.remedies.get(reason)

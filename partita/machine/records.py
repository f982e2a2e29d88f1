"""What a machine offers ONNX Runtime, as `partita providers --json` prints it: frozen and versioned.

Schema `partita.providers/1`; the JSON Schema is published in docs/providers.schema.json. Nothing is guessed: what could
not be found out is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from partita.observations.records import Record, RemedyRecord
from partita.observations.text_format import plural

SCHEMA = "partita.providers/1"


class OnnxRuntime(Record):
    """Wheel, version and build of the ONNX Runtime that is installed."""

    packages: tuple[str, ...]
    """Distributions that own its files, name and version; more than one is a finding."""
    version: str | None
    """null when it cannot be imported."""
    build: str | None
    cuda: str | None
    """CUDA version it was built with."""
    cudnn: str | None
    """cuDNN version it was built for, as far as it says."""
    available: tuple[str, ...]
    """Its names of the providers compiled into it."""


class Gpu(Record):
    """An NVIDIA GPU, as its driver describes it."""

    name: str
    memory_bytes: int
    driver: str
    cuda_driver: str | None
    """Newest CUDA version that the driver can run."""


class Device(Record):
    """A device that a provider offers, as ONNX Runtime lists it."""

    ort_name: str
    ep_vendor: str
    kind: str
    """CPU, GPU or NPU."""
    vendor: str
    vendor_id: int
    device_id: int
    metadata: dict[str, str]


class OptionEntry(Record):
    """An option that the provider takes."""

    name: str
    kind: str
    default: str
    choices: tuple[str, ...]
    meaning: str


class ProviderEntry(Record):
    """What came of asking one provider on this machine."""

    name: str
    ort_name: str
    in_build: bool
    plugin: str | None
    """Installed plugin package, name and version, or the library that was given by its path."""
    library_loads: bool | None
    device_found: bool | None
    software_device: bool
    """It runs, but on a driver that computes on the CPU: no GPU was found."""
    status: Literal["usable", "unavailable"]
    """usable: it alone ran a model of one node and gave the known answer."""
    reason: str | None
    """A provider-level reason code; null when usable."""
    evidence: str | None
    remedy: str | None
    """In words, commands among them."""
    remedies: tuple[RemedyRecord, ...] = ()
    """The same as data, the best first."""
    seconds: float | None
    """What the probe took, start of its process included; null when there was nothing to probe."""
    devices: tuple[Device, ...]
    options: tuple[OptionEntry, ...]

    @property
    def usable(self) -> bool:
        """True when the provider ran the test model and its result was right."""
        return self.status == "usable"


class EnvironmentFinding(Record):
    """Something wrong with what is installed, whatever provider is preferred."""

    reason: str
    evidence: str
    remedy: str
    """In words, commands among them."""
    remedies: tuple[RemedyRecord, ...] = ()
    """The same as data, the best first."""


class MachineReport(Record):
    """What `partita providers` found: runtime, providers, devices, and the default chain."""

    schema_id: Literal["partita.providers/1"] = Field(default="partita.providers/1", alias="schema")
    partita_version: str
    onnxruntime: OnnxRuntime
    gpus: tuple[Gpu, ...] | None
    """null when the driver cannot be asked."""
    plugins: dict[str, str]
    """Installed plugin packages and their versions."""
    findings: tuple[EnvironmentFinding, ...]
    providers: tuple[ProviderEntry, ...]
    default_chain: tuple[str, ...]
    """What a run without --provider uses."""
    default_reason: str
    seconds: float

    def __repr__(self) -> str:
        usable = ", ".join(entry.name for entry in self.providers if entry.status == "usable") or "none"
        findings = f"; {plural(len(self.findings), 'finding')}" if self.findings else ""
        return f"<MachineReport: ONNX Runtime {self.onnxruntime.version}; usable: {usable}{findings}>"

    __str__ = __repr__

"""The record of `partita providers --json`: frozen and versioned.

Schema `partita.providers/1`; its JSON Schema is docs/providers.schema.json. Unknown values are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from partita.capacity.records import MachineRates
from partita.observations.records import Record, RemedyRecord
from partita.observations.text_format import plural

SCHEMA = "partita.providers/1"


@dataclass(frozen=True, slots=True)
class OrtBuild:
    """The installed ONNX Runtime. None where the build does not report a value."""

    version: str
    build: str
    cuda: str | None
    """CUDA version of the build, e.g. 13.0."""
    cudnn: str | None


class OnnxRuntime(Record):
    """Wheel, version and build of the installed ONNX Runtime."""

    packages: tuple[str, ...]
    """Distributions that own its files, name and version; more than one is a finding."""
    version: str | None
    """null if it cannot be imported."""
    build: str | None
    cuda: str | None
    """CUDA version of the build."""
    cudnn: str | None
    """cuDNN version of the build, if known."""
    providers_in_build: tuple[str, ...]
    """ONNX Runtime's names of the providers in the build."""


class Gpu(Record):
    """An NVIDIA GPU, as reported by its driver."""

    name: str
    memory_bytes: int
    driver: str
    cuda_driver: str | None
    """Newest CUDA version that the driver supports."""


class Device(Record):
    """A device of a provider, as listed by ONNX Runtime."""

    ort_name: str
    ep_vendor: str
    kind: str
    """CPU, GPU or NPU."""
    vendor: str
    vendor_id: int
    device_id: int
    metadata: dict[str, str]


class OptionEntry(Record):
    """An option of the provider."""

    name: str
    kind: str
    default: str
    choices: tuple[str, ...]
    meaning: str


class ProviderEntry(Record):
    """The result of checking one provider on this machine."""

    name: str
    ort_name: str
    in_build: bool
    plugin: str | None
    """Installed plugin package, name and version, or the path of the library."""
    library_loads: bool | None
    device_found: bool | None
    software_device: bool
    """It runs, but on a driver that computes on the CPU, because no GPU was found."""
    status: Literal["usable", "unavailable"]
    """usable: it ran a model of one node without fallback, and the output is correct."""
    reason: str | None
    """A provider-level reason code; null if usable."""
    evidence: str | None
    remedy: str | None
    """Remedy as text, with commands."""
    remedies: tuple[RemedyRecord, ...] = ()
    """Remedies as data, best first."""
    seconds: float | None
    """Duration of the check with the start of its process; null without a check."""
    devices: tuple[Device, ...]
    options: tuple[OptionEntry, ...]

    @property
    def usable(self) -> bool:
        """Whether the provider ran the test model and the output is correct."""
        return self.status == "usable"


class EnvironmentFinding(Record):
    """A problem of the installation, independent of the preferred provider."""

    reason: str
    evidence: str
    remedy: str
    """Remedy as text, with commands."""
    remedies: tuple[RemedyRecord, ...] = ()
    """Remedies as data, best first."""


class MachineReport(Record):
    """The result of `partita providers`: runtime, providers, devices, and the default chain."""

    schema_id: Literal["partita.providers/1"] = Field(default="partita.providers/1", alias="schema")
    partita_version: str
    onnxruntime: OnnxRuntime
    gpus: tuple[Gpu, ...] | None
    """null if the driver does not respond."""
    plugins: dict[str, str]
    """Installed plugin packages and their versions."""
    findings: tuple[EnvironmentFinding, ...]
    providers: tuple[ProviderEntry, ...]
    default_chain: tuple[str, ...]
    """The default chain."""
    default_reason: str
    seconds: float
    rates: MachineRates | None = None
    """Rates of the CPU provider; null if they were not measured."""

    def __repr__(self) -> str:
        usable = ", ".join(entry.name for entry in self.providers if entry.status == "usable") or "none"
        findings = f"; {plural(len(self.findings), 'finding')}" if self.findings else ""
        return f"<MachineReport: ONNX Runtime {self.onnxruntime.version}; usable: {usable}{findings}>"

    __str__ = __repr__

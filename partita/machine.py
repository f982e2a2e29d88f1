"""The result of `partita providers`: the record of `--json`, and its document.

Schema `partita.providers/1`; its JSON Schema is docs/providers.schema.json. Unknown values are null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from partita.capacity.records import MachineRates
from partita.observations.records import Record, RemedyRecord
from partita.observations.text_format import decimals, listing, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Document, Line, Section, fields_of, pairs, table_of


class OnnxRuntime(Record):
    """Wheel, version and build of the installed ONNX Runtime. null: not reported by the build."""

    packages: tuple[str, ...] = ()
    """Distributions that own its files, name and version; more than one is a finding."""
    version: str | None = None
    """null if it cannot be imported."""
    build: str | None = None
    cuda: str | None = None
    """CUDA version of the build, e.g. 13.0."""
    cudnn: str | None = None
    """cuDNN version of the build."""
    providers_in_build: tuple[str, ...] = ()
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


SHOWN = ("ep.version", "ep.full_device_name", "description", "ep.compatibility")
"""Device metadata shown in the view; --json has all of it."""
COLUMNS = ("name", "usable", "in_build", "plugin", "library_loads", "device_found", "seconds")
USABLE = "ran a MatMul in a separate process without fallback; the result is correct."
SOFTWARE = "software device: its driver computes on the CPU; it is not selected automatically."


def document(report: MachineReport) -> Document:
    """Every non-empty section."""
    usable = [entry.name for entry in report.providers if entry.usable]
    chain = ",".join(report.default_chain) or "none"
    software = ", ".join(entry.name for entry in report.providers if entry.software_device)
    notes = [Line(USABLE, "usable"), *([Line(SOFTWARE, software)] if software else [])]
    sections = (
        Section("runtime", "ONNX Runtime", (pairs("ONNX Runtime", _runtime(report)),)),
        Section("providers", "Providers", (table_of("Providers", report.providers, *COLUMNS), *notes)),
        Section("reasons", "Not usable", tuple(_reasons(report))),
        Section("devices", "Devices", (pairs("Devices", _devices(report)),)),
        Section("default", "Default", (Line(f"{chain} ({report.default_reason})", "default chain"),)),
        Section("rates", "Rates", (pairs("Measured rates of the CPU provider", _rates(report)),)),
    )
    return Document(
        kind="Execution providers of a machine",
        name=", ".join(report.onnxruntime.packages) or "ONNX Runtime",
        headline=(f"usable: {listing(usable)}" if usable else "no provider is usable",),
        opening=tuple(_findings(report)),
        sections=sections,
        version=report.partita_version,
    )


VIEWS = Views(document)


def _findings(report: MachineReport) -> Iterator[Line]:
    """Problems of the installation."""
    for finding in report.findings:
        yield Line(f"{finding.reason}: {finding.evidence}", tone="bad")
        yield Line(finding.remedy, "remedy")


def _runtime(report: MachineReport) -> Iterator[tuple[str, str]]:
    """Versions and GPUs."""
    if report.onnxruntime.version is None:
        yield "version", "none: ONNX Runtime cannot be imported"
    yield from fields_of(report.onnxruntime)
    yield "plugins", ", ".join(f"{name} {version}" for name, version in report.plugins.items()) or "none installed"
    if report.gpus is None:
        yield "NVIDIA GPUs", "unknown: no driver responds, or nvidia-ml-py is not installed"
    for gpu in report.gpus or ():
        yield from fields_of(gpu, prefix="NVIDIA GPU: ")


def _reasons(report: MachineReport) -> Iterator[Line]:
    """Reasons of unusable providers; providers that are only not in the build come last, without evidence."""
    unusable = [entry for entry in report.providers if not entry.usable]
    for entry in sorted(unusable, key=lambda entry: entry.reason == "not_in_build"):
        known = entry.reason == "not_in_build" and report.onnxruntime.version is not None
        yield Line(f"{entry.name}: {entry.reason}{'' if known else f': {entry.evidence}'}; {entry.remedy}")


def _devices(report: MachineReport) -> Iterator[tuple[str, str]]:
    """Devices by provider, as ONNX Runtime lists them."""
    for entry in report.providers:
        for device in entry.devices:
            shown = [value for key, value in device.metadata.items() if key.lower() in SHOWN]
            vendor = f"{device.vendor or 'unknown vendor'} (id {device.vendor_id:#06x})"
            yield entry.name, ", ".join([device.kind, vendor, *shown])


def _rates(report: MachineReport) -> Iterator[tuple[str, str]]:
    """Measured rates of the CPU provider."""
    rates = report.rates
    if rates is None:
        return
    yield "measured with", f"ONNX Runtime {rates.onnxruntime}, {plural(rates.threads, 'thread')}"
    yield "memory", f"{decimals(rates.read_bytes_per_second, 1e-9)} GB/s read"
    for name, form in rates.forms.items():
        read = form.gemv_bytes_per_second[max(form.gemv_bytes_per_second)]
        speed = f"{decimals(read, 1e-9)} GB/s for one row, {decimals(form.gemm_flops, 1e-9)} GFLOP/s for 256 rows"
        yield f"{name} weights", speed
    yield "attention", f"{decimals(rates.attention_decode_flops, 1e-9)} GFLOP/s"
    yield "small node", f"{decimals(rates.node_seconds, 1e6)} us"

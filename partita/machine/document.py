"""The machine report as sections: providers, reasons of unusable providers, devices, default chain."""

from __future__ import annotations

from collections.abc import Iterator

from partita.machine.records import MachineReport
from partita.observations.text_format import decimals, listing, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Block, Column, Document, Line, Section, fields_of, pairs, table

SHOWN = ("ep.version", "ep.full_device_name", "description")
"""Device metadata shown in the view; --json has all of it."""
COLUMNS = ("provider", "usable", "in build", "plugin", "library", "device", "seconds")


def document(report: MachineReport) -> Document:
    """Every non-empty section."""
    usable = [entry.name for entry in report.providers if entry.usable]
    chain = ",".join(report.default_chain) or "none"
    default = Section("default", "Default", (Line(f"{chain} ({report.default_reason})", "default chain"),))
    found = (_runtime(report), _providers(report), _reasons(report), _devices(report), default, _rates(report))
    return Document(
        kind="Execution providers of a machine",
        name=", ".join(report.onnxruntime.packages) or "ONNX Runtime",
        headline=(f"usable: {listing(usable)}" if usable else "no provider is usable",),
        opening=tuple(_findings(report)),
        sections=tuple(section for section in found if section is not None),
        version=report.partita_version,
    )


VIEWS = Views(document)


def _findings(report: MachineReport) -> Iterator[Line]:
    """Problems of the installation."""
    for finding in report.findings:
        yield Line(f"{finding.reason}: {finding.evidence}", tone="bad")
        yield Line(str(finding.remedy), "remedy")


def _runtime(report: MachineReport) -> Section:
    """Versions and GPUs."""
    plugins = ", ".join(f"{name} {version}" for name, version in report.plugins.items())
    version = [] if report.onnxruntime.version else [("version", "none: ONNX Runtime cannot be imported")]
    rows = [*version, *fields_of(report.onnxruntime), ("plugins", plugins or "none installed")]
    if report.gpus is None:
        rows.append(("NVIDIA GPUs", "unknown: no driver responds, or nvidia-ml-py is not installed"))
    for gpu in report.gpus or ():
        rows += fields_of(gpu, prefix="NVIDIA GPU: ")
    return Section("runtime", "ONNX Runtime", (pairs("ONNX Runtime", rows),))


def _providers(report: MachineReport) -> Section:
    """One row per provider."""
    rows = [
        (
            entry.name,
            "yes" if entry.usable else "no",
            "yes" if entry.in_build else "no",
            "-" if entry.plugin is None else "yes",
            _yes_or_no(entry.library_loads),
            "software" if entry.software_device else _yes_or_no(entry.device_found),
            decimals(entry.seconds),
        )
        for entry in report.providers
    ]
    heads = [Column(title, title == "seconds") for title in COLUMNS]
    usable = "ran a MatMul in a separate process without fallback; the result is correct."
    blocks: list[Block] = [table("Providers", heads, rows, obvious=True), Line(usable, "usable")]
    if any(entry.software_device for entry in report.providers):
        blocks.append(
            Line("it runs on a driver that computes on the CPU; it is not selected automatically.", "software")
        )
    return Section("providers", "Providers", tuple(blocks))


def _yes_or_no(known: bool | None) -> str:
    """`yes`, `no`, or `-` if unknown."""
    return "-" if known is None else "yes" if known else "no"


def _reasons(report: MachineReport) -> Section | None:
    """Reasons of unusable providers; providers that are only not in the build come last, on one line each."""
    unusable = [entry for entry in report.providers if not entry.usable]
    if not unusable:
        return None
    imported = report.onnxruntime.version is not None
    lines = []
    for entry in sorted(unusable, key=lambda entry: entry.reason == "not_in_build"):
        evidence = "" if entry.reason == "not_in_build" and imported else f": {entry.evidence}"
        lines.append(Line(f"{entry.name}: {entry.reason}{evidence}; {entry.remedy}"))
    return Section("reasons", "Not usable", tuple(lines), plural(len(unusable), "provider"))


def _devices(report: MachineReport) -> Section | None:
    """Devices by provider, as ONNX Runtime lists them."""
    rows = [
        (
            entry.name,
            f"{device.kind}, {device.vendor or 'unknown vendor'} (id {device.vendor_id:#06x})"
            + "".join(f", {value}" for key, value in device.metadata.items() if key.lower() in SHOWN),
        )
        for entry in report.providers
        for device in entry.devices
    ]
    return Section("devices", "Devices", (pairs("Devices", rows),)) if rows else None


def _rates(report: MachineReport) -> Section | None:
    """Measured rates of the CPU provider."""
    rates = report.rates
    if rates is None:
        return None
    rows = [("memory", f"{decimals(rates.read_bytes_per_second, 1e-9)} GB/s read")]
    for name, form in rates.forms.items():
        read = form.gemv_bytes_per_second[max(form.gemv_bytes_per_second)]
        speed = f"{decimals(read, 1e-9)} GB/s for one row, {decimals(form.gemm_flops, 1e-9)} GFLOP/s for 256 rows"
        rows.append((f"{name} weights", speed))
    attention = decimals(rates.attention_decode_flops, 1e-9)
    rows += [("attention", f"{attention} GFLOP/s"), ("small node", f"{decimals(rates.node_seconds, 1e6)} us")]
    threads = plural(rates.threads, "thread")
    return Section("rates", "Rates", (pairs(f"Measured with ONNX Runtime {rates.onnxruntime}, {threads}", rows),))

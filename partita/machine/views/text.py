"""What a machine offers, for a terminal: providers as a table, why some are not usable, devices, the default chain."""

from __future__ import annotations

from rich.console import Console

from partita.machine.records import MachineReport, ProviderEntry
from partita.observations.text_format import decimals, human_bytes, listing, plural
from partita.partition_reports.render.terminal import ALARM, BOLD, Page
from partita.partition_reports.sections.model import Column

SHOWN = ("ep.version", "ep.full_device_name", "description")
"""What of a device's metadata people read; --json has all of it."""
COLUMNS = ("provider", "usable", "in build", "plugin", "library", "device", "seconds")


def render(report: MachineReport, console: Console) -> None:
    """Print the report to `console`, at its width; readable at 80 columns and without colour."""
    page = Page(console)
    usable = [entry.name for entry in report.providers if entry.usable]
    page.line(f"usable: {listing(usable)}" if usable else "no provider is usable", indent=0, style=BOLD)
    _show_findings(page, report)
    _show_runtime(page, report)
    _show_table(page, report)
    _show_reasons(page, report)
    _show_devices(page, report)
    chain = ",".join(report.default_chain) or "none"
    page.heading("Default")
    page.line(f"default chain: {chain} ({report.default_reason})")


def _show_findings(page: Page, report: MachineReport) -> None:
    """What is wrong with the installation itself."""
    for finding in report.findings:
        page.line(f"{finding.reason}: {finding.evidence}", indent=0, style=ALARM)
        page.line(f"remedy: {finding.remedy}")


def _show_runtime(page: Page, report: MachineReport) -> None:
    """Versions and GPUs."""
    runtime = report.onnxruntime
    page.heading("ONNX Runtime")
    cudnn = f", cuDNN {runtime.cudnn}" if runtime.cudnn else ""
    rows = [
        ("package", ", ".join(runtime.packages) or "not installed as a package"),
        ("version", runtime.version or "cannot be imported"),
        ("built with", f"CUDA {runtime.cuda}{cudnn}" if runtime.cuda else "no CUDA"),
        ("plugins", ", ".join(f"{name} {version}" for name, version in report.plugins.items()) or "none installed"),
    ]
    if report.gpus is None:
        rows.append(("NVIDIA GPUs", "not known: no driver responds, or nvidia-ml-py is not installed"))
    for gpu in report.gpus or ():
        newest = f", CUDA up to {gpu.cuda_driver}" if gpu.cuda_driver else ""
        rows.append(("NVIDIA GPU", f"{gpu.name}, {human_bytes(gpu.memory_bytes)}, driver {gpu.driver}{newest}"))
    page.pairs(rows)


def _show_table(page: Page, report: MachineReport) -> None:
    """One row per provider."""
    page.heading("Providers")
    rows = [
        (
            entry.name,
            "yes" if entry.usable else "no",
            "yes" if entry.in_build else "no",
            "-" if entry.plugin is None else "yes",
            _answer(entry.library_loads),
            "software" if entry.software_device else _answer(entry.device_found),
            decimals(entry.seconds),
        )
        for entry in report.providers
    ]
    page.table(tuple(Column(title, title == "seconds") for title in COLUMNS), rows)
    page.line(
        "usable: in a process of its own it ran one MatMul, with no other provider allowed, and gave the known answer."
    )
    if any(entry.software_device for entry in report.providers):
        page.line("software: it runs on a driver that computes on the CPU; it is not chosen automatically.")


def _answer(known: bool | None) -> str:
    """`yes`, `no`, or `-` when it is not known."""
    return "-" if known is None else "yes" if known else "no"


def _show_reasons(page: Page, report: MachineReport) -> None:
    """Why the others are not usable; those that are only not in the build come last, on one line each."""
    unusable = [entry for entry in report.providers if not entry.usable]
    if not unusable:
        return
    page.heading(f"Not usable: {plural(len(unusable), 'provider')}")
    for entry in sorted(unusable, key=_is_absent):
        page.line(_sentence(entry, imported=report.onnxruntime.version is not None))


def _is_absent(entry: ProviderEntry) -> bool:
    """Nothing is wrong with it, it is just not installed."""
    return entry.reason == "not_in_build"


def _sentence(entry: ProviderEntry, *, imported: bool) -> str:
    """Reason, evidence and remedy. That a provider is not in a build that can be `imported` is its own evidence."""
    if _is_absent(entry) and imported:
        return f"{entry.name}: not_in_build; {entry.remedy}"
    return f"{entry.name}: {entry.reason}: {entry.evidence}; {entry.remedy}"


def _show_devices(page: Page, report: MachineReport) -> None:
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
    if rows:
        page.heading("Devices")
        page.pairs(rows)

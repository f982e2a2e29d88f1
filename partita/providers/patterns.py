"""Log patterns shared by providers: why a node stayed on the CPU, and why a provider could not start.

Wording of ONNX Runtime 1.31.1 and cudaGetErrorString.
"""

from __future__ import annotations

from partita.observations.log_pattern import LogPattern

CPU_PREFERRED = LogPattern(
    "cpu_preferred",
    r"Force fallback to CPU execution for node: (?P<node>\S+) because (?P<why>the CPU execution path is deemed faster)",
)
"""Logged for providers that let ONNX Runtime move small shape computations to the CPU."""

DROPPED = LogPattern(
    "version_mismatch",
    r"(?P<provider>\w+) cannot be used with this model due to its ONNX opset not being supported",
)
"""The only line that is logged when a provider with another layout loses every node, because ONNX Runtime's layout
transformer does not support the opset."""

START_PATTERNS: tuple[LogPattern, ...] = (
    # version_mismatch first: its lines also match library_missing.
    LogPattern("version_mismatch", r"(?P<why>\S+: undefined symbol: [^\s,]+)"),
    LogPattern("version_mismatch", r"(?P<why>version `[^']+' not found \(required by [^)]+\))"),
    LogPattern("version_mismatch", r"(?P<why>The requested API version \[\d+\] is not available.*)"),
    LogPattern("version_mismatch", r"(?P<why>ORT runtime version \"[^\"]+\" is below the minimum required .*)"),
    LogPattern("version_mismatch", r"(?P<why>CUDA driver version is insufficient for CUDA runtime version)"),
    LogPattern(
        "library_missing", r"with error: (?P<why>\S+: cannot open shared object file: No such file or directory)"
    ),
    LogPattern("library_missing", r"(?P<why>\S+: cannot open shared object file: No such file or directory)"),
    LogPattern("library_missing", r"(?P<why>Library not loaded: \S+)"),
    LogPattern("library_missing", r"LoadLibrary failed with error 126(?P<why>.*)"),
    LogPattern("library_missing", r"(?P<why>Failed to load library .*)"),
    LogPattern("option_rejected", r"(?P<why>Unknown provider option: .*)"),
    LogPattern("option_rejected", r"(?P<why>Invalid device ID: .*)"),
    LogPattern("option_rejected", r"(?P<why>Failed to parse provider option .*)"),
    LogPattern("option_rejected", r"(?P<why>The value for the key '[^']+' should be .*)"),
    LogPattern("device_missing", r"(?P<why>no CUDA-capable device is detected.*)"),
    LogPattern("device_missing", r"(?P<why>No devices found for EP '.*)"),
    LogPattern("device_missing", r"(?P<why>No registered plugin EP device found for '.*)"),
)
"""Tried in this order, after the provider's own patterns."""

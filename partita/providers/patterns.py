"""Log lines that several providers share: why a node stayed on the CPU, and why a provider could not start.

Data only. Wording of ONNX Runtime 1.31.1, found in its libraries or seen by running it; CUDA's own words are those of
cudaGetErrorString.
"""

from __future__ import annotations

from partita.observations.log_pattern import LogPattern

CPU_PREFERRED = LogPattern(
    "cpu_preferred",
    r"Force fallback to CPU execution for node: (?P<node>\S+) because (?P<why>the CPU execution path is deemed faster)",
)
"""Logged on behalf of every provider that asks ONNX Runtime which small shape computations belong on the CPU."""

DROPPED = LogPattern(
    "version_mismatch",
    r"(?P<provider>\w+) cannot be used with this model due to its ONNX opset not being supported",
)
"""Logged, and nothing more, when a provider that prefers another layout loses every node: ONNX Runtime's layout
transformer does not know the opset of the model."""

START_PATTERNS: tuple[LogPattern, ...] = (
    # A library that is there but does not fit comes first: the same line also says that it failed to load.
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
"""Tried in this order, after the provider's own."""

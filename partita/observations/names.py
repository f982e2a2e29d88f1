"""Names of ONNX Runtime, and the placeholder for unknown names."""

from __future__ import annotations

CPU = "CPUExecutionProvider"
"""The provider of every build and every session."""
UNKNOWN = "unknown"
"""Placeholder for a provider or operator that no source names."""
INLINED = "_inlfunc_"
"""Prefix of node names from functions that ONNX Runtime inlined."""
RUN, EXPERIMENTS = "a run", "experiments"
"""Steps that are skipped after a crash, listed with providers: session runs, probes."""

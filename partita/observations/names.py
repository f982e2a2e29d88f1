"""Names of ONNX Runtime, and the placeholder for unknown names."""

from __future__ import annotations

import re

CPU = "CPUExecutionProvider"
"""The provider of every build and every session."""
UNKNOWN = "unknown"
"""Placeholder for a provider or operator that no source names."""
INLINED = "_inlfunc_"
"""Prefix of node names from functions that ONNX Runtime inlined."""
RENAMED = re.compile(r"(_token_\d+)+$")
"""Suffix of the name of a node whose layout ONNX Runtime changed."""
RUN, EXPERIMENTS = "a run", "experiments"
"""Work that is skipped after a crash: session runs, probes; listed together with provider names."""

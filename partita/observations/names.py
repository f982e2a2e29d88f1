"""Names that ONNX Runtime gives, and the word for none."""

from __future__ import annotations

CPU = "CPUExecutionProvider"
"""ONNX Runtime's name of the provider that is in every build and every session."""
UNKNOWN = "unknown"
"""In place of a provider or an operator that no source names."""
INLINED = "_inlfunc_"
"""How ONNX Runtime begins the name of a function's node that it puts in the place of a call."""
RUN, EXPERIMENTS = "a run", "experiments"
"""In place of a provider's name among what is left out after a crash: the model is opened, and not run; nor are there
experiments."""

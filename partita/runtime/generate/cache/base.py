"""Types of the states of rows, for code that does without ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

Span = tuple[int, int] | None
"""Rows of the batch, from the first to before the second of these; None: all."""
Place = int | slice
"""A row of the batch, or all of them, which have the same."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""What one row has in each state, on the host, by the name that graphs read the state as. Without the axis of the
batch, and of keys and values as many entries as tokens: [KV, T, D]. bfloat16 shows as uint16.
"""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each of them."""

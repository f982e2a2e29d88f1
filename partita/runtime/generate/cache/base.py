"""Types of the states of rows, independent of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

Span = tuple[int, int] | None
"""Rows of the batch, first and end (exclusive); None: all."""
Place = int | slice
"""A row of the batch, or a slice of all rows if they hold the same sequence."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""The states of one row on the host, by the graph's input name, without the batch axis. Keys and values have one entry
per token: [KV, T, D]. bfloat16 is stored as uint16."""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each state."""

"""Selection of the graphs that read convolution or recurrent states from the previous step."""

from __future__ import annotations

from typing import Literal

from partita.errors import UnsupportedModelError
from partita.export.trace.tracing import Traced
from partita.export.work import Work, tell

Phase = tuple[str, Literal["any", "prefill", "decode"], int | None]
"""File name, phase and fixed S of a graph."""


def continuing(work: Work, wanted: list[Phase], traced: list[Traced]) -> tuple[list[Phase], list[Traced]]:
    """The graphs that read every state they get. Other graphs are dropped.

    Some models read their states only in one-token steps: a second prompt chunk would ignore the first.
    """
    forgets = [name for item in traced for name in _unread_states(item)]
    kept = [(phase, item) for phase, item in zip(wanted, traced, strict=True) if not _unread_states(item)]
    if not kept:
        raise UnsupportedModelError(
            f"the model writes the state {forgets[0]} but never reads it, so it cannot be exported"
        )
    if len(wanted) == 1:
        return wanted, traced
    if len(kept) < len(wanted):
        tell(work, "its recurrent state advances one token per step, so prompts are prefilled one token at a time")
        (_, _, length), item = kept[-1]
        return [("model.onnx", "any", length)], [item]
    chunk = wanted[0][2]
    tell(
        work,
        f"the model has convolution or recurrent states: prompts are prefilled {chunk} tokens at a time, "
        "the rest one by one",
    )
    return wanted, traced


def _unread_states(item: Traced) -> list[str]:
    """States that a graph gets and does not read."""
    used = {value.name for node in item.model.graph for value in node.inputs if value is not None}
    return [state.past for state in item.states if state.past not in used]

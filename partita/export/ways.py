"""The variants of a model: a lowering of attention and cache, and a form of experts and recurrences.

A target that can be probed decides both: ONNX Runtime's operators where it supports them, standard ones otherwise.
Without a probe, the form is ONNX Runtime's where the lowering needs its operators anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.export.trace.attention import Lowering, lowering, ranked
from partita.export.trace.operators import Form

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Way:
    """A variant of a model's graphs."""

    attention: str
    """Name of a lowering."""
    form: Form
    """The form of experts and recurrences."""

    @property
    def is_usual(self) -> bool:
        """Whether the form is the default of this lowering."""
        return self.form == _usual_form(lowering(self.attention))

    def __str__(self) -> str:
        """`gqa`, or `gqa with standard experts and recurrences`."""
        return self.attention if self.is_usual else f"{self.attention} with {self.form} experts and recurrences"


def _usual_form(chosen: Lowering) -> Form:
    """The default form of a lowering: ONNX Runtime's operators where the lowering needs them anyway."""
    return "contrib" if chosen.domains else "standard"


def usual(name: str) -> Way:
    """A lowering with its default form. Raises UsageError for an unknown lowering."""
    return Way(name, _usual_form(lowering(name)))


def every_way() -> list[Way]:
    """Every lowering with its default form, in order of preference."""
    return [Way(each.name, _usual_form(each)) for each in ranked()]

"""In which ways a model can be written for a target, and in which order they are asked about.

A way is two choices: the lowering of attention and cache, and the form of experts and recurrences. A target that can be
asked decides both: it is asked about either form beside each lowering, and gets ONNX Runtime's own operators where it
takes them, standard ones where it leaves them. Where nobody can be asked there is one rule: a package that needs ONNX
Runtime's own operators for its attention anyway may have more of them, and one that does not is left without.
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.export.trace.attention import Lowering, lowering, ranked
from partita.export.trace.operators import Form

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is written."""

    attention: str
    """Name of a lowering."""
    form: Form
    """Of experts and recurrences."""

    @property
    def is_usual(self) -> bool:
        """Whether the form is the one that is tried first beside this lowering."""
        return self.form == _usual_form(lowering(self.attention))

    def __str__(self) -> str:
        """`gqa`, or `gqa with standard experts and recurrences`."""
        return self.attention if self.is_usual else f"{self.attention} with {self.form} experts and recurrences"


def _usual_form(chosen: Lowering) -> Form:
    """The form that is tried first: ONNX Runtime's own operators where the package needs such anyway."""
    return "contrib" if chosen.domains else "standard"


def usual(name: str) -> Way:
    """A lowering with the form that is tried first beside it. Raises UsageError when there is no such lowering."""
    return Way(name, _usual_form(lowering(name)))


def every_way() -> list[Way]:
    """Every lowering with its usual form, the best first."""
    return [Way(each.name, _usual_form(each)) for each in ranked()]

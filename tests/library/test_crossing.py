"""Errors cross from a child process whole: class, message, what to do, rows and exit code."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from partita import errors
from partita.errors import GenerationError, PartitaError, ProviderError, RefusedNode
from partita.library.crossing import raise_told, rebuilt, told
from partita.remedies import Remedy
from partita.runtime.run_errors import RunInterruptedError
from partita.spelling import read_by

TREE = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, PartitaError)]
ROW = RefusedNode("a/MatMul", "MatMul", None, "CUDAExecutionProvider", "CPUExecutionProvider", "no_kernel_op", *"xyz")
SAMPLES: dict[str, Any] = {
    "where": Path("/models/my package"),
    "remedy": Remedy("try it", options=("--provider", "cpu"), otherwise=Remedy("", ("partita", "providers", "--json"))),
    "nodes": (ROW, ROW),
    "option": "with_adapters",
}
"""A value for everything that a class of the tree takes by name; another field needs another one."""


def across(error: Exception) -> PartitaError:
    """The error as it comes out of a child process."""
    return rebuilt(json.loads(json.dumps(told(error))))


def sample(kind: type[PartitaError]) -> PartitaError:
    """An error of this class with a value for everything."""
    names = list(get_type_hints(kind.__init__))
    return kind("it is broken", **{name: SAMPLES[name] for name in names if name not in ("said", "return")})


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_class_of_the_tree_crosses_with_all_it_has(kind: type[PartitaError]) -> None:
    error = sample(kind)
    there = across(error)
    assert type(there) is kind and str(there) == str(error)
    assert vars(there) == {**vars(error), "exit_code": kind.exit_code}
    assert there.remedy == SAMPLES["remedy"] and str(there.remedy) == str(error.remedy)


def test_a_new_class_crosses_with_what_it_takes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class QuotaError(PartitaError):
        exit_code = 9

        def __init__(self, said: str, *, remedy: Remedy | None = None, limits: tuple[int, ...] = ()) -> None:
            super().__init__(said, remedy=remedy)
            self.limits = limits

    QuotaError.__module__ = errors.__name__
    monkeypatch.setattr(errors, "QuotaError", QuotaError, raising=False)
    there: Any = across(QuotaError("too much", limits=(1, 2)))
    assert type(there) is QuotaError and there.limits == (1, 2) and there.exit_code == 9


def test_a_class_below_the_tree_crosses_as_the_nearest_one_with_its_exit_code() -> None:
    there = across(RunInterruptedError(Path("m.onnx")))
    assert type(there) is GenerationError and there.exit_code == 130
    assert GenerationError.exit_code == 1


def test_what_is_none_of_ours_is_an_internal_error_and_a_library_that_is_missing_is_not() -> None:
    assert str(across(ZeroDivisionError("by zero"))) == "internal error: ZeroDivisionError: by zero"
    lacking = across(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert isinstance(lacking, errors.InstallationError) and lacking.remedy is not None


def test_what_to_do_stays_in_the_words_of_who_asked() -> None:
    with read_by("python"):
        error = ProviderError("it does not start", remedy=SAMPLES["remedy"])
    there = across(error)
    assert str(there) == str(error) == "it does not start; try it: providers='cpu', or partita.providers()"
    assert str(there.remedy) == "try it: providers='cpu', or partita.providers()"


def test_nothing_is_raised_for_nothing() -> None:
    raise_told(None)
    with pytest.raises(ProviderError, match="broken"):
        raise_told(told(ProviderError("broken")))

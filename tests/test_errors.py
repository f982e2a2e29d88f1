"""Exit codes and the exception tree."""

from __future__ import annotations

import inspect

import pytest

from partita import errors
from partita.remedies import Remedy

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.PartitaError)
}

# What scripts around Partita test for: changing a row breaks them.
EXIT_CODES = {
    "PartitaError": 1,
    "UsageError": 2,
    "CheckpointError": 1,
    "UnsupportedModelError": 1,
    "PackageError": 1,
    "ReportError": 1,
    "ResourceError": 1,
    "InstallationError": 1,
    "GenerationError": 1,
    "ProviderError": 3,
    "ParityError": 4,
    "ReportCheckError": 5,
}


def test_exit_codes() -> None:
    assert {name: error.exit_code for name, error in ERRORS.items()} == EXIT_CODES
    assert issubclass(errors.UnsupportedModelError, errors.CheckpointError)


def test_every_error_can_be_caught_as_one():
    for error in ERRORS.values():
        with pytest.raises(errors.PartitaError, match="disk full"):
            raise error("disk full")


def test_a_message_has_a_bounded_length_and_keeps_its_remedy():
    error = errors.PackageError("x" * 1_500_000, remedy=Remedy("export it again"))
    assert len(str(error)) < 5000 and str(error).endswith("(1,496,000 more characters); export it again")

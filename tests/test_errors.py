"""Exit codes and the exception tree."""

from __future__ import annotations

import inspect

import pytest

from partita import errors
from partita.errors import PartitaError
from partita.options.fields import with_flags
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


def test_long_message_is_truncated_but_keeps_remedy():
    error = errors.PackageError("x" * 1_500_000, remedy=Remedy("export it again"))
    assert len(str(error)) < 5000 and str(error).endswith("(1,496,000 more characters); export it again")


# Messages name an option by its Python argument in backticks; the command line and prompt files rename it


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("`max_length` is 0; it must be at least 1", "--max-length is 0; it must be at least 1"),
        ("`max_length=5`: too long", "--max-length 5: too long"),
        ("`force=True` or `verify=False`", "--force or --no-verify"),
        ("`cache_in_place=True`", "--require-cache-in-place"),
        ("`providers=cuda,cpu` and `pins=cpu:lm_head`", "--provider cuda,cpu and --pin cpu:lm_head"),
        ("`target_options=qnn.a=b`", "--provider-option qnn.a=b"),
        ("`shapes=x=1,3`", "--shape x=1,3"),
        ("`input_ids` and `partita export` are no options", "`input_ids` and `partita export` are no options"),
        ("an open ` and `seed", "an open ` and `seed"),
    ],
)
def test_command_line_messages_show_options_as_flags(message: str, printed: str) -> None:
    assert with_flags(message) == printed


def test_error_message_ends_with_remedy() -> None:
    remedy = Remedy("try it", options=("--provider", "cpu"), alternative=Remedy("", ("partita", "providers", "--json")))
    error = PartitaError("no", remedy=remedy)
    assert str(error) == "no; try it: --provider cpu, or partita providers --json"
    assert error.remedy == remedy

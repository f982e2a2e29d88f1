"""What says where a model is to run, as a user writes it."""

from __future__ import annotations

from pathlib import Path

from partita.files import STDIN
from partita.library.chain import ChainOptions, read_by


def test_an_option_may_be_longer_than_the_name_of_a_file(tmp_path: Path) -> None:
    """Its value is looked at as a path that a report must not be written over."""
    table = tmp_path / "table.csv"
    table.touch()
    options = {"qnn": {"profiling_file_path": str(table), "op_packages": "x" * 5000}}
    assert read_by(ChainOptions(provider_options=options), tmp_path) == (tmp_path, table, STDIN)

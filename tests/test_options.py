"""The dataclasses of options: what is checked, what the Python API takes, and where a sampling option is found."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import partita
from partita.cli import app
from partita.commands.build import split_pairs
from partita.errors import UsageError
from partita.library.batches.rows import SAMPLED as OF_ROWS
from partita.options.bench import BenchOptions
from partita.options.drift import DriftOptions
from partita.options.export import ExportOptions
from partita.options.fields import Range, check_fields, describe_fields
from partita.options.flags import option_groups
from partita.options.groups import LoadOptions
from partita.options.inspection import InspectOptions, ProvidersOptions
from partita.options.placement import PlaceOptions, SupportOptions
from partita.options.sampling import Sampling

FUNCTIONS = {
    "load": LoadOptions,
    "export": ExportOptions,
    "place": PlaceOptions,
    "support": SupportOptions,
    "bench": BenchOptions,
    "drift": DriftOptions,
    "inspect": InspectOptions,
    "providers": ProvidersOptions,
}
RECORDS = option_groups()
SAMPLED = [each.name for each in describe_fields(Sampling) if each.name != "source"]


@pytest.mark.parametrize(("name", "record"), FUNCTIONS.items())
def test_a_function_takes_the_fields_of_its_options(name: str, record: type[Any]) -> None:
    taken = inspect.signature(getattr(partita, name)).parameters
    assert {each.name: each.default for each in taken.values()} == {
        name: each.default for name, each in inspect.signature(record).parameters.items()
    }


@pytest.mark.parametrize("record", RECORDS)
def test_every_option_has_a_help_and_a_default_within_its_range(record: type[Any]) -> None:
    for each in describe_fields(record):
        assert each.option.help
        default, limits = each.field.default, each.option.range
        if isinstance(default, (int, float)) and limits is not None:
            assert default in limits, each.name
        if each.option.choices and default is not None:
            assert default in each.option.choices


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampling_option_is_found_everywhere(name: str) -> None:
    """Adding a field to `Sampling` is enough for the command line, prompt files and the server."""
    from partita.serve.protocol import SAMPLING

    flags = [flag for each in describe_fields(Sampling) if each.name == name for flag in each.option.flags]
    flag = flags[0] if flags else f"--{name.replace('_', '-')}"
    group: Any = typer.main.get_command(app)
    for verb in ("generate", "chat"):
        assert any(flag in parameter.opts for parameter in group.get_command(None, verb).params)
    assert name in OF_ROWS, "rows of prompt files"
    assert name in SAMPLING or name == "max_new_tokens", "bodies of the server"
    for function in (partita.Model.generate, partita.Model.chat, partita.request):
        assert name in inspect.signature(function).parameters


def test_paths_sequences_and_mappings_have_one_type() -> None:
    found = check_fields(PlaceOptions("m.onnx", pins=["cpu:lm_head"], inputs={"x": "x.npy"}, contract=Path("c.toml")))
    assert (found.model, found.pins, found.inputs) == (Path("m.onnx"), ("cpu:lm_head",), {"x": "x.npy"})
    assert check_fields(found) == found
    assert check_fields(BenchOptions("p", against=["a", Path("b")])).against == ("a", Path("b"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (PlaceOptions("m", runs=0), "`runs` is 0; it must be between 1 and 1,000"),
        (PlaceOptions("m", runs=True), "`runs` is True; it must be an integer"),
        (PlaceOptions("m", runs=1 << 2000), "`runs` is an integer of more than 300 digits"),
        (
            PlaceOptions("m", probe_seconds=float("nan")),
            r"`probe_seconds` is nan; it must be between 0 \(no experiments\)",
        ),
        (PlaceOptions("m", run_seconds=0.0), "`run_seconds` is 0.0; it must be above 0 and at most 86,400"),
        (PlaceOptions(3), "`model` is 3; it must be a path"),  # type: ignore[arg-type]
        (PlaceOptions("m", pins="cpu:x"), "`pins` must be a list of strings, not the string 'cpu:x'"),
        (PlaceOptions("m", shapes=["x"]), r"`shapes` is \['x'\]; it must be a mapping"),  # type: ignore[arg-type]
        (PlaceOptions("m", device=1), "`device` is 1; it must be a string"),  # type: ignore[arg-type]
        (PlaceOptions("m", dry_run=1), "`dry_run` is 1; it must be True or False"),  # type: ignore[arg-type]
        (ExportOptions("c", "o", cache="round"), "`cache=round`: choose one of fixed, window, growing"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_names_its_option(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_fields(given)


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        (Range(1, 5), (1, 5), (0, 6, float("nan")), "between 1 and 5"),
        (Range(0), (0, 10**9), (-1,), "0 or more"),
        (Range(most=1, above=0), (0.5, 1), (0, 1.5), "above 0 and at most 1"),
        (Range(2, 5, also=0), (0, 2), (1,), "between 2 and 5"),
    ],
)
def test_a_range(limits: Range, inside: tuple[float, ...], outside: tuple[float, ...], words: str) -> None:
    assert all(value in limits for value in inside) and not any(value in limits for value in outside)
    assert str(limits) == words


def test_a_sampling_keeps_the_order_of_its_fields() -> None:
    assert [each.name for each in fields(Sampling)] == [*SAMPLED, "source"], "they are given by position"


def test_of_a_module_that_is_kept_twice_the_last_precision_counts_and_its_place() -> None:
    found = split_pairs(["layers.0=int8,layers=fp32", "layers.0=fp16"])
    assert list(found.items()) == [("layers", "fp32"), ("layers.0", "fp16")]

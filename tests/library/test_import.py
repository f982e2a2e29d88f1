"""`import partita`: no heavy imports, public names, types and number conversion."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pydoc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import partita
from partita.library.api import python_values
from partita.options.fields import check_fields
from tests.conftest import REPOSITORY

HEAVY = ("torch", "onnxruntime", "transformers", "onnx", "numpy", "pydantic", "typer", "rich")


def run(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_import_does_not_load_heavy_modules():
    script = f"import json, sys, partita; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(run(script)) == []


def test_public_names_do_not_import_torch_or_cli():
    script = (
        "import json, sys, partita\n"
        "for name in partita.__all__: getattr(partita, name)\n"
        "print(json.dumps([m for m in ('torch', 'typer', 'onnxruntime', 'partita.cli', 'partita.commands')"
        " if m in sys.modules]))"
    )
    assert json.loads(run(script)) == []


def test_telemetry_is_disabled_unless_variable_is_set():
    """Child processes inherit the variable."""
    script = (
        "import os, partita\n"
        "for given in (None, '0'):\n"
        "    os.environ.pop('ORT_DISABLE_TELEMETRY', None)\n"
        "    if given is not None: os.environ['ORT_DISABLE_TELEMETRY'] = given\n"
        "    try: partita.place('no-such-model.onnx', 'cpu')\n"
        "    except partita.PartitaError: print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    assert run(script).split() == ["1", "0"]


def test_public_names_exist_and_are_typed():
    assert list(partita.__all__) == sorted(partita.__all__) == dir(partita)
    tree = ast.parse((REPOSITORY / "partita" / "__init__.py").read_text("utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {
        alias.asname or alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names - {"Any"} | {"__version__"} == set(partita.__all__)
    for name in partita.__all__:
        assert getattr(partita, name) is not None
    assert (REPOSITORY / "partita" / "py.typed").is_file()


SHARED = ("bench", "export", "providers", "support")
"""Functions with the name of a folder."""


@pytest.mark.parametrize("name", SHARED)
def test_help_of_function_shadowing_a_folder_shows_the_function(name):
    import partita.bench.records
    import partita.export.progress
    import partita.providers.cpu
    import partita.support.build  # from now on Python would have the folders as attributes

    function = getattr(partita, name)
    page = pydoc.plain(pydoc.render_doc(function))
    assert page.startswith(f"Python Library Documentation: function {name} in module partita.library")
    told = inspect.getdoc(function)
    assert told and told.splitlines()[0] in page and "PACKAGE CONTENTS" not in page
    assert pydoc.plain(pydoc.render_doc(f"partita.{name}")).count(told.splitlines()[0]) == 1
    assert str(inspect.signature(function)).startswith("(") and inspect.isfunction(function)


def test_modules_below_shadowed_folder_are_importable():
    assert "precision" in inspect.signature(partita.export).parameters
    assert "provider_libraries" in inspect.signature(partita.providers).parameters
    ways = importlib.import_module("partita.export.target")
    import partita.providers.cpu as cpu

    assert ways is sys.modules["partita.export.target"] is vars(partita.export)["target"]
    assert vars(partita.providers)["cpu"] is cpu is sys.modules["partita.providers.cpu"]


def test_public_errors_derive_from_partita_error():
    named = [getattr(partita, name) for name in partita.__all__ if name.endswith("Error")]
    assert len(named) > 12
    assert all(issubclass(error, partita.PartitaError) for error in named)
    assert issubclass(partita.ArgumentError, ValueError) and issubclass(partita.ArgumentError, TypeError)


# Numbers of other libraries, in arguments and in records that programs make


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (np.int64(3), 3),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        ({"a": [np.int64(1)]}, {"a": [1]}),
        (range(3), [0, 1, 2]),
        ("3", "3"),
        (int, int),
    ],
)
def test_python_values_converts_numbers_to_builtin_types(given: object, own: object) -> None:
    found = python_values(given)
    assert repr(found) == repr(own) and type(found) is type(own)


def test_sampling_rejects_booleans_and_texts():
    make: Any = partita.Sampling
    for name in ("seed", "top_k", "max_new_tokens", "temperature"):
        for wrong in (True, np.bool_(True), "1"):
            with pytest.raises(partita.UsageError, match=f"`{name}` is "):
                check_fields(make(**{name: wrong}))
    with pytest.raises(partita.UsageError, match="`seed` is 1.5; it must be an integer"):
        check_fields(make(seed=1.5))

"""Suggested sampling settings: generation_config.json, else genai_config.json of onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from partita.errors import PackageError
from partita.library.sampling import Suggestion, suggestion

DRAWS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
DRAWN = Suggestion(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)


def written(folder: Path, search: Any, file: str = "genai_config.json") -> Path:
    content = {"model": {}, "search": search} if file == "genai_config.json" else search
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (DRAWS, DRAWN),
        ({"do_sample": True}, Suggestion(temperature=1.0, top_k=50)),
        ({**DRAWS, "do_sample": False}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "temperature": 0.0}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "top_k": 1}, Suggestion(repetition_penalty=1.1)),
        ({**DRAWS, "top_k": 0, "top_p": 0.0}, Suggestion(temperature=0.6, repetition_penalty=1.1)),
        ({"num_beams": 4, "min_length": 0, "max_length": 64}, Suggestion(unknown=("num_beams 4",))),
        ({}, Suggestion()),
    ],
    ids=str,
)
def test_genai_search_section_gives_suggested_sampling(
    search: dict[str, Any], expected: Suggestion, tmp_path: Path
) -> None:
    assert suggestion(written(tmp_path, search)) == expected


def test_generation_config_takes_precedence_over_genai_config(tmp_path: Path) -> None:
    written(tmp_path, DRAWS)
    written(tmp_path, {"do_sample": True, "temperature": 0.3}, "generation_config.json")
    assert suggestion(tmp_path) == Suggestion(temperature=0.3, top_k=50)


def test_empty_folder_gives_default_suggestion(tmp_path: Path) -> None:
    assert suggestion(tmp_path) == Suggestion()


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({**DRAWS, "top_p": 3}, r"genai_config\.json: top_p is 3; it must be above 0"),
        ([1], r"genai_config\.json: damaged \(its section 'search' is not an object\); download the folder again"),
    ],
    ids=str,
)
def test_invalid_genai_search_section_raises_package_error(search: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=said):
        suggestion(written(tmp_path, search))

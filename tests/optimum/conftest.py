"""Real exports of optimum, made once by the interpreter that PARTITA_OPTIMUM_PYTHON names, or of `make env-optimum`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.export import optimum
from tests.conftest import TinyCheckpoint
from tests.foreign.makers.with_optimum import TYPES

HERE = Path(__file__).parent
MAKER = HERE.parent / "foreign" / "makers" / "with_optimum.py"
ROUNDED = ("llama", "qwen2", "mistral")
"""Types of which there are exports in fp16 and int8, too."""
__all__ = ["ROUNDED", "TYPES"]


Ask = Callable[..., None]
"""The fixture `ask`: has `in_environment.py` do requests."""


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of optimum's environment."""
    found = os.environ.get(optimum.VARIABLE)
    if found is None:
        pytest.skip("no environment of optimum: make test-optimum creates it")
    return Path(found).absolute()


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def ask(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Asks optimum's environment."""

    def asking(*requests: dict[str, Any]) -> None:
        path = tmp_path_factory.mktemp("request-") / "request.json"
        path.write_text(json.dumps(requests), encoding="utf-8")
        run(python, "-I", HERE / "in_environment.py", path)

    return asking


@pytest.fixture(scope="session")
def made(python: Path, ask: Ask, tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TYPE/checkpoint, TYPE/optimum and TYPE/tokens.json; of some TYPE/fp16 and TYPE/int8; of llama the rest."""
    out = tmp_path_factory.mktemp("optimum-")
    run(python, "-I", MAKER, out, tiny_checkpoint("llama"))
    ask(
        *(
            {"do": "fp16", "source": str(out / kind / "checkpoint"), "out": str(out / kind / "fp16")}
            for kind in ROUNDED
        ),
        *({"do": "int8", "source": str(out / kind / "optimum"), "out": str(out / kind / "int8")} for kind in ROUNDED),
    )
    return out


@pytest.fixture(scope="session")
def said_by_optimum(made: Path, ask: Ask) -> dict[str, Any]:
    """What ORTModelForCausalLM generates of each of optimum's own exports, by `TYPE/VARIANT`."""
    folders = sorted(
        str(path.parent) for path in made.glob("*/*/*.onnx") if path.parent.name in ("optimum", "fp16", "int8")
    )
    return generated(ask, list(dict.fromkeys(folders)), made, made / "said.json")


def generated(ask: Ask, folders: list[str], made: Path, answer: Path, **more: Any) -> dict[str, Any]:
    """Greedy tokens of ORTModelForCausalLM after the prompt of the samples, or its error, by `TYPE/VARIANT`."""
    known = json.loads((made / "llama" / "tokens.json").read_text(encoding="utf-8"))
    request = {"do": "generate", "folders": folders, "prompt": known["prompt"], "count": len(known["tokens"])}
    ask({**request, "answer": str(answer), **more})
    found = json.loads(answer.read_text(encoding="utf-8"))
    return {"/".join(Path(folder).parts[-2:]): tokens for folder, tokens in found.items()}


def known(made: Path, kind: str) -> dict[str, list[int]]:
    """Prompt, and the greedy tokens of transformers after it."""
    found: dict[str, list[int]] = json.loads((made / kind / "tokens.json").read_text(encoding="utf-8"))
    return found

"""Files of strangers with a few bytes or values changed at random: a line and an exit code, whatever they hold.

The seeds are fixed, so a failure can be repeated; more of them are `heavy`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.errors import PartitaError
from tests.conftest import TinyCheckpoint, require
from tests.foreign.conftest import SAMPLES
from tests.gguf_files import save_gguf

Captured = pytest.CaptureFixture[str]
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.5, 2**31, 10**30, float("nan"), float("inf")),
    *("", "x", "\x00", "\ud800", [], {}, [None], [[[1]]], {"x": 1}),
)
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(12, 300))]


def changed_bytes(chance: random.Random, raw: bytes, end: int) -> bytes:
    """Some of the first `end` bytes changed, or the rest cut off."""
    if chance.random() < 0.2:
        return raw[: chance.randrange(end)]
    made = bytearray(raw)
    for _ in range(chance.randrange(1, 4)):
        made[chance.randrange(end)] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
    return bytes(made)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every value in JSON: what it is in, and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [entry for key in keys for entry in ((value, key), *places(value[key]))]


def changed_values(chance: random.Random, path: Path) -> None:
    """Other values in a JSON file, or none."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    for home, key in chance.sample(places(raw), chance.randrange(1, 3)):
        home[key] = chance.choice(VALUES)
    path.write_text(json.dumps(raw), encoding="utf-8")


def answered(capsys: Captured, *arguments: str) -> None:
    """Run a command, which may do what it is asked for or refuse it."""
    code = run(list(arguments))
    err = capsys.readouterr().err
    assert "internal error" not in err and "Traceback" not in err, err
    assert code == 0 or (code == 1 and err.splitlines()[-1].startswith("partita: ")), (code, err)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", ["optimum", "genai-fp32-cpu"])
def test_foreign_folders(layout: str, seed: int, tmp_path: Path, capsys: Captured) -> None:
    chance = random.Random(f"{layout} {seed}")
    folder = shutil.copytree(SAMPLES / layout, tmp_path / "folder")
    model = folder / "model.onnx"
    model.write_bytes(changed_bytes(chance, model.read_bytes(), min(model.stat().st_size, 4000)))
    answered(capsys, "inspect", str(folder))
    shutil.copy(SAMPLES / layout / "model.onnx", folder)
    changed_values(chance, chance.choice(sorted(folder.glob("*config.json"))))
    answered(capsys, "inspect", str(folder))
    answered(capsys, "generate", str(folder), "3,4,5", "--token-ids", "--max-new-tokens", "2", "--provider", "cpu")


def test_headers_of_gguf_files(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    require("gguf")
    from partita.export.checkpoint.gguf.header import read_header

    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama"), "Q8_0")
    raw, chance = file.read_bytes(), random.Random(0)
    end = min(tensor.start for tensor in read_header(file).tensors.values())
    for _ in range(1000):
        file.write_bytes(changed_bytes(chance, raw, end))
        try:
            read_header(file)
        except PartitaError as error:
            assert str(file) in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_settings_of_checkpoints(seed: int, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    from partita.export.checkpoint.description import open_checkpoint

    chance = random.Random(seed)
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "checkpoint")
    changed_values(chance, folder / "config.json")
    try:
        open_checkpoint(str(folder))
    except PartitaError as error:
        assert len(str(error)) < 1000

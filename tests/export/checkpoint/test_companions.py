"""Export checks the generation config with the reader that generate uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from partita import cli
from partita.export.checkpoint.companions import write_generation
from partita.remedies import Remedy
from partita.runtime.generate.text.tokens import stop_token_ids

AGAIN = Remedy("do it again")


def edit_json(path: Path, *removed: str, **changes: Any) -> None:
    """Remove and change settings."""
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in removed}
    path.write_text(json.dumps({**kept, **changes}))


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    arguments = ["export", str(folder), str(folder.parent / "out"), "--max-length", "64", "--no-verify"]
    return cli.run([*arguments, "--attention", "gqa"]), *capsys.readouterr()


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": [2, null]}'])
def test_damaged_generation_config_fails_export(llama: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (llama / "generation_config.json").write_text(content)
    code, _, err = run(llama, capsys)
    assert code == 1 and "generation_config.json" in err and "export the checkpoint again" not in err
    assert not (llama.parent / "out").exists()


@pytest.mark.parametrize(
    ("model_type", "said", "stop"),
    [("gemma3", {"text_config": {"eos_token_id": 7}}, 7), ("gemma3", {}, 1), ("llama", {}, 2)],
)
def test_stop_tokens_come_from_model_config_without_generation_config(
    tmp_path: Path, model_type: str, said: dict[str, Any], stop: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **said}))
    write_generation(AutoConfig.from_pretrained(tmp_path), tmp_path)
    assert stop_token_ids(tmp_path) == {stop}


def test_export_writes_missing_generation_config(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "generation_config.json").unlink()
    edit_json(llama / "config.json", "eos_token_id")
    assert run(llama, capsys)[0] == 0
    assert stop_token_ids(llama.parent / "out") == {2}  # of LlamaConfig


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (99999999, "eos_token_id 99,999,999 is outside the vocabulary"),
        (None, "has no eos_token_id: generate will stop only at the maximum"),
        (2, ""),
    ],
)
def test_unreachable_or_missing_eos_token_adds_a_note(
    llama: Path, capsys: pytest.CaptureFixture[str], token: int | None, said: str
) -> None:
    for name in ("generation_config.json", "config.json"):
        edit_json(llama / name, eos_token_id=token)
    code, _, err = run(llama, capsys)
    assert code == 0 and said in " ".join(err.split()) and ("eos_token_id" in err) is bool(said)


def test_exporting_a_package_is_a_usage_error(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llama, capsys)[0] == 0
    assert cli.run(["export", str(llama.parent / "out"), str(llama.parent / "again")]) == 2
    assert "out: already a Partita package; run it with partita generate" in " ".join(capsys.readouterr().err.split())

"""The manifest names the library that reads the tokenizer; its ids equal those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.cli import run
from partita.export.checkpoint.companions import probe_tokenizer
from partita.package.folder import COMPANIONS, read_manifest
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.tokens import load_text
from tests.conftest import DEMO_CHECKPOINT, REPOSITORY, Exported, TinyCheckpoint

Copy = Callable[[Path], Path]
TRUNCATED = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}


def probe(folder: Path, *told: str) -> str:
    """What kind it is; what users are told starts as `told` does."""
    notes: list[str] = []
    kind = probe_tokenizer(folder, tuple(name for name in COMPANIONS if (folder / name).is_file()), notes)
    assert len(notes) == len(told) and all(n.startswith(t) for n, t in zip(notes, told, strict=True)), notes
    return kind


@pytest.mark.parametrize(
    ("file", "changes", "kind"),
    [
        ("tokenizer.json", {}, "tokenizers"),
        ("tokenizer.json", {"truncation": TRUNCATED}, "tokenizers"),
        # special tokens only there change ids in transformers, not in `tokenizers`
        ("tokenizer_config.json", {"extra_special_tokens": ["<extra>"]}, "transformers"),
    ],
)
def test_library_of_a_tokenizer_is_recorded(
    tiny_checkpoint: TinyCheckpoint, llama: Path, file: str, changes: dict[str, Any], kind: str
) -> None:
    (llama / file).write_text(json.dumps({**json.loads((llama / file).read_text()), **changes}))
    assert probe(llama) == kind
    assert probe(tiny_checkpoint("llama", tokenizer=False), "the checkpoint has no tokenizer") == "none"


def test_tokenizers_and_transformers_give_equal_ids() -> None:
    plain, full = load_text(DEMO_CHECKPOINT, "tokenizers"), load_text(DEMO_CHECKPOINT, "transformers")
    messages = conversation("Hello", "Be brief")
    assert plain.encode_messages(messages) == full.encode_messages(messages)


def test_export_without_usable_tokenizer_requires_token_ids_in_generate(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = own_copy(tiny_checkpoint("llama"))
    (damaged / "tokenizer.json").write_text("{")
    code = own_copy(tiny_checkpoint("llama", tokenizer=False))
    own = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (code / "tokenizer_config.json").write_text(json.dumps(own))
    unloadable = "note: the checkpoint's tokenizer cannot be loaded ("
    folders = {damaged: unloadable, code: unloadable, tiny_checkpoint("llama", tokenizer=False): "has no tokenizer"}
    for number, (folder, told) in enumerate(folders.items()):
        out = tmp_path / f"out{number}"
        assert run(["export", str(folder), str(out), "--max-length", "64", "--no-verify"]) == 0
        assert told in capsys.readouterr().err
        generate = ["generate", str(out), "--provider", "cpu", "--max-new-tokens", "2"]
        assert run([*generate, "some text"]) != 0
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "token" in err
        assert run([*generate, "1,5,9", "--token-ids"]) == 0
        assert capsys.readouterr().out.strip()


def test_generate_loads_neither_torch_nor_transformers(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    package = exported(tiny_checkpoint("llama"))
    assert read_manifest(package).tokenizer == "tokenizers"
    code = (
        "import sys; from partita.cli import run; run(['generate', sys.argv[1], 'return', '--max-new-tokens', '2']); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(package)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"

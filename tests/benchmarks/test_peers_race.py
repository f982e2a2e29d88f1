"""Child processes of `make bench-peers`: rounds, failures and preparation of model files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import prepare, race
from benchmarks.peers.plan import ENTRIES, Places
from benchmarks.peers.prepare import ExportFailedError
from benchmarks.peers.race import Race, Racer, Settings

CHILD = """
import os, sys
from benchmarks.peers.children.serving import Opened, serve

def generate(prompt, new_tokens):
    if {kind!r} == "crash" and len(prompt) == 9:
        os.abort()
    for number in range(new_tokens - ({kind!r} == "short")):
        yield prompt[0] + number, {kind!r} != "not finite"

def peer():
    print("what a peer prints does not reach the answers")
    def open_model(model, threads, length):
        if {kind!r} == "refuse":
            raise ValueError("no kernel for this\\nand a long explanation")
        return Opened(generate, ("numpy", "no-such-distribution"), {{"threads": str(threads), "length": str(length)}})
    return open_model

serve(peer)
"""
SETTINGS = Settings(prompts=(3, 9), new_tokens=4, rounds=3, threads=2, start_prompt=5, vocabulary=100)


def raced(tmp_path: Path, monkeypatch, *kinds: str, together=True) -> list[Racer]:
    """A contender of each kind, after a race."""
    entries = dict(zip(kinds, ENTRIES, strict=False))
    kind_of = {entry.name: kind for kind, entry in entries.items()}
    monkeypatch.setattr(race, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(
        race, "child_command", lambda entry, places: [sys.executable, "-c", CHILD.format(kind=kind_of[entry.name])]
    )
    monkeypatch.setattr(Race, "fits_together", lambda self: together)
    monkeypatch.chdir(Path(race.__file__).parents[2])
    (tmp_path / "tiny").mkdir()
    racers = [Racer(entry, 1000) for entry in entries.values()]
    Race(racers, "tiny", Places(tmp_path, tmp_path), SETTINGS).run()
    return racers


def test_every_contender_runs_every_prompt_in_every_round(tmp_path, monkeypatch):
    one, other = raced(tmp_path, monkeypatch, "good", "not finite")
    works = one.works(SETTINGS)
    assert [(each.prompt_tokens, len(each.turns), len(each.tokens)) for each in works] == [(3, 3, 4), (9, 3, 4)]
    assert all(each.finite and each.tokens_per_turn_equal for each in works)
    assert works[0].tokens == other.works(SETTINGS)[0].tokens  # the same prompt
    assert not any(each.finite for each in other.works(SETTINGS))
    assert len(one.starts) == 3 and one.error is None
    assert one.opened["settings"] == {"threads": "2", "length": "13"}
    assert list(one.opened["versions"]) == ["numpy"]
    assert one.peak_rss_bytes is not None and one.peak_rss_bytes > 1_000_000


def test_failed_contender_has_error_and_others_continue(tmp_path, monkeypatch):
    good, refused, crashed, short = raced(tmp_path, monkeypatch, "good", "refuse", "crash", "short")
    assert refused.error == "ValueError: no kernel for this" and not refused.starts
    assert crashed.error is not None and crashed.error.startswith("ended by signal 6") and len(crashed.starts) == 3
    assert short.error == "3 tokens where 4 were asked for"
    assert [len(each.turns) for each in good.works(SETTINGS)] == [3, 3]


# Files of the contenders: made once, with what that took, or why it failed


OURS = next(entry for entry in ENTRIES if entry.peer == "partita")
MIB = 1 << 20


def exporter(monkeypatch, code: str) -> None:
    """What `code` does in place of an exporter; its argument is the folder to write."""
    monkeypatch.setattr(
        prepare,
        "export_command",
        lambda entry, shape, places, length, threads: [
            sys.executable,
            "-S",
            "-c",
            code,
            str(places.model(shape, entry)),
        ],
    )


@pytest.fixture
def places(tmp_path):
    (tmp_path / "tiny").mkdir()
    return Places(tmp_path, tmp_path)


WRITES = """
import json, os, sys
os.makedirs(sys.argv[1])
open(sys.argv[1] + "/model.onnx", "wb").write(bytes(1000))
open(sys.argv[1] + "/known_answer.safetensors", "wb").write(bytes(500))
used = bytearray(64 << 20)
print(json.dumps({"seconds": {"trace": 1.5}}))
"""


def test_prepare_records_stages_and_memory_of_exporter(monkeypatch, places):
    held = bytearray(300 * MIB)  # of this process, which is not to be counted
    exporter(monkeypatch, WRITES)
    written = prepare.prepare(OURS, "tiny", places, 100, 1)
    assert written is not None and written.stages == {"trace": 1.5}
    assert 64 * MIB < written.peak_rss_bytes < 200 * MIB < len(held)
    assert 0 < written.seconds < 60
    assert prepare.file_bytes(places.model("tiny", OURS)) == 1000


def test_files_are_exported_once_per_length(monkeypatch, places):
    exporter(monkeypatch, WRITES)
    first = prepare.prepare(OURS, "tiny", places, 100, 1)
    exporter(monkeypatch, "raise SystemExit('called again')")
    assert prepare.prepare(OURS, "tiny", places, 100, 1) == first
    with pytest.raises(ExportFailedError, match="called again"):
        prepare.prepare(OURS, "tiny", places, 200, 1)

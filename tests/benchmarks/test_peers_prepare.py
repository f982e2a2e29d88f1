"""Files of the contenders of `make bench-peers`: made once, what that took is told, and so is why it failed."""

from __future__ import annotations

import sys

import pytest

from benchmarks.peers import prepare
from benchmarks.peers.plan import ENTRIES, Places
from benchmarks.peers.prepare import ExportFailedError

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


def test_seconds_stages_and_memory_are_those_of_the_exporter(monkeypatch, places):
    held = bytearray(300 * MIB)  # of this process, which is not to be counted
    exporter(monkeypatch, WRITES)
    written = prepare.prepare(OURS, "tiny", places, 100, 1)
    assert written is not None and written.stages == {"trace": 1.5}
    assert 64 * MIB < written.peak_rss_bytes < 200 * MIB < len(held)
    assert 0 < written.seconds < 60
    assert prepare.file_bytes(places.model("tiny", OURS)) == 1000


def test_files_are_made_once_for_a_length(monkeypatch, places):
    exporter(monkeypatch, WRITES)
    first = prepare.prepare(OURS, "tiny", places, 100, 1)
    exporter(monkeypatch, "raise SystemExit('called again')")
    assert prepare.prepare(OURS, "tiny", places, 100, 1) == first
    with pytest.raises(ExportFailedError, match="called again"):
        prepare.prepare(OURS, "tiny", places, 200, 1)


def test_files_that_a_busy_machine_made_are_made_again_when_asked_for(monkeypatch, places):
    monkeypatch.setattr(prepare, "others_cores", lambda busy, own, seconds: 1.5)
    exporter(monkeypatch, WRITES)
    first = prepare.prepare(OURS, "tiny", places, 100, 1, again=True)
    assert first is not None and first.disturbed
    monkeypatch.setattr(prepare, "others_cores", lambda busy, own, seconds: 0.0)
    assert prepare.prepare(OURS, "tiny", places, 100, 1) == first
    second = prepare.prepare(OURS, "tiny", places, 100, 1, again=True)
    assert second is not None and not second.disturbed
    assert prepare.prepare(OURS, "tiny", places, 100, 1, again=True) == second


def test_a_refusal_is_told_in_the_exporter_s_last_line(monkeypatch, places):
    exporter(monkeypatch, "raise NotImplementedError('The X model is not currently supported.')")
    with pytest.raises(ExportFailedError, match=r"^NotImplementedError: The X model is not currently supported\.$"):
        prepare.prepare(OURS, "tiny", places, 100, 1)
    assert not places.model("tiny", OURS).exists()

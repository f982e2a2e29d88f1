"""`--provider-option NAME.cache_dir=FOLDER`: graphs are compiled once; reports match those without the folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal

import pytest

from partita.providers.resolve import known_providers
from tests.contract.cases import cases
from tests.contract.commands import execute, generated, honoured, refused

LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    "sys.argv = ['partita', *sys.argv[1:]]; runpy.run_module('partita', run_name='__main__')"
)


KILLED = """
import os, sys, partita
from partita.runtime.chain import compiled_graphs
compiled_graphs.compiled_subgraphs = lambda *_: os.kill(os.getpid(), 9)
partita.place(sys.argv[1], providers=sys.argv[2] + ",cpu", provider_options={sys.argv[2]: {"cache_dir": sys.argv[3]}},
              process="this", probe_seconds=0)
"""
"""Ends like a process that is killed when the graph is compiled and its entry is not yet in its place."""


def keeping(environment):
    """Rows of target, for the providers with a folder of compiled graphs."""
    return [(target,) for target in environment.targets if known_providers()[target.provider].cache_option]


def caching(target, folder):
    return "--provider-option", f"{target.provider}.cache_dir={folder}"


def placement(report):
    """Of each phase: the file's nodes by provider, partitions, and fallbacks with their reasons."""
    return {
        phase["name"]: (
            {share["provider"]: share["nodes"] for share in phase["providers"]},
            [(part["provider"], part["nodes"]) for part in phase["partitions"]],
            len(phase["copies"]),
        )
        for phase in report["phases"]
    } | {"fallbacks": sorted((each["node"], each["reason"], each["provider"]) for each in report["fallbacks"])}


@pytest.fixture
def place(partita, model):
    """Place the model with an island on the CPU; its report."""
    file = model("island")

    def report(target, *options):
        words = ("place", file, "--provider", f"{target.provider},cpu", "--json", *options)
        return honoured(partita(*words)).json

    return report


@cases("target", keeping)
def test_second_start_reads_compiled_graph_with_same_placement(environment, target, place, tmp_path):
    without = place(target)
    first, second = (place(target, *caching(target, tmp_path / "kept")) for _ in range(2))
    assert placement(first) == placement(second) == placement(without)
    assert without["fallbacks"], "the island is on the CPU"
    (entry,) = (tmp_path / "kept").iterdir()
    assert any("compiled by" in note and f"kept in {entry}" in note for note in first["notes"])
    assert any("on an earlier start" in note and f"read from {entry}" in note for note in second["notes"])


@cases("target", keeping, heavy=("qnn",))
def test_package_with_cache_dir_gives_same_tokens_and_placement(environment, target, packages, partita, tmp_path):
    seen = []
    for number, option in enumerate([(), *[caching(target, tmp_path / "kept")] * 2]):
        report = tmp_path / f"{number}.json"
        done = honoured(generated(partita, packages / target.whole[0], target.provider, "--report", report, *option))
        seen.append((done.out, placement(json.loads(report.read_text(encoding="utf-8")))))
    assert seen[0] == seen[1] == seen[2]
    assert "read from" in done.err, done


def truncated(entry, _):
    (binary,) = entry.glob("*.bin")
    binary.write_bytes(binary.read_bytes()[:-1000])


def unreadable_record(entry, _):
    (entry / "entry.json").write_text("{", encoding="utf-8")


def no_graph(entry, _):
    (entry / "compiled.onnx").unlink()


def of_other_options(entry, other):
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


def rejected_by_the_provider(entry, _):
    """Bytes that are no compiled graph, with the right checksum."""
    (binary,) = entry.glob("*.bin")
    data = b"x" * binary.stat().st_size
    binary.write_bytes(data)
    record = json.loads((entry / "entry.json").read_text(encoding="utf-8"))
    record["files"][binary.name] = hashlib.sha256(data).hexdigest()
    (entry / "entry.json").write_text(json.dumps(record), encoding="utf-8")


@cases("target", keeping)
def test_invalid_cache_entry_is_recompiled_with_note(environment, target, place, tmp_path):
    kept = caching(target, tmp_path / "kept")
    known = placement(place(target, *kept))
    (entry,) = (tmp_path / "kept").iterdir()
    place(target, *kept, "--provider-option", f"{target.provider}.htp_performance_mode=burst")
    (other,) = set((tmp_path / "kept").iterdir()) - {entry}  # other options are another entry
    for spoil in (truncated, unreadable_record, no_graph, of_other_options, rejected_by_the_provider):
        spoil(entry, other)
        mended, again = place(target, *kept), place(target, *kept)
        assert placement(mended) == placement(again) == known, spoil
        assert any(f"{entry} cannot be used and was compiled again" in note for note in mended["notes"]), spoil
        assert any(f"read from {entry}" in note for note in again["notes"]), spoil


@cases("target", keeping)
def test_start_after_kill_recompiles_and_removes_stale_files(environment, target, place, model, tmp_path):
    kept = tmp_path / "kept"
    done = execute("-c", KILLED, model("island"), target.provider, kept, folder=tmp_path)
    assert done.code == -signal.SIGKILL, done
    (remains,) = kept.iterdir()
    assert (remains / "entry" / "compiled.onnx").is_file() and not (remains / "entry" / "entry.json").exists()
    first = place(target, *caching(target, kept))
    assert placement(first) == placement(place(target))
    (entry,) = set(kept.iterdir()) - {remains}
    assert any(f"kept in {entry}" in note for note in first["notes"])
    shutil.rmtree(entry)
    os.utime(remains, (0, 0))
    place(target, *caching(target, kept))
    assert list(kept.iterdir()) == [entry]


@cases("target", keeping)
def test_changed_weights_are_recompiled(environment, target, partita, model, tmp_path):
    import onnx

    file = model("matmul_relu")
    words = ("place", file, "--provider", target.provider, "--json", *caching(target, tmp_path / "kept"))
    honoured(partita(*words))
    changed = onnx.load(file)
    changed.graph.initializer[0].raw_data = bytes(reversed(changed.graph.initializer[0].raw_data))
    onnx.save(changed, file)
    notes = honoured(partita(*words)).json["notes"]
    assert any("kept in" in note for note in notes) and len(list((tmp_path / "kept").iterdir())) == 2


@cases("target", keeping)
def test_unusable_cache_dir_exits_2(environment, target, partita, model, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    words = ("place", model("matmul_relu"), "--provider", target.provider)
    for folder in ("file", "file/below"):
        done = partita(*words, *caching(target, tmp_path / folder))
        refused(done, f"{target.provider}.cache_dir=", "not a folder", "name a writable folder", code=2)


@cases("target", keeping)
def test_failed_cache_write_keeps_run_and_leaves_no_entry(environment, target, model, tmp_path):
    """A file size limit makes the write fail, as a full disk would."""
    words = ("place", model("matmul_relu"), "--provider", target.provider, "--json")
    done = execute("-c", LIMITED, *words, *caching(target, tmp_path / "kept"), folder=tmp_path)
    assert any("compiled graph is not kept: " in note for note in honoured(done).json["notes"])
    assert not list((tmp_path / "kept").iterdir())


@cases("target", keeping)
def test_compiled_model_note_names_provider_and_compatibility(environment, target, place, partita, tmp_path):
    """On x86-64, QNN's plugin does not evaluate its own compatibility string."""
    place(target, *caching(target, tmp_path / "kept"))
    (compiled,) = (tmp_path / "kept").glob("*/compiled.onnx")
    words = ("place", compiled, "--provider", f"{target.provider},cpu", "--json")
    (note,) = [note for note in honoured(partita(*words)).json["notes"] if "compiled for" in note]
    assert note.startswith(f"compiled for {target.ort_name} (v") and "unknown (EP_NOT_APPLICABLE)" in note

"""Reading, writing and checking a package, and that the published schema is the one the code uses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from partita.errors import PackageError
from partita.foreign.folder import open_folder
from partita.package.folder import KNOWN_ANSWER, check_files, read_manifest, write_manifest
from tests.conftest import REPOSITORY
from tests.runtime.handmade_packages import handmade

PUBLISHED_SCHEMA = REPOSITORY / "docs" / "package.schema.json"
GRAPH = "model.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound package with a graph and a known answer."""
    return handmade(tmp_path / "package")


def edit(folder: Path, value: Any, *where: str | int) -> None:
    """Change a field of the manifest on disk."""
    path = folder / "manifest.json"
    raw = place = json.loads(path.read_text())
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    path.write_text(json.dumps(raw))


def refusal(folder: Path, *, hashes: bool = True) -> str:
    """The message with which reading and checking `folder` ends; one line, as every message is."""
    with pytest.raises(PackageError) as caught:
        check_files(folder, read_manifest(folder), hashes=hashes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_package_manifest_round_trips(folder):
    before = (folder / "manifest.json").read_bytes()
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    write_manifest(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == before
    record = manifest.file(GRAPH)
    assert record is not None and record.size_bytes == (folder / GRAPH).stat().st_size


def test_written_manifest_matches_published_schema(folder):
    schema = json.loads(PUBLISHED_SCHEMA.read_text(encoding="utf-8"))
    raw = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(raw, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, "colour": "blue"}, schema)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "damaged"),
        (b"{}", "schema is None"),
        (
            b'{"schema": "partita.package/2", "new": 1}',
            "'partita.package/2', but this version of Partita reads 'partita.package/1'",
        ),
        (None, "a folder with an ONNX model, not a package"),
    ],
)
def test_invalid_or_missing_manifest_is_rejected(folder, content, says):
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_bytes(content)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "model.onnx: missing from the package"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), "bytes, the manifest states"),
    ],
)
def test_damaged_file_is_reported_without_hashes(folder, damage: Callable[[Path], object], said: str):
    damage(folder / GRAPH)
    assert said in refusal(folder, hashes=False)


def test_flipped_byte_is_found_by_its_hash(folder):
    data = bytearray((folder / GRAPH).read_bytes())
    data[-1] ^= 1
    (folder / GRAPH).write_bytes(data)
    check_files(folder, read_manifest(folder), hashes=False)  # the size is right, so the quick check cannot see it
    assert "changed since export" in refusal(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "..", "..\\secret", "C:\\b"])
def test_path_outside_package_is_rejected(folder, name):
    (folder.parent / "secret").write_bytes(b"secret")
    edit(folder, [{"name": name, "size_bytes": 6, "sha256": "0" * 64}], "files")
    message = refusal(folder, hashes=False)
    assert "is outside the model folder" in message and repr(name) in message


def test_verified_package_must_list_its_verification_file(folder):
    edit(folder, "verified", "verification", "status")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit(folder, [file for file in files if file["name"] != KNOWN_ANSWER], "files")
    assert "does not list known_answer.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("colour",), "blue", "colour"),
        (("graph", "batch_size"), 0, "graph.batch_size"),
        (("graph", "max_length"), 2**40, "graph.max_length: Input should be less than or equal to"),
        (("graph", "states", 0, "dtype"), "complex128", "numpy has no type that stores complex128"),
        (("graph", "states", 0, "shape"), [-1], "graph.states.0.shape.0: Input should be greater"),
        (("graph", "files", 0, "outputs"), [], "model.onnx lacks ports for logits"),
        (("graph", "opsets"), {"": 10**9}, "graph.opsets."),
        (("graph", "attention"), "\x1b]0;title\x07", "graph.attention"),
        (("graph", "vocab_size"), 10**400, "it contains an integer of more than 64 bits"),
        (("source", "checkpoint"), "\ud800", "a lone surrogate"),
    ],
)
def test_invalid_manifest_values_are_rejected(folder, where, value, said):
    edit(folder, value, *where)
    assert said in refusal(folder)


def test_onnx_runtime_model_package_is_identified(folder):
    shutil.copy(folder / GRAPH, folder / "main.onnx")
    (folder / "manifest.json").write_text(json.dumps({"schema_version": "1.0", "components": {"main": "main"}}))
    for read in (read_manifest, open_folder):
        with pytest.raises(PackageError, match="a model package of ONNX Runtime, which only place and inspect read"):
            read(folder)

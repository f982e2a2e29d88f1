"""Reading, writing and checking a package, and that the published schema is the one the code uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import ValidationError

from partita.errors import PackageError
from partita.foreign.folder import open_folder
from partita.package.contract import GraphFile, Port, State
from partita.package.folder import (
    WEIGHTS,
    FileRecord,
    Graph,
    Manifest,
    Source,
    check_files,
    path_inside,
    read_manifest,
    record_file,
    write_manifest,
)
from partita.package.records import StepError, Verification
from tests.conftest import REPOSITORY

PUBLISHED_SCHEMA = REPOSITORY / "docs" / "package.schema.json"


def example_manifest(
    files: tuple[FileRecord, ...] = (), status: Literal["verified", "unverified"] = "unverified"
) -> Manifest:
    """A manifest in which every kind of record occurs."""
    tokens = Port(name="input_ids", role="tokens", shape=(1, "S"), dtype="int64")
    logits = Port(name="logits", role="logits", shape=(1, "K", 288), dtype="float32")
    states = tuple(
        State(
            past=f"past_key_values.0.{kind}",
            present=f"present.0.{kind}",
            layer=0,
            kind=kind,
            shape=(1, 2, 64, 16),
            dtype="float32",
            window=8,
        )
        for kind in ("key", "value")
    )
    graph_file = GraphFile(
        file="model.onnx", phase="any", sequence_length=None, nodes=61, inputs=(tokens,), outputs=(logits,)
    )
    return Manifest(
        created="2026-11-21T08:00:00Z",
        source=Source(
            checkpoint="tiny",
            model_type="llama",
            architecture="LlamaForCausalLM",
            dtype="float32",
            parameters=98624,
            files=(FileRecord(name="model.safetensors", size_bytes=396888, sha256="0" * 64),),
        ),
        graph=Graph(
            files=(graph_file,),
            states=states,
            opsets={"": 21, "com.microsoft": 1},
            attention="gqa",
            appends_chunks=True,
            precision="fp32",
            batch_size=1,
            max_length=64,
            vocab_size=288,
            weight_bytes=394496,
            cache_bytes=16384,
        ),
        files=files,
        tokenizer="tokenizers",
        toolchain={"torch": "2.13.0", "onnx": "1.23.2"},
        verification=Verification(
            status=status,
            detail="replayed on the CPU",
            provider="cpu",
            reference="transformers, fp32, eager",
            tolerance=1e-4,
            steps=(
                StepError(step="prefill", output="logits", max_abs_error=1e-6, max_rel_error=2e-7, tokens_equal=True),
            ),
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound package with two files."""
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "model.onnx.data").write_bytes(bytes(range(256)) * 16)
    files = tuple(record_file(tmp_path, name) for name in ("model.onnx", "model.onnx.data"))
    write_manifest(tmp_path, example_manifest(files))
    return tmp_path


def edit(folder: Path, **fields: Any) -> None:
    """Change top-level fields of the manifest on disk."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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
    assert manifest == example_manifest(manifest.files)
    check_files(folder, manifest, hashes=True)
    write_manifest(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == before
    record = manifest.file("model.onnx.data")
    assert record is not None and record.size_bytes == 4096
    assert manifest.file("tokenizer.json") is None
    with pytest.raises(ValidationError):
        manifest.created = "later"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "damaged"),
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[]", "schema is None"),
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


def test_missing_folder_error_suggests_export(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert "nowhere" in message and "partita export" in message


def test_missing_file_or_folder_in_its_place_is_rejected(folder):
    (folder / "model.onnx").unlink()
    message = refusal(folder, hashes=False)
    assert "model.onnx" in message and "missing" in message
    (folder / "model.onnx").mkdir()
    assert "a folder, not a regular file" in refusal(folder, hashes=False)


@pytest.mark.parametrize("size", [0, 4095, 4097])
def test_file_size_is_checked_without_hashes(folder, size):
    with (folder / "model.onnx.data").open("r+b") as stream:
        stream.truncate(size)
    message = refusal(folder, hashes=False)
    assert f"{size:,} bytes" in message and "4,096" in message


def test_flipped_byte_is_found_by_its_hash(folder):
    path = folder / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[4095] ^= 1
    path.write_bytes(data)
    check_files(folder, read_manifest(folder), hashes=False)  # the size is right, so the quick check cannot see it
    assert "changed since export" in refusal(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "..", "..\\secret", "C:\\b"])
def test_path_outside_package_is_rejected(folder, name):
    (folder.parent / "secret").write_bytes(b"secret")
    edit(folder, files=[FileRecord(name=name, size_bytes=6, sha256="0" * 64).model_dump()])
    message = refusal(folder, hashes=False)
    assert "is outside the model folder" in message and repr(name) in message


def test_symbolic_links_must_stay_inside_package(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "weights").write_bytes(b"secret")
    (folder / "file").symlink_to(outside / "weights")
    (folder / "folder").symlink_to(outside)
    for name in ("file", "folder/weights"):
        with pytest.raises(PackageError, match="a link out of the folder, to .*/weights"):
            path_inside(folder, name)
    (folder / "alias").symlink_to("model.onnx")
    assert path_inside(folder, "alias").read_bytes() == b"graph"
    (outside / "latest").symlink_to(folder)
    manifest = read_manifest(outside / "latest")
    check_files(outside / "latest", manifest, hashes=True)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises(PackageError, match=r"a broken symbolic link to model\.onnx\.data"):
        check_files(folder, manifest, hashes=False)


def test_written_manifest_matches_published_schema(folder):
    schema = json.loads(PUBLISHED_SCHEMA.read_text(encoding="utf-8"))
    raw = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(raw, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, "colour": "blue"}, schema)


def test_verified_package_must_list_its_verification_file(tmp_path):
    with pytest.raises(PackageError, match=r"does not list known_answer\.safetensors"):
        check_files(tmp_path, example_manifest(status="verified"), hashes=False)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("colour",), "blue", "colour"),
        (("graph", "batch_size"), 0, "graph.batch_size"),
        (("graph", "max_length"), 2**40, "graph.max_length: Input should be less than or equal to"),
        (("graph", "batch_size"), 10**9, "graph.batch_size: Input should be less than or equal to"),
        (("graph", "states", 0, "dtype"), "complex128", "numpy has no type that stores complex128"),
        (("graph", "states", 0, "dtype"), "x", "'x' is not an element type"),
        (("graph", "states", 0, "shape"), [-1], "graph.states.0.shape.0: Input should be greater"),
        (("graph", "states", 0, "layer"), 10**18, "graph.states.0.layer"),
        (("graph", "files", 0, "inputs", 0, "dtype"), "complex128", "numpy has no type"),
        (("graph", "files", 0, "outputs"), [], "model.onnx lacks ports for logits"),
        (("graph", "files", 0, "inputs"), [], "model.onnx lacks ports for tokens"),
        (("graph", "files", 0, "nodes"), -1, "graph.files.0.nodes"),
        (("graph", "opsets"), {"": 10**9}, "graph.opsets."),
        (("graph", "attention"), "\x1b]0;title\x07", "graph.attention"),
        (("graph", "precision"), "\x1b]0;title\x07", "graph.precision"),
        (("graph", "vocab_size"), 10**400, "it contains an integer of more than 64 bits"),
        (("source", "checkpoint"), "\ud800", "a lone surrogate"),
    ],
)
def test_invalid_manifest_values_are_rejected(folder, where, value, said):
    raw = json.loads((folder / "manifest.json").read_text())
    place = raw
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(raw))
    assert said in refusal(folder)


def test_error_message_for_invalid_manifest_is_bounded(folder):
    raw = json.loads((folder / "manifest.json").read_text())
    raw["graph"]["files"][0]["phase"] = "x" * 10_000_000
    (folder / "manifest.json").write_text(json.dumps(raw))
    assert len(refusal(folder)) < 6000


def test_onnx_runtime_model_package_is_identified(tmp_path):
    variant = {"variant_directory": "main/cpu", "executor_info": {"ort": {"model_file": "model.onnx"}}}
    content = {"schema_version": "1.0", "components": {"main": {"variants": {"cpu": variant}}}}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    (tmp_path / "main" / "cpu").mkdir(parents=True)
    (tmp_path / "main" / "cpu" / "model.onnx").touch()
    for read in (read_manifest, open_folder):
        with pytest.raises(PackageError, match="a model package of ONNX Runtime, which only place and inspect read"):
            read(tmp_path)

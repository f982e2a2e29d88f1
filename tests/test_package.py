"""Reading, writing and checking a package, and that the published schema is the one the code uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import ValidationError

from partita import package
from partita.contract import GraphFile, Port, State
from partita.errors import PackageError
from partita.package import (
    WEIGHTS,
    FileRecord,
    Graph,
    Manifest,
    Source,
    check_files,
    inside,
    read_manifest,
    record_file,
    write_manifest,
)
from partita.package_records import StepError, Verification
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


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert manifest == example_manifest(manifest.files)
    check_files(folder, manifest, hashes=True)


def test_the_same_manifest_gives_the_same_bytes(folder):
    before = (folder / "manifest.json").read_bytes()
    write_manifest(folder, read_manifest(folder))
    assert (folder / "manifest.json").read_bytes() == before


def test_a_file_is_found_by_its_name(folder):
    manifest = read_manifest(folder)
    record = manifest.file("model.onnx.data")
    assert record is not None and record.size_bytes == 4096
    assert manifest.file("tokenizer.json") is None


def test_records_cannot_be_changed():
    with pytest.raises(ValidationError):
        example_manifest().created = "later"


def test_missing_folder(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert "nowhere" in message and "partita export" in message


def test_folder_without_manifest(tmp_path):
    assert "not a Partita package" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1, 2"], ids=["cut", "empty", "not UTF-8", "array"])
def test_damaged_json(folder, content):
    (folder / "manifest.json").write_bytes(content)
    assert "damaged" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", "null", '"text"', "{}"])
def test_json_that_is_no_manifest(folder, content):
    (folder / "manifest.json").write_text(content)
    assert "schema is None" in refusal(folder)


def test_newer_schema(folder):
    edit(folder, schema="partita.package/2", something_new=True)
    message = refusal(folder)
    assert "partita.package/2" in message and "partita.package/1" in message


def test_unknown_field(folder):
    edit(folder, colour="blue")
    assert "colour" in refusal(folder)


def test_field_of_the_wrong_type_is_named_with_its_path(folder):
    raw = json.loads((folder / "manifest.json").read_text())
    raw["graph"]["batch_size"] = 0
    edit(folder, graph=raw["graph"])
    assert "graph.batch_size" in refusal(folder)


def test_missing_file(folder):
    (folder / "model.onnx").unlink()
    message = refusal(folder, hashes=False)
    assert "model.onnx" in message and "missing" in message


def test_a_folder_in_place_of_a_file(folder):
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").mkdir()
    assert "a folder, not a regular file" in refusal(folder, hashes=False)


@pytest.mark.parametrize("size", [0, 4095, 4097])
def test_size_is_always_checked(folder, size):
    with (folder / "model.onnx.data").open("r+b") as stream:
        stream.truncate(size)
    message = refusal(folder, hashes=False)
    assert f"{size:,} bytes" in message and "4,096" in message


@pytest.mark.parametrize("position", [0, 2048, 4095])
def test_flipped_byte_is_found_by_its_hash(folder, position):
    path = folder / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    check_files(folder, read_manifest(folder), hashes=False)  # the size is right, so the quick check cannot see it
    assert "altered" in refusal(folder)


OUTSIDE = ["../secret", "/etc/hostname", "a/../../secret", "..", "..\\secret", "C:\\b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_path_that_leaves_the_package(folder, name):
    (folder.parent / "secret").write_bytes(b"secret")
    edit(folder, files=[FileRecord(name=name, size_bytes=6, sha256="0" * 64).model_dump()])
    message = refusal(folder, hashes=False)
    assert "leaves the model folder" in message and repr(name) in message


@pytest.mark.parametrize("link", ["file", "folder"])
def test_symlink_that_leaves_the_package(tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_bytes(b"secret")
    inner = tmp_path / "package"
    inner.mkdir()
    (inner / "entry").symlink_to(outside / "weights" if link == "file" else outside)
    name = "entry" if link == "file" else "entry/weights"
    with pytest.raises(PackageError, match="a link out of the folder, to .*/outside/weights"):
        inside(inner, name)


def test_a_symlink_that_leads_back_to_itself_leads_to_nothing(folder):
    manifest = read_manifest(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises(PackageError, match=r"a symbolic link to model\.onnx\.data, where nothing is"):
        check_files(folder, manifest, hashes=False)


def test_symlink_within_the_package_is_followed(folder):
    (folder / "alias").symlink_to("model.onnx")
    assert inside(folder, "alias").read_bytes() == b"graph"


def test_package_reached_through_a_symlink(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "latest"
    link.symlink_to(folder)
    check_files(link, read_manifest(link), hashes=True)


def test_hash_is_the_common_one(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert package.sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_written_manifest_obeys_the_published_schema(folder):
    schema = json.loads(PUBLISHED_SCHEMA.read_text(encoding="utf-8"))
    raw = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(raw, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, "colour": "blue"}, schema)


def test_a_verified_package_lists_the_answer_that_verified_it(tmp_path):
    with pytest.raises(PackageError, match=r"does not list known_answer\.safetensors"):
        check_files(tmp_path, example_manifest(status="verified"), hashes=False)


@pytest.mark.parametrize("gone", [False, True])
def test_a_package_that_is_replaced_while_it_is_read(folder, gone):
    """The files are another package's than the manifest that was read: not damaged, and not to be exported again."""
    before = read_manifest(folder)
    edit(folder, created="2026-11-22T08:00:00Z")
    if gone:
        (folder / "model.onnx").unlink()
    else:
        (folder / "model.onnx").write_bytes(b"another graph")
    with pytest.raises(PackageError, match="was replaced by another export while it was read"):
        check_files(folder, before, hashes=True)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("graph", "max_length"), 2**40, "graph.max_length: Input should be less than or equal to"),
        (("graph", "batch_size"), 10**9, "graph.batch_size: Input should be less than or equal to"),
        (("graph", "states", 0, "dtype"), "complex128", "numpy has no type that stores complex128"),
        (("graph", "states", 0, "dtype"), "x", "'x' is no element type"),
        (("graph", "states", 0, "shape"), [-1], "graph.states.0.shape.0: Input should be greater"),
        (("graph", "states", 0, "layer"), 10**18, "graph.states.0.layer"),
        (("graph", "files", 0, "inputs", 0, "dtype"), "complex128", "numpy has no type"),
        (("graph", "files", 0, "outputs"), [], "model.onnx has no port for logits"),
        (("graph", "files", 0, "inputs"), [], "model.onnx has no port for tokens"),
        (("graph", "files", 0, "nodes"), -1, "graph.files.0.nodes"),
        (("graph", "opsets"), {"": 10**9}, "graph.opsets."),
        (("graph", "attention"), "\x1b]0;title\x07", "graph.attention"),
        (("graph", "precision"), "\x1b]0;title\x07", "graph.precision"),
        (("graph", "vocab_size"), 10**400, "it has an integer of more than 64 bits"),
        (("source", "checkpoint"), "\ud800", "half a character"),
    ],
)
def test_values_that_no_package_has(folder, where, value, said):
    raw = json.loads((folder / "manifest.json").read_text())
    place = raw
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(raw))
    assert said in refusal(folder)


def test_thousands_of_wrong_states_are_a_short_message(folder):
    raw = json.loads((folder / "manifest.json").read_text())
    raw["graph"]["files"][0]["phase"] = "x" * 10_000_000
    (folder / "manifest.json").write_text(json.dumps(raw))
    assert len(refusal(folder)) < 6000

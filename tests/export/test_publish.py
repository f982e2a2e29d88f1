"""A package is published completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.errors import ParityError, ResourceError
from partita.export.pipeline import ExportOptions, export
from partita.export.verify import known_answer
from partita.export.verify.package_runs import changed_folder
from partita.package.folder import MANIFEST, Manifest, read_manifest
from partita.package.records import Verification
from tests.conftest import TinyCheckpoint

ONE: dict[str, Any] = {"num_hidden_layers": 1}


def no_replay(folder: Path, manifest: Manifest) -> Verification:
    raise AssertionError("not to be called")


def options(checkpoint: Path, out: Path, **changes: object) -> ExportOptions:
    return ExportOptions(str(checkpoint), out, max_length=64, **changes)  # type: ignore[arg-type]


def test_converted_copy_of_killed_export_is_removed(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """It lies next to the work folder and has its name plus a suffix."""
    out, work = tmp_path / "out", tmp_path / ".out.partial-a_b1c2d3"
    export(options(tiny_checkpoint("llama", **ONE), out, verify=False), replay=no_replay)
    out.rename(work)
    with changed_folder(work, read_manifest(work), lambda model: model) as (copy, _):
        name = copy.name
    (tmp_path / name).mkdir()
    export(options(tiny_checkpoint("llama", **ONE), out, verify=False), replay=no_replay)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    result = read_manifest(out).verification
    assert (result.status, result.detail) == ("unverified", "exported with `verify=False`")


def test_force_replaces_package_only_after_successful_export(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint("llama", **ONE), tmp_path / "out"
    export(options(checkpoint, out, verify=False), replay=no_replay)
    first = read_manifest(out)

    def fail(folder: Path, manifest: Manifest) -> Verification:
        assert not (folder / MANIFEST).exists()
        return Verification(status="unverified", detail="logits, decode 3: max relative error 0.5")

    with pytest.raises(ParityError, match="decode 3") as caught:
        export(options(checkpoint, out, force=True), replay=fail)
    assert caught.value.exit_code == 4
    assert read_manifest(out) == first
    export(options(checkpoint, out, force=True, verify=False, attention="onnx24"), replay=no_replay)
    assert read_manifest(out).graph.attention == "onnx24"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_lack_of_memory_raises_resource_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tiny_checkpoint("llama", **ONE), tmp_path / "out"
    with pytest.raises(ResourceError, match="the cache takes"):
        export(options(checkpoint, out, batch_size=1 << 24), replay=no_replay)
    monkeypatch.setattr(known_answer, "MEMORY_MARGIN", 1e9)
    with pytest.raises(ResourceError, match="export with `verify=False`"):
        export(options(checkpoint, out), replay=no_replay)
    assert not list(tmp_path.iterdir())


def test_file_as_parent_folder_raises_resource_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="cannot create a folder"):
        export(options(tiny_checkpoint("llama", **ONE), tmp_path / "file" / "out"), replay=no_replay)

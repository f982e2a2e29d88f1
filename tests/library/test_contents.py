"""What a run over a file goes on with: only with what gives the same answers, in folders of other exporters too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from partita.errors import PackageError
from partita.foreign.folder import open_folder
from partita.library.contents import contents_hash
from tests.foreign.test_any_decoder import LOOKED_UP, folder_of
from tests.runtime.handmade_packages import handmade


def hash_of(folder: Path) -> str:
    return contents_hash(folder, open_folder(folder))


@pytest.mark.parametrize("foreign", [False, True])
def test_what_makes_an_answer_another_makes_the_hash_another(tmp_path: Path, foreign: bool) -> None:
    folder = folder_of(LOOKED_UP, tmp_path / "odd") if foreign else handmade(tmp_path / "package")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    seen = [hash_of(folder)]
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    for path in elsewhere.rglob("*"):
        os.utime(path, (0, 0))
    assert hash_of(elsewhere) == seen[0], "of a copy, on another machine say, it is the same"
    (folder / "notes.txt").write_text("no part of it")
    assert hash_of(folder) == seen[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    seen.append(hash_of(folder))
    (folder / "tokenizer.json").write_text("{}")
    seen.append(hash_of(folder))
    assert len(set(seen)) == 3


def test_weights_of_another_exporter_are_known_by_what_they_are(tmp_path: Path) -> None:
    """Of the same size, and of the same time: a folder that was copied over."""
    folder = folder_of(LOOKED_UP, tmp_path / "odd")
    before, path = hash_of(folder), folder / "decoder.onnx"
    stat, content = path.stat(), path.read_bytes()
    assert content.count(b"memory_in_7") and content.count(b"memory_out_7")
    path.write_bytes(content.replace(b"memory_in_7", b"memory_in_8").replace(b"memory_out_7", b"memory_out_8"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size and hash_of(folder) != before


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "package")
    manifest = open_folder(folder)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(PackageError, match=r"config\.json"):
        contents_hash(folder, manifest)

"""What answers come from, as one hash: a run over a file goes on, and workers take part, only with the same."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from partita.errors import PackageError
from partita.package import COMPANIONS, Manifest, sha256_of, unreadable

OF_OTHERS = ("genai_config.json",)
"""Files that folders of other exporters have beside those that a checkpoint has."""


def contents_hash(folder: Path, manifest: Manifest) -> str:
    """Of what a manifest says, and of the files that a person may edit, such as the tokenizer's, as they are now.

    A manifest has the hashes of graphs and weights. A folder of another exporter has none, so they are read, too.
    Raises PackageError for a file that cannot be read.
    """
    digest = hashlib.sha256(manifest.model_dump_json(exclude={"created"}).encode())
    homes = {"", *(str(PurePosixPath(file.file).parent) for file in manifest.graph.files)}
    companions = {str(PurePosixPath(home, name)) for home in homes for name in (*COMPANIONS, *OF_OTHERS)}
    there = {name for name in companions if (folder / name).is_file()}
    for name in sorted(there | {record.name for record in manifest.files if not record.sha256}):
        try:
            found = sha256_of(folder / name)
        except PermissionError as error:
            raise unreadable(folder / name) from error
        except OSError as error:
            raise PackageError(f"{folder / name}: cannot be read ({error.strerror or error})") from error
        digest.update(f"{name}\0{found}\0".encode())
    return digest.hexdigest()

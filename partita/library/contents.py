"""The hash of a package, which resumed runs and cluster workers compare."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from partita.errors import PackageError
from partita.package.folder import COMPANIONS, Manifest, sha256_of, unreadable

OF_OTHERS = ("genai_config.json",)
"""Additional files of foreign folders."""


def contents_hash(folder: Path, manifest: Manifest) -> str:
    """SHA-256 of the manifest and of editable files such as the tokenizer's.

    Graphs and weights count by their hashes in the manifest; those of a foreign folder are hashed. Raises PackageError
    for an unreadable file.
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

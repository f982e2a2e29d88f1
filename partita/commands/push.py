"""`partita push`: uploads a package to the Hugging Face hub."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import partita
from partita.commands.terminal import Spinner, draws_progress, note, write_stdout
from partita.errors import UsageError
from partita.export.hub import HUB_ID, upload
from partita.options.export import PushCommand
from partita.package.folder import check_files, read_manifest


def run(options: PushCommand) -> None:
    """Check the package, upload it, and print the address of the commit.

    Raises PackageError for a damaged package, UsageError for a repository that the hub refuses.
    """
    package, name = Path(options.package), options.repository
    found = HUB_ID.fullmatch(name)
    if found is None or found["name"] != name:
        raise UsageError(f"`repository`: {name!r} is not of the form OWNER/NAME")
    manifest = read_manifest(package)
    check_files(package, manifest, hashes=False)
    source = f"{manifest.source.checkpoint}, {manifest.graph.precision}, Partita {partita.__version__}"
    title = f"uploading {package} to {name}"
    if draws_progress():  # huggingface_hub draws its own bars
        note(title)
    with nullcontext() if draws_progress() else Spinner(title):
        address = upload(package, name, source, private=options.private)
    write_stdout(f"{address}\n")

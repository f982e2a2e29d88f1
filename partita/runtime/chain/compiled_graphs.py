"""A folder of graphs that a provider has compiled: ONNX files with EPContext nodes, opened instead of compiling again.

An entry is a folder, named by a hash of everything that the compiled graph depends on. Its record has checksums of its
files, and of the session that compiled it the nodes of each subgraph and the log, which are the evidence of a report.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from partita import process
from partita.diagnosis.graphs import compiled_subgraphs
from partita.files import usable_folder
from partita.observations.facts import AssignedNode
from partita.observations.records import Record
from partita.package.folder import sha256_of
from partita.providers.resolve import Resolution
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.native_log import INFO
from partita.runtime.ort.registry import provider_identity
from partita.runtime.ort.session import EP_CONTEXT, NativeFailureError, Session, open_native
from partita.runtime.ort.session_options import Opening
from partita.runtime.place.model_file import data_files
from partita.untrusted_files import read_json_value

FORMAT: Literal[2] = 2
RECORD, GRAPH, WEIGHTS = "entry.json", "compiled.onnx", "weights.data"
SHORT_KEY = 24
"""Characters of the hash in the name of an entry."""
UNFINISHED, DAY_SECONDS = ".compiling-", 86400
"""Prefix of the folder of a compilation, and the age at which it is that of a killed process."""


class Entry(Record):
    """The record of a compiled graph, written after the session that compiled it."""

    format: Literal[2] = FORMAT
    key: str
    files: dict[str, str]
    """File name -> SHA-256."""
    subgraphs: dict[str, tuple[AssignedNode, ...]]
    """Nodes in each EPContext node, by its name."""
    log: tuple[str, ...]


def open_compiled(path: Path, active: Sequence[Resolution], opening: Opening) -> tuple[Session | None, tuple[str, ...]]:
    """A session of the compiled graph of `path`, and notes; it is compiled first unless an entry is there.

    None if no provider has a cache folder, or the graph cannot be compiled, kept or opened; the notes have the reason.
    Raises UsageError for an unusable folder.
    """
    named = next(((entry, entry.cache_folder) for entry in active if entry.cache_folder), None)
    if named is None:
        return None, ()
    provider, folder = named[0].provider, usable_folder(named[1], f"{named[0].provider.name}.cache_dir")
    try:
        key = _key(path, active, opening)
    except OSError as error:
        return None, (f"{path.name}: the compiled graph is not kept: {error}",)
    place = folder / f"{path.stem}-{key[:SHORT_KEY]}"
    notes: tuple[str, ...] = ()
    if place.is_dir():
        try:
            session = _open_entry(place, key, path, active, opening)
        except (OSError, ValueError, NativeFailureError) as error:
            reason = one_line(str(error))
            notes = (f"{path.name}: the compiled graph in {place} cannot be used and was compiled again: {reason}",)
        else:
            return session, (f"{path.name}: compiled by {provider.name} on an earlier start, read from {place}",)
    try:
        seconds = _compile(place, key, path, active, opening)
        session = _open_entry(place, key, path, active, opening)
    except (OSError, ValueError, NativeFailureError) as error:
        return None, (*notes, f"{path.name}: the compiled graph is not kept: {one_line(str(error))}")
    return session, notes or (f"{path.name}: compiled by {provider.name} in {seconds:.1f} s and kept in {place}",)


def _key(path: Path, active: Sequence[Resolution], opening: Opening) -> str:
    """Hash of the graph, its weights, the providers with their libraries, devices and options, and the session options.

    Raises OSError for an unreadable file.
    """
    import onnx

    graph = opening.model or path.read_bytes()
    weights = sorted(data_files(onnx.load_model_from_string(graph)))
    home = opening.weights or path.parent
    parts = {
        "format": FORMAT,
        "graph": hashlib.sha256(graph).hexdigest(),
        "weights": {name: sha256_of(home / name) for name in weights},
        "providers": [provider_identity(entry, os.environ) for entry in active],
        "session": [dict(opening.config), opening.optimise, process.own_process],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compile(place: Path, key: str, path: Path, active: Sequence[Resolution], opening: Opening) -> float:
    """Compile a graph and keep it as the entry `place`; return the seconds.

    Raises NativeFailureError if a provider rejects it, OSError if it cannot be written, ValueError if ONNX Runtime does
    not list the compiled nodes.
    """
    import onnx

    for old in place.parent.glob(f"{UNFINISHED}*"):
        if time.time() - old.stat().st_mtime > DAY_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=UNFINISHED) as temporary:
        unfinished = Path(temporary) / "entry"
        unfinished.mkdir()
        settings = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(unfinished / GRAPH),
            "ep.context_model_external_initializers_file_name": WEIGHTS,
        }
        quiet = replace(opening, observe=False, severity=INFO, config={**opening.config, **settings})
        with closing(open_native(path, active, quiet)) as session:
            seconds = session.load_seconds
            if not (unfinished / GRAPH).is_file():
                raise ValueError("ONNX Runtime compiled no subgraph")
            nodes = onnx.load(unfinished / GRAPH, load_external_data=False).graph.node
            written = [node.name for node in nodes if node.op_type == EP_CONTEXT]
            planned = [name for stream in session.plan or () for name in stream]
            found = compiled_subgraphs(session.assigned(), planned, [])
            if not written or set(written) - set(found):
                raise ValueError("ONNX Runtime does not list the nodes of its compiled subgraphs")
            entry = Entry(
                key=key,
                files={file.name: sha256_of(file) for file in sorted(unfinished.iterdir())},
                subgraphs={name: found[name] for name in written},
                log=session.log,
            )
        (unfinished / RECORD).write_text(entry.model_dump_json(), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        unfinished.replace(place)
    return seconds


def _open_entry(place: Path, key: str, path: Path, active: Sequence[Resolution], opening: Opening) -> Session:
    """A session of the compiled graph in the folder `place`, presented as one of `path`.

    Raises NativeFailureError, OSError, and ValueError with the reason for an entry that is damaged, of another graph,
    or does not know a subgraph.
    """
    try:
        entry = Entry.model_validate(read_json_value(place / RECORD))
    except ValidationError as error:
        raise ValueError(f"{RECORD} is damaged") from error
    if entry.key != key:
        raise ValueError("it belongs to another graph, provider or version")
    for name in (GRAPH, *entry.files):
        if sha256_of(place / Path(name).name) != entry.files.get(name):
            raise ValueError(f"{name} is damaged")
    session = open_native(place / GRAPH, active, replace(opening, model=None, weights=None))
    unknown = {node.name for node in session.assigned() if node.op_type == EP_CONTEXT} - set(entry.subgraphs)
    if unknown:
        session.close()
        raise ValueError(f"ONNX Runtime reports the unknown subgraph {min(unknown)}")
    session.present_as(path, opening, entry.subgraphs, entry.log)
    return session

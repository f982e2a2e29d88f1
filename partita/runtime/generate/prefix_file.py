"""A prefix file: tokens, and the states of a row that has read them, for later runs of the same package.

A safetensors file. `tokens` [T] is int64; `state.NAME` is the row's state NAME: keys and values [KV, T, D], other
states without the batch axis. bfloat16 is stored as uint16. The metadata names the package by the hashes of its graphs
and weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from os.path import commonprefix
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import numpy as np

from partita import __version__, dtypes
from partita.errors import GenerationError, UsageError
from partita.files import write_bytes
from partita.package.folder import Manifest, path_inside, sha256_of
from partita.remedies import Remedy
from partita.runtime.generate.request import Prefix
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.tokens import Text
from partita.untrusted_files import MOST_BYTES, check_size, parsed_record

if TYPE_CHECKING:
    from partita.runtime.generate.bound_graph import LoadedGraph
    from partita.runtime.generate.cache import RowShapes


SCHEMA: Final = "partita.prefix/1"
STATE = "state."
SAVE_AGAIN = Remedy("save it again with this package")


@dataclass(frozen=True, slots=True)
class PrefixContent:
    """The content of a prefix: a beginning of text, a system message, or token ids."""

    tokens: tuple[int, ...]
    text: str | None = None
    system: str | None = None
    adapter: str | None = None
    """Name of the adapter that the prefix was computed with."""


def identity(folder: Path, manifest: Manifest, graphs: Sequence[LoadedGraph], adapter: str | None = None) -> str:
    """A hash of everything that affects the states: graphs, weights, adapter and contract.

    Hashes come from the manifest; the files of a foreign folder are hashed.
    """
    names = [record.file for record in manifest.switchable if record.name == adapter and record.file is not None]
    for entry in graphs:
        home = PurePosixPath(entry.graph.file).parent
        names += [entry.graph.file, *(str(home / name) for name in entry.model.data_files)]
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        record = manifest.file(name)
        known = "" if record is None else record.sha256
        digest.update((known or sha256_of(path_inside(folder, name))).encode())
    if manifest.foreign is not None:  # its contract may be set by the user
        roles = [(port.name, port.role) for file in manifest.graph.files for port in (*file.inputs, *file.outputs)]
        digest.update(json.dumps(roles).encode())
    return digest.hexdigest()


def write_prefix(path: Path, prefix: Prefix, content: PrefixContent, package: str) -> int:
    """Write a prefix; return its size in bytes. `package`: see `identity`. Raises ReportError if this fails."""
    from safetensors.numpy import save

    tensors = {f"{STATE}{name}": np.ascontiguousarray(values) for name, values in prefix.states.items()}
    about = {name: value for name, value in asdict(content).items() if name != "tokens"}
    metadata = {"schema": SCHEMA, "partita": __version__, "package": package, "said": json.dumps(about)}
    data = save({"tokens": np.asarray(prefix.tokens, np.int64), **tensors}, metadata)
    write_bytes(data, path, "prefix")
    return len(data)


def read_content(path: Path) -> PrefixContent:
    """The content of a prefix, without its states. Raises GenerationError if the file is not a prefix."""
    return _read(path)[0]


def read_prefix(path: Path, package: str, adapter: str | None, shapes: RowShapes) -> Prefix:
    """Read a prefix for a package and the selected adapter. `shapes`: of a row's states after the prefix's tokens.

    Raises GenerationError for a damaged file, and for a prefix of another package or adapter.
    """
    from safetensors import safe_open

    content, saved_with = _read(path)
    if content.adapter != adapter:
        used, wanted = ("no adapter" if name is None else f"adapter {name}" for name in (content.adapter, adapter))
        raise GenerationError(f"saved with {used}, but this run uses {wanted}", path=path, remedy=SAVE_AGAIN)
    if saved_with != package:
        raise GenerationError(
            "saved with another package, or another adapter of the same name, so its states are not valid here",
            path=path,
            remedy=SAVE_AGAIN,
        )
    with safe_open(path, framework="numpy") as file:
        stored = {name.removeprefix(STATE) for name in file.keys() if name.startswith(STATE)}  # noqa: SIM118
        states = {name: file.get_tensor(f"{STATE}{name}") for name in sorted(stored & set(shapes))}
    for name, (shape, dtype) in shapes.items():
        found = states.get(name)
        if found is None or found.shape != shape or found.dtype != np.dtype(dtypes.storage(dtype)):
            raise _damaged(path, f"the state {name} does not match the package")
    return Prefix(np.array(content.tokens, np.int64), states, adapter)


def _read(path: Path) -> tuple[PrefixContent, str]:
    """The content of a prefix, and the package that it was saved with; see `identity`."""
    from safetensors import SafetensorError, safe_open

    try:
        check_size(path, MOST_BYTES)
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get("schema") != SCHEMA:
                raise GenerationError(
                    f"not a prefix: its schema is {metadata.get('schema')!r}; this version of Partita reads {SCHEMA!r}",
                    path=path,
                    remedy=SAVE_AGAIN,
                )
            tokens = file.get_tensor("tokens")
            if tokens.ndim != 1 or not len(tokens) or tokens.dtype != np.int64 or tokens.min() < 0:
                raise ValueError("its tokens are not token ids")
            content = PrefixContent(tuple(tokens.tolist()), **parsed_record(metadata["said"]))
            if not all(value is None or isinstance(value, str) for value in astuple(content)[1:]):
                raise ValueError("text, system and adapter are not strings")
            return content, metadata["package"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> GenerationError:
    return GenerationError(f"not a readable prefix ({' '.join(reason.split())[:200]})", path=path, remedy=SAVE_AGAIN)


ENDINGS = ("a", " b", "1", ".", "\n", "(", '"', "中")
"""Possible continuations of a text. Tokenizers join some of them with the end of the text; templates trim some."""


def text_prefix(text: Text, begin: str) -> PrefixContent:
    """The prefix of prompts that begin with a text. Raises GenerationError if all tokens depend on the continuation."""
    return PrefixContent(_whatever_follows(lambda end: text.encode(begin + end)), text=begin)


def system_prefix(text: Text, system: str) -> PrefixContent:
    """The prefix of conversations with a system message, up to the beginning of the user's.

    Raises UsageError without a chat template, GenerationError when the template rejects the message.
    """
    tokens = _whatever_follows(lambda end: text.encode_messages(conversation(end, system)))
    return PrefixContent(tokens, system=system)


def _whatever_follows(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Tokens that a text begins with for every continuation."""
    tokens = tuple(commonprefix([list(encode(end)) for end in ENDINGS]))
    if not tokens:
        raise GenerationError("every token of the prefix depends on the text after it; use a longer prefix")
    return tokens


def prompt_after(content: PrefixContent, prompt: str, text: Text, *, chat: bool = False) -> tuple[int, ...]:
    """Tokens of a prompt that continues a prefix, equal to those of the joined text.

    Raises UsageError for a prefix of another kind than the prompt.
    """
    if chat or content.system is not None:
        return tuple(text.encode_messages(conversation(prompt, system_of(content))))
    if content.text is None:
        raise UsageError("the prefix was saved from token ids and cannot be continued with text; pass token ids")
    return tuple(text.encode(content.text + prompt))


def ids_after(content: PrefixContent | None, ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that continue a prefix, if there is one.

    Raises UsageError for a prefix of text, whose last tokens depend on the text after it.
    """
    if content is None:
        return tuple(ids)
    if content.text is not None or content.system is not None:
        raise UsageError("the prefix was saved from text and cannot be continued with token ids; pass text")
    return (*content.tokens, *ids)


def system_of(content: PrefixContent) -> str:
    """The system message of a prefix. Raises UsageError if it has none."""
    if content.system is None:
        raise UsageError(
            "the prefix has no system message, so no conversation can continue it; save one with a system message"
        )
    return content.system

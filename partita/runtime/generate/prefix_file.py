"""A prefix in a file: tokens, and the states of a row that has taken them in, for later runs of the same package.

A safetensors file. `tokens` [T] are int64, `state.NAME` what a row has in the state that graphs read as NAME: keys and
values [KV, T, D], other states as they are without the axis of the batch. bfloat16 is stored by its bits, as uint16.
The metadata names the package by the hashes of its graphs and weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from partita import __version__, dtypes
from partita.capped import MOST_BYTES, check_size, parsed_record
from partita.errors import GenerationError, UsageError
from partita.files import write_bytes
from partita.package.folder import Manifest, inside, sha256_of
from partita.remedies import Remedy
from partita.runtime.generate.cache.base import RowShapes
from partita.runtime.generate.request import Prefix
from partita.runtime.generate.text.chat_templates import conversation
from partita.runtime.generate.text.tokens import Text

if TYPE_CHECKING:
    from partita.runtime.generate.bound_graph import LoadedGraph


SCHEMA: Final = "partita.prefix/1"
STATE = "state."
MOST_TOKENS = 1 << 22
SAVE_AGAIN = Remedy("save it again with this package")


@dataclass(frozen=True, slots=True)
class Said:
    """What a prefix says: text that goes on, a message of the system, or tokens alone."""

    tokens: tuple[int, ...]
    text: str | None = None
    system: str | None = None
    adapter: str | None = None
    """Name of the adapter of the package that it was read with."""


def identity(folder: Path, manifest: Manifest, graphs: Sequence[LoadedGraph], adapter: str | None = None) -> str:
    """A hash of what computes: the package's graphs and weights, those of an adapter, and what inputs were taken for.

    Where nobody recorded hashes, in a folder of another exporter, the files are read for them.
    """
    names = [record.file for record in manifest.switchable if record.name == adapter and record.file is not None]
    for entry in graphs:
        home = PurePosixPath(entry.graph.file).parent
        names += [entry.graph.file, *(str(home / name) for name in entry.model.data_files)]
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        record = manifest.file(name)
        digest.update((record.sha256 if record is not None else "").encode() or _hash_of(folder, name))
    if manifest.foreign is not None:  # which a contract may say otherwise
        roles = [(port.name, port.role) for file in manifest.graph.files for port in (*file.inputs, *file.outputs)]
        digest.update(json.dumps(roles).encode())
    return digest.hexdigest()


def _hash_of(folder: Path, name: str) -> bytes:
    return sha256_of(inside(folder, name)).encode()


def write_prefix(path: Path, prefix: Prefix, said: Said, package: str) -> int:
    """Write a prefix; its size in bytes. `package`: see `identity`. Raises ReportError when it cannot be written."""
    from safetensors.numpy import save

    tensors = {f"{STATE}{name}": np.ascontiguousarray(values) for name, values in prefix.states.items()}
    about = {"text": said.text, "system": said.system, "adapter": said.adapter}
    metadata = {"schema": SCHEMA, "partita": __version__, "package": package, "said": json.dumps(about)}
    data = save({"tokens": np.asarray(prefix.tokens, np.int64), **tensors}, metadata)
    write_bytes(data, path, "prefix")
    return len(data)


def read_said(path: Path) -> Said:
    """What a prefix says, without its states. Raises GenerationError for a file that is none."""
    tokens, about, _ = _read(path)
    return Said(tuple(tokens.tolist()), about.get("text"), about.get("system"), about.get("adapter"))


def read_prefix(path: Path, package: str, adapter: str | None, shapes: RowShapes, vocab_size: int) -> Prefix:
    """Read a prefix for a package, with the adapter that is switched on. `shapes`: of a row's states, by name, for the
    tokens of `read_said`. Raises GenerationError for a damaged file, and for one of another package or adapter.
    """
    from safetensors import safe_open

    tokens, about, metadata = _read(path)
    if about.get("adapter") != adapter:
        raise GenerationError(
            f"read with {_adapter(about.get('adapter'))}, and this run has {_adapter(adapter)}",
            where=path,
            remedy=SAVE_AGAIN,
        )
    if metadata["package"] != package:
        raise GenerationError(
            "of another package, or another adapter of that name: what its model made of the text means nothing here",
            where=path,
            remedy=SAVE_AGAIN,
        )
    with safe_open(path, framework="numpy") as file:
        stored = {name.removeprefix(STATE) for name in file.keys() if name.startswith(STATE)}  # noqa: SIM118
        states = {name: file.get_tensor(f"{STATE}{name}") for name in sorted(stored & set(shapes))}
    for name, (shape, dtype) in shapes.items():
        found = states.get(name)
        if found is None or found.shape != shape or found.dtype != np.dtype(dtypes.storage(dtype)):
            raise _damaged(path, f"the state {name} is not as the package has it")
        if dtypes.is_float(dtype) and not _all_finite(found, dtype):
            raise _damaged(path, f"the state {name} has NaN or infinite numbers")
    if int(tokens.max()) >= vocab_size:
        raise _damaged(path, f"token {tokens.max()} is outside the vocabulary of {vocab_size:,}")
    return Prefix(tokens, states)


def _all_finite(values: np.ndarray[Any, np.dtype[Any]], dtype: str) -> bool:
    if dtypes.named(dtype).upper_half:  # the exponent of bfloat16
        return not bool(np.any(values & 0x7F80 == 0x7F80))
    return bool(np.isfinite(values).all())


def _adapter(name: str | None) -> str:
    return "no adapter" if name is None else f"adapter {name}"


def _read(path: Path) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], dict[str, str | None], dict[str, str]]:
    """Tokens, what is told of them, and the metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        check_size(path, MOST_BYTES)
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get("schema") != SCHEMA:
                raise GenerationError(
                    f"not a prefix: its schema is {metadata.get('schema')!r}, and this Partita reads {SCHEMA!r}",
                    where=path,
                    remedy=SAVE_AGAIN,
                )
            if not 0 < math.prod(file.get_slice("tokens").get_shape()) <= MOST_TOKENS:
                raise ValueError(f"it has no tokens, or more than {MOST_TOKENS:,}")
            tokens, about = file.get_tensor("tokens"), dict(parsed_record(metadata["said"]))
            if tokens.ndim != 1 or tokens.dtype != np.int64 or tokens.min() < 0 or "package" not in metadata:
                raise ValueError("its tokens are no token ids, or it names no package")
            if not all(value is None or isinstance(value, str) for value in about.values()):
                raise ValueError("text, system and adapter are no texts")
            return tokens, about, metadata
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> GenerationError:
    return GenerationError(f"no prefix that can be read ({' '.join(why.split())[:200]})", where=path, remedy=SAVE_AGAIN)


ENDINGS = ("a", " b", "1", ".", "\n", "(", '"', "中")
"""What may follow a text. A tokenizer joins some of it with the end of the text, and a template trims some of it."""


def said_by_text(text: Text, begin: str, adapter: str | None = None) -> Said:
    """The prefix of prompts that begin with a text. Raises GenerationError for one without a token of its own."""
    return Said(_whatever_follows(lambda end: text.encode(begin + end)), text=begin, adapter=adapter)


def said_by_system(text: Text, system: str, adapter: str | None = None) -> Said:
    """The prefix of conversations with a message of the system, up to where the user's begins.

    Raises UsageError without a chat template, GenerationError when it refuses the message.
    """
    tokens = _whatever_follows(lambda end: text.encode_messages(conversation(end, system)))
    return Said(tokens, system=system, adapter=adapter)


def _whatever_follows(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Tokens that a text begins with, whatever follows."""
    tokens = tuple(commonprefix([list(encode(end)) for end in ENDINGS]))
    if not tokens:
        raise GenerationError("the prefix has no token that does not depend on what follows it; give more text")
    return tokens


def prompt_after(said: Said, prompt: str, text: Text, *, chat: bool = False) -> tuple[int, ...]:
    """Tokens of a prompt that goes on with a prefix: the same as of both in one piece.

    Raises UsageError for a prefix of another kind than the prompt.
    """
    if chat or said.system is not None:
        return tuple(text.encode_messages(conversation(prompt, system_of(said))))
    if said.text is None:
        raise UsageError("the prefix is one of token ids, which text cannot go on with; give token ids")
    return tuple(text.encode(said.text + prompt))


def ids_after(said: Said | None, ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that go on with a prefix, if there is one. Raises UsageError for one of text: what its last tokens are
    depends on what follows, so the file leaves them open.
    """
    if said is None:
        return tuple(ids)
    if said.text is not None or said.system is not None:
        raise UsageError("the prefix is one of text, which token ids cannot go on with; give text")
    return (*said.tokens, *ids)


def system_of(said: Said) -> str:
    """The message of the system that a prefix is of. Raises UsageError for one without."""
    if said.system is None:
        raise UsageError(
            "the prefix has no message of the system, so no conversation begins with it; save one that has"
        )
    return said.system

"""The contents of a folder or an ONNX file as one record; faults become findings.

Hashes come from the manifest or from the file names of a Hugging Face cache snapshot, and are computed only on request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import partita
from partita import dtypes
from partita.errors import PackageError
from partita.inspection.records import (
    CacheFacts,
    ContractFacts,
    FileFacts,
    GraphFacts,
    Inspection,
    InspectionFinding,
    Kind,
    LicenceFacts,
    ModelFacts,
    PortFacts,
    Provenance,
    TokenizerFacts,
    WeightFacts,
    WeightKind,
)
from partita.observations.records import remedy_records
from partita.observations.text_format import nats
from partita.package.contract import Contract
from partita.package.folder import (
    MANIFEST,
    Manifest,
    check_files,
    linked_sha256,
    not_exported,
    path_inside,
    sha256_of,
)
from partita.remedies import FROM_CHECKPOINT
from partita.runtime.contents.modules import UNKNOWN, TensorEntry, Weight, initializers, module_precisions, weights_in
from partita.runtime.place.model_file import all_nodes, check_external_data, data_files, parse_model
from partita.runtime.place.onnx_model import read_port
from partita.untrusted_files import read_json_value

if TYPE_CHECKING:
    import onnx

MAIN = ("", "ai.onnx")
"""Domains of ONNX's own operators."""
PLACES = ("", "onnx")
"""Subfolders in which exporters write graphs; `onnx` is that of the Hub's ONNX community."""


def graphs_in(folder: Path) -> tuple[str, ...]:
    """Names of the ONNX files of a folder."""
    paths = (path for place in PLACES for path in sorted((folder / place).glob("*.onnx")))
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def inspect(
    path: Path,
    manifest: Manifest | None,
    wrong: Sequence[PackageError],
    *,
    hashes: bool = False,
    variants: Mapping[str, Path | None] | None = None,
) -> Inspection:
    """The contents of `path`, a folder or an ONNX file.

    `manifest`: of a package, or inferred from a foreign folder; None without one. `wrong`: known faults. `hashes`: hash
    files that have none. `variants`: ONNX files of a model package, with the folders of their external data. Raises
    OSError when the folder cannot be read.
    """
    is_file = path.is_file()
    folder = path.parent if is_file else path
    graph = None if manifest is None else manifest.graph
    there = tuple(variants or ()) or ((path.name,) if is_file else graphs_in(folder))
    names = there if graph is None else tuple(file.file for file in graph.files)
    findings, read = list(wrong), []
    for name in names:
        try:
            read.append(read_graph(folder, name, graph, (variants or {}).get(name)))
        except PackageError as error:
            findings.append(error)
    findings += [each.data_error for each in read if each.data_error is not None]
    on_disk = manifest if manifest is not None and manifest.foreign is None else None
    if on_disk is not None and not findings:
        try:
            check_files(folder, on_disk, hashes=False)
        except PackageError as error:
            findings.append(error)
    is_package = on_disk is not None or (folder / MANIFEST).is_file()
    kind: Kind = "model package" if variants else "package" if is_package else "onnx folder"
    return Inspection(
        partita_version=partita.__version__,
        path=str(path),
        kind="onnx file" if is_file else kind,
        findings=tuple(
            InspectionFinding(problem=" ".join(error.problem.split()), remedies=remedy_records(error.remedy))
            for error in findings
        ),
        graphs=tuple(each.facts for each in read),
        other_graphs=tuple(_file(folder, name, None, hashes=hashes) for name in there if name not in names),
        weights=_weights(read),
        modules=module_precisions(weight for each in read for weight in each.weights),
        files=_files(path, folder, on_disk, read, everything=bool(variants), hashes=hashes),
        tokenizer=tokenizer_of(folder, None if on_disk is None else on_disk.tokenizer),
        licence=licence_of(folder),
        **{**_from_config(folder), **({} if manifest is None else _from_manifest(manifest))},
    )


def _from_config(folder: Path) -> dict[str, Any]:
    """The model and its origin, as far as config.json names them."""
    config = read_json(folder / "config.json")
    listed, version = config.get("architectures"), _text(config.get("transformers_version"))
    model = ModelFacts(
        model_type=_text(config.get("model_type")),
        architecture=_text(listed[0]) if isinstance(listed, list) and listed else None,
    )
    origin = Provenance(
        checkpoint=_text(config.get("_name_or_path")),
        dtype=_text(config.get("torch_dtype", config.get("dtype"))),
        toolchain={} if version is None else {"transformers": version},
    )
    return {"model": model, "provenance": origin}


def _text(value: object) -> str | None:
    """A value of config.json if it is a non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def _from_manifest(manifest: Manifest) -> dict[str, Any]:
    """The model, its contract, cache and adapters; its origin, too, unless the manifest is inferred."""
    source, graph, foreign = manifest.source, manifest.graph, manifest.foreign
    model = ModelFacts(
        model_type=source.model_type if source.model_type not in ("", UNKNOWN) else None,
        architecture=source.architecture or None,
        parameters=(source.parameters or None) if foreign is None else None,
        precision=graph.precision or None,
        attention=graph.attention or None,
        layout="partita" if foreign is None else foreign.layout,
        omitted=not_exported(source.unused),
    )
    read_from = "manifest" if foreign is None else f"inferred from a folder of {foreign.layout}"
    contract = ContractFacts.copy_of(graph, source=read_from)
    found = {"model": model, "contract": contract, "cache": _cache(graph), "adapters": manifest.adapters}
    return found | ({"provenance": _provenance(manifest)} if foreign is None else {"foreign": foreign})


def _cache(graph: Contract) -> CacheFacts:
    """Size and layout of the states."""
    sizes = {state: dtypes.size_bytes(state.dtype, state.shape) for state in graph.states}
    fixed = sum(size for state, size in sizes.items() if state.kind not in ("key", "value") or state.rolling)
    grows = any(state.growing_axis is not None for state in graph.states)
    return CacheFacts(
        states=graph.states,
        size_bytes=sum(sizes.values()),
        bytes_per_token=(sum(sizes.values()) - fixed) // (graph.batch_size * graph.max_length),
        fixed_bytes=fixed,
        layout="growing" if grows else "window" if any(state.rolling for state in graph.states) else "fixed",
    )


def _provenance(manifest: Manifest) -> Provenance:
    """The origin of a package."""
    source, quality, target = manifest.source, manifest.quality, manifest.target
    measured = None
    if quality is not None:
        measured = (
            f"perplexity ratio {quality.perplexity_ratio:.4f}, KL divergence {nats(quality.kl_mean)} on "
            f"{quality.tokens:,} tokens of {quality.text}"
        )
    return Provenance(
        created=manifest.created,
        checkpoint=source.checkpoint,
        dtype=source.dtype,
        source_files=tuple(FileFacts.copy_of(record) for record in source.files),
        toolchain=manifest.toolchain,
        target=None if target is None else target.provider,
        verification=f"{manifest.verification.status}: {manifest.verification.detail}",
        quality=measured,
    )


def _weights(read: Sequence[ReadGraph]) -> WeightFacts:
    """Stored tensors by type; a tensor shared by several graphs counts once."""
    tensors = {tensor.identity: tensor for graph in read for tensor in graph.tensors}
    kinds: dict[str, list[TensorEntry]] = {}
    for tensor in tensors.values():
        kinds.setdefault(tensor.dtype, []).append(tensor)
    rows = [
        WeightKind(
            dtype=dtype,
            tensors=len(listed),
            elements=sum(tensor.elements for tensor in listed),
            size_bytes=sum(tensor.size_bytes for tensor in listed),
        )
        for dtype, listed in kinds.items()
    ]
    return WeightFacts(
        size_bytes=sum(row.size_bytes for row in rows),
        kinds=tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.dtype))),
    )


def _files(
    path: Path, folder: Path, manifest: Manifest | None, read: Sequence[ReadGraph], *, everything: bool, hashes: bool
) -> tuple[FileFacts, ...]:
    """Files of the manifest or folder, with `everything` also of all its subfolders.

    Of an ONNX file, with `hashes` only, the file and its external data.
    """
    if path.is_file():
        data = (name for graph in read if graph.data_error is None for name in graph.facts.data_files)
        return tuple(_file(folder, name, None, hashes=True) for name in (path.name, *data)) if hashes else ()
    if manifest is not None:
        return tuple(_file(folder, record.name, record.sha256) for record in manifest.files)
    homes = (folder / place for place in PLACES)
    paths = folder.rglob("*") if everything else (path for home in homes if home.is_dir() for path in home.iterdir())
    names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return tuple(_file(folder, name, None, hashes=hashes) for name in names)


def _file(folder: Path, name: str, sha256: str | None, *, hashes: bool = False) -> FileFacts:
    """One file; size None if it is missing."""
    path = folder / name
    if not path.is_file():
        return FileFacts(name=name, size_bytes=None, sha256=sha256)
    sha256 = sha256 or linked_sha256(path) or (sha256_of(path) if hashes else None)
    return FileFacts(name=name, size_bytes=path.stat().st_size, sha256=sha256)


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """The facts and stored tensors of an ONNX file."""

    facts: GraphFacts
    tensors: tuple[TensorEntry, ...]
    """Every stored tensor, including those in subgraphs and constants."""
    weights: tuple[Weight, ...]
    data_error: PackageError | None
    """The error of its external data, if any."""


def read_graph(folder: Path, name: str, contract: Contract | None, data_folder: Path | None = None) -> ReadGraph:
    """Read the ONNX file `name` of a folder; its external data is in its folder or in `data_folder`.

    Raises PackageError if it is missing, damaged or unreadable.
    """
    path = path_inside(folder, name)
    home = (data_folder or path.parent).relative_to(folder).as_posix()
    if not path.is_file():
        raise PackageError(f"{path}: missing from the package", remedy=FROM_CHECKPOINT)
    proto = parse_model(path)
    try:
        tensors = tuple(initializers(proto.graph, name, home))
        facts = _graph_facts(path, name, home, proto, contract)
        weights = weights_in(proto, tensors)
    except (TypeError, ValueError, OSError) as error:
        raise PackageError(f"{path}: not a readable ONNX file ({error})", remedy=FROM_CHECKPOINT) from error
    data_error = None
    try:
        check_external_data(proto, path, folder / home)
    except PackageError as error:
        data_error = error
    return ReadGraph(facts, tensors, weights, data_error)


def _graph_facts(path: Path, name: str, home: str, proto: onnx.ModelProto, contract: Contract | None) -> GraphFacts:
    """The facts of the file and of its entry in the contract. `home`: folder of the external data."""
    graph = proto.graph
    known = None if contract is None else next((file for file in contract.files if file.file == name), None)
    states = set() if contract is None else {port for state in contract.states for port in (state.past, state.present)}
    roles = {} if known is None else {port.name: port.role for port in (*known.inputs, *known.outputs)}
    hidden = states | {tensor.name for tensor in graph.initializer}
    inputs, outputs = (
        tuple(_port(port, roles.get(port.name)) for port in listed if port.name not in hidden)
        for listed in (graph.input, graph.output)
    )
    return GraphFacts(
        file=name,
        size_bytes=path.stat().st_size,
        phase=None if known is None else known.phase,
        sequence_length=None if known is None else known.sequence_length,
        ir_version=proto.ir_version,
        producer=" ".join(filter(None, (proto.producer_name, proto.producer_version))),
        opsets={"" if entry.domain in MAIN else entry.domain: entry.version for entry in proto.opset_import},
        nodes=len(graph.node),
        subgraph_nodes=sum(1 for _ in all_nodes(graph)) - len(graph.node),
        functions=len(proto.functions),
        operators=_operators(proto),
        inputs=inputs,
        outputs=outputs,
        data_files=tuple(sorted(str(PurePosixPath(home, location)) for location in data_files(proto))),
        metadata={entry.key: entry.value for entry in proto.metadata_props},
    )


def _operators(proto: onnx.ModelProto) -> dict[str, int]:
    """Nodes per operator, subgraphs included; sorted by domain, then by frequency."""
    counted = Counter(("" if node.domain in MAIN else node.domain, node.op_type) for node in all_nodes(proto.graph))
    ranked = sorted(counted.items(), key=lambda entry: (entry[0][0], -entry[1], entry[0][1]))
    return {f"{domain}:{name}".lstrip(":"): nodes for (domain, name), nodes in ranked}


def _port(declared: onnx.ValueInfoProto, role: str | None) -> PortFacts:
    """An input or output."""
    port = read_port(declared)
    dtype = port.dtype if port.kind == "tensor" and port.dtype != UNKNOWN else None
    return PortFacts(name=port.name, dtype=dtype, shape=port.shape, role=role)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "added_tokens.json",
)
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
CARDS = ("README.md", "README", "README.txt", "MODEL_CARD.md")
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
MOST_BYTES = 1 << 20
FRONT = re.compile(r"\A\s*---\s*\n(?P<matter>.*?)\n---\s*(\n|\Z)", re.DOTALL)
ENTRY = re.compile(r"^(?P<key>license|license_name|license_link)\s*:\s*(?P<value>\S.*?)\s*$", re.MULTILINE)


def tokenizer_of(folder: Path, kind: str | None) -> TokenizerFacts:
    """Facts of the tokenizer in a folder, not loaded. `kind`: its reader by the manifest; None without a manifest."""
    files = tuple(name for name in TOKENIZER_FILES if (folder / name).is_file())
    tokenizer = read_json(folder / "tokenizer.json")
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    if kind is None:
        kind = "transformers" if set(files) - {"chat_template.jinja"} else "none"
        kind = "tokenizers" if "tokenizer.json" in files else kind
    tokens = {name: config.get(name) for name in SPECIAL}  # strings, or records with their text
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return TokenizerFacts(
        kind=kind,
        files=files,
        model=model["type"] if isinstance(model.get("type"), str) else None,
        vocabulary=_vocabulary(model, tokenizer.get("added_tokens")),
        special={name: text for name, token in texts.items() if (text := _text(token))},
        chat_template=bool(config.get("chat_template")) or "chat_template.jinja" in files,
    )


def _vocabulary(model: Mapping[str, Any], added: Any) -> int | None:
    """Number of vocabulary entries and added tokens; None if tokenizer.json has no vocabulary."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of text and score
        names = {entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    else:
        return None
    entries = added if isinstance(added, list) else ()
    return len(names | {entry.get("content") for entry in entries if isinstance(entry, dict)})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is missing or holds another type."""
    try:
        found = read_json_value(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def licence_of(folder: Path) -> LicenceFacts:
    """The licence from the first model card or licence file that names one."""
    for name in CARDS:
        front = FRONT.match(_beginning(folder, name))
        found = ENTRY.finditer(front["matter"]) if front is not None else ()
        entries = {entry["key"]: entry["value"].strip("'\"") for entry in found}
        if "license" in entries:
            named = entries.get("license_name") if entries["license"] == "other" else None
            return LicenceFacts(name=named or entries["license"], source=name, link=entries.get("license_link"))
    for name in LICENCES:
        lines = (line.strip(" #*\t") for line in _beginning(folder, name).splitlines())
        title = next((line[:120] for line in lines if any(letter.isalnum() for letter in line)), "")
        if title:
            return LicenceFacts(name=title, source=name)
    return LicenceFacts(name=None, source=f"no licence in {CARDS[0]} and no {LICENCES[0]} file")


def _beginning(folder: Path, name: str) -> str:
    """The beginning of a text file; empty if it cannot be read. Raises PackageError for a file outside the folder."""
    try:
        with path_inside(folder, name).open("rb") as stream:
            return stream.read(MOST_BYTES).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""

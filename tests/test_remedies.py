"""Every remedy of the house is found, and its command is one that works.

A remedy is a constant of its module. A command of ours is parsed by the command line, with its values looked up where
they are names; what pip is to install has to be a name that is published for it. Remedies
that can be applied here are applied where their complaint is provoked: test_hints.py, contract/test_remedies.py,
test_report_actions.py, and below.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer.main
from onnx import TensorProto, helper

import partita
from partita import cli
from partita.commands.build import split_options
from partita.diagnosis.reasons import REASONS
from partita.errors import PartitaError
from partita.foreign import inference
from partita.observations.codes import PROVIDER_CODES
from partita.package.folder import WEIGHTS, read_manifest
from partita.providers.options import parse_options
from partita.providers.resolve import known_providers, parse_chain
from partita.remedies import Remedy
from partita.runtime.chain.advice import ALLOW_CPU
from partita.runtime.ort import errors
from tests.conftest import REPOSITORY
from tests.foreign.conftest import SAMPLES
from tests.planted import cases
from tests.planted.graphs import build
from tests.remedies import alternatives, pattern, remedy_of

MAKER = "Remedy"
BLANKS: dict[str, Any] = {
    **dict.fromkeys(("setting", "needed", "library", "same_precision", "libraries", "options"), ()),
    "provider": "webgpu",
    "chain": "webgpu",
    "option": "provider",
    "now": "webgpu.enableInt64=1",
    "wheel": "onnxruntime",
    "version": "1.31.1",
    "specifier": ">=1.31",
    "plain": "cpu",
    "plugin": "onnxruntime-qnn",
    "wheels": ("onnxruntime", "onnxruntime-gpu"),
    "owners": ("onnxruntime", "onnxruntime-gpu"),
    "versions": ("transformers>=5.23,<5.25", "torch<2.14"),
    "owner": "onnx-ir",
    "extras": "export,cpu",
    "attention": "gqa",
    "how": ("--attention", "gqa"),
    "precision": "fp32",
    "max_length": 512,
    "batch_size": 1,
    "port": 8001,
    "device": "h100",
    "switch": "cuda.enable_cuda_graph=1",
    "sizes": ("--shape", "batch=1"),
}
"""What is filled into the blanks of remedies; their own names into the others."""
OTHER_PROGRAMS = {"git", "ray", "hf", "apt-get", "nvidia-smi", "rocminfo"}
"""Not on every machine; test_hints.py does what `git lfs pull` does."""
GROUP: Any = typer.main.get_command(cli.app)
FLAGS = [{name for each in GROUP.get_command(None, verb.name).params for name in each.opts} for verb in cli.VERBS]


@cache
def every_remedy() -> dict[int, tuple[str, Remedy]]:
    """Every remedy that a module of Partita holds, by identity, with the module that it was found in first."""
    found: dict[int, tuple[str, Remedy]] = {}
    for path in sorted((REPOSITORY / "partita").rglob("*.py")):
        if MAKER not in path.read_text("utf-8"):
            continue
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for value in vars(importlib.import_module(name)).values():
            for remedy in remedies_in(value, 0):
                found.setdefault(id(remedy), (name, remedy))
    return found


def remedies_in(value: object, depth: int) -> Iterator[Remedy]:
    """Remedies in a constant: itself, or in a record, a mapping or a sequence."""
    if depth > 6 or isinstance(value, type):
        return
    if isinstance(value, Remedy):
        yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from remedies_in(getattr(value, field.name), depth + 1)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from remedies_in(entry, depth + 1)
    elif isinstance(value, list | tuple | frozenset):
        for entry in value:
            yield from remedies_in(entry, depth + 1)


REMEDIES = {
    f"{name.removeprefix('partita.')}-{number}": remedy for number, (name, remedy) in enumerate(every_remedy().values())
}


@pytest.mark.parametrize("name", REMEDIES)
def test_remedy_has_text_or_valid_command(name: str) -> None:
    names = re.findall(r"\{(\w+)\}", repr(REMEDIES[name]))
    remedy = REMEDIES[name].filled(**{each: BLANKS.get(each, each) for each in names})
    assert remedy.text or remedy.command, "it says nothing"
    assert "\n" not in str(remedy)
    assert not (remedy.command and remedy.options), "one or the other"
    if remedy.command:
        check_command(remedy.command)
    if remedy.options:
        given = {word for word in remedy.options if word.startswith("--")}
        assert any(given <= flags for flags in FLAGS), f"no verb takes {remedy.options}"
        check_values(list(remedy.options))


def check_command(command: tuple[str, ...]) -> None:
    """Fail when a command cannot be what it says."""
    program, *words = command
    if program == "partita":
        parsed, rest = GROUP, words
        while hasattr(parsed, "commands"):
            parsed, rest = parsed.get_command(None, rest[0]), rest[1:]
        parsed.make_context(words[0], list(rest))
        check_values(words)
    elif program == "pip":
        assert words[0] in ("install", "uninstall")
        for word in words[1:]:
            assert word.startswith("--") or installable(word), f"{word} is no package that Partita knows of"
    elif program == "make":
        targets = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{word}:", targets, re.MULTILINE) for word in words[1:]), words
    else:
        assert program in OTHER_PROGRAMS


def check_values(words: list[str]) -> None:
    """Names that the command line reads as texts: providers, provider options."""
    for option, value in zip(words, words[1:], strict=False):
        if option in ("--provider", "--target"):
            parse_chain(value)
        if option == "--provider-option":
            parse_options(split_options([value]), parse_chain(value.partition(".")[0]))


def installable(word: str) -> bool:
    """Whether pip finds this: a package that Partita declares or knows a provider to be in, with extras that it has."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+?)(?:\[([^\]]+)\])?(?:[<>=~!][^ ]+)?", word)
    assert match is not None, word
    name, extras = re.escape(match[1]), (match[2] or "").split(",") if match[2] else []
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    if name == "partita":
        return set(extras) <= set(tomllib.loads(project)["project"]["optional-dependencies"])
    plugins = [provider.plugin.wheel for provider in known_providers().values() if provider.plugin]
    wheels = " ".join([*(wheel for provider in known_providers().values() for wheel in provider.wheels), *plugins])
    known = f"{project} {(REPOSITORY / 'constraints/optimum.txt').read_text()} {wheels} {FACTS}"
    listed = re.search(rf"(?<![\w-]){name}(?![\w-])", known) is not None
    return listed and all(re.search(rf"{name}\[[^\]]*\b{extra}\b", known) for extra in extras)


FACTS = "onnxruntime-gpu[cuda,cudnn]"
"""Extras that a wheel has by its own metadata (onnxruntime-gpu 1.31.1, METADATA, Provides-Extra)."""


def test_every_reason_and_provider_code_has_a_remedy() -> None:
    for reason in REASONS.values():
        assert reason.remedy
        for step in reason.steps:
            assert step.command, f"{reason.code}: {step.title} is a step without a command"
    for provider in known_providers().values():
        for code, remedy in provider.remedies.items():
            assert isinstance(remedy, Remedy), f"{provider.name}: {code}"


# applied


def test_damaged_package_remedy_restores_graph_and_source(tiny_checkpoint, exported, tmp_path):
    """The user supplies the checkpoint; a manifest names it only if it is from the hub."""
    checkpoint = tiny_checkpoint("llama")
    package = shutil.copytree(exported(checkpoint, precision="fp16", attention="primitives"), tmp_path / "pkg")
    before = read_manifest(package)
    (package / WEIGHTS).write_bytes((package / WEIGHTS).read_bytes()[:-8])
    command = remedy_of("verify", package, "--provider", "cpu").command
    assert command[:4] == ("partita", "export", "CHECKPOINT", str(package))
    words = [str(checkpoint) if word == "CHECKPOINT" else word for word in command[1:]]
    assert cli.run([*words, "--no-verify"]) == 0
    after = read_manifest(package)
    assert (after.graph, after.source) == (before.graph, before.source)


def test_damaged_tokenizer_remedy_generates_from_token_ids(tiny_checkpoint, exported, tmp_path):
    """Applies the option that the error names, with token ids as the prompt."""
    package = shutil.copytree(
        exported(tiny_checkpoint("llama"), precision="fp16", attention="primitives"), tmp_path / "p"
    )
    size = (package / "tokenizer.json").stat().st_size
    (package / "tokenizer.json").write_text("{".ljust(size))
    (found,) = alternatives(remedy_of("generate", package, "hi", "--provider", "cpu"))
    given = ["generate", str(package), "1,2,3", "--provider", "cpu", "--max-new-tokens", "2"]
    assert found.options and cli.run([*given, *found.options]) == 0


@pytest.mark.usefixtures("stand_ins")
def test_rejected_chain_is_accepted_with_suggested_options(tiny_checkpoint, exported) -> None:
    """GroupQueryAttention has no float32 kernel on CUDA."""
    package = exported(tiny_checkpoint("llama"), attention="gqa")
    given = ["place", str(package), "--dry-run", "--provider", "cuda", "--probe-seconds", "30"]
    assert cli.run(given) == 3
    allowed = ALLOW_CPU.filled(chain="cuda")
    assert cli.run([*given[:3], *allowed.options, "--probe-seconds", "0"]) == 0


def test_long_prompt_remedy_exports_cache_up_to_model_positions(tiny_checkpoint, exported, tmp_path):
    """Runs the suggested command; beyond the model's positions, shortening the prompt is the only remedy."""
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint)
    graph = read_manifest(package).graph
    most = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    assert graph.model_positions == most > graph.max_length

    def refused(tokens: int) -> Remedy:
        return remedy_of("generate", package, ",".join(["5"] * tokens), "--token-ids", "--provider", "cpu")

    shorten, again = alternatives(refused(most - 1))
    assert not shorten.command and again.command[-2:] == ("--max-length", str(most))
    given = {"CHECKPOINT": str(checkpoint), "PACKAGE": str(tmp_path / "longer")}
    assert cli.run([given.get(word, word) for word in (*again.command[1:], "--no-verify")]) == 0
    ids = ",".join(["5"] * (most - 1))
    assert cli.run(["generate", given["PACKAGE"], ids, "--token-ids", "--provider", "cpu"]) == 0
    (only,) = alternatives(refused(most))
    assert only.text == f"shorten the prompt: the model supports at most {most} positions" and not only.command


def test_missing_tokenizer_remedy_names_only_supported_options(tiny_checkpoint, exported, tmp_path):
    package = shutil.copytree(exported(tiny_checkpoint("llama")), tmp_path / "pkg")
    (package / "tokenizer.json").unlink()
    raw = json.loads((package / "manifest.json").read_text())
    files = [entry for entry in raw["files"] if entry["name"] != "tokenizer.json"]
    (package / "manifest.json").write_text(json.dumps({**raw, "files": files, "tokenizer": "none"}))
    export, generate = alternatives(remedy_of("chat", package, "--provider", "cpu"))
    assert not export.options and not export.command and not generate.options
    assert cli.run([*generate.command[1:], "--provider", "cpu", "--max-new-tokens", "1"]) == 0


def test_missing_bfloat16_kernels_error_suggests_fp32_export(tiny_checkpoint, exported, tmp_path, monkeypatch):
    """The suggested command changes only the precision, and exports a package that runs."""
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint, precision="bf16")
    monkeypatch.chdir(tmp_path)
    command = remedy_of("generate", package, "hi", "--provider", "cpu").command
    assert command[-2:] == ("--precision", "fp32") and "--attention" not in command
    given = [str(checkpoint) if word == "CHECKPOINT" else word for word in command[1:]]
    assert cli.run([*given, "--max-length", "32", "--no-verify"]) == 0
    assert cli.run(["generate", given[2], "hi", "--provider", "cpu", "--max-new-tokens", "2"]) == 0


def test_corrected_contract_file_resolves_the_error(tmp_path):
    words, contract = (SAMPLES / "optimum", "1,2", "--token-ids", "--provider", "cpu"), tmp_path / "contract.toml"
    state = '[[states]]\npast = "past_key_values.0.key"\npresent = "present.0.key"\nkind = "key"\n'
    contract.write_text(f"{state}shape = [1, 1]\n")
    assert remedy_of("generate", *words, "--contract", contract).text == inference.CORRECT.text
    contract.write_text(state)
    assert cli.run(["generate", *map(str, words), "--contract", str(contract)]) == 0


APPLIED_HERE: dict[str, tuple[str, ...]] = {
    "the output exists": ("export", "CHECKPOINT", "MADE", "--attention", "gqa", "--no-verify"),
    "an unknown provider": ("generate", "MADE", "hi", "--provider", "cpx"),
    "several models": ("generate", "SEVERAL", "5,6", "--token-ids", "--provider", "cpu"),
    "another exporter's folder": ("verify", "FOREIGN", "--provider", "cpu"),
    "a text longer than it was opened for": (
        "generate",
        "FOREIGN",
        "5,5,5,5,5,5,5,5",
        "--token-ids",
        "--max-length",
        "8",
    ),
    "a file of a model": ("generate", "MODEL", "hi", "--provider", "cpu"),
}
"""Command lines that fail -> as their remedies are applied, they succeed."""


@pytest.mark.parametrize("case", APPLIED_HERE)
def test_remedy_command_or_options_resolve_the_error(case, tiny_checkpoint, exported, tmp_path, monkeypatch):
    """Applies the first alternative with a command or options; after an export, reruns the failed command."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tiny_checkpoint("llama")
    places = {"CHECKPOINT": str(checkpoint), "MADE": "made", "SEVERAL": "several", "FOREIGN": "foreign"}
    places |= {"MODEL": "foreign/model.onnx", "PACKAGE": "package"}
    shutil.copytree(exported(checkpoint), tmp_path / "made")
    for name in ("several/model_q4.onnx", "several/model_int8.onnx", "foreign/model.onnx"):
        folder = (tmp_path / name).parent
        folder.mkdir(exist_ok=True)
        shutil.copy(SAMPLES / "optimum" / "model.onnx", tmp_path / name)
        shutil.copy(SAMPLES / "optimum" / "config.json", folder)
    given = [places.get(word, word) for word in APPLIED_HERE[case]]
    remedy = next(each for each in alternatives(remedy_of(*given)) if each.command or each.options)
    if remedy.options:
        assert cli.run([*given, *remedy.options]) == 0
        return
    program, verb, *rest = remedy.command
    reference = {**places, "CHECKPOINT": str(SAMPLES / "checkpoint")} if verb == "verify" else places
    extra = {"export": ["--no-verify"], "generate": ["--provider", "cpu"], "place": ["--provider", "cpu"]}
    made = [reference.get(word, word) for word in rest]
    if verb == "place":  # sizes of inputs are lacking, and the next remedy has them
        extra["place"] += remedy_of("place", *made, *extra["place"]).options
    assert program == "partita" and cli.run([verb, *made, *extra.get(verb, [])]) == 0
    if verb == "export":
        assert cli.run([made[1] if word in ("made", str(checkpoint)) else word for word in given]) == 0


# Text remedies of ONNX files: the error names the remedy, and the file that follows it is placed


def one_node(op_type: str, path: Path, *, ir_version: int = 10, opset: int = 17, **node: Any) -> Path:
    """A model of one node with an input x and an output y."""
    element, domain = node.pop("element", TensorProto.FLOAT), node.get("domain", "")
    ports = [helper.make_tensor_value_info(name, element, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], name="n", **node)], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path)
    return path


@pytest.mark.parametrize(
    ("remedy", "wrong"),
    [
        (errors.OTHER_NODE, {"op_type": "Sin", "element": TensorProto.BFLOAT16, "opset": 22}),
        (errors.OTHER_VERSION, {"op_type": "Relu", "newest": 1}),
        (errors.NEWER_RUNTIME, {"op_type": "Relu", "opset": 99}),
        (errors.OTHER_RUNTIME, {"op_type": "Foo", "domain": "my.operators"}),
        (errors.LOWER_IR, {"op_type": "Relu", "ir_version": 99}),
    ],
    ids=["type", "attribute", "opset", "operator", "IR version"],
)
def test_rewritten_file_resolves_the_error(remedy: Remedy, wrong: dict[str, Any], tmp_path: Path) -> None:
    path = one_node(path=tmp_path / "model.onnx", **wrong)
    with pytest.raises(PartitaError) as caught:
        partita.place(path, "cpu")
    texts = [each.text for each in alternatives(caught.value.remedy)]
    assert any(re.fullmatch(pattern(remedy), each) for each in texts), (texts, str(caught.value))
    last = re.search(r"set ir_version in the file to (\d+)", str(caught.value))
    assert (last is not None) == (remedy is errors.LOWER_IR)
    partita.place(one_node("Relu", path, ir_version=int(last[1]) if last else 10), "cpu")


# Reasons of nodes: tests/planted has a cause and a graph without it for all but two


@pytest.mark.usefixtures("stand_ins")
def test_inserted_cast_disappears_with_supported_operator(tmp_path: Path) -> None:
    planted = next(case.run.model for case in cases.CASES if case.name == "cuda-inserted-cast")
    found = []
    for model in (planted, planted.replace("Asin", "Cos")):
        onnx.save(build(model), tmp_path / "model.onnx")
        report = partita.place(tmp_path / "model.onnx", "cuda,cpu", dry_run=True, probe_seconds=0)
        found.append("runtime_inserted" in {fallback.reason for fallback in report.fallbacks})
    assert found == [True, False]


def test_every_node_reason_has_a_planted_case_with_control_graph() -> None:
    of_nodes = set(REASONS).difference(PROVIDER_CODES)
    planted = {case.expected for case in cases.CASES if case.control}
    assert of_nodes - planted == {"runtime_inserted", "unexplained"}

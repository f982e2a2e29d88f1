"""Errors for invalid foreign folders name the cause and the remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from partita.errors import PackageError, PartitaError, UsageError
from partita.foreign.folder import Choice, open_folder
from partita.library.inspecting import read
from partita.providers.resolve import parse_chain
from partita.runtime.generate.runner import load_runner
from partita.runtime.place.model_file import read_model_file
from tests.foreign.conftest import Sample, changed, length_and_notes

Change = Callable[[onnx.ModelProto], object]


def refused(folder: Path, choice: Choice | None = None) -> str:
    """What is said of a folder that cannot be opened."""
    with pytest.raises((PackageError, UsageError)) as caught:
        open_folder(folder, choice or Choice())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def load(folder: Path) -> None:
    """Open a folder, and try it."""
    load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder)).close()


def altered(folder: Path, change: Change, file: str = "model.onnx") -> Path:
    """The folder with its model changed."""
    model = onnx.load(folder / file, load_external_data=False)
    change(model)
    onnx.save(model, folder / file)
    return folder


def renamed(old: str, new: str) -> Callable[[onnx.ModelProto], None]:
    """Give a tensor of a model another name, wherever it is."""

    def change(model: onnx.ModelProto) -> None:
        for port in (*model.graph.input, *model.graph.output):
            port.name = new if port.name == old else port.name
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]

    return change


# files


def test_multiple_model_files_are_listed_with_variants(hub_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    shutil.copytree(hub_folder, folder)
    shutil.copy(folder / "onnx" / "model.onnx", folder / "model.onnx")
    assert "onnx/model.onnx" in refused(folder)
    for file in ("onnx/model.onnx", "model.onnx"):
        assert open_folder(folder, Choice(variant=file)).graph.files[0].file == file
    for home in (folder, folder / "onnx"):
        (home / "model.onnx").unlink()
    said = refused(folder)
    assert all(words in said for words in ("6 models", "model_fp16.onnx", "--variant bnb4"))
    assert open_folder(folder, Choice(variant="q4")).graph.precision == "int4"
    assert "q8" in refused(folder, Choice(variant="q8"))


def with_encoder(folder: Path) -> None:
    (folder / "genai_config.json").unlink()  # it names the model
    shutil.copy(folder / "model.onnx", folder / "encoder_model.onnx")


def padded_to(size: int) -> Callable[[Path], None]:
    """Pad the model with zeros; the file is sparse."""
    return lambda folder: os.truncate(folder / "model.onnx", size)


def linked_outside(folder: Path) -> None:
    data = folder / "model.onnx.data"
    data.rename(folder.parent / "elsewhere")
    data.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (with_encoder, "encoder_model.onnx: component of an encoder-decoder or multimodal model"),
        (lambda folder: (folder / "model.onnx.data").unlink(), "its weights file 'model.onnx.data' is missing"),
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx: no such file"),
        (linked_outside, "model.onnx.data: a link out of the folder, to "),
        (padded_to(1 << 26), "not a protobuf message"),
        (padded_to(3 << 30), "above 2 GiB"),
    ],
)
def test_missing_damaged_or_other_files_are_reported(
    damage: Callable[[Path], object], said: str, sample: Sample
) -> None:
    folder = sample("genai-int4-cpu")
    damage(folder)
    assert said in refused(folder)


def test_truncated_weights_error_suggests_download(sample: Sample) -> None:
    """Exporting again, the advice for packages, would overwrite the folder."""
    folder = sample("genai-int4-cpu")
    with (folder / "model.onnx.data").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(PackageError, match="truncated: it has 1,000 bytes.*download the folder again$"):
        read_model_file(folder / "model.onnx", folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("offset", "-1", "offset '-1'"),
        ("offset", str(1 << 70), "offset '118"),
        ("length", "-5", "length '-5'"),
        ("location", None, "no location"),
        ("location", "a\0b", "not followed"),
        ("location", "/dev/zero", "not followed"),
    ],
)
def test_invalid_external_data_location_is_rejected(key: str, value: str | None, said: str, sample: Sample) -> None:
    """`inspect` still reads the graph."""

    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        kept = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in kept.items():
            if text is not None:
                tensor.external_data.add(key=name, value=text)

    folder = altered(sample("genai-int4-cpu"), change)
    assert said in refused(folder)
    assert read(folder).graphs  # which shows what can be read


# configurations

SLIDES = "slide_key_value_cache.* with onnxruntime-genai"
"""Said of a window that the runtime slides; the default of onnxruntime-genai's config.h."""
WINDOW = "model__decoder__sliding_window"


@pytest.mark.parametrize(
    ("of", "settings", "said"),
    [
        ("optimum", {"vocab_size": 100}, "config.json contradicts the graph: its vocabulary has 100 .* have 64"),
        (
            "optimum",
            {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        ("genai", {"model__vocab_size": 2}, "genai_config.json contradicts the graph: its vocabulary has 2 tokens"),
        ("genai", {WINDOW: {"window_size": 8}}, SLIDES),
        ("genai", {"model__vision": {"filename": "vision.onnx"}}, "has a section 'vision'; .* in one ONNX file"),
        ("genai", {"model__decoder__pipeline": [{"a": {}}]}, "has a section 'pipeline'"),
        ("genai", {"model": {}}, "section 'decoder' is missing"),
        ("optimum", None, "config.json: damaged"),
    ],
)
def test_unsupported_or_damaged_configuration_is_rejected(
    of: str, settings: dict[str, object] | None, said: str, sample: Sample
) -> None:
    folder = sample("genai-fp32-cpu" if of == "genai" else of)
    config = folder / ("genai_config.json" if of == "genai" else "config.json")
    if settings is None:
        config.write_text("{")
    else:
        changed(config, **settings)
    with pytest.raises(PackageError, match=said):
        open_folder(folder)


@pytest.mark.parametrize(
    ("length", "said"),
    [(1000, "`max_length=1000`: config.json allows 64"), (0, "`max_length` is 0"), (1 << 40, "`max_length` is")],
)
def test_unsupported_max_length_is_rejected(length: int, said: str, sample: Sample) -> None:
    assert said in refused(sample("optimum"), Choice(max_length=length))


def test_genai_search_max_length_is_a_default_and_not_a_limit(sample: Sample) -> None:
    folder = sample("genai-fp32-cpu")
    changed(folder / "genai_config.json", search__max_length=32)
    assert length_and_notes(folder) == (32, "genai_config.json supports 64 tokens; 32 are used")
    assert length_and_notes(folder, 50) == (50, "")
    assert "genai_config.json allows 64" in refused(folder, Choice(max_length=65))
    changed(folder / "genai_config.json", search__max_length=1000)
    assert length_and_notes(folder) == (64, "")


# contract files

KEYS = '[[states]]\npast = "past_key_values.{layer}.key"\npresent = "present.{layer}.key"\nkind = "key"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_length = ", "not TOML"),
        ('[ports]\nodd = "tokens"\n', "a port 'odd'"),
        ('[ports]\nattention_mask = "cache_branch"\n', "does not have the type and rank of cache_branch"),
        ('[[files]]\nfile = "model.onnx"\nphase = "decode"\n', "0 files for prefill; name one file for any phase"),
        ('[[files]]\nfile = "../model.onnx"\n', "is outside"),
        (KEYS + "grows = 9\n", "axis 9"),
        ("length = 4\n", "length"),
        ('[ports]\nids = "token"\n', "ports.ids"),
        ('[[states]]\npast = "x"\npresent = "y"\nkind = "key"\n', "has states 'x', which no graph has"),
        (KEYS + 'shape = ["B", -1, "N", 16]\n', "states.0.shape.1"),
        (KEYS + 'shape = ["B", 16]\n', "the shape [B, 16], which contradicts the graph"),
        ('batch_size = "4"\n', "batch_size: Input should be a valid integer"),
        (f"batch_size = {'9' * 5000}\n", "not TOML"),
        (f"a = {'[' * 3000}{']' * 3000}\n", "not TOML: maximum recursion"),
    ],
)
def test_invalid_contract_is_rejected(text: str, said: str, sample: Sample, tmp_path: Path) -> None:
    contract = tmp_path / "contract.toml"
    contract.write_text(text)
    assert said in refused(sample("optimum"), Choice(contract=contract))


def test_in_place_contract_of_growing_cache_fails_test_run(sample: Sample, tmp_path: Path) -> None:
    folder, contract = sample("optimum"), tmp_path / "contract.toml"
    contract.write_text(KEYS + "in_place = true\n")
    with pytest.raises(PackageError, match="test run of 6 tokens before the first prompt failed: .*--contract"):
        load_runner(folder, parse_chain("cpu"), manifest=open_folder(folder, Choice(contract=contract)))


def test_contract_supplies_missing_cache_information(sample: Sample, tmp_path: Path) -> None:
    folder = altered(sample("optimum"), renamed("present.0.value", "odd"))
    contract = tmp_path / "contract.toml"
    contract.write_text(
        'max_length = 40\n[[states]]\npast = "past_key_values.{layer}.value"\npresent = "odd"\nkind = "value"\n'
    )
    manifest = open_folder(folder, Choice(contract=contract))
    (state,) = [state for state in manifest.graph.states if state.kind == "value"]
    assert (state.present, state.growing_axis, state.shape) == ("odd", 2, (1, 1, 40, 16))
    assert manifest.graph.vocab_size == 64 and manifest.foreign is not None
    sources = {port.name: port.source for port in manifest.foreign.ports}
    assert sources["odd"] == "the contract file" and sources["present.0.key"] == "name, type and shape"


# graphs


def test_open_cache_sizes_are_those_of_config(sample: Sample) -> None:
    def change(model: onnx.ModelProto) -> None:
        for port in (*model.graph.input, *model.graph.output):
            if port.name.startswith(("past", "present")):
                for size in port.type.tensor_type.shape.dim:
                    size.Clear()

    folder = sample("optimum")
    declared = open_folder(folder).graph.states
    assert open_folder(altered(folder, change)).graph.states == declared


def typed(start: str | tuple[str, ...], dtype: int, name: str | None = None) -> Change:
    """Give ports whose names begin with `start` another type, and another name."""

    def change(model: onnx.ModelProto) -> None:
        for port in (*model.graph.input, *model.graph.output):
            if port.name.startswith(start):
                port.type.tensor_type.elem_type = dtype
                renamed(port.name, name or port.name)(model)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: model.graph.input.append(helper.make_tensor_value_info("token_type_ids", 7, ["b", "s"])),
            r"the input token_type_ids int64\[b,s\] cannot be identified",
        ),
        (
            typed("input_ids", TensorProto.FLOAT, "inputs_embeds"),
            "no input for token ids was found; its inputs are inputs_embeds float32",
        ),
        (
            renamed("present.0.value", "odd"),
            r"past_key_values.0.value float32\[batch_size,1,past_sequence_length,16\] .*--contract",
        ),
        (
            typed(("past", "present"), TensorProto.FLOAT8E4M3FN),
            "numpy has no type for float8e4m3fn; export it with",
        ),
    ],
    ids=["unknown input", "embeddings", "no output", "8-bit floats"],
)
def test_unsupported_input_is_reported(change: Change, said: str, sample: Sample) -> None:
    folder = altered(sample("optimum"), change)
    with pytest.raises(PackageError, match=said):
        open_folder(folder)


def test_operator_missing_from_onnx_runtime_is_reported(sample: Sample) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Softmax")
        node.op_type, node.domain = "SoftmaxOfTomorrow", "com.microsoft"

    folder = altered(sample("optimum"), change)
    with pytest.raises(PartitaError, match=r"this ONNX Runtime lacks the operator com\.microsoft\.SoftmaxOfTomorrow"):
        load(folder)


def test_truncated_growing_cache_fails_test_run(sample: Sample) -> None:
    """The graph keeps only the last 4 rows: the output's length differs from a growing cache's."""

    def cut(model: onnx.ModelProto) -> None:
        renamed("present.0.key", "whole.key")(model)
        port = next(port for port in model.graph.output if port.name == "whole.key")
        port.name, port.type.tensor_type.shape.dim[2].dim_param = "present.0.key", "kept"
        sizes = {"begin": [-4], "end": [1 << 40], "axis": [2]}
        for name, values in sizes.items():
            model.graph.initializer.append(helper.make_tensor(name, 7, [1], values))
        model.graph.node.append(helper.make_node("Slice", ["whole.key", *sizes], ["present.0.key"], name="cut"))

    folder = altered(sample("optimum"), cut)
    with pytest.raises(PackageError, match=r"before the first prompt failed.* \[1, 1, 4, 16\]"):
        load(folder)

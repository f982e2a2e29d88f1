"""Every reader of a file that others may have written returns or raises a PartitaError, in bounded time and memory.

The samples are the same in every run. `PARTITA_HEAVY=1` draws `PARTITA_FUZZ` random ones for each reader (20,000).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from safetensors.numpy import save

from partita.cli import run
from partita.dtypes import storage
from partita.errors import PartitaError
from partita.explain import explain
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.gguf import read_header
from partita.export.checkpoint.weight_files import find_tensors
from partita.foreign.folder import open_folder
from partita.library.batches.journal import Journal
from partita.library.inspecting import read as inspect
from partita.package.folder import MANIFEST, check_files, read_manifest
from partita.partition_reports import storage as reports
from partita.partition_reports.render.show import load_view, view_names
from partita.runtime.generate.prefix_file import PrefixContent, read_content, read_prefix, write_prefix
from partita.runtime.generate.request import Prefix
from partita.runtime.place.model_file import SCOPES, SOURCE, STACK, read_model_file
from partita.runtime.place.onnx_model import read_onnx
from tests.conftest import DEMO_CHECKPOINT, REPOSITORY
from tests.gguf_files import save_settings
from tests.library.batches.test_journal import RUN, answer
from tests.partition_reports.samples import GPU_CHAIN, mixed_facts, report_of
from tests.runtime.handmade_packages import handmade

SECONDS = 3.0
"""Time of the processor for one file, on a slow machine."""
HEAVY = os.environ.get("PARTITA_HEAVY") == "1"
FOREIGN = REPOSITORY / "tests" / "foreign" / "samples" / "genai-fp32-cpu"
SHAPES = {"past.0.key": ((2, 3, 4), "float32"), "past.0.value": ((2, 3, 4), "bfloat16")}


# --- changes of a valid file: of its bytes, and of the values of its JSON text ----------------------------------------

RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@fields": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@digits": "1" + "0" * 400,
    "@many digits": "9" * 5000,
    "@huge": "1e999",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@half": '"\\ud800"',
}
"""JSON text that json.dumps does not write, by the text that stands for it."""
NASTY: tuple[Any, ...] = (
    *RAW,
    *(None, True, 0, -1, 2**31, 2**40, 2**63, -(2**63), 0.5, 1e300),
    *("", "x", "complex128", "\x00", "\x1b]0;title\x07", "../../etc/passwd", "/dev/zero", "a" * 100_000),
    *([], {}, [[]], [0], [-1, 2**62], {"": {}}),
)
LENGTHS = st.sampled_from((0, 1, 255, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within one."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _paths(inner, (*path, key))


@st.composite
def json_texts(draw: DrawFn, value: Any, most: int = 3) -> bytes:
    """The JSON text of `value` with up to `most` of its values changed, removed, added or repeated."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for path in _paths(changed):  # every field is drawn as often, however many records have it
            kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
        if not kinds:
            break
        *way, last = draw(st.sampled_from(kinds[draw(st.sampled_from(list(kinds)))]))
        place = changed
        for key in way:
            place = place[key]
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "repeat")))
        if how == "replace":
            place[last] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif how == "remove":
            del place[last]
        elif how == "repeat" and isinstance(place, list):
            place += [copy.deepcopy(place[last])] * draw(st.sampled_from((1, 1000)))
        elif isinstance(place, dict):
            place["unknown"] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    text = json.dumps(changed)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


@st.composite
def byte_texts(draw: DrawFn, data: bytes, most: int = 4, head: int | None = None) -> bytes:
    """`data` with up to `most` changes, within its first `head` bytes: bytes set, inserted, removed or repeated, the
    end cut off, or eight bytes set to a number, as lengths and counts are.
    """
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, min(len(changed), head or len(changed))))
        how = draw(st.sampled_from(("set", "insert", "remove", "repeat", "cut", "number")))
        if how == "set":
            changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif how == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif how == "remove":
            del changed[at : at + draw(st.sampled_from((1, 8, 100)))]
        elif how == "repeat":
            part = changed[at : at + draw(st.sampled_from((1, 8, 100)))]
            changed[at:at] = part * draw(st.sampled_from((1, 100)))
        elif how == "cut":
            del changed[at:]
        else:
            changed[at : at + 8] = draw(LENGTHS).to_bytes(8, "little")
    return bytes(changed)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a test: these samples, or random ones where the run is a long one."""
    return settings(
        max_examples=int(os.environ.get("PARTITA_FUZZ", "20000")) if HEAVY else examples,
        derandomize=not HEAVY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def held(read: Callable[[], object]) -> bool:
    """Whether the reader took the file; a PartitaError of one line is the other outcome."""
    began = time.process_time()
    try:
        read()
    except PartitaError as error:
        assert "\n" not in str(error) and len(str(error)) < 6000
        return False
    finally:
        assert time.process_time() - began < SECONDS
    return True


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# --- manifests --------------------------------------------------------------------------------------------------------


def package_in(folder: Path) -> dict[str, Any]:
    """Write a small package; its manifest."""
    read: dict[str, Any] = json.loads((handmade(folder) / MANIFEST).read_text())
    return read


@fuzz(25)
@given(data=st.data())
def test_manifest_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    folder = home / "package"
    raw = package_in(folder)
    written = json.dumps(raw).encode()
    (folder / MANIFEST).write_bytes(data.draw(st.one_of(json_texts(raw), json_texts(raw), byte_texts(written))))

    def read() -> None:
        manifest = read_manifest(folder)
        check_files(folder, manifest, hashes=False)

    held(read)
    held(lambda: inspect(folder))


# --- reports ----------------------------------------------------------------------------------------------------------

REPORT = report_of(mixed_facts(), GPU_CHAIN)


@fuzz(25)
@given(data=st.data())
def test_report_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    path, written = home / "report.json", reports.to_json(REPORT).encode()
    path.write_bytes(data.draw(st.one_of(json_texts(json.loads(written)), byte_texts(written))))
    if held(lambda: reports.read(path)):
        report = reports.read(path)
        for name in view_names():
            held(lambda name=name: load_view(name).to_text(report))  # type: ignore[misc]
        held(lambda: explain(report, "MatMul"))


# --- journals ---------------------------------------------------------------------------------------------------------


@fuzz(25)
@given(data=st.data())
def test_journal_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    """If the damaged journal opens, the run completes every row."""
    path, out = home / "out.jsonl.partial", home / "out.jsonl"
    path.unlink(missing_ok=True)
    with Journal(out, RUN, 1, 4) as journal:
        for index in range(3):
            journal.append(answer(index))
    header, *lines = path.read_bytes().splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines)))
    changed = [header, *lines]
    line = changed[number]
    changed[number] = data.draw(st.one_of(json_texts(json.loads(line)), byte_texts(line)))
    if data.draw(st.booleans()):
        changed[number] += b"\n"
    path.write_bytes(b"".join(changed))

    def read() -> None:
        with Journal(out, RUN, 1, 4) as journal:
            for index in journal.missing():
                journal.append(answer(index))
            assert len(journal) == 4

    held(read)


# --- prefixes ---------------------------------------------------------------------------------------------------------


@fuzz(25)
@given(data=st.data())
def test_prefix_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    path = home / "prefix"
    states = {name: np.zeros(shape, storage(kind)) for name, (shape, kind) in SHAPES.items()}
    write_prefix(path, Prefix(np.arange(3), states), PrefixContent((0, 1, 2), text="a"), "id")
    written = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(byte_texts(written, head=len(written) if data.draw(st.booleans()) else 400)))
    else:
        about = data.draw(json_texts({"text": "a", "system": None, "adapter": None})).decode()
        numbers = st.sampled_from((0, 1, 9, 10, -1, 2**40, -(2**63)))
        tokens = np.array(data.draw(st.lists(numbers, max_size=4)), np.int64)
        told = {"schema": "partita.prefix/1", "package": "id", "said": about}
        path.write_bytes(save({"tokens": tokens, **{f"state.{name}": value for name, value in states.items()}}, told))
    held(lambda: read_content(path))
    if held(lambda: read_prefix(path, "id", None, SHAPES)):
        assert all(token >= 0 for token in read_content(path).tokens)


# --- weights ----------------------------------------------------------------------------------------------------------


@fuzz(200)
@given(data=st.data())
def test_gguf_header_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    path = home / "model.gguf"
    if not (home / "sound.gguf").exists():
        save_settings(
            home / "sound.gguf", "llama", {"rope.scaling.type": "none", "layers": [1, 2], "names": ["a", "b"]}
        )
    path.write_bytes(data.draw(byte_texts((home / "sound.gguf").read_bytes(), head=800)))
    held(lambda: read_header(path))


@fuzz(50)
@given(data=st.data())
def test_safetensors_header_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    folder = home / "checkpoint"
    folder.mkdir(exist_ok=True)
    written = save({"a.weight": np.zeros((2, 3), np.float32), "b.bias": np.zeros(4, np.float16)}, {"format": "pt"})
    size = int.from_bytes(written[:8], "little")
    if data.draw(st.booleans()):
        header = data.draw(json_texts(json.loads(written[8 : 8 + size])))
        changed = len(header).to_bytes(8, "little") + header + written[8 + size :]
    else:
        changed = data.draw(byte_texts(written, head=8 + size))
    (folder / "model.safetensors").write_bytes(changed)
    held(lambda: find_tensors(folder))


# --- settings of a checkpoint, and of a folder of another exporter ----------------------------------------------------


@fuzz(25)
@given(data=st.data())
def test_checkpoint_config_reader_raises_only_partita_errors(home: Path, data: st.DataObject) -> None:
    folder, written = home / "settings", json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    if not folder.exists():
        shutil.copytree(DEMO_CHECKPOINT, folder)
    (folder / "config.json").write_bytes(data.draw(json_texts(written)))
    held(lambda: open_checkpoint(str(folder)))


@fuzz(15)
@given(data=st.data())
def test_invalid_foreign_config_causes_no_internal_error(
    home: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """The commands run or exit with code 1."""
    folder = home / "foreign"
    shutil.copytree(FOREIGN, folder, dirs_exist_ok=True)
    file = folder / data.draw(st.sampled_from(sorted(path.name for path in FOREIGN.glob("*config.json"))))
    file.write_bytes(data.draw(json_texts(json.loads(file.read_text()))))
    generate = ["generate", str(folder), "3,4,5", "--token-ids", "--max-new-tokens", "2", "--provider", "cpu"]
    for words in (["inspect", str(folder)], generate):
        code, err = run(words), capsys.readouterr().err
        assert code in (0, 1) and "internal error" not in err, err


# --- ONNX files -------------------------------------------------------------------------------------------------------

LISTED = (
    "",
    "-" * 200_000 + "1",
    "1+" * 50_000 + "1",
    "[" + "~" * 5000 + "1]",
    "['a', 'b']",
    "[" * 10_000,
    "['" * 9999,
)
METADATA = st.one_of(st.sampled_from(LISTED), st.text(max_size=40), st.binary(max_size=8).map(repr))


@fuzz(25)
@given(data=st.data())
def test_onnx_readers_raise_only_partita_errors(home: Path, data: st.DataObject) -> None:
    folder = home / "onnx"
    if not folder.exists():
        shutil.copytree(FOREIGN, folder)
    path = folder / "model.onnx"
    written = (FOREIGN / "model.onnx").read_bytes()
    if data.draw(st.booleans()):
        model = onnx.ModelProto.FromString(written)
        for _ in range(data.draw(st.integers(1, 4))):
            node = model.graph.node[data.draw(st.integers(0, len(model.graph.node) - 1))]
            key = data.draw(st.sampled_from((SCOPES, SOURCE, STACK, "partita.module")))
            node.metadata_props.add(key=key, value=data.draw(METADATA))
        path.write_bytes(model.SerializeToString())
    else:
        path.write_bytes(data.draw(byte_texts(written)))
    held(lambda: read_model_file(path, folder))
    held(lambda: read_onnx(path))
    held(lambda: open_folder(folder))
    held(lambda: inspect(folder))

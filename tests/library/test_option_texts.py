"""An error names the argument to a Python program and the flag on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import parser

import partita
from partita.cli import run
from partita.demo import checkpoint_path
from partita.options.fields import with_flags

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[N,4] x) => (float[N,4] y) { [first] h = Relu(x)  [second] y = Sigmoid(h) }"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file, its report, and a folder that is no package."""
    folder = tmp_path_factory.mktemp("words")
    onnx.save(parser.parse_model(MODEL), folder / "m.onnx")
    partita.place(folder / "m.onnx", "cpu", shapes={"N": 2}, runs=1).save(folder / "r.json")
    (folder / "bench.json").write_text('{"schema": "partita.bench/1"}')
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    return folder


CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "precision": (
        lambda at: partita.export(checkpoint_path(), at / "out", precision="fp8"),  # type: ignore[arg-type]
        f"export {checkpoint_path()} out --precision fp8",
        "`precision=fp8`",
    ),
    "there": (
        lambda at: partita.export(at / "none", at / "taken", attention="gqa"),
        "export none taken --attention gqa",
        "replace the package: --force",
    ),
    "dry": (
        lambda at: partita.place(at / "m.onnx", dry_run=True),
        "place m.onnx --dry-run",
        "`dry_run=True` needs `providers=cuda`",
    ),
    "provider": (
        lambda at: partita.place(at / "m.onnx", "nowhere"),
        "place m.onnx --provider nowhere",
        "`providers`: unknown provider",
    ),
    "library": (
        lambda at: partita.place(at / "m.onnx", "cpu", provider_libraries={"mine": "/none.so"}),
        "place m.onnx --provider cpu --provider-library mine=/none.so",
        "`provider_libraries`: /none.so does not exist",
    ),
    "size": (
        lambda at: partita.place(at / "m.onnx", "cpu", shapes={"x": (2, 5)}),
        "place m.onnx --provider cpu --shape x=2,5",
        "`shapes=x=2,5`",
    ),
    "slowdown": (
        lambda at: partita.Report.read(at / "r.json").check(max_slowdown=0.5),
        "report check r.json --max-slowdown 0.5",
        "`max_slowdown` needs `baseline`",
    ),
    "not met": (
        lambda at: partita.Report.read(at / "r.json").check(max_cpu_nodes=0, min_tokens_per_second=5.0),
        "report check r.json --max-cpu-nodes 0 --min-tokens-per-second 5",
        "--max-cpu-nodes 0",
    ),
    "bench": (
        lambda at: partita.Report.read(at / "bench.json"),
        "report check bench.json --max-copies 0",
        "bench writes reports with `reports`",
    ),
}
"""A call, a command line, and the message of both."""


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument_or_the_flag(case, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    call, words, says = CASES[case]
    with pytest.raises(partita.PartitaError) as caught:
        call(folder)
    assert says in f"{caught.value} {caught.value.remedy}"
    assert capfd.readouterr() == ("", "")
    assert run(words.split()) != 0
    out, err = capfd.readouterr()
    assert with_flags(says) in " ".join(f"{err} {out}".split())


def test_worker_error_includes_remedy_option(package: Path, folder: Path) -> None:
    with partita.load(package, "cpu", process="child") as model, pytest.raises(partita.PartitaError) as caught:
        model.generate([1] * 65)
    assert "--max-length 128" in str(caught.value)
    with pytest.raises(partita.PartitaError) as caught:
        partita.place(folder / "m.onnx", "cpu", process="child")
    assert str(caught.value).endswith("add them, as in: --shape N=1")

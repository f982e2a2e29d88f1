"""An error names the argument to a Python program and the flag on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

import partita
from partita.cli import run
from partita.demo import checkpoint_path
from partita.options.fields import with_flags

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[N,4] x) => (float[N,4] y) { [first] h = Relu(x)  [second] y = Sigmoid(h) }"""


@dataclass(frozen=True)
class Place:
    """What bad input is given about."""

    folder: Path
    model: Path
    report: Path
    exported: Callable[[], Path]

    @property
    def package(self) -> Path:
        """Made when somebody asks for it."""
        return self.exported()

    def load(self, **options: Any) -> partita.Model:
        return partita.load(self.package, options.pop("providers", "cpu"), **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Place:
    folder = tmp_path_factory.mktemp("words")
    model, report = folder / "m.onnx", folder / "r.json"
    onnx.save(parser.parse_model(MODEL), model)
    partita.place(model, "cpu", shapes={"N": 2}, runs=1).save(report)
    (folder / "bench.json").write_text('{"schema": "partita.bench/1"}')
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    return Place(folder, model, report, lambda: request.getfixturevalue("package"))


Call = Callable[[Place], object]
Words = Callable[[Place], list[str]]


def exporting(**options: Any) -> Call:
    return lambda place: partita.export(checkpoint_path(), place.folder / "out", **options)


def export_words(*words: str) -> Words:
    return lambda place: ["export", str(checkpoint_path()), str(place.folder / "out"), *words]


def placing(*providers: str, **options: Any) -> Call:
    return lambda place: partita.place(place.model, *providers, **options)


def place_words(*words: str) -> Words:
    return lambda place: ["place", str(place.model), *words]


def checking(*requirements: str, **options: Any) -> Call:
    return lambda place: partita.Report.read(place.report).check(*requirements, **options)


def check_words(*words: str) -> Words:
    return lambda place: ["report", "check", str(place.report), *words]


def generating(prompt: Any = "return the", **options: Any) -> Call:
    def call(place: Place) -> object:
        with place.load() as model:
            return model.generate(prompt, **options).run()

    return call


def generate_words(*words: str) -> Words:
    return lambda place: ["generate", str(place.package), "return the", "--provider", "cpu", *words]


CASES: dict[str, tuple[Call, str]] = {
    "precision": (exporting(precision="fp8"), "`precision=fp8`"),
    "target": (exporting(target="nowhere"), "`target`: unknown"),
    "taken": (
        lambda place: partita.export(place.folder / "none", place.folder / "taken", force=True, attention="gqa"),
        "`force=True` replaces only packages",
    ),
    "there": (
        lambda place: partita.export(place.folder / "none", place.folder / "taken", attention="gqa"),
        "replace the package: --force",
    ),
    "dry": (placing(dry_run=True), "`dry_run=True` needs `providers=cuda`"),
    "provider": (placing("nowhere"), "`providers`: unknown provider"),
    "library": (
        placing("cpu", provider_libraries={"mine": "/none.so"}),
        "`provider_libraries`: /none.so does not exist",
    ),
    "pin": (placing("cpu", pins=["lm_head"]), "`pins=lm_head`"),
    "size": (placing("cpu", shapes={"x": (2, 5)}), "`shapes=x=2,5`"),
    "package sizes": (lambda place: partita.place(place.package, "cpu", shapes={"x": 1}), "`shapes` is for ONNX files"),
    "not met": (checking(max_cpu_nodes=0, min_tokens_per_second=5.0), "--max-cpu-nodes 0"),
    "bench": (lambda place: partita.Report.read(place.folder / "bench.json"), "bench writes reports with `reports`"),
    "no report": (lambda place: partita.Report.read(place.folder / "none.json"), "write a report with `report`"),
    "temperature": (generating(temperature=-1.0), "`temperature` is -1.0"),
    "too many": (generating(list(range(1, 66)) * 1), "partita export CHECKPOINT PACKAGE --max-length 128"),
}
PRINTED: dict[str, Words] = {
    "precision": export_words("--precision", "fp8"),
    "there": lambda place: ["export", "none", str(place.folder / "taken"), "--attention", "gqa"],
    "provider": place_words("--provider", "nowhere"),
    "library": place_words("--provider", "cpu", "--provider-library", "mine=/none.so"),
    "size": place_words("--provider", "cpu", "--shape", "x=2,5"),
    "not met": check_words("--max-cpu-nodes", "0", "--min-tokens-per-second", "5"),
    "bench": lambda place: ["report", "check", str(place.folder / "bench.json"), "--max-copies", "0"],
    "temperature": generate_words("--temperature", "-1"),
    "too many": lambda place: [
        "generate",
        str(place.package),
        "--token-ids",
        " ".join(["1"] * 65),
        "--provider",
        "cpu",
    ],
}
"""Cases of each verb as a command line."""


def texts(error: BaseException) -> str:
    """Everything that it says, with what it says to do."""
    return f"{error} {getattr(error, 'remedy', None)}"


@pytest.mark.parametrize("case", CASES)
def test_python_error_names_argument(case: str, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    call, says = CASES[case]
    with pytest.raises(partita.PartitaError) as caught:
        call(place)
    assert says in texts(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("case", PRINTED)
def test_command_line_error_names_flag(case: str, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PRINTED[case](place)) != 0
    out, err = capsys.readouterr()
    assert with_flags(CASES[case][1]) in " ".join(f"{err} {out}".split())


def test_worker_error_includes_remedy_option(place: Place) -> None:
    with partita.load(place.package, "cpu", process="child") as model, pytest.raises(partita.PartitaError) as caught:
        model.generate([1] * 65)
    assert "--max-length 128" in str(caught.value)
    with pytest.raises(partita.PartitaError) as caught:
        partita.place(place.model, "cpu", process="child")
    assert str(caught.value).endswith("add them, as in: --shape N=1")

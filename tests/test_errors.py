"""Exit codes, the exception tree, and names in messages: the argument for Python, the flag on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import parser

import partita
from partita import errors
from partita.cli import run
from partita.demo import checkpoint_path
from partita.errors import PartitaError
from partita.options.fields import with_flags
from partita.remedies import Remedy

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.PartitaError)
}

# What scripts around Partita test for: changing a row breaks them.
EXIT_CODES = {
    "PartitaError": 1,
    "UsageError": 2,
    "CheckpointError": 1,
    "UnsupportedModelError": 1,
    "PackageError": 1,
    "ReportError": 1,
    "ResourceError": 1,
    "InstallationError": 1,
    "GenerationError": 1,
    "ProviderError": 3,
    "ParityError": 4,
    "ReportCheckError": 5,
}


def test_exit_codes() -> None:
    assert {name: error.exit_code for name, error in ERRORS.items()} == EXIT_CODES
    assert issubclass(errors.UnsupportedModelError, errors.CheckpointError)


def test_long_message_is_truncated_but_keeps_remedy():
    error = errors.PackageError("x" * 1_500_000, remedy=Remedy("export it again"))
    assert len(str(error)) < 5000 and str(error).endswith("(1,496,000 more characters); export it again")


# Messages name an option by its Python argument in backticks; the command line and prompt files rename it


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("`max_length` is 0; it must be at least 1", "--max-length is 0; it must be at least 1"),
        ("`max_length=5`: too long", "--max-length 5: too long"),
        ("`force=True` or `verify=False`", "--force or --no-verify"),
        ("`cache_in_place=True`", "--require-cache-in-place"),
        ("`providers=cuda,cpu` and `pins=cpu:lm_head`", "--provider cuda,cpu and --pin cpu:lm_head"),
        ("`target_options=qnn.a=b`", "--provider-option qnn.a=b"),
        ("`shapes=x=1,3`", "--shape x=1,3"),
        ("`input_ids` and `partita export` are no options", "`input_ids` and `partita export` are no options"),
        ("an open ` and `seed", "an open ` and `seed"),
    ],
)
def test_command_line_messages_show_options_as_flags(message: str, printed: str) -> None:
    assert with_flags(message) == printed


def test_error_message_ends_with_remedy() -> None:
    remedy = Remedy("try it", options=("--provider", "cpu"), alternative=Remedy("", ("partita", "providers", "--json")))
    error = PartitaError("no", remedy=remedy)
    assert str(error) == "no; try it: --provider cpu, or partita providers --json"
    assert error.remedy == remedy


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

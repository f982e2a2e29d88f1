"""No verb overwrites a file that it reads, for every output option and every way to name a file."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from partita.cli import REPORT_VERBS, VERBS, run
from partita.errors import ReportError
from partita.files import CACHE_VARIABLE, cache_folder, reserve, write_text
from partita.options.fields import OUTPUT, describe_fields
from tests.commands.test_cli import child_environment


def written_parameters() -> set[str]:
    """`verb parameter` of every path on the command line that is written."""
    return {
        f"{prefix}{verb.name} {each.flag.removeprefix('--')}"
        for prefix, verbs in (("", VERBS), ("report ", REPORT_VERBS))
        for verb in verbs
        for each in describe_fields(verb.record())
        if each.group == OUTPUT and each.is_path
    }


def test_every_written_path_is_tested() -> None:
    assert {f"{writer.verb} {writer.option.removeprefix('--')}" for writer in WRITERS} == written_parameters()


def make_files(folder: Path, package: Path, report: Path) -> dict[str, Path]:
    """A folder with everything that a verb may read, by the names in the words of a writer."""
    folder.mkdir()
    np.save(folder / "values.npy", np.ones((1, 4), np.float32))
    (folder / "libmine.so").write_bytes(b"\x7fELF CreateEpFactories")
    (folder / "settings.json").write_text("{}")
    for copied in ("package", "other"):
        shutil.copytree(package, folder / copied)
    shutil.copyfile(report, folder / "run.json")
    write_model(folder / "model.onnx")
    names = {"report": "run.json", "model": "model.onnx", "data": "model.onnx.data", "array": "values.npy"}
    names |= {"library": "libmine.so", "settings": "settings.json", "package": "package", "other": "other"}
    return {"folder": folder, **{name: folder / file for name, file in names.items()}}


def hashes(folder: Path) -> dict[str, str]:
    """Hash of every file; links are followed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_model(path: Path) -> None:
    """y = x + w, with w in a file beside it."""
    text = "g (float[1,4] x) => (float[1,4] y) { [add] y = Add(x, w) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


@dataclass
class Writer:
    """A verb, its option that names an output, its other words, and the names of the files that it reads then."""

    verb: str
    option: str
    words: str
    read: str

    def command(self, files: dict[str, Path], target: object) -> list[str]:
        return [*self.verb.split(), *self.words.format(**files).split(), self.option, str(target)]

    def reads(self, files: dict[str, Path]) -> Iterator[Path]:
        for path in (files[name] for name in self.read.split()):
            inside = ("manifest.json", "model.onnx.data", "new-file") if path.is_dir() else (".",)
            yield from (path / name for name in inside)


IDS = "{package} 1,2 --token-ids --provider cpu"
LIBRARIES = "--provider mine,openvino,cpu --provider-library mine={library}"
BENCH = "--provider cpu --max-new-tokens 2 --rounds 1"
WRITERS = [
    Writer("generate", "--report", IDS, "package"),
    Writer("generate", "--save-prefix", IDS, "package"),
    Writer("generate", "--output", "{package} --input {settings} --token-ids --provider cpu", "package settings"),
    Writer("place", "--report", "{package} --provider cpu", "package"),
    Writer("place", "--report", "{model} --provider cpu --input x={array}", "model data array"),
    Writer(
        "place",
        "--report",
        f"{{model}} {LIBRARIES} --provider-option openvino.load_config={{settings}}",
        "library settings",
    ),
    Writer("bench", "--report", f"{{package}} {BENCH}", "package"),
    Writer("bench", "--out", f"{{package}} --against {{other}} {BENCH}", "package other"),
    Writer("drift", "--out", "{package} --provider cpu", "package"),
    Writer("plan", "--out", "{package} --device h100", "package"),
    Writer("inspect", "--out", "{package} --against {other}", "package"),
    Writer("inspect", "--out", "{model}", "model data"),
    Writer("report show", "--out", "{report}", "report"),
    Writer("report html", "--out", "{report}", "report"),
    Writer("report markdown", "--out", "{report}", "report"),
    Writer("report explain", "--out", "{report} lm_head", "report"),
    Writer("report diff", "--out", "{report} {report}", "report"),
    Writer("report check", "--out", "{report} --max-copies 9", "report"),
    Writer("providers", "--out", "--provider-library mine={library}", "library"),
    Writer("support", "--out", "--model {model} --provider cpu", "model data"),
    Writer("run", "--report", "{package} 1,2 --raw --provider cpu", "package"),
]


def linked(path: Path, folder: Path) -> Path:
    (folder / "link").symlink_to(path)
    return folder / "link"


def below_a_link(path: Path, folder: Path) -> Path:
    (folder / "around").symlink_to(path.parent, target_is_directory=True)
    return folder / "around" / path.name


WAYS: list[Callable[[Path, Path], Path]] = [lambda path, folder: path, linked, below_a_link]


@pytest.fixture(scope="module")
def stored(tiny_checkpoint, exported, tmp_path_factory) -> tuple[Path, Path]:
    """A package, and the report of a run of it."""
    package, report = exported(tiny_checkpoint("llama")), tmp_path_factory.mktemp("stored") / "run.json"
    words = ["generate", package, "1,2", "--token-ids", "--max-new-tokens", 3, "--provider", "cpu", "--report", report]
    assert run([str(word) for word in words]) == 0
    return package, report


@pytest.fixture
def files(stored: tuple[Path, Path], tmp_path: Path) -> dict[str, Path]:
    return make_files(tmp_path / "files", *stored)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: f"{w.verb}-{w.option}-{WRITERS.index(w)}")
def test_output_equal_to_an_input_is_rejected(writer, files, tmp_path, capsys):
    for number, read in enumerate(writer.reads(files)):
        for way, name in enumerate(WAYS):
            (folder := tmp_path / f"{number}-{way}").mkdir()
            target = name(read, folder)
            if (writer.verb, writer.option) == ("bench", "--report"):  # a folder; its files have the names of chains
                target = linked_into(folder, target)
            before = hashes(files["folder"])
            assert run(writer.command(files, target)) == 2, (read, way)
            err = capsys.readouterr().err
            assert "which this command reads" in err and str(target) in err, err
            assert hashes(files["folder"]) == before, (read, way)


def linked_into(folder: Path, target: Path) -> Path:
    (folder / "reports").mkdir()
    (folder / "reports" / "cpu.json").symlink_to(target)
    return folder / "reports"


def test_prompt_file_on_stdin_is_not_overwritten(files: dict[str, Path]) -> None:
    prompt = files["folder"] / "prompt.txt"
    prompt.write_text("1,2,3")
    words = WRITERS[0].command(files, prompt)
    words[words.index("1,2")] = "-"
    with prompt.open() as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "partita", *words],
            stdin=stdin,
            capture_output=True,
            text=True,
            env=child_environment(),
            check=False,
        )
    assert (done.returncode, prompt.read_text()) == (2, "1,2,3")
    assert "the file that stdin reads" in done.stderr


def test_dangling_link_is_written_through_and_preserved(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    reserve(tmp_path / "link", "report", [], option="--report").write("text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


def test_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    path.chmod(0o600)
    write_text("new", path, "report")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "new"


def in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command.replace("partita ", f"{sys.executable} -m partita ")],
        cwd=folder,
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )


def test_report_on_stdout_can_be_piped_to_next_command(files: dict[str, Path]) -> None:
    told = in_shell(
        "partita generate package 1,2 --token-ids --max-new-tokens 3 --provider cpu --report - "
        "| partita report show - --full",
        files["folder"],
    )
    assert told.returncode == 0, told.stderr
    assert "nodes on CPU in" in told.stdout.replace("\n", " ")
    assert "finish: length" in told.stderr
    placed = in_shell("partita place model.onnx --provider cpu --report - > out.json", files["folder"])
    assert placed.returncode == 0, placed.stderr
    assert json.loads((files["folder"] / "out.json").read_text())["schema"] == "partita.report/1"
    assert not (files["folder"] / "-").exists()


def test_report_on_stdout_with_json_option_is_rejected(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    writers = [writer for writer in WRITERS if writer.option == "--report" and writer.verb != "bench"]
    for writer in [writer for writer in writers if "--input" not in writer.command(files, "-")][:2]:
        assert run([*writer.command(files, "-"), "--json"]) == 2
        assert "--report - and --json" in capsys.readouterr().err


def test_report_commands_read_stdin(files: dict[str, Path]) -> None:
    told = in_shell(
        "partita report html - < run.json > page.html && partita report markdown - < run.json > run.md"
        " && partita report diff - run.json --exit-code < run.json"
        " && partita report explain - lm_head/MatMul < run.json"
        " && partita report check - --max-cpu-nodes 999 < run.json",
        files["folder"],
    )
    assert told.returncode == 0, told.stderr
    assert (files["folder"] / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert "CPU" in (files["folder"] / "run.md").read_text()
    once = in_shell("partita report diff - - < run.json", files["folder"])
    assert once.returncode == 2 and "stdin" in once.stderr


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES])
def test_file_is_written_in_place_if_replace_fails(tmp_path: Path, monkeypatch, code: int) -> None:
    """A file that is mounted by itself in a container cannot be replaced by renaming."""
    path = tmp_path / "report.json"
    path.write_text("old")

    def refuses(*_: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "replace", refuses)
    write_text("new", path, "report")
    assert path.read_text() == "new" and [each.name for each in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(ReportError, match="refused"):
        write_text("new", tmp_path / "other.json", "report")


# One folder for everything that Partita keeps, and one variable that moves it


def test_cache_variable_sets_or_disables_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder("probes") == tmp_path / "probes"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder("probes") is None, "an empty variable: nothing is kept"

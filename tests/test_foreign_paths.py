"""What is given in place of a package is called by its name, and the command that is named takes it as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from partita import cli
from partita.package.folder import MANIFEST, WEIGHTS, read_manifest
from partita.remedies import LFS_HEAD, permission
from tests.conftest import REPOSITORY, Exported, TinyCheckpoint
from tests.remedies import remedy_of

POINTER = LFS_HEAD + b"\noid sha256:" + b"0" * 64 + b"\nsize 10498464\n"
VERBS = (("generate", "hi"), ("verify",), ("place",))
READ_PACKAGES = VERBS[1:]
"""Verbs that do not export."""


@pytest.fixture
def package(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A package that a test may damage, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported(tiny_checkpoint("llama")), "pkg")
    return Path("pkg")


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that fails."""
    assert cli.run([*map(str, arguments)]) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
    return line


@pytest.mark.parametrize("verb", READ_PACKAGES, ids=lambda verb: verb[0])
def test_a_checkpoint_is_to_be_exported_first(
    verb: tuple[str, ...],
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint("llama"), "my checkpoint")
    line = told(capsys, verb[0], "my checkpoint", *verb[1:], "--provider", "cpu")
    assert "a checkpoint, not a package" in line and 'partita export "my checkpoint" "my checkpoint-package"' in line
    if verb[0] == "verify":  # one export is enough
        command = remedy_of(verb[0], "my checkpoint", *verb[1:], "--provider", "cpu").command
        assert cli.run([*command[1:], "--max-length", "32"]) == 0
        assert cli.run([verb[0], command[3], *verb[1:], "--provider", "cpu"]) == 0


def test_files_go_to_the_verb_that_reads_them(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["place", "pkg", "--provider", "cpu", "--report", "run.json"]) == 0
    shutil.copy(package / "model.onnx", "alone.onnx")
    shutil.copy(package / WEIGHTS, WEIGHTS)
    capsys.readouterr()
    sizes = ("--provider", "cpu", "--shape", "logits_rows=1", "--shape", "sequence_length=1")
    for file, what, more in (("run.json", "the report of a run", ()), ("alone.onnx", "an ONNX file", sizes)):
        assert what in told(capsys, "generate", file, "hi", "--provider", "cpu")
        command = remedy_of("generate", file, "hi", "--provider", "cpu").command
        assert command[-1] == file
        assert cli.run([*command[1:], *more]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert "the report of a run" in told(capsys, "place", "run.json", "--provider", "cpu")


@pytest.mark.parametrize("name", [MANIFEST, "model.onnx"])
def test_a_file_of_a_package_names_its_folder(package: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name pkg instead" in told(capsys, "generate", package / name, "hi", "--provider", "cpu")


def test_a_folder_of_packages_names_the_package(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"name {Path().resolve() / 'pkg'} instead" in told(capsys, "generate", Path().resolve(), "hi")


@pytest.mark.parametrize("target", ["gone", "link"])
def test_a_link_that_leads_nowhere_is_called_one(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(target)
    for verb in (("generate", "hi"), ("verify",), ("inspect",)):
        line = told(capsys, verb[0], "link", *verb[1:])
        assert f"link: a broken symbolic link to {target}; name the package's folder" in line


def test_a_file_with_the_suffix_of_gguf_and_other_content_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"<html>not found</html>")
    line = told(capsys, "run", file, "hi")
    assert line.endswith("model.gguf: not a GGUF file: its first bytes are not `GGUF`; download it again")


def test_a_name_of_the_hub_is_to_be_exported(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remedy_of("verify", "owner/name").command == ("partita", "export", "owner/name", "name-package")
    assert remedy_of("verify", "nothing").command == ("partita", "export", "CHECKPOINT", "nothing")
    assert "no such folder" in told(capsys, "verify", "nothing")


# Git LFS


@pytest.mark.parametrize(
    ("verb", "name"),
    [(VERBS[0], MANIFEST), (VERBS[0], WEIGHTS), (VERBS[0], "tokenizer.json"), (VERBS[2], "model.onnx")],
)
def test_a_pointer_of_git_lfs_is_to_be_pulled(
    package: Path, name: str, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (package / name).read_bytes()
    (package / name).write_bytes(POINTER)
    line = told(capsys, verb[0], package, *verb[1:], "--provider", "cpu")
    assert str(package / name) in line and "in pkg run: git lfs pull" in line
    (package / name).write_bytes(kept)  # which is what the command does
    assert cli.run([verb[0], "pkg", *verb[1:], "--provider", "cpu"]) == 0


# permissions


def unprivileged(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a command that may not read what its permissions forbid; root may, unless told not to."""
    words = [sys.executable, "-m", "partita", *map(str, arguments)]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("root reads everything, and there is no setpriv to give that up")
        words = [setpriv, "--bounding-set=-dac_override,-dac_read_search", *words]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param("generate", MANIFEST, marks=pytest.mark.heavy),
        pytest.param("generate", WEIGHTS, marks=pytest.mark.heavy),
        ("generate", "."),
        ("place", WEIGHTS),
    ],
)
def test_what_may_not_be_read_is_to_be_made_readable(package: Path, verb: str, name: str) -> None:
    """The command that is named is run, and the complaint is gone."""
    path, mode = package / name, (package / name).stat().st_mode
    words = [verb, "pkg", *(["hi"] if verb == "generate" else []), "--provider", "cpu"]
    path.chmod(0o400 if name == "." else 0)
    try:
        code, err = unprivileged(*words)
        remedy = permission(path) if os.geteuid() else None
    finally:
        path.chmod(mode & ~(0o500 if name == "." else 0o400))
    assert code == 1 and "ermission denied" in err and "export" not in err and "disk" not in err, err
    given = "u+rx" if name == "." else "u+r"
    assert err.rstrip().endswith(f"chmod {given} {path}") or err.rstrip().endswith(
        f"chmod {given} {path.absolute()}"
    ), err
    assert remedy is None or remedy.command[:2] == ("chmod", given)
    subprocess.run(["chmod", given, str(path)], check=True)
    code, err = unprivileged(*words)
    assert code == 0, err


# a package that its runtime has no kernels for


def test_a_type_without_kernels_is_to_be_exported_in_another(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU provider has no kernels for bfloat16: the command is about precision, and its package runs."""
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint, precision="bf16")
    monkeypatch.chdir(tmp_path)
    for words in (("generate", package, "hi", "--provider", "cpu"), ("verify", package, "--provider", "cpu")):
        command = remedy_of(*words).command
        assert command[-2:] == ("--precision", "fp32") and "--attention" not in command
    given = [str(checkpoint) if word == "CHECKPOINT" else word for word in command]
    assert cli.run([*given[1:], "--max-length", "32", "--no-verify"]) == 0
    assert read_manifest(Path(given[3])).graph.precision == "fp32"
    assert cli.run(["generate", given[3], "hi", "--provider", "cpu", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_a_repository_of_folders_names_those_with_a_model(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of onnxruntime-genai on the hub are: a folder for each device and precision, and nothing at the top."""
    samples = Path(__file__).parent / "foreign" / "samples"
    home = tmp_path / "hub"
    for place in ("cpu/int4", "cuda/fp16"):
        shutil.copytree(samples / "genai-fp32-cpu", home / place)
    (home / "web" / "onnx").mkdir(parents=True)
    shutil.copy(samples / "optimum" / "model.onnx", home / "web" / "onnx")
    (home / "config.json").write_text("{}")
    said = told(capsys, verb, home, *(("1,2", "--token-ids") if verb == "generate" else ()))
    assert "3 folders with ONNX models below it" in said, said
    assert all(place in said for place in ("cpu/int4", "cuda/fp16", "web")) and "web/onnx" not in said
    assert f"name {home / 'cpu' / 'int4'} instead" in said or "web instead" in said
    (home / "model.safetensors").write_bytes(b"")
    assert "a checkpoint, not a package" in told(capsys, "verify", home)

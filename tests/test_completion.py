"""Completion, asked as the shells ask: what they are offered, and that the answer comes while a key is pressed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.cli import run
from tests.conftest import REPOSITORY, require

LIMIT_SECONDS = 0.4
PROVIDERS = ("cpu", "cuda", "openvino", "webgpu")


def variables(shell: str, line: str) -> dict[str, str]:
    """Environment of a question about a line; a blank at the end begins a new word."""
    words = line.split(" ")
    return {
        "_PARTITA_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }


Offered = Callable[[str], list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    """Words that bash is offered for a line."""

    def ask(line: str) -> list[str]:
        for name, value in variables("bash", line).items():
            monkeypatch.setenv(name, value)
        assert run([]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return str(out).split()

    return ask


@pytest.fixture
def partita(tmp_path: Path) -> dict[str, str]:
    """An environment in which `partita` is the command of this tree, and HOME is empty."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "partita"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m partita "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(home)}


def found(shell: str) -> str:
    path = shutil.which(shell)
    require(f"the shell {shell}", path is not None)
    assert path is not None
    return path


def test_verbs_and_options(offered: Offered) -> None:
    assert offered("partita ex") == ["export"]
    assert {"show", "html", "diff", "check"} <= set(offered("partita report "))
    assert set(offered("partita generate p --te")) == {"--temperature", "--temp"}


def test_values_of_choices(offered: Offered) -> None:
    assert offered("partita export c o --precision ") == ["auto", "fp32", "fp16", "bf16", "int8", "int4"]
    assert offered("partita export c o --activations ") == ["fp32", "fp16", "bf16", "int8"]
    assert offered("partita export c o --prefill-precision ") == ["int8"]
    assert offered("partita export c o --attention p") == ["primitives"]
    assert set(PROVIDERS) <= set(offered("partita export c o --target "))
    assert set(PROVIDERS) <= set(offered("partita generate p --provider "))
    assert offered("partita verify p -e webg") == ["webgpu"]
    assert offered("partita place m --device h1") == ["h100"]
    assert offered("partita place m --provider-option cuda.device") == ["cuda.device_id="]
    assert set(PROVIDERS) <= set(offered("partita bench p --providers webgpu "))
    assert offered("partita report show r --view ma") == ["markdown"]
    assert offered("partita report diff a b --view ma") == ["markdown"]
    assert set(offered("partita providers --view ")) == {"brief", "html", "json", "markdown", "text"}


def test_a_chain_goes_on_with_what_is_not_in_it_yet(offered: Offered) -> None:
    chains = offered("partita generate p --provider webgpu,")
    assert "webgpu,cpu" in chains and "webgpu,webgpu" not in chains
    assert offered("partita generate p --provider webgpu,cp") == ["webgpu,cpu"]


def test_bash_completes(partita: dict[str, str]):
    script = (
        'eval "$(partita --show-completion)"\n'
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _partita_completion partita; echo ${COMPREPLY[@]}; }\n'
        "ask partita gen; ask partita generate p --provider webgpu,c; ask partita report sh"
    )
    done = subprocess.run([found("bash"), "-c", script], env=partita, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "generate"
    assert "webgpu,cpu" in done.stdout.splitlines()[1].split()
    assert done.stdout.splitlines()[2] == "show"


def test_the_answer_is_quick_and_loads_nothing_heavy():
    tell = (
        "import atexit, json, sys\n"
        "heavy = ('torch', 'onnxruntime', 'transformers', 'numpy')\n"
        "atexit.register(lambda: print(json.dumps([m for m in heavy if m in sys.modules]), file=sys.stderr))\n"
        "from partita.cli import main\nmain()"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables("bash", "partita generate p --provider ")}
    seconds, plain = [], []
    for _ in range(3):
        before = of_children()
        done = subprocess.run([sys.executable, "-c", tell], env=environment, capture_output=True, text=True)
        seconds.append(of_children() - before)
        assert "webgpu" in done.stdout.split()
        assert json.loads(done.stderr) == []
        before = of_children()
        subprocess.run([sys.executable, "-c", "import typer.main"], check=True)
        plain.append(of_children() - before)
    # A slow or busy machine is as slow with an empty command line.
    assert min(seconds) < max(LIMIT_SECONDS, 5 * min(plain)), (seconds, plain)


def of_children() -> float:
    """Seconds of the processor that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

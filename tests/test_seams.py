"""A provider defined in a single file appears in completion, placement, reports and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
from onnx import parser

from tests.conftest import REPOSITORY

PROVIDER = '''"""A provider that this test adds."""

from partita.observations.patterns import LogPattern
from partita.providers.base import Option, Provider
from partita.remedies import Remedy

PROVIDER = Provider(
    name="lunar",
    ort_name="LunarExecutionProvider",
    aliases=("moon",),
    wheels=("onnxruntime-lunar",),
    device_memory="Lunar",
    preferred_attention="primitives",
    options=(Option("crater", "str", "Tycho", "which crater to compute in"),),
    node_patterns=(LogPattern("no_kernel_op", r"lunar has no kernel for (?P<node>\\S+)"),),
    start_patterns=(LogPattern("device_missing", r"(?P<why>no moon in sight)"),),
    remedies={"not_in_build": Remedy("wait for it"), "device_missing": Remedy("wait for the night")},
)
'''
MODEL = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (float[2,4] x) => (float[2,4] y) {\n  [a] h = Relu(x)\n  [b] y = Elu<alpha=3.0>(h)\n}"
)
PLACE = "place m.onnx --probe-seconds 0 --provider"
RUNS = (
    (f"{PLACE} moon,cpu --report run.json --provider-option lunar.crater=Tycho", 0, "is not used: not_in_build"),
    ("report explain run.json b", 0, "wait for it"),
    ("report show run.json --full", 0, "lunar"),
    ("report check run.json --require provider=lunar,nodes>=1", 5, "lunar"),
    (f"{PLACE} lunar", 3, "not_in_build"),
    (f"{PLACE} lumar", 2, "lunar"),
    (f"{PLACE} lunar,cpu --provider-option lunar.creater=Tycho", 2, "crater"),
    ("providers --json", 0, '"lunar"'),
)
"""Command line, exit code and part of what is printed."""
SCRIPT = """
import contextlib, io, json, sys
from partita.cli import run
from partita.commands.build import complete_chain
from partita.providers.resolve import explain, known_providers
for line in sys.argv[1:]:
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(line.split())
        said.flush()
    print(json.dumps([code, said.buffer.getvalue().decode().lower()]))
assert "lunar" in str(complete_chain("lun"))
assert explain(known_providers()["lunar"], ["E: no moon in sight tonight"]).reason == "device_missing"
"""


def test_single_file_provider_appears_in_commands_and_errors(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    (tmp_path / "lunar.py").write_text(PROVIDER)
    inside = f"import partita.providers\npartita.providers.__path__.append({str(tmp_path)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(inside)  # of worker processes, too
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "COLUMNS": "200"}
    command = [sys.executable, "-c", SCRIPT, *(line for line, _, _ in RUNS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    for (line, code, part), found in zip(RUNS, map(json.loads, done.stdout.splitlines()), strict=True):
        assert found[0] == code and part in found[1], (line, found)

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
SCRIPT = """
import contextlib, io, json
from partita.cli import run
from partita.commands.build import complete_chain
from partita.providers.resolve import known_providers
from partita.providers.resolve import explain

def told(*words):
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
        out.flush()
    return {"code": code, "out": out.buffer.getvalue().decode(), "err": err.getvalue()}

place = ("place", "m.onnx", "--probe-seconds", 0, "--provider")
print(json.dumps(dict(
    completed=str(complete_chain("lun")),
    placed=told(*place, "moon,cpu", "--report", "run.json", "--provider-option", "lunar.crater=Tycho"),
    explained=told("report", "explain", "run.json", "b"),
    shown=told("report", "show", "run.json", "--full"),
    checked=told("report", "check", "run.json", "--require", "provider=lunar,nodes>=1"),
    alone=told(*place, "lunar"),
    misspelt=told(*place, "lumar"),
    misused=told(*place, "lunar,cpu", "--provider-option", "lunar.creater=Tycho"),
    started=explain(known_providers()["lunar"], ["E: no moon in sight tonight"]).reason,
    providers=told("providers", "--json"),
)))
"""


def test_single_file_provider_appears_in_commands_and_errors(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    (tmp_path / "lunar.py").write_text(PROVIDER)
    inside = f"import partita.providers\npartita.providers.__path__.append({str(tmp_path)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(inside)  # of worker processes, too
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "COLUMNS": "200"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "lunar" in found["completed"]
    assert found["placed"]["code"] == 0, found["placed"]
    assert "is not used: not_in_build" in found["placed"]["err"] and "wait for it" in found["placed"]["err"]
    assert "not_in_build" in found["explained"]["out"] and "wait for it" in found["explained"]["out"]
    assert "lunar" in found["shown"]["out"].lower()
    assert found["checked"]["code"] == 5
    assert found["alone"]["code"] == 3 and "not_in_build" in found["alone"]["err"]
    assert found["misspelt"]["code"] == 2 and "lunar" in found["misspelt"]["err"]
    assert found["misused"]["code"] == 2 and "crater" in found["misused"]["err"]
    assert found["started"] == "device_missing"
    assert '"lunar"' in found["providers"]["out"]

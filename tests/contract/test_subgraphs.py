"""Nodes in the bodies of If, Loop and Scan: ONNX Runtime's ban on the CPU provider does not see them in 1.27."""

from __future__ import annotations

import json

import pytest

from tests.conftest import require_dry_run
from tests.contract.cases import cases
from tests.contract.commands import honoured, refused

BODIES = ("then/Scaler", "else/Scaler")


@cases("target", lambda environment: [(t,) for t in environment.targets if t.provider == "webgpu"])
@pytest.mark.usefixtures("device")
def test_a_body_on_the_cpu_breaks_a_chain_without_it(environment, target, partita, model, plain):
    file = model("branches")
    script = (
        "options = ort.SessionOptions()\n"
        "options.add_session_config_entry('session.disable_cpu_ep_fallback', '1')\n"
        "ort.InferenceSession(sys.argv[1], options, providers=['WebGpuExecutionProvider'])\n"
        "print('opened')"
    )
    assert "opened" in plain(script, file).out, "ONNX Runtime sees bodies now; the check of ours is one more then"
    refused(partita("place", file, "--provider", target.provider), *BODIES)


@cases("_", lambda environment: [("",)] if environment.name == "main" else [])
def test_bodies_count_for_the_limits_of_a_dry_run(environment, _, partita, model, tmp_path):
    require_dry_run()
    file, report = model("branches"), tmp_path / "report.json"
    command = ("place", file, "--provider", "cuda,cpu", "--dry-run")
    honoured(partita(*command, "--report", report, "--max-cpu-nodes", 2))
    (phase,) = json.loads(report.read_text())["phases"]
    assert {name.partition(" ")[0] for name in phase["subgraphs"]["cpu_nodes"]} == set(BODIES)
    assert phase["subgraphs"]["copies"] > 0
    limits = {"--max-cpu-nodes": 1, "--max-copies": 0, "--max-copy-bytes-per-token": 1_000_000}
    done = partita(*command, *(word for limit in limits.items() for word in limit))
    assert done.code == 3 and all(name in done.err for name in limits), done

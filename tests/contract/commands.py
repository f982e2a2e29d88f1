"""Commands of the contract tests, each in a process of its own, and what is checked of every one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.contract import forks, models
from tests.contract.expectations import ENVIRONMENTS, Environment, Target

COMMAND_SECONDS = 180
PROMPT = "1,45,7,99,12,3"
NEW_TOKENS = 6


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object that it printed."""
        return json.loads(self.out)

    def __str__(self) -> str:
        return f"exit code {self.code}\nstdout:\n{self.out}\nstderr:\n{self.err}"


Partita = Callable[..., Done]


def variables() -> dict[str, str]:
    """The environment of every command: this one's, and what some environment needs where it is not set."""
    wanted = {key: value for entry in ENVIRONMENTS.values() for key, value in entry.variables.items()}
    found = {key: value for key, value in wanted.items() if Path(value).exists()}
    return {**found, **os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}


def execute(*arguments: object, folder: Path, **extra: str) -> Done:
    """Run this Python with `arguments` in `folder`; `partita` in the environment of every command begins as a fork."""
    if arguments[:2] == ("-m", "partita") and not extra and sys.platform == "linux":
        words = [str(argument) for argument in arguments[2:]]
        return Done(*forks.run(words, folder, variables(), COMMAND_SECONDS))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**variables(), **extra},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    return Done(done.returncode, done.stdout, done.stderr)


DEVICES: dict[str, bool] = {}


def wrong_processor(target: Target) -> str:
    """Why this machine's processor keeps the target from running; empty when it does not. Nothing can be installed
    against it, so such a test is skipped in CI too."""
    try:
        vendor = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    if not target.processor or vendor is None or vendor[1] == target.processor:
        return ""
    return f"{target.wheel or target.provider} takes {target.processor} only; this is {vendor[1]}"


def device_is_there(target: Target) -> bool:
    """Whether plain ONNX Runtime runs one node on the target's provider; asked once."""
    if target.provider not in DEVICES:
        script = (
            "import sys, onnxruntime as ort; s = ort.InferenceSession(sys.argv[1], providers=[sys.argv[2]], "
            "enable_fallback=0); sys.exit(sys.argv[2] not in s.get_providers())"
        )
        with tempfile.TemporaryDirectory() as folder:
            file = models.matmul_relu(Path(folder) / "model.onnx")
            DEVICES[target.provider] = execute("-c", script, file, target.ort_name, folder=Path(folder)).code == 0
    return DEVICES[target.provider]


def generated(partita: Partita, package: Path, provider: str, *options: object) -> Done:
    """`partita generate` with token ids in and out."""
    return partita(
        "generate", package, PROMPT, "--token-ids", "--max-new-tokens", NEW_TOKENS, "--provider", provider, *options
    )


def honoured(done: Done) -> Done:
    """Check that a command ended well."""
    assert done.code == 0, done
    return done


def refused(done: Done, *words: str, code: int = 3) -> Done:
    """Check that a command was refused: exit code, nothing on stdout, one `partita:` line, and `words` on stderr."""
    assert done.code == code, done
    assert done.out == "", done
    assert sum(line.startswith("partita: ") for line in done.err.splitlines()) == 1, done
    for word in words:
        assert word in done.err, f"{word!r} is not in {done}"
    return done


def chain_entry(report: dict[str, Any], environment: Environment, ort_name: str) -> dict[str, Any]:
    """What a report says of one provider of the chain."""
    entries = [entry for entry in report["chain"] if entry["provider"] == ort_name]
    assert len(entries) == 1, f"{environment.name}: {report['chain']}"
    return entries[0]


def nodes_on(report: dict[str, Any], ort_name: str) -> int:
    """Nodes that a provider has, over all phases of a report."""
    shares = [share for phase in report["phases"] for share in phase["providers"]]
    return sum(share["nodes"] for share in shares if share["provider"] == ort_name)


def source(report: dict[str, Any], name: str) -> dict[str, Any]:
    """What a report says of one of its sources."""
    return next(entry for entry in report["sources"] if entry["source"] == name)


def sources_agree(report: dict[str, Any]) -> bool:
    """Whether the checks of a report have passed and its sources do not contradict each other."""
    return all(check["passed"] for check in report["checks"]) and report["conflicts"] == []

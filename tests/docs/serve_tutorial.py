"""Runs the commands of docs/tutorial-serve.md, in order and in one folder."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import redirect_stdout
from functools import cache

from tests.conftest import DEMO_CHECKPOINT, require, require_dry_run
from tests.docs.blocks import Block

ADDRESS = "http://127.0.0.1:8000"
"""The address on the page. The test uses a free port."""
COMMANDS = {
    "serve-export": "partita export partita/demo/checkpoint package --target cpu",
    "serve-verify": "partita verify package --provider cpu",
    "serve-generate": 'partita generate package "Return the" --provider cpu --report run.json',
    "serve-show": "partita report show run.json",
    "serve-refused": "partita serve package --provider webgpu",
    "serve-dry-run": "partita place package --provider cuda --dry-run --device h100",
    "serve-start": "partita serve package --provider cpu",
    "serve-curl": f"curl -s {ADDRESS}/v1/completions -H 'Content-Type: application/json' "
    """-d '{"model": "package", "prompt": "Return the", "max_tokens": 16, "temperature": 0}'""",
}
"""Block name -> command line. The server of the last but one receives the request of the last."""
CLIENT = """
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
completion = client.completions.create(model="package", prompt="Return the", max_tokens=16, temperature=0)
print(completion.choices[0].text)  # prints number of the string for the given string.
"""


@cache
def served() -> dict[str, str]:
    """The output of each block, by block name; `serve-client`: the output of the Python program."""
    from tests.docs.outputs import place_of_examples, run_here
    from tests.serve.test_command import serving

    require("torch")
    require("openai")
    require("curl", shutil.which("curl") is not None)
    require_dry_run()
    *before, start, request = COMMANDS
    with place_of_examples() as folder:
        (folder / "partita" / "demo").mkdir(parents=True)
        (folder / "partita" / "demo" / "checkpoint").symlink_to(DEMO_CHECKPOINT)
        texts = {name: run_here(COMMANDS[name]) for name in before}
        with serving(*shlex.split(COMMANDS[start])[2:]) as server:
            words = shlex.split(COMMANDS[request].replace(ADDRESS, server.told["url"]))
            texts[request] = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
            client = io.StringIO()
            with redirect_stdout(client):
                exec(CLIENT.replace(ADDRESS, server.told["url"]), {})
            code, err = server.end(signal.SIGTERM)
            assert code == 0, err
            texts[start] = err.replace(server.told["url"], ADDRESS)
    return {name: f"$ {COMMANDS[name]}\n{text}" for name, text in texts.items()} | {"serve-client": client.getvalue()}


def check_client(block: Block) -> None:
    """The program that `served` runs; it prints what its comment has."""
    assert block.text.strip() == CLIENT.strip()
    (line,) = re.findall(r"# prints (.*)", block.text)
    assert line in served()["serve-client"]

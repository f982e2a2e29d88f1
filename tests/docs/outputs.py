"""What the named blocks of the pages are compared with: each name with a function that gives the whole output."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from partita import cli
from partita.observations.records import Record
from partita.options.groups import ProviderChain
from partita.partition_reports import storage
from partita.partition_reports.render.show import load_view
from tests.conftest import DEMO_CHECKPOINT, require, require_dry_run
from tests.docs import recordings
from tests.foreign.conftest import SAMPLES
from tools import support_tables

DRIFT = "partita.drift.records"
WIDTH = 100
"""Columns of every output on the pages."""
FILES = {"run": "webgpu", "webgpu": "webgpu", "fp16": "fp16", "fp32": "fp32"}
"""Report files of the examples, and the recording each of them is made from."""


@contextmanager
def place_of_examples() -> Iterator[Path]:
    """A folder with the files that the examples name, reports and an export of optimum, as the working directory, and
    WIDTH columns.
    """
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    with TemporaryDirectory() as name:
        for file, recording in FILES.items():
            storage.write(recordings.report(recording), Path(name) / f"{file}.json")
        shutil.copytree(SAMPLES / "optimum", Path(name) / "my-onnx")
        os.chdir(name)
        os.environ["COLUMNS"] = str(WIDTH)
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            os.environ.pop("COLUMNS")
            if columns is not None:
                os.environ["COLUMNS"] = columns


def run(line: str) -> str:
    """What a command line prints in a folder of its own, stdout first."""
    with place_of_examples():
        return run_here(line)


def run_here(line: str) -> str:
    """What a command line prints in the current folder, stdout first."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        cli.run(shlex.split(line)[1:])
    out.seek(0)
    return out.read() + err.getvalue()


def on_a_page(render: Callable[[Console], None]) -> str:
    """What is printed to a console of WIDTH columns."""
    stream = io.StringIO()
    render(Console(file=stream, width=WIDTH, color_system=None, force_terminal=False, highlight=False))
    return stream.getvalue()


def shown(record: Record, views: str) -> str:
    """The text view of a record."""
    return load_view("text", views).to_text(record)


def exported(name: str) -> str:
    """The notes and the summary of an export."""
    from partita.commands.export import describe

    summary = recordings.exported(name)
    return "\n".join([*(f"note: {note}" for note in summary.notes), *describe(summary)])


def refused() -> str:
    """The error of a chain that cannot run everything, with its table."""
    from partita.commands.results import render_refusal

    with place_of_examples() as folder:
        (folder / "tiny").mkdir()
        (folder / "tiny" / "manifest.json").write_text(json.dumps(recordings.raw("export_onnx24")["manifest"]), "utf-8")
        error = recordings.refused()
    return f"partita: {error}\n{render_refusal(error.nodes, WIDTH)}"


def not_used() -> str:
    """The note on a provider of the chain that does not start."""
    from partita.commands.terminal import print_note, print_target_notes
    from partita.library.chain import not_used as note_of
    from partita.library.chain import read_chain
    from partita.providers.resolve import Resolution, parse_chain
    from partita.runtime.chain.provider_state import unavailable

    cuda, cpu = parse_chain("cuda,cpu")
    entry = next(entry for entry in recordings.machine().providers if entry.name == "cuda")
    why = recordings.why_not(cuda, entry.reason or "", entry.evidence)
    err = io.StringIO()
    with redirect_stderr(err):
        print_target_notes(read_chain(ProviderChain("cuda,cpu")))
        print_note(note_of(cuda.name, unavailable(Resolution(cuda, "active"), why)))
    return err.getvalue()


def verified() -> str:
    """What `partita verify` prints."""
    from partita.commands.verify import show

    return on_a_page(lambda console: show(Path("package"), recordings.verified(), console))


def evaluated() -> str:
    """What `partita evaluate` prints."""
    from partita.commands.verify import show_evaluation

    manifest = recordings.exported("export_int4").manifest
    return on_a_page(lambda console: show_evaluation(Path("package-int4"), manifest, recordings.evaluated(), console))


def foreign(line: str, layout: str, *copies: str) -> str:
    """What a command line prints of a sample folder of another exporter; its model is copied to these names."""
    with place_of_examples() as folder:
        name = shlex.split(line)[2]
        shutil.copytree(SAMPLES / layout, folder / name)
        for copy in copies:
            (folder / name / copy).parent.mkdir(exist_ok=True)
            shutil.copy(SAMPLES / layout / "model.onnx", folder / name / copy)
        if copies:
            (folder / name / "model.onnx").unlink()
        return run_here(line)


PLACE_ON_CUDA = "partita place {} --provider cuda,cpu --dry-run --device h100 --report {}"
REQUIRED = "--require 'provider=cpu,reason!=cpu_preferred,nodes=0' --max-copies 0"
SILENT_CPU = (
    PLACE_ON_CUDA.format("my-model", "before.json"),
    "partita report show before.json",
    "partita report explain before.json GroupQueryAttention",
    PLACE_ON_CUDA.format("my-model-fp16", "after.json"),
    "partita report show after.json",
    f"partita report check before.json {REQUIRED}",
    f"partita report check after.json {REQUIRED}",
)
"""The commands of docs/tutorial-silent-cpu.md, in order."""


@cache
def silent_cpu() -> tuple[str, ...]:
    """What each command of SILENT_CPU prints below its own line, run one after the other in one folder."""
    require_dry_run()
    with place_of_examples() as folder:
        copy_tutorial_models(folder)
        return tuple(f"$ {line}\n{run_here(line)}" for line in SILENT_CPU)


def copy_tutorial_models(folder: Path) -> None:
    """Copies the two models of docs/tutorial-silent-cpu.md."""
    shutil.copytree(SAMPLES / "genai-fp32-cpu", folder / "my-model")
    shutil.copytree(SAMPLES / "genai-fp16-cuda", folder / "my-model-fp16")


SERVE_ADDRESS = "http://127.0.0.1:8000"
"""The address on the page. The test uses a free port."""
SERVE_COMMANDS = {
    "serve-export": "partita export partita/demo/checkpoint package --target cpu",
    "serve-verify": "partita verify package --provider cpu",
    "serve-generate": 'partita generate package "Return the" --provider cpu --report run.json',
    "serve-show": "partita report show run.json",
    "serve-refused": "partita serve package --provider webgpu",
    "serve-dry-run": "partita place package --provider cuda --dry-run --device h100",
    "serve-start": "partita serve package --provider cpu",
    "serve-curl": f"curl -s {SERVE_ADDRESS}/v1/completions -H 'Content-Type: application/json' "
    """-d '{"model": "package", "prompt": "Return the", "max_tokens": 16, "temperature": 0}'""",
}
"""Block name -> command line. The server of the last but one receives the request of the last."""
SERVE_CLIENT = """
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
completion = client.completions.create(model="package", prompt="Return the", max_tokens=16, temperature=0)
print(completion.choices[0].text)  # prints number of the string for the given string.
"""


@cache
def served() -> dict[str, str]:
    """The output of each command of docs/tutorial-serve.md, run in order and in one folder, by block name.

    `serve-client`: the output of the Python program.
    """
    from tests.serve.test_command import serving

    require("torch")
    require("openai")
    require("curl", shutil.which("curl") is not None)
    require_dry_run()
    *before, start, request = SERVE_COMMANDS
    with place_of_examples() as folder:
        (folder / "partita" / "demo").mkdir(parents=True)
        (folder / "partita" / "demo" / "checkpoint").symlink_to(DEMO_CHECKPOINT)
        free = {"serve-refused": " --port 0"}  # what is shown does not depend on the port
        texts = {name: run_here(SERVE_COMMANDS[name] + free.get(name, "")) for name in before}
        with serving(*shlex.split(SERVE_COMMANDS[start])[2:]) as server:
            words = shlex.split(SERVE_COMMANDS[request].replace(SERVE_ADDRESS, server.told["url"]))
            texts[request] = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
            client = io.StringIO()
            with redirect_stdout(client):
                exec(SERVE_CLIENT.replace(SERVE_ADDRESS, server.told["url"]), {})
            code, err = server.end(signal.SIGTERM)
            assert code == 0, err
            texts[start] = err.replace(server.told["url"], SERVE_ADDRESS)
    return {name: f"$ {SERVE_COMMANDS[name]}\n{text}" for name, text in texts.items()} | {
        "serve-client": client.getvalue()
    }


def verdicts(*names: str) -> str:
    """The first sentence of each of these reports."""
    from partita.partition_reports.outcome import headline

    return "\n\n".join(textwrap.fill(headline(recordings.report(name)), WIDTH) for name in names)


def error_as_json() -> str:
    """An error of a verb with --json."""
    printed = run("partita verify pkg --json")
    return printed[: printed.rindex("}") + 1]


def supported() -> str:
    """Two operators of the published table of WebGPU."""
    found = support_tables.table(support_tables.FOLDER / "webgpu.json.xz")
    operators = tuple(entry for entry in found.operators if entry.full_name in ("Cast", "Resize"))
    return shown(found.model_copy(update={"operators": operators, "without_example": ()}), "partita.support.sections")


OUTPUTS: dict[str, Callable[[], str]] = {
    "export-demo": lambda: exported("export_demo"),
    "export-int4": lambda: exported("export_int4"),
    "evaluate-demo": evaluated,
    "export-cuda": lambda: exported("export_cuda"),
    "export-webgpu": lambda: exported("export_webgpu"),
    "not-used": not_used,
    "refused": refused,
    "providers": lambda: shown(recordings.machine(), "partita.machine"),
    "verify-demo": verified,
    "demo-brief": lambda: run("partita report show fp32.json"),
    "demo-verdicts": lambda: verdicts("fp32", "fp16"),
    "demo-text": lambda: run("partita report show fp32.json --full"),
    "fused": lambda: run("partita report explain webgpu.json layers.0.mlp.act_fn/Sigmoid"),
    "bench": lambda: shown(recordings.bench(), "partita.bench.sections"),
    "support-webgpu": supported,
    "drift": lambda: f"$ partita drift package --provider webgpu\n{shown(recordings.drifted(), DRIFT)}",
    "error-json": error_as_json,
    "foreign-candidates": lambda: foreign(
        "partita generate hub 1,2 --token-ids", "optimum", "onnx/model_fp16.onnx", "onnx/model_q4.onnx"
    ),
    "foreign-place": lambda: foreign("partita place optimum --provider cpu", "optimum").partition("\n")[2],
    "silent-place": lambda: silent_cpu()[0],
    "silent-show": lambda: silent_cpu()[1],
    "silent-explain": lambda: silent_cpu()[2],
    "silent-after": lambda: f"$ {SILENT_CPU[3]}\n{silent_cpu()[4]}",
    "silent-check-before": lambda: silent_cpu()[5],
    "silent-check-after": lambda: silent_cpu()[6],
    **{name: partial(lambda name: served()[name], name) for name in SERVE_COMMANDS},
}

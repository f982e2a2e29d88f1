"""optimum's exporter in an environment with transformers before 4.58; the result is read as a foreign folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from partita.errors import InstallationError, PackageError, ParityError, PartitaError, UnsupportedModelError, UsageError
from partita.export import optimum_child
from partita.export.checkpoint.description import Checkpoint
from partita.export.drafts import Exported
from partita.export.options import AUTO, OPTIMUM, ExportOptions, check_options, max_length, most_positions
from partita.export.progress import stage
from partita.export.work import Work
from partita.export.writing import unfinished_manifest
from partita.remedies import Remedy

VARIABLE = "PARTITA_OPTIMUM_PYTHON"
"""Environment variable with the Python of optimum's environment."""
FOLDER = Path(".venvs") / "optimum"
"""The environment that `make env-optimum` creates."""
INSTALL = ("pip", "install", "optimum-onnx", "onnxruntime", "accelerate")
MAKE = Remedy(f"set {VARIABLE} to the Python of a separate environment, created by", INSTALL)
USE = Remedy("optimum's exporter supports the type; use it with", options=("--exporter", "optimum"))
Refusal = UnsupportedModelError | ParityError


def export_graph(checkpoint: Checkpoint, work: Work) -> Exported:
    """The graph of optimum's exporter. Raises UsageError, UnsupportedModelError, InstallationError."""
    options, kind = work.options, checkpoint.model_type
    if checkpoint.file is not None or checkpoint.quantised is not None:
        what = "a GGUF file" if checkpoint.quantised is None else f"quantised ({checkpoint.quantised.method})"
        raise UsageError(f"{checkpoint.location}: {what}, which optimum cannot read; omit `exporter=optimum`")
    assert work.read_folder is not None
    prefix = f"{work.folder.name}-optimum-"  # the prefix by which the next export removes it after a kill
    folder = Path(work.cleanup.enter_context(tempfile.TemporaryDirectory(dir=work.folder.parent, prefix=prefix)))
    main_export = {"dtype": options.precision, "opset": options.opset}
    with stage(work.progress, "export", work.seconds, of=OPTIMUM):
        places = {"checkpoint": str(checkpoint.folder.resolve()), "out": str(folder.resolve())}
        found = _call_child(model_type=kind, options=main_export, **places)
    tools = {name if OPTIMUM in name else f"{name} of optimum": version for name, version in found["versions"].items()}
    if not found["covers"]:
        raise UnsupportedModelError(f"optimum-onnx {tools['optimum-onnx']} does not export decoders of type {kind}")
    try:
        graph = work.read_folder(folder, options.batch_size, max_length(options, checkpoint))
    except PackageError as error:
        raise UnsupportedModelError(f"the graph written by optimum cannot be run: {error}") from error
    model = ir.load(folder / graph.files[0].file)
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    count = sum(tensor.size for tensor in tensors if tensor.dtype.is_floating_point())
    facts = {
        "max_length_limit": None,
        "weight_bytes": sum(tensor.nbytes for tensor in tensors),
        "model_positions": most_positions(checkpoint),
        "attention": OPTIMUM,
        "precision": options.precision,
    }
    manifest = unfinished_manifest(work, checkpoint, graph.model_copy(update=facts), count)
    return Exported(
        work=work,
        checkpoint=checkpoint,
        label="`exporter=optimum`",
        models=(model,),
        manifest=manifest.model_copy(update={"toolchain": {**manifest.toolchain, **tools}}),
        parameters=count,
        caution="; optimum wrote the graph; `exporter=native` writes Partita's graph",
    )


def _call_child(**request: Any) -> dict[str, Any]:
    """The child's answer. Raises InstallationError, and UnsupportedModelError when optimum or its process fails."""
    given, homes = os.environ.get(VARIABLE), (Path.cwd(), Path(__file__).parents[2])
    made = [home / FOLDER / name for home in homes for name in ("bin/python", "Scripts/python.exe")]
    python = Path(given).absolute() if given else next(filter(Path.is_file, made), made[0])
    if not python.is_file():
        problem = f"{VARIABLE} is {given!r}, which does not exist" if given else "it needs transformers before 4.58"
        raise InstallationError(f"exporter optimum has no environment ({problem})", remedy=MAKE)
    # -I: PYTHONPATH and user site must not bring libraries of this environment into the other one.
    environ = {**{key: value for key, value in os.environ.items() if key[:6] != "PYTHON"}, "HF_HUB_OFFLINE": "1"}
    reading, writing = os.pipe()  # the child ends with the pipe, i.e. with this process
    with tempfile.TemporaryDirectory(prefix="partita-optimum-") as name, os.fdopen(reading), os.fdopen(writing, "w"):
        answer = Path(name) / "answer.json"
        command = [str(python), "-I", optimum_child.__file__, json.dumps({**request, "answer": str(answer)})]
        try:
            streams: dict[str, Any] = {"stdin": reading, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            own = sys.platform != "win32"  # its own session: Ctrl-C reaches only this process, which ends the child
            done = subprocess.run(command, check=False, cwd=name, env=environ, start_new_session=own, **streams)
        except OSError as error:
            raise InstallationError(f"{python}: cannot be started ({error.strerror})", remedy=MAKE) from error
        found = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else {}
    if "lacks" in found:
        raise InstallationError(f"the environment of optimum lacks the module {found['lacks']}", remedy=MAKE)
    if "covers" not in found:
        last = " / ".join(done.stdout.decode(errors="replace").split("\n")[-4:]).strip(" /")
        ended = f"its process ended with code {done.returncode}: {last[-400:]}"
        raise UnsupportedModelError(f"optimum's exporter failed: {found.get('error', ended)}")
    return found


def with_optimum_remedy(error: Refusal, checkpoint: Checkpoint, options: ExportOptions) -> Refusal:
    """The error, with optimum as the remedy where it supports the type and the options."""
    of_option = isinstance(error, UnsupportedModelError) and error.option is not None
    if options.exporter == OPTIMUM or error.remedy is not None or of_option or checkpoint.quantised is not None:
        return error
    requested = replace(options, exporter=OPTIMUM, attention=AUTO)
    try:
        check_options(requested)
        covers = _call_child(model_type=checkpoint.model_type)["covers"]
    except PartitaError:
        return error
    return type(error)(error.message, path=error.path, remedy=USE) if covers else error

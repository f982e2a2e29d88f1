"""Loads a package on a provider chain, in this process or a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from partita.errors import UsageError
from partita.foreign.folder import NO_CHOICE, Choice, open_folder
from partita.library.api import LOGGER, QUIET, Audience, from_fields
from partita.library.chain import Target, read_chain
from partita.library.engine.base import Engine
from partita.library.model import Model
from partita.library.notes import opened_notes
from partita.options.groups import LoadOptions, Process
from partita.package.folder import Manifest


@from_fields(LoadOptions)
def load(options: LoadOptions) -> Model:
    """Load an exported package or a foreign folder on these providers and no others.

    `providers`: the chain, in order of preference, as "webgpu,cpu" or ["webgpu", "cpu"], with options as ONNX Runtime
    has them, ("cuda", {"device_id": 1}), or in `provider_options`, by name; None for the best usable one, then cpu.
    `provider_libraries`: files of plugin providers by name. `pins`: modules by provider, "cpu:lm_head". `threads`:
    intra-op threads; None: one per usable core. `graph_capture`: capture a decode step once and replay it (cuda or
    webgpu as first provider); raises if that is not possible. `observe`: profile the first runs, which `report` needs;
    they do not count for speed. `process`: where native code runs that may crash; "auto" starts a worker process for
    providers other than CPU, "this" uses the calling process, "child" always starts a worker process.

    For a foreign folder: `variant` selects one of its models, e.g. "q4"; `contract` is a file that defines its inputs
    and outputs where they cannot be inferred; `max_length` is the maximum of prompt plus output tokens.

    Raises ArgumentError, PackageError, ResourceError, InstallationError; ProviderError when the chain cannot be
    honoured.
    """
    folder, choice = Path(options.package), Choice.of(options)
    target = read_chain(options, graph_capture=options.graph_capture)
    manifest = open_folder(folder, choice)
    # The program may change its working folder, and files of the package are read later, too.
    engine = open_engine(folder.absolute(), manifest, target, choice, observe=options.observe, process=options.process)
    if target.by_default is not None:
        LOGGER.info("providers %s, by default: %s", target.name, target.by_default)
    for line in (*target.notes, *opened_notes(target, engine.opened, manifest)):
        LOGGER.warning(line)
    return Model(engine)


def in_child(target: Target, process: Process) -> bool:
    """Whether a chain runs in a worker process.

    Providers other than CPU have native code that may crash, and `cpu.attention` is an environment variable. Raises
    UsageError for an unknown value.
    """
    if process not in get_args(Process):
        raise UsageError(f"process is {process!r}; it must be 'auto', 'this' or 'child'")
    needed = any(provider.name != "cpu" for provider in target.chain) or "attention" in target.options.get("cpu", {})
    return process == "child" or (process == "auto" and needed)


def open_engine(
    folder: Path,
    manifest: Manifest,
    target: Target,
    choice: Choice = NO_CHOICE,
    *,
    observe: bool = True,
    process: Process = "auto",
    refusal_seconds: float = 120.0,
    audience: Audience = QUIET,
    with_text: bool = True,
) -> Engine:
    """The package opened on its chain, in this process or in a worker process. Raises the errors of `load`.

    `refusal_seconds`: for experiments on a chain that cannot be honoured. `with_text`: requests need text.
    """
    arguments = (folder, manifest, target, choice)
    if in_child(target, process):
        from partita.library.engine.remote import RemoteEngine

        return RemoteEngine(
            *arguments, observe=observe, refusal_seconds=refusal_seconds, audience=audience, with_text=with_text
        )
    from partita.library.engine.local import LocalEngine

    return LocalEngine(*arguments, observe=observe, refusal_seconds=refusal_seconds, audience=audience)

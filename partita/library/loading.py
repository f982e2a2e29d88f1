"""Loading a package: on which providers, and in which process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from partita.errors import UsageError
from partita.foreign.folder import Choice, open_folder
from partita.library.audience import LOGGER, QUIET, Audience
from partita.library.chain import ChainOptions, Target, chain_of, read_chain_options
from partita.library.edge import takes
from partita.library.engine.base import Engine
from partita.library.model import Model
from partita.library.notes import idle, inferred, not_used, unverified
from partita.options.groups import LoadOptions, Process
from partita.package.folder import Manifest


@takes(LoadOptions)
def load(options: LoadOptions) -> Model:
    """Load a package that `export` wrote, or a folder of another exporter, on these providers and no others.

    `providers`: the chain, in order of preference, as "webgpu,cpu" or ["webgpu", "cpu"], with options as ONNX Runtime
    has them, ("cuda", {"device_id": 1}), or in `provider_options`, by name; None for the best usable one, then cpu.
    `provider_libraries`: files of plugin providers by name. `pins`: modules by provider, "cpu:lm_head". `threads`:
    intra-op threads; None: one per usable core. `graph_capture`: cuda or webgpu, at the head of the chain, records a
    decode step once and replays it, with everything on the device; where that is not possible it is an error that says
    why. `observe`: profile the first runs, which `report` needs to say what
    ran; they are left out of its speed. `process`: a provider other than the CPU's brings native code that may crash;
    "auto" gives it a process of its own, "this" runs it in the calling process, "child" also gives the CPU provider
    its own.

    Of a folder that Partita did not write: `variant` is which of its models is meant, "q4"; `contract` a file that says
    what its inputs and outputs mean where that cannot be inferred; `max_length` the most tokens of prompt and answer.

    Raises ArgumentError, PackageError, ResourceError, InstallationError; ProviderError when the chain cannot be
    honoured, before anything runs elsewhere.
    """
    folder, choice = Path(options.package), Choice.of(options)
    given = replace(chain_of(options), graph_capture=options.graph_capture)
    target = read_chain_options(given)
    manifest = open_folder(folder, choice)
    # A program may go to another folder; files of the package are read later, too.
    engine = open_engine(
        folder.absolute(), manifest, given, target, choice, observe=options.observe, process=options.process
    )
    _log_chain(target, engine, manifest)
    return Model(engine)


def in_child(target: Target, process: Process) -> bool:
    """Whether a chain runs in a worker process: other native code than ONNX Runtime's own may end its process, and
    `cpu.attention` is an environment variable. Raises UsageError for an unknown value.
    """
    if process not in get_args(Process):
        raise UsageError(f"process is {process!r}; it must be 'auto', 'this' or 'child'")
    needed = any(provider.name != "cpu" for provider in target.chain) or "attention" in target.options.get("cpu", {})
    return process == "child" or (process == "auto" and needed)


def open_engine(
    folder: Path,
    manifest: Manifest,
    given: ChainOptions,
    target: Target,
    choice: Choice,
    *,
    observe: bool = True,
    process: Process = "auto",
    refusal_seconds: float = 120.0,
    audience: Audience = QUIET,
    with_text: bool = True,
) -> Engine:
    """The package open on its chain, in this process or in a worker process. Raises what `load` raises.

    `refusal_seconds`: for experiments on a chain that cannot be honoured. `with_text`: requests will want text.
    """
    if in_child(target, process):
        from partita.library.engine.remote import RemoteEngine

        return RemoteEngine(
            folder,
            manifest,
            given,
            target,
            observe=observe,
            refusal_seconds=refusal_seconds,
            audience=audience,
            choice=choice,
            with_text=with_text,
        )
    from partita.library.engine.local import LocalEngine

    return LocalEngine(
        folder,
        manifest,
        target,
        threads=given.threads,
        observe=observe,
        refusal_seconds=refusal_seconds,
        audience=audience,
        choice=choice,
    )


def _log_chain(target: Target, engine: Engine, manifest: Manifest) -> None:
    """What a user would read on stderr of the command line."""
    if target.by_default is not None:
        names = ", ".join(provider.name for provider in target.chain)
        LOGGER.info("providers %s, by default: %s", names, target.by_default)
    notes = list(target.notes)
    for entry in engine.opened.chain:
        if entry.status != "active":
            notes.append(not_used(entry.provider, entry))
    notes += [*map(idle, engine.opened.idle), *unverified(manifest.verification), *inferred(manifest)]
    for line in notes:
        LOGGER.warning(line)

"""`partita serve`: checks the options, opens the packages, and serves them until a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from partita.check.requirements import Limits, check_limits
from partita.commands.arguments import package_of
from partita.commands.results import ServedModel, ServeResult
from partita.commands.terminal import TERMINAL, print_note, print_record, print_target_notes, write_stderr
from partita.errors import UsageError
from partita.export.hub import HUB_ID
from partita.foreign.folder import Choice, open_folder
from partita.library.chain import read_chain
from partita.library.sampling import CHECKPOINT
from partita.observations.text_format import plural
from partita.options.fields import PathText
from partita.options.generation import BatchOptions, ServeCommand
from partita.remedies import Remedy

if TYPE_CHECKING:
    from partita.serve.served_package import ServedPackage

KEY_VARIABLE = "PARTITA_API_KEY"
NAME_THEM = Remedy(
    "give each package a name, in the order of the packages", options=("--name", "{first}", "--name", "{second}")
)
ONE_ROW = ", so requests wait for each other (export with --batch-size 8 to run 8 at a time)"


def run(options: ServeCommand) -> int:
    """Serve; returns the exit code. Raises InstallationError without the extra `serve`."""
    keys = _checked(options)
    placement, choice, target = Limits.of(options), Choice.of(options), read_chain(options)
    check_limits(placement, target.requested_names)

    from partita.serve.app import model_names
    from partita.serve.metrics import Metrics
    from partita.serve.run import Server, bind, is_loopback, url_of
    from partita.serve.served_package import Serving, adapters_of, open_served

    names = _names(options.packages, tuple(options.name))
    _check_count("prefix", options.prefix, names)
    packages = tuple(package_of(model, options) for model in options.packages)
    prefixes = tuple(map(Path, options.prefix)) or (None,) * len(packages)
    manifests = [open_folder(package, choice) for package in packages]
    model_names({name: adapters_of(manifest) for name, manifest in zip(names, manifests, strict=True)})
    metrics = Metrics()
    batch = BatchOptions(
        speculate=options.speculate, draft=options.draft, prefill_chunk=options.prefill_chunk, adapter=options.adapter
    )
    serving = Serving(target, choice, batch, options.source == CHECKPOINT, placement, options.probe_seconds)
    with ExitStack() as stack:
        listening = stack.enter_context(bind(options.host, options.port))
        print_target_notes(target)
        if not keys and not is_loopback(listening):
            print_note(f"{options.host} is reachable from other machines and no API key is set; set one with --api-key")
        models: dict[str, ServedPackage] = {}
        for name, package, manifest, prefix in zip(names, packages, manifests, prefixes, strict=True):
            served = open_served(name, package, manifest, serving, metrics, TERMINAL, _print_line, prefix)
            stack.callback(served.stop)
            models[name] = served
        server = Server(
            models,
            options,
            metrics,
            listening,
            host=options.host,
            keys=keys,
            origins=options.allowed_origin,
            ready=lambda: _print_ready(url_of(listening), options, models),
            log=_print_line,
        )
        return server.run_until_signal()


def _names(models: Sequence[PathText], given: Sequence[str]) -> tuple[str, ...]:
    """The name of each model: the option, or the last part of its path or id. Raises UsageError for equal names."""
    _check_count("name", given, models)
    names = list(given)
    for model in () if given else models:
        found = None if os.path.lexists(model) else HUB_ID.fullmatch(str(model))  # a hub id without its revision
        names.append(Path(found["name"]).name if found else Path(model).resolve().name)
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"`name` is {name!r}; it must be non-empty, without control characters")
        if names.count(name) > 1:
            remedy = NAME_THEM.filled(first=f"{name}-1", second=f"{name}-2")
            raise UsageError(f"two models are named {name}; give them different names", remedy=remedy)
    return tuple(names)


def _check_count(option: str, given: Sequence[object], models: Sequence[object]) -> None:
    """Raise UsageError unless an option is given for every model or for none."""
    if given and len(given) != len(models):
        raise UsageError(
            f"`{option}` is given {len(given)} times for {len(models)} models; give it once per model, in their order"
        )


def _checked(options: ServeCommand) -> tuple[str, ...]:
    """The API keys, if every option is valid by itself. Raises UsageError."""
    keys = options.api_key or tuple(value for name, value in os.environ.items() if name == KEY_VARIABLE)
    if any(not key.strip() or not key.isprintable() for key in keys):
        given = "--api-key" if options.api_key else KEY_VARIABLE
        raise UsageError(f"{given} is empty or has characters that an HTTP header cannot contain; use another one")
    for origin in options.allowed_origin:
        scheme, _, host = origin.partition("://")
        if origin != "*" and (not scheme or not host or "/" in host or not origin.isprintable()):
            raise UsageError(
                f"--allowed-origin {origin}: write scheme, host and port, e.g. http://localhost:3000, or *"
            )
    return tuple(key.strip() for key in keys)  # a header has no spaces around it


def _print_line(text: str, prefix: str = "partita: ") -> None:
    """Print a line for the operator. Errors of a closed terminal or a full disk do not stop the server.

    rich is not used, because it keeps unwritten text and retries all of it with every line.
    """
    with suppress(OSError, ValueError):  # the second of a stream that is closed
        write_stderr(f"{prefix}{' '.join(text.split())}\n")


def _print_ready(url: str, options: ServeCommand, models: dict[str, ServedPackage]) -> None:
    """Print the address of the server on stderr, with --json also on stdout."""
    found = []
    for served in models.values():
        report, length = served.report(), served.max_length
        verdict = report.summary.verdict if report.summary is not None else "no report"
        adapters = f"; adapters {', '.join(served.adapters)}" if served.adapters else ""
        rows = f"{plural(served.slots, 'row')} of {length:,} tokens{ONE_ROW if served.slots == 1 else ''}"
        _print_line(f"{served.name}: {rows}{adapters}; {verdict}", "")
        found.append(
            ServedModel(
                name=served.name,
                package=str(served.folder),
                slots=served.slots,
                max_length=length,
                chat=served.has_template,
                adapters=served.adapters,
            )
        )
    pages = f"{url}/metrics, {url}/report"
    _print_line(f"serving {', '.join(models)} on {url}/v1; {pages}; stop with Ctrl-C or SIGTERM", "")
    if options.as_json:
        print_record(ServeResult(url=url, pid=os.getpid(), models=tuple(found)))

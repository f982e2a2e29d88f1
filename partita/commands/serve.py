"""`partita serve`: checks the options, opens the packages, and serves them until a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
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
from partita.observations.text_format import plural
from partita.options.fields import PathText
from partita.options.generation import ServeCommand
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
    options = _checked(options)
    target = read_chain(options)
    check_limits(Limits.of(options), target.requested_names)

    from partita.serve.app import model_names
    from partita.serve.metrics import Metrics
    from partita.serve.run import Server, bind, is_loopback, url_of
    from partita.serve.served_package import ServedPackage, adapters_of

    names = _names(options)
    packages = [package_of(model, options) for model in options.packages]
    prefixes: list[Path | None] = [*map(Path, options.prefix)] or [None] * len(packages)
    manifests = [open_folder(package, Choice.of(options)) for package in packages]
    model_names({name: adapters_of(manifest) for name, manifest in zip(names, manifests, strict=True)})
    metrics = Metrics()
    models: dict[str, ServedPackage] = {}
    with ExitStack() as stack:
        listening = stack.enter_context(bind(options.host, options.port))
        url = url_of(listening)
        print_target_notes(target)
        if not options.api_key and not is_loopback(listening):
            print_note(f"{options.host} is reachable from other machines and no API key is set; set one with --api-key")
        for name, package, manifest, prefix in zip(names, packages, manifests, prefixes, strict=True):
            given = (name, package, manifest, target, options, metrics)
            models[name] = ServedPackage(*given, log=_print_line, audience=TERMINAL, prefix=prefix)
            stack.callback(models[name].stop)
        ready = lambda: _print_ready(url, models, as_json=options.as_json)  # noqa: E731
        return Server(models, options, metrics, listening, ready=ready, log=_print_line).run_until_signal()


def _names(options: ServeCommand) -> Sequence[str]:
    """The name of each model: the option, or the last part of its path or id. Raises UsageError for equal names."""
    for option, given in (("name", options.name), ("prefix", options.prefix)):
        if given and len(given) != len(options.packages):
            count = f"given {len(given)} times for {len(options.packages)} models"
            raise UsageError(f"`{option}` is {count}; give it once per model, in their order")
    names = options.name or [_own_name(model) for model in options.packages]
    for name in names:
        if not name or not name.isprintable():
            raise UsageError(f"`name` is {name!r}; it must be non-empty, without control characters")
        if names.count(name) > 1:
            remedy = NAME_THEM.filled(first=f"{name}-1", second=f"{name}-2")
            raise UsageError(f"two models are named {name}; give them different names", remedy=remedy)
    return names


def _own_name(model: PathText) -> str:
    """The last part of a path, or of a hub id without its revision."""
    found = None if os.path.lexists(model) else HUB_ID.fullmatch(str(model))
    return Path(found["name"]).name if found else Path(model).resolve().name


def _checked(options: ServeCommand) -> ServeCommand:
    """The options with the API keys of the environment, if every option is valid by itself. Raises UsageError."""
    keys = options.api_key or [value for name, value in os.environ.items() if name == KEY_VARIABLE]
    if any(not key.strip() or not key.isprintable() for key in keys):
        given = "--api-key" if options.api_key else KEY_VARIABLE
        raise UsageError(f"{given} is empty or has characters that an HTTP header cannot contain; use another one")
    for origin in options.allowed_origin:
        scheme, _, host = origin.partition("://")
        if origin != "*" and (not scheme or not host or "/" in host or not origin.isprintable()):
            raise UsageError(
                f"--allowed-origin {origin}: write scheme, host and port, e.g. http://localhost:3000, or *"
            )
    return replace(options, api_key=tuple(key.strip() for key in keys))  # a header has no spaces around it


def _print_line(text: str, prefix: str = "partita: ") -> None:
    """Print a line for the operator. Errors of a closed terminal or a full disk do not stop the server.

    rich is not used, because it keeps unwritten text and retries all of it with every line.
    """
    with suppress(OSError, ValueError):  # the second of a stream that is closed
        write_stderr(f"{prefix}{' '.join(text.split())}\n")


def _print_ready(url: str, models: Mapping[str, ServedPackage], *, as_json: bool) -> None:
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
    if as_json:
        print_record(ServeResult(url=url, pid=os.getpid(), models=tuple(found)))

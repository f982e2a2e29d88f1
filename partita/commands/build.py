"""Commands of the command line, built from dataclasses of options. The only imported library is typer."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Exit

from partita.errors import PackageError, UsageError
from partita.options.fields import MODEL, Option, PathText, check_fields, describe_fields
from partita.options.groups import ProgressOptions

SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
"""Bytes of each unit."""
CHAINS = {"providers": "providers", "provider": "providers", "target": "target", "chains": "chains", "more": "chains"}
"""Options that name providers -> argument name in messages."""
GROUPS = (
    "Input",
    "Model",
    "Comparison",
    "Precision",
    "Graph",
    "Verification",
    "Sampling",
    "Speculative decoding",
    "Provider",
    "Dry run",
    "Measurement",
    "Limits",
    "Server",
    "Cluster",
    "Output",
)
"""Headings of options, in the order of the help."""
OTHER = "Other"


@dataclass(frozen=True, slots=True)
class Verb:
    """A command of the command line."""

    name: str
    options: str
    """Module and class in `partita.options`; the docstring of the class is the help of the command."""
    run: str
    """`MODULE:FUNCTION` in `partita.commands`. The function takes the options and returns the exit code, None for 0."""
    help: str
    examples: tuple[str, ...] = ()

    def record(self) -> type[Any]:
        """The class of its options."""
        module, _, name = self.options.partition(":")
        found: type[Any] = getattr(import_module(f"partita.options.{module}"), name)
        return found


def read_verbs(table: str) -> tuple[Verb, ...]:
    """The verbs of a table: a line `name | options | run | help` for each, and its examples on indented lines."""
    verbs: list[Verb] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            verbs[-1] = replace(verbs[-1], examples=(*verbs[-1].examples, line.strip()))
        else:
            name, options, run, summary = (part.strip() for part in line.split("|"))
            verbs.append(Verb(name, options, run, summary))
    return tuple(verbs)


def group_of(verbs: Sequence[Verb], prefix: str = "") -> type[TyperGroup]:
    """A group of commands that builds a command when it is called, without importing the options of others.

    `prefix`: names of the group in examples.
    """
    by_name = {verb.name: verb for verb in verbs}

    class Verbs(TyperGroup):
        """The commands of `verbs`, then the groups that were added."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: dict[str, Any] = {**dict.fromkeys(by_name), **self.commands}

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self.commands.get(cmd_name) is None and cmd_name in by_name:
                self.commands[cmd_name] = _command(by_name[cmd_name], prefix)
            return super().get_command(ctx, cmd_name)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            rows = [
                (name, by_name[name].help if name in by_name else command.help)
                for name, command in self.commands.items()
            ]
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    return Verbs


class VerbCommand(TyperCommand):
    """A command whose help has options under headings and one example per line."""

    options: type[Any]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The names of required arguments without the braces of typer."""
        return [re.sub(r"^\{(.+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section per group of options."""
        by_name = {each.name: each for each in describe_fields(self.options)}
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS, OTHER)}
        for parameter in self.get_params(ctx):
            each = by_name.get(parameter.name or "")
            if each is not None and not parameter.metavar and (names := _completer(each, self.options)("")):
                parameter.metavar = f"[{'|'.join(names)}]"
            name, help_text = parameter.get_help_record(ctx) or ("", "")
            if each is not None and each.positional:
                heading, name = "Arguments", name.partition(" <")[0]  # without the Python type
            else:
                heading = OTHER if each is None else each.group or OTHER
            sections[heading].append((name, help_text))
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples without line breaks."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _command(verb: Verb, prefix: str) -> Any:
    """The command of a verb."""
    record = verb.record()
    fields = sorted(describe_fields(record), key=lambda each: not each.positional)
    parameters = [_parameter(each, record) for each in fields]

    def call(**given: Any) -> None:
        options = check_fields(record(**_values(record, given)))
        check_early(options)
        if isinstance(options, ProgressOptions):
            import_module("partita.commands.terminal").show_progress(options)
        module, _, function = verb.run.partition(":")
        raise Exit(getattr(import_module(f"partita.commands.{module}"), function)(options) or 0)

    call.__doc__ = record.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = "\n".join(f"partita {prefix}{example}" for example in verb.examples)
    app.command(verb.name, cls=VerbCommand, epilog=epilog)(call)
    command: Any = typer.main.get_command(app)
    command.options = record
    return command


def _parameter(each: Option, options: type[Any]) -> inspect.Parameter:
    """The parameter that typer reads for a field."""
    default = each.default
    several = each.several or each.text in LISTS
    item = each.type if each.type in (bool, int, float) else str
    settings: dict[str, Any] = {"help": each.help, "metavar": each.metavar or ("FILE" if each.is_path else None)}
    if each.text == "size":
        settings["parser"] = read_size
    if each.complete or each.choices:
        settings["autocompletion"] = _completer(each, options)
    if each.positional:
        info = typer.Argument(show_default=False, **settings)
    else:
        name = each.name.replace("_", "-")
        flags = each.flags or (f"--no-{name}" if default is True else f"--{name}", *filter(None, [each.short]))
        info = typer.Option(*flags, **settings)
    kind: Any = list[item] if several else item  # type: ignore[valid-type]
    if default is MISSING:
        default = inspect.Parameter.empty
    elif item is bool:
        default = False
    elif default is None or several or each.text == "size":  # typer would parse the default
        kind, default = kind | None, None
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _completer(each: Option, options: type[Any]) -> Callable[[str], list[str]]:
    """A function that completes the value of an option; it returns nothing for an option without known values."""

    def complete(incomplete: str) -> list[str]:
        if each.complete in ("chains", "providers"):
            return complete_chain(incomplete)
        names: Sequence[str] = each.choices
        if each.complete == "views":
            from partita.partition_reports.render.show import view_names

            names = view_names(options.VIEWS)
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_chain(typed: str) -> list[str]:
    """Completions of a provider chain: the text up to the last comma, and a provider that is not in it yet."""
    from partita.providers.resolve import known_providers

    before, comma, begun = typed.rpartition(",")
    present = before.split(",")
    return [before + comma + name for name in known_providers() if name.startswith(begun) and name not in present]


def _values(options: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the options from typer's parsed values."""
    found = {}
    for each in describe_fields(options):
        value = given[each.name]
        for text in value if isinstance(value, list) else [value]:
            _check_text(each, text)
        if each.type is bool:
            found[each.name] = value != (each.default is True)
        elif each.text in LISTS:
            found[each.name] = LISTS[each.text](value) if value else each.default
        elif (not each.several or value) and (value is not None or each.optional):
            found[each.name] = value
    return found


def _check_text(each: Option, value: Any) -> None:
    """Raise UsageError for an empty file name, model or revision, and for a name that is not UTF-8.

    An empty path would be the current folder, which no user means by an unset variable.
    """
    names_file = each.is_path or (each.several and PathText in get_args(each.type))
    if not isinstance(value, str) or not (names_file or each.text in (MODEL, "not_empty")):
        return
    name = each.metavar if each.positional else f"`{each.argument}`"
    if not value or (value.endswith("=") and get_origin(each.type) is Mapping):
        raise UsageError(f"{name or 'FILE'} is empty; give a file or folder, or omit the option")
    if any("\ud800" <= character <= "\udfff" for character in value):  # ONNX Runtime and JSON cannot write these
        raise UsageError(f"{name or 'FILE'}: the name is not UTF-8; use another name")


# --- checks before a verb is loaded -----------------------------------------------------------------------------------


def check_early(options: Any) -> None:
    """Raise UsageError for an unknown provider, PackageError and CheckpointError for a missing or empty folder."""
    from partita.providers.resolve import parse_chain

    if isinstance(options, ProgressOptions) and options.quiet and options.verbose:
        raise UsageError("`quiet` and `verbose` exclude each other; give one")
    libraries = getattr(options, "provider_libraries", None) or getattr(options, "target_libraries", None)
    if not libraries:  # a library may bring a provider of another name
        for name, argument in CHAINS.items():
            given = getattr(options, name, None) or ()
            for chain in (given,) if isinstance(given, str) else given:
                parse_chain(chain, argument=argument)
    for path in (getattr(options, "package", None), *getattr(options, "packages", ())):
        if path is not None:
            _check_package(path, may_be_on_hub=hasattr(options, "revision"))
    model = getattr(options, "model", None)
    operators = getattr(options, "operators", None)  # support refuses them beside a model, or compares tables
    on_hub = any(each.name == "model" and each.is_model for each in describe_fields(type(options)))
    if model is not None and not operators and not on_hub and not os.path.lexists(model):
        raise PackageError(f"{model}: no such file; name an ONNX file or a package")
    if hasattr(options, "checkpoint"):
        from partita.library.exporting import check_before_loading

        check_before_loading(options)


def _check_package(given: PathText, *, may_be_on_hub: bool) -> None:
    if may_be_on_hub:
        from partita.export.hub import check_model

        check_model(os.fspath(given))
        return
    path = Path(given)
    if path.is_dir() and any(path.iterdir()):
        return
    from partita.foreign_paths import recognise

    recognised = recognise(path)
    if path.is_dir() or not path.exists():
        raise PackageError(f"{path}: {recognised.description}", remedy=recognised.remedy)


# --- parsers of texts -------------------------------------------------------------------------------------------------


def read_size(text: str) -> int:
    """Bytes: 600MiB, 2 GiB, 1.5GB, 5000000. Raises BadParameter."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in SIZES:
        raise typer.BadParameter(f"{text!r} is not a size; write e.g. 600MiB, 2GiB or a number of bytes")
    number = float(found[1]) * SIZES[found[2]]
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text[:40]!r} is too large; write e.g. 600MiB or 2GiB")
    return int(number)


def _by_name(texts: Sequence[str], argument: str, form: str, *, last: bool = False) -> dict[str, str]:
    """`NAME=VALUE` texts as name -> value, split at the first equals sign or the `last`.

    Raises UsageError for other forms and duplicate names.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.rpartition("=") if last else text.partition("=")
        if not (name and equals):
            raise UsageError(f"`{argument}={text[:80]}`: write {form}")
        if name in found:
            raise UsageError(f"`{argument}={text[:80]}`: {name} is set twice; set it once")
        found[name] = value
    return found


def split_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1,3,224` texts as name -> sizes; `NAME=` is a scalar. Raises UsageError for other forms."""
    found: dict[str, tuple[int, ...]] = {}
    form = "NAME=SIZES, e.g. `shapes=x=1,3,224,224` or `shapes=batch=1`"
    for name, listed in _by_name(texts, "shapes", form, last=True).items():
        try:
            found[name] = tuple(map(int, listed.split(","))) if listed.strip() else ()
        except ValueError as error:
            written = f"`shapes={name}={listed}`: {listed!r}"
            raise UsageError(f"{written} is not a list of sizes; write e.g. 1,3,224,224") from error
    return found


def split_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`PROVIDER.NAME=VALUE` texts as provider -> option -> value. Raises UsageError for other forms."""
    form, found = "PROVIDER.OPTION=VALUE, e.g. cuda.device_id=1", dict[str, dict[str, str]]()
    for left, value in _by_name(texts, "provider_options", form).items():
        provider, _, name = (part.strip() for part in left.partition("."))
        if not provider or not name:
            raise UsageError(f"`provider_options={left}={value}`: write {form}")
        if name in found.setdefault(provider, {}):
            raise UsageError(f"`provider_options={left}={value}`: {provider}.{name} is given twice; omit one")
        found[provider][name] = value.strip()
    return found


LIBRARY = "NAME=PATH, e.g. webgpu=/opt/lib/libwebgpu_ep.so"
LISTS: dict[str, Callable[[Sequence[str]], Any]] = {
    "list": list,
    "libraries": lambda texts: _by_name(texts, "provider_libraries", LIBRARY),
    "inputs": lambda texts: _by_name(texts, "inputs", "NAME=FILE.npy"),
    "provider_options": split_options,
    "shapes": split_shapes,
    "folders": lambda texts: _by_name(texts, "with_adapters", "NAME=FOLDER"),
    "pairs": lambda texts: _by_name(",".join(texts).replace(" ", "").split(","), "keep", "MODULE=PRECISION"),
}
"""Parsers of all texts of an option that can be repeated, by `Option.text`."""

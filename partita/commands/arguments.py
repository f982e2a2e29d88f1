"""Arguments and options that several verbs share: how they are spelled, read and completed. Of libraries
it imports typer alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import Exit

from partita.partition_reports.render.view import view_names

if TYPE_CHECKING:
    from partita.foreign.folder import Choice
    from partita.library.chain import ChainOptions

HELP = {"help_option_names": ["-h", "--help"]}
USAGE = 2
"""Exit code of a command line that makes no sense."""


@dataclass(frozen=True, slots=True)
class Started:
    """How this command line was started; the object that typer's context carries to the verb."""

    own_process: bool
    """Nothing else is in this process."""


def read_path(text: str) -> Path:
    """A path as it was written; every option and argument that names a file or folder is read by this."""
    return Path(not_empty(_in_utf8(text)))


def _in_utf8(text: str) -> str:
    """The text itself. Other bytes than UTF-8 are surrogates in it, and ONNX Runtime and JSON have no such names."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise typer.BadParameter("the name is not UTF-8 text; choose another one")
    return text


def not_empty(text: str) -> str:
    """The text itself. An empty path would be the current folder, which nobody means by an unset variable."""
    if not text:
        raise typer.BadParameter("it is empty; name a file or folder, or leave it out")
    return text


def read_pair(text: str) -> str:
    """NAME=FILE as it was written, with a file behind the name."""
    name, equals, file = _in_utf8(text).partition("=")
    if equals and not file:
        raise typer.BadParameter(f"the file of {name!r} is empty; name one behind {name}=")
    return text


def split_pair(text: str) -> tuple[str, str, str]:
    """NAME=FILE at its first =. Raises BadParameter without one."""
    name, equals, file = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text[:80]!r} is not NAME=FOLDER", param_hint="--with-adapters")
    return name, equals, file


def read_pairs(text: str | None) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE,NAME=VALUE as pairs; none of nothing. Raises BadParameter for what is no pair."""
    pairs = []
    for part in (text or "").split(",") if text is not None else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not (name and equals and value):
            raise typer.BadParameter(f"{part.strip() or 'nothing'!r} is not NAME=VALUE", param_hint="--keep")
        pairs.append((name, value))
    return tuple(pairs)


SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
"""Bytes of each unit."""


def read_size(text: str) -> int:
    """Bytes: 600MiB, 2 GiB, 1.5GB, 5000000. Raises BadParameter."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in SIZES:
        raise typer.BadParameter(f"{text!r} is no size; write it as 600MiB, 2GiB or a number of bytes")
    number = float(found[1]) * SIZES[found[2]]
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text[:40]!r} is more than anything has; write it as 600MiB or 2GiB")
    return int(number)


def complete(kind: str) -> Callable[[str], list[Any]]:
    """A function that completes values, by its name in `partita.commands.completion`."""

    def ask(incomplete: str) -> list[Any]:
        from partita.commands import completion

        found: list[Any] = getattr(completion, kind)(incomplete)
        return found

    return ask


def view_option(folder: str) -> Any:
    """`--view NAME`, for the views of a folder, given as a package: help names them, and the shell completes them."""
    names = view_names(folder)

    def begun(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    told = f"View: {', '.join(names)}. Default: text."
    return typer.Option("--view", metavar="NAME", autocompletion=begun, help=told)


PackageArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PACKAGE",
        help="Package folder written by `partita export`, or the folder of an ONNX decoder of another exporter.",
        show_default=False,
        parser=read_path,
    ),
]
VariantOption = Annotated[
    str | None,
    typer.Option(
        "--variant", metavar="NAME", help="Model of a folder that Partita did not write: q4, fp16 or a file name."
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PACKAGE",
        parser=read_path,
        help="The same with guesses of a smaller package of the same tokenizer.",
    ),
]
PrefixOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=read_path,
        help="Begin with a prefix of `generate --save-prefix`, which is not read again.",
    ),
]
PrefillChunkOption = Annotated[int | None, typer.Option(help="Prompt tokens per run. Default: 512.")]
ContractOption = Annotated[
    Path | None,
    typer.Option(
        "--contract",
        metavar="FILE.toml",
        parser=read_path,
        help="What inputs and outputs of such a folder mean, where that cannot be inferred.",
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-length", help="Most tokens of prompt and answer in such a folder. Default: what it says, up to 4096."
    ),
]
ProviderOption = Annotated[
    str | None,
    typer.Option(
        "--provider",
        "-e",
        metavar="CHAIN",
        autocompletion=complete("chains"),
        help="Execution providers in order of preference, comma-separated; no others may run a node. Default: the best "
        "usable one, then cpu.",
    ),
]
ProviderOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--provider-option",
        metavar="PROVIDER.NAME=VALUE",
        autocompletion=complete("provider_options"),
        help="Provider option, e.g. cuda.device_id=1.",
    ),
]
ProviderLibraryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--provider-library", metavar="NAME=PATH", parser=read_pair, help="Shared library of a plugin provider."
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PROVIDER:MODULE",
        autocompletion=complete("pins"),
        help="Pin a module to a provider: cpu:lm_head or webgpu:layers.0-11.",
    ),
]
MaxCpuNodesOption = Annotated[
    int | None, typer.Option(help="Maximum number of nodes on the CPU provider; exit code 3 if exceeded.")
]
MaxCopiesOption = Annotated[
    int | None, typer.Option(help="Maximum number of Memcpy nodes per step; exit code 3 if exceeded.")
]
MaxCopyBytesOption = Annotated[
    int | None, typer.Option(help="Maximum bytes copied between devices per decode step; exit code 3 if exceeded.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Intra-op threads. Default: one per usable core.")]
ProbeSecondsOption = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time budget for probing nodes that fell back; 0 disables probing."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="F", parser=read_path, help="File to write to. Default: stdout."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout instead of text.")]


def help_alone(context: typer.Context) -> None:
    """Without a verb, the help is the answer; nothing was done, and scripts hear of that."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise Exit(USAGE)


def folder_choice(variant: str | None, contract: Path | None, max_length: int | None) -> Choice:
    """What a verb was told of a folder that Partita did not write."""
    from partita.foreign.folder import Choice

    return Choice(variant, contract, max_length)


def chain_options(
    context: typer.Context,
    provider: str | None,
    options: list[str] | None,
    libraries: list[str] | None,
    pins: list[str] | None,
    threads: int | None,
) -> ChainOptions:
    """What a verb that runs something was told about where."""
    from partita.library.chain import ChainOptions

    started = context.find_object(Started)
    return ChainOptions(
        provider,
        tuple(options or ()),
        tuple(libraries or ()),
        tuple(pins or ()),
        threads,
        own_process=started is not None and started.own_process,
    )
